"""Measure how fast a hub's page in the browser paints, reacts and updates.

Run as `python -m benchmarks.page`. Debian's chromium, driven by Playwright, shows made fleets of 3,
300 and 10,000 devices, a tenth of which changes every second. Then the hub of three agents is
killed and resumed while the page is open. The exit code is 1 if a bound is exceeded.
"""

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from benchmarks.report import UNFIT, Form, Results, benchmark, show_progress
from tests.support.browser.made_fleet import MadeFleet
from tests.support.browser.page_server import PageServer
from tests.support.programs.processes import Commands, free_address

PAINT_MS_MAX = 1000.0
REACTION_MS_MAX = 100.0
RETURN_S_MAX = 3.0
FRAME_MS = 16.0
"""Shortest measured reaction. The browser draws no sooner than the next frame."""

SIZE = {"width": 1280, "height": 800}
REACTIONS = ("typing, ms", "sorting, ms", "opening a device, ms", "scrolling, ms")
ROW = ".rows [role=row]:not([hidden])"

WATCH = """
window.reactions = [];
new PerformanceObserver(list => {
  for (const entry of list.getEntries()) if (entry.interactionId) window.reactions.push(entry.duration);
}).observe({ type: "event", durationThreshold: 16 });
const look = () => {
  if (document.querySelector(".rows [role=row]:not([hidden])")) window.firstRow = performance.now();
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
"""Records the time from each key or click to the next frame, and the time of the first row."""

VERSION = "Number(document.querySelectorAll('#figures dd')[2].textContent.replaceAll(',', ''))"
"""What the page shows as the model's version: a made fleet has a new one each second."""

UNTIL_ROW = """
() => new Promise(done => {
  const look = () => window.firstRow ? done() : requestAnimationFrame(look);
  look();
})
"""

FRAMES = """
() => new Promise(done => {
  const grid = document.querySelector("[role=grid]"), last = 30;
  let worst = 0, before = performance.now(), frame = 0;
  const next = now => {
    worst = Math.max(worst, now - before);
    before = now;
    frame += 1;
    if (frame > last) return done(worst);
    grid.scrollTop = (frame % 2 ? frame : last - frame) / last * grid.scrollHeight;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})
"""
"""Jumps through the table, and returns the longest time between two frames."""


@dataclass(frozen=True)
class Effort:
    """How many devices to show, how often to load the page, to repeat each reaction and to kill a hub.

    `gone_s` is how long a killed hub is gone. After 8 s, the page retries as rarely as it ever does.
    """

    counts: tuple[int, ...]
    loads: int
    repeats: int
    kills: int
    gone_s: float


EFFORTS = {
    Form.FULL: Effort((3, 300, 10_000), 7, 12, 10, 8.0),
    Form.SHORT: Effort((3, 300, 10_000), 3, 4, 4, 8.0),
    Form.QUICK: Effort((3,), 1, 1, 1, 0.0),
}


@contextlib.contextmanager
def ticking(server: PageServer) -> Iterator[None]:
    """Send an update every second, from a thread."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(1.0):
            server.tick()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure_loads(browser: Browser, url: str, loads: int) -> dict[str, float]:
    """Load the page several times; return the medians."""
    paints, rows = [], []
    for _ in range(loads):
        with contextlib.closing(browser.new_context(viewport=SIZE)) as context:  # type: ignore[arg-type]
            page = context.new_page()
            page.add_init_script(WATCH)
            page.goto(url)
            page.evaluate(UNTIL_ROW)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            rows.append(page.evaluate("window.firstRow"))
    return {"first paint, ms": statistics.median(paints), "first rows, ms": statistics.median(rows)}


def measure_reactions(page: Page, repeats: int) -> dict[str, float]:
    """Type, sort, scroll and open devices; return the longest reactions."""
    reactions = {
        "typing": type_filter,
        "sorting": lambda page: page.get_by_role("button", name="loss", exact=True).click(),
        "opening a device": open_device,
    }
    worst = {}
    for name, act in reactions.items():
        page.evaluate("window.reactions.length = 0")
        for _ in range(repeats):
            act(page)
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        worst[f"{name}, ms"] = max([FRAME_MS, *page.evaluate("window.reactions")])
    worst["scrolling, ms"] = max(page.evaluate(FRAMES) for _ in range(repeats))
    return worst


def type_filter(page: Page) -> None:
    """Filter the table with the keyboard, and remove the filter again."""
    page.keyboard.press("/")
    page.keyboard.type("pump-1")
    page.keyboard.press("Escape")


def open_device(page: Page) -> None:
    """Open a device with the mouse, wait until it is shown, and close it."""
    page.locator(ROW).first.locator("[role=gridcell]").nth(2).click()
    page.locator("#device dl").first.wait_for()
    page.keyboard.press("Escape")


def measure_updates(page: Page, session: CDPSession, count: int) -> dict[str, float]:
    """Return the processor time of the page's thread per update, while nobody touches the page."""
    before, begun = read_metrics(session), version_of(page)
    time.sleep(count)  # a loop in the page that waits for a version would itself be measured
    after, ended = read_metrics(session), version_of(page)
    return {"work per update, ms": 1e3 * (after["TaskDuration"] - before["TaskDuration"]) / max(1, ended - begun)}


def version_of(page: Page) -> int:
    """Return the version that the page shows."""
    return int(page.evaluate(VERSION))


def read_metrics(session: CDPSession) -> dict[str, float]:
    """Return the browser's counters of a page."""
    return {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}


def measure(browser: Browser, count: int, effort: Effort) -> dict[str, float]:
    """Measure the page of a fleet; return the table's columns."""
    with PageServer(MadeFleet(count)) as server, ticking(server):
        columns = measure_loads(browser, server.url, effort.loads)
        context: Any = browser.new_context(viewport=SIZE)  # type: ignore[arg-type]
        with contextlib.closing(context):
            page = context.new_page()
            session = context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            page.add_init_script(WATCH)
            page.goto(server.url)
            page.evaluate(UNTIL_ROW)
            columns |= measure_reactions(page, effort.repeats)
            columns |= measure_updates(page, session, max(2, effort.repeats // 2))
    return columns


def measure_returns(browser: Browser, effort: Effort) -> dict[str, float]:
    """Kill and resume a hub several times; return how soon the page is alive after the hub listens."""
    with tempfile.TemporaryDirectory() as folder, Commands(folder) as commands:
        flags = ("--bind", free_address(), "--page", free_address().removeprefix("tcp://"))
        settings = commands.settings()
        hub, address = commands.hub(settings, *flags)
        for number in range(3):
            commands.agent(address, f"device-{number}")
        page = browser.new_page()
        page.goto(hub.wait_for("page")["detail"].partition(";")[0])
        live, returns = page.locator("#connection[data-state=live]"), []
        live.wait_for()
        for _ in range(effort.kills):
            hub.kill()
            page.locator("#connection[data-state=disconnected]").wait_for()
            time.sleep(effort.gone_s)
            hub, _ = commands.hub(settings, *flags)
            listens_s = time.monotonic()
            live.wait_for()
            returns.append(time.monotonic() - listens_s)
        page.close()
    return {"median, s": statistics.median(returns), "longest, s": max(returns)}


@benchmark("Speed of a hub's page in the browser.", parts=("fleets", "kills"))
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure each fleet."""
    path = shutil.which("chromium")
    if path is None:
        show_progress("page: needs chromium; install Debian's package chromium")
        sys.exit(UNFIT)
    effort = EFFORTS[arguments.form]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for count in effort.counts if "fleets" in arguments.part else ():
            show_progress(f"{count} devices")
            columns = measure(browser, count, effort)
            results.add("devices", f"{count:,}", columns, digits=1)
            slowest = max(value for name, value in columns.items() if name in REACTIONS)
            results.bound(f"{count:,} devices, first paint", columns["first paint, ms"], PAINT_MS_MAX)
            results.bound(f"{count:,} devices, slowest reaction", slowest, REACTION_MS_MAX)
        if "kills" in arguments.part:
            show_progress("kills")
            returns = measure_returns(browser, effort)
            results.add("alive after the hub listens again", "page", returns)
            results.bound("page alive after a kill", returns["longest, s"], RETURN_S_MAX)
        browser.close()


if __name__ == "__main__":
    main()
