"""The tests of pytest, run by the pytest that they test. Copied as ``tests_session.py``; started by ``run_tests.py``,
which is :mod:`_tests_runner`.

It imports pytest from the workspace. :mod:`_tests_session`, which lies beside it as ``pytest_session.py``, then takes
that for its own. What pytest needs is imported from the layers before, where they have it.
"""

import contextlib
import json
import os
import runpy
import sys


def main():
    data = sys.stdin.buffer.read()
    told = json.loads(data)
    workspace = told["workspace"]
    here = os.path.dirname(os.path.abspath(__file__))
    given = [place for place in told["path"].split(os.pathsep) if place]
    library = [place for place in sys.path if place not in ("", here)]
    sys.path[:] = [*library, *(place for place in given if not (place + "/").startswith(workspace + "/"))]
    import unittest  # noqa: F401

    for name in ("pluggy", "iniconfig", "packaging", "packaging.version", "attr"):
        with contextlib.suppress(ImportError):
            __import__(name)
    sys.path[:] = [*library, *given]
    try:
        import pytest
    except ImportError as error:
        sys.exit(f"the pytest under test cannot be imported ({error}): give the task a layer with what it needs")
    if not os.path.abspath(pytest.__file__).startswith(workspace + "/"):
        sys.exit(f"pytest is imported from {pytest.__file__}, not from the workspace: put the workspace on PYTHONPATH")
    sys.path[:] = library
    again = os.memfd_create("told")  # for the other session, which reads it from the standard input, too
    with open(again, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(again, 0, os.SEEK_SET)
    os.dup2(again, 0)
    os.close(again)
    runpy.run_path(os.path.join(here, "pytest_session.py"), run_name="__main__")


main()
