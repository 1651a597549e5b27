"""The records that every room shares: tasks, steps, turns, episodes, outcomes.

Invariants: records are frozen and hold no open resource; file contents stay on disk until
``TaskFile.read``; a task's :attr:`Task.content_hash` depends on what an agent sees and what grades
it, and on nothing else (not on its id, its folder, or the format it was read from).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from clawgym.errors import TaskError
from clawgym.files import read_below

__all__ = [
    "DEFAULT_WORKSPACE",
    "Desktop",
    "Episode",
    "GradingMode",
    "Image",
    "Layer",
    "Limits",
    "Observation",
    "Outcome",
    "Phase",
    "Role",
    "Sample",
    "Site",
    "Step",
    "Task",
    "TaskFile",
    "TaskSet",
    "ToolCall",
    "ToolServer",
    "Turn",
    "Usage",
    "VerifierResult",
    "VerifierSpec",
    "common_prefix",
    "continued",
    "packages_of",
    "prompt_ids",
]

DEFAULT_WORKSPACE = "/root/.openclaw/workspace"
"""Where ClawGym tasks keep their files, inside the box."""
_LARGEST_LIMIT = 2.0**53


class Outcome(StrEnum):
    """How an episode ended."""

    SOLVED = "solved"
    """Strict score 1."""
    FAILED = "failed"
    """Graded below 1, or the agent broke its box (``cause`` says how)."""
    TRUNCATED = "truncated"
    """Stopped by a budget; graded all the same."""
    INFRA = "infra"
    """Our fault: retried, reported as a rate, never in a score or a gradient."""


class GradingMode(StrEnum):
    """Where the verifier runs (see ``docs/grading.md``)."""

    CLEAN = "clean"
    FORK = "fork"
    LIVE = "live"


class Phase(StrEnum):
    """The four phases of an episode; each has its own budget and a hard deadline."""

    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"
    TEARDOWN = "teardown"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use. Sizes in MiB (2**20 bytes), times in seconds."""

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
    """One shell command."""
    output_bytes: int = 64 * 1024
    """Kept of one command's output: both ends."""
    max_steps: int = 50
    """Actions or model calls in one episode."""

    def plus(self, **more: int) -> Limits:
        """These limits, and ``more`` of some of them (``memory_mb=512``)."""
        return replace(self, **{name: getattr(self, name) + extra for name, extra in more.items()})

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 < value <= _LARGEST_LIMIT:
                shown = "one over 2**53" if value > _LARGEST_LIMIT else repr(value)
                raise TaskError(f"limits.{name} must be a positive number, not {shown}: correct it in the task")


def check_relative_path(path: str, where: str) -> str:
    """Return ``path`` if it is a plain relative POSIX path, else raise :class:`TaskError` naming ``where``."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise TaskError(f"{where}: {path!r} is not a plain relative path (no '..', no leading '/'): correct it")
    return path


@dataclass(frozen=True, slots=True)
class TaskFile:
    """One file of a task. ``source`` is a path, read only when used, or the bytes themselves."""

    path: str
    """Relative POSIX path below the folder it goes to."""
    source: Path | bytes
    executable: bool = False
    within: Path | None = field(default=None, compare=False)
    """The folder below which no link on the way to ``source`` is followed; None for the one that it lies in."""

    def __post_init__(self) -> None:
        check_relative_path(self.path, "task file")

    def read(self) -> bytes:
        """The content.

        Raises :class:`TaskError` if it is no regular file of at most ``LARGEST_FILE`` bytes, or not any more.
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

    protocol: Literal["reward_sh", "harbor"]
    """``reward_sh``: ClawGym's (last stdout line of ``reward.sh`` is the score).
    ``harbor``: ``test.sh`` writes ``/logs/verifier/reward.txt`` or ``reward.json``."""
    files: tuple[TaskFile, ...]
    """Mounted read-only; the entry is ``reward.sh`` or ``test.sh``."""
    mode: GradingMode = GradingMode.CLEAN
    executes_agent_code: Literal["in_process", "subprocess"] | None = None
    """Whether the checker imports (or runs) code the agent wrote: its result can then be forged."""
    mutable_inputs: tuple[str, ...] = ()
    """Glob patterns (``fnmatch`` on the path below the workspace) of inputs the task asks to change.
    The others are restored before the strict grading."""
    env: Mapping[str, str] = field(default_factory=dict)
    protected: tuple[str, ...] = ()
    """Glob patterns (``fnmatch`` on the path below the workspace) of what the agent's work is not taken from: in every
    grading, the official one too, files that match are as the task gave them, and others that match are gone (tests,
    their configuration, caches). Where there are some, what is graded is the agent's *diff* on the task's inputs, and
    the verifier's own files below ``overlay/`` are put over it: tests that the agent never saw. Mode ``clean`` only."""

    def __post_init__(self) -> None:
        if self.protected and self.mode is not GradingMode.CLEAN:
            raise TaskError(f"protected files need the mode 'clean', not '{self.mode}': a kept layer is no diff")

    @property
    def digest(self) -> str:
        """Hex SHA-256 of what grades: protocol, mode, files."""
        return self._digest_over(_rows(self.files))

    def _digest_over(self, rows: _Rows) -> str:
        what: list[Any] = [self.protocol, str(self.mode), sorted(self.mutable_inputs), sorted(self.env.items())]
        if self.protected:
            what.append(sorted(self.protected))
        head = json.dumps(what)
        return hashlib.sha256((head + _digest(rows)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Layer:
    """A folder of this machine that every box of a task sees, read-only: made once, never for an episode."""

    name: str
    """For messages: ``swe/humanize``."""
    digest: str
    """Hex SHA-256 of what the folder is made from, the same on every machine."""
    folder: Path
    """Where it is here."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A program in a box that offers tools over the Model Context Protocol, on its stdin and stdout.

    The first server of a task runs in the episode's own box, where the task's inputs are and whose workspace is graded;
    each further one in a box of its own, so that no server's code reaches what another keeps.
    """

    name: str
    """Unique in its task; a plain word."""
    argv: tuple[str, ...]
    """Started in the workspace."""
    files: tuple[TaskFile, ...] = ()
    """Read-only at ``/tools/<name>`` of its box."""
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").isalnum():
            raise TaskError(f"tool server {self.name!r}: a name has letters, digits and '-' only: rename it")


@dataclass(frozen=True, slots=True)
class Site:
    """A web server in the episode's box, whose workspace is graded; it listens at 127.0.0.1:8080."""

    argv: tuple[str, ...]
    """Started in the workspace."""
    files: tuple[TaskFile, ...] = ()
    """Read-only at ``/tools/site``."""


@dataclass(frozen=True, slots=True)
class Desktop:
    """A screen with programs, which the agent sees and drives by mouse and keyboard and by nothing else."""

    width: int = 1024
    """Pixels."""
    height: int = 768
    programs: tuple[tuple[str, ...], ...] = ()
    """Each opens one window; started in the workspace, in this order."""
    site: Site | None = None
    """Then the desktop is in a box of its own, and its browser sees this site: nothing that the agent reaches in there
    reaches the files of the site but by asking the site."""
    page: str = ""
    """What a browser opens at the start, such as ``/orders``; no browser if empty."""

    def __post_init__(self) -> None:
        if not (320 <= self.width <= 3840 and 240 <= self.height <= 2160):
            raise TaskError(f"desktop of {self.width} x {self.height} pixels: choose 320 x 240 to 3840 x 2160")
        if self.page and (self.site is None or not self.page.startswith("/")):
            raise TaskError(f"desktop page {self.page!r}: give a path like '/orders', and the site that has it")
        if self.site is not None and self.programs:
            raise TaskError("a desktop has a site or programs of its own, not both: the box of a site has no files")


_DEFAULT_IMAGE = "default"


def packages_of(image: str) -> tuple[str, ...] | None:
    """The packages asked for beside the default image's own; None for another image.

    >>> packages_of("default"), packages_of("default:python3-yaml"), packages_of("python:3.12")
    ((), ('python3-yaml',), None)
    """
    name, _, packages = image.partition(":")
    return tuple(filter(None, packages.split(","))) if name == _DEFAULT_IMAGE else None


@dataclass(frozen=True)
class Task:
    """One piece of work."""

    id: str
    instruction: str
    verifier: VerifierSpec
    inputs: tuple[TaskFile, ...] = ()
    """Put below :attr:`workspace` before the agent starts."""
    workspace: str = DEFAULT_WORKSPACE
    image: str = "default"
    """``default`` (host ``/usr`` read-only, synthetic ``/etc``), ``default:PACKAGE,PACKAGE`` (with these packages of
    Debian), or a name the backend knows."""
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, Layer] = field(default_factory=dict)
    """Absolute folder in the box -> what is mounted there, in the agent's boxes and the verifier's."""
    tools: tuple[ToolServer, ...] = ()
    """What the agent acts with. Empty: a shell and the files of the workspace (:mod:`clawgym.tools`)."""
    desktop: Desktop | None = None
    """What the agent acts with, instead of tools."""
    packages: tuple[str, ...] = ()
    """Packages of Debian that the checker tries to import: a format's reader finds them. Not part of the hash, as the
    checker is; :attr:`sandbox_image` has them."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free-form; ``category`` and ``level`` are used by the report. Not part of the hash."""
    solution: tuple[TaskFile, ...] = ()
    """Reference solution; entry ``solve.sh``, run with ``bash`` in the workspace, or where the task brings tools
    ``solve.json``, a list of calls ``{"name", "arguments"}``. Not part of the hash."""
    wrong_solutions: tuple[TaskFile, ...] = ()
    """Scripts (or lists of calls) that must not pass. Not part of the hash."""
    unsupported: str | None = None
    """Why this task cannot run here, or ``None``."""
    origin: str = ""
    """Where the task was read, for messages."""

    @property
    def brings_tools(self) -> bool:
        """Whether the agent acts with what the task brings, tool servers or a desktop, instead of a shell."""
        return bool(self.tools) or self.desktop is not None

    @property
    def sandbox_image(self) -> str:
        """:attr:`image`, with :attr:`packages` if it is the default one: what every sandbox is made from."""
        asked = packages_of(self.image)
        both = sorted({*(asked or ()), *self.packages})
        return self.image if asked is None or not both else f"{_DEFAULT_IMAGE}:{','.join(both)}"

    @cached_property
    def content_hash(self) -> str:
        """Hex SHA-256 of instruction, inputs, verifier, workspace, image, environment, layers, tools and desktop."""
        return self.content_hash_with(self.verifier._digest_over(self._files[1]))

    def content_hash_with(self, verifier: str) -> str:
        """The content hash if the verifier's digest were ``verifier``: tells a changed verifier from a changed task."""
        what: list[Any] = [self.instruction, self.workspace, self.image, sorted(self.env.items())]
        if self.layers or self.tools:
            what.append(sorted((target, layer.digest) for target, layer in self.layers.items()))
            what.append([(s.name, list(s.argv), sorted(s.env.items())) for s in self.tools])
            what.append(self._files[2])
        if (desktop := self.desktop) is not None:
            what.append([desktop.width, desktop.height, [list(argv) for argv in desktop.programs], desktop.page])
            what.append([list(desktop.site.argv) if desktop.site else [], self._files[3]])
        head = json.dumps(what)
        return hashlib.sha256((head + _digest(self._files[0]) + verifier).encode()).hexdigest()

    @cached_property
    def _files(self) -> tuple[_Rows, _Rows, _Rows, _Rows]:
        """Inputs, verifier, tool servers and site, as they were when the hash was taken."""
        served = (replace(file, path=f"{server.name}/{file.path}") for server in self.tools for file in server.files)
        site = self.desktop.site.files if self.desktop and self.desktop.site else ()
        return _rows(self.inputs), _rows(self.verifier.files), _rows(served), _rows(site)

    def frozen(self) -> Task:
        """This task with its inputs and its verifier in memory: what one attempt uses from beginning to end.

        Each file is read once. Raises :class:`TaskError` if one is gone, or is not what :attr:`content_hash` was taken
        of; where it was not taken yet, it will be taken of what is returned.
        """

        def held(files: tuple[TaskFile, ...]) -> tuple[TaskFile, ...]:
            return tuple(TaskFile(f.path, f.read(), f.executable) for f in files)

        verifier = replace(self.verifier, files=held(self.verifier.files))
        tools = tuple(replace(server, files=held(server.files)) for server in self.tools)
        desktop = self.desktop
        if desktop is not None and desktop.site is not None:
            desktop = replace(desktop, site=replace(desktop.site, files=held(desktop.site.files)))
        copy = replace(self, inputs=held(self.inputs), verifier=verifier, tools=tools, desktop=desktop)
        taken_of = self.__dict__.get("_files", copy._files)
        kinds = ("input", "verifier file", "file of tool", "file of the site")
        for kind, old, new in zip(kinds, taken_of, copy._files, strict=True):
            if old != new:
                path = min(set(new) - set(old))[0]
                raise TaskError(
                    f"task {self.id}: {kind} {path} was changed after the task was read "
                    f"({self.origin or 'no folder'}): put it back, or start a new run with the task as it is now"
                )
        return copy


@dataclass(frozen=True)
class TaskSet:
    """An ordered, named, versioned collection of tasks.

    ``problems`` maps the id (or file) of each task that could not be read to the reason: one bad
    task never hides the others.
    """

    name: str
    tasks: tuple[Task, ...]
    version: str = ""
    """Revision, pack version, or the hash of the contents."""
    problems: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def content_hash(self) -> str:
        """Hex SHA-256 of the ordered ids and content hashes."""
        return hashlib.sha256(json.dumps([(t.id, t.content_hash) for t in self.tasks]).encode()).hexdigest()

    @cached_property
    def by_id(self) -> dict[str, Task]:
        return {t.id: t for t in self.tasks}

    def __len__(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and money. ``cost_usd`` is ``None`` when no price is known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None

    def __add__(self, other: Usage) -> Usage:
        costs = [c for c in (self.cost_usd, other.cost_usd) if c is not None]
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(costs) if costs else None,
        )


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a prompt."""

    sha256: str
    """Hex digest of ``data``."""
    data: bytes
    """The encoded file (PNG, JPEG, ...), as the agent sent it; empty where only a transcript was read."""
    media_type: str = "image/png"


Role = Literal["main", "subagent", "compaction", "unknown"]
"""What a model call was for. ``unknown`` is never trained."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call, exact to the token, or marked with the ``flaw`` that keeps it out of training.

    A turn that continues another one holds only what is new: the engine was given the prompt and the sample
    of ``parent``, then ``context_ids``. So a continued history is a prefix by construction
    (:func:`prompt_ids` puts the whole together).
    """

    context_ids: tuple[int, ...] = ()
    """Given to the engine after the ids of ``parent``; the whole prompt where there is no parent."""
    sampled_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """One per sampled id, in nats: log softmax(logits / temperature), over the whole vocabulary."""
    policy_version: int | None = None
    role: Role = "main"
    parent: int | None = None
    """Index in its episode of the turn that this one continues."""
    finish_reason: str = "stop"
    """``stop``, ``length``, ``tool_calls``, ``content_filter``, ``aborted`` (the agent left) or ``error``."""
    flaw: str | None = None
    """Why its tokens are not proved to be what was sampled (``text-only``, ``stripped``, ``constrained``, ...);
    training refuses it."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Temperature, top_p, ... that were in force."""
    images: tuple[str, ...] = ()
    """Hex SHA-256 of each image new in this turn's context, in order."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """``queued``, ``first_token``, ``total``: wall seconds since the request came."""
    malformed_calls: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    """New in this turn (all of them where there is no parent), in OpenAI chat form."""
    reply: Mapping[str, Any] = field(default_factory=dict)
    """The assistant message as it was sent to the agent."""
    tools: str = ""
    """Hex SHA-256 of the tool definitions that were rendered into the prompt, kept beside images; empty without."""
    id: str = ""
    """The id that the agent was given with the answer (``chatcmpl-...``), to join its own transcript by."""

    def __post_init__(self) -> None:
        if self.flaw is None and len(self.logprobs) != len(self.sampled_ids):
            raise ValueError(
                f"{len(self.sampled_ids)} sampled ids with {len(self.logprobs)} log-probs: record both as the engine "
                "gave them, or name the flaw"
            )


def prompt_ids(turns: Sequence[Turn], index: int) -> tuple[int, ...]:
    """All ids that the engine was given for ``turns[index]``, in order."""
    parts: list[tuple[int, ...]] = [turns[index].context_ids]
    parent = turns[index].parent
    while parent is not None:
        if parent >= index:
            raise ValueError(f"turn {index} continues turn {parent}: a parent comes before its child")
        index = parent
        parts += [turns[index].sampled_ids, turns[index].context_ids]
        parent = turns[index].parent
    return tuple(token for part in reversed(parts) for token in part)


def continued(prompt: tuple[int, ...], histories: Mapping[int, tuple[int, ...]]) -> int | None:
    """The key of the longest of ``histories`` (index of a turn -> its prompt and sample) that ``prompt`` begins with;
    the latest of equals, ``None`` where there is none."""
    fits = [index for index, ids in histories.items() if ids and prompt[: len(ids)] == ids]
    return max(fits, key=lambda index: (len(histories[index]), index), default=None)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two lists (or two tuples) begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # whole slices are compared in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of training: the ids along a path of turns, from a first prompt to a last sample."""

    turns: tuple[int, ...]
    """Indices in the episode, first to last."""
    ids: tuple[int, ...]
    """(T,) as the engine saw and sampled them."""
    mask: tuple[int, ...]
    """(T,) 1 where an id was sampled and is trained in this row; each sampled id is trained in one row."""
    logprobs: tuple[float, ...]
    """(S,) one per 1 of ``mask``, in order: never padded."""
    policy_versions: tuple[int | None, ...]
    """(S,)"""
    turn_of: tuple[int, ...]
    """(S,) index in the episode of the turn that sampled it."""
    images: tuple[str, ...] = ()
    """Hex SHA-256, in the order of their places in ``ids``."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the agent made. ``id`` is unique within its episode."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What came back for one tool call (``call_id``), or from the environment (``None``)."""

    content: str
    call_id: str | None = None
    image: Image | None = None
    """What the screen showed."""


@dataclass(frozen=True)
class Step:
    """One entry of a transcript; field for field what an ATIF step can carry."""

    source: Literal["system", "user", "agent"]
    message: str
    timestamp: str
    """ISO 8601, UTC."""
    tool_calls: tuple[ToolCall, ...] = ()
    observations: tuple[Observation, ...] = ()
    reasoning: str | None = None
    model: str | None = None
    usage: Usage | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifierResult:
    """Named checks and the three numbers made of them; all in [0, 1]."""

    checks: Mapping[str, float]
    """The strict grading's named checks."""
    official: float
    """Bit for bit what the format's own harness gives on the workspace as it was left."""
    strict: float
    """1.0 if every check passes with changed inputs restored, else 0.0."""
    corrected: float | None
    """max(0, (s - f) / (1 - f)): ``s`` the mean of the non-composite checks, ``f`` the task's floor (the
    best cheap policy's ``s``). ``None`` where no floor is known."""
    mode: GradingMode = GradingMode.CLEAN
    verifier_hash: str = ""
    floor: float | None = None
    tampered: bool = False
    """Restoring the inputs changed the checks."""
    changed_inputs: tuple[str, ...] = ()
    cause: str | None = None
    """Why the verifier gave no checks (``crash``, ``timeout``, ``oom``, ``output``, ...), or ``None``."""
    log: str = ""
    """Output of the verifier, both ends."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Episode:
    """One attempt at one task."""

    task_id: str
    task_hash: str
    sample: int
    """0-based index among the attempts at this task."""
    seed: int
    agent: str
    outcome: Outcome
    cause: str | None = None
    """Why it was not solved; ``None`` for solved and for checks that simply failed."""
    error: str = ""
    """For ``infra``: the whole message, which ends with what to do."""
    result: VerifierResult | None = None
    """``None`` only for ``infra``."""
    steps: tuple[Step, ...] = ()
    turns: tuple[Turn, ...] = ()
    usage: Usage = field(default_factory=Usage)
    final_message: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by :class:`Phase`; ``boot``: the wait for a box with the agent's program in it."""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    """What the box isolated, as probed."""
    workspace: bytes | None = None
    """Gzipped tar of the frozen workspace, if kept."""
    dropped: tuple[str, ...] = ()
    """What could not be taken from the box (links out, FIFOs, files over the cap)."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What the agent's program wrote about itself (its own transcript, its log), by relative path."""

    @property
    def key(self) -> str:
        """Unique within a run: ``<task id>#<sample>``."""
        return f"{self.task_id}#{self.sample}"
