"""The tutorials run from top to bottom: their files, and their commands in order."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)(?: title=\"(.*?)\")?\n(.*?)^```", re.M | re.S)
FIRST_TERMINAL = "first terminal"


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Language, title and text of each block."""
    return BLOCK.findall((TUTORIALS / page).read_text())


@contextlib.contextmanager
def gateway(command: str, folder: Path, env: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run the gateway of a page; yields the values that it prints."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        printed: dict[str, str] = {}
        while "pool" not in printed and (line := process.stdout.readline()):
            name, _, value = line.partition(":")
            printed[name] = value.strip()
        assert {"base_url", "api_key", "pool"} <= set(printed)
        yield printed
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def run(page: str, folder: Path) -> str:
    """Write the files of a page and run its commands in one shell. Returns what they print."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    found = blocks(page)
    for language, title, text in found:
        if title and language != "bash":
            (folder / title).write_text(text)
    commands = [text for language, title, text in found if language == "bash" and not title and "pip " not in text]
    (server,) = [text for _, title, text in found if title == FIRST_TERMINAL]
    before = [text for text in commands if "model.py" in text]
    for command in before:
        subprocess.run(["bash", "-ec", command], cwd=folder, env=env, check=True, timeout=120)
    with gateway(server, folder, env) as printed:
        script = "\n".join(text for text in commands if text not in before)
        script = script.replace("BASE_URL=BASE_URL", f"BASE_URL={printed['base_url']}")
        script = script.replace("--base-url BASE_URL", f"--base-url {printed['base_url']}")
        script = script.replace("API_KEY=API_KEY", f"API_KEY={printed['api_key']}")
        done = subprocess.run(["bash", "-ec", script], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_collect_tokens(tmp_path: Path) -> None:
    printed = run("collect-tokens.md", tmp_path)
    shown = "".join(text for language, _, text in blocks("collect-tokens.md") if language == "text")
    for line in ("  sequences 1 with 32 trained ids, 1.00 per episode", "1 exact", "62 ids, 32 sampled, 32 log-probs"):
        assert line in printed.splitlines()
        assert line in shown.splitlines()


@pytest.mark.usefixtures("openclaw")
def test_run_openclaw(tmp_path: Path) -> None:
    printed = run("run-openclaw.md", tmp_path)
    assert "100.0 [21, 100]" in printed
    assert '"name": "openclaw"' in printed
    assert printed.endswith("ids, 32 sampled, 32 log-probs\n")
