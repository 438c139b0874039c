"""Context parallelism by diffusers' plans of the layers whose inputs are split and whose outputs are gathered."""

import warnings

from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks import apply_context_parallel
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import Attention

from phalanx.config.messages import check_divides
from phalanx.distributed.context_parallel import KEY
from phalanx.distributed.mesh import World
from phalanx.functional.flow import Sampler
from phalanx.models.flow.family import FlowModel


def share_tokens(model: FlowModel, world: World) -> None:
    """Let the transformer split the tokens of each sample over the ranks that share it; called before sharding.

    Raises ValueError if the transformer does not support this.
    """
    assert world.context is not None
    size, (heads, _) = world.context_size, model.heads()
    check_divides(KEY, size, heads, "the model's {} attention heads")
    model.prepare_sharing(size)
    config = ContextParallelConfig(ulysses_degree=size, mesh=world.context)
    parallel = ParallelConfig(context_parallel_config=config)
    # not by enable_parallelism, which counts accelerators and so does not work on CPUs
    parallel.setup(world.rank, world.size, world.device, mesh=world.context)
    for block in model.blocks():  # not the modules before them, which read whole sequences
        for module in block.modules():
            if isinstance(module, Attention | AttentionModuleMixin):
                _check_backend(module.processor._attention_backend)
                module.processor._parallel_config = parallel
    # diffusers gathers by a function that torch has deprecated and renamed
    warnings.filterwarnings("ignore", "`torch.distributed._functional_collectives.all_gather_tensor`", FutureWarning)
    apply_context_parallel(model.transformer, config, model.context_plan())


def check_tokens(model: FlowModel, sampler: Sampler, longest: int, size: int) -> None:
    """Raise ValueError if `size` does not divide the tokens of a sample, or those of a text of `longest` tokens."""
    for what, count in model.split_tokens(sampler.height, sampler.width, sampler.num_frames, longest).items():
        check_divides(KEY, size, count, f"the {{}} tokens of {what}")


def _check_backend(name: str | None) -> None:
    """Raise ValueError for a backend that does not support context parallelism; None is diffusers' default."""
    active, _ = _AttentionBackendRegistry.get_active_backend()
    backend = active if name is None else AttentionBackendName(name)
    known = sorted(_AttentionBackendRegistry._supports_context_parallel)
    if backend.value not in known:
        raise ValueError(f"model.attn_backend: {backend.value} does not support {KEY}; expected {', '.join(known)}")
