"""Old log-probabilities that the policy computes itself, where those of the rollout cannot be trained on."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config.run import RLConfig
from phalanx.rollout.rescore import nothing, rescore
from phalanx.telemetry.timers import Timers
from phalanx.training.components import TrainedPolicy
from phalanx.training.minibatches import BatchPlan
from phalanx.training.progress import Progress
from phalanx.types import Algorithm, Samples

log = logging.getLogger(__name__)

ERROR = "actor/first_ratio_error"


class Rescorer:
    """Recomputes the old log-probabilities with the policy itself if those of the rollout cannot be trained on.

    This applies to samples of an engine with other kernels or of older weights, and to all samples once `check` has
    found that the policy's replay differs from its own rollout (`progress.rescoring`, kept in checkpoints).
    """

    def __init__(
        self,
        cfg: RLConfig,
        plan: BatchPlan,
        algorithm: Algorithm,
        policy: TrainedPolicy,
        timers: Timers,
        progress: Progress,
        *,
        exact: bool,
        scored_elsewhere: bool = False,
        between: Callable[[], None] = nothing,
    ) -> None:
        """`exact`: see phalanx.types.Rollout. `scored_elsewhere`: ranks of another role compute the old log-probs.
        `between`: called after each forward pass, on all ranks; it may stop the job.
        """
        self.cfg, self.plan, self.algorithm, self.policy = cfg, plan, algorithm, policy
        self.timers, self.progress, self.exact, self.scored_elsewhere = timers, progress, exact, scored_elsewhere
        self.between = between
        # Ratios are not watched where the weights themselves differ, nor where rescoring would change nothing.
        rescores = exact or (plan.by_tokens and cfg.rollout.correction != "none")
        self.watches = rescores and algorithm.levels is None and cfg.rollout.schedule != "one_step_off"

    def __call__(self, samples: Samples) -> tuple[Samples, dict[str, float]]:
        """Return the samples with old log-probabilities [B, A] of the policy, and rollout/... metrics. Samples that
        already have them are returned unchanged.
        """
        # with passes of a token budget, the training's own passes rescore: see `in_passes`
        again = self.progress.rescoring and not self.plan.by_tokens
        if samples.on_policy or (self.exact and samples.exact and not again):
            return samples, {}
        if self.scored_elsewhere or self.algorithm.levels is not None:
            return samples, {}
        config = self.cfg.rollout
        stale = samples.version is not None and not samples.exact
        if self.exact and not stale:  # rollout.correction is only for other engines and for older weights
            config = replace(config, correction="rescore")
        with self.timers("rescore"):
            samples, row = rescore(self.policy, samples, config, self.plan.passes_of(1), self.between)
        return replace(samples, exact=True), row

    @property
    def in_training(self) -> bool:
        """Whether old log-probabilities are computed in the same passes as the training, see `in_passes`."""
        return self.progress.rescoring and self.plan.by_tokens

    @torch.no_grad()
    def in_passes(self, samples: Samples, passes: list[Tensor]) -> Samples:
        """Return the samples with log-probabilities computed in the passes that are about to train them, given as the
        rows [b] of each, so that both have equal shapes.
        """
        start, log_prob = time.perf_counter(), samples.log_prob.clone()
        with self.policy.unsharded():
            for rows in passes:
                at = rows.to(log_prob.device)
                log_prob[at] = self.policy.replay(samples.trace.select(at)).log_prob
                self.between()
        seconds = time.perf_counter() - start
        self.timers.add("rescore", seconds)
        self.timers.add("update", -seconds)  # the surrounding timer has counted these seconds, too
        return replace(samples, log_prob=log_prob)

    def check(self, row: dict[str, float]) -> None:
        """Rescore from now on if the ratios of the policy's replay to its own rollout differ from 1 by more than a
        tenth of the clip range: rounding, and not what was learned, would clip them.
        """
        clip = self.algorithm.clip_range
        if self.progress.rescoring or not self.watches or row.get(ERROR, 0.0) <= clip / 10:
            return
        self.progress.rescoring = True
        if self.policy.trained.world.rank == 0:
            log.warning(
                "%s is %.1e, more than a tenth of the clip range %g of %s=%s: the policy's replay differs from the "
                "rollout, so from here on the policy recomputes the old log-probs (time/rescore)",
                ERROR,
                row[ERROR],
                clip,
                f"{self.cfg.algorithm:name}",
                self.cfg.algorithm.name,
            )
