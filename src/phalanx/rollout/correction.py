"""Rescoring: the policy's own log-probabilities of samples that an engine with other kernels drew."""

from dataclasses import replace

import torch

from phalanx.config.run import RolloutConfig
from phalanx.distributed.collectives import mean_rows, reduce_float
from phalanx.distributed.passes import Passes
from phalanx.functional.correction import correction_weight, log_ratios
from phalanx.functional.token_budget import in_order
from phalanx.types import Policy, Samples


@torch.no_grad()
def rescore(
    policy: Policy, samples: Samples, config: RolloutConfig, passes: Passes
) -> tuple[Samples, dict[str, float]]:
    """Replay all samples with the policy, in passes of the training's shapes. Returns the samples with the policy's
    log-probabilities and the correction's weights (unchanged with rollout.correction=none), and mismatch metrics.
    """
    if config.correction == "none":
        return samples, {}
    tokens = None if samples.tokens is None else samples.tokens[:, None]
    parts, device = passes.parts(len(samples.log_prob), tokens), samples.log_prob.device
    with policy.unsharded():
        replays = [policy.replay(samples.trace.select(part.to(device))) for part in parts]
    log_prob = in_order([replay.log_prob for replay in replays], parts)
    mask = samples.mask
    diff = log_ratios(log_prob, samples.log_prob, mask)
    weight = correction_weight(log_prob, samples.log_prob, mask, kind=config.correction, limit=config.correction_limit)
    real = diff[mask] if mask.any() else diff.new_zeros(1)
    means = {
        "rollout/logprob_abs_diff_mean": real.abs().mean().item(),
        # estimates of KL(engine, policy) on the engine's samples: Schulman's k1 and k3
        "rollout/mismatch_k1": -real.mean().item(),
        "rollout/mismatch_k3": (torch.expm1(real) - real).mean().item(),
        "rollout/correction_weight_mean": (weight[mask] if mask.any() else weight.new_ones(1)).mean().item(),
    }
    row = mean_rows([means])
    row["rollout/logprob_abs_diff_max"] = reduce_float(real.abs().max().item(), "max")
    return replace(samples, log_prob=log_prob, trace=samples.trace.rescored(replays, parts), weight=weight), row
