"""Removing trees: unremovable entries do not keep others, and the time is bounded."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym.sandbox.inside.trees import remove_tree

GET_FLAGS, SET_FLAGS, IMMUTABLE = 0x80086601, 0x40086602, 0x10
"""Of ``linux/fs.h``."""


def mark(fd: int, flags: int) -> int:
    """Set the flags of a file, as chattr(1) does; returns what they were."""
    (before,) = struct.unpack("=l", fcntl.ioctl(fd, GET_FLAGS, bytes(8))[:4].ljust(4, b"\0"))
    fcntl.ioctl(fd, SET_FLAGS, struct.pack("=q", flags))
    return before


@contextlib.contextmanager
def immovable(*files: Path) -> Iterator[None]:
    """Files that nobody can remove."""
    held = [os.open(file, os.O_RDONLY | os.O_CREAT) for file in files]
    before: dict[int, int] = {}
    try:
        try:
            for fd in held:
                before[fd] = mark(fd, IMMUTABLE)
        except OSError:
            pytest.skip("this file system, or this user, cannot make a file immutable")
        yield
    finally:
        for fd, flags in before.items():  # wherever they are by now
            mark(fd, flags)
        for fd in held:
            os.close(fd)


def tree(top: Path) -> Path:
    for folder in ("a/b/c", "d/e", "f"):
        (top / folder).mkdir(parents=True)
    for file in ("a/1", "a/b/2", "a/b/c/3", "d/e/4", "5"):
        (top / file).write_text("x")
    (top / "a/link").symlink_to("..")
    (top / "f/out").symlink_to(top.parent / "outside")
    os.mkfifo(top / "d/pipe")
    return top


def test_a_tree_is_removed_and_nothing_that_it_links_to(tmp_path: Path) -> None:
    outside = tree(tmp_path / "outside")
    before = sorted(outside.rglob("*"))
    top = tree(tmp_path / "top")
    (top / "a").chmod(0)
    remove_tree(top)
    assert not top.exists()
    assert sorted(outside.rglob("*")) == before
    remove_tree(top)


@pytest.mark.parametrize("where", [["stuck"], ["a/stuck"], ["a/b/c/stuck", "d/e/stuck", "stuck"]], ids=len)
def test_unremovable_entries_do_not_keep_others(tmp_path: Path, where: list[str]) -> None:
    top = tree(tmp_path / "top")
    with immovable(*(top / name for name in where)):
        with pytest.raises(PermissionError):
            remove_tree(top)
        assert [path.name for path in top.rglob("*") if not path.is_dir()] == ["stuck"] * len(where)
    remove_tree(top)
    assert not top.exists()


def test_removal_is_bounded_in_time(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    for number in range(2000):
        (top / str(number)).mkdir()
        (top / str(number) / "x").touch()
    with pytest.raises(TimeoutError):
        remove_tree(top, 0.0)
    assert top.exists()
    remove_tree(top)
    assert not top.exists()
