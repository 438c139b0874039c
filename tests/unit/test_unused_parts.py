"""What a model folder, a scheduler or a row has, but a job does not use, is named in one line: refused, or a warning."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.config.flow import FlowRolloutConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.registry import family_of
from phalanx.models.lm.load_folder import load_model, unused_generation
from phalanx.run.flow_components import name_unused_columns, sampled_parts
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.tiny_i2v import wan_transformer

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
Folder = Callable[[str], Path]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A copy of a model folder that a test may change."""
    return lambda name: Path(shutil.copytree(request.getfixturevalue(f"{name}_folder"), tmp_path / name))


def change(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def add_tensors(file: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def load(folder: Path) -> Any:
    config = FlowModelConfig(path=str(folder), dtype="float32")
    return family_of(config)(config, torch.float32, torch.float32)


def test_tensors_and_settings_that_no_class_knows_are_warnings(folder: Folder, caplog: Any) -> None:
    """Of the transformer, the VAE, a text encoder and the scheduler; a folder without any is silent."""
    path = folder("sd3")
    load(path)
    assert caplog.messages == []
    add_tensors(path / TRANSFORMER, **{"controlnet_x.weight": torch.ones(2), "controlnet_y.weight": torch.ones(2)})
    add_tensors(path / VAE, **{"encoder.extra": torch.ones(2)})
    add_tensors(path / "text_encoder/model.safetensors", extra=torch.ones(2))
    change(path / "transformer/config.json", twist=2)
    change(path / "scheduler/scheduler_config.json", sharpness=0.5)
    load(path)
    assert sorted(caplog.messages) == [
        f"model.path: '{path}': AutoencoderKL has no place for encoder.extra of its files, and ignores it",
        f"model.path: '{path}': FlowMatchEulerDiscreteScheduler does not know the settings {{'sharpness': 0.5}} of its "
        "file, and ignores them",
        f"model.path: '{path}': SD3Transformer2DModel does not know the settings {{'twist': 2}} of its file, and ignores "
        "them",
        f"model.path: '{path}': SD3Transformer2DModel has no place for controlnet_x.weight (+1 more) of its files, and "
        "ignores it",
        f"model.path: '{path}': text_encoder: the model has no place for extra of its files, and ignores it",
    ]
    level = logging.getLogger("diffusers").level
    load(path)
    assert logging.getLogger("diffusers").level == level


def test_a_language_models_tensors_that_its_class_has_no_place_for(
    lm_folder: Path, tmp_path: Path, caplog: Any
) -> None:
    from phalanx.config.trained_model import LMModelConfig

    path = Path(shutil.copytree(lm_folder, tmp_path / "lm"))
    add_tensors(path / "model.safetensors", **{"model.layers.2.mlp.up_proj.weight": torch.ones(64, 64)})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.6, "top_k": 20}))
    change(path / "config.json", logit_scale=2.0, mup=True)
    model = load_model(LMModelConfig(path=str(path)), torch.float32, chunk=1)
    line = "the model has no place for model.layers.2.mlp.up_proj.weight of its files, and ignores it"
    assert caplog.messages == [
        f"model.path: '{path}': {line}",
        f"model.path: '{path}': its config.json has logit_scale, mup, which a Qwen3Config does not read",
    ]
    assert unused_generation(model.lm) == "temperature 0.6, top_k 20"


def test_a_part_without_a_tensor_is_refused(folder: Folder) -> None:
    """Also of LTX-2's connectors, and a buffer, such as the mean of its latents."""
    path = folder("ltx2")
    for name, lost in (("connectors", "text_proj_in.weight"), ("vae", "latents_mean")):
        file = next((path / name).glob("*.safetensors"))
        tensors = load_file(file)
        lost = next(key for key in tensors if key.endswith(lost.partition(".")[2] or lost))
        save_file({key: t for key, t in tensors.items() if key != lost}, file, {"format": "pt"})
        with refused(f"model.path: '{path}': the weights of {name} lack the tensor {lost}"):
            load(path)
        save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("wan", {"final_sigmas_type": "sigma_min"}, "final_sigmas_type is 'sigma_min'; expected zero"),
        ("wan", {"use_karras_sigmas": True}, "use_karras_sigmas is true; only false is supported"),
        ("wan", {"use_exponential_sigmas": True}, "use_exponential_sigmas is true; only false is supported"),
        ("sd3", {"stochastic_sampling": True}, "stochastic_sampling is true; only false is supported"),
        ("sd3", {"prediction_type": "epsilon"}, "prediction_type is 'epsilon'; expected flow_prediction"),
    ],
)
def test_settings_of_a_scheduler_that_change_the_steps(
    name: str, keys: dict[str, Any], message: str, folder: Folder
) -> None:
    path = folder(name)
    change(path / "scheduler/scheduler_config.json", **keys)
    with refused(f"model.path: {path}/scheduler/scheduler_config.json: {message}"):
        load(path)


@pytest.mark.parametrize(
    ("name", "more", "expected"), [("wan", 4, 4), ("sd3", 4, 4), ("flux", 16, 16), ("z_image", 4, 4), ("hunyuan", 4, 9)]
)
def test_a_transformer_with_more_channels_of_input(name: str, more: int, expected: int, folder: Folder) -> None:
    """As those that take a control image or a mask."""
    path = folder(name)
    file = path / "transformer/config.json"
    transformer = family_of(FlowModelConfig(path=str(path))).transformer_class.load_config(file)
    kind = family_of(FlowModelConfig(path=str(path))).transformer_class
    kind.from_config(transformer | {"in_channels": expected + more}).save_pretrained(path / "transformer")
    with refused(
        f"model.path: the transformer of '{path}' has {expected + more} channels of input; expected {expected}"
    ):
        load(path)


def test_a_transformer_of_first_and_last_frames(folder: Folder) -> None:
    path = folder("wan")
    wan_transformer(0, in_channels=4, image_dim=16, added_kv_proj_dim=64, pos_embed_seq_len=10).save_pretrained(
        path / "transformer"
    )
    with refused(
        f"model.path: the transformer of '{path}' takes a first and a last frame (pos_embed_seq_len), and a last frame "
        "is not supported"
    ):
        load(path)


def test_columns_without_effect_are_one_line_each(caplog: Any) -> None:
    rows = [Prompt("a", 0, {}, negative="blur"), Prompt("b", 0, {"last_image": "b.png"}), Prompt("c", 0, {})]

    def said(name: str, train: float, val: float, key: str = "guidance_scale") -> list[str]:
        caplog.clear()
        model = family_of(FlowModelConfig(path="some/folder", family=f"phalanx.zoo.families.{name}"))
        config = FlowRolloutConfig(num_frames=5 if name == "wan_i2v" else 1, **{key: train})
        setattr(config.val, key, val)
        name_unused_columns(sampled_parts(rows, {"held_out": rows[:1]}, config, model), model)
        return caplog.messages

    off = "data: {} rows have a negative_prompt, which has no effect, since there is no guidance: {} is not above 1"
    assert said("sd3", 1.0, 1.0) == [off.format(2, "guidance_scale")]
    assert said("sd3", 4.0, 1.0) == [off.format(1, "guidance_scale")]
    assert said("sd3", 4.0, 4.0) == []
    assert said("flux", 1.0, 1.0, "true_cfg_scale") == [off.format(2, "true_cfg_scale")]
    distilled = "since the model is distilled to do without guidance"
    assert said("flux2", 1.0, 1.0) == [f"data: 2 rows have a negative_prompt, which has no effect, {distilled}"]
    last = "data: 1 rows have a last_image, which has no effect, since a last frame is not supported"
    assert said("wan_i2v", 4.0, 4.0) == [last]
