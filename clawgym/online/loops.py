"""The loops of a service as processes: ``python -m clawgym.online.loops judge|train|gate FOLDER``.

Invariants: a loop that ends is started again, after a pause that grows while it keeps failing. A loop ends when its
service ends, however that ends. No loop runs twice in a folder: the one of a killed service ends before the next one
begins. What it says goes to a log file of bounded size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from clawgym.errors import ClawGymError
from clawgym.online.config import ServiceFolder

__all__ = ["LOOPS", "keep_running"]

_Work = Callable[[ServiceFolder, asyncio.Event], Coroutine[Any, Any, None]]

LOOPS = ("judge", "train", "gate")
"""The loops, each in a process of its own."""
_NICE = 10
"""Loops yield the processor to the process that serves."""
_SHORTEST, _LONGEST = 0.5, 60.0
"""Seconds before a loop is started again."""
_WELL = 60.0
"""A loop that ran for so many seconds did not fail at once."""
_ENDING = 5.0
"""Seconds in which a loop may finish what it does. All of it can be done again."""
_LOG_BYTES = 4 * 2**20


async def keep_running(name: str, folder: ServiceFolder, say: Callable[[str], None]) -> None:
    """Run a loop, and start it again whenever it ends; until this is cancelled, which ends it."""
    pause = _SHORTEST
    while True:
        began = asyncio.get_running_loop().time()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, name, str(folder.path), stdin=asyncio.subprocess.PIPE
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 20)
                process.kill()
            raise
        pause = _SHORTEST if asyncio.get_running_loop().time() - began > _WELL else min(2 * pause, _LONGEST)
        say(f"The loop {name!r} ended ({status}); see {folder.path / f'{name}.log'}. It starts again in {pause:g} s.")
        await asyncio.sleep(pause)


def main() -> int:
    """Run the loop that the command line names."""
    import fcntl  # not on Windows, where no service runs

    name, where = sys.argv[1:]
    folder = ServiceFolder(Path(where))
    _log_to(folder.path / f"{name}.log")
    os.nice(_NICE)
    try:
        with (folder.path / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            asyncio.run(_until_stopped(_work(name), folder))
    except ClawGymError as error:
        logging.getLogger("clawgym.online").error("%s", error)
        return 1
    except Exception:
        logging.getLogger("clawgym.online").exception("the loop failed")
        return 1
    return 0


def _work(name: str) -> _Work:
    if name == "judge":
        from clawgym.online.judging import judge_conversations

        return judge_conversations
    if name == "gate":
        from clawgym.online.gate import keep_gate

        return keep_gate
    from clawgym.online.training import train_versions

    return train_versions


async def _until_stopped(
    work: Callable[[ServiceFolder, asyncio.Event], Coroutine[Any, Any, None]], folder: ServiceFolder
) -> None:
    """Run ``work`` until SIGTERM, or until the service is gone: it holds the other end of the standard input."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = asyncio.create_task(_service_ends())
    working = asyncio.create_task(work(folder, stop))
    await asyncio.wait({service, working}, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    service.cancel()
    await asyncio.wait({working}, timeout=_ENDING)
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _service_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def _log_to(file: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")
    logging.captureWarnings(True)


if __name__ == "__main__":
    sys.exit(main())
