"""The view that a reward has of a policy's outputs: some frames of a video, each as an image, or all of it."""

from torch import Tensor

from phalanx.functional.frames import evenly_spaced
from phalanx.types import Outputs, Prompt


def seen_by(takes: str, outputs: Outputs, prompts: list[Prompt], frames: int) -> tuple[Outputs, list[Prompt]]:
    """The part of B outputs that a reward is given which takes images, videos or completions, and the prompt of each.

    For `images`: [B k, 3, H, W], k evenly spaced frames of each video, at most `frames`. For `videos`:
    [B, F, 3, H, W], of one frame where outputs are images. Completions are given as they are.
    """
    if not isinstance(outputs, Tensor):
        return outputs, prompts
    is_video = outputs.ndim == 5
    if takes == "videos":
        return (outputs if is_video else outputs[:, None]), prompts
    if not is_video:
        return outputs, prompts
    chosen = evenly_spaced(outputs.shape[1], frames)
    return outputs[:, chosen].flatten(0, 1), [prompt for prompt in prompts for _ in chosen]


def mean_of_frames(rows: dict[str, Tensor], frames: int) -> dict[str, Tensor]:
    """Scores [B k] of k frames of each video -> of the videos [B], by name."""
    return {name: values.view(-1, frames).mean(1) if frames > 1 else values for name, values in rows.items()}
