"""What published sets score, and what we score. Each test needs the set's own code, in a Python of its own.

- ``CLAWGYM_OSWORLD_CODE``: a clone of OSWorld; ``CLAWGYM_OSWORLD_PYTHON``: a Python with openpyxl, pandas, lxml,
  cssselect, xmltodict, formulas, python-docx, python-pptx, odfpy, scikit-image, mutagen, beautifulsoup4, tldextract,
  pypdf, PyPDF2, pdfplumber, pymupdf, ImageHash, rapidfuzz, requests and opencv-python-headless.
- ``CLAWGYM_SWEBENCH_PYTHON``: a Python with swebench.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawgym.records import Limits, Task, TaskFile
from clawgym.sandbox import Backend
from clawgym.sandbox.protocol import SandboxSpec
from clawgym.tasks.formats import read_row
from clawgym.verifiers.grading import Archive, Subject, grade
from clawgym.verifiers.protocols.tests import checks_of
from clawgym.verifiers.workspace import OVERLAY, packed

from .swe.real_rows import CASES, Case, bring

HERE = Path(__file__).parent
FORMATS = HERE.parents[1] / "tasks/formats"


def needed(*names: str) -> list[str]:
    values = [os.environ.get(name, "") for name in names]
    if not all(values):
        pytest.skip(f"{' and '.join(names)} do not name the set's own code")
    return values


@pytest.mark.parametrize("section", ["texts", "documents", "slides", "tables", "pictures"])
def test_comparisons_agree_with_osworld(section: str, tmp_path: Path):
    code, python = needed("CLAWGYM_OSWORLD_CODE", "CLAWGYM_OSWORLD_PYTHON")
    argv = [python, str(HERE / "osworld_parity.py"), code, str(FORMATS), str(tmp_path), section]
    lines = subprocess.run(argv, capture_output=True, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    different = [(func, case, one, other) for func, case, one, other in found if abs(one - other) > 1e-6]
    print(section, len(found), "cases", len({func for func, *_ in found}), "functions", len(different), "differ")
    assert not different, (Counter(func for func, *_ in different), different[:5])


def asked(argv: Sequence[str], given: object) -> Any:
    """What a program of the set's own interpreter answers."""
    return json.loads(subprocess.run(argv, input=json.dumps(given).encode(), capture_output=True, check=True).stdout)


STATUSES = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "xfailed": "XFAIL", "missing": None}


def test_resolution_agrees_with_swebench():
    """Without skipped tests: swebench 5 counts a skipped test of ``PASS_TO_PASS`` as maintained, and we do not."""
    (python,) = needed("CLAWGYM_SWEBENCH_PYTHON")
    cases = []
    for outcomes in itertools.product(STATUSES, repeat=4):
        statuses = {test: STATUSES[o] for test, o in zip("abcd", outcomes, strict=True) if STATUSES[o]}
        cases.append((["a", "b"], ["c", "d"], statuses, dict(zip("abcd", outcomes, strict=True))))
    argv = [python, str(HERE / "swebench_own.py")]
    found = asked(argv, [case[:3] for case in cases])
    ours = [all(checks_of(case[3]).values()) for case in cases]
    assert [status == "RESOLVED_FULL" for status in found] == ours
    print(len(cases), "cases,", sum(ours), "resolved")


COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "-c 'import sympy, sys; sys.exit(not sympy.test(*sys.argv[1:], verbose=True))'",
    "pytest-dev/pytest": "-m pytest -rA",
}
"""How swebench runs the tests of a repository. ``bin/test -C`` of SymPy, which its archives lack, does what is here."""


async def log_of(case: Case, task: Task, files: dict[str, TaskFile], backend: Backend) -> str:
    """What the repository's own runner prints, run as swebench does, on the files that are graded."""
    tests = [path for path in case.old if path.endswith(".py")]
    if case.repo == "django/django":
        tests = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in tests]
    box = await backend.create(
        SandboxSpec(
            limits=Limits(memory_mb=2048, pids=256, command_seconds=300, disk_mb=512),
            env={**task.env, "PYTHONHASHSEED": "0", "SYMPY_USE_CACHE": "no"},
            workdir=task.workspace,
            mounts={target: layer.folder for target, layer in task.layers.items()},
        )
    )
    try:
        await box.put([*files.values()], task.workspace)
        script = f"python3 -S {COMMANDS[case.repo]} {' '.join(tests)} 2>&1"
        return (await box.exec(["bash", "-c", script], timeout=300, max_output=2**23)).text
    finally:
        await box.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
async def test_runs_agree_with_swebench(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    """Each test and each verdict, on real repositories: with the patch, without it, and with other changes.

    The lists of tests are made as those of the set: what passes with the patch, by whether it passes without it.
    """
    (python,) = needed("CLAWGYM_SWEBENCH_PYTHON")
    own = [python, str(HERE / "swebench_own.py")]
    case = CASES[name]
    monkeypatch.setenv("CLAWGYM_REPOS", str(tmp_path))
    row = bring(case, tmp_path)
    task = read_row(row)
    assert task.unsupported is None
    path, good, bad = case.bug
    files = {file.path: file for file in task.inputs}
    source = files[path].read().decode()
    hidden = [f for f in task.verifier.files if f.path.startswith(OVERLAY)]
    added = {path: replace(f, path=path) for f in hidden for path in [f.path.removeprefix(OVERLAY)]}
    sources = {
        "gold": source.replace(bad, good),
        "noop": source,
        "wrong": source.replace(bad, case.wrong),
        "prints": source.replace(bad, good) + "\nprint('something')\n",
        "broken": source + "\n1 +\n",
    }
    trees = {kind: {**files, path: TaskFile(path, text.encode())} for kind, text in sources.items()}
    logs = [await log_of(case, task, {**tree, **added}, backend) for tree in trees.values()]
    statuses = dict(zip(trees, asked([*own, "logs"], [[case.repo, log] for log in logs]), strict=True))
    passed = {kind: {test for test, status in found.items() if status == "PASSED"} for kind, found in statuses.items()}
    first, second = sorted(passed["gold"] - passed["noop"]), sorted(passed["gold"] & passed["noop"])
    task = read_row({**row, "FAIL_TO_PASS": first, "PASS_TO_PASS": second})
    verdicts = asked(own, [[first, second, found] for found in statuses.values()])
    for kind, verdict in zip(trees, verdicts, strict=True):
        result = await grade(task, Subject(Archive(packed(trees[kind].values()))), backend)
        different = {test for test, value in result.checks.items() if (test in passed[kind]) != bool(value)}
        assert not different, (kind, different, result.cause, result.log)
        assert (verdict == "RESOLVED_FULL") == (result.official == 1.0), (kind, verdict, result.cause)
        print(name, kind, verdict, len(result.checks), "tests,", sum(map(bool, result.checks.values())), "passed")
    assert verdicts[0] == "RESOLVED_FULL"
    # Code under test that prints what the runner would print, and ends it with success: only the parser believes it.
    form = {"django": "{test} ... ok", "sympy": "{test} ok", "pytest-dev": "PASSED {test}"}[case.repo.split("/")[0]]
    lines = "\n".join(form.format(test=test) for test in (*first, *second))
    forged = f"{source}\nimport os\nos.write(1, {lines + chr(10)!r}.encode())\nos._exit(0)\n"
    tree = {**files, path: TaskFile(path, forged.encode())}
    (found,) = asked([*own, "logs"], [[case.repo, await log_of(case, task, {**tree, **added}, backend)]])
    assert asked(own, [[first, second, found]]) == ["RESOLVED_FULL"]
    result = await grade(task, Subject(Archive(packed(tree.values()))), backend)
    assert (result.official, result.cause, sum(result.checks.values())) == (0.0, "unfinished", 0)
