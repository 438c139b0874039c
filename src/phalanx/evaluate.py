"""Validation: every held-out prompt once across the ranks, with its own noise, the same at each validation."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from phalanx.distributed.collectives import all_gather, gather_object
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
    kept: list[tuple[Prompt, Tensor]] = []

    def each(images: Tensor, sampled: list[Prompt]) -> None:
        kept.extend((p, image) for p, image in zip(sampled, images, strict=True) if p.group_id < keep_images)
        submit(images, sampled)

    with policy.using("ema") if ema else nullcontext(), rollout.awake():
        rollout.sample_validation(mine, each=each)
    local_reward, local_terms = score()
    real = len(prompts) * images_a_prompt
    reward = all_gather(local_reward)[:real]
    row = {f"val/{name}/reward/mean": reward.mean().item(), f"val/{name}/reward/std": reward.std(correction=0).item()}
    for term, values in local_terms.items():
        row[f"val/{name}/reward/{term}"] = all_gather(values)[:real].mean().item()
    pixels = [(p.text, p.group_id, (image * 255).round().byte().permute(1, 2, 0).numpy()) for p, image in kept]
    records: dict[int, ImageRecord] = {}
    for text, number, image in (entry for part in gather_object(pixels) for entry in part):
        first = float(reward[number * images_a_prompt])
        records.setdefault(number, ImageRecord(prompt=text, reward=first, image=image, index=number))
    return Validation(row, [records[number] for number in sorted(records)])
