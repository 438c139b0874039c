"""Validation: sample and score every held-out prompt on one of the ranks, with the same noise each time."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config.run import RunConfig
from phalanx.data.prompts import share_of_rank
from phalanx.distributed.collectives import all_gather, gather_object, to_first
from phalanx.distributed.mesh import World
from phalanx.functional.advantage import check_range
from phalanx.functional.statistics import in_unit_range, mean_interval
from phalanx.rewards.client import RewardClient, without_filling
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.telemetry.records import CONVERSATION, TALKS, Output, Record, Thumbnail, storable
from phalanx.telemetry.step_metrics import reward_by_turns
from phalanx.telemetry.timers import Timers
from phalanx.training.components import Records
from phalanx.types import KeepsSamples, Outputs, Policy, Prompt, Rollout

Kept = tuple[Output, dict[str, Any]]  # an output, and further fields of its Record

log = logging.getLogger(__name__)


class Validator:
    """Validates with all ranks of its world: see phalanx.training.components.Sampling."""

    def __init__(
        self,
        cfg: RunConfig,
        world: World,
        policy: Policy,
        rollout: Rollout,
        rewards: RewardClient,
        val_sets: dict[str, list[Prompt]],
        timers: Timers,
    ) -> None:
        """val_sets: held-out prompts by name."""
        self.cfg, self.world, self.policy, self.rollout = cfg, world, policy, rollout
        self.rewards, self.val_sets, self.timers = rewards, val_sets, timers
        self.keeps = rollout if isinstance(rollout, KeepsSamples) else None

    @property
    def validates(self) -> int:
        """Number of held-out prompts of all sets."""
        return sum(map(len, self.val_sets.values()))

    def begin(self, step: int, total_steps: int, kept: Sequence[Tensor]) -> None:
        """Hand a checkpoint's samples in flight to the rollout, if it keeps samples."""
        if self.keeps is not None:
            self.keeps.begin(step, kept)
        elif kept and self.world.rank == 0:
            log.warning("the checkpoint's samples in flight are dropped: in this run each step draws its own samples")

    def validate(self, step: int, weights: str | None) -> tuple[dict[str, float], Records]:
        """Validate on all sets with these weights (None: the policy's own). Returns the metrics and, on rank 0, the
        samples to keep of each set.
        """
        row: dict[str, float] = {}
        kept: Records = {}
        for name, prompts in self.val_sets.items():
            samples = -(-len(prompts) // self.world.data_size) * self.cfg.rollout.val.n  # per rank
            self.timers.expect(-(-samples // self.rollout.micro_batch_size))
            context = nullcontext() if weights is None else self.policy.using(weights)
            metrics, kept[name] = self.validate_set(name, prompts, context)
            row |= metrics
            if self.rewards.forgives:
                row |= self.rewards.take_errors(f"val/{name}/")
        return row, kept

    def validate_set(
        self, name: str, prompts: list[Prompt], weights: AbstractContextManager[None]
    ) -> tuple[dict[str, float], list[Record]]:
        """Sample and score the set `name` within the context `weights`. Returns its metrics and, on rank 0, the samples
        to keep: the first sample of each of the first trainer.log_val_generations prompts.
        """
        world, rollout = self.world, self.rollout
        keep, n = self.cfg.trainer.log_val_generations, self.cfg.rollout.val.n
        local = share_of_rank(prompts, world.data_rank, world.data_size)
        share = len(local)
        pictures: dict[int, Tensor] = {}  # prompt number -> sample to keep
        texts: dict[int, Kept] = {}
        turns: list[int] = []  # number of turns of each of this rank's samples, if they are conversations
        numbers = iter(range(world.data_rank * share * n, (world.data_rank + 1) * share * n))

        def each(outputs: Outputs, sampled: list[Prompt]) -> None:
            first, *_ = islice(numbers, len(sampled))
            for prompt, output in zip(sampled, outputs, strict=True):
                if TALKS in prompt.meta:
                    turns.append(prompt.meta["turns"])
                number = prompt.group_id
                if number >= keep or _holding_rank(number, share, world) != world.rank:
                    continue
                # the first sample of a prompt arrives first; only that one is kept
                if isinstance(output, str):
                    beside = {"truncated": prompt.meta.get("truncated", False)}
                    if TALKS in prompt.meta:  # a conversation, whose last turn is the output
                        beside["conversation"] = storable({name: prompt.meta[name] for name in CONVERSATION})
                    texts.setdefault(number, (output, beside))
                elif number not in pictures:
                    # as bytes, since floats would take four times the memory
                    pictures[number] = (output * 255).round_().byte().movedim(-3, -1).contiguous()
            self.rewards.submit(outputs, without_filling(sampled, first, len(prompts) * n))

        with weights, rollout.awake():
            rollout.sample_validation(local, each=each)
        local_reward, local_terms = self.rewards.score()
        real = len(prompts) * n
        reward = all_gather(local_reward)[:real]
        check_range(reward)
        scored = ~reward.isnan()  # samples may lack a reward, depending on reward.on_error
        known = reward[scored]
        row = {f"val/{name}/reward/mean": known.mean().item(), f"val/{name}/reward/std": known.std(correction=0).item()}
        of_prompts = reward.double().view(-1, n).nanmean(1)
        mean = mean_interval(of_prompts[~of_prompts.isnan()].numpy(), unit=in_unit_range(known.double().numpy()))
        if mean.low is not None and mean.high is not None:
            row[f"val/{name}/reward/ci95"] = (mean.high - mean.low) / 2
            row[f"val/{name}/reward/ci95_low"] = mean.low
        terms = {term: all_gather(values)[:real] for term, values in local_terms.items()}
        for term, values in terms.items():
            row[f"val/{name}/reward/{term}"] = values[scored].mean().item()
        if turns:
            counts = all_gather(torch.tensor(turns))[:real]
            talks = {"conversation/turns_mean": counts.float().mean().item()} | reward_by_turns(reward, counts)
            row |= {f"val/{name}/{key}": value for key, value in talks.items()}
        kept = _on_first(pictures, texts, min(keep, len(prompts)), share, world)
        records = []
        for number, (output, beside) in enumerate(kept):
            scores = {term: float(values[number * n]) for term, values in terms.items()}
            prompt, truth = prompts[number], None
            if isinstance(output, str) and "ground_truth" in prompt.meta:
                truth = str(prompt.meta["ground_truth"])
            value = float(reward[number * n])
            shown = tuple(map(Thumbnail.of, prompt.images))
            records.append(
                Record(prompt.text, value, output, number, rollout.fps, scores, truth, images=shown, **beside)
            )
        return row, records

    def in_flight(self, step: int) -> Tensor | None:
        """See Sampling: the samples in flight of a rollout that keeps some."""
        return None if self.keeps is None or self.world.rank else self.keeps.in_flight(step)

    def held(self, step: int) -> list[Tensor]:
        """See Sampling."""
        return [] if self.keeps is None else [self.keeps.in_flight(step)]

    def drawing(self, step: int) -> list[Tensor]:
        """See Sampling; nothing is drawn ahead."""
        return []

    def end(self, stop: int = 0) -> None:
        """Close the rollout; there are no ranks of other roles."""
        self.rollout.close()


def _holding_rank(number: int, share: int, world: World) -> int:
    """The rank that keeps the sample of a prompt: the first of the context-parallel ranks that have it."""
    return number // share * world.context_size


def _on_first(pictures: dict[int, Tensor], texts: dict[int, Kept], count: int, share: int, world: World) -> list[Kept]:
    """On rank 0: the `count` outputs that all ranks kept, in the order of prompts; on other ranks an empty list."""
    # images are sent one at a time, since a gather would allocate room for those of all ranks; texts are small
    if world.rank != 0:
        for number in sorted(pictures):
            to_first(pictures[number], world.rank)
        gather_object(texts)
        return []
    for number in range(len(pictures), count if pictures else 0):
        pictures[number] = torch.empty_like(pictures[0])
        to_first(pictures[number], _holding_rank(number, share, world))
    for part in gather_object(texts):
        texts |= part
    outputs = dict(texts)
    for number, picture in pictures.items():
        outputs[number] = picture.numpy(), {}
    return [outputs[number] for number in range(len(outputs))]


def validation_summary(folder: Path) -> list[str]:
    """One line per validation set, with the first and the last mean reward in a run's metrics.jsonl."""
    points_of: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(folder / METRICS_FILE):
        for key, value in row.items():
            if key.startswith("val/") and key.endswith("/reward/mean"):
                points_of.setdefault(key, []).append((row["step"], value))
    lines = []
    for key, points in points_of.items():
        ends = points[:1] if len(points) == 1 else [points[0], points[-1]]
        lines.append(f"{key}: " + " -> ".join(f"{value:.3f} (step {step})" for step, value in ends))
    return lines
