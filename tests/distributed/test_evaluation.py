"""phalanx evaluate: equal records on any number of ranks, in one run or several, from folders and from checkpoints."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.tasks import EvaluateConfig
from phalanx.exit import Stopped
from phalanx.rewards.client import RewardClient
from phalanx.rewards.judge_model import RewardModel
from phalanx.run.folder_lock import FolderLock
from phalanx.run.rules import load_config
from phalanx.zoo.rewards.judge.unified_reward import UnifiedReward
from tests.distributed.test_conversations import ENVIRONMENTS
from tests.helpers.jobs import PROMPTS, fit, rows, tiny_config
from tests.helpers.judged import settings, shown
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.tiny_vlm import grades, picture

# Scores evenness, or the mean of an image. At the third call it kills its rank if the file `fatal` exists, requests a
# stop like `phalanx stop` if `stop` exists, and then fails if `wrong` exists as well.
REWARD = """
import json, os, signal, time
from pathlib import Path

from phalanx.run import watchdog

calls = 0

def evenness(completions, prompts, metadata):
    global calls
    calls += 1
    if calls == 3 and (Path(__file__).parent / "fatal").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if calls == 3 and (Path(__file__).parent / "stop").exists():
        folder = Path(__file__).parent / "stopped"
        token = json.loads((folder / "running.json").read_text())["token"]
        (folder / "stop.json").write_text(json.dumps({"token": token}))
        while watchdog.current.stop is None:
            time.sleep(0.01)
        if (Path(__file__).parent / "wrong").exists():
            raise KeyError("no such thing")
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]

def brightness(images, prompts, metadata):
    return images.mean(dim=(1, 2, 3))
"""


def evaluate(words: list[str]) -> None:
    from phalanx.tools.evaluate import Evaluation

    Evaluation(load_config(EvaluateConfig, None, words)).run()


def lm_words(model: Path, folder: Path, name: str, *words: str) -> list[str]:
    """An evaluation of five prompts, in chunks of two, in folder/name."""
    (folder / "reward.py").write_text(REWARD)
    lines = []
    for i in range(5):
        lines.append(json.dumps({"prompt": f"Ann has {i} books" + " and more" * i, "level": i % 2}) + "\n")
    (folder / "held_out.jsonl").write_text("".join(lines))
    return [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.val_files=[{folder / 'held_out.jsonl'}]",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"reward.functions=[{{path: '{folder / 'reward.py'}:evenness'}}]",
        "rollout.val.temperature=1",
        "n=3",
        "prompts_per_chunk=2",
        "group_by=level",
        f"output_dir={folder / name}",
        *words,
    ]


def written(folder: Path) -> tuple[str, dict[str, Any]]:
    """The records and the statistics of an evaluation."""
    result = json.loads((folder / "evaluation.json").read_text())
    return (folder / "records.jsonl").read_text(), result["sets"]["held_out"]


@pytest.mark.seldom("2x2")
@pytest.mark.parametrize(("world", "fsdp"), [(2, 1), (4, 2)], ids=["2", "2x2"])
def test_ranks_share_the_work(world: int, fsdp: int, lm_folder: Path, tmp_path: Path) -> None:
    run_ranks(evaluate, 1, lm_words(lm_folder, tmp_path, "one"))
    run_ranks(evaluate, world, lm_words(lm_folder, tmp_path, "more", f"parallel.fsdp_size={fsdp}"), local_world=2)
    assert written(tmp_path / "one") == written(tmp_path / "more")
    records, part = written(tmp_path / "one")
    places = [(row["index"], row["sample"]) for row in map(json.loads, records.splitlines())]
    assert places == [(i, j) for i in range(5) for j in range(3)]
    assert len({json.loads(line)["text"] for line in records.splitlines()}) > 10
    assert (part["prompts"], part["n"], part["groups"]["0"]["prompts"]) == (5, 3, 3)
    mean = sum(json.loads(line)["reward"] for line in records.splitlines()) / 15
    assert part["scores"]["reward"]["mean"]["value"] == pytest.approx(mean, abs=1e-12)


def test_a_killed_evaluation_goes_on(lm_folder: Path, tmp_path: Path) -> None:
    words = lm_words(lm_folder, tmp_path, "whole")
    run_ranks(evaluate, 1, words)
    again = lm_words(lm_folder, tmp_path, "killed")
    (tmp_path / "fatal").touch()
    with pytest.raises(RankError):
        run_ranks(evaluate, 1, again)
    (tmp_path / "fatal").unlink()
    file = tmp_path / "killed" / "records.jsonl"
    before = file.read_text()
    assert 0 < len(before.splitlines()) < 15
    assert not (tmp_path / "killed" / "evaluation.json").exists()
    file.write_text(before + written(tmp_path / "whole")[0].splitlines()[6] + '\n{"set": "held_o')  # a torn chunk
    run_ranks(evaluate, 1, again)
    assert written(tmp_path / "killed") == written(tmp_path / "whole")
    with pytest.raises(RankError, match=re.escape("other arguments: rollout.val.seed was 1234 and is 7; give another")):
        run_ranks(evaluate, 1, [*again, "seed=7"])
    # other statistics of the same records need no samples
    (tmp_path / "fatal").touch()
    run_ranks(evaluate, 1, [*again, "k=[3]", "threshold=0.5", "group_by=null"])
    _, part = written(tmp_path / "killed")
    assert list(part["scores"]["reward"]) == ["mean", "avg@3", "pass@3", "best@3"]


def evaluate_until_it_is_stopped(words: list[str], message: str) -> None:
    from phalanx.run import folder_lock

    folder_lock.BEAT_S = 0.05
    with pytest.raises(Stopped, match=message):
        evaluate(words)
    folder_lock.release()


@pytest.mark.full
def test_a_stopped_evaluation_goes_on_and_two_at_once_are_refused(lm_folder: Path, tmp_path: Path) -> None:
    words, folder = lm_words(lm_folder, tmp_path, "stopped"), tmp_path / "stopped"
    (tmp_path / "stop").touch()
    line = f"^stopped by phalanx stop after [12] of 3 chunks of prompts; the same command resumes from {re.escape(str(folder))}$"
    run_ranks(evaluate_until_it_is_stopped, 1, words, line)
    assert (folder / "records.jsonl").read_text() and not (folder / "evaluation.json").exists()
    assert not (folder / "running.json").exists() and not (folder / "stop.json").exists()
    end = json.loads((folder / "ended.json").read_text())
    assert end["ended"] == "stopped" and re.match(line, end["text"])
    other = FolderLock(folder, lambda _: None, lambda: None)
    with pytest.raises(RankError, match=f"output_dir: {re.escape(str(folder))} is in use by another job, process "):
        run_ranks(evaluate, 1, words)
    other.release()
    # a failure between the request and the stop
    (tmp_path / "wrong").touch()
    (folder / "records.jsonl").unlink()
    with pytest.raises(RankError, match="no such thing"):
        run_ranks(evaluate, 1, words)
    end = json.loads((folder / "ended.json").read_text())
    assert end["ended"] == "failed" and "raised KeyError: 'no such thing'" in end["text"]
    (tmp_path / "stop").unlink()
    run_ranks(evaluate, 1, words)
    assert json.loads((folder / "ended.json").read_text())["ended"] == "finished"
    run_ranks(evaluate, 1, lm_words(lm_folder, tmp_path, "whole"))
    assert written(folder) == written(tmp_path / "whole")


@pytest.mark.full
def test_a_checkpoint_scores_as_in_its_validation_and_beats_no_baseline(sd3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "held_out.txt").write_text("\n".join(PROMPTS[:3]) + "\n")
    cfg = tiny_config(
        sd3_folder,
        tmp_path,
        *("model.lora_rank=4", "actor.ema.decay=0.5", "optim.lr=1e-2"),
        f"reward.functions=[{{path: '{tmp_path / 'reward.py'}:brightness'}}]",
        f"data.val_files=[{tmp_path / 'held_out.txt'}]",
        *("rollout.micro_batch_size_per_gpu=4", "rollout.val.num_inference_steps=3", "rollout.val.n=2"),
        *("trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=1"),
    )
    run_ranks(fit, 1, cfg)
    validated = [row for row in rows(tmp_path / "out") if "val/held_out/reward/mean" in row]
    words = [f"checkpoint={tmp_path / 'out'}", f"baseline={sd3_folder}", "trust_run=true"]
    run_ranks(evaluate, 1, words)
    _, part = written(tmp_path / "out" / "evaluation" / "step_000001")
    after = part["scores"]["reward"]["mean"]["value"]
    assert after == pytest.approx(validated[-1]["val/held_out/reward/mean"], abs=1e-7)
    before, difference = part["baseline"]["scores"]["reward"], part["baseline"]["differences"]["reward"]["mean"]
    assert before["mean"]["value"] == pytest.approx(validated[0]["val/held_out/reward/mean"], abs=1e-7)
    assert difference["value"] == pytest.approx(after - before["mean"]["value"], abs=1e-12) != 0
    assert sum(part["baseline"]["better_equal_worse"]["reward"]["samples"]) == 6
    # an earlier evaluation, with other seeds, in place of a model
    earlier = tmp_path / "out" / "evaluation" / "step_000001" / "baseline"
    other = [
        f"checkpoint={tmp_path / 'out'}",
        f"baseline={earlier}",
        f"output_dir={tmp_path / 'again'}",
        "trust_run=true",
    ]
    with pytest.raises(RankError, match=r"is not comparable: rollout\.val\.seed was 1234 and is 7; expected"):
        run_ranks(evaluate, 1, [*other, "seed=7"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["flow", "blocks", "conversations"])
def test_other_models_on_two_ranks(
    kind: str, sd3_folder: Path, blocks_folder: Path, lm_folder: Path, tmp_path: Path
) -> None:
    small = ("rollout.height=32", "rollout.width=32", "rollout.val.num_inference_steps=2")
    bright = f"reward.functions=[{{path: '{tmp_path / 'reward.py'}:brightness'}}]"
    folder, words = {
        "flow": (sd3_folder, (*small, bright)),
        "blocks": (blocks_folder, ("model.block_size=4",)),
        "conversations": (
            lm_folder,
            (f"environment.path='{tmp_path / 'talk.py'}:Talk'", "data.max_response_length=40"),
        ),
    }[kind]
    (tmp_path / "talk.py").write_text(ENVIRONMENTS)
    for world in (1, 2):
        given = lm_words(folder, tmp_path, str(world), *words, "parallel.fsdp_size=1")
        if kind == "flow":
            of_texts = ("rollout.val.temperature", "data.max_response_length")
            given = [word for word in given if not word.startswith(of_texts)]
        run_ranks(evaluate, world, given)
    assert written(tmp_path / "1") == written(tmp_path / "2")
    records = [json.loads(line) for line in written(tmp_path / "1")[0].splitlines()]
    assert len(records) == 15
    if kind == "flow":
        images = sorted(path.name for path in (tmp_path / "2" / "images" / "held_out").iterdir())
        assert images == [f"{i:05d}_{j}.png" for i in range(5) for j in range(3)]
    if kind == "conversations":
        assert any(len(row["messages"]) > 2 for row in records)


def evaluate_shown(words: list[str], last: int = 100) -> int:
    """Evaluate with the sampled images replaced, for the rewards, by images on which the judge was trained; the rank is
    killed after sample `last`. Returns how often a reward model was loaded.
    """
    submit, load_model = RewardClient.submit, RewardModel.__init__
    shows, loads = [], []

    def count(self: RewardModel, *args: Any, **kwargs: Any) -> None:
        loads.append(self)
        load_model(self, *args, **kwargs)

    RewardModel.__init__ = count  # type: ignore[method-assign, assignment]

    def show(self: RewardClient, images: torch.Tensor, prompts: list[Any]) -> None:
        shows.append(images)
        if len(shows) > last:
            os.kill(os.getpid(), signal.SIGKILL)
        submit(self, torch.stack([picture(*shown(image)) for image in images]), prompts)

    RewardClient.submit = show  # type: ignore[method-assign, assignment]
    evaluate(words)
    return len(loads)


def judged_words(model: Path, judge: Path, folder: Path, name: str, *words: str) -> list[str]:
    """An evaluation of a flow model by a judge."""
    given = lm_words(
        model, folder, name, *settings(judge, "{name: unified_reward}"), "reward.model.engine=transformers"
    )
    of_texts = ("rollout.val.temperature", "data.max_response_length")
    given = [word for word in given if not word.startswith(of_texts)]
    return [*given, "rollout.height=32", "rollout.width=32", "rollout.val.num_inference_steps=2", "n=2", *words]


@pytest.mark.long
def test_a_judge_scores_alike_on_any_ranks(judge_model: Path, sd3_folder: Path, tmp_path: Path) -> None:
    """The reward model is on each rank, or on one of two ranks, where it answers while the other one samples."""
    run_ranks(evaluate_shown, 1, judged_words(sd3_folder, judge_model, tmp_path, "one"))
    on_one = judged_words(sd3_folder, judge_model, tmp_path, "two", "reward.model.placement='ranks 1-1'")
    run_ranks(evaluate_shown, 2, on_one)
    assert written(tmp_path / "one") == written(tmp_path / "two")
    records = [json.loads(line) for line in written(tmp_path / "one")[0].splitlines()]
    for row in records:
        (lit,) = [lit for lit in range(5) if row["judged"] == {"unified_reward": [grades(1 + lit)]}]
        assert row["reward"] == float(torch.tensor((2 * lit + 2) / 12))
    assert len({row["reward"] for row in records}) > 2


@pytest.mark.long
def test_a_judged_evaluation_goes_on_and_has_a_baseline(judge_model: Path, sd3_folder: Path, tmp_path: Path) -> None:
    """An evaluation is interrupted in its second chunk and resumed on more ranks with a sharded judge. One judge scores
    candidate and baseline. An evaluation by another judge is refused as a baseline.
    """
    first = judged_words(sd3_folder, judge_model, tmp_path, "first")
    assert run_ranks(evaluate_shown, 1, [*first, f"baseline={sd3_folder}"]) == [1]
    records, part = written(tmp_path / "first")
    assert (tmp_path / "first" / "baseline" / "records.jsonl").read_text() == records
    assert part["baseline"]["better_equal_worse"]["unified_reward"]["prompts"] == [0, 5, 0]
    again = judged_words(sd3_folder, judge_model, tmp_path, "again")
    with pytest.raises(RankError):
        run_ranks(evaluate_shown, 1, again, 6)
    assert len((tmp_path / "again" / "records.jsonl").read_text().splitlines()) == 4
    run_ranks(evaluate_shown, 2, [*again, "reward.model.tensor_parallel_size=2"])
    assert (tmp_path / "again" / "records.jsonl").read_text() == records
    other = judged_words(sd3_folder, judge_model, tmp_path, "other", f"baseline={tmp_path / 'first'}")
    with pytest.raises(RankError, match=r"not comparable: reward\.model\.max_tokens was 40 and is 30; expected"):
        run_ranks(evaluate_shown, 1, [*other, "reward.model.max_tokens=30"])


def test_a_judge_without_a_model_is_refused(sd3_folder: Path, tmp_path: Path) -> None:
    words = judged_words(sd3_folder, tmp_path, tmp_path, "none", "reward.model.path=null")
    with pytest.raises(RankError, match=r"ConfigError: reward\.model\.path is null, but reward\.functions has a judge"):
        run_ranks(evaluate, 1, words)


@pytest.mark.long
def test_answers_are_those_about_their_samples(judge_model: Path, qwen_folder: Path, tmp_path: Path) -> None:
    """Even if several ranks share a sample, so that samples are distributed among them."""
    shared = ("parallel.ulysses_sequence_parallel_size=2", "n=3", "prompts_per_chunk=3")
    run_ranks(evaluate_shown, 2, judged_words(qwen_folder, judge_model, tmp_path, "shared", *shared))
    records = [json.loads(line) for line in written(tmp_path / "shared")[0].splitlines()]
    assert len(records) == 15 and len({row["reward"] for row in records}) > 2
    for row in records:
        (answer,) = row["judged"]["unified_reward"]
        assert row["reward"] == pytest.approx(UnifiedReward().parse(answer, "", {}))
