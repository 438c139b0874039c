"""Sampling of training images: the trained steps, the initial noise, and solvers for steps without noise."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in, normal
from phalanx.functional.losses import noise_weight
from phalanx.functional.window import visited_levels
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.flow.solver import multistep_solver
from phalanx.types import Samples
from tests.helpers.checks import refused
from tests.helpers.policies import PROMPTS, disturb, make_policy, make_rollout, sample, validated

MICRO = 3  # samples per replay
N = 4  # images per prompt, of 3 prompts


@pytest.fixture(params=["sd3", "qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def replayed(policy: FlowPolicy, samples: Samples) -> tuple[Tensor, Tensor]:
    """Log-probs and means of all samples, replayed in another order than that of sampling."""
    order = torch.randperm(len(samples.index), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        replays = [policy.replay(samples.trace.select(part)) for part in order.split(MICRO)]
    back = order.argsort()
    return torch.cat([r.log_prob for r in replays])[back], torch.cat([r.mean for r in replays])[back]


# -- the trained steps ----------------------------------------------------------------------------------------------


@pytest.mark.quick("sd3-sde", "sd3-flash", "qwen-dance", "qwen-cps")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sde_type": "dance_sde", "noise_level": 0.3, "init_same_noise": True},
        {"sde_type": "cps"},
        {"solver": "dpm_solver++", "ode_compression": 0.5, "sde_window_range": [0, 3], "num_inference_steps": 7},
    ],
    ids=["sde", "dance", "cps", "flash"],
)
def test_log_probs_of_a_share_of_the_steps_are_exact(world: World, folder: Path, options: dict[str, Any]) -> None:
    """2 of 3 stochastic steps, which may not be adjacent, in rollout micro-batches of MICRO x 2."""
    policy = make_policy(world, folder, lora_rank=4)
    disturb(policy)
    keys = {"n": N, "sde_window_size": None, "timestep_fraction": 0.6, "guidance": 3.0} | options
    rollout = make_rollout(policy, 2 * MICRO, **keys)
    seen = set()
    for step in range(4):
        samples = sample(rollout, step=step)
        trace = samples.trace
        seen.add(tuple(trace.trained.tolist()))
        assert trace.latents.shape[:2] == (12, 4) and trace.sigmas.shape == (4,)
        assert samples.log_prob is not None and samples.log_prob.shape == trace.means.shape[:2] == (12, 2)
        log_prob, mean = replayed(policy, samples)
        assert torch.equal(log_prob, samples.log_prob) and samples.log_prob.std() > 0
        assert torch.equal(mean, trace.means)
    assert len(seen) > 1


def test_the_trained_share_is_a_choice_of_the_same_samples(world: World, sd3_folder: Path) -> None:
    policy = make_policy(world, sd3_folder, lora_rank=4)
    disturb(policy)
    whole = sample(make_rollout(policy, 6, n=N, sde_window_size=None))
    part = sample(make_rollout(policy, 6, n=N, sde_window_size=None, timestep_fraction=0.6))
    assert whole.log_prob is not None and part.log_prob is not None
    assert whole.trace.trained.tolist() == [0, 1, 2] and len(part.trace.trained) == 2
    assert torch.equal(part.outputs, whole.outputs) and torch.equal(part.trace.latents, whole.trace.latents)
    assert torch.equal(part.log_prob, whole.log_prob[:, part.trace.trained])
    assert torch.equal(part.trace.means, whole.trace.means[:, part.trace.trained])
    assert torch.equal(part.trace.delta, whole.trace.delta[part.trace.trained])
    assert whole.trace.delta.tolist() == pytest.approx((whole.trace.sigmas[1:] - whole.trace.sigmas[:-1]).tolist())


# -- the first noise ------------------------------------------------------------------------------------------------


def test_a_window_of_one_step_is_weighed_by_the_whole_schedule(world: World, sd3_folder: Path) -> None:
    """Otherwise timestep_weight=noise would have no effect: its std would be divided by itself."""
    policy = make_policy(world, sd3_folder)
    weights = set()
    for first in range(3):
        rollout = make_rollout(policy, 6, sde_window_size=1, sde_window_range=[0, 3])
        rollout.stochastic_steps = lambda seed, step, at=first: range(at, at + 1)  # type: ignore[misc, assignment]
        trace = sample(rollout).trace
        weights.add(float(noise_weight(policy.replay(trace).std, trace.typical_std)))
    assert len(weights) == 3 and sum(weights) == pytest.approx(3, rel=1e-5)


def test_images_of_a_prompt_begin_with_the_same_noise(world: World, sd3_folder: Path) -> None:
    policy = make_policy(world, sd3_folder)
    options: dict[str, Any] = {"n": N, "sde_window_size": None}
    own = sample(make_rollout(policy, 6, **options)).trace.latents[:, 0]
    assert len(own.flatten(1).unique(dim=0)) == len(PROMPTS) * N
    samples = sample(make_rollout(policy, 6, init_same_noise=True, **options))
    first = samples.trace.latents[:, 0]
    for group, images in enumerate(first.view(len(PROMPTS), N, *first.shape[1:])):
        expected = normal(tuple(first.shape[1:]), fold_in(0, 0, group, "init"), torch.device("cpu"))
        assert all(torch.equal(image, expected) for image in images)
    assert len(samples.outputs.flatten(1).unique(dim=0)) == len(PROMPTS) * N  # the steps' noise differs between images
    again = sample(make_rollout(policy, 4, init_same_noise=True, **options), step=1).trace.latents[:, 0]
    assert not torch.isin(again, first).any()


@pytest.mark.parametrize("micro", [2, 3, 6])
def test_images_of_a_prompt_branch_in_the_window(micro: int, world: World, sd3_folder: Path) -> None:
    """The images equal those of the same noise without sharing; steps before the window run once per group."""
    policy = make_policy(world, sd3_folder)
    options: dict[str, Any] = {"n": N, "sde_window_size": 1, "sde_window_range": [2, 3], "init_same_noise": True}
    apart = sample(make_rollout(policy, micro, guidance=3.0, **options))
    rows, velocity = [], policy.velocity
    policy.velocity = lambda x, *args: rows.append(len(x)) or velocity(x, *args)  # type: ignore[method-assign]
    shared = sample(make_rollout(policy, micro, guidance=3.0, branching=True, **options))
    assert shared.outputs.shape == apart.outputs.shape
    torch.testing.assert_close(shared.trace.latents, apart.trace.latents, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shared.outputs, apart.outputs, rtol=1e-4, atol=1e-5)
    trunks = [len({i // N for i in range(start, start + micro)}) for start in range(0, len(PROMPTS) * N, micro)]
    assert rows == [count for groups in trunks for count in (groups, groups, micro, micro)]
    before = shared.trace.latents[:, 0].view(len(PROMPTS), N, -1)
    if micro % N == 0:  # the same batch size
        assert torch.equal(before, before[:, :1].expand_as(before))
    assert len(shared.outputs.flatten(1).unique(dim=0)) == len(PROMPTS) * N
    assert (apart.trace.evaluations, shared.trace.evaluations) == (4, 4 - round(2 * (1 - 1 / N)))


# -- solvers --------------------------------------------------------------------------------------------------------


def gaussian_velocity(x: Tensor, level: float) -> Tensor:
    """The exact velocity for data from N(0.7, 0.25)."""
    variance = (1 - level) ** 2 * 0.25 + level**2
    centred = x - (1 - level) * 0.7
    return level / variance * centred - (0.7 + (1 - level) * 0.25 / variance * centred)


def wavy_velocity(x: Tensor, level: float) -> Tensor:
    """A velocity that is nonlinear in both arguments."""
    return torch.sin(3 * x) + level * x.flip(-1) ** 2


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 20])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_solver_is_diffusers_own(steps: int, shift: float) -> None:
    stock = DPMSolverMultistepScheduler(
        solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    stock.set_timesteps(steps)
    levels = stock.sigmas.tolist()
    solve = multistep_solver(levels)
    x = y = normal((2, 3, 4), 0, torch.device("cpu"))
    for level, timestep in zip(levels[:-1], stock.timesteps, strict=True):
        x = stock.step(wavy_velocity(x, level), timestep, x).prev_sample
        y = solve(wavy_velocity(y, level), y)
        assert torch.equal(x, y) and y.isfinite().all()


def test_the_solver_is_of_second_order() -> None:
    """On levels from 1, pure noise, to 0: the error decreases much faster than Euler's."""

    def error(steps: int, euler: bool) -> float:
        levels = [1 - k / steps for k in range(steps + 1)]
        solve = multistep_solver(levels)
        x = torch.tensor([[1.3]])
        for level, after in pairwise(levels):
            velocity = gaussian_velocity(x, level)
            x = x + velocity * (after - level) if euler else solve(velocity, x)
        return abs(x.item() - (0.7 + 0.5 * 1.3))

    euler, solver = ([error(steps, kind) for steps in (40, 80, 160)] for kind in (True, False))
    assert all(0.9 < math.log2(a / b) < 1.1 for a, b in pairwise(euler))
    assert all(1.5 < math.log2(a / b) < 2.5 for a, b in pairwise(solver))
    assert all(10 * b < a for a, b in zip(euler[1:], solver[1:], strict=True))


def tail(policy: FlowPolicy, rollout: PolicyRollout, samples: Samples, begin: int, make: Callable[..., Any]) -> Tensor:
    """The final latents of the samples, solved from level `begin` on in the rollout's micro-batches."""
    sampler, trace = rollout.sampler, samples.trace
    schedule = rollout.schedule(sampler)
    levels = visited_levels(sampler.num_inference_steps, begin, sampler.compression)[begin:]
    parts = []
    for rows in torch.arange(len(samples.index)).split(rollout.micro_batch_size):
        x, step = trace.latents[rows, -1], make([schedule.levels[i] for i in levels])
        for i, after in pairwise(levels):
            time = schedule.timesteps[i].expand(len(x))
            with torch.no_grad():
                velocity = policy.velocity(x, time, trace.embeds, trace.prompt_index[rows], sampler)
            x = step(velocity, x, schedule.levels[i], schedule.levels[after])
        parts.append(x)
    return torch.cat(parts)


def by_diffusers(levels: list[float]) -> Callable[..., Tensor]:
    """diffusers' scheduler on these levels, which finds its place by timesteps."""
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    scheduler.set_timesteps(len(levels) - 1)
    scheduler.sigmas, scheduler.timesteps = torch.tensor(levels), 1000 * torch.tensor(levels[:-1])

    def step(velocity: Tensor, x: Tensor, level: float, after: float) -> Tensor:
        return scheduler.step(velocity, 1000 * torch.tensor(level), x).prev_sample

    return step


def by_euler(levels: list[float]) -> Callable[..., Tensor]:
    def step(velocity: Tensor, x: Tensor, level: float, after: float) -> Tensor:
        return x + velocity * (torch.tensor(after) - torch.tensor(level))

    return step


@pytest.mark.quick("sd3-0.4-dpm_solver++-by_diffusers", "qwen-1.0-euler-by_euler")
@pytest.mark.parametrize(("solver", "make"), [("euler", by_euler), ("dpm_solver++", by_diffusers)])
@pytest.mark.parametrize("compression", [1.0, 0.4])
def test_the_steps_behind_the_window(
    world: World, folder: Path, solver: str, make: Callable[..., Any], compression: float
) -> None:
    """MixGRPO-Flash: 2 stochastic steps, then 6 or 2 steps of the solver; nothing before them changes."""
    policy = make_policy(world, folder, lora_rank=4)
    disturb(policy)
    keys: dict[str, Any] = {"n": N, "num_inference_steps": 9, "sde_window_range": [1, 3], "guidance": 3.0}
    plain = sample(make_rollout(policy, 6, **keys))
    rollout = make_rollout(policy, 6, solver=solver, ode_compression=compression, **keys)
    samples = sample(rollout)
    assert samples.trace.evaluations == 3 + {1.0: 6, 0.4: 2}[compression]
    assert torch.equal(samples.trace.latents, plain.trace.latents)
    assert samples.log_prob is not None and plain.log_prob is not None
    assert torch.equal(samples.log_prob, plain.log_prob)
    assert torch.equal(samples.trace.clean, tail(policy, rollout, samples, 3, make))
    same = solver == "euler" and compression == 1.0
    assert torch.equal(samples.trace.clean, plain.trace.clean) == same
    assert torch.equal(samples.outputs, plain.outputs) == same


@pytest.mark.parametrize(("solver", "make"), [("euler", by_euler), ("dpm_solver++", by_diffusers)])
def test_whole_trajectories(world: World, sd3_folder: Path, solver: str, make: Callable[..., Any]) -> None:
    """As sampled for forward-process algorithms, without a window."""
    policy = make_policy(world, sd3_folder)
    config = make_rollout(policy, 6, n=N, num_inference_steps=5, noise_level=0.0, solver=solver).config
    rollout = PolicyRollout(policy, config, world, 6, window=False)
    samples = sample(rollout)
    assert samples.trace.evaluations == 5 and samples.trace.latents.shape[1] == 1
    assert torch.equal(samples.trace.clean, tail(policy, rollout, samples, 0, make))


def test_the_solver_of_validation(world: World, sd3_folder: Path) -> None:
    policy = make_policy(world, sd3_folder)
    pictures: dict[str, Tensor] = {}
    for name, keys in {
        "euler": {},
        "own": {"val.solver": "dpm_solver++"},
        "rollout's": {"solver": "dpm_solver++", "ode_compression": 0.4},
        "back": {"solver": "dpm_solver++", "val.solver": "euler"},
    }.items():
        rollout = make_rollout(policy, 3, num_inference_steps=6)
        for key, value in keys.items():
            setattr(rollout.config.val if key.startswith("val.") else rollout.config, key.removeprefix("val."), value)
        pictures[name] = validated(PolicyRollout(policy, rollout.config, world, 3))
    assert torch.equal(pictures["euler"], pictures["back"]) and torch.equal(pictures["own"], pictures["rollout's"])
    assert not torch.equal(pictures["euler"], pictures["own"])


def test_a_solver_takes_no_noise_in_validation(world: World, sd3_folder: Path) -> None:
    policy = make_policy(world, sd3_folder)
    config = make_rollout(policy, 3).config
    config.val.noise_level, config.solver = 0.5, "dpm_solver++"
    with refused(
        "rollout.val.solver: dpm_solver++ takes steps without noise; set rollout.val.noise_level=0, or "
        "rollout.val.solver=euler"
    ):
        PolicyRollout(policy, config, world, 3)
