"""Validation: every held-out prompt once across the ranks, with the same noise each time."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.distributed.collectives import all_gather, gather_object, to_first
from phalanx.distributed.mesh import World
from phalanx.telemetry.records import Output, Record
from phalanx.types import Each, Outputs, Policy, Prompt, Rollout

Score = Callable[[], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Validation:
    """The result for one set: `row` of metrics, and on rank 0 the samples that are kept."""

    row: dict[str, float]
    records: list[Record]


def validate(
    policy: Policy,
    rollout: Rollout,
    submit: Each,
    score: Score,
    name: str,
    prompts: list[Prompt],
    world: World,
    *,
    samples_per_prompt: int,
    keep: int,
    fps: int,
    ema: bool,
) -> Validation:
    """Sample and score one set, and keep the first sample of each of the first `keep` prompts.

    `score()` returns this rank's rewards and terms for what `submit` was given. `fps` is that of
    videos.
    """
    share = -(-len(prompts) // world.size)
    # ranks must do equal work, so the end is filled up with the last prompt and cut off again below
    mine = [prompts[min(world.rank * share + j, len(prompts) - 1)] for j in range(share)]
    pictures: dict[int, Tensor] = {}  # of this rank's prompts, by their numbers
    texts: dict[int, str] = {}

    def each(outputs: Outputs, sampled: list[Prompt]) -> None:
        for prompt, output in zip(sampled, outputs, strict=True):
            number = prompt.group_id
            if number >= keep or number // share != world.rank:
                continue
            # a prompt's samples come one after the other, its first one first
            if isinstance(output, str):
                texts.setdefault(number, output)
            elif number not in pictures:
                # floats would take four times the memory until the end
                pictures[number] = (output * 255).round_().byte().movedim(-3, -1).contiguous()
        submit(outputs, sampled)

    with policy.using("ema") if ema else nullcontext(), rollout.awake():
        rollout.sample_validation(mine, each=each)
    local_reward, local_terms = score()
    real = len(prompts) * samples_per_prompt
    reward = all_gather(local_reward)[:real]
    row = {f"val/{name}/reward/mean": reward.mean().item(), f"val/{name}/reward/std": reward.std(correction=0).item()}
    for term, values in local_terms.items():
        row[f"val/{name}/reward/{term}"] = all_gather(values)[:real].mean().item()
    kept = _on_first(pictures, texts, min(keep, len(prompts)), share, world)
    records = [
        Record(prompts[number].text, float(reward[number * samples_per_prompt]), output, number, fps)
        for number, output in enumerate(kept)
    ]
    return Validation(row, records)


def _on_first(pictures: dict[int, Tensor], texts: dict[int, str], count: int, share: int, world: World) -> list[Output]:
    """On rank 0 the `count` outputs that all ranks kept, in the order of prompts; else nothing."""
    # pictures go one at a time, as a gather would hold room for those of every rank; texts are small
    if world.rank != 0:
        for number in sorted(pictures):
            to_first(pictures[number], world.rank)
        gather_object(texts)
        return []
    for number in range(len(pictures), count if pictures else 0):
        pictures[number] = torch.empty_like(pictures[0])
        to_first(pictures[number], number // share)
    for part in gather_object(texts):
        texts |= part
    outputs: dict[int, Output] = {number: picture.numpy() for number, picture in pictures.items()}
    outputs |= texts
    return [outputs[number] for number in range(len(outputs))]
