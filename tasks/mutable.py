"""Which inputs a task asks to change, read from its instruction.

Published ClawGym tasks do not say it, yet the strict grading restores every other input first. The rule: an
input may change if, somewhere in the instruction,

* a verb of change governs its name ("modify config/app.json", "append to docs/notes.md"), or
* its name is called changed ("the updated config/app.json", "docs/plan.md (modified)", "docs/plan.md in place"),

unless that is negated, or the sentence goes on to write the result somewhere else. Below ``input/`` and ``inputs/``,
which by custom are read-only, only the second counts. When in doubt an input stays protected; a
task can always say it itself (``clawgym.mutable_inputs``).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable

__all__ = ["inputs_to_change"]

_VERB = (
    r"(?:edit|modify|modifying|update|updating|fix|fixing|debug|append|overwrite|rename|delete|remove|refactor|rewrite|"
    r"patch|correct|repair|extend|implement|complete|replace|change|mend|clean up|insert|prepend|add)"
)
_FILLER = (
    r"(?:(?:to|into|the|an?|existing|current|local|provided|file|files|script|module|config|in|at|only|your|end|of"
    r"|functions|todos)\W+)"
)
_CHANGED = r"(?:updated|modified|edited|fixed|corrected|refactored|patched|revised|repaired|in-place edit of|back to)"
_GOVERNS = re.compile(
    rf"(?<![\"“'‘])\b(?:{_VERB}(?:ing)?\W+{_FILLER}{{0,5}}|(?:append|add|insert|prepend)(?:ed|ing)?\b[^.;:]*\bto\W+)$",
    re.IGNORECASE,
)
_CALLED_BEFORE = re.compile(rf"\b(?:{_CHANGED}|in[ -]place (?:at|in))\W+(?:the\W+)?(?:file\W+)?$", re.IGNORECASE)
_CALLED_AFTER = re.compile(rf"\W{{0,3}}{_CHANGED}\b|.*\bin[ -]place\b", re.IGNORECASE)
_IN_IT = re.compile(rf"\W{{0,3}}{_VERB}\b", re.IGNORECASE)
_NEGATED = re.compile(r"\b(?:not|never|don['’]t|without|avoid|no)\b[^,;:]*$", re.IGNORECASE)
_PATH = r"\W+(?:a new |the )?(?:file )?\W*(?P<{}>[\w.-]+/[\w./-]*\w)"
_ELSEWHERE = re.compile(
    rf"^\W*(?:in)?to{_PATH.format('next')}"
    rf"|^(?:(?!\bso (?:that|it)\b).)*?\bsav(?:e|ed|ing)\b.*?\b(?:to|as|at){_PATH.format('saved')}",
    re.IGNORECASE,
)


def inputs_to_change(instruction: str, paths: Iterable[str]) -> tuple[str, ...]:
    """The ``paths`` that ``instruction`` asks to change, as ``fnmatch`` patterns, sorted.

    >>> inputs_to_change("Modify config/app.json in place; do not edit data/a.csv.", ["config/app.json", "data/a.csv"])
    ('config/app.json',)
    """
    sentences = [s for s in re.split(r"(?<=[.;!?])\s+|\n", instruction) if s.strip()]
    return tuple(sorted(glob.escape(path) for path in set(paths) if any(_asks(s, path) for s in sentences)))


def _asks(sentence: str, path: str) -> bool:
    start = -1
    while (start := sentence.find(path, start + 1)) >= 0:
        before, after = sentence[max(0, start - 160) : start], sentence[start + len(path) :]
        if re.search(r"[\w/-]$", before) or re.match(r"[\w/-]", after):
            continue
        if _NEGATED.search(before):
            continue
        if _CALLED_BEFORE.search(before) or _CALLED_AFTER.match(after):
            return True
        if path.startswith(("input/", "inputs/")):
            continue
        other = _ELSEWHERE.search(after)
        governed = _GOVERNS.search(before) or (re.search(r"\bIn\W+$", before) and _IN_IT.match(after))
        if governed and not (other and path not in other.groups()):
            return True
    return False
