"""The whole loop with a policy without images, whose samples have different numbers of actions."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.my_kind import FILE

from phalanx.config.ranges import LOSS_AGG_MODES
from phalanx.config.run import RLConfig
from phalanx.config.tasks import EvaluateConfig, ExportConfig, GenerateConfig
from phalanx.tools.evaluate import Evaluation
from phalanx.tools.export import Export
from phalanx.tools.generate import Generation
from phalanx.tools.plan import plan_job
from tests.helpers.jobs import full_weights, update
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.toy import Critic, build, small, word_config


def one_step(cfg: RLConfig) -> dict[str, Any]:
    t = build(cfg)
    samples, _ = t.collector.sample(0)
    samples, reward, scores = t.collector.reward(samples, 0)
    row = update(t, samples, reward, 0)
    return {
        "row": row | scores,
        "mask": samples.mask,
        "letters": samples.trace.letters,
        "reward": reward,
        "weights": full_weights(t.policy.trained.parameters),
    }


@pytest.mark.quick("seq-mean-token-sum-norm")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_ragged_actions_have_one_gradient_in_every_layout(mode: str, tmp_path: Path) -> None:
    cfg = word_config(tmp_path, f"actor.loss_agg_mode={mode}", "parallel.fsdp_size=1")
    (alone,) = run_ranks(one_step, 1, cfg)
    lengths = alone["mask"].sum(1)
    assert len(set(lengths.tolist())) > 2, "words of unequal lengths are what this is about"
    for ranks, width in ((2, 1), (2, 2), (4, 2)):
        sharded = word_config(tmp_path, f"actor.loss_agg_mode={mode}", f"parallel.fsdp_size={width}")
        parts = run_ranks(one_step, ranks, sharded)
        for name in ("mask", "letters"):
            assert torch.equal(torch.cat([part[name] for part in parts]), alone[name])
        assert torch.equal(parts[0]["reward"], alone["reward"])
        for key in ("actor/grad_norm", "reward/mean"):
            assert parts[0]["row"][key] == pytest.approx(alone["row"][key], rel=1e-5)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(parts[0]["weights"][name], value, atol=2e-4, rtol=1e-4)


def test_modes_differ_where_lengths_do(tmp_path: Path) -> None:
    norms = []
    for mode in LOSS_AGG_MODES:
        cfg = word_config(tmp_path, f"actor.loss_agg_mode={mode}", "actor.loss_scale_factor=50")
        norms.append(run_ranks(one_step, 1, cfg)[0]["row"]["actor/grad_norm"])
    assert len({round(norm, 6) for norm in norms}) == 4


def test_padding_teaches_nothing(tmp_path: Path) -> None:
    """The gradient depends only on the letters: another number after the full stop changes nothing."""
    (plain,) = run_ranks(one_step, 1, word_config(tmp_path))
    (changed,) = run_ranks(scribbled, 1, word_config(tmp_path))
    assert changed["row"]["actor/grad_norm"] == pytest.approx(plain["row"]["actor/grad_norm"], rel=1e-6)


def scribbled(cfg: RLConfig) -> dict[str, Any]:
    t = build(cfg)
    samples, _ = t.collector.sample(0)
    samples, reward, _ = t.collector.reward(samples, 0)
    samples.trace.letters[:, samples.trace.prompt :][~samples.mask] = 0
    return {"row": update(t, samples, reward, 0)}


def learned(cfg: RLConfig) -> list[float]:
    t = build(cfg)
    rewards: list[float] = []
    for step in range(30):
        samples, reward, _ = t.collector.reward(t.collector.sample(step)[0], step)
        rewards.append(float(reward.mean()))
        update(t, samples, reward, step)
    return rewards


@pytest.mark.full
def test_the_loop_learns_to_write(tmp_path: Path) -> None:
    cfg = word_config(tmp_path, "rollout.n=16", "actor.ppo_micro_batch_size_per_gpu=8")
    (rewards,) = run_ranks(learned, 1, cfg)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards


def test_a_run_writes_its_texts(tmp_path: Path) -> None:
    cfg = word_config(
        tmp_path, "trainer.test_freq=1", f"data.val_files=[{tmp_path}/held_out.txt]", "trainer.logger=[tensorboard]"
    )
    run_ranks(fit, 2, cfg)
    folder = tmp_path / "out" / "samples" / "held_out" / "step_000002"
    lines = (folder / "index.jsonl").read_text().splitlines()
    assert len(lines) == 3 and all('"text": ' in line for line in lines)
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert "perf/words_per_gpu_per_s" in rows[-1] and "val/held_out/reward/mean" in rows[-1]


def fit(cfg: RLConfig) -> None:
    build(cfg).fit()


def evaluated(cfg: EvaluateConfig) -> None:
    Evaluation(cfg).run()


def test_a_registered_kind_is_evaluated_exported_and_planned(tmp_path: Path) -> None:
    out, val = str(tmp_path / "out"), f"data.val_files=[{tmp_path}/held_out.txt]"
    cfg = word_config(tmp_path, val, "trainer.save_freq=2", "trainer.val_before_train=false", "rollout.val.n=2")
    run_ranks(fit, 1, cfg)
    plan = plan_job(cfg, {"nnodes": "2", "nproc": "2"})
    assert "4 prompts x 4 words = 16 words" in plan and "2 words of 7 letters" in plan
    Export(ExportConfig(checkpoint=out, output_dir=str(tmp_path / "export"))).run()
    assert {file.name for file in (tmp_path / "export").iterdir()} == {
        "README.md",
        "curves.png",
        FILE,
        "model.safetensors",
    }
    scores = tmp_path / "scores"
    trust = {"trust_run": True, "checkpoint": out}
    run_ranks(evaluated, 2, EvaluateConfig(**trust, baseline=str(tmp_path), output_dir=str(scores)))
    rows = [json.loads(line) for line in (scores / "records.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 2 and all(set(row["text"]) <= set("abcdefgh.") for row in rows)
    assert json.loads((scores / "evaluation.json").read_text())["baseline"] == str(tmp_path)
    with pytest.raises(ValueError, match="is of another kind of model; use its own task"):
        Generation(GenerateConfig(**trust, prompts=["ab"]))


def with_critic(cfg: RLConfig, stop: int) -> dict[str, Any]:
    """Train a policy and, beside it, a critic on the rewards with a separate optimizer; save after each step."""
    from dataclasses import replace

    from phalanx.run.job import Job
    from phalanx.training.optim import TrainState

    t = build(cfg)
    model = small(Critic, t.world, cfg, 5)
    critic = TrainState(model, replace(cfg.optim, lr=3e-3), 100, averages=("slow",))
    # a job with a second model, made anew of the first one's parts
    first = t.job
    t.job = Job(
        cfg,
        t.world,
        first.policies,
        first.sampling,
        first.timers,
        first.total_steps,
        batch="",
        exports=None,
        beside={"critic": critic},
    )
    t.updater.rescorer.progress = t.job.progress
    collected, plan, end_step = t.collector.reward, t.updater.plan, t.job.end_step

    def reward(samples: Any, step: int, chunk: int = 0) -> Any:
        """The rewards, from which the critic learns first."""
        samples, rewards, row = collected(samples, step, chunk)
        own = rewards[t.world.rank * plan.per_rank :][: plan.per_rank]
        loss = (critic.model.module(samples.trace.letters).mean(1) - own).square().sum() / plan.samples
        critic.model.sharded.set_last_micro_batch(True)
        loss.backward()
        critic.step(loss.detach())
        critic.averages["slow"].update(0.5)
        return samples, rewards, row

    def stop_after(step: int, row: dict[str, float]) -> None:
        end_step(step, row)
        if step == stop:
            t.job.checkpointer.wait()
            raise KeyboardInterrupt

    t.collector.reward, t.job.end_step = reward, stop_after
    with contextlib.suppress(KeyboardInterrupt):
        t.fit()
    found = {
        "policy": t.policy.trained.parameters,
        "critic": critic.model.parameters,
        "slow": critic.averages["slow"].values if t.world.shard_size == 1 else {},
    }
    weights = {f"{who} {name}": value for who, some in found.items() for name, value in full_weights(some).items()}
    return weights | {"updates": torch.tensor([t.job.state.updates, critic.updates])}


@pytest.mark.quick("1")
@pytest.mark.parametrize("width", [1, 2])
def test_two_models_are_saved_and_resumed_together(width: int, tmp_path: Path) -> None:
    keys = ["trainer.total_training_steps=4", "trainer.save_freq=1", f"parallel.fsdp_size={width}"]
    whole = run_ranks(with_critic, 2, word_config(tmp_path / "whole", *keys), -1)[0]
    cfg = word_config(tmp_path / "parts", *keys)
    run_ranks(with_critic, 2, cfg, 2)
    resumed = run_ranks(with_critic, 2, cfg, -1)[0]
    assert whole["updates"].tolist() == [8, 4]
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_a_checkpoint_without_the_critic_is_refused(tmp_path: Path) -> None:
    keys = ["trainer.total_training_steps=1", "trainer.save_freq=1"]
    run_ranks(fit, 1, word_config(tmp_path, *keys))
    with pytest.raises(RankError, match="holds critic: trained tensors None, this run has"):
        run_ranks(with_critic, 1, word_config(tmp_path, *keys), -1)
