"""Validation: every held-out prompt once across the ranks, with its own noise, the same at each validation."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.distributed.collectives import all_gather, to_first
from phalanx.distributed.mesh import World
from phalanx.images import ImageRecord
from phalanx.types import Policy, Prompt, Rollout

Submit = Callable[[Tensor, list[Prompt]], None]
Score = Callable[[], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Validation:
    """The result for one set: `row` of metrics, and on rank 0 the first images."""

    row: dict[str, float]
    images: list[ImageRecord]


def validate(
    policy: Policy,
    rollout: Rollout,
    submit: Submit,
    score: Score,
    name: str,
    prompts: list[Prompt],
    world: World,
    *,
    images_a_prompt: int,
    keep_images: int,
    ema: bool,
) -> Validation:
    """Sample and score one set. `score()` returns this rank's rewards and terms for what `submit` was given."""
    share = -(-len(prompts) // world.size)
    # ranks must do equal work, so the end is filled up with the last prompt and cut off again below
    mine = [prompts[min(world.rank * share + j, len(prompts) - 1)] for j in range(share)]
    kept: dict[int, Tensor] = {}  # of this rank's prompts among the first, the first image, which comes first

    def each(images: Tensor, sampled: list[Prompt]) -> None:
        for p, image in zip(sampled, images, strict=True):
            if p.group_id < keep_images and p.group_id // share == world.rank and p.group_id not in kept:
                kept[p.group_id] = (image * 255).round_().byte().movedim(-3, -1).contiguous()
        submit(images, sampled)

    with policy.using("ema") if ema else nullcontext(), rollout.awake():
        rollout.sample_validation(mine, each=each)
    local_reward, local_terms = score()
    real = len(prompts) * images_a_prompt
    reward = all_gather(local_reward)[:real]
    row = {f"val/{name}/reward/mean": reward.mean().item(), f"val/{name}/reward/std": reward.std(correction=0).item()}
    for term, values in local_terms.items():
        row[f"val/{name}/reward/{term}"] = all_gather(values)[:real].mean().item()
    records = []
    for number, prompt in enumerate(prompts[:keep_images]):
        owner = number // share
        if world.rank == 0 and owner != 0:
            kept[number] = torch.empty_like(kept[0])
        if world.rank in (0, owner):
            to_first(kept[number], owner)
        if world.rank == 0:
            first = float(reward[number * images_a_prompt])
            image = kept[number].numpy()
            records.append(ImageRecord(prompt.text, first, image, index=number, fps=policy.model.fps))
    return Validation(row, records)
