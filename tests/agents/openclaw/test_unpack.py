"""Unpacking images: semantics of layers, and hostile layers do not write outside the folder."""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clawgym.agents.openclaw._unpack import resolve, unpack
from clawgym.errors import AgentError

from .images import docker_archive, entry, layer, oci_layout


def unpacked(tmp_path: Path, *layers: bytes) -> dict[str, str]:
    """Unpack layers and return path -> content of files, ``-> target`` of links, ``/`` for folders."""
    root = tmp_path / "root"
    root.mkdir()
    unpack(oci_layout(tmp_path / "image", layers), root, lambda what, done, total: None)
    return tree_of(root)


def tree_of(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


def test_layer_overrides_lower_layer(tmp_path: Path) -> None:
    below = [
        entry("a/kept", "1"),
        entry("a/changed", "1"),
        entry("a/gone", "1"),
        entry("b/x", "1"),
        entry("b/c/y", "1"),
    ]
    above = [
        entry("a/changed", "2"),
        entry("a/.wh.gone"),
        entry("b/new", "2"),
        entry("b/c/z", "2"),
        entry("b/.wh..wh..opq"),
        entry("same", kind=tarfile.LNKTYPE),
    ]
    above[-1][0].linkname = "a/changed"
    assert unpacked(tmp_path, layer(below), layer(above)) == {
        "a": "/",
        "a/kept": "1",
        "a/changed": "2",
        "same": "2",
        "b": "/",
        "b/new": "2",
        "b/c": "/",
        "b/c/z": "2",
    }


def test_file_types_replace_each_other(tmp_path: Path) -> None:
    below = [entry("a", "file"), entry("b/c", "1"), entry("d", link="b"), entry("e", link="b")]
    above = [entry("a", kind=tarfile.DIRTYPE, mode=0o755), entry("b", "file"), entry("d", "file"), entry("e/x", "2")]
    with pytest.raises(AgentError, match="cannot be unpacked"):  # e links to b, which is now a file
        unpacked(tmp_path, layer(below), layer(above))
    (tmp_path / "again").mkdir()
    assert unpacked(tmp_path / "again", layer(below), layer(above[:3])) == {
        "a": "/",
        "b": "file",
        "d": "file",
        "e": "-> b",
    }


def test_links_resolve_inside_root(tmp_path: Path) -> None:
    below = [entry("usr/bin/x", "1"), entry("bin", link="usr/bin"), entry("abs", link="/usr/bin")]
    above = [entry("bin/y", "2"), entry("abs/z", "2"), entry("bin/.wh.x")]
    found = unpacked(tmp_path, layer(below), layer(above))
    assert {name for name in found if name.startswith("usr/bin/")} == {"usr/bin/y", "usr/bin/z"}


def test_files_get_owner_mode_and_time(tmp_path: Path) -> None:
    entries = [
        entry("su", "x", mode=0o4755),
        entry("secret", "x", mode=0o000),
        entry("closed", kind=tarfile.DIRTYPE, mode=0o000),
        entry("tmp", kind=tarfile.DIRTYPE, mode=0o1777),
        entry("null", kind=tarfile.CHRTYPE),
        entry("fifo", kind=tarfile.FIFOTYPE),
    ]
    for info, _ in entries:
        info.uid = info.gid = 4242
    found = unpacked(tmp_path, layer(entries))
    assert set(found) == {"su", "secret", "closed", "tmp"}
    modes = {name: stat.S_IMODE((tmp_path / "root" / name).stat().st_mode) for name in found}
    assert modes == {"su": 0o755, "secret": 0o400, "closed": 0o700, "tmp": 0o1777}
    assert {(tmp_path / "root" / name).stat().st_uid for name in found} == {os.geteuid()}
    assert (tmp_path / "root/su").stat().st_mtime == 1_600_000_000


@pytest.mark.parametrize("nested", [False, True])
def test_layout_and_archive_unpack_alike(tmp_path: Path, nested: bool) -> None:
    layers = [layer([entry("a", "1")]), layer([entry("b", "2")])]
    folder = oci_layout(tmp_path / "oci", layers, nested=nested)
    with tarfile.open(tmp_path / "oci.tar", "w") as tar:
        tar.add(folder, arcname=".")
    for source in (folder, tmp_path / "oci.tar", docker_archive(tmp_path / "docker.tar", layers)):
        root = tmp_path / f"root-{source.name}"
        root.mkdir()
        unpack(source, root, lambda what, done, total: None)
        assert tree_of(root) == {"a": "1", "b": "2"}


OUTSIDE = "outside/secret"


def hostile(top: Path) -> dict[str, list[tuple[tarfile.TarInfo, bytes]]]:
    """Layers that try to reach ``outside/secret`` next to the root folder ``root``."""
    far = f"{top}/outside"
    hard = entry("hard", kind=tarfile.LNKTYPE)
    hard[0].linkname = "../outside/secret"
    absolute = entry("hard", kind=tarfile.LNKTYPE)
    absolute[0].linkname = f"{far}/secret"
    through = entry("hard", kind=tarfile.LNKTYPE)
    through[0].linkname = "way/secret"
    of_link = entry("hard", kind=tarfile.LNKTYPE)
    of_link[0].linkname = "way"
    return {
        "parent": [entry("../outside/secret", "hit")],
        "parent inside": [entry("a/../../outside/secret", "hit")],
        "absolute": [entry(f"{far}/secret", "hit")],
        "through a link": [entry("way", link=far), entry("way/secret", "hit")],
        "through a relative link": [entry("way", link="../outside"), entry("way/secret", "hit")],
        "through two links": [entry("a", link=".."), entry("b", link="a/outside"), entry("b/secret", "hit")],
        "over a link": [entry("way", link=f"{far}/secret"), entry("way", "hit")],
        "folder over a link": [entry("way", link=far), entry("way", kind=tarfile.DIRTYPE, mode=0o777)],
        "hard link": [hard, entry("hard", "hit")],
        "absolute hard link": [absolute, entry("hard", "hit")],
        "hard link through a link": [entry("way", link=far), through, entry("hard", "hit")],
        "hard link to a link": [entry("way", link=f"{far}/secret"), of_link, entry("hard", "hit")],
        "whiteout": [entry("way", link=far), entry("way/.wh.secret")],
        "whiteout of parent": [entry("x/.wh...")],
        "whiteout of itself": [entry("x/.wh..")],
        "opaque": [entry("way", link=far), entry("way/.wh..wh..opq")],
        "loop": [entry("a", link="b"), entry("b", link="a"), entry("a/x", "hit")],
        "root as file": [entry(".", "hit"), entry("/", "hit")],
    }


@pytest.mark.parametrize("name", sorted(hostile(Path("/"))))
def test_hostile_layer_does_not_write_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / OUTSIDE).write_text("secret")
    (tmp_path / OUTSIDE).chmod(0o600)
    before = {str(p): p.lstat() for p in (tmp_path / "outside", tmp_path / OUTSIDE)}
    root = tmp_path / "root"
    root.mkdir()
    image = oci_layout(tmp_path / "image", [layer(hostile(tmp_path)[name])])
    try:
        unpack(image, root, lambda what, done, total: None)
    except AgentError as error:
        assert "cannot be unpacked" in str(error)  # noqa: PT017
    assert (tmp_path / OUTSIDE).read_text() == "secret"
    for path, info in before.items():
        now = os.lstat(path)
        assert (now.st_mode, now.st_nlink, now.st_mtime_ns) == (info.st_mode, info.st_nlink, info.st_mtime_ns), path
    assert sorted(os.listdir(tmp_path)) == ["image", "outside", "root"]
    assert os.listdir(tmp_path / "outside") == ["secret"]


@pytest.mark.parametrize("target", ["", "/", ".", "..", "../..", "a/..", "../a/x", "nowhere", "a/x/y"])
def test_hard_link_to_missing_file_is_refused(tmp_path: Path, target: str) -> None:
    hard = entry("hard", kind=tarfile.LNKTYPE)
    hard[0].linkname = target
    with pytest.raises(AgentError, match="cannot be unpacked"):
        unpacked(tmp_path, layer([entry("a/x", "1"), hard]))


def test_damaged_image_is_refused(tmp_path: Path) -> None:
    good = oci_layout(tmp_path / "good", [layer([entry("a", "1")])])
    blobs = sorted((good / "blobs/sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    content = blobs[-1].read_bytes()
    texts = {
        "damaged": lambda: blobs[-1].write_bytes(content + b"\0" * 512),
        "cannot be unpacked": lambda: blobs[-1].write_bytes(content[:40]),
        "zstd": lambda: blobs[-1].write_bytes(b"\x28\xb5\x2f\xfd" + content),
        "not a SHA-256": lambda: (good / "index.json").write_text('{"manifests": [{"digest": "sha256:../../../x"}]}'),
        "contains 0 images": lambda: (good / "index.json").write_text('{"manifests": []}'),
        "cannot be unpacked .*": lambda: (good / "index.json").write_text("[]"),
    }
    for number, (text, damage) in enumerate(texts.items()):
        damage()
        root = tmp_path / f"root{number}"
        root.mkdir()
        with pytest.raises(AgentError, match=text):
            unpack(good, root, lambda what, done, total: None)
    (tmp_path / "text").write_text("no tar")
    with pytest.raises(AgentError, match="docker save IMAGE"):
        unpack(tmp_path / "text", root, lambda what, done, total: None)


PARTS = st.sampled_from(["a", "b", "c", "..", "."])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
TARGETS = st.builds(lambda start, path: start + path, st.sampled_from(["", "/"]), PATHS)


@settings(max_examples=200, deadline=None)
@given(links=st.dictionaries(PATHS, TARGETS, max_size=4), asked=PATHS, make=st.booleans())
@example(links={"a": "a", "a/a/a": "a"}, asked="a", make=False)
@example(links={"a": "a", "a/a": "a"}, asked="a", make=True)
def test_resolved_path_is_inside_and_not_a_link(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str], asked: str, make: bool
) -> None:
    root = tmp_path_factory.mktemp("resolve") / "root"
    root.mkdir()
    for place, target in links.items():
        path = root / os.path.normpath(f"/{place}").lstrip("/")
        if path != root and not os.path.lexists(path) and os.path.realpath(path.parent) == str(path.parent):
            with contextlib.suppress(OSError):  # nothing can be created below a link to itself
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
    try:
        found = resolve(root, asked, make=make)
    except OSError as error:
        assert "links" in str(error)  # noqa: PT017
        found = None
    if found is not None:
        assert found.is_dir()
        assert os.path.realpath(found) == str(found)
        assert found == root or root in found.parents
    assert os.listdir(root.parent) == ["root"]
    if found is None and make:
        with pytest.raises(OSError, match="links"):
            resolve(root, asked, make=True)
