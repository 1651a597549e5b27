"""An owner whose sandbox holds all that is slow to take away: ``python owner_of_hoarders.py BACKEND SEED``.

Prints its owner id at once, and ``busy`` with its supervisor's pid once every hoarder holds what it could get.
"""

from __future__ import annotations

import asyncio
import sys

from clawgym.sandbox import SandboxSpec, backend

# Each takes the kernel ten milliseconds to close: pressure triggers, as many as there are descriptors, and watches.
HOARDER = """
import ctypes, os, time
ready, done = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        libc, held = ctypes.CDLL(None), []
        for name in ("cpu", "io", "memory", "irq"):
            try:
                while True:
                    held.append(os.open("/proc/pressure/" + name, os.O_RDWR))
                    os.write(held[-1], b"some 500000 2000000\\0")
            except OSError:
                pass
        while (fd := libc.inotify_init()) >= 0:
            libc.inotify_add_watch(fd, b"/tmp", 0xfff)
        os.write(done, b"x")
        time.sleep(1000)
for _ in range(3):
    os.read(ready, 1)
"""


async def main() -> None:
    made = backend(sys.argv[1])
    supervised = made.supervised  # type: ignore[attr-defined]
    print(supervised.owner, flush=True)
    sandbox = await made.create(SandboxSpec())
    done = await sandbox.exec(["python3", "-I", "-S", "-c", HOARDER], timeout=60)
    assert done.exit_code == 0, done.text
    print("busy", supervised._process.pid, flush=True)
    await asyncio.sleep(120)  # nobody came to kill it


asyncio.run(main())
