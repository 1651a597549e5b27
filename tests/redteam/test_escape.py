"""The escape suite: no probe escapes from ClawGym's sandboxes, and the same probes escape from weak ones."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import platform
import re
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawgym.cli import app
from clawgym.errors import SandboxUnavailable
from clawgym.redteam import escape
from clawgym.redteam.escape import BLOCKED, OPEN, ROWS, SKIPPED, Column, ProbeFinding, baseline
from clawgym.redteam.escape.declared import declared_open
from clawgym.redteam.escape.host_ends import alive
from clawgym.redteam.escape.table import lines, table
from clawgym.sandbox import Backend, Isolation, local_names
from clawgym.sandbox import backend as make_backend

from .leaky import Leaky

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the probes are Linux system calls")]
ROOT = os.geteuid() == 0


def _host() -> dict[str, str]:
    """What no probe may change."""
    names = ("kernel/core_pattern", "kernel/hostname", "kernel/domainname", "vm/overcommit_memory")
    return {name: Path("/proc/sys", name).read_text() for name in names} | {"node": platform.node()}


def _params() -> list:
    marks = {"docker": pytest.mark.docker}
    return [pytest.param(name, marks=marks.get(name, ())) for name in local_names()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _params())
async def test_a_backend_stops_what_it_claims_to_stop(name: str, request: pytest.FixtureRequest) -> None:
    if name == "docker":
        request.getfixturevalue("docker_engine")
    before = _host()
    with escape.lay_baits() as baits:
        made = make_backend(name)
        try:
            ids = [probe.id for probe in escape.probes()]
            # Probes mostly wait: several at once, each share in sandboxes of its own.
            shares = [escape.escape_suite(made, baits, only=ids[n::3]) for n in range(3)]
            columns = await asyncio.gather(*shares)
        finally:
            await made.aclose()
    if columns[0].unavailable:
        pytest.skip(f"{name}: {columns[0].unavailable}")
    column = dataclasses.replace(columns[0], findings=tuple(f for one in columns for f in one.findings))
    said = "\n".join(lines([column]))
    assert not column.unexpected, said
    assert sorted(finding.probe for finding in column.findings) == sorted(ids)
    # A probe that cannot run shows nothing: only where the host lacks what it would attack, or is too busy, may it be
    # left out.
    assert {finding.probe for finding in column.findings if finding.verdict == SKIPPED} <= {"13b", "31a"}, said
    assert _host() == before


async def _opens(make, ids: set[str], bare: bool = False) -> dict[str, ProbeFinding]:
    with escape.lay_baits() as baits:
        place = make()
        try:
            column = await escape.escape_suite(place, baits, only=ids, baseline=True, bare=bare)
        finally:
            await place.aclose()
    if column.unavailable:
        pytest.skip(column.unavailable)
    return {finding.probe: finding for finding in column.findings}


def _all_open(found: dict[str, ProbeFinding], ids: set[str]) -> None:
    closed = [f"{f.probe} {f.verdict}: {f.evidence}" for f in found.values() if f.probe in ids and f.verdict != OPEN]
    assert not closed, "\n".join(closed)
    assert set(found) == ids


async def test_without_a_sandbox_the_probes_reach_the_host() -> None:
    ids = {
        "1a",
        "1b",
        "1c",
        "1d",
        "2c",
        "3a",
        "3b",
        "3f",
        "4a",
        "4c",
        "5a",
        "5b",
        "6a",
        "9a",
        "23a",
        "23e",
        "24a",
        "24b",
        "1e",
        "9d",
    }
    ids |= {"14d"} if Path("/proc/pressure/cpu").exists() else set()
    ids |= {"25a", "25b", "26a", "26b", "27c", "28a", "28b", "28c", "28d", "28e", "28f", "28g", "37a", "37b", "37c"}
    ids |= {"2a", "2b", "3c", "3d", "7a", "7c", "10a", "21c", "21d", "22c", "23b", "23d"} if ROOT else set()
    found = await _opens(baseline.no_sandbox, ids, bare=True)
    held = {name for name in ids if found[name].verdict == SKIPPED}
    assert held == ({"10a", "23e"} if ROOT else {"23e"})  # not harmless where there is nothing between
    _all_open({name: f for name, f in found.items() if name not in held}, ids - held)


async def test_a_bare_bubblewrap_lets_through_what_it_is_known_to() -> None:
    ids = {
        "9a",
        "20a",
        "25a",
        "25b",
        "26a",
        "28a",
        "29a",
        "29b",
        "29c",
        "29d",
        "30a",
        "30b",
        "32a",
        "32b",
        "32c",
        "36a",
        "36b",
    }
    # Started by root it is the host's root: the reason why ours never is.
    ids |= {"10a", "14a", "14c", "22a", "22b", "23b", "23c", "23e"} if ROOT else set()
    before = _host()
    found = await _opens(baseline.bare_bubblewrap, ids | {"31a"})
    assert found.pop("31a").verdict != BLOCKED  # open, unless others leave too little of the machine to tell
    _all_open(found, ids)
    assert _host() == before


@pytest.mark.docker
async def test_a_default_container_lets_through_what_it_is_known_to(docker_engine: str) -> None:
    ids = {"1e", "3g", "5c", "7a", "9a", "9d", "11b", "12b", "23a", "23b", "23c", "23d", "27b", "33a", "33b", "34a"}
    _all_open(await _opens(baseline.docker_run, ids), ids)


@pytest.mark.parametrize(
    ("leak", "probes"),
    [
        ("one sandbox for all", {"11b", "35a"}),
        ("never stops", {"33a", "33b", "34a"}),
        ("copies a moving sandbox", {"34b"}),
        ("tools are not pristine", {"35b"}),
        ("readonly is not", {"35c"}),
        ("mounts are copies", {"11c"}),
        ("connects by path", {"28h"}),
        ("output is text", {"36c"}),
        ("exit code in the output", {"36d"}),
        ("archives by the sandbox's tar", {"37a", "37d"}),
    ],
)
async def test_probes_find_a_weakened_sandbox(backend: Backend, leak: str, probes: set[str]) -> None:
    with escape.lay_baits() as baits:
        good = await escape.escape_suite(backend, baits, only=probes)
        broken = await escape.escape_suite(Leaky(backend, leak), baits, only=probes)
    assert {f.probe: f.verdict for f in good.findings} == dict.fromkeys(sorted(probes), BLOCKED)
    _all_open({f.probe: f for f in broken.findings}, probes)
    assert {f.probe for f in broken.unexpected} == probes


def test_baits_are_removed() -> None:
    with escape.lay_baits() as baits:
        assert os.environ["CLAWGYM_BAIT_TOKEN"] == baits.known["secret"]
        assert alive(baits.known["marker"])
    assert "CLAWGYM_BAIT_TOKEN" not in os.environ
    assert not alive(baits.known["marker"])
    assert not Path(baits.path).exists()
    assert not Path("/dev/shm", baits.known["shm_name"]).exists()
    # The kernel may still hold a datagram socket for a moment after its process closed it.
    deadline = time.monotonic() + 10
    while baits.known["abstract"] in (sockets := Path("/proc/net/unix").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert baits.known["abstract"] not in sockets


def test_every_row_has_probes_and_every_probe_a_row() -> None:
    probes = escape.probes()
    assert {probe.row for probe in probes} == set(ROWS) == set(range(1, 39))
    assert len({probe.id for probe in probes}) == len(probes) >= 144
    assert all(re.fullmatch(r"\d+[a-z]", probe.id) for probe in probes)
    for row in ROWS:  # none is missing in between
        letters = sorted(probe.id[-1] for probe in probes if probe.row == row)
        assert letters == list("abcdefghi"[: len(letters)])


def test_probes_make_the_system_calls_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from clawgym.redteam.escape.inside import kit, network, processes
    from clawgym.sandbox.linux.seccomp import DENIED

    both = kit.CALLS.keys() & DENIED.keys()
    assert len(both) > 30
    assert {name: kit.CALLS[name] for name in both} == {name: DENIED[name] for name in both}

    asked: set[tuple[int, int, int]] = set()

    def refused(*family: int) -> None:
        asked.add(family)  # type: ignore[arg-type]
        raise PermissionError(1, "EPERM")

    monkeypatch.setattr(network.socket, "socket", refused)
    assert kit.PROBES["9e"][0]({})[0] == BLOCKED
    ordinary = {6, 17, 136}  # TCP, UDP, UDP-Lite: allowed, or asked for by 9d
    for family in (2, 10):
        for protocol in {*range(1, 257), 263} - ordinary:
            assert {(family, 1, protocol), (family, 2, protocol)} <= asked
    assert {(2, 5, 132), (2, 6, 33), (2, 5, 0), (2, 6, 0)} <= asked
    # A number that is no process of the host's here, where there is a /proc to tell by.
    assert processes._is_bait(2**22 + 1, {"marker": "marker"}) is False


async def test_backend_without_connections_is_skipped_not_blocked(backend: Backend) -> None:
    with escape.lay_baits() as baits:
        column = await escape.escape_suite(Leaky(backend, "connects nowhere"), baits, only={"28h"})
    assert [(f.verdict, f.evidence) for f in column.findings] == [(SKIPPED, "no connections into sandboxes here")]


async def test_blocked_probes_that_are_not_claimed_count_as_skipped(backend: Backend) -> None:
    class Modest(Leaky):
        async def probe(self) -> Isolation:
            found = await self.inner.probe()
            return dataclasses.replace(found, features={**found.features, "disk_limit": False})

    with escape.lay_baits() as baits:
        column = await escape.escape_suite(Modest(backend, "nothing"), baits, only={"32a", "32b"})
    one, two = column.findings
    assert (one.verdict, two.verdict) == (SKIPPED, BLOCKED)
    assert one.evidence.startswith("disk is not limited here, though it did not show: ")


_PAGE = Path(__file__).parents[2] / "docs" / "results" / "attacks.md"


def test_docs_table_has_every_row_and_no_open_probe_of_full_backends() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", _PAGE.read_text(), re.M)
    shown = [table.splitlines() for table in tables if table.startswith("| attack on")]
    assert len(shown) == 2  # this machine, and a default container
    for head, _, *rows in shown:
        names = [cell.strip() for cell in head.split("|")[1:-1]]
        cells = [dict(zip(names, (cell.strip() for cell in row.split("|")[1:-1]), strict=True)) for row in rows]
        assert [cell["attack on"] for cell in cells] == [f"{row} {title}" for row, (title, _) in ROWS.items()]
        for name in {"namespace", "docker"} & set(names):
            assert [cell[name] for cell in cells if "Y" in cell[name]] == []


def test_only_missing_host_features_are_declared_open() -> None:
    everything = Isolation("namespace", "namespace-root", {"memory_limit": True, "cpu_limit": True})
    assert declared_open(everything) == {}
    without = Isolation("namespace", "namespace-user", {"memory_limit": False, "cpu_limit": True})
    assert set(declared_open(without)) == {"29b", "29c", "29d"}


def _column(**fields: object) -> Column:
    findings = (
        ProbeFinding("1a", "read", BLOCKED, "ENOENT"),
        ProbeFinding("1b", "look", OPEN, "found it"),
        ProbeFinding("29b", "eat", OPEN, "160 MiB", declared="not limited here"),
        ProbeFinding("38a", "kill", SKIPPED, "no"),
    )
    return Column("sandbox", "some-tier", findings=findings, **fields)  # type: ignore[arg-type]


_GOOD = Column("good", "tier", findings=(ProbeFinding("1a", "read", BLOCKED, "ENOENT"),))


def test_the_table_says_what_is_open() -> None:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO())
    console.print(table([_column()]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"\| 1 files of the host.*\| Y b +\|", text)
    assert re.search(r"\| 38 the sandbox's own agent +\| not run +\|", text)
    said = lines([_column()])
    assert "sandbox (tier some-tier): 1 blocked, 2 open, 1 not run" in said
    assert "  OPEN 1b look: found it" in said
    assert any("declared: 29b" in line for line in said)
    assert lines([_column(baseline=True)]) == ["sandbox (a baseline, not a sandbox): 1 blocked, 2 open, 1 not run"]


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ([_GOOD], 0),
        ([_GOOD, _column()], 1),
        ([_GOOD, _column(baseline=True)], 0),
        ([_GOOD, Column("docker", "", unavailable="no engine")], 0),
        ([Column("docker", "", unavailable="no engine")], 1),
    ],
)
def test_only_what_should_be_closed_fails_the_command(
    columns: list[Column], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def found(*_: object, **__: object) -> list[Column]:
        return columns

    monkeypatch.setattr(escape, "attack_all", found)
    done = CliRunner().invoke(app, ["redteam", "escape", "--json"])
    assert done.exit_code == code
    written = json.loads(done.stdout)
    assert [column["name"] for column in written["columns"]] == [column.name for column in columns]


def test_unavailable_backend_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    pytest.importorskip("docker")
    done = CliRunner().invoke(app, ["redteam", "escape", "--sandbox", "docker"])
    assert done.exit_code == 1
    assert "docker: not attacked: no Docker engine answers" in done.output


def test_unknown_sandbox_is_refused_with_the_closest_name() -> None:
    done = CliRunner().invoke(app, ["redteam", "escape", "--sandbox", "dokcer"])
    assert isinstance(done.exception, SandboxUnavailable)
    assert "Did you mean 'docker'" in str(done.exception)
