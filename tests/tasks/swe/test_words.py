"""The words tell how a bug shows, and neither what was changed nor where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.tasks.swe.mutations import apply, edits
from clawgym.tasks.swe.words import Example, clean_message, describe, reveals, statement_at

from ..local_index import SHOP

SOURCE = SHOP["src/shop/__init__.py"].encode()
PATH = "src/shop/__init__.py"


def text(*examples: Example, failing: int = 2) -> str:
    return describe("shop", "1.0", frozenset({"total", "label"}), examples, failing)


def test_expected_and_actual_values():
    one = Example(
        "tests/a.py::test_a",
        "assert total([1, 2]) == 3\n",
        "AssertionError",
        "assert 4 == 3\n +  where 4 = total([1, 2])",
    )
    said = text(one)
    assert said.startswith("`total` does not behave as documented and tested (shop 1.0)")
    assert "    assert total([1, 2]) == 3\n" in said
    assert "Expected: `3`. Got: `4`." in said
    assert "2 tests of its suite fail" in said
    turned = Example("t::b", "assert whole == total([1, 2])", "AssertionError", "assert 3 == 4")
    assert "Expected: `3`. Got: `4`." in text(turned)
    older = Example("t::c", "self.assertEqual(total([1, 2]), 3)", "AssertionError", "4 != 3")
    assert "Expected: `3`. Got: `4`." in text(older)


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        ("Failed", "DID NOT RAISE <class 'ValueError'>", "Expected: an error (ValueError). Got: none."),
        ("TypeError", "no", "Expected: no error. Got: `TypeError`."),
        ("NotImplementedError", "", "Got: it is not implemented at all."),
        ("AssertionError", "assert False", "The check that fails says:"),
    ],
)
def test_other_symptoms(kind: str, message: str, said: str):
    whole = text(Example("t::a", "total(x)", kind, message), failing=1)
    assert said in whole
    assert "One test of its suite fails" in whole


def test_without_a_statement_or_a_known_name():
    said = text(Example("t::a", "", "KeyError", "'x'"))
    assert said.startswith("Something in shop does not behave")
    assert text(Example("t::a", "x = (", "KeyError", "'x'")).startswith("Something in shop")


def test_messages_are_cleaned():
    message = "assert <f at 0x7fa3b2c1d0> == 1\n\n  Use -v to get more diff\n" + "x" * 500 + "\n" + "line\n" * 30
    lines = clean_message(message).split("\n")
    assert lines[0] == "assert <f at 0x...> == 1"
    assert len(lines) == 11
    assert lines[-1] == "..."
    assert max(map(len, lines)) <= 200


def test_statement_at_line():
    source = b"def test():\n    x = [\n        1,\n    ]\n    assert x == 1, (\n        2)\n"
    assert source[slice(*statement_at(source, 3))] == b"    x = [\n        1,\n    ]\n"
    assert source[slice(*statement_at(source, 6))] == b"    assert x == 1, (\n        2)\n"
    assert statement_at(source, 1) is None
    assert statement_at(source, 99) is None
    assert statement_at(b"(", 1) is None


@given(st.sampled_from(edits(SOURCE)))
def test_edit_is_not_revealed(edit):
    """A text with the changed line, before or after, or with the file, is found; the words' own frame is not."""
    assert (
        reveals(
            text(Example("tests/test_shop.py::test_total[1]", "assert total(a) == b", "ValueError", "no")),
            PATH,
            SOURCE,
            edit,
        )
        is None
    )
    for data in (SOURCE, apply(SOURCE, edit)):
        at = data.rfind(b"\n", 0, edit.start) + 1
        line = data[at : data.find(b"\n", edit.start)].decode().strip()
        if line:
            assert reveals(f"Look:\n    {line}\n", PATH, SOURCE, edit) is not None
    assert reveals(f"see {PATH}:12", PATH, SOURCE, edit) == "the file"
    assert reveals("see __init__.py", PATH, SOURCE, edit) == "the file's name"
    assert reveals("see src/shop/__init__.pyc and tests/test_shop.py", PATH, SOURCE, edit) is None
