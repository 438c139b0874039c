"""The model of a plan, without its weights, from its folder, the hub, or what is shipped."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.distributed.mesh import alone
from phalanx.models.flow.registry import family_of
from phalanx.tools.plan import plan_job
from phalanx.tools.plan.blueprint import family_name, fetch, planned_policy
from phalanx.tools.plan.ledger import Ledger
from phalanx.tools.plan.memory import count
from tests.helpers.jobs import tiny_config
from tests.helpers.plans import ONE, judged, memory_of, plan_of
from tests.helpers.ranks import ROOT
from tests.unit.test_plan_lm import SHIPPED_LM

# -- the model without its weights --------------------------------------------------------------------------------


@pytest.mark.quick("flux-1", "wan-2", "flux2_klein-2")
@pytest.mark.parametrize(
    ("family", "branches"),
    [
        *(("qwen", 2), ("qwen_21", 2), ("flux", 1), ("z_image", 2), ("wan", 2), ("flux2", 1), ("flux2_klein", 2)),
        *(("flux_kontext", 1), ("hunyuan", 2), ("ltx2", 2)),
    ],
)
def test_a_plan_of_each_family(
    family: str, branches: int, request: pytest.FixtureRequest, config_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    """FLUX takes guidance as an input."""
    cfg = tiny_config(config_only(request.getfixturevalue(f"{family}_folder")), tmp_path / "job", "model.lora_rank=4")
    text = plan_job(cfg, {"nproc": "2", "gpu_memory_gb": "1"})
    rows = f" x {branches} branches of guidance = 8 rows" if branches > 1 else " = 4 rows"
    assert f"micro-batch     2 images x 2 trained steps{rows}" in text
    assert "  update " in text and "TFLOP" in text


@pytest.mark.quick("lora-sd3", "lora-qwen", "full-wan", "full-flux2_klein")
@pytest.mark.parametrize(
    "family", ["sd3", "sd3_t5", "qwen", "qwen_21", "flux", "z_image", "wan", "flux2", "flux2_klein", "hunyuan", "ltx2"]
)
@pytest.mark.parametrize("keys", [["model.lora_rank=4", "model.dtype=bfloat16"], []], ids=["lora", "full"])
def test_the_blueprint_is_the_model(
    family: str, keys: list[str], request: pytest.FixtureRequest, config_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Names, shapes and dtypes of all tensors are those of the loaded model, and no tensor has memory."""
    real_folder = request.getfixturevalue(f"{family}_folder")
    cfg = tiny_config(config_only(real_folder), tmp_path / "job", *keys)
    drawn = plan_of(cfg).policy.model
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[cfg.model.dtype]
    cfg.model.path = str(real_folder)
    real = family_of(cfg.model)(cfg.model, dtype, dtype)
    for module, other in zip([real.vae, *real.text_encoders], [drawn.vae, *drawn.text_encoders], strict=True):
        assert tensors(module) == tensors(other)
    lora = {name: t for name, t in tensors(drawn.transformer).items() if "lora_" in name}
    base = {name.replace(".base_layer", ""): t for name, t in tensors(drawn.transformer).items() if name not in lora}
    assert base == tensors(real.transformer)
    assert bool(lora) == bool(cfg.model.lora_rank)
    (encoded,) = real.encode(["a text"], torch.device("cpu"), 32)
    length = len(encoded["prompt_embeds"])
    assert shapes(encoded) == shapes(drawn.embeds_like(length, 32, 32))
    assert length <= drawn.most_tokens(32, 32, 32)
    assert all(t.is_meta for m in [drawn.transformer, drawn.vae, *drawn.text_encoders] for t in m.state_dict().values())


@pytest.mark.quick("flux-keys1-2080")
@pytest.mark.parametrize(
    ("family", "keys", "numbers"),  # of a prompt's embeddings: tokens of 64, and what FLUX's CLIP pools to 32
    [
        ("flux", ["data.max_prompt_length=1"], 64 + 32),
        ("flux", ["rollout.height=8", "rollout.width=8"], 32 * 64 + 32),  # one image token
        ("qwen", ["data.max_prompt_length=1", "rollout.height=8", "rollout.width=8"], 64),
    ],
)
def test_texts_and_images_of_one_token(
    family: str,
    keys: list[str],
    numbers: int,
    request: pytest.FixtureRequest,
    config_only: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    cfg = tiny_config(config_only(request.getfixturevalue(f"{family}_folder")), tmp_path / "job", *keys)
    assert "  update " in plan_job(cfg, {})
    embeds = plan_of(cfg).policy.model.embeds_like(cfg.data.max_prompt_length, 8, 8)
    assert sum(tensor.numel() for tensor in embeds.values()) == numbers


def test_frames_are_counted(wan_folder: Path, config_only: Callable[[Path], Path], tmp_path: Path) -> None:
    """Latents, videos, activations and arithmetic; texts are what they are for an image."""
    image, video = (
        plan_of(tiny_config(config_only(wan_folder), tmp_path / str(n), f"rollout.num_frames={n}"))
        for n in (1, 9)  # 1 and 3 frames of the latent
    )
    pictures = [count(plan).host["images"] for plan in (image, video)]
    assert pictures == [16 * frames * 3 * 32 * 32 * 4 for frames in (1, 9)]
    texts = 32 * image.policy.model.transformer.config.text_dim * 4 * 4 * 2  # of 4 prompts and their negatives
    assert video.samples_size - texts == pytest.approx(3 * (image.samples_size - texts), rel=0.01)
    assert 2 < video.flops / image.flops < 4  # attention grows faster, what the text takes not at all
    for one, other in zip(count(image).phases, count(video).phases, strict=True):
        if one.activations:
            assert other.activations > 1.5 * one.activations, one.name


def test_a_prompt_length_that_the_model_refuses(
    z_image_folder: Path, config_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    cfg = tiny_config(config_only(z_image_folder), tmp_path / "job", "data.max_prompt_length=97")
    with pytest.raises(ValueError) as error:
        plan_job(cfg, {})
    assert str(error.value) == "data.max_prompt_length: 97 is more than the model's 96 tokens"


def shapes(embeds: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in embeds.items()}


def tensors(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    found = [*module.named_parameters(), *module.named_buffers()]
    return {name: (t.shape, t.dtype) for name, t in found}


def broken_index(**changes: Any) -> Callable[[Path], object]:
    """Breaks a folder's model_index.json: other entries, None for those that it is to lack."""

    def change(folder: Path) -> None:
        index = json.loads((folder / "model_index.json").read_text()) | changes
        left = {name: value for name, value in index.items() if value is not None}
        (folder / "model_index.json").write_text(json.dumps(left))

    return change


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (
            lambda folder: (folder / "model_index.json").unlink(),
            "model.path: '{folder}' is not a diffusers model folder: it has no model_index.json",
        ),
        (lambda folder: (folder / "vae" / "config.json").unlink(), "model.path: {folder}/vae has no config.json"),
        (
            lambda folder: (folder / "transformer" / "config.json").write_text('{"num_layers": 2,,}'),
            "model.path: {folder}/transformer/config.json:1:18 is not valid JSON: ",
        ),
        (
            broken_index(text_encoder=["transformers", "CLIPTextModle"]),
            "model.path: '{folder}' has a CLIPTextModle, which the installed transformers lacks",
        ),
        (
            broken_index(vae=["my_vae", "Vae"]),
            "model.path: '{folder}' has its vae from my_vae; known: diffusers, transformers",
        ),
        (
            broken_index(_class_name="SanaPipeline"),
            "model.path: '{folder}' is a SanaPipeline; supported: Flux2KleinPipeline, Flux2Pipeline, FluxKontextPipeline, "
            "FluxPipeline, HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline, LTX2Pipeline, "
            "QwenImage21Pipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline, "
            "StableDiffusion3Pipeline, WanImageToVideoPipeline, WanPipeline, ZImagePipeline",
        ),
        (
            lambda folder: shutil.rmtree(folder / "scheduler"),
            "model.path: {folder}/scheduler has no scheduler_config.json",
        ),
        (
            broken_index(vae=None),
            "model.path: '{folder}': StableDiffusion3Pipeline.__init__() missing 1 required positional argument: 'vae'",
        ),
    ],
    ids=["index", "config", "json", "class", "library", "family", "scheduler", "lacks"],
)
def test_folders_that_cannot_be_read(
    breaks: Callable[[Path], object],
    message: str,
    sd3_folder: Path,
    config_only: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    folder = config_only(sd3_folder)
    breaks(folder)
    with pytest.raises(ValueError) as error:
        plan_job(tiny_config(folder, tmp_path / "job"), {})
    said, expected = str(error.value), message.format(folder=folder)
    # what Python says of a JSON file changes with its version
    assert said == expected or (expected.endswith("JSON: ") and said.startswith(expected))


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/nowhere/at/all", "no such folder"), ("someone/something", "no such folder, and no hub has it within reach")],
)
def test_folders_that_are_not_there(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        plan_job(tiny_config(Path(path), tmp_path), {})
    assert str(error.value) == f"model.path: {path!r}: {reason}"


# -- models whose folder is not within reach -----------------------------------------------------------------------

T5, UMT5, CLIP_L, CLIP_G, QWEN_VL = 4_762_310_656, 5_680_910_336, 123_650_304, 694_659_840, 8_292_166_656
KL_VAE, VIDEO_VAE, PATCH_VAE = 83_819_683, 126_892_531, 84_046_115
SHIPPED = {
    "stabilityai/stable-diffusion-3.5-medium": [2_243_171_520, KL_VAE, CLIP_L, CLIP_G, T5],
    "stabilityai/stable-diffusion-3.5-large": [8_056_627_520, KL_VAE, CLIP_L, CLIP_G, T5],
    "black-forest-labs/FLUX.1-dev": [11_901_408_320, KL_VAE, CLIP_L - 768 * 768, T5],  # without a projection
    "black-forest-labs/FLUX.1-Kontext-dev": [11_901_408_320, KL_VAE, CLIP_L - 768 * 768, T5],
    "black-forest-labs/FLUX.2-dev": [32_223_281_152, PATCH_VAE, 24_011_361_280],
    "black-forest-labs/FLUX.2-klein-4B": [3_875_544_576, PATCH_VAE, 4_022_468_096],
    "black-forest-labs/FLUX.2-klein-9B": [9_078_581_248, PATCH_VAE, 8_190_735_360],
    "Qwen/Qwen-Image": [20_430_401_088, VIDEO_VAE, QWEN_VL],
    "Qwen/Qwen-Image-2.1": [7_115_124_736, 337_740_404, 8_767_123_696],
    "Qwen/Qwen-Image-2512": [20_430_401_088, VIDEO_VAE, QWEN_VL],
    "Qwen/Qwen-Image-Edit-2509": [20_430_401_088, VIDEO_VAE, QWEN_VL],
    "Tongyi-MAI/Z-Image": [6_154_908_736, KL_VAE, 4_022_468_096],
    "Tongyi-MAI/Z-Image-Turbo": [6_154_908_736, KL_VAE, 4_022_468_096],
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": [1_418_996_800, VIDEO_VAE, UMT5],
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": [14_288_491_584, VIDEO_VAE, UMT5],
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": [4_999_787_712, 704_688_668, UMT5],
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": [
        *(8_326_608_160, 1_260_634_115, 7_070_619_136, 219_314_944)
    ],
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v": [
        *(8_326_608_160, 1_260_634_115, 7_070_619_136, 219_314_944, 428_225_600)
    ],
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": [2 * 14_288_491_584, VIDEO_VAE, UMT5],
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": [2 * (14_288_491_584 + 20 * 4 * 5120), VIDEO_VAE, UMT5],
}
JUDGES = {"Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976, "Qwen/Qwen2.5-VL-7B-Instruct": QWEN_VL}


@pytest.mark.parametrize("path", SHIPPED)
def test_shipped_shapes(path: str, sd3_folder: Path, tmp_path: Path) -> None:
    """Transformer, VAE and text encoders have as many parameters as the published weights."""
    cfg = tiny_config(sd3_folder, tmp_path)
    cfg.model.path = fetch(path)
    cfg.model.family = family_name(cfg.model)
    with alone():
        model = planned_policy(cfg, ONE, Ledger()).model
    modules: list[nn.Module] = [model.transformer, model.vae, *model.text_encoders]
    assert [sum(p.numel() for p in module.parameters()) for module in modules] == SHIPPED[path]


def test_shipped_judges(sd3_folder: Path, tmp_path: Path) -> None:
    for path, parameters in JUDGES.items():
        cfg = judged(sd3_folder, tmp_path, path)
        assert memory_of(cfg).host["sleeping reward model"] == parameters  # a half of them, in bfloat16


def test_all_that_is_shipped_is_known() -> None:
    folders = {folder.name for folder in (ROOT / "src" / "phalanx" / "tools" / "plan" / "models").iterdir()}
    assert folders == {path.replace("/", "--") for path in [*SHIPPED, *JUDGES, *SHIPPED_LM]}


def test_the_hub_goes_before_what_is_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert fetch("Qwen/Qwen-Image") == str(tmp_path)
