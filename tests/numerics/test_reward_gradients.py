"""Algorithms that differentiate the reward, compared with a plain loop of sampling, decoding and reward."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.algorithms import draft, refl
from phalanx.algorithms._reward_gradient import RewardGradientAlgorithm
from phalanx.distributed.seed import fold_in, normal
from phalanx.functional.flow import FlowTrace, States
from phalanx.models.flow.policy import FlowPolicy
from phalanx.types import Batch, Samples
from tests.helpers.checks import reduced
from tests.helpers.policies import disturb, make_policy, make_rollout, one_rank, sample

STEPS = 4


@pytest.fixture(scope="module")
def policy(sd3_folder: Path) -> Iterator[FlowPolicy]:
    """A tiny SD3 with a nonzero LoRA."""
    with one_rank() as world:
        policy = make_policy(world, sd3_folder, lora_rank=4, gradient_checkpointing=True)
        policy.trained.keep_reference()
        disturb(policy)
        yield policy


def contrast(images: Tensor) -> Tensor:
    """Rewards [N] of images [N, 3, H, W]."""
    return images.flatten(1).var(1)


def drawn(policy: FlowPolicy, last_steps: int) -> Samples:
    """Six images of three prompts, sampled with the ODE and guidance, and their last states."""
    rollout = make_rollout(policy, 3, guidance=3.0, noise_level=0.0, num_inference_steps=STEPS)
    rollout.window, rollout.last_steps = False, last_steps
    return sample(rollout)


def batch_of(algorithm: RewardGradientAlgorithm, policy: FlowPolicy, samples: Samples, seeds: list[int]) -> Batch:
    """A batch of all samples, with the reference's outputs."""
    states = algorithm.corrupt(policy, samples, seeds)
    weight = states.mask / states.mask.sum()
    none = samples.log_prob
    batch = Batch(samples.trace, none, states.mask, none.new_zeros(6), weight, {}, states, score=contrast)
    if algorithm.references:
        with torch.no_grad(), policy.using("reference"):
            batch.reference_outputs["reference"] = algorithm.reference_output(policy, batch)
    return batch


def velocity(policy: FlowPolicy, trace: FlowTrace, x: Tensor, sigma: Tensor) -> Tensor:
    """The velocity of all six images at one level."""
    timesteps = (sigma * 1000).expand(len(x))
    return policy.velocity(x, timesteps, trace.embeds, trace.prompt_index, trace.sampler)


def sampled(policy: FlowPolicy, trace: FlowTrace, stop: int) -> tuple[list[Tensor], Tensor]:
    """The states of Euler steps from the initial noise, the first `stop` steps without a gradient, and sigmas."""
    sigmas, _ = policy.model.schedule(STEPS, trace.sampler.height, trace.sampler.width)
    names = [(0, 0, group, image) for group in range(3) for image in range(2)]
    x = torch.stack([normal(trace.clean.shape[1:], fold_in(*name, "init"), torch.device("cpu")) for name in names])
    states = [x]
    for i in range(STEPS):
        with torch.set_grad_enabled(i >= stop):
            x = x + velocity(policy, trace, x, sigmas[i]) * (sigmas[i + 1] - sigmas[i])
        states.append(x)
    return states, sigmas


def reward_of(policy: FlowPolicy, trace: FlowTrace, clean: Tensor) -> Tensor:
    """Rewards [N] of final latents [N, ...], decoded by diffusers' VAE."""
    c = policy.model.vae.config
    images = policy.model.vae.decode(clean / c.scaling_factor + c.shift_factor).sample
    return contrast((images / 2 + 0.5).clamp(0, 1))


def gradients(policy: FlowPolicy, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of the trained weights, by name."""
    for parameter in policy.trained.parameters.values():
        parameter.grad = None
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.trained.parameters.items() if p.grad is not None}


def assert_alike(policy: FlowPolicy, algorithm: RewardGradientAlgorithm, batch: Batch, expected: Tensor) -> None:
    """Check that the algorithm's loss and its gradients are those of `expected`."""
    loss, stats = algorithm.loss(policy, batch)
    assert loss.shape == batch.weight.shape and "reward_mean" in reduced(stats, batch.weight)
    total = (loss * batch.weight).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    ours, theirs = gradients(policy, total), gradients(policy, expected)
    assert ours.keys() == theirs.keys() and len(ours) > 8
    largest = max(gradient.abs().max() for gradient in theirs.values())
    assert largest > 0
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=float(1e-5 * largest), msg=name)


@pytest.mark.parametrize(("last_steps", "kl"), [(1, 0.0), (3, 0.5), (STEPS, 0.0)])
def test_draft_differentiates_the_last_steps(last_steps: int, kl: float, policy: FlowPolicy) -> None:
    algorithm = draft.Algorithm(draft.Config(last_steps=last_steps, kl_loss_coef=kl))
    samples = drawn(policy, last_steps)
    batch = batch_of(algorithm, policy, samples, list(range(6)))
    trace = samples.trace
    states, sigmas = sampled(policy, trace, STEPS - last_steps)
    torch.testing.assert_close(trace.latents[:, 0], states[STEPS - last_steps].detach(), rtol=1e-4, atol=1e-5)
    expected = -reward_of(policy, trace, states[-1]).mean()
    if kl > 0:
        x, sigma = states[STEPS - last_steps], sigmas[STEPS - last_steps]
        with torch.no_grad(), policy.using("reference"):
            reference = velocity(policy, trace, x, sigma)
        expected = expected + kl * (velocity(policy, trace, x, sigma) - reference).square().mean()
    assert_alike(policy, algorithm, batch, expected)


def test_draft_lv_takes_the_last_step_from_fresh_noise(policy: FlowPolicy) -> None:
    algorithm = draft.Algorithm(draft.Config(noise_draws=2, kl_loss_coef=0.5))
    samples = drawn(policy, 1)
    batch = batch_of(algorithm, policy, samples, list(range(6)))
    trace, states = samples.trace, batch.corrupted
    sigma = trace.sigmas[0]
    assert sigma == policy.model.schedule(STEPS, 32, 48)[0][-2] and states.latents.shape[:2] == (6, 2)
    noise = (states.latents - (1 - sigma) * trace.clean[:, None]) / sigma
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    assert len({round(float(row.flatten()[0]), 4) for row in noise.flatten(0, 1)}) == 12  # all are different
    expected = torch.zeros(())
    for k in range(2):
        x = states.latents[:, k]
        v = velocity(policy, trace, x, sigma)
        with torch.no_grad(), policy.using("reference"):
            reference = velocity(policy, trace, x, sigma)
        distance = (v - reference).square().mean()
        expected = expected + (0.5 * distance - reward_of(policy, trace, x - sigma * v).mean()) / 2
    assert_alike(policy, algorithm, batch, expected)


@pytest.mark.parametrize("margin", [2.0, 0.045])
def test_refl_takes_the_expected_image_of_a_late_state(margin: float, policy: FlowPolicy) -> None:
    algorithm = refl.Algorithm(refl.Config(last_steps=3, margin=margin, reward_coef=0.1))
    samples = drawn(policy, 3)
    batch = batch_of(algorithm, policy, samples, list(range(6)))
    trace, steps = samples.trace, batch.corrupted.step[:, 0].tolist()
    assert set(steps) == {0, 1, 2}
    states, sigmas = sampled(policy, trace, STEPS)
    expected, rewards = torch.zeros(()), []
    for i, step in enumerate(steps):
        number = STEPS - 3 + step
        v = velocity(policy, trace, states[number], sigmas[number])[i : i + 1]
        reward = reward_of(policy, trace, states[number][i : i + 1] - sigmas[number] * v)
        rewards.append(reward.item())
        expected = expected + 0.1 * (margin - reward).clamp(min=0).sum() / 6
    if margin < 1:  # some rewards exceed the margin, and have no gradient
        assert min(rewards) < margin < max(rewards)
    assert_alike(policy, algorithm, batch, expected)


def test_states_are_functions_of_the_seed(policy: FlowPolicy) -> None:
    samples = drawn(policy, 3)
    seeds = list(range(6))
    for algorithm in (refl.Algorithm(refl.Config()), draft.Algorithm(draft.Config(noise_draws=1, last_steps=3))):
        states: list[States] = [algorithm.corrupt(policy, samples, some) for some in (seeds, seeds, seeds[::-1])]
        assert torch.equal(states[0].latents, states[1].latents)
        assert not torch.equal(states[0].latents, states[2].latents)
        part: Any = states[0].select(torch.tensor([4, 1]))
        assert torch.equal(part.latents, states[0].latents[[4, 1]]) and part.step.shape == (2, 1)
