"""Sweeps: each run equals its run alone, in passes that the runs share; they end early, fail and resume by themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.models import trained
from phalanx.run import rl
from phalanx.run.sweep import built
from phalanx.types import JobError
from tests.helpers.jobs import full_weights, rows, tiny_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks

LORA = ("model.lora_rank=4", "model.lora_alpha=8", "parallel.fsdp_size=1", "trainer.save_freq=1")


def train(cfg: Any) -> tuple[dict[str, dict[str, torch.Tensor]], set[int]]:
    """Train a job or a sweep; returns the weights of each run, and how many runs shared passes."""
    shares, together = set(), trained._together

    def counted(calls: list[Any]) -> list[Any]:
        shares.add(len(calls))
        return together(calls)

    trained._together = counted
    job = built(rl.build, cfg)
    job.run()
    jobs = dict(zip(cfg.runs, job.jobs, strict=True)) if cfg.runs else {"": job}
    return {name: full_weights(each.policy.trained.parameters) for name, each in jobs.items()}, shares


def check_equals_alone(config: Callable[..., Any], ranks: int, keys: tuple[str, ...], swept: str) -> set[int]:
    """Train a sweep, in two starts, and each of its runs alone; returns how many of them shared passes."""
    cfg = config(*keys, swept)
    begun = config(*keys, swept, "trainer.total_training_steps=1")
    run_ranks(train, ranks, begun)
    weights, shares = run_ranks(train, ranks, cfg)[0]
    assert len(weights) == 2
    folder = Path(cfg.trainer.output_dir)
    for name, found in weights.items():
        alone = config(*keys, *name.split(","), f"trainer.output_dir={folder}/alone/{name}")
        [expected] = run_ranks(train, ranks, alone)[0][0].values()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key)
        assert rows(folder / name) == rows(folder / "alone" / name)
        assert [row["step"] for row in rows(folder / name)] == [1, 2]
    one, other = weights.values()
    assert not all(torch.equal(one[key], value) for key, value in other.items())
    return shares


@pytest.mark.quick("1")
@pytest.mark.parametrize("ranks", [1, 2], ids=str)
def test_runs_of_a_flow_model_equal_those_alone(sd3_folder: Path, tmp_path: Path, ranks: int) -> None:
    def config(*words: str) -> Any:
        return tiny_config(sd3_folder, tmp_path, *words)

    keys = (*LORA, "actor.ema={decay: 0.5}", "model.gradient_checkpointing=true")
    shares = check_equals_alone(config, ranks, keys, "sweep={optim.lr: [1e-3, 4e-3]}")
    assert shares == {2}


@pytest.mark.full
def test_runs_differ_in_their_seeds_and_micro_batches(sd3_folder: Path, tmp_path: Path) -> None:
    def config(*words: str) -> Any:
        return tiny_config(sd3_folder, tmp_path, *words)

    shares = check_equals_alone(
        config, 1, LORA, "sweep={trainer.seed: [3, 5], actor.ppo_micro_batch_size_per_gpu: [1]}"
    )
    assert shares == {2}


@pytest.mark.quick("text")
@pytest.mark.parametrize("kind", ["text", "blocks", "vision"])
def test_runs_of_language_models_equal_those_alone(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    folders = {"text": "lm_folder", "blocks": "blocks_folder", "vision": "vision_folder"}
    folder = request.getfixturevalue(folders[kind])
    keys = ("model.block_size=4",) if kind == "blocks" else ()

    def config(*words: str) -> Any:
        return tiny_lm_config(folder, tmp_path, *words)

    check_equals_alone(config, 1, (*LORA, *keys), "sweep={optim.lr: [1e-3, 4e-3]}")


def test_a_run_below_the_limit_ends_and_stays_ended(sd3_folder: Path, tmp_path: Path) -> None:
    keys = (*LORA, "trainer.end_below={actor/lr: 2e-3}", "trainer.end_below_from=2", "trainer.total_training_steps=3")
    cfg = tiny_config(sd3_folder, tmp_path, *keys, "sweep.optim.lr=[1e-3,4e-3]")
    for _ in range(2):  # the second one resumes
        run_ranks(train, 1, cfg)
        steps = {name: [row["step"] for row in rows(tmp_path / "out" / name)] for name in cfg.runs}
        assert steps == {"optim.lr=0.001": [1, 2], "optim.lr=0.004": [1, 2, 3]}
        assert sorted(path.name for path in (tmp_path / "out/optim.lr=0.001/checkpoints").iterdir()) == [
            "step_000001",
            "step_000002",
        ]


def failing(cfg: Any) -> str:
    with pytest.raises(JobError) as error:
        train(cfg)
    return str(error.value)


def test_a_run_that_fails_leaves_the_others_alone(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *LORA, "optim.grad_clip=0", "sweep.optim.lr=[1e-3,1e9]")
    [said] = run_ranks(failing, 1, cfg)
    assert said.startswith("1 of the 2 runs of the sweep ended with an error; optim.lr=1000000000.0: ")
    assert [row["step"] for row in rows(tmp_path / "out/optim.lr=0.001")] == [1, 2]
    assert [row["step"] for row in rows(tmp_path / "out/optim.lr=1000000000.0")] != [1, 2]
