"""Memory of a rank, phase by phase, before anything runs.

What a phase takes was counted by a Ledger while the job's own code ran (phalanx.plan.rehearsal). What FSDP holds
meanwhile is arithmetic over its units (phalanx.plan.layout). What stands beside the model comes from
phalanx.plan.engines. Not counted: the allocator's gaps, CUDA's context, NCCL's buffers, and models that rewards keep.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.config.run import ParallelConfig
from phalanx.plan.engines import RewardModel, engine_copy, reward_model
from phalanx.plan.jobs import Planned, PlannedTeacher, tensors
from phalanx.plan.layout import Layout, Weight
from phalanx.plan.ledger import nbytes


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

    `loading`: the most in the host's memory at the start, before weights go to the device. `reward`: the reward model,
    where this rank holds a part of one; `loading_without`: `loading` of a rank that does not.
    """

    held: dict[str, int]
    phases: list[Phase]
    host: dict[str, int]
    loading: int
    loading_without: int
    reward: RewardModel | None

    @property
    def largest(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """The most bytes on the device."""
        return sum(self.held.values()) + self.largest.total


def count(plan: Planned, gpu_memory: int | None = None) -> Memory:
    """The memory of a job on GPUs of `gpu_memory` bytes (None: not known). Of the ranks, it is one that holds a part of
    the reward model, where there is one.
    """
    layout, model, learner, parallel = plan.layout, plan.policy.model, plan.job.learner, plan.cfg.parallel
    here, away = _places(parallel, layout)
    reward = reward_model(plan.cfg, gpu_memory, layout.width)
    states = {
        name: nbytes(v for v in state.values() if v.dim() > 0) for name, state in learner.optimizer.state().items()
    }

    def state(weights: list[Weight]) -> int:
        return sum(states[w.name] * w.part(layout.width) // w.numel for w in weights if w.trained)

    def average(weights: list[Weight]) -> int:
        return sum(w.part(layout.width) * 4 for w in weights if w.trained)

    rests = [] if parallel.optimizer_offload else here
    trained = [w for w in here if w.trained]
    encoders, averages = nbytes(tensors(model.text_encoders)), len(learner.averages)
    own = [e.own_encoders for e in plan.teachers]
    held = {
        "frozen weights": layout.kept(w for w in here if not w.trained),
        "trained weights": layout.kept(trained) + layout.copies(),
        "model's buffers": nbytes(model.transformer.buffers()),
        "optimizer's state": state(rests),
        "moving average": average(rests) * (learner.ema is not None),
        "algorithm's weights": average(rests) * averages,
        "VAE": nbytes(tensors([model.vae])),
        **{e.name: _beside(parallel, e)[0] for e in plan.teachers},
        "reward model": reward.held if reward is not None else 0,
    }
    host = {
        "text encoders": encoders + sum(own),
        "weights": layout.kept(away),
        **{e.name: _beside(parallel, e)[1] for e in plan.teachers},
        "optimizer's state": state(layout.trained) - state(rests),
        "moving average": (average(layout.trained) - average(rests)) * (learner.ema is not None),
        "algorithm's weights": (average(layout.trained) - average(rests)) * averages,
        "reference": layout.kept(layout.trained) if plan.job.copies_reference else 0,
        "images": nbytes([plan.job.samples.outputs]) if plan.job.samples is not None else 0,
        "sleeping reward model": reward.asleep if reward is not None else 0,
    }
    # the copy of an engine is made on the CPU, when the model has gone to the device
    loading = max(_whole(layout) + held["VAE"], engine_copy(plan.cfg, layout)) + encoders
    for i, e in enumerate(plan.teachers):  # one after the other, each with encoders and VAE, equal ones too
        there = encoders + sum(own[:i]) + host["weights"] + sum(host[f.name] for f in plan.teachers[:i])
        loading = max(loading, there + _whole(e.layout) + held["VAE"] + e.encoders)
    return Memory(
        held={name: size for name, size in held.items() if size},
        phases=[
            Phase("encode prompts", other=max([encoders, *own])),
            *_phases(plan, layout.kept(trained), reward),
            _optimizer(plan, trained, state(trained) - state(rests)),
        ],
        host={name: size for name, size in host.items() if size},
        loading=loading if reward is None else max(reward.loading, reward.asleep + loading),
        loading_without=loading,
        reward=reward,
    )


def _phases(plan: Planned, trained: int, reward: RewardModel | None) -> Iterator[Phase]:
    """What ran, in the order of a step. Of the `trained` bytes a copy is made where other weights take their place; an
    engine has a copy of all weights while it samples, and a reward model may be there beside.
    """
    cfg, layout = plan.cfg, plan.layout
    engine, throughout = cfg.rollout.engine, cfg.parallel.rollout_unsharded
    beside = reward.while_sampling if reward is not None else 0
    order = ["rollout: sample", "rollout: decode", "validation: sample", "validation: decode", "judge", "rescore"]
    order += ["reference", *(e.name for e in plan.teachers), "encode images", "update"]
    of = {e.name: e.layout for e in plan.teachers}
    for name in order:
        if name == "judge" and reward is not None:
            yield Phase(name, other=plan.job.samples_size + reward.woken)
        if name not in plan.phases:
            continue
        took = plan.phases[name]
        if not took.passes and name.endswith(("sample", "rescore")):  # there was nothing to do
            continue
        gathered, gradients, other = _gathered(of.get(name, layout), throughout=throughout), 0, took.before
        if took.aside:
            other += trained
        if name.endswith(("sample", "decode")):
            other += beside
            if engine == "vllm_omni":
                gathered = engine_copy(cfg, layout)
            elif name.endswith("decode"):
                gathered = sum(layout.units()) if throughout else layout.units()[-1]
        elif name == "encode images":
            gathered = 0
            other += beside if engine == "dataset" else 0  # they are scored as sampled ones are
        elif name == "update":
            gathered = _gathered(layout, throughout=not cfg.parallel.reshard_after_forward)
            gradients = took.gradients + layout.reducing()
        yield Phase(name, gathered, took.peak - took.before - took.gradients, gradients, other)


def _optimizer(plan: Planned, trained: list[Weight], moved: int) -> Phase:
    """The step of those `trained` weights that are on the device; `moved` bytes of their state come there for it."""
    gradients = sum(plan.layout.gradient(w) for w in trained)
    # on GPUs, AdamW takes the roots of all second moments at once; the message to other copies was sent by then
    stepping = max(plan.layout.message(), moved + plan.layout.kept(trained))
    return Phase("optimizer", gradients=gradients, other=plan.job.samples_size + stepping)


def _gathered(layout: Layout, *, throughout: bool) -> int:
    """Gathered weights: all of them `throughout`, or the root's, a block's and the message of the next block."""
    units = layout.units()
    return sum(units) if throughout else units[-1] + 2 * max(units)


def _beside(parallel: ParallelConfig, teacher: PlannedTeacher) -> tuple[int, int]:
    """Bytes of a teacher on the device throughout, and in the host's memory."""
    layout, transformer = teacher.layout, teacher.loaded.policy.model.transformer
    here, away = _places(parallel, layout)
    return layout.kept(here) + nbytes(transformer.buffers()), layout.kept(away)


def _whole(layout: Layout) -> int:
    return sum(w.numel * w.kept.itemsize for w in layout.weights)


def _places(parallel: ParallelConfig, layout: Layout) -> tuple[list[Weight], list[Weight]]:
    """The weights that stay on the device, and those that FSDP's offload keeps on the host.

    It takes along what belongs to a weight: gradient, moments, average.
    """
    here = [w for w in layout.weights if not (w.sharded and parallel.param_offload)]
    return here, [w for w in layout.weights if w.sharded and parallel.param_offload]
