"""A CPU platform for vLLM-omni, which has none: the little that the in-process executor asks of a platform."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # these are read when vLLM is imported
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One device, the CPU; gloo; PyTorch's attention."""

    _omni_enum = OmniPlatformEnum.OOT
    dist_backend = "gloo"
    device_type = "cpu"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """There is one."""

    @classmethod
    def get_device_count(cls) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @classmethod
    def synchronize(cls, *args: Any) -> None:
        """Nothing runs on its own."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is none."""

    @classmethod
    def is_available(cls) -> bool:
        return False  # as an accelerator

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        """A process's peak cannot be reset."""

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        return DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "vllm_omni.diffusion.worker.diffusion_worker.DiffusionWorker"


def install() -> None:
    """Make it the platform of this process. Call it before an engine is built."""
    import vllm.model_executor.layers.utils as layers
    import vllm_omni.platforms as platforms
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

    torch.cpu._init_amx()  # vLLM's own processes do; the first kernel dies without it on CPUs that have AMX
    platforms._current_omni_platform = CpuOmniPlatform()
    SDPAImpl.forward = SDPAImpl.forward_cuda  # it chooses by the platform's name, and knows no CPU

    # vLLM packs linear weights for the CPU once they are loaded, and new weights do not reach the packed copy
    def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain_linear
