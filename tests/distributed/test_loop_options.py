"""Options of the loop for all algorithms: resampled groups, a reference that is updated, sums of rewards."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.flow import FlowRLConfig
from phalanx.functional.advantage import has_signal
from phalanx.rewards import RewardSet
from phalanx.types import Samples
from tests.helpers.jobs import fit, full_weights, rows, tiny_config, update
from tests.helpers.ranks import run_ranks

REWARDS = '''"""Rewards of tests."""

import shutil
from pathlib import Path


def picky(images, prompts, metadata):
    """It has no opinion on some prompts."""
    return [image.mean().item() if len(prompt) % 2 else 1.0 for image, prompt in zip(images, prompts)]


def deleting(images, prompts, metadata):
    """It deletes the run's folder after its first step."""
    out = Path(__file__).parent / "out"
    if out.exists() and len((out / "metrics.jsonl").read_text().splitlines()) == 1:
        shutil.rmtree(out)
    return [image.mean().item() for image in images]


def bright(images, prompts, metadata):
    return images.mean((1, 2, 3))


def thousands(images, prompts, metadata):
    return -1000 * images[:, 0].mean((1, 2))
'''


def configure(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    (folder / "rewards.py").write_text(REWARDS)
    return tiny_config(model, folder, "rollout.micro_batch_size_per_gpu=4", "model.lora_rank=4", *overrides)


def reward(folder: Path, *names: str) -> str:
    return "reward.functions=[" + ",".join(f"{{path: '{folder}/rewards.py:{n}'}}" for n in names) + "]"


def drawn_again(cfg: FlowRLConfig) -> dict[str, Any]:
    """A step's samples as first sampled, and after resampling."""
    from phalanx.run.rl import build

    t = build(cfg)
    with t.collector.rollout.awake():
        first = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    combine, seen = t.collector._combine_terms, list[dict[str, torch.Tensor]]()

    def noted(reward_set: RewardSet, terms: dict[str, torch.Tensor], step: int, samples: Samples) -> torch.Tensor:
        seen.append(terms)
        return combine(reward_set, terms, step, samples)

    t.collector._combine_terms = noted  # type: ignore[method-assign]
    samples, reward, row = t.collector.reward(first, 0)
    before, after = seen[0], seen[-1]
    learned = update(t, samples, reward, 0)
    found = {
        "before": before["picky"],
        "after": after["picky"],
        "bright": after["bright"],
        "row": row | learned,
        "index": samples.index,
        "prompts_before": [prompt.text for prompt in first.prompts][:: cfg.rollout.n],
        "prompts": [prompt.text for prompt in samples.prompts][:: cfg.rollout.n],
    }
    for name, these in (("first", first), ("samples", samples)):
        trace = these.trace
        found[name] = [these.outputs, these.log_prob, trace.latents, trace.means, trace.clean]
    return found


@pytest.mark.seldom("3")
@pytest.mark.full
@pytest.mark.parametrize("times", [2, 3])
def test_groups_of_equal_rewards_are_drawn_again(times: int, sd3_folder: Path, tmp_path: Path) -> None:
    functions = reward(tmp_path, "picky", "bright").replace("bright'", "bright', weight: 0")
    cfg = configure(sd3_folder, tmp_path, functions, f"rollout.max_draws_per_prompt={times}")
    (alone,) = run_ranks(drawn_again, 1, cfg)
    groups = torch.arange(16) // 4
    stale = ~has_signal(alone["before"], groups)
    assert 0 < stale.sum() < 16, alone["before"]  # the reward is chosen so
    for old, new in zip(alone["first"], alone["samples"], strict=True):
        changed = (old != new).flatten(1).any(1)
        assert torch.equal(changed, stale)
    # what was scored is what is kept, and the log-probs are the new samples' own
    means = torch.stack([image.mean() for image in alone["samples"][0]])
    torch.testing.assert_close(alone["bright"], means)
    torch.testing.assert_close(alone["after"], torch.where(stale, 1.0, means))
    assert alone["row"]["actor/first_ratio_error"] == 0
    assert alone["row"]["rollout/resampled_ratio"] == (times - 1) * stale.sum() / 16
    for world in (2, 4):
        parts = run_ranks(drawn_again, world, cfg)
        for i, whole in enumerate(alone["samples"]):
            assert torch.equal(torch.cat([part["samples"][i] for part in parts]), whole)
        assert all(torch.equal(part["bright"], alone["bright"]) for part in parts)
        assert all(part["row"]["rollout/resampled_ratio"] == alone["row"]["rollout/resampled_ratio"] for part in parts)


@pytest.mark.parametrize("family", ["sd3", pytest.param("qwen", marks=pytest.mark.full)])
def test_groups_of_equal_rewards_give_way_to_other_prompts(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As in DAPO. Texts of Qwen-Image have different lengths: a longer one changes the padding of all."""
    model = request.getfixturevalue(f"{family}_folder")
    functions = reward(tmp_path, "picky", "bright").replace("bright'", "bright', weight: 0")
    cfg = configure(
        model, tmp_path, functions, "rollout.max_num_gen_batches=2", "data.train_batch_size=2", "data.seed=5"
    )
    cfg.actor.ppo_mini_batch_size = 1
    odd = ["odd", "seven 7", "a text that is longer than all of the rest, to be padded.", "five5"]
    assert all(len(text) % 2 for text in odd)
    (tmp_path / "prompts.txt").write_text("\n".join(["even", *odd, "is too"]) + "\n")
    (alone,) = run_ranks(drawn_again, 1, cfg)
    groups = torch.arange(8) // 4
    stale = ~has_signal(alone["before"], groups)
    assert stale.any(), alone["before"]
    assert has_signal(alone["after"], groups).all()
    for old, new in zip(alone["prompts_before"], alone["prompts"], strict=True):
        assert len(new) % 2 == 1 and (old == new) == (len(old) % 2 == 1)
    assert len(set(alone["prompts"])) == 2
    changed = (alone["first"][0] != alone["samples"][0]).flatten(1).any(1)
    assert torch.equal(changed, stale)  # what taught something stays
    means = torch.stack([image.mean() for image in alone["samples"][0]])
    torch.testing.assert_close(alone["after"], means)
    assert alone["row"]["actor/first_ratio_error"] == 0
    parts = run_ranks(drawn_again, 2, cfg)
    assert [text for part in parts for text in part["prompts"]] == alone["prompts"]
    for i, whole in enumerate(alone["samples"]):
        assert torch.equal(torch.cat([part["samples"][i] for part in parts]), whole)
    assert parts[0]["row"]["actor/grad_norm"] == pytest.approx(alone["row"]["actor/grad_norm"], rel=1e-5)


def two_references(cfg: FlowRLConfig) -> list[dict[str, torch.Tensor]]:
    """The reference and the weights after each of three steps."""
    from phalanx.run.rl import build

    t = build(cfg)
    found: list[dict[str, torch.Tensor]] = []
    plain = t.updater.follow

    def after_step(step: int) -> None:
        plain(step)
        found.append({k: v.detach().clone() for k, v in t.job.state.averages["reference"].values.items()})
        found.append(full_weights(t.policy.trained.parameters))

    t.updater.follow = after_step  # type: ignore[method-assign]
    t.fit()
    return found


@pytest.mark.full
def test_the_reference_follows_every_k_steps(sd3_folder: Path, tmp_path: Path) -> None:
    keys = ("algorithm.kl_loss_coef=0.1", "actor.ref_model_sync_steps=2", "trainer.total_training_steps=3")
    cfg = configure(sd3_folder, tmp_path, reward(tmp_path, "bright"), *keys, "parallel.fsdp_size=1")
    (found,) = run_ranks(two_references, 1, cfg)
    first, one, second, two, third, three = found
    name = next(k for k in one if "lora_B" in k)
    assert (first[name] == 0).all()  # the base
    assert one[name].abs().max() > 0 and not torch.equal(two[name], three[name])
    for k in one:
        assert torch.equal(second[k], two[k]) and torch.equal(third[k], two[k])


def rewards_of_a_step(cfg: FlowRLConfig) -> dict[str, Any]:
    from phalanx.run.rl import build

    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    gather, terms = t.collector._gather_terms, dict[str, torch.Tensor]()

    def noted() -> dict[str, torch.Tensor]:
        terms.update(gather())
        return terms

    t.collector._gather_terms = noted  # type: ignore[method-assign]
    _, trained, row = t.collector.reward(samples, 1)
    return {"terms": terms, "trained": trained, "row": row}


def test_terms_are_clipped_weighted_by_step_and_normalised(sd3_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    functions = (
        f"reward.functions=[{{path: '{file}:bright', weight: 2, initial_weight: 0, weight_steps: 4}},"
        f"{{path: '{file}:thousands', clip: [-505, -480]}}]"
    )
    cfg = configure(sd3_folder, tmp_path, functions)
    parts = run_ranks(rewards_of_a_step, 2, cfg)
    terms = parts[0]["terms"]
    plain = 0.5 * terms["bright"] + terms["thousands"].clamp(-505, -480)
    torch.testing.assert_close(parts[0]["trained"], plain)
    assert parts[0]["row"]["reward/mean"] == pytest.approx(float(plain.mean()))
    normalised = run_ranks(rewards_of_a_step, 2, configure(sd3_folder, tmp_path, functions, "reward.normalize=group"))
    trained = normalised[0]["trained"].view(4, 4)
    torch.testing.assert_close(trained.mean(1), torch.zeros(4), atol=1e-5, rtol=0)
    assert normalised[0]["row"]["reward/mean"] == pytest.approx(float(plain.mean()))
    for group in range(4):
        own = slice(4 * group, 4 * group + 4)
        expected = torch.zeros(4)
        for values, weight in ((terms["bright"], 0.5), (terms["thousands"].clamp(-505, -480), 1.0)):
            centred = values[own].double() - values[own].double().mean()
            expected = expected + weight * centred / (centred.square().mean().sqrt() + 1e-6)
        torch.testing.assert_close(trained[group], expected.float(), atol=1e-4, rtol=1e-4)


def encoded(cfg: FlowRLConfig, room: int) -> list[list[str]]:
    """The prompts encoded together in a run whose memory has room for that many embeddings."""
    from phalanx.models.flow import embeds
    from phalanx.run.rl import build

    t, calls = build(cfg), list[list[str]]()
    (one,) = t.policy.model.encode(["x"], torch.device("cpu"), cfg.data.max_prompt_length)
    embeds.MEMORY_LIMIT = room * sum(value.nbytes for value in one.values())
    encode = t.policy.embeds._encode

    def counted(texts: list[str]) -> list[dict[str, torch.Tensor]]:
        calls.append(texts)
        return encode(texts)

    t.policy.embeds._encode = counted
    t.fit()
    return calls


@pytest.mark.quick("16-steps0")
@pytest.mark.parametrize(("room", "steps"), [(16, [1, 1, 2, 2, 2]), (1000, [1, 7])])
def test_no_more_is_encoded_ahead_than_memory_keeps(
    room: int, steps: list[int], sd3_folder: Path, tmp_path: Path
) -> None:
    """With 4 embeddings per step, half of 16 are those of two steps; each text is encoded once."""
    small = ("data.train_batch_size=2", "rollout.n=2", "rollout.num_inference_steps=2", "rollout.sde_window_size=1")
    cfg = configure(sd3_folder, tmp_path, *small, "trainer.total_training_steps=8")
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt {i}" for i in range(16)))
    (calls,) = run_ranks(encoded, 1, cfg, room)
    texts = [text for call in calls for text in call]
    assert len(texts) == len(set(texts)) == 16 + 1  # the negative of all
    assert [len(call) for call in calls] == [2 * n + (i == 0) for i, n in enumerate(steps)]


def logged_fit(cfg: FlowRLConfig, file: Path) -> None:
    logging.getLogger().addHandler(logging.FileHandler(file))
    fit(cfg)


def test_a_folder_that_is_deleted_is_made_anew(sd3_folder: Path, tmp_path: Path) -> None:
    """It then has all metrics, whose file is still open, the configuration, and later checkpoints."""
    steps = ("trainer.total_training_steps=3", "trainer.save_freq=3")
    cfg = configure(sd3_folder, tmp_path, reward(tmp_path, "deleting"), *steps)
    run_ranks(logged_fit, 1, cfg, tmp_path / "log")
    out = tmp_path / "out"
    assert [row["step"] for row in rows(out)] == [1, 2, 3]
    assert (out / "config.yaml").is_file() and (out / "checkpoints" / "step_000003").is_dir()
    assert (tmp_path / "log").read_text().count(f"trainer.output_dir: {out} was deleted;") == 1
