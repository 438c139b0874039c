"""Sweeps: each run equals its run alone, in passes that the runs share; they end early, fail and resume by themselves."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.distributed.fsdp import local
from phalanx.models import shared_base
from phalanx.models.lm import joined_steps
from phalanx.run import rl
from phalanx.run.sweep import built
from phalanx.types import JobError
from tests.helpers.jobs import rows, tiny_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks

SHARDED = ("model.lora_rank=4", "model.lora_alpha=8", "trainer.save_freq=1")
LORA = (*SHARDED, "parallel.fsdp_size=1")


def train(cfg: Any) -> tuple[dict[str, dict[str, torch.Tensor]], set[int]]:
    """Train a job or a sweep; returns this rank's weights of each run, and how many runs shared passes."""
    shares = set()

    def counted(together: Callable[[list[Any]], list[Any]], calls: list[Any]) -> list[Any]:
        shares.add(len(calls))
        return together(calls)

    shared_base.together = partial(counted, shared_base.together)
    joined_steps._joined_pass = partial(counted, joined_steps._joined_pass)
    job = built(rl.build, cfg)
    job.run()
    jobs = dict(zip(cfg.runs, job.jobs, strict=True)) if cfg.runs else {"": job}
    weights, bases = {}, []
    for name, each in jobs.items():
        frozen = [local(p) for p in each.policy.trained.module.parameters() if not p.requires_grad]
        bases.append({p.data_ptr() for p in frozen if p.numel()})
        weights[name] = {key: local(p.detach()).clone() for key, p in each.policy.trained.parameters.items()}
    # FSDP pads shards that are smaller than those of other ranks, in memory of their own
    assert all(len(base & bases[0]) > 0.8 * len(base) for base in bases)
    return weights, shares


def check_equals_alone(
    config: Callable[..., Any], ranks: int, keys: tuple[str, ...], swept: str, runs: int = 2
) -> set[int]:
    """Train a sweep, and the last of its runs alone; returns how many runs shared passes."""
    cfg = config(*keys, swept)
    weights, shares = run_ranks(train, ranks, cfg)[0]
    folder, (*_, name) = Path(cfg.trainer.output_dir), weights
    assert len(weights) == runs
    alone = config(*keys, *name.split(","), f"trainer.output_dir={folder}/alone")
    [expected] = run_ranks(train, ranks, alone)[0][0].values()
    *_, other, found = weights.values()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert rows(folder / name) == rows(folder / "alone")
    assert [row["step"] for row in rows(folder / name)] == [1, 2]
    assert not all(torch.equal(found[key], value) for key, value in other.items())
    return shares


@pytest.mark.full
def test_runs_of_a_flow_model_equal_those_alone(sd3_folder: Path, tmp_path: Path) -> None:
    def config(*words: str) -> Any:
        return tiny_config(sd3_folder, tmp_path, *words)

    keys = (*LORA, "actor.ema={decay: 0.5}", "model.gradient_checkpointing=true")
    swept = "sweep={optim.lr: [1e-3, 4e-3]}"
    run_ranks(train, 1, config(*keys, swept, "trainer.total_training_steps=1"))  # the next start resumes from here
    assert check_equals_alone(config, 1, keys, swept) == {2}


@pytest.mark.full
def test_runs_on_two_ranks_differ_in_their_seeds(sd3_folder: Path, tmp_path: Path) -> None:
    def config(*words: str) -> Any:
        return tiny_config(sd3_folder, tmp_path, *words)

    swept = "sweep={trainer.seed: [3, 5], actor.ppo_micro_batch_size_per_gpu: [1]}"
    assert check_equals_alone(config, 2, LORA, swept) == {2}


@pytest.mark.quick("text")
@pytest.mark.parametrize("kind", ["text", "blocks", "vision", "taught"])
def test_runs_of_language_models_equal_those_alone(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    folders = {"text": "lm_folder", "blocks": "blocks_folder", "vision": "vision_folder", "taught": "lm_folder"}
    folder = request.getfixturevalue(folders[kind])
    keys = ("model.block_size=4",) if kind == "blocks" else ()
    if kind == "taught":
        keys = ("algorithm.name=distillation", f"algorithm.teacher_path={folder}")

    def config(*words: str) -> Any:
        return tiny_lm_config(folder, tmp_path, *words)

    ranks, swept = 2 if kind == "taught" else 1, "sweep={optim.lr: [1e-3, 4e-3]}"
    shares = check_equals_alone(config, ranks, (*LORA, *keys), swept)
    assert 2 in shares  # steps of decoding


@pytest.mark.full
@pytest.mark.seldom("shard", "text")
@pytest.mark.parametrize("kind", ["replicate", "shard", "text"])
def test_runs_share_a_sharded_base(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Each rank holds its shards of the base once; runs share passes if their LoRAs are whole on each rank."""
    text = kind == "text"
    folder = request.getfixturevalue("lm_folder" if text else "sd3_folder")
    keys = (*SHARDED, f"parallel.lora_sharding={'shard' if text else kind}")

    def config(*words: str) -> Any:
        return (tiny_lm_config if text else tiny_config)(folder, tmp_path, *words)

    swept = "sweep={optim.lr: [1e-3, 4e-3], trainer.seed: [3, 5]}"
    assert check_equals_alone(config, 2, keys, swept, runs=4) == ({4} if kind == "replicate" else set())


def failing(cfg: Any) -> str:
    with pytest.raises(JobError) as error:
        train(cfg)
    return str(error.value)


@pytest.mark.full
def test_runs_end_early_or_fail_by_themselves(sd3_folder: Path, tmp_path: Path) -> None:
    keys = (*LORA, "trainer.end_below={actor/lr: 2e-3}", "trainer.end_below_from=2", "trainer.total_training_steps=3")
    low, fine, wild = names = "optim.lr=0.001", "optim.lr=0.004", "optim.lr=1000000000.0"
    cfg = tiny_config(sd3_folder, tmp_path, *keys, "optim.grad_clip=0", "sweep.optim.lr=[1e-3,4e-3,1e9]")
    [message] = run_ranks(failing, 1, cfg)
    assert message.startswith(f"1 of the 3 runs of the sweep ended with an error; {wild}: ")
    assert tuple(cfg.runs) == names
    assert [row["step"] for row in rows(tmp_path / "out" / fine)] == [1, 2, 3]
    assert rows(tmp_path / "out" / wild)[-1]["step"] < 3
    again = tiny_config(sd3_folder, tmp_path, *keys, "sweep.optim.lr=[1e-3,4e-3]")
    run_ranks(train, 1, again)  # both have ended
    assert [row["step"] for row in rows(tmp_path / "out" / low)] == [1, 2]
    saved = sorted(path.name for path in (tmp_path / "out" / low / "checkpoints").iterdir())
    assert saved == ["step_000001", "step_000002"]
