"""Learning rates by hand, the optimizer against AdamW written out in float64, and the moving average."""

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import phalanx.training.offload
from phalanx.config.optimizer import OptimConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.run import EmaConfig
from phalanx.distributed.fsdp import Sharded
from phalanx.run.world import start_world
from phalanx.training.offload import PART, OffloadedState
from phalanx.training.optim import Ema, Optimizer, TrainState, learning_rate
from tests.helpers.ranks import free_port, run_ranks
from tests.pretended import install

STEPS = 5


# --- learning rates

PEAK = 8.0
HALF = math.sqrt(2) / 2
RATES: list[tuple[int, dict[str, Any], list[float]]] = [
    (4, {}, [PEAK] * 6),
    # warm-up is linear, and its last step is the peak; also of a run that ends within it
    (6, {"lr_warmup_steps": 4}, [2, 4, 6, 8, 8, 8, 8, 8]),
    (2, {"lr_warmup_steps": 4}, [2, 4, 6, 8]),
    # the decay starts after the warm-up, and would reach zero one step after the last
    (4, {"lr_scheduler": "linear"}, [8, 6, 4, 2, 0, 0]),
    (6, {"lr_scheduler": "linear", "lr_warmup_steps": 2}, [4, 8, 8, 6, 4, 2, 0, 0]),
    # 4 (1 + cos(pi u / 4)) of u = 0 .. 4
    (4, {"lr_scheduler": "cosine"}, [8, 4 * (1 + HALF), 4, 4 * (1 - HALF), 0, 0]),
    # decay over a quarter of 8 steps, the last two; a constant rate has none
    (8, {"lr_scheduler": "linear", "lr_decay_fraction": 0.25}, [PEAK] * 7 + [4, 0, 0]),
    (8, {"lr_decay_fraction": 0.25}, [PEAK] * 10),
    (8, {"lr_scheduler": "linear", "lr_warmup_steps": 6}, [PEAK * (u + 1) / 6 for u in range(6)] + [8, 4, 0, 0]),
]


@pytest.mark.parametrize(("total", "settings", "expected"), RATES)
def test_learning_rates(total: int, settings: dict[str, Any], expected: list[float]) -> None:
    config = OptimConfig(lr=PEAK, **settings)
    assert [learning_rate(config, update, total) for update in range(total + 2)] == pytest.approx(expected, rel=1e-12)


# --- the optimizer


class Net(nn.Module):
    """Two blocks, and a head outside of them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def data(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def full(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().float().clone() for name, t in values.items()
    }


def train(config: OptimConfig, fsdp_size: int, dtype: torch.dtype, offload: bool, part: int = PART) -> dict[str, Any]:
    """On a rank: some steps, each rank with its share of the rows. The norms, rates, and all weights at the end.
    `part`: bytes of the optimizer's state that travel together.
    """
    phalanx.training.offload.PART = part
    parallel = ParallelConfig(fsdp_size=fsdp_size, reshard_after_forward=True)
    world = start_world(parallel)
    net = Net()
    sharded = Sharded(net, list(net.blocks), world, parallel, dtype)
    optimizer = Optimizer(config, sharded, STEPS, offload=offload)
    addresses = [t.data_ptr() for state in optimizer.state().values() for t in state.values()]
    said = []
    for step in range(STEPS):
        x = data(step).chunk(world.size)[world.rank].to(world.device)
        sharded.set_last_micro_batch(True)
        net(x.to(dtype)).float().square().sum().backward()
        assert optimizer.updates == step
        said.append({k: float(v) for k, v in optimizer.step(torch.zeros(())).items()})
        assert all(p.grad is None for p in [*net.parameters(), *sharded.parameters.values()])
    moments = [t for state in optimizer.state().values() for t in state.values()]
    assert [t.data_ptr() for t in moments] == addresses  # a checkpoint is loaded into them
    return {
        "said": said,
        "weights": full(sharded.parameters),
        "module": {} if fsdp_size > 1 else {name: p.detach().cpu() for name, p in net.named_parameters()},
        "devices": {t.device.type for t in moments},
        "moments": [t.cpu() for t in moments],
        "device": world.device.type,
    }


def reference(config: OptimConfig) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW (arXiv 1711.05101, algorithm 2) with clipping, in float64: norms before clipping, and the weights."""
    net = Net().double()
    first = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    norms = []
    beta1, beta2 = config.betas
    for step in range(STEPS):
        net.zero_grad()
        net(data(step).double()).square().sum().backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
        norms.append(norm)
        scale = min(1.0, config.grad_clip / norm) if config.grad_clip > 0 else 1.0
        lr = learning_rate(config, step, STEPS)
        with torch.no_grad():
            for name, p in net.named_parameters():
                g = p.grad * scale
                first[name] = beta1 * first[name] + (1 - beta1) * g
                second[name] = beta2 * second[name] + (1 - beta2) * g * g
                m, v = first[name] / (1 - beta1 ** (step + 1)), second[name] / (1 - beta2 ** (step + 1))
                p -= lr * (m / (v.sqrt() + config.eps) + config.weight_decay * p)
    return norms, {name: p.detach() for name, p in net.named_parameters()}


def settings(**changes: Any) -> OptimConfig:
    values: dict[str, Any] = {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.1, "lr_scheduler": "linear"}
    return OptimConfig(**{**values, **changes})


@pytest.mark.parametrize(("ranks", "fsdp_size"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adamw(ranks: int, fsdp_size: int, clip: float) -> None:
    config = settings(grad_clip=clip)
    norms, weights = reference(config)
    assert norms[0] > 1  # so that 0.5 does clip
    for result in run_ranks(train, ranks, config, fsdp_size, torch.float32, False):
        assert [row["grad_norm"] for row in result["said"]] == pytest.approx(norms, rel=1e-5)
        assert [row["lr"] for row in result["said"]] == pytest.approx([0.02, 0.016, 0.012, 0.008, 0.004])
        for name, value in weights.items():
            torch.testing.assert_close(result["weights"][name].double(), value, rtol=1e-5, atol=1e-6)


def train_on_a_gpu(config: OptimConfig, port: int) -> dict[str, Any]:
    """`train` on a pretended GPU, and the number of tensors in each call of the fused kernel."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    install()
    fused, calls = torch._fused_adamw_, []

    def counted(tensors: list[Tensor], *args: Any, **keys: Any) -> None:
        calls.append(len(tensors))
        fused(tensors, *args, **keys)

    torch._fused_adamw_ = counted
    return train(config, 1, torch.float32, False) | {"calls": calls}


def test_adamw_on_a_gpu_is_one_kernel() -> None:
    """With all state on the device, counts of steps included, and the numbers of the formula."""
    config = settings(grad_clip=0.5)
    norms, weights = reference(config)
    (result,) = run_ranks(train_on_a_gpu, 1, config, free_port(), init=False)
    assert result["calls"] == [len(weights)] * STEPS and result["devices"] == {"cuda"}
    assert [row["grad_norm"] for row in result["said"]] == pytest.approx(norms, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(result["weights"][name].double().cpu(), value, rtol=1e-5, atol=1e-6)


def test_a_gradient_below_the_limit_is_left_as_it_is() -> None:
    free, wide = (run_ranks(train, 1, settings(grad_clip=c), 1, torch.float32, False)[0] for c in (0.0, 1e4))
    assert all(torch.equal(free["weights"][name], wide["weights"][name]) for name in free["weights"])


def test_weights_are_kept_in_float32_where_the_module_computes_in_bfloat16() -> None:
    (result,) = run_ranks(train, 1, settings(lr=1e-5), 1, torch.bfloat16, False)
    start = dict(Net().named_parameters())
    for name, value in result["weights"].items():
        assert value.dtype == torch.float32
        assert 1e-6 < (value - start[name]).abs().max() < 1e-4  # steps that bfloat16 would lose
        assert torch.equal(result["module"][name], value.bfloat16())


@pytest.mark.parametrize("part", [PART, 300, 1])  # all parameters together, some, each by itself
@pytest.mark.parametrize(("name", "ranks"), [("adamw", 1), ("adamw", 2), ("muon", 1)])
def test_offload_changes_nothing(name: str, ranks: int, part: int) -> None:
    """The moments travel, in parts; they are on the CPU, and all is as without."""
    kept, moved = (
        run_ranks(train, ranks, settings(name=name), ranks, torch.float32, offload, part)[0]
        for offload in (False, True)
    )
    assert moved["devices"] == {"cpu"} and kept["device"] in kept["devices"]
    assert kept["said"] == moved["said"]
    assert all(torch.equal(kept["weights"][name], moved["weights"][name]) for name in kept["weights"])
    assert all(torch.equal(a, b) for a, b in zip(kept["moments"], moved["moments"], strict=True))


def test_parts_of_the_state_take_turns_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is there with its own values while it is visited, and back where it was afterwards."""
    monkeypatch.setattr("phalanx.training.offload.PART", 1024)
    sizes = [100, 200, 0, 7, 300, 1, 150, 90]  # 0: of uneven shards
    parameters = [torch.zeros(n) for n in sizes]
    states = [{"step": torch.tensor(0.0), "m": torch.empty(n, device="meta")} for n in sizes]
    first = [state["step"] for state in states]
    offloaded = OffloadedState(zip(parameters, states, strict=True))
    for i, state in enumerate(states):
        assert state["m"].device == torch.device("cpu") and not state["m"].any()
        state["m"] += i
    homes = [state["m"].data_ptr() for state in states]
    for turn in range(2):
        seen: list[int] = []
        for part in offloaded.visits():
            numbers = [i for i, p in enumerate(parameters) if any(p is q for q in part)]
            for i in numbers:
                assert states[i]["m"].tolist() == [i + turn] * sizes[i]
                assert sizes[i] == 0 or states[i]["m"].data_ptr() != homes[i]
                states[i]["m"] += 1
            seen += numbers
            assert len(numbers) < len(sizes)
        assert seen == list(range(len(sizes)))
        assert [state["m"].data_ptr() for state in states] == homes
        assert all(
            state["m"].tolist() == [i + turn + 1] * n for i, (n, state) in enumerate(zip(sizes, states, strict=True))
        )
    assert all(state["step"] is step for state, step in zip(states, first, strict=True))


def muon_step() -> dict[str, Tensor]:
    parallel = ParallelConfig(fsdp_size=1)
    net = Net()
    sharded = Sharded(net, list(net.blocks), start_world(parallel), parallel, torch.float32)
    before = full(sharded.parameters)
    optimizer = Optimizer(settings(name="muon", weight_decay=0.0, grad_clip=0.0, lr_scheduler="constant"), sharded, 1)
    net(torch.cat([data(step) for step in range(16)])).square().sum().backward()
    optimizer.step(torch.zeros(()))
    assert {frozenset(state) for name, state in optimizer.state().items() if name in sharded.hidden_matrices} == {
        frozenset({"momentum_buffer"})
    }
    return {name: before[name] - value for name, value in full(sharded.parameters).items()}


def test_muon_steps_by_orthogonal_matrices_in_the_blocks_and_adamw_elsewhere() -> None:
    (steps,) = run_ranks(muon_step, 1)
    for name in ("blocks.0.weight", "blocks.1.weight"):
        # 0.2 sqrt(6) times an orthogonal matrix, whose singular values Newton-Schulz brings near 1
        values = torch.linalg.svdvals(steps[name] / (0.02 * 0.2 * math.sqrt(6)))
        assert values.min() > 0.3 and values.max() < 1.4
    for name in ("blocks.0.bias", "head.weight", "head.bias"):  # the first step of Adam is the sign, times lr
        torch.testing.assert_close(steps[name].abs(), torch.full_like(steps[name], 0.02), rtol=1e-3, atol=0)


# --- the moving average


def test_moving_average_by_hand() -> None:
    weight = {"w": torch.tensor([1.0, 8.0])}
    ema = Ema(EmaConfig(decay=0.75, warmup=False), weight)
    assert ema.values["w"].tolist() == [1.0, 8.0] and ema.values["w"] is not weight["w"]
    weight["w"].copy_(torch.tensor([5.0, 0.0]))
    ema.after_update(1)
    assert ema.values["w"].tolist() == [2.0, 6.0]  # 3/4 of 1 and 8, 1/4 of 5 and 0
    ema.after_update(2)
    assert ema.values["w"].tolist() == [2.75, 4.5]
    assert weight["w"].tolist() == [5.0, 0.0]


def test_moving_average_of_bfloat16_weights_keeps_small_steps() -> None:
    weight = {"w": torch.ones(1, dtype=torch.bfloat16)}
    ema = Ema(EmaConfig(decay=0.999, warmup=False), weight)
    weight["w"].fill_(1.5)
    ema.after_update(1)
    assert ema.values["w"].dtype == torch.float32
    assert ema.values["w"].item() == pytest.approx(1.0005, rel=1e-7)  # bfloat16 knows 1.0 and 1.0078


def test_moving_average_with_a_short_memory_at_first() -> None:
    weight = {"w": torch.zeros(1)}
    ema = Ema(EmaConfig(decay=0.5, warmup=True), weight)
    weight["w"].fill_(1.0)
    # decay (1 + u) / (10 + u) = 2/11, 3/12, ... until 1/2, at u = 8
    left = 1.0
    for update in range(1, 12):
        ema.after_update(update)
        left *= min(0.5, (1 + update) / (10 + update))
        assert ema.values["w"].item() == pytest.approx(1 - left, rel=1e-6)
    assert left < 1e-4


def test_moving_average_at_intervals() -> None:
    """The decay of the warm-up counts all optimizer steps, as flow_grpo's does."""
    weight = {"w": torch.zeros(1)}
    ema = Ema(EmaConfig(decay=0.9, update_interval=3), weight)
    seen = []
    for update in range(1, 7):
        weight["w"].fill_(float(update))
        ema.after_update(update)
        seen.append(ema.values["w"].item())
    # after 3: 4/13 of 0 and 9/13 of 3; after 6: 7/16 of that and 9/16 of 6
    third = 27 / 13
    assert seen == pytest.approx([0, 0, third, third, third, 7 / 16 * third + 54 / 16])


def averages(fsdp_size: int) -> dict[str, Tensor]:
    parallel = ParallelConfig(fsdp_size=fsdp_size)
    world = start_world(parallel)
    net = Net()
    sharded = Sharded(net, list(net.blocks), world, parallel, torch.float32)
    ema = Ema(EmaConfig(decay=0.5, warmup=False), sharded.parameters, offload=True)
    optimizer = Optimizer(settings(), sharded, STEPS)
    for step in range(STEPS):
        net(data(step).chunk(world.size)[world.rank]).square().sum().backward()
        optimizer.step(torch.zeros(()))
        ema.after_update(optimizer.updates)
    return {name: value.clone() for name, value in ema.values.items()}


def test_moving_average_of_sharded_weights() -> None:
    (whole,) = run_ranks(averages, 1, 1)
    parts = run_ranks(averages, 2, 2)
    for name, value in whole.items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), value, rtol=1e-5, atol=1e-6)


def test_a_step_that_only_changes_averages_is_undone() -> None:
    """The first change of a step, whatever it is, keeps the state before it."""
    part, state = torch.zeros(2), TrainState.__new__(TrainState)
    model = SimpleNamespace(sharded=SimpleNamespace(reshard=lambda: None, copy_to_module=lambda: None))
    optimizer = SimpleNamespace(updates=3, drop_gradients=lambda: None)
    vars(state).update(undoes=True, applied=0, model=model, optimizer=optimizer, local_parts=lambda: [part])
    for value in (1.0, 2.0):
        state.begin_step()
        assert state.parts_before()[0] is part and not state.changed
        for _ in range(2):
            state.keep()
            part += value
            state.changed = True
        assert state.parts_before()[0].tolist() == [0, 0] and state.changed
        state.undo()
        assert part.tolist() == [0, 0] and not state.changed and optimizer.updates == 3
