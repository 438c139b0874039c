"""Rewards that fail on some samples, where reward.on_error forgives it: zeros, or samples that are left out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.functional.advantage import group_advantage
from phalanx.types import JobError
from tests.helpers.jobs import full_weights, update
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import build, word_config

REWARD = '''"""Rewards of tests."""


def flaky(completions, prompts, metadata):
    """NaN for words that end with c or d."""
    return [float("nan") if word.rstrip(".").endswith(("c", "d")) else len(word) + word.count("a") for word in completions]


def broken(completions, prompts, metadata):
    raise OSError("no route to host")
'''


def configure(folder: Path, function: str, *overrides: str) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flaky.py").write_text(REWARD)
    functions = f"reward.functions=[{{path: '{folder}/flaky.py:{function}'}}]"
    return word_config(folder, functions, "reward.max_error_fraction=0.9", *overrides)


def step(cfg: Any) -> dict[str, Any]:
    """One step, with what the algorithm was asked and what came of it."""
    t = build(cfg)
    samples, _ = t.collector.sample(0)
    samples, reward, row = t.collector.reward(samples, 0)
    advantage, asked = t.updater.algorithm.advantage, []
    t.updater.algorithm.advantage = lambda reward, group_id: (
        asked.append((reward, group_id)) or advantage(reward, group_id)
    )
    row |= update(t, samples, reward, 0)
    return {"reward": reward, "asked": asked[0], "row": row, "weights": full_weights(t.policy.trained.parameters)}


def test_a_sample_without_a_score_is_skipped_on_any_layout(tmp_path: Path) -> None:
    cfg = configure(tmp_path, "flaky", "reward.on_error=skip")
    (alone,) = run_ranks(step, 1, cfg)
    lost = alone["reward"].isnan()
    assert 0 < lost.sum() < 16 and alone["row"]["reward/errors"] == lost.sum()
    known = alone["reward"][~lost]
    assert alone["row"]["reward/mean"] == pytest.approx(known.mean().item())
    reward, group_id = alone["asked"]  # the others' mean and std know nothing of it
    assert torch.equal(reward, known) and torch.equal(group_id, (torch.arange(16) // 4)[~lost])
    assert group_advantage(reward, group_id).abs().max() > 0
    for ranks in (2, 4):
        for part in run_ranks(step, ranks, cfg):
            assert torch.equal(part["reward"].isnan(), lost)
            assert part["row"]["reward/errors"] == lost.sum()
            assert part["row"]["actor/grad_norm"] == pytest.approx(alone["row"]["actor/grad_norm"], rel=1e-5)


def test_zero_is_a_score_like_any_other(tmp_path: Path) -> None:
    skipped, zero = (
        run_ranks(step, 2, configure(tmp_path / kind, "flaky", f"reward.on_error={kind}"))[0]
        for kind in ("skip", "zero")
    )
    lost = skipped["reward"].isnan()
    assert torch.equal(zero["reward"], torch.where(lost, 0.0, skipped["reward"]))
    assert len(zero["asked"][0]) == 16 and zero["row"]["reward/errors"] == lost.sum()


def run(cfg: Any) -> None:
    build(cfg).fit()


def refused(cfg: Any) -> str:
    try:
        run(cfg)
    except JobError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("function", "overrides", "message"),
    [
        ("flaky", (), "reward 'flaky' returned nan for "),
        (
            "flaky",
            ("reward.on_error=skip", "reward.max_error_fraction=0.01"),
            "more than reward.max_error_fraction=0.01",
        ),
        (
            "broken",
            ("reward.on_error=zero",),
            "16 of 16 words have no score, more than reward.max_error_fraction=0.9 of them; ",
        ),
    ],
)
def test_there_is_a_bound(function: str, overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    cfg = configure(tmp_path, function, "trainer.val_before_train=false", *overrides)
    said = run_ranks(refused, 2, cfg)
    assert said[0] == said[1] and message in said[0]
    if function == "broken":
        assert "the first: rank 0: reward 'broken' raised OSError: no route to host on the prompt" in said[0]
