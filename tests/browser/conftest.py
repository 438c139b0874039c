"""Fixtures of the tests in Chromium."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

pytest.register_assert_rewrite("tests.browser.visits")

from tests.browser.visits import Site, Visitor

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The Chromium named by the variable CHROMIUM, otherwise the one on PATH."""
    names = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else NAMES
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        reason = f"no {' or '.join(names)}: `apt install chromium`, or CHROMIUM=<path of a Chromium or Chrome>"
        pytest.fail(reason, pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts servers: serve(folder, ...)."""
    sites: list[Site] = []

    def start(*folders: Path, **options: Any) -> Site:
        sites.append(Site(*folders, **options))
        return sites[-1]

    yield start
    for site in sites:
        site.close()


@pytest.fixture
def visitor(browser: Browser, serve: Any) -> Iterator[Visitor]:
    """A visitor whose pages may ask for nothing from elsewhere and have no errors. Its pages are closed
    before their servers are.
    """
    visitor = Visitor(browser)
    yield visitor
    visitor.close()
    assert visitor.strangers() == []
    assert visitor.errors == []
