"""What a checker's verdict depends on besides the workspace, read from its source."""

from __future__ import annotations

import pytest

from clawgym.verifiers.effects import Effects, effects_of

CLOCK = [
    ("from datetime import datetime\nx = datetime.now()", "line 2: datetime.datetime.now"),
    ("import datetime as dt\nx = dt.datetime.utcnow()", "line 2: datetime.datetime.utcnow"),
    ("from datetime import date as day\nx = day.today()", "line 2: datetime.date.today"),
    ("import time\nx = time.time()", "line 2: time.time"),
    ("import time\nx = time.strftime('%Y')", "line 2: time.strftime"),
    ("import time\nread = time.time_ns\nx = read()", "line 2: time.time_ns"),
    ("from datetime import datetime\ndef f(now=datetime.now): pass", "line 2: datetime.datetime.now"),
]
NOT_CLOCK = [
    "import time\nx = time.monotonic() + time.perf_counter()",
    "import time\nx = time.strftime('%Y', stamp)\ny = time.gmtime(0)",
    "from datetime import datetime\nx = datetime.strptime(text, '%Y')",
    "now = rows[0]\nx = now.today()",
    "needle = 'datetime.now()'",
]


@pytest.mark.parametrize(("source", "found"), CLOCK)
def test_clock_reads_are_found_with_line(source, found):
    assert effects_of(source).clock == (found,)


@pytest.mark.parametrize("source", NOT_CLOCK)
def test_other_time_functions_are_not_clock_reads(source):
    assert effects_of(source) == Effects()


@pytest.mark.parametrize(
    "source",
    ["import os\nx = os.path.getmtime(p)", "x = path.stat().st_mtime", "import os\nx = os.stat(p).st_ctime_ns"],
)
def test_file_times(source):
    assert len(effects_of(source).file_times) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import socket", "socket"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("from urllib import request", "urllib.request"),
        ("def f():\n    import requests.sessions as s", "requests"),
    ],
)
def test_network_modules(source, module):
    assert [entry.partition(": ")[2] for entry in effects_of(source).network] == [module]


@pytest.mark.parametrize("source", ["from urllib.parse import urlparse", "import urllib", "requests = rows[3]"])
def test_no_network_module(source):
    assert effects_of(source).network == ()


UNBOUNDED = [
    "import subprocess\nsubprocess.run(['x'])",
    "from subprocess import check_output as go\ngo(['x'], text=True)",
    "import os\nos.system('x')",
    "import subprocess\np = subprocess.Popen(['x'])\np.wait()",
]
BOUNDED = [
    "import subprocess\nsubprocess.run(['x'], timeout=5)",
    "import subprocess\nsubprocess.run(['x'], **options)",
    "import subprocess\np = subprocess.Popen(['x'])\np.communicate(timeout=5)",
    "import subprocess\np = subprocess.Popen(['x'])\np.wait(5)",
    "def run(x): pass\nrun(['x'])",
]


@pytest.mark.parametrize("source", UNBOUNDED)
def test_programs_without_a_timeout(source):
    assert len(effects_of(source).unbounded) == 1


@pytest.mark.parametrize("source", BOUNDED)
def test_programs_with_a_timeout(source):
    assert effects_of(source).unbounded == ()


@pytest.mark.parametrize("pattern", ["(", "a(?i)b", "[z-a]", "(?P<x>a)(?P<x>b)"])
def test_invalid_pattern_is_found(pattern):
    assert len(effects_of(f"import re\nre.search({pattern!r}, text)").bad_patterns) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('a+')",
        "import re\nre.compile('a # (', re.VERBOSE)",
        "import re\nre.search(pattern, text)",
        "text.split('(')",
    ],
)
def test_valid_and_unknown_patterns(source):
    assert effects_of(source).bad_patterns == ()


def test_invalid_source_has_no_effects():
    assert effects_of("import time\ntime.time(") == Effects()
