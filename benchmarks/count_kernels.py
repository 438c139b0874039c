"""Kernels and bytes of one transformer block at its real widths, without a GPU and without weights.

    python benchmarks/count_kernels.py [qwen_image] [sd35_medium] [qwen25_7b] [qwen25_0_5b] [--rows 32] [--size 512]

Without compiling, a kernel is an aten operation on the meta device that is not a view; its bytes are those of the
tensors that it reads and writes, as if there were no cache. Compiled, kernels are the loops that Inductor fuses for
CPUs, and the matrix products and attention between them, by Inductor's own count. Attention counts as one fused kernel.

The milliseconds are modelled, not measured: each kernel takes the time that an H100 needs for its arithmetic or for its
bytes, whichever is longer, at the fractions of its peaks in `Rates`; launches and caches are ignored. The utilization
is the arithmetic divided by that time and by the whole peak.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
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
from torch.utils.flop_counter import flop_registry
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.attention import use_real_rotations
from phalanx.models.fused_lora import FusedLinear
from phalanx.models.lora import add_lora, lora_off
from phalanx.tools.plan.ledger import fused_attention
from phalanx.zoo.families import qwen_image, sd3

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, torch.ops.mkldnn._linear_pointwise)
COUNTED_AS = {  # the operations whose formula in torch's FLOP counter applies
    aten.addmm_: aten.addmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
NONE = (aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)


@dataclass(frozen=True)
class Rates:
    """Peaks of an H100 SXM, of dense bfloat16 arithmetic and of its memory, and the assumed fractions of them that
    kernels reach.
    """

    flops: float = 989.4e12
    memory: float = 3.35e12
    of_products: float = 0.7
    of_attention: float = 0.5
    of_memory: float = 0.85

    def seconds(self, flops: float, size: float, *, attention: bool = False) -> float:
        """Seconds of a kernel with these operations and bytes."""
        fraction = self.of_attention if attention else self.of_products
        return max(flops / self.flops / fraction, size / self.memory / self.of_memory)


RATES = Rates()
# layers of language models, with the widths of their configurations on the hub
LAYERS = {
    "qwen25_7b": Qwen2Config(
        hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944, num_hidden_layers=1
    ),
    "qwen25_0_5b": Qwen2Config(
        hidden_size=896, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864, num_hidden_layers=1
    ),
}


class Kernels(TorchDispatchMode):
    """Counts kernels while it is active: `kernels`, `bytes`, and `elementwise_bytes` without matrix products and
    attention; the arithmetic of these is `flops`, and their modelled time is `seconds`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = self.elementwise_bytes = self.flops = 0
        self.seconds = 0.0

    @property
    def modelled(self) -> float:
        """Seconds of all kernels; the time of elementwise ones is that of their bytes."""
        return self.seconds + RATES.seconds(0, self.elementwise_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or packet in NONE:
            return out
        moved = sum(_bytes(t) for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        self.kernels += 1
        self.bytes += moved
        attention = "attention" in str(packet)
        if packet not in PRODUCTS and not attention:
            self.elementwise_bytes += moved
            return out
        counter = flop_registry.get(COUNTED_AS.get(packet, packet))  # None for oneDNN's products, which no GPU has
        flops = 0 if counter is None else counter(*args, **(kwargs or {}), out_val=out)
        self.flops += flops
        self.seconds += RATES.seconds(flops, moved, attention=attention)
        return out


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements: repeated reads of an expanded tensor come from a cache."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.itemsize


def block_of(name: str, rank: int, rows: int, size: int, *, real: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A block of a shape, in bfloat16 on the meta device with a LoRA, and its arguments for `rows` images of
    `size` x `size` pixels. Its inputs require gradients, as they do after another block.
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


def layer_of(name: str, rows: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """A layer of a language model in bfloat16 on the meta device, with all weights trained, and its inputs for `rows`
    samples of `length` tokens. The attention costs the same as that of as many packed samples.
    """
    config = LAYERS[name]
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = Qwen2DecoderLayer(config, 0).to(torch.bfloat16)
        hidden = torch.empty(rows, length, config.hidden_size, dtype=torch.bfloat16)
        rotary = Qwen2RotaryEmbedding(config)(hidden, torch.empty(1, length, dtype=torch.long))
    return layer, {"hidden_states": hidden.requires_grad_(), "position_embeddings": rotary}


def passes(block: nn.Module, inputs: dict[str, Any]) -> dict[str, Kernels]:
    """The kernels of a forward pass, and of the backward pass after it."""
    forward, backward = Kernels(), Kernels()
    wanted = [p for p in block.parameters() if p.requires_grad]
    wanted += [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
    with fused_attention():
        with forward:
            out = _several(block(**inputs))
        grads = [torch.empty_like(x) for x in out]
        with backward:
            torch.autograd.grad(out, wanted, grads, allow_unused=True)
    return {"forward": forward, "backward": backward}


def _several(outputs: Any) -> Any:
    """The outputs as a list: a layer of a language model has only one."""
    return [outputs] if isinstance(outputs, Tensor) else outputs


def trace(
    block: nn.Module,
    inputs: dict[str, Any],
    compiler: Callable[[str], Callable[[Any, Any], Any]],
    mode: FakeTensorMode,
    *,
    inference: bool = False,
) -> None:
    """Give the graphs of the passes to `compiler("forward")` and `compiler("backward")`, and run what they return.
    `inference`: without a backward pass.
    """

    def function(weights: dict[str, Tensor], inputs: dict[str, Any]) -> Any:
        return functional_call(block, weights, kwargs=inputs)

    run = aot_function(
        function,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )

    def fake(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).requires_grad_(t.requires_grad)

    # on fake CPU tensors, because Inductor cannot generate code for the meta device
    with mode, fused_attention(), torch.set_grad_enabled(not inference):
        out = _several(run(*tree_map_only(Tensor, fake, (dict(block.named_parameters()), inputs))))
        if not inference:
            torch.autograd.backward(out, [torch.empty_like(x) for x in out])


def compiled_passes(block: nn.Module, inputs: dict[str, Any], *, inference: bool = False) -> dict[str, Kernels]:
    """The kernels of the passes as compiled by Inductor; `inference`: of a graph without a backward pass."""
    found: dict[str, Kernels] = {}
    mode = FakeTensorMode()

    def counting(way: str) -> Callable[[Any, Any], Any]:
        def count(graph: Any, args: Any) -> Any:
            lowering = GraphLowering(graph, args, is_inference=inference)
            with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
                lowering.run(*args)
                lowering._update_scheduler()
                found[way] = scheduled(lowering)
            return graph.forward

        return count

    trace(block, inputs, counting, mode, inference=inference)
    return found


def scheduled(lowering: GraphLowering) -> Kernels:
    """The nodes of a scheduled graph, and their bytes by Inductor's own count."""
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
    """Set the class of LoRA layers."""
    for part in block.modules():
        if isinstance(part, Linear):
            part.__class__ = kind


def flow_block(name: str, args: argparse.Namespace) -> dict[str, dict[str, Kernels]]:
    """The passes of a block of a flow model with a LoRA, for each way of computing it."""
    sizes = args.rank, args.rows, args.size
    block, inputs = block_of(name, *sizes)
    by(Linear, block)
    ways = {"peft": passes(block, inputs)}
    by(FusedLinear, block)
    ways["fused LoRA"] = passes(block, inputs)
    with lora_off(block):
        ways["no LoRA"] = passes(block, inputs)
    block, inputs = block_of(name, *sizes, real=True)
    ways["fused LoRA, compiled"] = compiled(ways["fused LoRA"], compiled_passes(block, inputs))
    inference = compiled_passes(block, inputs, inference=True)
    ways["the same without a backward pass"] = compiled(ways["fused LoRA"], inference)
    return ways


def language_layer(name: str, args: argparse.Namespace) -> dict[str, dict[str, Kernels]]:
    """The passes of a layer of a language model, with all weights trained."""
    layer, inputs = layer_of(name, args.tokens // args.length, args.length)
    ways = {"all weights": passes(layer, inputs)}
    ways["all weights, compiled"] = compiled(ways["all weights"], compiled_passes(layer, inputs))
    return ways


def compiled(eager: dict[str, Kernels], fused: dict[str, Kernels]) -> dict[str, Kernels]:
    """`fused`, with the arithmetic of products and attention from the passes without compiling."""
    for way, kernels in fused.items():
        kernels.flops, kernels.seconds = eager[way].flops, eager[way].seconds
    return fused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["qwen_image", "sd35_medium", *LAYERS])
    parser.add_argument("--rows", type=int, default=32, help="images, noise levels and guidance branches (32)")
    parser.add_argument("--size", type=int, default=512, help="pixels per side (512)")
    parser.add_argument("--rank", type=int, default=64, help="rank of the LoRA (64)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per pass of a language model (8192)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each of its samples (512)")
    args = parser.parse_args()
    for name in args.shapes:
        if name in LAYERS:
            ways, sizes = language_layer(name, args), f"{args.tokens} tokens in samples of {args.length}"
        else:
            ways, sizes = flow_block(name, args), f"rank {args.rank}, {args.rows} rows, {args.size} px"
        print(f"\n{name}, {sizes}, bfloat16; GB moved, and of all but products; ms and utilisation are modelled")
        for label, of_passes in ways.items():
            line = f"{label:33}"
            for way, k in of_passes.items():
                used = 100 * k.flops / k.modelled / RATES.flops
                line += f"  {way} {k.kernels:4} kernels {k.bytes / 1e9:6.2f} GB {k.elementwise_bytes / 1e9:6.2f} GB"
                line += f" {1e3 * k.modelled:6.2f} ms {used:3.0f} %"
            print(line)


if __name__ == "__main__":
    main()
