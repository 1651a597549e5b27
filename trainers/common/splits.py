"""The splits of a run's tasks.

Invariants: no instruction and no reference solution is in two splits. If the solutions of a generator differ in their
operations, and not only in the names they apply them to, no chain of operations is in two splits either.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clawgym.agents.oracle import solution_name
from clawgym.errors import TrainingError
from clawgym.records import Task
from clawgym.registry import packs
from clawgym.tasks import sets
from clawgym.tasks.packs import pack
from clawgym.tasks.packs.seeded import WORDS
from clawgym.trainers.config import AgentPart, Seeds, Tasks

__all__ = ["Splits", "chain_of", "limited", "load_splits"]

_PARTS = ("heldout", "validation", "train", "demonstrations")
"""The splits in order of precedence: a task that fits two splits belongs to the first."""
_MIN_CHAINS = 32
"""From this number of different chains on, a generator's chains of operations are kept in separate splits."""
_NAMES = re.compile(r"\b(?:" + "|".join(WORDS) + r")\b", re.IGNORECASE)


@dataclass(frozen=True)
class Splits:
    """The tasks of each split."""

    heldout: tuple[Task, ...]
    validation: tuple[Task, ...]
    train: tuple[Task, ...]
    demonstrations: tuple[Task, ...]
    left_out: Mapping[str, int]
    """Split -> number of tasks that were left out because another split has them."""

    def about(self) -> dict[str, Any]:
        """Sizes and hashes, for a run manifest."""
        return {
            name: {"tasks": len(tasks), "sha256": _digest(*(t.content_hash for t in tasks))}
            for name in _PARTS
            for tasks in [getattr(self, name)]
        } | {"left_out": dict(self.left_out)}


def load_splits(tasks: Tasks, agent: AgentPart) -> Splits:
    """The splits of ``tasks``, with the agent's limit of steps.

    Raises :class:`~clawgym.errors.TrainingError` if a split is empty, and as :func:`clawgym.tasks.sets.load` does."""
    found = {name: list(_slice(tasks, name)) for name in _PARTS}
    chains: dict[str, set[str]] = {}
    for task in (task for part in found.values() for task in part):
        chains.setdefault(_generator(task), set()).add(chain_of(task))
    varied = {generator for generator, known in chains.items() if len(known) >= _MIN_CHAINS}
    taken: set[str] = set()
    splits: dict[str, tuple[Task, ...]] = {}
    left_out: dict[str, int] = {}
    for name in _PARTS:
        kept, own = [], set[str]()
        for task in found[name]:
            marks = {_digest("text", task.instruction), _digest("solution", _solution(task))}
            if _generator(task) in varied:
                marks.add(_digest("chain", _generator(task), chain_of(task)))
            if marks & taken or (name != "train" and _digest("text", task.instruction) in own):
                left_out[name] = left_out.get(name, 0) + 1
                continue
            own |= marks
            kept.append(task)
        taken |= own
        if not kept:
            raise TrainingError(
                f"tasks.{name}: no task of {tasks.set!r} is left for it: choose another range, or a larger one"
            )
        splits[name] = tuple(limited(task, agent) for task in kept)
    return Splits(**splits, left_out=left_out)


def chain_of(task: Task) -> str:
    """The reference solution with all words of the pack replaced by ``_``: its chain of operations."""
    return _NAMES.sub("_", _solution(task))


def _solution(task: Task) -> str:
    name = solution_name(task)
    entry = next((f for f in task.solution if f.path == name), None)
    # Without a solution, only the instruction can be compared.
    return task.instruction if entry is None else entry.read().decode("utf-8", "replace")


def _generator(task: Task) -> str:
    return str(task.metadata.get("generator") or task.metadata.get("category") or "")


def _digest(*splits: str) -> str:
    return hashlib.sha256("\0".join(splits).encode()).hexdigest()


def limited(task: Task, agent: AgentPart) -> Task:
    """The task with at most as many steps as the agent takes."""
    steps = min(agent.max_steps, task.limits.max_steps)
    return dataclasses.replace(task, limits=dataclasses.replace(task.limits, max_steps=steps))


def _names_pack(name: str) -> bool:
    """Whether ``name`` is a registered pack or ``package.module:thing``, and no split of a set or file."""
    base, _, thing = name.partition(":")
    imported = base.replace(".", "_").isidentifier() and thing.isidentifier() and not base.endswith(".py")
    return name in packs or (imported and base not in packs)


def _slice(tasks: Tasks, name: str) -> Iterator[Task]:
    seeds: Seeds = getattr(tasks, name)
    module: Any = pack(tasks.set) if _names_pack(tasks.set) else None
    if getattr(module, "make", None) is not None:
        odd = name in ("heldout", "validation")
        wanted = range(seeds.first, seeds.first + seeds.count)
        for generator in tasks.generators or module.generators:
            yield from (module.make(generator, 2 * n + odd) for n in wanted)
        return
    if tasks.generators:
        raise TrainingError(f"tasks.generators: {tasks.set!r} has no generators: leave them out")
    everything = sets.load(tasks.set).tasks
    yield from everything[seeds.first : seeds.first + seeds.count]
