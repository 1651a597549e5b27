"""The result of an audit: observations of each task, the flaws found in them, and totals of the set.

Invariant: flaws are computed from :class:`TaskAudit` alone, so other limits can be applied to a stored ``audit.json``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from clawgym.records import Task, TaskSet
from clawgym.tasks.curation.clean import HASH_DIGITS, Verdict
from clawgym.tasks.curation.missing import missing_inputs
from clawgym.tasks.curation.web import asks_for_web
from clawgym.verifiers.cheap import CHEAP_POLICIES, CheapGrade, output_paths
from clawgym.verifiers.effects import Effects, effects_of
from clawgym.verifiers.scan import third_party_imports
from clawgym.verifiers.scores import COMPOSITE_KEYS

__all__ = ["FLAWS", "HIGH_BASELINE", "Audit", "Flaw", "TaskAudit"]

HIGH_BASELINE = 0.5
"""A no-model baseline of at least this is a flaw: half of the checks pass without doing the task."""
_HELPER = "clawgym_checks.py"


@dataclass(frozen=True)
class TaskAudit:
    """One task's record in ``audit.json``. Findings in the verifier's source have the form ``file: line N: what``."""

    task: str
    hash: str
    policies: Mapping[str, CheapGrade]
    """The grade of each no-model policy (``nothing``, ``empty``, ``touch``, ``echo``); of the first of two gradings."""
    floor: float
    """The no-model baseline: the best ``mean`` of the policies, in [0, 1]."""
    outputs: tuple[str, ...]
    """The output paths that the prompt names."""
    composite: tuple[str, ...]
    """Checks that combine other checks into one number."""
    varies: Mapping[str, tuple[str, ...]]
    """Policy, or ``solution`` -> the checks in which two gradings of the same workspace differed."""
    writes: tuple[str, ...]
    """Paths that the verifier ``added``, ``changed`` or ``removed`` in the workspace, over all gradings; without
    Python's byte code."""
    solution: str | None
    """``pass``, the reason why the reference solution fails, or ``None`` without a reference solution."""
    agent_code: str | None
    """How the verifier may execute files of the agent, as the task declares: ``in_process``, ``subprocess`` or
    ``None``."""
    ran: tuple[str, ...] | None
    """Files of the agent that grading executed; ``None`` if the task has no program to try."""
    effects: Effects
    """``clock``, ``file_times``, ``network``, ``unbounded``, ``bad_patterns``, from the verifier's source."""
    packages: tuple[str, ...]
    """Third-party modules that the verifier imports, also inside ``try``."""
    unread: tuple[str, ...]
    """Files of the verifier that are neither Python nor the standard ``reward.sh``; their source was not analysed."""
    web: tuple[str, ...]
    """The sentences of the prompt that ask for the live internet."""
    missing: tuple[str, ...]
    """Input files that the prompt mentions and that the task does not contain."""

    @classmethod
    def of(cls, task: Task, observed: Mapping[str, Any]) -> Self:
        """Make the record from the task and its observations (:func:`~clawgym.evaluation.audit.observe`)."""
        policies = {policy: CheapGrade(**observed["policies"][policy]) for policy in CHEAP_POLICIES}
        checks = {name for grade in policies.values() for name in grade.checks}
        return cls(
            task=task.id,
            hash=task.content_hash,
            policies=policies,
            floor=max(grade.mean for grade in policies.values()),
            outputs=tuple(output_paths(task)),
            composite=tuple(sorted(checks & COMPOSITE_KEYS)),
            varies={policy: tuple(names) for policy, names in observed["varies"].items()},
            writes=tuple(entry for entry in observed["writes"] if "__pycache__" not in entry),
            solution=observed["solution"],
            agent_code=task.verifier.executes_agent_code,
            ran=None if observed["ran"] is None else tuple(observed["ran"]),
            effects=Effects(**{kind: tuple(found) for kind, found in observed["effects"].items()}),
            packages=tuple(observed["packages"]),
            unread=tuple(observed["unread"]),
            web=asks_for_web(task.instruction),
            missing=missing_inputs(task),
        )

    @property
    def flaws(self) -> dict[str, str]:
        """Name of the flaw -> description of what was found, in the order of :data:`FLAWS`."""
        found = ((flaw.name, flaw.found(self)) for flaw in FLAWS)
        return {name: what for name, what in found if what}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data, with ``effects`` flattened and ``flaws`` added."""
        plain = dataclasses.asdict(self)
        effects = plain.pop("effects")
        return plain | effects | {"flaws": self.flaws}


def read_sources(task: Task) -> dict[str, Any]:
    """Analyse the source of a task's verifier: ``effects``, ``packages`` and ``unread``, JSON-ready. Runs nothing."""
    effects: dict[str, list[str]] = {kind: [] for kind in Effects.__slots__}
    packages: set[str] = set()
    unread = []
    # Modules that come with the verifier or belong to the workspace.
    paths = [f.path for f in (*task.verifier.files, *task.inputs)] + output_paths(task)
    own = {name for path in paths if path.endswith(".py") for name in path.removesuffix(".py").split("/")}
    for file in task.verifier.files:
        if file.path == _HELPER:
            continue
        if not file.path.endswith(".py"):
            if file.path.endswith(".sh") and not _is_standard(file.read()):
                unread.append(file.path)
            continue
        source = file.read().decode("utf-8", "replace")
        found = effects_of(source)
        for kind, entries in effects.items():
            entries += [f"{file.path}: {entry}" for entry in getattr(found, kind)]
        packages.update(third_party_imports(source))
    return {"effects": effects, "packages": sorted(packages - own), "unread": unread}


def _is_standard(script: bytes) -> bool:
    from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

    return script == standard_reward_sh()


@dataclass(frozen=True)
class Flaw:
    """A reason to leave a task out of the cleaned subset."""

    name: str
    breaks: bool
    """Whether the flaw makes the reward itself wrong; ``clawgym tasks audit`` then ends with exit status 1."""
    about: str
    """What the flaw means, for reports."""
    found: Callable[[TaskAudit], str]
    """Describes the flaw in one task; the empty string if the task does not have it."""


def _list_policies(
    grades: Mapping[str, CheapGrade], matches: Callable[[CheapGrade], bool], text: Callable[[CheapGrade], str]
) -> str:
    return ", ".join(f"{policy} {text(grade)}" for policy, grade in grades.items() if matches(grade))


def _broken(a: TaskAudit) -> str:
    return next((str(g.cause) for g in a.policies.values() if (g.cause or "").startswith("control-")), "")


def _unearned(a: TaskAudit) -> str:
    idle = {policy: a.policies[policy] for policy in ("nothing", "empty")}
    return _list_policies(
        idle, lambda g: g.mean > 0 or (g.official or 0) > 0, lambda g: f"{max(g.mean, g.official or 0):.3f}"
    )


FLAWS: tuple[Flaw, ...] = (
    Flaw("broken", True, "the verifier fails on the untouched workspace", _broken),
    Flaw(
        "solution",
        True,
        "the reference solution does not pass",
        lambda a: "" if a.solution in (None, "pass") else str(a.solution),
    ),
    Flaw(
        "free",
        True,
        "a no-model policy gets the full score",
        lambda a: _list_policies(a.policies, lambda g: g.strict >= 1 or (g.official or 0) >= 1, lambda g: "1"),
    ),
    Flaw(
        "crash",
        True,
        "a no-model policy makes the verifier crash, hang or print no result, so that the whole score is 0",
        lambda a: (
            _list_policies(a.policies, lambda g: g.official is None, lambda g: str(g.cause)) if not _broken(a) else ""
        ),
    ),
    Flaw(
        "varies",
        True,
        "two gradings of the same workspace differ",
        lambda a: "; ".join(f"{policy}: {', '.join(names)}" for policy, names in a.varies.items()),
    ),
    Flaw("writes", True, "the verifier writes into the workspace", lambda a: ", ".join(a.writes)),
    Flaw(
        "pattern",
        True,
        "a regular expression of the verifier does not compile",
        lambda a: "; ".join(a.effects.bad_patterns),
    ),
    Flaw(
        "cheap",
        False,
        f"the no-model baseline is at least {HIGH_BASELINE}",
        lambda a: f"{a.floor:.3f}" if a.floor >= HIGH_BASELINE else "",
    ),
    Flaw("unearned", False, "doing nothing, or deleting the inputs, earns a reward", _unearned),
    Flaw("clock", False, "the verifier reads the current date or time", lambda a: "; ".join(a.effects.clock)),
    Flaw("file-times", False, "the verifier reads modification times", lambda a: "; ".join(a.effects.file_times)),
    Flaw("network", False, "the verifier imports network modules", lambda a: "; ".join(a.effects.network)),
    Flaw(
        "packages",
        False,
        "the score may depend on whether a package is installed",
        lambda a: ", ".join(a.packages),
    ),
    Flaw(
        "in-process",
        False,
        "the agent's code may run in the verifier's process and forge the result",
        lambda a: "executes agent code in its own process" if a.agent_code == "in_process" else "",
    ),
    Flaw(
        "unbounded",
        False,
        "the verifier starts programs without a timeout",
        lambda a: "; ".join(a.effects.unbounded),
    ),
    Flaw("web", False, "the prompt asks for the live internet", lambda a: a.web[0] if a.web else ""),
    Flaw("missing", False, "an input that the prompt mentions is missing", lambda a: ", ".join(a.missing)),
)
"""In the order in which they are reported."""


@dataclass(frozen=True)
class Audit:
    """The audit of a task set; incomplete if it was interrupted."""

    task_set: TaskSet
    tasks: tuple[TaskAudit, ...]
    """The tasks that were audited, in the order of the set."""
    infra: Mapping[str, str] = field(default_factory=dict)
    """Task id -> infrastructure error. The same call tries these tasks again."""

    @property
    def unsupported(self) -> dict[str, str]:
        """Task id -> why the task cannot run here."""
        return {task.id: task.unsupported for task in self.task_set.tasks if task.unsupported}

    @property
    def complete(self) -> bool:
        """Whether every task that can run here was audited."""
        return len(self.tasks) + len(self.unsupported) == len(self.task_set)

    @property
    def counts(self) -> dict[str, int]:
        """Name of the flaw -> number of tasks that have it."""
        found = [task.flaws for task in self.tasks]
        return {flaw.name: sum(flaw.name in flaws for flaws in found) for flaw in FLAWS}

    @property
    def broken(self) -> bool:
        """Whether a task has a flaw that makes its reward wrong, or could not be read."""
        counts = self.counts
        return bool(self.task_set.problems) or any(counts[flaw.name] for flaw in FLAWS if flaw.breaks)

    @property
    def seconds(self) -> dict[str, float]:
        """``median``, ``p95`` and ``max`` wall time of a grading in seconds, over the no-model policies."""
        times = sorted(grade.seconds for task in self.tasks for grade in task.policies.values())
        if not times:
            return {}
        return {"median": statistics.median(times), "p95": times[int(0.95 * (len(times) - 1))], "max": times[-1]}

    def earned(self, policy: str) -> dict[str, float]:
        """What one no-model policy earns: ``mean`` and ``max`` official score (0 without a score), and the number of
        tasks with a score ``above_0``, of at least 0.5 (``above_half``) and without a score (``crashed``)."""
        scores = [task.policies[policy].official for task in self.tasks]
        given = [score or 0.0 for score in scores]
        return {
            "mean": statistics.fmean(given) if given else 0.0,
            "max": max(given, default=0.0),
            "above_0": sum(score > 0 for score in given),
            "above_half": sum(score >= 0.5 for score in given),
            "crashed": sum(score is None for score in scores),
        }

    def verdicts(self) -> tuple[Verdict, ...]:
        """The cleaned subset: a task with any flaw is left out, with its flaws as the reasons."""
        return tuple(Verdict(task.task, task.hash[:HASH_DIGITS], tuple(task.flaws)) for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``audit.json``: the set, the totals, and one record per task."""
        return {
            "task_set": {
                "name": self.task_set.name,
                "version": self.task_set.version,
                "hash": self.task_set.content_hash,
                "size": len(self.task_set),
                "problems": dict(self.task_set.problems),
            },
            "complete": self.complete,
            "kept": sum(not task.flaws for task in self.tasks),
            "flaws": self.counts,
            "policies": {policy: self.earned(policy) for policy in CHEAP_POLICIES},
            "floor": statistics.fmean(task.floor for task in self.tasks) if self.tasks else 0.0,
            "seconds": self.seconds,
            "unsupported": self.unsupported,
            "infra": dict(self.infra),
            "tasks": [task.to_dict() for task in self.tasks],
        }
