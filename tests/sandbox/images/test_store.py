"""Images are added, shared, run and removed."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from clawgym.errors import SandboxError
from clawgym.sandbox import Backend, SandboxSpec, backend
from clawgym.sandbox.images import ImageStore

from . import make

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the images made here name one architecture")

CONFIG = {"Env": ["PATH=/opt/bin:/usr/bin", "GREETING=hello world=1"], "WorkingDir": "/app", "Cmd": ["bash"]}
UPPER = make.layer(("opt/bin", None), ("opt/bin/greet", b"#!/bin/bash\necho $GREETING\n"), ("etc/old", b"new"))
TOP = make.layer(("etc/.wh.gone", b""), ("etc/box/.wh..wh..opq", b""), ("etc/box/new", b"1"))
BASE = make.layer(("etc/gone", b"x"), ("etc/box", None), ("etc/box/old", b"x"), ("etc/old", b"old"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ImageStore()


@pytest_asyncio.fixture
async def namespace() -> AsyncIterator[Backend]:
    made = backend("namespace")
    yield made
    await made.aclose()


async def output(of: Backend, image: str, command: str, *, pristine: bool = False) -> str:
    sandbox = await of.create(SandboxSpec(image=image, workdir="/app", pristine_tools=pristine))
    try:
        return (await (await sandbox.shell()).run(command)).text.strip()
    finally:
        await sandbox.close()


@pytest.mark.parametrize("kind", ["folder", "archive", "docker"])
async def test_an_image_runs(kind: str, tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    layers = [make.root(), BASE, UPPER, TOP]
    source = {
        "folder": lambda: make.oci_folder(tmp_path / "oci", layers, CONFIG),
        "archive": lambda: make.oci_archive(tmp_path / "image.tar", layers, CONFIG),
        "docker": lambda: make.docker_archive(tmp_path / "saved.tar", layers, CONFIG),
    }[kind]()
    image = store.add(str(source), "own/image:1")
    assert len(image.layers) == 4
    assert (image.workdir, image.command) == ("/app", ("bash",))
    assert await output(namespace, "own/image:1", "greet; cat /etc/old; echo; ls /etc/gone /etc/box 2>&1; pwd") == (
        "hello world=1\nnew\nls: cannot access '/etc/gone': No such file or directory\n/etc/box:\nnew\n/app"
    )
    assert await output(namespace, f"sha256:{image.digest}", "cat /etc/box/new") == "1"
    assert await output(namespace, "own/image:1", "ls /.pristine/usr/bin/bash", pristine=True)


async def test_sandboxes_do_not_change_an_image(tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    store.add(str(make.oci_archive(tmp_path / "i.tar", [make.root(), BASE])), "i")
    assert await output(namespace, "i", "echo bad > /etc/old; rm -r /etc/box; rm /usr/bin/ls; cat /etc/old") == "bad"
    assert await output(namespace, "i", "cat /etc/old; ls /etc/box") == "oldold"


async def test_a_fork_keeps_the_files(tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    store.add(str(make.oci_archive(tmp_path / "i.tar", [make.root(), BASE])), "i")
    sandbox = await namespace.create(SandboxSpec(image="i"))
    await sandbox.exec(["bash", "-c", "echo mine > /etc/old; rm /etc/gone"])
    snapshot = await sandbox.snapshot()
    await sandbox.close()
    fork = await namespace.fork(snapshot)
    found = await fork.exec(["bash", "-c", "cat /etc/old; ls /etc"])
    assert found.text.split() == ["mine", "box", "old"]
    await fork.close()


def test_a_root_file_system_is_an_image(tmp_path: Path, store: ImageStore) -> None:
    (tmp_path / "debian.tar").write_bytes(make.root())
    assert store.add(str(tmp_path / "debian.tar")).layers == store.names()["debian"].layers


def test_layers_are_shared_and_removed(tmp_path: Path, store: ImageStore) -> None:
    one = store.add(str(make.oci_archive(tmp_path / "1.tar", [make.root(), BASE])), "one")
    two = store.add(str(make.oci_folder(tmp_path / "2", [make.root(), UPPER])), "two")
    assert one.layers[0] == two.layers[0]
    store.remove("one")
    assert store.find("one") is None
    assert [layer.is_dir() for layer in (*one.layers, *two.layers)] == [True, False, True, True]
    store.remove("two")
    assert not any(layer.exists() for layer in two.layers)
    with pytest.raises(SandboxError, match="no image 'two' here"):
        store.remove("two")


def test_what_cannot_run_is_refused(tmp_path: Path, store: ImageStore) -> None:
    root = make.root()

    def refused(name: str, match: str, *layers: bytes, config: dict | None = None, **changed: object) -> None:
        with pytest.raises(SandboxError, match=match):
            store.add(str(make.oci_folder(tmp_path / name, layers, config, **changed)), name)
        assert store.find(name) is None

    refused("user", "runs as user 'app'", root, config={"User": "app:app"})
    refused("arm", "is for linux/s390x", root, architecture="s390x")
    refused("windows", "is for windows/amd64", root, os="windows")
    refused("shell", "has no bash", BASE)
    refused("digest", "has another digest", root, rootfs={"diff_ids": ["sha256:" + 64 * "0"]})
    refused("count", "1 layers and digests of 2", root, rootfs={"diff_ids": ["sha256:0", "sha256:1"]})
    with pytest.raises(SandboxError, match="no such file"):
        store.add(str(tmp_path / "nothing"))
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(SandboxError, match="is no image"):
        store.add(str(tmp_path / "text"))
    blob = next((make.oci_folder(tmp_path / "changed", [root]) / "blobs/sha256").iterdir())
    blob.write_bytes(b"{}")
    with pytest.raises(SandboxError, match="has another digest"):
        store.add(str(tmp_path / "changed"))
    assert not store.names()


async def test_unknown_image_says_what_to_do(store: ImageStore, namespace: Backend) -> None:
    with pytest.raises(SandboxError, match="clawgym images add SOURCE --name debian:12"):
        await namespace.create(SandboxSpec(image="debian:12"))


async def test_an_image_of_an_engine(docker_engine: str, tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    docker = pytest.importorskip("docker")
    client = docker.APIClient(base_url=docker_engine, timeout=120)
    try:
        client.import_image_from_data(make.root(), "clawgym-saved", "1", changes=["ENV OWN=engine", "WORKDIR /app"])
        with (tmp_path / "saved.tar").open("wb") as file:
            for part in client.get_image("clawgym-saved:1"):
                file.write(part)
        client.remove_image("clawgym-saved:1", force=True)
    finally:
        client.close()
    image = store.add(str(tmp_path / "saved.tar"), "saved")
    assert image.workdir == "/app"
    assert await output(namespace, "saved", "echo $OWN; ls /bin/bash") == "engine\n/bin/bash"
