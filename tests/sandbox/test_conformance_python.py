"""``warm_python``: what a program sees and gives is the same in an interpreter that has been started before."""

from __future__ import annotations

import re

import pytest

from clawgym.sandbox import Backend, ExecResult, Sandbox, SandboxSpec
from clawgym.sandbox import backend as make_backend
from clawgym.sandbox.linux import supervised

from .conftest import Traits

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMMAND = ["python3", "-I", "-S", "-B", "-c"]
PROGRAMS = {
    "what it sees": """
import os, sys, signal, locale
print(sys.argv, sys.path, sys.executable, sys.version, __name__, __file__ if "__file__" in globals() else None)
print(os.getcwd(), sorted(os.environ.items()), os.umask(0o22), sorted(map(int, os.listdir("/proc/self/fd")))[:3])
print(sys.flags, sys.dont_write_bytecode, sys.stdin.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.name)
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
print(locale.getpreferredencoding(), sys.getfilesystemencoding(), sys.stdin.read())
print([name for name in sys.modules if "clawgym" in name], sorted(vars(sys.modules["__main__"])))
""",
    "its streams": """
import sys
print("out", "\\u00e9", chr(0xdcff))
print("err", "\\u20ac", chr(0xd800), file=sys.stderr)
sys.stdout.buffer.write(b"x")
""",
    "an exception": "def f():\n    raise ValueError('so')\nf()",
    "a syntax error": "print(1)\nif",
    "an exit code": "import sys; print(1); sys.exit(7)",
    "a message at its exit": "import sys; sys.exit('why')",
    "an odd exit code": "import sys; sys.exit(300)",
    "exit functions and threads": """
import atexit, threading, time
atexit.register(print, "first"); atexit.register(print, "second")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
""",
    "an error in an exit function": "import atexit; atexit.register(lambda: 1 / 0); print(1)",
    "a closed stdout": "import sys; sys.stdout.close()",
    "no stdout left": "import os; print(1); os.close(1)",
    "a signal": "import os; print(1, flush=True); os.kill(os.getpid(), 15)",
    "an interrupt": "import os, time; os.kill(os.getpid(), 2); time.sleep(5)",
    "a program that it starts": """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "print(2)"], capture_output=True).stdout, flush=True)
print(subprocess.run("exit 3", shell=True).returncode)
""",
    "other processes of its own": """
import multiprocessing, os
pid = os.fork()
if not pid:
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "modules that are not there yet": "import sqlite3, decimal, asyncio; asyncio.run(asyncio.sleep(0)); print(1)",
    "a module that is not installed": "import numpy_of_nobody",
    "a deep recursion": "def f(n):\n    return n and f(n - 1)\nprint(f(900))\nf(2000)",
}


async def _both(backend: Backend, text: str) -> list[ExecResult]:
    found = []
    for warm in (False, True):
        sandbox = await backend.create(SandboxSpec(warm_python=warm))
        try:
            argv = [*COMMAND, text, "one", "two"]
            found.append(await sandbox.exec(argv, cwd="/tmp", env={"MORE": "1"}, stdin=b"in", stdout_only=True))
        finally:
            await sandbox.close()
    return found


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_gives_the_same(backend: Backend, name: str) -> None:
    cold, warm = await _both(backend, PROGRAMS[name])
    assert (warm.exit_code, warm.output) == (cold.exit_code, cold.output)
    address = re.compile(rb"\b0x[0-9a-f]+")
    assert address.sub(b"", warm.stderr) == address.sub(b"", cold.stderr)


@pytest.fixture
def starts(traits: Traits) -> None:
    """Skips a backend that has no preloaded interpreter."""
    if traits.name == "docker":
        pytest.skip("process 1 of a container is started by the engine")


async def _loaded(sandbox: Sandbox, *flags: str) -> int:
    argv = ["python3", *flags, "-c", "import sys; print(len(sys.modules))"]
    return int((await sandbox.exec(argv)).output)


async def test_the_interpreter_was_started_before(backend: Backend, starts: None) -> None:
    sandbox = await backend.create(SandboxSpec(warm_python=True))
    new = await _loaded(sandbox, "-I", "-S", "-B")
    assert new > 1.5 * await _loaded(sandbox, "-I", "-B"), "common modules are imported already"


async def test_changed_files_or_settings_start_it_as_usual(backend: Backend, starts: None) -> None:
    for spec in (
        SandboxSpec(),
        SandboxSpec(warm_python=True, env={"PATH": "/usr/bin:/bin"}),
        SandboxSpec(warm_python=True, env={"LC_ALL": "C"}),
    ):
        sandbox = await backend.create(spec)
        assert await _loaded(sandbox, "-I", "-S", "-B") < 1.5 * await _loaded(sandbox, "-I", "-B")
    sandbox = await backend.create(SandboxSpec())
    snapshot = await sandbox.snapshot()
    fork = await backend.fork(snapshot, SandboxSpec(warm_python=True))
    assert await _loaded(fork, "-I", "-S", "-B") < 1.5 * await _loaded(fork, "-I", "-B"), (
        "the agent changed its modules"
    )


async def test_a_program_that_hangs_is_killed(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(warm_python=True))
    done = await sandbox.exec([*COMMAND, "print(1, flush=True)\nwhile True: pass"], timeout=0.5)
    assert (done.timed_out, done.output) == (True, b"1\n")
    assert (await sandbox.exec([*COMMAND, "print(2)"])).output == b"2\n"


async def test_a_python_that_lacks_a_module_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "_NEEDED", ("no_such_module_here",))
    supervised._image_python.cache_clear()
    own = make_backend("namespace")
    try:
        sandbox = await own.create(SandboxSpec(warm_python=True))
        assert await _loaded(sandbox, "-I", "-S", "-B") < 1.5 * await _loaded(sandbox, "-I", "-B")
    finally:
        await own.aclose()
        supervised._image_python.cache_clear()
