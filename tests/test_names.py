"""A public class name means one thing in the whole library."""

from __future__ import annotations

import ast
from collections import defaultdict

from .tree import modules

PINNED = (
    "clawgym.tasks.python._stub",
    "clawgym.tasks.worlds.servers.",
    "clawgym.tasks.worlds.sites.",
    "clawgym.verifiers._tests_",
    "clawgym.verifiers.state",
)
"""Programs that run in sandboxes, without the library. Most of their bytes enter task hashes; they keep their names."""


def test_public_class_names_are_unique() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())) if not name.startswith(PINNED) else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                used[node.name].add(name)
    assert len(used) > 400
    assert {name: sorted(places) for name, places in used.items() if len(places) > 1} == {}
