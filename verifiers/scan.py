"""Read a checker without running it: does it execute what the agent wrote, what does it import?

A checker that imports or starts the agent's code shares its process (or its uid) with it, so its
verdict can be forged. Such tasks are flagged when they are read, and reported apart. The answer is
an over-estimate by design: a checker that only ever runs ``git log`` is flagged as well.
"""

from __future__ import annotations

import ast
import re
import sys
from typing import Literal

__all__ = ["Execution", "scan_checker", "third_party_imports"]

Execution = Literal["in_process", "subprocess"]

_EVALUATORS = {"exec", "eval", "execfile"}
_RUNNERS = {
    "code.InteractiveInterpreter",
    "runpy.run_module",
    "runpy.run_path",
    "importlib.machinery.SourceFileLoader",
}
_LOADER_METHODS = {"exec_module", "load_module"}
_IMPORTERS = {"__import__", "importlib.import_module", "importlib.__import__"}
_STARTERS = re.compile(
    r"subprocess\.(run|call|check_call|check_output|Popen|getoutput|getstatusoutput)"
    r"|os\.(system|popen|exec[lv]p?e?|spawn[lv]p?e?|posix_spawnp?|startfile)"
    r"|pty\.spawn"
    r"|asyncio\.(subprocess\.)?create_subprocess_(exec|shell)"
    r"|clawgym_checks\.run_program"
)
# No source without one of these can match anything above (bar spaces before a bracket): most checkers are never parsed.
_HINTS = (
    *("subprocess", "runpy", "importlib", "__import__", "load_module", "SourceFileLoader", "InteractiveInterpreter"),
    *("sys.path", "from sys", "run_program", "startfile", "popen", "spawn", "import system", "os.system", "os.exec"),
    *("exec(", "eval(", "execfile(", "system("),
)


def scan_checker(source: str) -> Execution | None:
    """How a checker may execute code it finds in the workspace; ``None`` if it does not.

    ``in_process``: it imports, ``exec``s or ``eval``s text that is not written in the checker itself.
    ``subprocess``: it starts programs. The first outranks the second. A source that cannot be parsed but
    holds one of the calls in question counts as ``in_process``.

    >>> scan_checker("import json; print(json.dumps({}))") is None
    True
    >>> scan_checker("from subprocess import run as go; go(['python3', 'tool.py'])")
    'subprocess'
    """
    if not any(hint in source for hint in _HINTS):
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "in_process"
    nodes = _nodes(tree)
    names = _imported_names(nodes)
    found: Execution | None = None
    for node in nodes:
        if isinstance(node, ast.Call) and _runs_in_process(node, names):
            return "in_process"
        if isinstance(node, ast.Attribute | ast.Name) and _STARTERS.fullmatch(_dotted(node, names)):
            found = "subprocess"
    if _changes_import_path(nodes, names) and third_party_imports(source):
        return "in_process"
    return found


def third_party_imports(source: str) -> tuple[str, ...]:
    """Top-level names of imported modules that are not in the standard library, sorted.

    Guarded imports (``try: import yaml``) count; relative ones do not. Empty if the source cannot be parsed.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return tuple(sorted(found - sys.stdlib_module_names))


def _nodes(tree: ast.AST) -> list[ast.AST]:
    """Every node; :func:`ast.walk` takes twice as long, and there are thousands of checkers."""
    found: list[ast.AST] = []
    open_nodes = [tree]
    while open_nodes:
        node = open_nodes.pop()
        found.append(node)
        for value in vars(node).values():
            if isinstance(value, list):
                open_nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                open_nodes.append(value)
    return found


def _imported_names(nodes: list[ast.AST]) -> dict[str, str]:
    """Local name -> dotted name it stands for, over every import in the source."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """``sp.run`` -> ``subprocess.run``; empty for anything but a chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def _runs_in_process(call: ast.Call, names: dict[str, str]) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _LOADER_METHODS:
        return True
    name = _dotted(call.func, names).removeprefix("builtins.")
    constant = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if name in _IMPORTERS:
        return not isinstance(constant, str) or constant.partition(".")[0] not in sys.stdlib_module_names
    return name in _RUNNERS or (name in _EVALUATORS and constant is None)


def _changes_import_path(nodes: list[ast.AST], names: dict[str, str]) -> bool:
    return any(isinstance(node, ast.Attribute) and _dotted(node, names) == "sys.path" for node in nodes)
