"""Edits are places in a file: the same ones everywhere, each Python again, each undone by putting the text back."""

from __future__ import annotations

import ast
import hashlib
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.tasks.swe import mutations
from clawgym.tasks.swe.mutations import OPERATORS, Edit, apply, edits, usable

from ..local_index import SHOP

SAMPLE = '''\
"""Words — not code: 1 < 2 and 3."""

import sys


def clamp(value, low=0, high=10, *, strict=True, unit="é"):
    """Between ``low`` and ``high``."""
    if value < low and not strict:
        return low
    if (value) > (high):  # over the top
        raise ValueError(f"{value + 1} is over {high:>{low}}")
    found = []
    for n in range(low, high):
        if n is None or n in found:
            continue
        found.append(n * 2)
        if n == 7: break
    total = 0
    total += len(found[1:-1]) // 2
    print(total, value, unit)
    return max(value - total, low) if found else min(high, low)


def later(items: "list[int]" = None) -> int:
    while items and items[0] != 3:
        items = items[1:]
    return len(items or ()) % 4


if __name__ == "__main__":
    sys.exit(clamp(1) == 2)
'''.encode()


def made(operator: str) -> set[str]:
    """The changed lines that an operator makes of the sample."""
    found = set()
    for edit in edits(SAMPLE):
        if edit.operator == operator:
            old, new = (text.decode().splitlines() for text in (SAMPLE, apply(SAMPLE, edit)))
            found.update(line.strip() for line in new if line not in old)
    return found


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("comparison", "if value <= low and not strict:"),
        ("comparison", "if (value) >= (high):  # over the top"),
        ("comparison", "if n is not None or n in found:"),
        ("comparison", "if n is None or n not in found:"),
        ("comparison", "while items and items[0] == 3:"),
        ("boolean", "if value < low or not strict:"),
        ("boolean", "return len(items and ()) % 4"),
        ("arithmetic", "found.append(n + 2)"),
        ("arithmetic", "return len(items or ()) // 4"),
        ("constant", "if n == 8: break"),
        ("constant", "total += len(found[1:-1]) // 1"),
        ("negation", "if not (value < low and not strict):"),
        ("negation", "return max(value - total, low) if not found else min(high, low)"),
        ("result", "return None"),
        ("arguments", "for n in range(high, low):"),
        ("arguments", "print(value, total, unit)"),
        ("slice", "items = items[:]"),
        ("slice", "total += len(found[1:]) // 2"),
        ("loop", "if n == 7: continue"),
        ("loop", "break"),
        ("default", 'def clamp(value, low=0, high=11, *, strict=True, unit="é"):'),
        ("default", 'def clamp(value, low=0, high=10, *, strict=False, unit="é"):'),
        ("statement", "pass"),
        ("body", "raise NotImplementedError"),
    ],
)
def test_each_operator(operator: str, line: str):
    assert line in made(operator)


def test_every_operator_is_tested():
    assert {edit.operator for edit in edits(SAMPLE)} == set(OPERATORS)
    assert len(OPERATORS) >= 10


def test_excluded_nodes():
    """Text, f-strings, annotations, and what only a program's start reads."""
    for edit in edits(SAMPLE):
        before = SAMPLE[: edit.start].decode()
        assert edit.start > SAMPLE.index(b"import sys")
        assert "__main__" not in before
        line = before.rpartition("\n")[2]
        if "ValueError" in line:
            assert edit.operator in ("statement", "body")


def test_pinned():
    """The digest of every edit of a text: another one, and packages give other instances than before."""
    text = repr([edits(source.encode()) for source in SHOP.values()] + [edits(SAMPLE)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "9b4a66af90f11e74"


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_edits_are_same_on_every_python(version: str, tmp_path: Path):
    python = shutil.which(f"python{version}")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mutations\n"
        "print(sys.version_info[:2]); print(repr(mutations.edits(open(sys.argv[2], 'rb').read())))"
    )
    (tmp_path / "sample.py").write_bytes(SAMPLE)
    (tmp_path / "mutations.py").write_bytes(Path(mutations.__file__).read_bytes())
    command = [python or "", "-c", program, str(tmp_path), str(tmp_path / "sample.py")]
    done = subprocess.run(command, capture_output=True, text=True) if python else None
    if done is None or done.returncode or str(tuple(map(int, version.split(".")))) not in done.stdout:
        pytest.skip(f"there is no Python {version} here")
    assert done.stdout.splitlines()[1] == repr(edits(SAMPLE)).replace("clawgym.tasks.swe.", "")


def _library() -> list[Path]:
    folder = Path(ast.__file__).parent
    return sorted(p for p in folder.glob("*.py") if 2000 < p.stat().st_size < 16_000)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(_library()), st.randoms(use_true_random=False))
def test_properties(path: Path, dice: random.Random):
    """Of any file: edits parse, differ, are undone by the text they took, and touch nothing outside of their place."""
    source = path.read_bytes()
    found = edits(source)
    assert list(found) == sorted(set(found))
    for edit in dice.sample(found, min(4, len(found))):
        changed = apply(source, edit)
        assert changed != source
        undone = Edit(
            edit.start, edit.start + len(edit.replacement.encode()), source[edit.start : edit.end].decode(), ""
        )
        assert apply(changed, undone) == source
        if usable(source, edit):
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    "source", [b"x = (\n", b"\xff = 1\n", b"x = 1 + 2\r\n", b"x = 1 + 2", b"\xef\xbb\xbfx = 1 + 2\n", b""]
)
def test_files_that_are_not_plain_python(source: bytes):
    assert edits(source) == ()


def test_edit_with_invalid_python_is_not_usable():
    assert not usable(b"x = 1\n", Edit(0, 1, "(", "constant"))
    assert not usable(b"x = 1\n", Edit(4, 5, "(1)", "constant"))
    assert not usable(b"while x:\n    break\n", Edit(0, 8, "if x:", "loop"))
    assert usable(b"x = 1\n", Edit(4, 5, "2", "constant"))
