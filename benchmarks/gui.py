"""Desktops side by side on one small machine: how soon they stand, what they cost, how soon an action is seen.

    python benchmarks/gui.py                # light desktops: an editor each, 64 at once
    python benchmarks/gui.py --web 8        # a site and a browser each

- ready: from ``gym.make`` until the last of all environments has its first screenshot.
- memory: what the machine has less of, for each environment.
- one: action to settled screenshot in one environment alone, p50 and p95; a key that the editor (or the page) shows.
  The baseline is a fixed sleep of 0.5 s after each action, as is the custom.
- all: every environment gets its next action as soon as it has answered; screenshots/s in total.
- reset: a new episode in one environment of the batch, once a desktop stands ready for it, as after any episode that
  takes longer than to make one.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import gymnasium as gym
import numpy as np
import psutil

import clawgym  # noqa: F401  # registers the ids
from clawgym.records import Desktop, Limits, Task, TaskSet, VerifierSpec
from clawgym.tasks import load

LIMITS = Limits(max_steps=10_000, memory_mb=1024, pids=256, setup_seconds=300, agent_seconds=3600)
SLEEP = 0.5


def light() -> TaskSet:
    """An editor on a desktop; nothing is graded."""
    desktop = Desktop(programs=(("xfwrite",),))
    return TaskSet("light", (Task("editor", "Look.", VerifierSpec("reward_sh", ()), desktop=desktop, limits=LIMITS),))


def typed(number: int) -> dict[str, Any]:
    return {"action": "type", "text": "abcdefgh"[number % 8]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--web", type=int, default=0, help="so many sites with browsers instead")
    args = parser.parse_args()
    count = args.web or args.n
    tasks: Any = light()
    if args.web:
        made = load("gui-basic:heldout")
        form = next(task for task in made.tasks if task.id.startswith("forms"))
        tasks = TaskSet("web", (dataclasses.replace(form, limits=LIMITS),))
    before = psutil.virtual_memory().available
    began = time.perf_counter()
    envs = gym.make_vec("ClawGym/gui-v0", num_envs=count, tasks=tasks, autoreset_mode="Disabled")
    _, info = envs.reset(seed=0)
    if errors := {str(error) for error in info.get("error", ()) if error}:
        envs.close()
        raise SystemExit("\n".join(errors))
    ready = time.perf_counter() - began
    memory = (before - psutil.virtual_memory().available) / count / 2**20
    first = {"action": "left_click", "coordinate": [430, 263] if args.web else [400, 300]}
    envs.step([{"action": "key", "keys": ["enter"]} if not args.web else first] * count)
    envs.step([first] * count)
    seconds = []
    for number in range(60):
        began = time.perf_counter()
        envs.send([typed(number)], [0])
        envs.recv(1)
        seconds.append(time.perf_counter() - began)
    p50, p95 = np.percentile(np.array(seconds) * 1000, [50, 95])
    steps, began, number = 0, time.perf_counter(), 0
    envs.send([typed(0)] * count, range(count))
    while time.perf_counter() - began < 10:
        ids, *_ = envs.recv(1)
        steps += len(ids)
        number += 1
        envs.send([typed(number)] * len(ids), ids.tolist())
    envs.recv(count)
    rate = steps / (time.perf_counter() - began)
    mask = np.zeros(count, dtype=bool)
    mask[0] = True
    resets = []
    for _ in range(9):
        time.sleep(4 if args.web else 2)
        began = time.perf_counter()
        envs.reset(options={"reset_mask": mask})
        resets.append(time.perf_counter() - began)
    envs.close()
    kind = "browsers" if args.web else "light desktops"
    print(f"{count} {kind}: ready {ready:.1f} s, {memory:.0f} MiB each")
    print(f"one: {p50:.1f} ms p50, {p95:.1f} ms p95 ({SLEEP * 1000 / p50:.0f} x quicker than {SLEEP} s of sleep)")
    print(f"all: {rate:.0f} screenshots/s; reset {1000 * float(np.median(resets)):.0f} ms")


if __name__ == "__main__":
    main()
