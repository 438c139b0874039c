"""Sampling by vLLM-omni, in this process, on a copy of the weights that the policy refreshes before every rollout."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.config.schema import RolloutConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.vllm_groups import as_before
from phalanx.rollout._denoise import Generated, Job
from phalanx.rollout.policy import PolicyRollout
from phalanx.types import Policy


class VllmOmniRollout(PolicyRollout):
    """See phalanx.types.Rollout. Noise, guidance, text and images are as in the policy's rollout, the kernels of the
    transformer are not: log-probabilities differ from the policy's in the last digits.
    """

    exact = False

    def __init__(
        self, policy: Policy, config: RolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
    ) -> None:
        """Raises ValueError where vLLM-omni is missing, or has no such model."""
        super().__init__(policy, config, world, micro_batch_size, window=window)
        with as_before():
            self.executor = _executor(policy)
        self.pipeline = self.executor.driver_worker.worker.model_runner.pipeline
        self.pipeline.attach(policy)
        self.pipeline.release()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The policy's weights, as they are now, in the engine, which has none at other times."""
        self.pipeline.refresh(self.policy.whole_weights())
        try:
            with torch.no_grad():
                yield
        finally:
            self.pipeline.release()

    def generate(self, job: Job) -> Generated:
        """Denoise and decode one micro-batch in the engine."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        # a seed, since vLLM-omni would draw one from the process's random state; the noise is named in the job
        parameters = OmniDiffusionSamplingParams(seed=0, extra_args={"job": job})
        request = OmniDiffusionRequest(prompt="", sampling_params=parameters, request_id="rollout")
        out = self.executor.collective_rpc(
            "execute_model", args=(request, self.executor.od_config), unique_reply_rank=0
        )
        # tensors of inference mode cannot take part in the training that follows; copies can
        return Generated(
            images=out.output["images"].clone(),
            latents=out.trajectory_latents.clone(),
            means=out.output["means"].clone(),
            log_prob=out.trajectory_log_probs.clone(),
            clean=out.output["clean"].clone(),
        )


def _pipeline_class(policy: Policy) -> type:
    """The pipeline of the model's family."""
    name = policy.model.pipeline_class
    if name == "StableDiffusion3Pipeline":
        from phalanx.rollout._omni_sd3 import SD3Pipeline

        return SD3Pipeline
    if name == "QwenImagePipeline":
        from phalanx.rollout._omni_qwen_image import QwenImagePipeline

        return QwenImagePipeline
    raise ValueError(
        f"rollout.engine: vllm_omni samples from StableDiffusion3Pipeline and QwenImagePipeline, not {name}; "
        "set rollout.engine=policy"
    )


def _executor(policy: Policy) -> Any:
    """vLLM-omni's in-process executor. All ranks must make theirs, in step: it cuts groups from the world."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig
    from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
    from vllm_omni.platforms import current_omni_platform
    from vllm_omni.platforms.interface import OmniPlatformEnum

    logging.getLogger("vllm_omni").setLevel(logging.ERROR)  # its warnings are for its servers
    if current_omni_platform._omni_enum is OmniPlatformEnum.UNSPECIFIED:
        raise ValueError(
            "rollout.engine: vllm_omni finds no GPU that it knows on this machine; set rollout.engine=policy"
        )
    model = policy.model
    config = OmniDiffusionConfig(
        model_class_name=model.pipeline_class,
        tf_model_config=TransformerConfig.from_dict(dict(model.transformer.config)),
        dtype=model.dtype,
        num_gpus=1,
        enforce_eager=True,
        distributed_executor_backend="uni",
        worker_extension_cls="phalanx.rollout._omni_worker.RankWorker",
        custom_pipeline_args={"pipeline_class": _pipeline_class(policy)},
    )
    return UniProcDiffusionExecutor(config)
