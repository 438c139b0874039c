"""Pages in Chromium: their requests and their appearance."""

import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Dialog, Page

from phalanx.tools.board.watch import Server, watcher_of

DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 3, "is_mobile": True}
PHONE["has_touch"] = True
# The visible texts, with their contrast to the background by the formula of WCAG 2.
CONTRASTS = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (!text || !element.checkVisibility() || element.closest("script, style, template, option")) continue;
    let below = element;
    while (below && (parts(getComputedStyle(below).backgroundColor)[3] ?? 1) === 0) below = below.parentElement;
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(below ?? document.body).backgroundColor];
    const [one, two] = [light(parts(a)), light(parts(b))];
    found.push([(Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05), text.slice(0, 40)]);
  }
  return found;
}"""


class Visitor:
    """Opens pages, and records their requests and errors."""

    def __init__(self, browser: Browser) -> None:
        self._browser, self._contexts = browser, list[Any]()
        self.requests: list[str] = []
        self.errors: list[str] = []

    def open(self, address: str | Path, scheme: str = "light", scripts: bool = True, **device: Any) -> Page:
        """Open a page, from an address or a file, in a fresh browser context."""
        options = device or DESKTOP
        context = self._browser.new_context(color_scheme=scheme, java_script_enabled=scripts, **options)
        context.set_default_timeout(15_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("popup", lambda popup: self.errors.append(f"a window was opened: {popup.url}"))
        page.goto(address.as_uri() if isinstance(address, Path) else address)
        return page

    def _dialog(self, dialog: Dialog) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def strangers(self) -> list[str]:
        """Requests to anything but this machine's files and loopback address."""
        others = []
        for url in self.requests:
            address = urlsplit(url)
            if address.scheme not in ("data", "file", "blob") and address.hostname != "127.0.0.1":
                others.append(url)
        return others

    def expect_errors(self, words: str) -> None:
        """Close the pages; check that there were errors and that all of them contain these words."""
        self.close()
        errors, self.errors = self.errors, []
        assert errors != [] and [error for error in errors if words not in error] == []

    def close(self) -> None:
        while self._contexts:
            self._contexts.pop().close()


class Site:
    """A server of `phalanx watch`."""

    def __init__(self, *folders: Path, token: str | None = None, port: int = 0) -> None:
        self.server = Server(watcher_of(folders), "127.0.0.1", port, token)
        self.url, self.port = self.server.url, self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def check_looks(page: Page, scheme: str) -> None:
    """Check that a page fits the width of its window, follows the colour scheme, and has readable texts."""
    page.wait_for_timeout(100)
    width, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= window == page.viewport_size["width"], f"{width} of {window} pixels"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    if scheme == "dark":
        assert max(background) < 60
    else:
        assert min(background) > 230
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    assert [(ratio, text) for ratio, text in contrasts if ratio < 4.5] == []


def frame_ms(page: Page, act: str, frames: int = 60) -> float:
    """Milliseconds of a processor that the page's main thread takes per frame: for scripts, style, layout and painting,
    without what the thread waits for where the machine is loaded. act: a function in JavaScript of the frame's number.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    seconds = []
    for count in (5, frames):  # the first frames warm up
        before = _task_seconds(session)
        script = "for (let k = 0; k < {count}; k++) {{ ({act})(k); await new Promise(requestAnimationFrame); }}"
        page.evaluate(f"async () => {{ {script.format(count=count, act=act)} }}")
        seconds.append(_task_seconds(session) - before)
    session.detach()
    return 1000 * seconds[-1] / frames


def _task_seconds(session: Any) -> float:
    values = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return float(values["TaskDuration"])
