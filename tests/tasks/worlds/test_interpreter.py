"""The code interpreter: a session that stays, and a server that outlives it. What could hurt a host is in a box."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clawgym.agents import ScriptAgent
from clawgym.sandbox import Backend
from clawgym.tasks.packs import toolcall_basic
from clawgym.tasks.worlds.servers import interpreter_server

from ...rollouts import episode_of
from ..served import Running

LOST = "its variables are gone"


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Running]:
    with Running(interpreter_server(seconds=1, output=2000), tmp_path) as running:
        yield running


def run(python: Running, code: str) -> str:
    text, failed = python.call("code_interpreter", code=code)
    assert not failed
    return text


def test_state_stays_and_the_last_value_is_shown(python: Running) -> None:
    assert run(python, "x = 41\nx + 1") == "42"
    assert run(python, "import math as m\nprint('pi'); m.floor(x / 2)") == "pi\n20"
    assert run(python, "None") == run(python, "y = 1") == "[no output]"
    assert run(python, "def f():\n    return x\n\nf()") == "41"


def test_code_is_run_exactly_as_typed(python: Running) -> None:
    code = 'text = """a\n  b\\n\n\tc"""\nprint(repr(text))\nif True:\n\tprint("tab")'
    assert run(python, code) == "'a\\n  b\\n\\n\\tc'\ntab"
    assert run(python, "print('\\u00e9', 'é')") == "é é"


def test_errors_come_back_as_text_with_the_line(python: Running) -> None:
    text = run(python, "def f(a):\n    return 1 / a\n\nf(0)")
    assert text.startswith("Traceback (most recent call last):\n")
    assert "return 1 / a" in text
    assert "_session" not in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "SyntaxError" in run(python, "x = (")
    assert "_session" not in run(python, "x = (")
    assert run(python, "1") == "1"


def test_both_streams_and_children_in_order(python: Running) -> None:
    code = """
import os, subprocess, sys
print("a")
print("b", file=sys.stderr)
os.system("echo c; echo d >&2")
subprocess.run(["echo", "e"])
print("f")
"""
    assert run(python, code).splitlines() == list("abcdef")


def test_output_is_cut_in_the_middle(python: Running) -> None:
    text = run(python, "print('a' * 5000 + 'b' * 5000)")
    assert text.startswith("a" * 1000 + "\n[8001 bytes of output left out]\n")
    assert text.endswith("b" * 999)


def test_the_limit_interrupts_and_keeps_the_session(python: Running) -> None:
    run(python, "kept = 7")
    text = run(python, "while True:\n    pass")
    assert "KeyboardInterrupt" in text
    assert text.endswith("[stopped after 1 s, with all it had started; variables are still there]")
    assert run(python, "kept") == "7"
    text = run(python, "import os, subprocess\nsleeper = subprocess.Popen(['sleep', '100'])\nsleeper.wait()")
    assert "stopped after 1 s" in text
    assert run(python, "sleeper.poll() is not None") == "True"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os._exit(3)", "ended with exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", "stopped after 1 s"),
        ("import os; os.closerange(3, 99)", "the session "),
        (
            "import os\nfor n in range(3, 99):\n try: os.write(n, b'no answer\\n')\n except OSError: pass",
            "the session ",
        ),
        ("import os; os.kill(os.getpid(), 19)", "stopped after 1 s"),
    ],
)
def test_a_lost_session_is_said_and_started_afresh(code: str, says: str, python: Running) -> None:
    run(python, "kept = 7")
    text = run(python, code)
    assert says in text
    assert LOST in text
    assert "NameError" in run(python, "kept")


def test_a_session_that_ends_between_calls_is_told_of(python: Running) -> None:
    run(python, "import os, threading; threading.Timer(0.1, os._exit, [0]).start()")
    python.call("code_interpreter", code="import time; time.sleep(1)")
    assert run(python, "1") == "1"


def test_exits_and_forks_keep_it(python: Running) -> None:
    run(python, "kept = 7")
    assert run(python, "import sys; sys.exit('bye')") == "[sys.exit('bye') was called: the session goes on]"
    assert run(python, "import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()").startswith("child")
    assert run(python, "kept") == "7"
    assert "EOFError" in run(python, "input()")


def test_memory_is_bounded(python: Running) -> None:
    assert "MemoryError" in run(python, "bytearray(1 << 30)")
    assert run(python, "1") == "1"


def test_background_work_goes_on(python: Running) -> None:
    run(python, "import threading\nthreading.Timer(0.1, print, ['later']).start()")
    assert "later" in run(python, "import time; time.sleep(0.4)")


async def test_fork_bombs_end_with_the_call(backend: Backend) -> None:
    """In a box: the server answers, and the next call works."""
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    task = toolcall_basic.make("math-digits", 1)
    task = replace(task, tools=(interpreter_server(seconds=2),))
    names = [("code_interpreter", {"code": code}) for code in (bomb, "1", "40 + 2")]
    script = json.dumps([{"name": n, "arguments": a} for n, a in (*names, ("submit", {"message": "."}))])
    episode = await episode_of(task, ScriptAgent(script.encode()), backend)
    seen = [observation.content for step in episode.steps for observation in step.observations]
    assert "stopped after 2 s" in seen[0]
    assert "42" in seen[2].splitlines()
    assert "stopped" not in seen[2]
