"""Runs a task's tests and says what became of each. Copied beside ``tests.json`` as ``run_tests.py``; Python >= 3.8.

    python3 -I -S -B run_tests.py WORKSPACE [SECONDS]

This process never imports what it grades and cannot be read or traced by it (``PR_SET_DUMPABLE``). It starts one
pytest (``tests_session.py``), which says over an inherited pipe what became of each test, every line with a token made
for this run. Beside the task's tests it runs *canaries*: tests with random names, made for this run, some of which
must pass and some fail. Code that makes failing tests pass wholesale makes the canaries pass, too.

Prints one JSON object, ``{"cause", "outcomes": {test id: outcome}}``, then the score: 1.0 if every test of
``fail_to_pass`` and ``pass_to_pass`` passed (or failed as expected, ``xfailed``), else 0.0.
"""

import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time

PASSED = ("passed", "xfailed")
MOST_BYTES = 64 * 2**20
LOG_BYTES = 12 * 1024


def main():
    _hide()
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    workspace = os.path.abspath(sys.argv[1])
    with open(os.path.join(here, "tests.json"), encoding="utf-8") as file:
        plan = json.load(file)
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else float(plan.get("seconds", 600))
    wanted = [*plan["fail_to_pass"], *plan["pass_to_pass"]]
    canaries = _plant(workspace, _files(workspace, wanted or plan["paths"]))
    run = Run(plan, here, workspace, wanted, canaries)
    try:
        run.go(time.monotonic() + seconds)
    finally:
        for path in canaries.paths:
            os.unlink(path)
    outcomes = run.outcomes
    found = {test: _outcome(test, outcomes) for test in wanted} if wanted else outcomes
    resolved = run.cause is None and bool(wanted) and all(found[test] in PASSED for test in wanted)
    sys.stderr.buffer.write(bytes(run.log))
    print(json.dumps({"cause": run.cause, "outcomes": found}))
    print(float(resolved))


def _hide():
    try:
        import _ctypes  # the C half: ctypes itself takes ten times as long

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # pyright: ignore[reportArgumentType] None: this program
        _ctypes.call_function(prctl, (4, 0, 0, 0, 0))  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):
        pass


def cut(test):
    """Whether the id was cut off at a blank, as in lists that were made by splitting a log."""
    return "[" in test and not test.endswith("]")


def _outcome(test, outcomes):
    if test in outcomes:
        return outcomes[test]
    if cut(test):
        found = {outcome for name, outcome in outcomes.items() if name.split(" ")[0] == test}
        if found:
            return min(found, key=lambda outcome: outcome in PASSED)
    return "missing"


def _files(workspace, tests):
    """The files of ``tests`` that are there, each once, in order."""
    paths = dict.fromkeys(test.split("::")[0] for test in tests)
    return [path for path in paths if os.path.exists(os.path.join(workspace, path))]


class Canaries:
    """``paths`` of their files, ``expected`` outcomes by test id, and all ``files`` in the order to run."""

    def __init__(self):
        self.paths, self.expected, self.files = [], {}, []


def _plant(workspace, files):
    """Two files of canaries: somewhere among the tests, and after the last."""
    dice = random.SystemRandom()
    canaries = Canaries()
    places = sorted({dice.randrange(len(files)), len(files) - 1}) if files else []
    for number, path in enumerate(files):
        if number == dice.choice(places[:1]):
            canaries.files.append(_write_canary(workspace, path, dice, canaries))
        canaries.files.append(path)
        if number == places[-1]:
            canaries.files.append(_write_canary(workspace, path, dice, canaries))
    return canaries


def _write_canary(workspace, beside, dice, canaries):
    folder = os.path.join(workspace, beside)
    if not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    path = os.path.join(folder, f"test_{_word(dice)}.py")
    name = os.path.relpath(path, workspace)
    tests = []
    for number in range(6):
        test, left, right = "test_" + _word(dice), dice.randrange(10**6), dice.randrange(10, 99)
        fails = number % 2
        result = left % right + fails
        if number < 3:
            tests.append(f"def {test}():\n    assert int('{left}') % {right} == {result}\n")
            whole = f"{name}::{test}"
        else:
            group = "Test" + _word(dice)
            line = f"        self.assertEqual(int('{left}') % {right}, {result})\n"
            tests.append(f"class {group}(unittest.TestCase):\n    def {test}(self):\n{line}")
            whole = f"{name}::{group}::{test}"
        canaries.expected[whole] = "failed" if fails else "passed"
    dice.shuffle(tests)
    with open(path, "x") as file:
        file.write("import unittest\n\n\n" + "\n\n".join(tests))
    canaries.paths.append(path)
    return name


def _word(dice):
    return "".join(dice.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(12))


class Run:
    """One pytest: ``outcomes`` by test id, and the ``cause`` why they are not the whole truth, if they are not."""

    def __init__(self, plan, here, workspace, wanted, canaries):
        self.plan, self.here, self.workspace = plan, here, workspace
        self.wanted, self.canaries = wanted, canaries
        self.outcomes, self.seen, self.cause, self.log = {}, {}, None, bytearray()
        self.token, self.done, self._read, self._rest = os.urandom(16).hex(), None, 0, b""

    def go(self, deadline):
        results, child_end = os.pipe()
        flags = ["-B"] if self.plan.get("site") else ["-S", "-B"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env.update(PYTHONHASHSEED="0", PYTHONNOUSERSITE="1")
        child = subprocess.Popen(
            ["python3", *flags, os.path.join(self.here, "tests_session.py"), str(child_end)],
            cwd="/",
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(child_end,),
            start_new_session=True,
        )
        os.close(child_end)
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(json.dumps(self._told()).encode())
            child.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._listen(child, results, deadline)
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except OSError:
                pass
            child.wait()
        self._conclude(child.returncode)

    def _told(self):
        return {
            "token": self.token,
            "workspace": self.workspace,
            "path": os.environ.get("PYTHONPATH", ""),
            "files": self.canaries.files,
            "wanted": [*self.wanted, *self.canaries.expected] if self.wanted else None,
            "cut": [test for test in self.wanted if cut(test)],
            "unshown": [test.partition("::")[0] for test in self.canaries.expected],
            "arguments": self.plan["arguments"],
        }

    def _listen(self, child, results, deadline):
        log = child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            for pipe in (results, log):
                os.set_blocking(pipe, False)
                selector.register(pipe, selectors.EVENT_READ)
            while self.cause is None and self.done is None:
                over = child.poll() is not None
                left = deadline - time.monotonic()
                if left <= 0:
                    self.cause = "timeout"
                # A test may leave processes behind that hold the pipes: the end of the session is what counts.
                events = selector.select(0 if over else min(left, 0.1))
                for key, _ in events:
                    data = os.read(key.fd, 2**16)
                    if not data:
                        selector.unregister(key.fd)
                    elif key.fd == results:
                        self._hear(data)
                    else:
                        self._note(data)
                if over and not events:
                    break

    def _note(self, data):
        self.log += data
        if len(self.log) > 4 * LOG_BYTES:
            self.log[LOG_BYTES : -2 * LOG_BYTES] = b"\n[...]\n"

    def _hear(self, data):
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                token, test, outcome = json.loads(line)
            except (ValueError, TypeError):
                token = test = outcome = None
            if token != self.token or not isinstance(test, str):
                self.cause = "forged"
            elif not test:
                self.done = outcome
            elif test in self.canaries.expected:
                self.seen[test] = outcome
            elif self.outcomes.get(test) in (None, *PASSED):  # one that ran twice is worth the worse
                self.outcomes[test] = outcome
        if self._read > MOST_BYTES:
            self.cause = "output"

    def _conclude(self, code):
        wrong = any(self.canaries.expected[test] != outcome for test, outcome in self.seen.items())
        if self.cause is None and self.done is None:
            self.cause = "crash" if code else "unfinished"
        elif self.cause is None and self.done not in (0, 1, 5):  # passed, failed, nothing to run
            self.cause = "crash"
        elif self.cause is None:
            wrong = wrong or len(self.seen) != len(self.canaries.expected)
        if wrong:
            self.cause = "forged"
        if self.cause == "forged":
            self.outcomes = {}


main()
