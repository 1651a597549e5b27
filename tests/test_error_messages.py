"""The reference of errors has every message, each with an anchor of its own."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

_ERRORS = """
class ClawGymError(Exception):
    "Base class."

class TaskError(ClawGymError):
    "A task cannot be read."
"""


@pytest.fixture(scope="module")
def errors() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        return importlib.import_module("error_messages")


@pytest.fixture(scope="module")
def found(errors: ModuleType) -> list[Any]:
    return errors.messages(errors.read())


def _texts(errors: ModuleType, source: str) -> set[str]:
    return {one.text for one in errors.messages({"clawgym.errors": _ERRORS, "clawgym.tasks.made": source})}


def test_message_built_before_it_is_raised(errors: ModuleType) -> None:
    source = """
def read(path):
    if path.wide:
        why = "the table is too wide"
    elif path.long:
        why = f"the table has {path.rows} rows"
    do = "split it" if path.long else "choose another file"
    raise TaskError(f"{path}: " + why + f": {do}")
"""
    assert _texts(errors, source) == {
        "{path}: the table is too wide: split it",
        "{path}: the table is too wide: choose another file",
        "{path}: the table has {rows} rows: split it",
        "{path}: the table has {rows} rows: choose another file",
    }


def test_message_of_a_function_that_returns_the_error(errors: ModuleType) -> None:
    source = """
def _refused(why: str) -> TaskError:
    return TaskError(f"refused: {why}")

def read(self):
    raise _refused("the file is empty: write something")
    raise self._unknown_helper("the helper is not known: look it up")
"""
    assert {"refused: the file is empty: write something", "the helper is not known: look it up"} <= _texts(
        errors, source
    )


def test_messages_of_other_exceptions_are_listed_if_they_say_what_to_do(errors: ModuleType) -> None:
    source = """
def read(count):
    if count < 0:
        raise ValueError(f"count={count}: give 0 or more")
    raise ValueError("only programs see this")
"""
    assert _texts(errors, source) == {"count={count}: give 0 or more"}


def test_anchors_are_unique_and_on_the_page(errors: ModuleType, found: list[Any]) -> None:
    anchors = list(errors.anchors(found).values())
    assert len(anchors) == len(set(anchors)) == len(found) > 900
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]*", anchor) for anchor in anchors)
    ids = re.findall(r'id="([^"]+)"|\{#([^}]+)\}', errors.page(errors.read()))
    assert len(ids) == len(set(ids)), "an anchor of a message is also the anchor of a heading"
    assert {one for one, _ in ids if one} == set(anchors)


def test_links_to_messages_exist(errors: ModuleType, found: list[Any]) -> None:
    anchors = {*errors.anchors(found).values(), *(kind.lower() for kind in errors.error_classes(errors.read()))}
    for page in (ROOT / "docs").rglob("*.md"):
        for anchor in re.findall(r"reference/errors\.md#([^)]+)\)", page.read_text()):
            assert anchor in anchors, f"{page.relative_to(ROOT)}: {anchor}"


def _literals(node: ast.expr) -> Iterator[str]:
    """The literal texts that a message is put together from."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            for part in parts:
                yield from _literals(part)
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
            yield from _literals(one)
            yield from _literals(other)
        case ast.FormattedValue(value=ast.IfExp() as inner):
            yield from _literals(inner)
        case _:
            pass


def test_every_text_that_is_raised_is_on_the_page(errors: ModuleType, found: list[Any]) -> None:
    """Reads the source in another way: each literal text of a ``raise``, or of an error that is made, is listed.

    An exception of another library, or of Python, has to be listed if its text has advice: words after a colon or a
    semicolon.
    """
    sources = errors.read()
    kinds = set(errors.error_classes(sources))
    listed = "\n".join(errors.slug(message.text) for message in found)
    missing = []
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            kind = ast.unparse(call.func).rpartition(".")[2]
            texts = [text for argument in call.args for text in _literals(argument)]
            if kind in kinds or (
                call is not node and kind not in errors.NOT_SHOWN and any(re.search("[:;] ", one) for one in texts)
            ):
                missing += [
                    f"{name}:{call.lineno}: {text}"
                    for text in texts
                    if re.search(r"[a-z]{3}", text) and errors.slug(text) not in listed
                ]
    assert not missing, "\n".join(missing)
