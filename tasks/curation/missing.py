"""Find inputs that an instruction refers to but the task does not have. Such a task can only be solved by invention.

A path in the instruction that is not an input is reported if

* it is below ``input/`` or ``inputs/``, or is a log (``.log``) outside of an output folder,
* a sentence says to read it ("parse logs/a.log", "derived from logs/a.log"), or it is in a list of inputs, and
* no sentence says to create it ("save the console output to logs/a.log"). The last verb before the path decides.

Patterns (``YYYY``) and prefixes of other names (``input/.env`` of ``input/.env.sample``) are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from clawgym.records import Task
from clawgym.verifiers.cheap import output_paths

__all__ = ["missing_inputs"]

_SENTENCE = re.compile(r"(?<=[.!?;])\s+")
_PATTERN = re.compile(r"YYYY|relative/path|path/to")
_VERB = re.compile(
    r"\b(?:(?P<read>(?:read|inspect|analy[sz]|pars|review|tail|process|examin|assess|check)(?:e|es|ing|s)?"
    r"|(?:derived|shown|extracted|copied|failure|lines?|appears?) (?:from|in)|provided|files to use)"
    r"|(?:creat|writ|sav|generat|simulat|produc|captur|append|cop|mov|stor|export|emit|redirect|record|put|into)"
    r"(?:e|es|ing|y|ies|ying|s)?)\b",
    re.IGNORECASE,
)
_INPUTS = re.compile(r"\b(?:inputs?|provided|read|use|given)\b", re.IGNORECASE)
_OUTPUTS = re.compile(r"\b(?:out\w*|creat\w*|produc\w*|deliver\w*|results?|artifacts?)\b", re.IGNORECASE)


def missing_inputs(task: Task) -> tuple[str, ...]:
    """The paths of missing inputs, in the order of the instruction."""
    have = [f.path for f in task.inputs]
    found = []
    for path in output_paths(task):
        if not (path.startswith(("input/", "inputs/")) or (path.endswith(".log") and not path.startswith("out"))):
            continue
        if _PATTERN.search(path) or any(name.startswith((path + ".", path + "/")) for name in have):
            continue
        if set(_uses(task.instruction, path)) == {"read"}:
            found.append(path)
    return tuple(found)


def _uses(instruction: str, path: str) -> Iterator[str]:
    """``read`` or ``made`` for each sentence with the path and such a verb; the last verb before the path decides."""
    exactly = re.compile(rf"(?<![\w./-]){re.escape(path)}(?![\w/-]|\.\w)")
    heading = ""
    for line in instruction.splitlines():
        if (item := exactly.match(text := line.lstrip(" -*•\t`"))) is not None:
            if re.match(r"\W*(?:captur|record|contain|with )", text[item.end() :]):
                yield "made"
            elif _INPUTS.search(heading) and not _OUTPUTS.search(heading):
                yield "read"
        for sentence in _SENTENCE.split(line):
            if (at := exactly.search(sentence)) is not None and (
                verbs := list(_VERB.finditer(sentence, 0, at.start()))
            ):
                yield "read" if verbs[-1]["read"] else "made"
        if line.rstrip().endswith(":"):
            heading = line
