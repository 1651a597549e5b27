"""Safe reading and writing of task folders.

Invariants: reading never opens an input (a :class:`~clawgym.records.TaskFile` keeps its path). Returned paths, with
links resolved, are below the given folder. Written files and folders appear under their final name when they are
complete, and never replace existing ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from clawgym.errors import TaskError
from clawgym.files import LARGEST_FILE, read_below
from clawgym.records import GradingMode, TaskFile, VerifierSpec
from clawgym.verifiers.protocols import protocol_of
from clawgym.verifiers.scan import Execution, scan_checker, third_party_imports
from clawgym.visible import visible

__all__ = [
    "atomic_target",
    "check_files",
    "check_task_id",
    "decode",
    "executes_agent_code",
    "make_folder",
    "malformed_as_task_error",
    "packages_for",
    "parse_json",
    "read_text",
    "walk",
    "flag_agent_tools",
    "write_files",
]

_CHECK_HELPER = "clawgym_checks.py"
_LIBRARIES = {"cryptography": "python3-cryptography", "yaml": "python3-yaml"}
"""Module -> Debian package. Some public checkers, and programs that they run, import one of these if it is installed,
and score differently without it."""


DEEPEST = 64
"""Most levels of nested folders in a task."""
MOST_FILES = 20_000
"""Most files and folders in one part of a task."""
LARGEST_PART = 2**30
"""Most bytes of one part of a task: inputs, verifier or solution."""


def walk(folder: Path, *, within: Path | None = None) -> tuple[TaskFile, ...]:
    """All files below ``folder``, sorted by path, without their contents.

    A link to a regular file below ``within`` (default: ``folder``) is read as that file. A file that is replaced by a
    link before it is read raises an error at that time. Raises :class:`TaskError` for any other link, for devices and
    FIFOs, for names that are not UTF-8, and beyond ``DEEPEST``, ``MOST_FILES`` and ``LARGEST_PART``.
    """
    top = within or folder
    root = top.resolve()
    found: list[TaskFile] = []
    size = seen = 0
    waiting = [_listed(folder, "")]
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        path, entry = waiting[-1].pop()
        seen += 1
        if seen > MOST_FILES:
            raise TaskError(f"{folder}: holds more than {MOST_FILES} files and folders: split the task")
        if entry.is_dir(follow_symlinks=False):
            if len(waiting) > DEEPEST:
                raise TaskError(f"{folder}: is more than {DEEPEST} folders deep: reduce the nesting")
            waiting.append(_listed(Path(entry.path), f"{path}/"))
            continue
        source, below = Path(entry.path), top
        if entry.is_symlink():
            source, below = _inside(source, root), root
        info = source.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise TaskError(f"{entry.path}: is neither a file nor a folder: remove it from the task")
        size += info.st_size
        if info.st_size > LARGEST_FILE or size > LARGEST_PART:
            raise TaskError(
                f"{entry.path}: is too large (a file has at most {LARGEST_FILE} bytes, and {folder.name} at most "
                f"{LARGEST_PART}): make it smaller"
            )
        found.append(TaskFile(path, source, executable=bool(info.st_mode & stat.S_IXUSR), within=below))
    return tuple(found)


def _listed(folder: Path, prefix: str) -> list[tuple[str, os.DirEntry[str]]]:
    """The entries of a folder with their paths, in reverse order of names."""
    try:
        with os.scandir(folder) as found:
            entries = list(islice(found, MOST_FILES + 1))
    except OSError as error:
        raise TaskError(f"{folder}: cannot be listed ({error.strerror}): make the folder readable") from error
    for entry in entries:
        if not _is_text(entry.name):
            raise TaskError(f"{folder}: file name {prefix + entry.name!r} is not UTF-8: rename it")
    return [(prefix + entry.name, entry) for entry in sorted(entries, key=lambda e: e.name, reverse=True)]


def _inside(link: Path, root: Path) -> Path:
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise TaskError(f"{link}: is a broken link: remove it from the task") from error
    if not target.is_relative_to(root):
        raise TaskError(f"{link}: is a link out of {root}: replace it by a copy of the file")
    if not target.is_file():
        raise TaskError(f"{link}: is a link to a folder: replace it by a copy of the folder")
    return target


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(data: bytes, where: str, *, keep_bom: bool = False) -> str:
    """``data`` as UTF-8 text, without a byte order mark. Raises :class:`TaskError`, naming ``where``, if it is not
    UTF-8."""
    try:
        return data.decode("utf-8" if keep_bom else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: is not UTF-8 (byte {error.start}): save it as UTF-8") from error


LONGEST_TEXT = 64 * 2**20
"""Most bytes of a configuration file, an instruction or a Dockerfile of a task."""


def read_text(folder: Path, name: str, *, keep_bom: bool = False) -> str:
    """The UTF-8 text of the file ``name`` below ``folder``.

    Raises :class:`TaskError` if it is missing, reached through a link, longer than ``LONGEST_TEXT``, or not text.
    """
    path = folder / name
    try:
        data = read_below(folder, name, LONGEST_TEXT)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TaskError(f"{path}: cannot be read ({reason}): restore the file") from error
    return decode(data, str(path), keep_bom=keep_bom)


@contextmanager
def malformed_as_task_error(where: str, kind: str) -> Iterator[None]:
    """Turn what code raises on data of another shape into a :class:`TaskError`: ``<where>: is no <kind> (...)``."""
    try:
        yield
    except TaskError:
        raise
    except (
        LookupError, TypeError, AttributeError, ArithmeticError, ValueError, SyntaxError, StopIteration, RecursionError,
        MemoryError,
    ) as error:  # fmt: skip
        said = visible(f"{type(error).__name__}: {error}")[:200]
        raise TaskError(f"{where}: is no {kind} ({said}): restore the package's data") from error


def parse_json(text: str, where: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises :class:`TaskError` for anything else, including NaN and lone surrogates."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: is not JSON ({error}): correct it") from error
    if not isinstance(value, dict):
        raise TaskError(f"{where}: holds a JSON {type(value).__name__}, not an object: correct it")
    if re.search(r"\\u[dD][89a-fA-F]", text) and not _is_text(json.dumps(value, ensure_ascii=False)):
        raise TaskError(f"{where}: has a lone surrogate, which is not text: correct it")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def check_task_id(task_id: str, where: str) -> str:
    """Return ``task_id`` if it can name a folder on every system. Raises :class:`TaskError` otherwise."""
    bad = not task_id or len(task_id) > 128 or task_id[0] in ".-" or task_id[-1] in ". "
    if bad or any(c in '/\\#:*?"<>|' or not c.isprintable() for c in task_id):
        raise TaskError(
            f"{where}: task id {task_id!r} cannot name a folder (1 to 128 printable characters, no leading '.' or '-', "
            'none of / \\ # : * ? " < > |): rename it'
        )
    return task_id


def check_files(files: Iterable[TaskFile], where: str) -> tuple[TaskFile, ...]:
    """Return ``files``. Raises :class:`TaskError` if two share a path, or if one is a folder of another."""
    kept = tuple(files)
    paths: set[str] = set()
    for file in kept:
        if file.path in paths:
            raise TaskError(f"{where}: {file.path!r} is there twice: remove one")
        paths.add(file.path)
    for path in paths:
        for parent in PurePosixPath(path).parents:
            if str(parent) in paths:
                raise TaskError(f"{where}: {str(parent)!r} is both a file and a folder: rename one")
    return kept


def executes_agent_code(files: Iterable[TaskFile], where: str) -> Execution | None:
    """How a verifier's Python files execute the agent's code, by :func:`scan_checker`; the least safe way of all files.

    Raises :class:`TaskError` if one of them is not text.
    """
    found: Execution | None = None
    for file in files:
        if file.path.endswith(".py") and file.path != _CHECK_HELPER:
            kind = scan_checker(decode(file.read(), f"{where}/{file.path}"))
            if kind == "in_process":
                return kind
            found = found or kind
    return found


def packages_for(files: Iterable[TaskFile]) -> tuple[str, ...]:
    """The Debian packages of :data:`_LIBRARIES` that Python files of a verifier, or inputs that it may run, import."""
    found: set[str] = set()
    for file in files:
        if file.path.endswith(".py"):
            source = file.read()
            tried = [module for module in _LIBRARIES if module.encode() in source]
            if tried and (imported := third_party_imports(source.decode("utf-8", "replace"))):
                found.update(_LIBRARIES[module] for module in tried if module in imported)
    return tuple(sorted(found))


def flag_agent_tools(spec: VerifierSpec) -> VerifierSpec:
    """``spec``, with ``executes_agent_code`` set if it is a script in ``fork`` mode: the agent may have replaced the
    programs that it calls.

    The standard ``reward.sh`` is not affected: its checker is run by an interpreter from outside the agent's files.
    """
    if spec.mode is not GradingMode.FORK or spec.executes_agent_code or protocol_of(spec).own_interpreter:
        return spec
    return dataclasses.replace(spec, executes_agent_code="subprocess")


def make_folder(folder: Path) -> None:
    """Create a new folder. Raises :class:`TaskError` if it exists or cannot be created."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise TaskError(f"{folder}: cannot be created ({error.strerror}): choose another name") from error


def write_files(folder: Path, files: Iterable[TaskFile]) -> None:
    """Write ``files`` below ``folder``. Raises :class:`TaskError` if their paths collide or they cannot be read."""
    for file in check_files(files, str(folder)):
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read())
        target.chmod(0o755 if file.executable else 0o644)


@contextmanager
def atomic_target(dest: Path) -> Iterator[Path]:
    """Context manager: a temporary path that is renamed to ``dest`` at the end, or removed on an exception.

    Raises :class:`TaskError` if ``dest`` exists or its parent cannot be written.
    """
    if dest.exists() or dest.is_symlink():
        raise TaskError(f"{dest}: already exists: choose another name, or move it away")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    except OSError as error:
        raise TaskError(f"{dest.parent}: cannot be written ({error.strerror}): choose another folder") from error
    try:
        yield scratch / dest.name
        os.rename(scratch / dest.name, dest)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
