"""Ends the processes of a Ray cluster with the process that started it: ``python -I reaper.py FOLDER``.

Ray ends them itself after a normal end. If the process is killed, Ray's agents run on for a minute, and the folder
stays. So this waits for the end of its standard input, which that process holds. Then it kills whatever else has a
file in the cluster's FOLDER open, which every process of Ray does, and deletes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator

__all__: list[str] = []


def _users(folder: str, but: int) -> Iterator[int]:
    """The processes that have a file in ``folder`` open, without the process ``but``."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != but:
            with contextlib.suppress(OSError):  # it is gone, or that of another user
                links = (os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd"))
                if any(link.startswith(f"{folder}/") for link in links):
                    yield int(name)


def main(folder: str) -> None:
    """Wait, then end the cluster of ``folder``."""
    starter = os.getppid()  # it has Ray's log of itself open, and may go on
    sys.stdin.buffer.read()
    while found := [*_users(folder, starter)]:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
