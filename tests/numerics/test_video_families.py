"""Properties of each family that makes videos: exact replays, and the arithmetic of a pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.distributed.mesh import World
from phalanx.types import Prompt
from tests.helpers.policies import PROMPTS, disturb, make_policy, make_rollout, sample

FRAMES = 5
# a quoted word, a text that is truncated, and an empty text
TEXTS = [
    Prompt('a sign that says "zeta"', 0, {}, negative='"blur"'),
    Prompt("two small dogs on a red sofa, " * 4, 1, {}),
    Prompt("", 2, {}, negative="x"),
]


@pytest.fixture(params=["hunyuan", "ltx2"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_folder")
    return path


@pytest.mark.parametrize(
    "model", [{"lora_rank": 4, "attn_backend": "native"}, {"dtype": "bfloat16", "gradient_checkpointing": True}]
)
def test_log_probs_are_exact(world: World, folder: Path, model: dict[str, Any]) -> None:
    policy = make_policy(world, folder, **model)
    disturb(policy)
    samples = sample(make_rollout(policy, 4, guidance=3.0, num_frames=FRAMES), TEXTS)
    assert samples.outputs.shape == (6, FRAMES, 3, 32, 48)
    assert samples.log_prob is not None and samples.log_prob.std() > 0
    for part in torch.arange(4).split(2):
        assert torch.equal(policy.replay(samples.trace.select(part)).log_prob, samples.log_prob[part])


def test_the_count_of_flops_is_that_of_the_real_forward_pass(world: World, folder: Path) -> None:
    policy = make_policy(world, folder)
    rollout = make_rollout(policy, 1, num_frames=9)
    embeds = rollout.collate(PROMPTS[:1])
    latents = torch.zeros(1, *policy.model.latent_shape(32, 48, 9))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        policy.velocity(latents, torch.ones(1), embeds, torch.zeros(1, dtype=torch.long), rollout.sampler)
    assert policy.model.flops(32, 48, embeds["prompt_embeds"].shape[1], 9) == counter.get_total_flops()
