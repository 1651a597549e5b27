"""Static analysis of checkers: whether they execute the agent's code, and what they import.

A checker that imports or starts the agent's code shares its process or its uid with it, so the result can be forged.
Such tasks are flagged when they are read, and reported separately. False positives are accepted: a checker that only
runs ``git log`` is flagged too.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import lru_cache
from typing import Literal

from clawgym.verifiers._names import dotted, imported_names, nodes_of

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
    r"|clawgym(_checks|\.verifiers\.checks)\.run_program"
)
# A source without one of these matches nothing above, so most checkers need not be parsed.
_HINTS = (
    *("subprocess", "runpy", "importlib", "__import__", "load_module", "SourceFileLoader", "InteractiveInterpreter"),
    *("sys.path", "from sys", "run_program", "startfile", "popen", "spawn", "import system", "os.system", "os.exec"),
    *("exec(", "eval(", "execfile(", "system("),
)

# Imports alone on a line. Most imports are written so, and matching them is 50 times faster than parsing.
_IMPORT = re.compile(r"\bimport\b")
_ONE = r"[\w.]+(?:[ \t]+as[ \t]+\w+)?"
_PLAIN_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+(\w[\w.]*)[ \t]+import\b|import[ \t]+({_ONE}(?:[ \t]*,[ \t]*{_ONE})*)[ \t]*(?:#.*)?$)",
    re.MULTILINE,
)
_MODULE = re.compile(r"(?:^|,)[ \t]*(\w+)")


def scan_checker(source: str) -> Execution | None:
    """How a checker may execute code from the workspace; ``None`` if it does not.

    ``in_process``: it imports, ``exec``s or ``eval``s code that is not in the checker itself. ``subprocess``: it starts
    programs. ``in_process`` takes precedence. A source that cannot be parsed but contains such a call counts as
    ``in_process``.

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
    nodes = nodes_of(tree)
    names = imported_names(nodes)
    found: Execution | None = None
    for node in nodes:
        if isinstance(node, ast.Call) and _runs_in_process(node, names):
            return "in_process"
        if isinstance(node, ast.Attribute | ast.Name) and _STARTERS.fullmatch(dotted(node, names)):
            found = "subprocess"
    if _changes_import_path(nodes, names) and third_party_imports(source):
        return "in_process"
    return found


@lru_cache(maxsize=512)  # all episodes of a task have the same checker
def third_party_imports(source: str) -> tuple[str, ...]:
    """Top-level names of imported modules that are not in the standard library, sorted.

    Guarded imports (``try: import yaml``) are included, relative ones are not. Empty if the source cannot be parsed.
    """
    plain = list(_PLAIN_IMPORT.finditer(source))
    if len(plain) == len(_IMPORT.findall(source)):  # no import was missed; strings may add false ones
        found = {name for match in plain for name in _MODULE.findall(match[1] or match[2])}
        if found <= sys.stdlib_module_names:
            return ()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return tuple(sorted(found - sys.stdlib_module_names))


def _runs_in_process(call: ast.Call, names: dict[str, str]) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _LOADER_METHODS:
        return True
    name = dotted(call.func, names).removeprefix("builtins.")
    constant = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if name in _IMPORTERS:
        return not isinstance(constant, str) or constant.partition(".")[0] not in sys.stdlib_module_names
    return name in _RUNNERS or (name in _EVALUATORS and constant is None)


def _changes_import_path(nodes: list[ast.AST], names: dict[str, str]) -> bool:
    return any(isinstance(node, ast.Attribute) and dotted(node, names) == "sys.path" for node in nodes)
