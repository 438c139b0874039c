"""Starting from a LoRA: files of diffusers and peft are read, added to weights, and joined with another LoRA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.config.flow import FlowModelConfig
from phalanx.models.flow.family import FlowModel
from phalanx.models.flow.registry import family_of
from phalanx.models.lm.model import read_lora
from phalanx.models.lora import WEIGHTS, Layers, joined, plain_layers, start_from_lora
from tests.checks import refused
from tests.tiny import load_pipeline

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


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_adds_the_same(rslora: bool, tmp_path: Path) -> None:
    """Some layers have other ranks and alphas."""
    net = Net()
    given = {"rank_pattern": {"second": 4}, "alpha_pattern": {"second": 7}, "use_rslora": rslora}
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
