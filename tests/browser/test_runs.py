"""The table of a folder of runs, and pages of 100,000 rows, in Chromium."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, expect

from phalanx.run.telemetry.run_folder import read_run
from phalanx.telemetry.records import Record
from phalanx.tools.board.comparison import figures_of
from phalanx.tools.board.report import write_report
from phalanx.tools.board.runs_page import table_page
from tests.browser.emulated import Training
from tests.browser.visits import PHONE, Visitor, check_looks, frame_ms
from tests.helpers.pages import picture

FRAME_MS = 1000 / 60
ROWS = 100_000


def some_runs(folder: Path) -> Path:
    """Three runs that differ in their learning rate; the last one goes on."""
    for name, rate, steps in (("a", 0.1, 2), ("b", 0.02, 3), ("deep/c", 0.3, 1)):
        with Training(folder / name) as run:
            for step in range(steps):
                run.step(**{"val/test/reward/mean": rate * (step + 1)})
            run.validate(Record("a prompt", rate, f"a sample of {name}", 0))
            run.end()
        (folder / name / "config.yaml").write_text(f"optim: {{lr: {rate}}}\ntrainer: {{experiment_name: {name}}}\n")
    return folder


def column(page: Page, name: str) -> list[str]:
    """The cells of a column of the table, from the top."""
    heads = page.locator("#runs .head .cell")
    place = [head.split(" ")[0] if head.endswith(("▼", "▲")) else head for head in heads.all_inner_texts()].index(name)
    cells = page.locator("#runs .body .row")
    return [cells.nth(k).locator(".cell").nth(place).inner_text() for k in range(cells.count())]


def test_a_folder_of_runs_is_a_table(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    folder = some_runs(tmp_path / "outputs")
    page = visitor.open(serve(folder).url)
    grid = page.locator("#runs .grid")
    expect(grid.locator(".body a")).to_have_count(3)
    for name, steps in zip(column(page, "run"), column(page, "steps"), strict=True):
        assert int(steps) == figures_of(read_run(folder / name))["steps"]
    page.get_by_role("columnheader", name="lr").click()
    expect(grid.locator(".body a")).to_have_text(["deep/c", "a", "b"])
    assert column(page, "lr") == ["0.3", "0.1", "0.02"] and column(page, "test last") == ["0.3", "0.2", "0.06"]
    page.get_by_role("columnheader", name="lr").click()
    expect(grid.locator(".body a")).to_have_text(["b", "a", "deep/c"])
    field = page.get_by_role("searchbox")
    for words, names in (("lr<0.2 state=finished", ["b", "a"]), ("DEEP", ["deep/c"]), ("steps>=2 lr=0.1", ["a"])):
        field.fill(words)
        expect(grid.locator(".body a")).to_have_text(names)
    field.fill("")
    expect(page.locator("#compared h2")).to_have_text("The first 3 runs of the table")
    page.get_by_label("compare b").check()
    page.get_by_label("compare deep/c").check()
    expect(page.locator("#compared h2")).to_have_text("The 2 ticked runs")
    names = page.locator("#compared .chart").first.locator(".u-series:not(.companion) th").all_inner_texts()
    assert [name for name in names if "lr" in name] == ["lr=0.3", "lr=0.02"]
    expect(page.locator("#compared tbody tr", has_text="optim.lr")).to_contain_text("0.3")

    with Training(folder / "d") as run:
        run.step()
    expect(grid.locator(".body a")).to_have_count(4)  # a new run, without a reload
    expect(page.get_by_label("compare deep/c")).to_be_checked()

    page.get_by_role("link", name="Open their curves").click()
    expect(page.locator("h1")).to_have_text("Comparison of 2 runs")
    expect(page.locator("#samples")).to_contain_text("a sample of deep/c")
    expect(page.locator("#ranks .status")).to_contain_text("step 1")
    page.go_back()
    page.get_by_role("link", name="a", exact=True).click()
    expect(page.locator("#samples")).to_contain_text("a sample of a")
    visitor.close()


def test_a_written_table_opens_the_reports(tmp_path: Path, visitor: Visitor) -> None:
    folder = some_runs(tmp_path / "outputs")
    write_report(folder / "deep/c")
    path = write_report(folder)
    assert path == folder / "runs.html"
    page = visitor.open(path, **PHONE)
    expect(page.locator("#runs .body a[href]")).to_have_count(1)
    check_looks(page, "light")
    page.get_by_role("link", name="deep/c").click()
    expect(page.locator("#samples")).to_contain_text("a sample of deep/c")
    page = visitor.open(path, scripts=False)
    assert page.get_by_role("rowheader", name="deep/c").is_visible()


def many_rows() -> dict[str, Any]:
    """The data of a table of 100,000 runs."""
    draw = np.random.default_rng(0)
    rows = []
    for k, values in enumerate(draw.normal(size=(ROWS, 8)).round(6).tolist()):
        rows.append([f"sweep/run_{k:06d}", "finished", k % 977, *values, "cosine", f"2026-01-{1 + k % 28:02d} 12:00"])
    names = ["run", "state", "steps", *(f"figure {k}" for k in range(8)), "optim.lr_scheduler", "changed"]
    empty: dict[str, Any] = {}
    return {"columns": names, "settings": 1, "rows": rows, "reports": [None] * ROWS, "curves": [empty] * ROWS}


def test_100_000_runs_scroll_at_60_frames_per_second(tmp_path: Path, visitor: Visitor) -> None:
    data = many_rows()
    path = tmp_path / "runs.html"
    path.write_bytes(table_page(tmp_path, data)[0])
    page = visitor.open(path)
    rows = page.locator("#runs .body .row")
    expect(page.locator("#runs output")).to_have_text(f"{ROWS} of {ROWS}")
    assert rows.count() < 60
    scrolling = frame_ms(page, "(k) => document.querySelector('.grid').scrollTop += 200")  # 12,000 pixels per second
    jumping = frame_ms(page, "(k) => document.querySelector('.grid').scrollTop += 2977")  # as with the scroll bar
    print(f"100,000 runs: scrolling {scrolling:.1f} ms, jumping {jumping:.1f} ms per frame")
    assert scrolling < FRAME_MS and jumping < 2 * FRAME_MS
    shown = rows.first.locator(".cell").all_inner_texts()
    row = data["rows"][int(shown[0].strip().removeprefix("sweep/run_"))]
    assert [float(cell) for cell in shown[2:11]] == [float(f"{value:.4g}") for value in row[2:11]]
    page.evaluate("document.querySelector('.grid').scrollTop = 1e9")
    expect(page.get_by_label(f"compare sweep/run_{ROWS - 1:06d}")).to_be_in_viewport()
    page.get_by_role("columnheader", name="figure 3").click()
    page.evaluate("document.querySelector('.grid').scrollTop = 0")
    expect(rows.first).to_contain_text(max(data["rows"], key=lambda row: row[6])[0], timeout=15_000)
    expected = sum(row[2] == 500 for row in data["rows"])
    page.get_by_role("searchbox").fill("steps=500")
    expect(page.locator("#runs output")).to_have_text(f"{expected} of {ROWS}", timeout=15_000)


def test_a_run_of_100_000_steps_scrolls_and_is_read_at_60_frames_per_second(tmp_path: Path, visitor: Visitor) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    names = ["reward/mean", "reward/std", "actor/grad_norm", "time/rollout", *(f"actor/metric_{k}" for k in range(6))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step, row in enumerate(np.random.default_rng(0).normal(size=(ROWS, len(names))).round(4).tolist()):
            file.write(f"{json.dumps({'step': step, **dict(zip(names, row, strict=True))})}\n")
    page = visitor.open(write_report(folder))
    page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    page.wait_for_timeout(500)
    scrolling = frame_ms(page, "(k) => scrollTo(0, 60 * k)")
    page.locator(".plot").first.scroll_into_view_if_needed()
    point = """(k) => { const over = document.querySelector(".u-over"), box = over.getBoundingClientRect();
      over.dispatchEvent(new MouseEvent("mousemove", { clientX: box.x + 4 * k, clientY: box.y + 20, bubbles: true })); }"""
    pointing = frame_ms(page, point)
    print(f"100,000 steps: scrolling {scrolling:.1f} ms, pointing {pointing:.1f} ms per frame")
    assert max(scrolling, pointing) < FRAME_MS


def test_samples_of_two_steps_beside_each_other_and_a_search(tmp_path: Path, visitor: Visitor) -> None:
    with Training(tmp_path / "run", total=3) as run:
        for step in range(4):
            if step:
                run.step()
            run.validate(*(Record(f"prompt {k}", step / 4, f"text {k} at {step}", k) for k in range(20)), name="texts")
            run.validate(Record("a lighthouse", step / 4, picture(step), 0), name="pictures")
        run.end()
    page = visitor.open(write_report(tmp_path / "run"))
    texts = page.locator("#samples .set", has_text="texts: step")
    card = texts.locator("figure", has_text="prompt 3")
    expect(card.locator(".side")).to_contain_text(["text 3 at 0", "text 3 at 3"])
    texts.get_by_label("beside step").select_option("2")
    texts.locator("input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(card.locator(".side")).to_contain_text(["text 3 at 2", "text 3 at 1"])
    texts.get_by_label("beside step").select_option("3")
    expect(card.locator(".side")).to_contain_text(["text 3 at 3", "text 3 at 1"])
    assert card.locator(".side b").all_inner_texts() == ["0.750", "0.250"]
    hidden = texts.locator("figure", has_text="prompt 17")
    expect(hidden).not_to_be_visible()
    page.get_by_role("searchbox").fill("TEXT 17 at")
    expect(hidden).to_be_visible()
    expect(page.locator("#samples .set figure:visible")).to_have_count(1)
    expect(page.locator("#samples .search output")).to_have_text("1 of 21 prompts")
    page.get_by_role("searchbox").fill("")
    expect(card).to_be_visible()
