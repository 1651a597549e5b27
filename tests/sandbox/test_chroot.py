"""The chroot backend in a default container, which may neither make namespaces nor mount.

``CLAWGYM_WHOLE=1 pytest tests/sandbox/test_chroot.py -s`` runs the whole conformance suite, the whole escape suite and
the whole pack in there, and shows what they say; otherwise a part of each.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from .container import Container, container

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

WHOLE = bool(os.environ.get("CLAWGYM_WHOLE"))
_PART = (
    "put_and_get or workspace_replaced or devices or readonly_folders or files_can_be_taken or snapshot_and_fork "
    "or bomb or largest or limits_cannot or network or abstract or host_ or as_probed or dangerous or stop_while "
    "or process_one or keeps_its_state or orphans or forged or clean or inherited "
    "or changes_it or in_forks or we_talk or no_link"
)
_NEED_PROC = {"service-script-h0001", "service-script-h0003"}


@pytest.fixture(scope="module")
def inside(docker_engine: str) -> Iterator[Container]:
    with container(docker_engine) as made:
        yield made


_DENIED = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for call in (lambda: libc.unshare(0x10000000), lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)):
    print(errno.errorcode[ctypes.get_errno()] if call() else "allowed")
"""


def test_it_is_a_default_container(inside: Container) -> None:
    """Otherwise the tests below show nothing."""
    _, status = inside.run("cat", "/proc/self/status")
    assert "CapEff:\t00000000a80425fb" in status
    assert "Seccomp:\t2" in status
    _, said = inside.python("-c", _DENIED)
    assert said.split() == ["EPERM", "EPERM"]


def test_conformance(inside: Container) -> None:
    code, text = inside.conformance("chroot" if WHOLE else f"chroot and ({_PART})")
    assert code == 0, text[-4000:]
    passed = re.search(r"(\d+) passed", text)
    assert passed is not None
    assert int(passed[1]) >= (78 if WHOLE else 20)


_ATTACK = """
import asyncio, json, sys
from clawgym.redteam import escape
from clawgym.sandbox import backend

async def attack():
    with escape.lay_baits() as baits:
        made = backend("chroot")
        try:
            return await escape.escape_suite(made, baits, only=sys.argv[1:] or None)
        finally:
            await made.aclose()

print(json.dumps(asyncio.run(attack()).as_dict()))
"""


def test_only_declared_probes_are_open(inside: Container) -> None:
    if WHOLE:
        code, text = inside.clawgym("redteam", "escape", "--sandbox", "chroot", "--json")
        assert code == 0, text[-4000:]
        column = json.loads(text[text.index("\n{") :])["columns"][0]
    else:
        rows = {1: "abcdefg", 2: "abcdef", 3: "abcdefg", 4: "abcd", 5: "abc", 6: "ab", 11: "c", 23: "abcde", 26: "ab"}
        rows |= {28: "h", 33: "ab"}
        code, text = inside.python("-c", _ATTACK, *(f"{row}{letter}" for row in rows for letter in rows[row]))
        assert code == 0, text[-4000:]
        column = json.loads(text.strip().splitlines()[-1])
    assert not column["unavailable"]
    verdicts = {finding["probe"]: finding["verdict"] for finding in column["findings"]}
    assert len(verdicts) >= (144 if WHOLE else 25)
    assert not [finding for finding in column["findings"] if finding["unexpected"]], text[-4000:]
    # No cgroup may be made in there, and a disk has no quota.
    assert {probe for probe, verdict in verdicts.items() if verdict == "open"} <= {
        "29b",
        "29c",
        "29d",
        "31a",
        "32a",
        "32c",
    }
    assert {probe for probe, verdict in verdicts.items() if verdict == "skipped"} <= {"13b", "31a"}


def test_an_evaluation(inside: Container) -> None:
    words = [] if WHOLE else ["--limit", "4"]
    code, text = inside.clawgym(
        "eval", "terminal-basic", "--agent", "oracle", "--sandbox", "chroot", "--out", "/tmp/run", *words
    )
    assert code == 0, text[-4000:]
    assert "the chroot backend isolates less than the others:" in text  # said at the start, and once
    assert text.count("no pid namespace") == 1
    rows = [json.loads(line) for line in inside.run("cat", "/tmp/run/results.jsonl")[1].splitlines()]
    assert len(rows) == (40 if WHOLE else 4)
    assert {row["task_id"] for row in rows if row["outcome"] != "solved"} == (_NEED_PROC if WHOLE else set())
    manifest = json.loads(inside.run("cat", "/tmp/run/receipt.json")[1])
    assert manifest["isolation"]["tier"] == "chroot"
    assert any(note.startswith("memory: limited for each process") for note in manifest["isolation"]["notes"])


def test_the_doctor_names_what_is_not_isolated(inside: Container) -> None:
    code, text = inside.clawgym("doctor")
    assert code == 0, text
    assert re.search(r"^NO  user namespaces .*\n.*fix: .*--sandbox chroot", text, re.M)
    assert re.search(r"^NO  sandbox: namespace .*\n.*fix: .*backend='chroot'", text, re.M)
    assert re.search(r"^ok  sandbox: chroot +tier chroot; not isolated: .*pid.*memory_limit", text, re.M)
    assert re.search(r"^ +- processes: no pid namespace", text, re.M)
    assert re.search(r"^ +- cpu: not limited", text, re.M)


def test_ordinary_user_gets_advice(inside: Container) -> None:
    code, text = inside.clawgym("doctor", user="1000")
    assert code == 1
    assert re.search(r"^NO  sandbox: chroot +the chroot backend needs root.*\n +fix: .*docker run --user 0", text, re.M)
    words = ("eval", "terminal-basic", "--agent", "noop", "--out", "/tmp/refused")
    code, text = inside.clawgym(*words, "--sandbox", "chroot", user="1000")
    assert code == 2
    assert "the chroot backend needs root" in text
    assert "Traceback" not in text
    assert inside.run("ls", "/tmp/refused")[0] != 0


def test_a_missing_capability_is_named(inside: Container) -> None:
    start = ["setpriv", "--bounding-set", "-mknod,-kill", "--inh-caps", "-mknod,-kill"]
    _, text = inside.run(*start, *inside.argv("doctor", "--json"))
    found = {finding["what"]: finding for finding in json.loads(text)}
    assert not found["sandbox: chroot"]["ok"]
    assert "KILL, MKNOD is missing" in found["sandbox: chroot"]["detail"]
    assert "--cap-add KILL --cap-add MKNOD" in found["sandbox: chroot"]["mend"]
