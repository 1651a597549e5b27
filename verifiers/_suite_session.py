"""One run of a repository's own test runner. Copied as ``tests_session.py``; started by ``run_tests.py``, which is
:mod:`_suite_runner`.

What happened to each test goes to the descriptor that was inherited, as ``[token, name, outcome]``, and at the end
``[token, "", exit status]``; nothing is read from what the tests print. The standard library comes before the
workspace on the path.

Names are those that the parsers of SWE-bench find in the output of the runner. For Django this is the first line of a
test's docstring if it has one: ``unittest`` prints it on a line of its own, before ``... ok``, and the parser takes
what is on that line. Otherwise it is ``test (module.Class)``, or ``test (module.Class.test)`` where the rows were made
with Python 3.11 or later. Older Pythons took a docstring that begins with a blank line for none. So a test gets all
names that it could have. For SymPy it is the name of the function.
"""

import json
import os
import sys


def main():
    descriptor = int(sys.argv[1])
    told = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.set_inheritable(descriptor, False)
    workspace = told["workspace"]
    here = os.path.dirname(os.path.abspath(__file__))
    given = [place for place in told["path"].split(os.pathsep) if place]
    library = [place for place in sys.path if place not in ("", here)]
    sys.path[:] = [*library, *(place for place in given if not (place + "/").startswith(workspace + "/"))]
    import importlib  # noqa: F401 (what the session needs is imported while nothing of the workspace can be)
    import runpy  # noqa: F401
    import unittest  # noqa: F401
    import warnings  # noqa: F401

    tell = _teller(descriptor, told.pop("token"))
    sys.path[:] = [*library, workspace, *given]
    if told["path"]:
        os.environ["PYTHONPATH"] = told["path"]
    os.chdir(workspace)
    status = {"django": _django, "sympy": _sympy}[told["suite"]](told, tell)
    sys.stdout.flush()
    sys.stderr.flush()
    tell([""], status)
    os._exit(0)


def _teller(descriptor, token):
    """A function that says what became of a test with the given names. A name that was used before gets a number, so
    that the later outcome is not taken for the same test's."""
    write, dumps, used = os.write, json.dumps, {}

    def tell(names, outcome):
        for name in names:
            name = name.replace("\n", " ")
            used[name] = number = used.get(name, 0) + 1
            line = (dumps([token, name if number == 1 else f"{name}\n{number}", outcome]) + "\n").encode()
            while line:
                line = line[write(descriptor, line) :]

    return tell


def _django(told, tell):
    """``tests/runtests.py``, with a result of ours in the place of ``unittest.TextTestResult``."""
    import runpy
    import unittest

    canaries, workspace = frozenset(told["canaries"]), told["workspace"]

    def names(test):
        names = {str(test)}
        if isinstance(test, unittest.TestCase) and hasattr(test, "_testMethodName"):
            method, group = test._testMethodName, f"{type(test).__module__}.{type(test).__qualname__}"
            names |= {f"{method} ({group})", f"{method} ({group}.{method})"}
        words = test.shortDescription()
        return [*names, words.strip()] if words else [*names]

    class Result(unittest.TextTestResult):
        """The first that is made is that of the run. The tests of Django's own runner make others."""

        made = False

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.outer = not Result.made
            Result.made = True

        def hidden(self, test):
            return self.outer and not canaries.isdisjoint(names(test))

        def startTest(self, test):
            if not self.hidden(test):
                super().startTest(test)

        def told(self, test, outcome, method, *args):
            if self.outer:
                tell(canaries.intersection(names(test)) or names(test), outcome)
            if not self.hidden(test):
                method(test, *args)

        def addSuccess(self, test):
            self.told(test, "passed", super().addSuccess)

        def addError(self, test, err):
            self.told(test, "error", super().addError, err)

        def addFailure(self, test, err):
            self.told(test, "failed", super().addFailure, err)

        def addSkip(self, test, reason):
            self.told(test, "skipped", super().addSkip, reason)

        # The parser of SWE-bench does not know these two: a test with such an outcome is missing there.
        def addExpectedFailure(self, test, err):
            self.told(test, "expected failure", super().addExpectedFailure, err)

        def addUnexpectedSuccess(self, test):
            self.told(test, "unexpected success", super().addUnexpectedSuccess)

        def addSubTest(self, test, subtest, err):
            if err is not None and self.outer:
                tell(names(test), "failed")
            super().addSubTest(test, subtest, err)

    unittest.TextTestRunner.resultclass = Result
    program = os.path.join(workspace, "tests", "runtests.py")
    labels = [file[:-3] if file.endswith(".py") else file for file in told["files"]]
    labels = [label[len("tests/") :] if label.startswith("tests/") else label for label in labels]
    sys.path.insert(0, os.path.dirname(program))
    sys.argv = [program, "--verbosity", "2", "--settings=test_sqlite", "--parallel", "1"]
    sys.argv += [label.replace("/", ".") for label in labels]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _sympy(told, tell):
    """What ``bin/test -C --verbose`` calls, with a reporter of ours."""
    import importlib
    import warnings

    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    os.environ["SYMPY_USE_CACHE"] = "no"
    try:
        runtests = importlib.import_module("sympy.testing.runtests")
    except ImportError:  # before SymPy 1.6
        runtests = importlib.import_module("sympy.utilities.runtests")
    canaries = frozenset(told["canaries"])

    class Reporter(runtests.PyTestReporter):
        test = None

        def entering_test(self, f):
            self.test = f.__name__
            super().entering_test(f)

        def told(self, outcome, method, *args):
            test, self.test = self.test, None
            if test is not None:  # None: the file itself
                tell([test], outcome)
            if test not in canaries:
                method(*args)

        def test_pass(self, *args):
            self.told("passed", super().test_pass, *args)

        def test_fail(self, *args):
            self.told("failed", super().test_fail, *args)

        def test_exception(self, *args):
            self.told("error", super().test_exception, *args)

        def test_skip(self, *args):
            self.told("skipped", super().test_skip, *args)

        # The parser of SWE-bench does not know these two: a test with such an outcome is missing there.
        def test_xfail(self, *args):
            self.told("expected failure", super().test_xfail, *args)

        def test_xpass(self, *args):
            self.told("unexpected success", super().test_xpass, *args)

    vars(runtests)["PyTestReporter"] = Reporter
    return int(runtests._test(*told["files"], verbose=True, tb="short", kw="", pdb=False, colors=False, sort=True))


main()
