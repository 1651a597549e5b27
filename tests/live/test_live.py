"""The live view: access, contents, and clean-up."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import clawgym  # noqa: F401  # registers the ids
from clawgym import live
from clawgym.live.page import Page
from clawgym.live.processes import Processes
from clawgym.live.registry import listening
from clawgym.viewer.sources import writer
from clawgym.visible import visible_lines

HOSTILE = "</script><img src=x onerror=alert(1)>\r\n\u2028\ud800"
MAIN = "from clawgym.cli import main; main()"
RUNS = """
    import os, sys, time
    from clawgym import live
    class Thing:
        def about(self):
            return {"task": "t0", "step": 3, "picture": 1}
        def picture(self):
            return b"a picture"
    thing = Thing()
    number = live.add(thing)
"""

opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str) -> bytes:
    with opener.open(url, timeout=10) as answer:
        return answer.read()


def until(true: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return found


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of our own where processes tell of themselves; the name of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="cg-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@contextlib.contextmanager
def program(rest: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has something to watch; ends when its stdin does."""
    code = textwrap.dedent(RUNS) + textwrap.dedent(rest)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_other_process_is_listed_until_it_ends_and_leaves_no_socket(runtime: Path) -> None:
    rest = """
        for n in range(2):
            sys.stdin.readline()
            print("clawgym.live.page" in sys.modules, flush=True)
            live.drop(number)
        sys.stdin.readline()
    """
    with program(rest) as other:
        (path,) = until(lambda: list((runtime / "clawgym").glob("*.sock")))
        assert stat.S_IMODE((runtime / "clawgym").stat().st_mode) == 0o700
        tell(other)
        assert line(other) == "False", "while nobody asks, nothing is loaded"
        assert Processes(other.pid).all() == [], "what is dropped is not seen"
        assert Processes(other.pid + 1).all() == []
        tell(other)
        assert line(other) == "True"
        assert path.exists()
        tell(other)
        other.wait(10)
    assert not list(runtime.iterdir())


def test_screenshots_are_served_and_sockets_of_killed_processes_removed(runtime: Path) -> None:
    with program("sys.stdin.readline()") as other:
        (entry,) = until(lambda: Processes(other.pid).all())
        assert entry == {"task": "t0", "step": 3, "picture": 1, "id": entry["id"]}
        assert Processes().picture(entry["id"]) == b"a picture"
        for wrong in ("", "/", entry["id"] + "0", "../x/1", entry["id"].replace("/", "/../")):
            assert Processes().picture(wrong) is None
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert list((runtime / "clawgym").iterdir()), "nobody was there to take it away"
    assert list(listening()) == []
    assert Processes().all() == []
    assert not list((runtime / "clawgym").iterdir())


def test_socket_folder_open_to_others_is_not_used(runtime: Path) -> None:
    (runtime / "clawgym").mkdir(mode=0o755)
    (runtime / "clawgym").chmod(0o755)
    with program("time.sleep(0.5); print('runs', flush=True); sys.stdin.readline()") as other:
        assert line(other) == "runs", "it is no trouble of what runs"
        assert not list((runtime / "clawgym").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_socket_folder_of_another_user_is_not_used(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with program("sys.stdin.readline()"):
        until(lambda: len(Processes().all()) == 1)
        os.chown(runtime / "clawgym", 70_000, 70_000)
        assert Processes().all() == []
        monkeypatch.setattr(os, "getuid", lambda: int("70000"))
        assert len(Processes().all()) == 1
        monkeypatch.setattr(os, "getuid", lambda: int("70001"))
        assert Processes().all() == []


def test_unresponsive_process_hides_no_other(runtime: Path) -> None:
    with program("sys.stdin.readline()") as stopped, program("sys.stdin.readline()") as other:
        until(lambda: len(Processes().all()) == 2)
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: len(Processes().all()) == 1)  # a signal takes its time to reach every thread
        (entry,) = Processes().all()
        assert entry["id"].startswith(f"{other.pid}-")
        stopped.send_signal(signal.SIGCONT)


def test_forked_child_is_not_listed_as_its_parent(runtime: Path) -> None:
    rest = """
        sys.stdin.readline()
        if not (child := os.fork()):
            sys.exit(0 if not live.ThisProcess().all() else 1)  # with all that is done at an end
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        sys.stdin.readline()
    """
    with program(rest) as other:
        until(lambda: Processes(other.pid).all())
        tell(other)
        assert line(other) == "0"
        assert Processes(other.pid).all()


class Thing:
    def about(self) -> dict[str, Any]:
        return {"task": HOSTILE, "agent": "a", "step": 1, "action": "", "text": "", "picture": 2}

    def picture(self) -> bytes | None:
        return b"png"


def test_page_requires_its_secret_and_contains_no_task_text() -> None:
    thing = Thing()
    number = live.add(thing)
    page = Page(live.ThisProcess())
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", page.url)
        with opener.open(page.url, timeout=10) as answer:
            policy, text = answer.headers["Content-Security-Policy"], answer.read().decode()
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        nonces = set(re.findall(r'nonce="([^"]+)"', text))
        assert len(nonces) == 1
        assert f"script-src 'nonce-{nonces.pop()}'" in policy
        assert not re.search(r"https?://|innerHTML|eval\(", text)
        (entry,) = [entry for entry in json.loads(get(page.url + "all")) if entry["id"] == str(number)]
        assert entry["task"] == visible_lines(HOSTILE)  # as escapes
        assert get(f"{page.url}picture/{number}?2") == b"png"
        port = page.url.split("/")[2]
        for wrong in (f"http://{port}/", f"http://{port}/all", page.url[:-2] + "/all", page.url + "picture/x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(wrong)
    finally:
        page.close()
    live.drop(number)
    with pytest.raises(OSError):  # noqa: PT011  # whatever a system says where nobody listens
        get(page.url)


MARKUP = (
    "</b></article><script>document.title='forged'</script><img src=x onerror=\"document.title='forged'\">"
    "<svg onload=document.title='forged'><base href=//evil/><meta http-equiv=refresh content='0;url=//evil/'>"
    "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe>{{7*7}}${7*7}\x1b[2J\u202etxt\u2028\x00"
)


class Marked:
    def __init__(self, picture: Any) -> None:
        self.version = picture

    def about(self) -> dict[str, Any]:
        told = dict.fromkeys(("task", "agent", "action", "text"), MARKUP)
        return {**told, "step": MARKUP, "picture": self.version}

    def picture(self) -> bytes | None:
        return b"<html><script>document.title='forged'</script></html>"


class Tags(HTMLParser):
    """The elements of a page, and all their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)


def test_a_browser_shows_markup_of_a_task_as_text(tmp_path: Path) -> None:
    """In all fields, and in place of a screenshot."""
    if not (browser := shutil.which("chromium")):
        pytest.skip("no chromium here: make system")
    shown = [Marked(None), Marked(MARKUP), Marked(7)]
    numbers = [live.add(each) for each in shown]
    page = Page(live.ThisProcess())
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"]
    argv += ["--no-proxy-server", "--virtual-time-budget=4000", "--dump-dom", page.url]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, errors="replace")
    finally:
        page.close()
        for number in numbers:
            live.drop(number)
    dom = done.stdout
    assert dom.count("&lt;script&gt;document.title='forged'&lt;/script&gt;") >= 3 * 3, done.stderr[-1000:]
    seen = Tags(dom)
    assert "<title>ClawGym · live</title>" in dom
    assert seen.tags["script"] == 1
    assert not seen.tags.keys() & {"iframe", "svg", "base"}
    assert not [name for name in seen.attributes if name.startswith("on") or name in ("srcdoc", "http-equiv")]
    assert "\x1b" not in dom
    assert "\u202e" not in dom


def test_a_closed_page_is_not_served() -> None:
    page = Page(live.ThisProcess())
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", page.url)
    assert json.loads(get(page.url + "all")) == live.ThisProcess().all()
    page.close()
    page.close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "clawgym-page"]:
        thread.join(10)
        assert not thread.is_alive(), "a closed page is still served"


def test_collected_entries_are_not_shown() -> None:
    thing = Thing()
    number = live.add(thing)
    assert str(number) in [entry["id"] for entry in live.ThisProcess().all()]
    del thing
    assert str(number) not in [entry["id"] for entry in live.ThisProcess().all()]
    assert live.ThisProcess().picture(str(number)) is None
    live.drop(number)
    live.drop(number)


def test_an_environment_without_pictures_shows_none() -> None:
    with pytest.raises(ValueError, match="use 'ansi'"):
        gym.make("ClawGym/terminal-v0", render_mode="human")


@contextlib.contextmanager
def viewing(path: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], bytes]]]:
    """``clawgym view PATH``, and what asks it as its page does."""
    command = [sys.executable, "-c", MAIN, "view", str(path)]
    # Whoever started the tests in the background may have had them ignore SIGINT, which is inherited.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as view:
        try:
            found = re.search(r"(http://[^/]+)\S+", line(view))
            assert found
            cookies = urllib.request.HTTPCookieProcessor()
            browser = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)

            def ask(url: str) -> bytes:
                with browser.open(url, timeout=10) as answer:
                    return answer.read()

            ask(found[0])  # gives the cookie
            yield view, lambda path: ask(found[1] + path)
        finally:
            view.kill()


def test_view_shows_what_runs_by_run_and_ends_at_ctrl_c(runtime: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    rest = f"""
        from clawgym.records import TaskSet
        from clawgym.records.run_folder import RunFolder, make_manifest
        run = RunFolder.open({run!r}, make_manifest("eval", TaskSet("s", ())))
        print("open", flush=True)
        sys.stdin.readline()
    """
    with program(rest) as one, program("sys.stdin.readline()") as other:
        assert line(one) == "open"
        until(lambda: len(Processes().all()) == 2)
        assert writer(Path(run)) == one.pid
        with viewing(tmp_path) as (view, ask):
            shown = {found["pid"]: found for found in json.loads(ask("/api/live"))["runs"]}
            assert [shown[process.pid]["name"] for process in (one, other)] == ["run", f"process {other.pid}"]
            assert shown[one.pid]["source"].startswith("run-")
            (sandbox,) = shown[one.pid]["sandboxes"]
            assert (sandbox["task"], sandbox["turn"]) == ("t0", 3)
            assert ask(sandbox["picture"]) == b"a picture"
            tell(one)
            one.wait(10)
            assert [found["pid"] for found in json.loads(ask("/api/live"))["runs"]] == [other.pid]
            view.send_signal(signal.SIGINT)
            assert view.wait(20) == 0
        assert other.poll() is None
