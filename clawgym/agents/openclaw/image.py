"""Images and root file systems that contain OpenClaw, such as the official image.

``spec.image`` can name one of them; :func:`inspect_image` finds out how to start OpenClaw in it. Preparing an image
adds two small files and changes nothing else: a :class:`Layout` as JSON, and the name ``python`` for its python3.
Whatever an image contains is read with bounds, and links are followed inside of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clawgym.cache import Progress
from clawgym.errors import AgentError, MissingDependency
from clawgym.sandbox.images import ImageStore
from clawgym.sandbox.images.layers import read_file

__all__ = [
    "NOTE",
    "Layout",
    "add_image",
    "add_to_docker_image",
    "inspect_image",
    "inspect_rootfs",
    "rootfs_of_environment",
]

NOTE = "/etc/clawgym-openclaw.json"
"""Path in an image of a JSON file that holds its :class:`Layout`."""

_NODES = ("/usr/local/bin/node", "/usr/bin/node", "/opt/openclaw/node/bin/node")
_ENTRIES = (  # in the official image; where npm installs it
    "/app/openclaw.mjs",
    "/app/dist/index.js",
    "/opt/openclaw/node_modules/openclaw/openclaw.mjs",
    "/usr/local/lib/node_modules/openclaw/openclaw.mjs",
    "/usr/lib/node_modules/openclaw/openclaw.mjs",
)
_NEEDED = ("sh", "bash", "python3", "tar")
_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_MOST_JSON = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """Where OpenClaw is in an image. ``node entry gateway ...`` starts it."""

    node: str
    entry: str
    version: str


def rootfs_of_environment() -> str | None:
    """Return ``$OPENCLAW_ROOTFS``, the path of an unpacked image, or None if it is not set.

    Raises :class:`~clawgym.errors.AgentError` if it is set, but not to an unpacked image with OpenClaw.
    """
    value = os.environ.get("OPENCLAW_ROOTFS", "").strip()
    if not value:
        return None
    if not os.path.isabs(value) or not os.path.isdir(value):
        raise AgentError(f"OPENCLAW_ROOTFS={value}: not the absolute path of a folder: unset or correct it")
    inspect_rootfs(Path(value))
    return value


# -- inspecting


def _package_of(entry: str) -> str:
    folder = entry.rpartition("/")[0]
    return f"{folder.removesuffix('/dist')}/package.json"


def _layout(node: str, entry: str, note: bytes | None, package: bytes, where: object) -> Layout:
    """Make a layout from the ``note`` if there is one, else from the paths that were found. Raises AgentError."""
    try:
        if note is not None:
            known = json.loads(note)
            return Layout(str(known["node"]), str(known["entry"]), str(known["version"]))
        about = json.loads(package) if package else {}
        if node and entry and about.get("name") == "openclaw":
            return Layout(node, entry, str(about["version"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AgentError(
            f"{where}: {NOTE} or OpenClaw's package.json is malformed ({error!r}): correct the image"
        ) from error
    raise AgentError(
        f"{where} has no {'OpenClaw' if node else 'node'} in any of {', '.join(_ENTRIES if node else _NODES)}: "
        f"start from an official release, or write {NOTE} into it: "
        '{"node": "/usr/bin/node", "entry": "/path/openclaw.mjs", "version": "1.2.3"}'
    )


def inspect_rootfs(folder: Path) -> Layout:
    """Find OpenClaw in an unpacked image: from the file at :data:`NOTE`, else in the usual places.

    Raises :class:`~clawgym.errors.AgentError` if it is not found, or if a program that sandboxes need is missing.
    """
    try:
        return _inspect([folder], folder)
    except OSError as error:
        raise AgentError(f"{folder}: cannot be read ({error}): check the path") from error


def _inspect(layers: Sequence[Path], where: object) -> Layout:
    """Find OpenClaw in ``layers``, bottom first."""

    def exists(path: str) -> bool:
        return read_file(layers, path, 0) is not None

    missing = [name for name in _NEEDED if not any(exists(f"{folder}/{name}") for folder in _FOLDERS)]
    _check_missing(missing, where)
    node, entry = next(filter(exists, _NODES), ""), next(filter(exists, _ENTRIES), "")
    package = read_file(layers, _package_of(entry), _MOST_JSON) if entry else None
    return _layout(node, entry, read_file(layers, NOTE, _MOST_JSON), package or b"", where)


def _check_missing(missing: list[str], where: object) -> None:
    if missing:
        names = " ".join(missing)
        raise AgentError(
            f"{where} lacks {', '.join(missing)}, which sandboxes need: build an image that has it "
            f"(FROM the release; USER root; RUN apt-get update && apt-get install -y {names}), and use that one"
        )


def _script() -> str:
    """Shell script that inspects an image.

    It prints one line each, possibly empty, for the missing programs, node, the entry, the note and python; then
    OpenClaw's package.json.
    """
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
    """Parse the output of :func:`_script`: the layout, and whether ``python`` is a command."""
    missing, node, entry, note, python, package = [*text.split("\n", 5), *[""] * 5][:6]
    _check_missing(missing.split(), where)
    return _layout(node, entry, note.encode() if note else None, package.encode(), where), bool(python)


def inspect_image(image: str) -> Layout:
    """Find OpenClaw in a sandbox image (``spec.image``): a root file system, or the name of a stored image (``clawgym
    images``) or of an image of a Docker engine.

    Raises :class:`~clawgym.errors.AgentError` if it is not found, or if a program that sandboxes need is missing.
    """
    if os.path.isabs(image):
        return inspect_rootfs(Path(image))
    if (stored := ImageStore().find(image)) is not None:
        return _inspect(stored.layers, f"image {image!r}")
    with _docker(f"inspect {image!r}", image) as engine:
        return _read_answer(_run_in_image(engine, image, ["sh", "-c", _script()]), f"image {image!r}")[0]


# -- preparing


def _note(layout: Layout) -> bytes:
    return (json.dumps(asdict(layout)) + "\n").encode()


def add_image(source: str, name: str, *, progress: Progress | None = None) -> Layout:
    """Make the stored image ``name`` from an OCI layout, an archive, or what skopeo can copy
    (:meth:`~clawgym.sandbox.images.ImageStore.add`). Its programs run as root, whatever its user is.

    Raises:
        AgentError: it does not contain OpenClaw, or lacks a program that sandboxes need.
        SandboxError: it is no image that can be used.
    """
    tell = progress or (lambda what, done, total: None)
    folder = Path(source).expanduser()
    if folder.is_dir() and (folder / "bin").exists():
        raise AgentError(
            f"{source}: a root file system needs no preparation: use it with --agent-option image={folder.absolute()}"
        )
    store = ImageStore()
    image = store.unpack(source, as_root=True, progress=tell)
    layout = _inspect(image.layers, source)
    has_python = any(read_file(image.layers, f"{folder}/python", 0) is not None for folder in _FOLDERS)
    tar = _layer(layout, has_python)
    key = f"{image.digest} {hashlib.sha256(tar).hexdigest()}"
    own = store.tar_layer(key, tar, image.layers, tell)
    store.save(name, (*image.layers, own), image.settings())
    return layout


def add_to_docker_image(source: str, name: str, *, progress: Progress | None = None) -> Layout:
    """Make the Docker image ``name`` from the image ``source``, on the Docker engine at ``DOCKER_HOST``.

    Command, user and environment of the image stay the same. Raises :class:`~clawgym.errors.AgentError`.
    """
    report = progress or (lambda what, done, total: None)
    repository, _, tag = name.rpartition(":")
    if not repository or "/" in tag:
        repository, tag = name, "latest"
    with _docker(f"make {name!r}", source) as engine:
        report("inspecting", 0, 0)
        layout, has_python = _read_answer(_run_in_image(engine, source, ["sh", "-c", _script()]), f"image {source!r}")
        report("committing", 0, 0)
        old: Mapping[str, Any] = engine.inspect_image(source).get("Config") or {}
        starts = old.get("Cmd") or old.get("Entrypoint")  # a container needs a command, though this one never starts
        made = engine.create_container(source, None if starts else ["bash"])["Id"]
        try:
            engine.put_archive(made, "/", _layer(layout, has_python))
            engine.commit(made, repository, tag)
        finally:
            engine.remove_container(made, force=True)
    return layout


@contextlib.contextmanager
def _docker(what: str, image: str) -> Iterator[Any]:
    """Connect to the Docker engine at ``DOCKER_HOST``; its errors become an AgentError: it could not ``what``."""
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
        raise AgentError(f"the Docker engine could not {what} ({text}): see `clawgym doctor`") from error


def _run_in_image(engine: Any, image: str, argv: list[str]) -> str:
    """Run a program in a new container of ``image`` and return its stdout. Raises DockerException."""
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
