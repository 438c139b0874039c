"""Kernels and bytes of one transformer block at its real widths: no GPU and no weights.

    python benchmarks/count_kernels.py [qwen_image] [sd35_medium] [--rows 32] [--size 512] [--rank 64]

Without compiling, a kernel is an operation of aten on the meta device that is no view; its bytes are those of the
tensors that it reads and writes, so that a cache hides none of them. Compiled, kernels are the loops that Inductor
fuses for CPUs, and the products and attention between them, by its own account. Attention counts as one fused kernel.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel, SD3Transformer2DModel
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from phalanx.config.flow import FlowModelConfig
from phalanx.models.flow.attention import use_real_rotations
from phalanx.models.flow.families import qwen_image, sd3
from phalanx.models.fused_lora import FusedLinear
from phalanx.models.lora import add_lora, lora_off
from phalanx.plan.ledger import fused_attention

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, torch.ops.mkldnn._linear_pointwise)
NONE = (aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)


class Kernels(TorchDispatchMode):
    """Counts what runs while it is active: `kernels`, `bytes`, and `elementwise_bytes` of all but matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = self.elementwise_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or packet in NONE:
            return out
        moved = sum(_bytes(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        self.kernels += 1
        self.bytes += moved
        if packet not in PRODUCTS and "attention" not in str(packet):
            self.elementwise_bytes += moved
        return out


def _bytes(tensor: Tensor) -> int:
    """Of the elements that there are: an expanded tensor's are read from a cache."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.itemsize


def block_of(name: str, rank: int, rows: int, size: int, *, real: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A block of a shape, in bfloat16 on the meta device with a LoRA, and what it is called with: `rows` rows of images
    of `size` pixels a side. What its transformer gives it needs a gradient, as behind another block.
    """
    from shapes import SHAPES

    text, side = SHAPES[name].text_length, size // 16
    with torch.device("meta"):
        if name == "sd35_medium":
            config = SHAPES[name].transformer | {"num_layers": 2, "dual_attention_layers": ()}
            transformer: Any = SD3Transformer2DModel(**config)
            sd3.Model.adapt(transformer)
            inputs = {
                "hidden_states": torch.empty(rows, 16, 2 * side, 2 * side),
                "encoder_hidden_states": torch.empty(rows, 77 + 256, 4096),
                "pooled_projections": torch.empty(rows, 2048),
            }
            targets = sd3.Model.lora_targets
        else:
            transformer = QwenImageTransformer2DModel(num_layers=2)
            inputs = {
                "hidden_states": torch.empty(rows, side * side, 64),
                "encoder_hidden_states": torch.empty(rows, text or 0, 3584),
                "img_shapes": [[(1, side, side)]] * rows,
            }
            targets = qwen_image.Model.lora_targets
            if real:
                use_real_rotations(transformer)
        transformer.to(torch.bfloat16)
        block = transformer.transformer_blocks[0]
        add_lora(block, FlowModelConfig(path=name, lora_rank=rank, lora_init="gaussian"), targets, seed=0)
        block.to(torch.bfloat16)
        found: dict[str, Any] = {}
        block.register_forward_pre_hook(lambda _, args, kwargs: found.update(kwargs), with_kwargs=True)
        inputs = {k: v.bfloat16() if isinstance(v, Tensor) else v for k, v in inputs.items()}
        with torch.no_grad(), fused_attention():
            transformer(**inputs, timestep=torch.empty(rows, dtype=torch.bfloat16))
    for key in ("hidden_states", "encoder_hidden_states"):
        found[key].requires_grad_()
    return block, found


def passes(block: nn.Module, inputs: dict[str, Any]) -> dict[str, Kernels]:
    """What a forward pass takes, and what the backward pass takes after it."""
    forward, backward = Kernels(), Kernels()
    wanted = [p for p in block.parameters() if p.requires_grad]
    wanted += [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
    with fused_attention():
        with forward:
            out = block(**inputs)
        grads = [torch.empty_like(x) for x in out]
        with backward:
            torch.autograd.grad(out, wanted, grads, allow_unused=True)
    return {"forward": forward, "backward": backward}


def compiled_passes(block: nn.Module, inputs: dict[str, Any], *, inference: bool = False) -> dict[str, Kernels]:
    """The same of what Inductor would make of it; `inference`: of a graph without a backward pass."""
    found: dict[str, Kernels] = {}
    mode = FakeTensorMode()

    def counting(way: str) -> Callable[[Any, Any], Any]:
        def count(graph: Any, args: Any) -> Any:
            lowering = GraphLowering(graph, args, is_inference=inference)
            with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
                lowering.run(*args)
                lowering._update_scheduler()
                found[way] = counted(lowering)
            return graph.forward

        return count

    def function(weights: dict[str, Tensor], inputs: dict[str, Any]) -> Any:
        return functional_call(block, weights, kwargs=inputs)

    run = aot_function(
        function,
        fw_compiler=counting("forward"),
        bw_compiler=counting("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )

    def fake(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).requires_grad_(t.requires_grad)

    # Inductor has no code for the meta device
    with mode, fused_attention(), torch.set_grad_enabled(not inference):
        out = run(*tree_map_only(Tensor, fake, (dict(block.named_parameters()), inputs)))
        if not inference:
            torch.autograd.backward(out, [torch.empty_like(x) for x in out])
    return found


def counted(lowering: GraphLowering) -> Kernels:
    """Nodes of a scheduled graph, and their bytes by Inductor's own account."""
    kernels = Kernels()
    for node in lowering.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        size = node.get_read_write_buffers_sizes()
        kernels.kernels += 1
        kernels.bytes += size
        if not node.is_extern():
            kernels.elementwise_bytes += size
    return kernels


def by(kind: type[Linear], block: nn.Module) -> None:
    """Have the LoRA computed by a class."""
    for part in block.modules():
        if isinstance(part, Linear):
            part.__class__ = kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["qwen_image", "sd35_medium"])
    parser.add_argument("--rows", type=int, default=32, help="images, noise levels and guidance branches (32)")
    parser.add_argument("--size", type=int, default=512, help="pixels of a side (512)")
    parser.add_argument("--rank", type=int, default=64, help="of the LoRA (64)")
    args = parser.parse_args()
    for name in args.shapes:
        sizes = args.rank, args.rows, args.size
        block, inputs = block_of(name, *sizes)
        by(Linear, block)
        found = {"peft": passes(block, inputs)}
        by(FusedLinear, block)
        found["fused LoRA"] = passes(block, inputs)
        with lora_off(block):
            found["no LoRA"] = passes(block, inputs)
        block, inputs = block_of(name, *sizes, real=True)
        found["fused LoRA, compiled"] = compiled_passes(block, inputs)
        found["the same without a backward pass"] = compiled_passes(block, inputs, inference=True)
        print(
            f"\n{name}, rank {args.rank}, {args.rows} rows, {args.size} px, bfloat16; GB moved, and of all but products"
        )
        for label, counted in found.items():
            line = f"{label:33}"
            for way, k in counted.items():
                line += f"  {way} {k.kernels:4} kernels {k.bytes / 1e9:6.2f} GB {k.elementwise_bytes / 1e9:6.2f} GB"
            print(line)


if __name__ == "__main__":
    main()
