"""Samples of several turns in the loop: exact, on any layout, repeated by a resumed run, and ended by one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.lm import LMRLConfig
from tests.jobs import assert_same_weights, first_step, rows
from tests.lm import fit, tiny_lm_config
from tests.ranks import run_ranks

ENVIRONMENTS = '''
import random, time


class Talk:
    """Says something of another length each time, and ends by itself at times."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def reset(self, seed, sample_seed, prompt):
        self.number, self.random = seed % 1000, random.Random(sample_seed)
        return f" Number {self.number}."

    def step(self, message: str):
        if self.fails == "raises" or (self.fails == "sometimes" and self.random.random() < 0.2):
            raise KeyError("no such thing")
        self.score = (len(message) * 7 + self.number) % 5
        text = "and " * self.random.randrange(6) + "more"
        return text, self.score / 8, self.random.random() < 0.2


class Tool:
    """A tool that the model never calls by chance."""

    def reset(self, **row):
        pass

    def look(self, place: str) -> str:
        """Looks.

        Args:
            place: where
        """
        return place

    def get_reward(self, messages):
        said = [message["role"] for message in messages]
        return {"size": 0.5, "odd": float(said == ["user", "assistant"])}
'''


@pytest.fixture(scope="module")
def talker(lm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose turns have about ten tokens: many of them are end tokens."""
    folder = Path(shutil.copytree(lm_folder, tmp_path_factory.mktemp("talker") / "lm"))
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(300, 340)]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def job(model: Path, folder: Path, *keys: str, name: str = "Talk", **kwargs: Any) -> LMRLConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "envs.py").write_text(ENVIRONMENTS)
    own = [
        f"environment.path={folder}/envs.py:{name}",
        f"environment.kwargs={json.dumps(kwargs)}",
        "environment.max_turns=3",
        "environment.join=4",
        "data.max_response_length=64",
        "reward.functions=[{name: environment}]",
    ]
    return tiny_lm_config(model, folder, *own, *keys)


def one_step(cfg: LMRLConfig) -> dict[str, Any]:
    """Sample, score and update once: this rank's conversations, the row of metrics, and the weights after."""
    from phalanx.training.lm_rl import build

    samples, found = first_step(build, cfg)
    trace, conversations = samples.trace, []
    for ids, sampled, start, end in zip(trace.ids, trace.sampled, trace.starts, trace.ends, strict=True):
        conversations.append((ids[:end].tolist(), sampled[:end].tolist(), int(start)))
    return found | {"conversations": conversations}


def joined(parts: list[dict[str, Any]]) -> list[Any]:
    return [conversation for part in parts for conversation in part["conversations"]]


@pytest.mark.parametrize("keys", [(), ("actor.use_dynamic_bsz=true", "model.use_remove_padding=true")])
def test_layouts_hold_the_same_conversations(keys: tuple[str, ...], talker: Path, tmp_path: Path) -> None:
    """And their log-probs are those of the replay, in two updates a step, padded and packed."""
    (alone,) = run_ranks(one_step, 1, job(talker, tmp_path / "alone", *keys))
    talks = alone["conversations"]
    turns = [str(sampled).count("False, True") for _, sampled, _ in talks]
    assert set(turns) >= {1, 2, 3} and alone["row"]["actor/first_ratio_error"] == 0
    norm = alone["row"]["actor/grad_norm"]
    assert norm > 1e-4
    starts = [ids[:start] for ids, _, start in talks]
    assert starts[0] == starts[3] != starts[4]  # the samples of a group begin alike
    for ranks, shards in ((2, 1), (2, 2)):
        cfg = job(talker, tmp_path / f"{ranks}_{shards}", *keys, f"parallel.fsdp_size={shards}")
        parts = run_ranks(one_step, ranks, cfg)
        assert joined(parts) == talks
        assert torch.equal(parts[0]["reward"], alone["reward"])
        for part in parts:
            assert part["row"]["actor/first_ratio_error"] == 0
            assert part["row"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_same_weights(alone["weights"], parts[0]["weights"], 1e-3)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_is_the_run(algorithm: str, talker: Path, tmp_path: Path) -> None:
    """With metrics of the conversations, and validation, whose samples are kept with their messages."""
    keys = (
        f"algorithm.name={algorithm}",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.val_before_train=false",
        "rollout.val.temperature=1",
    )

    def run(folder: str, steps: int) -> list[dict[str, Any]]:
        held_out = f"data.val_files=[{tmp_path / folder / 'prompts.jsonl'}]"
        run_ranks(fit, 2, job(talker, tmp_path / folder, *keys, held_out, f"trainer.total_training_steps={steps}"))
        return rows(tmp_path / folder / "out")

    whole = run("whole", 3)
    run("parts", 2)
    assert [timeless(row) for row in run("parts", 3)] == [timeless(row) for row in whole]
    for row in whole:
        assert 1 < row["conversation/turns_mean"] <= row["conversation/turns_max"] == 3
        assert row["response/length_mean"] < row["conversation/length_mean"] <= row["conversation/length_max"] <= 64
        assert 0 < row["conversation/turns_ratio"] < 1 and row["conversation/error_ratio"] == 0
        assert row["tools/call_frequency"] > 0 and row["tools/failure_frequency"] == 0
    index = tmp_path / "whole" / "out" / "samples" / "prompts" / "step_000003" / "index.jsonl"
    record = json.loads(index.read_text().splitlines()[0])
    roles = [message["role"] for message in record["messages"]]
    assert roles[:3] == ["user", "assistant", "user"] and " Number " in record["messages"][0]["content"]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "tools/seconds_mean"}


def test_samples_that_an_environment_failed_are_left_out(talker: Path, tmp_path: Path) -> None:
    run_ranks(
        fit,
        2,
        job(talker, tmp_path, "trainer.total_training_steps=1", "environment.max_error_fraction=1", fails="sometimes"),
    )
    (row,) = rows(tmp_path / "out")
    assert 0 < row["conversation/error_ratio"] < 1 and row["reward/mean"] > 0
    assert row["actor/grad_norm"] > 0


def test_a_failure_of_one_rank_ends_all_in_one_line(talker: Path, tmp_path: Path) -> None:
    cfg = job(talker, tmp_path, "environment.on_error=fail", fails="sometimes")
    with pytest.raises(
        Exception,
        match=r"rank \d: environment Talk: step raised KeyError: .*no such thing.*envs\.py:\d+, on the row with",
    ):
        run_ranks(fit, 2, cfg)


def test_tools_that_nobody_calls(talker: Path, tmp_path: Path) -> None:
    """A turn without a call is the last one, and parts of a reward are terms of their own."""
    entry = "path: 'phalanx.rewards.text.environment:Environment', kwargs"
    functions = f"reward.functions=[{{name: size, {entry}: {{key: size}}}}, {{name: environment}}]"
    run_ranks(fit, 1, job(talker, tmp_path, functions, "trainer.total_training_steps=1", name="Tool"))
    (row,) = rows(tmp_path / "out")
    assert row["conversation/turns_max"] == 1 and row["tools/call_frequency"] == 0
    assert row["reward/size"] == 0.5 and row["reward/environment"] == 1.5
