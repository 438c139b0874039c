"""Draw docs/images/watch.png: `phalanx watch` in Chromium, on a run of 16 ranks whose files this script makes up.

    python scripts/draw_watch.py

It needs the extra `browser`, and a Chromium on PATH or one that CHROMIUM names.
"""

import io
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from phalanx.tools.board.watch import Server, Watcher

FILE = Path(__file__).resolve().parents[1] / "docs" / "images" / "watch.png"
RANKS, STEPS, TOTAL, SLOW = 16, 24, 300, 11
WIDTH, SCALE = 1180, 2


def phases(step: int, begin: float, draw: random.Random) -> tuple[list[list[dict[str, object]]], float]:
    """The lines of each rank for a step that begins at `begin`, and when it ends."""
    sampled = [begin + 10.5 + draw.random() + (2.4 if rank == SLOW else 0.0) for rank in range(RANKS)]
    scored = max(sampled) + 0.9
    end = scored + 6.3
    lines: list[list[dict[str, object]]] = []
    for rank in range(RANKS):
        of_rank: list[dict[str, object]] = [{"phase": "rollout", "step": step, "from": begin, "to": max(sampled)}]
        if rank != SLOW:
            of_rank.append({"wait": step, "from": sampled[rank], "to": max(sampled)})
        of_rank.append({"phase": "reward", "step": step, "from": max(sampled), "to": scored})
        of_rank.append({"phase": "update", "step": step, "from": scored, "to": end})
        if step % 10 == 0 and rank == 0:
            of_rank.append({"phase": "checkpoint", "step": step, "from": end, "to": end + 1.4})
        lines.append(of_rank)
    return lines, end + 1.4 * (step % 10 == 0)


def make_run(folder: Path) -> None:
    """A run's folder in the middle of its training."""
    draw, now = random.Random(0), time.time()
    (folder / "ranks").mkdir(parents=True)
    start = now - STEPS * 20.0
    texts = [[json.dumps({"event": "start", "at": start, "ranks": RANKS, "host": "node-0"})] for _ in range(RANKS)]
    rows, begin = [], start + 15
    for step in range(1, STEPS + 1):
        lines, end = phases(step, begin, draw)
        for text, of_rank in zip(texts, lines, strict=True):
            text += [json.dumps(line) for line in of_rank]
        reward = 0.35 + 0.5 * (1 - 0.93**step) + 0.02 * draw.random()
        row = {"step": step, "reward/mean": reward, "perf/elapsed_s": end - start, "time/rollout": 12.0}
        rows.append(json.dumps(row | {"time/update": 6.3, "perf/images_per_gpu_per_s": 1.2}))
        begin = end
    skipped = "an update with NaN or infinity in loss or gradient is skipped (actor/updates_non_finite); lower optim.lr"
    texts[0].append(json.dumps({"event": "warning", "at": now - 200, "text": f"step 14: {skipped}"}))
    for rank in range(RANKS):
        state = {
            "rank": rank,
            "ranks": RANKS,
            "role": "actor",
            "host": f"node-{rank // 8}",
            "pid": 100,
            "interval": 2.0,
        }
        state |= {"at": now, "step": STEPS + 1, "total": TOTAL, "phase": f"rollout {5 + rank % 2}/8"}
        state |= {
            "phase_since": now - 7,
            "memory_gb": 61.2 + draw.random(),
            "rate": f"{1.2 + 0.01 * draw.random():.3f} images/s",
        }
        (folder / "ranks" / f"{rank}.json").write_text(json.dumps(state))
        (folder / "ranks" / f"{rank}.jsonl").write_text("\n".join([*texts[rank], ""]))
    (folder / "metrics.jsonl").write_text("\n".join([*rows, ""]))
    (folder / "config.yaml").write_text("trainer: {experiment_name: qwen_image_ocr_lora, total_training_steps: 300}\n")
    (folder / "running.json").write_text(json.dumps({"beat": 1, "token": "t", "pid": 100, "host": "node-0"}))


def section(url: str, chromium: str) -> Image.Image:
    """The section of the ranks without its log, once it is drawn."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": WIDTH, "height": 2000}, device_scale_factor=SCALE)
        page.goto(url)
        page.locator("#ranks tbody tr").last.wait_for()
        page.locator("#ranks .log").wait_for()
        page.add_style_tag(content="#ranks .log, #ranks h3:has(select) {display: none}")
        box = page.locator("#ranks").bounding_box()
        assert box is not None
        part = {"x": 0, "y": box["y"], "width": WIDTH, "height": box["height"] + 12}
        shot = page.screenshot(clip=part, full_page=True)
        browser.close()
    return Image.open(io.BytesIO(shot)).convert("RGB")


def main() -> None:
    """Draw the picture."""
    chromium = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if chromium is None:
        sys.exit("no chromium: `apt install chromium`, or CHROMIUM=<path of a Chromium or Chrome>")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "qwen_image_ocr_lora")
        make_run(folder)
        server = Server(Watcher([folder]), "127.0.0.1", 0, None)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        picture = section(server.url, chromium)
        server.shutdown()
    picture.quantize(64).save(FILE, optimize=True)
    print(FILE)


if __name__ == "__main__":
    main()
