"""Partial rollouts in the loop: groups and versions on any layout, their log-probs, and a resumed run."""

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.lm import LMRLConfig
from phalanx.run.rl import build
from phalanx.types import Samples
from tests.helpers.checks import heard
from tests.helpers.jobs import rows
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.roles import learned, run_roles

STEPS = 5
KEYS = ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=4", "rollout.correction=token_tis")
BLOCKS = ("model.block_size=4", "rollout.threshold=0.1")
LONGER = ("data.max_response_length=24", "rollout.max_staleness=2", f"trainer.total_training_steps={STEPS}")


def job(model: Path, folder: Path, *keys: str) -> LMRLConfig:
    return tiny_lm_config(model, folder, *KEYS, *LONGER, *keys)


def drawn(cfg: LMRLConfig) -> list[dict[str, Any]]:
    """This rank's samples in each step of a run as they were sampled, with the policy's log-probs at that time."""
    from phalanx.training.loop import train

    trainer, found = build(cfg), list[dict[str, Any]]()

    class Recorded:
        chunks = 1

        def sample(self, step: int, chunk: int = 0) -> tuple[Samples, dict[str, float]]:
            collector = trainer.collector
            collector.rescorer, rescorer = None, collector.rescorer
            samples, _ = collector.sample(step)
            collector.rescorer = rescorer
            with torch.no_grad():
                log_prob = trainer.policy.replay(samples.trace).log_prob
            texts = [(prompt.text, text) for prompt, text in zip(samples.prompts, samples.outputs, strict=True)]
            of_step = {"texts": texts, "version": samples.version, "mask": samples.mask, "step": step}
            found.append(of_step | {"off": (samples.log_prob - log_prob).abs()})
            return rescorer(samples)

        def reward(self, samples: Samples, step: int, chunk: int = 0) -> tuple[Samples, Tensor, dict[str, float]]:
            samples, reward, row = trainer.collector.reward(samples, step)
            found[-1]["row"] = row
            return samples, reward, row

    with trainer.job.logger:
        train(trainer.job, Recorded(), trainer.updater)
    return found


def warnings(cfg: LMRLConfig) -> list[str]:
    """The messages that a job logs on this rank."""
    messages = heard("phalanx", logging.NOTSET)
    fit(cfg)
    return messages


def joined(parts: list[list[dict[str, Any]]], name: str) -> list[Any]:
    """The results of all ranks, concatenated for each step."""
    steps = []
    for of_ranks in zip(*parts, strict=True):
        values: list[Any] = []
        for part in of_ranks:
            values += part[name].tolist() if isinstance(part[name], Tensor) else part[name]
        steps.append(values)
    return steps


@pytest.mark.full
def test_layouts_train_the_same_groups(lm_folder: Path, tmp_path: Path) -> None:
    """Each group once and completely, within its staleness; tokens have log-probs of the weights that sampled them."""
    one = run_ranks(drawn, 1, job(lm_folder, tmp_path / "1", "optim.lr=1e-2"))
    two = run_ranks(drawn, 2, job(lm_folder, tmp_path / "2", "optim.lr=1e-2", "parallel.fsdp_size=2"))
    assert joined(two, "texts") == joined(one, "texts")
    assert joined(two, "version") == joined(one, "version")
    ages, groups = set(), list[str]()
    for step, found in enumerate(one[0]):
        age, mask, row = step - found["version"], found["mask"], found["row"]
        ages |= set(age[mask].tolist())
        fresh, older = found["off"][mask & (age == 0)], found["off"][mask & (age > 0)]
        assert step > 0 or len(fresh)
        assert not len(fresh) or fresh.max() < 1e-5
        assert not len(older) or older.max() > 1e-3
        assert row["rollout/staleness_max"] == age[mask].max()
        assert row["rollout/pending_ratio"] == (0.5 if step < STEPS - 1 else 0)
        prompts = [prompt for prompt, _ in found["texts"]]
        assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
        groups += prompts[::4]
    assert 1 in ages and ages <= {0, 1, 2}
    lines = (tmp_path / "1" / "prompts.jsonl").read_text().splitlines()
    times = [groups.count(json.loads(line)["prompt"]) for line in lines]
    assert sum(times) == 4 * STEPS and max(times) - min(times) <= 1  # as without partial rollouts


@pytest.mark.quick("lm")
@pytest.mark.parametrize("kind", ["lm", "blocks"])
def test_a_step_that_waits_for_all_is_a_usual_one(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """The responses do not depend on the number of rounds in which they were sampled."""
    folder = request.getfixturevalue(f"{kind}_folder")
    keys = BLOCKS if kind == "blocks" else ()
    usual = run_ranks(fit, 1, tiny_lm_config(folder, tmp_path / "usual", "trainer.logger=[]", *keys))
    more = (*KEYS, "rollout.over_sampling_batch_size=4", *keys)
    run_ranks(fit, 1, tiny_lm_config(folder, tmp_path / "partial", *more))
    for one, other in zip(rows(tmp_path / "usual" / "out"), rows(tmp_path / "partial" / "out"), strict=True):
        assert one["response/length_mean"] == other["response/length_mean"]
        assert one["reward/mean"] == other["reward/mean"]
        assert other["rollout/rounds"] == 3 and other["rollout/staleness_max"] == 0
        assert other["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)
        assert other["actor/first_ratio_error"] == 0
        assert kind == "lm" or one["rollout/tokens_per_forward"] == other["rollout/tokens_per_forward"]
    assert usual


@pytest.mark.full
def test_a_resumed_run_is_the_run(lm_folder: Path, tmp_path: Path) -> None:
    """The checkpoint has the unfinished responses; a run without partial rollouts logs that it drops them."""
    keys = ("trainer.save_freq=1", "trainer.max_checkpoints=9")
    whole = run_ranks(fit, 2, job(lm_folder, tmp_path / "whole", *keys))
    expected = rows(tmp_path / "whole" / "out")
    assert max(row["rollout/staleness_max"] for row in expected) > 0
    kept = tmp_path / "whole" / "out" / "checkpoints" / "step_000002"
    shutil.copytree(kept, tmp_path / "parts" / "out" / "checkpoints" / kept.name)
    resumed = run_ranks(fit, 2, job(lm_folder, tmp_path / "parts", *keys))
    assert rows(tmp_path / "parts" / "out") == expected[2:]
    for name, value in whole[0].items():
        assert torch.equal(value, resumed[0][name])
    shutil.copytree(kept, tmp_path / "usual" / "out" / "checkpoints" / kept.name)
    usual = ("data.max_response_length=24", "trainer.total_training_steps=3")
    [messages] = run_ranks(warnings, 1, tiny_lm_config(lm_folder, tmp_path / "usual", *usual))
    assert "the checkpoint's samples in flight are dropped: in this run each step draws its own samples" in messages


APART = ("placement={rollout: 0-1, actor: 2-3}", "parallel.fsdp_size=1")


@pytest.mark.full
def test_ranks_that_only_sample_keep_the_unfinished_responses(lm_folder: Path, tmp_path: Path) -> None:
    """The actor has them in its checkpoint, so that a resumed run is the run; with other ranks too."""
    keys = ("trainer.save_freq=1", "trainer.max_checkpoints=9")
    whole = run_roles(build, 4, job(lm_folder, tmp_path / "apart", *APART, *keys))
    together = run_roles(build, 2, job(lm_folder, tmp_path / "together", "parallel.fsdp_size=1", *keys))
    assert learned(tmp_path / "apart") == learned(tmp_path / "together")
    assert all(torch.equal(value, together[name]) for name, value in whole.items())
    assert_resumes(whole, tmp_path, partial(run_roles, build, 4), job(lm_folder, tmp_path / "parts", *APART, *keys))
    alone = job(lm_folder, tmp_path / "alone", "parallel.fsdp_size=1", *keys)
    assert_resumes(whole, tmp_path, partial(run_roles, build, 2), alone)


@pytest.mark.full
@pytest.mark.parametrize("in_flight", ["finish", "drop"])
def test_unfinished_responses_of_a_step_that_is_sampled_ahead(lm_folder: Path, tmp_path: Path, in_flight: str) -> None:
    """Their tokens are of the weights that sampled them, no older than the limit; a resumed run is the run."""
    keys = (*APART, "rollout.schedule=one_step_off", f"rollout.in_flight={in_flight}", "rollout.max_staleness=3")
    keys = (*keys, "trainer.save_freq=1", "trainer.max_checkpoints=9", "optim.lr=1e-2")
    whole = run_roles(build, 4, job(lm_folder, tmp_path / "apart", *keys))
    ages = [row["rollout/staleness_max"] for row in rows(tmp_path / "apart" / "out")]
    assert ages[0] == 0 and max(ages) > 1 and max(ages) <= 3
    resumed = job(lm_folder, tmp_path / "parts", *keys)
    if in_flight == "finish":
        assert_resumes(whole, tmp_path, partial(run_roles, build, 4), resumed)
    else:  # the groups that waited are those of the whole run
        copied(tmp_path, resumed, step=1)
        run_roles(build, 4, resumed)
        later, usual = learned(tmp_path / "parts")[0], learned(tmp_path / "apart")[1]
        assert later["response/length_mean"] == usual["response/length_mean"]
        assert rows(tmp_path / "parts" / "out")[0]["rollout/staleness_max"] == ages[1] == 1


def copied(folder: Path, cfg: LMRLConfig, step: int = 2) -> None:
    """Let a run resume after a step of the run in `apart`."""
    kept = folder / "apart" / "out" / "checkpoints" / f"step_{step:06d}"
    shutil.copytree(kept, Path(cfg.trainer.output_dir) / "checkpoints" / kept.name)


def assert_resumes(whole: dict[str, Tensor], folder: Path, run: Any, cfg: LMRLConfig) -> None:
    """A run that resumes after the second step of the run in `apart` has its rows and its weights."""
    copied(folder, cfg)
    weights = run(cfg)
    assert learned(Path(cfg.trainer.output_dir).parent) == learned(folder / "apart")[2:]
    assert all(torch.equal(value, weights[name]) for name, value in whole.items())
