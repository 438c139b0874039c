"""The rewards with a CLIP, at tiny size with random weights, against transformers' own processor and forward pass."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from phalanx.rewards import DeviceReward, RewardSet
from phalanx.types import Prompt
from phalanx.zoo.rewards.image._clip import pixels_of
from tests.helpers.judged import broken_copy, cut
from tests.helpers.rewards import entry, rewards, told
from tests.helpers.tiny import clip_tokenizer

# of the tiny CLIP
EDGE, PATCH, WIDTH, TEXT_WIDTH, DIM, TOKENS = 28, 7, 48, 32, 24, 16
PROMPTS = ["a red cat", "two dogs, one of them asleep", "a red cat"]
PREDICTOR_WIDTHS = {"0": 1024, "2": 128, "4": 64, "6": 16, "7": 1}


def save_clip_base(folder: Path) -> Path:
    """The folder of a tiny CLIPModel without weights: configuration, tokenizer and preprocessing."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPProcessor

    tokenizer = clip_tokenizer()
    layers = {"num_hidden_layers": 2, "hidden_act": "gelu"}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {"hidden_size": TEXT_WIDTH, "intermediate_size": 4 * TEXT_WIDTH, "num_attention_heads": 2, **layers, **ids}
    vision = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 3, **layers}
    CLIPConfig(
        text_config={**text, "vocab_size": len(tokenizer), "max_position_embeddings": TOKENS},
        vision_config={**vision, "image_size": EDGE, "patch_size": PATCH},
        projection_dim=DIM,
    ).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": EDGE}, crop_size={"height": EDGE, "width": EDGE})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIPModel with its processor; read only."""
    return save_clip(tmp_path_factory.mktemp("clip"))


def save_clip(folder: Path) -> Path:
    """The folder of a tiny CLIPModel with its processor."""
    from transformers import CLIPConfig, CLIPModel

    save_clip_base(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(CLIPConfig.from_pretrained(folder))
        for parameter in model.parameters():  # large enough for scores that differ clearly
            torch.nn.init.normal_(parameter, std=0.2)
        torch.nn.init.constant_(model.logit_scale, 3.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def predictor_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An aesthetic predictor for features of DIM, with the keys of the published one."""
    path = tmp_path_factory.mktemp("predictor") / "sac.safetensors"
    save_file(predictor_state(DIM), path)
    return path


def predictor_state(features: int) -> dict[str, Tensor]:
    generator, state, width = torch.Generator().manual_seed(1), {}, features
    for key, out in PREDICTOR_WIDTHS.items():
        state[f"layers.{key}.weight"] = torch.randn(out, width, generator=generator) / width**0.5
        state[f"layers.{key}.bias"] = torch.randn(out, generator=generator)
        width = out
    return state


def random_images(height: int, width: int, count: int = 3) -> Tensor:
    """Smooth pictures with an edge, [count, 3, height, width] in 0..1."""
    coarse = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(height * 1000 + width))
    images = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)
    images[:, :, : height // 3] = 1 - images[:, :, : height // 3]
    return images


def pil(images: Tensor) -> list[Image.Image]:
    pixels = np.rint(images.permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)
    return [Image.fromarray(p) for p in pixels]


def reference(folder: Path, images: Tensor, prompts: list[str]) -> Any:
    """transformers' CLIPModel on the output of its own CLIPProcessor for PIL images, all pairs at once."""
    from transformers import CLIPModel, CLIPProcessor

    inputs = CLIPProcessor.from_pretrained(folder)(
        text=prompts, images=pil(images), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
    )
    with torch.no_grad():
        return CLIPModel.from_pretrained(folder).eval()(**inputs)


def build(name: str, **kwargs: Any) -> RewardSet:
    """A single reward; paths among its kwargs are converted to texts."""
    return rewards(entry(name, **{k: str(v) if isinstance(v, Path) else v for k, v in kwargs.items()}))


def score(name: str, images: Tensor, prompts: list[str], **kwargs: Any) -> Tensor:
    reward = build(name, **kwargs)
    assert isinstance(reward.terms[0].function, DeviceReward) and reward.terms[0].on_device
    reward.submit(images, [Prompt(text, i, {}) for i, text in enumerate(prompts)])
    return reward.collect()[name]


@pytest.mark.parametrize("size", [(EDGE, EDGE), (64, 64), (40, 90), (101, 37), (15, 20)])
def test_pixels_are_those_of_the_image_processor(clip_folder: Path, size: tuple[int, int]) -> None:
    from transformers import AutoImageProcessor

    images = random_images(*size)
    processor = AutoImageProcessor.from_pretrained(clip_folder)
    expected = processor(images=pil(images), return_tensors="pt").pixel_values
    pixels = pixels_of(processor.to_dict(), torch.device("cpu"))(images)
    assert pixels.shape == (3, 3, EDGE, EDGE)
    levels = (pixels - expected).abs() * torch.tensor(processor.image_std).view(3, 1, 1) * 255
    assert levels.max() < (0.01 if size == (EDGE, EDGE) else 2.01), levels.max()
    assert levels.mean() < 0.25


@pytest.mark.parametrize(
    ("size", "prompts", "tolerance"),
    [((EDGE, EDGE), PROMPTS, 1e-5), ((80, 60), ["x" * 40, "a cat " * 20, "b"], 2e-2)],
    ids=["small", "larger images and long prompts"],
)
def test_clip_score_is_the_cosine(
    clip_folder: Path, size: tuple[int, int], prompts: list[str], tolerance: float
) -> None:
    images = random_images(*size)
    found = score("clip_score", images, prompts, model=clip_folder)
    out = reference(clip_folder, images, prompts)
    expected = torch.cosine_similarity(out.image_embeds, out.text_embeds)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    swapped = score("clip_score", images, prompts[1:] + prompts[:1], model=clip_folder)
    assert (swapped - found).abs().max() > 0.01 and found.std() > 0.005  # images and prompts are told apart


def test_pickscore_is_the_logit_over_26(clip_folder: Path) -> None:
    images = random_images(EDGE, EDGE)
    found = score("pickscore", images, PROMPTS, model=clip_folder, processor=clip_folder)
    expected = reference(clip_folder, images, PROMPTS).logits_per_image.diagonal() / 26
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("as_folder", [False, True])
def test_aesthetic_is_the_mlp_on_the_unit_image_vector(
    clip_folder: Path, predictor_file: Path, as_folder: bool
) -> None:
    images = random_images(EDGE, EDGE)
    predictor = predictor_file.parent if as_folder else predictor_file
    found = score("aesthetic", images, PROMPTS, predictor=predictor, clip_model=clip_folder)
    features = reference(clip_folder, images, PROMPTS).image_embeds.double()
    state = predictor_state(DIM)
    for key in PREDICTOR_WIDTHS:
        features = features @ state[f"layers.{key}.weight"].double().T + state[f"layers.{key}.bias"].double()
    torch.testing.assert_close(found.double(), features[:, 0], atol=1e-4, rtol=0)
    assert found.std() > 1e-3


# --- gradients


def with_gradient(reward: RewardSet, images: Tensor, prompts: list[str] = PROMPTS) -> tuple[Tensor, Tensor]:
    """The differentiable scores, and the gradient of their sum with respect to the images."""
    images = images.clone().requires_grad_()
    scores = reward.with_gradient(images, prompts=[Prompt(text, i, {}) for i, text in enumerate(prompts)], step=0)
    (gradient,) = torch.autograd.grad(scores.sum(), images)
    return scores.detach(), gradient


@pytest.mark.parametrize("size", [(EDGE, EDGE), (64, 48)])
@pytest.mark.parametrize("name", ["clip_score", "pickscore", "hps_v2", "aesthetic"])
def test_scores_have_a_gradient(
    name: str, size: tuple[int, int], clip_folder: Path, predictor_file: Path, tmp_path: Path
) -> None:
    """Scores equal those of a call within 1e-6; the gradient is that of the preprocessing without rounding."""
    kwargs = {"clip_score": {"model": clip_folder}, "hps_v2": {"model": clip_folder}}
    kwargs["pickscore"] = {"model": clip_folder, "processor": clip_folder}
    kwargs["aesthetic"] = {"predictor": predictor_file, "clip_model": clip_folder}
    images = 0.1 + 0.8 * random_images(*size)
    reward = build(name, **kwargs[name])
    reward.check_gradients()
    reward.submit(images, [Prompt(text, i, {}) for i, text in enumerate(PROMPTS)])
    scores, gradient = with_gradient(reward, images)
    torch.testing.assert_close(scores, reward.collect()[name], atol=1e-6, rtol=1e-6)
    # a step along the gradient, far larger than the rounding, changes the scores by about its length
    assert gradient.shape == images.shape and gradient.abs().amax((1, 2, 3)).min() > 0
    step = 0.01 * gradient / gradient.abs().max()
    moved = with_gradient(reward, images + step)[0] - with_gradient(reward, images - step)[0]
    assert float(moved.sum()) == pytest.approx(2 * float((gradient * step).sum()), rel=0.2)


def test_the_weighted_sum_has_the_gradients_of_its_terms(clip_folder: Path, predictor_file: Path) -> None:
    terms = [
        entry("clip_score", model=str(clip_folder), weight=0.5),
        entry("aesthetic", predictor=str(predictor_file), clip_model=str(clip_folder), weight=-2.0),
        entry("jpeg_compressibility", weight=0.0),
    ]
    reward, images = rewards(*terms), random_images(EDGE, EDGE)
    reward.check_gradients()
    scores, gradient = with_gradient(reward, images)
    parts = [with_gradient(rewards(term), images) for term in terms[:2]]
    torch.testing.assert_close(scores, parts[0][0] + parts[1][0])
    torch.testing.assert_close(gradient, parts[0][1] + parts[1][1])
    # two images of each prompt, side by side
    twice = with_gradient(reward, images.repeat_interleave(2, 0))[0]
    torch.testing.assert_close(twice, scores.repeat_interleave(2))


def test_a_term_that_has_no_gradient_is_named() -> None:
    assert told(ValueError, rewards(entry("jpeg_compressibility")).check_gradients) == (
        "reward.functions[0]: 'jpeg_compressibility' has no gradient, and the algorithm differentiates the reward; "
        "expected a reward such as aesthetic, clip_score, hps_v2 or pickscore, a function marked with "
        "phalanx.rewards.differentiable, or a weight of 0"
    )


# --- mistakes


def error_of(name: str, **kwargs: Any) -> str:
    message = told(ValueError, build, name, **kwargs)
    assert "\n" not in message
    return message.removeprefix(f"reward.functions[0] ({name}): ")


def test_missing_models(tmp_path: Path, clip_folder: Path) -> None:
    assert error_of("clip_score", model=tmp_path / "no") == (
        f"model='{tmp_path}/no' is not a folder; give a folder with a CLIP model, or a hub id"
    )
    assert error_of("pickscore", model=clip_folder, processor="./no") == (
        "processor='./no' is not a folder; give a folder with a CLIP model, or a hub id"
    )
    assert error_of("pickscore") == (  # the tests are offline
        "model='yuvalkirstain/PickScore_v1' does not load as CLIPModel: We couldn't "
        "connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."
    )
    (tmp_path / "bare").mkdir()
    message = error_of("clip_score", model=tmp_path / "bare")
    assert message.startswith(f"model='{tmp_path}/bare' does not load as CLIPModel: ")


def test_weights_without_a_tokenizer(tmp_path: Path, clip_folder: Path) -> None:
    """transformers would continue with an empty vocabulary."""
    for name in ("config.json", "model.safetensors", "processor_config.json"):
        (tmp_path / name).write_bytes((clip_folder / name).read_bytes())
    assert error_of("clip_score", model=tmp_path) == (
        f"model='{tmp_path}' has a tokenizer of 2 tokens, but the model has 514; "
        "give the processor that belongs to the model"
    )


def test_weights_of_another_model(tmp_path: Path, clip_folder: Path) -> None:
    """transformers would fill the missing weights with random numbers."""
    (tmp_path / "config.json").write_bytes((clip_folder / "config.json").read_bytes())
    save_file({"logit_scale": torch.tensor(1.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    message = error_of("clip_score", model=tmp_path)
    assert message == (
        f"model='{tmp_path}' is not a CLIP model: it has no text_model.embeddings.position_embedding.weight"
    )


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("model.safetensors", cut, "does not load as CLIPModel: SafetensorError: Error while deserializing header: "),
        (
            "config.json",
            lambda text: text.replace('"projection_dim": 24', '"projection_dim": 12'),
            "is not a CLIP model: its text_projection.weight is [24, 32] rather than [12, 32]",
        ),
        ("config.json", cut, "does not load as CLIPModel: It looks like the config file at "),
        ("processor_config.json", cut, "does not load as AutoImageProcessor: It looks like the config file at "),
        ("tokenizer.json", cut, "does not load as AutoTokenizer: JSONDecodeError: "),
        ("tokenizer.json", lambda text: "{}", "does not load as AutoTokenizer: KeyError: 'added_tokens'"),
        ("tokenizer.json", lambda text: text.replace('"BPE"', '"Words"'), "does not load as AutoTokenizer: "),
    ],
)
def test_broken_downloads(
    tmp_path: Path, clip_folder: Path, file: str, change: Callable[[str], str], reason: str
) -> None:
    folder = broken_copy(clip_folder, tmp_path / "clip", file, change)
    assert error_of("clip_score", model=folder).startswith(f"model='{folder}' {reason}")


@pytest.mark.parametrize(
    "other",
    [
        {"image_processor_type": "ViTImageProcessor"},
        {"image_processor_type": "SiglipImageProcessor"},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": EDGE - 1}, "crop_size": EDGE},
    ],
)
def test_a_processor_that_is_not_clips(tmp_path: Path, clip_folder: Path, other: dict[str, Any]) -> None:
    folder = tmp_path / "clip"
    shutil.copytree(clip_folder, folder)
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(other))
    assert error_of("clip_score", model=folder) == (
        "the image processor is not CLIP's: bicubic resize, centre crop, rescaling, normalisation"
    )


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("crop_size", [None]),
        ("size", [None]),
        ("image_mean", [None]),
        ("do_center_crop", [None, False]),
        ("resample", [None, 2]),
        ("rescale_factor", [None, 1.0]),
    ],
)
def test_processors_that_lack_a_value_or_have_another(clip_folder: Path, key: str, values: list[Any]) -> None:
    from transformers import AutoImageProcessor

    config = AutoImageProcessor.from_pretrained(clip_folder).to_dict()
    pixels_of(config, torch.device("cpu"))
    for other in ({k: v for k, v in config.items() if k != key}, *({**config, key: value} for value in values)):
        assert told(ValueError, pixels_of, other, torch.device("cpu")).startswith("the image processor is not CLIP's")


def test_bad_predictors(tmp_path: Path, clip_folder: Path) -> None:
    keys = ", ".join(f"layers.{k}.weight and .bias" for k in PREDICTOR_WIDTHS)

    def message(predictor: Path) -> str:
        return error_of("aesthetic", predictor=predictor, clip_model=clip_folder)

    assert error_of("aesthetic") == (
        "reward.functions[0].kwargs: aesthetic(**kwargs): missing a required argument: 'predictor'; "
        "its kwargs: predictor, clip_model"
    )
    none, pth = tmp_path / "none.safetensors", tmp_path / "sac+logos.pth"
    assert message(none) == (f"predictor='{none}' does not exist; expected a .safetensors file or its folder")
    assert message(pth) == (
        f"predictor='{pth}' is a pickle, which can run code; convert it once: python -c \"import torch, "
        f"safetensors.torch as s; d = torch.load('{pth}', weights_only=True); s.save_file({{k: v.clone() for k, v in "
        f"d.get('state_dict', d).items()}}, '{tmp_path}/sac+logos.safetensors')\""
    )
    assert message(tmp_path) == f"predictor='{tmp_path}' is a folder with 0 .safetensors files; expected one"

    other, wide, noise, short = (tmp_path / f"{n}.safetensors" for n in ("other", "wide", "noise", "short"))
    save_file({"head.weight": torch.zeros(1, 1)}, other)
    assert message(other) == f"predictor='{other}' has no matrix layers.0.weight; expected {keys}"
    save_file(predictor_state(768), wide)
    assert message(wide) == (
        f"predictor='{wide}' takes 768 features, and clip_model='{clip_folder}' gives {DIM}; expected the CLIP "
        "that it was trained on, openai/clip-vit-large-patch14"
    )
    noise.write_bytes(b"\xff" * 100)
    assert message(noise).startswith(f"predictor='{noise}' is not a safetensors file: ")
    save_file({k: v for k, v in predictor_state(DIM).items() if not k.startswith("layers.7")}, short)
    text = message(short)
    assert text.startswith(f"predictor='{short}' has other layers (") and text.endswith(f"); expected {keys}")


def test_the_conversion_that_the_message_gives_works(tmp_path: Path, clip_folder: Path) -> None:
    torch.save(predictor_state(DIM), tmp_path / "sac.pth")
    error = error_of("aesthetic", predictor=tmp_path / "sac.pth", clip_model=clip_folder)
    command = shlex.split(error.split("convert it once: ")[1])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
    written = tmp_path / "sac.safetensors"
    assert len(score("aesthetic", random_images(EDGE, EDGE), PROMPTS, predictor=written, clip_model=clip_folder)) == 3
