"""A policy's weights: gradients, the reference, moving averages, and compiled blocks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy
from phalanx.models.lora import add_lora
from tests.helpers.policies import PROMPTS, disturb, make_policy, one_rank, velocity
from tests.helpers.ranks import run_ranks

Folder = Callable[[str], Path]


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Folder:
    return lambda family: request.getfixturevalue(f"{family}_folder")


# -- gradients ----------------------------------------------------------------------------------------------------------


def gradients(policy: FlowPolicy) -> dict[str, Tensor]:
    weight = torch.randn(velocity(policy).shape, generator=torch.Generator().manual_seed(1))
    (velocity(policy) * weight).sum().backward()
    policy.trained.sharded.reduce_gradients()
    grads = {}
    for name, p in policy.trained.parameters.items():
        assert p.grad is not None
        grads[name], p.grad = p.grad.clone(), None
    return grads


# The last block's text output is not used, so that its text queries, output and feed-forward have no gradient.
UNUSED: dict[str, tuple[str, ...]] = {
    "sd3": ("transformer_blocks.1.attn.add_q_proj.",),
    "flux": (),  # its last block has one stream
    "flux2_klein": (),
    "z_image": (),
    "qwen": tuple(f"transformer_blocks.1.{n}." for n in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp")),
}


@pytest.mark.seldom("0-flux2_klein")
@pytest.mark.quick("4-sd3", "0-qwen", "4-flux")
@pytest.mark.parametrize("family", ["sd3", "qwen", "flux", "z_image", "flux2_klein"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_gradients_flow_through_both_branches_of_guidance(
    world: World, folder: Folder, family: str, lora_rank: int
) -> None:
    both, detached = (make_policy(world, folder(family), lora_rank=lora_rank, detach_uncond=d) for d in (False, True))
    for policy in (both, detached):
        disturb(policy)
    # one pass of six rows against two of three: rounding depends on the processor; weights and guidance amplify it
    torch.testing.assert_close(velocity(both), velocity(detached), rtol=1e-3, atol=1e-4)
    full, positive = gradients(both), gradients(detached)
    assert full.keys() == positive.keys()
    for name in full:
        if name.startswith(UNUSED[family]):
            assert full[name].abs().max() == 0, name
        elif lora_rank:  # some biases of a full model have no effect, such as those of keys
            assert full[name].abs().max() > 0, name
            assert positive[name].abs().max() > 0, name
    a, b = (torch.cat([g.flatten() for g in grads.values()]) for grads in (full, positive))
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=0)
    assert cosine < 0.99


@pytest.mark.quick("sd3", "z_image")
@pytest.mark.parametrize("family", ["sd3", "qwen", "flux", "z_image", "flux2_klein"])
def test_gradients_of_guidance_are_the_sum_of_both_branches(world: World, folder: Folder, family: str) -> None:
    """Against finite differences along a random direction: no branch is missing or counted twice."""
    policy = make_policy(world, folder(family), lora_rank=4)
    disturb(policy)
    weight = torch.randn(velocity(policy).shape, generator=torch.Generator().manual_seed(1))
    grads = gradients(policy)
    generator, step = torch.Generator().manual_seed(2), 3e-4
    direction = {name: torch.randn(p.shape, generator=generator) for name, p in policy.trained.parameters.items()}
    values = []
    with torch.no_grad():
        for sign in (1, -2):
            for name, p in policy.trained.parameters.items():
                p.add_(direction[name], alpha=sign * step)
            values.append((velocity(policy).double() * weight).sum())
    expected = (values[0] - values[1]) / (2 * step)
    computed = sum((grads[name].double() * direction[name]).sum() for name in grads)
    norm = torch.cat(
        [g.flatten() for g in grads.values()]
    ).norm()  # the standard deviation of the derivative over directions
    torch.testing.assert_close(computed, expected, rtol=0, atol=2e-3 * float(norm))


# -- other weights ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["sd3", "qwen", "flux", "z_image"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_of_a_lora_is_the_base_model(world: World, folder: Folder, family: str, dtype: str) -> None:
    plain = make_policy(world, folder(family), dtype=dtype)
    plain.model.transformer.to(plain.model.dtype)  # full fine-tuning keeps buffers in float32
    base = velocity(plain)
    policy = make_policy(world, folder(family), dtype=dtype, lora_rank=4)
    policy.trained.keep_reference()
    assert torch.equal(velocity(policy), base)  # B is 0
    disturb(policy)
    trained = velocity(policy)
    assert not torch.equal(trained, base)
    with policy.using("reference"):
        assert torch.equal(velocity(policy), base)
        assert all(p.requires_grad for p in policy.trained.parameters.values())
    assert torch.equal(velocity(policy), trained)


@torch.no_grad()
@pytest.mark.parametrize("init", ["gaussian", "kaiming", "orthogonal", "pissa"])
def test_every_start_of_a_lora_is_the_base_model(world: World, folder: Folder, init: str) -> None:
    base = velocity(make_policy(world, folder("sd3")))
    policy = make_policy(world, folder("sd3"), lora_rank=4, lora_init=init)
    torch.testing.assert_close(velocity(policy), base, rtol=0, atol=1e-5)
    again = make_policy(world, folder("sd3"), lora_rank=4, lora_init=init)
    assert all(torch.equal(p, again.trained.parameters[name]) for name, p in policy.trained.parameters.items())
    policy.trained.keep_reference()
    disturb(policy)
    assert (velocity(policy) - base).abs().max() > 0.01
    with policy.using("reference"):
        torch.testing.assert_close(velocity(policy), base, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("init", ["orthogonal", "pissa"])
def test_a_rounded_lora_starts_at_the_base_model(init: str, dtypes: tuple[str, str]) -> None:
    """B A is exactly 0 or, for PiSSA, it and the rest of the weight are the weight up to the rounding of the rest."""
    dtype, lora_dtype = dtypes
    module = nn.ModuleDict({"to_q": nn.Linear(48, 32, dtype=getattr(torch, dtype))})
    weight = module["to_q"].weight.detach().float().clone()
    config = FlowModelConfig(path="none", dtype=dtype, lora_rank=8, lora_init=init, lora_dtype=lora_dtype)
    add_lora(module, config, ("to_q",), seed=0)
    layer = module["to_q"]
    down, up = (matrix["default"].weight for matrix in (layer.lora_A, layer.lora_B))
    assert down.dtype is up.dtype is getattr(torch, lora_dtype)
    assert down.std() > 0.01 and up.std() > 0.01
    # as the module computes, in the dtype with fewer bits
    change = layer.scaling["default"] * (up.bfloat16().float() @ down.bfloat16().float())
    assert (change.abs().max() == 0) == (init == "orthogonal")
    rest = layer.base_layer.weight.float()
    error = 1e-6 if dtype == "float32" else 2**-8 * rest.abs().max()
    torch.testing.assert_close(rest + change, weight, rtol=0, atol=error)


@torch.no_grad()
@pytest.mark.parametrize("family", ["sd3", "qwen"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_of_full_fine_tuning_is_the_old_weights(
    world: World, folder: Folder, family: str, dtype: str
) -> None:
    policy = make_policy(world, folder(family), dtype=dtype)
    old = velocity(policy)
    policy.trained.keep_reference()
    disturb(policy)
    new, weights = velocity(policy), {name: p.clone() for name, p in policy.trained.parameters.items()}
    assert not torch.equal(new, old)
    with policy.using("reference"):
        assert torch.equal(velocity(policy), old)
    assert torch.equal(velocity(policy), new)
    with pytest.raises(RuntimeError, match="on the way"), policy.using("reference"):
        raise RuntimeError("on the way")
    assert torch.equal(velocity(policy), new)
    assert all(torch.equal(p, weights[name]) for name, p in policy.trained.parameters.items())


@torch.no_grad()
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_moving_average_is_used_and_put_back(world: World, folder: Folder, lora_rank: int) -> None:
    other = make_policy(world, folder("qwen"), lora_rank=lora_rank)
    disturb(other, seed=1)
    policy = make_policy(world, folder("qwen"), lora_rank=lora_rank)
    disturb(policy)
    policy.trained.add_weights("ema", {name: p.clone() for name, p in other.trained.parameters.items()})
    before = velocity(policy)
    with policy.using("ema"):
        assert torch.equal(velocity(policy), velocity(other))
    assert torch.equal(velocity(policy), before)


# -- compilation --------------------------------------------------------------------------------------------------------


# relative to the largest value; blocks that are not compiled use oneDNN's products where these are faster
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}


def compiled(path: Path, backend: str, dtype: str) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The velocity without compiling, with it, and with it for a backward pass; and the number of graphs, before and
    after texts of other lengths.
    """
    from torch._dynamo.utils import counters

    longer = [replace(p, text=p.text + " in the rain", negative="a blur" + "red" * i) for i, p in enumerate(PROMPTS)]
    with one_rank() as world, torch._inductor.config.patch(compile_threads=1):
        torch.compile = partial(torch.compile, backend=backend)
        policies = [make_policy(world, path, lora_rank=2, dtype=dtype, compile=c) for c in (False, True)]
        counters.clear()  # loading has tried to compile something
        graphs = []
        for policy in policies:
            disturb(policy)
        with torch.no_grad():
            plain, fast = map(velocity, policies)
        replayed = velocity(policies[1])
        graphs.append(counters["stats"]["unique_graphs"])
        with torch.no_grad():
            longer_plain, longer_fast = (velocity(policy, prompts=longer) for policy in policies)
        assert (longer_fast - longer_plain).abs().max() < TOLERANCE[dtype] * longer_plain.abs().max()
        graphs.append(counters["stats"]["unique_graphs"])
        if backend != "inductor":  # Inductor would take as long again for the backward passes
            replayed.square().sum().backward()
            velocity(policies[0]).square().sum().backward()
            compiled_parameters = policies[1].trained.parameters
            for name, p in policies[0].trained.parameters.items():
                # unused weights of the last block have no gradient, or zeros
                pair = [torch.zeros_like(p) if q.grad is None else q.grad for q in (p, compiled_parameters[name])]
                assert (pair[0] - pair[1]).abs().max() <= 1e-4 * pair[0].abs().max(), name
        return plain, fast, replayed.detach(), graphs


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU wants a C++ compiler")
def test_compiled_blocks_compute_the_same(qwen_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In bfloat16, where another fusion gives other numbers. On a forked rank, because the compiler leaves threads and
    processes running.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    [(plain, fast, replayed, graphs)] = run_ranks(compiled, 1, qwen_folder, "inductor", "bfloat16", timeout=540)
    assert graphs == [2, 2]  # the blocks share one graph, except the first, whose inputs need no gradient
    assert torch.equal(fast, replayed)
    assert (fast - plain).abs().max() < TOLERANCE["bfloat16"] * plain.abs().max()


# The first block's inputs need no gradient. SD3's last block outputs no text. FLUX has blocks of two streams and of one
# stream, and the first of the latter gets other strides. Z-Image has blocks for the image, the text, and both. FLUX.2's
# blocks of two streams share a graph, since their inputs before and after the first block have the same strides. The two
# transformers of Wan 2.2 A14B share theirs.
@pytest.mark.full
@pytest.mark.seldom("sd3-2", "flux-4", "flux2_klein-3", "z_image-3", "wan-2", "a14b-2", "hunyuan-2", "ltx2-2")
@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        *(("sd3", 2), ("qwen", 2), ("flux", 4), ("z_image", 3), ("flux2_klein", 3)),
        *(("wan", 2), ("a14b", 2), ("hunyuan", 2), ("ltx2", 2)),
    ],
)
def test_blocks_of_each_family_can_be_compiled(folder: Folder, family: str, graphs: int) -> None:
    """Each kind of block is one graph for both modes and all lengths of texts. The graphs are run without generating
    code, which would take the compiler much longer.
    """
    [(plain, fast, replayed, found)] = run_ranks(compiled, 1, folder(family), "eager", "float32", timeout=240)
    assert found == [graphs, graphs]
    assert torch.equal(fast, replayed)
    assert (fast - plain).abs().max() < TOLERANCE["float32"] * plain.abs().max()
