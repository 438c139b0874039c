"""Reward: HPSv3 (arXiv 2508.03789), a Qwen2-VL-7B with a small head that reads a special token.

The head returns mean and spread of the preference for an image; the score is the mean, which is unbounded. As in the
code of github.com/MizzenAI/HPSv3:

1. The image precedes HPSv3's instruction in Qwen2-VL's chat format; the reward token is added to the tokenizer as its
   last token.
2. Images are resized to about 448 x 448 pixels (256 tokens of 28 x 28), keeping the aspect ratio as Qwen2-VL does.
3. The head is Linear, ReLU, Dropout, Linear, ReLU, Linear on the last hidden state of the reward token, in float32.

The instruction, hps_v3.txt, is data of github.com/MizzenAI/HPSv3 (hpsv3/dataset/data_collator_qwen.py; see NOTICE),
verbatim, with its blanks at line ends and its mistakes, since changes would change the scores.
"""

from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from phalanx.rewards.base import DeviceReward
from phalanx.zoo.rewards.image._qwen_vl import IMAGE_TOKEN, Dtype, Published, Trunk

REWARD_TOKEN = "<|Reward|>"
TEMPLATE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
# the output of Qwen2-VL's chat template for a question about an image, with the default system message
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{image}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
_EXPECTED = "expected HPSv3.safetensors of MizzenAI/HPSv3, or its folder"


class HpsV3(DeviceReward):
    """`model`: the published .safetensors file, or its folder; `base`: folder or hub id of Qwen2-VL's configuration and
    tokenizer, whose weights are not needed. `template`: the instruction, with {prompt} and one `reward_token`.
    `micro_batch_size`: images per forward pass.
    """

    def __init__(
        self,
        model: str,
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        template: str = TEMPLATE,
        reward_token: str = REWARD_TOKEN,
        micro_batch_size: PositiveInt = 8,
        dtype: Dtype = "bfloat16",
        device: str = "cpu",
    ) -> None:
        if template.count("{prompt}") != 1 or template.count(reward_token) != 1:
            raise ValueError(f"template={template!r}; expected {{prompt}} and {reward_token} once each")
        self._template = template
        published = Published(model, base, "qwen2_vl", "Qwen2-VL", "HPSv3", _EXPECTED)
        self._trunk = Trunk(published, [reward_token], ["rm_head"], dtype, micro_batch_size, device)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores float32 [B] of images [B, 3, H, W] in 0..1."""
        return self._trunk.in_micro_batches(self._score_images, images, prompts)

    def _score_images(self, images: Tensor, prompts: list[str]) -> Tensor:
        pixels, grid = self._trunk.patches(images[:, None])
        chats = []
        for prompt in prompts:
            text = self._trunk.fill(self._template, prompt)
            chats.append(CHAT.replace("{image}", IMAGE_TOKEN).replace("{text}", text))
        hidden = self._trunk.hidden(chats, IMAGE_TOKEN, pixels, grid)[:, 0]
        scores: Tensor = self._trunk.heads["rm_head"](hidden)[:, 0]  # column 1 is the spread
        return scores
