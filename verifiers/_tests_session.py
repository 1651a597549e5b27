"""One pytest over a task's tests. Copied beside ``tests.json`` as ``tests_session.py``; started by ``run_tests.py``.

pytest and this plugin are imported while nothing of the workspace can be: the path gets the workspace afterwards.
What happened to each test goes to the descriptor that was inherited, as ``[token, test id, outcome]``, and at the
end ``[token, "", pytest's exit status]``.
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
    layers = [place for place in given if not (place + "/").startswith(workspace + "/")]
    library = [place for place in sys.path if place not in ("", here)]
    sys.path[:] = [*library, *layers]
    try:
        import unittest  # noqa: F401 (tests, and pytest later on, are given the real one)

        import pytest
    except ImportError as error:
        sys.exit(f"pytest cannot be imported ({error}): give the task a layer that has it, on its PYTHONPATH")
    say = _speaker(descriptor, told.pop("token"))
    plugin, texts = _plugin(pytest, say, told["wanted"], told["cut"], told["unshown"])
    sys.path[:] = [workspace, *given, *library]
    if told["path"]:
        os.environ["PYTHONPATH"] = told["path"]
    os.chdir(workspace)
    sys.argv = ["pytest"]
    fixed = ["--rootdir", workspace, "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:randomly"]
    fixed += ["-qq", "--tb=no", "-rN", "--color=no", "--continue-on-collection-errors"]
    status = pytest.main([*fixed, *told["arguments"], "--", *told["files"]], plugins=[plugin])
    sys.stdout.write("".join(texts))
    sys.stdout.flush()
    say("", int(status))
    os._exit(0)


def _speaker(descriptor, token):
    write, dumps = os.write, json.dumps

    def say(test, outcome):
        line = (dumps([token, test, outcome]) + "\n").encode()
        while line:
            line = line[write(descriptor, line) :]

    return say


def _plugin(pytest, say, wanted, cut, unshown):
    chosen = None if wanted is None else frozenset(wanted)
    cut = frozenset(cut)
    unshown = tuple(unshown)
    phases, texts = {}, []

    def note(report):
        if report.failed and len(texts) < 50 and not report.nodeid.startswith(unshown):
            texts.append(f"\n____ {report.nodeid}\n{report.longreprtext[-2000:]}\n")

    class Plugin:
        def pytest_collectreport(self, report):
            note(report)

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, config, items):
            if chosen is None:
                return
            kept = [i for i in items if i.nodeid in chosen or (cut and i.nodeid.split(" ")[0] in cut)]
            left = set(items).difference(kept)
            if left:
                config.hook.pytest_deselected(items=list(left))
                items[:] = kept

        def pytest_runtest_logreport(self, report):
            seen = phases.setdefault(report.nodeid, {})
            seen[report.when] = report
            note(report)
            if report.when == "teardown":
                say(report.nodeid, _outcome(phases.pop(report.nodeid)))

    return Plugin(), texts


def _outcome(seen):
    """passed, failed, error (around the test), skipped, xfailed (as it should), xpassed (as it should not)."""
    for when in ("setup", "teardown"):
        if when in seen and seen[when].failed:
            return "error"
    call = seen.get("call", seen.get("setup"))
    if call is None:
        return "error"
    expected = hasattr(call, "wasxfail")
    if call.skipped:
        return "xfailed" if expected else "skipped"
    if call.failed:
        return "failed"
    if "call" not in seen:
        return "error"
    return "xpassed" if expected else "passed"


main()
