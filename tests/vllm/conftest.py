"""Engines are imported once, here: the ranks, which are forks of this process, find them there."""

from importlib import import_module

from phalanx.distributed.vllm_groups import as_before
from phalanx.engines import vllm
from tests.vllm import omni_cpu_platform

vllm.CPU_KV_CACHE = 2**26  # tiny models need no more, and an engine fills it with zeros first

with as_before():
    for name in ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        import_module(name)
    import_module("vllm_omni.platforms")._current_omni_platform = omni_cpu_platform.CpuOmniPlatform()
    for name in ("vllm_omni.diffusion.worker.diffusion_worker", "phalanx.zoo.engines.omni.qwen_image"):
        import_module(name)
