"""How fast the pages are in a real Chromium, with 5,000 episodes and an episode of 5,000 steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Tab
from .made import Server

SCROLL = """([by, frames]) => new Promise((done) => {
    let n = 0, most = 0;
    const move = () => {
        scrollBy(0, by);
        most = Math.max(most, document.getElementsByTagName("*").length);
        ++n < frames ? requestAnimationFrame(move) : setTimeout(() => done([most, scrollY]), 300);
    };
    requestAnimationFrame(move);
})"""


def longest_task(trace: dict[str, Any]) -> float:
    """The most processor time, in milliseconds, that one task of the page's main thread took.

    Processor time, since a busy machine stretches every task. Tasks of the debugging protocol are left out.
    """
    events = trace["traceEvents"]
    main = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    own = [event for event in events if event.get("ph") == "X" and (event["pid"], event["tid"]) in main]
    debugging = [event["ts"] for event in own if "DevToolsSession" in json.dumps(event.get("args", {}))]
    tasks = [event for event in own if event["name"].endswith("RunTask")]
    assert len(tasks) > 100, "nothing was traced"
    shown = [
        task.get("tdur", 0) / 1000
        for task in tasks
        if not any(task["ts"] <= at <= task["ts"] + task["dur"] for at in debugging)
    ]
    return max(shown)


@pytest.mark.parametrize(
    ("address", "ready", "by"),
    [("/runs/big", ".vt-body .open", 220), ("/runs/small/episodes/long", ".turn article[aria-label]", 180)],
)
def test_scrolling_makes_no_long_task_and_the_document_stays_small(
    address: str, ready: str, by: int, shared: Server, browser: Any
) -> None:
    tab = Tab(browser)
    page = tab.open(shared.url + address)
    page.wait_for_selector(ready)
    page.evaluate(SCROLL, [by, 5])  # what is compiled at first
    browser.start_tracing(page=page, categories=["toplevel"])
    most, place = page.evaluate(SCROLL, [by, 150])
    longest = longest_task(json.loads(browser.stop_tracing()))
    tab.context.close()
    print(f"{address}: longest task {longest:.0f} ms, at most {most} elements")
    assert place > 100 * by, "it did not scroll"
    assert longest < 50
    assert most < 2500


@pytest.mark.parametrize("address", ["/runs/big", "/runs/small/episodes/long", "/training/grpo-a"])
def test_the_first_paint_comes_within_a_second(address: str, shared: Server, browser: Any) -> None:
    """The best of five counts: other processes delay a paint, and never hasten it."""
    paints = []
    for _ in range(5):
        tab = Tab(browser)
        page = tab.open(shared.url + address)
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 1e9"))
        tab.context.close()
        if paints[-1] < 1000:
            break
    print(f"{address}: first paint after {min(paints):.0f} ms")
    assert min(paints) < 1000
