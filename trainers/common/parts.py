"""The tasks of a run, in parts that share nothing.

Invariants: no instruction, no input and no reference solution is in two parts, whatever was asked for; where the
solutions of a generator vary in what they do (and not only in the names they do it to), nor is the chain of operations.
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

__all__ = ["Parts", "chain_of", "load_parts"]

_PARTS = ("heldout", "validation", "train", "demonstrations")
"""In the order in which they choose."""
_MANY_CHAINS = 32
"""A generator with at least so many different chains of operations has them held apart."""
_NAMES = re.compile(r"\b(?:" + "|".join(WORDS) + r")\b", re.IGNORECASE)


@dataclass(frozen=True)
class Parts:
    """Tasks by what they are for."""

    heldout: tuple[Task, ...]
    validation: tuple[Task, ...]
    train: tuple[Task, ...]
    demonstrations: tuple[Task, ...]
    left_out: Mapping[str, int]
    """How many of a part were left out because another one has them."""

    def about(self) -> dict[str, Any]:
        """Sizes and hashes, for a run manifest."""
        return {
            name: {"tasks": len(tasks), "sha256": _digest(*(t.content_hash for t in tasks))}
            for name in _PARTS
            for tasks in [getattr(self, name)]
        } | {"left_out": dict(self.left_out)}


def load_parts(tasks: Tasks, agent: AgentPart) -> Parts:
    """The parts that ``tasks`` asks for, with the agent's limit of steps. Raises
    :class:`~clawgym.errors.TrainingError` where one of them is empty, and as :func:`clawgym.tasks.sets.load` does."""
    found = {name: list(_slice(tasks, name)) for name in _PARTS}
    chains: dict[str, set[str]] = {}
    for task in (task for part in found.values() for task in part):
        chains.setdefault(_generator(task), set()).add(chain_of(task))
    varied = {generator for generator, known in chains.items() if len(known) >= _MANY_CHAINS}
    taken: set[str] = set()
    parts: dict[str, tuple[Task, ...]] = {}
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
            raise TrainingError(f"tasks.{name}: no task of {tasks.set!r} is left for it: ask for others, or for more")
        parts[name] = tuple(_limited(task, agent) for task in kept)
    return Parts(**parts, left_out=left_out)


def chain_of(task: Task) -> str:
    """What its reference solution does, without the words that it does it to."""
    return _NAMES.sub("_", _solution(task))


def _solution(task: Task) -> str:
    name = solution_name(task)
    entry = next((f for f in task.solution if f.path == name), None)
    # Without one, only the instruction can be compared.
    return task.instruction if entry is None else entry.read().decode("utf-8", "replace")


def _generator(task: Task) -> str:
    return str(task.metadata.get("generator") or task.metadata.get("category") or "")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _limited(task: Task, agent: AgentPart) -> Task:
    steps = min(agent.max_steps, task.limits.max_steps)
    return dataclasses.replace(task, limits=dataclasses.replace(task.limits, max_steps=steps))


def _slice(tasks: Tasks, name: str) -> Iterator[Task]:
    seeds: Seeds = getattr(tasks, name)
    module: Any = pack(tasks.set) if tasks.set in packs else None
    if getattr(module, "make", None) is not None:
        odd = name in ("heldout", "validation")
        wanted = range(seeds.first, seeds.first + seeds.count)
        for generator in tasks.generators or module.generators:
            yield from (module.make(generator, 2 * n + odd) for n in wanted)
        return
    if tasks.generators:
        raise TrainingError(f"tasks.generators: {tasks.set!r} is no pack that is made from seeds: leave them out")
    everything = sets.load(tasks.set).tasks
    yield from everything[seeds.first : seeds.first + seeds.count]
