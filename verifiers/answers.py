"""What an agent answered, and whether it is the right answer; copied beside a checker as ``clawgym_answers.py``.

Standard library only; expressions are compared by the library math-verify, where a layer brings it.

Invariants: of several answers the last one counts, and an answer that offers alternatives equals none of them; what is
literally right is right without the library; nothing of an answer is ever evaluated as code, and one that is made to
keep the library busy is wrong after :data:`SECONDS` of its work.

    import clawgym_answers as ca

    LIBRARY = ca.library("/opt/layers/math")  # not for answers that are whole numbers or text

    @checks("answer")
    def _():
        return ca.equal(ca.answer_in(ca.final_message()), r"\\frac{1}{2}", LIBRARY)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

__all__ = ["answer_in", "equal", "final_message", "library", "number", "same_text"]

SECONDS = 10
"""Seconds of work that a comparison by the library may take."""
_WALL_SECONDS = 90.0
_MEMORY = 1 << 30
_LONGEST = 500
_DEEPEST = 20
_PAYLOAD = "/payload/openclaw_reward_payload.json"


def final_message() -> str:
    """The agent's closing message, as the grader brings it."""
    path = os.environ.get("OPENCLAW_REWARD_PAYLOAD", _PAYLOAD)
    return str(json.loads(Path(path).read_text("utf-8", "replace")).get("final_message") or "")


_LABEL = re.compile(r"\banswer(?:\s+is)?\s*(?:\*\*|__)?\s*[::]", re.IGNORECASE)


def answer_in(message: str) -> str:
    """The answer that ``message`` ends with: what its last ``Answer:`` says, its last ``\\boxed{}``, or its one line.

    Empty if there is none. An answer in a box comes without the box, and none has dollars or a full stop around it.

    >>> answer_in("Six times seven.\\nAnswer: \\\\boxed{42}")
    '42'
    >>> answer_in("Answer: 1\\nNo: **Answer:** $x = 2$.")
    'x = 2'
    """
    message = message[-20_000:].strip()
    labels = list(_LABEL.finditer(message))
    rest = message[labels[-1].end() :] if labels else message
    if (boxed := _last_box(rest)) is not None:
        first = _last_box(rest[: rest.rfind("\\boxed")]) if labels else None
        return _bare(boxed) if first in (None, boxed) else ""
    lines = [line for line in (_bare(line) for line in rest.splitlines()) if line]
    if labels:
        return lines[0] if lines else ""
    return lines[0] if len(lines) == 1 else ""


def _last_box(text: str) -> str | None:
    """What the last ``\\boxed{...}`` holds, braces matched; None without one that is closed."""
    start = text.rfind("\\boxed")
    if start < 0 or not (opened := re.match(r"\\boxed\s*\{", text[start:])):
        return None
    depth, begin = 1, start + opened.end()
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
        if depth == 0:
            return text[begin:place]
    return None


def _bare(text: str) -> str:
    """``text`` without what is put around an answer: spaces, dollars, stars, back quotes, a full stop."""
    before = None
    while text != before:
        before = text
        text = text.strip().strip("*`").removesuffix(".").strip()
        for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)]
    return text


_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL = r"\d{1,400}(?:\.\d{1,400})?"
_NUMBER = re.compile(rf"([+-]?)({_DECIMAL})(?:/({_DECIMAL}))?")
_FRACTION = re.compile(rf"([+-]?)\\[dt]?frac\{{([+-]?{_DECIMAL})\}}\{{({_DECIMAL})\}}")


def number(text: str) -> Fraction | None:
    """The number that ``text`` plainly is: ``-12``, ``1,234.5``, ``3/4``, ``\\frac{3}{4}``; None for anything else.

    >>> number("\\\\frac{3}{4}") == number("0.75")
    True
    """
    text = text.replace("\u2212", "-").replace("\\!", "").replace("\\,", "").replace("{,}", ",")
    text = re.sub(r"\s*([/+-])\s*", r"\1", text.strip())
    if _GROUPED.fullmatch(text.lstrip("+-")):
        text = text.replace(",", "")
    found = _NUMBER.fullmatch(text) or _FRACTION.fullmatch(text)
    if not found:
        return None
    sign, above, below = found.groups()
    if below is not None and Fraction(below) == 0:
        return None
    return Fraction(above) / Fraction(below or 1) * (-1 if sign == "-" else 1)


def same_text(left: str, right: str) -> bool:
    """Whether two texts say the same word for word; case and the width of spaces do not count."""
    left, right = (" ".join(text.split()).casefold() for text in (left, right))
    return left == right != ""


def library(folder: str) -> str:
    """``folder``, if math-verify is there. Ends the checker if not: that is the host's fault, not the answer's."""
    if not os.path.isdir(os.path.join(folder, "math_verify")):
        sys.exit(f"math-verify is not in {folder}: the task's layer is missing")
    return folder


def equal(answer: str, truth: str, library: str = "") -> bool:
    """Whether ``answer`` is ``truth``, exactly: ``0.333`` is not one third. ``library``: see :func:`library`."""
    if not answer or len(answer) > _LONGEST:
        return False
    if same_text(answer, truth):
        return True
    answer, truth = _value(answer), _value(truth)
    given, right = number(answer), number(truth)
    if given is not None and right is not None:
        return given == right
    if not library or not _is_expression(answer):
        return False
    if given is not None:  # exactly: a decimal is the fraction that it says
        answer = f"\\frac{{{given.numerator}}}{{{given.denominator}}}"
    return _limited(lambda: _same_expression(_latex(answer), _latex(truth), library))


def _latex(text: str) -> str:
    return re.sub(r"\\?\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text).replace("*", "\\cdot ")


def _value(text: str) -> str:
    """The right side of ``x = ...``, without the sign of a degree."""
    text = re.sub(r"(?:\^\s*\{?\\circ\}?|°)\s*$", "", text)
    return re.sub(r"^\s*[A-Za-z](?:\([A-Za-z]\))?\s*=", "", text, count=1).strip()


_COMMANDS = {
    *("frac", "dfrac", "tfrac", "sqrt", "pi", "cdot", "times", "div", "left", "right", "cup", "cap", "infty", "in"),
    *("ln", "log", "exp", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "le", "leq", "ge"),
    *("geq", "lt", "gt", "ne", "neq", "mathbb", "quad", "circ", "binom", "setminus", "emptyset", "begin", "end"),
    *("pmatrix", "bmatrix"),
}
_NAMES = {"sqrt", "sin", "cos", "tan", "log", "exp", "pmatrix", "bmatrix"}
_JOINING = {"or", "and", "not", "if", "is", "nor", "for", "but", "to"}
_SIGNS = re.compile(r"[A-Za-z0-9\\{}()\[\]+\-*/^_<>.,;:|!%&\s−×·÷√π∞∪∩≤≥≠°]*")


def _is_expression(text: str) -> bool:
    """Whether ``text`` is one expression, set or interval and not several, or words, or a program."""
    if not _SIGNS.fullmatch(text) or "__" in text:
        return False
    braces = depth = 0
    for character in re.sub(r"\\[{}]", "", text):
        braces += (character == "{") - (character == "}")
        depth += (character in "{([") - (character in "})]")
        if braces < 0 or depth > _DEEPEST:
            return False
    if braces:
        return False
    for word in re.findall(r"\\?[A-Za-z]+", text):
        if word[0] == "\\":
            if word[1:] not in _COMMANDS:
                return False
        elif word.lower() in _JOINING or (len(word) > 3 and word not in _NAMES):
            return False
    return True


def _same_expression(answer: str, truth: str, folder: str) -> bool:
    import site

    site.addsitedir(folder)
    from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingImports] of the layer

    # LaTeX only: that reader builds expressions from a grammar, the other one evaluates Python.
    one, other = (
        parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None, raise_on_error=True)
        for text in (truth, answer)
    )
    if not one or not other or isinstance(one[0], str) or isinstance(other[0], str):
        return False
    return bool(verify(one[:1], other[:1], float_rounding=40, numeric_precision=60, timeout_seconds=None))


def _held() -> int:
    """Bytes of data that this process has already."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def _limited(work: Callable[[], bool]) -> bool:
    """What ``work`` says in a process of its own, under limits; False for one that fails or takes too long."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"0"
        with contextlib.suppress(BaseException):
            null = os.open(os.devnull, os.O_RDWR)
            for handle in (0, 1, 2):
                os.dup2(null, handle)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            most = _held() + _MEMORY
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            said = b"1" if work() is True else b"0"
        with contextlib.suppress(BaseException):
            os.write(there, said)
        os._exit(0)
    os.close(there)
    try:
        # Its own time is what is limited: on a busy machine an honest answer takes longer, and is as right.
        ready, _, _ = select.select([here], [], [], _WALL_SECONDS)
        return bool(ready) and os.read(here, 1) == b"1"
    finally:
        os.close(here)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
