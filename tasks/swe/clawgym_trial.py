"""A pytest plugin for trials in a sandbox (``-p clawgym_trial``): records the result of each test and its failure.

It uses only the standard library and pytest. It writes one JSON object to the file named by ``CLAWGYM_TRIAL``.
"""

import json
import os

_MESSAGE = 2000
_found = {"tests": {}, "failures": {}, "broken": []}


def pytest_collectreport(report):
    if report.failed:
        _found["broken"].append(report.nodeid)


def pytest_runtest_makereport(item, call):
    if call.excinfo is None or item.nodeid in _found["failures"]:
        return
    line = None
    for entry in call.excinfo.traceback:
        if os.path.realpath(str(entry.path)) == os.path.realpath(str(item.path)):
            line = entry.lineno + 1
    try:
        message = str(call.excinfo.value)
    except Exception:
        message = ""
    _found["failures"][item.nodeid] = {
        "file": os.path.relpath(str(item.path), str(item.config.rootpath)),
        "line": line,
        "type": call.excinfo.typename,
        "message": message[:_MESSAGE],
    }


def pytest_runtest_logreport(report):
    seen = _found["tests"].get(report.nodeid)
    if report.failed:
        now = "failed"
    elif report.skipped or hasattr(report, "wasxfail"):
        now = "skipped"
    else:
        now = "passed" if report.when == "call" else None
    order = [None, "passed", "skipped", "failed"]
    _found["tests"][report.nodeid] = max(seen, now, key=order.index)


def pytest_sessionfinish(session, exitstatus):
    _found["failures"] = {k: v for k, v in _found["failures"].items() if _found["tests"].get(k) == "failed"}
    _found["exit"] = int(exitstatus)
    with open(os.environ["CLAWGYM_TRIAL"], "w", encoding="utf-8") as file:
        json.dump(_found, file)
