"""What --plan says of memory and messages, against what a step takes on a CPU.

Memory is what the C library says of the process's heap, above what the storages of all live tensors hold before the
step; messages are the tensors that collectives are given. The plan knows neither.
"""

import ctypes
import gc
import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.scale import Mail
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRunConfig
from phalanx.distributed.collectives import all_gather
from phalanx.distributed.fsdp import local
from phalanx.run import flow_matching
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from phalanx.tools.plan.batch import messages as planned_messages
from phalanx.tools.plan.blueprint import family_name
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import Memory, count
from phalanx.tools.plan.rehearsal import Rehearsal
from phalanx.training.supervised import SupervisedTrainer
from tests.helpers.jobs import PROMPTS, base_overrides, update
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import jitter, tiny_sd3

WITHIN, HEAP_NOISE = 0.08, 2_500_000
SMALL = 1 << 16  # bytes
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.addmm_.default)
LORA, FULL = "model.lora_rank=16", "model.lora_rank=0"
CHECKPOINTING, BF16 = "model.gradient_checkpointing=true", "model.dtype=bfloat16"
SOME_BLOCKS = [CHECKPOINTING, "model.gradient_checkpointing_blocks=2"]
SHARDED = "parallel.fsdp_size=2"
NF4 = "model.quantization=nf4"
ONE_PASS = ["actor.ppo_micro_batch_size_per_gpu=4", "rollout.micro_batch_size_per_gpu=4"]

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is asked for by glibc's mallinfo2")


@pytest.fixture(scope="session")
def medium_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny SD3 with a transformer of 59 MB: six blocks, 256 wide."""
    from diffusers import SD3Transformer2DModel

    folder = tiny_sd3(tmp_path_factory.mktemp("models") / "medium_sd3")
    with torch.random.fork_rng(devices=[]):
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=6,
            attention_head_dim=32,
            num_attention_heads=8,
            joint_attention_dim=64,
            caption_projection_dim=256,
            pooled_projection_dim=64,
            pos_embed_max_size=16,
            dual_attention_layers=(0, 1),
            qk_norm="rms_norm",
        )
    jitter(transformer, 1)
    transformer.save_pretrained(folder / "transformer")
    return folder


def configure(model: Path, folder: Path, ranks: int, *overrides: str) -> FlowRLConfig:
    """Four images a rank and step, at 64 x 64 pixels, in one update of two passes."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    sizes = ["rollout.height=64", "rollout.width=64", "rollout.num_inference_steps=3"]
    batch = ["data.train_batch_size=2", f"rollout.n={2 * ranks}"]
    return load_config(FlowRLConfig, None, [*base_overrides(model, folder), *sizes, *batch, *overrides])


def estimate(cfg: FlowRunConfig, cluster: Cluster) -> tuple[Rehearsal, Memory]:
    cfg.model.family = family_name(cfg.model)
    plan = planned(cfg, cluster)
    return plan, count(plan)


def train(t: Any, learn: Callable[..., Any] = update) -> None:
    """A training step, whose updates are made by `learn`."""
    if isinstance(t, SupervisedTrainer):
        t.update(0)
        return
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    reward = all_gather(t.collector.rewards.score()[0])
    learn(t, samples, reward, 0)


# -- memory -------------------------------------------------------------------------------------------------------


class Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


class WideProducts(TorchDispatchMode):
    """Products of bfloat16 by those of float32: CPUs without instructions for them take a hundred times as long."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or args[-1].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        out = func(*(t.float() for t in args), **(kwargs or {}))
        return args[0].copy_(out) if func is aten.addmm_.default else out.to(torch.bfloat16)


class Heap(WideProducts):
    """Bytes of the process's heap, read after operators that make something of size: the most in each phase, if there
    were `held` at first.
    """

    def __init__(self, held: int) -> None:
        super().__init__()
        self._libc = ctypes.CDLL("libc.so.6")
        self._libc.mallinfo2.restype = Mallinfo
        self._start = self._in_use() - held
        self._phases = ["peak"]
        self.most: dict[str, int] = {}

    def _in_use(self) -> int:
        info = self._libc.mallinfo2()
        return info.uordblks + info.hblkhd

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        made = func._schema.returns and func._schema.returns[0].alias_info is None
        # the C library walks over all that is free to say how much is not
        if not made or max((t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor)), default=0) < SMALL:
            return out
        now = self._in_use() - self._start
        for phase in self._phases:
            self.most[phase] = max(now, self.most.get(phase, 0))
        return out

    def during(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a phase of its own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self._phases = self._phases, ["peak", phase]
            try:
                return function(*args, **kwargs)
            finally:
                self._phases = outer

        return run


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages of tensors, by address; a sharded tensor's is the part that is here."""
    found = [local(t).untyped_storage() for t in tensors]
    return {s.data_ptr(): s.nbytes() for s in found if s.nbytes()}


def total(tensors: Iterable[Tensor]) -> int:
    return sum(storages(tensors).values())


def alive() -> dict[int, int]:
    """Bytes of the storages of all tensors that are there, by address."""
    gc.collect()
    return storages(thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))


def parts(t: Any, strangers: dict[int, int]) -> dict[str, int]:
    """Bytes of all tensors that are there between steps, and of some of them; those of the host are left out, and
    `strangers`, those of the tests before in this process.
    """
    everything = alive()
    on_host = storages([p for e in t.policy.model.text_encoders for p in [*e.parameters(), *e.buffers()]])
    on_host |= strangers
    if "reference" in t.policy.trained._weights:
        on_host |= storages(t.policy.trained._weights["reference"].values())
    return {
        "held": sum(size for address, size in everything.items() if address not in on_host),
        "weights": total([*t.policy.model.transformer.parameters(), *t.policy.trained.parameters.values()]),
        "optimizer's state": total(
            value for state in t.job.state.optimizer.state().values() for value in state.values()
        ),
        "moving average": total(t.job.state.ema.values.values()) if t.job.state.ema is not None else 0,
    }


def as_on_gpus(t: Any) -> None:
    for optimizer in t.job.state.optimizer._optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = True


def measure(cfg: FlowRunConfig) -> dict[str, int]:
    """Bytes of the parts, and the most that there are in each phase of a step."""
    strangers = alive()
    t: Any = build(cfg) if isinstance(cfg, FlowRLConfig) else flow_matching.build(cfg)
    as_on_gpus(t)
    with WideProducts():
        train(t)  # imports that come late, and kernels' caches
    found = parts(t, strangers)
    apply = t.job.state.optimizer.step

    def step(loss: Tensor) -> dict[str, Any]:
        found["gradients"] = total(p.grad for p in t.policy.trained.parameters.values() if p.grad is not None)
        return apply(loss)

    with Heap(found["held"]) as heap:
        t.job.state.optimizer.step = heap.during("optimizer", step)
        learn = heap.during("update", update)
        if isinstance(t, SupervisedTrainer):
            t.update = heap.during("update", t.update)
        else:
            t.policy.model.decode = heap.during("rollout: decode", t.policy.model.decode)
            t.collector.rollout.sample = heap.during("rollout: sample", t.collector.rollout.sample)
            if t.updater.algorithm.references:
                t.updater.reference_outputs = heap.during("reference", t.updater.reference_outputs)
        train(t, learn)
    return found | heap.most


def compare(plan: Rehearsal, memory: Memory, took: dict[str, int]) -> None:
    held = memory.held
    before = sum(held.values())
    said = {
        "held": before,
        "weights": held.get("frozen weights", 0) + held["trained weights"],
        "optimizer's state": held["optimizer's state"],
        "moving average": held.get("moving average", 0),
        "gradients": sum(plan.policy.layout.gradient(w) for w in plan.policy.layout.trained),
        **{phase.name: before + phase.total for phase in memory.phases},
        "peak": memory.peak,
    }
    assert said.keys() >= took.keys()
    table = {name: f"{said[name] / 1e6:.2f} MB, took {took[name] / 1e6:.2f}" for name in took}
    kept = {name for name in took if name in ("held", "weights", "optimizer's state", "moving average", "gradients")}
    assert {name: said[name] for name in kept} == pytest.approx({name: took[name] for name in kept}, rel=0.01), table
    peaks = {name: took[name] for name in took if name not in kept}
    assert {name: said[name] for name in peaks} == pytest.approx(peaks, rel=WITHIN, abs=HEAP_NOISE), table


@pytest.mark.quick("full, EMA, two passes")
@needs_glibc
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [FULL, CHECKPOINTING, *ONE_PASS], id="full, checkpointing, one pass", marks=pytest.mark.long),
        pytest.param(1, [LORA, CHECKPOINTING, BF16], id="lora, checkpointing, bfloat16", marks=pytest.mark.long),
        pytest.param(
            1,
            [FULL, *SOME_BLOCKS, *ONE_PASS],
            id="full, checkpointing of 2 blocks of 6, one pass",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            [LORA, *SOME_BLOCKS, BF16, SHARDED],
            id="sharded, lora, checkpointing of 2 blocks of 6, bfloat16",
            marks=pytest.mark.long,
        ),
        pytest.param(1, [FULL, "actor.ema.decay=0.9"], id="full, EMA, two passes", marks=pytest.mark.long),
        pytest.param(
            2,
            [FULL, CHECKPOINTING, "parallel.fsdp_size=1", "algorithm.kl_loss_coef=0.1"],
            id="copies, KL",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            [FULL, CHECKPOINTING, SHARDED, "actor.ema.decay=0.9", *ONE_PASS],
            id="sharded, EMA, one pass",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            [FULL, BF16, SHARDED, "parallel.reshard_after_forward=false"],
            id="sharded, bfloat16",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            [LORA, BF16, SHARDED, "parallel.lora_sharding=replicate", "parallel.rollout_unsharded=false"],
            id="sharded base, replicated LoRA",
            marks=pytest.mark.long,
        ),
        pytest.param(1, [LORA, BF16, CHECKPOINTING, NF4], id="a base in 4 bits", marks=pytest.mark.long),
        pytest.param(2, [LORA, BF16, SHARDED, NF4], id="sharded, a base in 4 bits", marks=pytest.mark.long),
    ],
)
def test_memory(ranks: int, overrides: list[str], medium_folder: Path, tmp_path: Path) -> None:
    cfg = configure(medium_folder, tmp_path, ranks, *overrides)
    took = run_ranks(measure, ranks, cfg, timeout=240)[0]
    compare(*estimate(cfg, Cluster(1, ranks)), took)


@pytest.mark.full
@needs_glibc
def test_memory_of_flow_matching(medium_folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), (200, 30, 90)).save(tmp_path / "red.png")
    pictures = tmp_path / "pictures.jsonl"
    pictures.write_text("".join(json.dumps({"image": "red.png", "prompt": f"red {i}"}) + "\n" for i in range(8)))
    keep = ("model.", "data.max_prompt_length", "rollout.height", "rollout.width", "optim.", "trainer.")
    base = [o for o in base_overrides(medium_folder, tmp_path) if o.startswith(keep)]
    sizes = ["data.train_batch_size=8", "rollout.height=64", "rollout.width=64"]
    job = [f"data.train_files=[{pictures}]", "flow_matching.micro_batch_size_per_gpu=4", CHECKPOINTING]
    cfg = load_config(FlowMatchingTaskConfig, None, [*base, *sizes, *job])
    took = run_ranks(measure, 1, cfg, timeout=240)[0]
    plan, memory = estimate(cfg, Cluster(1, 1))
    compare(plan, memory, took)


# -- messages -----------------------------------------------------------------------------------------------------


def messages(cfg: FlowRLConfig) -> dict[tuple[str, int], float]:
    t = build(cfg)
    with Mail() as mail:
        train(t)
    return mail.received


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        ["model.lora_rank=4", SHARDED],
        [FULL, SHARDED, BF16, "parallel.reshard_after_forward=false", "algorithm.kl_loss_coef=0.1"],
        [
            *["model.lora_rank=4", SHARDED, "parallel.lora_sharding=replicate", "parallel.rollout_unsharded=false"],
            *["actor.detach_uncond=true", CHECKPOINTING, "data.train_batch_size=4"],
        ],
        [FULL, "parallel.fsdp_size=4"],
        [FULL, "parallel.fsdp_size=1"],
    ],
    ids=["lora", "full, KL", "replicated lora, detach_uncond", "one copy", "a copy each"],
)
def test_messages(overrides: list[str], sd3_folder: Path, tmp_path: Path) -> None:
    """Four ranks, as if on two nodes."""
    cfg = configure(sd3_folder, tmp_path, 4, *overrides)
    sent = run_ranks(messages, 4, cfg, timeout=240)[0]
    plan, _ = estimate(cfg, Cluster(2, 2))
    width = plan.policy.layout.width
    kinds = {
        "weights, gathered to sample": ("gather", width),
        "weights, gathered for the reference": ("gather", width),
        "weights, gathered to train": ("gather", width),
        "gradients, reduced to their parts": ("reduce", width),
        "gradients, summed over copies": ("sum", 4 // width),
        "gradients of replicated weights": ("sum", 4),
    }
    said: dict[tuple[str, int], float] = {}
    for item in planned_messages(plan):
        said[kinds[item.what]] = said.get(kinds[item.what], 0) + item.size
        assert item.nodes == (width == 4 or kinds[item.what][0] == "sum")
    assert said == pytest.approx(sent, rel=0.01)
