"""Weights and samples with NaN or infinity are never silently loaded, saved or scored; rewards without any difference
are reported as well.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config.flow import FlowRLConfig
from phalanx.run.checkpoint_folder import find
from phalanx.types import JobError
from tests.helpers.checks import heard
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import RankError, run_ranks


def spoiled_copy(base: Path, folder: Path, part: str, wanted: Callable[[str], bool]) -> Path:
    """A model folder in which one value of a component's tensors is NaN."""
    shutil.copytree(base, folder)
    file = next((folder / part).glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if wanted(name))
    tensors[name].view(-1)[-1] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("fsdp", [1, 2])
def test_weights_that_are_loaded(fsdp: int, sd3_folder: Path, tmp_path: Path) -> None:
    """Each rank checks its own shard, and all ranks end."""
    bad = spoiled_copy(sd3_folder, tmp_path / "sd3", "transformer", lambda name: "proj_out.weight" in name)
    with pytest.raises(RankError, match=r"model\.path: rank \d: the weights proj_out\.weight hold NaN or infinity"):
        run_ranks(fit, 2, tiny_config(bad, tmp_path, f"parallel.fsdp_size={fsdp}"))


def test_pictures(sd3_folder: Path, tmp_path: Path) -> None:
    bad = spoiled_copy(sd3_folder, tmp_path / "sd3", "vae", lambda name: name == "decoder.conv_out.bias")
    with pytest.raises(RankError, match=r"the sample of the prompt '.*' contains NaN or infinity; check the weights"):
        run_ranks(fit, 2, tiny_config(bad, tmp_path))


def broken_after_two(cfg: FlowRLConfig) -> str:
    """The message of a run in whose third step a weight becomes infinite on one rank."""
    from phalanx.run.rl import build

    trainer = build(cfg)
    honest = trainer.updater.follow

    def after_step(step: int) -> None:
        honest(step)
        if step == 3 and trainer.world.rank == 1:
            next(iter(trainer.policy.trained.parameters.values())).data.view(-1)[0] = torch.inf

    trainer.updater.follow = after_step  # type: ignore[method-assign]
    with pytest.raises(JobError) as raised:
        trainer.fit()
    trainer.job.checkpointer.wait()
    return str(raised.value)


@pytest.mark.full
def test_weights_that_are_saved(sd3_folder: Path, tmp_path: Path) -> None:
    settings = ("trainer.total_training_steps=4", "trainer.save_freq=1", "parallel.fsdp_size=1")
    cfg = tiny_config(sd3_folder, tmp_path, *settings)
    for said in run_ranks(broken_after_two, 2, cfg):
        assert said.startswith("after step 3 rank 1: the weights ")
        assert said.endswith(
            "hold NaN or infinity; no checkpoint is written, and the earlier ones are kept; lower optim.lr, or look at "
            "the rewards"
        )
    newest = find(tmp_path / "out" / "checkpoints")
    assert newest is not None and newest.name == "step_000002"
    assert all(value.isfinite().all() for value in run_ranks(fit, 2, cfg)[0].values())


FLAT = """
def flat(images, prompts, metadata):
    return [0.25] * len(images)
"""


def warnings_of(cfg: FlowRLConfig) -> tuple[list[str], dict[str, Tensor]]:
    return heard("phalanx.run.telemetry.run_logger"), fit(cfg)


@pytest.mark.full
def test_a_reward_that_never_differs(sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text(FLAT)
    functions = f"reward.functions=[{{path: '{tmp_path}/flat.py:flat'}}]"
    cfg = tiny_config(sd3_folder, tmp_path, functions, "trainer.total_training_steps=12")
    said, _ = run_ranks(warnings_of, 1, cfg)[0]
    assert said == [
        "the reward is 0.25 for every sample of the last 5 steps, up to step 5: there is nothing to learn from"
    ]
