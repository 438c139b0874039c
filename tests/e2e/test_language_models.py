"""The quickstart of language models, started as by its users, and mistakes in its configuration."""

from pathlib import Path

import pytest

from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from tests.helpers.checks import mistakes
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks, torchrun
from tests.helpers.tasks import run_task

TASK, CONFIG = "tasks/train_grpo.py", "configs/grpo/quickstart.yaml"
PPO = "configs/ppo/quickstart.yaml"


@pytest.mark.full
def test_the_quickstart_learns(tmp_path: Path) -> None:
    """After its first 20 steps, far more greedy answers to held-out problems are correct."""
    keys = ["trainer.total_training_steps=20", "trainer.save_freq=-1", f"trainer.output_dir={tmp_path}"]
    done = torchrun([TASK, CONFIG, *keys], nproc=2, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / METRICS_FILE)
    greedy = [row["val/test/reward/mean"] for row in rows if "val/test/reward/mean" in row]
    assert greedy[0] < 0.5 and greedy[-1] > greedy[0] + 0.2
    assert all(row["actor/first_ratio_error"] == 0 for row in rows[1:])
    assert (tmp_path / "samples" / "test" / "step_000020" / "index.jsonl").is_file()


@pytest.mark.long
def test_the_quickstart_with_tools_learns(tmp_path: Path) -> None:
    """After its first 12 steps, more answers are correct, because the calculator is called more often."""
    keys = ["trainer.total_training_steps=12", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    keys += ["trainer.val_before_train=false", f"trainer.output_dir={tmp_path}"]
    done = run_task([TASK, "configs/grpo/quickstart_tools.yaml", *keys], nproc=2, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_metrics(tmp_path / METRICS_FILE) if row["step"] > 0]
    for key in ("reward/mean", "tools/call_frequency", "conversation/turns_mean"):
        first, last = (sum(row[key] for row in some) / 3 for some in (rows[:3], rows[-3:]))
        assert last > first + 0.15, key
    assert all(row["actor/first_ratio_error"] == 0 for row in rows)


@pytest.mark.long
def test_the_quickstart_with_images_learns(tmp_path: Path) -> None:
    """After its first 10 steps, far more greedy answers to held-out pictures are correct."""
    keys = ["trainer.total_training_steps=10", "trainer.save_freq=-1", f"trainer.output_dir={tmp_path}"]
    keys += ["optim.lr_scheduler=constant"]  # as in the first steps of a long run
    done = run_task([TASK, "configs/grpo/quickstart_vl.yaml", *keys], nproc=2, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / METRICS_FILE)
    greedy = [row["val/test/reward/mean"] for row in rows if "val/test/reward/mean" in row]
    assert greedy[0] < 0.75 and greedy[-1] > greedy[0] + 0.12
    assert all(row["actor/first_ratio_error"] == 0 for row in rows[1:])


@pytest.mark.full
def test_the_recipe_of_ppo_trains_policy_and_critic(tmp_path: Path) -> None:
    """A few steps at a quarter of its batch size."""
    small = ["data.train_batch_size=32", "actor.ppo_mini_batch_size=32", "actor.ppo_micro_batch_size_per_gpu=16"]
    keys = ["trainer.total_training_steps=4", "trainer.test_freq=-1", "trainer.critic_warmup=2", *small]
    done = run_task([TASK, PPO, *keys, f"trainer.output_dir={tmp_path}"], nproc=2, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_metrics(tmp_path / METRICS_FILE) if row["step"] > 0]
    assert ["actor/grad_norm" in row for row in rows] == [False, False, True, True]
    assert rows[0]["critic/values_mean"] == 0 != rows[-1]["critic/values_mean"]
    assert all(row["critic/updates_non_finite"] == 0 for row in rows)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("algorithm.name=flow_grpo", "algorithm.name: flow_grpo does not train language models; expected such as grpo"),
        ("rollout.correction=none", "rollout.correction: none has nothing to correct with rollout.engine=policy"),
        ("parallel.rollout_unsharded=false", "parallel.rollout_unsharded: false would gather weights for each token"),
        (
            "data.max_response_length=1000",
            "data.max_response_length: 1000 with data.max_prompt_length 64 is 1064 tokens",
        ),
        (
            "critic.model.path=nowhere/at/all",
            "critic.model.path: nowhere/at/all configures a critic, but algorithm.name=grpo",
        ),
        ("data.max_prompt_length=9", "data.train_files: {folder}/prompts.jsonl:1: it has 14 tokens with the chat"),
        ("reward.functions=[{name: ocr}]", "reward.functions[0]: ocr takes images, and this job makes completions"),
    ],
)
def test_a_mistake_is_told(key: str, message: str, lm_folder: Path, tmp_path: Path) -> None:
    from phalanx.run.rl import build

    def built() -> str:
        with pytest.raises(ValueError) as error:
            build(tiny_lm_config(lm_folder, tmp_path, key))
        return str(error.value)

    (said,) = run_ranks(built, 1)
    assert said.startswith(message.format(folder=tmp_path)) and "\n" not in said


@pytest.mark.full
def test_files_are_looked_at_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = torchrun([TASK, CONFIG, f"model.path={tmp_path}"], nproc=2)
    assert (done.returncode, mistakes(done.stderr)) == (
        2,
        f"error: model.path: {tmp_path} has no weights (*.safetensors)\n",
    )
    done = torchrun([TASK, PPO, f"critic.model.path={tmp_path}"], nproc=2)
    assert (done.returncode, mistakes(done.stderr)) == (
        2,
        f"error: critic.model.path: {tmp_path} has no weights (*.safetensors)\n",
    )
