"""Images that contain OpenClaw: inspected, prepared for sandboxes, started in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clawgym.agents.openclaw.image import (
    NOTE,
    Layout,
    add_to_docker_image,
    inspect_image,
    inspect_rootfs,
    make_rootfs,
    rootfs_of_environment,
)
from clawgym.errors import AgentError
from clawgym.sandbox import Backend, SandboxSpec
from clawgym.sandbox import backend as make_backend

from ...sandbox.conftest import docker_engine
from .images import Entry, docker_archive, entry, layer, oci_layout, openclaw_layer, small_system

__all__ = ["docker_engine"]

OFFICIAL = Layout("/usr/local/bin/node", "/app/openclaw.mjs", "1.2.3")


@pytest.fixture(scope="module")
def system() -> list[Entry]:
    return small_system()


@pytest.fixture(scope="module")
def rootfs(system: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared image."""
    folder = tmp_path_factory.mktemp("rootfs")
    image = oci_layout(folder / "image", [layer(system), layer(openclaw_layer())])
    assert make_rootfs(image, folder / "made") == OFFICIAL
    return folder / "made"


def bare_rootfs(folder: Path, entries: list[Entry]) -> Path:
    """A root file system of empty programs, for inspection only."""
    programs = [entry(f"usr/bin/{name}", mode=0o755) for name in ("sh", "bash", "python3", "tar")]
    oci_layout(folder / "image", [layer([*programs, entry("bin", link="usr/bin"), *entries])])
    return folder / "image"


def test_make_rootfs_from_official_layout(rootfs: Path) -> None:
    assert json.loads((rootfs / NOTE.lstrip("/")).read_text()) == {
        "node": "/usr/local/bin/node",
        "entry": "/app/openclaw.mjs",
        "version": "1.2.3",
    }
    assert os.readlink(rootfs / "usr/bin/python") == "python3"
    assert inspect_rootfs(rootfs) == OFFICIAL
    assert sorted(entry.name for entry in rootfs.parent.iterdir()) == ["image", "made"]


async def test_openclaw_of_rootfs_starts_in_sandbox(rootfs: Path, backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(image=str(rootfs)))
    try:
        found = inspect_image(str(rootfs))
        assert found == OFFICIAL
        done = await sandbox.exec([found.node, found.entry, "gateway"])
        assert done.output == b"started /app/openclaw.mjs gateway\n"
        assert (await sandbox.exec(["python", "-I", "-c", "print(6 * 7)"])).output == b"42\n"
    finally:
        await sandbox.close()


def test_rootfs_without_openclaw_is_refused(rootfs: Path, tmp_path: Path) -> None:
    shutil.copytree(rootfs, tmp_path / "root", symlinks=True)
    (tmp_path / "root" / NOTE.lstrip("/")).unlink()
    (tmp_path / "root/usr/local/bin/node").unlink()
    with pytest.raises(AgentError, match=r"has no node in any of .* start from an official release"):
        inspect_image(str(tmp_path / "root"))


def test_make_rootfs_copies_folder_and_keeps_source(rootfs: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(rootfs, source, symlinks=True)
    (source / NOTE.lstrip("/")).unlink()
    (source / "usr/bin/python").unlink()
    (source / "usr/bin/tar").chmod(0o4755)
    os.mkfifo(source / "tmp/fifo")
    assert make_rootfs(source, tmp_path / "made") == OFFICIAL
    assert not (source / NOTE.lstrip("/")).exists()
    assert (tmp_path / "made" / NOTE.lstrip("/")).exists()
    assert not (tmp_path / "made/tmp/fifo").exists()
    assert (tmp_path / "made/usr/bin/tar").stat().st_mode & 0o7777 == 0o755
    (tmp_path / "made/app/openclaw.mjs").write_text("changed")
    assert (source / "app/openclaw.mjs").read_text() == ""


def test_inspect_rootfs_uses_other_paths_and_note(tmp_path: Path) -> None:
    by_npm = {
        "usr/lib/node_modules/openclaw/package.json": '{"name": "openclaw", "version": "2.0.0"}',
        "usr/lib/node_modules/openclaw/openclaw.mjs": "",
        "usr/bin/node": "",
    }
    entries = [entry(name, text) for name, text in by_npm.items()]
    found = make_rootfs(bare_rootfs(tmp_path / "1", entries), tmp_path / "one")
    assert found == Layout("/usr/bin/node", "/usr/lib/node_modules/openclaw/openclaw.mjs", "2.0.0")
    only_dist = [*openclaw_layer(changes={"app/openclaw.mjs": "-"})]
    assert make_rootfs(bare_rootfs(tmp_path / "2", only_dist), tmp_path / "two").entry == "/app/dist/index.js"
    note = '{"node": "/n", "entry": "/e", "version": "3"}'
    noted = [entry(NOTE.lstrip("/"), note)]
    assert make_rootfs(bare_rootfs(tmp_path / "3", noted), tmp_path / "three") == Layout("/n", "/e", "3")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "has no node in any of"),
        ([entry("usr/bin/node")], "has no OpenClaw in any of /app/openclaw.mjs"),
        ([entry("usr/bin/node"), entry("app/openclaw.mjs")], "has no OpenClaw"),
        (openclaw_layer(changes={"app/package.json": '{"name": "other", "version": "1"}'}), "has no OpenClaw"),
        (openclaw_layer(changes={"app/package.json": "no json"}), "malformed"),
        ([entry(NOTE.lstrip("/"), "[]")], "malformed"),
        ([*openclaw_layer(), entry("usr/bin/.wh.python3")], "lacks python3, .*apt-get install -y python3"),
    ],
)
def test_incomplete_image_is_refused_and_nothing_remains(tmp_path: Path, entries: list[Entry], says: str) -> None:
    image = bare_rootfs(tmp_path / "image", [e for e in entries if ".wh." not in e[0].name])
    if any(".wh." in e[0].name for e in entries):
        shutil.rmtree(tmp_path / "image")
        programs = [entry(f"usr/bin/{name}") for name in ("sh", "bash", "tar")]
        image = oci_layout(tmp_path / "image", [layer([*programs, entry("bin", link="usr/bin"), *entries])])
    with pytest.raises(AgentError, match=says):
        make_rootfs(image, tmp_path / "made")
    assert os.listdir(tmp_path) == ["image"]


def test_image_links_do_not_lead_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "clawgym-openclaw.json").write_text('{"node": "/x", "entry": "/x", "version": "stolen"}')
    image = bare_rootfs(tmp_path / "image", [*openclaw_layer(), entry("etc", link=str(outside))])
    assert make_rootfs(image, tmp_path / "made").version == "1.2.3"
    assert sorted(os.listdir(outside)) == ["clawgym-openclaw.json"]
    assert "stolen" in (outside / "clawgym-openclaw.json").read_text()


def test_make_rootfs_does_not_overwrite(rootfs: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with pytest.raises(AgentError, match="exists already"):
        make_rootfs(rootfs, tmp_path / "made")
    with pytest.raises(AgentError, match="no such file or folder"):
        make_rootfs(tmp_path / "gone", tmp_path / "new")
    with pytest.raises(AgentError, match=r"neither an OCI layout .* nor a root file system"):
        make_rootfs(tmp_path, tmp_path / "new")


def test_openclaw_rootfs_environment_variable(rootfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENCLAW_ROOTFS", raising=False)
    assert rootfs_of_environment() is None
    monkeypatch.setenv("OPENCLAW_ROOTFS", str(rootfs))
    assert rootfs_of_environment() == str(rootfs)
    monkeypatch.setenv("OPENCLAW_ROOTFS", "relative")
    with pytest.raises(AgentError, match="OPENCLAW_ROOTFS=relative: not the absolute path"):
        rootfs_of_environment()


@pytest.mark.docker
async def test_add_to_docker_image(docker_engine: str, system: list[Entry], tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(layer([*system, *openclaw_layer()]))
    docker = ["docker", "-H", docker_engine]
    changes = ["--change", 'CMD ["node", "openclaw.mjs"]', "--change", "USER 1000", "--change", "ENV A=b"]
    subprocess.run([*docker, "import", *changes, tmp_path / "image.tar", "clawgym-test/release:1"], check=True)
    made = make_backend("docker")
    try:
        assert add_to_docker_image("clawgym-test/release:1", "clawgym-test/fit:1") == OFFICIAL
        ask = [*docker, "image", "inspect", "clawgym-test/fit:1"]
        about = json.loads(subprocess.run(ask, capture_output=True, check=True).stdout)[0]["Config"]
        assert (about["Cmd"], about["User"]) == (["node", "openclaw.mjs"], "1000")
        assert not about.get("Entrypoint")
        assert "A=b" in about["Env"]
        left = subprocess.run([*docker, "ps", "-aq"], capture_output=True, check=True).stdout
        assert left == b""
        sandbox = await made.create(SandboxSpec(image="clawgym-test/fit:1"))
        assert inspect_image("clawgym-test/fit:1") == OFFICIAL
        assert OFFICIAL.version in (await sandbox.exec(["cat", NOTE])).text
        assert (await sandbox.exec(["python", "-I", "-c", "print(6 * 7)"])).output == b"42\n"
        await sandbox.close()
        saved = tmp_path / "saved.tar"
        subprocess.run([*docker, "save", "-o", saved, "clawgym-test/fit:1"], check=True)
        assert make_rootfs(saved, tmp_path / "rootfs") == OFFICIAL
        with pytest.raises(AgentError, match="docker pull clawgym-test/none"):
            add_to_docker_image("clawgym-test/none", "clawgym-test/fit:2")
        with pytest.raises(AgentError, match="docker pull clawgym-test/none"):
            inspect_image("clawgym-test/none")
    finally:
        await made.aclose()
        subprocess.run([*docker, "rmi", "-f", "clawgym-test/fit:1", "clawgym-test/release:1"], capture_output=True)


def test_archives_of_older_docker_engines(system: list[Entry], tmp_path: Path) -> None:
    archive = docker_archive(tmp_path / "saved.tar", [layer(system), layer(openclaw_layer())])
    assert make_rootfs(archive, tmp_path / "made") == OFFICIAL
