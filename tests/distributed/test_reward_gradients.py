"""Algorithms that differentiate the reward in the loop: layouts agree, micro-batches add up, and the reward rises."""

from pathlib import Path

import pytest

from phalanx.config.flow import FlowRLConfig
from tests.distributed.test_layouts import assert_same_step
from tests.helpers.jobs import algorithm_config, fit, one_step, rows
from tests.helpers.ranks import RankError, run_ranks

LORA = "model.lora_rank=4"
GRADED = Path(__file__).parents[1] / "helpers" / "graded.py"
KL = "algorithm.kl_loss_coef=0.01"


def configure(model: Path, folder: Path, name: str, *overrides: str, reward: str = "brightness") -> FlowRLConfig:
    """A tiny job with a differentiable reward."""
    functions = f"reward.functions=[{{path: '{GRADED}:{reward}'}}]"
    return algorithm_config(model, folder, name, functions, "rollout.micro_batch_size_per_gpu=4", *overrides)


RULES = [
    ("draft", (LORA, "algorithm.last_steps=2", KL)),
    ("draft", ("algorithm.last_steps=2",)),
    ("draft", (LORA, "algorithm.noise_draws=2")),
    ("refl", ("algorithm.last_steps=2", KL)),
]


@pytest.mark.seldom(
    "draft-model.lora_rank=4-algorithm.noise_draws=2", "refl-algorithm.last_steps=2-algorithm.kl_loss_coef=0.01"
)
@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), RULES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_layouts_agree(name: str, kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    """On one rank and on two ranks that shard the weights, with other micro-batches and recomputed blocks."""
    one = run_ranks(one_step, 1, configure(sd3_folder, tmp_path, name, *kind))
    again = ("actor.ppo_micro_batch_size_per_gpu=1", "model.gradient_checkpointing=true", "parallel.fsdp_size=2")
    cfg = configure(sd3_folder, tmp_path, name, *kind, *again)
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    row = one[0]["row"]
    assert row["actor/updates_skipped"] == 0 and row["actor/grad_norm"] > 0
    assert ("actor/kl_ref" in row) == (KL in kind)


def test_the_reward_rises(sd3_folder: Path, tmp_path: Path) -> None:
    """For the same prompts in each step; the first update differentiates exactly the sampled images."""
    keys = ("optim.lr=1e-2", "trainer.total_training_steps=6", "actor.ppo_mini_batch_size=4", LORA)
    cfg = configure(sd3_folder, tmp_path, "draft", *keys)
    run_ranks(fit, 1, cfg)
    found = rows(tmp_path / "out")
    assert found[0]["actor/reward_mean"] == pytest.approx(found[0]["reward/mean"], rel=1e-5)
    assert found[-1]["reward/mean"] > found[0]["reward/mean"] + 0.02


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("numbers", "reward 'numbers' returned no scores with a gradient on the prompt"),
        ("brightness, weight: 2.0}, {name: jpeg_compressibility", "reward.functions[1]: 'jpeg_compressibility' has no"),
    ],
)
def test_refuses_what_has_no_gradient(reward: str, message: str, sd3_folder: Path, tmp_path: Path) -> None:
    name, _, more = reward.partition(",")
    functions = f"reward.functions=[{{path: '{GRADED}:{name}'{more and ',' + more}}}]"
    with pytest.raises(RankError) as error:
        run_ranks(fit, 1, configure(sd3_folder, tmp_path, "draft", functions))
    assert message in str(error.value)


@pytest.mark.full
def test_a_term_without_weight_needs_no_gradient(sd3_folder: Path, tmp_path: Path) -> None:
    functions = f"reward.functions=[{{path: '{GRADED}:brightness'}}, {{name: jpeg_compressibility, weight: 0}}]"
    run_ranks(fit, 1, configure(sd3_folder, tmp_path, "refl", functions, "trainer.total_training_steps=1"))
    assert rows(tmp_path / "out")[0]["reward/jpeg_compressibility"] != 0
