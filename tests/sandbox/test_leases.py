"""Folders of owners: made, seen by others, cleared when nobody holds them."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from clawgym.sandbox.leases import OwnerFolder, reap


def test_what_an_owner_left_that_died_while_it_began(tmp_path: Path) -> None:
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
