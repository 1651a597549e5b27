"""The library has no import cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from .tree import modules


def imports(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the library that a module imports, also within functions and for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The groups of modules that import each other (strongly connected components, by Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in number:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in number:
            visit(name)
    return found


def test_import_cycle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(graph) == [["b", "c"]]


def test_no_import_cycles() -> None:
    known = modules()
    graph = {name: set(imports(name, path, known)) - {name} for name, path in known.items()}
    assert len(graph) > 400
    assert circles(graph) == []


def room(name: str) -> str:
    """The package below ``clawgym`` that a module belongs to."""
    return ".".join(name.split(".")[:2])


def test_private_modules_are_imported_only_in_their_package() -> None:
    known = modules()
    found = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in imports(name, path, known)
        if room(other) != room(name) and any(part.startswith("_") for part in other.split(".")[2:])
    ]
    assert found == []
