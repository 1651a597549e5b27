"""Cgroups where they can be had, and an honest fallback where they cannot."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from clawgym.sandbox._cgroups import Cgroups

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


def test_another_process_finds_them_again(cgroups: Cgroups) -> None:
    cgroups.create("a", memory=1 << 28, pids=7, cpus=0.5)
    again = Cgroups(cgroups.name.removeprefix("clawgym-"), cgroups.where())
    assert again.leases() == {"a"}
    assert again.remove("a")
    stranger = Cgroups("somebody-else", cgroups.where())
    assert not stranger.roots, "a note that names other folders is not believed"


def test_a_claim_that_cannot_be_joined_is_given_up(cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Cgroups(secrets.token_hex(8))
    roots = list(mine.roots.values())
    monkeypatch.setattr(Cgroups, "create", lambda *a, **k: ["/proc/self/no-such-file/cgroup.procs"])
    mine.try_out()
    assert mine.limits == []
    assert not any(path.exists() for path in roots)
