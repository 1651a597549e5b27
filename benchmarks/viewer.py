"""How fast ``clawgym view`` is on a large run: ``python benchmarks/viewer.py [--episodes 5000] [--turns 100]``.

Makes a run folder with that many episodes of that many turns each, starts the server with an empty index, and prints as
JSON the times of its answers (the first ones, those while the index is made, and those afterwards), and how its pages
are shown in a real Chromium: the first paint, the longest task while scrolling, and the most elements in the document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from clawgym.records import (
    Episode,
    Observation,
    Outcome,
    Step,
    Task,
    TaskSet,
    ToolCall,
    Usage,
    VerifierResult,
    VerifierSpec,
)
from clawgym.records.atif import episode_to_atif
from clawgym.records.run_folder import RunFolder, make_manifest, result_row, safe_name

WORDS = (
    "report",
    "total",
    "invoice",
    "customer",
    "parse",
    "error",
    "retry",
    "column",
    "sum",
    "window",
    "archive",
    "note",
)
CHECKS = ("file exists", "total is right", "format", "no extra files", "names are kept")
WHEN = "2026-01-01T00:00:00+00:00"


def make_run(folder: Path, episodes: int, turns: int, seed: int = 0) -> None:
    """Write a run folder with made-up episodes; each step has about 500 characters."""
    chance = random.Random(seed)
    tasks = [
        Task(f"task-{n:05}", f"Work on part {n}.", VerifierSpec("scores"), metadata={"category": f"part-{n % 7}"})
        for n in range(episodes)
    ]
    manifest = make_manifest("eval", TaskSet("large", tuple(tasks)), agent={"name": "made-up", "version": "1"})
    with RunFolder.open(folder, manifest) as run, (folder / "results.jsonl").open("ab") as results:
        for n, task in enumerate(tasks):
            steps = [Step("user", task.instruction, WHEN)]
            for turn in range(turns):
                text = " ".join(chance.choices(WORDS, k=40))
                call = ToolCall(f"c{turn}", "bash", {"command": f"grep -n {chance.choice(WORDS)} part-{n}-{turn}.txt"})
                seen = Observation(" ".join(chance.choices(WORDS, k=30)), call.id)
                steps.append(Step("agent", text, WHEN, (call,), (seen,), usage=Usage(900, 60)))
            scores = {name: float(chance.random() < 0.8) for name in CHECKS}
            solved = all(scores.values())
            result = VerifierResult(scores, sum(scores.values()) / 5, float(solved), None)
            episode = Episode(
                task.id, task.content_hash, 0, n, "made-up", Outcome.SOLVED if solved else Outcome.FAILED,
                result=result, steps=tuple(steps), usage=Usage(900 * turns, 60 * turns, cost_usd=0.01),
                seconds={"setup": 0.4, "agent": 30 + 30 * chance.random(), "verify": 0.3},
            )  # fmt: skip
            path = run.path / "episodes" / safe_name(task.id, 0)
            path.mkdir(parents=True, exist_ok=True)
            (path / "transcript.json").write_text(json.dumps(episode_to_atif(episode)))
            results.write(json.dumps(result_row(episode)).encode() + b"\n")


async def measure(folder: Path, turns: int) -> dict[str, Any]:
    """The times of answers, in milliseconds."""
    import aiohttp

    from clawgym.viewer.server import open_viewer

    found: dict[str, Any] = {}
    started = time.perf_counter()
    async with (
        open_viewer([folder]) as viewer,
        aiohttp.ClientSession(
            cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=aiohttp.ClientTimeout(total=None)
        ) as client,
    ):
        await client.get(viewer.url)  # sets the cookie
        found["start"] = _ms(started)

        async def timed(address: str) -> tuple[float, Any]:
            began = time.perf_counter()
            async with client.get(f"{viewer.origin}/api/{address}") as answer:
                data = await answer.json()
                assert answer.status == 200, data
            return _ms(began), data

        found["sources, first"], sources = await timed("sources")
        (id,) = (source["id"] for source in sources["sources"] if source["kind"] == "run")
        found["episodes, first"], page = await timed(f"runs/{id}/episodes?limit=100")
        name = page["items"][0]["name"]
        addresses = {
            "run": f"runs/{id}",
            "episodes": f"runs/{id}/episodes?limit=100",
            "episodes, last page by cost": f"runs/{id}/episodes?limit=100&offset={page['total'] - 100}&sort=-cost",
            "episodes, one check not passed": f"runs/{id}/episodes?check=format",
            "episode": f"runs/{id}/episodes/{name}",
            "turns": f"runs/{id}/episodes/{name}/turns?offset={turns // 2}&limit=50",
            "search": "search?q=invoice%20window&limit=20",
            "search for a rare phrase": f'search?q="part-7-{turns - 1}.txt"&limit=20',
        }
        for when in ("while it indexes", "afterwards"):
            if when == "afterwards":
                async with asyncio.timeout(3600):
                    await _indexed(client, viewer.origin, id)
                found["index made, s"] = round(time.perf_counter() - started, 1)
            for what, address in addresses.items():
                found[f"{what}, {when}"] = round(median([(await timed(address))[0] for _ in range(5)]), 1)
        places = {
            "list of the run": (f"runs/{id}", ".vt-body .open"),
            "episode": (f"runs/{id}/episodes/{name}", ".turn article[aria-label]"),
            "search": ("search?q=invoice%20window", ".hit"),
        }
        found["pages"] = await asyncio.to_thread(measure_pages, viewer.url, places)
    return found


SCROLL = """([by, frames]) => new Promise((done) => {
    let n = 0, most = 0;
    const move = () => {
        scrollBy(0, by);
        most = Math.max(most, document.getElementsByTagName("*").length);
        ++n < frames ? requestAnimationFrame(move) : setTimeout(() => done([most, scrollY]), 300);
    };
    requestAnimationFrame(move);
})"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 1e9"


def measure_pages(url: str, places: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """For each place (address, selector of its rows): the first paint of five, and what :func:`scrolled` gives."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), chromium_sandbox=False)
        for what, (address, ready) in places.items():
            paints = []
            for _ in range(5):
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                page = context.new_page()
                page.goto(url + address)
                page.wait_for_selector(ready)
                paints.append(page.evaluate(PAINT))
                if len(paints) < 5:
                    context.close()
            page.evaluate(SCROLL, [200, 5])  # what is compiled at first
            longest, most, place = scrolled(browser, page, 200)
            context.close()
            found[what] = {
                "first paint, ms": [round(paint) for paint in sorted(paints)],
                "longest task while scrolling, ms": round(longest, 1),
                "most elements": most,
                "scrolled, pixels": round(place),
            }
        browser.close()
    return found


def scrolled(browser: Any, page: Any, by: int, frames: int = 150) -> tuple[float, int, float]:
    """Scroll by ``by`` pixels in each frame: the longest task of the main thread in milliseconds, the most elements of
    the document, and the place at the end.

    Processor time counts, since a busy machine stretches every task. Tasks of the debugging protocol are left out."""
    browser.start_tracing(page=page, categories=["toplevel"])
    most, place = page.evaluate(SCROLL, [by, frames])
    return longest_task(json.loads(browser.stop_tracing())), most, place


def longest_task(trace: Mapping[str, Any]) -> float:
    """The most processor time, in milliseconds, that one task of the page's main thread took."""
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


async def _indexed(client: Any, origin: str, id: str) -> None:
    """Wait for the events of a run until the search covers it, and its figures are computed."""
    async with client.get(f"{origin}/api/events") as events:
        while True:
            async with client.get(f"{origin}/api/runs/{id}") as answer:
                run = await answer.json()
            if run["summary"] and run["indexed"]["done"] == run["indexed"]["total"]:
                return
            await events.content.readline()


def _ms(began: float) -> float:
    return round(1000 * (time.perf_counter() - began), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5_000)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="Where the run is, or is made. Default: a temporary folder.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary, "large")
        if not (folder / "results.jsonl").exists():
            make_run(folder, given.episodes, given.turns)
        os.environ["XDG_CACHE_HOME"] = str(Path(temporary, "cache"))
        found = asyncio.run(measure(folder, given.turns))
    pages = found.pop("pages")
    size = {"episodes": given.episodes, "turns": given.episodes * given.turns}
    print(json.dumps({**size, "answers, ms": found, "pages": pages}, indent=1))


if __name__ == "__main__":
    main()
