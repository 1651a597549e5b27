"""Runs a task's tests with the runner of their repository. Copied as ``run_tests.py``, as :mod:`_tests_runner` for
pytest; Python >= 3.8.

    python3 -I -S -B run_tests.py WORKSPACE [SECONDS]

``tests.json`` names the ``suite`` (``django``, ``sympy``), the files of tests to run (``paths``), and the names of
tests as SWE-bench has them. ``tests_session.py`` runs the files in one process. All else is that of
:mod:`_tests_runner`: the token, the inherited pipe, the process that cannot be read, the canaries, what is printed. It
lies beside this file as ``pytest_runner.py``, and is read without its last line, which starts it: its bytes are part of
the hashes of tasks, so nothing could be added to it.
"""

import json
import os
import random
import re
import sys
import time
import types


def main():
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    base = _module(os.path.join(here, "pytest_runner.py"))
    base._hide()
    workspace = os.path.abspath(sys.argv[1])
    with open(os.path.join(here, "tests.json"), encoding="utf-8") as file:
        plan = json.load(file)
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else float(plan.get("seconds", 600))
    wanted = [*plan["fail_to_pass"], *plan["pass_to_pass"]]
    canaries = _plant(base, plan["suite"], workspace, base._files(workspace, plan["paths"]))

    class SuiteRun(base.Run):
        def _told(self):
            return {**super()._told(), "suite": plan["suite"], "canaries": [*canaries.expected]}

    run = SuiteRun(plan, here, workspace, wanted, canaries)
    try:
        run.go(time.monotonic() + seconds)
    finally:
        for path in canaries.paths:
            os.unlink(path)
    # Of several tests with one name the last counts, as for the parsers of SWE-bench.
    outcomes = {name.partition("\n")[0]: outcome for name, outcome in run.outcomes.items()}
    found = {test: outcomes.get(test, "missing") for test in wanted} if wanted else outcomes
    resolved = run.cause is None and bool(wanted) and all(found[test] in base.PASSED for test in wanted)
    sys.stderr.buffer.write(bytes(run.log))
    print(json.dumps({"cause": run.cause, "outcomes": found}))
    print(float(resolved))


def _module(path):
    with open(path, encoding="utf-8") as file:
        source, started, rest = file.read().rpartition("\n\nmain()")
    assert started, path
    assert not rest.strip(), path
    module = types.ModuleType("pytest_runner")
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def _plant(base, suite, workspace, files):
    """Two files of canaries, one before and one after the tests: beside one of them, or for Django in ``tests``, since
    other folders may be read by tests (migrations, template tags, what the discovery of tests is tried on)."""
    dice = random.SystemRandom()
    canaries = base.Canaries()
    for _ in (1, 2) if files else ():
        beside = dice.choice(files)
        folder = "tests" if suite == "django" else os.path.dirname(beside)
        path = os.path.join(folder, f"test_{base._word(dice)}.py")
        tests = [_canary(base, dice, number % 2) for number in range(6)]
        with open(os.path.join(workspace, beside), encoding="utf-8", errors="replace") as file:
            text, expected = _WRITERS[suite](path, file.read(), tests)
        with open(os.path.join(workspace, path), "x", encoding="utf-8") as file:
            file.write(text)
        canaries.paths.append(os.path.join(workspace, path))
        canaries.files.append(path)
        canaries.expected.update(expected)
    canaries.files[1:1] = files
    return canaries


def _canary(base, dice, fails):
    """A name, whether the test of that name fails, and the two sides of what it asserts to be equal."""
    left, right = dice.randrange(10**6), dice.randrange(10, 99)
    sides = f"int('{left}') % {right}", str(left % right + fails)
    return base._word(dice), "failed" if fails else "passed", sides


def _django(path, beside, canaries):
    """Classes of unittest and of Django. ``TestCase`` only where it is used beside them: it makes databases."""
    with_databases = "TestCase" if re.search(r"\bTestCase\b", beside) else "SimpleTestCase"
    bases = ["unittest.TestCase", "SimpleTestCase", with_databases]
    text, expected = "import unittest\n\nfrom django.test import SimpleTestCase, TestCase\n", {}
    module = os.path.basename(path)[:-3]
    for number, (name, outcome, sides) in enumerate(canaries):
        test, group = "test_" + name, "Test" + name
        text += f"\n\nclass {group}({bases[number // 2]}):\n    def {test}(self):\n"
        text += "        self.assertEqual({}, {})\n".format(*sides)
        expected[f"{test} ({module}.{group})"] = outcome
    return text, expected


def _sympy(path, beside, canaries):
    text, expected = "", {}
    for name, outcome, sides in canaries:
        text += "def test_{}():\n    assert {} == {}\n\n\n".format(name, *sides)
        expected["test_" + name] = outcome
    return text, expected


_WRITERS = {"django": _django, "sympy": _sympy}

main()
