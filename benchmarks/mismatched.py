"""Rollout engines whose computation is off from that of the trained modules, for learn_mismatch.py.

    sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml rollout.engine=benchmarks/mismatched.py:Texts_fp8

`Images_NAME` and `Texts_NAME` are off by NAME, a key of OFF. They draw samples with this computation, and report the
log-probs that it gives; the trainer replays the samples with the true weights. Validation is not perturbed. In every
EVERYth training step, the engine also replays its samples with the true weights, and logs mismatch/...: the median and
the largest |ratio - 1|, and the shares of actions beyond each of RANGES.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.engine_facts import EngineFacts
from phalanx.distributed.collectives import all_gather
from phalanx.distributed.fsdp import local
from phalanx.distributed.passes import Passes
from phalanx.distributed.seed import fold_in, normal
from phalanx.functional.correction import mismatch
from phalanx.functional.token_budget import in_order
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.types import Each, Prompt, Samples

EVERY = 5
RANGES = (1e-4, 1e-3, 1e-2, 0.2, 1.0)
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Off:
    """noise: standard deviation of what is added to each reported log-prob. bias: what is added to all of them.
    weights: those that the engine computes with: "true", rounded to "bf16" or to "fp8", or "stale", those of one
    training step before.
    """

    noise: float = 0.0
    bias: float = 0.0
    weights: str = "true"


OFF = {"exact": Off(), "bf16": Off(weights="bf16"), "fp8": Off(weights="fp8"), "stale": Off(weights="stale")}
for exponent in range(6):
    OFF[f"noise_1e_{exponent}"] = Off(noise=10.0**-exponent)
    OFF[f"high_1e_{exponent}"] = Off(bias=10.0**-exponent)
    OFF[f"low_1e_{exponent}"] = Off(bias=-(10.0**-exponent))


def rounded(weight: Tensor, form: str) -> Tensor:
    """This rank's part of a weight after rounding. fp8: e4m3 with a scale per row, as engines scale per output channel;
    vectors, such as biases and norms, stay in bfloat16.
    """
    if form == "bf16" or weight.ndim < 2:
        return weight.to(torch.bfloat16).to(weight.dtype)
    rows = weight.flatten(1)
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return ((rows / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale).view_as(weight)


class Mismatched:
    """What engines of images and of texts share; a class before PolicyRollout or LMRollout."""

    off = Off()
    facts = EngineFacts(exact=False, redraws=False)
    policy: Any
    config: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._before: dict[str, Tensor] = {}  # the weights of the last training step
        self._row: dict[str, float] = {}

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The weights are gathered later, once they are those of the engine."""
        with torch.no_grad():
            yield

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """Validate with the true weights."""
        with self.policy.unsharded():
            super().sample_validation(prompts, each=each)  # type: ignore[misc]

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Draw with the engine's weights; the log-probs are those of the same weights, and off by noise and bias."""
        with self.engine_weights(), self.policy.unsharded():
            # the engine's modules score as they would train: nothing is off but what OFF says
            self.facts = replace(self.facts, exact=True)
            samples: Samples = super().sample(prompts, seed=seed, step=step, each=each)  # type: ignore[misc]
            del self.facts
        if samples.on_policy:
            raise ValueError("actor.ppo_mini_batch_size: with one update per step, log-probs of an engine are not used")
        log_prob = samples.log_prob + self.off.bias
        if self.off.noise:
            log_prob = log_prob + self.off.noise * self.noise(samples, seed, step)
        samples = replace(samples, log_prob=log_prob.where(samples.mask, 0.0))
        self._row = self.measured(samples) if step % EVERY == EVERY - 1 else {}
        return samples

    @contextmanager
    def engine_weights(self) -> Iterator[None]:
        """A context in which the policy's modules have the weights of the engine."""
        parameters, form = self.policy.trained.parameters, self.off.weights
        if form == "true":
            yield
            return
        true = {name: local(value).detach().clone() for name, value in parameters.items()}
        if form == "stale":
            values, self._before = self._before or true, true
        else:
            values = {name: rounded(value, form) for name, value in true.items()}
        self.policy.trained.add_weights("engine", values)
        with self.policy.using("engine"):
            yield

    def noise(self, samples: Samples, seed: int, step: int) -> Tensor:
        """Standard normal numbers [B, A], each row a function of the seed, the step, the prompt and the sample."""
        n, width, rows = self.config.n, samples.mask.shape[1:], []
        for i in samples.index.tolist():
            rows.append(normal(width, fold_in(seed, step, i // n, i % n, "mismatch"), samples.mask.device))
        return torch.stack(rows)

    def replayed(self, samples: Samples, passes: Passes) -> Tensor:
        """Log-probs [B, A] by the policy's modules with their current weights, in passes of the training's shapes."""
        tokens = None if samples.tokens is None else samples.tokens[:, None]
        parts = passes.parts(len(samples.index), tokens)
        device = samples.mask.device
        replays = [self.policy.replay(samples.trace.select(part.to(device))) for part in parts]
        return in_order([replay.log_prob for replay in replays], parts)

    def measured(self, samples: Samples) -> dict[str, float]:
        """Metrics of the ratio before any update, over all ranks."""
        with self.policy.unsharded():
            ratio = (self.replayed(samples, self.training_passes) - samples.log_prob).where(samples.mask, 0.0)
        ratio, mask = all_gather(ratio.cpu()), all_gather(samples.mask.float().cpu()) > 0
        every = {limit: mismatch(ratio, mask, limit) for limit in RANGES}
        row = {f"mismatch/{name}": every[RANGES[0]][name] for name in ("median", "largest")}
        return row | {f"mismatch/beyond_{limit:g}": every[limit]["actions_clipped"] for limit in RANGES}

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """The metrics of the samples, and of the mismatch if it was measured."""
        return super().metrics(samples, reward) | self._row  # type: ignore[misc]


class Images(Mismatched, PolicyRollout):
    """A flow model's engine."""

    @property
    def training_passes(self) -> Passes:
        """Passes with as many rows as those that sampled: a replay has a row per image and stochastic step."""
        return Passes(self.micro_batch_size // (self.config.sde_window_size or self.config.num_inference_steps - 1))


class Texts(Mismatched, LMRollout):
    """A language model's engine. Its log-probs are not those of decoding with a cache, which rounds differently."""

    @property
    def training_passes(self) -> Passes:
        """The trainer's."""
        assert self.passes is not None
        return self.passes


for base in (Images, Texts):
    for name, off in OFF.items():
        globals()[f"{base.__name__}_{name}"] = type(f"{base.__name__}_{name}", (base,), {"off": off})
