"""Folders of owners: making them, and clearing those without a lock."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from pathlib import Path

import pytest

from clawgym.sandbox.leases import GUARDS, OwnerFolder, UidBlock, reap


def test_leftovers_of_an_owner_that_died_at_its_start_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "new-empty").mkdir()
    (tmp_path / "new-locked-once").mkdir()
    (tmp_path / "new-locked-once" / "lock").touch()
    (tmp_path / "new-held").mkdir()
    held = os.open(tmp_path / "new-held" / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    reap(tmp_path)
    assert [path.name for path in tmp_path.glob("new-*")] == ["new-held"]
    os.close(held)
    reap(tmp_path)
    assert not list(tmp_path.glob("new-*"))


def test_owners_begin_while_others_clear(tmp_path: Path) -> None:
    over = threading.Event()

    def clear() -> None:
        while not over.is_set():
            reap(tmp_path)

    clearing = [threading.Thread(target=clear) for _ in range(2)]
    for thread in clearing:
        thread.start()
    try:
        owners = [OwnerFolder(tmp_path, f"owner{i}") for i in range(200)]
        assert all((owner.path / "lock").exists() for owner in owners)
    finally:
        over.set()
        for thread in clearing:
            thread.join()
    assert not list(tmp_path.glob("new-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a uid a sandbox")
@pytest.mark.parametrize("offset", [1, 4095, GUARDS + 1, GUARDS + 4095], ids=["first", "last", "guard", "last guard"])
def test_only_processes_of_a_dead_owners_uids_are_killed(tmp_path: Path, offset: int) -> None:
    """A chroot sandbox has no pid namespace that would end with it."""
    uids = UidBlock(tmp_path)
    uids.first = 0x68000000  # below all blocks: no sandbox of another owner is killed here
    owner = OwnerFolder(tmp_path, "dead")
    owner.add_uids(uids)
    (owner.path / "chroot-x").mkdir()
    others = (uids.first + offset, uids.first + 4096, uids.first + GUARDS + 4096, uids.first - 1, os.getuid())
    left, *strangers = [subprocess.Popen(["sleep", "60"], user=uid) for uid in others]
    try:
        reap(tmp_path)
        assert owner.path.exists(), "its owner lives"
        assert left.poll() is None
        os.close(held_by_us(owner.path / "lock"))
        os.close(held_by_us(uids.path))
        assert reap(tmp_path) == ["dead"]
        assert left.wait(30) == -9
        assert [process.poll() for process in strangers] == [None] * 4
    finally:
        for process in (left, *strangers):
            process.kill()
            process.wait()
    assert not owner.path.exists()


def held_by_us(path: Path) -> int:
    """This process's descriptor of a file."""
    (found,) = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]
    return int(found)


def test_uids_of_two_owners_are_apart(tmp_path: Path) -> None:
    one, other = UidBlock(tmp_path), UidBlock(tmp_path)
    assert abs(one.first - other.first) >= 4096
    taken = {one.take() for _ in range(4095)}
    assert taken == set(range(one.first + 1, one.first + 4096)), "the first is nobody's sandbox"
    with pytest.raises(OSError, match="every outer uid is in use"):
        one.take()
    one.give_back(one.first + 7)
    assert one.take() == one.first + 7
    assert min(one.first, other.first) >= 0x70000000
    assert max(one.first, other.first) + GUARDS + 4096 < 2**31
