"""Evaluation of a model: samples of held-out prompts with scores, on any number of ranks, and statistics of them.

Sample i of prompt j is a function of (seed, j, i) and the settings, as in validation; the ranks only share the work.
Records are written as they come, so that a job that was cut goes on where it ended.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config.lm import LMRunConfig
from phalanx.config.tasks import EvaluateConfig
from phalanx.distributed import mesh
from phalanx.distributed.collectives import all_gather, broadcast_object, gather_object
from phalanx.distributed.mesh import World
from phalanx.jobs.candidate import (
    Candidate,
    Parts,
    Sets,
    build_parts,
    differing,
    read_baseline,
    read_candidate,
    read_sets,
)
from phalanx.jobs.outputs import check_place, writing
from phalanx.media.videos import write_video
from phalanx.rewards.base import GivesAnswers
from phalanx.rewards.client import RewardClient
from phalanx.telemetry.evaluation import (
    ARGUMENTS,
    RECORDS,
    RESULT,
    Records,
    Wanted,
    read_records,
    result_of,
    table,
    write_json,
)
from phalanx.telemetry.evaluation_page import Side, write_page
from phalanx.telemetry.metrics import Timers
from phalanx.telemetry.records import CONVERSATION, TALKS, storable
from phalanx.training import folder_lock
from phalanx.training.collect import check_range
from phalanx.training.components import start
from phalanx.types import Outputs, Prompt

log = logging.getLogger(__name__)
LONGEST_CELL = 200  # characters of a column's value in records
# of the facts, what two evaluations that are compared must have in common
PAIRED = ("rollout.val.n", "rollout.val.seed", "reward.functions", "prompts")


@dataclass(frozen=True)
class Chunk:
    """Prompts of a set that all ranks sample together."""

    set_name: str
    prompts: list[Prompt]


class Evaluation:
    """The job: `Evaluation(cfg)` looks at all files, where a ValueError is a mistake of the user's; `run()` samples."""

    def __init__(self, cfg: EvaluateConfig) -> None:
        self.cfg = cfg
        self.candidate = read_candidate(cfg)
        self.wanted = Wanted(cfg.k, cfg.threshold, cfg.group_by)
        n = self.candidate.run.rollout.val.n
        if cfg.k is not None and max(cfg.k, default=0) > n:
            raise ConfigError(f"k: {max(cfg.k)} is more than the {n} samples per prompt; expected at most n={n}")
        self.sets = read_sets(self.candidate.run)
        if cfg.group_by is not None:
            _check_column(self.sets, cfg.group_by)
        self.folder = self._folder()
        check_place(self.folder, "output_dir")
        self.baseline: Candidate | None = None
        self.earlier: Path | None = None  # the folder of an evaluation in place of a baseline to sample
        if cfg.baseline is not None:
            folder = Path(cfg.baseline).expanduser()
            if (folder / ARGUMENTS).is_file():
                self.earlier = folder
            else:
                self.baseline = read_baseline(cfg, self.candidate)
        run = self.candidate.run
        run.trainer.output_dir = str(self.folder)
        stored = _stored(self.folder)
        if stored is not None:  # what the libraries or the day have chosen
            run.model.cpu_linear = run.model.cpu_linear or stored["facts"]["model"].get("cpu_linear")
            if isinstance(run, LMRunConfig):
                date = stored["facts"]["data"].get("chat_template_date")
                run.data.chat_template_date = run.data.chat_template_date or date
        try:
            self.world = start(run)
        except ValueError as error:
            raise ConfigError(str(error).replace("trainer.output_dir", "output_dir")) from error
        if self.baseline is not None:
            self.baseline.run.model.cpu_linear = self.baseline.run.model.cpu_linear or run.model.cpu_linear
        self._on_first(self._check_earlier)
        self.sampling = Sampling(cfg, self.candidate, self.world, self.sets, self.folder)
        self.before = None
        if self.baseline is not None:
            self.before = Sampling(cfg, self.baseline, self.world, self.sets, self.folder / "baseline")

    def run(self) -> None:
        """Sample and score what is lacking, and write the statistics on rank 0."""
        if self.before is not None:
            self.before.run()
        self.sampling.run()
        if self.world.rank == 0:
            with writing(self.folder, "output_dir"):
                self._finish()
        folder_lock.release()
        mesh.stop()

    def _finish(self) -> None:
        rows, others, baseline = read_records(self.folder / RECORDS), None, None
        folder = self.earlier or self.folder / "baseline"
        if self.cfg.baseline is not None:
            others, baseline = read_records(folder / RECORDS), self.cfg.baseline
        facts = _stored(self.folder)
        assert facts is not None, "it has just been written"
        head = {"model": self.candidate.name, "baseline": baseline, "arguments": facts["facts"]}
        result = result_of(rows, self.wanted, head, others)
        write_json(self.folder / RESULT, result)
        before = None if others is None else Side(others, folder)
        page = write_page(self.folder, result, Side(rows, self.folder), before)
        print(table(result), flush=True)
        print(f"{len(rows)} samples in {self.folder / RECORDS}, their statistics in {self.folder / RESULT}", flush=True)
        print(f"page: {page}", flush=True)

    def _folder(self) -> Path:
        cfg, trained = self.cfg, self.candidate.trained
        if cfg.output_dir is not None:
            return Path(cfg.output_dir).expanduser()
        if trained is not None:
            return trained.folder.parent.parent / "evaluation" / trained.policy / trained.folder.name
        return Path("outputs", "evaluation", Path(self.candidate.name).name)

    def _check_earlier(self) -> None:
        """Raise ConfigError for an earlier evaluation as the baseline that has other prompts, seeds or rewards."""
        if self.earlier is None:
            return
        stored, now = _stored(self.earlier), self.candidate.facts(self.sets)
        if stored is None or not stored["complete"]:
            raise ConfigError(f"baseline: the evaluation in {self.earlier} has not ended; run it to its end first")
        for key in PAIRED:
            problem = differing(_part(stored["facts"], key), _part(now, key))
            if problem is not None:
                raise ConfigError(
                    f"baseline: the evaluation in {self.earlier} has other samples: there {problem}; compare what has "
                    "the same prompts, seeds and rewards"
                )

    def _on_first(self, check: Any) -> None:
        """Call `check` on rank 0, and raise its ConfigError on all ranks."""
        problem = None
        if self.world.rank == 0:
            try:
                check()
            except ConfigError as error:
                problem = str(error)
        problem = broadcast_object(problem)
        if problem is not None:
            raise ConfigError(problem)


class Sampling:
    """The records of a candidate in `folder`: those that are there, and those that `run` adds."""

    def __init__(self, cfg: EvaluateConfig, candidate: Candidate, world: World, sets: Sets, folder: Path) -> None:
        self.cfg, self.candidate, self.world, self.sets, self.folder = cfg, candidate, world, sets, folder
        self.records, self.facts = Records(folder), candidate.facts(sets) | {"chunk": cfg.prompts_per_chunk}
        self.parts: Parts | None = None
        complete, problem = False, None
        if world.rank == 0:
            stored = _stored(folder)
            complete = stored is not None and stored["complete"]
            problem = None if stored is None else differing(stored["facts"], self.facts)
        complete, problem = broadcast_object((complete, problem))
        if problem is not None:
            raise ConfigError(
                f"output_dir: {folder} has an evaluation with other arguments: {problem}; give another output_dir"
            )
        self.complete = complete

    def run(self) -> None:
        """Sample and score what the folder lacks."""
        if self.complete:
            return
        self.parts = build_parts(self.candidate, self.world, self.sets)
        self.timers = Timers()
        run, rollout = self.candidate.run, self.parts.rollout
        self.client = RewardClient(run, self.world, self.parts.rewards, self.timers, rollout.noun)
        self.drawn: list[dict[str, Any]] = []  # of this rank's samples of a chunk, beside their scores
        chunks, n = self._chunks(self.parts.sets), run.rollout.val.n
        done = 0
        with writing(self.folder, "output_dir"):
            if self.world.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(self.folder / ARGUMENTS, {"facts": self.facts, "complete": False})
                done = self.records.keep([len(chunk.prompts) * n for chunk in chunks])
        done = broadcast_object(done)
        if done and self.world.rank == 0:
            log.info("going on behind %d of %d chunks in %s", done, len(chunks), self.folder)
        for number, chunk in enumerate(chunks[done:], start=done + 1):
            rows = self._sample(chunk)
            if self.world.rank == 0:
                with writing(self.folder, "output_dir"):
                    self.records.add(rows)
                log.info("%d of %d chunks: %d samples of %s", number, len(chunks), len(rows), chunk.set_name)
        if self.world.rank == 0:
            with writing(self.folder, "output_dir"):
                write_json(self.folder / ARGUMENTS, {"facts": self.facts, "complete": True})
        self.parts.close()
        self.parts = None

    def _chunks(self, sets: Sets) -> list[Chunk]:
        chunks, size = [], self.cfg.prompts_per_chunk
        for name, prompts in sets.items():
            for first in range(0, len(prompts), size):
                chunks.append(Chunk(name, prompts[first : first + size]))
        return chunks

    def _sample(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The rows of a chunk, on rank 0, in the order of its prompts and their samples."""
        assert self.parts is not None, "run has built them"
        world, prompts, n = self.world, chunk.prompts, self.candidate.run.rollout.val.n
        share = -(-len(prompts) // world.data_size)
        # ranks must do equal work, so the end is filled up with the last prompt and cut off again below
        local = [prompts[min(world.data_rank * share + j, len(prompts) - 1)] for j in range(share)]
        self.drawn, rollout = [], self.parts.rollout
        numbers = iter(range(world.data_rank * share * n, (world.data_rank + 1) * share * n))

        def each(outputs: Outputs, sampled: list[Prompt]) -> None:
            beside = []
            for prompt, output in zip(sampled, outputs, strict=True):
                place = next(numbers)
                row = {"set": chunk.set_name, "index": prompt.group_id, "sample": place % n}
                row |= {"prompt": prompt.text, "place": place}
                row |= self._text(prompt, output) if isinstance(output, str) else {}
                beside.append(row)
            if isinstance(outputs, Tensor):
                self._keep_pictures(outputs, beside, len(prompts) * n)
            self.drawn += beside
            self.client.submit(outputs, sampled)

        with rollout.awake():
            rollout.sample_validation(local, each=each)
        reward, terms = self.client.score()
        real = len(prompts) * n
        reward = all_gather(reward)[:real]
        check_range(reward)
        values = {name: all_gather(scores)[:real].tolist() for name, scores in terms.items()}
        rows = []
        for drawn in gather_object(self.drawn)[:: world.context_size]:
            rows += drawn
        for place, (row, prompt) in enumerate(zip(rows[:real], _repeated(prompts, n), strict=False)):
            assert row.pop("place") == place, "ranks are in order"
            row["reward"] = _finite(float(reward[place]))
            row["scores"] = {name: _finite(scores[place]) for name, scores in values.items()}
            row["columns"] = columns_of(prompt)
        return rows[:real]

    def _text(self, prompt: Prompt, output: str) -> dict[str, Any]:
        """The part of a record that is of a response."""
        assert self.parts is not None
        row: dict[str, Any] = {"text": storable(output), "tokens": prompt.meta.get("response_length")}
        row["truncated"] = prompt.meta.get("truncated", False)
        if TALKS in prompt.meta:
            # the time that it took is another one each time
            row |= storable({name: prompt.meta[name] for name in CONVERSATION if name != "environment_seconds"})
        answers: dict[str, str | None] = {}
        for term in self.parts.rewards.terms:
            if isinstance(term.function, GivesAnswers):
                answers[term.name] = term.function.answer(output)
        return row | ({"answers": answers} if answers else {})

    def _keep_pictures(self, outputs: Tensor, rows: list[dict[str, Any]], real: int) -> None:
        """Write a micro-batch of all ranks' pictures on rank 0, and their files into the rows."""
        assert self.parts is not None
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
                    (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                    if videos:
                        write_video(self.folder / file, picture, self.parts.rollout.fps)
                    else:
                        Image.fromarray(picture).save(self.folder / file)


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of a prompt's data that a record holds: short texts, numbers and truth values."""
    columns = {}
    for name, value in prompt.meta.items():
        if isinstance(value, bool | int | float | str) and len(str(value)) <= LONGEST_CELL:
            columns[name] = storable(value)
    return columns


def _check_column(sets: Sets, column: str) -> None:
    """Raise ConfigError for a prompt without a short value of the column."""
    for prompts in sets.values():
        for prompt in prompts:
            if column not in columns_of(prompt):
                held = ", ".join(columns_of(prompt)) or "none"
                raise ConfigError(
                    f"group_by: {prompt.place} has no number or short text in a column {column!r}; it has {held}"
                )


def _repeated(prompts: list[Prompt], n: int) -> list[Prompt]:
    return [prompt for prompt in prompts for _ in range(n)]


def _finite(value: float) -> float | None:
    return None if torch.tensor(value).isnan() else value


def _stored(folder: Path) -> dict[str, Any] | None:
    """The arguments of the evaluation in a folder; None without one, ConfigError for a file that is none."""
    file = folder / ARGUMENTS
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        content = None
    if not isinstance(content, dict) or not content.keys() >= {"facts", "complete"}:
        raise ConfigError(f"{file} is not the arguments of an evaluation; give another folder")
    return content


def _part(facts: dict[str, Any], key: str) -> dict[str, Any]:
    """The facts of one dotted key."""
    value: Any = facts
    for name in key.split("."):
        value = value[name]
    return {key: value}
