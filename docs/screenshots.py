"""The pictures of the documentation, made from real runs by the commands that users type.

    make screenshots

Runs ``clawgym demo`` and an evaluation of desktop tasks, which takes about three minutes, and writes
``docs/images/*.png``. Needs the programs of a desktop (``make system``). The site is published with new pictures.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).with_name("images")
DESKTOP, PHONE, FOUR_TILES = (1280, 800), (390, 844), (1280, 1150)
CLAWGYM = str(Path(sys.executable).with_name("clawgym"))
FEW_COLOURS = 128
"""A palette makes a picture of a page three times smaller."""


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--demo", type=Path, metavar="RUNS", help="a folder of `clawgym demo`, instead of a new one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        demo = given.demo or Path(folder, "demo")
        if not given.demo:
            subprocess.run([CLAWGYM, "demo", "--out", str(demo)], check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), chromium_sandbox=False)
        picture(browser, demo / "sloppy/report.html", "report", DESKTOP)
        picture(browser, demo / "sloppy/report.html", "report-phone", PHONE)
        picture(browser, demo / "trained/report.html", "training-report", DESKTOP)
        watch(browser, Path(folder, "gui"))
        browser.close()


def picture(browser: Browser, page: Path, name: str, size: tuple[int, int]) -> None:
    """Write ``docs/images/NAME.png``, of the top of a file's page in a window of ``size`` (width, height) pixels."""
    tab = browser.new_page(viewport={"width": size[0], "height": size[1]}, device_scale_factor=1)
    tab.goto(page.resolve().as_uri())
    _save(tab.screenshot(), name)
    tab.close()


def watch(browser: Browser, run: Path) -> None:
    """Write ``docs/images/watch.png``: the live page of ``clawgym view`` beside an evaluation of desktop tasks."""
    evaluation = subprocess.Popen([CLAWGYM, "eval", "gui-basic", "--agent", "oracle", "-j", "4", "--out", str(run)])
    page = subprocess.Popen([CLAWGYM, "view", str(run.parent)], stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        address = next(found[0] for line in page.stdout if (found := re.search(r"http://\S+", line)))
        tab = browser.new_page(viewport={"width": FOUR_TILES[0], "height": FOUR_TILES[1]}, bypass_csp=True)
        tab.goto(f"{address}live")
        tab.wait_for_function("document.querySelectorAll('main img').length >= 4", timeout=120_000)
        tab.wait_for_function("[...document.images].every(image => image.complete && image.naturalWidth)")
        _save(tab.screenshot(), "watch")
    finally:
        for process in (page, evaluation):
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _save(png: bytes, name: str) -> None:
    Image.open(BytesIO(png)).convert("RGB").quantize(FEW_COLOURS).save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
