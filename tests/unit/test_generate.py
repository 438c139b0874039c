"""tasks/generate.py: its prompts, and its end by a signal."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.tasks import GenerateConfig
from phalanx.exit import Stopped
from phalanx.run.rules import load_config
from phalanx.tools.generate import Generation, read_prompts
from tests.helpers.checks import wait_for
from tests.helpers.ranks import run_ranks


def test_a_file_of_supervised_training_is_answered_anew(tmp_path: Path) -> None:
    """The answers at the end of chats are not part of the prompts."""
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    answered = [*turns, {"role": "assistant", "content": "1"}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (answered, turns)))
    cfg = load_config(GenerateConfig, None, ["model.path=x", f"prompt_file={file}"])
    prompts = read_prompts(cfg, "messages")
    assert [(p.text, p.messages, p.group_id) for p in prompts] == [("one", turns, 0), ("one", turns, 1)]


def interrupted(overrides: list[str]) -> str:
    """Generate, with a signal during the second micro-batch; returns how the job ends."""
    job, count = Generation(load_config(GenerateConfig, None, overrides)), 0
    draw = job.rollout.draw_validation

    def until_the_signal(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: job.world.watch.stop is not None)
        return draw(*args, **options)

    job.rollout.draw_validation = until_the_signal  # type: ignore[method-assign]
    with pytest.raises(Stopped) as stopped:
        job.run()
    return str(stopped.value)


def test_a_signal_ends_it_with_the_responses_so_far(lm_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    keys = [f"model.path={lm_folder}", "prompts=[a, b, c, d]", "n=2", "micro_batch_size_per_gpu=2"]
    keys += ["max_response_length=4", f"output_file={file}"]
    assert run_ranks(interrupted, 1, keys, init=False) == ["stopped by SIGTERM after 2 of 4 prompts"]
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()] == ["a", "a", "b", "b"]
