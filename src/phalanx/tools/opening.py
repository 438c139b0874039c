"""Opening the checkpoint that a task's key `checkpoint` gives, with the configuration of its run."""

from pathlib import Path

from phalanx.config.messages import ConfigError
from phalanx.config.tasks import read_run
from phalanx.config.trust import Use
from phalanx.run.checkpoint_folder import complete, find, named_folder, no_folder
from phalanx.run.exporting import Trained, opened
from phalanx.run.kind import kind_of, known_schemas


def open_checkpoint(checkpoint: str, weights: str, use: Use, policy: str | None = None) -> Trained:
    """Open the checkpoint given by the task's key `checkpoint`; `weights` is auto, model or ema, `use` what the task
    takes from its run, and `policy` one of a joint run's.

    Raises ValueError if the checkpoint does not exist, is incomplete, or lacks these weights, or needs trust.
    """
    folder = _locate_checkpoint(checkpoint)
    run = read_run(folder.parent.parent / "config.yaml", *known_schemas(), policy=policy, use=use)
    return opened(folder, run, weights, policy)


def _locate_checkpoint(given: str) -> Path:
    """The folder of the checkpoint given by the key: a step_NNNNNN folder, or the newest or the best one of a run."""
    folder = named_folder(given)
    if not folder.is_dir():
        raise ValueError(f"checkpoint: {given!r}: {no_folder(folder)}")
    if (folder / "checkpoints").is_dir():
        newest = find(folder / "checkpoints")
        if newest is None:
            raise ValueError(f"checkpoint: {given!r} has no complete checkpoint in its folder checkpoints")
        return newest.resolve()
    if not folder.name.startswith("step_"):
        raise ValueError(
            f"checkpoint: {given!r} is neither a run's output_dir, with a folder checkpoints in it, nor a checkpoint, "
            "a folder step_NNNNNN"
        )
    problem = complete(folder)
    if problem is not None:
        raise ValueError(f"checkpoint: {given!r} cannot be used: {problem}")
    return folder.resolve()


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is named and made as a run or a checkpoint is, and not as a model."""
    return (folder / "checkpoints").is_dir() or folder.name.startswith("step_")


def check_command(trained: Trained, command: str) -> None:
    """Raise ConfigError if another task samples from this kind of model."""
    kind = kind_of(trained.run)
    if kind.command != command:
        raise ConfigError(f"checkpoint: {trained.folder} is of {kind.words}; use {kind.command or 'its own task'}")
