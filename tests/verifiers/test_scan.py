"""What a checker executes and imports, read from its source."""

from __future__ import annotations

import ast
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.verifiers.scan import scan_checker, third_party_imports

IN_PROCESS = [
    "import runpy\nrunpy.run_path(p)",
    "from runpy import run_module as go\ngo('x')",
    "import importlib.util as u\nspec = u.spec_from_file_location('m', p)\nspec.loader.exec_module(m)",
    "import importlib\nimportlib.import_module(name)",
    "import importlib\nimportlib.import_module('tool')",
    "from importlib import import_module\nimport_module(f'a{b}')",
    "__import__(name)",
    "exec(open(p).read())",
    "eval(text)",
    "import builtins\nbuiltins.exec(code)",
    "from importlib.machinery import SourceFileLoader\nSourceFileLoader('m', p).load_module()",
    "import sys\nsys.path.insert(0, ws)\nimport tool",
    "import subprocess\nsubprocess.run(['x'])\nexec(compile(s, 'f', 'exec'))",
    "exec(open(p).read()  # cut off",
]

SUBPROCESS = [
    "import subprocess\nsubprocess.run(['python3', p])",
    "import subprocess as sp\nsp.check_output('x', shell=True)",
    "from subprocess import Popen as P\nP(['x'])",
    "import os\nos.system('x')",
    "from os import popen\npopen('x').read()",
    "import os\nos.execvp('x', ['x'])",
    "import os\nos.posix_spawn('x', ['x'], {})",
    "import asyncio\nasyncio.create_subprocess_exec('x')",
    "import pty\npty.spawn('x')",
    "import subprocess\ndef go(run=subprocess.run): run(['x'])",
    "import subprocess\nrunner = subprocess.run\nrunner(['x'])",
    "import clawgym_checks as cg\ncg.run_program(['bash', 'x.sh'])",
]

HARMLESS = [
    "",
    "import json, re\nre.compile('x')\nprint(json.dumps({}))",
    "import ast\nast.literal_eval(text)",
    "import subprocess\ntry:\n    pass\nexcept subprocess.TimeoutExpired:\n    pass",
    "needles = ['eval(', 'exec(', 'os.system(', 'subprocess.run']",
    "compile(text, 'agent.py', 'exec')",
    "importlib = None\nimport importlib\nimportlib.import_module('json')",
    "exec('x = 1')",
    "import sys\nsys.path.insert(0, ws)\nimport json",
    "class A:\n    def eval(self): pass\nA().eval()",
    "import os\nos.path.exists('x')",
    "def system(): pass\nsystem()",
    "not python at all (",
]


@pytest.mark.parametrize("source", IN_PROCESS)
def test_in_process_execution_is_flagged(source):
    assert scan_checker(source) == "in_process"


@pytest.mark.parametrize("source", SUBPROCESS)
def test_starting_programs_is_flagged(source):
    assert scan_checker(source) == "subprocess"


@pytest.mark.parametrize("source", HARMLESS)
def test_other_code_is_not_flagged(source):
    assert scan_checker(source) is None


def test_third_party_imports_guarded_or_not():
    source = "import json, os.path\ntry:\n    import yaml.nodes as n\nexcept ImportError:\n    n = None\n"
    source += "def f():\n    from cryptography.x509 import y\nfrom . import local\nfrom __future__ import annotations\n"
    assert third_party_imports(source) == ("cryptography", "yaml")
    assert third_party_imports("import (") == ()


LINES = st.sampled_from(
    [
        *(
            "import json",
            "import os.path as p, re  # import",
            "import os, \\\n  yaml",
            "from . import near",
            "from xml.dom import x",
        ),
        *(
            "if 1: import yaml",
            "from yaml import (\n  a,\n  b)",
            "'''\nimport numpy\n'''",
            "import  sys ;import toml",
            "x = 'import'",
        ),
        *(
            "\timport json",
            "from os import path; import attr",
            "import yaml.nodes, json",
            "__import__('os')",
            "\r\nimport toml\r",
            "pass",
        ),
    ]
)


@given(st.lists(LINES, max_size=6).map("\n".join))
def test_third_party_imports_match_syntax_tree(source):
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        nodes = []
    found = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level}
    assert third_party_imports(source) == tuple(sorted(found - sys.stdlib_module_names))
