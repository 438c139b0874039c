"""The check of numerics: whether a job's trainer gives the actions that its sampler drew the same log-probabilities.

Each job samples the prompts of its first step, with the weights before any update, and replays the samples as training
does. No reward is computed. Jobs run one after the other in the same ranks.
"""

import gc
import json
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.config.flow import FlowRewardFunctionConfig, FlowRLConfig
from phalanx.config.inside import write_inside
from phalanx.config.joint import WRITER, JointConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.load import load
from phalanx.config.messages import ConfigError, UnknownKeys, told_as
from phalanx.config.run import RLConfig
from phalanx.config.shipped import located
from phalanx.config.sources import read
from phalanx.config.tasks import CheckNumericsConfig
from phalanx.distributed.collectives import all_gather, reduce_float, reduce_int
from phalanx.distributed.mesh import World
from phalanx.functional.correction import by_position, mismatch
from phalanx.functional.flow import FlowTrace
from phalanx.functional.token_budget import in_order
from phalanx.functional.tokens import TokenTrace
from phalanx.rewards.client import RewardClient
from phalanx.run.kind import kind_of
from phalanx.run.outputs import check_place, writing
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from phalanx.run.world import stop_world
from phalanx.telemetry.step_metrics import peak_memory_gb
from phalanx.tools.board.numerics_page import numerics_page
from phalanx.tools.first_update import TASKS, measure_update, update_line, update_verdict
from phalanx.tools.standard_variants import standard_variants
from phalanx.types import JobError, Samples

FILE, PAGE = "numerics.json", "numerics.html"
BASE = "the job"
STILL = ("logger=[]", "save_freq=-1", "test_freq=-1", "val_before_train=false", "resume=never")
# the job of a model folder without a configuration: a few samples of shipped prompts, whose reward is not computed
SHORT = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "trainer.total_training_steps=1")
FOLDER_KEYS: dict[Any, tuple[str, ...]] = {
    LMRLConfig: (
        *SHORT,
        "data.train_files=[assets/words/train.jsonl]",
        "data.prompt_key=question",
        "data.max_prompt_length=256",
        "data.max_response_length=64",
        "reward.functions=[{name: length}]",
    ),
    FlowRLConfig: (
        *SHORT,
        "data.train_files=[assets/digits/train.txt]",
        "rollout.n=2",
        "reward.functions=[{name: jpeg_incompressibility}]",
    ),
}
EXACT = 0.1  # of the clip range: ratios that are off by so much are rounding, as for phalanx.training.rescorer


@dataclass
class Drawn:
    """A job's samples on this rank. replayed: their log-probabilities [B, A] by the trainer of that job."""

    samples: Samples
    replayed: Tensor


class NumericsCheck:
    """The check on one rank: `NumericsCheck(cfg)` reads the configurations, and all ranks call `run` together."""

    def __init__(self, cfg: CheckNumericsConfig) -> None:
        self.cfg, self.folder = cfg, Path(cfg.output_dir).expanduser()
        check_place(self.folder, "output_dir")
        for name in cfg.variants:
            if name == BASE or not name or "/" in name or name.startswith("."):
                raise ConfigError(f"variants: {name!r} is no name for a folder; expected one such as bf16")
        self.schema = _schema_of(cfg)
        self.cfg = cfg = replace(cfg, keys=[*_folder_keys(cfg, self.schema), *cfg.keys])
        self.keys = {BASE: cfg.keys} | {name: [*cfg.keys, *keys] for name, keys in cfg.variants.items()}
        self.jobs = {name: self._read_job(name, keys) for name, keys in self.keys.items()}
        self.variants, self.refused = dict(cfg.variants), dict[str, str]()
        for name, keys in (standard_variants(self.jobs[BASE]) if cfg.standard else {}).items():
            keys = [key if cfg.part is None else f"{cfg.part}.{key}" for key in keys]
            try:
                self.jobs.setdefault(name, self._read_job(name, [*cfg.keys, *keys]))
            except ConfigError as error:
                self.refused[name] = str(error)
            else:
                self.keys[name], self.variants[name] = [*cfg.keys, *keys], keys

    def run(self) -> None:
        """Run all jobs; the lead writes the file and the page, and prints the table and the verdict."""
        base, rows, task = None, dict[str, dict[str, Any]](), self.cfg.task
        for name, job in self.jobs.items():
            try:
                with told_as(JobError, f"{self._place(name)}: "):
                    if task is not None:
                        rows[name], world = measure_update(job, task, rows.get(BASE))
                    else:
                        rows[name], drawn, world = measure(job, base)
                        base = base or drawn
            except JobError as error:
                if name == BASE or name in self.cfg.variants:
                    raise
                self.refused[name] = str(error)  # such as attention that this model lacks
            torch.use_deterministic_algorithms(False)  # a job may have set it
            gc.collect()
        sentence = verdict(rows, self.variants) if task is None else update_verdict(rows)
        result = {
            "config": self.cfg.config,
            "keys": self.keys,
            "ranks": world.size,
            "device": world.device.type,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "jobs": rows,
            "refused": self.refused,
            "verdict": sentence,
        }
        if world.rank == 0:
            with writing(self.folder, "output_dir"):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_inside(self.folder, FILE, json.dumps(result, indent=1) + "\n")
                write_inside(self.folder, PAGE, numerics_page(result))
            for name, row in rows.items():
                print(line_of(name, row) if task is None else update_line(name, row))
            for name, reason in self.refused.items():
                print(f"{name}: refused: {reason}")
            print(f"{result['verdict']}\n{self.folder / PAGE}", flush=True)
        stop_world()

    def _place(self, name: str) -> str:
        """The key of this command that says what job this is."""
        if name != BASE:
            return f"variants: {name}"
        return "keys" if self.cfg.keys or self.cfg.config is None else f"config: {self.cfg.config}"

    def _read_job(self, name: str, keys: list[str]) -> RLConfig:
        still = [f"trainer.{key}" for key in STILL]
        place = f"trainer.output_dir={self.folder / 'jobs' / name.replace(' ', '_')}"
        with told_as(ConfigError, f"{self._place(name)}: "):
            loaded: Any = load_config(self.schema, self.cfg.config, [*keys, *still, place])
        job: RLConfig = loaded
        if self.cfg.part is not None:
            job = loaded.parts()[self.cfg.part]
            if self.cfg.part == WRITER:  # pictures are rewarded, which the writer does not make; none is computed
                job.reward.functions = [FlowRewardFunctionConfig(name="length")]
        job.data.val_files = []
        if vars(job).get("placement"):
            raise ConfigError("keys: placement: ranks that only sample have no trainer; leave it out")
        with told_as(ConfigError, f"{self._place(name)}: "):
            kind = kind_of(job)
            kind.check()
            if self.cfg.task is None and kind.build_algorithm().levels is not None:
                raise ConfigError(f"{job.algorithm:name=} trains on fresh noise, without log-probabilities of samples")
        return job


def _folder_keys(cfg: CheckNumericsConfig, schema: Any) -> list[str]:
    """Keys of a job without a configuration, before its own; the column of the shipped prompts only with these."""
    given = any(key.startswith("data.train_files=") for key in cfg.keys)
    keys = () if cfg.config is not None else FOLDER_KEYS.get(schema, ())
    return [key for key in keys if not (given and key.startswith("data.prompt_key="))]


def _schema_of(cfg: CheckNumericsConfig) -> Any:
    """The schema of the configuration, which is that of language models if it fits both. Of one that fits none, the
    schema that has most of the file's keys: loading it says what is wrong. Raises ConfigError for another `part` or
    `task` than it needs.
    """
    if cfg.config is not None:
        with told_as(ConfigError, "config: "):
            read(cfg.config)
    if cfg.part is not None:
        if JointConfig not in _closest(cfg):
            raise ConfigError(f"part: {cfg.config} is not of a joint run; leave it out")
        return JointConfig
    if cfg.task is not None:
        return TASKS[cfg.task][0]
    paths = [key.removeprefix("model.path=") for key in cfg.keys if key.startswith("model.path=")]
    if cfg.config is None and paths and Path(located(paths[-1]), "model_index.json").exists():
        return FlowRLConfig
    for schema in (LMRLConfig, FlowRLConfig):
        with suppress(ConfigError):
            load_config(schema, cfg.config, [*_folder_keys(cfg, schema), *cfg.keys])
            return schema
    closest, fitting = _closest(cfg), list[str]()
    if closest[0] is JointConfig:
        raise ConfigError(f"part: {cfg.config} is of a joint run; expected writer or painter")
    for name, (schema, _) in TASKS.items():
        if schema in closest:
            with suppress(ConfigError):
                load_config(schema, cfg.config, cfg.keys)
                fitting.append(name)
    if fitting:
        raise ConfigError(f"task: {cfg.config} is of a supervised job; expected task={' or '.join(fitting)}")
    return closest[0]


def _closest(cfg: CheckNumericsConfig) -> list[Any]:
    """The schemas that have most of the keys of the file."""
    unknown = dict[Any, int]()
    for schema in (LMRLConfig, FlowRLConfig, JointConfig, *(schema for schema, _ in TASKS.values())):
        unknown[schema] = 0
        try:
            load(schema, cfg.config, [])
        except UnknownKeys as error:
            unknown[schema] = error.number
        except ConfigError:  # such as a key without its value, which is one of `keys`
            continue
    return [schema for schema, number in unknown.items() if number == min(unknown.values())]


def measure(cfg: RLConfig, base: Drawn | None) -> tuple[dict[str, Any], Drawn, World]:
    """The row of a job, of its own samples and of those of `base`, the first job; all ranks call this together."""
    trainer: Any = build(cfg)
    collector, updater, world = trainer.collector, trainer.updater, trainer.policy.trained.world
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    collector.rewards, collector.rescorer = RewardClient(cfg, world, None, collector.timers, "samples"), None
    collector.total_steps = 1  # no texts of later steps are encoded
    start = time.perf_counter()
    samples = collector.sample(0)[0]
    sampled = time.perf_counter()
    replayed = _replayed_scores(trainer, samples)
    took = time.perf_counter() - sampled
    sampler, old = _log_probs_of_sampler(collector, samples), updater.rescorer(samples)[0].log_prob
    if samples.on_policy:  # old log-probabilities are those of the training pass
        old, sampler = replayed, sampler.where(~sampler.isnan(), replayed)
    mask = _gathered_values(samples.mask.float()) > 0
    by_sampler, by_old = (_gathered_values((replayed - values).where(samples.mask, 0.0)) for values in (sampler, old))
    clip = updater.algorithm.clip_range
    row: dict[str, Any] = {
        "unit": "denoising step" if samples.lengths is None else "token",
        "clip_range": clip,
        "correction": None if samples.exact and collector.rollout.facts.weights == "none" else cfg.rollout.correction,
        "sampler": mismatch(by_sampler, mask, clip),
        "positions": by_position(by_sampler, mask, clip),
        "old": mismatch(by_old, mask, clip),
        "sample_s": reduce_float(sampled - start, "max"),
        "replay_s": reduce_float(took, "max"),
        "memory_gb": reduce_float(peak_memory_gb(world.device), "max"),
    }
    beside = {} if base is None else _beside(trainer, samples, base)
    row |= {"beside": beside} if beside else {}
    return row, Drawn(samples, replayed), world


def _replayed_scores(trainer: Any, samples: Samples) -> Tensor:
    """Log-probabilities [B, A] by the trainer, in passes of the training's shapes, with the graph for gradients."""
    tokens = None if samples.tokens is None else samples.tokens[:, None]
    parts = trainer.updater.plan.passes_of(1).parts(len(samples.index), tokens)
    device, scored = samples.mask.device, []
    for part in parts:
        scored.append(trainer.policy.replay(samples.trace.select(part.to(device))).log_prob.detach())
    return in_order(scored, parts)


def _log_probs_of_sampler(collector: Any, samples: Samples) -> Tensor:
    """Log-probabilities [B, A] by the kernels that drew the samples. A language model's own modules decode with a cache
    and score afterwards; here they sample once more, and say what they decoded with.
    """
    rollout = collector.rollout
    if samples.lengths is None or not rollout.exact or not isinstance(samples.trace, TokenTrace):
        return samples.log_prob
    with rollout.decoding_scores():
        again = collector.sample(0)[0]
    same = torch.equal(again.trace.ids, samples.trace.ids) and bool((again.log_prob[samples.mask] != 0).any())
    return again.log_prob if same else samples.log_prob


def _beside(trainer: Any, samples: Samples, base: Drawn) -> dict[str, float]:
    """The number of samples that equal those of the first job, and the largest difference between this trainer's
    log-probabilities of the first job's samples and those of its own trainer; empty for other prompts or shapes.
    """
    trace, theirs = samples.trace, base.samples
    alike = [p.text for p in samples.prompts] == [p.text for p in theirs.prompts]
    if isinstance(trace, FlowTrace):
        alike &= trace.latents.shape == theirs.trace.latents.shape
    if reduce_int(int(not alike), "max"):
        return {}
    both, equal = (_final_states(samples), _final_states(theirs)), 0
    for one, other in zip(*both, strict=True):
        equal += torch.equal(one, other)
    if isinstance(trace, FlowTrace):  # with texts that its own encoders have read
        read = replace(theirs.trace, embeds=trace.embeds, prompt_index=trace.prompt_index)
        theirs = replace(theirs, trace=read)
    off = (_replayed_scores(trainer, theirs) - base.replayed).abs().where(theirs.mask, 0.0)
    return {
        "equal_samples": float(reduce_int(equal, "sum")),
        "samples": float(reduce_int(len(samples.index), "sum")),
        "replay_off": reduce_float(float(off.max()), "max"),
    }


def _final_states(samples: Samples) -> Tensor | list[Tensor]:
    """The latents or the tokens of each sample. A decoder rounds images in its own way."""
    if isinstance(samples.trace, FlowTrace):
        return samples.trace.clean
    responses = []
    for ids, mask in zip(samples.trace.ids, samples.trace.responses, strict=True):
        responses.append(ids[mask])
    return responses


def _gathered_values(values: Tensor) -> Tensor:
    """Values [B, A] of the samples of all ranks, [N, A] with A of the rank that has most."""
    width = reduce_int(values.shape[1], "max")
    return all_gather(pad(values.float().cpu(), (0, width - values.shape[1])))


def verdict(rows: dict[str, dict[str, Any]], variants: dict[str, list[str]]) -> str:
    """A sentence about the job's training, with the setting that mends it."""
    base = rows[BASE]
    stats, clip, unit = base["sampler"], base["clip_range"], base["unit"]
    if not stats:
        return "No sample has an action to train."
    far = f"{100 * stats['actions_clipped']:.3g} % of {unit}s"
    if stats["largest"] == 0:
        return "Exact: the trainer gives every action the sampler's log-probability, bit for bit."
    size = f"|ratio - 1| is at most {stats['largest']:.1e}, the clip range {clip:g}"
    if stats["largest"] <= EXACT * clip:
        return f"Sound: {size}; rounding will not clip a ratio."
    if not stats["actions_clipped"]:
        size = size.replace("the clip range", "more than a tenth of the clip range")
    if base["old"]["largest"] <= EXACT * clip:
        cause = "old log-probabilities are recomputed by the trainer, so that no ratio is clipped before an update"
        return f"Mended by the job: the sampler's {size}, and would clip {far}; {cause}, at the cost of a pass."
    mends = []
    for name, keys in variants.items():
        other = rows[name]["old"] if name in rows else None  # a variant may be refused as it is built
        if other and other["largest"] <= EXACT * rows[name]["clip_range"]:
            mends.append((rows[name]["sample_s"] + rows[name]["replay_s"], name, keys))
    if mends:
        _, name, keys = min(mends)
        return f"Off: {size}, which clips {far} before any update; set {' '.join(keys)} ({name}), where none is."
    if base["correction"] == "none":
        return f"Off: {size}, which clips {far} before any update; set rollout.correction=rescore."
    return f"Off: {size}, which clips {far} before any update; from its second step on the job recomputes old ones."


def line_of(name: str, row: dict[str, Any]) -> str:
    """A job's line of the terminal."""
    stats, clip = row["sampler"], row["clip_range"]
    if not stats:
        return f"{name}: nothing to train"
    text = (
        f"{name}: |ratio - 1| {stats['median']:.1e} {stats['p99']:.1e} {stats['largest']:.1e} (median, 99 %, largest), "
    )
    text += f"KL {stats['k3']:.1e}, {100 * stats['actions_clipped']:.3g} % beyond {clip:g}; "
    text += f"{row['sample_s']:.2f} s to sample, {row['replay_s']:.2f} to replay"
    if "beside" in row:
        beside = row["beside"]
        text += f"; {beside['equal_samples']:.0f} of {beside['samples']:.0f} samples equal"
        text += f", replay off by {beside['replay_off']:.1e}"
    return text
