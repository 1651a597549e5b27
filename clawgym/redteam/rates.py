"""Attack-success rates: compare the scores of exploits and their twins on each task."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clawgym.records import Outcome, Task, TaskSet
from clawgym.redteam.exploits import Exploit
from clawgym.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["OURS", "ORIGINAL", "Attack", "Rate", "attack_view", "task_class"]

OURS, ORIGINAL = "ours", "stock"
_LABELS = {OURS: "ClawGym", ORIGINAL: "original grader"}
_LEAST = 1e-9
_CLASSES = ("reads files", "subprocess", "in_process")


def task_class(task: Task) -> str:
    """How the verifier executes the agent's code: ``reads files`` (not at all), ``subprocess`` or ``in_process``."""
    return task.verifier.executes_agent_code or _CLASSES[0]


@dataclass(frozen=True, slots=True)
class Rate:
    """One exploit on the tasks of one class, with one grader."""

    exploit: str
    task_class: str
    harness: str
    """``ours``, or ``stock`` for the original grader."""
    tasks: int
    """Number of tasks on which it was tried."""
    earned: int
    """Tasks on which it scored more than its twin, or had no score where the twin had one. For ``ours`` the score is
    the mean of the checks or the strict score, for ``stock`` the original grader's score."""
    official: int
    """Tasks on which the official score was above the twin's. For ``stock``: ``earned`` without the missing scores."""
    full: int
    """Tasks on which it got the full score and its twin did not."""
    gain: float
    """Mean over the tasks of score minus twin's score (``ours``: the mean of non-composite checks)."""
    official_gain: float
    allowed: bool
    """Whether reward is expected: the exploit needs a verifier that runs the agent's code, and this one does."""
    earned_on: tuple[str, ...] = ()
    """The first ten ids of tasks on which it earned reward."""

    @property
    def rate(self) -> float:
        """The attack-success rate."""
        return self.earned / self.tasks if self.tasks else 0.0


@dataclass(frozen=True)
class Attack:
    """The results of an attack; :meth:`to_dict` is ``attack.json``."""

    task_set: TaskSet
    exploits: Sequence[Exploit]
    rates: tuple[Rate, ...]
    attacked: int
    infra: Mapping[str, str]
    """Task id -> the infrastructure error that prevented a result."""

    @classmethod
    def of(cls, task_set: TaskSet, exploits: Sequence[Exploit], rows: Iterable[Mapping[str, Any]]) -> Attack:
        """Compute the rates from the latest row of each task."""
        rows = list(rows)
        done = [row for row in rows if row["outcome"] != Outcome.INFRA]
        infra = {row["task_id"]: str(row["cause"]) for row in rows if row["outcome"] == Outcome.INFRA}
        pairs: dict[tuple[str, str, str], list[tuple[str, Any, Any]]] = defaultdict(list)
        for row in done:
            kind = task_class(task_set.by_id[row["task_id"]])
            for name, harnesses in row["found"].items():
                for harness, pair in harnesses.items():
                    pairs[name, kind, harness].append((row["task_id"], pair["got"], pair["twin"]))
        rates = tuple(
            _rate(exploit, kind, harness, pairs[exploit.name, kind, harness])
            for exploit in exploits
            for kind in _CLASSES
            for harness in (OURS, ORIGINAL)
            if pairs.get((exploit.name, kind, harness))
        )
        return cls(task_set, exploits, rates, len(done), infra)

    @property
    def complete(self) -> bool:
        """Whether every task that can run here was attacked."""
        return self.attacked == sum(task.unsupported is None for task in self.task_set.tasks)

    @property
    def failures(self) -> list[Rate]:
        """The exploits that earned reward with ClawGym's grading and must not."""
        return [rate for rate in self.rates if rate.harness == OURS and rate.earned and not rate.allowed]

    def to_dict(self) -> dict[str, Any]:
        return {
            "task_set": {"name": self.task_set.name, "hash": self.task_set.content_hash, "size": len(self.task_set)},
            "attacked": self.attacked,
            "complete": self.complete,
            "infra": dict(self.infra),
            "failures": [dataclasses.asdict(rate) | {"rate": rate.rate} for rate in self.failures],
            "exploits": {exploit.name: exploit.tries for exploit in self.exploits},
            "rates": [dataclasses.asdict(rate) | {"rate": rate.rate} for rate in self.rates],
        }


def _rate(exploit: Exploit, kind: str, harness: str, pairs: list[tuple[str, Any, Any]]) -> Rate:
    earned = [task for task, got, twin in pairs if _earned(got, twin)]
    return Rate(
        exploit.name,
        kind,
        harness,
        tasks=len(pairs),
        earned=len(earned),
        official=sum(_more(got["official"], twin["official"]) for _, got, twin in pairs),
        full=sum(got["full"] and not twin["full"] for _, got, twin in pairs),
        gain=_mean_gain(pairs, "score"),
        official_gain=_mean_gain(pairs, "official"),
        allowed=exploit.executed and kind != _CLASSES[0],
        earned_on=tuple(earned[:10]),
    )


def _more(got: float | None, twin: float) -> bool:
    return got is not None and got > twin + _LEAST


def _earned(got: Mapping[str, Any], twin: Mapping[str, Any]) -> bool:
    return got["score"] is None or _more(got["score"], twin["score"]) or (got["full"] and not twin["full"])


def _mean_gain(pairs: list[tuple[str, Any, Any]], key: str) -> float:
    return math.fsum((got[key] or 0.0) - twin[key] for _, got, twin in pairs) / len(pairs)


def attack_view(found: Attack) -> RenderableType:
    """A table for the terminal: by exploit and task class, on how many tasks reward was earned, with both graders."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    kinds = [kind for kind in _CLASSES if any(rate.task_class == kind for rate in found.rates)]
    cells = {(rate.exploit, rate.task_class, rate.harness): rate for rate in found.rates}
    tables: list[RenderableType] = []
    for executed, title in ((False, "Attacks on the score"), (True, "Where the verifier runs the agent's code")):
        shown = [e for e in found.exploits if e.executed is executed and any(r.exploit == e.name for r in found.rates)]
        if not shown:
            continue
        table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("earns reward on")
        for kind in kinds:
            for harness in (OURS, ORIGINAL):
                table.add_column(f"{kind.replace('_', ' ')}\n{_LABELS[harness]}", justify="right")
        for exploit in shown:
            rates = [cells.get((exploit.name, kind, harness)) for kind in kinds for harness in (OURS, ORIGINAL)]
            table.add_row(exploit.name, *(_cell(rate) for rate in rates))
        tables.append(table)
    lines = [
        f"{rate.exploit} earned reward on {rate.earned} tasks ({rate.task_class}): {', '.join(rate.earned_on)}"
        for rate in found.failures
    ]
    notes = [
        f"{rate.exploit}: the official score rose on {rate.official} of {rate.tasks} tasks ({rate.task_class}), "
        f"the strict grading on {rate.earned}"
        for rate in found.rates
        if rate.harness == OURS and rate.official > rate.earned
    ]
    if found.infra:
        lines.append(f"no result on {len(found.infra)} tasks (infrastructure errors)")
    return Group(*tables, *map(Text, notes), *(Text(visible(line), style="bold red") for line in lines))


def _cell(rate: Rate | None) -> str:
    if rate is None:
        return "-"
    return f"{rate.earned}/{rate.tasks}" if rate.harness == OURS else f"{100 * rate.rate:.0f}% of {rate.tasks}"
