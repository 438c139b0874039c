"""What a reward sees of a video: some of its frames, each as an image, or all of it."""

from torch import Tensor

from phalanx.functional.frames import evenly_spaced
from phalanx.types import Prompt


def shown(samples: Tensor, prompts: list[Prompt], frames: int, *, whole: bool) -> tuple[Tensor, list[Prompt]]:
    """What is scored of samples [B, 3, H, W] or [B, F, 3, H, W] with their B prompts.

    `whole`: videos [B, F, 3, H, W], of one frame where samples are images. Else images [B k, 3, H, W], k evenly spaced
    frames of each sample, at most `frames`, and the prompt of each.
    """
    video = samples.ndim == 5
    if whole:
        return (samples if video else samples[:, None]), prompts
    if not video:
        return samples, prompts
    chosen = evenly_spaced(samples.shape[1], frames)
    return samples[:, chosen].flatten(0, 1), [prompt for prompt in prompts for _ in chosen]


def mean_of_frames(rows: dict[str, Tensor], frames: int) -> dict[str, Tensor]:
    """Scores [B k] of k frames of each sample -> of the samples [B], by name."""
    return {name: values.view(-1, frames).mean(1) if frames > 1 else values for name, values in rows.items()}
