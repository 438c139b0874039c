"""Offload of weights and of the optimizer's state, sharded or not, with a LoRA or without, on pretended GPUs: each is
saved, resumed and exported, and trains what all have trained.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from phalanx.config.tasks import ExportConfig
from phalanx.run import rl
from phalanx.run.rl import Trainer
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from tests.helpers.jobs import assert_same_weights
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import free_port, run_ranks
from tests.pretended.jobs import pretend
from tests.pretended.places import local

KEYS = (
    *("actor.ema.decay=0.9", "data.max_response_length=4", "rollout.n=2"),
    *("trainer.save_freq=1", "trainer.total_training_steps=2"),
)
OPTIMIZER, PARAM = "parallel.optimizer_offload=true", "parallel.param_offload=true"
LAYOUTS = {
    "none": ("parallel.fsdp_size=1",),
    "optimizer": ("parallel.fsdp_size=1", OPTIMIZER),
    "sharded_optimizer": ("parallel.fsdp_size=2", OPTIMIZER),
    "sharded_param": ("parallel.fsdp_size=2", PARAM),
    "sharded_both": ("parallel.fsdp_size=2", OPTIMIZER, PARAM),
}


def train(cfg: Any, port: int) -> tuple[dict[str, Tensor], str]:
    """Train to the end; this rank's part of the weights, and the device that it is on."""
    os.environ["MASTER_PORT"] = str(port)
    trainer = rl.build(cfg)
    assert isinstance(trainer, Trainer)
    trainer.run()
    parameters = trainer.policy.trained.parameters
    places = {str(parameter.device) for parameter in parameters.values()}
    return {name: local(p).detach().clone() for name, p in parameters.items()}, ", ".join(places)


def rehearse(jobs: dict[str, Any], ports: list[int]) -> dict[str, str]:
    """Of each job the devices of its weights between uses; each resumed run is the run, and is exported by rank 0."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    record, places, port = pretend(), {}, iter(ports)
    for name, cfg in jobs.items():
        whole, places[name] = train(cfg, next(port))
        folder = Path(cfg.trainer.output_dir)
        if os.environ["RANK"] == "0":
            shutil.rmtree(folder / "checkpoints" / "step_000002")
        resumed, _ = train(cfg, next(port))
        for key, value in whole.items():
            assert torch.equal(value, resumed[key]), f"{name}: {key} is another one after a resume"
        if os.environ["RANK"] == "0":
            words = [f"checkpoint={folder}", f"output_dir={folder / 'export'}", "weights=model"]
            Export(load_config(ExportConfig, None, words)).run()
    assert not record.faults, "\n".join(record.faults)
    return places


@pytest.mark.long
@pytest.mark.parametrize("lora", [0, 4], ids=["full", "lora"])
def test_offloads_are_saved_resumed_and_exported(lora: int, lm_folder: Path, tmp_path: Path) -> None:
    jobs = {}
    for name, keys in LAYOUTS.items():
        jobs[name] = tiny_lm_config(lm_folder, tmp_path / name, *KEYS, f"model.lora_rank={lora}", *keys)
    ports = [free_port() for _ in range(2 * len(jobs))]  # one for each start
    (places, _) = run_ranks(rehearse, 2, jobs, ports, init=False, timeout=200)
    assert places == {name: "cpu" if PARAM in keys else "cuda:0" for name, keys in LAYOUTS.items()}
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    exports = {name: load_file(tmp_path / name / "out" / "export" / file) for name in LAYOUTS}
    for export in exports.values():
        assert_same_weights(exports["none"], export, 1e-3)
