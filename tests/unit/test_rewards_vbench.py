"""Rewards of VBench for whole videos: their values by hand, and tiny models of transformers' classes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.rewards import RewardError
from phalanx.types import Prompt
from phalanx.zoo.rewards.video._frames import consistency
from phalanx.zoo.rewards.video.background_consistency import BackgroundConsistency
from phalanx.zoo.rewards.video.subject_consistency import SubjectConsistency
from phalanx.zoo.rewards.video.temporal_flickering import temporal_flickering
from tests.helpers.rewards import entry, rewards, scored, told
from tests.unit.test_rewards_clip import DIM, EDGE, clip_folder, random_images  # noqa: F401

DINO_EDGE, PATCH = 32, 8
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.fixture(scope="module")
def dino_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    folder = tmp_path_factory.mktemp("dino")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTModel(ViTConfig(**sizes, image_size=DINO_EDGE, patch_size=PATCH), add_pooling_layer=False)
        for parameter in model.parameters():  # frames that differ clearly
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    ViTImageProcessorPil(
        size={"height": DINO_EDGE, "width": DINO_EDGE}, image_mean=MEAN, image_std=STD
    ).save_pretrained(folder)
    return folder


def of(*frames: float) -> Tensor:
    """A video [1, F, 3, 2, 2] whose frames have one shade of grey each."""
    return torch.tensor(frames).view(1, -1, 1, 1, 1).expand(-1, -1, 3, 2, 2)


def test_flickering_is_the_mean_change() -> None:
    video = of(0.2, 0.5, 0.5, 0.1).clone()
    assert temporal_flickering(video, ["p"], [{}]).tolist() == pytest.approx([1 - (0.3 + 0 + 0.4) / 3])
    video[:, 1, :, 0, 0] = 1.0  # a quarter of the pixels, from 0.2 to 1.0 to 0.5
    assert temporal_flickering(video, ["p"], [{}]).tolist() == pytest.approx([1 - (0.425 + 0.125 + 0.4) / 3])
    assert temporal_flickering(of(0.3, 0.3), ["p"], [{}]).tolist() == [1.0]


def test_consistency_is_to_the_frame_before_and_to_the_first_one() -> None:
    features = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 3.0], [-1.0, 0.0]])
    root = 0.5**0.5
    # each the mean of the cosines to the previous and to the first frame, with negative ones as 0
    assert float(consistency(features)) == pytest.approx(((root + root) / 2 + (root + 0) / 2 + 0) / 3)


def test_frames_as_dino_sees_them(dino_folder: Path) -> None:
    """Features of videos of any shape; for square frames of DINO's image size, they are ViTModel's first tokens."""
    from transformers import ViTModel

    reward = SubjectConsistency(str(dino_folder))
    videos = random_images(DINO_EDGE, DINO_EDGE, 6).view(2, 3, 3, DINO_EDGE, DINO_EDGE)
    pixels = (videos.flatten(0, 1) - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        tokens = ViTModel.from_pretrained(dino_folder, add_pooling_layer=False).eval()(pixels).last_hidden_state[:, 0]
    expected = [float(consistency(part)) for part in tokens.view(2, 3, -1)]
    assert reward(videos, ["p"] * 2, [{}] * 2).tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) < 0.999
    wide = random_images(40, 90, 3)[None]
    assert 0 <= float(reward(wide, ["p"], [{}])) < 1
    still = wide[:, :1].expand(-1, 3, -1, -1, -1)
    assert float(reward(still, ["p"], [{}])) == pytest.approx(1.0)


def test_frames_as_clip_sees_them(clip_folder: Path) -> None:  # noqa: F811
    from transformers import CLIPModel

    video = random_images(EDGE, EDGE, 4)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    model = CLIPModel.from_pretrained(clip_folder).eval()
    with torch.no_grad():
        pixels = (video - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        features = model.visual_projection(model.vision_model(pixels).pooler_output)
    reward = BackgroundConsistency(str(clip_folder))
    assert features.shape == (4, DIM)
    assert reward(video[None], ["p"], [{}]).tolist() == pytest.approx([float(consistency(features))], abs=1e-5)
    # a larger frame is resized as a tensor: each pixel of every second one, between its neighbours
    large = video.repeat_interleave(2, -2).repeat_interleave(2, -1)
    assert reward(large[None], ["p"], [{}]).tolist() == pytest.approx([float(consistency(features))], abs=0.02)


def test_dinos_positions(dino_folder: Path) -> None:
    """For frames of another shape, positions are stretched along each axis independently."""
    reward = SubjectConsistency(str(dino_folder))
    side, width = DINO_EDGE // PATCH, 24
    learnt = reward._vit.embeddings.position_embeddings.data
    grid = learnt[:, 1:].view(side, side, width)
    grid[:] = torch.arange(side).float()[:, None, None]  # each row has its number
    wide = reward._position_embeddings(torch.empty(0), DINO_EDGE, 9 * PATCH)
    assert wide.shape == (1, 1 + side * 9, width) and torch.equal(wide[:, 0], learnt[:, 0])
    rows = wide[0, 1:].view(side, 9, width)
    assert torch.allclose(rows, rows[:, :1, :1].expand_as(rows), atol=1e-5)
    assert rows[:, 0, 0].diff().min() > 0.8
    tall = reward._position_embeddings(torch.empty(0), 9 * PATCH, DINO_EDGE)[0, 1:].view(9, side, width)
    assert torch.allclose(tall, tall[:, :1, :1].expand_as(tall), atol=1e-5) and tall[8, 0, 0] > tall[4, 0, 0] + 1
    assert torch.equal(reward._position_embeddings(torch.empty(0), DINO_EDGE, DINO_EDGE), learnt)


def test_the_style_of_frames(clip_folder: Path) -> None:  # noqa: F811
    """VBench's appearance style: frames are compared with a text other than the prompt."""
    images = random_images(EDGE, EDGE, 2)
    of_style = rewards(entry("clip_score", model=str(clip_folder), column="style"))
    of_prompt = rewards(entry("clip_score", model=str(clip_folder)))
    styles = ["a red cat", "two dogs"]
    rows = [Prompt("one of them asleep", i, {"style": style}) for i, style in enumerate(styles)]
    expected = scored(of_prompt, (images, [Prompt(style, i, {}) for i, style in enumerate(styles)]))
    assert scored(of_style, (images, rows)) == expected != scored(of_prompt, (images, rows))
    assert of_style.terms[0].objection("p", {}) == "style None; expected a text in this column"


def test_the_rewards_of_a_job(dino_folder: Path, clip_folder: Path) -> None:  # noqa: F811
    """They have gradients, and refuse images."""
    reward = rewards(
        entry("temporal_flickering"),
        entry("subject_consistency", model=str(dino_folder)),
        entry("background_consistency", model=str(clip_folder)),
    )
    videos = random_images(36, 48, 6).view(2, 3, 3, 36, 48)
    prompts = [Prompt("p", i, {}) for i in range(2)]
    scores = scored(reward, (videos, prompts))
    assert set(scores) == {"temporal_flickering", "subject_consistency", "background_consistency"}
    videos.requires_grad_()
    total = reward.with_gradient(videos, prompts=prompts, step=0)
    assert total.tolist() == pytest.approx([sum(row[i] for row in scores.values()) for i in range(2)], abs=1e-5)
    total.sum().backward()
    assert videos.grad is not None and bool(videos.grad.flatten(2).any(-1).all())
    message = "samples of one frame; expected videos of two frames or more (rollout.num_frames)"
    batch = random_images(36, 48, 1), [Prompt("p", 0, {})]
    for name, kwargs in {"temporal_flickering": {}, "subject_consistency": {"model": str(dino_folder)}}.items():
        assert message in told(RewardError, scored, rewards(entry(name, **kwargs)), batch)


def test_another_model_is_refused(clip_folder: Path) -> None:  # noqa: F811
    assert told(ValueError, rewards, entry("subject_consistency", model=str(clip_folder))) == (
        f"reward.functions[0] (subject_consistency): model={str(clip_folder)!r} is a model of type clip; expected DINO, "
        "of type vit"
    )
