"""VideoReward of VideoAlign at tiny size with random weights, against the scores of its authors' code with these."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.tiny_qwen2_vl import SPECIAL, tiny_qwen2_vl
from tests.unit.test_rewards_clip import build, error_of

State = dict[str, Tensor]
PROMPTS = ["a cat runs", "a cat runs", "a boat, in the storm"]
RANK = 2
CONFIG: dict[str, dict[str, Any]] = {
    "data_config": {
        "fps": 2.0,
        "max_frame_pixels": 448 * 448,
        "eval_dim": ["VQ", "MQ", "TA"],
        "num_frames": None,
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    },
    "model_config": {"use_special_tokens": True, "output_dim": 1},
    "peft_lora_config": {
        "lora_enable": True,
        "lora_r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_modules_to_save": None,
        "use_rslora": False,
    },
    "inference_config": {
        "VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"), videos=True)


def random_state(base: Path, grades: int = 1) -> State:
    """Weights under peft's published names, with rows for the reward tokens; each is drawn with its name as seed."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = 256 + len(SPECIAL) + 1 + 3
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen2VLForConditionalGeneration(config).state_dict().items()}
    shapes["rm_head.weight"] = torch.Size((grades, 32))
    state = {}
    for name, shape in shapes.items():
        published = name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
        published = f"base_model.model.{published}"
        parts = {published: shape}
        layer, _, kind = published.rpartition(".")
        if layer.endswith("_proj"):  # all linear layers of the language model have a LoRA
            parts = {f"{layer}.base_layer.{kind}": shape}
            if kind == "weight":
                parts[f"{layer}.lora_A.default.weight"] = torch.Size((RANK, shape[1]))
                parts[f"{layer}.lora_B.default.weight"] = torch.Size((shape[0], RANK))
        for part, size in parts.items():
            seed = int.from_bytes(hashlib.sha256(part.encode()).digest()[:4], "little")
            drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed))
            state[part] = (0.5 if "rm_head" in part else 0.15) * drawn + float("norm" in part and "weight" in part)
    return state


def save(folder: Path, state: State, config: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "model_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def weights(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("video_align"), random_state(base), CONFIG)


def random_videos(frames: int, height: int, width: int) -> Tensor:
    """Smooth videos of whole levels [3, F, 3, H, W] in 0..1."""
    drawn = torch.rand(3, 3, frames, 6, 7, generator=torch.Generator().manual_seed(5))
    videos = torch.nn.functional.interpolate(drawn, size=(frames, height, width), mode="trilinear")
    return (videos.movedim(1, 2) * 255).round() / 255


# of the class Qwen2VLRewardModelBT of github.com/KwaiVGI/VideoAlign, with peft, in transformers 4.45 with its
# preprocessing: the grades of videos at 4 frames per second, with one row of the head for all grades, and one for each
ONE_ROW = {
    (9, 448, 448): [[1.864075, 2.978033, 2.524835], [2.366494, 3.162568, 2.658526], [2.378978, 3.374753, 2.680976]],
    (5, 280, 364): [[2.658591, 4.191565, 3.541746], [2.270024, 3.900167, 3.436318], [2.660017, 4.148930, 3.461119]],
}
THREE_ROWS = [[2.658591, -0.524196, -4.798167], [2.270024, -0.597576, -4.865450], [2.660017, -0.753847, -4.647153]]


def scored(model: Path, base: Path, videos: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    options = {"model": model, "base": base, "fps": 4, "dtype": "float32", **kwargs}
    (term,) = build("video_align", **options).terms
    assert term.takes == "videos"
    output = term.function(videos, PROMPTS, [{}] * len(PROMPTS))
    return {"score": output.scores, **output.extras}


def check(rows: dict[str, Tensor], grades: list[list[float]]) -> None:
    norm = CONFIG["inference_config"]
    mean, std = (torch.tensor([norm[f"{grade}_{kind}"] for grade in ("VQ", "MQ", "TA")]) for kind in ("mean", "std"))
    expected = (torch.tensor(grades) - mean) / std
    names = ("visual_quality", "motion_quality", "text_alignment")
    found = torch.stack([rows[name] for name in names], 1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(rows["score"], expected.sum(1), atol=3e-4, rtol=0)


@pytest.mark.parametrize("micro_batch_size", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", ONE_ROW)
def test_scores_are_those_of_the_authors_code(
    base: Path, weights: Path, shape: tuple[int, int, int], micro_batch_size: int
) -> None:
    rows = scored(weights, base, random_videos(*shape), micro_batch_size=micro_batch_size)
    check(rows, ONE_ROW[shape])


def test_a_head_with_a_row_for_each_grade(base: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "three", random_state(base, 3), CONFIG)
    check(scored(folder, base, random_videos(5, 280, 364)), THREE_ROWS)
    with pytest.raises(ValueError, match=r"samples of one frame; expected videos of two frames or more"):
        scored(folder, base, random_videos(1, 280, 364))


def test_frames_are_those_that_the_authors_code_takes() -> None:
    """As VideoAlign's smart_nframes and linspace; 81 frames at 16 per second are five seconds."""
    from phalanx.zoo.rewards.video.video_align import frames

    assert frames(81, 16, 2) == [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
    assert frames(121, 24, 2) == [0, 13, 27, 40, 53, 67, 80, 93, 107, 120]
    assert frames(9, 4, 2) == [0, 3, 5, 8]
    assert frames(5, 16, 2) == [0, 1, 3, 4] and frames(3, 16, 2) == [0, 2]


def test_the_text_is_that_which_the_model_was_trained_with() -> None:
    """A typing error in it, or an editor that strips spaces, would shift all scores without an error."""
    from phalanx.zoo.rewards.video.video_align import TEMPLATE

    digest = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert digest == "fd7862ecb43bbe39144c6a45a52f886c95a659afb2a231655fd990c2e459976c"


def test_bad_weights_configurations_and_bases(base: Path, weights: Path, tmp_path: Path) -> None:
    state, folder = random_state(base), tmp_path / "model"
    right = "expected a folder with model_config.json and model.pth of KwaiVGI/VideoReward, the latter as .safetensors"

    def message(kept: State, config: dict[str, dict[str, Any]] = CONFIG, **kwargs: Any) -> str:
        save(folder, kept, config)
        return error_of("video_align", **{"model": folder, "base": base, "fps": 16, **kwargs}).removeprefix(
            f"model='{folder}'"
        )

    def changed(section: str, key: str, value: Any) -> dict[str, dict[str, Any]]:
        return CONFIG | {section: CONFIG[section] | {key: value}}

    lora = "base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"
    cut = {name: value for name, value in state.items() if name != lora}
    assert message(cut) == f" has no weights {lora}; {right}"
    head = "base_model.model.rm_head.weight"
    cut = {name: value for name, value in state.items() if name != head}
    assert message(cut) == f" has no weights rm_head.weight: not a reward model; {right}"
    assert message(state | {"film.weight": torch.zeros(1)}) == (
        f" has film.weight, which does not begin with base_model.model.; {right}"
    )
    assert message(state, changed("data_config", "prompt_template_type", "simple")) == (
        f" has data_config.prompt_template_type 'simple' in model_config.json rather than 'detailed_special'; {right}"
    )
    assert message(state, changed("inference_config", "MQ_std", 0)) == (
        f" has inference_config.MQ_std 0 in model_config.json rather than a number above 0; {right}"
    )
    silent = tiny_qwen2_vl(tmp_path / "silent", videos=True)
    (silent / "chat_template.jinja").unlink()
    assert message(state, base=silent) == (
        f"base='{silent}' has no chat template for videos; expected one beside its tokenizer"
    )
    (folder / "model_config.json").unlink()
    assert error_of("video_align", model=folder, base=base, fps=16).removeprefix(f"model='{folder}'") == (
        f" has no readable model_config.json (FileNotFoundError); {right}"
    )
