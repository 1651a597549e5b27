"""Hostile workspaces beside honest episodes, in a process that may open 1,024 files.

``hostile_workspaces.py BACKEND AT_ONCE``: so many of the hostile ones at once, and some honest ones beside them. Prints
a JSON object: what became of each episode, the pauses of the event loop, and what is left in the state folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import sys
import time

from guarded import guarded
from hostile_trees import CAUSES, TREES

from clawgym.agents import ScriptAgent
from clawgym.records import GradingMode
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import Backend, backend

HONEST = b"mkdir -p output; printf 42 > output/sum.txt"


def script(code: str, folder: str) -> bytes:
    head = f"import os, socket\nos.makedirs({folder!r}, exist_ok=True)\nos.chdir({folder!r})"
    return HONEST + f"\npython3 -I -S - <<'END'\n{head}\n{code}\nEND\n".encode()


async def watch(pauses: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.005)
        pauses.append(time.monotonic() - before - 0.005)


async def attempt(sandboxes: Backend, mode: str, work: bytes) -> tuple[str, str | None]:
    """Outcome and cause."""
    if mode == "fork":
        made = guarded("42", mode=GradingMode.FORK, protocol="harbor", disk_mb=512, agent_seconds=120)
    else:
        made = guarded("42", disk_mb=512, agent_seconds=120)
    try:
        episode = (await run_episode(EpisodeRequest(task=made, seed=0), ScriptAgent(work), sandboxes)).episode
    except Exception as error:
        return "raised", repr(error)
    return episode.outcome.value, episode.cause if not episode.error else episode.error


async def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    name, at_once = sys.argv[1], int(sys.argv[2])
    sandboxes = backend(name)
    await sandboxes.probe()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # this loop is measured, and not how busy the machine is
    folder = sandboxes.supervised.state / "owners" / sandboxes.supervised.owner  # type: ignore[attr-defined]
    pauses: list[float] = []
    honest: list[tuple[str, str | None]] = []
    watching = asyncio.create_task(watch(pauses))

    places = {"clean": ".", "fork": f"/opt/{secrets.token_hex(4)}"}
    turn, honest_turn = asyncio.Semaphore(at_once), asyncio.Semaphore(4)

    async def attack(mode: str, code: str) -> tuple[str, str | None]:
        async with turn:
            ended = await attempt(sandboxes, mode, script(code, places[mode]))
        honest_turn.release()
        return ended

    hostile = {(mode, tree): asyncio.create_task(attack(mode, code)) for tree, code in TREES.items() for mode in CAUSES}

    async def work_on(mode: str) -> None:
        """An honest episode at the start, and one whenever a hostile one has ended: some are there all the time."""
        while await honest_turn.acquire() and not all(task.done() for task in hostile.values()):
            honest.append(await attempt(sandboxes, mode, HONEST))

    workers = [asyncio.create_task(work_on(mode)) for mode in CAUSES for _ in range(2)]
    await asyncio.gather(*hostile.values())
    for _ in workers:
        honest_turn.release()
    await asyncio.gather(*workers)
    watching.cancel()
    left = sorted(path.name for path in folder.iterdir())
    await sandboxes.aclose()

    later = backend(name)
    await later.probe()
    honest.append(await attempt(later, "fork", HONEST))
    await later.aclose()
    told = {
        "hostile": {f"{mode}: {tree}": task.result() for (mode, tree), task in hostile.items()},
        "honest": honest,
        "pauses": sorted(pauses),
        "left": left,
        "gone": not folder.exists(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
