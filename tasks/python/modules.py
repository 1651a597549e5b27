"""Load task sets from Python: a file named by the user, or an imported module.

Invariant: only a file that the user named is executed on the host, never a file found in a folder of tasks.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.tasks.python.authoring import PythonTasks

__all__ = ["load_file", "tasks_of"]


def load_file(path: Path) -> PythonTasks:
    """Import the Python file ``path`` and return the tasks of all its functions with ``@task``.

    The same text is executed only once in a process. Raises :class:`TaskSetNotFound` if the file cannot be read, and
    :class:`TaskError`, naming the line, if it cannot be imported.
    """
    path = path.expanduser().absolute()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise TaskSetNotFound(f"{path}: cannot be read ({error.strerror}): check the path") from error
    name = "clawgym_tasks_" + hashlib.sha256(bytes(path) + b"\0" + source).hexdigest()[:16]
    if (module := sys.modules.get(name)) is None:
        module = ModuleType(name)
        module.__dict__.update(__file__=str(path), __source__=source)
        sys.modules[name] = module
        try:
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, TaskError) or not isinstance(error, Exception):
                raise
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
            at = "" if line is None else f":{line}"
            raise TaskError(f"{path}{at}: cannot be imported ({type(error).__name__}: {error}): correct it") from error
    return tasks_of(module, path.stem)


def tasks_of(module: ModuleType, name: str | None = None) -> PythonTasks:
    """The tasks of all functions of ``module`` with ``@task``, in order. Raises :class:`TaskError` if there are
    none."""
    sets = [one for one in vars(module).values() if isinstance(one, PythonTasks)]
    makers = [maker for one in sets for maker in one.makers if maker.function.__module__ == module.__name__]
    if not makers:
        raise TaskError(f"{module.__file__}: has no function with @task: see docs/tutorials/write-a-task.md")
    return PythonTasks(name or module.__name__.rpartition(".")[2], tuple(dict.fromkeys(makers)))
