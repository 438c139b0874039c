"""LLaDA2: the model against plain torch on the hub's weights, and folders that are loaded and saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, silu
from transformers import DynamicCache

from phalanx.config.lm import LMDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.models.lm.kv_rows import CACHE
from phalanx.models.lm.llada2 import LLaDA2Config
from phalanx.models.lm.lm_export import export_model
from phalanx.models.lm.lm_policy import LMPolicy, build_policy
from phalanx.models.lm.load_folder import load_model
from phalanx.models.lm.model import CausalLM
from phalanx.models.lora import add_lora, merge_lora
from tests.helpers.llada2 import SETTINGS, tiny_llada2

IDS = torch.randint(3, 500, (2, 20), generator=torch.Generator().manual_seed(1))
OTHERS = {
    "published": {},
    "tied": {"tie_word_embeddings": True, "use_qkv_bias": True, "partial_rotary_factor": 1.0},
    "shared": {"num_shared_experts": 2, "first_k_dense_replace": 0, "num_key_value_heads": 4, "rope_theta": 10000.0},
    "one": {"num_experts_per_tok": 1, "topk_group": 1, "first_k_dense_replace": 2, "routed_scaling_factor": 1.0},
}


def load(folder: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> CausalLM:
    return load_model(LMModelConfig(path=str(folder), **keys), dtype, chunk=8)


# -- the reference ----------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotated(x: Tensor, settings: dict[str, Any]) -> Tensor:
    """Rotate the pairs (i, i + n / 2) of the first n dims of heads [heads, length, dim] by their position."""
    n = int(settings["head_dim"] * settings["partial_rotary_factor"])
    angle = torch.arange(x.shape[1])[:, None] / settings["rope_theta"] ** (torch.arange(0, n, 2) / n)
    a, b = x[..., : n // 2], x[..., n // 2 : n]
    turned = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
    return torch.cat([*turned, x[..., n:]], -1)


def attention(x: Tensor, w: Callable[[str], Tensor], settings: dict[str, Any]) -> Tensor:
    heads, groups, dim = (settings[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    bias = w("query_key_value.bias") if settings["use_qkv_bias"] else None
    every = linear(x, w("query_key_value.weight"), bias).view(len(x), -1, dim).transpose(0, 1)
    q = rotated(norm(every[:heads], w("query_layernorm.weight")), settings)
    k = rotated(norm(every[heads : heads + groups], w("key_layernorm.weight")), settings)
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    found = []
    for head in range(heads):
        of = head * groups // heads
        scores = (q[head] @ k[of].T / dim**0.5).masked_fill(later, -torch.inf)
        found.append(scores.softmax(-1) @ every[heads + groups + of])
    return linear(torch.cat(found, -1), w("dense.weight"))


def mlp(x: Tensor, w: Callable[[str], Tensor], place: str) -> Tensor:
    inner = silu(linear(x, w(f"{place}gate_proj.weight"))) * linear(x, w(f"{place}up_proj.weight"))
    return linear(inner, w(f"{place}down_proj.weight"))


def mixture(x: Tensor, w: Callable[[str], Tensor], settings: dict[str, Any]) -> Tensor:
    """The best experts of the groups with the best top-two sums, token by token; the bias affects only the choice."""
    out = []
    for token in x:
        score = linear(token, w("gate.weight")).sigmoid()
        biased = score + w("gate.expert_bias")
        groups = biased.view(settings["n_group"], -1)
        best = groups.sort(descending=True).values[:, :2].sum(1).argsort(descending=True)[: settings["topk_group"]]
        size = groups.shape[1]
        allowed = [i for i in range(len(biased)) if i // size in best.tolist()]
        chosen = sorted(allowed, key=lambda i: -biased[i].item())[: settings["num_experts_per_tok"]]
        total = sum(score[i] for i in chosen) if len(chosen) > 1 else 1.0
        parts = [score[i] / total * mlp(token, w, f"experts.{i}.") for i in chosen]
        out.append(settings["routed_scaling_factor"] * sum(parts) + mlp(token, w, "shared_experts."))
    return torch.stack(out)


def reference(weights: dict[str, Tensor], settings: dict[str, Any], ids: Tensor) -> Tensor:
    """Logits of one text."""
    x = embedding(ids, weights["model.word_embeddings.weight"])
    for i in range(settings["num_hidden_layers"]):

        def w(name: str, layer: str = f"model.layers.{i}.", part: str = "") -> Tensor:
            return weights[layer + part + name]

        x = x + attention(norm(x, w("input_layernorm.weight")), lambda n, w=w: w(n, part="attention."), settings)
        y = norm(x, w("post_attention_layernorm.weight"))
        inner: Any = lambda n, w=w: w(n, part="mlp.")  # noqa: E731
        x = x + (mlp(y, inner, "") if i < settings["first_k_dense_replace"] else mixture(y, inner, settings))
    head = weights["model.word_embeddings.weight" if settings["tie_word_embeddings"] else "lm_head.weight"]
    return linear(norm(x, weights["model.norm.weight"]), head)


@pytest.mark.parametrize("name", OTHERS)
def test_logits_and_gradients(name: str, tmp_path: Path) -> None:
    """Equal to the reference, by each implementation of the experts; gradients map to the hub's tensors."""
    folder = tiny_llada2(tmp_path, **OTHERS[name])
    settings, weights = SETTINGS | OTHERS[name], load_file(folder / "model.safetensors")
    for tensor in weights.values():
        tensor.requires_grad_()
    wanted = torch.stack([reference(weights, settings, ids) for ids in IDS])
    wanted.log_softmax(-1)[..., 7].sum().backward()
    for kind in (None, "eager", "batched_mm", "grouped_mm"):
        lm = load(folder, experts_implementation=kind).lm.eval()
        found = lm(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=2e-5)
        found.log_softmax(-1)[..., 7].sum().backward()
        layer, last = lm.model.layers[2], "model.layers.2"
        grads = {
            f"{last}.attention.query_key_value.weight": torch.cat(
                [getattr(layer.self_attn, f"{x}_proj").weight.grad for x in "qkv"]
            ),
            f"{last}.mlp.gate.weight": layer.mlp.gate.weight.grad,
            f"{last}.mlp.experts.3.down_proj.weight": layer.mlp.experts.down_proj.grad[3],
            f"{last}.mlp.experts.3.up_proj.weight": layer.mlp.experts.gate_up_proj.grad[3].chunk(2)[1],
            "model.word_embeddings.weight": lm.model.embed_tokens.weight.grad,
        }
        for place, grad in grads.items():
            of_reference = weights[place].grad
            expected = torch.zeros_like(grad) if of_reference is None else of_reference
            assert (grad - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max())), (kind, place)


def test_the_embedding_of_the_end_learns(tmp_path: Path) -> None:
    """It is also the padding's embedding, which torch would not train."""
    lm = load(tiny_llada2(tmp_path)).lm
    end = SETTINGS["pad_token_id"]
    lm(input_ids=torch.tensor([[5, end, 6]]), use_cache=False).logits[..., 9].sum().backward()
    assert lm.model.embed_tokens.weight.grad[end].abs().max() > 0


def test_a_cache_forgets_nothing(tmp_path: Path) -> None:
    """Published settings have a sliding window (4 tokens here), which LLaDA2 does not use."""
    lm = load(tiny_llada2(tmp_path)).lm.eval()
    cache = DynamicCache(config=lm.config)
    with torch.no_grad():
        whole = lm(input_ids=IDS, use_cache=False).logits
        lm(input_ids=IDS[:, :-1], **{CACHE: cache}, use_cache=True)
        last = lm(input_ids=IDS[:, -1:], **{CACHE: cache}, use_cache=True).logits
    torch.testing.assert_close(last[:, 0], whole[:, -1], rtol=0, atol=1e-5)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_comes_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With the names, bits and dtypes of all tensors, the settings, and the code, which was not run."""
    base, folder = tiny_llada2(tmp_path / "base", dtype, **OTHERS[name]), tmp_path / "out"
    folder.mkdir()
    export_model(folder, LMModelConfig(path=str(base)), load(base, dtype))
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(after) == set(before)
    for place, tensor in before.items():
        assert after[place].dtype == tensor.dtype and torch.equal(after[place], tensor), place
    for file in ("config.json", "modeling_llada2_moe.py", "configuration_llada2_moe.py", "tokenizer.json"):
        assert json_or_bytes(folder / file) == json_or_bytes(base / file)


def json_or_bytes(file: Path) -> Any:
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()


def test_a_merged_lora(tmp_path: Path) -> None:
    """It changes attention, dense layers and shared experts; everything else, including the router's bias, is kept."""
    base, folder = tiny_llada2(tmp_path / "base"), tmp_path / "out"
    folder.mkdir()
    config = LMModelConfig(path=str(base), lora_rank=2, dtype="float32")
    model = load(base)
    add_lora(model, config, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 0)
    with torch.no_grad():
        for place, p in model.named_parameters():
            if "lora_B" in place:
                p.normal_(std=0.1)
        wanted = model.lm(input_ids=IDS, use_cache=False).logits
    merge_lora(model)
    export_model(folder, config, model)
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(after) == set(before)
    changed = {place for place in before if not torch.equal(after[place], before[place])}
    linears = ("query_key_value.weight", "dense.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    assert changed == {place for place in before if place.endswith(linears) and ".experts." not in place}
    with torch.no_grad():
        again = load(folder).lm(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=1e-4)


def broken(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    weights = load_file(tiny_llada2(folder) / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EXPERT = "model.layers.1.mlp.experts.15"
BAD: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no qkv": (lambda w: w.pop("model.layers.0.attention.query_key_value.weight"), r"it has no .*0\.self_attn\.k_proj"),
    "no bias": (lambda w: w.pop("model.layers.1.mlp.gate.expert_bias"), "it has no .*e_score_correction_bias"),
    "one expert less": (
        lambda w: [w.pop(f"{EXPERT}.{kind}_proj.weight") for kind in ("gate", "up", "down")],
        r"its .*experts.* is \[15, .*\] rather than \[16, ",
    ),
    "a part of an expert": (
        lambda w: w.pop(f"{EXPERT}.up_proj.weight"),
        r"its weights are not whole: no model\.layers\.1\.mlp\.experts\.15\.up_proj\.weight$",
    ),
    "another width": (
        lambda w: w.update({"model.layers.0.attention.query_key_value.weight": torch.zeros(60, 32)}),
        "does not load: .* conversion of the weights",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_weights_that_are_not_whole(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    folder = broken(tmp_path, change)
    with pytest.raises(ValueError, match=message) as found:
        load(folder)
    assert "\n" not in str(found.value) and str(found.value).startswith(f"model.path: '{folder}'")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"use_bias": True}, "use_bias is true"), ({"num_shared_experts": 0}, "num_shared_experts is 0")],
)
def test_settings_without_a_module(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^model.path: .* does not load: {message} in its config.json; expected"):
        load(tiny_llada2(tmp_path, **settings))


def test_settings_that_are_left_out() -> None:
    """Missing settings have the defaults of LLaDA2's own code."""
    found = LLaDA2Config(hidden_size=32, num_attention_heads=4, num_experts_per_tok=1, norm_topk_prob=True)
    assert (found.head_dim, found.norm_topk_prob, found.n_group, found.routed_scaling_factor) == (8, False, 8, 2.5)
    assert found.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def test_the_way_of_the_experts_is_refused_without_any(lm_folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^model\.experts_implementation: 'eager' needs a model with experts, and qwe"
    ):
        load(lm_folder, experts_implementation="eager")


def test_a_loop_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model\.experts_implementation: eager is a loop .* model\.compile=false$"):
        load(tiny_llada2(tmp_path), experts_implementation="eager", compile=True)


# -- cost -------------------------------------------------------------------------------------------------------------


def policy_of(folder: Path, world: World) -> LMPolicy:
    config = LMModelConfig(path=str(folder), dtype="float32")
    return build_policy(
        config, ParallelConfig(), LMDataConfig(max_prompt_length=64), world, chunk=8, temperature=1.0, seed=0
    )


def test_operations_are_those_of_the_chosen_experts(tmp_path: Path, world: World) -> None:
    """Twice the weights of a token's experts, 3 x 32 x 16 each, in two layers; the number of experts does not matter."""
    found = []
    for name, settings in (("4", {}), ("8", {"num_experts_per_tok": 8}), ("32", {"num_experts": 32})):
        data = {"max_position_embeddings": 4096} | settings
        found.append(policy_of(tiny_llada2(tmp_path / name, **data), world).forward_flops(100, 0))
    four, eight, of_many = found
    assert eight - four == pytest.approx(100 * 4 * 2 * (2 * 3 * 32 * 16))
    assert of_many - four == pytest.approx(100 * 2 * 2 * 16 * 32)  # for the router
