"""Passes with a token budget, padded or packed: the step equals that of fixed micro-batches, on every layout."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.training.minibatches import Minibatches
from phalanx.types import Batch, Samples
from tests.helpers.jobs import assert_same_weights, full_weights, update
from tests.helpers.lm import fit, one_step, tiny_lm_config
from tests.helpers.ranks import run_ranks

KEYS = ("algorithm.kl_loss_coef=0.04", "actor.loss_agg_mode=seq-mean-token-mean")
BUDGET = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=80", "rollout.mask_truncated=true")
PADDED, PACKED = "model.use_remove_padding=false", "model.use_remove_padding=true"
GROUPED = "model.use_prefix_grouper=true"


def watched(cfg: Any) -> dict[str, Any]:
    """`one_step`, and the tokens that each forward and backward pass read."""
    passes = []

    def select(self: Any, rows: Any, weight: Any) -> Batch:
        batch = original(self, rows, weight)
        lengths = (batch.trace.starts + batch.trace.lengths).tolist()
        packed = cfg.model.use_remove_padding
        passes.append((sum(lengths) if packed else max(lengths) * len(lengths), int((batch.weight > 0).any(1).sum())))
        return batch

    original = Minibatches.select
    with patch.object(Minibatches, "select", select):
        return one_step(cfg) | {"passes": passes}


@pytest.mark.full
@pytest.mark.parametrize("own", [(PADDED,), (PACKED,), (PACKED, GROUPED)], ids=["padded", "packed", "prompts once"])
def test_the_step_is_that_of_fixed_micro_batches(own: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    mask = "rollout.mask_truncated=true"
    (fixed,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "fixed", *KEYS, mask))
    norm = fixed["row"]["actor/grad_norm"]
    assert norm > 1e-4
    for ranks, shards in ((1, 1), (2, 1), (4, 2)):
        size = f"parallel.fsdp_size={shards}"
        cfg = tiny_lm_config(lm_folder, tmp_path / f"{ranks}_{shards}", *KEYS, *BUDGET, *own, size)
        parts = run_ranks(watched, ranks, cfg)
        # of the reference and of two updates, on all ranks equally many
        assert len({len(part["passes"]) for part in parts}) == 1 and len(parts[0]["passes"]) >= 3
        assert [text for part in parts for text in part["texts"]] == fixed["texts"]
        for part in parts:
            assert max(tokens for tokens, _ in part["passes"]) <= 80
            assert part["row"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert part["row"]["actor/first_ratio_error"] < 1e-5
        assert_same_weights(fixed["weights"], parts[0]["weights"], 1e-3)


def scored_again(cfg: Any) -> list[float]:
    """The first ratio's error of a step, without and with old log-probs computed in the training's passes."""
    from phalanx.distributed.collectives import all_gather
    from phalanx.run.rl import build

    errors = []
    for again in (False, True):
        t = build(cfg)
        t.job.progress.rescoring = again
        with t.collector.rollout.awake():
            samples: Samples = t.collector.rollout.sample(
                t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
            )
        # as after kernels that round more coarsely
        samples.log_prob.mul_(1 + 1e-3)
        samples, _ = t.collector.rescorer(samples)
        errors.append(update(t, samples, all_gather(t.collector.rewards.score()[0]), 0)["actor/first_ratio_error"])
        t.job.checkpointer.wait()
        assert all(value.isfinite().all() for value in full_weights(t.policy.trained.parameters).values())
        torch.distributed.barrier()
    return errors


@pytest.mark.full
@pytest.mark.parametrize("own", [(*BUDGET, PACKED), (PACKED,)], ids=["budget", "packed"])
def test_the_guard_makes_old_log_probs_exact(own: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    """They are then computed in the same passes as the training."""
    for errors in run_ranks(scored_again, 2, tiny_lm_config(lm_folder, tmp_path, *own, "trainer.resume=never")):
        assert errors[0] > 1e-4 and errors[1] == 0


@pytest.mark.full
def test_tokens_are_counted(lm_folder: Path, tmp_path: Path) -> None:
    """Over both ranks, in each phase."""
    cfg = tiny_lm_config(lm_folder, tmp_path, *BUDGET[:2], PACKED, "trainer.total_training_steps=1")
    run_ranks(fit, 2, cfg)
    (row,) = read_metrics(tmp_path / "out" / METRICS_FILE)
    total = row["perf/total_num_tokens"]
    assert total == pytest.approx(16 * (row["prompt/length_mean"] + row["response/length_mean"]))
    assert row["perf/tokens_per_gpu_per_s"] == pytest.approx(total / 2 / row["perf/step_s"])
    drawn = 16 * row["response/length_mean"]
    assert row["perf/rollout_tokens_per_gpu_per_s"] == pytest.approx(drawn / 2 / row["time/rollout"])
    trained = row["perf/update_tokens_per_gpu_per_s"] * 2 * row["time/update"]
    assert 0 < trained <= total * 1.001 and 1 <= row["perf/token_imbalance"] < 2
    assert 0 < row["perf/cpu_mfu"] <= row["perf/cpu_hfu"]
