"""Reward: HPSv3 (arXiv 2508.03789): a Qwen2-VL-7B with a small head that reads the answer at a special token.

The head gives mean and spread of the preference for an image; the score is the mean, which has no bounds. From the code
of github.com/MizzenAI/HPSv3:

1. Image before text, in Qwen2-VL's chat, with HPSv3's instruction; its reward token is added to the tokenizer, last.
2. Images are resized to about 448 x 448 pixels (256 tokens of 28 x 28), keeping their shape as Qwen2-VL does.
3. The head is Linear, ReLU, Dropout, Linear, ReLU, Linear on the last hidden state of the reward token, in float32.
4. Tokens, those of the image too, have their number as position, rather than Qwen2-VL's time, height and width: that
   code puts the image's embeddings into the sequence by itself, and transformers then counts the tokens through.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.rewards.base import DeviceReward
from phalanx.rewards.image._clip import folder_or_hub, load_part, read_weights, resize
from phalanx.rewards.image._hps_v3_text import CHAT, IMAGE_TOKEN, REWARD_TOKEN, TEMPLATE

_PIXELS = 256 * 28 * 28  # about the area of an image after resizing
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HEAD = ("0", "3", "5")  # positions of the linear layers in the published nn.Sequential
_EXPECTED = "expected HPSv3.safetensors of MizzenAI/HPSv3, or its folder"


class HpsV3(DeviceReward):
    """`model`: the published .safetensors file, or its folder; `base`: folder or hub id of Qwen2-VL's configuration and
    tokenizer, whose weights are not needed. A `template` has {prompt} and one `reward_token`. `micro_batch_size` images
    are scored at once.
    """

    def __init__(
        self,
        model: str,
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        template: str = TEMPLATE,
        reward_token: str = REWARD_TOKEN,
        micro_batch_size: int = 8,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ) -> None:
        from transformers import AutoConfig, AutoTokenizer

        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(_DTYPES)}")
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size}; expected a number of images, at least 1")
        if template.count("{prompt}") != 1 or template.count(reward_token) != 1:
            raise ValueError(f"template has to have {{prompt}} and {reward_token} once each, and is {template!r}")
        source = folder_or_hub(base, "base", "the configuration and tokenizer of Qwen2-VL")
        config = load_part(AutoConfig, source, "base")
        if config.model_type != "qwen2_vl":
            raise ValueError(f"base={base!r} is a model of type {config.model_type}; expected a qwen2_vl")
        tokenizer = load_part(AutoTokenizer, source, "base", padding_side="right")
        if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != config.image_token_id:
            # transformers makes an empty tokenizer, silently, of a folder without one
            raise ValueError(f"base={base!r} has no tokenizer of Qwen2-VL: {IMAGE_TOKEN} is not its image token")
        tokenizer.add_tokens([reward_token], special_tokens=True)
        self._reward_id: int = tokenizer.convert_tokens_to_ids(reward_token)
        self._tokenizer = tokenizer
        self._specials = re.compile("|".join(map(re.escape, tokenizer.get_added_vocab())))
        self._template, self._micro_batch = template, micro_batch_size
        self._device = torch.device(device)
        backbone, head = _split(_read(model), model)
        embeddings = backbone.get("language_model.embed_tokens.weight")
        if embeddings is None:
            raise ValueError(f"model={model!r} has no weights model.embed_tokens.weight; {_EXPECTED}")
        rows = len(embeddings)
        if rows <= self._reward_id:
            raise ValueError(
                f"model={model!r} embeds {rows} tokens, and {reward_token} is number {self._reward_id} of "
                f"base={base!r}; expected the base that the model was trained from"
            )
        config.text_config.vocab_size = rows
        self._head = _head(head, model).to(device)
        self._backbone = _backbone(backbone, config, _DTYPES[dtype], device, (model, base))
        self._vision = config.vision_config

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Images [B, 3, H, W] in 0..1 -> float32 [B]."""
        size, scores = self._micro_batch, [torch.zeros(0, device=self._device)]
        for i in range(0, len(prompts), size):
            scores.append(self._score(images[i : i + size], prompts[i : i + size]))
        return torch.cat(scores)

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        vision = self._vision
        pixels, grid = patches_of(
            images.to(self._device), vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        )
        tokens = self._tokens(prompts, int(grid[0].prod()) // vision.spatial_merge_size**2)
        # No mask: a token sees what is left of it, and the padding is right of the reward token. Positions: see 4.
        positions = torch.arange(tokens.shape[1], device=self._device).expand(3, *tokens.shape)
        hidden = self._backbone(
            input_ids=tokens, pixel_values=pixels, image_grid_thw=grid, position_ids=positions, use_cache=False
        ).last_hidden_state  # [b, tokens, D]
        rows = torch.arange(len(prompts), device=self._device)
        at = (tokens == self._reward_id).int().argmax(1)
        return self._head(hidden[rows, at].float())[:, 0]  # column 1 is the spread

    def _tokens(self, prompts: list[str], image_tokens: int) -> Tensor:
        """b prompts -> token ids [b, longest]; a special token that a prompt holds becomes plain text."""
        texts = []
        for prompt in prompts:
            plain = self._specials.sub(lambda match: f"{match[0][0]} {match[0][1:]}", prompt)
            text = CHAT.replace("{text}", self._template.replace("{prompt}", plain))
            texts.append(text.replace("{image}", IMAGE_TOKEN * image_tokens, 1))
        ids: Tensor = self._tokenizer(texts, padding=True, return_tensors="pt").input_ids
        return ids.to(self._device)


def patches_of(images: Tensor, side: int, merge: int, frames: int) -> tuple[Tensor, Tensor]:
    """Images [b, 3, H, W] in 0..1 -> patches [b * h * w, values], and their grid [b, 3] of rows (1, h, w).

    Qwen2-VL's preprocessing, for a batch on any device: the steps of transformers' Qwen2VLImageProcessor, which works
    image by image and leaves the device; the two agree within two of 255 levels (tested). A patch is `side` pixels
    wide, merge * merge of them become a token. An image fills all `frames` of the model's pairs of video frames.
    """
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    b, device = len(images), images.device
    height, width = resized(images.shape[2], images.shape[3], side * merge, _PIXELS)
    mean, std = (torch.tensor(rgb, device=device).view(3, 1, 1) for rgb in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    pixels = (resize(images, (height, width)) / 255 - mean) / std
    h, w = height // side, width // side
    pixels = pixels.view(b, 3, 1, h // merge, merge, side, w // merge, merge, side)
    # patches that become one token lie together: [b, h, w, merge, merge, 3, frames, side, side]
    patches = pixels.permute(0, 3, 6, 4, 7, 1, 2, 5, 8).expand(-1, -1, -1, -1, -1, -1, frames, -1, -1)
    return patches.reshape(b * h * w, -1), torch.tensor([[1, h, w]] * b, device=device)


def resized(height: int, width: int, unit: int, pixels: int) -> tuple[int, int]:
    """The size that Qwen2-VL gives an image for an area of `pixels`: of its shape, in multiples of `unit`.

    ValueError for an image more than 200 times as long as wide.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"an image of {height} x {width} pixels is more than 200 times as long as wide")
    nearest = [max(unit, round(side / unit) * unit) for side in (height, width)]
    area = nearest[0] * nearest[1]
    if area > pixels:
        shrink = math.sqrt(height * width / pixels)
        nearest = [max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)]
    elif area < pixels:
        grow = math.sqrt(pixels / (height * width))
        nearest = [math.ceil(side * grow / unit) * unit for side in (height, width)]
    return nearest[0], nearest[1]


def _read(model: str) -> dict[str, Tensor]:
    """All weights of a .safetensors file, or of those of a folder."""
    path = Path(model).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"model={model!r} has no .safetensors file; {_EXPECTED}")
    state: dict[str, Tensor] = {}
    for file in files:
        state |= read_weights(file, f"model={model!r}: {file.name}")
    return state


def _split(state: dict[str, Tensor], model: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of Qwen2VLModel, under today's names or the published ones, and of the head; the rest is not used."""
    backbone: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        if part == "rm_head":
            head[name] = value
        elif part == "visual":
            backbone[name] = value
        elif part == "model":
            backbone[rest if rest.startswith(("visual.", "language_model.")) else f"language_model.{rest}"] = value
        elif part != "lm_head":
            raise ValueError(f"model={model!r} has {name}, which is not a weight of HPSv3; {_EXPECTED}")
    return backbone, head


def _require(names: list[str], state: dict[str, Tensor], model: str, why: str = "") -> None:
    """ValueError for weights that are not there."""
    missing = [name for name in names if name not in state]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(f"model={model!r} has no weights {missing[0]}{more}{why}; {_EXPECTED}")


def _head(state: dict[str, Tensor], model: str) -> nn.Sequential:
    """The head in float32, its widths read from the weights."""
    names = [f"rm_head.{k}.{kind}" for k in _HEAD for kind in ("weight", "bias")]
    _require(names, state, model, ": no reward model")
    extra = sorted(state.keys() - set(names))
    if extra:
        raise ValueError(f"model={model!r} has another head, with {extra[0]}; {_EXPECTED}")
    first, second, third = (nn.Linear(*state[f"rm_head.{k}.weight"].T.shape) for k in _HEAD)
    head = nn.Sequential(first, nn.ReLU(), nn.Dropout(), second, nn.ReLU(), third)
    head.load_state_dict({name.removeprefix("rm_head."): value.float() for name, value in state.items()})
    return head.requires_grad_(False).eval()


def _backbone(
    state: dict[str, Tensor], config: Any, dtype: torch.dtype, device: str, sources: tuple[str, str]
) -> nn.Module:
    """Qwen2VLModel with exactly these weights."""
    from transformers import Qwen2VLModel

    model, base = sources
    with torch.device("meta"):
        expected = Qwen2VLModel(config).state_dict()
    _require(sorted(expected), state, model)
    wrong = sorted(state.keys() - expected.keys())
    for name, value in state.items():
        if name in expected and value.shape != expected[name].shape:
            wrong.append(f"{name} of {list(value.shape)} rather than {list(expected[name].shape)}")
    if wrong:
        raise ValueError(
            f"model={model!r} has {wrong[0]}, which does not go with base={base!r}; expected the base that the "
            "model was trained from"
        )
    backbone: nn.Module = Qwen2VLModel.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, device_map={"": device}
    )
    return backbone.requires_grad_(False).eval()
