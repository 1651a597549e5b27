"""Filtering of untrusted archives."""

from __future__ import annotations

import io
import tarfile

import pytest

from clawgym.errors import SandboxError
from clawgym.sandbox.extract import filter_tar


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
