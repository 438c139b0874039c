"""DGPO's loss compared with the formula in float64 and with autograd; groups, their noise, and the clip."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.algorithms.dgpo import Algorithm, Config
from phalanx.config.flow import FlowRLConfig
from phalanx.functional.advantage import fill_missing, group_advantage, on_scored
from phalanx.functional.flow import Noised
from phalanx.functional.preference import group_preference
from phalanx.run.rl import build
from phalanx.training.minibatches import Minibatches, Units
from phalanx.types import Batch
from tests.helpers.checks import normal, reduced
from tests.helpers.jobs import tiny_config
from tests.helpers.policies import disturb, make_policy, make_rollout, one_rank, sample
from tests.helpers.ranks import run_ranks


def test_loss_and_gradient() -> None:
    """d loss / d e_i = A_i sigmoid(beta mean A (e - e_ref)) / n, for any beta."""
    advantage = group_advantage(normal(3, 4, seed=0).flatten(), torch.arange(12) // 4).view(3, 4)
    for beta in (0.1, 100.0):
        reference = 1 + normal(3, 4, 2, seed=1) / beta
        error = (reference + normal(3, 4, 2, seed=2) / beta).requires_grad_()
        loss, metrics = group_preference(error, reference, advantage, beta=beta)
        stats = reduced(metrics, torch.ones_like(loss))
        loss.sum().backward()
        assert loss.dtype == torch.float32 and loss.shape == (3, 2)
        a = advantage.double()[..., None]
        margin = -beta * (a * (error.detach().double() - reference.double())).mean(1)
        torch.testing.assert_close(loss.detach().double(), torch.log1p(torch.exp(-margin)) / beta, rtol=1e-3, atol=1e-6)
        slope = a * torch.sigmoid(-margin)[:, None] / 4
        torch.testing.assert_close(error.grad.double(), slope, rtol=1e-3, atol=1e-5)
        assert stats["accuracy"] == pytest.approx((margin > 0).double().mean().item())


def test_a_group_of_two_is_a_pair_of_diffusion_dpo() -> None:
    """With advantages of 1 and -1 the mean over the group is half of the pair's difference."""
    from phalanx.functional.preference import dpo_loss

    error, reference = normal(5, 2, seed=0), normal(5, 2, seed=1)
    pair, _ = dpo_loss(error, reference, beta=3.0)
    group, _ = group_preference(error, reference, torch.tensor([[1.0, -1.0]]).expand(5, 2), beta=3.0)
    torch.testing.assert_close(group * 3.0, pair)


def test_groups_are_all_images_of_a_prompt() -> None:
    rule = Algorithm(Config())
    reward, group = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 5.0]), torch.tensor([7, 1, 7, 1, 3, 3])
    assert rule.units(reward, group).tolist() == [[1, 3], [4, 5], [0, 2]]
    assert rule.sample_mask(reward, group)[rule.units(reward, group)].all(1).tolist() == [True, False, True]


@pytest.mark.parametrize(("clip", "kl"), [(None, 0.5), (1e-3, 0.0)])
def test_a_step_is_the_plain_formula(clip: float | None, kl: float, sd3_folder: Path) -> None:
    """Two groups of three, by hand from velocities at the noise of each group's first image."""
    rule = Algorithm(Config(beta=50.0, clip_ratio=clip, kl_loss_coef=kl, min_level=0.4))
    with one_rank() as world:
        policy = make_policy(world, sd3_folder)
        samples = sample(make_rollout(policy, 6, guidance=3.0, n=3, noise_level=0.7))
        trace = samples.trace.select(torch.arange(6))
        drawn = rule.corrupt(policy, samples, list(range(9)))
        assert drawn.levels.shape == (9, 2) and drawn.levels.min() >= 0.4 and drawn.levels.max() > 0.8
        noised = drawn.select(torch.arange(6))
        advantage = torch.tensor([1.2, -0.2, -1.0, 0.3, 0.9, -1.2])
        batch = Batch(trace, torch.zeros(6, 2), noised.mask, advantage, torch.full((2, 2), 0.25), {}, noised)
        with torch.no_grad():
            batch.reference_outputs["reference"] = rule.reference_output(policy, batch)
            disturb(policy, 0.01)
            batch.reference_outputs["policy"] = rule.reference_output(policy, batch)
            disturb(policy, 0.002, seed=1)
        loss, metrics = rule.loss(policy, batch)
        stats = reduced(metrics, batch.weight)
        assert loss.shape == (2, 2)
        ours = gradients(policy.trained.parameters, (loss * batch.weight).sum())

        shared = noised.select(torch.tensor([0, 0, 0, 3, 3, 3]))
        v = policy.predict(trace, shared)
        u = shared.noise - trace.clean[:, None]
        views = (v, batch.reference_outputs["reference"], batch.reference_outputs["policy"])
        e, e_ref, e_old = ((x - u).square().flatten(2).mean(2) for x in views)
        expected, dropped = torch.zeros(()), 0
        for g in range(2):
            for w in range(2):
                total = torch.zeros(())
                for i in range(3 * g, 3 * g + 3):
                    error = e[i, w]
                    ratio = torch.exp(e_old[i, w] - error).item()
                    if clip is not None and (ratio > 1 + clip if advantage[i] > 0 else ratio < 1 - clip):
                        error, dropped = error.detach(), dropped + 1
                    total = total + advantage[i] * (error - e_ref[i, w]) / 3
                    expected = expected + kl * (v[i, w] - views[1][i, w]).square().mean() / 12
                expected = expected + torch.log1p(torch.exp(50.0 * total)) / 50.0 / 4
        assert (loss * batch.weight).sum().item() == pytest.approx(expected.item(), rel=1e-6)
        theirs = gradients(policy.trained.parameters, expected)
        largest = max(gradient.abs().max() for gradient in theirs.values())
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=float(1e-5 * largest), msg=name)
        assert ("kl_ref" in stats) == (kl > 0)
        if clip is not None:
            assert 0 < dropped < 12 and stats["clipfrac"] == pytest.approx(dropped / 12)

        noise = noised.noise.clone()
        noise[[1, 2, 4, 5]] = 100.0
        again, _ = rule.loss(policy, replace(batch, corrupted=Noised(noise, noised.levels)))
        assert torch.equal(again, loss)


@pytest.mark.parametrize("lost", [0, 2])
def test_an_image_without_a_reward_is_left_out_of_its_group(lost: int) -> None:
    """The loss and the gradient of its group are those of the other images alone."""
    reward = torch.tensor([0.1, 0.9, 0.4, 0.7, 0.2, 0.3])
    reward[lost] = torch.nan
    ids = torch.arange(6) // 3
    known = ~reward.isnan()
    advantage = on_scored(Algorithm(Config()).advantage, reward, ids, 0.0)
    counted = on_scored(Algorithm(Config()).sample_mask, reward, ids, False)
    assert counted.tolist() == known.tolist()
    units = Algorithm(Config()).units(fill_missing(reward, ids), ids)
    with one_rank() as world:
        assert Units.of(units, counted, torch.arange(6), world, partial=True).counted.tolist() == [True, True]
        assert Units.of(units, counted, torch.arange(6), world).counted.tolist() == [False, True]
    error, reference = normal(2, 3, 2, seed=3).requires_grad_(), normal(2, 3, 2, seed=4)
    groups = {"beta": 3.0, "known": known.view(2, 3)}
    loss, _ = group_preference(error, reference, advantage.view(2, 3), **groups)
    loss.sum().backward()
    rest = error.detach()[:1, known[:3]].requires_grad_()
    kept = group_advantage(reward[:3][known[:3]], torch.zeros(2, dtype=torch.long))
    alone, _ = group_preference(rest, reference[:1, known[:3]], kept[None], beta=3.0)
    alone.sum().backward()
    torch.testing.assert_close(loss[:1], alone)
    torch.testing.assert_close(error.grad[:1, known[:3]], rest.grad)
    assert (error.grad[0, lost] == 0).all() and error.grad[1].abs().min() > 0


def references_of(cfg: FlowRLConfig) -> dict[str, Tensor]:
    """The reference's velocities for the first step's samples, and those of plain calls of the model."""
    trainer = build(cfg)
    updater, found = trainer.updater, {}

    def outputs(batch: Minibatches) -> dict[str, Tensor]:
        found.update(type(updater).reference_outputs(updater, batch))
        found["advantage"] = batch.advantage
        trace, noised = batch.samples.trace, shared_rows(batch)
        prompts = [batch.samples.prompts[i] for i in range(len(batch.advantage))]
        policy = trainer.policy
        x = noised.latents(trace.clean).flatten(0, 1)
        rows = torch.arange(len(prompts)).repeat_interleave(noised.levels.shape[1])
        for name, scale in (("unguided", 1.0), ("guided", 4.5)):
            sampler = replace(trace.sampler, guidance=scale)
            embeds = trainer.collector.rollout.collate(prompts, negatives=scale > 1)
            with torch.no_grad(), policy.using("reference"):
                v = policy.velocity(x, noised.levels.flatten() * 1000, embeds, rows, sampler)
            found[name] = v.view(len(prompts), -1, *v.shape[1:])
        return {name: found[name] for name in ("reference", "policy") if name in found}

    updater.reference_outputs = outputs
    trainer.fit()
    return found


def shared_rows(batch: Minibatches) -> Noised:
    first = torch.arange(len(batch.advantage)) // 2 * 2
    return batch.corrupted.select(first)


def test_the_reference_may_be_guided_where_the_policy_is_not(sd3_folder: Path, tmp_path: Path) -> None:
    """As in the authors' recipe, whose kl_cfg is 4.5; the old policy's velocities are unguided."""
    keys = ["algorithm.name=dgpo", "algorithm.reference_guidance=4.5", "rollout.n=2", "data.train_batch_size=2"]
    keys += ["rollout.guidance_scale=1", "rollout.noise_level=0", "rollout.sde_window_size=null", "model.lora_rank=4"]
    keys += ["actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=2", "trainer.total_training_steps=1"]
    keys += ["reward.functions=[{name: jpeg_compressibility}]"]
    (found,) = run_ranks(references_of, 1, tiny_config(sd3_folder, tmp_path, *keys))
    torch.testing.assert_close(found["reference"], found["guided"], rtol=0, atol=1e-4)
    torch.testing.assert_close(found["policy"], found["unguided"], rtol=0, atol=1e-4)
    assert (found["guided"] - found["unguided"]).abs().max() > 0.01


def gradients(parameters: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """Gradients of a loss, by name of weight."""
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: value for name, value in zip(parameters, found, strict=True) if value is not None}
