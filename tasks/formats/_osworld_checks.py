"""What the checker of a task read from OSWorld's JSON compares: the last word, and texts from the files.

Standard library only: it is mounted beside the checker, as ``osworld_checks.py``. What each comparison means is taken
from the format's documentation and examples; whatever is missing, or not of the expected kind, is no match.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

__all__ = ["METRICS", "OPTIONS", "last_word"]


def last_word(path: str | None = None) -> str:
    """The last action of the transcript in the payload; empty if there was none."""
    path = path or os.environ.get("OPENCLAW_REWARD_PAYLOAD", "/payload/openclaw_reward_payload.json")
    with open(path, encoding="utf-8", errors="replace") as file:
        transcript = json.load(file)["transcript"]
    word = ""
    for step in transcript:
        for call in (step.get("tool_calls") or ()) if step["role"] == "assistant" else ():
            word = call["arguments"].get("action", "") if call["name"] == "computer_use" else call["name"]
    return word if isinstance(word, str) else ""


def _plain(text: str, options: dict[str, Any]) -> str:
    if options.get("ignore_blanks"):
        text = " ".join(text.split())
    return text.lower() if options.get("ignore_case") else text


def exact_match(got: Any, rules: Any, options: dict[str, Any]) -> bool:
    """The very text."""
    return got == rules["expected"]


def literal_match(got: Any, rules: Any, options: dict[str, Any]) -> bool:
    """The text, in capitals or not where the options say so."""
    return _plain(got, options) == _plain(rules["expected"], options)


def is_in_list(got: Any, rules: Any, options: dict[str, Any]) -> bool:
    """What is expected is in the text, or among the names."""
    return rules["expected"] in got


def check_include_exclude(got: Any, rules: Any, options: dict[str, Any]) -> bool:
    """All that is to be included is in the text, and nothing that is to be excluded."""
    included = all(part in got for part in rules.get("include", []))
    return included and not any(part in got for part in rules.get("exclude", []))


def check_list(got: Any, rules: Any, options: dict[str, Any]) -> bool:
    """Each pattern of ``expect`` is found in some line, and none of ``unexpect`` in any."""
    lines: list[str] = got.splitlines()

    def found(pattern: str) -> bool:
        return any(re.search(pattern, line) for line in lines)

    return all(map(found, rules.get("expect", []))) and not any(map(found, rules.get("unexpect", [])))


def compare_text_file(got: Any, expected: Any, options: dict[str, Any]) -> bool:
    """Two files of the same text, up to blanks and capitals where the options say so."""
    return _plain(got, options) == _plain(expected, options)


def check_moved_jpgs(got: Any, rules: Any, options: dict[str, Any]) -> bool:
    """A folder holds these names and no others."""
    return sorted(got) == sorted(rules["expected"])


METRICS: dict[str, Callable[[Any, Any, dict[str, Any]], bool]] = {
    metric.__name__: metric
    for metric in (
        *(exact_match, literal_match, is_in_list, check_include_exclude, check_list, compare_text_file),
        check_moved_jpgs,
    )
}
"""Name -> what was got, what was expected (rules, or a text) and options -> whether they match."""

OPTIONS = {"literal_match": ("ignore_case",), "compare_text_file": ("ignore_blanks", "ignore_case")}
"""The options of those that have some."""
