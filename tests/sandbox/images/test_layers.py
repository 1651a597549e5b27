"""Layers are hostile: whatever they hold, nothing outside their folder is written, and nothing outside is read."""

from __future__ import annotations

import gzip
import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from clawgym.errors import SandboxError
from clawgym.sandbox.images.layers import Bounds, read_file, unpack

from . import make


def opened(tmp: Path, *layers: bytes, bounds: Bounds | None = None) -> list[Path]:
    """The folders of layers, bottom first."""
    folders: list[Path] = []
    for data in layers:
        folder = tmp / f"layer-{len(folders)}"
        folder.mkdir()
        unpack(io.BytesIO(data), folder, folders[:], bounds or Bounds())
        folders.append(folder)
    return folders


def special(name: str, kind: bytes, **fields: Any) -> make.Entry:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return name, info


def is_whiteout(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque") == b"y"
    except OSError:
        return False


@pytest.mark.parametrize(
    "entries",
    [
        [("../escaped", b"x")],
        [("a/../../escaped", b"x")],
        [("d/.wh...", b"")],
        [("d/.wh..", b"")],
        [("d/.wh.", b"")],
        [("a", "=>../escaped")],
        [("a", "=>missing")],
        [("a", "->b"), ("b", "->a"), ("a/x", b"x")],
        [("/".join("d" * 200), None)],
        [("a", b"file"), ("a/b", b"x")],
        [("a", "->")],
    ],
    ids=lambda entries: str(entries)[:40],
)
def test_it_is_refused(entries: list[make.Entry], tmp_path: Path) -> None:
    with pytest.raises(SandboxError):
        opened(tmp_path, make.layer(*entries))
    assert not (tmp_path / "escaped").exists()


def test_links_stay_in_the_image(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    outside = str(tmp_path / "outside")
    (own,) = opened(
        tmp_path,
        make.layer(
            ("abs", f"->{outside}"),
            ("up", "->../outside"),
            ("abs/one", b"1"),
            ("up/two", b"2"),
            ("/root/three", b"3"),
        ),
    )
    assert os.listdir(tmp_path / "outside") == ["secret"]
    assert (own / outside.lstrip("/") / "one").read_text() == "1"
    assert (own / "outside/two").read_text() == "2"
    assert (own / "root/three").read_text() == "3"
    assert os.readlink(own / "abs") == outside


def test_a_hard_link_never_leads_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for target in (f"{tmp_path}/secret", "out/secret"):
        folder = tmp_path / str(len(target))
        folder.mkdir()
        with pytest.raises(SandboxError, match="which it does not have"):
            opened(folder, make.layer(("out", f"->{tmp_path}"), ("copy", f"=>{target}")))


def test_paths_go_through_the_links_of_lower_layers(tmp_path: Path) -> None:
    _, upper = opened(
        tmp_path,
        make.layer(("usr/bin", None), ("bin", "->usr/bin"), ("usr/bin/a", b"a")),
        make.layer(("bin/b", b"b"), ("c", "=>bin/a")),
    )
    assert (upper / "usr/bin/b").read_text() == "b"
    assert not (upper / "bin").exists()
    assert (upper / "c").read_text() == "a"


def test_whiteouts(tmp_path: Path) -> None:
    base = make.layer(("gone", b""), ("d/old", b""), ("e/old", b""), ("f/old", b""), ("g", b""), ("tmp", None))
    _, upper = opened(
        tmp_path,
        base,
        make.layer(
            *[(".wh.gone", b""), ("d/.wh..wh..opq", b""), (".wh.e", b""), ("e/new", b"")],
            *[("f/new", b""), (".wh.f", b""), (".wh.g", b""), ("g", None), ("tmp/x", b"")],
        ),
    )
    assert is_whiteout(upper / "gone")
    assert is_opaque(upper / "d")
    assert is_opaque(upper / "e")
    assert is_opaque(upper / "f")
    assert os.listdir(upper / "f") == ["new"], "a whiteout hides lower layers only"
    assert is_opaque(upper / "g")
    assert not is_opaque(upper / "tmp")
    assert not any(is_whiteout(p) for p in opened(_below(tmp_path), make.layer((".wh.x", b"")))[0].rglob("*"))


def _below(folder: Path) -> Path:
    (folder / "below").mkdir()
    return folder / "below"


def test_files_are_read_through_links_of_the_image_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of this machine")
    base = make.layer(("usr/bin/x", b"base"), ("bin", "->usr/bin"), ("gone", b"x"), ("d/old", b"x"))
    upper = make.layer(
        *[(".wh.gone", b""), ("d/.wh..wh..opq", b""), ("usr/bin/y", b"upper"), ("abs", "->/usr/bin/y")],
        *[("out", f"->{tmp_path}/secret"), ("up", "->../../../secret"), ("circle", "->circle"), ("to", "->usr")],
        special("pipe", tarfile.FIFOTYPE),
    )
    layers = opened(tmp_path, base, upper)
    found = {name: read_file(layers, f"/{name}", 3) for name in ("bin/x", "bin/y", "abs", "to/bin/y")}
    assert found == {"bin/x": b"bas", "bin/y": b"upp", "abs": b"upp", "to/bin/y": b"upp"}
    nothing = ("gone", "d/old", "out", "up", "circle", "pipe", "usr", "", "usr/bin/x/y", "../secret")
    assert {name: read_file(layers, name, 3) for name in nothing} == dict.fromkeys(nothing)
    assert read_file(layers, "bin/x", 0) == b""


def test_modes_owners_and_special_files(tmp_path: Path) -> None:
    base, upper = opened(
        tmp_path,
        make.layer(
            special("tmp", tarfile.DIRTYPE, mode=0o1777),
            special("locked", tarfile.DIRTYPE, mode=0o0),
            ("locked/file", b"x"),
            special("disk", tarfile.BLKTYPE, devmajor=8, devminor=0),
            special("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
            special("pipe", tarfile.FIFOTYPE, mode=0o644),
            special("root-shell", tarfile.REGTYPE, mode=0o6755, uid=0),
            special("other", tarfile.REGTYPE, mode=0o640, uid=1234, gid=5678),
        ),
        make.layer(("tmp/x", b"")),
    )
    assert stat.S_IMODE((base / "tmp").stat().st_mode) == stat.S_IMODE((upper / "tmp").stat().st_mode) == 0o1777
    assert stat.S_IMODE((base / "locked").stat().st_mode) == 0o500, "overlays must be able to read it"
    assert (base / "locked/file").read_text() == "x"
    assert not (base / "disk").exists()
    assert not (base / "null").exists()
    assert stat.S_ISFIFO((base / "pipe").lstat().st_mode)
    assert stat.S_IMODE((base / "root-shell").stat().st_mode) == 0o755
    assert (base / "other").stat().st_uid == os.geteuid()


def test_an_entry_replaces_an_earlier_one(tmp_path: Path) -> None:
    (own,) = opened(
        tmp_path,
        make.layer(
            ("a/b/c", b"1"), ("a", b"file"), ("l", "->a"), ("l", b"file"), ("d/x", b"2"), ("d", "->a"), ("a", b"3")
        ),
    )
    assert (own / "a").read_text() == "3"
    assert (own / "l").read_text() == "file"
    assert not (own / "l").is_symlink()
    assert os.readlink(own / "d") == "a"


def test_bounds(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="too large"):
        opened(tmp_path, make.layer(("zeros", bytes(2 << 20))), bounds=Bounds(size=1 << 20))
    with pytest.raises(SandboxError, match="too many files"):
        opened(_below(tmp_path), make.layer(*((str(n), b"") for n in range(20))), bounds=Bounds(entries=10))


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    code = (
        "import io, resource, sys; from pathlib import Path; from clawgym.sandbox.images.layers import Bounds, unpack\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "class Zeros(io.RawIOBase):\n"
        "    start = bytes.fromhex(sys.argv[1])\n"
        "    def read(self, size=-1):\n"
        "        data, self.start = (self.start[:size], self.start[size:])\n"
        "        return data + bytes(size - len(data))\n"
        "unpack(Zeros(), Path(sys.argv[2]), [], Bounds())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, info.tobuf().hex(), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert "a layer is damaged" in done.stderr, done.stderr
    assert "MemoryError" not in done.stderr


NAMES = st.sampled_from(["a", "b", "c", "a/b", "a/b/c", "b/a", "../x", "/a", "a/.wh.b", "a/.wh..wh..opq", ".wh.a"])
THINGS = st.sampled_from(["->a", "->/", "->..", "->b/a", "=>a", "=>a/b", "=>c", None, b"x"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.lists(st.lists(st.tuples(NAMES, THINGS), max_size=8), min_size=1, max_size=3))
@example(layers=[[("a/b/c", "->a"), ("a", "->a"), ("a/b/c", "->a")]])
def test_any_layers_stay_below_their_folder(
    layers: list[list[make.Entry]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    top = tmp_path_factory.mktemp("any")
    (top / "x").write_text("kept")
    try:
        folders = opened(top, *(make.layer(*entries) for entries in layers))
        assert {read_file(folders, name, 9) for name in ("a", "b", "c", "a/b", "b/a", "../x", "/x")} <= {None, b"x"}
    except SandboxError:
        pass
    assert (top / "x").read_text() == "kept"
    assert (top / "x").stat().st_nlink == 1
    assert {p.name for p in top.iterdir()} <= {"x", "layer-0", "layer-1", "layer-2"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=3000))
def test_any_bytes_are_refused_or_read(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    start = make.layer(("a", b"x"), ("b", None))
    for text in (data, start[:600] + data, gzip.compress(start)):
        try:
            opened(tmp_path_factory.mktemp("bytes"), text)
        except SandboxError:
            pass
