"""Reuse the results of verifiers for identical workspaces within a run.

Episodes of a group often end with the same files. A verifier whose result depends on nothing but these files
(:func:`is_pure`) is run once for them. Every other verifier is run every time.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from importlib import resources

from clawgym.offload import offloaded_if_large
from clawgym.records import GradingMode, Task, VerifierSpec
from clawgym.sandbox.protocol import Archive
from clawgym.tars import open_tar
from clawgym.verifiers._names import nodes_of
from clawgym.verifiers.protocols import StandardCheck, VerifierReport, protocol_of

__all__ = ["Grades", "is_pure", "workspace_digest"]

_DETERMINISTIC = frozenset(
    (
        *(
            "__future__",
            "abc",
            "argparse",
            "ast",
            "base64",
            "binascii",
            "bisect",
            "codecs",
            "collections",
            "configparser",
        ),
        *("contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "email", "enum", "errno"),
        *("fnmatch", "fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html", "io", "itertools", "json"),
        *("keyword", "math", "numbers", "operator", "os", "pathlib", "posixpath", "pprint", "re", "shlex", "sqlite3"),
        *("stat", "statistics", "string", "struct", "sys", "tarfile", "textwrap", "token", "tokenize", "tomllib"),
        *("traceback", "types", "typing", "unicodedata", "xml", "zipfile", "zlib", "clawgym_checks"),
    )
)
"""Modules that give the same result for the same files, but for the names in :data:`_VARYING`."""
_VARYING = frozenset(
    (
        *(
            "now",
            "today",
            "utcnow",
            "urandom",
            "getpid",
            "getppid",
            "environ",
            "getenv",
            "environb",
            "get_terminal_size",
        ),
        *(
            "getmtime",
            "getctime",
            "getatime",
            "st_mtime",
            "st_ctime",
            "st_atime",
            "st_mtime_ns",
            "st_ctime_ns",
            "st_ino",
        ),
        *("st_atime_ns", "st_dev", "times", "getloadavg", "cpu_count", "fork", "getrandom", "maxrss"),
        *("hash", "id", "__hash__", "__import__", "exec", "eval", "getattr", "globals", "vars", "__dict__"),
    )
)
"""Names of what differs from run to run, or that reach such things by other names."""
_OUTSIDE = re.compile(r"payload|/proc|/sys/|/dev/|random\s*\(|'now'|current_(time|date)", re.IGNORECASE)
"""In a text of a checker: it may read what the agent said, or the kernel's state, or ask SQLite for the time."""


def is_pure(spec: VerifierSpec) -> bool:
    """Whether the verifier's result depends on its own files and the workspace's names, contents and modes alone.

    By static analysis, on the safe side: a standard ``check.py`` that starts no program, imports none of the agent's
    code, and names no clock, process, random number, file time or environment variable.

    >>> is_pure(VerifierSpec("harbor", (TaskFile("test.sh", b"exit 0"),)))
    False
    """
    if spec.protocol != "reward_sh" or spec.mode is not GradingMode.CLEAN or spec.executes_agent_code:
        return False
    if spec.protected or not isinstance(protocol_of(spec), StandardCheck):
        return False
    return _are_deterministic(tuple((file.path, file.read()) for file in spec.files if file.path.endswith(".py")))


@lru_cache(maxsize=512)  # asked for each episode
def _are_deterministic(sources: tuple[tuple[str, bytes], ...]) -> bool:
    ours = resources.files("clawgym.verifiers").joinpath("checks.py").read_bytes()
    beside = frozenset(path.rpartition(".")[0].split("/")[0] for path, _ in sources)
    return all(source == ours or _is_deterministic(source, beside) for _, source in sources)


def _is_deterministic(source: bytes, beside: frozenset[str]) -> bool:
    try:
        nodes = nodes_of(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(_is_harmless(node, beside) for node in nodes)


def _is_harmless(node: ast.AST, beside: frozenset[str]) -> bool:
    match node:
        case ast.Import(names):
            return all(_is_known(alias.name, beside) for alias in names)
        case ast.ImportFrom(module, names):
            return _is_known(module or "", beside) and _VARYING.isdisjoint(alias.name for alias in names)
        case ast.Attribute(_, name) | ast.Name(name):
            return name not in _VARYING
        case ast.Subscript(ast.Call(ast.Attribute(_, "stat" | "lstat" | "fstat"))):
            return False  # the times are among the numbers
        case ast.Constant(str(text)):
            return _OUTSIDE.search(text) is None
    return True


def _is_known(module: str, beside: frozenset[str]) -> bool:
    top = module.partition(".")[0]
    return top in _DETERMINISTIC or top in beside


def workspace_digest(archive: Archive) -> str:
    """SHA-256 over names, kinds, modes, link targets and contents, in their order; not over times."""
    digest = hashlib.sha256()
    with open_tar(archive.tar) as tar:
        for member in tar:
            head = (member.name, member.type, member.mode, member.linkname, member.size)
            digest.update(repr(head).encode("utf-8", "surrogateescape"))
            held = tar.extractfile(member) if member.isreg() else None
            if held is not None:
                digest.update(held.read())
    return digest.hexdigest()


class Grades:
    """Reports of verifiers by task and workspace; the least recently used are forgotten. For one event loop.

    >>> grades = Grades()
    >>> (grades.run, grades.reused)
    (0, 0)
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._known: OrderedDict[str, VerifierReport] = OrderedDict()
        self._waiting: dict[str, asyncio.Lock] = {}
        self.run = 0
        """Times that a verifier was run."""
        self.reused = 0
        """Times that an earlier report was taken."""

    async def of(
        self, task: Task, archive: Archive, restore: Sequence[str], run: Callable[[], Awaitable[VerifierReport]]
    ) -> VerifierReport:
        """What ``run`` gives for these files of ``task``, with the inputs in ``restore`` restored.

        It is an earlier report, if the verifier is pure. Identical workspaces that are graded at the same time wait for
        the first. Only reports without a cause are kept. Raises what ``run`` raises.
        """
        if not is_pure(task.verifier):
            self.run += 1
            return await run()
        key = repr((task.content_hash, *restore, await offloaded_if_large(len(archive.tar), workspace_digest, archive)))
        lock = self._waiting.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                found = self._known.pop(key, None)
                if found is None:
                    self.run += 1
                    found = await run()
                else:
                    self.reused += 1
                if found.cause is None:
                    self._known[key] = found
                    if len(self._known) > self._most:
                        self._known.popitem(last=False)
        finally:
            if self._waiting.get(key) is lock:  # whoever waits for it holds it
                del self._waiting[key]
        return found
