"""Cgroups, and the fallback on hosts without them."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

import pytest

from clawgym.sandbox.linux import cgroups as cgroups_module
from clawgym.sandbox.linux.cgroups import Cgroups

pytestmark = pytest.mark.skipif(os.name != "posix" or not Path("/sys/fs/cgroup").exists(), reason="no cgroups here")


@pytest.fixture
def cgroups():
    made = Cgroups(secrets.token_hex(8))
    made.try_out()
    if not made.limits:
        pytest.skip("no cgroup can be made here")
    yield made
    for lease in made.leases():
        made.kill(lease)
        made.remove(lease)
    made.remove_all()
    assert not any(path.exists() for path in made.roots.values())


def test_a_lease_is_limited_and_removed(cgroups: Cgroups) -> None:
    procs = cgroups.create("a", memory=1 << 28, pids=7, cpus=0.5)
    assert procs
    assert cgroups.leases() == {"a"}
    text = "".join(
        f.read_text() for p in procs for f in Path(p).parent.iterdir() if f.name in ("pids.max", "memory.max")
    ) + "".join(f.read_text() for p in procs for f in Path(p).parent.glob("memory.limit_in_bytes"))
    assert "7" in text.split()
    assert str(1 << 28) in text.split()
    assert cgroups.remove("a")
    assert cgroups.leases() == set()


def test_another_process_finds_existing_cgroups(cgroups: Cgroups) -> None:
    cgroups.create("a", memory=1 << 28, pids=7, cpus=0.5)
    again = Cgroups(cgroups.name.removeprefix("clawgym-"), cgroups.where())
    assert again.leases() == {"a"}
    assert again.remove("a")
    stranger = Cgroups("somebody-else", cgroups.where())
    assert not stranger.roots, "a note that names other folders is not believed"


def test_cgroups_that_cannot_be_joined_are_released(cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Cgroups(secrets.token_hex(8))
    roots = list(mine.roots.values())
    monkeypatch.setattr(Cgroups, "create", lambda *a, **k: ["/proc/self/no-such-file/cgroup.procs"])
    mine.try_out()
    assert mine.limits == []
    assert not any(path.exists() for path in roots)


def hierarchy(folder: Path, controllers: str) -> Path:
    """The files of a version 2 hierarchy that claims are made with."""
    folder.mkdir()
    (folder / "cgroup.controllers").write_text(f"{controllers}\n")
    (folder / "cgroup.subtree_control").touch()
    return folder


@pytest.mark.parametrize(
    ("controllers", "limits"),
    [
        ("cpuset cpu io memory hugetlb pids rdma", ["memory", "pids", "cpu"]),
        ("pids memory", ["memory", "pids"]),
        ("cpuset", []),
        ("", []),
    ],
)
def test_controllers_of_a_version_2_hierarchy_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str, limits: list[str]
) -> None:
    """Whatever version this machine has."""
    top = hierarchy(tmp_path / "top", controllers)
    ours = hierarchy(top / "clawgym-owner", controllers)
    written: dict[str, list[str]] = {}

    def write(path: Path | str, value: int | str) -> None:
        written.setdefault(str(path), []).append(str(value))

    monkeypatch.setattr(cgroups_module, "_mounts", lambda: [("cgroup2", top, ["rw"])])
    monkeypatch.setattr(cgroups_module, "_own_paths", lambda: {"": "/"})
    monkeypatch.setattr(cgroups_module, "_write", write)
    made = Cgroups("owner")
    assert made.limits == limits
    assert made.where() == {name: (str(ours), 2) for name in ("kill", *limits)}
    expected = [f"+{name}" for name in limits]
    assert written == ({f"{folder}/cgroup.subtree_control": expected for folder in (top, ours)} if limits else {})


def test_a_lease_with_a_process_in_it_is_not_removed(cgroups: Cgroups) -> None:
    procs = cgroups.create("a", memory=1 << 28, pids=7, cpus=0.5)
    inside = subprocess.Popen(["sleep", "60"])
    try:
        for file in procs:
            Path(file).write_text(str(inside.pid))
        assert cgroups.pids("a") == {inside.pid}
        assert not cgroups.remove("a")
        assert cgroups.leases() == {"a"}
    finally:
        inside.kill()
        inside.wait()
    assert cgroups.remove("a")
    assert cgroups.remove("a"), "what is gone is removed"
