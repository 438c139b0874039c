"""Reward: EditReward (arXiv 2509.26346), a Qwen2.5-VL-7B or MiMo-VL-7B with two heads, for edited images.

One head scores how well the instruction is followed, the other the image quality, each with its own instruction text.
As in the code of github.com/TIGER-AI-Lab/EditReward:

1. The source image, the edited one and the text are given in the chat format of the base model; the reward token is
   added to the tokenizer as its last token.
2. Both images are resized to about 448 x 448 pixels (256 tokens of 28 x 28), keeping the aspect ratio as Qwen2-VL does.
3. Each head has HPSv3's architecture, and returns a mean and a spread; the score is the unbounded mean of both means.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.media.pictures import Picture
from phalanx.rewards.base import DeviceReward, RewardOutput, RewardWithExtras
from phalanx.rewards.image._edit_reward_text import FOLLOWING, QUALITY, REWARD_TOKEN
from phalanx.rewards.image._qwen_vl import DTYPES, IMAGE_TOKEN, Published, Trunk, check_options

_HEADS = {"rm_heads.head_0": FOLLOWING, "rm_heads.head_1": QUALITY}
_SHOWN = ("image", "image")  # before and after editing
_EXPECTED = "expected the weights of EditReward on Qwen2.5-VL or MiMo-VL as .safetensors, or their folder"


class EditReward(DeviceReward, RewardWithExtras):
    """`model`: the .safetensors file, or its folder; `base`: folder or hub id of the configuration and tokenizer of the
    model that it was trained from. `source_key`: the column of the data with the image to edit. `micro_batch_size`:
    images per forward pass.
    """

    extras = ("following", "quality")

    def __init__(
        self,
        model: str,
        base: str = "Qwen/Qwen2.5-VL-7B-Instruct",
        source_key: str = "image",
        micro_batch_size: int = 8,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ) -> None:
        check_options(dtype, micro_batch_size)
        self._source_key, self._micro_batch = source_key, micro_batch_size
        published = Published(model, base, "qwen2_5_vl", "Qwen2.5-VL", "EditReward", _EXPECTED)
        self._trunk = Trunk(published, [REWARD_TOKEN], list(_HEADS), DTYPES[dtype], torch.device(device))
        self._trunk.check_chat(_SHOWN, IMAGE_TOKEN)

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without one image to edit."""
        picture = metadata.get(self._source_key)
        if not isinstance(picture, Picture):
            raise ValueError(f"it has no image in the column {self._source_key!r} (source_key)")
        if picture.count != 1:
            raise ValueError(f"{self._source_key!r} has {picture.count} images, and EditReward reads one")

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """Scores float32 [B] of images [B, 3, H, W] in 0..1, with those of both heads as extras."""
        for prompt, meta in zip(prompts, metadata, strict=True):
            self.check_row(prompt, meta)
        size, scores = self._micro_batch, [torch.zeros(0, len(_HEADS), device=self._trunk.device)]
        for i in range(0, len(prompts), size):
            part = slice(i, i + size)
            scores.append(self._score(images[part], prompts[part], metadata[part]))
        both = torch.cat(scores)
        return RewardOutput(both.mean(1), dict(zip(self.extras, both.T, strict=True)))

    def _score(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """The means of both heads [b, 2]."""
        edited, grid = self._trunk.patches(images)
        sources: dict[int, tuple[Tensor, Tensor]] = {}  # by image to edit, which the samples of a prompt share
        pixels, grids = [], []
        for i, (patches, meta) in enumerate(zip(edited.chunk(len(images)), metadata, strict=True)):
            picture: Picture = meta[self._source_key]
            if id(picture) not in sources:
                values = torch.from_numpy(np.array(picture.parts[0].pil())).movedim(-1, 0)[None] / 255
                sources[id(picture)] = self._trunk.patches(values)
            source, source_grid = sources[id(picture)]
            pixels += [source, patches]
            grids += [source_grid, grid[i : i + 1]]
        both = torch.cat(grids)  # [2 b, 3]
        counts = self._trunk.image_tokens(both)
        scores = []
        for name, template in _HEADS.items():
            texts = []
            for i, prompt in enumerate(prompts):
                chat = self._trunk.chat(_SHOWN, template.replace("{prompt}", self._trunk.plain(prompt)))
                head, middle, tail = chat.split(IMAGE_TOKEN)
                texts.append(head + IMAGE_TOKEN * counts[2 * i] + middle + IMAGE_TOKEN * counts[2 * i + 1] + tail)
            hidden = self._trunk.hidden(self._trunk.tokens(texts), torch.cat(pixels), both)[:, 0]
            scores.append(self._trunk.heads[name](hidden)[:, 0])  # column 1 is the spread
        return torch.stack(scores, 1)
