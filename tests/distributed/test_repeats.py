"""Repeat jobs while all cores are busy: no result depends on timing."""

import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.exit import end_with_parent
from tests.helpers import jobs, lm
from tests.helpers.ranks import run_ranks

REPEATS = int(os.environ.get("PHALANX_REPEATS", "20"))
TOGETHER = 30  # repeats in one pair of processes, each of which leaves threads of its process groups behind
Fit = Callable[[Any], dict[str, torch.Tensor]]


def multiply() -> None:
    """Wide float32 products, which compete for caches, vector units and clock rate."""
    end_with_parent()
    os.nice(19)
    matrix = torch.randn(768, 768)
    while True:
        torch.mm(matrix, matrix)


@pytest.fixture
def busy() -> Iterator[None]:
    """A process per core that multiplies matrices."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=multiply, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


def repeated(fit: Fit, config: Callable[[Path], Any], folder: Path, repeats: range) -> tuple[list[int], str]:
    """The repeats whose metrics or weights differ from the first one in any bit, and a digest of the first."""
    first: tuple[Any, dict[str, torch.Tensor]] | None = None
    differ = []
    for i in repeats:
        cfg = config(folder / str(i))
        weights = fit(cfg)
        rows = jobs.rows(Path(cfg.trainer.output_dir)) if os.environ["RANK"] == "0" else []
        if first is None:
            first = rows, weights
        elif rows != first[0] or not all(torch.equal(value, first[1][name]) for name, value in weights.items()):
            differ.append(i)
        if os.environ["RANK"] == "0":
            # the other rank may still be closing a file in it
            shutil.rmtree(folder / str(i), ignore_errors=True)
    assert first is not None
    digest = hashlib.sha256(repr(first[0]).encode())
    for name, value in sorted(first[1].items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return differ, digest.hexdigest()


@pytest.mark.long
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("kind", ["flow LoRA", "language model", "block diffusion", "SFT"])
def test_a_repeated_job_is_the_job(
    kind: str, sd3_folder: Path, lm_folder: Path, blocks_folder: Path, tmp_path: Path
) -> None:
    """On two ranks, with the CPU's default library for linear layers. PHALANX_REPEATS=300 repeats it more often."""
    keys = ("trainer.total_training_steps=1", "parallel.fsdp_size=1", "data.train_batch_size=4")
    rl = (*keys, "actor.ppo_mini_batch_size=4", "rollout.n=2", "rollout.micro_batch_size_per_gpu=4")

    def config(folder: Path) -> Any:
        if kind == "flow LoRA":
            return jobs.tiny_config(sd3_folder, folder, "model.lora_rank=4", *rl)
        if kind == "SFT":
            return lm.tiny_sft_config(lm_folder, folder, *keys)
        blocks = ("model.block_size=4", "rollout.threshold=0.02") if kind == "block diffusion" else ()
        return lm.tiny_lm_config(blocks_folder if blocks else lm_folder, folder, *blocks, *rl)

    fit: Fit = {"flow LoRA": jobs.fit, "SFT": lm.fit_sft}.get(kind, lm.fit)
    parts = []
    for begin in range(0, REPEATS + 1, TOGETHER):
        repeats = range(begin, min(begin + TOGETHER, REPEATS + 1))
        parts.append(run_ranks(repeated, 2, fit, config, tmp_path, repeats, timeout=3500))
    assert all(differ == [] for part in parts for differ, _ in part)
    for rank in range(2):
        assert len({part[rank][1] for part in parts}) == 1
