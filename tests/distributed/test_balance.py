"""trainer.balance_batch: ranks exchange samples to balance the work, and the training step does not change."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from phalanx.config.lm import LMRLConfig
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.training.minibatches import Minibatches
from phalanx.training.update import Updater
from tests.helpers.jobs import first_step, full_weights, rows
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.roles import learned, run_roles

# With this epsilon, Adam's steps are proportional to the gradients within 1 %, so weights compare gradients, not signs.
LINEAR = ("optim.eps=1", "optim.lr=1", "optim.grad_clip=0")
PACKED = "model.use_remove_padding=true"
BUDGET = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=80")
BLOCKS = ("model.block_size=4", "rollout.threshold=0.02", BUDGET[0], "actor.ppo_max_token_len_per_gpu=160")
PPO = ("algorithm.name=ppo", "algorithm.kl_reward_coef=0.05", *(f"critic.{key}" for key in LINEAR))
KL = ("algorithm.kl_loss_coef=0.04", "actor.ppo_epochs=2")
KINDS = {
    "budget": (*BUDGET, *KL, "rollout.mask_truncated=true"),
    "packed": (PACKED, *KL),
    "packed_budget": (PACKED, *BUDGET, *KL, "actor.loss_agg_mode=seq-mean-token-mean"),
    "truncated": (PACKED, *BUDGET, "rollout.top_k=9"),
    "ppo": (PACKED, *BUDGET, *PPO),
}


def steps(cfgs: dict[str, LMRLConfig]) -> dict[str, dict[str, Any]]:
    """A step of each job: its results, and the numbers and costs of the samples that this rank trained."""
    from phalanx.run.rl import build

    results, original = {}, Updater.batches
    for name, cfg in cfgs.items():
        trained: dict[str, Any] = {}

        def batches(self: Updater, *args: Any, trained: dict[str, Any] = trained) -> Minibatches:
            batch = original(self, *args)
            kept = torch.zeros(len(batch.samples.index), dtype=torch.bool)
            kept[batch.units.local.flatten()] = batch.units.kept
            costs = torch.tensor(self.policy.sample_flops(batch.samples))  # type: ignore[attr-defined]
            models = [self.policy] if self.critic is None else [self.policy, self.critic.critic]
            trained["parameters"] = [model.trained.parameters for model in models]
            trained["before"] = [full_weights(parameters) for parameters in trained["parameters"]]
            trained |= {"index": batch.samples.index, "cost": float(costs[kept].sum())}
            trained["drawn"] = args[-1].rows[-1].get("perf/token_imbalance_drawn")
            return batch

        with patch.object(Updater, "batches", batches):
            _, step = first_step(build, cfg)
        after = [full_weights(parameters) for parameters in trained.pop("parameters")]
        results[name] = {"row": step["row"], "reward": step["reward"], "after": after} | trained
    return results


def both(model: Path, folder: Path, kinds: dict[str, tuple[str, ...]], *keys: str) -> dict[str, LMRLConfig]:
    """Each kind of job with and without the exchange."""
    cfgs = {}
    for name, own in kinds.items():
        for on in ("true", "false"):
            options = (*LINEAR, *own, *keys, f"trainer.balance_batch={on}")
            cfgs[f"{name}_{on}"] = tiny_lm_config(model, folder / f"{name}_{on}", *options)
    return cfgs


def assert_same_change(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The weights of policy and critic changed equally, up to 1e-4 of each one's largest change."""
    for before, after, here in zip(one["before"], one["after"], other["after"], strict=True):
        for name, value in before.items():
            change = after[name] - value
            torch.testing.assert_close(here[name] - value, change, rtol=0, atol=1e-4 * float(change.abs().max()) + 1e-8)
        assert any(not after[name].equal(value) for name, value in before.items())


def assert_balanced(parts: list[dict[str, Any]], kinds: dict[str, tuple[str, ...]]) -> None:
    """The gradients equal those without an exchange, and all samples are trained, with costs more balanced."""
    for name in kinds:
        on, off = ([part[f"{name}_{which}"] for part in parts] for which in ("true", "false"))
        assert torch.cat([rank["index"] for rank in off]).tolist() == list(range(16))
        index = torch.cat([rank["index"] for rank in on])
        assert index.tolist() != list(range(16)) and sorted(index.tolist()) == list(range(16))
        even, uneven = ([rank["cost"] for rank in ranks] for ranks in (on, off))
        assert sum(even) == pytest.approx(sum(uneven)) and max(even) < max(uneven)
        assert {rank["drawn"] for rank in off} == {None} and on[0]["drawn"] > 1
        assert torch.equal(on[0]["reward"], off[0]["reward"])
        assert on[0]["row"]["actor/grad_norm"] == pytest.approx(off[0]["row"]["actor/grad_norm"], rel=1e-5)
        assert on[0]["row"]["actor/grad_norm"] > 1e-4
        for rank in on:
            assert rank["row"] == on[0]["row"] and rank["row"].keys() == off[0]["row"].keys()
            assert rank["row"]["actor/first_ratio_error"] < 1e-5
            assert_same_change(off[0], rank)


@pytest.mark.full
@pytest.mark.seldom("4")
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_step_is_that_without_an_exchange(ranks: int, lm_folder: Path, tmp_path: Path) -> None:
    """Replicas, and two replicas of two shards; padded, packed and truncated samples, and a critic."""
    cfgs = both(lm_folder, tmp_path, KINDS, f"parallel.fsdp_size={ranks // 2}")
    assert_balanced(run_ranks(steps, ranks, cfgs), KINDS)


@pytest.mark.full
def test_a_step_of_blocks(blocks_folder: Path, tmp_path: Path) -> None:
    kinds = {"blocks": (*BLOCKS, *KL), "elbo": (*BLOCKS, "actor.log_prob_estimate=elbo")}
    assert_balanced(run_ranks(steps, 2, both(blocks_folder, tmp_path, kinds)), kinds)


@pytest.mark.full
def test_values_are_of_the_samples_that_are_trained(lm_folder: Path, tmp_path: Path) -> None:
    """In the second step, since all values of the initial critic are 0."""
    runs = []
    for on in ("true", "false"):
        cfg = tiny_lm_config(lm_folder, tmp_path / on, *LINEAR, *KINDS["ppo"], f"trainer.balance_batch={on}")
        run_ranks(fit, 2, cfg)
        runs.append(rows(tmp_path / on / "out"))
    one, other = (run[-1] for run in runs)
    assert one["step"] == 2 and abs(one["critic/values_mean"]) > 1e-3
    for key in ("critic/values_mean", "critic/explained_variance", "critic/grad_norm", "actor/grad_norm"):
        assert one[key] == pytest.approx(other[key], rel=1e-3), key


@pytest.mark.long
def test_a_resumed_run_is_the_run(lm_folder: Path, tmp_path: Path) -> None:
    """Bit for bit; and a run without the exchange can be resumed with it."""
    keys = (*KINDS["packed_budget"], "trainer.save_freq=2")

    def job(name: str, steps: int, *own: str) -> LMRLConfig:
        return tiny_lm_config(lm_folder, tmp_path / name, *keys, f"trainer.total_training_steps={steps}", *own)

    whole, wanted = run_ranks(fit, 2, job("whole", 4))[0], rows(tmp_path / "whole" / "out")
    shutil.rmtree(tmp_path / "whole" / "out" / "checkpoints" / "step_000004")
    again = run_ranks(fit, 2, job("whole", 4))[0]
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert rows(tmp_path / "whole" / "out") == wanted
    run_ranks(fit, 2, job("off", 2, "trainer.balance_batch=false"))
    run_ranks(fit, 2, job("off", 4))
    exchanging = read_metrics(tmp_path / "whole" / "out" / METRICS_FILE)
    for row, expected in zip(read_metrics(tmp_path / "off" / "out" / METRICS_FILE), exchanging, strict=True):
        assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-2)
        exchanged = row["step"] > 2
        assert ("perf/token_imbalance_drawn" in row) == exchanged
        assert row["perf/token_imbalance"] == (
            pytest.approx(expected["perf/token_imbalance"], rel=1e-2)
            if exchanged
            else pytest.approx(expected["perf/token_imbalance_drawn"])
        )
        assert 1 <= expected["perf/token_imbalance"] < expected["perf/token_imbalance_drawn"] < 2


def language(cfg: Any) -> Any:
    from phalanx.run.rl import build

    return build(cfg)


@pytest.mark.long
def test_the_actors_ranks_exchange(lm_folder: Path, tmp_path: Path) -> None:
    """The samples of rollout ranks with all their fields, bit-identical to those of colocated ranks."""
    keys = (*KINDS["packed_budget"], "parallel.fsdp_size=1")
    apart = (*keys, "placement={rollout: 0-1, actor: 2-3}")
    once = (*apart, "actor.ppo_epochs=1")
    together = run_roles(language, 2, tiny_lm_config(lm_folder, tmp_path / "together", *keys))
    alike = run_roles(language, 4, tiny_lm_config(lm_folder, tmp_path / "apart", *apart))
    assert learned(tmp_path / "apart") == learned(tmp_path / "together")
    assert all(torch.equal(value, alike[name]) for name, value in together.items())
    for name, key in (("pipelined", "rollout.parts=2"), ("one_step_off", "rollout.correction=token_tis")):
        runs = []
        for on in ("true", "false"):
            options = (*once, f"rollout.schedule={name}", key, f"trainer.balance_batch={on}")
            run_roles(language, 4, tiny_lm_config(lm_folder, tmp_path / name / on, *options))
            runs.append(learned(tmp_path / name / on))
        for row, expected in zip(*runs, strict=True):
            assert row["reward/mean"] == expected["reward/mean"]
            assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)
        whole = read_metrics(tmp_path / name / "true" / "out" / METRICS_FILE)
        assert any(row["perf/token_imbalance"] < row["perf/token_imbalance_drawn"] for row in whole)
