"""Algorithms on the forward process in the loop: layouts agree, runs resume, and the old weights sample."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from phalanx.config.flow import FlowRLConfig
from phalanx.distributed.seed import fold_in
from tests.distributed.test_layouts import assert_same_step
from tests.helpers.jobs import algorithm_config, fit, full_weights, one_step
from tests.helpers.ranks import RankError, run_ranks

LORA = "model.lora_rank=4"
# (algorithm, overrides): LoRA and all weights, ODE and SDE sampling, with and without a reference
RULES = [
    ("diffusion_nft", ("algorithm.kl_loss_coef=0.01",)),
    ("diffusion_nft", (LORA, "algorithm.kl_loss_coef=0.01")),
    ("awm", (LORA, "algorithm.level_distribution=logit_normal")),
    ("awm", ("algorithm.kl_loss_coef=0.01", "rollout.noise_level=0.7")),
    ("rwr", ("algorithm.temperature=0.5", "algorithm.level_distribution=uniform")),
    ("sft", (LORA, "algorithm.best=2", "rollout.noise_level=0.7", "algorithm.kl_loss_coef=0.01")),
]


def configure(model: Path, folder: Path, name: str, *overrides: str) -> FlowRLConfig:
    """A tiny job with another algorithm."""
    return algorithm_config(model, folder, name, "rollout.micro_batch_size_per_gpu=4", *overrides)


@pytest.mark.seldom("rwr-algorithm.temperature=0.5-algorithm.level_distribution=uniform")
@pytest.mark.quick("diffusion_nft-model.lora_rank=4-algorithm.kl_loss_coef=0.01")
@pytest.mark.parametrize(("name", "kind"), RULES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_layouts_agree(name: str, kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    one = run_ranks(one_step, 1, configure(sd3_folder, tmp_path, name, *kind))
    cfg = configure(sd3_folder, tmp_path, name, *kind, "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    assert one[0]["row"]["actor/updates_skipped"] == 0
    assert ("actor/kl_ref" in one[0]["row"]) == (cfg.algorithm.kl_loss_coef > 0)
    if name == "awm":  # views and training run at equal shapes
        assert one[0]["row"]["actor/first_ratio_error"] == 0.0
    if name == "diffusion_nft":  # of the step's second update; in the first the policy is the old one
        assert one[0]["row"]["actor/old_distance"] > 0


@pytest.mark.seldom("awm")
@pytest.mark.full
@pytest.mark.parametrize("name", ["diffusion_nft", "awm"])
def test_qwen_image(name: str, qwen_folder: Path, tmp_path: Path) -> None:
    """Packed latents, padded texts and true guidance."""
    kind = (LORA, "algorithm.kl_loss_coef=0.01", "algorithm.train_timesteps=1")
    one = run_ranks(one_step, 1, configure(qwen_folder, tmp_path, name, *kind))
    cfg = configure(qwen_folder, tmp_path, name, *kind, "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)


@pytest.mark.seldom("4")
@pytest.mark.quick("1")
@pytest.mark.parametrize("micro", [1, 4])
def test_actor_micro_batch(micro: int, sd3_folder: Path, tmp_path: Path) -> None:
    """With samples that do not count: only the best of each prompt is trained."""
    one = run_ranks(one_step, 1, configure(sd3_folder, tmp_path, "sft"))
    cfg = configure(sd3_folder, tmp_path, "sft", f"actor.ppo_micro_batch_size_per_gpu={micro}")
    assert_same_step(one, run_ranks(one_step, 1, cfg), cfg.optim.lr)


# --- fresh noise


def fresh_noise(cfg: FlowRLConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Noise [B, W, ...] and levels [B, W] of this rank, by distribution, step and epoch."""
    from phalanx.run.rl import build

    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    found = {}
    for distribution in ("schedule", "uniform", "logit_normal"):
        t.updater.algorithm.config.level_distribution = distribution  # type: ignore[attr-defined]
        for step, epoch in ((0, 0), (0, 1), (1, 0)):
            seeds = [fold_in(cfg.trainer.seed, step, int(i), "forward", epoch) for i in samples.index]
            noised = t.updater.algorithm.corrupt(t.policy, samples, seeds)
            found[f"{distribution} {step} {epoch}"] = (noised.noise, noised.levels)
    size = cfg.rollout.height, cfg.rollout.width
    schedule, _ = t.policy.model.schedule(cfg.rollout.num_inference_steps, *size)
    return found | {
        "of the model": (schedule[:-1], torch.tensor(t.policy.model.shift(cfg.rollout.num_inference_steps, *size)))
    }


def test_fresh_noise_is_a_function_of_the_sample(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path, "diffusion_nft", "algorithm.train_timesteps=3")
    one, two = run_ranks(fresh_noise, 1, cfg)[0], run_ranks(fresh_noise, 2, cfg)
    schedule, shift = one.pop("of the model")
    assert len(schedule) == 4 and shift == 3
    for what, (noise, levels) in one.items():
        for part, whole in enumerate((noise, levels)):
            assert torch.equal(torch.cat([rank[what][part] for rank in two]), whole), what
        # no two of the 16 images x 3 levels share their noise
        assert len({tuple(row.tolist()) for row in noise.flatten(0, 1).flatten(1)[:, :4]}) == 48
        if what.startswith("schedule"):
            assert all(len(set(row)) == 3 and set(row) <= set(schedule.tolist()) for row in levels.tolist())
            assert len({tuple(row) for row in levels.tolist()}) > 8  # of 24 orders
        else:
            assert len(set(levels.flatten().tolist())) == 48 and levels.min() > 0 and levels.max() < 1
    for distribution in ("schedule", "uniform", "logit_normal"):
        for other in ("0 1", "1 0"):
            for part in range(2):
                assert not torch.equal(one[f"{distribution} 0 0"][part], one[f"{distribution} {other}"][part])
    # one noise, whatever the levels: and the uniform levels are shifted as the model's schedule is
    assert torch.equal(one["schedule 0 0"][0], one["uniform 0 0"][0])


# --- the weights that sample

HALF = ("algorithm.old_decay_rate=0.5", "algorithm.old_decay_limit=0.5")  # old = 1/2 old + 1/2 policy after each step


def watched_fit(cfg: FlowRLConfig) -> dict[str, Any]:
    """Train two steps. Returns the weights and images of each rollout, the policy's weights before and after each step,
    and the rollout of step 1 under some of these.
    """
    from phalanx.run.rl import build

    t = build(cfg)
    sample, after_step = t.collector.rollout.sample, t.updater.follow
    policy, sampling, images = [full_weights(t.policy.trained.parameters)], [], []

    def watched_sample(*args: Any, **kwargs: Any) -> Any:
        sampling.append(full_weights(t.policy.trained.parameters))
        samples = sample(*args, **kwargs)
        images.append(samples.outputs)
        return samples

    def watched_after_step(step: int) -> None:
        policy.append(full_weights(t.policy.trained.parameters))
        after_step(step)

    t.collector.rollout.sample, t.updater.follow = watched_sample, watched_after_step  # type: ignore[method-assign,assignment]
    t.fit()
    again = {}
    for name, weights in (("old", sampling[1]), ("policy", policy[1])):
        t.policy.trained.add_weights("test", weights)
        with t.policy.using("test"), t.collector.rollout.awake():
            again[name] = sample(
                t.collector.prompts.batch(1), seed=cfg.trainer.seed, step=1, each=lambda *_: None
            ).outputs
    return {"policy": policy, "sampling": sampling, "images": images, "again": again}


@pytest.mark.quick("lora")
@pytest.mark.parametrize("kind", [(LORA,), ()], ids=["lora", "full"])
def test_the_old_policy_samples(kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path, "diffusion_nft", *HALF, *kind, "optim.lr=1e-2")
    seen = run_ranks(watched_fit, 1, cfg)[0]
    start, one, two = seen["policy"]
    for name, value in start.items():
        assert torch.equal(seen["sampling"][0][name], value)  # at first they are the policy's
        torch.testing.assert_close(seen["sampling"][1][name], (value + one[name]) / 2, rtol=1e-6, atol=1e-7)
    assert any((one[name] - value).abs().max() > 5e-3 for name, value in start.items())
    # training went on from the policy's own weights, not from those that had sampled
    assert max((two[name] - value).abs().max().item() for name, value in one.items()) <= 2.1 * 2 * 1e-2
    assert torch.equal(seen["images"][1], seen["again"]["old"])
    assert (seen["images"][1] - seen["again"]["policy"]).abs().max() > 1e-3


@pytest.mark.full
def test_without_a_memory_the_policy_samples(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path, "diffusion_nft", "algorithm.old_decay=zero", LORA)
    seen = run_ranks(watched_fit, 1, cfg)[0]
    for name, value in seen["policy"][1].items():
        assert torch.equal(seen["sampling"][1][name], value)


# --- resuming

STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2", "actor.ema.decay=0.9")


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without time and memory."""
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("perf/", "time/"))} for line in lines]


@pytest.mark.seldom("lora")
@pytest.mark.full
@pytest.mark.parametrize(("world", "kind"), [(1, ()), (2, (LORA,))], ids=["full", "lora"])
def test_resume_repeats_bit_for_bit(world: int, kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    """The old policy is in the checkpoint, and samples after the resume."""
    keys = (*HALF, *STEPS, *kind, "algorithm.kl_loss_coef=0.01", f"parallel.fsdp_size={world}")
    cfg = configure(sd3_folder, tmp_path, "diffusion_nft", *keys)
    unkilled = run_ranks(fit, world, cfg)[0]
    wanted = rows(tmp_path)
    assert [row["step"] for row in wanted] == [1, 2, 3, 4]
    checkpoints = tmp_path / "out" / "checkpoints"
    saved = FileSystemReader(checkpoints / "step_000002").read_metadata().state_dict_metadata
    assert {f"{part}.{name}" for name in unkilled for part in ("model", "ema", "old")} <= set(saved)
    shutil.rmtree(checkpoints / "step_000004")
    resumed = run_ranks(fit, world, cfg)[0]
    assert rows(tmp_path) == wanted
    for name, value in unkilled.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.full
def test_resume_refuses_a_run_without_the_old_policy(sd3_folder: Path, tmp_path: Path) -> None:
    run_ranks(fit, 1, configure(sd3_folder, tmp_path, "rwr", LORA, *STEPS))
    with pytest.raises(RankError) as error:
        run_ranks(fit, 1, configure(sd3_folder, tmp_path, "diffusion_nft", LORA, *STEPS))
    assert "holds other weights none, this run has old; give another trainer.output_dir" in str(error.value)
