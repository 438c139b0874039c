"""Samples of several turns in the loop: exact, equal on any layout and in resumed runs, with one-line errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.lm import LMRLConfig
from tests.helpers.jobs import assert_same_weights, first_step, rows
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.roles import run_roles
from tests.helpers.tasks import run_task

ENVIRONMENTS = '''
import random, time


class Talk:
    """Answers with a different length each time, and sometimes ends the conversation."""

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


class Last(Talk):
    """The same reward, once at the end."""

    def reset(self, seed, sample_seed, prompt):
        self.earned = 0.0
        return super().reset(seed, sample_seed, prompt)

    def step(self, message: str):
        text, reward, done = super().step(message)
        self.earned += reward
        return text, 0.0, done

    def get_reward(self):
        return self.earned


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
        roles = [message["role"] for message in messages]
        return {"size": 0.5, "odd": float(roles == ["user", "assistant"])}

    def close(self):
        time.sleep(3)
        with open(__file__ + ".closed", "a") as file:
            file.write("closed\\n")
'''


@pytest.fixture(scope="module")
def talker(lm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose turns have about ten tokens, because many of its tokens are end tokens."""
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
    """Sample, score and update once. Returns this rank's conversations, the metrics, and the updated weights."""
    from phalanx.run.rl import build

    samples, found = first_step(build, cfg)
    trace, conversations = samples.trace, []
    for ids, sampled, start, end in zip(trace.ids, trace.sampled, trace.starts, trace.ends, strict=True):
        conversations.append((ids[:end].tolist(), sampled[:end].tolist(), int(start)))
    return found | {"conversations": conversations, "earned": samples.action_reward}


def joined(parts: list[dict[str, Any]]) -> list[Any]:
    return [conversation for part in parts for conversation in part["conversations"]]


@pytest.mark.seldom("keys0")
@pytest.mark.full
@pytest.mark.parametrize(
    "keys", [(), ("actor.use_dynamic_bsz=true", "model.use_remove_padding=true", "algorithm.name=reinforce_plus_plus")]
)
def test_layouts_hold_the_same_conversations(keys: tuple[str, ...], talker: Path, tmp_path: Path) -> None:
    """Log-probs equal those of the replay, in two updates per step, padded and packed."""
    (alone,) = run_ranks(one_step, 1, job(talker, tmp_path / "alone", *keys))
    talks = alone["conversations"]
    turns = [str(sampled).count("False, True") for _, sampled, _ in talks]
    assert set(turns) >= {1, 2, 3} and alone["row"]["actor/first_ratio_error"] == 0
    norm = alone["row"]["actor/grad_norm"]
    assert norm > 1e-4
    starts = [ids[:start] for ids, _, start in talks]
    assert starts[0] == starts[3] != starts[4]  # the samples of a group begin alike
    assert torch.equal(alone["earned"].sum(1), alone["reward"])
    for earned, (_, sampled, _) in zip(alone["earned"], talks, strict=True):
        drawn = [int(place) for place, own in enumerate(sampled) if own]
        lasts = [k for k, place in enumerate(drawn) if sampled[place + 1 : place + 2] != [True]]
        assert set(earned.nonzero().flatten().tolist()) <= set(lasts)  # the last token of each turn
    for ranks, shards in ((2, 1), (2, 2)):
        cfg = job(talker, tmp_path / f"{ranks}_{shards}", *keys, f"parallel.fsdp_size={shards}")
        parts = run_ranks(one_step, ranks, cfg)
        assert joined(parts) == talks
        assert torch.equal(parts[0]["reward"], alone["reward"])
        for part in parts:
            assert part["row"]["actor/first_ratio_error"] == 0
            assert part["row"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_same_weights(alone["weights"], parts[0]["weights"], 1e-3)


@pytest.mark.long
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

    def run() -> list[dict[str, Any]]:
        held_out = f"data.val_files=[{tmp_path / 'whole' / 'prompts.jsonl'}]"
        run_ranks(fit, 2, job(talker, tmp_path / "whole", *keys, held_out, "trainer.total_training_steps=3"))
        return rows(tmp_path / "whole" / "out")

    whole = run()
    shutil.rmtree(tmp_path / "whole" / "out" / "checkpoints" / "step_000003")
    assert [timeless(row) for row in run()] == [timeless(row) for row in whole]
    for row in whole:
        by_turns = [row[f"conversation/reward_turns_{k}"] for k in (1, 2, 3)]
        assert min(by_turns) < row["reward/mean"] < max(by_turns)
        assert 1 < row["val/prompts/conversation/turns_mean"] <= 3
        assert 1 < row["conversation/turns_mean"] <= row["conversation/turns_max"] == 3
        assert row["response/length_mean"] < row["conversation/length_mean"] <= row["conversation/length_max"] <= 64
        assert 0 < row["conversation/turns_ratio"] < 1 and row["conversation/error_ratio"] == 0
        assert row["tools/call_frequency"] > 0 and row["tools/failure_frequency"] == 0
    index = tmp_path / "whole" / "out" / "samples" / "prompts" / "step_000003" / "index.jsonl"
    record = json.loads(index.read_text().splitlines()[0])
    assert 0 <= record["turns"] - len(record["turn_rewards"]) <= (record["ended"] == "tokens")
    assert record["reward"] == pytest.approx(sum(record["turn_rewards"])) and record["tool_calls"] > 0
    if algorithm == "grpo":
        assert_generated_again(record, tmp_path / "whole")
    roles = [message["role"] for message in record["messages"]]
    assert roles[:3] == ["user", "assistant", "user"] and " Number " in record["messages"][0]["content"]


def assert_generated_again(record: dict[str, Any], folder: Path) -> None:
    """tasks/generate.py talks to the run's environment as its last validation did, or not at all."""
    file = folder / "texts.jsonl"
    words = [f"checkpoint={folder / 'out'}", f"prompt_file={folder / 'prompts.jsonl'}", f"output_file={file}"]
    done = run_task(["tasks/generate.py", *words])
    assert (
        done.returncode == 2 and "config.yaml would run code or read the environment: environment.path=" in done.stderr
    )
    done = run_task(["tasks/generate.py", *words, "trust_run=true"])
    assert done.returncode == 0, done.stderr
    row = json.loads(file.read_text().splitlines()[0])
    for key in ("text", "messages", "turns", "tool_calls", "ended", "turn_rewards"):
        assert row[key] == record[key], key
    assert f"user: {record['messages'][0]['content']}\n\nassistant: " in done.stdout
    assert f"{record['turns']} turns; {record['tool_calls']} calls; " in done.stdout
    done = run_task(["tasks/generate.py", *words, "environment=false"])
    assert "messages" not in json.loads(file.read_text().splitlines()[0])
    done = run_task(["tasks/generate.py", *words, "trust_run=true", "stop=[x]"])
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == (
        "error: stop: with an environment, a turn ends with an end token of the model; leave stop out, or set "
        "environment=false"
    )


def test_what_a_sample_says_of_its_turns(talker: Path, tmp_path: Path) -> None:
    """A turn that was cut counts, no turn follows an answer without room, and only samples cut by the limit are
    truncated.
    """
    (tmp_path / "kept.py").write_text(
        "import json\nfrom pathlib import Path\n\n"
        "def kept(completions, prompts, metadata):\n"
        "    with Path(__file__).with_suffix('.jsonl').open('a') as file:\n"
        "        for meta in metadata:\n"
        "            names = 'messages', 'turns', 'ended', 'truncated'\n"
        "            file.write(json.dumps({name: meta[name] for name in names}) + '\\n')\n"
        "    return [0.0] * len(completions)\n"
    )
    functions = f"reward.functions=[{{name: environment}}, {{name: kept, path: '{tmp_path}/kept.py:kept', weight: 0}}]"
    keys = (functions, "data.max_response_length=40", "environment.max_turns=2", "trainer.total_training_steps=2")
    run_ranks(fit, 1, job(talker, tmp_path, *keys))
    last = set()
    for line in (tmp_path / "kept.jsonl").read_text().splitlines():
        sample = json.loads(line)
        roles = [message["role"] for message in sample["messages"]]
        assert roles.count("assistant") == sample["turns"]
        assert sample["truncated"] == (sample["ended"] == "tokens")
        last.add((sample["ended"], roles[-1]))
    assert last >= {("tokens", "user"), ("tokens", "assistant"), ("turns", "user"), ("done", "user")}


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "tools/seconds_mean"}


def collected(cfg: LMRLConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards of the turns of a step's samples, and the samples' rewards."""
    from phalanx.run.rl import build

    step = build(cfg).collector.collect(0)
    assert step.samples.action_reward is not None
    return step.samples.action_reward.sum(1), step.reward


@pytest.mark.full
def test_rewards_of_turns_are_parts_of_the_reward(talker: Path, tmp_path: Path) -> None:
    """Only from the term of the environment, and not from normalised scores."""
    terms = "reward.functions=[{name: environment, weight: 2}, {name: length, weight: 0.01}]"
    ((earned, reward),) = run_ranks(collected, 1, job(talker, tmp_path, terms))
    assert earned.any() and ((reward - earned) > 0).any() and (reward >= earned).all()
    ((twice, _),) = run_ranks(collected, 1, job(talker, tmp_path))
    assert torch.equal(earned, 2 * twice)
    for keys in (["reward.functions=[{name: length}]"], ["reward.normalize=group"]):
        ((none, _),) = run_ranks(collected, 1, job(talker, tmp_path, *keys))
        assert not none.any()


@pytest.mark.long
def test_rewards_of_turns_reach_ranks_that_only_train(talker: Path, tmp_path: Path) -> None:
    from phalanx.run.rl import build

    norms = []
    for name, terminal in (("alone", False), ("apart", False), ("last", True)):
        keys = ("algorithm.name=reinforce_plus_plus", "trainer.total_training_steps=1")
        if name == "apart":
            cfg = job(talker, tmp_path / name, *keys, "placement={actor: 0, rollout: 1}")
            run_roles(build, 2, cfg)
        else:
            run_ranks(fit, 1, job(talker, tmp_path / name, *keys, name="Last" if terminal else "Talk"))
        (row,) = rows(tmp_path / name / "out")
        norms.append((row["reward/mean"], row["actor/grad_norm"]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[2][0] == norms[0][0] and abs(norms[2][1] / norms[0][1] - 1) > 0.01


def sampled(cfg: LMRLConfig) -> tuple[torch.Tensor, torch.Tensor]:
    from phalanx.run.rl import build

    samples, _ = first_step(build, cfg)
    return samples.lost, samples.mask.any(1)


def test_samples_that_an_environment_failed_are_left_out(talker: Path, tmp_path: Path) -> None:
    keys = "trainer.total_training_steps=1", "environment.max_error_fraction=1"
    cfg = job(talker, tmp_path, *keys, fails="sometimes")
    [(lost, trained)] = run_ranks(sampled, 1, cfg)
    assert lost.any() and torch.equal(trained, ~lost)
    run_ranks(fit, 2, cfg)
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


def run(cfg: LMRLConfig) -> None:
    """Run the job to its end, as a task does."""
    from phalanx.run.rl import build

    build(cfg).run()


@pytest.mark.full
def test_tools_that_nobody_calls(talker: Path, tmp_path: Path) -> None:
    """A turn without a call is the last one, and parts of a reward are terms of their own."""
    entry = "path: 'phalanx.zoo.rewards.text.environment:Environment', kwargs"
    functions = f"reward.functions=[{{name: size, {entry}: {{key: size}}}}, {{name: environment}}]"
    run_ranks(run, 1, job(talker, tmp_path, functions, "trainer.total_training_steps=1", name="Tool"))
    (row,) = rows(tmp_path / "out")
    assert row["conversation/turns_max"] == 1 and row["tools/call_frequency"] == 0
    assert row["reward/size"] == 0.5 and row["reward/environment"] == 1.5
    assert (tmp_path / "envs.py.closed").read_text().count("closed") == 16, "before the job ends"
