"""The pictures of the documentation, made from real runs by the commands that users type.

    make screenshots

Runs ``clawgym demo`` and an evaluation of desktop tasks, which takes about ten minutes, and writes
``docs/images/*.png``. Needs the programs of a desktop (``make system``). The site is published with new pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from clawgym.pool.view import PoolView
from clawgym.records.run_folder import safe_name
from clawgym.reporting.page import source_id

IMAGES = Path(__file__).with_name("images")
DESKTOP, PHONE, FOUR_TILES = (1280, 800), (390, 844), (960, 1110)
CLAWGYM = str(Path(sys.executable).with_name("clawgym"))
FOUR_BUSY = """document.querySelectorAll('main img').length >= 4
    && document.querySelector('main').innerText.match(/turn [2-9]/g)?.length >= 4"""
"""There are pictures of four desktops whose agents have acted."""
FEW_COLOURS = 128
"""A palette makes a picture of a page three times smaller."""


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--demo", type=Path, metavar="RUNS", help="a folder of `clawgym demo`, instead of a new one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        demo = (given.demo or Path(folder, "demo")).resolve()
        if not given.demo:
            subprocess.run([CLAWGYM, "demo", "--out", str(demo)], check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), chromium_sandbox=False)
        sloppy, trained, pool = demo / "sloppy", demo / "trained", demo / "trained/pool.db"
        picture(browser, (sloppy / "report.html").as_uri(), "report", DESKTOP)
        picture(browser, (sloppy / "report.html").as_uri(), "report-phone", PHONE)
        picture(browser, (trained / "report.html").as_uri(), "training-report", DESKTOP)
        with viewer(demo) as address:
            run, other = source_id(sloppy.name, sloppy), source_id("oracle", demo / "oracle")
            picture(browser, f"{address}runs/{run}/episodes/{unsolved(sloppy)}", "view-episode", DESKTOP)
            picture(browser, f"{address}compare?a={run}&b={other}", "view-compare", DESKTOP)
            seq, turn = trained_turn(trained)
            of_pool = f"{address}pools/{source_id(trained.name, pool)}/episodes/{seq}"
            picture(browser, f"{of_pool}?tab=tokens&turn={turn}&by=advantage", "view-tokens", DESKTOP, dark=True)
        watch(browser, Path(folder, "gui"))
        browser.close()


def unsolved(run: Path) -> str:
    """The episode of a run that passed most of its checks without being solved."""
    rows = [json.loads(line) for line in (run / "results.jsonl").read_text("utf-8").splitlines()]
    row = max((row for row in rows if row["outcome"] == "failed"), key=lambda row: row["result"]["official"])
    return safe_name(row["task_id"], row["sample"])


def trained_turn(run: Path) -> tuple[int, int]:
    """An episode in the pool of a training, and the turn of it with the largest advantage in its newest step."""
    stored = json.loads(sorted((run / "advantages").iterdir())[-1].read_text("utf-8"))
    turns = [(abs(mean), id, int(turn)) for id, of in stored.items() for turn, (mean, _, _) in of.items()]
    _, id, turn = max(turns)
    view = PoolView(run / "pool.db")
    seq = view.find(id)
    view.close()
    assert seq is not None
    return seq, turn


def picture(browser: Browser, address: str, name: str, size: tuple[int, int], *, dark: bool = False) -> None:
    """Write ``docs/images/NAME.png``, of the top of a page in a window of ``size`` (width, height) pixels."""
    width, height = size
    scheme = "dark" if dark else "light"
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True)
    tab.goto(address)
    tab.wait_for_selector("main h1")
    tab.wait_for_function("!document.querySelector('.ghost') && document.fonts.status === 'loaded'")
    _save(tab.screenshot(), name)
    tab.close()


@contextmanager
def viewer(folder: Path) -> Iterator[str]:
    """``clawgym view`` of a folder: its address, which ends with a slash."""
    page = subprocess.Popen([CLAWGYM, "view", str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        yield next(found[0] for line in page.stdout if (found := re.search(r"http://\S+", line)))
    finally:
        page.send_signal(signal.SIGINT)
        page.wait(60)


def watch(browser: Browser, run: Path) -> None:
    """Write ``docs/images/watch.png``: the live page of ``clawgym view`` beside an evaluation of desktop tasks."""
    os.environ["XDG_RUNTIME_DIR"] = str(run.parent)  # whatever else runs on this machine is not on the page
    evaluation = subprocess.Popen([CLAWGYM, "eval", "gui-basic", "--agent", "oracle", "-j", "4", "--out", str(run)])
    try:
        with viewer(run.parent) as address:
            tab = browser.new_page(viewport={"width": FOUR_TILES[0], "height": FOUR_TILES[1]}, bypass_csp=True)
            tab.goto(f"{address}live")
            tab.wait_for_function(FOUR_BUSY, timeout=300_000)
            tab.evaluate("Promise.all([...document.images].map(image => image.decode()))")
            _save(tab.screenshot(), "watch")
            tab.close()
    finally:
        evaluation.send_signal(signal.SIGINT)
        evaluation.wait(180)


def _save(png: bytes, name: str) -> None:
    Image.open(BytesIO(png)).convert("RGB").quantize(FEW_COLOURS).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
