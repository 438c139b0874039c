"""`phalanx watch` in a browser, with runs whose files grow."""

import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from phalanx.telemetry.records import Record
from tests.browser.emulated import Training
from tests.browser.visits import DESKTOP, PHONE, Site, Visitor, check_looks
from tests.helpers.pages import picture

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "how much is 2 * 3?"},
    {"role": "assistant", "content": "calc(2 * 3)"},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": "It is six."},
]


def newest_step(page: Page) -> Locator:
    """The step whose values the first chart's legend shows: the last one."""
    return page.locator("figure.chart .u-legend .u-series:first-child .u-value").first


def test_a_run_is_followed_without_a_reload(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    with Training(tmp_path / "run") as run:
        for _ in range(3):
            run.step()
        page = visitor.open(serve(run.folder).url)
        page.evaluate("window.since = 'the beginning'")
        status = page.locator("#ranks .status")
        expect(status).to_contain_text("running · step 3 of 20")
        expect(newest_step(page)).to_have_text("3")
        expect(page.locator("#samples")).not_to_contain_text("a lighthouse")
        page.get_by_label("Log of rank").select_option("2")
        expect(page.locator("#ranks .log")).to_contain_text("rank 2 begins")

        run.step(**{"actor/kl": 0.25})  # a new curve
        run.validate(Record("a lighthouse", 0.5, picture(1), 0), name="pictures")
        talk = {
            "messages": TALK,
            "turns": 2,
            "tool_calls": 1,
            "ended": "stop",
            "environment_seconds": 0.1,
            "turn_rewards": [],
        }
        run.validate(Record("how much is 2 * 3?", 1.0, "It is six.", 0, conversation=talk))
        run.warn(3, "step 4: an update is skipped")
        run.say(2, "a new line")
        expect(status).to_contain_text("running · step 4 of 20")
        expect(newest_step(page)).to_have_text("4")
        expect(page.locator("#samples")).to_contain_text("a lighthouse")
        expect(page.locator("#samples")).to_contain_text("It is six.")
        expect(page.locator("#ranks .log")).to_contain_text("a new line")
        expect(page.locator("#ranks .events")).to_contain_text("step 4: an update is skipped")
        expect(page.locator("#ranks .events")).to_contain_text("validation")
        assert page.locator("#samples img").first.evaluate("image => image.naturalWidth") > 0
        expect(page.get_by_text("kl", exact=False).first).to_be_attached()

        run.step()
        run.end()
    expect(status).to_contain_text("finished · step 5 of 20")
    expect(page.locator("#ranks tbody tr").first).to_contain_text("finished")
    assert page.evaluate("window.since") == "the beginning"
    assert visitor.requests.count(page.url) == 1


def test_64_ranks_and_who_waits_for_whom(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    with Training(tmp_path / "run", ranks=64) as run:
        run.step(late=5)
        run.step(late=37)
        run.beat(silent=9)
        page = visitor.open(serve(run.folder).url)
        rows = page.locator("#ranks .table tbody tr")
        expect(rows).to_have_count(64)
        expect(page.locator("#ranks .status")).to_contain_text("64 ranks on 8 hosts")
        expect(rows.nth(9)).to_have_class("silent")
        expect(page.locator("#ranks tr.silent")).to_have_count(1)
        cells = rows.nth(12).locator("th, td").all_inner_texts()
        assert cells[:4] == ["12", "node-1", "3", "rollout 1/2"]
        assert cells[6:] == ["13.50 GB", "21 tokens/s", "60 %", "0.8 s"]
        assert rows.nth(37).locator("td").all_inner_texts()[-2:] == ["100 %", "0 s"]
        blame = page.locator("#ranks .note")
        expect(blame).to_contain_text("The others waited for: rank 37 (50.4 s). That is 39.4 % of the time of 64 ranks")
        canvas = page.locator("#ranks canvas")
        assert "waited for: rank 37" in (canvas.get_attribute("aria-label") or "")
        pointed = page.locator("#ranks .pointed")
        box = canvas.bounding_box()
        assert box is not None
        share = (box["width"] - 68) / 2.0  # pixels per second, to the right of the names
        for rank, at, words in (
            (2, 0.8, "rank 2: rollout, 1.2 s; waits 0.8 s for rank 37"),
            (37, 1.6, "rank 37: update, 0.8 s"),
        ):
            canvas.hover(position={"x": 64 + share * at, "y": 14 * rank + 7})
            expect(pointed).to_have_text(words)
        before = page.locator("#ranks input[type=range]")
        before.focus()
        page.keyboard.press("ArrowLeft")  # the previous step
        expect(blame).to_contain_text("The others waited for: rank 5 (")
        time.sleep(2.5)  # updates do not change the selected step
        expect(blame).to_contain_text("The others waited for: rank 5 (")
        colours = canvas.evaluate(
            """canvas => {
              const pen = canvas.getContext("2d"), ratio = devicePixelRatio, colours = new Set();
              for (let x = 66; x < canvas.width / ratio - 8; x++) {
                colours.add(pen.getImageData(x * ratio, (14 * 20 + 6) * ratio, 1, 1).data.join());
              }
              return colours.size;
            }"""
        )
        assert colours >= 3  # the bars of two phases and the hatching of a wait


def test_two_runs(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    with Training(tmp_path / "one") as one, Training(tmp_path / "two", ranks=8) as two:
        for run in (one, two):
            run.step()
            run.step()
        page = visitor.open(serve(one.folder, two.folder).url)
        expect(page.locator("h1")).to_have_text("Comparison of 2 runs")
        expect(page.locator("#ranks .table tbody tr")).to_have_count(4)
        page.get_by_label("Run", exact=True).select_option("two")
        expect(page.locator("#ranks .table tbody tr")).to_have_count(8)
        names = page.locator("figure.chart").first.locator(".u-legend .u-series:not(.companion) th").all_inner_texts()
        assert any("two" in name for name in names)
        two.step()
        expect(page.locator("#ranks .status")).to_contain_text("running · step 3 of 20")


def test_a_server_that_goes_and_comes_back(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    with Training(tmp_path / "run") as run:
        run.step()
        site = serve(run.folder)
        page = visitor.open(site.url)
        status = page.locator("#ranks .status")
        expect(status).to_contain_text("step 1 of 20")
        site.close()
        expect(status).to_contain_text("no answer of phalanx watch: ")
        run.step()
        again = Site(run.folder, port=site.port)
        expect(status).to_contain_text("running · step 2 of 20")
        visitor.expect_errors("Failed to load resource: net::ERR_CONNECTION_")
        again.close()


def test_a_folder_that_goes_and_comes_back(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    with Training(tmp_path / "run") as run:
        run.step()
    page = visitor.open(serve(run.folder).url)
    status = page.locator("#ranks .status")
    expect(status).to_contain_text("step 1 of 20")
    run.folder.rename(tmp_path / "elsewhere")
    expect(status).to_have_text(f"{run.folder} no longer exists")
    (tmp_path / "elsewhere").rename(run.folder)
    expect(status).to_contain_text("step 1 of 20")
    visitor.expect_errors("400 (Bad Request)")


def test_a_token_goes_with_all_requests(tmp_path: Path, visitor: Visitor, serve: Any) -> None:
    with Training(tmp_path / "run") as run:
        run.step()
        page = visitor.open(serve(run.folder, token="t0ken").url)
        expect(page.locator("#ranks .status")).to_contain_text("step 1 of 20")
        expect(newest_step(page)).to_have_text("1")
        assert all("token=t0ken" in url for url in visitor.requests if url.startswith("http"))


@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits(tmp_path: Path, device: dict[str, Any], scheme: str, visitor: Visitor, serve: Any) -> None:
    """Even with extremely long words."""
    with Training(tmp_path / "run", ranks=64) as run:
        run.step(late=63)
        run.step(late=63)
        run.validate(Record("word" * 200, 0.5, picture(1), 0), name="pictures")
        run.validate(Record("word" * 200, 0.5, "word" * 200, 0), name="a_set_with_a_long_name" * 3)
        run.warn(3, "word" * 200)
        run.say(0, "word" * 200)
        page = visitor.open(serve(run.folder).url, scheme, **device)
        expect(page.locator("#ranks .table tbody tr")).to_have_count(64)
        expect(page.locator("#ranks .log")).to_contain_text("word")
        check_looks(page, scheme)
