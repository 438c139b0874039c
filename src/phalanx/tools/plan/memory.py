"""Memory of a rank in each phase of a step.

A Ledger counted the tensors of each phase while the job's code ran (phalanx.tools.plan.rehearsal); the memory that FSDP
adds is arithmetic over its units (phalanx.tools.plan.layout). The reward model and an engine's copy of the weights are
not loaded: their sizes come from the headers or the index of their files. Not counted: fragmentation, CUDA's context,
NCCL's buffers, models that rewards keep, and what the host needs while weights are loaded.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.reward import RewardModelConfig
from phalanx.config.run import RunConfig
from phalanx.distributed.mesh import ACTOR, ROLLOUT
from phalanx.distributed.placement import judged_beside
from phalanx.engines.vllm_lora import buffer_rank
from phalanx.models.flow.policy import DTYPES
from phalanx.models.headers import read_json, tensors
from phalanx.run.link import BUCKET_BYTES
from phalanx.tools.plan.blueprint import fetch
from phalanx.tools.plan.layout import CountedPolicy, Layout, Weight
from phalanx.tools.plan.ledger import Kind, kinds, nbytes
from phalanx.tools.plan.rehearsal import Rehearsal
from phalanx.training.offload import PART, SLOTS

_COMPUTED_IN = ("F64", "F32", "F16", "BF16")  # safetensors' names of dtypes that are cast to the requested dtype
MAPPED = "text encoders of the node"  # views of files, whose pages the ranks of a node share
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class RewardModel:
    """The reward model on a rank that holds a part of it.

    weights: bytes of that part; None if they are unknown. share: bytes of the GPU that vLLM reserves, cache included;
    None for other engines and for an unknown GPU. sleeps: between scorings it is in the host's memory. overlaps: it
    scores while samples are drawn.
    """

    weights: int | None
    share: int | None
    sleeps: bool
    overlaps: bool

    @property
    def awake(self) -> int:
        """Bytes on the device while it scores."""
        return self.weights or 0 if self.share is None else self.share


@dataclass(frozen=True)
class Phase:
    """Bytes that a phase adds on the device. other: samples, and what only this phase needs."""

    name: str
    gathered: int = 0
    activations: int = 0
    gradients: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.gathered + self.activations + self.gradients + self.other

    def times(self, runs: int) -> "Phase":
        """The phase with the passes of so many runs."""
        other = self.other if self.name == "encode prompts" else self.other * runs
        return Phase(self.name, self.gathered, self.activations * runs, self.gradients * runs, other)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank by what they are: held on the device throughout, added by each phase, and in the host's memory.
    reward: the reward model, if this rank holds a part of one.
    """

    held: dict[str, int]
    phases: list[Phase]
    host: dict[str, int]
    reward: RewardModel | None

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """The most bytes on the device."""
        return sum(self.held.values()) + self.largest.total


def count(p: Rehearsal, gpu_memory: int | None = None) -> Memory:
    """The memory of a rank of a job on GPUs of `gpu_memory` bytes (None if unknown); of a rank that holds a part of the
    reward model, if there is one.
    """
    layout, policy, sleeps = p.policy.layout, p.policy, p.cfg.rollout.engine_memory.sleeps
    samples, trains, offload = p.role in ("", ROLLOUT), p.trains, p.cfg.parallel.optimizer_offload
    reward = reward_model(p.cfg, gpu_memory, layout.width) if samples else None
    engine = engine_size(p.cfg, gpu_memory, layout) if samples else 0
    trained = [w for w in layout.trained if not w.away]
    # a replicated weight that is trained in another dtype has a copy in the dtype that the module computes in
    recast = [w for w in layout.trained if not w.sharded and w.kept != layout.dtype]
    copies = sum(w.numel for w in recast) * layout.dtype.itemsize
    state = _optimizer_bytes(p, layout.trained if trains else [])
    on_device = _optimizer_bytes(p, trained if trains and not offload else [])
    held = {
        "frozen weights": layout.kept_on(host=False) - layout.kept(trained),
        "trained weights": layout.kept(trained) + copies,
        "model's buffers": _buffer_bytes(policy),
        **on_device,
        "VAE": nbytes(*policy.decoders),
    }
    some_sharded = any(w.sharded for w in layout.trained)
    copied = p.cfg.trainer.peer_copy and trains and some_sharded and layout.width > layout.cluster.per_node
    undoes = p.cfg.model.lora_rank > 0 or copied if p.cfg.trainer.undo_steps is None else p.cfg.trainer.undo_steps
    if undoes and (p.updates > 1 or copied) and trains and not p.role:
        held["state before a step"] = layout.kept(trained) + sum(on_device.values())
    encoders, mapped = [nbytes(*policy.encoders)], nbytes(*policy.mapped)
    host = {"text encoders": 0, MAPPED: 0, "weights": layout.kept_on(host=True)}
    for name, teacher in p.frozen.items():
        held[name] = teacher.layout.kept_on(host=False) + _buffer_bytes(teacher)
        host[name] = teacher.layout.kept_on(host=True)
        if teacher.model.text_encoders is not policy.encoders:
            encoders.append(nbytes(*teacher.encoders))
            mapped += nbytes(*teacher.mapped)
    awake, asleep = 0, 0
    if reward is not None:
        awake, asleep = (0, reward.weights or 0) if reward.sleeps else (reward.awake, 0)
    held |= {"reward model": awake, "sampling engine": 0 if sleeps else engine, **p.beside}
    host |= {"text encoders": sum(encoders) - mapped, MAPPED: mapped}
    host |= {name: size - on_device[name] for name, size in state.items()}
    host["two copies of another rank's state"] = 2 * (layout.kept(layout.trained) + sum(state.values())) * copied
    host["reference"] = layout.kept(layout.trained) if p.copies_reference and trains else 0
    keeps = p.cfg.rollout.engine_memory.keeps
    keeps = p.cfg.model.lora_rank > 0 if keeps is None else keeps
    kept = engine_copy(p.cfg, layout) if samples and keeps else 0
    host |= {"images": p.outputs_size, "sleeping engine": kept, "sleeping reward model": asleep}
    phases = []
    before, after = p.waiting
    if encoders[0] and samples:
        phases.append(Phase("encode prompts", other=max(encoders) + before))
    if p.role:
        phases.append(Phase("weights from the actor", other=_passing_on(p)))
    phases += _step_phases(p, layout.kept(trained), reward, engine if sleeps else 0)
    if trains:
        moved = _optimizer_bytes(p, trained)["optimizer's state"] * offload
        gradients = sum(map(layout.gradient, trained))
        other = p.samples_size + _step_bytes(p, trained, moved) + after
        phases.append(Phase("optimizer", gradients=gradients, other=other))
    runs = len(p.cfg.runs)
    for name in ("trained weights", *on_device) if runs else ():  # of a sweep, each of whose runs has a LoRA
        held[name] *= runs
    whole = policy.layout.width == 1 or p.cfg.parallel.lora_sharding == "replicate"
    for i, phase in enumerate(phases if runs else ()):
        decodes = p.policy.tokens and phase.name.endswith(": sample") and policy.layout.width == 1
        if decodes or (p.kind.shares and whole):
            phases[i] = phase.times(runs)
    some = [{name: size for name, size in sizes.items() if size} for sizes in (held, host)]
    return Memory(some[0], phases, some[1], reward)


def _step_bytes(p: Rehearsal, trained: list[Weight], moved: int) -> int:
    """Temporary bytes of an optimizer step, which fetches `moved` bytes of its state from the host in parts."""
    # on GPUs, AdamW takes the roots of all second moments at once; the message to other copies was sent by then
    roots = p.policy.layout.kept(trained)
    if moved:
        largest, total = max(w.part for w in trained), sum(w.part for w in trained)
        part = max(PART, largest * moved // total)
        moved, roots = min(moved, SLOTS * part), min(roots, part)
    return max(p.policy.layout.message(), moved + roots)


def _passing_on(p: Rehearsal) -> int:
    """Bytes of whole tensors on their way from the actor: a message and the one before or after it; on the sending
    ranks also a tensor of the next message.
    """
    sizes = [w.numel * w.kept.itemsize for w in p.policy.layout.trained]
    message = max(*sizes, min(BUCKET_BYTES, sum(sizes)), 0)
    return message * (3 if p.role == ACTOR else 2)


def _optimizer_bytes(p: Rehearsal, weights: list[Weight]) -> dict[str, int]:
    """Bytes of the optimizer and of the averages for these weights on a rank."""
    state = p.state.optimizer.state()
    moments = 0
    for w in weights:
        moments += w.part * sum(tensor.itemsize for tensor in state[w.name].values() if tensor.dim() > 0)
    average = sum(w.part for w in weights) * 4
    return {
        "optimizer's state": moments,
        "moving average": average * (p.state.ema is not None),
        "algorithm's weights": average * len(p.state.averages),
    }


def _buffer_bytes(policy: CountedPolicy) -> int:
    return sum(buffer.nbytes for buffer in policy.trained.module.buffers())


def _step_phases(p: Rehearsal, trained: int, reward: RewardModel | None, engine: int) -> Iterator[Phase]:
    """The phases that ran, in the order of a step.

    trained: bytes of weights, which are copied while other weights take their place. engine: bytes of an engine that
    sleeps between rollouts.
    """
    for kind in kinds(p.frozen):
        if kind.name == "judge" and reward is not None:
            yield Phase(kind.name, other=p.samples_size + reward.awake * reward.sleeps + p.waiting[0])
        if kind.name not in p.ledger.phases:
            continue
        took = p.ledger.phases[kind.name]
        cache = engine if kind.draws and p.policy.tokens else 0  # an engine runs its own passes
        if kind.optional and not took.passes and not cache:
            continue
        other = took.before + trained * took.aside + cache + p.waiting[kind.trains]
        # images of the data are scored like drawn ones
        scored = kind.draws or kind.decodes or (kind.name == "encode images" and bool(p.cfg.rollout.facts.columns))
        if reward is not None and scored:
            other += reward.awake * reward.overlaps
        activations = took.peak - took.before - took.gradients - took.gathered
        yield Phase(kind.name, took.gathered + _gathered_bytes(p, kind, engine), activations, took.gradients, other)


def _gathered_bytes(p: Rehearsal, kind: Kind, engine: int) -> int:
    """Bytes of whole weights throughout a phase: none in an update; those of a sleeping engine while it samples."""
    layout, parallel = p.policy.layout, p.cfg.parallel
    if kind.name in ("encode images", "update"):
        return 0
    if (kind.draws or kind.decodes) and p.cfg.rollout.facts.weights == "copy":
        return 0 if p.policy.tokens else engine  # that of a language model is counted with its cache
    if kind.decodes and not parallel.rollout_unsharded:
        return layout.units()[-1]
    if kind.name in p.frozen:
        layout = p.frozen[kind.name].layout
    whole = parallel.rollout_unsharded
    return layout.unsharded(throughout=whole) + (layout.experts() if whole else 0)


def reward_model(cfg: RunConfig, gpu_memory: int | None, width: int) -> RewardModel | None:
    """The reward model of a job on GPUs of `gpu_memory` bytes (None if unknown), `width` of which share the policy's
    weights; None for a job without one. Raises ValueError, in one line, for damaged files.
    """
    model = cfg.reward.model
    if model.path is None or not cfg.reward.functions:
        return None
    whole = None
    with suppress(ValueError):
        folder = fetch(model.path, model.revision)  # of a hub id: its cached files, and the index
        whole = Path(folder)
    size = None if whole is None else _model_bytes(model, whole)
    weights = None if size is None else -(-size // model.tensor_parallel_size)
    share = None
    if model.engine == "vllm" and gpu_memory is not None:
        share = int(gpu_memory * model.gpu_memory_utilization)
    return RewardModel(weights, share, model.sleep, model.sleep and judged_beside(cfg, width))


def engine_size(cfg: RunConfig, gpu_memory: int | None, layout: Layout) -> int:
    """Bytes that an engine takes on the device while it samples: its share of the GPU, cache included, if it reserves
    one, else a part of its copy of the model, with the LoRA merged into it or beside it.
    """
    if cfg.rollout.facts.weights != "copy":
        return 0
    return int((gpu_memory or 0) * cfg.rollout.engine_memory.reserved) or engine_copy(cfg, layout)


def engine_copy(cfg: RunConfig, layout: Layout) -> int:
    """Bytes of a rank's part of an engine's copy of the model."""
    whole = sum(w.numel for w in layout.weights if not w.lora) * layout.dtype.itemsize
    memory, beside = cfg.rollout.engine_memory, 0
    if memory.adapts and cfg.model.lora_rank > 0:  # most of it on each rank, in buffers of the next size of vLLM's
        beside = sum(w.numel for w in layout.weights if w.lora) * layout.dtype.itemsize
        beside = beside * buffer_rank(cfg.model.lora_rank) // cfg.model.lora_rank
    return -(-whole // memory.ranks) + beside


def _model_bytes(model: RewardModelConfig, folder: Path) -> int | None:
    """Bytes of all weights in the dtype that they are loaded in, or if only their index is within reach, in that of the
    files; None without an index.
    """
    index: dict[str, Any] = {}
    single, files = folder / "model.safetensors", sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():  # the folder may contain the same weights in another form as well
        index = read_json(folder / _INDEX, "reward.model.path")
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    elif single.is_file():
        files = [single]
    if files and all(file.is_file() for file in files):
        bits, wide = 0, DTYPES[model.dtype].itemsize * 8
        for file in files:
            for dtype, shape in tensors(file, "reward.model.path").values():
                digits = re.search(r"\d+", dtype)
                stored = 8 if digits is None else int(digits[0])  # BOOL has no number
                bits += math.prod(shape) * (wide if dtype in _COMPUTED_IN else stored)
        return bits // 8
    stored_size = index.get("metadata", {}).get("total_size")
    return None if stored_size is None else int(stored_size)
