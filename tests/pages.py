"""Run a page of the documentation: its commands and its Python blocks, from top to bottom, in one folder.

What a fence means:

==================================  ==================================================================================
``bash``                            commands, run by ``bash -e``
``console``                         commands after ``$``, each followed by the output that is shown for it
``python``                          a program that is run
``text``, or no language            the output shown for the block before it
a title, such as ``title="x.py"``   a file of this name; ``title="x.py (continued)"`` appends to it
``title="first terminal"``          a command that runs until the page ends. ``BASE_URL`` and ``API_KEY`` in later
                                    blocks stand for the values that it prints
``<!-- exit 1 -->`` before it       the exit status of the last command of the block
``<!-- any output: why -->``        what it prints may differ from what is shown
``<!-- not run: why -->``           the block is neither run nor output
==================================  ==================================================================================

The first tab of a set of tabs runs in the folder, each other tab in a copy of it. Commands that install are left out.
``MODEL`` and ``URL`` stand for a model and its endpoint. Commands with a model run a few tasks only (``--limit``).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(
    r"(?:^ *<!-- (?P<note>exit \d+|any output: .*?|not run: .*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>.*?)\")?\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
TAB = re.compile(r"^=== \"(.*)\"$", re.M)
INSTALLS = re.compile(r"(pip|git clone|python3 -m venv|make) ")
MODELS = re.compile(r"\b(MODEL|OTHER|SMALL|LARGE)\b")
UNSTABLE = re.compile(r"[\d.]+m[\d.]+s|[\d.]+ ?(ms|s|min|[KMG]iB)\b|\d{4,} ids\b")
PROGRESS = re.compile(r"\d+/\d+ strict |[a-z ]+: \d+/\d+ |.*\d%\|")
FIRST_TERMINAL = "first terminal"
CONTINUED = " (continued)"


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    title: str = ""
    note: str = ""
    tab: str = ""
    """The tab that it is in; empty outside of tabs."""


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page's text, in order."""
    found = []
    for match in FENCE.finditer(page):
        tabs = [tab for tab in TAB.finditer(page, 0, match.start()) if match["indent"]]
        last = tabs[-1] if tabs else None
        inside = last and not re.search(r"^\S", page[last.end() : match.start()], re.M)
        found.append(
            Block(
                language=match["language"],
                text=textwrap.dedent(match["text"]),
                title=match["title"] or "",
                note=match["note"] or "",
                tab=last[1] if last and inside else "",
            )
        )
    return found


def files(page: str) -> dict[str, str]:
    """Name -> text of the files that a page shows, as they are at its end."""
    written: dict[str, str] = {}
    for block in blocks(page):
        if block.title and block.title != FIRST_TERMINAL:
            name = block.title.removesuffix(CONTINUED)
            before = written[name] + "\n\n" if name != block.title else ""
            written[name] = before + block.text
    return written


def commands(session: str) -> list[tuple[str, str]]:
    """Each command of a ``console`` block, and the output shown for it."""
    found: list[tuple[str, str]] = []
    lines = session.splitlines()
    while lines:
        line = lines.pop(0)
        if not line.startswith("$ "):
            assert found, f"output without a command: {line}"
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
            continue
        command = line[2:]
        end = re.search(r"<<'?(\w+)", command)
        while lines and (command.endswith("\\") or (end and command.splitlines()[-1] != end[1])):
            command += "\n" + lines.pop(0)
        found.append((command, ""))
    return found


def plain(text: str, numbers: bool = True) -> list[str]:
    """The lines of an output without what differs from run to run: durations, sizes, spacing, progress; also without
    other numbers if ``numbers`` is False."""
    lines = []
    for line in text.splitlines():
        line = re.sub(r"[─━]+", "─", " ".join(line.split()))
        if line and not PROGRESS.match(line):
            line = UNSTABLE.sub("#", line)
            lines.append(line if numbers else re.sub(r"\d[\d.,]*", "#", line))
    return lines


def agrees(shown: str, printed: str, *, ends: bool = False) -> bool:
    """Whether a program printed what a page shows. ``...`` stands for any lines, or any text within a line.

    ``ends``: compare the first and the last line shown only, wherever lines break, and no numbers.
    """
    want, have = plain(shown, not ends), plain(printed, not ends)
    patterns = [".*?".join(map(re.escape, line.split("..."))) for line in want]
    if ends:
        flat = " ".join(have)
        return bool(re.match(patterns[0], flat) and re.search(patterns[-1] + "$", flat))
    pattern = "".join(r"(?:.*\n)*?" if line == ".*?" else line + r"\n" for line in patterns)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in have)) is not None


@dataclass
class Page:
    """A page that is run.

    Args:
        path: the page.
        folder: where it runs.
        endpoint: OpenAI-compatible endpoint of ``MODEL``.
        add: pattern of commands -> text that is put at their ends. From the first such command on, only the first and
            the last line of each output are compared, without their numbers.
    """

    path: Path
    folder: Path
    endpoint: str = ""
    add: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = self.path.read_text()
        self.values: dict[str, str] = {}
        self.output = ""
        """What the last command or block printed."""
        self.changed = False
        """Whether something was added to a command."""
        self.ran = 0
        programs = Path(sys.executable).parent
        self.env = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "80",
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": self.endpoint,
        }

    def run(self) -> None:
        """Run all blocks. Raises :class:`AssertionError` if a command fails, or prints something else than shown."""
        todo = blocks(self.text)
        with contextlib.ExitStack() as self._stack:
            while todo:
                block = todo.pop(0)
                if not block.tab:
                    self._block(block)
                    continue
                tabs = {block.tab: [block]}
                while todo and todo[0].tab:
                    tabs.setdefault(todo[0].tab, []).append(todo.pop(0))
                self._tabs(list(tabs.values()))
        assert self.ran, "nothing was run"

    def _tabs(self, tabs: list[list[Block]]) -> None:
        env, home = self.env, self.folder
        for number, tab in enumerate(reversed(tabs), start=1):
            last = number == len(tabs)
            self.env, self.folder = dict(env), home if last else home.with_name(f"{home.name}-{self.ran}-{number}")
            if not last:
                shutil.copytree(home, self.folder)
            for block in tab:
                self._block(block)

    def _block(self, block: Block) -> None:
        if block.note.startswith("not run"):
            return
        if block.title == FIRST_TERMINAL:
            self._start(block.text)
        elif block.title:
            self._save(block)
        elif block.language in ("", "text"):
            if not block.note:
                self._compare(block.text)
        elif block.language == "python":
            self._python(block.text)
        elif block.language == "bash":
            self._bash(block.text, self._status(block))
        elif block.language == "console":
            session = commands(block.text)
            for number, (command, shown) in enumerate(session, start=1):
                self._bash(command, self._status(block) if number == len(session) else 0)
                if shown and not block.note.startswith("any output"):
                    self._compare(shown)
        else:
            raise AssertionError(f"a block of {block.language} that is neither run nor a file:\n{block.text}")

    @staticmethod
    def _status(block: Block) -> int:
        return int(block.note.removeprefix("exit ")) if block.note.startswith("exit") else 0

    def _save(self, block: Block) -> None:
        path = self.folder / block.title.removesuffix(CONTINUED)
        before = path.read_text() + "\n\n" if block.title.endswith(CONTINUED) else ""
        path.write_text(before + block.text)

    def _python(self, code: str) -> None:
        done = subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", code],
            cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=170,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
        assert [line for line in done.stdout.splitlines() if line in shown] == shown, f"{shown}\n{done.stdout}"
        self.output = done.stdout
        self.ran += 1

    def _bash(self, script: str, status: int) -> None:
        lines = [line for line in script.splitlines() if not INSTALLS.match(line)]
        script = self._filled("\n".join(lines))
        if not script.strip():
            return
        exports = self.folder / ".exports"
        whole = f"trap 'export -p > {shlex.quote(str(exports))}' EXIT\n{script}"
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", whole], cwd=self.folder, env=self.env, text=True, timeout=900,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == status, f"$ {script}\nexit status {done.returncode}\n{done.stdout}"
        self.env |= dict(re.findall(r'^declare -x (\w+)="([^"$`\\]*)"$', exports.read_text(), re.M))
        exports.unlink()
        self.output = done.stdout
        self.ran += 1

    def _filled(self, script: str) -> str:
        """The script with a model and an endpoint, and with what :attr:`add` adds."""
        model = MODELS.search(script)
        for name, value in self.values.items():
            script = re.sub(rf"\b{name}\b", value, script)
        script = re.sub(r"\bURL\b|\bhttp://127\.0\.0\.1:8000/v1", self.endpoint, MODELS.sub(r"fake-\1", script))
        if model and " --limit " not in script:
            script = f"{script.rstrip()} --limit 6"
        for pattern, text in self.add.items():
            if re.search(pattern, script) and "--dry-run" not in script:
                script, self.changed = f"{script.rstrip()} {text}", True
        return script

    def _compare(self, shown: str) -> None:
        same = agrees(shown, self.output, ends=self.changed)
        assert same, f"{self.path.name} shows\n{shown}\nand this was printed:\n{self.output}"

    def _start(self, command: str) -> None:
        """Run the command of the first terminal until the page ends."""
        printed = self._stack.enter_context(self._server(command))
        self.values = {"BASE_URL": printed["base_url"], "API_KEY": printed["api_key"]}
        self.output = "".join(f"{name}: {value}\n" for name, value in printed.items())
        self.ran += 1

    @contextlib.contextmanager
    def _server(self, command: str) -> Iterator[dict[str, str]]:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            printed: dict[str, str] = {}
            while not {"pool", "folder"} & set(printed) and (line := process.stdout.readline()):
                name, _, value = line.partition(":")
                printed[name] = value.strip()
            assert {"base_url", "api_key"} <= set(printed)
            yield printed
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
