"""`model.attn_backend`: this backend computes attention, and one that cannot is refused in one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.distributed.mesh import World
from phalanx.models.flow.attention import use_real_rotations
from tests.helpers.checks import refused
from tests.helpers.policies import PROMPTS, make_policy, one_rank, velocity


@pytest.fixture
def world() -> Iterator[World]:
    # setting a model's backend also sets that of the process
    with one_rank() as world, attention_backend("native"):
        yield world


@pytest.fixture(params=["sd3", "qwen", "flux", "z_image"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


class Operations(TorchDispatchMode):
    """Names of the kernels that run within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FUSED, SOFTMAX = "_scaled_dot_product_flash_attention_for_cpu", "_safe_softmax"


@pytest.mark.parametrize(("backend", "kernel", "other"), [("native", FUSED, SOFTMAX), ("_native_math", SOFTMAX, FUSED)])
def test_the_backend_is_the_one_that_computes(
    world: World, folder: Path, backend: str, kernel: str, other: str
) -> None:
    with torch.no_grad():
        default = velocity(make_policy(world, folder))
        policy = make_policy(world, folder, attn_backend=backend)
        policy.embed(PROMPTS)  # the text encoders use other kernels
        with Operations() as operations:
            out = velocity(policy)
    assert kernel in operations.names and other not in operations.names
    scale = max(1.0, float(default.abs().max()))
    torch.testing.assert_close(out, default, rtol=0, atol=scale * (1e-6 if backend == "native" else 1e-5))


def test_gradients_are_those_of_the_default(world: World, folder: Path) -> None:
    grads = []
    for backend in (None, "_native_math"):
        policy = make_policy(world, folder, attn_backend=backend)
        velocity(policy).square().sum().backward()
        policy.trained.sharded.reduce_gradients()
        found = [p.grad for p in policy.trained.parameters.values()]
        grads.append(torch.cat([g.flatten() for g in found if g is not None]))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-5 * float(grads[0].abs().max()))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (
            "_native_npu",
            "NPU Attention backend '_native_npu' is not usable because of missing package or the version is too old. "
            "Please install `torch_npu`.",
        ),
        (
            "_native_cudnn",
            "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both the "
            "math kernel and the fused kernels.",
        ),
        (
            "flex",
            "FlexAttention does not support backward on CPU. Please set the input requires_grad to False or use another "
            "device.",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="some of these work on a GPU")
def test_a_backend_that_cannot_train_here(world: World, folder: Path, backend: str, reason: str) -> None:
    with refused(f"model.attn_backend: {backend!r} cannot be used here: {reason}"):
        make_policy(world, folder, attn_backend=backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is the CPU's")
def test_a_backend_without_masks(world: World, sd3_folder: Path, qwen_folder: Path) -> None:
    with torch.no_grad():
        native = velocity(make_policy(world, sd3_folder))
        flash = velocity(make_policy(world, sd3_folder, attn_backend="_native_flash"))  # SD3 has none
    torch.testing.assert_close(native, flash)
    with refused(
        "model.attn_backend: '_native_flash' takes no mask, which this model needs for prompts of different lengths: "
        "`attn_mask` is not supported for native flash attention"
    ):
        make_policy(world, qwen_folder, attn_backend="_native_flash")


def test_an_unknown_backend(world: World, folder: Path) -> None:
    with pytest.raises(ValueError) as error:
        make_policy(world, folder, attn_backend="falsh")
    known = ", ".join(sorted(b.value for b in AttentionBackendName))
    assert str(error.value) == f"model.attn_backend: 'falsh' is unknown to diffusers; known: {known}"


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_rotations_are_the_complex_ones(world: World, qwen_folder: Path, dtype: str) -> None:
    complex_, real = (make_policy(world, qwen_folder, dtype=dtype) for _ in range(2))
    use_real_rotations(real.model.transformer)
    with Operations() as operations:
        found = velocity(real)
    assert "view_as_complex" not in operations.names
    wanted = velocity(complex_)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 if dtype == "float32" else 0.02)
