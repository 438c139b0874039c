"""Reward: VideoReward of VideoAlign (arXiv 2501.13918), a Qwen2-VL-2B that grades a video for a prompt.

A linear head reads the grades of visual quality, motion quality and text alignment at three special tokens. As in the
code of github.com/KwaiVGI/VideoAlign and the `model_config.json` beside its weights:

1. It sees two frames per second, evenly spaced from the first to the last one, an even number of at least four. Each is
   resized if it has less than 128 or more than 256 tokens of 28 x 28 pixels, keeping the aspect ratio as Qwen2-VL does.
2. The video precedes VideoAlign's instruction in the base's chat format; the reward tokens are added to the tokenizer
   as its last tokens.
3. Each grade is normalised by a mean and a spread from the configuration; the score is the sum of the three.

The instruction, video_align.txt, is data of that code (prompt_template.py; see NOTICE), verbatim, with its blanks
at line ends and its mistakes, since changes would change the scores.
"""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from phalanx.rewards.base import DeviceReward, RewardOutput, RewardWithExtras
from phalanx.zoo.rewards.image._qwen_vl import VIDEO_TOKEN, Dtype, Published, Trunk
from phalanx.zoo.rewards.video._frames import check_frames

# for visual quality, motion quality and text alignment, in the order in which they are added to the tokenizer
REWARD_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
TEMPLATE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
_EXPECTED = "expected a folder with model_config.json and model.pth of KwaiVGI/VideoReward, the latter as .safetensors"
_LEAST = 128 * 28 * 28  # pixels of a frame
_FEWEST, _MOST_FRAMES = 4, 768
_GRADES = ("VQ", "MQ", "TA")
# values in the published configuration that this reward assumes
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
    """`model`: the folder of the weights; `base`: folder or hub id of the configuration and tokenizer of the model that
    they were trained from. `fps`: frames per second of the videos, as in the policy's model family. `micro_batch_size`:
    videos per forward pass.
    """

    extras = ("visual_quality", "motion_quality", "text_alignment")

    def __init__(
        self,
        model: str,
        fps: PositiveFloat,
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        micro_batch_size: PositiveInt = 4,
        dtype: Dtype = "bfloat16",
        device: str = "cpu",
    ) -> None:
        config = _read_configuration(model)
        lora, data, norm = config["peft_lora_config"], config["data_config"], config["inference_config"]
        scale = lora["lora_alpha"] / lora["lora_r"]
        published = Published(model, base, "qwen2_vl", "Qwen2-VL", "VideoReward", _EXPECTED, scale, linear=True)
        self._fps, self._sampled_fps = fps, float(data["fps"])
        self._most = int(data["max_frame_pixels"])
        self._trunk = Trunk(published, list(REWARD_TOKENS), ["rm_head"], dtype, micro_batch_size, device)
        self._mean, self._std = (
            torch.tensor([norm[f"{grade}_{kind}"] for grade in _GRADES], device=device) for kind in ("mean", "std")
        )
        self._trunk.check_chat(["video"], VIDEO_TOKEN)

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """Scores float32 [B] of videos [B, F, 3, H, W] in 0..1, with the three grades as extras."""
        check_frames(videos)
        chosen = frames(videos.shape[1], self._fps, self._sampled_fps)
        grades = self._trunk.in_micro_batches(
            lambda part, texts: self._grade_videos(part[:, chosen], texts), videos, prompts
        )
        normalised = (grades - self._mean) / self._std
        return RewardOutput(normalised.sum(1), dict(zip(self.extras, normalised.T, strict=True)))

    def _grade_videos(self, videos: Tensor, prompts: list[str]) -> Tensor:
        """The grades [b, 3] before normalisation."""
        pixels, grid = self._trunk.patches(videos, _LEAST, self._most)
        chats = [self._trunk.chat(["video"], self._trunk.fill(TEMPLATE, prompt)) for prompt in prompts]
        hidden = self._trunk.hidden(chats, VIDEO_TOKEN, pixels, grid)
        grades: Tensor = self._trunk.heads["rm_head"](hidden)  # [b, 3, 1], or [b, 3, 3] with one output per grade
        return grades.squeeze(2) if grades.shape[2] == 1 else grades.diagonal(dim1=1, dim2=2)


def frames(count: int, fps: float, sampled_fps: float) -> list[int]:
    """The frames that the model sees of `count` frames at `fps`: `sampled_fps` per second, an even number of 4 to 768,
    evenly spaced.
    """
    most = min(_MOST_FRAMES, count) // 2 * 2
    number = round(min(max(count / fps * sampled_fps, _FEWEST), most) / 2) * 2
    chosen: list[int] = torch.linspace(0, count - 1, number).round().long().tolist()
    return chosen


def _read_configuration(model: str) -> dict[str, Any]:
    """The checked `model_config.json` of the weights' folder."""

    def wrong(problem: str) -> ValueError:
        return ValueError(f"model={model!r} {problem}; {_EXPECTED}")

    file = Path(model).expanduser() / "model_config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise wrong(f"has no readable model_config.json ({type(error).__name__})") from error
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
