"""Final answers: which one counts, what equals what, and what must neither hang nor run."""

from __future__ import annotations

import importlib
import site
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.tasks.mathematics import math_layer
from clawgym.verifiers.answers import answer_in, equal, number, same_text


@pytest.fixture(scope="module")
def library() -> Iterator[str]:
    """The layer, with what it brings imported once, so that each comparison forks with it."""
    layer, missing = math_layer()
    if missing:
        pytest.skip(missing)
    before = sys.path[:]
    site.addsitedir(str(layer.folder))
    # As in a box, where nothing else is: another program's parser of the same name may be imported here already.
    sys.path[:] = [*(place for place in sys.path if place not in before), *before]
    others = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "antlr4"}
    importlib.import_module("math_verify")
    yield str(layer.folder)
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "antlr4"]:
        del sys.modules[name]
    sys.modules.update(others)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("Answer: 42", "42"),
        ("Let me see.\nANSWER:  42 .\nBye", "42"),
        ("**Answer:** $\\frac{1}{2}$.", "\\frac{1}{2}"),
        ("Answer:\n\n\\[ x = 2 \\]", "x = 2"),
        ("Answer: \\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("The answer is: \\boxed{\\sqrt{2}} as shown", "\\sqrt{2}"),
        ("First \\boxed{1}, then \\boxed{2}.", "2"),
        ("Answer: \\boxed{1} or \\boxed{2}", ""),
        ("Answer: 1\nAnswer: 2", "2"),
        ("42", "42"),
        ("It is 42.\nOr so.", ""),
        ("Answer: \\boxed{1", "\\boxed{1"),
        ("Answer:", ""),
        ("", ""),
    ],
)
def test_answer_in_message(message: str, answer: str) -> None:
    assert answer_in(message) == answer


@given(
    st.fractions(),
    st.sampled_from(["{0}", "{1}/{2}", "\\frac{{{1}}}{{{2}}}", " {1} / {2} ", "+{3}", "\\dfrac{{{1}}}{{{2}}}"]),
)
def test_numbers_are_exact(value: Fraction, form: str) -> None:
    text = form.format(value, value.numerator, value.denominator, abs(value))
    assert number(text) == (abs(value) if form == "+{3}" else value)
    assert equal(text, str(number(text)))
    assert not equal(text, str(value + 1) if form != "+{3}" else str(-abs(value) - 1))


@given(st.text(max_size=40))
def test_any_text_is_accepted(text: str) -> None:
    number(text)
    assert not equal(text, "no such answer")
    assert equal(text, text) == same_text(text, text) or len(text) > 500


@pytest.mark.parametrize(
    ("left", "right"), [("1,234,567", "1234567"), ("−5", "-5"), ("1{,}000", "1000"), ("073", "73")]
)
def test_equal_forms_of_a_number(left: str, right: str) -> None:
    assert equal(left, right)


@pytest.mark.parametrize("text", ["1 2", "1,23", "1/0", "0x10", "1e3", "١٢", "1_000", "5 apples"])
def test_texts_that_are_not_plain_numbers(text: str) -> None:
    assert number(text) is None or text == "١٢"
    assert not equal(text, "12") or text == "١٢"


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("\\sqrt{3} + 2", "2+\\sqrt{3}"),
        ("2 + sqrt(3)", "2+\\sqrt{3}"),
        ("\\frac{\\sqrt{8}}{4}", "\\frac{1}{\\sqrt{2}}"),
        ("\\{2, 1\\}", "\\{1,2\\}"),
        ("1, 2", "\\{1,2\\}"),
        ("[1, 2)", "[1,2)"),
        ("x^2+2x+1", "(x+1)^2"),
        ("50\\%", "\\frac{1}{2}"),
        ("x = \\pi/2", "\\frac{\\pi}{2}"),
        ("336", "336^\\circ"),
    ],
)
def test_equal_expressions(answer: str, truth: str, library: str) -> None:
    assert equal(answer, truth, library)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("3.7320508075688772", "2+\\sqrt{3}"),
        ("-\\sqrt{3}", "\\sqrt{3}"),
        ("\\sqrt{2}, \\sqrt{3}", "\\sqrt{3}"),
        ("\\sqrt{2} < \\sqrt{3}", "\\sqrt{3}"),
        ("(1, 2]", "[1,2)"),
        ("1 = 2 = 3", "3"),
        ("1 or 2", "2"),
        ("1 \\text{ or } 2", "2"),
        ("\\sqrt{2}}+{\\sqrt{3}", "\\sqrt{2}"),
        ("\\sqrt{2}} \\boxed{\\sqrt{3}", "\\sqrt{3}"),
        ("__import__('os').system('touch /tmp/run')", "\\sqrt{2}"),
        ("exec", "\\sqrt{2}"),
        ("((" * 15 + "1" + "))" * 15, "\\sqrt{2}"),
        ("1" * 600, "\\sqrt{2}"),
    ],
)
def test_unequal_answers(answer: str, truth: str, library: str) -> None:
    assert not equal(answer, truth, library)


def test_hostile_answers_do_not_hang(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym.verifiers.answers.SECONDS", 3)
    start = time.process_time()
    assert not equal("9^{9^{9^{9}}}", "\\sqrt{2}", library)
    assert time.process_time() - start < 2, "the work is done elsewhere"


def test_missing_library_is_named(tmp_path: Path) -> None:
    from clawgym.verifiers import answers

    with pytest.raises(SystemExit, match="layer is missing"):
        answers.library(str(tmp_path))
