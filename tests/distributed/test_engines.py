"""Sampling engines of the user's, a file each, through whole jobs: what they say of themselves is what the job does."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.messages import ConfigError
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from tests.helpers import jobs, lm
from tests.helpers.ranks import run_ranks
from tests.helpers.roles import learned, run_roles

FLOW = """
from dataclasses import replace

from phalanx.distributed.collectives import reduce_int
from phalanx.rollout.flow.in_policy import PolicyRollout


class Counted(PolicyRollout):
    drawn = 0

    def generate(self, job):
        self.drawn += len(job.names)
        return super().generate(job)

    def metrics(self, samples, reward):
        return {"rollout/drawn": reduce_int(self.drawn, "sum")}


class Off(Counted):
    facts = replace(PolicyRollout.facts, exact=False)

    def generate(self, job):
        found = super().generate(job)
        return found._replace(log_prob=found.log_prob + 0.25)
"""

LM = """
from dataclasses import replace
from functools import cached_property

from phalanx.distributed.collectives import reduce_int
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.rollout.lm.in_policy import LMRollout


class Counting:
    drawn = 0

    def __init__(self, session):
        self.admit, self.step, self.close = session.add, session.step, session.close

    def add(self, request):
        self.drawn += 1
        self.admit(request)


class Counted(LMRollout):
    @cached_property
    def session(self):
        return Counting(super().session)

    def metrics(self, samples, reward):
        return super().metrics(samples, reward) | {"rollout/drawn": reduce_int(self.session.drawn, "sum")}


class Off(Counted):
    facts = replace(LMRollout.facts, exact=False)

    def drawn_sample(self, request):
        return replace(super().drawn_sample(request), log_probs=[-1.0] * len(request.tokens))


class Blocks(BlockDiffusionRollout):
    def text(self, request):
        return "aceg" * len(super().text(request))
"""

KINDS = ["flow", "lm"]
Made = tuple[Callable[..., Any], Callable[[Any], dict[str, torch.Tensor]], str]


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A tiny job of a kind in a folder of that name, what trains it, and the file of its engines."""
    flow = request.param == "flow"
    model = request.getfixturevalue("sd3_folder" if flow else "lm_folder")
    file = tmp_path / "engines.py"
    file.write_text(FLOW if flow else LM)

    def config(name: str, *overrides: str) -> Any:
        make = jobs.tiny_config if flow else lm.tiny_lm_config
        return make(model, tmp_path / name, *overrides)

    return config, jobs.fit if flow else lm.fit, str(file)


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "out" / METRICS_FILE)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.seldom("lm-1", "flow-2")
@pytest.mark.quick("flow-1")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_an_engine_of_ones_own_samples(made: Made, ranks: int, tmp_path: Path) -> None:
    """It draws all samples, and one that changes nothing trains the same as the policy."""
    config, fit, file = made
    counted = run_ranks(fit, ranks, config("counted", f"rollout.engine={file}:Counted"), timeout=240)[0]
    plain = run_ranks(fit, ranks, config("plain"), timeout=240)[0]
    assert [row["rollout/drawn"] for row in rows(tmp_path / "counted")] == [16, 32]
    assert same(counted, plain)
    assert all("rollout/logprob_abs_diff_mean" not in row for row in rows(tmp_path / "counted"))


@pytest.mark.seldom("flow-1", "lm-1", "flow-2")
@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("made", KINDS, indirect=True)
def test_log_probs_of_an_engine_that_is_not_exact_are_taken_again(made: Made, ranks: int, tmp_path: Path) -> None:
    """The policy's own take the place of the engine's, so that training is as if the policy had sampled."""
    config, fit, file = made
    off = run_ranks(fit, ranks, config("off", f"rollout.engine={file}:Off"), timeout=240)[0]
    plain = run_ranks(fit, ranks, config("plain"), timeout=240)[0]
    assert same(off, plain)
    for row in rows(tmp_path / "off"):
        assert row["rollout/logprob_abs_diff_mean"] > 0.2 and row["actor/first_ratio_error"] == 0
    as_drawn = config("none", f"rollout.engine={file}:Off", "rollout.correction=none", "trainer.total_training_steps=1")
    run_ranks(fit, ranks, as_drawn, timeout=240)
    (row,) = rows(tmp_path / "none")
    assert row["actor/first_ratio_error"] > 0.2 and "rollout/logprob_abs_diff_mean" not in row


@pytest.mark.full
def test_an_engine_on_ranks_of_its_own(lm_folder: Path, tmp_path: Path) -> None:
    """The actor builds none, and knows from its class that the log-probs are to be taken again."""
    (tmp_path / "engines.py").write_text(LM)
    apart = "placement={rollout: 0, actor: 1}"
    engine = f"rollout.engine={tmp_path / 'engines.py'}:Off"
    off = run_roles(build_lm, 2, lm.tiny_lm_config(lm_folder, tmp_path / "off", apart, engine), timeout=240)
    plain = run_roles(build_lm, 2, lm.tiny_lm_config(lm_folder, tmp_path / "plain", apart), timeout=240)
    assert same(off, plain) and learned(tmp_path / "off") == learned(tmp_path / "plain")
    assert all(row["rollout/logprob_abs_diff_mean"] > 0.2 for row in rows(tmp_path / "off"))


def build_lm(cfg: Any) -> Any:
    from phalanx.run.rl import build

    return build(cfg)


@pytest.mark.full
def test_an_engine_of_block_diffusion(blocks_folder: Path, lm_folder: Path, tmp_path: Path) -> None:
    """In reinforcement learning, and in the validation of supervised training."""
    (tmp_path / "engines.py").write_text(LM)
    engine = f"rollout.engine={tmp_path / 'engines.py'}:Blocks"
    run_ranks(lm.fit, 1, lm.tiny_lm_config(blocks_folder, tmp_path / "rl", engine, "model.block_size=4"), timeout=240)
    assert [row["reward/mean"] for row in rows(tmp_path / "rl")] == [0, 0]  # of letters that are all odd
    sft = tmp_path / "sft"
    reward = f"reward.functions=[{{path: '{sft}/reward.py:evenness'}}]"
    val = (f"data.val_files=[{sft / 'chats.jsonl'}]", "trainer.test_freq=1", reward)
    run_ranks(lm.fit_sft, 1, lm.tiny_sft_config(lm_folder, sft, engine, *val), timeout=240)
    scores = [value for row in rows(sft) for key, value in row.items() if re.match(r"val/.+/reward/(?!ci95$)", key)]
    assert scores and set(scores) == {0}


SESSION = """
from phalanx.rollout.lm.policy_session import PolicySession


class Mine:
    def __init__(self, policy, config, world, micro_batch_size):
        model = policy.trained.module, policy.settings, world.device
        self.inner = PolicySession(*model, micro_batch_size, scores=True)

    def add(self, request):
        self.inner.add(request)

    def step(self):
        return self.inner.step()

    def close(self):
        self.inner.close()
"""


def test_an_engine_whose_method_nobody_calls_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text(
        "from phalanx.rollout.lm.in_policy import LMRollout\n\n\nclass Old(LMRollout):\n    def decode(self): pass\n"
    )
    with pytest.raises(ConfigError, match="nothing calls its `decode`; override `session`"):
        lm.tiny_lm_config(tmp_path, tmp_path, f"rollout.engine={file}:Old")


@pytest.mark.full
def test_a_class_of_three_methods_is_an_engine(lm_folder: Path, tmp_path: Path) -> None:
    """Its samples are the policy's, whichever are drawn together; its own log-probs are not exact."""
    (tmp_path / "session.py").write_text(SESSION)
    (plain,) = run_ranks(lm.one_step, 1, lm.tiny_lm_config(lm_folder, tmp_path / "plain"))
    four = ("rollout.micro_batch_size_per_gpu=4", "rollout.refill=true")
    for keys, most in (((f"rollout.engine={tmp_path / 'session.py'}:Mine",), 1e-5), (four, 0)):
        (step,) = run_ranks(lm.one_step, 1, lm.tiny_lm_config(lm_folder, tmp_path / str(len(keys)), *keys))
        assert step["texts"] == plain["texts"] and step["row"]["actor/first_ratio_error"] <= most
