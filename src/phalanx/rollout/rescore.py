"""Rescoring: the policy's own log-probabilities of samples that an engine with other kernels drew."""

from collections.abc import Callable
from dataclasses import replace

import torch

from phalanx.config.run import RolloutConfig
from phalanx.distributed.passes import Passes
from phalanx.functional.aggregation import Sums
from phalanx.functional.correction import correction_weight, log_ratios
from phalanx.functional.token_budget import in_order
from phalanx.telemetry.step_metrics import over_ranks
from phalanx.types import Metric, Metrics, Policy, Replay, Samples


def nothing() -> None:
    """Do nothing between two passes."""


@torch.no_grad()
def rescore(
    policy: Policy, samples: Samples, config: RolloutConfig, passes: Passes, between: Callable[[], None] = nothing
) -> tuple[Samples, dict[str, float]]:
    """Replay all samples with the policy, in passes of the training's shapes. Returns the samples with the policy's
    log-probabilities and the correction's weights (unchanged with rollout.correction=none), and mismatch metrics.
    between: called after each pass.
    """
    if config.correction == "none":
        return samples, {}
    tokens = None if samples.tokens is None else samples.tokens[:, None]
    parts, device = passes.parts(len(samples.log_prob), tokens), samples.log_prob.device
    replays: list[Replay] = []
    with policy.unsharded():
        for part in parts:
            replays.append(policy.replay(samples.trace.select(part.to(device))))
            between()
    log_prob = in_order([replay.log_prob for replay in replays], parts)
    mask = samples.mask
    diff = log_ratios(log_prob, samples.log_prob, mask)
    weight = correction_weight(log_prob, samples.log_prob, mask, kind=config.correction, limit=config.correction_limit)
    sums = Sums()
    metrics: Metrics = {
        "logprob_abs_diff_mean": diff.abs(),
        "logprob_abs_diff_max": Metric(diff.abs(), "max"),
        # estimates of KL(engine, policy) on the engine's samples: Schulman's k1 and k3
        "mismatch_k1": -diff,
        "mismatch_k3": torch.expm1(diff) - diff,
        "correction_weight_mean": weight,
    }
    sums.add(metrics, mask)
    row = {f"rollout/{name}": value for name, value in over_ranks(sums).values().items()}
    return replace(samples, log_prob=log_prob, trace=samples.trace.rescored(replays, parts), weight=weight), row
