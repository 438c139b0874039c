"""Reward: VideoReward of VideoAlign (arXiv 2501.13918): a Qwen2-VL-2B that grades a video after the prompt.

A linear head reads the answer at three special tokens: visual quality, motion quality and text alignment. From the code
of github.com/KwaiVGI/VideoAlign and the `model_config.json` beside its weights:

1. Two frames of each second, evenly spaced from the first to the last one, at least four, an even number; each is
   resized to 128 to 256 tokens of 28 x 28 pixels where it has more or fewer, keeping its shape as Qwen2-VL does.
2. Video before text, in the base's chat, with VideoAlign's instruction; its reward tokens are added last.
3. Each grade is normalised by a mean and a spread of the configuration; the score is the sum of the three.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.rewards.base import DeviceReward, RewardOutput, RewardWithExtras
from phalanx.rewards.image._qwen_vl import DTYPES, VIDEO_TOKEN, Published, Trunk, check_options
from phalanx.rewards.video._video_align_text import REWARD_TOKENS, TEMPLATE

_EXPECTED = "expected a folder with model_config.json and model.pth of KwaiVGI/VideoReward, the latter as .safetensors"
_LEAST = 128 * 28 * 28  # pixels of a frame
_FEWEST, _MOST_FRAMES = 4, 768
_GRADES = ("VQ", "MQ", "TA")
# of the published configuration, what this reward has no other way to compute
_FIXED: dict[str, dict[str, Any]] = {
    "data_config": {
        "eval_dim": list(_GRADES),
        "num_frames": None,
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    },
    "model_config": {"use_special_tokens": True},
    "peft_lora_config": {"lora_enable": True, "lora_modules_to_save": None, "use_rslora": False},
}


class VideoAlign(DeviceReward, RewardWithExtras):
    """`model`: the folder of the weights; `base`: folder or hub id of the configuration and tokenizer that they were
    trained from. `fps`: frames per second of the videos, that of the policy's family. `micro_batch_size` videos are
    scored at once.
    """

    extras = ("visual_quality", "motion_quality", "text_alignment")

    def __init__(
        self,
        model: str,
        fps: float,
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        micro_batch_size: int = 4,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ) -> None:
        check_options(dtype, micro_batch_size)
        if fps <= 0:
            raise ValueError(f"fps={fps}; expected the frames per second of the videos, more than 0")
        config = _configuration(model)
        lora, data, norm = config["peft_lora_config"], config["data_config"], config["inference_config"]
        scale = lora["lora_alpha"] / lora["lora_r"]
        published = Published(model, base, "qwen2_vl", "Qwen2-VL", "VideoReward", _EXPECTED, scale, linear=True)
        self._fps, self._sampled_fps, self._micro_batch = fps, float(data["fps"]), micro_batch_size
        self._most = int(data["max_frame_pixels"])
        self._device = torch.device(device)
        self._trunk = Trunk(published, list(REWARD_TOKENS), ["rm_head"], DTYPES[dtype], self._device)
        self._mean, self._std = (
            torch.tensor([norm[f"{grade}_{kind}"] for grade in _GRADES], device=self._device)
            for kind in ("mean", "std")
        )
        if self._trunk.tokenizer.chat_template is None or self._chat("").count(VIDEO_TOKEN) != 1:
            raise ValueError(f"base={base!r} has no chat template for videos; expected one beside its tokenizer")

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """Videos [B, F, 3, H, W] in 0..1 -> float32 [B], and the three grades."""
        chosen = frames(videos.shape[1], self._fps, self._sampled_fps)
        size, grades = self._micro_batch, [torch.zeros(0, len(_GRADES), device=self._device)]
        for i in range(0, len(prompts), size):
            grades.append(self._grade(videos[i : i + size, chosen], prompts[i : i + size]))
        normalised = (torch.cat(grades) - self._mean) / self._std
        return RewardOutput(normalised.sum(1), dict(zip(self.extras, normalised.T, strict=True)))

    def _grade(self, videos: Tensor, prompts: list[str]) -> Tensor:
        """The grades [b, 3], before they are normalised."""
        pixels, grid = self._trunk.video_patches(videos, _LEAST, self._most)
        texts = []
        for prompt, count in zip(prompts, self._trunk.image_tokens(grid), strict=True):
            chat = self._chat(TEMPLATE.replace("{prompt}", self._trunk.plain(prompt)))
            texts.append(chat.replace(VIDEO_TOKEN, VIDEO_TOKEN * count, 1))
        hidden = self._trunk.hidden(self._trunk.tokens(texts), pixels, grid, videos=True)
        grades: Tensor = self._trunk.heads["rm_head"](hidden)  # [b, 3, 1], or [b, 3, 3] of a row for each grade
        return grades.squeeze(2) if grades.shape[2] == 1 else grades.diagonal(dim1=1, dim2=2)

    def _chat(self, text: str) -> str:
        """A turn of a video and a text, in the chat template of the base."""
        turns = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]
        chat: str = self._trunk.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return chat


def frames(count: int, fps: float, sampled_fps: float) -> list[int]:
    """The frames that are seen of `count` at `fps`: `sampled_fps` a second, an even number of 4 to 768, evenly spaced.

    ValueError for a video of one frame.
    """
    if count < 2:
        raise ValueError("samples of one frame; expected videos of two frames or more (rollout.num_frames)")
    most = min(_MOST_FRAMES, count) // 2 * 2
    number = round(min(max(count / fps * sampled_fps, _FEWEST), most) / 2) * 2
    chosen: list[int] = torch.linspace(0, count - 1, number).round().long().tolist()
    return chosen


def _configuration(model: str) -> dict[str, Any]:
    """`model_config.json` of the weights' folder, checked."""

    def wrong(problem: str) -> ValueError:
        return ValueError(f"model={model!r} {problem}; {_EXPECTED}")

    file = Path(model).expanduser() / "model_config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise wrong(f"has no model_config.json that can be read ({type(error).__name__})") from error
    for section, values in _FIXED.items():
        for key, value in values.items():
            actual = config.get(section, {}).get(key)
            if actual != value:
                raise wrong(f"has {section}.{key} {actual!r} in model_config.json rather than {value!r}")
    numbers = [("data_config", "fps"), ("data_config", "max_frame_pixels")]
    numbers += [("peft_lora_config", "lora_r"), ("peft_lora_config", "lora_alpha")]
    numbers += [("inference_config", f"{grade}_{kind}") for grade in _GRADES for kind in ("mean", "std")]
    for section, key in numbers:
        actual = config.get(section, {}).get(key)
        signed = key.endswith("_mean")
        if not isinstance(actual, int | float) or (actual <= 0 and not signed):
            expected = "a number" if signed else "a number above 0"
            raise wrong(f"has {section}.{key} {actual!r} in model_config.json rather than {expected}")
    return config
