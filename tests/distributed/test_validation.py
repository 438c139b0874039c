"""Validation: every held-out prompt once across the ranks, with its own noise, equal on any number of ranks."""

import json
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from phalanx.config.flow import FlowRLConfig
from phalanx.config.run import RunConfig
from phalanx.run.validation import Validator
from phalanx.types import Prompt
from tests.helpers.checks import wait_for
from tests.helpers.jobs import PROMPTS, tiny_config
from tests.helpers.ranks import run_ranks

# it notes every prompt that it is asked for, and scores the brightness
REWARD = """
from pathlib import Path

def noted(images, prompts, metadata, *, file):
    with Path(file).open("a") as f:
        for prompt in prompts:
            f.write(prompt + "\\n")
    return images.mean(dim=(1, 2, 3))
"""


def configure(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "held_out.txt").write_text("\n".join(PROMPTS[:5]) + "\n")
    function = f"{{path: '{folder / 'reward.py'}:noted', kwargs: {{file: '{folder / 'asked.txt'}'}}}}"
    return tiny_config(
        model,
        folder,
        f"reward.functions=[{function}]",
        f"data.val_files=[{folder / 'held_out.txt'}]",
        "rollout.micro_batch_size_per_gpu=4",
        "rollout.val.num_inference_steps=3",
        *overrides,
    )


def validate(cfg: FlowRLConfig) -> dict[str, float]:
    from phalanx.run.rl import build

    trainer = build(cfg)
    with trainer.job.logger:
        return trainer.job.validate(0)


def pictures(folder: Path) -> list[Any]:
    images = folder / "out" / "images" / "held_out" / "step_000000"
    rows = [json.loads(line) for line in (images / "index.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS[:5]
    assert all(row["scores"] == {"noted": row["reward"]} for row in rows)
    return [np.asarray(Image.open(images / row["file"])) for row in rows]


def test_every_prompt_once_on_any_number_of_ranks(sd3_folder: Path, tmp_path: Path) -> None:
    rows, images = [], []
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        rows.append(run_ranks(validate, world, configure(sd3_folder, folder, "parallel.fsdp_size=1"))[0])
        images.append(pictures(folder))
        asked = (folder / "asked.txt").read_text().splitlines()
        # the last rank is filled up with the last prompt, which does not count twice
        assert set(asked) == set(PROMPTS[:5])
        assert len(asked) == world * -(-5 // world)
    assert rows[0] == rows[1] == rows[2]
    index = tmp_path / "1" / "out" / "images" / "held_out" / "step_000000" / "index.jsonl"
    rewards = np.array([json.loads(line)["reward"] for line in index.read_text().splitlines()])
    # Student's t of 4 degrees of freedom
    assert rows[0]["val/held_out/reward/ci95"] == pytest.approx(2.7764 * rewards.std(ddof=1) / 5**0.5, rel=1e-3)
    for other in images[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(images[0], other, strict=True))


def test_each_prompt_and_image_has_its_own_noise(sd3_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "same"
    cfg = configure(sd3_folder, folder, "rollout.val.n=2")
    (folder / "held_out.txt").write_text('"x"\n"x"\n')  # the same prompt twice
    row = run_ranks(validate, 1, cfg)[0]
    assert (folder / "asked.txt").read_text().splitlines() == ['"x"'] * 4
    assert row["val/held_out/reward/std"] > 0
    again = run_ranks(validate, 1, cfg)[0]
    assert again == row


def moved_and_average(cfg: FlowRLConfig) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    from phalanx.run.rl import build

    trainer = build(cfg)
    with trainer.job.logger:
        before = trainer.job.validate(0)
        with torch.no_grad():
            for p in trainer.policy.trained.parameters.values():
                p.add_(0.05)
        average = trainer.job.validate(1)  # the average has not moved
        assert trainer.job.state.ema is not None
        trainer.job.state.ema.after_update(10**6)
        return before, average, trainer.job.validate(2)


@pytest.mark.quick("lora")
@pytest.mark.parametrize("kind", [("model.lora_rank=4",), ()], ids=["lora", "full"])
def test_validation_uses_the_average(kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path, *kind, "actor.ema.decay=0.1")
    before, average, moved = run_ranks(moved_and_average, 1, cfg)[0]
    assert average == before
    assert moved != before


def around_other_weights(cfg: FlowRLConfig) -> None:
    from phalanx.run.rl import build

    trainer = build(cfg)

    def sample() -> torch.Tensor:
        with trainer.collector.rollout.awake():
            return trainer.collector.rollout.sample(
                trainer.collector.prompts.batch(0), seed=0, step=0, each=lambda *_: None
            ).trace.latents

    before = sample()
    assert trainer.job.state.ema is not None
    for average in trainer.job.state.ema.values.values():
        average.add_(0.05)
    for weights in ("ema", "reference"):
        with trainer.policy.using(weights):
            other = sample()
        assert torch.equal(other, before) == (weights == "reference")  # nothing was trained yet
        assert torch.equal(sample(), before)


@pytest.mark.seldom(
    "model.lora_rank=4-true-false",
    "model.lora_rank=4-false-true",
    "model.lora_rank=0-true-false",
    "model.lora_rank=0-false-true",
)
@pytest.mark.quick("model.lora_rank=0-false-false")
@pytest.mark.parametrize("gathered", ["true", "false"])
@pytest.mark.parametrize("reshard", ["true", "false"])
@pytest.mark.parametrize("kind", ["model.lora_rank=4", "model.lora_rank=0"])
def test_other_weights_leave_nothing_behind(
    kind: str, gathered: str, reshard: str, sd3_folder: Path, tmp_path: Path
) -> None:
    """Gathered weights must not outlive the shards that they were gathered from."""
    keys = [kind, "actor.ema.decay=0.9", "algorithm.kl_loss_coef=0.1", "parallel.fsdp_size=2"]
    keys += [f"parallel.rollout_unsharded={gathered}", f"parallel.reshard_after_forward={reshard}"]
    run_ranks(around_other_weights, 2, configure(sd3_folder, tmp_path, *keys))


def overlap(cfg: FlowRLConfig) -> tuple[float, float, list[tuple[float, float]]]:
    import time

    from phalanx.run.rl import build

    trainer = build(cfg)
    submitted: list[float] = []

    def each(images: torch.Tensor, prompts: Any) -> None:
        rewards = trainer.collector.rewards.rewards
        if cfg.reward.overlap and len(submitted) == 3:
            assert rewards is not None and rewards._calls[0].task is not None
            wait_for(
                rewards._calls[0].task.done
            )  # the last one is sampled for long enough, however busy the machine is
        submitted.append(time.perf_counter())
        trainer.collector.rewards.submit(images, prompts)

    with trainer.collector.rollout.awake():
        trainer.collector.rollout.sample(trainer.collector.prompts.batch(0), seed=0, step=0, each=each)
    trainer.collector.rewards.score()
    assert trainer.collector.rewards.rewards is not None
    return submitted[0], submitted[-1], trainer.collector.rewards.rewards.spans


def test_rewards_are_scored_while_the_next_micro_batch_is_sampled(sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path)
    first, last, spans = run_ranks(overlap, 1, cfg)[0]
    assert len(spans) == 4  # micro-batches
    # the first one was scored between its own end and that of the last
    assert first <= spans[0][0] and spans[0][1] < last
    serial = configure(sd3_folder, tmp_path, "reward.overlap=false")
    _, last, spans = run_ranks(overlap, 1, serial)[0]
    assert all(start >= last for start, _ in spans)


VIDEO = (8, 3, 512, 512)  # frames and channels first: 6.3 MB as bytes, 25 MB as floats


class Shades:
    """A rollout of two videos per prompt, each with a uniform shade."""

    fps = 8

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sample_validation(self, prompts: list[Prompt], *, each: Callable[[Tensor, list[Prompt]], None]) -> None:
        for p in prompts:
            for j in range(2):
                each(torch.full((1, *VIDEO), shade(p.group_id, j) / 255), [p])


def shade(prompt: int, j: int) -> int:
    return 20 * prompt + 100 * j


def kept(rollout: Any, reward: Callable[[Any], list[float]], keep: int) -> tuple[dict[str, float], list[Any]]:
    """The metrics of a validation of five prompts with two samples each, and the samples it keeps."""
    cfg = RunConfig()
    cfg.trainer.log_val_generations, cfg.rollout.val.n = keep, 2
    rewards: list[float] = []
    rank = dist.get_rank()
    world = SimpleNamespace(rank=rank, data_rank=rank, data_size=dist.get_world_size(), context_size=1)
    client = SimpleNamespace(
        submit=lambda outputs, sampled: rewards.extend(reward(outputs)),
        score=lambda: (torch.tensor(rewards), {}),
        forgives=False,
    )
    unused = cast(Any, None)
    validator = Validator(cfg, cast(Any, world), unused, rollout, cast(Any, client), {}, unused)
    return validator.validate_set("set", [Prompt(f"prompt {i}", i, {}) for i in range(5)], nullcontext())


def kept_videos(keep: int) -> tuple[list[tuple[str, int, float, list[int]]], int]:
    """The kept samples with their shades, and the growth of this rank's memory in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, records = kept(Shades(), lambda videos: videos.mean(dim=(1, 2, 3, 4)).tolist(), keep)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    for record in records:
        assert record.frames.shape == (8, 512, 512, 3) and record.fps == 8
    return [(r.prompt, r.index, r.reward, np.unique(r.frames).tolist()) for r in records], grown


@pytest.mark.quick("4")
@pytest.mark.parametrize("keep", [4, 9])
def test_the_first_video_of_a_prompt_is_kept_on_rank_0(keep: int) -> None:
    expected = [(f"prompt {i}", i, pytest.approx(20 * i / 255), [20 * i]) for i in range(min(keep, 5))]
    for world in (1, 2, 4, 8):
        first, *others = run_ranks(kept_videos, world, keep)
        assert first[0] == expected
        assert all(rest == [] for rest, _ in others)


def test_rank_0_holds_no_more_than_it_keeps() -> None:
    """For any number of ranks, even if one of them has sampled all kept samples."""
    (_, grown), *_ = run_ranks(kept_videos, 4, 2)
    assert grown < 150e6  # two videos as bytes, and one as floats a few times over while it is made


class Letters:
    """A rollout of two completions per prompt, in micro-batches of three, of unequal lengths."""

    fps = 1

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sample_validation(self, prompts: list[Prompt], *, each: Callable[[list[str], list[Prompt]], None]) -> None:
        both = [(completion(p.group_id, j), p) for p in prompts for j in range(2)]
        for start in range(0, len(both), 3):
            texts, sampled = zip(*both[start : start + 3], strict=True)
            each(list(texts), list(sampled))


def completion(prompt: int, j: int) -> str:
    return "語" * prompt if j == 0 else "the second"


def kept_texts(keep: int) -> list[tuple[str, int, float, Any]]:
    row, records = kept(Letters(), lambda texts: [float(len(text)) for text in texts], keep)
    assert row["val/set/reward/mean"] == (0 + 1 + 2 + 3 + 4 + 5 * len("the second")) / 10
    return [(r.prompt, r.index, r.reward, r.output) for r in records]


@pytest.mark.parametrize("keep", [0, 4, 9])
def test_the_first_completion_of_a_prompt_is_kept_on_rank_0(keep: int) -> None:
    expected = [(f"prompt {i}", i, float(i), "語" * i) for i in range(min(keep, 5))]
    for world in (1, 2, 4, 8):
        first, *others = run_ranks(kept_texts, world, keep)
        assert first == expected
        assert others == [[]] * (world - 1)
