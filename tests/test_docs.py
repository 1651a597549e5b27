"""The code and the commands on the documentation pages run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from clawgym.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PYTHON = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    if page.parent.name not in ("start", "tutorials")  # tests/test_tutorials.py runs these pages
    and page.name != "notebooks.md"  # tests/test_notebooks.py runs its cells
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
    if "import" in code
]


@pytest.mark.parametrize("code", PYTHON)
def test_python_examples_run(code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "class " in code or "def make" in code:
        pytest.skip("part of a module, shown in pieces")
    if "ClawGym-Bench" in code or "path/to" in code:
        pytest.skip("about files that a reader has")
    if "gui-v0" in code and not shutil.which("Xvfb"):
        pytest.skip("no desktops here: make system")
    if "openclaw" in code:
        request.getfixturevalue("openclaw")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_links_between_pages_exist() -> None:
    """A link leads to a file, or to a page of the navigation; generated pages are only there."""
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {(ROOT / "docs" / name).resolve() for name in listed}
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            path = (page.parent / target).resolve()
            assert path.exists() or path in pages, f"{page.relative_to(ROOT)}: {target}"


def test_commands_shown_exist() -> None:
    """Every ``$ clawgym ...`` line of the pages names a command and options that there are."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ *\$ (?:\w+=\S+ )*clawgym ([^#|;\n]*)", text, re.M):
            command: Any = typer.main.get_command(app)
            words = shlex.split(line)
            while words and words[0] in getattr(command, "commands", {}):
                command = command.commands[words.pop(0)]
            known = {"--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}
            given = [word for word in words if re.match("--?[a-z]", word)]
            where = f"{page.relative_to(ROOT)}: clawgym {line}"
            assert given or not hasattr(command, "commands"), where
            assert set(given) <= known, where
