"""Memory of a rank, phase by phase, before anything runs.

What a phase takes was counted by a Ledger while the job's own code ran (phalanx.plan.rehearsal). What FSDP holds
meanwhile is arithmetic over its units (phalanx.plan.layout). What stands beside the model comes from
phalanx.plan.engines. Not counted: the allocator's gaps, CUDA's context, NCCL's buffers, and models that rewards keep.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from phalanx.config.lm import LMRunConfig
from phalanx.distributed.link import BUCKET_BYTES
from phalanx.distributed.roles import ACTOR, ROLLOUT
from phalanx.models.stored import dtype_to_read
from phalanx.plan.blueprint import PlannedPolicy
from phalanx.plan.engines import RewardModel, engine_copy, engine_share, reward_model
from phalanx.plan.layout import Weight
from phalanx.plan.ledger import nbytes
from phalanx.plan.lm import PlannedLMPolicy
from phalanx.plan.loading import Loading, loading, loading_of_module
from phalanx.plan.rehearsal import Planned
from phalanx.training.offload import PART, SLOTS


@dataclass(frozen=True)
class Phase:
    """Bytes of a phase on the device beyond what is held throughout; `other` are samples, and what is there for this
    phase alone.
    """

    name: str
    gathered: int = 0
    activations: int = 0
    gradients: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gathered + self.activations + self.gradients + self.other


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: `held` on the device throughout, and `host` in the host's memory, by what they are.

    `loading`: what is in the host's memory at the start, before weights go to the device, one after the other.
    `reward`: the reward model, where this rank holds a part of one; it is loaded first.
    """

    held: dict[str, int]
    phases: list[Phase]
    host: dict[str, int]
    loading: list[Loading]
    reward: RewardModel | None

    @property
    def largest(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """The most bytes on the device."""
        return sum(self.held.values()) + self.largest.total

    def loading_of_a_node(self, ranks: int, judges: int, *, cast: bool) -> int:
        """The most in the memory of a node while its ranks load, of which so many `judges` hold a part of the reward
        model. `cast`: see Loading.of_a_node.
        """
        judge = self.reward or RewardModel()
        models = max(stage.of_a_node(ranks, cast=cast) for stage in self.loading)
        return max(judge.loading.of_a_node(judges, cast=cast), judge.asleep * judges + models)


def count(p: Planned, gpu_memory: int | None = None) -> Memory:
    """The memory of a job on GPUs of `gpu_memory` bytes (None: not known). Of the ranks, it is one that holds a part of
    the reward model, where there is one.
    """
    layout, teachers = p.policy.layout, p.frozen
    samples, trains = p.role in ("", ROLLOUT), p.role in ("", ACTOR)
    reward = reward_model(p.cfg, gpu_memory, layout.width) if samples else None
    judge = reward or RewardModel()
    trained = [w for w in layout.trained if not w.away]
    stays = trained if trains and not p.cfg.parallel.optimizer_offload else []
    beside, stay = _beside(p, layout.trained if trains else []), _beside(p, stays)
    vae, encoders = _parts_beside(p.policy)
    engine, sleeps = engine_share(p.cfg, gpu_memory, layout) if samples else 0, _engine_sleeps(p)
    theirs = {name: nbytes(*teacher.model.text_encoders) for name, teacher in teachers.items()}
    own = {name: theirs[name] * _reads_alone(p, e) for name, e in teachers.items()}
    held = {
        "frozen weights": layout.kept(w for w in layout.weights if not w.trained and not w.away),
        "trained weights": layout.kept(trained) + layout.copies(),
        "model's buffers": _buffers(p.policy),
        **stay,
        "VAE": vae,
        **{name: e.layout.here() + _buffers(e) for name, e in teachers.items()},
        "reward model": judge.held,
        "sampling engine": 0 if sleeps else engine,
    }
    host = {
        "text encoders": encoders + sum(own.values()),
        "weights": layout.away(),
        **{name: e.layout.away() for name, e in teachers.items()},
        **{name: size - stay[name] for name, size in beside.items()},
        "reference": layout.kept(layout.trained) if p.copies_reference and trains else 0,
        "images": p.outputs_size,
        "sleeping reward model": judge.asleep,
    }
    # on GPUs, AdamW takes the roots of all second moments at once; the message to other copies was sent by then
    moved, roots = _beside(p, trained)["optimizer's state"] - stay["optimizer's state"], layout.kept(trained)
    if moved:
        # of the parts that are there at a time
        part = max(PART, max(w.part for w in trained) * moved // sum(w.part for w in trained))
        moved, roots = min(moved, SLOTS * part), min(roots, part)
    stepping = max(layout.message(), moved + roots)
    gradients = sum(layout.gradient(w) for w in trained)
    update = [Phase("optimizer", gradients=gradients, other=p.samples_size + stepping)] if trains else []
    return Memory(
        held={name: size for name, size in held.items() if size},
        phases=[
            *([Phase("encode prompts", other=max([encoders, *own.values()]))] if encoders and samples else []),
            *([Phase("weights from the actor", other=_passing_on(p))] if p.role else []),
            *_phases(p, layout.kept(trained), reward, engine if sleeps else 0),
            *update,
        ],
        host={name: size for name, size in host.items() if size},
        loading=list(_loading(p)),
        reward=reward,
    )


def _passing_on(p: Planned) -> int:
    """Whole tensors on their way from the actor: a message and the one before or after it, and where they are sent a
    tensor of the next one.
    """
    sizes = [w.numel * w.kept.itemsize for w in p.policy.layout.trained]
    message = max(*sizes, min(BUCKET_BYTES, sum(sizes)), 0)
    return message * (3 if p.role == ACTOR else 2)


def _loading(p: Planned) -> Iterator[Loading]:
    """The steps of loading: the policy, an engine's copy of it, and each teacher."""
    if isinstance(p.policy, PlannedLMPolicy):
        yield _weights(p.policy, Path(p.policy.config.path))
        return
    encoders = _from_files(p.policy, "text_encoder")
    yield encoders + _transformer(p.policy) + _from_files(p.policy, "vae")
    # made on the CPU, when the model has gone to the device
    if p.role in ("", ROLLOUT):
        yield encoders + Loading(own=engine_copy(p.cfg, p.policy.layout))
    there = encoders + Loading(own=p.policy.layout.away())
    for teacher in p.frozen.values():  # each with encoders and VAE, equal ones too
        theirs = _from_files(teacher, "text_encoder")
        yield there + theirs + _transformer(teacher) + _from_files(teacher, "vae")
        there += Loading(own=teacher.layout.away())
        if _reads_alone(p, teacher):
            there += theirs


def _parts_beside(policy: PlannedPolicy | PlannedLMPolicy) -> tuple[int, int]:
    """Bytes of the VAE and of the text encoders; a language model has neither."""
    if isinstance(policy, PlannedLMPolicy):
        return 0, 0
    return nbytes(policy.model.vae), nbytes(*policy.model.text_encoders)


def _reads_alone(p: Planned, teacher: PlannedPolicy) -> bool:
    """Whether a teacher has text encoders of its own."""
    assert isinstance(p.policy, PlannedPolicy), "flow models alone have teachers"
    return teacher.model.text_encoders is not p.policy.model.text_encoders


def _engine_sleeps(p: Planned) -> bool:
    """Whether a sampling engine's memory is free between rollouts: that of flow models has no key to keep it."""
    return p.cfg.rollout.facts.sleeps and (not isinstance(p.cfg, LMRunConfig) or p.cfg.rollout.sleep)


def _transformer(policy: PlannedPolicy) -> Loading:
    return _weights(policy, Path(policy.config.path) / "transformer")


def _weights(policy: PlannedPolicy | PlannedLMPolicy, files: Path) -> Loading:
    """The weights in these files; a LoRA is new, and in none."""
    lora = sum(w.numel * w.kept.itemsize for w in policy.layout.weights if ".lora_" in w.name)
    base = next(w for w in policy.layout.weights if ".lora_" not in w.name)
    # where all weights are trained, ranks cast their parts of what the files hold
    read = dtype_to_read(files, base.kept) if policy.config.lora_rank == 0 else base.kept
    size = (policy.layout.whole() - lora) * read.itemsize // base.kept.itemsize
    return loading(files, size, read) + Loading(own=lora)


def _from_files(policy: PlannedPolicy, kind: str) -> Loading:
    """The parts of the pipeline whose names begin with `kind`."""
    parts = [item for item in policy.model.pipeline.components.items() if item[0].startswith(kind)]
    modules = [(name, part) for name, part in parts if isinstance(part, nn.Module)]
    return sum((loading_of_module(Path(policy.config.path) / name, part) for name, part in modules), Loading())


def _beside(p: Planned, weights: list[Weight]) -> dict[str, int]:
    """What the optimizer and the averages have beside these weights on a rank."""
    state = p.state.optimizer.state()
    moments = 0
    for w in weights:
        whole = sum(tensor.nbytes for tensor in state[w.name].values() if tensor.dim() > 0)
        moments += whole * w.part // w.numel
    average = sum(w.part for w in weights) * 4
    return {
        "optimizer's state": moments,
        "moving average": average * (p.state.ema is not None),
        "algorithm's weights": average * len(p.state.averages),
    }


def _buffers(policy: PlannedPolicy | PlannedLMPolicy) -> int:
    return sum(buffer.nbytes for buffer in policy.trained.module.buffers())


def _phases(p: Planned, trained: int, reward: RewardModel | None, engine: int) -> Iterator[Phase]:
    """What ran, in the order of a step. Of the `trained` bytes a copy is made where other weights take their place; a
    reward model may be there beside, and while samples are drawn `engine` bytes of an engine.
    """
    order = ["rollout: sample", "rollout: decode", "rollout: log-probs", "validation: sample", "validation: decode"]
    order += ["judge", "rescore"]
    for name in [*order, "reference", *p.frozen, "encode images", "update"]:
        if name == "judge" and reward is not None:
            yield Phase(name, other=p.samples_size + reward.woken)
        if name not in p.ledger.phases:
            continue
        took = p.ledger.phases[name]
        drawn = isinstance(p.cfg, LMRunConfig) and name.endswith("sample")  # an engine's passes are its own
        if not took.passes and name.endswith(("sample", "rescore")) and not (drawn and engine):  # nothing to do
            continue
        other = took.before + trained * took.aside
        # the data's images are scored as sampled ones are
        scored = name == "encode images" and bool(p.cfg.rollout.facts.columns)
        if reward is not None and (scored or name.endswith(("sample", "decode"))):
            other += reward.while_sampling
        if drawn:
            other += engine
        activations, summed = took.peak - took.before - took.gradients, p.state.micro_batches > p.state.updates_made
        gradients = took.gradients + p.policy.layout.reducing(activations, summed=summed) if name == "update" else 0
        yield Phase(name, _gathered(p, name), activations, gradients, other)


def _gathered(p: Planned, name: str) -> int:
    """Whole weights in a phase; an engine has a copy of all while it samples."""
    layout, parallel = p.policy.layout, p.cfg.parallel
    if name == "encode images":
        return 0
    if name == "update":
        return layout.unsharded(throughout=not parallel.reshard_after_forward)
    if name.endswith(("sample", "decode")) and p.cfg.rollout.facts.weights == "copy":
        # else it is counted with what stays, or with the cache beside it
        alone = not isinstance(p.cfg, LMRunConfig) and _engine_sleeps(p)
        return engine_copy(p.cfg, layout) if alone else 0
    if name.endswith("decode") and not parallel.rollout_unsharded:
        return layout.units()[-1]
    if name in p.frozen:
        layout = p.frozen[name].layout
    whole = parallel.rollout_unsharded
    return layout.unsharded(throughout=whole) + (layout.experts() if whole else 0)
