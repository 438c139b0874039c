"""Memory of a rank, phase by phase, before anything runs.

A Ledger counted the tensors of a phase while the job's code ran (phalanx.plan.rehearsal). The memory of FSDP
meanwhile is arithmetic over its units (phalanx.plan.layout). Of models beside the trained one, the reward model and an
engine's copy, none is loaded: the sizes are in the headers of their files, or in their index. Not counted: the
allocator's gaps, CUDA's context, NCCL's buffers, and models that rewards keep.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.config.reward import RewardModelConfig
from phalanx.config.run import RunConfig
from phalanx.distributed.link import BUCKET_BYTES
from phalanx.distributed.placement import judged_beside
from phalanx.distributed.roles import ACTOR, ROLLOUT
from phalanx.models.flow.folder import dtype_on_disk
from phalanx.models.flow.policy import DTYPES
from phalanx.models.headers import read_json, tensors
from phalanx.models.stored import dtype_to_read
from phalanx.plan.blueprint import fetch
from phalanx.plan.layout import Layout, Weight
from phalanx.plan.ledger import Kind, kinds, nbytes
from phalanx.plan.rehearsal import AnyPlannedPolicy, Planned
from phalanx.training.offload import PART, SLOTS

_COMPUTED_IN = ("F64", "F32", "F16", "BF16")  # as safetensors calls what is loaded in the dtype that is asked for
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Loading:
    """Bytes in the host's memory: those `copied` by each rank, and those of mapped files, `shared` by the ranks of a
    node. `either` is one or the other: the files that would tell are not here.
    """

    copied: int = 0
    shared: int = 0
    either: int = 0

    def __add__(self, other: "Loading") -> "Loading":
        return Loading(self.copied + other.copied, self.shared + other.shared, self.either + other.either)

    def of_a_node(self, ranks: int, *, cast: bool) -> int:
        """Bytes of `ranks` ranks; `cast`: the bytes that may be either are copied by each rank."""
        copied, shared = (self.copied + self.either, self.shared) if cast else (self.copied, self.shared + self.either)
        return copied * ranks + shared


@dataclass(frozen=True)
class RewardModel:
    """The reward model on a rank that holds a part of it, in bytes.

    `weights`: that part; None where it is not known. `share`: memory that vLLM takes of the GPU while it scores, its
    cache included; None for other engines, and where the GPU is not known. On the device it has `held` throughout,
    `woken` more while it scores, and of that `while_sampling` while images are sampled. The host has `loading` of it
    while it is loaded, and `asleep` from then on. `folder` is where its size was found.
    """

    weights: int | None = None
    share: int | None = None
    held: int = 0
    woken: int = 0
    while_sampling: int = 0
    loading: Loading = Loading()
    asleep: int = 0
    folder: str | None = None


@dataclass(frozen=True)
class Phase:
    """Bytes of a phase on the device, beside those that are held throughout; `other` are samples, and memory that only
    this phase needs.
    """

    name: str
    gathered: int = 0
    activations: int = 0
    gradients: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.gathered + self.activations + self.gradients + self.other


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: `held` on the device throughout, and `host` in the host's memory, by what they are.

    `loading`: the stages of the start, each in the host's memory before its weights go to the device.
    `reward`: the reward model, where this rank holds a part of one; it is loaded first.
    """

    held: dict[str, int]
    phases: list[Phase]
    host: dict[str, int]
    loading: list[Loading]
    reward: RewardModel | None

    @property
    def largest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """The most bytes on the device."""
        return sum(self.held.values()) + self.largest.total

    def loading_of_a_node(self, ranks: int, judges: int, *, cast: bool) -> int:
        """The most in the memory of a node while its ranks load, `judges` of which hold a part of the reward model.
        `cast`: see Loading.of_a_node.
        """
        judge = self.reward or RewardModel()
        models = max(stage.of_a_node(ranks, cast=cast) for stage in self.loading)
        return max(judge.loading.of_a_node(judges, cast=cast), judge.asleep * judges + models)


def count(p: Planned, gpu_memory: int | None = None) -> Memory:
    """The memory of a job on GPUs of `gpu_memory` bytes (None: not known). Of the ranks, it is one that holds a part of
    the reward model, where there is one.
    """
    layout, policy, sleeps = p.policy.layout, p.policy, p.cfg.rollout.engine_memory.sleeps
    samples, trains, offload = p.role in ("", ROLLOUT), p.trains, p.cfg.parallel.optimizer_offload
    reward = reward_model(p.cfg, gpu_memory, layout.width) if samples else None
    judge = reward or RewardModel()
    engine = engine_share(p.cfg, gpu_memory, layout) if samples else 0
    trained = [w for w in layout.trained if not w.away]
    state = _beside(p, layout.trained if trains else [])
    on_device = _beside(p, trained if trains and not offload else [])
    held = {
        "frozen weights": layout.kept_on(host=False) - layout.kept(trained),
        "trained weights": layout.kept(trained) + layout.copies(),
        "model's buffers": _buffers(policy),
        **on_device,
        "VAE": nbytes(*policy.decoders),
    }
    encoders = [nbytes(*policy.encoders)]
    host = {"text encoders": 0, "weights": layout.kept_on(host=True)}
    for name, teacher in p.frozen.items():
        held[name] = teacher.layout.kept_on(host=False) + _buffers(teacher)
        host[name] = teacher.layout.kept_on(host=True)
        if teacher.model.text_encoders is not policy.encoders:
            encoders.append(nbytes(*teacher.model.text_encoders))
    held |= {"reward model": judge.held, "sampling engine": 0 if sleeps else engine, **p.beside}
    host["text encoders"] = sum(encoders)
    host |= {name: size - on_device[name] for name, size in state.items()}
    host["reference"] = layout.kept(layout.trained) if p.copies_reference and trains else 0
    host |= {"images": p.outputs_size, "sleeping reward model": judge.asleep}
    phases = []
    before, after = p.waiting
    if encoders[0] and samples:
        phases.append(Phase("encode prompts", other=max(encoders) + before))
    if p.role:
        phases.append(Phase("weights from the actor", other=_passing_on(p)))
    phases += _phases(p, layout.kept(trained), reward, engine if sleeps else 0)
    if trains:
        moved = _beside(p, trained)["optimizer's state"] * offload
        gradients = sum(map(layout.gradient, trained))
        other = p.samples_size + _stepping(p, trained, moved) + after
        phases.append(Phase("optimizer", gradients=gradients, other=other))
    some = [{name: size for name, size in sizes.items() if size} for sizes in (held, host)]
    return Memory(some[0], phases, some[1], list(_loading(p)), reward)


def _stepping(p: Planned, trained: list[Weight], moved: int) -> int:
    """Temporary bytes of an optimizer step, for which `moved` bytes of its state come from the host in parts."""
    # on GPUs, AdamW takes the roots of all second moments at once; the message to other copies was sent by then
    roots = p.policy.layout.kept(trained)
    if moved:
        largest, total = max(w.part for w in trained), sum(w.part for w in trained)
        part = max(PART, largest * moved // total)
        moved, roots = min(moved, SLOTS * part), min(roots, part)
    return max(p.policy.layout.message(), moved + roots)


def _passing_on(p: Planned) -> int:
    """Whole tensors on their way from the actor: a message and the one before or after it, and on the sending ranks a
    tensor of the next one.
    """
    sizes = [w.numel * w.kept.itemsize for w in p.policy.layout.trained]
    message = max(*sizes, min(BUCKET_BYTES, sum(sizes)), 0)
    return message * (3 if p.role == ACTOR else 2)


def _loading(p: Planned) -> Iterator[Loading]:
    """The steps of loading: the policy, an engine's copy of it, and each teacher."""
    encoders = _from_files(p.policy, "text_encoder")
    yield encoders + _weights(p.policy) + _from_files(p.policy, "vae")
    # made on the CPU, when the model has gone to the device
    if p.role in ("", ROLLOUT) and not p.policy.tokens:
        yield encoders + Loading(copied=engine_copy(p.cfg, p.policy.layout))
    there = encoders + Loading(copied=p.policy.layout.kept_on(host=True))
    for teacher in p.frozen.values():  # each with encoders and VAE, equal ones too
        theirs = _from_files(teacher, "text_encoder")
        yield there + theirs + _weights(teacher) + _from_files(teacher, "vae")
        there += Loading(copied=teacher.layout.kept_on(host=True))
        if teacher.model.text_encoders is not p.policy.encoders:
            there += theirs


def _weights(policy: AnyPlannedPolicy) -> Loading:
    """The weights of the trained model in its files; a LoRA is new, and in none."""
    lora = sum(w.numel * w.kept.itemsize for w in policy.layout.weights if w.lora)
    base = [w for w in policy.layout.weights if not w.lora]
    kept = next(w.kept for w in base if not w.quantized)
    # where all weights are trained, each rank casts its part of the files' tensors
    read = dtype_to_read(policy.files, kept) if policy.config.lora_rank == 0 else kept
    # they are quantized once they are there
    stored = sum(w.count * (kept if w.quantized else w.kept).itemsize for w in base)
    size = stored * read.itemsize // kept.itemsize
    return loading(policy.files, size, read) + Loading(copied=lora)


def _from_files(policy: AnyPlannedPolicy, kind: str) -> Loading:
    """The parts of the pipeline whose names begin with `kind`."""
    total = Loading()
    for name, part in policy.components.items():
        if name.startswith(kind) and isinstance(part, nn.Module):
            total += loading(Path(policy.config.path) / name, nbytes(part), next(part.parameters()).dtype)
    return total


def _beside(p: Planned, weights: list[Weight]) -> dict[str, int]:
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


def _buffers(policy: AnyPlannedPolicy) -> int:
    return sum(buffer.nbytes for buffer in policy.trained.module.buffers())


def _phases(p: Planned, trained: int, reward: RewardModel | None, engine: int) -> Iterator[Phase]:
    """The phases that ran, in the order of a step. The `trained` bytes are copied where other weights take their place.
    A reward model may be there beside samples, and with those of a language model `engine` bytes of an engine.
    """
    for kind in kinds(p.frozen):
        if kind.name == "judge" and reward is not None:
            yield Phase(kind.name, other=p.samples_size + reward.woken + p.waiting[0])
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
            other += reward.while_sampling
        activations = took.peak - took.before - took.gradients - took.gathered
        yield Phase(kind.name, took.gathered + _gathered(p, kind), activations, took.gradients, other)


def _gathered(p: Planned, kind: Kind) -> int:
    """Whole weights throughout a phase, as an update has none; an engine has a copy of all while it samples."""
    layout, parallel = p.policy.layout, p.cfg.parallel
    if kind.name in ("encode images", "update"):
        return 0
    if (kind.draws or kind.decodes) and p.cfg.rollout.facts.weights == "copy":
        # else it is counted with the memory that is held, or with the cache beside it
        alone = not p.policy.tokens and p.cfg.rollout.engine_memory.sleeps
        return engine_copy(p.cfg, layout) if alone else 0
    if kind.decodes and not parallel.rollout_unsharded:
        return layout.units()[-1]
    if kind.name in p.frozen:
        layout = p.frozen[kind.name].layout
    whole = parallel.rollout_unsharded
    return layout.unsharded(throughout=whole) + (layout.experts() if whole else 0)


# -- models beside the trained one, and files ------------------------------------------------------------------------


def loading(folder: Path, size: int, dtype: torch.dtype) -> Loading:
    """Loading `size` bytes in `dtype` from a folder's *.safetensors.

    Tensors are views of the mapped file as long as their dtype is the file's; a cast makes a copy.
    """
    if not any(folder.glob("*.safetensors")):
        return Loading(either=size)
    return Loading(shared=size) if dtype_on_disk(folder) is dtype else Loading(copied=size)


def reward_model(cfg: RunConfig, gpu_memory: int | None, width: int) -> RewardModel | None:
    """The reward model of a job on GPUs of `gpu_memory` bytes (None: not known), `width` of which share the policy's
    weights; None for a job without one.

    Raises ValueError, with one line, for files that are damaged.
    """
    model, vllm, loads = cfg.reward.model, cfg.reward.model.engine == "vllm", Loading()
    if model.path is None or not cfg.reward.functions:
        return None
    folder = whole = weights = None
    with suppress(ValueError):
        folder = fetch(model.path, model.revision, [_INDEX])  # of a hub id: what is in the cache, and the index
    if folder is not None:
        whole = _size(model, Path(folder))
    if folder is not None and whole is not None:
        weights = -(-whole // model.tensor_parallel_size)
        if not vllm:  # which loads to the device, a part at a time
            loads = loading(Path(folder), whole, DTYPES[model.dtype])
    share = int(gpu_memory * model.gpu_memory_utilization) if vllm and gpu_memory is not None else None
    awake, beside = weights or 0 if share is None else share, judged_beside(cfg, width)
    if not model.sleep:
        return RewardModel(weights, share, held=awake, loading=loads, folder=folder)
    return RewardModel(weights, share, 0, awake, awake * beside, loads, asleep=weights or 0, folder=folder)


def engine_copy(cfg: RunConfig, layout: Layout) -> int:
    """Bytes of a sampling engine's copy of the model on a rank, the LoRA merged into it."""
    if cfg.rollout.facts.weights != "copy":
        return 0
    whole = sum(w.numel for w in layout.weights if not w.lora) * layout.dtype.itemsize
    return -(-whole // cfg.rollout.engine_memory.ranks)


def engine_share(cfg: RunConfig, gpu_memory: int | None, layout: Layout) -> int:
    """Bytes that an engine takes on the device while it samples: its share of the GPU, with the cache in it, where it
    reserves one.
    """
    reserved = 0 if gpu_memory is None else int(gpu_memory * cfg.rollout.engine_memory.reserved)
    return reserved or engine_copy(cfg, layout)


def _size(model: RewardModelConfig, folder: Path) -> int | None:
    """Bytes of all weights in the dtype that they are loaded in, or where only their index is within reach, in that of
    the files. None where neither is.
    """
    index: dict[str, Any] = {}
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX, "reward.model.path")
    single, files = folder / "model.safetensors", sorted(folder.glob("*.safetensors"))
    if index:  # beside its files the folder may have the same weights in another form
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
