"""Evaluation of a model: sample and score held-out prompts on any number of ranks, and compute statistics.

Sample i of prompt j is a function of (seed, j, i) and the settings, as in validation, and does not depend on the number
of ranks. Records are written chunk by chunk, so that an interrupted job resumes where it ended.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from phalanx.config.inside import status_inside
from phalanx.config.messages import ConfigError, reason, told_as
from phalanx.config.secrets import hide
from phalanx.config.tasks import EvaluateConfig
from phalanx.distributed.collectives import broadcast_object, from_first
from phalanx.exit import Stopped
from phalanx.rewards.registry import asks_model
from phalanx.run import folder_lock
from phalanx.run.kind import Sets
from phalanx.run.outputs import check_place, place_in_run, refuse_link, writing
from phalanx.run.start import fitting_sets, start_job
from phalanx.run.usable_images import usable_images
from phalanx.run.world import stop_world
from phalanx.telemetry.loggers import setting
from phalanx.tools.board.evaluation import result_of, table
from phalanx.tools.board.evaluation_files import (
    ARGUMENTS,
    ENDED,
    RECORDS,
    RESULT,
    Row,
    each_record,
    read_records,
    write_json,
)
from phalanx.tools.board.evaluation_page import Side, write_page
from phalanx.tools.candidate import Candidate, differing, read_baseline, read_candidate, read_sets
from phalanx.tools.scored import Sampling, columns_of, is_complete, stored_in
from phalanx.types import JobError

log = logging.getLogger(__name__)
# the facts that must be equal in two evaluations that are compared, plus `reward.model` if there is a judge
DATE = "chat_template_date"  # a key of language models
PAIRED = ("rollout.val.n", "rollout.val.seed", "reward.functions", "prompts")


class Evaluation:
    """The job: `Evaluation(cfg)` checks all files (a ValueError is the user's mistake), `run()` samples and scores."""

    def __init__(self, cfg: EvaluateConfig) -> None:
        self.cfg = cfg
        self.candidate = read_candidate(cfg)
        n = self.candidate.run.rollout.val.n
        if cfg.k is not None and max(cfg.k, default=0) > n:
            raise ConfigError(f"k: {max(cfg.k)} is more than the {n} samples per prompt; expected at most n={n}")
        self.sets = read_sets(self.candidate.run)
        if cfg.group_by is not None:
            _check_column(self.sets, cfg.group_by)
        self.folder = self._output_folder()
        check_place(self.folder, "output_dir")
        refuse_link(self.folder / "baseline")
        self.baseline: Candidate | None = None
        self.earlier: Path | None = None  # the folder of a finished evaluation that serves as the baseline
        if cfg.baseline is not None:
            folder = Path(cfg.baseline).expanduser()
            if status_inside(folder, ARGUMENTS) is not None:
                self.earlier = folder
            else:
                self.baseline = read_baseline(cfg, self.candidate)
        self._start()
        usable = partial(usable_images, unusable=self.candidate.run.data.unusable_rows, world=self.world)
        self.sets = fitting_sets(self.sets, usable)
        from_first(self._check_earlier)
        parts, before = (self.world, self.sets), None
        if self.baseline is not None:
            before = Sampling(cfg, self.baseline, *parts, self.folder / "baseline", key="baseline")
        main = Sampling(cfg, self.candidate, *parts, self.folder, before=before)
        self.samplings = [main] if before is None else [before, main]
        first = next((sampling for sampling in self.samplings if not sampling.complete), None)
        if first is not None:  # a second model is loaded only after the first one has been freed
            first.build()

    def _start(self) -> None:
        """Join the world, and agree on what may differ by rank or day: checkpoint, linear library, template date."""
        run = self.candidate.run
        given = run.model.cpu_linear, vars(run.data).get(DATE)
        run.trainer.output_dir = str(self.folder)
        with told_as(ConfigError, key=("trainer.output_dir", "output_dir")):
            self.world = start_job(run)
        if self.world.rank == 0:  # remove the record of how an earlier job in this folder ended
            with writing(self.folder, "output_dir"):
                (self.folder / ENDED).unlink(missing_ok=True)
        # use rank 0's checkpoints on all ranks, because a run in progress may have written newer ones in between
        self.candidate = self._agreed_candidate(
            self.candidate, lambda folder: read_candidate(replace(self.cfg, checkpoint=folder))
        )
        stored = broadcast_object(stored_in(self.folder) if self.world.rank == 0 else None)
        facts = {} if stored is None else stored["facts"]
        before = setting(facts, "model.cpu_linear"), setting(facts, f"data.{DATE}")
        chosen = run.model.cpu_linear, vars(run.data).get(DATE)
        linear, date = (value or old or new for value, old, new in zip(given, before, chosen, strict=True))
        run = self.candidate.run
        run.trainer.output_dir, run.model.cpu_linear = str(self.folder), linear
        if DATE in vars(run.data):
            vars(run.data)[DATE] = date
        if self.baseline is not None:
            candidate = self.candidate
            self.baseline = self._agreed_candidate(
                self.baseline, lambda folder: read_baseline(replace(self.cfg, baseline=folder), candidate)
            )
            model = self.baseline.run.model
            model.cpu_linear = model.cpu_linear or linear
            self.baseline = replace(self.baseline, run=replace(run, model=model))

    def _agreed_candidate(self, candidate: Candidate, read: Callable[[str], Candidate]) -> Candidate:
        """The candidate with rank 0's checkpoint, if it has a checkpoint."""
        folder = broadcast_object(None if candidate.trained is None else str(candidate.trained.folder))
        if candidate.trained is None or folder is None or folder == str(candidate.trained.folder):
            return candidate
        return read(folder)

    def run(self) -> None:
        """Sample and score what is missing, and write the statistics on rank 0. Raises Stopped on all ranks."""
        self.world.watch.listen()
        with self._last_words():
            for sampling in self.samplings:
                sampling.run()
            if self.world.rank == 0:
                with writing(self.folder, "output_dir"):
                    self._finish()
        folder_lock.release()
        stop_world()

    @contextmanager
    def _last_words(self) -> Iterator[None]:
        """Record in the folder how the block ends, for `phalanx stop`; a job without this record has died."""
        end = {"ended": "finished", "text": f"finished; see {self.folder / RESULT}"}
        try:
            yield
        except BaseException as error:  # record any error and raise it again
            kind = "stopped" if isinstance(error, Stopped) else "failed"
            end = {"ended": kind, "text": hide(str(error)) if kind == "stopped" else f"failed: {hide(reason(error))}"}
            raise
        finally:
            if self.world.rank == 0:
                with suppress(OSError):  # a full disk must not hide the error
                    write_json(self.folder, ENDED, end)

    def _finish(self) -> None:
        rows, others, baseline = read_records(self.folder), None, None
        folder = self.earlier or self.folder / "baseline"
        if self.cfg.baseline is not None:
            others, baseline = list(islice(each_record(folder), len(rows) + 1)), self.cfg.baseline
            if _sample_places(others) != _sample_places(rows):
                raise JobError(f"baseline: {folder / RECORDS} has other samples than {self.folder / RECORDS}")
        facts = stored_in(self.folder)
        assert facts is not None, "the arguments were written before"
        head = {"model": self.candidate.name, "baseline": baseline, "arguments": facts["facts"]}
        result = result_of(rows, self.cfg, head, others)
        write_json(self.folder, RESULT, result)
        before = None if others is None else Side(others, folder)
        page = write_page(self.folder, result, Side(rows, self.folder), before)
        print(table(result), flush=True)
        print(f"{len(rows)} samples in {self.folder / RECORDS}, their statistics in {self.folder / RESULT}", flush=True)
        print(f"page: {page}", flush=True)

    def _output_folder(self) -> Path:
        cfg, trained = self.cfg, self.candidate.trained
        if cfg.output_dir is not None:
            return Path(cfg.output_dir).expanduser()
        if trained is not None:
            return place_in_run(trained.folder, "evaluation", trained.policy)
        return Path("outputs", "evaluation", Path(self.candidate.name).name)

    def _check_earlier(self) -> None:
        """Raise ConfigError if the baseline is an earlier evaluation that is incomplete or not comparable."""
        if self.earlier is None:
            return
        stored, now = stored_in(self.earlier), self.candidate.facts(self.sets)
        if stored is None or not is_complete(self.earlier, stored):
            raise ConfigError(f"baseline: the evaluation in {self.earlier} is incomplete; run it to its end first")
        judged = asks_model(self.candidate.run.reward.functions)
        for key in (*PAIRED, "reward.model") if judged else PAIRED:
            problem = differing({key: setting(stored["facts"], key)}, {key: setting(now, key)})
            if problem is not None:
                raise ConfigError(
                    f"baseline: the evaluation in {self.earlier} is not comparable: {problem}; expected the same "
                    "prompts, seeds and rewards"
                )


def _sample_places(rows: Sequence[Row]) -> list[tuple[str, int, int]]:
    """The set, prompt and sample of each row, in order."""
    return sorted((row["set"], row["index"], row["sample"]) for row in rows)


def _check_column(sets: Sets, column: str) -> None:
    """Raise ConfigError if a prompt has no number or short text in the column."""
    for prompts in sets.values():
        for prompt in prompts:
            if column not in columns_of(prompt):
                columns = ", ".join(columns_of(prompt)) or "none"
                raise ConfigError(
                    f"group_by: {prompt.place} has no number or short text in a column {column!r}; it has {columns}"
                )
