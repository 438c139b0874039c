"""The models of an evaluation, from checkpoints or folders, with the task's changes to their configuration."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from phalanx.config.block_diffusion import BlockDiffusionRunConfig
from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRunConfig, LMTurnRunConfig
from phalanx.config.load import build, flat
from phalanx.config.messages import ConfigError, shown
from phalanx.config.run import RunConfig, TrainerConfig
from phalanx.config.secrets import public
from phalanx.config.tasks import EvaluateConfig
from phalanx.config.trust import Use
from phalanx.data.prompts import question, validation_sets
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import World
from phalanx.environments.environments import Environments, with_tools
from phalanx.models.flow.pipeline_headers import local_index
from phalanx.models.flow.policy import build_policy
from phalanx.models.flow.registry import family_of, image_columns
from phalanx.models.lm.blocks import build_block_policy
from phalanx.models.lm.lm_folder import check_folder
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.lm_policy import build_policy as build_lm_policy
from phalanx.rewards.runner import RewardSet
from phalanx.rollout import flow as flow_engines
from phalanx.rollout import lm as lm_engines
from phalanx.rollout.registry import check_installed
from phalanx.run.checkpoint import read_meta
from phalanx.run.flow_components import check_plan, check_references
from phalanx.run.lm_prompt_lengths import fitting_prompts
from phalanx.run.lm_rl import check_counts
from phalanx.run.prompt_lengths import fitting as fitting_flow
from phalanx.run.rules import check
from phalanx.run.start import build_rewards, fitting_sets
from phalanx.run.world import check_world
from phalanx.tools.export import Trained, open_checkpoint, with_images
from phalanx.tools.inputs import given
from phalanx.training.components import TrainedPolicy
from phalanx.types import Prompt, Rollout

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
DECODED = 8  # responses that the policy's own modules decode together if rollout.micro_batch_size_per_gpu is null
Sets = dict[str, list[Prompt]]


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
        facts["prompts"] = {name: _digest(prompts) for name, prompts in sets.items()}
        return facts

    def _step(self) -> int:
        assert self.trained is not None, "of a checkpoint"
        return int(read_meta(self.trained.folder)["progress"]["step"])


@dataclass(frozen=True)
class Parts:
    """A candidate on this rank, ready to sample."""

    policy: TrainedPolicy
    rollout: Rollout
    rewards: RewardSet
    sets: Sets

    def close(self) -> None:
        """Free the memory for another model."""
        self.rollout.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def read_candidate(cfg: EvaluateConfig) -> Candidate:
    """The candidate specified by the task's keys; raises ValueError with one line."""
    changes: dict[str, Any] = {name: public(vars(cfg)[name]) for name in SECTIONS if vars(cfg)[name]}
    changes["rollout"] = _with_val(changes.get("rollout", {}), given(n=cfg.n, seed=cfg.seed))
    trained = None
    if cfg.checkpoint is not None:
        named = changes | {"data": {"train_files": []} | changes.get("data", {})}
        trained = _open(cfg.checkpoint, cfg, Use(cfg.trust_run, SECTIONS, named))
        run, name = trained.run, str(trained.folder)
        if "path" in changes.get("model", {}):  # the run's revision belongs to the run's model
            changes["model"] = {"revision": None} | changes["model"]
    else:
        name = str(changes["model"]["path"])
        kind = FlowRunConfig if (cfg.kind or _kind(name, "model.path")) == "flow" else LMTurnRunConfig
        run = build(kind, OmegaConf.create({"model": {"path": name}}))
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
    folder = Path(cfg.baseline).expanduser()
    if folder.is_dir() and ((folder / "checkpoints").is_dir() or folder.name.startswith("step_")):
        trained = _open(cfg.baseline, cfg, Use(cfg.trust_run, ("model",)))
        model, name = replace(trained.run.model, gradient_checkpointing=False), str(trained.folder)
        if type(model) is not type(candidate.run.model):
            raise ConfigError(f"baseline: {cfg.baseline!r} is not the same kind of model as {candidate.name!r}")
    else:
        trained, name = None, cfg.baseline
        base = candidate.run.model
        model = replace(base, path=name, revision=None, lora_rank=0, lora_path=None, target_modules=None)
        model = replace(model, quantization=None)
        kind = "flow" if isinstance(candidate.run, FlowRunConfig) else "lm"
        if folder.is_dir() and _kind(name, "baseline") != kind:
            raise ConfigError(f"baseline: {name!r} is not the same kind of model as {candidate.name!r}")
        try:
            local_index(name) if kind == "flow" else check_folder(name, "baseline")
        except ValueError as error:
            raise ConfigError(str(error).replace("model.path", "baseline")) from error
    run = replace(candidate.run, model=model)
    _check(run)
    return Candidate(run, trained, name)


def _open(checkpoint: str, cfg: EvaluateConfig, use: Use) -> Trained:
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


def _kind(path: str, key: str) -> str:
    """The kind of a model folder, lm or flow, by its files; raises ConfigError if it does not exist."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{key}: {path!r} is not a folder on this machine; for a hub id, also set kind=lm or kind=flow"
        )
    return "flow" if (folder / "model_index.json").is_file() else "lm"


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
    if isinstance(run, FlowRunConfig):
        check_plan(run)
        family_of(run.model)
    elif isinstance(run, LMRunConfig):
        lm_engines.check_engine(run)


def read_sets(run: RunConfig) -> Sets:
    """Read the prompts of each set; raises ValueError for files that cannot be read."""
    data = run.data
    form: dict[str, Any] = {"prompt": data.prompt_key, "unusable": data.unusable_rows}
    if isinstance(run, FlowRunConfig):
        sets = validation_sets(data.val_files, images=image_columns(run.model), **form)
        check_references(run.model, chain.from_iterable(sets.values()))
        return sets
    assert isinstance(run, LMRunConfig), "the other of the two kinds"
    form |= {"quoted": False, "answered": True, "image_key": run.data.image_key}
    sets = validation_sets(data.val_files, **form)
    return {name: [question(prompt) for prompt in prompts] for name, prompts in sets.items()}


def _digest(prompts: list[Prompt]) -> str:
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


def build_parts(candidate: Candidate, world: World, sets: Sets, rewards: RewardSet | None) -> Parts:
    """Build the model, its rollout and its rewards on all ranks, and load the checkpoint. `rewards`: those of a model
    evaluated before, which are reused. Raises ValueError for the user's mistakes.
    """
    run = candidate.run
    build = _flow if isinstance(run, FlowRunConfig) else _lm
    made = build(candidate, world, sets, rewards)
    if candidate.trained is not None:
        candidate.trained.check_fits(made.policy.trained.parameters, run.model.path)
        candidate.trained.load(made.policy.trained, world.checkpoint_group)
    return made


def _flow(candidate: Candidate, world: World, sets: Sets, rewards: RewardSet | None) -> Parts:
    run = candidate.run
    assert isinstance(run, FlowRunConfig), "of the two kinds"
    rewards = rewards or _rewards(run, world, sets, "images")
    policy = build_policy(run.model, run.parallel, run.data, world, seed=run.trainer.seed, detach_uncond=False)
    sets = fitting_sets(sets, partial(fitting_flow, model=policy.model, cfg=run, first=world.rank == 0))
    micro = run.rollout.micro_batch_size_per_gpu or 1
    return Parts(policy, flow_engines.build_rollout(policy, run.rollout, world, micro, window=False), rewards, sets)


def _lm(candidate: Candidate, world: World, sets: Sets, rewards: RewardSet | None) -> Parts:
    run, facts = candidate.run, candidate.run.rollout.facts
    assert isinstance(run, LMRunConfig), "of the two kinds"
    environments = None
    if isinstance(run, LMTurnRunConfig) and run.environment.used:
        environments = Environments(run.environment)
        tools: Callable[..., Any] = partial(with_tools, environments=environments)
        sets = {name: tools(prompts) for name, prompts in sets.items()}
    images = _images(candidate, sets, talks=environments is not None)
    rewards = rewards or _rewards(run, world, sets, "completions")
    options: dict[str, Any] = {"chunk": 1024, "seed": run.trainer.seed}
    if run.model.block_size is not None:
        options |= {"temperature": 1.0, "add_mask": isinstance(run, BlockDiffusionRunConfig)}
        policy: LMPolicy = build_block_policy(run.model, run.parallel, run.data, world, **options)
    else:
        options |= {"temperature": run.rollout.temperature, "decodes": facts.weights == "policy", "images": images}
        policy = build_lm_policy(run.model, run.parallel, run.data, world, **options)
    sets = fitting_sets(sets, partial(fitting_prompts, policy=policy, first=world.lead))
    # engines with their own copy of the weights form batches themselves
    decoded = run.rollout.micro_batch_size_per_gpu or (DECODED if facts.weights == "policy" else 2**20)
    rollout = lm_engines.build_rollout(run, policy, world, decoded, None, environments)
    return Parts(policy, rollout, rewards, sets)


def _rewards(run: RunConfig, world: World, sets: Sets, outputs: str) -> RewardSet:
    rewards = build_rewards(run, world, (), sets, outputs=outputs)
    assert rewards is not None, "there are functions, and all ranks sample"
    if not rewards.validates:
        raise ConfigError("reward.functions: the policy itself computes all of them, which it does only in training")
    return rewards


def _images(candidate: Candidate, sets: Sets, *, talks: bool) -> bool:
    """Whether the model reads images; raises ConfigError if prompts have images that it cannot read."""
    run, prompts = candidate.run, list(chain.from_iterable(sets.values()))
    assert isinstance(run, LMRunConfig)
    place = next((prompt.place for prompt in prompts if prompt.images), None)
    if place is not None and talks and run.rollout.facts.weights != "policy":
        raise ConfigError(
            f"{place} has images, and only the engine policy samples conversations about images; set "
            "rollout.engine=policy"
        )
    images = with_images(run.model, prompts, candidate.trained)
    check_counts(prompts, run.rollout.limit_images)
    return images
