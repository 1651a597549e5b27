"""An owner of sandboxes that is about to be killed: ``python owner_to_kill.py BACKEND SEED``.

Prints its owner id at once, and ``busy`` with its supervisor's pid once the first sandbox runs; then makes, uses,
copies and closes sandboxes until it is killed. What runs in them does what it can to stay: it ignores signals,
changes its session, listens on ports, fills the disk, forks.
"""

from __future__ import annotations

import asyncio
import random
import sys

from clawgym.errors import SandboxError
from clawgym.records import Limits, TaskFile
from clawgym.sandbox import Backend, Sandbox, SandboxSpec, backend

LIMITS = Limits(memory_mb=128, disk_mb=32, pids=48, cpus=0.1)
COMMANDS = (
    "setsid sleep 1000 & disown",
    "(trap '' TERM HUP INT; while :; do sleep 0.05; done) & disown",
    "python3 -m http.server 8000 >/dev/null 2>&1 & disown",
    "nohup sh -c 'while :; do date; sleep 0.1; done' >/root/log 2>&1 &",
    "head -c 20M /dev/urandom > /root/blob; mkdir -p /root/d/e/f; mkfifo /root/p",
    "for i in 1 2 3 4 5 6 7 8; do (sleep 1000 & sleep 1000) & done",
    "while :; do :; done",
    "yes",
)


async def live(made: Backend, dice: random.Random) -> None:
    """One sandbox after the other, for ever."""
    held: list[Sandbox] = []
    while True:
        readonly = {"/verifier": (TaskFile("check.py", b"print(1)"),)} if dice.random() < 0.3 else {}
        sandbox: Sandbox = await made.create(SandboxSpec(limits=LIMITS, readonly=readonly))
        shell = await sandbox.shell(pty=dice.random() < 0.3)
        for command in dice.sample(COMMANDS, 3):
            try:
                await shell.run(command, timeout=0.1)
            except SandboxError:
                break
        choice = dice.random()
        if choice < 0.3:
            snapshot = await sandbox.snapshot()
            held.append(await made.fork(snapshot))
            await held[-1].exec(["true"])
        if choice < 0.2:
            await sandbox.stop()
        held.append(sandbox)
        if choice < 0.5 or len(held) > 3:
            await held.pop().close()


async def main() -> None:
    dice = random.Random(int(sys.argv[2]))
    made = backend(sys.argv[1])
    supervised = made.supervised  # type: ignore[attr-defined]
    print(supervised.owner, flush=True)
    await (await made.create(SandboxSpec(limits=LIMITS))).exec(["true"])
    print("busy", supervised._process.pid, flush=True)
    await asyncio.gather(*(live(made, dice) for _ in range(1 if made.name == "docker" else dice.randint(1, 3))))


asyncio.run(asyncio.wait_for(main(), 120))  # nobody came to kill it
