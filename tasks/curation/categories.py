"""Assign a category to tasks without one, by counting keywords.

The published ClawGym data has an empty ``metadata.category``, while ClawGym-Bench reports six categories. A keyword
counts once if it occurs in the instruction as a whole word or, if it ends in ``*``, as the start of a word. The
category with the most hits wins; on a tie, or without hits, the first in :data:`KEYWORDS`. The result is a rough guide
for reports, not the authors' label; it is marked by ``category_source: clawgym-rule``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["KEYWORDS", "RULE", "categorize", "with_category", "without_rule_category"]

RULE = "clawgym-rule"

KEYWORDS: Mapping[str, str] = {
    "Productivity & Collaboration": "meeting* email* inbox calendar reminder* team* stakeholder* follow-up* message* "
    "contact* agenda minutes invite* slack attendee* colleague*",
    "Systems & Automation": "log logs config deploy* service* server* backup* cron monitor* incident* shell bash "
    "automation pipeline* permission* audit* security sha256 checksum* manifest* docker environment",
    "Analysis & Reasoning": "analy* statistic* average median correlation trend* dataset* metrics aggregate* forecast* "
    "outlier* regression distribution ranking percent*",
    "Content & Domain": "article* blog* draft* write-up story post posts copy audience tone headline* translat* "
    "lesson* recipe* clinical legal patient* essay* newsletter* brand* press social narrative title* caption*",
    "Planning & Knowledge": "plan plans planning schedule* roadmap* milestone* timeline* budget* itinerar* goal* "
    "knowledge glossary wiki notes guide* checklist* weekly trip* study research*",
    "Software Development": "code function* module* refactor* bug* unit test tests api class classes repository "
    "compile* library python javascript typescript package* cli codebase implement*",
}
"""Category -> its keywords, in the published order."""

_EXACT = {word: name for name, words in KEYWORDS.items() for word in words.split() if not word.endswith("*")}
_PREFIX = {word[:-1]: name for name, words in KEYWORDS.items() for word in words.split() if word.endswith("*")}
_LENGTHS = sorted({len(prefix) for prefix in _PREFIX})


def categorize(instruction: str) -> str:
    """The category with the most different keywords in ``instruction``.

    >>> categorize("Refactor the module and add unit tests for each function")
    'Software Development'
    """
    hits = dict.fromkeys(KEYWORDS, 0)
    for word in set(re.findall(r"[a-z][a-z0-9-]*", instruction.lower())):
        prefix = next((word[:n] for n in _LENGTHS if word[:n] in _PREFIX), "")
        if name := _EXACT.get(word) or _PREFIX.get(prefix):
            hits[name] += 1
    return max(hits, key=lambda name: hits[name])


def with_category(metadata: Mapping[str, Any], instruction: str) -> dict[str, Any]:
    """``metadata``, with an empty or missing category filled by :func:`categorize` and marked as such."""
    if metadata.get("category"):
        return dict(metadata)
    return {**metadata, "category": categorize(instruction), "category_source": RULE}


def without_rule_category(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``metadata`` as it was before :func:`with_category`."""
    if metadata.get("category_source") != RULE:
        return dict(metadata)
    return {**{k: v for k, v in metadata.items() if k != "category_source"}, "category": ""}
