"""Run by a Python that has swebench: its own verdict on outcomes of tests, and its own reading of logs.

Reads from stdin a list of ``[fail_to_pass, pass_to_pass, {test: status}]``, and prints the list of resolution statuses.
With the argument ``logs`` it reads a list of ``[repository, log]`` and prints the list of ``{test: status}``.
Packages that are missing are replaced by empty ones: the verdict uses none of them.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from typing import Any
from unittest.mock import MagicMock


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else finds."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec:
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(Missing())
from swebench.harness import grading  # noqa: E402  # with the finder in place
from swebench.harness.log_parsers.python import MAP_REPO_TO_PARSER_PY  # noqa: E402

if sys.argv[1:] == ["logs"]:
    print(json.dumps([MAP_REPO_TO_PARSER_PY[repo](log, None) for repo, log in json.load(sys.stdin)]))
    sys.exit()
found = []
for first, second, statuses in json.load(sys.stdin):
    gold = {"FAIL_TO_PASS": first, "PASS_TO_PASS": second}
    found.append(grading.get_resolution_status(grading.get_eval_tests_report(statuses, gold)))
print(json.dumps(found))
