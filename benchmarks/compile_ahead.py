"""Compile for a GPU, without having one, the code that `model.compile` generates for one transformer block.

    python benchmarks/compile_ahead.py [sd35_medium] [qwen_image] [qwen25_7b] [--arch 90] [--rows 8] [--size 512]

The block has its real widths. The script needs Triton, whose wheel includes an assembler, but neither a driver, nor a
device, nor a CUDA build of torch. The block is traced on fake CPU tensors; its graphs are moved to `cuda:0` and given
to Inductor, which is made to see a device of the architecture. Each Triton kernel that it generates is compiled to
machine code (a cubin), for each launch configuration among which a job would choose by timing. Matrix products and
attention are library calls, and are not compiled.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from count_kernels import LAYERS, block_of, by, layer_of, trace
from torch import nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import async_compile, compile_fx, scheduler
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import reinplace
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from phalanx.models.fused_lora import FusedLinear

DEVICE = torch.device("cuda", 0)


@dataclass
class Kernel:
    """A Triton kernel: the bytes of its machine code and its shared memory, by launch configuration."""

    name: str
    code: list[int]
    shared: list[int]


class Driver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


class NotLoaded:
    """Stand-in for a kernel in the module that Inductor generates, which is never called."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no device")


@contextmanager
def pretended(arch: int, kernels: dict[str, Kernel]) -> Iterator[None]:
    """Make Inductor and Triton see a device of the architecture; collect the compiled kernels by their source."""
    properties = SimpleNamespace(
        name="pretended",
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=232448,
        total_memory=80 << 30,
    )
    state = torch.zeros(16, dtype=torch.uint8)

    def compile_kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> NotLoaded:
        if source not in kernels:
            kernel = async_compile._load_triton_kernel_from_source(name, source)
            kernel.precompile(warm_cache_only=True)
            binaries = [result.kernel for result in kernel.compile_results]
            code = [len(binary.asm["cubin"]) for binary in binaries]
            kernels[source] = Kernel(name, code, [binary.metadata.shared for binary in binaries])
        return NotLoaded()

    replaced: list[tuple[Any, str, Any]] = [
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: (arch // 10, arch % 10)),
        (torch.cuda, "get_rng_state", lambda device=None: state),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
        (torch.cuda, "_exchange_device", lambda device: 0),
        (torch.cuda, "_maybe_exchange_device", lambda device: 0),
        (CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: arch)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: properties)),
        (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (scheduler, "has_triton", lambda: True),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (async_compile.AsyncCompile, "triton", compile_kernel),
        (reinplace, "_inplace_generalized_scatter", lambda out, src, views: out),  # of fake tensors
    ]
    options = {"compile_threads": 1, "force_disable_caches": True, "use_static_triton_launcher": False}
    driver.set_active(Driver(arch))
    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch(options))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def on_device(tensor: FakeTensor) -> FakeTensor:
    """The same shape and strides on `cuda:0`, without a call into CUDA."""
    with fake_tensor.in_kernel_invocation_manager(tensor.fake_mode):
        meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(tensor.fake_mode, meta, DEVICE)


def moved(graph: GraphModule, args: list[Any]) -> tuple[GraphModule, list[Any]]:
    """A copy of a graph whose tensors are on `cuda:0`."""
    graph = deepcopy(graph)
    mode = next(arg.fake_mode for arg in args if isinstance(arg, FakeTensor))
    args = [on_device(arg) if isinstance(arg, FakeTensor) else arg for arg in args]
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": DEVICE}
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*args)
    return graph, args


def compile_block(block: nn.Module, inputs: dict[str, Any], arch: int) -> dict[str, list[Kernel]]:
    """The kernels of a block's forward and backward pass."""
    by_pass: dict[str, list[Kernel]] = {}

    def compiler(way: str) -> Callable[[GraphModule, list[Any]], Any]:
        def compile_graph(graph: GraphModule, args: list[Any]) -> Any:
            kernels: dict[str, Kernel] = {}
            with pretended(arch, kernels):
                compile_fx.compile_fx_inner(*moved(graph, args), is_backward=way == "backward")
            by_pass[way] = list(kernels.values())
            return make_boxed_func(graph.forward)

        return compile_graph

    torch._C._ensureCUDADeviceGuardSet()  # so that autograd's switch of devices does nothing without a device
    trace(block, inputs, compiler, FakeTensorMode())
    return by_pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["sd35_medium", "qwen_image", "qwen25_7b"])
    parser.add_argument("--arch", type=int, default=90, help="compute capability without its dot: 80, 89, 90, 100 (90)")
    parser.add_argument("--rows", type=int, default=8, help="images, noise levels and guidance branches (8)")
    parser.add_argument("--size", type=int, default=512, help="pixels of a side (512)")
    parser.add_argument("--rank", type=int, default=64, help="rank of the LoRA (64)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a packed row of a language model (8192)")
    args = parser.parse_args()
    for name in args.shapes:
        start = time.perf_counter()
        if name in LAYERS:
            block, inputs = layer_of(name, 1, args.tokens)
        else:
            block, inputs = block_of(name, args.rank, args.rows, args.size, real=True)
            by(FusedLinear, block)
        for way, kernels in compile_block(block, inputs, args.arch).items():
            code = [size for kernel in kernels for size in kernel.code]
            shared = max(size for kernel in kernels for size in kernel.shared)
            print(
                f"{name:12} {way:8} {len(kernels):3} kernels, {len(code):3} cubins of sm_{args.arch}: "
                f"median {statistics.median(code) / 1e3:.1f} kB, shared memory at most {shared / 1e3:.1f} kB"
            )
        print(f"{name:12} {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
