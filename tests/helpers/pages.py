"""A parser of the report's pages for tests, and the folders of runs from which pages are made."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.config.run import TrainerConfig
from phalanx.run.telemetry.curves import Curves
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.telemetry.records import Record

EVIL = '</pre></script><script>alert(1)</script><img src=x onerror="alert(2)">'
VOID = {"meta", "img", "br", "link", "input", "hr"}


def curves_of(*rows: dict[str, Any]) -> Curves:
    curves = Curves()
    for row in rows:
        curves.add(row)
    return curves


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text, as a browser without scripts shows them; fails if tags
    are not closed in order.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if "template" not in self._open:
            self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title", "script", "template"} & set(self._open):
            self.text += " " + data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def words(self) -> str:
        return " ".join(self.text.split())

    def charts(self) -> list[dict[str, Any]]:
        """The data of the charts that the script draws."""
        (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', self.source, re.DOTALL)
        return json.loads(data)


def picture(seed: int, height: int = 6, width: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def logger(folder: Path) -> RunLogger:
    return RunLogger(TrainerConfig(output_dir=str(folder), logger=[]), {}, {}, 0, 3, True)


def run(folder: Path, steps: int = 3) -> Path:
    """Write the folder of a run as the loggers do."""
    with logger(folder) as log:
        log.log(0, {"val/ocr/reward/mean": 0.5, "val/easy/reward/mean": 0.9, "time/validation": 2.0})
        log.records(0, "ocr", [Record(f'sign "{i}" & <more>', 0.25, picture(i), i) for i in range(2)])
        for step in range(1, steps + 1):
            row = {"reward/mean": 0.1 * step, "reward/std": 0.05, "reward/max": 1.0 + step, "reward/ocr": 0.1 * step}
            row |= {
                "actor/grad_norm": float("nan") if step == 2 else 0.25 * (step + 1),
                "actor/ratio_mean": 1 + 0.1 * step,
            }
            row |= {
                "time/rollout": 3.0,
                "time/update": 1.0,
                "perf/images_per_gpu_per_s": 18.0 + step,
                "perf/mfu": 0.125 * step,
            }
            row |= {"val/ocr/reward/mean": 0.75, "val/easy/reward/mean": 0.8} if step == steps else {}
            log.log(step, row)
        log.records(steps, "ocr", [Record(f'sign "{i}" & <more>', 0.875, picture(10 + i), i) for i in range(2)])
    (folder / "config.yaml").write_text(
        "trainer:\n  experiment_name: my <run>\n  total_training_steps: 3\nmodel:\n  path: a/b\n"
    )
    return folder


def steps_of(folder: Path, name: str, steps: int, samples: int) -> Path:
    """Write a run with a validation at each step; sample i of step k has the reward k + i."""
    with logger(folder) as log:
        for step in range(steps):
            rows = [
                Record(f"p{i}", float(step + i), picture(i), i, scores={"ocr": i / 8, "clip": 2.0})
                for i in range(samples)
            ]
            log.records(step, name, rows)
            log.log(step, {"reward/mean": step / 10, "time/rollout": 1.0})
    return folder


def add_ranks(folder: Path, ranks: int = 2, text: str = "") -> Path:
    """Add files of ranks after a step of 2 s, in which all ranks wait a second for rank 1."""
    (folder / "ranks").mkdir()
    for rank in range(ranks):
        state = {"rank": rank, "ranks": ranks, "role": "actor", "host": f"node-{rank // 8}", "pid": 1, "interval": 2.0}
        state |= {"at": time.time(), "step": 2, "phase": "rollout", "phase_since": time.time(), "total": 3}
        (folder / "ranks" / f"{rank}.json").write_text(json.dumps(state | {"memory_gb": 1.5, "rate": "9 tokens/s"}))
        lines: list[dict[str, Any]] = [{"event": "warning", "at": 5.0, "text": text}]
        lines.append({"phase": "rollout", "step": 1, "from": 10.0, "to": 12.0})
        if rank != 1:
            lines.append({"wait": 4, "from": 11.0, "to": 12.0})
        (folder / "ranks" / f"{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / "ranks" / f"{rank}.log").write_text(f"rank {rank} says {text}\n")
    return folder
