"""Conversations of partial rollouts: the same on any layout and in a resumed run, whose environments are made anew."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.config.lm import LMRLConfig
from tests.distributed.test_conversations import job as conversations
from tests.distributed.test_conversations import talker, timeless  # noqa: F401
from tests.distributed.test_partial_rollouts import KEYS, drawn, joined, warnings
from tests.helpers.jobs import rows
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import ROOT, run_ranks

STEPS = 4
LONGER = ("rollout.max_staleness=2", "optim.lr=1e-2", f"trainer.total_training_steps={STEPS}")
KEPT = ("trainer.save_freq=1", "trainer.max_checkpoints=9")


def job(model: Path, folder: Path, *keys: str, name: str = "Talk") -> LMRLConfig:
    return conversations(model, folder, *KEYS, *LONGER, *keys, name=name)


def copied(folder: Path, cfg: LMRLConfig, step: int) -> LMRLConfig:
    """The job, which resumes after a step of the run in `folder`."""
    kept = folder / "out" / "checkpoints" / f"step_{step:06d}"
    shutil.copytree(kept, Path(cfg.trainer.output_dir) / "checkpoints" / kept.name)
    return cfg


def test_a_step_that_waits_for_all_is_a_usual_one(talker: Path, tmp_path: Path) -> None:  # noqa: F811
    """Turns, answers and rewards do not depend on the number of rounds in which they were sampled."""
    run_ranks(fit, 1, conversations(talker, tmp_path / "usual"))
    run_ranks(fit, 1, conversations(talker, tmp_path / "partial", *KEYS, "rollout.over_sampling_batch_size=4"))
    for one, other in zip(rows(tmp_path / "usual" / "out"), rows(tmp_path / "partial" / "out"), strict=True):
        assert other["rollout/rounds"] > 3 and other["rollout/staleness_max"] == 0
        assert one["conversation/turns_mean"] > 1 and other["actor/first_ratio_error"] == 0
        for name in one:
            if name.startswith(("response/", "conversation/", "reward/")) or name == "tools/call_frequency":
                assert other[name] == pytest.approx(one[name], rel=1e-6), name
        assert other["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)


@pytest.mark.full
def test_layouts_train_the_same_conversations(talker: Path, tmp_path: Path) -> None:  # noqa: F811
    """Each goes on where its environment is, so that rounds need no environment twice."""
    one = run_ranks(drawn, 1, job(talker, tmp_path / "1"))
    two = run_ranks(drawn, 2, job(talker, tmp_path / "2", "parallel.fsdp_size=2"))
    assert joined(two, "texts") == joined(one, "texts")
    assert joined(two, "version") == joined(one, "version")
    assert {int(age) for step, found in enumerate(one[0]) for age in (step - found["version"])[found["mask"]]} >= {0, 1}


def waiting(folder: Path, step: int) -> int:
    """The number of unfinished conversations of a checkpoint with an answer among their tokens."""
    [file] = (folder / "out" / "checkpoints" / f"step_{step:06d}").glob("*in_flight*")
    kept = load_file(file)
    parts = kept["sampled"].split(kept["length"].tolist())
    return sum(not ended and not part.all() for ended, part in zip(kept["ended"].tolist(), parts, strict=True))


@pytest.mark.full
def test_a_resumed_run_is_the_run(talker: Path, tmp_path: Path) -> None:  # noqa: F811
    """At each step; with another number of ranks up to rounding."""
    whole = run_ranks(fit, 2, job(talker, tmp_path / "whole", *KEPT))
    expected = list(map(timeless, rows(tmp_path / "whole" / "out")))
    assert max(row["rollout/staleness_max"] for row in expected) > 0
    assert sum(waiting(tmp_path / "whole", step) for step in range(1, STEPS)) > 3
    for step in range(1, STEPS):
        folder = tmp_path / str(step)
        resumed = run_ranks(fit, 2, copied(tmp_path / "whole", job(talker, folder, *KEPT), step))
        assert list(map(timeless, rows(folder / "out"))) == expected[step:]
        for name, value in whole[0].items():
            assert torch.equal(value, resumed[0][name])
    run_ranks(fit, 1, copied(tmp_path / "whole", job(talker, tmp_path / "alone"), 1))
    for row, other in zip(rows(tmp_path / "alone" / "out"), expected[1:], strict=True):
        for name in other:
            if name.startswith(("response/", "conversation/", "reward/", "rollout/staleness")):
                assert row[name] == pytest.approx(other[name], rel=1e-5), name


SCRIPT = '''
import random

CALL = '<tool_call>\\n{"name": "roll", "arguments": {"sides": %d}}\\n</tool_call>'


class Scripted:
    """A session whose samples make none to three calls, as their names say."""

    def __init__(self, policy, config, world, micro_batch_size):
        self.policy, self.requests = policy, []

    def add(self, request):
        self.requests.append(request)

    def step(self):
        over = []
        for request in self.requests:
            *_, place, i = request.name
            made = str(request.sampled).count("True, False")
            text = CALL % (90 + made) if made < place * i % 4 else "The end."
            tokens = [*self.policy.tokenizer(text)["input_ids"], self.policy.ends[0]]
            if request.say([tokens[len(request.turn)]], [-1.0]):
                over.append(request)
        self.requests = [request for request in self.requests if not request.over]
        return over

    def close(self):
        pass


class Dice:
    def reset(self, sample_seed, **row):
        self.random, self.sum = random.Random(sample_seed), 0

    def roll(self, sides: int) -> int:
        """Rolls.

        Args:
            sides: how many
        """
        with open(__file__ + ".calls", "a") as file:
            file.write(f"{sides}\\n")
        rolled = self.random.randint(1, sides)
        self.sum += rolled
        return rolled

    def get_reward(self) -> float:
        return self.sum / 100
'''


@pytest.mark.full
def test_a_resumed_run_calls_its_tools_again(tmp_path: Path) -> None:
    """Those of the unfinished conversations, whose state is that of before; in a session of one's own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    base = ROOT / "assets" / "calculator"
    keys = (
        f"environment.path={tmp_path}/script.py:Dice",
        f"rollout.engine={tmp_path}/script.py:Scripted",
        "reward.functions=[{name: environment}]",
        f"data.train_files=[{base}/train.jsonl]",
        "data.prompt_key=question",
        "data.max_prompt_length=250",
        "data.max_response_length=260",
        "rollout.partial_rollout={over_sampling_batch_size: 8, tokens: 20}",
        "rollout.max_staleness=2",
        "rollout.correction=token_tis",
        "trainer.total_training_steps=3",
        *KEPT,
    )

    def of(name: str) -> LMRLConfig:
        return tiny_lm_config(base / "base", tmp_path / name, *keys)

    (whole,) = run_ranks(fit, 1, of("whole"))
    expected = list(map(timeless, rows(tmp_path / "whole" / "out")))
    calls = (tmp_path / "script.py.calls").read_text().split()
    assert len(calls) == sum(place * i % 4 for place in range(4) for i in range(4)) * 3
    assert waiting(tmp_path / "whole", 1) > 0
    (tmp_path / "script.py.calls").unlink()
    (resumed,) = run_ranks(fit, 1, copied(tmp_path / "whole", of("parts"), 1))
    assert list(map(timeless, rows(tmp_path / "parts" / "out"))) == expected[1:]
    assert len((tmp_path / "script.py.calls").read_text().split()) < len(calls)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name])


@pytest.mark.full
def test_conversations_that_are_not_repeated_are_drawn_again(talker: Path, tmp_path: Path) -> None:  # noqa: F811
    """In one line; those that had ended are trained as they were."""
    run_ranks(fit, 1, job(talker, tmp_path / "whole", *KEPT))
    count = waiting(tmp_path / "whole", 1)
    other = copied(tmp_path / "whole", job(talker, tmp_path / "other", name="Last"), 1)
    [messages] = run_ranks(warnings, 1, other)
    [line] = [message for message in messages if "drawn again" in message]
    number, _, rest = line.partition(" ")
    assert int(number) >= count > 0
    assert rest.startswith("unfinished conversations are drawn again, the first one of ") and "prompts.jsonl" in rest
    assert [row["rollout/pending_ratio"] for row in rows(tmp_path / "other" / "out")] == [0.5] * (STEPS - 2) + [0]
