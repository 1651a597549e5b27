"""Filtering of untrusted archives."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from clawgym.errors import InfraError, SandboxError
from clawgym.sandbox.extract import filter_tar, write_tree


def packed(*members: tuple[str, bytes | str]) -> bytes:
    """Files, and links where there is a text."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = (tarfile.DIRTYPE, "") if content == "/" else (tarfile.SYMTYPE, content)
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def passed(data: bytes, strip: str) -> tuple[dict[str, bytes | str], list[str]]:
    archive = filter_tar(data, strip, 1 << 20, 100)
    found: dict[str, bytes | str] = {}
    with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
        for member in tar:
            held = tar.extractfile(member) if member.isreg() else None
            found[member.name] = held.read() if held else member.linkname
    return found, [why.partition(":")[0] for why in archive.dropped]


def test_dropped_entries_do_not_affect_others() -> None:
    members = [
        ("top", "/"),
        ("other/x", b"1"),
        ("top/a", b"2"),
        ("topping", b"3"),
        ("top/../y", b"4"),
        ("top/b", b"5"),
        ("top/out", "../.."),
        ("top/in", "b"),
        ("top/in/z", b"6"),
        ("./top/c", b"7"),
    ]
    found, dropped = passed(packed(*members), "top")
    assert found == {"a": b"2", "b": b"5", "in": "b", "c": b"7"}
    assert dropped == ["other/x", "topping", "top/../y".removeprefix("top/"), "out", "in/z"]
    found, _ = passed(packed(("./a", b"1"), (".", "/"), ("/b", b"2"), ("c", b"3")), "")
    assert found == {"a": b"1", "c": b"3"}


def test_damaged_archives_are_reported() -> None:
    whole = packed(("top/a", b"x" * 5000))
    for data in (b"", b"no tar", whole[:2000], b"\xff" * 1024):
        with pytest.raises(SandboxError, match="damaged archive"):
            filter_tar(data, "top", 1 << 20, 100)


def test_a_tree_is_written_without_following_links(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    (outside / "inner").mkdir(parents=True)
    (outside / "file").write_text("kept")
    (target / "was/folder").mkdir(parents=True)
    (target / "way").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    (target / "inner").symlink_to(outside / "inner")
    members = [("way", "/"), ("way/file", b"1"), ("file", b"2"), ("inner", "/"), ("was", b"3"), ("new/deep/file", b"4")]
    archive = filter_tar(packed(*members, ("link", "way/file")), "", 1 << 20, 100)
    write_tree(archive, target)
    assert (outside / "file").read_text() == "kept"
    assert os.listdir(outside / "inner") == []
    written = {path.relative_to(target).as_posix(): path for path in target.rglob("*")}
    assert {name: path.read_text() for name, path in written.items() if path.is_file()} == {
        **{"way/file": "1", "file": "2", "was": "3", "new/deep/file": "4"},
        "link": "1",
    }
    assert [name for name, path in written.items() if path.is_symlink()] == ["link"]
    write_tree(archive, tmp_path / "some", {"was", "link"})
    assert sorted(os.listdir(tmp_path / "some")) == ["link", "was"]


def test_a_target_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InfraError, match="cannot be written"):
        write_tree(filter_tar(packed(("file", b"1")), "", 10, 10), tmp_path / "link")
    assert not (tmp_path / "file").exists()
