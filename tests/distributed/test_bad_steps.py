"""NaN and infinity in loss or gradient: the update is skipped on all ranks and counted; too many end the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config.flow import FlowRLConfig
from phalanx.run.rules import load_config
from phalanx.types import Batch, JobError, Policy
from tests.helpers.checks import heard
from tests.helpers.jobs import PROMPTS, base_overrides, fit, full_weights, rows, tiny_config
from tests.helpers.ranks import run_ranks

SETTINGS = ("model.lora_rank=4", "actor.ema.decay=0.9", "trainer.total_training_steps=6", "trainer.save_freq=1")


def spoil(trainer: Any, value: float, steps: tuple[int, ...], *, loss_only: bool = False) -> None:
    """Spoil rank 1's first micro-batch of each update of the given steps; rank 0 must skip these, too."""
    honest = trainer.updater.algorithm.loss

    def loss(policy: Policy, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        per_action, stats = honest(policy, batch)
        if dist.get_rank() == 1 and trainer.job.progress.step in steps:
            per_action = per_action + value if loss_only else per_action * value
        return per_action, stats

    trainer.updater.algorithm.loss = loss


def spoiled(cfg: FlowRLConfig, value: float, steps: tuple[int, ...], loss_only: bool) -> dict[str, Any]:
    from phalanx.run.rl import build

    trainer = build(cfg)
    spoil(trainer, value, steps, loss_only=loss_only)
    error, messages = None, heard("phalanx.run.job")
    try:
        trainer.fit()
    except JobError as raised:
        error = str(raised)
        trainer.job.checkpointer.wait()
    return {
        "error": error,
        "messages": messages,
        "weights": full_weights(trainer.policy.trained.parameters),
        "ema": full_weights(trainer.job.state.ema.values),
        "updates": trainer.job.progress.updates,
    }


@pytest.mark.seldom("nan-False-1", "inf-False-1", "inf-False-2", "inf-True-1", "inf-True-2")
@pytest.mark.full
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize(
    ("value", "loss_only"), [(float("nan"), False), (float("inf"), False), (float("inf"), True)], ids=str
)
def test_a_bad_update_is_skipped_on_all_ranks(
    value: float, loss_only: bool, fsdp: int, sd3_folder: Path, tmp_path: Path
) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *SETTINGS, f"parallel.fsdp_size={fsdp}")
    ranks = run_ranks(spoiled, 2, cfg, value, (2, 3), loss_only)
    assert [r["error"] for r in ranks] == [None, None]
    counts = [row["actor/updates_non_finite"] for row in rows(tmp_path / "out")]
    assert counts == [0, 0, 2, 2, 0, 0]
    warning = "step 3: an update with NaN or infinity in loss or gradient was skipped (actor/updates_non_finite); "
    assert [r["messages"] for r in ranks] == [[warning + "lower optim.lr, or look at the rewards"], []]
    assert [r["updates"] for r in ranks] == [8, 8]
    for r in ranks:
        assert all(t.isfinite().all() for part in ("weights", "ema") for t in r[part].values())
    assert all(torch.equal(ranks[0]["weights"][name], value) for name, value in ranks[1]["weights"].items())


def bad_at_the_end(cfg: FlowRLConfig) -> dict[str, dict[str, Tensor]]:
    """The old policy's weights when the run gives up, and those of the checkpoint that it leaves."""
    from phalanx.run.rl import build

    trainer = build(cfg)
    spoil(trainer, float("nan"), (2, 3))
    found: dict[str, dict[str, Tensor]] = {}
    plain = trainer.job.end_step

    def end_step(step: int, row: dict[str, float]) -> None:
        found[f"after {step}"] = full_weights(trainer.job.state.averages["old"].values)
        plain(step, row)

    trainer.job.end_step = end_step  # type: ignore[method-assign]
    with pytest.raises(JobError):
        trainer.fit()
    trainer.job.checkpointer.wait()
    found["kept"] = full_weights(build(cfg).job.state.averages["old"].values)
    return found


@pytest.mark.full
def test_an_algorithms_own_weights_stay_those_of_the_good_step(sd3_folder: Path, tmp_path: Path) -> None:
    keys = ["algorithm.name=diffusion_nft", "algorithm.old_decay_rate=0.2", "rollout.noise_level=0"]
    keys += ["parallel.fsdp_size=1", "trainer.max_bad_steps=2", "trainer.save_freq=10"]
    base = [o for o in base_overrides(sd3_folder, tmp_path) if not o.startswith("algorithm.")]
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    for found in run_ranks(bad_at_the_end, 2, load_config(FlowRLConfig, None, [*base, *SETTINGS, *keys])):
        name = next(k for k in found["kept"] if "lora_B" in k)
        assert not torch.equal(found["after 1"][name], found["after 2"][name])
        for step in ("after 3", "after 4", "kept"):
            assert all(torch.equal(found[step][k], v) for k, v in found["after 2"].items()), step


@pytest.mark.long
def test_too_many_in_a_row_end_the_run_with_a_checkpoint_from_before(sd3_folder: Path, tmp_path: Path) -> None:
    settings = ("trainer.max_bad_steps=2", "trainer.save_freq=4", "parallel.fsdp_size=2")
    cfg = tiny_config(sd3_folder, tmp_path, *SETTINGS, *settings)
    ranks = run_ranks(spoiled, 2, cfg, float("nan"), (1, 3, 4, 5), False)  # one alone, then three in a row
    message = (
        "no update of the last 2 training steps was finite (NaN or infinity in loss or gradient): the weights are still "
        "those of step 3; lower optim.lr, or look at the rewards"
    )
    assert [r["error"] for r in ranks] == [message, message]
    assert [row["step"] for row in rows(tmp_path / "out")] == [1, 2, 3, 4, 5]
    assert [f.name for f in (tmp_path / "out" / "checkpoints").iterdir()] == ["step_000003"]
    # it is the state after step 3, and resuming from it equals a run without a bad step 4
    mended = run_ranks(fit, 2, cfg)[0]
    assert [row["step"] for row in rows(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    whole = tiny_config(sd3_folder, tmp_path / "whole", *SETTINGS, *settings)
    wanted = run_ranks(spoiled, 2, whole, float("nan"), (1,), False)[0]["weights"]
    assert all(torch.equal(mended[name], value) for name, value in wanted.items())
