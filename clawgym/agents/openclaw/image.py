"""Images and root file systems that hold an OpenClaw of their own, such as the official ones.

``spec.image`` may name one of them; :func:`inspect_image` says how to start OpenClaw in its boxes. What is added to an
image is small: a note of where things are, and the name ``python`` for its python3. Nothing of it is changed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clawgym.agents.openclaw import _tree
from clawgym.agents.openclaw._unpack import Tell, copy_rootfs, is_image, resolve, unpack
from clawgym.errors import AgentError, MissingDependency

__all__ = [
    "NOTE",
    "Layout",
    "add_to_docker_image",
    "inspect_image",
    "inspect_rootfs",
    "make_rootfs",
    "rootfs_of_environment",
]

NOTE = "/etc/clawgym-openclaw.json"
"""In an image: a :class:`Layout` as JSON."""

_NODES = ("/usr/local/bin/node", "/usr/bin/node", "/opt/openclaw/node/bin/node")
_ENTRIES = (  # the official image; what npm makes
    "/app/openclaw.mjs",
    "/app/dist/index.js",
    "/opt/openclaw/node_modules/openclaw/openclaw.mjs",
    "/usr/local/lib/node_modules/openclaw/openclaw.mjs",
    "/usr/lib/node_modules/openclaw/openclaw.mjs",
)
_NEEDED = ("sh", "bash", "python3", "tar")
_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an image has OpenClaw: ``node entry gateway ...`` starts it."""

    node: str
    entry: str
    version: str


def rootfs_of_environment() -> str | None:
    """``$OPENCLAW_ROOTFS``, an unpacked image, as a ``spec.image``; None if it is not set.

    Raises :class:`~clawgym.errors.AgentError` if it is set to something else.
    """
    value = os.environ.get("OPENCLAW_ROOTFS", "").strip()
    if not value:
        return None
    if not os.path.isabs(value) or not os.path.isdir(value):
        raise AgentError(f"OPENCLAW_ROOTFS={value}: not the absolute path of a folder: unset it, or mend it")
    inspect_rootfs(Path(value))
    return value


# -- looking


def _package_of(entry: str) -> str:
    folder = entry.rpartition("/")[0]
    return f"{folder.removesuffix('/dist')}/package.json"


def _layout(node: str, entry: str, note: bytes | None, package: bytes, where: object) -> Layout:
    """From what was found; raises AgentError."""
    try:
        if note is not None:
            known = json.loads(note)
            return Layout(str(known["node"]), str(known["entry"]), str(known["version"]))
        about = json.loads(package) if package else {}
        if node and entry and about.get("name") == "openclaw":
            return Layout(node, entry, str(about["version"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AgentError(f"{where}: what it says of OpenClaw cannot be read ({error!r}): mend the image") from error
    raise AgentError(
        f"{where} has no {'OpenClaw' if node else 'node'} in any of {', '.join(_ENTRIES if node else _NODES)}: "
        f"start from an official release, or write {NOTE} into it: "
        '{"node": "/usr/bin/node", "entry": "/path/openclaw.mjs", "version": "1.2.3"}'
    )


def inspect_rootfs(folder: Path) -> Layout:
    """Where an unpacked image has OpenClaw: from its note, else by looking.

    Raises :class:`~clawgym.errors.AgentError` if there is none, or if boxes lack something else in it.
    """
    return _inspect(folder, folder)


def _inspect(folder: Path, where: Path) -> Layout:
    def there(path: str) -> bool:
        try:
            found = resolve(folder, path)
        except OSError:
            return False
        return found is not None and found.is_file()

    def content(path: str) -> bytes | None:
        found = resolve(folder, path) if there(path) else None
        return found.read_bytes() if found else None

    _refuse_lack([name for name in _NEEDED if not any(there(f"{bin}/{name}") for bin in _FOLDERS)], where)
    node, entry = next(filter(there, _NODES), ""), next(filter(there, _ENTRIES), "")
    return _layout(node, entry, content(NOTE), (entry and content(_package_of(entry))) or b"", where)


def _refuse_lack(lack: list[str], where: object) -> None:
    if lack:
        names = " ".join(lack)
        raise AgentError(
            f"{where} lacks {', '.join(lack)}, which boxes need: build an image that has it "
            f"(FROM the release; USER root; RUN apt-get update && apt-get install -y {names}), and begin with that one"
        )


def _script() -> str:
    """Shell: lines that may be empty: what is lacking, node, entry, the note, python; and what the package says."""
    first = 'for p in {}; do if [ -f "$p" ]; then {}; break; fi; done'
    packages = " ".join(f"{shlex.quote(e)}:{shlex.quote(_package_of(e))}" for e in _ENTRIES)
    return "\n".join(
        (
            f"for n in {' '.join(_NEEDED)}; do command -v $n >/dev/null || printf '%s ' $n; done; echo",
            first.format(" ".join(_NODES), "printf %s $p") + "; echo",
            f"for x in {packages}; do if [ -f ${{x%%:*}} ]; then printf %s ${{x%%:*}}; "
            "package=${x#*:}; break; fi; done; echo",
            f"if [ -f {NOTE} ]; then tr -d '\\n' < {NOTE}; fi; echo",
            "command -v python || echo",
            'if [ -n "$package" ]; then cat $package; fi',
        )
    )


def _read_answer(text: str, where: object) -> tuple[Layout, bool]:
    """Where things are, and whether ``python`` is a command."""
    lack, node, entry, note, python, package = [*text.split("\n", 5), *[""] * 5][:6]
    _refuse_lack(lack.split(), where)
    return _layout(node, entry, note.encode() if note else None, package.encode(), where), bool(python)


def inspect_image(image: str) -> Layout:
    """Where the image of a box (``spec.image``) has OpenClaw: a root file system, or an image of a Docker engine.

    Raises :class:`~clawgym.errors.AgentError` if it has none, or if boxes lack something else in it.
    """
    if os.path.isabs(image):
        return inspect_rootfs(Path(image))
    with _docker(f"look into {image!r}", image) as engine:
        return _read_answer(_run_in_image(engine, image, ["sh", "-c", _script()]), f"image {image!r}")[0]


# -- adding


def _note(layout: Layout) -> bytes:
    return (json.dumps(asdict(layout)) + "\n").encode()


def make_rootfs(source: Path, folder: Path, *, progress: Tell | None = None) -> Layout:
    """Make ``folder``, a root file system for boxes, from an OCI layout, an archive of an image, or a root file system.

    ``source`` stays as it is. Raises :class:`~clawgym.errors.AgentError`; nothing is left behind then.
    """
    tell = progress or (lambda what, done, total: None)
    if not source.exists():
        raise AgentError(f"{source}: no such file or folder, and not the name of a Docker image: check the name")
    if folder.exists():
        raise AgentError(f"{folder} is there already: name another folder, or remove it")
    scratch = folder.with_name(f".{folder.name}.new")
    try:
        _tree.remove(scratch)
        scratch.mkdir(parents=True)
        scratch.chmod(0o755)
        if is_image(source):
            unpack(source, scratch, tell)
        elif (source / "bin").exists() or (source / "bin").is_symlink():
            tell("copying", 0, 0)
            copy_rootfs(source, scratch)
        else:
            raise AgentError(f"{source}: no OCI layout (index.json) and no root file system (bin): check the path")
        layout = _inspect(scratch, source)
        _write_into(scratch, layout)
        scratch.rename(folder)
    except OSError as error:
        raise AgentError(f"{folder} cannot be made ({error}): mend that and run the same command again") from error
    finally:
        _tree.remove(scratch)
    return layout


def _write_into(root: Path, layout: Layout) -> None:
    etc, programs = resolve(root, "/etc", make=True), resolve(root, "/usr/bin", make=True)
    assert etc is not None
    assert programs is not None
    note = etc / Path(NOTE).name
    note.unlink(missing_ok=True)
    note.write_bytes(_note(layout))
    note.chmod(0o644)
    if not any(resolve(root, f"{folder}/python") for folder in _FOLDERS):
        (programs / "python").symlink_to("python3")


def add_to_docker_image(source: str, name: str, *, progress: Tell | None = None) -> Layout:
    """Make the Docker image ``name`` from the image ``source`` of the engine at ``DOCKER_HOST``.

    Its command, user and environment stay as they are. Raises :class:`~clawgym.errors.AgentError`.
    """
    tell = progress or (lambda what, done, total: None)
    repository, _, tag = name.rpartition(":")
    if not repository or "/" in tag:
        repository, tag = name, "latest"
    with _docker(f"make {name!r}", source) as engine:
        tell("looking into it", 0, 0)
        layout, has_python = _read_answer(_run_in_image(engine, source, ["sh", "-c", _script()]), f"image {source!r}")
        tell("adding to it", 0, 0)
        old: Mapping[str, Any] = engine.inspect_image(source).get("Config") or {}
        starts = old.get("Cmd") or old.get("Entrypoint")  # a container must have a command; this one never starts
        made = engine.create_container(source, None if starts else ["bash"])["Id"]
        try:
            engine.put_archive(made, "/", _layer(layout, has_python))
            engine.commit(made, repository, tag)
        finally:
            engine.remove_container(made, force=True)
    return layout


@contextlib.contextmanager
def _docker(what: str, image: str) -> Iterator[Any]:
    """The API of the engine at ``DOCKER_HOST``, which is to do ``what``. Raises AgentError where it does not."""
    try:
        import docker
        import docker.errors
    except ImportError:
        raise MissingDependency("Docker images need the Docker SDK: pip install 'clawgym[docker]'") from None
    try:
        client = docker.DockerClient(base_url=os.environ.get("DOCKER_HOST"), version="auto")
        with contextlib.closing(client):
            yield client.api
    except docker.errors.ImageNotFound:
        raise AgentError(f"image {image!r} is not on this Docker engine: docker pull {image}") from None
    except (docker.errors.DockerException, OSError) as error:
        text = re.sub(r"\s+", " ", str(error))[-500:]
        raise AgentError(f"the Docker engine did not {what} ({text}): see `clawgym doctor`") from error


def _run_in_image(engine: Any, image: str, argv: list[str]) -> str:
    """What a program of an image prints. Raises DockerException."""
    options = engine.create_host_config(network_mode="none", cap_drop=["ALL"])
    made = engine.create_container(image, argv[1:], user="0", host_config=options, entrypoint=argv[:1])["Id"]
    try:
        engine.start(made)
        engine.wait(made, timeout=60)
        return engine.logs(made, stdout=True, stderr=False).decode("utf-8", "replace")
    finally:
        engine.remove_container(made, force=True)


def _layer(layout: Layout, has_python: bool) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        note = tarfile.TarInfo(NOTE.lstrip("/"))
        note.size, note.mode = len(_note(layout)), 0o644
        tar.addfile(note, io.BytesIO(_note(layout)))
        if not has_python:
            link = tarfile.TarInfo("usr/bin/python")
            link.type, link.linkname = tarfile.SYMTYPE, "python3"
            tar.addfile(link)
    return buffer.getvalue()
