"""Loggers of a run for tests, the records that are logged, and the rows of metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.config.run import TrainerConfig
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.telemetry.records import Record, Thumbnail


def trainer(folder: Path, *loggers: str) -> TrainerConfig:
    return TrainerConfig(output_dir=str(folder), logger=list(loggers), project_name="p", experiment_name="e")


def start(
    folder: Path, *loggers: str, step: int = 0, ids: dict[str, str] | None = None, enabled: bool = True
) -> RunLogger:
    return RunLogger(trainer(folder, *loggers), {"trainer": {"seed": 3}}, ids or {}, step, 4, enabled)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, read as strict JSON, without the elapsed time."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    return [{key: value for key, value in row.items() if key != "perf/elapsed_s"} for row in found]


def records(count: int = 3, height: int = 6, width: int = 9) -> list[Record]:
    rng = np.random.default_rng(0)
    return [
        Record(f'a sign that says "{i}"', i / 10, rng.integers(0, 256, (height, width, 3), dtype=np.uint8), i)
        for i in range(count)
    ]


def prompt_image(width: int = 30, shade: int = 200) -> Thumbnail:
    """An image in a prompt."""
    return Thumbnail("data.val_files: a.jsonl:1: images[0]", 200, 300, np.full((20, width, 3), shade, np.uint8))


def texts(count: int = 2) -> list[Record]:
    """Completions of several lines, with characters that are special in Markdown, HTML and JSON."""
    return [
        Record(
            f"What is {i} + *1*?",
            i / 4,
            f"# {i}\n\n  <b>{i + 1}</b> \\ | 二",
            i,
            scores={"exact": i / 2},
            ground_truth=f"*{i + 1}*",
        )
        for i in range(count)
    ]


def talk(text: str = "<b>6</b>", turns: int = 2) -> Record:
    """A multi-turn sample; each turn except the last calls a tool."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2 * 3?"}]
    for turn in range(1, turns):
        call = {"name": "calc", "arguments": {"expression": f"2 * {turn}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "calc", "content": str(2 * turn)})
    messages.append({"role": "assistant", "content": text, "reasoning_content": "so"})
    beside = {"messages": messages, "turns": turns, "tool_calls": turns - 1, "ended": "done"}
    return Record("2 * 3?", 0.5, text, 0, conversation=beside | {"environment_seconds": 0.25, "turn_rewards": [0, 0.5]})


TALK = """\
user: 2 * 3?

assistant: calc({"expression": "2 * 1"})

tool calc: 2

assistant: so
<b>6</b>"""  # the transcript of `talk()`
