"""Qwen2-VL and Qwen2.5-VL as trunks of reward models, with heads that read special tokens.

The position of a token, also of an image, is its index in the sequence rather than Qwen2-VL's time, height and width:
these models were trained with code that inserts the images' embeddings itself, so that transformers numbers the tokens
consecutively.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.engines.loading import as_text
from phalanx.zoo.rewards.image._clip import load_part, openai_colours, read_weights, resize

IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
Dtype = Literal["bfloat16", "float16", "float32"]
_PIXELS = 256 * 28 * 28  # approximate area of an image after resizing
_HEAD = ("0", "3", "5")  # positions of the linear layers in the published nn.Sequential
_PEFT = "base_model.model."  # peft's prefix of the names of weights


@dataclass(frozen=True)
class Published:
    """Published weights of a reward model.

    model: the .safetensors file, or its folder.
    base: folder or hub id of the configuration and tokenizer of the model that they were trained from.
    kind, family: the base's model type, and its name in messages.
    name, expected: name of the weights, and description of the expected file, in messages.
    lora_scale: scale of the LoRA that the weights include and that is merged; None: no LoRA.
    linear: heads are linear layers without bias.
    """

    model: str
    base: str
    kind: str
    family: str
    name: str
    expected: str
    lora_scale: float | None = None
    linear: bool = False

    def wrong(self, problem: str) -> ValueError:
        """An error about these weights."""
        return ValueError(f"model={self.model!r} {problem}; {self.expected}")


class Trunk:
    """The transformer of `published`, the tokenizer with the tokens `added`, and `heads`, given by their names in the
    weights, in float32. `dtype`, `micro_batch_size` and `device` are the kwargs of the reward.
    """

    def __init__(
        self, published: Published, added: list[str], heads: list[str], dtype: Dtype, micro_batch_size: int, device: str
    ) -> None:
        from transformers import AutoConfig, AutoTokenizer

        model, base = published.model, published.base
        self._base = base
        config = load_part(AutoConfig, base, "base", f"the configuration and tokenizer of {published.family}")
        if config.model_type != published.kind:
            raise ValueError(f"base={base!r} is a model of type {config.model_type}; expected a {published.kind}")
        tokenizer = load_part(AutoTokenizer, base, "base", padding_side="right")
        if tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) != config.image_token_id:
            # transformers silently makes an empty tokenizer if the folder has none
            raise ValueError(
                f"base={base!r} has no tokenizer of {published.family}: {IMAGE_TOKEN} is not its image token"
            )
        tokenizer.add_tokens(added, special_tokens=True)
        self.tokenizer, self.device, self.vision = tokenizer, torch.device(device), config.vision_config
        self._micro_batch = micro_batch_size
        self.added: list[int] = tokenizer.convert_tokens_to_ids(added)
        self._specials = list(tokenizer.get_added_vocab())
        weights, head = _split_weights(_without_lora(_read_weights(published), published), published)
        embeddings = weights.get("language_model.embed_tokens.weight")
        if embeddings is None:
            raise published.wrong("has no weights model.embed_tokens.weight")
        rows = len(embeddings)
        if rows <= max(self.added):
            raise ValueError(
                f"model={model!r} embeds {rows} tokens, and {added[-1]} is number {self.added[-1]} of "
                f"base={base!r}; expected the base that the model was trained from"
            )
        config.text_config.vocab_size = rows
        self.heads = _build_heads(head, heads, published, self.device)
        self.backbone = _build_backbone(weights, config, vars(torch)[dtype], self.device, published)

    def fill(self, template: str, prompt: str) -> str:
        """The template with a prompt, whose special tokens are broken up, so that they are tokenized as plain words."""
        return template.replace("{prompt}", as_text(prompt, self._specials))

    def chat(self, shown: Sequence[str], text: str) -> str:
        """A turn of the user in the base's chat template: the items `shown`, each "image" or "video", then the text."""
        content = [*({"type": kind} for kind in shown), {"type": "text", "text": text}]
        turns = [{"role": "user", "content": content}]
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def check_chat(self, shown: Sequence[str], token: str) -> None:
        """Raise ValueError unless the chat template has one `token` for each item shown."""
        if self.tokenizer.chat_template is None or self.chat(shown, "").count(token) != len(shown):
            raise ValueError(
                f"base={self._base!r} has no chat template for {shown[0]}s; expected one beside its tokenizer"
            )

    def patches(self, videos: Tensor, least: int = _PIXELS, most: int = _PIXELS) -> tuple[Tensor, Tensor]:
        """Patches and grid of videos [b, F, 3, H, W] in 0..1; see `patches_of`."""
        vision = self.vision
        sizes = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        return patches_of(videos.to(self.device), *sizes, least, most)

    def in_micro_batches(self, grade: Callable[..., Tensor], *samples: Any) -> Tensor:
        """The results of `grade` [b, ...] for micro-batches of the samples, joined to [B, ...]."""
        starts = range(0, len(samples[0]), self._micro_batch)
        return torch.cat([grade(*(each[i : i + self._micro_batch] for each in samples)) for i in starts])

    def hidden(self, chats: list[str], token: str, pixels: Tensor, grid: Tensor) -> Tensor:
        """The last hidden states [b, A, D], float32, of the A added tokens, each of which occurs once in every chat.

        `token` is IMAGE_TOKEN or VIDEO_TOKEN, and stands in the chats once for each of the grid's images or videos.
        """
        counts = iter((grid.prod(1) // self.vision.spatial_merge_size**2).tolist())
        texts = [re.sub(re.escape(token), lambda _: token * next(counts), chat) for chat in chats]
        tokens: Tensor = self.tokenizer(texts, padding=True, return_tensors="pt").input_ids.to(self.device)
        # no mask is needed: attention is causal, and the padding follows the tokens that are read
        positions = torch.arange(tokens.shape[1], device=self.device).expand(3, *tokens.shape)
        inputs = {"pixel_values": pixels, "image_grid_thw": grid}
        if token == VIDEO_TOKEN:
            inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid}
        states = self.backbone(
            input_ids=tokens, position_ids=positions, use_cache=False, **inputs
        ).last_hidden_state  # [b, tokens, D]
        rows = torch.arange(len(tokens), device=self.device)
        read = [states[rows, (tokens == token).int().argmax(1)] for token in self.added]
        return torch.stack(read, 1).float()


def patches_of(
    videos: Tensor, side: int, merge: int, frames: int, least: int = _PIXELS, most: int = _PIXELS
) -> tuple[Tensor, Tensor]:
    """Patches [b * t * h * w, values] of videos [b, F, 3, H, W] in 0..1, and their grid [b, 3] of rows (t, h, w).

    Qwen2-VL's preprocessing for a batch on any device, with the steps of transformers' Qwen2VLImageProcessor, which
    processes single images on the CPU; the two agree within two of 255 levels (tested). A patch is `side` pixels wide
    and `frames` frames deep; merge * merge patches become one token. An image is a video of one frame, which is
    repeated for all `frames` of a patch. `least` and `most` bound the pixels of a frame after resizing.
    """
    b, count, device = len(videos), videos.shape[1], videos.device
    height, width = resized(videos.shape[3], videos.shape[4], side * merge, least, most)
    mean, std = openai_colours(device)
    pixels = (resize(videos.flatten(0, 1), (height, width)) / 255 - mean) / std
    h, w = height // side, width // side
    pixels = pixels.view(b, count, 3, h // merge, merge, side, w // merge, merge, side)
    if count == 1:
        pixels = pixels.expand(-1, frames, *(-1,) * 7)
    pixels = pixels.unflatten(1, (-1, frames))
    # patches of one token are adjacent: [b, t, h, w, merge, merge, 3, frames, side, side]
    patches = pixels.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    t = patches.shape[1]
    return patches.reshape(b * t * h * w, -1), torch.tensor([[t, h, w]] * b, device=device)


def resized(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """The size to which Qwen2-VL resizes an image: an area of `least` to `most` pixels, sides that are multiples of
    `unit`, and nearly the same aspect ratio. Raises ValueError if one side is more than 200 times the other.
    """
    # imported here, since it loads transformers' image processing; from the file that needs no torchvision
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"one side of an image of {height} x {width} pixels is more than 200 times the other")
    size: tuple[int, int] = smart_resize(height, width, unit, least, most)
    return size


def _read_weights(published: Published) -> dict[str, Tensor]:
    """All weights of a .safetensors file, or of all such files of a folder."""
    path = Path(published.model).expanduser()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise published.wrong("has no .safetensors file")
    state: dict[str, Tensor] = {}
    for file in files:
        state |= read_weights(file, f"model={published.model!r}: {file.name}")
    return state


def _without_lora(state: dict[str, Tensor], published: Published) -> dict[str, Tensor]:
    """The weights with peft's LoRA merged in float32, under the model's own names; unchanged if there is no LoRA."""
    scale = published.lora_scale
    if scale is None:
        return state
    plain: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith(_PEFT):
            raise published.wrong(f"has {name}, which does not begin with {_PEFT}")
        if ".lora_" in name:
            continue
        layer, base, kind = name.removeprefix(_PEFT).partition(".base_layer.")
        if base and kind == "weight":
            down, up = (f"{_PEFT}{layer}.lora_{part}.default.weight" for part in "AB")
            _require_weights([down, up], state, published)
            value = value.float().addmm(state[up].float(), state[down].float(), alpha=scale).to(value.dtype)
        plain[f"{layer}.{kind}" if base else layer] = value
    return plain


def _split_weights(state: dict[str, Tensor], published: Published) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of the trunk, under transformers' current names, and those of the heads; lm_head is dropped."""
    trunk: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        if part in ("rm_head", "rm_heads"):
            heads[name] = value
        elif part == "visual":
            trunk[name] = value
        elif part == "model":
            trunk[rest if rest.startswith(("visual.", "language_model.")) else f"language_model.{rest}"] = value
        elif part != "lm_head":
            raise published.wrong(f"has {name}, which is not a weight of {published.name}")
    return trunk, heads


def _require_weights(names: list[str], state: dict[str, Tensor], published: Published, why: str = "") -> None:
    """Raise ValueError if any of the weights is missing."""
    missing = [name for name in names if name not in state]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise published.wrong(f"has no weights {missing[0]}{more}{why}")


def _build_heads(
    state: dict[str, Tensor], prefixes: list[str], published: Published, device: torch.device
) -> dict[str, nn.Module]:
    """The heads in float32, with widths inferred from the weights."""
    parts = [f"{k}.{kind}" for k in _HEAD for kind in ("weight", "bias")]
    parts = ["weight"] if published.linear else parts
    names = [f"{prefix}.{part}" for prefix in prefixes for part in parts]
    _require_weights(names, state, published, ": not a reward model")
    extra = sorted(state.keys() - set(names))
    if extra:
        raise published.wrong(f"has another head, with {extra[0]}")
    heads: dict[str, nn.Module] = {}
    for prefix in prefixes:
        if published.linear:
            rows, width = state[f"{prefix}.weight"].shape
            head: nn.Module = nn.Linear(width, rows, bias=False)
        else:
            first, second, third = (nn.Linear(*state[f"{prefix}.{k}.weight"].T.shape) for k in _HEAD)
            head = nn.Sequential(first, nn.ReLU(), nn.Dropout(), second, nn.ReLU(), third)
        weights = {name.removeprefix(f"{prefix}."): value.float() for name, value in state.items() if prefix in name}
        head.load_state_dict(weights)
        heads[prefix] = head.requires_grad_(False).eval().to(device)
    return heads


def _build_backbone(
    state: dict[str, Tensor], config: Any, dtype: torch.dtype, device: torch.device, published: Published
) -> nn.Module:
    """The transformer with exactly these weights."""
    from transformers import AutoModel

    with torch.device("meta"):
        empty = AutoModel.from_config(config, trust_remote_code=False)
    expected = empty.state_dict()
    _require_weights(sorted(expected), state, published)
    wrong = sorted(state.keys() - expected.keys())
    for name, value in state.items():
        if name in expected and value.shape != expected[name].shape:
            wrong.append(f"{name} of {list(value.shape)} rather than {list(expected[name].shape)}")
    if wrong:
        raise ValueError(
            f"model={published.model!r} has {wrong[0]}, which does not match base={published.base!r}; expected the "
            "base that the model was trained from"
        )
    backbone: nn.Module = type(empty).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, device_map={"": device}, trust_remote_code=False
    )
    return backbone.requires_grad_(False).eval()
