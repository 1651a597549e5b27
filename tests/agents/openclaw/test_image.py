"""Images that contain OpenClaw: inspected, prepared for sandboxes, started in them."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from clawgym.agents.openclaw.image import (
    NOTE,
    Layout,
    add_image,
    add_to_docker_image,
    inspect_image,
    inspect_rootfs,
    rootfs_of_environment,
)
from clawgym.errors import AgentError, SandboxError
from clawgym.sandbox import SandboxSpec
from clawgym.sandbox import backend as make_backend
from clawgym.sandbox.images import ImageStore

from ...sandbox.conftest import docker_engine
from ...sandbox.images.make import Entry, docker_archive, layer, oci_archive, oci_folder
from .images import bare_programs, openclaw_layer, small_system

__all__ = ["docker_engine"]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the images made here name one architecture")

OFFICIAL = Layout("/usr/local/bin/node", "/app/openclaw.mjs", "1.2.3")


@pytest.fixture(scope="module")
def system() -> list[Entry]:
    return small_system()


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ImageStore()


@pytest.fixture(scope="module")
def rootfs(system: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked root file system with OpenClaw."""
    folder = tmp_path_factory.mktemp("rootfs")
    with tarfile.open(fileobj=io.BytesIO(layer(*system, *openclaw_layer()))) as tar:
        tar.extractall(folder, filter="tar")
    return folder


def bare_image(folder: Path, entries: list[Entry]) -> str:
    """An image of empty programs, for inspection only."""
    return str(oci_folder(folder, [layer(*bare_programs(), *entries)]))


@pytest.mark.parametrize("kind", ["folder", "archive", "docker"])
async def test_an_image_is_prepared_and_starts(
    kind: str, system: list[Entry], tmp_path: Path, store: ImageStore
) -> None:
    layers = [layer(*system), layer(*openclaw_layer())]
    config = {"User": "node", "Env": ["GREETING=hello"]}  # as the official one, which names a user
    source = {
        "folder": lambda: oci_folder(tmp_path / "oci", layers, config),
        "archive": lambda: oci_archive(tmp_path / "image.tar", layers, config),
        "docker": lambda: docker_archive(tmp_path / "saved.tar", layers, config),
    }[kind]()
    assert add_image(str(source), "own/openclaw:1") == OFFICIAL
    assert list(store.names()) == ["own/openclaw:1"]
    assert inspect_image("own/openclaw:1") == OFFICIAL
    made = make_backend("namespace")
    sandbox = await made.create(SandboxSpec(image="own/openclaw:1"))
    try:
        assert json.loads((await sandbox.exec(["cat", NOTE])).output) == {
            "node": "/usr/local/bin/node",
            "entry": "/app/openclaw.mjs",
            "version": "1.2.3",
        }
        done = await sandbox.exec([OFFICIAL.node, OFFICIAL.entry, "gateway"])
        assert done.output == b"started /app/openclaw.mjs gateway\n"
        assert (
            await sandbox.exec(["python", "-I", "-c", "import os; print(os.environ['GREETING'])"])
        ).text == "hello\n"
    finally:
        await sandbox.close()
        await made.aclose()


def test_the_same_command_again_changes_nothing(tmp_path: Path, store: ImageStore) -> None:
    image = bare_image(tmp_path / "image", openclaw_layer())
    add_image(image, "one")
    first = store.names()
    add_image(image, "one")
    assert store.names() == first
    add_image(image, "two")
    assert store.names()["two"].layers == first["one"].layers


def test_a_python_of_the_image_stays(tmp_path: Path, store: ImageStore) -> None:
    add_image(bare_image(tmp_path / "1", [*openclaw_layer(), ("usr/local/bin/python", b"")]), "with")
    add_image(bare_image(tmp_path / "2", [*openclaw_layer(), ("usr/bin/python", "->nowhere")]), "broken")
    own = {name: image.layers[-1] / "usr/bin/python" for name, image in store.names().items()}
    assert not os.path.lexists(own["with"])
    assert os.readlink(own["broken"]) == "python3"


def test_a_root_file_system_is_used_as_it_is(rootfs: Path, tmp_path: Path, store: ImageStore) -> None:
    assert inspect_rootfs(rootfs) == inspect_image(str(rootfs)) == OFFICIAL
    with pytest.raises(AgentError, match=f"needs no preparation: use it with --agent-option image={rootfs}"):
        add_image(str(rootfs), "made")
    assert not store.names()


async def test_openclaw_of_a_root_file_system_starts(rootfs: Path) -> None:
    made = make_backend("namespace")
    sandbox = await made.create(SandboxSpec(image=str(rootfs)))
    try:
        done = await sandbox.exec([OFFICIAL.node, OFFICIAL.entry, "gateway"])
        assert done.output == b"started /app/openclaw.mjs gateway\n"
    finally:
        await sandbox.close()
        await made.aclose()


def test_rootfs_without_openclaw_is_refused(rootfs: Path, tmp_path: Path) -> None:
    shutil.copytree(rootfs, tmp_path / "root", symlinks=True)
    (tmp_path / "root/usr/local/bin/node").unlink()
    with pytest.raises(AgentError, match=r"has no node in any of .* start from an official release"):
        inspect_image(str(tmp_path / "root"))
    with pytest.raises(AgentError, match=r"cannot be read .* check the path"):
        inspect_image(str(tmp_path / "gone"))


def test_other_paths_and_the_note_are_found(tmp_path: Path) -> None:
    by_npm = {
        "usr/lib/node_modules/openclaw/package.json": b'{"name": "openclaw", "version": "2.0.0"}',
        "usr/lib/node_modules/openclaw/openclaw.mjs": b"",
        "usr/bin/node": b"",
    }
    found = add_image(bare_image(tmp_path / "1", [*by_npm.items()]), "one")
    assert found == Layout("/usr/bin/node", "/usr/lib/node_modules/openclaw/openclaw.mjs", "2.0.0")
    only_dist = openclaw_layer(changes={"app/openclaw.mjs": "-"})
    assert add_image(bare_image(tmp_path / "2", only_dist), "two").entry == "/app/dist/index.js"
    note = b'{"node": "/n", "entry": "/e", "version": "3"}'
    assert add_image(bare_image(tmp_path / "3", [(NOTE.lstrip("/"), note)]), "three") == Layout("/n", "/e", "3")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "has no node in any of"),
        ([("usr/bin/node", b"")], "has no OpenClaw in any of /app/openclaw.mjs"),
        ([("usr/bin/node", b""), ("app/openclaw.mjs", b"")], "has no OpenClaw"),
        (openclaw_layer(changes={"app/package.json": '{"name": "other", "version": "1"}'}), "has no OpenClaw"),
        (openclaw_layer(changes={"app/package.json": "no json"}), "malformed"),
        ([(NOTE.lstrip("/"), b"[]")], "malformed"),
        ([*openclaw_layer(), ("usr/bin/python3", "->usr/bin/nowhere")], "lacks python3, .*apt-get install -y python3"),
    ],
)
def test_incomplete_image_is_refused_and_has_no_name(
    tmp_path: Path, store: ImageStore, entries: list[Entry], says: str
) -> None:
    with pytest.raises(AgentError, match=says):
        add_image(bare_image(tmp_path / "image", entries), "made")
    assert not store.names()


def test_image_links_do_not_lead_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "clawgym-openclaw.json").write_text('{"node": "/x", "entry": "/x", "version": "stolen"}')
    image = bare_image(tmp_path / "image", [*openclaw_layer(), ("etc", f"->{outside}")])
    assert add_image(image, "made").version == "1.2.3"
    assert sorted(os.listdir(outside)) == ["clawgym-openclaw.json"]
    assert "stolen" in (outside / "clawgym-openclaw.json").read_text()


def test_what_is_no_image_is_refused(tmp_path: Path, store: ImageStore) -> None:
    with pytest.raises(SandboxError, match="no such file or folder"):
        add_image(str(tmp_path / "gone"), "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SandboxError, match=r"has neither index\.json nor manifest\.json"):
        add_image(str(tmp_path / "empty"), "new")
    assert not store.names()


def test_an_index_that_names_itself_ends(tmp_path: Path) -> None:
    """Its digest is not that of its content; it was followed for ever."""
    name = "sha256:" + "0" * 64
    (tmp_path / "image/blobs/sha256").mkdir(parents=True)
    for path in ("index.json", f"blobs/sha256/{'0' * 64}"):
        (tmp_path / "image" / path).write_text(json.dumps({"manifests": [{"digest": name}]}))
    with pytest.raises(SandboxError, match="has another digest"):
        add_image(str(tmp_path / "image"), "new")


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
    (tmp_path / "image.tar").write_bytes(layer(*system, *openclaw_layer()))
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
        assert add_image(str(saved), "saved") == OFFICIAL
        with pytest.raises(AgentError, match="docker pull clawgym-test/none"):
            add_to_docker_image("clawgym-test/none", "clawgym-test/fit:2")
        with pytest.raises(AgentError, match="docker pull clawgym-test/none"):
            inspect_image("clawgym-test/none")
    finally:
        await made.aclose()
        subprocess.run([*docker, "rmi", "-f", "clawgym-test/fit:1", "clawgym-test/release:1"], capture_output=True)
