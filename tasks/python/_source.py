"""The source of a task set's module: checks of its imports, and the files that are copied into a sandbox."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import clawgym.verifiers.checks
from clawgym.errors import TaskError

__all__ = ["CHECK", "HELPER", "call_script", "check_source", "sandbox_files"]

MODULE = "task_module"
"""The name of the module in a sandbox."""
CHECK = "check.py"
_HELPERS = "clawgym.verifiers.checks"
HELPER = "clawgym_checks"
"""The name of the checkers' helpers in a sandbox; :data:`_HELPERS` is an alias of it there."""
_OFFERED = {"clawgym": {"TaskDraft", "task"}, "clawgym.verifiers": {"checks"}}
"""Module -> names that may be imported from it."""
_FORWARD = f"import sys\n\nimport {HELPER}\n\nsys.modules[__name__] = {HELPER}\n"


@cache
def _text(name: str) -> str:
    return resources.files("clawgym.tasks.python").joinpath(name).read_text("utf-8")


def check_source(source: bytes, where: str) -> str:
    """The text of a module. Raises :class:`TaskError` if its top level imports a module that a sandbox lacks."""
    try:
        text = source.decode()
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"{where}: is not a Python module ({error}): correct it") from error
    for node in _statements_at_import(tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _check_import(alias.name, None, f"{where}:{node.lineno}")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise TaskError(
                    f"{where}:{node.lineno}: a relative import: only this file is copied into the sandbox, so move the "
                    "imported code into it"
                )
            for alias in node.names:
                _check_import(node.module or "", alias.name, f"{where}:{node.lineno}")
    return text


def _statements_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported in a sandbox."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            # ``if TYPE_CHECKING`` and ``if __name__ == "__main__"`` do not run there.
            if not {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} & {"TYPE_CHECKING", "__name__"}:
                yield from _statements_at_import(node.body)
            yield from _statements_at_import(node.orelse)
        elif isinstance(node, ast.Try):
            if not any(_catches_imports(handler.type) for handler in node.handlers):
                yield from _statements_at_import(node.body)
            for handler in node.handlers:
                yield from _statements_at_import(handler.body)
            yield from _statements_at_import([*node.orelse, *node.finalbody])
        elif isinstance(node, ast.ClassDef | ast.With | ast.For | ast.While):
            yield from _statements_at_import(node.body)


def _catches_imports(kind: ast.expr | None) -> bool:
    named = {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)} if kind is not None else {"Exception"}
    return bool(named & {"ImportError", "ModuleNotFoundError", "Exception"})


def _check_import(module: str, name: str | None, where: str) -> None:
    if module.partition(".")[0] in sys.stdlib_module_names or module == _HELPERS:
        return
    if name is not None and name in _OFFERED.get(module, ()):
        return
    if module.partition(".")[0] == "clawgym":
        what = f"{module}.{name}" if name else module
        raise TaskError(
            f"{where}: imports {what}, which the grading sandbox lacks: at the top of the module import only TaskDraft "
            "and task from clawgym, and checks from clawgym.verifiers; import anything else in the function that makes "
            "the tasks"
        )
    raise TaskError(
        f"{where}: imports {module}, which is not in Python's standard library, so the grading sandbox lacks it: "
        "import it in the function that makes the tasks, which runs on the host"
    )


def sandbox_files(text: str) -> Mapping[str, str | Path]:
    """Path in the sandbox -> text, or the file with the text: a module and what it imports from ClawGym."""
    files: dict[str, str | Path] = {f"{MODULE}.py": text, "clawgym/__init__.py": _text("_stub.py")}
    if _HELPERS in text or "clawgym.verifiers" in text:
        files |= {"clawgym/verifiers/__init__.py": "", "clawgym/verifiers/checks.py": _FORWARD}
        files[f"{HELPER}.py"] = Path(clawgym.verifiers.checks.__file__)
    return files


_CALL = """\
#!/usr/bin/env bash
# Calls {function}() of the task's module in the workspace.
python3 -I -S -B - <<'END_OF_PROGRAM'
import importlib.abc, importlib.util, json, sys
from pathlib import Path
SOURCES = {sources!r}
class Sources(importlib.abc.InspectLoader, importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if self.get_source(name) is not None:
            return importlib.util.spec_from_loader(name, self)
    def get_source(self, name):
        path = name.replace(".", "/")
        return SOURCES.get(path + "/__init__.py", SOURCES.get(path + ".py"))
    def is_package(self, name):
        return name.replace(".", "/") + "/__init__.py" in SOURCES
sys.meta_path.insert(0, Sources())
import {module}
{module}.{function}(Path("."), **json.loads({expected!r}))
END_OF_PROGRAM
"""


def call_script(text: str, function: str, expected: str) -> str:
    """A bash script that calls ``function(workspace, **expected)`` of the module ``text``, with the current folder as
    workspace. ``expected`` is a JSON object."""
    sources = {
        path: content if isinstance(content, str) else content.read_text("utf-8")
        for path, content in sandbox_files(text).items()
    }
    return _CALL.format(function=function, module=MODULE, sources=sources, expected=expected)


def check_files(text: str, function: Callable[..., Any], expected: str) -> Mapping[str, str | Path]:
    """The files of the verifier that calls ``function``: path -> text, or the file with the text."""
    call = f'{{"check": "{function.__name__}", "expected": {expected}}}\n'
    return {CHECK: _text("_check.py"), "call.json": call, **sandbox_files(text)}
