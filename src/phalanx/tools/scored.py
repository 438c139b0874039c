"""The samples of an evaluation: sampled and scored on all ranks, and written chunk by chunk."""

import gc
import logging
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config.files import json_object
from phalanx.config.inside import make_inside, read_inside, write_inside
from phalanx.config.messages import ConfigError, told_as
from phalanx.config.tasks import EvaluateConfig
from phalanx.data.prompts import share_of_rank
from phalanx.distributed.collectives import all_gather, broadcast_object, from_first, gather_object
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.functional.advantage import check_range
from phalanx.media.pictures import encode_image
from phalanx.media.videos import encode_video
from phalanx.rewards.base import GivesAnswers
from phalanx.rewards.client import RewardClient, without_filling
from phalanx.rewards.judge_pool import Answers
from phalanx.rewards.runner import RewardSet
from phalanx.run.kind import Sets
from phalanx.run.outputs import writing
from phalanx.telemetry.records import CONVERSATION, TALKS, finite_or_none, storable
from phalanx.telemetry.timers import Timers
from phalanx.tools.board.evaluation_files import ARGUMENTS, append_records, each_record, keep_chunks, write_json
from phalanx.tools.candidate import Candidate, build_parts, differing
from phalanx.types import JobError, Outputs, Prompt

log = logging.getLogger(__name__)
MOST_ARGUMENTS = 1 << 22  # bytes of an arguments.json
LONGEST_CELL = 200  # maximum characters of a column's value that is copied to the records


class Sampling:
    """Completes the records of a candidate in `folder`. `key` names the model in messages; `before`: the sampling of
    another model, whose rewards and reward model are reused.
    """

    def __init__(
        self,
        cfg: EvaluateConfig,
        candidate: Candidate,
        world: World,
        sets: Sets,
        folder: Path,
        key: str = "model.path",
        before: "Sampling | None" = None,
    ) -> None:
        self.key, self.before = key, before
        self.cfg, self.candidate, self.world, self.sets, self.folder = cfg, candidate, world, sets, folder
        self.facts = candidate.facts(sets) | {"chunk": cfg.prompts_per_chunk}
        self.parts: Any = None
        self.rewards: RewardSet | None = None
        self._kept = ""  # description of the completed chunks
        self.complete = from_first(self._is_complete)

    def _is_complete(self) -> bool:
        """Whether the folder contains all records. Raises ValueError if it contains others, or damaged ones."""
        stored = stored_in(self.folder)
        if stored is None:
            return False
        problem = differing(stored["facts"], self.facts)
        if problem is not None:
            raise ConfigError(
                f"output_dir: {self.folder} has an evaluation with other arguments: {problem}; give another output_dir"
            )
        return is_complete(self.folder, stored)

    def build(self) -> None:
        """Load the model and the rewards. Raises ValueError for the user's mistakes."""
        with told_as(ValueError, key=("model.path: ", f"{self.key}: ")):
            before = None if self.before is None else self.before.rewards
            self.parts = build_parts(self.candidate, self.world, self.sets, before)
            self.rewards = self.parts.rewards

    def run(self) -> None:
        """Sample and score the chunks that the folder lacks."""
        if self.complete:
            return
        with told_as(JobError):
            if self.parts is None:
                self.build()
        assert self.parts is not None, "built above or before"
        run, noun = self.candidate.run, self.parts.rollout.noun
        self.client = RewardClient(run, self.world, self.parts.rewards, Timers(), noun, on_stop=self._raise_stopped)
        chunks, n = list[tuple[str, list[Prompt]]](), run.rollout.val.n  # that all ranks sample together, by set
        for name, prompts in self.parts.val_sets.items():
            for first in range(0, len(prompts), self.cfg.prompts_per_chunk):
                chunks.append((name, prompts[first : first + self.cfg.prompts_per_chunk]))
        sizes = [len(prompts) * n for _, prompts in chunks]
        done = 0
        with writing(self.folder, "output_dir"):
            if self.world.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(self.folder, ARGUMENTS, {"facts": self.facts, "complete": False})
                done = keep_chunks(self.folder, sizes)
        done = broadcast_object(done)
        if done and self.world.rank == 0:
            log.info("resuming after %d of %d chunks in %s", done, len(chunks), self.folder)
        for number, (set_name, prompts) in enumerate(chunks[done:], start=done + 1):
            self._kept = f"{number - 1} of {len(chunks)} chunks of prompts"
            rows = self._sample_chunk(self.parts, set_name, prompts)
            if self.world.rank == 0:
                with writing(self.folder, "output_dir"):
                    append_records(self.folder, rows)
                log.info("%d of %d chunks: %d samples of %s", number, len(chunks), len(rows), set_name)
        if self.world.rank == 0:
            with writing(self.folder, "output_dir"):
                write_json(self.folder, ARGUMENTS, {"facts": self.facts, "complete": True, "samples": sum(sizes)})
        self.parts.rollout.close()
        self.parts = None
        gc.collect()  # the memory is for another model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _raise_stopped(self, number: int) -> None:
        self.world.watch.close()
        raise Stopped(number, f" after {self._kept}; the same command resumes from {self.folder}")

    def _sample_chunk(self, parts: Any, set_name: str, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Sample and score a chunk; returns its rows on rank 0, ordered by prompt and sample."""
        world, n = self.world, self.candidate.run.rollout.val.n
        local = share_of_rank(prompts, world.data_rank, world.data_size)
        share, rollout = len(local), parts.rollout
        drawn: list[dict[str, Any]] = []  # records of this rank's samples, without scores
        numbers = iter(range(world.data_rank * share * n, (world.data_rank + 1) * share * n))

        def each(outputs: Outputs, sampled: list[Prompt]) -> None:
            beside, places = [], list(islice(numbers, len(sampled)))
            for prompt, output, place in zip(sampled, outputs, places, strict=True):
                row = {"set": set_name, "index": prompt.group_id, "sample": place % n}
                row |= {"prompt": prompt.text, "place": place}
                row |= _text_fields(parts.rewards, prompt, output) if isinstance(output, str) else {}
                beside.append(row)
            if isinstance(outputs, Tensor):
                self._keep_pictures(outputs, rollout.fps, beside, len(prompts) * n)
            drawn.extend(beside)
            self.client.submit(outputs, without_filling(sampled, places[0], len(prompts) * n))

        with rollout.awake():
            rollout.sample_validation(local, each=each)
        reward, terms = self.client.score()
        real = len(prompts) * n
        reward = all_gather(reward)[:real]
        check_range(reward)
        values = {name: all_gather(scores)[:real].tolist() for name, scores in terms.items()}
        rows: list[dict[str, Any]] = []
        judged = gather_object(parts.rewards.answers)
        for rank, of_rank in list(enumerate(gather_object(drawn)))[:: world.context_size]:
            rows += _with_answers(of_rank, judged[rank : rank + world.context_size])
        for place, row in enumerate(rows[:real]):
            assert row.pop("place") == place, "ranks are in order"
            row["reward"] = finite_or_none(float(reward[place]))
            row["scores"] = {name: finite_or_none(scores[place]) for name, scores in values.items()}
            row["columns"] = columns_of(prompts[place // n])
        return rows[:real]

    def _keep_pictures(self, outputs: Tensor, fps: int, rows: list[dict[str, Any]], real: int) -> None:
        """Write the images or videos of a micro-batch of all ranks on rank 0, and add their file names to the rows."""
        videos = outputs.ndim == 5
        for row in rows:
            row["file"] = f"images/{row['set']}/{row['index']:05d}_{row['sample']}.{'mp4' if videos else 'png'}"
        pixels = (outputs * 255).round().byte().movedim(-3, -1).numpy()
        shown = [(row["place"], row["file"], picture) for row, picture in zip(rows, pixels, strict=True)]
        for of_rank in gather_object(shown)[:: self.world.context_size]:
            for place, file, picture in of_rank:
                if place >= real:
                    continue
                with writing(self.folder, "output_dir"):
                    make_inside(self.folder, str(Path(file).parent))
                    content = encode_video(picture, fps) if videos else encode_image(picture)
                    write_inside(self.folder, file, content)


def _text_fields(rewards: RewardSet, prompt: Prompt, output: str) -> dict[str, Any]:
    """The fields of a record that describe a response."""
    row: dict[str, Any] = {"text": storable(output), "tokens": prompt.meta.get("response_length")}
    row["truncated"] = prompt.meta.get("truncated", False)
    if TALKS in prompt.meta:
        # without the time, which differs each time
        row |= storable({name: prompt.meta[name] for name in CONVERSATION if name != "environment_seconds"})
    answers: dict[str, str | None] = {}
    for term in rewards.terms:
        if isinstance(term.function, GivesAnswers):
            answers[term.name] = term.function.answer(output)
    return row | ({"answers": answers} if answers else {})


def _with_answers(drawn: list[dict[str, Any]], judged: list[Answers]) -> list[dict[str, Any]]:
    """Add the judges' answers to the rows of samples; `judged` has the answers on each rank that scored them. Sample i
    was scored by rank i % len(judged).
    """
    for name in judged[0]:
        for i, row in enumerate(drawn):
            of_rank = judged[i % len(judged)][name]
            frames = len(of_rank) // len(drawn[i % len(judged) :: len(judged)])
            first = i // len(judged) * frames
            row.setdefault("judged", {})[name] = list(chain.from_iterable(of_rank[first : first + frames]))
    return drawn


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of a prompt's data that are copied to its records: short texts, numbers and booleans."""
    columns = {}
    for name, value in prompt.meta.items():
        if isinstance(value, bool | int | float | str) and len(str(value)) <= LONGEST_CELL:
            columns[name] = storable(value)
    return columns


def stored_in(folder: Path) -> dict[str, Any] | None:
    """The arguments of the evaluation in a folder, None if there is none; raises ConfigError for an invalid file."""
    try:
        content = json_object(read_inside(folder, ARGUMENTS, MOST_ARGUMENTS))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{folder / ARGUMENTS} cannot be read: {error.strerror}; give another folder") from None
    if content is None or not content.keys() >= {"facts", "complete"} or not isinstance(content["facts"], dict):
        raise ConfigError(f"{folder / ARGUMENTS} does not contain the arguments of an evaluation; give another folder")
    return content


def is_complete(folder: Path, stored: dict[str, Any]) -> bool:
    """Whether an evaluation has all its records; raises ValueError if one is damaged."""
    count = sum(1 for _ in each_record(folder, is_cut=True))
    return stored["complete"] is True and count == stored.get("samples")
