"""The models of an evaluation, from checkpoints or folders, with the task's changes to their configuration."""

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from phalanx.config.load import build, flat
from phalanx.config.messages import ConfigError, shown, told_as
from phalanx.config.run import RunConfig, TrainerConfig
from phalanx.config.secrets import public
from phalanx.config.tasks import EvaluateConfig
from phalanx.config.trust import Use
from phalanx.data.prompts import question
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import World
from phalanx.rewards.runner import RewardSet
from phalanx.rollout.registry import check_installed
from phalanx.run.checkpoint_folder import named_folder, read_meta
from phalanx.run.exporting import Trained
from phalanx.run.kind import Kind, Sets, kind_class, kind_of, kind_of_folder, sampling_parts
from phalanx.run.rules import check
from phalanx.run.start import JobComponents
from phalanx.run.world import check_world
from phalanx.tools.inputs import given
from phalanx.tools.opening import is_checkpoint, open_checkpoint
from phalanx.types import Prompt

SECTIONS = ("model", "data", "rollout", "reward", "environment")
# keys that affect only memory and time, not samples and scores
COSTS = (
    "rollout.gpu_memory_utilization",
    "reward.overlap",
    "reward.num_workers",
    "reward.timeout_s",
    "reward.model.gpu_memory_utilization",
    "reward.model.placement",
    "reward.model.sleep",
    "reward.model.tensor_parallel_size",
)


@dataclass(frozen=True)
class Candidate:
    """A model and how it samples: the configuration `run`, with the task's changes, and the checkpoint, if any. `name`
    is for messages.
    """

    run: RunConfig
    trained: Trained | None
    name: str

    def facts(self, sets: Sets) -> dict[str, Any]:
        """Everything on which samples and scores depend, plus COSTS; `sets` are the prompts."""
        content = public(self.run)
        facts: dict[str, Any] = {name: content[name] for name in SECTIONS if name in content}
        for key in ("train_files", "val_files"):  # the facts contain a hash of the prompts instead
            facts["data"].pop(key)
        checkpoint = None if self.trained is None else {"folder": str(self.trained.folder), "step": self._step()}
        facts["checkpoint"] = checkpoint
        facts["weights"] = "model" if self.trained is None else self.trained.weights
        facts["prompts"] = {name: _prompts_digest(prompts) for name, prompts in sets.items()}
        return facts

    def _step(self) -> int:
        assert self.trained is not None, "of a checkpoint"
        return int(read_meta(self.trained.folder)["progress"]["step"])


def read_candidate(cfg: EvaluateConfig) -> Candidate:
    """The candidate specified by the task's keys; raises ValueError with one line."""
    changes: dict[str, Any] = {name: public(vars(cfg)[name]) for name in SECTIONS if vars(cfg)[name]}
    changes["rollout"] = _with_val(changes.get("rollout", {}), given(n=cfg.n, seed=cfg.seed))
    trained = None
    if cfg.checkpoint is not None:
        named = changes | {"data": {"train_files": []} | changes.get("data", {})}
        trained = _open_checkpoint(cfg.checkpoint, cfg, Use(cfg.trust_run, SECTIONS, named))
        run, name = trained.run, str(trained.folder)
        if "path" in changes.get("model", {}):  # the run's revision belongs to the run's model
            changes["model"] = {"revision": None} | changes["model"]
    else:
        name = str(changes["model"]["path"])
        kind = _kind(name, "model.path") if cfg.kind is None else kind_class(cfg.kind)
        run = build(kind.schemas[0], OmegaConf.create({"model": {"path": name}}))
    content = OmegaConf.merge(OmegaConf.create(public(run)), OmegaConf.create(changes))
    assert isinstance(content, DictConfig), "a configuration has keys"
    run = build(type(run), content)
    run.parallel, seed, deterministic = cfg.parallel, run.trainer.seed, run.trainer.deterministic
    run.trainer = TrainerConfig(seed=seed, deterministic=deterministic, resume="never", output_dir="")
    run.model.gradient_checkpointing = False
    _check(run)
    return Candidate(run, trained, name)


def read_baseline(cfg: EvaluateConfig, candidate: Candidate) -> Candidate:
    """The baseline, a checkpoint or a model folder, with the candidate's sampling settings."""
    assert cfg.baseline is not None, "checked by the caller"
    folder = named_folder(cfg.baseline)
    if folder.is_dir() and is_checkpoint(folder):
        trained = _open_checkpoint(cfg.baseline, cfg, Use(cfg.trust_run, ("model",)))
        model, name = replace(trained.run.model, gradient_checkpointing=False), str(trained.folder)
        if type(model) is not type(candidate.run.model):
            raise ConfigError(f"baseline: {cfg.baseline!r} is not the same kind of model as {candidate.name!r}")
    else:
        trained, name = None, cfg.baseline
        base = candidate.run.model
        model = replace(base, path=name, revision=None, lora_rank=0, lora_path=None, target_modules=None)
        model = replace(model, quantization=None)
        kind = kind_of(candidate.run)
        if folder.is_dir() and not issubclass(type(kind), _kind(name, "baseline")):
            raise ConfigError(f"baseline: {name!r} is not the same kind of model as {candidate.name!r}")
        with told_as(ConfigError, key=("model.path", "baseline")):
            kind.check_folder(name, "baseline")
    run = replace(candidate.run, model=model)
    _check(run)
    return Candidate(run, trained, name)


def _open_checkpoint(checkpoint: str, cfg: EvaluateConfig, use: Use) -> Trained:
    """Open a checkpoint, with the library of linear layers that its run used."""
    trained = open_checkpoint(checkpoint, cfg.weights, use, cfg.policy)
    if cfg.policy is not None and not trained.policy:
        raise ConfigError(f"policy: {checkpoint!r} is not from a joint run; leave policy={cfg.policy} out")
    signature, policy = read_meta(trained.folder)["signature"], f"{trained.policy}: " if trained.policy else ""
    model = trained.run.model
    model.cpu_linear = model.cpu_linear or signature.get(f"{policy}cpu_linear")
    return trained


def _with_val(rollout: dict[str, Any], val: dict[str, Any]) -> dict[str, Any]:
    section = rollout.get("val") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"rollout.val: expected a section, got {shown(section)}")
    both = [name for name in val if name in section]
    if both:
        raise ConfigError(f"{both[0]} and rollout.val.{both[0]} are both set; give one of them")
    return rollout | {"val": section | val}


def _kind(path: str, key: str) -> type[Kind]:
    """The kind of a model folder, by its files; raises ConfigError if it does not exist."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{key}: {path!r} is not a folder on this machine; for a hub id, also set kind=lm or kind=flow"
        )
    return kind_of_folder(folder)


def _check(run: RunConfig) -> None:
    """Raise ValueError, with one line, for mistakes that can be found before the world starts."""
    check(run)
    if not run.data.val_files:
        raise ConfigError("data.val_files is empty; give the files of the prompts, such as [assets/words/test.jsonl]")
    if not run.reward.functions:
        raise ConfigError("reward.functions is empty; give what is measured, such as [{name: gsm8k}]")
    # with a default `trainer`, because a restarted job resumes from its records whatever trainer.resume is
    check_world(replace(run, trainer=TrainerConfig()), lambda *_: None, Launch.from_env())
    check_installed(run.rollout)
    kind_of(run).check_model()


def read_sets(run: RunConfig) -> Sets:
    """Read the prompts of each set; raises ValueError for files that cannot be read."""
    kind = kind_of(run)
    sets = {name: list(map(question, prompts)) for name, prompts in kind.read_sets(answered=True).items()}
    kind.check_rows(chain.from_iterable(sets.values()))
    return sets


def _prompts_digest(prompts: list[Prompt]) -> str:
    """A hash of the prompts' texts and columns."""
    digest = sha256()
    for prompt in prompts:
        columns = {name: value for name, value in prompt.meta.items() if name != "images"}
        digest.update(json.dumps([prompt.text, prompt.negative, prompt.messages, columns], default=str).encode())
    return digest.hexdigest()[:16]


def differing(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first key in which two facts differ, with both values; None if they differ in nothing but COSTS."""
    values, others = flat(before), flat(json.loads(json.dumps(now)))
    for name in [*values, *others]:
        if name not in COSTS and values.get(name) != others.get(name):
            return f"{name} was {values.get(name, 'unset')} and is {others.get(name, 'unset')}"
    return None


def build_parts(candidate: Candidate, world: World, sets: Sets, rewards: RewardSet | None) -> JobComponents:
    """Build the model, its rollout and its rewards on all ranks, and load the checkpoint. `rewards`: those of a model
    evaluated before, which are reused. Raises ValueError for the user's mistakes.
    """
    run, trained, kind = candidate.run, candidate.trained, kind_of(candidate.run)
    _, sets = kind.prepare([], sets, None if trained is None else trained.entries)
    made = sampling_parts(kind, world, sets, rewards)
    assert made.rewards is not None, "there are functions, and all ranks sample"
    if not made.rewards.validates:
        raise ConfigError("reward.functions: the policy itself computes all of them, which it does only in training")
    if trained is not None:
        trained.check_fits(made.policy.trained.parameters, run.model.path)
        trained.load(made.policy.trained, world.checkpoint_group)
    return made
