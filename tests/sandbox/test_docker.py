"""The parts of the Docker backend that others do not have; see ``test_conformance_*.py`` for the rest."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from clawgym.errors import MissingDependency, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import Limits, TaskFile
from clawgym.sandbox import Sandbox, SandboxSpec, leases
from clawgym.sandbox.docker.backend import DockerBackend, DockerSandbox
from clawgym.sandbox.docker.engine import DockerImage, Frames
from clawgym.sandbox.docker.removal import remove_containers

IMAGE = "clawgym-test/minimal:1"


# -- no engine needed


async def test_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingDependency, match=r"pip install 'clawgym\[docker\]'"):
        await DockerBackend().probe()


async def test_missing_engine_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises(SandboxUnavailable, match=r"systemctl start docker.*DOCKER_HOST$"):
        await DockerBackend().create(SandboxSpec())


async def test_ssh_engines_are_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://somewhere")
    with pytest.raises(SandboxUnavailable, match="DOCKER_HOST=unix://"):
        await DockerBackend().probe()


@pytest.mark.parametrize(
    "body", [b'{"message": "no"}', b"[{}]", b"[1]", b"7", b"null", b"<html>", b"\xff", b""], ids=repr
)
def test_unexpected_answers_of_the_engine_do_not_stop_cleanup(body: bytes) -> None:
    folder = Path(tempfile.mkdtemp(prefix="clawgym-engine-"))  # a unix socket's path must be short
    asked: list[bytes] = []

    def engine(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(1 << 16).split(b" ")[0])
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s"))
        listener.listen()
        thread = threading.Thread(target=engine, args=(listener,), daemon=True)
        thread.start()
        remove_containers(str(folder / "s"), f"{leases.LABEL}=dead")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
    assert asked == [b"GET"], "and it is not asked again"
    shutil.rmtree(folder)
    remove_containers(str(folder / "s"), f"{leases.LABEL}=dead")


def test_frames_are_parsed_however_they_are_split() -> None:
    def frame(kind: int, data: bytes) -> bytes:
        return bytes([kind, 0, 0, 0]) + len(data).to_bytes(4, "big") + data

    stream = frame(1, b"one") + frame(2, b"error") + frame(1, b"") + frame(1, b"two" * 50) + frame(2, b"x" * 9000)
    for size in (1, 3, 7, 8, 9, 64, 10_000):
        frames = Frames()
        parts = [c for i in range(0, len(stream), size) for c in frames.feed(stream[i : i + size])]
        assert b"".join(parts) == b"one" + b"two" * 50
        assert frames.errors.startswith(b"errorx")
        assert len(frames.errors) == 4096


def test_writable_folders() -> None:
    image = DockerImage("x", True)
    assert "/app" in image.writable("/app", ())
    workspace = "/root/.openclaw/workspace"
    assert workspace not in image.writable(workspace, ("/verifier",))
    assert workspace in image.writable(workspace, (f"{workspace}/reward",))
    assert "/data" in DockerImage("x", False, volumes=("/data",)).writable("/root", ())
    assert "/opt" not in DockerImage("x", False).writable("/root", ())


# -- with an engine


@pytest_asyncio.fixture
async def backend(docker_engine: str) -> AsyncIterator[DockerBackend]:
    made = DockerBackend()
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
def minimal(docker_engine: str) -> Iterator[str]:
    """A real image of another kind: its own /usr, files in its folders, a volume."""
    docker = pytest.importorskip("docker")
    programs = [
        shutil.which(n) for n in ("python3", "bash", "sh", "tar", "cat", "ls", "mkdir", "id", "env", "sort", "rm")
    ]
    programs = [f"/usr/bin/{Path(p).name}" for p in programs if p and Path(f"/usr/bin/{Path(p).name}").exists()]
    needed = set(programs) | {str(Path(p).resolve()) for p in programs}
    stdlib = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", "import os; print(os.path.dirname(os.__file__))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    modules = [str(p) for p in Path(stdlib, "lib-dynload").glob("*.so")]
    for line in subprocess.run(["ldd", *programs, *modules], capture_output=True, text=True).stdout.splitlines():
        path = line.split("=>")[-1].split(" (")[0].strip()
        if path.startswith("/lib"):
            path = f"/usr{path}"
        if path.startswith("/usr") and not path.endswith(":"):
            needed |= {path, str(Path(path).resolve())}

    def without_clutter(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name.endswith(("__pycache__", "/test", "/idlelib", "/tkinter")) else entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(needed):
            tar.add(path, arcname=path.lstrip("/"))
        if Path("/usr/lib/locale/C.utf8").is_dir():
            tar.add("/usr/lib/locale/C.utf8", arcname="usr/lib/locale/C.utf8")
        tar.add(stdlib, arcname=stdlib.lstrip("/"), filter=without_clutter)
        for name, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, text in (
            ("app/main.py", b"print('app')\n"),
            ("root/.profile", b"profile\n"),
            ("data/seed.txt", b"seed\n"),
            ("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
    client = docker.APIClient(base_url=docker_engine, timeout=120)
    repository, tag = IMAGE.split(":")
    client.import_image_from_data(buffer.getvalue(), repository, tag, changes=["VOLUME /data", "ENV OWN=image"])
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    client.import_image_from_data(empty.getvalue(), repository, "empty")
    yield IMAGE
    for name in (IMAGE, f"{repository}:empty"):
        client.remove_image(name, force=True)
    client.close()


async def _sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.exec(["bash", "-c", script])
    assert done.exit_code == 0, done.text
    return done.text


@pytest.mark.docker
async def test_sandbox_is_hardened(backend: DockerBackend) -> None:
    one = await backend.create(SandboxSpec(limits=Limits(memory_mb=100, disk_mb=50, pids=40, cpus=0.5)))
    two = await backend.create(SandboxSpec())
    assert isinstance(one, DockerSandbox)
    assert isinstance(two, DockerSandbox)
    held = backend.engine.api.inspect_container(one.container)
    host, config = held["HostConfig"], held["Config"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["Privileged"] is False
    assert host["NetworkMode"] == "none"
    assert host["IpcMode"] == "private"
    assert host["PidMode"] == ""
    assert host["AutoRemove"] is True
    assert host["Memory"] == host["MemorySwap"] == 150 * 2**20
    assert (host["PidsLimit"], host["NanoCpus"]) == (56, 5 * 10**8)
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert any(o.startswith("seccomp=") for o in host["SecurityOpt"])
    assert host["LogConfig"]["Type"] == "none"
    mounts = {m["Target"]: m["Source"] for m in host["Mounts"]}
    assert all(m["ReadOnly"] for m in host["Mounts"])
    assert mounts.pop("/usr") == "/usr"
    assert "/usr/local" in mounts, "what the machine's users put there is not shown"
    roots = str(backend.supervised.state / "roots")
    assert all(t.startswith("/usr/") and s.startswith(roots) for t, s in mounts.items())
    assert {"/sys", "/proc/pressure", "/proc/cmdline"} <= set(host["MaskedPaths"])
    assert host["ReadonlyPaths"] == ["/proc/sys"]
    assert config["Labels"] == {leases.LABEL: backend.supervised.owner, "clawgym.lease": one.id}
    assert config["StdinOnce"] is True
    uids = {await _sh(sandbox, "id -u") for sandbox in (one, two)}
    assert len(uids) == 2
    assert all(0x60000000 <= int(u) < 0x70000000 for u in uids)
    assert "0" not in (await _sh(one, "id -G")).split()


@pytest.mark.docker
async def test_default_image_is_made_once(backend: DockerBackend) -> None:
    await (await backend.create(SandboxSpec())).close()
    images = backend.engine.api.images(name="clawgym/default")
    again = DockerBackend()
    await (await again.create(SandboxSpec())).close()
    assert [i["Id"] for i in again.engine.api.images(name="clawgym/default")] == [i["Id"] for i in images]
    await again.aclose()


@pytest.mark.docker
async def test_closed_sandboxes_leave_no_container(backend: DockerBackend) -> None:
    sandboxes = [await backend.create(SandboxSpec()) for _ in range(3)]
    await sandboxes[0].close()
    await sandboxes[1].stop()
    await backend.aclose()
    mine = {"label": f"{leases.LABEL}={backend.supervised.owner}"}
    assert backend.engine.api.containers(all=True, filters=mine) == []
    assert not backend.folder.exists()


@pytest.mark.docker
async def test_files_over_the_memory_limit_end_the_sandbox_with_its_cause(backend: DockerBackend) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(memory_mb=48, disk_mb=48)))

    async def fill() -> None:
        for _ in range(10):
            for folder in ("/root", "/tmp", "/home", "/var/tmp"):
                await sandbox.exec(["sh", "-c", f"head -c 45M /dev/zero > {folder}/f"])

    with pytest.raises(SandboxDied) as died:
        await fill()
    assert died.value.cause == "oom"


@pytest.mark.docker
async def test_unknown_image_error_names_docker_pull(backend: DockerBackend) -> None:
    with pytest.raises(SandboxError, match=r"docker pull no/such:image$"):
        await backend.create(SandboxSpec(image="no/such:image"))


@pytest.mark.docker
async def test_image_without_python_says_so(backend: DockerBackend, minimal: str) -> None:
    with pytest.raises(SandboxError, match="python3, bash and tar"):
        await backend.create(SandboxSpec(image="clawgym-test/minimal:empty"))
    assert not backend.sandboxes


@pytest.mark.docker
async def test_other_images_keep_their_files(backend: DockerBackend, minimal: str) -> None:
    spec = SandboxSpec(image=minimal, workdir="/app", readonly={"/app/reward": (TaskFile("check.py", b"1"),)})
    sandbox = await backend.create(spec)
    assert await _sh(sandbox, "cat /app/main.py /root/.profile /data/seed.txt; echo $OWN") == (
        "print('app')\nprofile\nseed\nimage\n"
    )
    await _sh(sandbox, "echo changed > /app/main.py; rm /data/seed.txt; echo new > /data/new; rm /root/.profile")
    assert (await sandbox.exec(["bash", "-c", "echo x > /app/reward/check.py"])).exit_code != 0
    snapshot = await sandbox.snapshot()
    fresh = await backend.create(spec)
    assert await fresh.get("/app/main.py") == b"print('app')\n"
    fork = await backend.fork(snapshot, SandboxSpec(image=minimal, workdir="/app", pristine_tools=True))
    assert await _sh(fork, "cat /app/main.py; ls /data /root; echo 1 | /.pristine/usr/bin/sort") == (
        "changed\n/data:\nnew\n\n/root:\n1\n"
    )
    assert (await fork.exec([*fork.tool("python3"), "-c", "print(1)"])).output == b"1\n"
    volumes = backend.engine.api.volumes()["Volumes"] or []
    assert [v for v in volumes if "clawgym" in str(v.get("Labels"))] == []


# argv: a folder. What lies in it is this process's own from then on: the engine sees another.
_APART = """
import asyncio, sys
from pathlib import Path
from clawgym.sandbox import SandboxSpec, backend
from clawgym.sandbox.linux import syscalls

async def main():
    sandboxes = backend("docker")
    try:
        await sandboxes.create(SandboxSpec(mounts={"/opt/tool": Path(sys.argv[1], "tool")}))
    finally:
        await sandboxes.aclose()

syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.make_mounts_private()
syscalls.mount("tmpfs", sys.argv[1], "tmpfs", 0)
Path(sys.argv[1], "tool").mkdir()
asyncio.run(main())
"""


@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
@pytest.mark.parametrize("there", ["nothing", "another"])
async def test_a_folder_that_the_engine_does_not_see(docker_engine: str, tmp_path: Path, there: str) -> None:
    if there == "another":
        (tmp_path / "tool").mkdir()
    argv = [sys.executable, "-c", _APART, str(tmp_path)]
    env = {**os.environ, "DOCKER_HOST": docker_engine}
    done = await asyncio.to_thread(subprocess.run, argv, env=env, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("clawgym.errors.SandboxError: "), done.stderr
    assert "Docker engine does not see this machine's" in last
    assert last.endswith("use an engine that runs beside this process, or another backend")


class _Forwarder(threading.Thread):
    """Makes an engine's unix socket a TCP port: an engine that is not on this machine, for all the backend knows."""

    def __init__(self, path: str) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]

    def run(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            upstream = socket.socket(socket.AF_UNIX)
            upstream.connect(self.path)
            for a, b in ((client, upstream), (upstream, client)):
                threading.Thread(target=self.pump, args=(a, b), daemon=True).start()

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.mark.docker
async def test_engine_over_tcp(docker_engine: str, minimal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarder = _Forwarder(docker_engine.removeprefix("unix://"))
    forwarder.start()
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{forwarder.port}")
    try:
        with pytest.raises(SandboxUnavailable, match="CLAWGYM_DOCKER_IMAGE"):
            await DockerBackend().create(SandboxSpec())
        far = DockerBackend(default_image=minimal)
        assert (await far.probe()).features["network"]
        sandbox = await far.create(SandboxSpec())
        await sandbox.put([TaskFile("a", b"x")], "/root/w")
        assert await _sh(sandbox, "cat /root/w/a") == "x"
        await sandbox.stop()
        assert await sandbox.get("/root/w/a") == b"x"
        await far.aclose()
    finally:
        forwarder.server.close()
