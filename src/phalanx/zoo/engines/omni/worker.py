"""vLLM-omni's diffusion worker in a rank's process: it joins the job's world, and does not change or destroy it."""

import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.v1.worker.workspace import init_workspace_manager
from vllm_omni.diffusion.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.platforms import current_omni_platform

from phalanx.distributed.launch_env import Launch


class RankWorker(CustomPipelineWorkerExtension):
    """Methods that override those of vLLM-omni's worker (its `worker_extension_cls`)."""

    def init_device(self) -> None:
        """Join the job's world.

        The worker's own method would create a world of `num_gpus` ranks, set environment variables for it, and rename
        the process. Here every rank is a separate replica: its data-parallel group contains all ranks, and all other
        groups only this one.
        """
        local_rank = Launch.from_env().local_rank
        self.device = current_omni_platform.get_torch_device(local_rank)
        current_omni_platform.set_device(self.device)
        # the rest is as in the worker's own method, except for the world
        config = create_diffusion_vllm_config(self.device, self.od_config)
        priority = current_omni_platform.get_default_ir_op_priority(config)
        config.kernel_config.ir_op_priority = priority
        current_omni_platform.init_diffusion_worker_vllm_config(config)
        self.vllm_config = config
        with (
            set_forward_context(vllm_config=config, omni_diffusion_config=self.od_config),
            set_current_vllm_config(config),
        ):
            size = dist.get_world_size()
            # torch's default group exists already, so this does not create another
            init_distributed_environment(size, dist.get_rank(), local_rank=local_rank)
            initialize_model_parallel(data_parallel_size=size)
            init_workspace_manager(self.device)

    def shutdown(self) -> None:
        """Do nothing: the worker's own method would destroy the job's process groups."""
