"""FLOP counts compared with counts by hand and with torch's counter on real backward passes."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from phalanx.telemetry import flops
from phalanx.telemetry.flops import forward_flops, named_peak_flops, peak_flops
from phalanx.telemetry.step_metrics import step_flops


def linear(rows: int, inputs: int, outputs: int) -> int:
    return 2 * rows * inputs * outputs


def attention(batch: int, tokens: int, width: int) -> int:
    """Two products that involve [tokens, tokens], over all heads."""
    return 2 * 2 * batch * tokens * tokens * width


def feed_forward(rows: int, width: int) -> int:
    return linear(rows, width, 4 * width) + linear(rows, 4 * width, width)


def time_embedding(batch: int, width: int) -> int:
    return linear(batch, 256, width) + linear(batch, width, width)


def test_sd3_equals_the_count_by_hand() -> None:
    from diffusers import SD3Transformer2DModel

    batch, side, text, width, joint, pooled, channels = 2, 16, 7, 16, 32, 24, 4
    image = (side // 2) ** 2

    def build() -> nn.Module:
        return SD3Transformer2DModel(
            sample_size=side,
            patch_size=2,
            in_channels=channels,
            out_channels=channels,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=joint,
            caption_projection_dim=width,
            pooled_projection_dim=pooled,
            pos_embed_max_size=side,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )

    def inputs() -> dict[str, torch.Tensor]:
        return {
            "hidden_states": torch.zeros(batch, channels, side, side),
            "encoder_hidden_states": torch.zeros(batch, text, joint),
            "pooled_projections": torch.zeros(batch, pooled),
            "timestep": torch.zeros(batch),
        }

    n, t = batch * image, batch * text
    stem = linear(n, 4 * channels, width) + linear(t, joint, width)
    stem += time_embedding(batch, width) + linear(batch, pooled, width) + linear(batch, width, width)
    joint_attention = 4 * linear(n, width, width) + attention(batch, image + text, width)
    own_attention = 4 * linear(n, width, width) + attention(batch, image, width)
    # Block 0 has a second attention over the image (9 modulations instead of 6); the last block leaves the text alone.
    first = linear(batch, width, 9 * width) + linear(batch, width, 6 * width) + joint_attention + own_attention
    first += 4 * linear(t, width, width) + feed_forward(n, width) + feed_forward(t, width)
    last = linear(batch, width, 6 * width) + linear(batch, width, 2 * width) + joint_attention
    last += 3 * linear(t, width, width) + feed_forward(n, width)
    head = linear(batch, width, 2 * width) + linear(n, width, 4 * channels)
    assert forward_flops(build, inputs) == stem + first + last + head


def test_the_full_qwen_image_is_counted_without_its_memory() -> None:
    """20 B parameters; a forward pass at 512 x 512 with 64 text tokens is about 15.7 TFLOP."""
    from diffusers import QwenImageTransformer2DModel

    image, text, width, joint, patch = 32 * 32, 64, 3072, 3584, 64  # `patch`: channels of a packed image token

    def inputs() -> dict[str, object]:
        return {
            "hidden_states": torch.zeros(1, image, patch),
            "encoder_hidden_states": torch.zeros(1, text, joint),
            "encoder_hidden_states_mask": torch.ones(1, text, dtype=torch.bool),
            "timestep": torch.zeros(1),
            "img_shapes": [[(1, 32, 32)]],
        }

    block = 2 * linear(1, width, 6 * width) + attention(1, image + text, width)
    block += sum(4 * linear(rows, width, width) + feed_forward(rows, width) for rows in (image, text))
    stem = linear(image, patch, width) + linear(text, joint, width) + time_embedding(1, width)
    head = linear(1, width, 2 * width) + linear(image, width, patch)
    counted = forward_flops(QwenImageTransformer2DModel, inputs)
    assert counted == stem + 60 * block + head
    assert counted == pytest.approx(15.7e12, rel=0.01)


def test_real_weights_are_refused() -> None:
    with pytest.raises(ValueError) as error:
        forward_flops(lambda: nn.Linear(2, 2, device="cpu"), lambda: {"input": torch.zeros(1, 2)})
    assert str(error.value) == (
        "forward_flops: parameter weight is on cpu; build() must make a new model and leave the device to the caller"
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_factors_of_an_update_are_those_of_a_real_backward_pass(lora: bool, recompute: bool) -> None:
    stack = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).requires_grad_(not lora)
    x = torch.randn(4, 16, requires_grad=True)  # before a trained layer, activations need gradients

    def run() -> torch.Tensor:
        return checkpoint(stack, x, use_reentrant=False) if recompute else stack(x)

    forward = forward_flops(
        lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), lambda: {"input": torch.zeros(4, 16)}
    )
    assert forward == 3 * linear(4, 16, 16)
    # The count is of whole blocks; torch would not recompute a block's last product, which nothing needs.
    with set_checkpoint_early_stop(False), FlopCounterMode(display=False) as counter:
        run().sum().backward()
    assert counter.get_total_flops() == step_flops(forward, samples=1, lora=lora, checkpointing=recompute)


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        # 10 rollout steps; 2 trained ones of replay 1, backward 2
        ({}, 10 + 2 * (1 + 2)),
        ({"lora": True}, 10 + 2 * (1 + 1)),
        ({"checkpointing": True}, 10 + 2 * (1 + 2 + 1)),
        ({"references": 1}, 10 + 2 + 2 * (1 + 2)),
        ({"references": 0.5, "updates_per_sample": 0.5}, 10 + 1 + 2 * (1 + 2) // 2),  # of every second sample
        ({"updates_per_sample": 3}, 10 + 3 * 2 * (1 + 2)),
        ({"updates_per_sample": 3, "references": 1}, 10 + 2 + 3 * 2 * (1 + 2)),
        ({"cfg": True}, 20 + 2 * (2 + 2 * 2)),
        ({"cfg": True, "detach_uncond": True}, 20 + 2 * (2 + 2)),
        ({"cfg": True, "detach_uncond": True, "checkpointing": True}, 20 + 2 * (2 + 2 + 1)),
        ({"detach_uncond": True}, 10 + 2 * (1 + 2)),
        ({"cfg": True, "lora": True, "checkpointing": True}, 32),
        ({"cfg": True, "references": 1}, 20 + 4 + 2 * (2 + 2 * 2)),
    ],
)
def test_step_in_forward_passes(changes: dict[str, bool | float], forwards: int) -> None:
    settings = {"lora": False, "checkpointing": False} | changes
    assert step_flops(7, samples=5, steps=10, window=2, **settings) == 7 * 5 * forwards


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 51.2e12),
        ("NVIDIA H100 NVL", 835.5e12, 60e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA H200 NVL", 835.5e12, 60e12),
        ("NVIDIA GH200 480GB", 989.4e12, 66.9e12),
        ("NVIDIA H800", 989.4e12, 66.9e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", 2500e12, 80e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
        ("NVIDIA H20", 148e12, 44e12),
        ("NVIDIA L40", 181e12, 90.5e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12, 104.8e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA GeForce RTX 3090", None, None),
    ],
)
def test_peaks_by_name(name: str, half: float | None, single: float | None) -> None:
    assert named_peak_flops(name, torch.bfloat16) == (half and pytest.approx(half))
    assert named_peak_flops(name, torch.float16) == named_peak_flops(name, torch.bfloat16)
    assert named_peak_flops(name, torch.float32) == (single and pytest.approx(single))
    assert named_peak_flops(name, torch.float64) is None


def test_the_peak_of_a_cpu_is_measured_once() -> None:
    assert peak_flops(torch.device("meta"), torch.float32) is None
    device = torch.device("cpu")
    first = peak_flops(device, torch.float32)
    assert first is not None
    assert first == peak_flops(device, torch.float32)  # two measurements would differ
    assert 1e8 < first < 1e14
    # A product of this size runs at about that rate; a large deviation would mean wrong units.
    a = torch.ones(512, 512)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    assert 0.02 < linear(512, 512, 512) / min(seconds) / first < 50


def test_the_peak_of_a_cpu_is_that_of_the_fastest_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype without vector instructions has a slow one: a share of its rate would be above 1."""
    now = [0.0]
    layouts = set[tuple[bool, bool]]()

    def multiply(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
        layouts.add((one.is_contiguous(), other.is_contiguous()))
        now[0] += 1.0 if one.is_contiguous() else 0.1

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert flops._measured_gemm.__wrapped__(torch.bfloat16, 1) == pytest.approx(2 * 512**3 / 0.1)
    assert layouts == {(True, True), (True, False), (False, True)}
