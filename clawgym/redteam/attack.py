"""``attack``: what does it pay to attack the score of a task set, here and graded the stock way?

An exploit has earned something on a task if its score is above that of its twin: the same visible work without the
exploit, on the same task, graded the same way. Having no score at all (``infra``, a harness brought down) where the
twin has one counts as well: it is a way out of a low score.

Invariants: a result comes from running the exploit in a box and grading it by the public way; the two harnesses get
the same script; the folder can be continued by the same command.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from clawgym.agents.script import ScriptAgent
from clawgym.errors import InfraError, RunFolderError, SandboxUnavailable
from clawgym.evaluation.progress import NoProgress, ProgressView
from clawgym.evaluation.schedule import ATTEMPTS, Schedule, finished_writing
from clawgym.records import Outcome, Task, TaskSet
from clawgym.records.run_folder import RunFolder, make_receipt, now
from clawgym.redteam import exploits as library
from clawgym.redteam.exploits import Exploit
from clawgym.redteam.original_grader import stock_score_of
from clawgym.redteam.rates import OURS, STOCK, Attack, task_class
from clawgym.rollout import fault_of, run_episode
from clawgym.sandbox.machine import machine_of
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.scores import plain_mean

__all__ = ["ATTACK", "BASELINE_TASKS", "attack", "draw"]

ATTACK = "attack.json"
BASELINE_TASKS = 200
"""Tasks of each class that are graded the stock way too."""
_AGENT_SECONDS, _VERIFY_SECONDS = 60.0, 20.0
"""No exploit needs longer; a verifier that hangs is not waited for as long as an honest one. (One that runs a
repository's tests gets its own time: a run cut short would be worth less by chance, the twin's too.)"""


def draw(tasks: Iterable[Task], n: int | None) -> list[Task]:
    """At most ``n`` tasks of each class, always the same ones, in the order of ``tasks``."""
    tasks = [task for task in tasks if task.unsupported is None]
    if n is None:
        return tasks
    classes: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        classes[task_class(task)].append(task)
    chosen = {t.id for members in classes.values() for t in random.Random(0).sample(members, min(n, len(members)))}
    return [task for task in tasks if task.id in chosen]


async def attack(
    task_set: TaskSet,
    backend: Backend,
    out: Path,
    *,
    names: Sequence[str] = (),
    baseline: bool = True,
    concurrency: int | None = None,
    progress: ProgressView | None = None,
    stop: asyncio.Event | None = None,
) -> Attack:
    """Try the exploits called ``names`` (all for none) on every task; write ``attack.json`` into ``out``.

    Setting ``stop`` cancels what is in flight; the same call goes on from there. Raises
    :class:`~clawgym.errors.TaskError` for an unknown exploit, :class:`~clawgym.errors.RunFolderError` if the folder
    belongs to something else, and :class:`~clawgym.errors.SandboxUnavailable` if the backend cannot work here.
    """
    chosen = library.find(names)
    isolation = await backend.probe()
    config = {"exploits": [exploit.name for exploit in chosen], "baseline": baseline, "sha256": _digest()}
    receipt = make_receipt("attack", task_set, config=config, isolation=isolation.as_dict())
    drawn = {most: {t.id for t in draw(task_set.tasks, None if names else most)} for most in {e.most for e in chosen}}
    stock = {task.id for task in draw(task_set.tasks, BASELINE_TASKS)} if baseline else set()
    with RunFolder.open(out, receipt) as folder:

        async def attempt(task: Task, sample: int, attempt: int) -> Mapping[str, Any]:
            tried = [exploit for exploit in chosen if task.id in drawn[exploit.most]]
            row = await _row(task, tried, backend, task.id in stock) | {"sample": sample, "attempt": attempt}
            return await finished_writing(asyncio.create_task(asyncio.to_thread(folder.append, row)))

        machine = machine_of(backend)
        shown = progress or NoProgress()
        schedule = Schedule(folder, task_set.tasks, attempt, shown, concurrency=concurrency, machine=machine)
        await schedule.run(stop or asyncio.Event())
        found = Attack.of(task_set, chosen, folder.latest.values())
        folder.write_json(ATTACK, found.to_dict())
    return found


def _digest() -> str:
    """Changes with the exploits: a folder never mixes two states of them."""
    sources = sorted(resources.files(library).iterdir(), key=lambda file: file.name)
    text = b"".join(file.read_bytes() for file in sources if file.name.endswith(".py"))
    return hashlib.sha256(text).hexdigest()


async def _row(task: Task, exploits: Sequence[Exploit], backend: Backend, stock: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": f"{task.id}#0",
        "task_id": task.id,
        "task_hash": task.content_hash,
        "outcome": "attacked",
        "cause": None,
    }
    try:
        row["found"] = await _attack_task(task, exploits, backend, stock)
    except (SandboxUnavailable, RunFolderError):
        raise
    except Exception as error:  # one task's accident is data, not the end of the attack
        row["outcome"], row["fault"] = Outcome.INFRA, str(fault_of(error))
        known = isinstance(error, InfraError)
        row["cause"] = str(error) if known else "".join(traceback.format_exception(error))[-4000:]
    return row | {"finished": now()}


async def _attack_task(task: Task, exploits: Sequence[Exploit], backend: Backend, stock: bool) -> dict[str, Any]:
    """Exploit name -> harness -> (what it got, what its twin got). Raises InfraError if a twin ends ``infra``."""
    own = task.limits.verify_seconds
    limits = dataclasses.replace(
        task.limits,
        agent_seconds=min(task.limits.agent_seconds, _AGENT_SECONDS),
        verify_seconds=own if task.verifier.protected else min(own, _VERIFY_SECONDS),
    )
    task = dataclasses.replace(task, limits=limits)
    twins: dict[tuple[str, str], dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for exploit in exploits:
        if exploit.setting != library.setting_of(task):
            continue
        script, twin = exploit.script(task), exploit.twin(task)
        if not script:
            continue
        found[exploit.name] = {}
        # The public harnesses know no tools.
        for harness in (OURS, STOCK) if stock and not task.brings_tools else (OURS,):
            if (harness, twin) not in twins:
                twins[harness, twin] = await _score(task, twin, backend, harness)
                if twins[harness, twin]["score"] is None:
                    raise InfraError(f"task {task.id}: harmless work got no score ({twins[harness, twin]['cause']})")
            got = await _score(task, script, backend, harness)
            found[exploit.name][harness] = {"got": got, "twin": twins[harness, twin]}
    return found


async def _score(task: Task, script: str, backend: Backend, harness: str) -> dict[str, Any]:
    """``score`` (what counts), ``official``, ``full`` and ``cause``; ``score`` is ``None`` where there is none."""
    if harness == STOCK:
        stock = await stock_score_of(task, script, backend)
        full = stock.score is not None and stock.score >= 1
        return {"score": stock.score, "official": stock.score, "full": full, "cause": stock.cause}
    episode = None
    for _ in range(ATTEMPTS):
        episode = await run_episode(task, ScriptAgent(script.encode()), backend, seed=0, keep_workspace=False)
        if episode.outcome != Outcome.INFRA:
            break
    assert episode is not None
    result = episode.result
    if result is None:
        return {"score": None, "official": None, "full": False, "cause": episode.cause}
    return {
        "score": plain_mean(result.checks),
        "official": result.official,
        "full": result.strict >= 1,
        "cause": episode.cause,
    }
