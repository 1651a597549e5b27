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
from pathlib import Path

import pytest

from clawgym.verifiers.protocols.tests import checks_of

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


STATUSES = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "xfailed": "XFAIL", "missing": None}


def test_resolution_agrees_with_swebench():
    """Without skipped tests: swebench 5 counts a skipped test of ``PASS_TO_PASS`` as maintained, and we do not."""
    (python,) = needed("CLAWGYM_SWEBENCH_PYTHON")
    cases = []
    for outcomes in itertools.product(STATUSES, repeat=4):
        statuses = {test: STATUSES[o] for test, o in zip("abcd", outcomes, strict=True) if STATUSES[o]}
        cases.append((["a", "b"], ["c", "d"], statuses, dict(zip("abcd", outcomes, strict=True))))
    argv = [python, str(HERE / "swebench_own.py")]
    given = json.dumps([case[:3] for case in cases]).encode()
    found = json.loads(subprocess.run(argv, input=given, capture_output=True, check=True).stdout)
    ours = [all(checks_of(case[3]).values()) for case in cases]
    assert [status == "RESOLVED_FULL" for status in found] == ours
    print(len(cases), "cases,", sum(ours), "resolved")
