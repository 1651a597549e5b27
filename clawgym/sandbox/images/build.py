"""Build an image from a Dockerfile without a container engine.

``RUN`` runs in a sandbox over the layers so far; what it wrote is the next layer. Each step is found again by what it
depends on: the layers below, its text, variables, and the files that it copies.

Not done, and refused by name: users other than root, ``ONBUILD``, ``ADD`` of an address, and the mounts of ``RUN``
other than caches and tmpfs. A network is there for ``RUN`` only, and leads to named hosts only.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clawgym.cache import Progress
from clawgym.errors import SandboxError
from clawgym.records import Limits, TaskFile
from clawgym.sandbox.egress import AllowList, way_out
from clawgym.sandbox.images.dockerfile import Statement, expanded, ignored, json_words, statements, take_flags, words
from clawgym.sandbox.images.layers import kind_of, resolved
from clawgym.sandbox.images.store import ImageStore, StoredImage
from clawgym.sandbox.inside.trees import FOLDER, Room
from clawgym.sandbox.linux.layers import copy_tree
from clawgym.sandbox.protocol import Backend, SandboxSpec
from clawgym.tars import open_tar

__all__ = ["build_image"]

LIMITS = Limits(memory_mb=4096, disk_mb=8192, pids=4096, command_seconds=3600, file_mb=8192)
_MOST_CONTEXT = 4 * 2**30
"""Bytes that one COPY may take."""
_LARGEST_IGNORE = 2**16
_NO_EFFECT = {"EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"}
_APT = "/.clawgym"
_APT_CONF = TaskFile("apt.conf", b'APT::Sandbox::User "root";\n')
"""apt would check that it became another user."""
_TAIL = 2000
"""Characters of a failed command's output that are shown."""


@dataclass(frozen=True)
class _Stage:
    """An image so far."""

    layers: tuple[Path, ...] = ()
    key: str = ""
    """Names what the layers were made from."""
    env: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        return {**self.args, **self.env}

    def settings(self) -> dict[str, Any]:
        """The fields of an :class:`~clawgym.sandbox.images.store.StoredImage` besides its layers."""
        return {
            "env": dict(self.env),
            "workdir": self.workdir,
            "entrypoint": self.entrypoint,
            "command": self.command,
        }


async def build_image(
    folder: Path,
    name: str,
    *,
    store: ImageStore,
    backend: Backend,
    dockerfile: str = "Dockerfile",
    args: Mapping[str, str] = {},
    allow: Sequence[str] = (),
    progress: Progress | None = None,
) -> StoredImage:
    """Build ``folder/dockerfile`` with the context ``folder``, as ``name``.

    ``backend`` is a ``namespace`` backend; ``args`` are values of ``ARG``; ``allow`` are the hosts that ``RUN`` may
    reach (:class:`~clawgym.sandbox.egress.AllowList`).

    Raises :class:`~clawgym.errors.SandboxError`, with the line, for what cannot be built.
    """
    builder = _Builder(folder, store, backend, args, AllowList(allow), progress or (lambda what, done, total: None))
    try:
        text = (folder / dockerfile).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SandboxError(f"{folder / dockerfile}: cannot be read ({error}): write a Dockerfile there") from error
    stage = await builder.build(statements(text), str(folder / dockerfile))
    return store.save(name, stage.layers, stage.settings())


class _Builder:
    def __init__(
        self,
        context: Path,
        store: ImageStore,
        backend: Backend,
        args: Mapping[str, str],
        allowed: AllowList,
        tell: Progress,
    ) -> None:
        self._context, self._store, self._backend = context, store, backend
        self._ignored = _ignored_in(context)
        self._args, self._allowed, self._tell = args, allowed, tell
        self._stages: dict[str, _Stage] = {}
        self._globals: dict[str, str] = {}
        """``ARG`` before the first ``FROM``."""

    async def build(self, parsed: list[Statement], where: str) -> _Stage:
        stage: _Stage | None = None
        name = ""
        for number, statement in enumerate(parsed):
            self._tell(f"{statement.keyword} {statement.rest}"[:70], number, len(parsed))
            try:
                if statement.keyword == "FROM":
                    stage, name = self._from(statement.rest)
                elif stage is None:
                    if statement.keyword != "ARG":
                        raise SandboxError("comes before FROM: begin with FROM")
                    self._globals |= self._values(statement.rest, self._globals)
                else:
                    stage = await self._step(stage, statement)
                if stage is not None:
                    self._stages[name] = stage
            except SandboxError as error:
                raise SandboxError(f"{where}: line {statement.line}: {statement.keyword} {error}") from error
        if stage is None:
            raise SandboxError(f"{where}: has no FROM: begin with FROM and an image")
        return stage

    def _from(self, rest: str) -> tuple[_Stage, str]:
        _, rest = take_flags(rest)
        said = words(rest, self._globals)
        if len(said) not in (1, 3) or (len(said) == 3 and said[1].upper() != "AS"):
            raise SandboxError(f"{rest}: write FROM IMAGE or FROM IMAGE AS NAME")
        name = said[2].lower() if len(said) == 3 else str(len(self._stages))
        image = said[0]
        if image == "scratch":
            return _Stage(), name
        if image.lower() in self._stages:
            return replace(self._stages[image.lower()], args={}), name
        return self._base(image), name

    def _base(self, image: str) -> _Stage:
        short = re.sub(r"^(docker\.io/)?(library/)?", "", image)
        tagged = short if ":" in short else f"{short}:latest"
        found = next((one for n in (image, short, tagged) if (one := self._store.find(n))), None)
        if found is None:
            raise SandboxError(
                f"{image}: is not on this machine: add it (clawgym images add docker://{image} --name {image})"
            )
        return _Stage(
            found.layers,
            found.layers[-1].name,
            found.env,
            workdir=found.workdir,
            entrypoint=tuple(found.entrypoint),
            command=tuple(found.command),
        )

    async def _step(self, stage: _Stage, statement: Statement) -> _Stage:
        keyword, rest = statement.keyword, statement.rest
        match keyword:
            case "RUN":
                return await self._run(stage, statement)
            case "COPY" | "ADD":
                return await self._copy(stage, statement)
            case "ENV":
                return replace(stage, env={**stage.env, **_pairs(rest, stage.variables)})
            case "ARG":
                return replace(stage, args={**stage.args, **self._values(rest, stage.variables)})
            case "WORKDIR":
                where = posixpath.normpath(posixpath.join(stage.workdir, expanded(rest, stage.variables)))
                moved = replace(stage, workdir=where)
                return moved if self._is_folder(stage, where) else self._layer(moved, _tarred([_folder(where)]))
            case "SHELL" | "CMD" | "ENTRYPOINT":
                said = json_words(rest)
                if said is None and keyword == "SHELL":
                    raise SandboxError(f'{rest}: write it as ["program", "flag"]')
                value = tuple(said) if said is not None else (*stage.shell, rest)
                changed = {"SHELL": "shell", "CMD": "command", "ENTRYPOINT": "entrypoint"}[keyword]
                return replace(stage, **{changed: value})
            case "USER":
                if expanded(rest, stage.variables).partition(":")[0] not in ("root", "0"):
                    raise SandboxError(f"{rest}: sandboxes have one user, root: leave it out, or use a Docker engine")
                return stage
            case _ if keyword in _NO_EFFECT:
                return stage
            case _:
                raise SandboxError("is not supported: leave it out, or build with a Docker engine")

    def _values(self, rest: str, variables: Mapping[str, str]) -> dict[str, str]:
        """``ARG NAME`` and ``ARG NAME=DEFAULT``."""
        found: dict[str, str] = {}
        for word in words(rest, variables):
            name, given, default = word.partition("=")
            if name in self._args:
                found[name] = self._args[name]
            elif given:
                found[name] = default
            elif name in self._globals:
                found[name] = self._globals[name]
        return found

    # -- RUN

    async def _run(self, stage: _Stage, statement: Statement) -> _Stage:
        flags, rest = take_flags(statement.rest)
        for mount in flags.pop("mount", []):
            if (
                not re.match(r"(type=)?(cache|tmpfs)\b|target=", mount)
                or "type=bind" in mount
                or "type=secret" in mount
            ):
                raise SandboxError(f"--mount={mount}: only caches and tmpfs are supported: copy the files instead")
        flags.pop("network", None)
        if flags:
            raise SandboxError(f"--{next(iter(flags))}: is not supported: leave it out")
        argv = json_words(rest) or [*stage.shell, _script(rest, statement)]
        about = [argv, dict(stage.variables), stage.workdir, self._allowed.hosts]
        key = f"{stage.key} RUN {hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}"
        made = self._store.known(key)
        if made is None:
            made = await self._ran(stage, argv, key)
        return replace(stage, layers=(*stage.layers, made), key=made.name)

    async def _ran(self, stage: _Stage, argv: list[str], key: str) -> Path:
        image = self._store.describe(stage.layers, stage.settings())
        env = {**stage.variables, "APT_CONFIG": f"{_APT}/apt.conf"}
        spec = SandboxSpec(
            f"sha256:{image.digest}", LIMITS, env, stage.workdir, readonly={_APT: (_APT_CONF,)}, one_user=True
        )
        sandbox = await self._backend.create(spec)
        try:
            if self._allowed.hosts:
                async with way_out(sandbox, self._allowed) as proxy:
                    done = await sandbox.exec(argv, env=proxy)
            else:
                done = await sandbox.exec(argv)
            if done.exit_code:
                raise SandboxError(f"ended with {done.exit_code}: {done.text[-_TAIL:].strip()}")
            await sandbox.stop()
            snapshot = await sandbox.snapshot()
        finally:
            await sandbox.close()
        try:
            return self._store.layer(key, lambda folder: _copy_layer(snapshot.handle[-1] / "root", folder), self._tell)
        finally:
            await self._backend.drop(snapshot)

    # -- COPY and ADD

    async def _copy(self, stage: _Stage, statement: Statement) -> _Stage:
        flags, rest = take_flags(statement.rest)
        came_from = (flags.pop("from", None) or [""])[0]
        mode = (flags.pop("chmod", None) or [""])[0]
        for harmless in ("chown", "link"):
            flags.pop(harmless, None)
        if flags:
            raise SandboxError(f"--{next(iter(flags))}: is not supported: leave it out")
        if mode and not re.fullmatch("[0-7]{3,4}", mode):
            raise SandboxError(f"--chmod={mode}: write it as octal digits")
        given = json_words(rest)
        *sources, target = [expanded(w, stage.variables) for w in given] if given else words(rest, stage.variables)
        if not sources:
            raise SandboxError(f"{rest}: write a source and a target")
        dest = posixpath.join(stage.workdir, target)
        held = {f"<<{doc.name}": doc for doc in statement.heredocs}
        entries: list[_Entry] = []
        into = target.endswith("/") or len(sources) > 1 or self._is_folder(stage, dest)
        for source in sources:
            doc = held.get(source.replace("<<-", "<<").replace('"', "").replace("'", ""))
            if doc is not None:
                text = _with_variables(doc.text, stage.variables) if doc.expands else doc.text
                found = [_file(doc.name, text.encode(), 0o644)]
            elif came_from:
                found = await self._from_stage(came_from, source)
            else:
                found = self._from_context(source, unpacks=statement.keyword == "ADD")
            if not found:
                raise SandboxError(f"{source}: is not there: correct the path")
            if len(found) > 1 and not into and not found[0].whole:
                raise SandboxError(f"{source}: names several files: end the target {target} with /")
            for entry in found:
                entries.append(entry.at(dest, into))
        if mode:
            entries = [replace(e, mode=int(mode, 8)) if e.kind == "file" else e for e in entries]
        return self._layer(stage, _tarred(entries))

    def _from_context(self, source: str, *, unpacks: bool) -> list[_Entry]:
        if "://" in source or source.startswith("git@"):
            raise SandboxError(f"{source}: addresses are not fetched: use RUN with curl and an allowed host")
        plain = posixpath.normpath(source.lstrip("/") or ".")
        if plain.startswith(".."):
            raise SandboxError(f"{source}: is outside the folder of the Dockerfile: copy it there")
        found = [self._context] if plain == "." else sorted(self._context.glob(plain))
        entries: list[_Entry] = []
        size = 0
        for path in found:
            if not path.resolve().is_relative_to(self._context.resolve()):
                raise SandboxError(f"{source}: leads out of the folder of the Dockerfile: copy it there")
            if unpacks and path.is_file() and tarfile.is_tarfile(path):
                raise SandboxError(f"{source}: archives are not unpacked: use COPY and RUN tar")
            for name, one in _walked(path):
                if one != self._context and self._ignored(one.relative_to(self._context).as_posix()):
                    continue
                entry = _read(one, name, whole=path.is_dir())
                size += len(entry.data)
                if size > _MOST_CONTEXT:
                    raise SandboxError(f"{source}: has more than {_MOST_CONTEXT} bytes: copy less")
                entries.append(entry)
        return entries

    async def _from_stage(self, name: str, source: str) -> list[_Entry]:
        named = [*self._stages][int(name)] if name.isdigit() and int(name) < len(self._stages) else name.lower()
        stage = self._stages.get(named) or self._base(name)
        kind = self._kind(stage, source)
        if kind is None:
            return []
        image = self._store.describe(stage.layers, stage.settings())
        sandbox = await self._backend.create(SandboxSpec(f"sha256:{image.digest}", LIMITS, {}, "/"))
        try:
            await sandbox.stop()
            if not stat.S_ISDIR(kind):
                data = await sandbox.get(source, max_bytes=_MOST_CONTEXT)
                return [_file(posixpath.basename(source), data, stat.S_IMODE(kind) & 0o777)]
            archive = await sandbox.get_archive(source, max_bytes=_MOST_CONTEXT, max_files=500_000)
        finally:
            await sandbox.close()
        return _entries(archive.tar)

    def _kind(self, stage: _Stage, path: str) -> int | None:
        """The mode of ``path`` in a stage; links in its folders are followed within the image."""
        opened = [os.open(layer, FOLDER) for layer in reversed(stage.layers)]
        try:
            real = resolved(opened, posixpath.normpath(path).lstrip("/"))
            found = kind_of(opened, real)
            return None if found is None else found[0]
        finally:
            for layer in opened:
                os.close(layer)

    def _is_folder(self, stage: _Stage, path: str) -> bool:
        kind = self._kind(stage, path)
        return kind is not None and stat.S_ISDIR(kind)

    def _layer(self, stage: _Stage, tar: bytes) -> _Stage:
        """The stage with one more layer, of ``tar``."""
        key = f"{stage.key} COPY {hashlib.sha256(tar).hexdigest()}"
        made = self._store.tar_layer(key, tar, stage.layers, self._tell)
        return replace(stage, layers=(*stage.layers, made), key=made.name)


@dataclass(frozen=True)
class _Entry:
    """A file, folder or link to be copied; ``name`` is relative to what was named."""

    name: str
    kind: str
    """``file``, ``folder`` or ``link``."""
    mode: int
    data: bytes = b""
    """The content, or the target of a link."""
    whole: bool = False
    """Part of a folder that was named, whose content is copied."""

    def at(self, dest: str, into: bool) -> _Entry:
        """The entry at its place below ``dest``; ``into``: a single file goes into ``dest``, not there."""
        path = posixpath.join(dest, self.name) if self.whole or into else dest
        return replace(self, name=posixpath.normpath(path).lstrip("/"))


def _folder(path: str) -> _Entry:
    return _Entry(path.lstrip("/"), "folder", 0o755)


def _file(name: str, data: bytes, mode: int) -> _Entry:
    return _Entry(name, "file", mode, data)


def _ignored_in(context: Path) -> Callable[[str], bool]:
    """What the ``.dockerignore`` of a folder leaves out; nothing if it has none."""
    file = context / ".dockerignore"
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            return ignored(opened.read(_LARGEST_IGNORE).decode())
    except FileNotFoundError:
        return ignored("")
    except (OSError, ValueError, SandboxError) as error:
        raise SandboxError(f"{file}: {error}: correct it") from error


def _walked(path: Path) -> list[tuple[str, Path]]:
    """What is to be copied for ``path``: (name, path), sorted; no link is followed."""
    if path.is_symlink() or not path.is_dir():
        return [(path.name, path)]
    found = [(".", path)]
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            one = Path(folder, name)
            found.append((str(one.relative_to(path)), one))
    return sorted(found)


def _read(path: Path, name: str, *, whole: bool) -> _Entry:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return _Entry(name, "link", 0o777, os.fsencode(os.readlink(path)), whole)
    if stat.S_ISDIR(info.st_mode):
        return _Entry(name, "folder", 0o755, whole=whole)
    if not stat.S_ISREG(info.st_mode):
        raise SandboxError(f"{path}: is no file, folder or link: remove it")
    if info.st_size > _MOST_CONTEXT:
        raise SandboxError(f"{path}: has more than {_MOST_CONTEXT} bytes: leave it out")
    return _Entry(name, "file", 0o755 if info.st_mode & 0o100 else 0o644, path.read_bytes(), whole)


def _entries(tar: bytes) -> list[_Entry]:
    """The entries of an archive from a sandbox."""
    found = [_Entry(".", "folder", 0o755, whole=True)]
    with open_tar(tar) as opened:
        for member in opened:
            if member.isdir():
                found.append(_Entry(member.name, "folder", member.mode & 0o777, whole=True))
            elif member.issym():
                found.append(_Entry(member.name, "link", 0o777, os.fsencode(member.linkname), True))
            elif (held := opened.extractfile(member)) is not None:
                found.append(_Entry(member.name, "file", member.mode & 0o777, held.read(), True))
    return found


def _tarred(entries: Sequence[_Entry]) -> bytes:
    """A tar that depends on nothing else."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode = entry.mode
            if entry.kind == "folder":
                info.type = tarfile.DIRTYPE
            elif entry.kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(entry.data)
            else:
                info.size = len(entry.data)
            tar.addfile(info, io.BytesIO(entry.data) if entry.kind == "file" else None)
    return out.getvalue()


def _copy_layer(source: Path, target: Path) -> None:
    """Copy what a sandbox wrote, with its whiteouts."""
    here, there = os.open(source, FOLDER), os.open(target, FOLDER)
    try:
        copy_tree(here, there, Room(2_000_000, 2 * LIMITS.disk_mb * 2**20), frozenset({"dev", "proc", "sys", _APT[1:]}))
    finally:
        os.close(here)
        os.close(there)


def _script(rest: str, statement: Statement) -> str:
    """The text of a RUN; here-documents follow their line, as in a shell."""
    if not statement.heredocs:
        return rest
    if re.fullmatch(r"<<-?[\"']?\w+[\"']?", rest):
        return statement.heredocs[0].text
    return rest + "\n" + "".join(f"{doc.text}{doc.name}\n" for doc in statement.heredocs)


def _pairs(rest: str, variables: Mapping[str, str]) -> dict[str, str]:
    """``ENV A=1 B=2``, or in the old form ``ENV A 1``."""
    said = words(rest, variables)
    if not said:
        raise SandboxError("sets nothing: write NAME=VALUE")
    if "=" not in said[0]:
        return {said[0]: expanded(rest.partition(" ")[2].strip(), variables)}
    if bad := [word for word in said if not word.partition("=")[1] or word.startswith("=")]:
        raise SandboxError(f"{bad[0]}: write NAME=VALUE")
    return {name: value for name, _, value in (word.partition("=") for word in said)}


def _with_variables(text: str, variables: Mapping[str, str]) -> str:
    """A here-document with its variables replaced; quotes stay."""
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: variables.get(m[1] or m[2], ""), text)
