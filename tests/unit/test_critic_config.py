"""Mistakes in keys of critics and groups raise one line when the configuration loads; verl's keys are recognized."""

import pytest

from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(LMRLConfig, None, ["model.path=x", *overrides])
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["critic.optim.lr=1e-3"],
            "critic.optim.lr: 0.001 configures a critic, but algorithm.name=grpo has none; leave it out, or set "
            "algorithm.name=ppo",
        ),
        (
            ["algorithm.name=reinforce_plus_plus", "trainer.critic_warmup=3"],
            "trainer.critic_warmup: 3 configures a critic, but algorithm.name=reinforce_plus_plus has none; leave it "
            "out, or set algorithm.name=ppo",
        ),
        (
            ["algorithm.name=ppo", "critic.optim.betas=[0.9]"],
            "critic.optim.betas: expected two numbers in 0 .. 1, such as [0.9, 0.999], got [0.9]",
        ),
        (["rollout.temperature=1e-30"], "rollout.temperature: expected at least 0.01, got 1e-30"),
        (["algorithm.name=ppo", "critic.cliprange_value=0"], "critic.cliprange_value: expected more than 0, got 0.0"),
        (
            ["rollout.n=1"],
            "rollout.n: 1 leaves algorithm.name=grpo nothing to compare a sample with; set it to at least 2, or "
            "algorithm.name=ppo, which needs no groups",
        ),
        (
            ["algorithm.name=reinforce_plus_plus", "algorithm.group_baseline=true", "rollout.n=1"],
            "rollout.n: 1 leaves algorithm.name=reinforce_plus_plus nothing to compare a sample with; set it to at "
            "least 2, or algorithm.name=ppo, which needs no groups",
        ),
        (
            ["algorithm.name=ppo", "rollout.n=1", "reward.normalize=group"],
            "rollout.n: 1 leaves reward.normalize=group no group of samples to compare; set it to at least 2, or leave "
            "the other key out",
        ),
        (
            ["algorithm.name=ppo", "rollout.n=1", "rollout.max_draws_per_prompt=2"],
            "rollout.n: 1 leaves rollout.max_draws_per_prompt=2 no group of samples to compare; set it to at least 2, "
            "or leave the other key out",
        ),
        (
            ["algorithm.kl_reward_coef=0.1"],
            "unknown key algorithm.kl_reward_coef; did you mean algorithm.kl_loss_coef?",
        ),
        (
            ["algorithm.name=ppo", "algorithm.use_kl_in_reward=true"],
            "unknown key algorithm.use_kl_in_reward; here it is algorithm.kl_reward_coef of ppo and "
            "reinforce_plus_plus, 0 without a KL",
        ),
        (
            ["algorithm.name=ppo", "critic.ppo_micro_batch_size_per_gpu=2"],
            "unknown key critic.ppo_micro_batch_size_per_gpu; here it is actor.ppo_micro_batch_size_per_gpu, of policy "
            "and critic",
        ),
    ],
)
def test_a_mistake_is_told(keys: list[str], message: str) -> None:
    assert refusal(*keys) == message


@pytest.mark.parametrize("name", ["ppo", "reinforce_plus_plus"])
def test_no_groups_are_needed(name: str) -> None:
    cfg = load_config(LMRLConfig, None, ["model.path=x", f"algorithm.name={name}", "rollout.n=1"])
    assert cfg.rollout.n == 1


@pytest.mark.parametrize("key", ["adv_clip_max=1", "global_std=true", "group_filter=top_bottom", "importance=sequence"])
def test_keys_of_group_advantages_mean_nothing_to_ppo(key: str) -> None:
    message = refusal("algorithm.name=ppo", f"algorithm.{key}")
    assert message.startswith(f"algorithm.{key.split('=')[0]}: ")
    assert message.endswith(" is not used by algorithm.name=ppo; leave it out")
