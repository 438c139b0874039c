"""Memory of a rank, phase by phase, before anything runs.

What a phase of training computes is run here on meta tensors, which allocate nothing and compute nothing, while a
`Ledger` counts those that are alive. What FSDP holds meanwhile is arithmetic over its units (phalanx.plan.layout).

What stands beside the model comes from phalanx.plan.engines. Not counted: the allocator's rounding and gaps, CUDA's
context, buffers of NCCL, and models that rewards keep there.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.config.schema import OptimConfig, ParallelConfig, RunConfig
from phalanx.models.family import FlowModel
from phalanx.models.flow import FlowPolicy
from phalanx.optim import Optimizer
from phalanx.plan.blueprint import META, fused_attention, latent_of
from phalanx.plan.engines import RewardModel, engine_copy, reward_model
from phalanx.plan.layout import Layout, PlannedExpert, Weight
from phalanx.types import Sampler


class Ledger(TorchDispatchMode):
    """Bytes of the meta tensors that are made while it is active: `live` now, and `peak`.

    Gradients that stay are entered by hand; `gradients_at_peak` is what there was of them when `live` was largest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.gradients = self.gradients_at_peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _makes_tensors(func):
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    self._see(tensor.untyped_storage())
        return out

    def keep_gradient(self, size: int) -> None:
        """Enter a gradient that stays."""
        self.gradients += size
        self._add(size)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def forget(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, forget)
        self._add(size)

    def _add(self, size: int) -> None:
        self.live += size
        if self.live > self.peak:
            self.peak, self.gradients_at_peak = self.live, self.gradients


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether an operator's result is new, rather than a view of an argument or the argument itself."""
    return any(returned.alias_info is None for returned in func._schema.returns)


@dataclass(frozen=True)
class Job:
    """What a rank does in a training step, as far as its memory is concerned.

    `loss` runs the forward pass of a micro-batch, `passes` of which make an optimizer step. Images are sampled
    `together` at once; a sampler is None where there is nothing to sample. `reference` is a pass for the KL, and
    `rescoring` one for the log-probs of an engine's samples.
    `encoded` images go through the VAE at once, before training. `samples` are the bytes that a step's samples keep on
    the device, and `pictures` those on the host. `averages` copies of the weights belong to the algorithm beside the
    one of `ema`; `behaviour`: one of them samples; `first_weights`: the reference is the weights as they were at first.
    `experts` are there beside it.
    """

    cfg: RunConfig
    policy: FlowPolicy
    layout: Layout
    ema: bool
    loss: Callable[[], Tensor]
    passes: int
    together: int
    sampler: Sampler | None = None
    val_sampler: Sampler | None = None
    reference: Callable[[], Any] | None = None
    rescoring: Callable[[], Any] | None = None
    encoded: int = 0
    samples: int = 0
    pictures: int = 0
    averages: int = 0
    first_weights: bool = False
    behaviour: bool = False
    experts: Sequence[PlannedExpert] = ()

    @property
    def copies_reference(self) -> bool:
        """Whether the reference is a copy of the trained weights. A LoRA's is its base, which PiSSA changes."""
        model = self.cfg.model
        return self.first_weights and (model.lora_rank == 0 or model.lora_init == "pissa")

    @property
    def swaps(self) -> bool:
        """Whether the trained weights step aside for others' view of the samples."""
        return self.reference is not None and (self.copies_reference or self.averages > 0)


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


def count(job: Job, gpu_memory: int | None = None) -> Memory:
    """The memory of a job on GPUs of `gpu_memory` bytes (None: not known); seconds, since every phase runs once on meta
    tensors. Of the ranks, it is one that holds a part of the reward model, where there is one.
    """
    layout, model, states = job.layout, job.policy.model, optimizer_state(job.policy, job.cfg.optim)
    here, away = _places(job.cfg.parallel, layout)
    reward = reward_model(job.cfg, gpu_memory, layout.width)
    beside = reward.while_sampling if reward is not None else 0

    def state(weights: list[Weight]) -> int:
        return sum(states[w.name] * w.part(layout.width) // w.numel for w in weights if w.trained)

    def average(weights: list[Weight]) -> int:
        return sum(w.part(layout.width) * 4 for w in weights if w.trained)

    rests = [] if job.cfg.parallel.optimizer_offload else here
    encoders, others = text_encoders(model), [own_encoders(job.policy, e.policy) for e in job.experts]
    vae, copy = nbytes([*model.vae.parameters(), *model.vae.buffers()]), engine_copy(job.cfg, layout)
    held = {
        "frozen weights": layout.kept(w for w in here if not w.trained),
        "trained weights": layout.kept(w for w in here if w.trained) + layout.copies(),
        "model's buffers": nbytes(model.transformer.buffers()),
        "optimizer's state": state(rests),
        "moving average": average(rests) * job.ema,
        "algorithm's weights": average(rests) * job.averages,
        "VAE": vae,
        **{e.name: _beside(job, e)[0] for e in job.experts},
        "reward model": reward.held if reward is not None else 0,
    }
    host = {
        "text encoders": encoders + sum(others),
        "weights": layout.kept(away),
        **{e.name: _beside(job, e)[1] for e in job.experts},
        "optimizer's state": state(layout.trained) - state(rests),
        "moving average": (average(layout.trained) - average(rests)) * job.ema,
        "algorithm's weights": (average(layout.trained) - average(rests)) * job.averages,
        "reference": layout.kept(layout.trained) if job.copies_reference else 0,
        "images": job.pictures,
        "sleeping reward model": reward.asleep if reward is not None else 0,
    }
    trained = [w for w in here if w.trained]
    # the copy of an engine is made on the CPU, when the model has gone to the device
    loading = max(_whole(layout) + vae, copy) + encoders
    for i, e in enumerate(job.experts):  # one after the other, each with encoders and VAE, equal ones too
        there = host["text encoders"] - sum(others[i:]) + host["weights"] + sum(host[f.name] for f in job.experts[:i])
        vae = nbytes([*e.policy.model.vae.parameters(), *e.policy.model.vae.buffers()])
        loading = max(loading, there + _whole(e.layout) + vae + text_encoders(e.policy.model))
    return Memory(
        held={name: size for name, size in held.items() if size},
        phases=[
            Phase("encode prompts", other=max([encoders, *others])),
            *_sampling(job, layout.kept(trained), copy, beside),
            *([Phase("judge", other=job.samples + reward.woken)] if reward is not None else []),
            *_scoring(job, layout.kept(trained), beside),
            _update(job),
            _optimizer(job, trained, state(trained) - state(rests)),
        ],
        host={name: size for name, size in host.items() if size},
        loading=loading if reward is None else max(reward.loading, reward.asleep + loading),
        loading_without=loading,
        reward=reward,
    )


def text_encoders(model: FlowModel) -> int:
    """Bytes of a model's text encoders."""
    return sum(nbytes([*e.parameters(), *e.buffers()]) for e in model.text_encoders)


def own_encoders(policy: FlowPolicy, expert: FlowPolicy) -> int:
    """Bytes of the text encoders that an expert does not share with the policy. Those of equal shapes are taken for
    equal, as only their numbers could tell.
    """
    both = ([e.state_dict() for e in p.model.text_encoders] for p in (policy, expert))
    own, theirs = ([{name: t.shape for name, t in state.items()} for state in found] for found in both)
    return 0 if own == theirs else text_encoders(expert.model)


def _beside(job: Job, expert: PlannedExpert) -> tuple[int, int]:
    """Bytes of an expert on the device throughout, and in the host's memory."""
    here, away = _places(job.cfg.parallel, expert.layout)
    return expert.layout.kept(here) + nbytes(expert.policy.model.transformer.buffers()), expert.layout.kept(away)


def _whole(layout: Layout) -> int:
    return sum(w.numel * w.kept.itemsize for w in layout.weights)


def _places(parallel: ParallelConfig, layout: Layout) -> tuple[list[Weight], list[Weight]]:
    """The weights that stay on the device, and those that FSDP's offload keeps on the host.

    It takes along what belongs to a weight: gradient, moments, average.
    """
    offload = parallel.param_offload
    here = [w for w in layout.weights if not (w.sharded and offload)]
    return here, [w for w in layout.weights if w.sharded and offload]


def optimizer_state(policy: FlowPolicy, config: OptimConfig) -> dict[str, int]:
    """Bytes of the optimizer's state of each whole tensor, by the tensor's name."""
    with META:
        states = Optimizer(config, policy.sharded, total_updates=1).state()
    return {name: nbytes(value for value in state.values() if value.dim() > 0) for name, state in states.items()}


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _sampling(job: Job, trained: int, engine: int, beside: int) -> list[Phase]:
    """Sampling and decoding. Of the `trained` bytes a copy is made where other weights take their place; an `engine`
    has a copy of all weights for this time, and a reward model may be there `beside` it.
    """
    c = job.cfg.rollout
    throughout, units = job.cfg.parallel.rollout_unsharded, job.layout.units()
    gathered, at_rest = _gathered(job.layout, throughout=throughout), sum(units) if throughout else units[-1]
    if c.engine != "policy":
        gathered = at_rest = engine
    phases = []
    known: dict[tuple[tuple[int, ...], bool], tuple[int, int]] = {}
    for name, sampler, other in (
        ("rollout", job.sampler, beside + job.samples + (trained if job.behaviour else 0)),
        ("validation", job.val_sampler, beside + (trained if job.ema else 0)),
    ):
        if sampler is None:
            continue
        shape = latent_of(job.policy, sampler)
        key = (shape, sampler.guided)
        if key not in known:
            latents = (min(c.vae_batch_size or job.together, job.together), *shape)
            known[key] = (
                peak(partial(velocity, job.policy, sampler, job.together)),
                peak(partial(_decode, job.policy, sampler, latents)),
            )
        sampled, decoded = known[key]
        states = (sampler.num_inference_steps + 1) * job.together * math.prod(shape) * 4
        phases += [
            Phase(f"{name}: sample", gathered, sampled + states, other=other),
            Phase(f"{name}: decode", at_rest, decoded + states, other=other),
        ]
    return phases


def _scoring(job: Job, trained: int, beside: int) -> list[Phase]:
    """The other phases without gradients; see _sampling."""
    c, throughout = job.cfg.rollout, job.cfg.parallel.rollout_unsharded
    gathered = _gathered(job.layout, throughout=throughout)
    phases = []
    if job.rescoring is not None:
        phases.append(Phase("rescore", gathered, peak(job.rescoring), other=job.samples))
    if job.reference is not None:
        other = job.samples + (trained if job.swaps else 0)
        phases.append(Phase("reference", gathered, peak(job.reference), other=other))
    for e in job.experts:
        theirs = _gathered(e.layout, throughout=throughout)
        phases.append(Phase(e.name, theirs, peak(e.view), other=job.samples + e.embeds))
    if job.encoded:
        images = (job.encoded, 3, c.height, c.width)
        other = beside if c.engine == "dataset" else 0  # they are scored as sampled ones are
        phases.append(Phase("encode images", activations=peak(partial(_encode, job.policy, images)), other=other))
    return phases


def velocity(policy: FlowPolicy, sampler: Sampler, images: int) -> Tensor:
    """A forward pass of the policy, with guidance where the sampler has it."""
    x = torch.empty(images, *latent_of(policy, sampler))
    rows = torch.zeros(images, dtype=torch.long)
    return policy.velocity(x, torch.empty(images), no_embeds(), rows, sampler)


def no_embeds() -> dict[str, Tensor]:
    """What stands for embeddings of a prompt and its negative: a blueprint's model makes its own."""
    return {"prompt_embeds": torch.empty(2, 1)}


def _decode(policy: FlowPolicy, sampler: Sampler, shape: tuple[int, ...]) -> Tensor:
    return policy.model.decode(torch.empty(shape), sampler.height, sampler.width)


def _encode(policy: FlowPolicy, shape: tuple[int, ...]) -> Tensor:
    return policy.model.encode_images(torch.empty(shape))


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that are alive at once while `run` makes tensors, without gradients."""
    with META, torch.no_grad(), fused_attention(), Ledger() as ledger:
        run()
    return ledger.peak


def _update(job: Job) -> Phase:
    """The forward and backward pass of a micro-batch, and the gradients that are there meanwhile."""
    layout, policy = job.layout, job.policy
    summed = job.passes > 1  # then the sums of earlier passes are there from the start
    away = job.cfg.parallel.param_offload
    stays = {w.name: 0 if summed or (w.sharded and away) else layout.gradient(w) for w in layout.trained}
    with fused_attention(), Ledger() as ledger:

        def keep(name: str, parameter: Tensor) -> None:
            parameter.grad = policy.parameters[name].grad = None
            ledger.keep_gradient(stays[name])

        named = policy.model.transformer.named_parameters()
        hooks = [p.register_post_accumulate_grad_hook(partial(keep, n)) for n, p in named if p.requires_grad]
        if summed:
            ledger.keep_gradient(sum(layout.gradient(w, summed=True) for w in layout.trained))
        with META:
            loss = job.loss()
        loss.backward()
    for hook in hooks:
        hook.remove()
    return Phase(
        "update",
        gathered=_gathered(job.layout, throughout=not job.cfg.parallel.reshard_after_forward),
        activations=ledger.peak - ledger.gradients_at_peak,
        gradients=ledger.gradients_at_peak + layout.reducing(),
        other=job.samples,
    )


def _optimizer(job: Job, trained: list[Weight], moved: int) -> Phase:
    """The step of those `trained` weights that are on the device; `moved` bytes of their state come there for it."""
    gradients = sum(job.layout.gradient(w) for w in trained)
    # on GPUs, AdamW takes the roots of all second moments at once; the message to other copies was sent by then
    stepping = max(job.layout.message(), moved + job.layout.kept(trained))
    return Phase("optimizer", gradients=gradients, other=job.samples + stepping)


def _gathered(layout: Layout, *, throughout: bool) -> int:
    """Gathered weights: all of them `throughout`, or the root's, a block's and the message of the next block."""
    units = layout.units()
    return sum(units) if throughout else units[-1] + 2 * max(units)
