"""Find the inputs that an instruction asks to change.

Strict grading first restores all other inputs, but published ClawGym tasks do not list the mutable ones. An input is
mutable if, somewhere in the instruction,

* a verb of change has it as its object ("modify config/app.json", "append to docs/notes.md") or follows it ("open
  docs/plan.md and edit it", "in config/app.json, set debug to false"), or
* it is described as changed ("the updated config/app.json", "docs/plan.md (modified)", "docs/plan.md in place"),

unless this is negated, or the sentence says to write the result elsewhere. A verb applies to all names of a list
("update a/b.py, a/c.py and d.md", "edit the pages in site/ (index.html, menu.html)").

Two cases are less certain: a verb whose object is something in the file ("fix the logic in src/run.py") or a note
beside the name ("to be modified"); and files below ``input/`` and ``inputs/``, which are read-only by convention. For
the latter, verbs that may also mean making a copy ("rewrite", "complete") do not count. In both cases the input is
mutable only if the instruction protects no inputs and gives the result no other name. In doubt, an input stays
protected. A task can set ``clawgym.mutable_inputs`` itself.

Evaluation on the 2,000 training tasks, which were also used to develop the rule: of the 57 inputs in 39 tasks that the
less certain cases and lists add, none is clearly wrong. Misses, among sentences with a verb of change: none in 60
random tasks without a match; 7 in 70 such tasks with inputs outside ``input/``, mostly where the file is not named
("fix the configuration").
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

__all__ = ["inputs_to_change"]

_EDIT = (
    r"(?:edit|modify|modifying|update|updating|fix|fixing|debug|overwrite|rename|refactor|patch|correct|repair|replace"
    r"|change|mend)"
)
_VERB = rf"(?:{_EDIT}|append|delete|remove|rewrite|extend|implement|complete|clean up|insert|prepend|add)"
_FILLER = (
    r"(?:(?:to|into|the|an?|existing|current|local|provided|file|files|script|module|config|configuration|in|at|only"
    r"|your|end|of|functions|todos|both|either|place)\W+)"
)
_CHANGED = r"(?:updated|modified|edited|fixed|corrected|refactored|patched|revised|repaired|in-place edit of|back to)"
_GOVERNS = re.compile(
    rf"(?<![\"“'‘])\b(?:{_VERB}(?:ing)?\W+{_FILLER}{{0,5}}|(?:append|add|insert|prepend)(?:ed|ing)?\b[^.;:]*\bto\W+)$",
    re.IGNORECASE,
)
_NOT_IN_A_NAME = (
    r"(?:and|are|as|based|by|defined|described|for|found|from|given|in|is|listed|of|per|present|reported|shown"
    r"|specified|that|to|using|via|which|with)"
)
_THING_IN = rf"(?:(?!{_NOT_IN_A_NAME}\b)[^\s,;:.]+\s+){{1,6}}(?:in|at)\W+$"
_EDITS = re.compile(rf"(?<![\"“'‘])\b{_EDIT}(?:ing)?(?:\W+{_FILLER}{{0,5}}$|\s+{_THING_IN})", re.IGNORECASE)
_CALLED_BEFORE = re.compile(
    rf"\b(?:{_CHANGED}(?: in[ -]place)?|in[ -]place (?:at|in))\W+(?:the\W+)?(?:files?\W+)?$", re.IGNORECASE
)
_CALLED_AFTER = re.compile(rf"\W{{0,3}}{_CHANGED}\b|.*\bin[ -]place\b", re.IGNORECASE)
_NOTE = re.compile(
    rf"\W{{0,3}}\((?:[^()]*\b(?:you (?:will|must|should)|to be)\s+)?(?:{_EDIT}|{_CHANGED})\b", re.IGNORECASE
)
_IN = re.compile(r"\bIn\W+$", re.IGNORECASE)
_IN_IT = re.compile(rf"\W{{0,3}}(?:{_VERB}|set)\b", re.IGNORECASE)
_OPEN = re.compile(r"\b(?:open|inspect|review)\W+(?:the\W+)?(?:[\w-]+\W+(?:at|in)\W+)?$", re.IGNORECASE)
_AND_EDIT = re.compile(rf"\W{{0,3}}and\s+(?:{_EDIT}|extend)\b(?!.*\binto\W+[\w.-]+/)", re.IGNORECASE)
_NEGATED = re.compile(r"\b(?:not|never|don['’]t|without|avoid|no)\b[^,;:]*$", re.IGNORECASE)
_PATH = r"\W+(?:a new |the )?(?:file )?\W*(?P<{}>[\w.-]+/[\w./-]*\w)"
_ELSEWHERE = re.compile(
    rf"^\W*(?:in)?to{_PATH.format('next')}"
    rf"|^(?:(?!\bso (?:that|it)\b).)*?\b(?:sav(?:e|ed|ing)|write the result)\b.*?\b(?:to|as|at){_PATH.format('saved')}",
    re.IGNORECASE,
)
_INTO = re.compile(r"\W*into\b", re.IGNORECASE)
_NAME = r"[`\"'“]*[\w.-]*[./][\w./-]*\w[`\"'”]*"
_JOINED = r"(?:\s*,\s*(?:(?:and/or|and|or)\s+)?|\s+(?:and/or|and|or|&)\s+)"
_NAMES_BEFORE = re.compile(rf"(?:{_NAME}(?:\s*\([^()]*\))?{_JOINED}(?:the\s+)?)+[`\"'“]*$", re.IGNORECASE)
_NAMES_AFTER = re.compile(rf"^[`\"'”]*(?:{_JOINED}{_NAME})+", re.IGNORECASE)

_INPUT = ("input/", "inputs/")
_INPUTS_PROTECTED = re.compile(
    r"\b(?:not|never|don['’]t|without|avoid)\s+(?:\w+\s+){0,2}?(?:modify|modifying|chang|edit|alter|overwrit|touch)"
    r"[^.;\n]{0,40}\b(?:inputs?(?!/\w)|originals?)\b"
    r"|\binputs?\b(?!/\w)[^.;\n]{0,30}\b(?:read[- ]only|not? (?:be )?modif)",
    re.IGNORECASE,
)
_COPY_WRITTEN = re.compile(
    rf"\b(?:sav|writ|creat|produc|plac|export)\w*\W[^.;\n]{{0,10}}\b(?:{_CHANGED}|rewritten|cleaned|new version)\b"
    r"(?:(?!in[ -]place)[^.;\n]){0,60}\b(?:to|as|at|in|under)\W+(?!inputs?/)[\w.-]+/",
    re.IGNORECASE,
)


def inputs_to_change(instruction: str, paths: Iterable[str]) -> tuple[str, ...]:
    """The ``paths`` that ``instruction`` asks to change, as ``fnmatch`` patterns, sorted.

    >>> inputs_to_change("Modify config/app.json in place; do not edit data/a.csv.", ["config/app.json", "data/a.csv"])
    ('config/app.json',)
    """
    sentences = [s for s in re.split(r"(?<=[.;!?])\s+|\n", instruction) if s.strip()]
    inputs = set(paths)
    return tuple(sorted(glob.escape(path) for path in inputs if _asks(instruction, sentences, path, inputs)))


def _asks(instruction: str, sentences: list[str], path: str, inputs: set[str]) -> bool:
    mentions = [m for sentence in sentences for m in _mentions(sentence, path)]
    if any(_CALLED_BEFORE.search(before) or _CALLED_AFTER.match(after) for before, after in mentions):
        return True
    here = [m for m in mentions if not _elsewhere(m[1], path)]
    if not path.startswith(_INPUT) and any(_surely(*m) for m in here):
        return True
    return any(_perhaps(*m) for m in here) and not _copied(instruction, path, inputs)


def _mentions(sentence: str, path: str) -> Iterator[tuple[str, str]]:
    """The text before and after each mention of ``path`` that is not negated, without other listed names before it."""
    folder, _, name = path.rpartition("/")
    if name not in sentence:  # common; skips compiling a pattern, which is slow
        return
    spellings = [rf"(?:\./)?{re.escape(path)}"]
    if folder and f"{folder}/" in sentence and sentence.count(name) > sentence.count(path):
        listed = rf"(?:{_NAME}{_JOINED})*[`\"'“]*"
        spellings.append(rf"{re.escape(folder)}/[`\"'”]*\s*(?:\(|:\s){listed}{re.escape(name)}")
    for found in re.finditer(rf"(?<![\w./-])(?:{'|'.join(spellings)})(?![\w/-]|\.\w)", sentence):
        whole, after = sentence[max(0, found.start() - 160) : found.start()], sentence[found.end() :][:600]
        before = _NAMES_BEFORE.sub("", whole)
        if not _NEGATED.search(whole) and not _NEGATED.search(before):
            yield before, after


def _surely(before: str, after: str) -> bool:
    return bool(
        _GOVERNS.search(before)
        or (_IN.search(before) and _IN_IT.match(after))
        or (_OPEN.search(before) and _AND_EDIT.match(after))
    )


def _perhaps(before: str, after: str) -> bool:
    return bool((_EDITS.search(before) and not _INTO.match(after)) or _NOTE.match(after))


def _elsewhere(after: str, path: str) -> bool:
    """Whether the rest of the sentence says to write the result to another path."""
    other = _ELSEWHERE.search(_NAMES_AFTER.sub("", after))
    return other is not None and path not in other.groups()


def _copied(instruction: str, path: str, inputs: set[str]) -> bool:
    """Whether the instruction protects inputs, asks for a changed copy, or names an output with a similar name."""
    if _INPUTS_PROTECTED.search(instruction) or _COPY_WRITTEN.search(instruction):
        return True
    this = PurePosixPath(path)
    others = (PurePosixPath(p) for p in re.findall(r"(?<![\w.-])[\w.-]+/[\w./-]*\w", instruction) if p not in inputs)
    return any(p.suffix == this.suffix and _words(p) & _words(this) for p in others)


def _words(path: PurePosixPath) -> set[str]:
    return set(re.findall(r"[a-z]{3,}", path.stem.lower()))
