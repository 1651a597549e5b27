"""Tasks: an instruction with its input files, verifier and limits.

Invariants:

- Records are frozen and hold no open resource. File contents stay on disk until :meth:`TaskFile.read`.
- :attr:`Task.content_hash` depends only on what an agent sees and what grades it, not on the task's id, its folder or
  the format it was read from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from clawgym.errors import TaskError
from clawgym.files import read_below
from clawgym.frames import Preview, Table, Tabular
from clawgym.records.dialogue import Dialogue

__all__ = [
    "DEFAULT_WORKSPACE",
    "Desktop",
    "DesktopStep",
    "GradingMode",
    "Layer",
    "Limits",
    "Site",
    "Task",
    "TaskFile",
    "TaskSet",
    "ToolServer",
    "VerifierSpec",
    "check_relative_path",
    "packages_of",
]

DEFAULT_WORKSPACE = "/root/.openclaw/workspace"
"""The default workspace folder, inside the sandbox."""
_MAX_LIMIT = 2.0**53


class GradingMode(StrEnum):
    """Where the verifier runs (see ``docs/concepts/grading.md``)."""

    CLEAN = "clean"
    """In a new sandbox, on a copy of the workspace."""
    FORK = "fork"
    """In a sandbox made from a snapshot of the agent's sandbox."""
    LIVE = "live"
    """In a new sandbox that shares the network of the agent's running sandbox, on a copy of the workspace."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that one episode may use. Sizes in MiB (2**20 bytes), times in seconds."""

    memory_mb: int = 1024
    pids: int = 256
    cpus: float = 1.0
    disk_mb: int = 512
    """Size of the writable layer."""
    file_mb: int = 256
    """Largest single file (RLIMIT_FSIZE)."""
    setup_seconds: float = 60.0
    agent_seconds: float = 900.0
    verify_seconds: float = 120.0
    teardown_seconds: float = 30.0
    command_seconds: float = 60.0
    """Most seconds of one shell command."""
    output_bytes: int = 64 * 1024
    """Bytes kept of one command's output, from its beginning and end."""
    max_steps: int = 50
    """Most actions or model calls in one episode."""

    def plus(self, **more: int) -> Limits:
        """These limits with some increased by the given amounts (``memory_mb=512``)."""
        return replace(self, **{name: getattr(self, name) + extra for name, extra in more.items()})

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 < value <= _MAX_LIMIT:
                shown = "one over 2**53" if value > _MAX_LIMIT else repr(value)
                raise TaskError(f"limits.{name} must be a positive number, not {shown}: correct it in the task")


def check_relative_path(path: str, where: str) -> str:
    """Return ``path`` if it is a plain relative POSIX path. Raises :class:`TaskError` with ``where`` otherwise."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise TaskError(f"{where}: {path!r} is not a plain relative path (no '..', no leading '/'): correct it")
    return path


@dataclass(frozen=True, slots=True)
class TaskFile:
    """One file of a task. ``source`` is a path, read only when used, or the bytes themselves."""

    path: str
    """Relative POSIX path below the target folder."""
    source: Path | bytes
    executable: bool = False
    within: Path | None = field(default=None, compare=False)
    """The folder below which no link in the path of ``source`` is followed; None: the folder of ``source``."""

    def __post_init__(self) -> None:
        check_relative_path(self.path, "task file")

    def read(self) -> bytes:
        """Read the content.

        Raises :class:`TaskError` if ``source`` is missing, or not a regular file of at most ``LARGEST_FILE`` bytes.
        """
        if isinstance(self.source, bytes):
            return self.source
        within = self.within or self.source.parent
        try:
            return read_below(within, self.source.relative_to(within).as_posix())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TaskError(f"{self.source}: cannot be read ({reason}): restore the file") from error

    @property
    def sha256(self) -> str:
        """Hex digest of the content."""
        return hashlib.sha256(self.read()).hexdigest()


_Rows = list[tuple[str, bool, str]]


def _rows(files: Iterable[TaskFile]) -> _Rows:
    """(path, executable bit, content digest) of each file, sorted."""
    return sorted((f.path, f.executable, f.sha256) for f in files)


def _digest(rows: _Rows) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """How a task is graded."""

    protocol: Literal["reward_sh", "harbor", "grader"]
    """``reward_sh``: ClawGym's (last stdout line of ``reward.sh`` is the score).
    ``harbor``: ``test.sh`` writes ``/logs/verifier/reward.txt`` or ``reward.json``.
    ``grader``: :attr:`grader`, which runs on the host and not in a sandbox."""
    files: tuple[TaskFile, ...] = ()
    """Mounted read-only; the entry is ``reward.sh`` or ``test.sh``. Of ``grader``: the ``check.py`` that the grader may
    run in a sandbox, and what it needs; most have none."""
    mode: GradingMode = GradingMode.CLEAN
    executes_agent_code: Literal["in_process", "subprocess"] | None = None
    """Whether the checker imports or runs the agent's code, which could then forge the result."""
    mutable_inputs: tuple[str, ...] = ()
    """Glob patterns (``fnmatch`` on the path below the workspace) of the inputs that the task asks to change. The other
    inputs are restored before the strict grading."""
    env: Mapping[str, str] = field(default_factory=dict)
    protected: tuple[str, ...] = ()
    """Glob patterns (``fnmatch`` on the path below the workspace) of files that the agent cannot change, such as tests,
    their configuration and caches. Before every grading, the official one too, inputs that match are restored and other
    files that match are removed. With protected files, the agent's *diff* on the task's inputs is graded, and the
    verifier's files below ``overlay/`` (tests that the agent never saw) are added. Mode ``clean`` only."""
    grader: str = ""
    """Of the protocol ``grader``: its name in :data:`clawgym.registry.graders`, such as ``rubric``."""
    grader_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the grader; plain JSON, part of the hash."""

    def __post_init__(self) -> None:
        if self.protected and self.mode is not GradingMode.CLEAN:
            raise TaskError(
                f"protected files need the mode 'clean', not '{self.mode}': set it, a kept layer is no diff"
            )
        if (self.protocol == "grader") is not bool(self.grader):
            raise TaskError(
                f"a verifier of protocol {self.protocol!r} with grader {self.grader!r}: give both protocol='grader' "
                "and the name of a grader, or neither"
            )
        if self.grader and self.mode is not GradingMode.CLEAN:
            raise TaskError(f"grader {self.grader!r} reads the frozen workspace: give the mode 'clean'")

    @property
    def digest(self) -> str:
        """Hex SHA-256 of what grades: protocol, mode, files; of a grader its name and options, not its code."""
        return self._digest_over(_rows(self.files))

    def _digest_over(self, rows: _Rows) -> str:
        what: list[Any] = [self.protocol, str(self.mode), sorted(self.mutable_inputs), sorted(self.env.items())]
        if self.protected:
            what.append(sorted(self.protected))
        if self.grader:
            what.append([self.grader, json.dumps(self.grader_options, sort_keys=True)])
        head = json.dumps(what)
        return hashlib.sha256((head + _digest(rows)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Layer:
    """A folder of the host that is mounted read-only in every sandbox of a task. It is made once, not per episode."""

    name: str
    """Name for messages, such as ``swe/humanize``."""
    digest: str
    """Hex SHA-256 of what the folder is made from; the same on every machine."""
    folder: Path
    """The folder on this machine."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A program in a sandbox that offers tools over the Model Context Protocol, on its stdin and stdout.

    The first server of a task runs in the episode's sandbox, which has the task's inputs and whose workspace is graded.
    Each further server runs in its own sandbox, so that it cannot access the state of the others.
    """

    name: str
    """Unique in its task; a plain word."""
    argv: tuple[str, ...]
    """Started in the workspace."""
    files: tuple[TaskFile, ...] = ()
    """Mounted read-only at ``/tools/<name>`` of its sandbox."""
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").isalnum():
            raise TaskError(f"tool server {self.name!r}: a name has letters, digits and '-' only: rename it")


@dataclass(frozen=True, slots=True)
class Site:
    """A web server in the episode's sandbox, whose workspace is graded. It listens at 127.0.0.1:8080."""

    argv: tuple[str, ...]
    """Started in the workspace."""
    files: tuple[TaskFile, ...] = ()
    """Mounted read-only at ``/tools/site``."""


@dataclass(frozen=True, slots=True)
class DesktopStep:
    """One step that the library takes on a desktop, before the agent's first action or after its last."""

    kind: Literal["run", "start", "focus", "close", "act", "wait"]
    """``run`` a program until it ends. ``start`` a program, which opens a window. ``focus`` or ``close`` a window by
    title. ``act``: perform an action of ``computer_use``. ``wait`` some seconds."""
    words: tuple[str, ...] = ()
    """The program with its arguments; the title, or a part of it; the action's arguments as JSON; the seconds."""


@dataclass(frozen=True, slots=True)
class Desktop:
    """A screen with programs. The agent sees it and uses it only by mouse and keyboard."""

    width: int = 1024
    """Pixels."""
    height: int = 768
    programs: tuple[tuple[str, ...], ...] = ()
    """Each opens one window; started in the workspace, in this order."""
    site: Site | None = None
    """A web site for the desktop's browser. The desktop then has its own sandbox, so the agent can change the files of
    the site only through the site."""
    page: str = ""
    """The page that a browser opens at the start, such as ``/orders``; empty: no browser."""
    opening: tuple[DesktopStep, ...] = ()
    """Taken once :attr:`programs` stand, before the agent's first action."""
    closing: tuple[DesktopStep, ...] = ()
    """Taken after the agent's last action, before the files are graded, such as the keys that save a document."""

    def __post_init__(self) -> None:
        if not (320 <= self.width <= 3840 and 240 <= self.height <= 2160):
            raise TaskError(f"desktop of {self.width} x {self.height} pixels: choose 320 x 240 to 3840 x 2160")
        if self.page and (self.site is None or not self.page.startswith("/")):
            raise TaskError(f"desktop page {self.page!r}: give a path like '/orders', and the site that has it")
        if self.site is not None and (self.programs or self.opening or self.closing):
            raise TaskError("a desktop has a site or programs and steps of its own, not both: remove one of them")


_DEFAULT_IMAGE = "default"


def packages_of(image: str) -> tuple[str, ...] | None:
    """The Debian packages that an image adds to the default image; None for other images.

    >>> packages_of("default"), packages_of("default:python3-yaml"), packages_of("python:3.12")
    ((), ('python3-yaml',), None)
    """
    name, _, packages = image.partition(":")
    return tuple(filter(None, packages.split(","))) if name == _DEFAULT_IMAGE else None


@dataclass(frozen=True)
class Task:
    """One task: what the agent is asked to do, with which files and tools, and how the work is graded."""

    id: str
    """Unique in its task set."""
    instruction: str
    """The prompt."""
    verifier: VerifierSpec
    inputs: tuple[TaskFile, ...] = ()
    """Files that are put below :attr:`workspace` before the agent starts."""
    workspace: str = DEFAULT_WORKSPACE
    image: str = "default"
    """``default`` (host ``/usr`` read-only, synthetic ``/etc``), ``default:PACKAGE,PACKAGE`` (with these Debian
    packages), or the name of an image that the backend knows."""
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, Layer] = field(default_factory=dict)
    """Absolute folder in the sandbox -> layer that is mounted there, in the sandboxes of the agent and the verifier."""
    tools: tuple[ToolServer, ...] = ()
    """The tools of the agent. Empty: a shell and the files of the workspace (:mod:`clawgym.tools`)."""
    desktop: Desktop | None = None
    """The desktop that the agent uses instead of tools."""
    dialogue: Dialogue | None = None
    """The conversation that the agent has. :attr:`instruction` then describes it, and is not shown to the agent."""
    packages: tuple[str, ...] = ()
    """Debian packages that the checker imports, found by the task format's reader. Part of :attr:`sandbox_image`. Not
    part of the hash, which covers the checker itself."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free-form; reports use ``category`` and ``level``. Not part of the hash."""
    solution: tuple[TaskFile, ...] = ()
    """Reference solution: ``solve.sh``, run with ``bash`` in the workspace, or for a task with its own tools
    ``solve.json``, a list of calls ``{"name", "arguments"}``. Not part of the hash."""
    wrong_solutions: tuple[TaskFile, ...] = ()
    """Scripts (or lists of calls) that must fail. Not part of the hash."""
    unsupported: str | None = None
    """Why this task cannot run here, or ``None``."""
    origin: str = ""
    """Where the task was read from, for messages."""

    @property
    def brings_tools(self) -> bool:
        """Whether the agent uses tool servers, a desktop or functions of the task instead of a shell."""
        return bool(self.tools) or self.desktop is not None or self.dialogue is not None

    @property
    def sandbox_image(self) -> str:
        """The image of every sandbox of the task: :attr:`image`, with :attr:`packages` added to the default image."""
        asked = packages_of(self.image)
        both = sorted({*(asked or ()), *self.packages})
        return self.image if asked is None or not both else f"{_DEFAULT_IMAGE}:{','.join(both)}"

    @cached_property
    def content_hash(self) -> str:
        """Hex SHA-256 of instruction, inputs, verifier, workspace, image, environment, layers, tools, desktop and
        dialogue."""
        return self.content_hash_with(self.verifier._digest_over(self._files[1]))

    def content_hash_with(self, verifier: str) -> str:
        """The content hash with ``verifier`` as the verifier's digest, to distinguish a changed verifier from a changed
        task."""
        what: list[Any] = [self.instruction, self.workspace, self.image, sorted(self.env.items())]
        if self.layers or self.tools:
            what.append(sorted((target, layer.digest) for target, layer in self.layers.items()))
            what.append([(s.name, list(s.argv), sorted(s.env.items())) for s in self.tools])
            what.append(self._files[2])
        if (desktop := self.desktop) is not None:
            what.append([desktop.width, desktop.height, [list(argv) for argv in desktop.programs], desktop.page])
            what.append([list(desktop.site.argv) if desktop.site else [], self._files[3]])
            if desktop.opening or desktop.closing:
                what.append([[[s.kind, *s.words] for s in steps] for steps in (desktop.opening, desktop.closing)])
        if self.dialogue is not None:
            what.append(["dialogue", self.dialogue.as_json])
        head = json.dumps(what)
        return hashlib.sha256((head + _digest(self._files[0]) + verifier).encode()).hexdigest()

    @cached_property
    def _files(self) -> tuple[_Rows, _Rows, _Rows, _Rows]:
        """Files of the inputs, verifier, tool servers and site, as they were when the hash was computed."""
        served = (replace(file, path=f"{server.name}/{file.path}") for server in self.tools for file in server.files)
        site = self.desktop.site.files if self.desktop and self.desktop.site else ()
        return _rows(self.inputs), _rows(self.verifier.files), _rows(served), _rows(site)

    def frozen(self) -> Task:
        """A copy of this task with all files in memory, so that one attempt uses the same files throughout.

        Each file is read once; such a copy is returned as it is. Raises :class:`TaskError` if a file is missing, or has
        changed since :attr:`content_hash` was computed.
        """

        if self.__dict__.get("_is_frozen"):
            return self

        def in_memory(files: tuple[TaskFile, ...]) -> tuple[TaskFile, ...]:
            return tuple(TaskFile(f.path, f.read(), f.executable) for f in files)

        verifier = replace(self.verifier, files=in_memory(self.verifier.files))
        tools = tuple(replace(server, files=in_memory(server.files)) for server in self.tools)
        desktop = self.desktop
        if desktop is not None and desktop.site is not None:
            desktop = replace(desktop, site=replace(desktop.site, files=in_memory(desktop.site.files)))
        copy = replace(self, inputs=in_memory(self.inputs), verifier=verifier, tools=tools, desktop=desktop)
        hashed = self.__dict__.get("_files", copy._files)
        kinds = ("input", "verifier file", "file of tool", "file of the site")
        for kind, old, new in zip(kinds, hashed, copy._files, strict=True):
            if old != new:
                path = min(set(new) - set(old))[0]
                raise TaskError(
                    f"task {self.id}: {kind} {path} was changed after the task was read "
                    f"({self.origin or 'no folder'}): restore it, or start a new run with the changed task"
                )
        copy.__dict__["_is_frozen"] = True
        return copy


_COLUMNS = (
    *("id", "category", "level", "instruction", "grader", "mode", "executes_agent_code", "inputs", "tools", "image"),
    *("agent_seconds", "max_steps", "unsupported"),
)
"""The columns of the table of a task set."""


@dataclass(frozen=True)
class TaskSet(Tabular):
    """An ordered, named, versioned collection of tasks."""

    name: str
    tasks: tuple[Task, ...]
    version: str = ""
    """Revision, pack version, or the hash of the contents."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Id or file of each task that could not be read -> the reason."""
    license: str = ""
    """SPDX identifier of a published set."""

    @cached_property
    def content_hash(self) -> str:
        """Hex SHA-256 of the ordered ids and content hashes."""
        return hashlib.sha256(json.dumps([(t.id, t.content_hash) for t in self.tasks]).encode()).hexdigest()

    @cached_property
    def by_id(self) -> dict[str, Task]:
        """Task id -> task."""
        return {t.id: t for t in self.tasks}

    def __len__(self) -> int:
        return len(self.tasks)

    def _tables(self) -> Mapping[str, Callable[[], Table]]:
        return {
            "tasks": lambda: Table(_COLUMNS, map(_row, self.tasks)),
            "problems": lambda: Table(("task", "problem"), self.problems.items()),
        }

    def _preview(self) -> Preview:
        about = {"version": self.version, "license": self.license}
        lines = [f"{what} {value}" for what, value in about.items() if value]
        if unsupported := sum(task.unsupported is not None for task in self.tasks):
            lines.append(f"{unsupported} tasks cannot run here")
        if self.problems:
            where, why = next(iter(self.problems.items()))
            lines.append(f"{len(self.problems)} tasks could not be read, such as {where[:100]}: {why}")
        table = Table(_COLUMNS[:6], (_row(task)[:6] for task in self.tasks))
        return Preview(f"{self.name}: {len(self):,} tasks", lines, table, len(self))


def _row(task: Task) -> tuple[Any, ...]:
    level = task.metadata.get("level") or task.metadata.get("difficulty")
    verifier = task.verifier
    return (
        *(task.id, task.metadata.get("category"), level, task.instruction, verifier.grader or verifier.protocol),
        *(str(verifier.mode), verifier.executes_agent_code, len(task.inputs), len(task.tools), task.image),
        *(task.limits.agent_seconds, task.limits.max_steps, task.unsupported),
    )
