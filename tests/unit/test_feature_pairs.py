"""Which pairs of features of language models can be configured together."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.distributed.launch_env import Launch
from phalanx.run.kind import kind_of
from phalanx.run.rules import load_config

ENGINE = """
class Mine:
    def __init__(self, policy, config, world, micro_batch_size):
        pass

    def add(self, request):
        pass

    def step(self):
        return []

    def close(self):
        pass
"""
BASE = (
    "model.path=x",
    "data.train_files=[x]",
    "trainer.total_training_steps=4",
    "reward.functions=[{name: math}]",
    "data.max_response_length=64",
)
SMALL = {"data.train_batch_size": "8", "actor.ppo_mini_batch_size": "8", "rollout.n": "4"}
IMAGES = "images"
APART = "placement={rollout: 0-1, actor: 2-3}"
FEATURES: dict[str, tuple[str, ...]] = {
    "vllm": ("rollout.engine=vllm",),
    "a session of one's own": ("rollout.engine={own}:Mine",),
    "environment": ("environment.tools=[calculator]",),
    "partial rollouts": ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=16"),
    "block diffusion": ("model.block_size=4",),
    "images": (IMAGES,),
    "roles": (APART, "rollout.schedule=one_step_off"),
    "context parallelism": ("parallel.ulysses_sequence_parallel_size=2",),
    "top-k": ("rollout.top_k=10",),
    "stop texts": ("rollout.stop=[x]",),
    "new prompts": ("rollout.max_num_gen_batches=3",),
    "token budget": ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=4096"),
    "packing": ("model.use_remove_padding=true",),
    "critic": ("algorithm.name=ppo",),
}
REFUSED = {
    # an environment's state is in no checkpoint, and of one rank
    ("environment", "partial rollouts"),
    # what blocks are is the model's: one turn, no images, no kept tokens, no causal order of a packed row or a critic
    ("environment", "block diffusion"),
    ("partial rollouts", "block diffusion"),
    ("block diffusion", "images"),
    ("block diffusion", "context parallelism"),
    ("block diffusion", "top-k"),
    ("block diffusion", "packing"),
    ("block diffusion", "critic"),
    # ranks that only sample
    ("partial rollouts", "roles"),
    ("images", "roles"),
    ("roles", "context parallelism"),
    # the tokens that are kept, and the tower's features, would be of ranks that have other positions
    ("images", "context parallelism"),
    ("context parallelism", "top-k"),
}


def refused(overrides: list[str], own: Path) -> str | None:
    """The message with which a job of these keys is refused on four ranks; None if it is not."""
    keys = [*BASE, *(f"{key}={value}" for key, value in SMALL.items())]
    keys += [key.replace("{own}", str(own)) for key in overrides if key != IMAGES]
    try:
        cfg = load_config(LMRLConfig, None, keys)
        kind_of(cfg).check(Launch(0, 4, 0, 4), installed=False)
        if IMAGES in overrides:
            kind_of(cfg).check_images("a row has images")
    except (ConfigError, ValueError) as error:
        return str(error)
    return None


def test_pairs_of_features(tmp_path: Path) -> None:
    """All pairs compose, except those with a reason: at most one in eight."""
    own = tmp_path / "own.py"
    own.write_text(ENGINE)
    alone: Any = {name: refused(list(keys), own) for name, keys in FEATURES.items()}
    assert not any(alone.values()), alone
    found: dict[tuple[str, str], str] = {}
    for one, other in combinations(FEATURES, 2):
        if {one, other} <= {"vllm", "a session of one's own"}:
            continue  # alternatives
        if "block diffusion" in (one, other) and {one, other} & {"vllm", "a session of one's own"}:
            continue  # these engines have no blocks
        message = refused([*FEATURES[one], *FEATURES[other]], own)
        if message is not None:
            found[one, other] = message
    assert set(found) == REFUSED, found
    assert len(REFUSED) <= 20


@pytest.mark.parametrize("member", ["add", "step", "close"])
def test_a_session_without_a_method_is_no_engine(tmp_path: Path, member: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(ENGINE.replace(f"def {member}(", "def other("))
    message = refused([f"rollout.engine={own}:Mine"], own)
    assert message is not None and "derive it from phalanx.rollout.lm.in_policy.LMRollout" in message
