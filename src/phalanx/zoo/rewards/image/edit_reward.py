"""Reward: EditReward (arXiv 2509.26346), a Qwen2.5-VL-7B or MiMo-VL-7B with two heads, for edited images.

One head scores how well the instruction is followed, the other the image quality, each with its own instruction text.
As in the code of github.com/TIGER-AI-Lab/EditReward:

1. The source image, the edited one and the text are given in the chat format of the base model; the reward token is
   added to the tokenizer as its last token.
2. Both images are resized to about 448 x 448 pixels (256 tokens of 28 x 28), keeping the aspect ratio as Qwen2-VL does.
3. Each head has HPSv3's architecture, and returns a mean and a spread; the score is the unbounded mean of both means.

The instructions, edit_reward_*.txt, are data of that code (EditReward/dataset/prompts.py; see NOTICE), verbatim, with
the blanks at line ends, since changes would change the scores.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from phalanx.media.pictures import Picture
from phalanx.rewards.base import DeviceReward, RewardOutput, RewardWithExtras
from phalanx.zoo.rewards.image._qwen_vl import IMAGE_TOKEN, Dtype, Published, Trunk

REWARD_TOKEN = "<|Reward|>"
_HERE = Path(__file__)
FOLLOWING = _HERE.with_name("edit_reward_following.txt").read_text(encoding="utf-8")
QUALITY = _HERE.with_name("edit_reward_quality.txt").read_text(encoding="utf-8")
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
        micro_batch_size: PositiveInt = 8,
        dtype: Dtype = "bfloat16",
        device: str = "cpu",
    ) -> None:
        self._source_key = source_key
        published = Published(model, base, "qwen2_5_vl", "Qwen2.5-VL", "EditReward", _EXPECTED)
        self._trunk = Trunk(published, [REWARD_TOKEN], list(_HEADS), dtype, micro_batch_size, device)
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
        both = self._trunk.in_micro_batches(self._score_images, images, prompts, metadata)
        return RewardOutput(both.mean(1), dict(zip(self.extras, both.T, strict=True)))

    def _score_images(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """The means of both heads [b, 2]."""
        edited, grid = self._trunk.patches(images[:, None])
        sources: dict[int, tuple[Tensor, Tensor]] = {}  # by image to edit, which the samples of a prompt share
        pixels, grids = [], []
        for i, (patches, meta) in enumerate(zip(edited.chunk(len(images)), metadata, strict=True)):
            picture: Picture = meta[self._source_key]
            if id(picture) not in sources:
                values = torch.from_numpy(np.array(picture.parts[0].pil())).movedim(-1, 0)[None, None] / 255
                sources[id(picture)] = self._trunk.patches(values)
            source, source_grid = sources[id(picture)]
            pixels += [source, patches]
            grids += [source_grid, grid[i : i + 1]]
        scores = []
        for name, template in _HEADS.items():
            chats = [self._trunk.chat(_SHOWN, self._trunk.fill(template, prompt)) for prompt in prompts]
            hidden = self._trunk.hidden(chats, IMAGE_TOKEN, torch.cat(pixels), torch.cat(grids))[:, 0]
            scores.append(self._trunk.heads[name](hidden)[:, 0])  # column 1 is the spread
        return torch.stack(scores, 1)
