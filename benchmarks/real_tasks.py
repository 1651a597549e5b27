"""ClawGym's public tasks, for real: read them all, do nothing on them, solve ten of them.

    CLAWGYM_DATA=/path/to/ClawGym python benchmarks/real_tasks.py [--all]

Doing nothing has a known score on every train task (``tests/data/train_do_nothing.json``). The ten tasks with a
reference solution (``tests/data/train_solutions``) are graded twice: through an episode, and by the task's own
``reward.sh``, run unmodified where the work was done, as the public harness does. So that partial scores are compared
too, each is done once more with one of its results deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from clawgym.agents import NoopAgent, OracleAgent
from clawgym.agents.protocol import Agent
from clawgym.errors import ClawGymError
from clawgym.records import Episode, Task, TaskFile
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import Backend, Sandbox, SandboxSpec
from clawgym.sandbox import backend as make_backend
from clawgym.tasks import load

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
SOLUTIONS = DATA / "train_solutions"
TRAIN = "ClawGym-Train"
SPOIL = b"\nfind out* -type f | LC_ALL=C sort | head -n 1 | xargs rm\n"
"""Appended to a solution: deletes the first file below ``out/``, ``output/`` or ``outputs/``."""


def do_nothing_scores() -> dict[str, float]:
    """Task id -> what its ``reward.sh`` gives on the untouched workspace; the ids left out score 0."""
    return json.loads((DATA / "train_do_nothing.json").read_text(encoding="utf-8"))["scores"]


def solved_ids() -> list[str]:
    """The tasks with a reference solution."""
    return sorted(folder.name for folder in SOLUTIONS.iterdir() if folder.is_dir())


def with_solution(task: Task, *, spoiled: bool = False) -> Task:
    """``task`` with its reference solution attached; ``spoiled``: with one that deletes a result in the end."""
    script = (SOLUTIONS / task.id / "solve.sh").read_bytes() + (SPOIL if spoiled else b"")
    return dataclasses.replace(task, solution=(TaskFile("solve.sh", script),))


async def attempt_all(
    tasks: Iterable[Task], agent: Agent, backend: Backend, concurrency: int, *, show: bool = False
) -> list[Episode]:
    """One episode per task, in the order of ``tasks``, at most ``concurrency`` at once."""
    gate = asyncio.Semaphore(concurrency)
    tasks = list(tasks)
    done = 0

    async def attempt(task: Task) -> Episode:
        nonlocal done
        async with gate:
            request = EpisodeRequest(task=task, seed=0, keep_workspace=False)
            episode = (await run_episode(request, agent, backend)).episode
        done += 1
        if show and sys.stderr.isatty():
            print(f"\r{done}/{len(tasks)} ", end="\r" if done == len(tasks) else "", file=sys.stderr, flush=True)
        return episode

    return list(await asyncio.gather(*(attempt(task) for task in tasks)))


def wrong_scores(episodes: Iterable[Episode]) -> dict[str, tuple[float, float]]:
    """Task id -> (score, known score) of each graded do-nothing episode where the two are not exactly equal."""
    known = do_nothing_scores()
    pairs = {e.task_id: (e.result.official, known.get(e.task_id, 0.0)) for e in episodes if e.result is not None}
    return {task_id: (score, wanted) for task_id, (score, wanted) in pairs.items() if score != wanted}


async def by_hand(task: Task, backend: Backend) -> float:
    """The score as the public harness takes it: one box, the work, ``reward/`` beside it, the last line of stdout."""
    box = await backend.create(SandboxSpec(task.sandbox_image, task.limits, task.env, task.workspace))
    try:
        await box.put(task.inputs, task.workspace)
        await box.put(task.solution, "/tmp/solution")
        await run_script(box, "/tmp/solution/solve.sh", task.workspace, task.limits.agent_seconds)
        reward = Path(task.origin) / "reward"
        files = [f for f in reward.rglob("*") if f.is_file()]
        await box.put((TaskFile(f.relative_to(reward).as_posix(), f) for f in files), f"{task.workspace}/reward")
        stdout = await run_script(box, f"{task.workspace}/reward/reward.sh", "/root", task.limits.verify_seconds)
    finally:
        await box.close()
    return float([line for line in stdout.splitlines() if line.strip()][-1])


async def run_script(box: Sandbox, path: str, cwd: str, timeout: float) -> str:
    """Run ``bash path``; its stdout. Raises RuntimeError if it fails."""
    done = await box.exec(["bash", path], cwd=cwd, timeout=timeout, stdout_only=True)
    if done.exit_code != 0:
        raise RuntimeError(f"{path} ended with exit code {done.exit_code}: {done.stderr.decode(errors='replace')}")
    return done.text


async def report(count: int, concurrency: int) -> int:
    """Print the three parts; the exit code."""
    started = time.perf_counter()
    tasks = load(TRAIN)
    seconds = time.perf_counter() - started
    line("tasks read", f"{len(tasks)} in {seconds:.1f} s")
    line("tasks that could not be read", f"{len(tasks.problems)}")
    backend = make_backend()
    try:
        line("boxes", (await backend.probe()).tier)
        line("at once", f"{concurrency}")
        bad = await report_nothing(tasks.tasks[:count], backend, concurrency)
        ten = [tasks.by_id[task_id] for task_id in solved_ids()]
        bad += await report_solutions("Reference solutions", [with_solution(t) for t in ten], backend)
        spoiled = [with_solution(t, spoiled=True) for t in ten]
        bad += await report_solutions("Reference solutions, one result deleted", spoiled, backend)
    finally:
        await backend.aclose()
    return 1 if bad or tasks.problems else 0


async def report_nothing(tasks: Sequence[Task], backend: Backend, concurrency: int) -> int:
    """Do nothing on ``tasks``; the number of wrong scores and infra failures."""
    started = time.perf_counter()
    episodes = await attempt_all(tasks, NoopAgent(), backend, concurrency, show=True)
    seconds = time.perf_counter() - started
    wrong = wrong_scores(episodes)
    infra = [episode for episode in episodes if episode.result is None]
    print("\nDoing nothing")
    line("episodes", f"{len(episodes)} in {seconds:.1f} s")
    line("episodes per second", f"{len(episodes) / seconds:.1f}")
    line("not the known score", f"{len(wrong)}")
    line("infra", f"{len(infra)}")
    for task_id, (score, wanted) in wrong.items():
        line(f"  {task_id}", f"{score!r}, known {wanted!r}")
    for episode in infra:
        line(f"  {episode.task_id}", f"infra: {episode.cause}")
    return len(wrong) + len(infra)


async def report_solutions(title: str, tasks: Iterable[Task], backend: Backend) -> int:
    """Solve ``tasks``; the number of those whose two scores differ."""
    print(f"\n{title}")
    print(f"{'task':<12}{'by hand':<22}{'official':<22}{'same':<6}{'strict':<8}{'seconds':>7}")
    different = 0
    for task in tasks:
        started = time.perf_counter()
        expected = await by_hand(task, backend)
        (episode,) = await attempt_all([task], OracleAgent(), backend, 1)
        seconds = time.perf_counter() - started
        official, strict = ("infra", "") if episode.result is None else (episode.result.official, episode.result.strict)
        same = "yes" if official == expected else "NO"
        different += official != expected
        print(f"{task.id:<12}{expected!s:<22}{official!s:<22}{same:<6}{strict!s:<8}{seconds:>7.1f}")
    return different


def line(name: str, value: str) -> None:
    """One row of the plain table."""
    print(f"{name:<30}{value}")


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", type=int, default=200, metavar="N", help="do nothing on the first N tasks (default: 200)")
    parser.add_argument("--all", action="store_true", help="do nothing on all 2,000")
    parser.add_argument("--concurrency", type=int, default=6, metavar="N", help="sandboxes at once (default: 6)")
    args = parser.parse_args()
    if args.n < 1 or args.concurrency < 1:
        parser.error("-n and --concurrency must be at least 1")
    try:
        return asyncio.run(report(sys.maxsize if args.all else args.n, args.concurrency))
    except ClawGymError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
