"""A public class name means one thing in the whole library."""

from __future__ import annotations

import ast
from collections import defaultdict

from .tree import modules

PINNED = (
    "clawgym.tasks.worlds.servers.",
    "clawgym.tasks.worlds.sites.",
    "clawgym.verifiers._tests_",
    "clawgym.verifiers.state",
)
"""Programs whose bytes enter task hashes. They run in sandboxes, without the library, and keep their names."""
ALLOWED: dict[str, int] = {
    "Agent": 2,
    "Attempt": 3,
    "Budget": 3,
    "Change": 2,
    "Dialect": 2,
    "Draft": 3,
    "Entry": 3,
    "Failure": 2,
    "Finding": 2,
    "Learner": 2,
    "Malformed": 2,
    "Server": 2,
    "Shown": 2,
    "Step": 2,
    "TaskDraft": 2,
    "ToolServer": 2,
}
"""Names that are still used more than once, and how often. This list may only get shorter."""


def test_public_class_names_are_unique() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())) if not name.startswith(PINNED) else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                used[node.name].add(name)
    assert len(used) > 400
    twice = {name: len(places) for name, places in sorted(used.items()) if len(places) > 1}
    assert twice == ALLOWED, {name: sorted(used[name]) for name in twice if twice[name] != ALLOWED.get(name)}
