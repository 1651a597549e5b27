"""Write the issue text of an instance from the failures of its tests.

Invariant: the text contains neither a line that the bug changed, before or after, nor its location (:func:`reveals`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent, indent

from clawgym.tasks.swe.mutations import Edit, apply

__all__ = ["Example", "clean_message", "describe", "statement_at", "reveals"]

_LINES = 10
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_NOISE = re.compile(r"^\s*(Use -v to get more diff|Full diff|\.\.\.\s*Full output truncated)")


@dataclass(frozen=True, slots=True)
class Example:
    """One failing test, as the issue shows it."""

    test: str
    """Its node id."""
    statement: str
    """The statement of the test that failed; may be empty."""
    type: str
    message: str


def clean_message(message: str) -> str:
    """A failure's message, shortened, without parts that vary from run to run."""
    lines = [line.rstrip() for line in _ADDRESS.sub("0x...", message).splitlines() if not _NOISE.search(line)]
    text = "\n".join(line[:200] for line in lines if line.strip())
    kept = text.split("\n")
    return "\n".join([*kept[:_LINES], "..."] if len(kept) > _LINES else kept)


def statement_at(source: bytes, line: int) -> tuple[int, int] | None:
    """Byte range of the smallest statement that contains a line; None if there is none or it is too long."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not found:
        return None
    node = max(found, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    first, last = node.lineno, node.end_lineno or node.lineno
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) or last - first >= _LINES:
        return None
    starts = [0, *(match.end() for match in re.finditer(rb"\n", source)), len(source)]
    return starts[first - 1], starts[last]


def describe(package: str, version: str, public: frozenset[str], examples: Sequence[Example], failing: int) -> str:
    """The issue text. ``public``: names that the package defines; ``failing``: the number of failing tests."""
    names = list(dict.fromkeys(name for example in examples for name in _called(example.statement, public)))[:2]
    what = " and ".join(f"`{name}`" for name in names) or f"Something in {package}"
    verb = "do" if len(names) > 1 else "does"
    text = [
        f"{what} {verb} not behave as documented and tested ({package} {version})\n",
        f"The working folder is the source repository of the Python package {package} {version}. "
        + ("One test of its suite fails" if failing == 1 else f"{failing} tests of its suite fail")
        + " that passed before; the others go on passing.\n",
    ]
    for example in examples:
        text.append(f"In `{example.test}`:\n")
        if example.statement:
            text.append(indent(dedent(example.statement).rstrip(), "    ") + "\n")
        text.append(_symptom(example))
        text.append(indent(f"{example.type}: {example.message}".rstrip(": \n"), "    ") + "\n")
    text.append(
        "Find the cause in the package's own source and mend it so that the whole suite passes "
        "(`python3 -m pytest`). Before the grading, tests and their configuration are put back as they are now: "
        "changes to them count for nothing.\n"
    )
    return "\n".join(text)


def _symptom(example: Example) -> str:
    """Expected and actual result, if the test's message has them."""
    first = example.message.split("\n")[0]
    if example.type == "NotImplementedError" and not example.message:
        return "Expected: a result. Got: it is not implemented at all.\n"
    if "DID NOT RAISE" in first:
        wanted = re.sub(r".*DID NOT RAISE\s*", "", first).strip("<>")
        return f"Expected: an error ({wanted.removeprefix('class ').strip(chr(39))}). Got: none.\n"
    if example.type not in ("AssertionError", "Failed"):
        return f"Expected: no error. Got: `{example.type}`.\n"
    if (values := re.fullmatch(r"assert (.+) == (.+)", first) or re.fullmatch(r"(.+) != (.+)", first)) is not None:
        got, expected = values[1], values[2]
        if _computed_on_the_right(example.statement):
            got, expected = expected, got
        return f"Expected: `{expected}`. Got: `{got}`.\n"
    return "The check that fails says:\n"


def _computed_on_the_right(statement: str) -> bool:
    """Whether only the right side of the test's comparison has a call."""
    try:
        node = ast.parse(dedent(statement)).body[0]
    except (SyntaxError, IndexError, ValueError):
        return False
    sides: list[ast.expr] = []
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
        sides = [node.test.left, *node.test.comparators]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        sides = node.value.args[:2]
    calls = [any(isinstance(part, ast.Call) for part in ast.walk(side)) for side in sides]
    return calls == [False, True]


def _called(statement: str, public: frozenset[str]) -> list[str]:
    try:
        tree = ast.parse(dedent(statement))
    except SyntaxError:
        return []
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [c.attr if isinstance(c, ast.Attribute) else c.id for c in calls if isinstance(c, ast.Attribute | ast.Name)]
    return [name for name in dict.fromkeys(names) if name in public and not name.startswith("_")]


def reveals(text: str, path: str, source: bytes, edit: Edit) -> str | None:
    """What ``text`` reveals of an edit of the file ``path``, or None."""
    if re.search(rf"(?<![\w-]){re.escape(path)}(?!\w)", text):
        return "the file"
    if re.search(rf"(?<![\w/-]){re.escape(path.rpartition('/')[2])}\b", text):
        return "the file's name"
    if re.search(rf"\b{edit.operator}\b", text) and edit.operator in ("comparison", "negation", "arithmetic"):
        return "the kind of change"
    said = {line.strip() for line in text.splitlines()}
    changed = apply(source, edit)
    pieces = {source[edit.start : edit.end].decode().strip(), edit.replacement.strip()}
    for data, end in ((source, edit.end), (changed, edit.start + len(edit.replacement.encode()))):
        start = data.rfind(b"\n", 0, edit.start) + 1
        stop = data.find(b"\n", end)
        pieces.update(line.strip() for line in data[start : stop if stop >= 0 else None].decode().splitlines())
    for piece in pieces - {""}:
        if piece in said or (len(piece) >= 16 and piece in text):
            return f"the text {piece!r}"
    return None
