"""Hostile workspaces beside honest episodes, in a process that may open 1,024 files: ``hostile_workspaces.py BACKEND``.

Prints a JSON object: what became of each episode, the event loop's pauses, and what is left in the state folder.
"""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import sys
import time

from guarded import guarded
from hostile_trees import CAUSES, TREES

from clawgym.agents import ScriptAgent
from clawgym.records import GradingMode
from clawgym.rollout import run_episode
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


async def attempt(boxes: Backend, mode: str, work: bytes) -> tuple[str, str | None]:
    """Outcome and cause."""
    if mode == "fork":
        made = guarded("42", mode=GradingMode.FORK, protocol="harbor", disk_mb=512, agent_seconds=120)
    else:
        made = guarded("42", disk_mb=512, agent_seconds=120)
    try:
        episode = await run_episode(made, ScriptAgent(work), boxes, seed=0)
    except Exception as error:
        return "raised", repr(error)
    return episode.outcome.value, episode.cause if not episode.error else episode.error


async def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    boxes = backend(sys.argv[1])
    await boxes.probe()
    folder = boxes.supervised.state / "owners" / boxes.supervised.owner  # type: ignore[attr-defined]
    pauses: list[float] = []
    honest: list[tuple[str, str | None]] = []
    watching = asyncio.create_task(watch(pauses))

    places = {"clean": ".", "fork": f"/opt/{secrets.token_hex(4)}"}
    hostile = {
        (mode, name): asyncio.create_task(attempt(boxes, mode, script(code, places[mode])))
        for name, code in TREES.items()
        for mode in CAUSES
    }

    async def work_on() -> None:
        while not all(task.done() for task in hostile.values()):
            for mode in CAUSES:
                honest.append(await attempt(boxes, mode, HONEST))

    await asyncio.gather(*hostile.values(), *(work_on() for _ in range(4)))
    watching.cancel()
    left = sorted(path.name for path in folder.iterdir())
    await boxes.aclose()

    later = backend(sys.argv[1])
    await later.probe()
    honest.append(await attempt(later, "fork", HONEST))
    await later.aclose()
    told = {
        "hostile": {f"{mode}: {name}": task.result() for (mode, name), task in hostile.items()},
        "honest": honest,
        "pauses": sorted(pauses),
        "left": left,
        "gone": not folder.exists(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
