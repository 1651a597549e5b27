"""Copies of folders that replace mounts where nothing can be mounted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym.sandbox.chroot.clones import FolderStore, store_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="copies belong to root")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    top = tmp_path / "source"
    (top / "lib").mkdir(parents=True)
    (top / "lib" / "file").write_text("one")
    (top / "link").symlink_to("lib/file")
    (top / "away").symlink_to("/etc/hostname")
    (top / "tool").write_text("#!/bin/sh\n")
    (top / "tool").chmod(0o6755)
    (top / "open").write_text("anybody's")
    (top / "open").chmod(0o666)
    os.mkfifo(top / "fifo")
    return top


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def claimed(store: FolderStore, target: Path) -> Path:
    store.claim(target)
    return target


def tree(top: Path) -> dict[str, str]:
    return {
        str(path.relative_to(top)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(top.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_a_copy_is_whole_and_cannot_be_changed_by_others(state: Path, source: Path, tmp_path: Path) -> None:
    store = store_of(state, str(source))
    copy = claimed(store, tmp_path / "copy")
    assert tree(copy) == tree(source)  # links as they are; no FIFO
    for path in (copy, *copy.rglob("*")):
        info = path.lstat()
        assert (info.st_uid, info.st_gid) == (0, 0)
        assert path.is_symlink() or not info.st_mode & 0o6022, path
    assert os.path.samefile(copy / "lib" / "file", source / "lib" / "file")  # no second copy of what is safe to share
    assert not os.path.samefile(copy / "open", source / "open")
    assert (source / "open").stat().st_mode & 0o777 == 0o666
    assert oct(state.joinpath("mounts").stat().st_mode & 0o777) == "0o700"
    store.close()


def test_copies_are_used_again(state: Path, source: Path, tmp_path: Path) -> None:
    store = store_of(state, str(source))
    one, two = claimed(store, tmp_path / "one"), claimed(store, tmp_path / "two")
    known = {one.stat().st_ino, two.stat().st_ino}
    assert len(known) == 2
    store.give_back(one)
    store.give_back(two)
    store.close()
    later = store_of(state, str(source))
    assert later.path == store.path
    assert {claimed(later, tmp_path / name).stat().st_ino for name in ("one", "two")} == known
    later.close()


def test_changed_content_makes_a_new_store_and_removes_the_old_one(state: Path, source: Path, tmp_path: Path) -> None:
    store = store_of(state, str(source))
    (source / "lib" / "new").write_text("two")
    newer = store_of(state, str(source))
    assert store.path.is_dir()  # somebody uses it
    assert claimed(newer, tmp_path / "copy").joinpath("lib/new").read_text() == "two"
    for held in (store, newer):
        held.close()
    store_of(state, str(source)).close()
    assert not store.path.exists()
    assert sorted(path.name for path in (state / "mounts").iterdir()) == [newer.path.name, f"{newer.path.name}.lock"]


def test_store_of_a_missing_folder_is_removed_and_others_stay(state: Path, source: Path, tmp_path: Path) -> None:
    other, third = tmp_path / "other", tmp_path / "third"
    for folder in (other, third):
        folder.mkdir()
    gone, stays = store_of(state, str(source)), store_of(state, str(other))
    gone.close()
    stays.close()
    shutil.rmtree(source)
    store_of(state, str(third)).close()
    assert not gone.path.exists()
    assert stays.path.is_dir()


def test_unfinished_template_is_not_used(state: Path, source: Path, tmp_path: Path) -> None:
    store = store_of(state, str(source))
    shutil.rmtree(store.path / "template")
    (store.path / "new-0123").mkdir()
    (store.path / "new-0123" / "usr").mkdir()
    store.close()
    again = store_of(state, str(source))
    assert tree(claimed(again, tmp_path / "copy")) == tree(source)
    assert not list(again.path.glob("new-*"))
    again.close()


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder of another file system."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no second file system here")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_a_folder_of_another_file_system_is_copied(state: Path, elsewhere: Path, tmp_path: Path) -> None:
    (elsewhere / "file").write_text("far")
    store = store_of(state, str(elsewhere))
    one, two = claimed(store, tmp_path / "one"), claimed(store, tmp_path / "two")
    assert (one / "file").read_text() == "far"
    assert os.path.samefile(one / "file", two / "file")  # once
    store.close()
