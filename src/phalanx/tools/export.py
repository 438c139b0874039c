"""The command `phalanx export`: a checkpoint for use elsewhere, see phalanx.run.exporting, also on the hub."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from phalanx.config.tasks import ExportConfig
from phalanx.config.trust import Use
from phalanx.distributed.launch_env import Launch
from phalanx.run.exporting import Exporter
from phalanx.run.kind import kind_of
from phalanx.run.outputs import check_place, place_in_run, writing
from phalanx.tools.model_card import write_card
from phalanx.tools.opening import open_checkpoint
from phalanx.types import JobError


class Export:
    """The job: `Export(cfg)` checks everything (a ValueError is the user's mistake), `run()` writes; on rank 0 only."""

    def __init__(self, cfg: ExportConfig) -> None:
        self.cfg, self.idle = cfg, Launch.from_env().rank != 0
        if self.idle:
            return
        use = Use(cfg.trust_run, ("model",), {} if cfg.model_path is None else {"model": {"path": cfg.model_path}})
        self.trained = open_checkpoint(cfg.checkpoint, cfg.weights, use, cfg.policy)
        if cfg.policy is not None and not self.trained.policy:
            raise ValueError(f"policy: {cfg.checkpoint!r} is not from a joint run; leave policy={cfg.policy} out")
        folder, model = self.trained.folder, self.trained.run.model
        model = model if cfg.model_path is None else replace(model, path=cfg.model_path, revision=None)
        dtype: torch.dtype | None = None if cfg.dtype is None else getattr(torch, cfg.dtype)
        family = kind_of(self.trained.run).files(model)
        self.exporter = Exporter(self.trained, model, family, merge_lora=cfg.merge_lora, dtype=dtype)
        place = cfg.output_dir or place_in_run(folder, "export", self.trained.policy)
        self.output_dir = Path(place).expanduser()
        if self.output_dir.exists():
            raise ValueError(f"output_dir: {str(self.output_dir)!r} exists; give a new folder")
        check_place(self.output_dir, "output_dir")
        self.exporter.load_base()
        if cfg.push_to_hub is not None:
            make_repository(cfg.push_to_hub)

    def run(self) -> None:
        """Write the export, upload it if requested, and print its location. The folder appears only when complete."""
        if self.idle:
            return
        with writing(self.output_dir, "output_dir"):
            self.exporter.write(
                self.output_dir, partial(write_card, exporter=self.exporter, repository=self.cfg.push_to_hub)
            )
        what = "the moving average" if self.trained.weights == "ema" else "the weights"
        print(f"{what} of {self.trained.folder} -> {self.output_dir}", flush=True)
        if self.exporter.model.lora_rank == 0:
            call = self.exporter.family.how_to_load(self.output_dir)
            if call is not None:
                print(f"the folder lacks components, as its base does; load it with {call}", flush=True)
        if self.cfg.push_to_hub is not None:
            print(f"uploaded: {upload(self.output_dir, self.cfg.push_to_hub, self.trained.folder.name)}", flush=True)


def make_repository(repo: str) -> None:
    """Create the hub repository before any work is done; raises ValueError if that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        HfApi().create_repo(repo, exist_ok=True)
    except (HFValidationError, HTTPError, OSError) as error:
        raise ValueError(
            f"push_to_hub: the repository {repo!r} cannot be created: {_first_line(error)}; expected access to the hub "
            "and a token in HF_TOKEN, or leave push_to_hub out"
        ) from error


def upload(folder: Path, repo: str, name: str) -> str:
    """Upload a finished export and return its URL; raises JobError if that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        return str(HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{name} of a Phalanx run"))
    except (HTTPError, OSError) as error:
        raise JobError(
            f"push_to_hub: the upload to {repo!r} failed: {_first_line(error)}; the export itself is in {folder}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
