"""Attack a task set: which exploits earn reward, with ClawGym's grading and with the original grader?

An exploit earns reward on a task if its score is above that of its twin. The twin is a control: the same visible work
without the exploit, on the same task and graded in the same way. No score at all (an infrastructure error, a crashed
harness) where the twin has one also counts, as it avoids a low score.

Invariants: every result comes from running the exploit in a sandbox and grading it through the public interface. Both
graders get the same script. Run the same command again to resume.
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
from clawgym.evaluation.schedule import MAX_ATTEMPTS, Schedule, finished_writing
from clawgym.records import Outcome, Task, TaskSet
from clawgym.records.run_folder import RunFolder, make_manifest, now
from clawgym.redteam import exploits as library
from clawgym.redteam.exploits import Exploit
from clawgym.redteam.original_grader import original_score_of
from clawgym.redteam.rates import ORIGINAL, OURS, Attack, task_class
from clawgym.rollout import EpisodeRequest, fault_of, run_episode
from clawgym.sandbox.machine import machine_of
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.scores import plain_mean

__all__ = ["ATTACK", "BASELINE_TASKS", "attack", "draw"]

ATTACK = "attack.json"
BASELINE_TASKS = 200
"""Tasks of each class that are also graded by the original grader."""
_AGENT_SECONDS, _VERIFY_SECONDS = 60.0, 20.0
"""Time limits of an exploit, and of a verifier, which may hang. A verifier that runs a repository's tests keeps its own
limit: a run that is cut short would score less by chance, for the twin too."""


def draw(tasks: Iterable[Task], n: int | None) -> list[Task]:
    """Draw at most ``n`` tasks of each class, always the same ones, in the order of ``tasks``; all for None."""
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
    """Try exploits on the tasks of a set, and write ``attack.json`` into the folder ``out``.

    Args:
        task_set: the tasks to attack.
        backend: where to run the sandboxes.
        out: the run folder. The same call resumes an interrupted attack.
        names: the exploits to try; by default all, each on at most ``max_tasks`` tasks of a class.
        baseline: also grade up to :data:`BASELINE_TASKS` tasks of each class by the original grader.
        concurrency: tasks at once; by default chosen by the machine's load.
        progress: shows the progress.
        stop: setting it cancels the tasks in flight.

    Raises:
        TaskError: an unknown exploit.
        RunFolderError: the folder belongs to another run.
        SandboxUnavailable: the backend does not work here.
    """
    chosen = library.find(names)
    isolation = await backend.probe()
    config = {"exploits": [exploit.name for exploit in chosen], "baseline": baseline, "sha256": _digest()}
    manifest = make_manifest("attack", task_set, config=config, isolation=isolation.as_dict())
    drawn = {
        most: {t.id for t in draw(task_set.tasks, None if names else most)} for most in {e.max_tasks for e in chosen}
    }
    stock = {task.id for task in draw(task_set.tasks, BASELINE_TASKS)} if baseline else set()
    with RunFolder.open(out, manifest) as folder:

        async def attempt(task: Task, sample: int, attempt: int) -> Mapping[str, Any]:
            tried = [exploit for exploit in chosen if task.id in drawn[exploit.max_tasks]]
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
    """SHA-256 of the exploits' sources, so that a run folder never mixes two versions of them."""
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
    except Exception as error:  # an error on one task does not end the attack
        row["outcome"], row["fault"] = Outcome.INFRA, str(fault_of(error))
        known = isinstance(error, InfraError)
        row["cause"] = str(error) if known else "".join(traceback.format_exception(error))[-4000:]
    return row | {"finished": now()}


async def _attack_task(task: Task, exploits: Sequence[Exploit], backend: Backend, stock: bool) -> dict[str, Any]:
    """Exploit name -> grader -> the results ``got`` and ``twin``. Raises :class:`InfraError` if a twin has no score."""
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
        # The original graders do not support tools.
        for harness in (OURS, ORIGINAL) if stock and not task.brings_tools else (OURS,):
            if (harness, twin) not in twins:
                twins[harness, twin] = await _score(task, twin, backend, harness)
                if twins[harness, twin]["score"] is None:
                    raise InfraError(
                        f"task {task.id}: harmless work got no score ({twins[harness, twin]['cause']}): try again"
                    )
            got = await _score(task, script, backend, harness)
            found[exploit.name][harness] = {"got": got, "twin": twins[harness, twin]}
    return found


async def _score(task: Task, script: str, backend: Backend, harness: str) -> dict[str, Any]:
    """Run ``script`` and grade it: ``score`` (the one compared; None if there is none), ``official``, ``full``,
    ``cause``."""
    if harness == ORIGINAL:
        stock = await original_score_of(task, script, backend)
        full = stock.score is not None and stock.score >= 1
        return {"score": stock.score, "official": stock.score, "full": full, "cause": stock.cause}
    episode = None
    for _ in range(MAX_ATTEMPTS):
        request = EpisodeRequest(task=task, seed=0, keep_workspace=False)
        episode = (await run_episode(request, ScriptAgent(script.encode()), backend)).episode
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
