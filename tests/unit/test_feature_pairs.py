"""Which pairs of features of language models can be configured together."""

import copy
from collections.abc import Sequence
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
    "partial rollouts": ("rollout.partial_rollout={tokens: 16}", "rollout.max_staleness=2"),
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
    "new samples": ("rollout.max_draws_per_prompt=3",),
    "teacher": ("algorithm.name=distillation", "algorithm.teacher_path=y"),
    "prefix sharing": ("model.use_remove_padding=true", "model.use_prefix_grouper=true"),
    "LoRA": ("model.lora_rank=8",),
    "4-bit base": ("model.lora_rank=8", "model.quantization=nf4"),
    "compiled blocks": ("model.compile=true",),
    "expert parallelism": ("parallel.expert_parallel=true",),
    "judge": ("reward.functions=[{name: judge}]", "reward.model.path=z"),
    "several epochs": ("actor.ppo_epochs=2",),
    "normalized rewards": ("reward.normalize=gdpo",),
}
OWN_ENGINES = {"vllm", "a session of one's own"}  # without blocks


def documented() -> set[tuple[str, str]]:
    """The pairs that docs/rules.md lists as refused, each with a reason."""
    section = Path("docs/rules.md").read_text().partition("## Features of language models")[2]
    pairs = set()
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| feature"):
            one, other, reason = (cell.strip() for cell in line.strip("|").split("|"))
            assert len(reason) > 30, line
            pairs.add((one, other))
    return pairs


def loaded(overrides: Sequence[str], own: Path) -> LMRLConfig:
    """The configuration of a job with these keys."""
    given = {key.partition("=")[0] for key in overrides}
    keys = [key for key in BASE if key.partition("=")[0] not in given]
    keys += [f"{key}={value}" for key, value in SMALL.items()]
    keys += [key.replace("{own}", str(own)) for key in overrides if key != IMAGES]
    return load_config(LMRLConfig, None, keys)


def with_keys(cfg: LMRLConfig, overrides: Sequence[str], other: LMRLConfig) -> LMRLConfig:
    """`cfg` with the values that `other` has for these keys: loading takes most of the time of a pair."""
    cfg = copy.deepcopy(cfg)
    for key in overrides:
        names = key.partition("=")[0].split(".")
        if names[0] == "algorithm":  # the name decides which keys the section has
            names = names[:1]
        section: Any = cfg
        value: Any = other
        for name in names[:-1]:
            section, value = vars(section)[name], vars(value)[name]
        if key != IMAGES:
            setattr(section, names[-1], vars(value)[names[-1]])
    return cfg


def refused(cfg: LMRLConfig, *, images: bool = False) -> str | None:
    """The message with which a job is refused on four ranks; None if it is not."""
    try:
        kind_of(cfg).check(Launch(0, 4, 0, 4), installed=False)
        if images:
            kind_of(cfg).check_images("a row has images")
    except (ConfigError, ValueError) as error:
        return str(error)
    return None


def test_pairs_of_features(tmp_path: Path) -> None:
    """All pairs compose, except at most 10, which the page on rules lists with a reason."""
    own = tmp_path / "own.py"
    own.write_text(ENGINE)
    alone = {name: loaded(keys, own) for name, keys in FEATURES.items()}
    for name, cfg in alone.items():
        assert refused(cfg, images=name == IMAGES) is None, name
    found: dict[tuple[str, str], str] = {}
    for one, other in combinations(FEATURES, 2):
        keys = [*FEATURES[one], *(key for key in FEATURES[other] if key not in FEATURES[one])]
        if len({key.partition("=")[0] for key in keys}) < len(keys) or {one, other} == {
            "block diffusion",
            "prefix sharing",
        }:
            continue  # alternatives, or implied by packing
        if "block diffusion" in (one, other) and {one, other} & OWN_ENGINES:
            continue
        message = refused(with_keys(alone[one], FEATURES[other], alone[other]), images=IMAGES in (one, other))
        if message is not None:
            found[one, other] = message
    assert set(found) == documented(), found
    assert len(found) <= 10


@pytest.mark.parametrize("member", ["add", "step", "close"])
def test_a_session_without_a_method_is_no_engine(tmp_path: Path, member: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(ENGINE.replace(f"def {member}(", "def other("))
    with pytest.raises(ConfigError, match="derive it from phalanx"):
        loaded([f"rollout.engine={own}:Mine"], own)
