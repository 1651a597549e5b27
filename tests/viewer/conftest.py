"""A real browser, and pages with made answers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym.agents.programs._npm import npm_command
from clawgym.errors import AgentError

from .made import Made, Server, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
WEB = Path(__file__).parents[2] / "web"


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources of the pages and with their packages, as the lock names them."""
    try:
        npm = npm_command()
    except AgentError:
        pytest.skip("no npm here")
    if not WEB.is_dir():
        pytest.skip("this is not a clone: it has no sources of the pages")
    folder = tmp_path_factory.mktemp("pages") / "web"
    shutil.copytree(WEB, folder, ignore=shutil.ignore_patterns("node_modules"))
    install = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=170)
    if done.returncode:
        pytest.skip(f"the npm registry does not answer: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    if not (program := shutil.which("chromium")):
        pytest.skip("no chromium here: make system")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=program, chromium_sandbox=False)
        yield found
        found.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """Pages that no test changes."""
    with serving() as server:
        yield server


@pytest.fixture
def server() -> Iterator[Server]:
    """Pages of one test."""
    with serving(Made()) as server:
        yield server


class Tab:
    """A page of the browser. What it complains about is in :attr:`complaints`."""

    def __init__(self, browser: playwright.Browser, **options: object) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(**options)  # type: ignore[arg-type]
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda told: self._note(told.text) if told.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self._note(str(error)))

    def _note(self, text: str) -> None:
        self.complaints.append(text)

    def open(self, url: str) -> playwright.Page:
        """Open an address and wait until the page shows something else than that it loads."""
        self.page.goto(url)
        self.page.wait_for_selector("main h1, main .state")
        return self.page


@pytest.fixture
def tab(browser: playwright.Browser) -> Iterator[Tab]:
    """A page that must not complain: no error on its console, and nothing that its policy forbids."""
    made = Tab(browser)
    yield made
    made.context.close()
    assert made.complaints == []
