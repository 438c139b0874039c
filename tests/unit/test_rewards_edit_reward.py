"""EditReward at tiny size with random weights, against the scores of its authors' code with these weights."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.media.pictures import Picture
from phalanx.types import Prompt
from tests.helpers.pairs import png
from tests.helpers.tiny_qwen2_vl import SPECIAL, tiny_qwen2_vl
from tests.unit.test_rewards_clip import build, error_of, pil, random_images

State = dict[str, Tensor]
SIZE = 448  # pixels of a square image after Qwen2-VL's resize
PROMPTS = ["make it red", "make it red", "add a dog, please"]
SHAPES = {"0": (12, 32), "3": (5, 12), "5": (2, 5)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2_vl(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl")


def random_state(base: Path) -> State:
    """Weights under the published names, with a row for the reward token; each is drawn with its name as seed."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig.from_pretrained(base)
    config.text_config.vocab_size = 256 + len(SPECIAL) + 1
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen2_5_VLForConditionalGeneration(config).state_dict().items()}
    for head in (0, 1):
        for layer, shape in SHAPES.items():
            shapes[f"rm_heads.head_{head}.{layer}.weight"] = torch.Size(shape)
            shapes[f"rm_heads.head_{head}.{layer}.bias"] = torch.Size(shape[:1])
    state = {}
    for name, shape in shapes.items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        scale = 0.5 if "rm_heads" in name else 0.15
        state[name] = scale * drawn + float("norm" in name and "weight" in name)
    return state


@pytest.fixture(scope="module")
def state(base: Path) -> State:
    return random_state(base)


@pytest.fixture(scope="module")
def weights(state: State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edit_reward") / "model.safetensors"
    save_file(state, path)
    return path


def sources(size: tuple[int, int]) -> list[Picture]:
    """Two images to edit; the first two samples share one."""
    first, second = pil(random_images(*size, 2).flip(3))
    one = Picture(partial(bytes, png(first)), Path(), "row 0")
    return [one, one, Picture(partial(bytes, png(second)), Path(), "row 1")]


def scored(model: Path, base: Path, images: Tensor, pictures: list[Picture], **kwargs: Any) -> dict[str, Tensor]:
    reward = build("edit_reward", **{"model": model, "base": base, "dtype": "float32", **kwargs})
    reward.submit(images, [Prompt(text, i, {"image": pictures[i]}) for i, text in enumerate(PROMPTS[: len(pictures)])])
    return reward.collect()


# of the class Qwen2_5_VLRewardModelBT_MultiHead of github.com/TIGER-AI-Lab/EditReward, in transformers 4.57, with its
# preprocessing: the scores of both heads
AUTHORS = {
    (448, 448): ([-4.213231, -3.660712, -1.496272], [-0.767961, -0.820393, -1.281463]),
    (300, 530): ([-0.571033, -2.014899, -1.071131], [-0.997396, -0.985115, -0.478221]),
}


@pytest.mark.parametrize(
    ("size", "micro_batch_size", "tolerance"), [((448, 448), 8, 1e-4), ((448, 448), 2, 1e-4), ((300, 530), 8, 6e-3)]
)
def test_scores_are_those_of_the_authors_code(
    base: Path, weights: Path, size: tuple[int, int], micro_batch_size: int, tolerance: float
) -> None:
    """The tolerance covers differences to other libraries' resize, which images of 448 x 448 do not need."""
    rows = scored(weights, base, random_images(*size), sources(size), micro_batch_size=micro_batch_size)
    following, quality = map(torch.tensor, AUTHORS[size])
    torch.testing.assert_close(rows["edit_reward_following"], following, atol=tolerance, rtol=0)
    torch.testing.assert_close(rows["edit_reward_quality"], quality, atol=tolerance, rtol=0)
    torch.testing.assert_close(rows["edit_reward"], (following + quality) / 2, atol=tolerance, rtol=0)


def test_the_texts_are_those_that_the_model_was_trained_with() -> None:
    """A typing error in them, or an editor that strips spaces, would shift all scores without an error."""
    from phalanx.zoo.rewards.image.edit_reward import FOLLOWING, QUALITY

    assert [hashlib.sha256(text.encode()).hexdigest() for text in (FOLLOWING, QUALITY)] == [
        "9b25bbc2775fabc09964c9cf44234d8e5c20e4c6c4dd00a0d7851459e22bfe73",
        "c9f328f27cfc7fa7a93fe57b15caf088b35acb8bf5293b4a493270358f539ffb",
    ]


def test_rows_need_one_image_to_edit(base: Path, weights: Path) -> None:
    (term,) = build("edit_reward", model=weights, base=base).terms
    one, *_ = sources((SIZE, SIZE))
    several = Picture(lambda: [b"", b""], Path(), "row 0")
    assert term.objection("p", {"image": one}) is None
    assert term.objection("p", {"image": several}) == "'image' has 2 images, and EditReward reads one"
    for meta in ({}, {"image": "a.png"}):
        assert term.objection("p", meta) == "it has no image in the column 'image' (source_key)"


def test_bad_weights_and_bases(base: Path, state: State, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    right = "expected the weights of EditReward on Qwen2.5-VL or MiMo-VL as .safetensors, or their folder"

    def message(kept: State, **kwargs: Any) -> str:
        save_file(kept, path)
        return error_of("edit_reward", **{"model": path, "base": base, **kwargs}).removeprefix(f"model='{path}'")

    without = {name: value for name, value in state.items() if not name.startswith("rm_heads.head_1")}
    assert message(without) == f" has no weights rm_heads.head_1.0.weight (and 5 more): not a reward model; {right}"
    assert message(state | {"film.weight": torch.zeros(1)}) == (
        f" has film.weight, which is not a weight of EditReward; {right}"
    )
    other = tiny_qwen2_vl(tmp_path / "qwen2_vl")
    assert message(state, base=other) == f"base='{other}' is a model of type qwen2_vl; expected a qwen2_5_vl"
    silent = tiny_qwen2_vl(tmp_path / "silent", "qwen2_5_vl")
    (silent / "chat_template.jinja").unlink()
    assert message(state, base=silent) == (
        f"base='{silent}' has no chat template for images; expected one beside its tokenizer"
    )
