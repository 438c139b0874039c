"""rollout.engine: vllm_omni, beside our own world, mesh and FSDP steps.

A process holds one engine, so each test forks the ranks that it needs. What "agree" means, in float32 on a CPU: images
in 0..1 and latents of a few units to 5e-5, log-probabilities to 2e-6. Measured: 3e-6, 8e-6 and 3e-7.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.config.flow import FlowDataConfig, FlowRolloutConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy, build_policy
from phalanx.rollout.flow import build_rollout
from phalanx.run.world import start_world
from phalanx.types import Samples
from tests.helpers.jobs import full_weights
from tests.helpers.policies import PROMPTS, disturb, make_policy, sample
from tests.helpers.ranks import run_ranks
from tests.vllm import omni_cpu_platform

IMAGES, LOG_PROBS = 5e-5, 2e-6


@pytest.fixture(params=["sd3", "qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def make_samples(engine: str, policy: FlowPolicy, world: World, guidance: float = 3.0) -> tuple[Any, Samples]:
    keys = {"n": 2, "num_inference_steps": 4, "height": 32, "width": 48, policy.model.guidance_key: guidance}
    rollout = build_rollout(policy, FlowRolloutConfig(engine=engine, **keys), world, 3)
    return rollout, sample(rollout)


def replayed(policy: FlowPolicy, samples: Samples) -> torch.Tensor:
    with torch.no_grad(), policy.unsharded():
        rows = torch.arange(len(samples.prompts)).split(3)
        return torch.cat([policy.replay(samples.trace.select(part)).log_prob for part in rows])


def started(width: int = 1) -> World:
    """The world of the forked ranks, where vLLM-omni knows the CPU."""
    omni_cpu_platform.install()
    return start_world(ParallelConfig(fsdp_size=width))


def compare(folder: Path, guidance: float) -> dict[str, float]:
    """The largest differences between the two engines."""
    world = started()
    policy = make_policy(world, folder)
    state = torch.get_rng_state()
    ours, engines = (make_samples(engine, policy, world, guidance)[1] for engine in ("policy", "vllm_omni"))
    assert torch.equal(torch.get_rng_state(), state)
    assert engines.index.equal(ours.index) and engines.trace.timesteps.equal(ours.trace.timesteps)
    assert not engines.log_prob.is_inference() and not engines.trace.latents.is_inference()
    assert ours.outputs.std(0).mean() > 0.01
    return {
        "images": float((ours.outputs - engines.outputs).abs().max()),
        "latents": float((ours.trace.latents - engines.trace.latents).abs().max()),
        "log_prob": float((ours.log_prob - engines.log_prob).abs().max()),
    }


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_it_samples_what_the_policy_samples(folder: Path, guidance: float) -> None:
    [found] = run_ranks(compare, 1, folder, guidance)
    assert found["images"] < IMAGES and found["latents"] < IMAGES and found["log_prob"] < LOG_PROBS, found


def follow(folder: Path, lora: int) -> dict[str, float]:
    """The engine before and after the weights moved, judged by the policy."""
    world = started()
    policy = make_policy(world, folder, lora_rank=lora)
    rollout, before = make_samples("vllm_omni", policy, world)
    found = {"at first": float((replayed(policy, before) - before.log_prob).abs().max())}
    disturb(policy)
    found["its old samples"] = float((replayed(policy, before) - before.log_prob).abs().max())
    after = sample(rollout)
    found["its new samples"] = float((replayed(policy, after) - after.log_prob).abs().max())
    return found


@pytest.mark.parametrize("lora", [0, 4])
def test_it_samples_from_the_weights_as_they_are(folder: Path, lora: int) -> None:
    """The policy finds the log-probabilities that the engine gave, and finds others for samples of the old weights."""
    [found] = run_ranks(follow, 1, folder, lora)
    assert found["at first"] < LOG_PROBS and found["its new samples"] < LOG_PROBS, found
    assert found["its old samples"] > 1e3 * LOG_PROBS, found


def beside(folder: Path, width: int) -> dict[str, Any]:
    """Our own steps before, between and after the engine's."""
    world = started(width)
    launch = Launch.from_env()
    config = FlowModelConfig(path=str(folder), dtype="float32")
    data, parallel = FlowDataConfig(max_prompt_length=32), ParallelConfig(fsdp_size=width)
    policy = build_policy(config, parallel, data, world, seed=0, detach_uncond=False)

    def step() -> None:
        samples = make_samples("policy", policy, world)[1]
        policy.trained.sharded.set_last_micro_batch(True)
        policy.replay(samples.trace).log_prob.sum().backward()
        policy.trained.sharded.reduce_gradients()
        with torch.no_grad():
            for p in policy.trained.parameters.values():
                if p.grad is not None:  # the last block's text goes nowhere
                    p.add_(p.grad, alpha=-1e-4)
                p.grad = None
        policy.trained.sharded.copy_to_module()

    step()
    rollout, samples = make_samples("vllm_omni", policy, world)
    step()
    moved = sample(rollout)
    drift = float((replayed(policy, moved) - moved.log_prob).abs().max())
    step()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert Launch.from_env() == launch and world.mesh["shard"].size() == width and float(total) == world.size
    return {
        "index": samples.index,
        "images": samples.outputs,
        "drift": drift,
        "weights": full_weights(policy.trained.parameters),
    }


@pytest.mark.parametrize("width", [1, 2])
def test_it_lives_beside_our_world(folder: Path, width: int) -> None:
    """One rank and two, replicated and sharded: the same images, the same weights after the same steps."""
    [alone] = run_ranks(beside, 1, folder, 1)
    ranks = run_ranks(beside, 2, folder, width)
    images = torch.cat([rank["images"] for rank in ranks])
    assert torch.cat([rank["index"] for rank in ranks]).tolist() == list(range(2 * len(PROMPTS)))
    assert max(rank["drift"] for rank in ranks) < LOG_PROBS
    torch.testing.assert_close(images, alone["images"], rtol=0, atol=IMAGES)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=0, atol=1e-4)
