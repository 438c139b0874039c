"""phalanx.functional.preference compared with numbers by hand and the formula in float64; pairs, and their noise."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.algorithms.diffusion_dpo import Algorithm, Config
from phalanx.functional.flow import Noised
from phalanx.functional.preference import best_and_worst, dpo_loss
from phalanx.types import Batch
from tests.helpers.checks import normal, reduced
from tests.helpers.policies import disturb, make_policy, make_rollout, one_rank, sample


def test_by_hand() -> None:
    # beta 4, so r = -2 (e - e_ref). Winner: e 1, ref 1.5 -> r 1. Loser: e 2, ref 1.25 -> r -1.5. Margin 2.5.
    # The second pair is the first with its samples exchanged: margin -2.5. The third is at the reference: margin 0.
    error = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 4.0]])
    reference = torch.tensor([[1.5, 1.25], [1.25, 1.5], [3.0, 4.0]])
    loss, metrics = dpo_loss(error, reference, beta=4.0)
    stats = reduced(metrics, torch.ones(3, 1))
    # -ln(1 / (1 + e^-2.5)) = ln(1 + e^-2.5) = 0.0788898, and 2.5 more for the second pair; ln 2 at the reference
    torch.testing.assert_close(loss, torch.tensor([0.0788898, 2.5788898, math.log(2)]), rtol=1e-6, atol=1e-7)
    assert stats["accuracy"] == pytest.approx(1 / 3)
    assert stats["margin"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("beta", [0.1, 2000.0])
@pytest.mark.parametrize("shape", [(5, 2), (5, 2, 3)])
def test_loss_and_gradient(shape: tuple[int, ...], beta: float) -> None:
    """d loss / d e_w = beta / 2 sigmoid(-margin), and its negative for the loser."""
    spread = 1 / beta
    reference = 1 + spread * normal(*shape, seed=0)
    error = (reference + spread * normal(*shape, seed=1)).requires_grad_()
    loss, _ = dpo_loss(error, reference, beta=beta)
    loss.sum().backward()
    e, r = error.detach().double(), reference.double()
    margin = -beta / 2 * ((e[:, 0] - r[:, 0]) - (e[:, 1] - r[:, 1]))
    expected = torch.log1p(torch.exp(-margin))
    slope = beta / 2 / (1 + torch.exp(margin))
    assert loss.dtype == torch.float32 and loss.shape == (shape[0], *shape[2:])
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if beta < 1 else {"rtol": 5e-4, "atol": 5e-4}  # errors of 1 in float32
    torch.testing.assert_close(loss.detach().double(), expected, **tolerance)
    torch.testing.assert_close(error.grad.double(), torch.stack([slope, -slope], 1), **tolerance)


def test_large_margins_stay_finite() -> None:
    error = torch.tensor([[0.0, 1.0], [1.0, 0.0]], requires_grad=True)
    loss, _ = dpo_loss(error, torch.zeros(2, 2), beta=1e6)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 5e5]
    assert error.grad.tolist() == [[0.0, 0.0], [5e5, -5e5]]


def test_pairs_are_the_ends_of_each_group() -> None:
    reward = torch.tensor([0.2, 0.9, 0.1, 0.9, 5.0, 5.0, 5.0, 5.0, -3.0, -1.0, -2.0, -3.0])
    group = torch.arange(12) // 4
    assert best_and_worst(reward, group).tolist() == [[3, 2], [7, 4], [9, 8]]
    # the second group has equal rewards: it does not count, but still has two samples
    rule = Algorithm(Config())
    assert rule.units(reward, group).tolist() == [[3, 2], [7, 4], [9, 8]]
    assert rule.sample_mask(reward, group)[rule.units(reward, group)].all(1).tolist() == [True, False, True]


def test_groups_in_any_order() -> None:
    reward, group = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([7, 1, 7, 1])
    assert best_and_worst(reward, group).tolist() == [[3, 1], [2, 0]]


def test_a_pair_shares_noise_and_level(sd3_folder: Path) -> None:
    """The loss of a batch of two pairs, by hand from velocities at the winner's noise; the loser's noise is not used."""
    with one_rank() as world:
        policy = make_policy(world, sd3_folder)
        samples = sample(make_rollout(policy, 6, guidance=3.0))  # 3 prompts x 2
        trace = replace(samples.trace, clean=samples.trace.clean[:4], prompt_index=samples.trace.prompt_index[:4])
        noised = Noised(normal(4, 3, *trace.clean.shape[1:], seed=1), normal(4, 3, seed=2).sigmoid())
        batch = Batch(trace, torch.zeros(4, 3), torch.ones(4, 3).bool(), torch.zeros(4), torch.ones(2, 3), {}, noised)
        rule = Algorithm(Config(beta=50.0, kl_loss_coef=0.5))
        with torch.no_grad():
            reference = rule.reference_output(policy, batch)
            disturb(policy, 0.01)
            batch = replace(batch, reference_outputs={"reference": reference})
            loss, metrics = rule.loss(policy, batch)
            stats = reduced(metrics, batch.weight)

            first = torch.tensor([0, 0, 2, 2])
            shared = Noised(noised.noise[first], noised.levels[first])
            v = policy.predict(trace, shared)
        u = shared.noise - trace.clean[:, None]
        e, e_ref = ((x - u).double().square().flatten(2).mean(2) for x in (v, reference))
        gain = -25.0 * (e - e_ref)
        margin = gain[0::2] - gain[1::2]
        distance = (v - reference).double().square().flatten(2).mean(2)
        expected = torch.log1p(torch.exp(-margin)) + 0.5 * (distance[0::2] + distance[1::2]) / 2
        torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
        assert stats["margin"] == pytest.approx(margin.mean().item(), abs=1e-4)
        assert stats["kl_ref"] == pytest.approx(distance.mean().item(), rel=1e-4)

        noise, levels = noised.noise.clone(), noised.levels.clone()
        noise[1::2], levels[1::2] = 100.0, 0.0
        with torch.no_grad():
            again, _ = rule.loss(policy, replace(batch, corrupted=Noised(noise, levels)))
        assert torch.equal(again, loss)
