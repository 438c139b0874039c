"""PPO and REINFORCE++: all layouts agree, and policy and critic are saved and resumed together."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.config.lm import LMRLConfig
from tests.helpers.jobs import assert_same_weights, first_step, full_weights, rows
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks

SPREAD = """
from phalanx.algorithms import grpo
from phalanx.types import Credit

Config = grpo.Config


class Algorithm(grpo.Algorithm):
    per_action = True

    def credit(self, scored, total):
        assert total(scored.mask.sum().double()[None]) > 0 and scored.values is None
        advantage = scored.advantage[:, None] * scored.mask
        return Credit(advantage, advantage, {"spread": 1.0})
"""
PPO = (
    "algorithm.name=ppo",
    "algorithm.gamma=0.95",
    "algorithm.lam=0.9",
    "algorithm.kl_reward_coef=0.05",
    "critic.optim.lr=1e-3",
)
STEPS = ("trainer.save_freq=2", "critic.ppo_epochs=2", "trainer.critic_warmup=1", "critic.optim.lr_scheduler=linear")


def one_step(cfg: LMRLConfig, poison: bool = False) -> dict[str, Any]:
    """Sample, score and update once: rewards, the row of metrics, the weights of policy and critic before and after.

    `poison` makes the critic's loss NaN.
    """
    from phalanx.run.rl import build

    found: dict[str, Any] = {}

    def make(cfg: LMRLConfig) -> Any:
        t = build(cfg)
        if t.updater.critic is not None and poison:
            values = t.updater.critic.critic.values
            t.updater.critic.critic.values = lambda trace: values(trace) * (torch.nan if torch.is_grad_enabled() else 1)
        found.update(trainer=t, before=weights(t))
        return t

    samples, step = first_step(make, cfg)
    return {
        "row": step["row"],
        "reward": step["reward"],
        "mask": samples.mask,
        "before": found["before"],
        "after": weights(found["trainer"]),
    }


def weights(t: Any) -> dict[str, dict[str, Tensor]]:
    models = {"policy": t.policy.trained} | {name: learner.model for name, learner in t.job.beside.items()}
    return {name: full_weights(model.parameters) for name, model in models.items()}


def fit(cfg: LMRLConfig) -> dict[str, Tensor]:
    """Train to the end; returns the contents of a checkpoint: weights and both optimizers' states."""
    from phalanx.run.rl import build

    t = build(cfg)
    t.fit()
    return dict(leaves(t.job.tensors(), ""))


def leaves(state: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", (value.full_tensor() if isinstance(value, DTensor) else value).clone()


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [PPO, ("algorithm.name=reinforce_plus_plus", "algorithm.group_baseline=true", "algorithm.gamma=0.9")],
    ids=["ppo", "reinforce_plus_plus"],
)
def test_layouts_agree(keys: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    """Replicas, shards and both take the same step, of the policy and of the critic."""
    (alone,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "alone", *keys))
    row = alone["row"]
    assert row["actor/first_ratio_error"] == 0 and row["actor/grad_norm"] > 1e-4
    assert not alone["mask"].all()  # of different lengths
    for ranks, shards in ((2, 1), (4, 2)):
        cfg = tiny_lm_config(lm_folder, tmp_path / f"{ranks}_{shards}", *keys, f"parallel.fsdp_size={shards}")
        for part in run_ranks(one_step, ranks, cfg):
            assert torch.equal(part["reward"], alone["reward"])
            for key, value in row.items():
                assert part["row"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
            for model, values in alone["after"].items():
                assert_same_weights(values, part["after"][model], 1e-3)


@pytest.mark.full
def test_advantages_of_samples_are_those_of_their_tokens(lm_folder: Path, tmp_path: Path) -> None:
    """Bit for bit: GRPO's advantage of a sample equals the same advantage for each of its tokens."""
    (tmp_path / "spread.py").write_text(SPREAD)
    steps = []
    for name in ("grpo", f"{tmp_path}/spread.py"):
        steps += run_ranks(one_step, 2, tiny_lm_config(lm_folder, tmp_path / "run", f"algorithm.name={name}"))[:1]
    one, other = steps
    assert other["row"].pop("spread") == 1.0
    assert one["row"] == other["row"]
    assert all(torch.equal(value, other["after"]["policy"][k]) for k, value in one["after"]["policy"].items())


@pytest.mark.full
def test_passes_and_checkpointing_are_no_part_of_the_gradient(lm_folder: Path, tmp_path: Path) -> None:
    """Single samples, four with recomputed layers, and packed ones with a token budget on two ranks."""
    fours = ("actor.ppo_micro_batch_size_per_gpu=4", "critic.model.gradient_checkpointing=true")
    budget = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=80", "model.use_remove_padding=true")
    (one,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path, *PPO, "actor.ppo_micro_batch_size_per_gpu=1"))
    for ranks, keys in ((1, fours), (2, budget)):
        other = run_ranks(one_step, ranks, tiny_lm_config(lm_folder, tmp_path, *PPO, *keys))[0]
        for key in ("critic/grad_norm", "actor/grad_norm", "critic/explained_variance"):
            assert other["row"][key] == pytest.approx(one["row"][key], rel=1e-4), key
        assert_same_weights(one["after"]["critic"], other["after"]["critic"], 1e-3)


@pytest.mark.full
def test_the_critic_is_trained_alone_at_first(lm_folder: Path, tmp_path: Path) -> None:
    (step,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path, *PPO, "trainer.critic_warmup=1"))
    policy, critic = (
        any((value != step["after"][model][name]).any() for name, value in step["before"][model].items())
        for model in ("policy", "critic")
    )
    assert (policy, critic) == (False, True)
    assert step["row"]["actor/updates_skipped"] == 2
    assert step["row"]["critic/values_mean"] == 0  # the head is initialised to 0
    assert step["row"]["critic/updates_skipped"] == 0


def test_a_bad_update_of_the_critic_is_skipped(lm_folder: Path, tmp_path: Path) -> None:
    for part in run_ranks(one_step, 2, tiny_lm_config(lm_folder, tmp_path, *PPO), True):
        assert part["row"]["critic/updates_non_finite"] == 2
        assert all(torch.equal(value, part["after"]["critic"][k]) for k, value in part["before"]["critic"].items())
        assert part["row"]["actor/updates_non_finite"] == 0 and part["row"]["actor/grad_norm"] > 0


@pytest.mark.full
def test_single_samples_and_equal_rewards_are_trained(lm_folder: Path, tmp_path: Path) -> None:
    keys = (*PPO, "rollout.n=1", "data.train_batch_size=4", "rollout.micro_batch_size_per_gpu=2")
    cfg = tiny_lm_config(lm_folder, tmp_path, *keys)
    (tmp_path / "reward.py").write_text(
        "def evenness(completions, prompts, metadata):\n    return [1.0] * len(prompts)\n"
    )
    (step,) = run_ranks(one_step, 1, cfg)
    assert step["row"]["actor/updates_skipped"] == 0 and step["row"]["actor/grad_norm"] > 0
    assert step["row"]["critic/grad_norm"] > 0


@pytest.mark.long
def test_a_resumed_run_is_the_run(lm_folder: Path, tmp_path: Path) -> None:
    """Policy, critic and both optimizers, bit for bit; on another number of ranks up to rounding."""
    keys, last = (*PPO, *STEPS, "parallel.fsdp_size=2"), "trainer.total_training_steps=4"
    cfg = tiny_lm_config(lm_folder, tmp_path, *keys, last)
    whole, wanted = run_ranks(fit, 2, cfg)[0], rows(tmp_path / "out")
    assert [row["actor/updates_skipped"] for row in wanted] == [2, 0, 0, 0]
    assert wanted[-1]["reward/kl_mean"] != 0 == wanted[0]["reward/kl_mean"]
    assert {"critic/model/value.weight", "critic/optim/value.weight/exp_avg"} <= whole.keys()
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step_000004")
    again = run_ranks(fit, 2, cfg)[0]
    assert rows(tmp_path / "out") == wanted
    assert whole.keys() == again.keys()
    assert [name for name, value in whole.items() if not torch.equal(value, again[name])] == []
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step_000004")
    run_ranks(fit, 1, tiny_lm_config(lm_folder, tmp_path, *PPO, *STEPS, "parallel.fsdp_size=1", last))
    for row, expected in zip(rows(tmp_path / "out"), wanted, strict=True):
        for key in ("reward/mean", "actor/grad_norm", "critic/grad_norm", "critic/lr", "critic/values_mean"):
            if key in expected:
                assert row[key] == pytest.approx(expected[key], rel=1e-4), key
