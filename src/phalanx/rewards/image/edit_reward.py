"""Reward: EditReward (arXiv 2509.26346): a Qwen2.5-VL-7B or MiMo-VL-7B with two heads, for images that were edited.

One head reads how well the instruction is followed, the other how well the image looks, each after another text. From
the code of github.com/TIGER-AI-Lab/EditReward:

1. The image as it was, the edited one and the text, in the chat of the model that it was trained from; its reward token
   is added to the tokenizer, last.
2. Both images are resized to about 448 x 448 pixels (256 tokens of 28 x 28), keeping their shape as Qwen2-VL does.
3. Each head is that of HPSv3, and gives mean and spread; the score is the mean of both means, which has no bounds.
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
_EXPECTED = "expected the weights of EditReward on Qwen2.5-VL or MiMo-VL as .safetensors, or their folder"


class EditReward(DeviceReward, RewardWithExtras):
    """`model`: the .safetensors file, or its folder; `base`: folder or hub id of the configuration and tokenizer that
    the model was trained from. `source_key`: the column of the data with the image to edit. `micro_batch_size` images
    are scored at once.
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
        if self._trunk.tokenizer.chat_template is None or self._chat("").count(IMAGE_TOKEN) != 2:
            raise ValueError(f"base={base!r} has no chat template for images; expected one beside its tokenizer")

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without one image to edit."""
        picture = metadata.get(self._source_key)
        if not isinstance(picture, Picture):
            raise ValueError(f"it has no image in the column {self._source_key!r} (source_key)")
        if picture.count != 1:
            raise ValueError(f"{self._source_key!r} holds {picture.count} images, and EditReward reads one")

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """Images [B, 3, H, W] in 0..1 -> float32 [B], and the scores of both heads."""
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
        seen: dict[int, tuple[Tensor, Tensor]] = {}  # images to edit, which the samples of a prompt share
        pixels, grids = [], []
        for i, (patches, meta) in enumerate(zip(edited.chunk(len(images)), metadata, strict=True)):
            picture: Picture = meta[self._source_key]
            if id(picture) not in seen:
                values = torch.from_numpy(np.array(picture.parts[0].pil())).movedim(-1, 0)[None] / 255
                seen[id(picture)] = self._trunk.patches(values)
            source, of_source = seen[id(picture)]
            pixels += [source, patches]
            grids += [of_source, grid[i : i + 1]]
        both = torch.cat(grids)  # [2 b, 3]
        counts = self._trunk.image_tokens(both)
        scores = []
        for name, template in _HEADS.items():
            texts = []
            for i, prompt in enumerate(prompts):
                chat = self._chat(template.replace("{prompt}", self._trunk.plain(prompt)))
                head, middle, tail = chat.split(IMAGE_TOKEN)
                texts.append(head + IMAGE_TOKEN * counts[2 * i] + middle + IMAGE_TOKEN * counts[2 * i + 1] + tail)
            hidden = self._trunk.hidden(self._trunk.tokens(texts), torch.cat(pixels), both)[:, 0]
            scores.append(self._trunk.heads[name](hidden)[:, 0])  # column 1 is the spread
        return torch.stack(scores, 1)

    def _chat(self, text: str) -> str:
        """A turn of two images and a text, in the chat template of the base."""
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": text}]
        turns = [{"role": "user", "content": content}]
        chat: str = self._trunk.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return chat
