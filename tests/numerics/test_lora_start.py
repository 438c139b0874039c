"""Starting from a LoRA: files of diffusers and peft are read, added to weights, and joined with another LoRA."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.family import FlowModel
from phalanx.models.flow.registry import family_of
from phalanx.models.lm.load_folder import read_lora
from phalanx.models.lora import BIAS, WEIGHTS, Layers, joined, plain_layers, start_from_lora
from tests.helpers.checks import refused
from tests.helpers.comfy import add_as_comfy, ltx2_name
from tests.helpers.tiny import load_pipeline

TARGETS = {
    "sd3": "attn.to_q",
    "qwen": "img_mlp.net.2",
    "flux": "proj_out",
    "flux_kontext": "ff.net.2",
    "flux2": "attn.to_out",
    "flux2_klein": "attn.to_qkv_mlp_proj",
    "z_image": "attention.to_k",
    "wan": "ffn.net.2",
    "hunyuan": "ff_context.net.2",
    "ltx2": "audio_to_video_attn.to_out.0",
}


def drawn(module: nn.Module, target: str, rank: int, seed: int) -> Layers:
    """A LoRA of the layers whose names end in `target`."""
    stream = torch.Generator().manual_seed(seed)
    layers: Layers = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and name.endswith(target):
            down = torch.randn(rank, part.in_features, generator=stream)
            layers[name] = down, torch.randn(part.out_features, rank, generator=stream)
    assert layers
    return layers


def base_of(folder: Path) -> tuple[type[FlowModel], FlowModelConfig, Any]:
    config = FlowModelConfig(path=str(folder), dtype="float32")
    return family_of(config), config, family_of(config).load_base(config, torch.float32)


@pytest.mark.parametrize("name", TARGETS)
def test_an_export_is_added_as_stock_diffusers_adds_it(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(f"{name}_folder")
    family, config, transformer = base_of(folder)
    layers = drawn(transformer, TARGETS[name], 3, seed=1)
    rank, tensors = joined({}, layers)
    family.export_lora(tmp_path, config, tensors, rank, rank)
    start_from_lora(transformer, str(tmp_path), family.read_lora)
    pipeline = load_pipeline(folder)
    if name == "hunyuan":  # its transformer can load LoRAs, but its pipeline's class cannot
        pipeline.transformer.load_lora_adapter(tmp_path, weight_name=WEIGHTS, prefix="transformer")
    else:
        pipeline.load_lora_weights(tmp_path)
    for layer in layers:
        stock = pipeline.transformer.get_submodule(layer)
        expected = stock.base_layer.weight + stock.get_delta_weight("default_0")
        torch.testing.assert_close(transformer.get_submodule(layer).weight, expected, rtol=0, atol=1e-5)
        assert not torch.equal(expected, stock.base_layer.weight)


@pytest.mark.parametrize("name", ["sd3", "wan", "ltx2"])
def test_biases_are_added_as_stock_diffusers_adds_them(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """`diff_b` of Wan's files, and peft's lora_B.bias, through an export."""
    folder = request.getfixturevalue(f"{name}_folder")
    family, config, transformer = base_of(folder)
    layers = drawn(transformer, TARGETS[name], 3, seed=1)
    for layer in list(layers)[:1]:
        layers[layer + BIAS] = torch.ones(1, 1), torch.randn(len(layers[layer][1]), 1)
    rank, tensors = joined(layers, {})
    family.export_lora(tmp_path, config, tensors, rank, rank)
    assert any(key.endswith(".diff_b" if name == "wan" else ".lora_B.bias") for key in load_file(tmp_path / WEIGHTS))
    start_from_lora(transformer, str(tmp_path), family.read_lora)
    pipeline = load_pipeline(folder)
    pipeline.load_lora_weights(tmp_path)
    stock = pipeline.transformer.get_submodule(layer)
    assert not torch.equal(stock.base_layer.bias, transformer.get_submodule(layer).bias)
    stock.merge()
    torch.testing.assert_close(transformer.get_submodule(layer).bias, stock.base_layer.bias, rtol=0, atol=1e-6)
    torch.testing.assert_close(transformer.get_submodule(layer).weight, stock.base_layer.weight, rtol=0, atol=1e-5)


def test_every_layer_of_ltx2_is_known_to_comfyui(ltx2_folder: Path, tmp_path: Path) -> None:
    """As stock diffusers adds it: all linear layers, also outside of the blocks."""
    family, config, transformer = base_of(ltx2_folder)
    layers = drawn(transformer, "", 2, seed=1)
    rank, tensors = joined({}, layers)
    family.export_lora(tmp_path, config, tensors, rank, rank)
    pipeline = load_pipeline(ltx2_folder)
    add_as_comfy(transformer, tmp_path, ltx2_name)
    pipeline.load_lora_weights(tmp_path)
    pipeline.fuse_lora()
    for layer in layers:
        stock = pipeline.transformer.get_submodule(layer).base_layer
        torch.testing.assert_close(transformer.get_submodule(layer).weight, stock.weight, rtol=0, atol=1e-5)


def matrices(layer: str, up: str = "lora_B", down: str = "lora_A") -> dict[str, torch.Tensor]:
    return {f"{layer}.{down}.weight": torch.ones(2, 64), f"{layer}.{up}.weight": torch.ones(64, 2)}


SD3, WAN, LTX2 = (
    "transformer.transformer_blocks.0.attn.to_q",
    "diffusion_model.blocks.0.self_attn.q",
    "diffusion_model.transformer_blocks.0.attn1.to_q",
)
LOST: dict[str, tuple[str, str, dict[str, torch.Tensor], str]] = {
    "dora": ("sd3", SD3, {f"{SD3}.dora_scale": torch.ones(64, 1)}, f"{SD3}.dora_scale"),
    "dora of qwen": ("qwen", SD3, {f"{SD3}.dora_scale": torch.ones(64, 1)}, f"{SD3}.dora_scale"),
    "a norm": (
        "wan",
        WAN,
        {f"diffusion_model.blocks.0.{name}": torch.ones(64) for name in ("norm3.diff", "norm3.diff_b")},
        "diffusion_model.blocks.0.norm3.diff (+1 more)",
    ),
    "a modulation": (
        "wan",
        WAN,
        {"diffusion_model.blocks.0.modulation.diff": torch.ones(1, 6, 64)},
        "diffusion_model.blocks.0.modulation.diff",
    ),
    "another prefix": ("wan", WAN, matrices("blocks.1.self_attn.k"), "blocks.1.self_attn.k.lora_A.weight (+1 more)"),
    "no prefix": (
        "ltx2",
        LTX2,
        matrices("transformer_blocks.0.attn1.to_k"),
        "transformer_blocks.0.attn1.to_k.lora_A.weight (+1 more)",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_a_tensor_that_is_not_used_is_named(case: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """diffusers drops each of these without an error."""
    name, layer, more, named = LOST[case]
    family, config, _ = base_of(request.getfixturevalue(f"{name}_folder"))
    file = tmp_path / WEIGHTS
    save_file(matrices(layer) | {key: t * 0 if key.endswith(".diff") else t for key, t in more.items()}, file)
    if case == "a modulation":  # zeros add nothing
        assert list(family.read_lora(str(file), config)) == ["blocks.0.attn1.to_q"]
    save_file(matrices(layer) | more, file)
    with refused(
        f"model.lora_path: '{file}' does not load: its tensor {named} cannot be used: expected the matrices, alphas "
        "and biases of a plain LoRA, all with one prefix"
    ):
        family.read_lora(str(file), config)


def test_biases_without_matrices_are_read(wan_folder: Path, tmp_path: Path) -> None:
    """As AccVideo's files have them beside norms' differences of zeros; ComfyUI adds `diff_b` to the bias."""
    family, config, transformer = base_of(wan_folder)
    projection = transformer.condition_embedder.time_proj
    bias, before = torch.randn(len(projection.bias)), projection.bias.clone()
    others = {f"diffusion_model.blocks.0.{name}": torch.zeros(64) for name in ("norm3.diff", "self_attn.norm_q.diff")}
    for up, down in (("lora_B", "lora_A"), ("lora_up", "lora_down")):
        save_file(
            matrices(WAN, up, down) | others | {"diffusion_model.time_projection.1.diff_b": bias}, tmp_path / WEIGHTS
        )
        layers = family.read_lora(str(tmp_path), config)
        assert list(layers) == ["blocks.0.attn1.to_q", f"condition_embedder.time_proj{BIAS}"]
    weight = projection.weight.clone()
    start_from_lora(transformer, str(tmp_path), family.read_lora)
    torch.testing.assert_close(projection.bias, before + bias)
    assert torch.equal(projection.weight, weight)


@pytest.mark.parametrize("kind", ["comfyui", "kohya", "kohya, also split"])
def test_fused_layers_of_z_image_are_split(
    kind: str, z_image_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`qkv` and `out` are the names in the model's own code; ComfyUI adds a third of the rows to each layer."""
    family, config, transformer = base_of(z_image_folder)
    attention = transformer.layers[0].attention
    down, up = torch.randn(2, attention.to_q.in_features), torch.randn(3 * attention.to_q.out_features, 2)
    other = torch.randn(len(attention.to_out[0].weight), 2)
    block, ends = ("lora_unet_layers_0_attention_", ("lora_down", "lora_up"))
    if kind == "comfyui":
        block, ends = "diffusion_model.layers.0.attention.", ("lora_A", "lora_B")
    file = {}
    for name, matrix in (("qkv", up), ("out", other)):
        file |= {f"{block}{name}.{ends[0]}.weight": down, f"{block}{name}.{ends[1]}.weight": matrix}
    parts = dict(zip(("to_q", "to_k", "to_v", "to_out_0"), [*up.chunk(3), other], strict=True))
    if kind == "kohya, also split":
        for name, matrix in parts.items():
            file |= {f"{block}{name}.{ends[0]}.weight": down, f"{block}{name}.{ends[1]}.weight": matrix.contiguous()}
    save_file({key: tensor.clone() for key, tensor in file.items()}, tmp_path / WEIGHTS)
    layers = family.read_lora(str(tmp_path), config)
    expected = {f"layers.0.attention.{name.replace('out_0', 'out.0')}": matrix for name, matrix in parts.items()}
    assert layers.keys() == expected.keys()
    for name, matrix in expected.items():
        assert torch.equal(layers[name][0], down) and torch.equal(layers[name][1], matrix)
    line = f"model.lora_path: '{tmp_path}': 4 tensors repeat others and are left out"
    assert caplog.messages == ([line] if kind.endswith("split") else [])
    start_from_lora(transformer, str(tmp_path), family.read_lora)


def test_parts_that_are_not_trained_are_named(ltx2_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    """A connector's layers, and those of a text encoder."""
    for folder, layer, other, held in (
        (ltx2_folder, LTX2, "text_embedding_projection.aggregate_embed", "connectors.text_proj_in"),
        (sd3_folder, SD3, "text_encoder.text_model.encoder.layers.0.self_attn.q_proj", None),
    ):
        family, _, transformer = base_of(folder)
        names = [name for name, p in transformer.named_modules() if name.endswith(layer.rpartition(".transformer_")[2])]
        size = transformer.get_submodule(names[0]).weight.shape
        tensors = {f"{layer}.lora_A.weight": torch.ones(2, size[1]), f"{layer}.lora_B.weight": torch.ones(size[0], 2)}
        save_file(tensors | matrices(other), tmp_path / WEIGHTS)
        with refused(
            f"model.lora_path: '{tmp_path}' is of another model, or of parts that are not trained: its {held or other} "
            "adds [64, 64], the model has no such linear layer"
        ):
            start_from_lora(transformer, str(tmp_path), family.read_lora)


def test_two_names_of_one_tensor_are_refused(sd3_folder: Path, tmp_path: Path) -> None:
    family, config, _ = base_of(sd3_folder)
    bare = SD3.removeprefix("transformer.")
    save_file(matrices(SD3) | matrices(bare), tmp_path / WEIGHTS)
    same = f"{SD3}.lora_A.weight and {bare}.lora_A.weight are the same tensor of the model"
    with refused(f"model.lora_path: '{tmp_path}' does not load: {same}"):
        family.read_lora(str(tmp_path), config)


def test_settings_of_other_adapters_are_refused_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    get_peft_model(Net(), LoraConfig(target_modules=["first"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"twisted": True, "untwisted": False}))
    assert list(read_lora(str(tmp_path))) == ["lm.first"]
    assert caplog.messages == [
        f"model.lora_path: the installed peft does not know settings of {file}, which are ignored: twisted"
    ]
    file.write_text(json.dumps(settings | {"layer_replication": [[0, 2], [1, 3]]}))
    message = "layer_replication: [[0, 2], [1, 3]] is not a setting of a plain LoRA"
    with refused(f"model.lora_path: '{tmp_path}' does not load: {message}"):
        read_lora(str(tmp_path))


def test_exports_with_alpha_in_the_metadata_keep_their_strength(sd3_folder: Path, tmp_path: Path) -> None:
    """As older exports were written, with B not multiplied by alpha / rank."""
    family, config, transformer = base_of(sd3_folder)
    rank, tensors = joined({}, drawn(transformer, "attn.to_q", 2, seed=1))
    family.export_lora(tmp_path, config, tensors, rank, 5.0)
    for name, (down, up) in family.read_lora(str(tmp_path / "pytorch_lora_weights.safetensors")).items():
        assert torch.equal(down, tensors[f"{name}.lora_A.weight"])
        assert torch.equal(up, tensors[f"{name}.lora_B.weight"] * 2.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)


@pytest.mark.parametrize("more", [{}, {"use_rslora": True}, {"lora_bias": True}], ids=["plain", "rslora", "bias"])
def test_peft_adds_the_same(more: dict[str, bool], tmp_path: Path) -> None:
    """Some layers have other ranks and alphas."""
    net = Net()
    given = {"rank_pattern": {"second": 4}, "alpha_pattern": {"second": 7}} | more
    settings = LoraConfig(r=2, lora_alpha=3, target_modules=["first", "second"], init_lora_weights=False, **given)
    base = {name: t.clone() for name, t in net.state_dict().items()}
    peft = get_peft_model(net, settings)
    peft.save_pretrained(tmp_path)
    merged = peft.merge_and_unload().state_dict()
    fresh = nn.ModuleDict({"lm": Net()})
    fresh["lm"].load_state_dict(base)
    start_from_lora(fresh, str(tmp_path), read_lora)
    for name, tensor in fresh["lm"].state_dict().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
    assert not torch.equal(merged["second.weight"], base["second.weight"])


def test_the_sum_is_rounded_once() -> None:
    net = Net().bfloat16()
    before = net.first.weight.float()
    layers = drawn(net, "first", 2, seed=1)
    exact = before + layers["first"][1] @ layers["first"][0]
    start_from_lora(net, "a", lambda _: layers)
    assert torch.equal(net.first.weight, exact.bfloat16())
    net.first.weight.data = before.bfloat16()
    start_from_lora(net, "a", lambda _: layers, torch.float32)
    assert torch.equal(net.first.weight, exact)


def test_two_loras_are_joined_into_one_of_equal_ranks() -> None:
    net = Net()
    one, other = drawn(net, "first", 2, seed=1), drawn(net, "first", 3, seed=2) | drawn(net, "second", 3, seed=3)
    rank, tensors = joined(one, other)
    assert rank == 5
    back = plain_layers(tensors, {"lora_alpha": rank})
    assert {len(down) for down, _ in back.values()} == {5}
    for name, (down, up) in back.items():
        expected = sum(layers[name][1] @ layers[name][0] for layers in (one, other) if name in layers)
        torch.testing.assert_close(up @ down, expected)


def test_what_is_no_plain_lora_is_refused(
    sd3_folder: Path, qwen_folder: Path, wan_folder: Path, tmp_path: Path
) -> None:
    family, _, transformer = base_of(sd3_folder)
    with refused(f"model.lora_path: '{tmp_path / 'gone'}': no such file or folder"):
        family.read_lora(str(tmp_path / "gone"))
    with refused(
        f"model.lora_path: '{sd3_folder}' has neither adapter_model.safetensors nor pytorch_lora_weights.safetensors; "
        "expected a LoRA of peft or diffusers, such as tasks/export_checkpoint.py writes"
    ):
        family.read_lora(str(sd3_folder))
    (tmp_path / "pytorch_lora_weights_2.safetensors").touch()
    wan, settings, _ = base_of(wan_folder)
    message = f"'{tmp_path}' has pytorch_lora_weights_2.safetensors, but the model has no second transformer"
    with refused(f"model.lora_path: {message}"):
        wan.read_lora(str(tmp_path), settings)
    peft = get_peft_model(Net(), LoraConfig(target_modules=["first"], use_dora=True))
    peft.save_pretrained(tmp_path / "dora")
    name = "first.lora_magnitude_vector"
    with refused(f"model.lora_path: '{tmp_path / 'dora'}' does not load: {name} is not a matrix of a plain LoRA"):
        read_lora(str(tmp_path / "dora"))
    file = tmp_path / "dora" / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if "lora_A" in name}, file)
    with refused(f"model.lora_path: '{file}' does not load: first has only lora_A and not both matrices of a LoRA"):
        read_lora(str(file))
    other, settings, _ = base_of(qwen_folder)
    rank, tensors = joined({}, {"transformer_blocks.0.attn.to_q": (torch.ones(1, 7), torch.ones(9, 1))})
    other.export_lora(tmp_path / "other", settings, tensors, rank, rank)
    held = list(transformer.transformer_blocks[0].attn.to_q.weight.shape)
    with refused(
        f"model.lora_path: '{tmp_path / 'other'}' is of another model, or of parts that are not trained: its "
        f"transformer_blocks.0.attn.to_q adds [9, 7], the model has {held}"
    ):
        start_from_lora(transformer, str(tmp_path / "other"), family.read_lora)
    tied = Net()
    tied.second.weight = nn.Parameter(torch.ones(8, 6))
    tied.first.weight = tied.second.weight
    with refused("model.lora_path: 'a' has first, whose weights another layer of the model shares"):
        start_from_lora(tied, "a", lambda _: drawn(tied, "first", 1, seed=0))


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"q.lora_A.weight": torch.tensor([[1.0, torch.nan]])}, {}, "q.lora_A has float32 values; expected floating-"),
        ({"q.lora_B.weight": torch.ones(3, 1).to(torch.int8)}, {}, "q.lora_B has int8 values; expected floating-point"),
        (
            {"q.lora_A.weight": torch.ones(1, 2, 1, 1)},
            {},
            r"q: its matrices are \[\[1, 2, 1, 1\], \[3, 1\]\]; expected ",
        ),
        (
            {"q.lora_B.weight": torch.ones(3, 2)},
            {},
            r"q: its matrices are \[\[1, 2\], \[3, 2\]\]; expected lora_A \[rank,",
        ),
        ({"q.alpha": torch.tensor(2.0)}, {"lora_alpha": 8}, "q.alpha is 2, and the settings' lora_alpha is 8"),
        ({}, {"lora_alpha": "8"}, "lora_alpha of q is '8'; expected a number"),
        ({}, {"init_lora_weights": "OLoRA"}, "init_lora_weights: 'OLoRA' changes the base weights"),
    ],
)
def test_a_file_whose_sum_would_be_wrong(changed: dict[str, Tensor], settings: dict[str, Any], message: str) -> None:
    plain = {"q.lora_A.weight": torch.ones(1, 2), "q.lora_B.weight": torch.ones(3, 1)}
    assert plain_layers(plain | {"q.alpha": torch.tensor(8.0)}, {"lora_alpha": 8})["q"][1].eq(8).all()
    with pytest.raises(ValueError, match=f"^{message}"):
        plain_layers(plain | changed, settings)


def test_a_file_without_a_tensor() -> None:
    with pytest.raises(ValueError, match=r"^it has no tensors$"):
        plain_layers({}, {"lora_alpha": 8})
