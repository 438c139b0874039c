"""Sampling engines, a file each."""

from importlib.util import find_spec

from phalanx.config.flow import FlowRolloutConfig
from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.dataset import DatasetRollout
from phalanx.rollout.flow.in_policy import PolicyRollout


def check_engine(config: FlowRolloutConfig) -> None:
    """Raise ValueError for an engine that is not installed, or a correction of what needs none."""
    if config.engine != "vllm_omni" and config.correction != "rescore" and config.schedule != "one_step_off":
        why = "its log-probs are exact" if config.engine == "policy" else "its images have no log-probs"
        raise ValueError(
            f"rollout.correction: {config.correction} has nothing to correct where rollout.engine is {config.engine}; "
            f"{why}"
        )
    again = {"max_num_gen_batches": config.max_num_gen_batches, "max_draws_per_prompt": config.max_draws_per_prompt}
    for key, times in again.items():
        if config.engine != "policy" and times > 1:
            raise ValueError(f"rollout.{key}: {times} needs rollout.engine=policy; set it to 1")
    if config.engine != "policy" and config.num_frames > 1:
        raise ValueError(
            f"rollout.num_frames: {config.num_frames} needs rollout.engine=policy; {config.engine} knows images alone"
        )
    if config.engine == "vllm_omni" and find_spec("vllm_omni") is None:
        raise ValueError("rollout.engine: vllm_omni is not installed; pip install 'phalanx[vllm-omni]', or set policy")


def build_rollout(
    policy: FlowPolicy, config: FlowRolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
) -> PolicyRollout:
    """The engine that the configuration names, all ranks in step; ValueError if it cannot run here."""
    check_engine(config)
    if config.engine == "vllm_omni":
        from phalanx.rollout.flow.vllm_omni import VllmOmniRollout

        return VllmOmniRollout(policy, config, world, micro_batch_size, window=window)
    if config.engine == "dataset":
        return DatasetRollout(policy, config, world, micro_batch_size, window=window)
    return PolicyRollout(policy, config, world, micro_batch_size, window=window)
