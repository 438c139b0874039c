"""Batch sizes: those that divide are planned, others are refused with suggestions that work."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.algorithms import diffusion_dpo, flow_grpo
from phalanx.config import ConfigError
from phalanx.config.flow import FlowRewardFunctionConfig, FlowRLConfig
from phalanx.distributed.launch_env import Launch
from phalanx.run.flow_kind import stochastic_steps
from phalanx.run.rules import load_config
from phalanx.run.world import check_world
from phalanx.training.minibatches import BatchPlan
from tests.helpers.kinds import check_config, plan_of

KEYS = {
    "data.train_batch_size": "prompts",
    "rollout.n": "n",
    "actor.ppo_mini_batch_size": "mini",
    "actor.ppo_micro_batch_size_per_gpu": "micro",
    "rollout.micro_batch_size_per_gpu": "rollout",
    "data.train_batch_size_per_gpu": "prompts_each",
    "actor.ppo_mini_batch_size_per_gpu": "mini_each",
}


QUICKSTART: dict[str, int] = {
    "samples": 192, "per_rank": 96, "updates": 2, "micro": 48, "actions": 2, "units": 96,
}  # fmt: skip


def config(
    prompts: int = 12,
    n: int = 16,
    mini: int = 6,
    micro: int = 48,
    window: int = 2,
    rollout: int | None = None,
    prompts_each: int | None = None,
    mini_each: int | None = None,
) -> FlowRLConfig:
    """The quickstart's batch sizes, unless overridden."""
    cfg = FlowRLConfig(algorithm=flow_grpo.Config())
    cfg.data.train_batch_size, cfg.rollout.n = prompts, n
    cfg.data.train_files, cfg.trainer.total_training_steps = ["prompts.txt"], 1
    cfg.reward.functions = [FlowRewardFunctionConfig(name="ocr")]
    cfg.trainer.output_dir = "outputs/run"
    cfg.actor.ppo_mini_batch_size, cfg.actor.ppo_micro_batch_size_per_gpu = mini, micro
    cfg.rollout.sde_window_size, cfg.rollout.micro_batch_size_per_gpu = window, rollout
    cfg.data.train_batch_size_per_gpu, cfg.actor.ppo_mini_batch_size_per_gpu = prompts_each, mini_each
    return cfg


def refusal(check: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check(*args)
    return str(error.value)


def test_the_quickstart_on_two_ranks() -> None:
    # 12 prompts x 16 = 192 images, 96 a rank, 2 updates of 6 prompts; 48 x 2 steps sampled and replayed together
    assert plan_of(config(), 2) == BatchPlan(**QUICKSTART, rollout_micro=96, exact=True)


def test_a_rollout_batch_of_its_own_is_not_exact() -> None:
    assert plan_of(config(rollout=32), 2) == BatchPlan(**QUICKSTART, rollout_micro=32, exact=False)
    assert plan_of(config(rollout=96), 2).exact


def test_a_window_of_all_steps() -> None:
    cfg = config(micro=16)
    cfg.rollout.sde_window_size = None
    cfg.rollout.sde_window_range = [1, 4]
    assert plan_of(cfg, 1).actions == 3
    assert plan_of(cfg, 1).rollout_micro == 48


def test_a_share_of_the_stochastic_steps() -> None:
    cfg = config(micro=16)
    cfg.rollout.sde_window_size, cfg.rollout.timestep_fraction = None, 0.34
    plan = plan_of(cfg, 1)
    assert (stochastic_steps(cfg), plan.actions, plan.rollout_micro) == (9, 3, 48)
    assert plan.exact


def test_a_batch_that_follows_the_ranks() -> None:
    """A rank's share is the same on any number of them."""
    cfg = config(prompts=32, mini=16, prompts_each=4, mini_each=2, micro=8)
    for world in (1, 3, 8, 32):
        plan = plan_of(cfg, world)
        assert (plan.samples, plan.per_rank, plan.updates) == (64 * world, 64, 2)
    half = config(prompts=32, mini=16, prompts_each=4, micro=8)  # only the prompts follow
    assert [plan_of(half, world).updates for world in (4, 8, 16)] == [1, 2, 4]


ONE_OF_THE_TWO = [
    (("data.train_batch_size=16", "data.train_batch_size_per_gpu=4"),
     "data.train_batch_size_per_gpu: 4 conflicts with data.train_batch_size: 16; set one of them: leave data.train_batch_size at 32, or "
     "set data.train_batch_size_per_gpu=null"),
    (("data.train_batch_size_per_gpu=4", "actor.ppo_mini_batch_size=8", "actor.ppo_mini_batch_size_per_gpu=2"),
     "actor.ppo_mini_batch_size_per_gpu: 2 conflicts with actor.ppo_mini_batch_size: 8; set one of them: leave actor.ppo_mini_batch_size at "
     "16, or set actor.ppo_mini_batch_size_per_gpu=null"),
    (("actor.ppo_mini_batch_size_per_gpu=2",),
     "actor.ppo_mini_batch_size_per_gpu: 2 grows with the ranks, but data.train_batch_size does not; set data.train_batch_size_per_gpu, or "
     "actor.ppo_mini_batch_size"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), ONE_OF_THE_TWO)
def test_a_batch_has_one_size(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert refusal(lambda: check_config(job(tmp_path, *overrides))) == message


def job(tmp_path: Path, *overrides: str) -> FlowRLConfig:
    own = ["model.path=model", "data.train_files=[prompts.txt]", "trainer.total_training_steps=1"]
    own += ["reward.functions=[{name: ocr}]", f"trainer.output_dir={tmp_path}"]
    return load_config(FlowRLConfig, None, [*own, *overrides])


NONSENSE = [
    (("algorithm.name=grpo_guard", "rollout.sde_type=cps"),
     "rollout.sde_type: cps does not work with algorithm.name=grpo_guard; expected sde or dance_sde"),
    (("algorithm.name=cps", "rollout.sde_type=sde"), "rollout.sde_type: sde does not work with algorithm.name=cps; expected cps"),
    (("algorithm.importance=sequence", "algorithm.timestep_weight=noise"),
     "algorithm.timestep_weight: noise weights a sample's steps differently, but algorithm.importance=sequence treats them as one; set one of the two to "
     "its default"),
    (("algorithm.name=dance_grpo", "rollout.noise_level=0"),
     "rollout.noise_level: 0.0; expected more than 0, since algorithm.name=dance_grpo trains denoising steps, which have no probability without noise"),
    (("algorithm.name=diffusion_nft", "rollout.ode_compression=0.4"),
     "rollout.ode_compression: 0.4 needs log-probs of a window of steps, which diffusion_nft does not use; leave it out"),
    (("algorithm.name=diffusion_nft", "rollout.noise_level=0.7", "rollout.solver=dpm_solver++"),
     "rollout.solver: dpm_solver++ takes steps without noise, but with diffusion_nft all steps have rollout.noise_level=0.7; set that to 0, or "
     "rollout.solver=euler"),
    (("algorithm.name=sft", "algorithm.group_filter=top_bottom"),
     "algorithm.group_filter: top_bottom is not used by algorithm.name=sft; leave it out"),
    (("algorithm.name=diffusion_dpo", "algorithm.adv_clip_max=3"),
     "algorithm.adv_clip_max: 3.0 is not used by algorithm.name=diffusion_dpo; leave it out"),
    (("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_clip_max=3"),
     "algorithm.adv_clip_max: 3.0 clamps advantages that were divided by a std, but "
     "algorithm.norm_adv_by_std_in_grpo=false does not divide; leave it out"),
    (("algorithm.name=opd", "algorithm.teacher_path=x", "rollout.engine=vllm_omni", "rollout.correction=truncated_is"),
     "rollout.correction: truncated_is weights a policy gradient, which algorithm.name=opd does not have; set it to rescore or none"),
    (("algorithm.name=awm", "rollout.engine=vllm_omni", "rollout.correction=rejection"),
     "rollout.correction: rejection needs log-probs of a window of steps, which awm does not use; leave it out"),
    (("algorithm.name=opd", "algorithm.teacher_path=x", "rollout.max_num_gen_batches=2"),
     "rollout.max_num_gen_batches: 2 depends on rewards, from which opd does not learn; set it to 1"),
    (("rollout.max_num_gen_batches=2", "rollout.max_draws_per_prompt=3"),
     "rollout.max_num_gen_batches: 2 draws new prompts, and rollout.max_draws_per_prompt: 3 the same ones again; set one of the two to 1"),
    (("reward.normalize=gdpo", "algorithm.global_std=false"),
     "algorithm.global_std: false contradicts reward.normalize=gdpo, which divides by the std of all samples; leave it out, or set "
     "reward.normalize=group"),
    (("algorithm.name=diffusion_nft", "rollout.init_same_noise=true"),
     "rollout.init_same_noise: true makes all images of a prompt equal, because diffusion_nft samples without noise; set it to false"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), NONSENSE)
def test_samplers_that_make_no_sense(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert refusal(lambda: check_config(job(tmp_path, *overrides))) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=dance_grpo",),
        ("algorithm.name=mix_grpo", "rollout.solver=dpm_solver++", "rollout.ode_compression=0.4"),
        ("algorithm.name=flow_dppo", "rollout.sde_type=cps", "algorithm.importance=sequence"),
        ("algorithm.name=grpo_guard", "rollout.sde_type=dance_sde", "algorithm.timestep_weight=noise"),
        ("algorithm.name=cps", "rollout.init_same_noise=true"),
        ("algorithm.name=diffusion_dpo", "reward.normalize=gdpo"),
        ("algorithm.name=opd", "algorithm.teacher_path=x", "reward.normalize=gdpo"),
        ("algorithm.name=diffusion_nft", "rollout.solver=dpm_solver++"),
        ("algorithm.name=diffusion_nft", "rollout.noise_level=0.7", "rollout.init_same_noise=true"),
    ],
)
def test_samplers_that_make_sense(overrides: tuple[str, ...], tmp_path: Path) -> None:
    check_config(job(tmp_path, *overrides))


UNEVEN = [
    (1, {"mini": 5},
     "actor.ppo_mini_batch_size: 5 prompts do not divide data.train_batch_size 12; nearest that work: actor.ppo_mini_batch_size=3 or 6"),
    (1, {"mini": 24, "micro": 8},
     "actor.ppo_mini_batch_size: 24 prompts do not divide data.train_batch_size 12; nearest that work: actor.ppo_mini_batch_size=12"),
    (4, {"n": 3, "micro": 1, "window": 1},
     "actor.ppo_mini_batch_size: 6 prompts x rollout.n 3 = 18 samples of an update do not divide over 4 ranks; nearest that work: "
     "actor.ppo_mini_batch_size=4 or 12"),
    (5, {"micro": 6},  # no mini-batch of 12 prompts x 16 images divides by 5
     "actor.ppo_mini_batch_size: 6 prompts x rollout.n 16 = 96 samples of an update do not divide over 5 ranks; nearest that work: "
     "rollout.n=15 or 20"),
    (2, {"micro": 5},
     "actor.ppo_micro_batch_size_per_gpu: 5 does not divide the 48 samples of an update on a rank (6 prompts x rollout.n 16 = 96 samples of "
     "an update / 2 ranks); nearest that work: actor.ppo_micro_batch_size_per_gpu=4 or 6"),
    (2, {"micro": 48, "window": 3},
     "actor.ppo_micro_batch_size_per_gpu: 48 x 3 trained steps = 144, the rollout's micro-batch, does not divide the 96 samples of a rank; "
     "nearest that work: actor.ppo_micro_batch_size_per_gpu=16"),
    (1, {"prompts": 2, "n": 2, "mini": 2, "micro": 1, "window": 3},  # 4 images, windows of 3: no micro-batch times 3 divides them
     "actor.ppo_micro_batch_size_per_gpu: 1 x 3 trained steps = 3, the rollout's micro-batch, does not divide the 4 samples of a rank; "
     "nearest that work: rollout.micro_batch_size_per_gpu=2 or 4"),
    (2, {"rollout": 36},
     "rollout.micro_batch_size_per_gpu: 36 does not divide the 96 samples of a rank; nearest that work: rollout.micro_batch_size_per_gpu=32 or 48"),
    (3, {"prompts": 32, "mini": 16, "prompts_each": 4, "micro": 8},
     "actor.ppo_mini_batch_size: 16 prompts do not divide data.train_batch_size_per_gpu 4 x 3 ranks = 12; nearest that work: "
     "actor.ppo_mini_batch_size=12"),
    (2, {"prompts": 32, "mini": 16, "prompts_each": 6, "mini_each": 4},
     "actor.ppo_mini_batch_size_per_gpu: 4 x 2 ranks = 8 prompts do not divide data.train_batch_size_per_gpu 6 x 2 ranks = 12; nearest that "
     "work: actor.ppo_mini_batch_size_per_gpu=3 or 6"),
    (8, {"prompts": 7, "n": 4, "mini": 3, "micro": 2, "window": 1},  # a prime number of prompts, of which no part divides over 8 ranks
     "actor.ppo_mini_batch_size: 3 prompts do not divide data.train_batch_size 7; nearest that work: actor.ppo_mini_batch_size=1 with rollout.n=16"),
]  # fmt: skip


@pytest.mark.parametrize(("world", "numbers", "message"), UNEVEN)
def test_what_does_not_divide(world: int, numbers: dict[str, Any], message: str) -> None:
    assert refusal(plan_of, config(**numbers), world) == message


def splits(
    world: int,
    n: int,
    micro: int,
    window: int,
    rollout: int | None,
    prompts: int = 0,
    mini: int = 0,
    prompts_each: int | None = None,
    mini_each: int | None = None,
) -> bool:
    """Whether all slices of the loop are full, tested by slicing: consecutive images of the step are on one rank."""
    prompts = prompts if prompts_each is None else prompts_each * world
    mini = mini if mini_each is None else mini_each * world
    images = list(range(prompts * n))
    if prompts % mini or len(images) % world:
        return False
    share, updates = len(images) // world, prompts // mini
    sampled = {
        len(images[i : min(i + (rollout or micro * window), share)]) for i in range(0, share, rollout or micro * window)
    }
    if sampled != {rollout or micro * window}:
        return False
    for k in range(updates):
        mine = images[:share][k::updates]
        if len(mine) * updates != share or {len(mine[i : i + micro]) for i in range(0, len(mine), micro)} != {micro}:
            return False
    return True


def advised(message: str, numbers: dict[str, Any]) -> tuple[dict[str, Any], str, list[int]]:
    """Apply the first suggested change; returns the numbers, the number to change next, and its suggested values."""
    what, _, advice = message.partition("; nearest that work: ")
    assert what.partition(":")[0] in KEYS
    choices = re.fullmatch(r"(?:([\w.]+)=(\d+) with )?([\w.]+)=(\d+)(?: or (\d+))?", advice)
    assert choices is not None, advice
    also, value, key, *values = choices.groups()
    changed = numbers if also is None else {**numbers, KEYS[also]: int(value)}
    return changed, KEYS[key], [int(v) for v in values if v is not None]


def test_every_suggestion_works_and_is_the_nearest() -> None:
    """Random batch sizes: those that divide are planned, and all suggestions of a refusal work."""
    refused = 0
    for trial in range(1500):
        draw = random.Random(trial)
        world = draw.choice([1, 2, 3, 4, 6, 8])
        numbers: dict[str, Any] = {
            "prompts": draw.choice([1, 4, 6, 7, 12, 16, 30]),
            "n": draw.randint(2, 18),
            "mini": draw.choice([1, 2, 3, 4, 5, 6, 12, 40]),
            "micro": draw.choice([1, 2, 3, 4, 6, 8, 12]),
            "window": draw.randint(1, 4),
            "rollout": draw.choice([None, None, 1, 4, 9]),
        }
        if trial % 3:  # the batch follows the ranks, or batch and mini-batch do
            numbers["prompts_each"] = numbers.pop("prompts")
        if trial % 3 == 2:
            numbers["mini_each"] = numbers.pop("mini")
        if splits(world, **numbers):
            plan_of(config(**numbers), world)
            continue
        refused += 1
        advice = refusal(plan_of, config(**numbers), world)
        changed, named, suggested = advised(advice, numbers)
        for value in suggested:
            plan = plan_of(config(**{**changed, named: value}), world)
            assert splits(world, **{**changed, named: value}), advice
            assert plan.per_rank * world == plan.samples
        own = numbers[named] or numbers["micro"] * numbers["window"]
        works = [
            v for v in range(2 if named == "n" else 1, max(own, *suggested)) if splits(world, **{**changed, named: v})
        ]
        assert [v for v in works if v < own][-1:] == [v for v in suggested if v < own], (numbers, advice)
        assert [v for v in works if own < v < suggested[-1]] == [], (numbers, advice)
    assert 500 < refused < 1450


# --- pairs


def pairs(**numbers: Any) -> FlowRLConfig:
    """diffusion_dpo: the best and the worst image of a prompt form a unit, trained at two noise levels."""
    cfg = config(**numbers)
    cfg.algorithm = diffusion_dpo.Config(name="diffusion_dpo")
    return cfg


def test_the_units_of_pairs() -> None:
    """12 prompts x 16 images in 2 updates: a rank trains 3 pairs per update, and all 6 pass through its references."""
    plan = plan_of(pairs(micro=4, rollout=8), 2)
    assert (plan.per_rank, plan.units, plan.together) == (96, 6, 2)
    assert (plan.micro_units, plan.passes, plan.reference_samples) == (2, 2, 12)
    assert [plan.first(passes) for passes in (1, 2)] == [4, 6]  # the last micro-batch is a single pair
    for micro, units in ((1, 1), (3, 1), (6, 3), (48, 24)):
        assert plan_of(pairs(micro=micro, rollout=8), 2).micro_units == units
    plain = plan_of(config(micro=12), 2)
    assert (plain.micro_units, plain.passes, plain.reference_samples) == (12, 4, 96)


def test_references_see_every_epoch() -> None:
    """On the forward process, since each epoch has fresh noise."""
    cfg = pairs(micro=4, rollout=8)
    cfg.actor.ppo_epochs = 3
    plan = plan_of(cfg, 2)
    assert plan.reference_samples == 36
    cfg.algorithm = flow_grpo.Config()
    assert plan_of(cfg, 2).reference_samples == 96


UNEVEN_PAIRS = [
    (8, {"n": 4, "mini": 4, "micro": 2},
     "actor.ppo_mini_batch_size: 4 whole prompts do not divide over 8 ranks; nearest that work: actor.ppo_mini_batch_size=8 with "
     "data.train_batch_size=8 or 16"),
    (3, {"prompts": 4, "n": 3, "mini": 2, "micro": 1, "rollout": 1},
     "actor.ppo_mini_batch_size: 2 whole prompts do not divide over 3 ranks; nearest that work: actor.ppo_mini_batch_size=3 with "
     "data.train_batch_size=3 or 6"),
    (8, {"prompts": 4, "n": 2, "mini": 4, "micro": 1, "rollout": 1},
     "actor.ppo_mini_batch_size: 4 whole prompts do not divide over 8 ranks; nearest that work: actor.ppo_mini_batch_size=8 with "
     "data.train_batch_size=8"),
    (3, {"prompts": 4, "n": 2, "mini": 4, "micro": 1, "rollout": 1},
     "actor.ppo_mini_batch_size: 4 prompts x rollout.n 2 = 8 samples of an update do not divide over 3 ranks; nearest that work: "
     "actor.ppo_mini_batch_size=3 with data.train_batch_size=3 or 6"),
    (4, {"prompts": 16, "n": 4, "mini": 2, "micro": 1},
     "actor.ppo_mini_batch_size: 2 whole prompts do not divide over 4 ranks; nearest that work: actor.ppo_mini_batch_size=4"),
]  # fmt: skip


@pytest.mark.parametrize(("world", "numbers", "message"), UNEVEN_PAIRS)
def test_pairs_that_do_not_divide(world: int, numbers: dict[str, Any], message: str) -> None:
    assert refusal(plan_of, pairs(**numbers), world) == message


def test_every_suggestion_for_pairs_works() -> None:
    refused = 0
    for trial in range(600):
        draw = random.Random(trial)
        world = draw.choice([1, 2, 3, 8])
        numbers: dict[str, Any] = {
            "prompts": draw.choice([1, 4, 7, 12, 16]),
            "n": draw.choice([2, 2, 5, 8]),
            "mini": draw.choice([1, 2, 4, 8, 12, 40]),
            "micro": draw.choice([1, 2, 3, 8]),
            "rollout": draw.choice([None, 1, 4, 9]),
        }
        try:
            plan = plan_of(pairs(**numbers), world)
        except ConfigError as error:
            changed, named, suggested = advised(str(error), numbers)
        else:
            assert plan.units * world == numbers["prompts"] and plan.units % plan.updates == 0
            continue
        refused += 1
        # which pairs of the data do not leave open
        assert named != "n" and changed["n"] == numbers["n"]
        for value in suggested:
            plan_of(pairs(**{**changed, named: value}), world)
    assert refused > 200


# --- combinations that work with no number of ranks


IMPOSSIBLE = [
    ({"data.train_files": []}, "data.train_files: [] names no prompts; give at least one .txt, .jsonl, .csv, .parquet or dataset folder"),
    ({"reward.functions": []}, "reward.functions: [] leaves nothing to optimise; give at least one, e.g. reward.functions=[{name: ocr}]"),
    ({"trainer.total_training_steps": None}, "trainer.total_training_steps: null needs trainer.total_epochs; set one of them"),
    ({"trainer.test_freq": 5}, "trainer.test_freq: 5 needs data.val_files; give some, or -1"),
    ({"rollout.sde_window_range": [4, 11]},
     "rollout.sde_window_range: [4, 11] should satisfy 0 <= a < b <= 10 (rollout.num_inference_steps)"),
    ({"rollout.sde_window_size": 10}, "rollout.sde_window_size: 10 does not fit into the range [0, 9]; should be at most 9"),
    ({"rollout.sde_type": "cps", "rollout.sde_window_range": [6, 10]},
     "rollout.sde_window_range: [6, 10] contains the last step, which has no log-probability under cps; expected an end of at most 9"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), IMPOSSIBLE)
def test_impossible_combinations(changes: dict[str, Any], message: str) -> None:
    cfg = config()
    check_config(cfg)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        assert name in vars(vars(cfg)[section])
        setattr(vars(cfg)[section], name, value)
    assert refusal(check_config, cfg) == message


def test_offload_needs_shards() -> None:
    cfg = config()
    cfg.parallel.param_offload, cfg.parallel.fsdp_size = True, 1
    assert refusal(check_world, cfg, lambda roles, launch: None, Launch.from_env()) == (
        "parallel.param_offload: true needs parallel.fsdp_size > 1; replicated weights stay on the device"
    )


def test_the_last_step_is_fine_under_the_other_types() -> None:
    for kind in ("sde", "dance_sde"):
        cfg = config()
        cfg.rollout.sde_type, cfg.rollout.sde_window_range = kind, [8, 10]
        check_config(cfg)
