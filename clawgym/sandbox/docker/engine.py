"""A Docker engine, by blocking calls of the official SDK (``backend.py`` runs them in threads).

:meth:`DockerEngine.config` decides what a container may do.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from clawgym.errors import InfraError, MissingDependency, SandboxDied, SandboxError, SandboxUnavailable, TreeTooLarge
from clawgym.records import packages_of
from clawgym.sandbox import leases
from clawgym.sandbox.linux import procfs, rootfs, seccomp
from clawgym.sandbox.protocol import SandboxSpec
from clawgym.tars import open_tar

if TYPE_CHECKING:
    from docker import APIClient

__all__ = ["DockerEngine", "DockerImage"]

_MiB = 2**20
_REPOSITORY = "clawgym/default"
_EVERYWHERE = ("/home", "/logs", "/root", "/run", "/tmp", "/var/tmp")
_DEFAULT_TOO = ("/mnt", "/opt", "/srv")
LEASE_LABEL = "clawgym.lease"
_ELSEWHERE = "use an engine that runs beside this process, or another backend"
NOT_SHARED = "mounts[{!r}]: the Docker engine does not see this machine's {}: " + _ELSEWHERE


@dataclass(frozen=True)
class DockerImage:
    """A local image, and what is needed to run a sandbox from it."""

    id: str
    default: bool
    env: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    over_usr: Mapping[str, str] = field(default_factory=dict)
    """For the default image: folder of ``/usr``, relative to it -> the host's folder that sandboxes see in its
    place."""

    def writable(self, workdir: str, readonly: Iterable[str]) -> list[str]:
        """The folders that are tmpfs in a sandbox, outermost first; everything else is read-only."""
        found = {*_EVERYWHERE, *self.volumes, *(_DEFAULT_TOO if self.default else ())}
        # The engine makes the folders above a mount as root: below one, the workdir is a mount of its own.
        if not any(_below(workdir, f) for f in found) or any(_below(f, workdir) and f != workdir for f in readonly):
            found.add(workdir)
        return sorted(found)


def _masked() -> list[str]:
    """Paths to hide: all of /sys, and all of /proc that is not listed as shown."""
    found = ["/sys"]
    for folder, known, shown in (
        ("/proc", procfs.KNOWN, procfs.SHOWN),
        ("/proc/sys", procfs.KNOWN_SETTINGS, procfs.SETTINGS),
    ):
        here = {name for name in os.listdir(folder) if not name.isdigit()} if os.path.isdir(folder) else set()
        found += sorted(f"{folder}/{name}" for name in (known | here) - shown)
    return found


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


class DockerEngine:
    """One Docker engine. Raises :class:`SandboxUnavailable`, with what to do, if none answers."""

    def __init__(self, default_image: str | None) -> None:
        try:
            import docker
            import docker.errors
            from docker.utils import kwargs_from_env
        except ImportError:
            raise MissingDependency("the Docker backend needs the Docker SDK: pip install 'clawgym[docker]'") from None
        settings = kwargs_from_env()
        self.address: str = settings.get("base_url") or "unix:///var/run/docker.sock"
        if settings.get("tls") or self.address.startswith(("ssh:", "npipe:")):
            raise SandboxUnavailable(
                f"DOCKER_HOST={self.address}: only unix sockets and plain tcp are supported: "
                "forward the socket (ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST) "
                "and set DOCKER_HOST=unix:///tmp/docker.sock"
            )
        self.errors = docker.errors
        try:
            self.api: APIClient = docker.APIClient(base_url=self.address, version="auto", timeout=120)
            self.info: dict[str, Any] = self.api.info()
        except docker.errors.DockerException as error:
            if "Permission denied" in str(error):
                mend = "join its group (sudo usermod -aG docker $USER) and log in again"
            else:
                mend = "start it (sudo systemctl start docker, or sudo dockerd), or set DOCKER_HOST"
            raise SandboxUnavailable(f"no Docker engine answers at {self.address} ({error}): {mend}") from None
        self._default_image = default_image
        self._images: dict[str, DockerImage] = {}
        options = " ".join(self.info.get("SecurityOptions") or ())
        self.remapped = "name=userns" in options or "name=rootless" in options
        self._seccomp = seccomp.docker_profile()

    @property
    def socket_path(self) -> str | None:
        """Path of the engine's unix socket; None if it is reached over TCP."""
        path = self.address.removeprefix("http+").removeprefix("unix:")
        return "/" + path.lstrip("/") if self.address.startswith(("unix:", "http+unix:", "/")) else None

    # -- images

    def image(self, name: str) -> DockerImage:
        """Find a local image. The default image is made once for each engine and content.

        Raises :class:`SandboxError` for an unknown image, :class:`SandboxUnavailable` if the default cannot be made.
        """
        if name not in self._images:
            packages = packages_of(name)
            if packages is not None and self._default_image is None:
                self._images[name] = self._import_default(packages)
            else:
                self._images[name] = self._find(name if packages is None else self._default_image)
        return self._images[name]

    def _find(self, name: str | None) -> DockerImage:
        assert name is not None
        try:
            found = self.api.inspect_image(name)
        except self.errors.ImageNotFound:
            raise SandboxError(f"image {name!r} is not on this Docker engine: docker pull {name}") from None
        config = found.get("Config") or {}
        env = tuple(config.get("Env") or ())
        return DockerImage(found["Id"], False, env, tuple(sorted(v.rstrip("/") for v in config.get("Volumes") or ())))

    def _import_default(self, packages: tuple[str, ...]) -> DockerImage:
        if sys.platform != "linux" or self.socket_path is None:
            raise SandboxUnavailable(
                "the default image shares this machine's /usr, so it needs Linux and a Docker engine on this machine: "
                "name another for it (docker pull python:3.12; export CLAWGYM_DOCKER_IMAGE=python:3.12)"
            )
        state = leases.state_dir()
        try:
            state.mkdir(parents=True, exist_ok=True)
            root = rootfs.prepare(state, packages)
        except OSError as error:
            raise SandboxUnavailable(
                f"the default image cannot be made from this machine ({error}): name another for it "
                "(docker pull python:3.12; export CLAWGYM_DOCKER_IMAGE=python:3.12)"
            ) from error
        tag = root.fingerprint[:32]
        # A folder that does not exist cannot be mounted on; ``src`` is an empty one.
        over_usr = {
            folder: str(root.shown / (folder if (root.shown / folder).is_dir() else "src"))
            for folder in root.hidden
            if os.path.isdir(f"/usr/{folder}")
        }
        try:
            return DockerImage(self.api.inspect_image(f"{_REPOSITORY}:{tag}")["Id"], True, over_usr=over_usr)
        except self.errors.ImageNotFound:
            pass

        def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = "root"
            return entry

        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(root.base[0], arcname=".", filter=owned_by_root)
        answer = self.api.import_image_from_data(buffer.getvalue(), repository=_REPOSITORY, tag=tag)
        if "error" in answer:
            raise SandboxUnavailable(
                f"the Docker engine refused the default image ({answer.strip()[-300:]}): see its log"
            )
        return DockerImage(self.api.inspect_image(f"{_REPOSITORY}:{tag}")["Id"], True, over_usr=over_usr)

    # -- containers

    def config(
        self,
        spec: SandboxSpec,
        image: DockerImage,
        argv: list[str],
        user: int,
        writable: list[str],
        readonly_bytes: int,
        labels: dict[str, str],
        join: str | None,
        folders: Mapping[str, str],
    ) -> dict[str, Any]:
        """The container's configuration: no capability, no network, no new privileges, nothing shared."""
        limits = spec.limits
        inodes = max(20_000, limits.disk_mb * 100)
        tmpfs = "rw,exec,nosuid,nodev,mode=755"
        mounts = dict.fromkeys(writable, f"{tmpfs},size={limits.disk_mb}m,nr_inodes={inodes},uid={user},gid={user}")
        for folder in spec.readonly:  # owned by root and filled at the start
            mounts[folder] = f"{tmpfs},size={readonly_bytes},uid=0,gid=0"
        if spec.pristine_tools and not image.default:
            mounts["/.pristine"] = f"{tmpfs},size=64k,uid=0,gid=0"
        # Files of the sandbox are memory: a full disk must not end the sandbox for lack of memory.
        memory = (limits.memory_mb + limits.disk_mb) * _MiB
        env = dict(rootfs.ENV)
        if not image.default:
            env.update((name, value) for name, _, value in (entry.partition("=") for entry in image.env))
        env.update(spec.env)
        host: dict[str, Any] = {
            "AutoRemove": True,
            "Binds": None,
            "Mounts": _binds(spec, image, folders),
            "Tmpfs": mounts,
            "ReadonlyRootfs": True,
            "NetworkMode": f"container:{join}" if join else "none",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true", f"seccomp={self._seccomp}"],
            "MaskedPaths": _masked(),
            "ReadonlyPaths": ["/proc/sys"],
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "ShmSize": 64 * _MiB,
            "LogConfig": {"Type": "none", "Config": {}},
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        }
        if self.info.get("MemoryLimit"):
            host.update(Memory=memory, MemorySwap=memory if self.info.get("SwapLimit") else 0)
        if self.info.get("PidsLimit", True):
            # RLIMIT_NPROC stops the sandbox's own uid earlier: this leaves room for ``docker exec`` in a full sandbox.
            host["PidsLimit"] = limits.pids + 16
        if self.info.get("CPUCfsQuota", self.info.get("CpuCfsQuota")):
            host["NanoCpus"] = int(min(limits.cpus, self.info.get("NCPU") or limits.cpus) * 1e9)
        return {
            "Image": image.id,
            "Entrypoint": argv,
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in env.items()],
            "User": f"{user}:{user}",
            "WorkingDir": "/",
            "Labels": labels,
            "Hostname": "" if join else "box",
            "OpenStdin": True,
            "StdinOnce": True,  # the end of the attached stream ends process 1
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "StopSignal": "SIGKILL",
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }

    def hijack(self, path: str, body: Mapping[str, Any] | None = None) -> socket.socket:
        """Open a two-way stream. The SDK's own method loses data that arrives together with the response header."""
        data = json.dumps(body or {}).encode()
        head = (
            f"POST /v{self.api.api_version}{path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        )
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        if self.socket_path is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: Any = self.socket_path
        else:
            sock = socket.socket()
            host, _, port = self.address.rpartition("/")[2].partition(":")
            where = (host, int(port or 2375))
        try:
            sock.settimeout(120)
            sock.connect(where)
            sock.sendall(head.encode() + data)
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                byte = sock.recv(1)
                if not byte or len(answer) > 16384:
                    raise InfraError("the Docker engine closed a stream: see its log")
                answer += byte
            if answer.split(b" ", 2)[1] not in (b"101", b"200"):
                text = sock.recv(4096).decode(errors="replace")
                raise InfraError(f"the Docker engine refused a stream ({text.strip()}): see its log")
        except BaseException:
            sock.close()
            raise
        return sock

    def launch(self, config: Mapping[str, Any], name: str) -> tuple[str, socket.socket, int]:
        """Create, attach, start. Returns the container's id, its stream, and the pid of process 1 on the engine's
        host."""
        try:
            container: str = self.api.create_container_from_config(config, name)["Id"]
        except self.errors.APIError as error:
            raise _refused(error) from error
        stream = None
        try:
            stream = self.hijack(f"/containers/{container}/attach?stdin=1&stdout=1&stderr=1&stream=1")
            self.api.start(container)
            pid = self.api.inspect_container(container)["State"]["Pid"]
        except BaseException as error:
            if stream is not None:
                stream.close()
            self.remove(container)
            if isinstance(error, self.errors.NotFound):
                raise SandboxDied("the sandbox ended while it started: create another one", cause="died") from error
            if isinstance(error, self.errors.APIError):
                raise _refused(error) from error
            raise
        return container, stream, pid

    def remove(self, container: str) -> None:
        """Kill and remove a container, and wait until it is gone. Idempotent."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self.api.remove_container(container, force=True, v=True)
                return
            except self.errors.NotFound:
                return
            except self.errors.APIError as error:
                if error.status_code not in (409, 500):  # it is being removed, or about to start
                    raise
            time.sleep(0.02)
        raise InfraError("a container could not be removed: see the Docker engine's log")

    def run_inside(
        self, container: str, argv: list[str], user: str, stdin: bytes, max_bytes: int, seconds: float
    ) -> tuple[int, bytes, str]:
        """``docker exec``, for what the sandbox's process 1 cannot be trusted with.

        Returns:
            The exit code, stdout, and the end of stderr.

        Raises:
            TreeTooLarge: over ``max_bytes``.
            SandboxError: over ``seconds``.
            SandboxDied: the container ended.
        """
        try:
            ticket = self.api.exec_create(container, argv, stdin=bool(stdin), user=user)["Id"]
        except self.errors.APIError as error:
            raise SandboxDied(f"the sandbox is gone ({error.explanation}): create another one", cause="died") from error
        sock = self.hijack(f"/exec/{ticket}/start", {"Detach": False, "Tty": False})
        deadline = time.monotonic() + seconds
        streams = Frames()
        taken: list[bytes] = []
        total = 0
        try:
            sock.settimeout(seconds)
            if stdin:
                sock.sendall(stdin)
                sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(1 << 18):
                for chunk in streams.feed(data):
                    total += len(chunk)
                    taken.append(chunk)
                if total > max_bytes:
                    raise TreeTooLarge(f"larger than {max_bytes} bytes: take a smaller part")
                if time.monotonic() > deadline:
                    raise TimeoutError
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer within {seconds:.0f} s: try again, or close it") from None
        finally:
            sock.close()
        code = self.api.exec_inspect(ticket)["ExitCode"]
        return (code if isinstance(code, int) else 1), b"".join(taken), streams.errors.decode(errors="replace")[-300:]

    def cause_of_death(self, container: str) -> str:
        """``oom`` or ``died``, by the engine's latest events (it remembers 256).

        Raises :class:`InfraError` if it was not the sandbox that ended: the engine was stopped, or was replaced since.
        """
        # Times are by the engine's clock, which may differ from this machine's.
        until = int(datetime.fromisoformat(self.api.info()["SystemTime"]).timestamp()) + 2
        events = self.api.events(since=1, until=until, filters={"container": container}, decode=True)
        seen = {str(e.get("Action", e.get("status"))) for e in events}
        if "oom" in seen:
            return "oom"
        if "kill" not in seen and "die" in seen:
            return "died"
        try:
            if "kill" not in seen and self.api.inspect_container(container)["State"]["Running"]:
                return "died"
        except self.errors.NotFound:
            pass
        raise InfraError("the Docker engine was stopped or started again under a sandbox: see that it stays up")

    def content(self, image: DockerImage, paths: list[str], labels: dict[str, str]) -> bytes | None:
        """A tar of what the image has below ``paths``, with names relative to ``/``; None if nothing."""
        body = {"Image": image.id, "Entrypoint": ["none"], "Cmd": [], "Labels": labels}
        body["HostConfig"] = {"NetworkMode": "none"}
        container = self.api.create_container_from_config(body)["Id"]
        buffer, count = io.BytesIO(), 0
        try:
            with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
                for path in paths:
                    try:
                        chunks, _ = self.api.get_archive(container, path)
                    except self.errors.NotFound:
                        continue
                    parent = os.path.dirname(path).strip("/")
                    with open_tar(b"".join(chunks)) as tar:
                        for member in tar:
                            held = tar.extractfile(member) if member.isreg() else None
                            member.name = os.path.join(parent, member.name)
                            if member.islnk():
                                member.linkname = os.path.join(parent, member.linkname)
                            count += member.name != path.strip("/")
                            out.addfile(member, held)
        finally:
            self.remove(container)
        return buffer.getvalue() if count else None


def _binds(spec: SandboxSpec, image: DockerImage, folders: Mapping[str, str]) -> list[dict[str, Any]]:
    """The read-only bind mounts of a container: this machine's ``/usr`` for the default image, and ``folders``."""
    # The engine has no nosuid and nodev for binds; no-new-privileges and the devices cgroup replace them.
    shared = dict(folders)
    if image.default:
        for usr in ["/usr", *(["/.pristine/usr"] if spec.pristine_tools else [])]:
            shared[usr] = "/usr"
            shared |= {f"{usr}/{folder}": source for folder, source in image.over_usr.items()}
    return [
        {
            "Type": "bind",
            "Source": source,
            "Target": target,
            "ReadOnly": True,
            "BindOptions": {"NonRecursive": True},
        }
        for target, source in shared.items()
    ]


class Frames:
    """Removes the engine's framing from an attached stream: 8 bytes (kind, length), then the data."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._kind = self._left = 0
        self.errors = bytearray()
        """The first 4096 bytes of stderr."""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The pieces of stdout in ``data``."""
        self._buffer += data
        while self._buffer:
            if not self._left:
                if len(self._buffer) < 8:
                    return
                self._kind, self._left = self._buffer[0], int.from_bytes(self._buffer[4:8], "big")
                del self._buffer[:8]
            chunk = bytes(self._buffer[: self._left])
            del self._buffer[: len(chunk)]
            self._left -= len(chunk)
            if self._kind == 1 and chunk:
                yield chunk
            elif self._kind == 2:
                self.errors += chunk[: 4096 - len(self.errors)]


def _refused(error: Any) -> Exception:
    """Translate an engine's refusal to start a container."""
    text = str(error.explanation or error)[-500:]
    if "executable file not found" in text or ("no such file or directory" in text and "exec" in text):
        return SandboxError(f"the image has no python3 ({text}): choose one with python3, bash and tar in it")
    if "bind source path does not exist" in text:
        return SandboxError(f"the Docker engine does not see this machine's folders ({text}): {_ELSEWHERE}")
    if "cannot join network" in text or "No such container" in text:
        return SandboxError(f"the sandbox whose network was to be joined is gone ({text}): start it again")
    return InfraError(f"the Docker engine could not start a sandbox ({text}): see its log")
