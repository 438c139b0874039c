"""The pages that commands write, including texts that contain markup, in a browser."""

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from phalanx.config.tasks import EvaluateConfig
from phalanx.run.telemetry.run_folder import LONGEST_EVENT
from phalanx.telemetry.records import Record
from phalanx.tools.board.evaluation import result_of
from phalanx.tools.board.evaluation_page import Side, write_page
from phalanx.tools.board.report import write_report
from tests.browser.emulated import Training
from tests.browser.visits import DESKTOP, PHONE, Visitor, check_looks
from tests.helpers.pages import picture

AWAY = "http://192.0.2.1"  # an unassigned address
CALL = "window.ran = 1"
EVIL = (
    f"</pre></template></style></script><script>{CALL}</script><script src={AWAY}/a.js></script>"
    f"<img src='{AWAY}/b.png' onerror='{CALL}'><svg onload='{CALL}'></svg><iframe src='{AWAY}/c'></iframe>"
    f"<link rel=stylesheet href={AWAY}/d.css><style>@import '{AWAY}/e.css'</style><meta http-equiv=refresh content='0;{AWAY}'>"
    f"<form action={AWAY}><input autofocus onfocus='{CALL}'></form><a href='javascript:{CALL}'>a link</a>"
    f'"><video src={AWAY}/f.mp4 onerror="{CALL}"></video>--><object data={AWAY}/g></object><base href={AWAY}>'
)


def a_run(folder: Path, text: str = "a text", late: int = 1) -> Path:
    """A finished run with samples before and after, and the given text wherever a text can be."""
    with Training(folder, ranks=3, total=2) as run:
        for step in range(3):
            if step:
                run.step(late=late, **{f"reward/{text}": 0.5 * step})
            talk = {"messages": [{"role": text, "content": text}], "turns": 1, "tool_calls": 1, "ended": text}
            talk |= {"environment_seconds": 0.1, "turn_rewards": [0.5]}
            scores = {text: 0.5, "other": 0.25}
            name = text.replace("/", "|")[:80]
            run.validate(Record(text, step / 4, text, 0, ground_truth=text, scores=scores), name=name)
            run.validate(Record(text, step / 4, text, 0, conversation=talk), name="talks")
            run.validate(Record(text, step / 4, picture(step, 64, 64), 0), name="pictures")
        run.warn(0, text)
        run.say(0, text)
        run.end()
    (folder / "config.yaml").write_text(f"trainer: {{experiment_name: {text!r}, total_training_steps: 2}}\n")
    return folder


def an_evaluation(folder: Path, text: str = "a text") -> Path:
    """The page of an evaluation against a baseline."""
    sides = []
    for side in range(2):
        rows = []
        for index in range(4):
            row = {"set": text[:40], "index": index, "sample": 0, "prompt": f"{index} {text}", "text": f"{side} {text}"}
            row |= {"tokens": 3, "truncated": False, "reward": float((index + side) % 2), "columns": {"level": text}}
            rows.append(row | {"scores": {text: float((index + side) % 2)}, "answers": {text: text}})
        sides.append(rows)
    folder.mkdir()
    head = {"model": f"models/{text}", "baseline": text, "arguments": {"model": {"path": text}}}
    result = result_of(sides[0], EvaluateConfig(group_by="level"), head, sides[1])
    return write_page(folder, result, Side(sides[0], folder), Side(sides[1], folder))


def newest_steps(page: Page) -> list[str]:
    return page.locator("figure.chart .u-legend .u-series:first-child .u-value").all_inner_texts()


def unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")


def test_a_report_of_a_finished_run(tmp_path: Path, visitor: Visitor) -> None:
    page = visitor.open(write_report(a_run(tmp_path / "run")))
    expect(page.locator("h1")).to_have_text("a text")
    assert {step for step in newest_steps(page) if step} == {"2"}
    expect(page.locator("#ranks .table tbody tr")).to_have_count(3)
    expect(page.locator("#ranks .note")).to_contain_text("The others waited for: rank 1 (1.6 s)")
    expect(page.locator("#ranks input[type=range]")).to_be_disabled()
    expect(page.locator("#ranks .log")).to_have_count(0)

    top, parts = 0.0, page.locator("nav a").evaluate_all("links => links.map((link) => link.hash)")
    assert parts == ["#samples", "#curves", "#ranks", "#tables"]
    for part in parts:  # in the order in which they are listed
        box = page.locator(part).bounding_box()
        assert box is not None and box["y"] > top
        top = box["y"]
    assert page.evaluate("JSON.parse(document.getElementById('of-ranks').textContent)[0].step") == 2

    page.locator(".side img").first.focus()  # enlarged, flipped and closed without a mouse
    page.keyboard.press("Enter")
    dialog = page.locator("dialog")
    pressed = dialog.locator("button[aria-pressed=true]")
    before = pressed.inner_text()
    page.keyboard.press("ArrowRight")
    assert pressed.inner_text() != before
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)

    slider = page.locator("input[data-steps]").first
    shown = page.locator("#samples .set").first
    slider.focus()
    page.keyboard.press("Home")
    expect(shown).to_contain_text("Step 0")
    assert all(url.startswith(("file:", "data:")) for url in visitor.requests)


def test_a_report_without_scripts(tmp_path: Path, visitor: Visitor) -> None:
    page = visitor.open(write_report(a_run(tmp_path / "run")), scripts=False)
    assert page.locator("noscript p").inner_text() == "Curves need JavaScript; below are their figures."
    assert page.locator(".side img").first.bounding_box() is not None
    page.get_by_text("All metrics in figures").click()
    expect(page.get_by_role("rowheader", name="reward/mean")).to_be_visible()


@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_written_pages_fit(tmp_path: Path, device: dict[str, Any], scheme: str, visitor: Visitor) -> None:
    word = "word" * 100
    runs = [a_run(tmp_path / name, word[:60]) for name in ("one", "two")]
    for path in (
        write_report(runs[0]),
        write_report(*runs),
        write_report(tmp_path),
        an_evaluation(tmp_path / "evaluation", word),
    ):
        page = visitor.open(path, scheme, **device)
        unfold(page)
        check_looks(page, scheme)


def test_texts_run_nothing_and_ask_for_nothing(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    """On the live page, initially and after an update, in the report, the comparison and an evaluation's page."""
    one, two = a_run(tmp_path / "one", EVIL), a_run(tmp_path / "two", EVIL)
    for folder in (one, two):  # JSON is YAML
        config = {"trainer": {"experiment_name": EVIL}, "model": {"path": f"{EVIL}{folder.name}", EVIL: folder.name}}
        (folder / "config.yaml").write_text(json.dumps(config | {"optim": {f"x{k}": folder.name for k in range(4)}}))
    (one / "running.json").write_text('{"beat": 1, "token": "t", "pid": 1, "host": "h"}')
    addresses = [serve(one).url, serve(one, two).url, write_report(one), write_report(one, two), write_report(tmp_path)]
    addresses.append(serve(tmp_path).url)
    for address in [*addresses, an_evaluation(tmp_path / "evaluation", EVIL)]:
        page = visitor.open(address)
        expect(page.get_by_text(EVIL[:20], exact=False).first).to_be_attached()
        if isinstance(address, str) and page.locator("#ranks").count():
            expect(page.locator("#ranks .log")).to_have_text(f"rank 0 begins\n{EVIL}\n")
            expect(page.locator("#ranks .events")).to_contain_text(EVIL[:LONGEST_EVENT])
        unfold(page)
        page.wait_for_timeout(300)
        assert page.evaluate("window.ran") is None
        link = "a[href]:not([href^='#']):not([href$='/report.html']):not([href^='/?of='])"  # to parts, and to runs
        assert page.locator(f"iframe, object, form, link, base, svg, {link}, video").count() == 0


def test_what_the_checks_would_see(browser: Browser, tmp_path: Path) -> None:
    """The checks find texts used as markup, pages that are too wide, and texts in the colour of their background."""
    path = tmp_path / "page.html"
    path.write_text(
        f"<img src='{AWAY}/b.png'><script>console.error('no')</script><p>{escape(EVIL)}</p>" + "<p>a</p>" * 30
    )
    visitor = Visitor(browser)
    page = visitor.open(path)
    assert visitor.strangers() == [f"{AWAY}/b.png"] and "no" in visitor.errors
    for style, words in (("p{width:3000px}", "pixels"), ("p{color:#999}", "'a'"), ("body{background:#777}", "min")):
        page.set_content(f"<style>body{{background:#fff}}{style}</style>" + "<p>a</p>" * 30)
        with pytest.raises(AssertionError, match=words):
            check_looks(page, "light")
    visitor.close()
