"""Sampling with vLLM-omni, in this process, on a copy of the weights that each rollout refreshes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.flow import FlowRolloutConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.vllm_groups import as_before
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.denoise import Generated, Job, generate
from phalanx.rollout.flow.in_policy import PolicyRollout

log = logging.getLogger(__name__)


class VllmOmniRollout(PolicyRollout):
    """See phalanx.types.Rollout. As PolicyRollout, but with vLLM-omni's transformer.

    Its kernels round differently, so log-probabilities differ from the policy's in the last digits.
    """

    facts = EngineFacts(
        exact=False,
        weights="copy",
        redraws=False,
        videos=False,
        exclusive=True,
        sleeps=True,
        package="vllm_omni",
        install="pip install 'phalanx[vllm-omni]'",
    )

    def __init__(
        self, policy: FlowPolicy, config: FlowRolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
    ) -> None:
        """Raises ValueError if vLLM-omni is missing or does not have the model."""
        super().__init__(policy, config, world, micro_batch_size, window=window)
        # starting it changes random states, threads and environment variables of the whole process
        log.info("starting vLLM-omni")
        with as_before():
            self.executor = _start_executor(policy)
        self.pipeline = self.executor.driver_worker.worker.model_runner.pipeline
        # our sampling loop runs vLLM-omni's transformer; noise, guidance, VAE and text encoding are the policy's
        self.pipeline.attach(policy, generate)
        self.pipeline.release()  # the initial weights are not needed: each rollout brings the policy's

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Give the engine the policy's current weights for the duration of the block; it has none at other times."""
        self.pipeline.refresh(self.policy.trained.whole_weights())
        try:
            with torch.no_grad():
                yield
        finally:
            self.pipeline.release()

    def generate(self, job: Job) -> Generated:
        """Denoise and decode one micro-batch in the engine."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        # the noise is determined by the job; without a seed vLLM-omni would draw one from the process's random state
        parameters = OmniDiffusionSamplingParams(seed=0, extra_args={"job": job})
        request = OmniDiffusionRequest(prompt="", sampling_params=parameters, request_id="rollout")
        out = self.executor.collective_rpc(
            "execute_model", args=(request, self.executor.od_config), unique_reply_rank=0
        )
        # inference-mode tensors cannot be used in the training that follows, but copies can
        return Generated(
            images=out.output["images"].clone(),
            latents=out.trajectory_latents.clone(),
            means=out.output["means"].clone(),
            log_prob=out.trajectory_log_probs.clone(),
            clean=out.output["clean"].clone(),
        )


def _pipeline_class(policy: FlowPolicy) -> type:
    """The pipeline of the model's family."""
    if policy.model.omni_pipeline is None:
        raise ValueError(
            f"rollout.engine: vllm_omni samples from StableDiffusion3Pipeline and QwenImagePipeline, not "
            f"{policy.model.pipeline_class}; set rollout.engine=policy"
        )
    pipeline: type = resolve_name(policy.model.omni_pipeline)
    return pipeline


def _start_executor(policy: FlowPolicy) -> Any:
    """Start vLLM-omni's in-process executor. Collective, because it creates process groups."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig
    from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
    from vllm_omni.platforms import current_omni_platform
    from vllm_omni.platforms.interface import OmniPlatformEnum

    logging.getLogger("vllm_omni").setLevel(logging.ERROR)  # its warnings concern its servers
    if current_omni_platform._omni_enum is OmniPlatformEnum.UNSPECIFIED:
        raise ValueError(
            "rollout.engine: vllm_omni finds no GPU that it supports on this machine; set rollout.engine=policy"
        )
    model = policy.model
    config = OmniDiffusionConfig(
        model_class_name=model.pipeline_class,
        tf_model_config=TransformerConfig.from_dict(dict(model.transformer.config)),
        dtype=model.dtype,
        num_gpus=1,  # each rank has a full replica and draws its share of the samples
        # captured graphs would keep the old weights, whose tensors are replaced in each rollout
        enforce_eager=True,
        distributed_executor_backend="uni",
        worker_extension_cls="phalanx.zoo.engines.omni.worker.RankWorker",
        custom_pipeline_args={"pipeline_class": _pipeline_class(policy)},
    )
    return UniProcDiffusionExecutor(config)
