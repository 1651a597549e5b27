"""Static analysis of checkers: dependencies of the result on anything besides the workspace.

It finds uses of the clock, file times, the network, programs without a timeout, and invalid patterns. It reads the
syntax tree and resolves names through imports. Calls through variables, or of code made at run time, are missed.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

from clawgym.verifiers._names import dotted, imported_names, nodes_of

__all__ = ["Effects", "effects_of"]

_CLOCK = {
    *(f"datetime.datetime.{name}" for name in ("now", "today", "utcnow")),
    "datetime.date.today",
    "time.time",
    "time.time_ns",
}
_CLOCK_BY_DEFAULT = {"time.strftime": 2, "time.localtime": 1, "time.gmtime": 1, "time.ctime": 1, "time.asctime": 1}
"""Function -> number of arguments; with fewer it reads the clock."""
_FILE_TIMES = {"os.path.getmtime", "os.path.getctime", "os.path.getatime"}
_STAT_FIELDS = {f"st_{kind}time{unit}" for kind in "mac" for unit in ("", "_ns")}
_NETWORK = (
    *("socket", "ssl", "http.client", "http.server", "socketserver", "urllib.request", "xmlrpc", "ftplib", "smtplib"),
    *("poplib", "imaplib", "telnetlib", "requests", "httpx", "aiohttp", "urllib3", "websockets", "paramiko"),
)
_BOUNDABLE = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}
_UNBOUNDED = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
_PATTERNS = {
    f"re.{name}" for name in ("compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
}


@dataclass(frozen=True, slots=True)
class Effects:
    """What a checker depends on. Each entry is ``line N: what``, in the order of the source."""

    clock: tuple[str, ...] = ()
    """Reads of the current time or date, without the monotonic clock, which only measures durations."""
    file_times: tuple[str, ...] = ()
    """Reads of modification, access or change times of files."""
    network: tuple[str, ...] = ()
    """Imports of modules that open connections."""
    unbounded: tuple[str, ...] = ()
    """Programs started without a timeout."""
    bad_patterns: tuple[str, ...] = ()
    """Regular expressions that do not compile."""


def effects_of(source: str) -> Effects:
    """The effects of Python source; empty if it cannot be parsed.

    >>> effects_of("from datetime import date\\nprint(date.today())").clock
    ('line 2: datetime.date.today',)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Effects()
    nodes = nodes_of(tree)
    names = imported_names(nodes)
    waits = any(_waits_with_timeout(node) for node in nodes)
    found: dict[str, set[tuple[int, str]]] = {name: set() for name in Effects.__slots__}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found["network"].update((node.lineno, name) for name in _connecting(node))
        elif isinstance(node, ast.Attribute | ast.Name):
            name = _imported(node, names)
            if name in _CLOCK:
                found["clock"].add((node.lineno, name))
            elif name in _FILE_TIMES or (isinstance(node, ast.Attribute) and node.attr in _STAT_FIELDS):
                found["file_times"].add((node.lineno, name or f".{node.attr}"))  # type: ignore[union-attr]
        elif isinstance(node, ast.Call):
            name = _imported(node.func, names)
            if len(node.args) < _CLOCK_BY_DEFAULT.get(name, 0):
                found["clock"].add((node.lineno, name))
            if name in _UNBOUNDED or (name in _BOUNDABLE and not _names_timeout(node)):
                found["unbounded"].add((node.lineno, name))
            if name == "subprocess.Popen" and not waits:
                found["unbounded"].add((node.lineno, name))
            if name in _PATTERNS and (why := _bad_pattern(node)):
                found["bad_patterns"].add((node.lineno, why))
    return Effects(**{kind: tuple(f"line {line}: {what}" for line, what in sorted(at)) for kind, at in found.items()})


def _imported(node: ast.AST, names: dict[str, str]) -> str:
    """The dotted name of an imported object; empty for local names."""
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    return dotted(node, names) if isinstance(root, ast.Name) and root.id in names else ""


def _connecting(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        modules = [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for module in modules for name in _NETWORK if module == name or module.startswith(name + ".")]


def _names_timeout(call: ast.Call) -> bool:
    """Whether a call has ``timeout=``, or a ``**mapping`` that may contain it."""
    return any(keyword.arg in ("timeout", None) for keyword in call.keywords)


def _waits_with_timeout(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    positional = {"wait": 1, "communicate": 2}.get(node.func.attr)
    return positional is not None and (len(node.args) >= positional or _names_timeout(node))


def _bad_pattern(call: ast.Call) -> str | None:
    pattern = call.args[0] if call.args else None
    if not isinstance(pattern, ast.Constant) or not isinstance(pattern.value, str | bytes):
        return None
    why = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flags in (0, re.VERBOSE):  # a comment in a verbose pattern may contain anything
            try:
                re.compile(pattern.value, flags)
            except (re.error, OverflowError, RecursionError) as error:
                why = str(error)
            else:
                return None
    return why
