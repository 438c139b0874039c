"""Packed rows by one call of torch's varlen_attn per layer, whose arguments a plain reference reads here: it has no CPU
kernel, so only a GPU shows the kernel itself.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from phalanx.config.lm import LMDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.models.lm import packing
from phalanx.models.lm import varlen as ours
from phalanx.models.lm.lm_policy import build_policy
from phalanx.models.lm.model import CausalLM
from tests.numerics.test_packing import STARTS, trace

SIGNATURE = inspect.signature(varlen.varlen_attn)


class Reference:
    """varlen_attn in plain operators, as its documentation describes it; counts its calls."""

    def __init__(self, *, grouped: bool) -> None:
        self.grouped, self.calls = grouped, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = SIGNATURE.bind(*args, **kwargs).arguments  # raises for what torch's function would not take
        if not self.grouped:
            assert "enable_gqa" not in given, "torch 2.11 does not have it"
            assert given["key"].shape[1] == given["query"].shape[1]
        self.calls += 1
        ends_q, ends_k = given["cu_seq_q"], given["cu_seq_k"]
        assert ends_q.dtype == ends_k.dtype == torch.int32
        assert given["max_q"] == ends_q.diff().max() and given["max_k"] == ends_k.diff().max()
        left, right = given["window_size"]
        assert right == 0
        parts = []
        for i in range(len(ends_q) - 1):
            q = given["query"][ends_q[i] : ends_q[i + 1]].transpose(0, 1)
            k, v = (given[name][ends_k[i] : ends_k[i + 1]].transpose(0, 1) for name in ("key", "value"))
            rows, columns = q.shape[1], k.shape[1]
            seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)  # aligned at the last token
            if left >= 0:
                seen &= torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows - left)
            gqa = given.get("enable_gqa", False)
            out = scaled_dot_product_attention(q, k, v, seen, scale=given.get("scale"), enable_gqa=gqa)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_packed_rows_take_one_call_per_layer(
    grouped: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and gradients are those of padded samples, with shared prompts and without."""
    reference = Reference(grouped=grouped)
    monkeypatch.setattr(varlen, "varlen_attn", reference)
    monkeypatch.setattr(ours, "WITH_GROUPS", grouped)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "max_window_layers": 1}
    sliding = {"use_sliding_window": window is not None, "sliding_window": window}
    lm = Qwen3ForCausalLM(Qwen3Config(vocab_size=400, head_dim=16, **sliding, **sizes, **layers)).eval()
    given, results = trace(), []
    for prompts in ("padded", None, "abcaa"):
        row = None if prompts == "padded" else packing.Row.of(given.ids, given.stops.tolist(), STARTS, prompts)
        lm.config._attn_implementation = "sdpa" if row is None else packing.PACKED_VARLEN
        lm.zero_grad()
        log_prob = CausalLM(lm, chunk=64)(given.ids, given.predicting, 1.0, row)[0]
        log_prob.sum().backward()
        results.append([log_prob.detach(), lm.model.layers[0].self_attn.k_proj.weight.grad])
    assert reference.calls == 2 * 2
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-4)


def test_one_graph_serves_rows_of_all_lengths() -> None:
    """Compiled with torch's operator in the graph, which has a plain kernel here: other lengths compile nothing again."""
    operator = torch.ops.torch_attn._varlen_attn.default
    names = [argument.name for argument in operator._schema.arguments]
    reference = Reference(grouped=True)

    def kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(names, args, strict=False)) | kwargs
        known = {name: value for name, value in given.items() if name in SIGNATURE.parameters and value is not None}
        output = reference(**known | {"enable_gqa": given["key"].shape[1] < given["query"].shape[1]})
        lse = output.new_empty(output.shape[1], output.shape[0], dtype=torch.float32)
        return output, lse, torch.zeros(2, dtype=torch.uint64)

    varlen._varlen_attn.register_kernel("cpu")(kernel)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    lm = Qwen3ForCausalLM(Qwen3Config(vocab_size=400, head_dim=16, num_hidden_layers=2, **sizes)).eval()
    model, given = CausalLM(lm, chunk=64), trace()
    rows = []
    for samples in ([0, 1, 2], [0, 3, 4, 1], [2, 0, 4]):
        some = given.select(torch.tensor(samples))
        rows.append((some, packing.Row.of(some.ids, some.stops.tolist())))

    def log_probs() -> list[Tensor]:
        found = []
        for number, (some, row) in enumerate(rows):
            with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found.append(model(some.ids, some.predicting, 1.0, row)[0])
        return found

    lm.config._attn_implementation = packing.PACKED_SDPA
    expected = log_probs()
    lm.config._attn_implementation = packing.PACKED_VARLEN
    for block in model.blocks():
        block.forward = torch.compile(block.forward, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(log_probs(), expected, rtol=1e-4, atol=1e-4)
    assert reference.calls == 2 * len(rows)


def test_packing_and_compiled_blocks_need_it(lm_folder: Path, world: World) -> None:
    """On a CPU, blocks are compiled without packing if that was only tried, and refused if not."""
    data = LMDataConfig(max_prompt_length=64, max_response_length=16)
    config = LMModelConfig(path=str(lm_folder), dtype="float32", use_remove_padding=True, compile=True)
    options: dict[str, Any] = {"chunk": 5, "temperature": 0.7, "seed": 0}
    with pytest.raises(ValueError, match=r"^model\.compile: true would recompile for each pass .*varlen_attn"):
        build_policy(config, ParallelConfig(), data, world, **options)
    policy = build_policy(config, ParallelConfig(), data, world, tries=True, **options)
    assert policy.config.use_remove_padding is False
