"""Interpret a simple Dockerfile without building it: files, variables and working folder.

Supported: one ``FROM`` of a plain Debian, Ubuntu or Python image, ``WORKDIR``, ``ENV``, ``ARG``, ``COPY`` and ``ADD``
of files in the folder, and ``RUN`` of simple commands (``mkdir``, ``touch``, ``chmod``, installing packages that the
default sandbox has). Any other statement raises :class:`NeedsBuild` with the reason.

Invariant: a supported Dockerfile gives the agent the same files, variables and working folder as the built image.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from clawgym.records import TaskFile

__all__ = ["Build", "is_plain_image", "read_dockerfile", "system_folder"]

_PLAIN = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?:ubuntu|debian|python)(?::(?P<tag>[\w.-]+))?(?:@sha256:[0-9a-f]{64})?"
)
_IGNORED = {"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"}
_PRESENT = {
    *("bash", "ca-certificates", "coreutils", "diffutils", "findutils", "gawk", "grep", "gzip", "locales", "mawk"),
    *("passwd", "procps", "python3", "sed", "tar", "tzdata", "util-linux"),
}
"""Packages whose programs the default sandbox has."""
_HARBOR_FOLDERS = ("/logs", "/tests", "/solution", "/tmp")
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/logs", "/proc"),
    *("/run", "/sbin", "/solution", "/sys", "/tests", "/usr"),
)


class NeedsBuild(Exception):
    """This Dockerfile needs an image build; the message says why."""


@dataclass
class Build:
    """The state of the image so far; paths are absolute."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, TaskFile] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    """Folders created by ``mkdir`` and ``WORKDIR``."""

    def inputs(self, workspace: str) -> tuple[TaskFile, ...]:
        """The files below ``workspace``; an empty folder has an empty file ``.gitkeep``.

        Raises :class:`NeedsBuild` if there are files elsewhere.
        """
        found = dict(self.files)
        for folder in self.folders - {workspace}:
            if PurePosixPath(workspace).is_relative_to(folder) or _below(folder, _HARBOR_FOLDERS):
                continue
            if not any(PurePosixPath(path).is_relative_to(folder) for path in found):
                found[f"{folder}/.gitkeep"] = TaskFile(".gitkeep", b"")
        for path in found:
            if path == workspace:
                raise NeedsBuild(f"makes its working folder {workspace} a file")
            if not PurePosixPath(path).is_relative_to(workspace):
                raise NeedsBuild(f"{path} lies outside the working folder {workspace}")
        below = {str(PurePosixPath(path).relative_to(workspace)): file for path, file in found.items()}
        return tuple(replace(below[path], path=path) for path in sorted(below))


def is_plain_image(name: str) -> bool:
    """Whether the default sandbox can replace this image.

    >>> is_plain_image("python:3.12-slim"), is_plain_image("python:3.12-alpine"), is_plain_image("node:22")
    (True, False, False)
    """
    match = _PLAIN.fullmatch(name)
    return match is not None and not re.search("alpine|windows|nanoserver", match["tag"] or "")


def system_folder(path: str) -> bool:
    """Whether ``path`` is a system folder, which cannot be a workspace."""
    return path == "/" or _below(path, _SYSTEM)


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def read_dockerfile(text: str, context: tuple[TaskFile, ...]) -> Build:
    """Interpret the Dockerfile ``text`` with the build context ``context``.

    Raises :class:`NeedsBuild`, with the line and the reason, if only a real build could give the result.
    """
    build = Build()
    arguments: dict[str, str] = {}
    files = {file.path: file for file in context}
    stages = 0
    for line, statement in _statements(text):
        word, _, rest = statement.partition(" ")
        keyword, rest = word.upper(), rest.strip()
        try:
            if keyword == "FROM":
                stages += 1
                _from(rest, arguments, stages)
            elif keyword == "ARG":
                arguments.update(_assignments(rest, arguments, default=""))
            elif keyword == "ENV":
                build.env.update(_assignments(rest, {**arguments, **build.env}))
            elif keyword == "WORKDIR":
                where = _expand(_unquoted(rest), {**arguments, **build.env})
                build.workdir = posixpath.normpath(posixpath.join(build.workdir, where))
                build.folders.add(build.workdir)
            elif keyword in ("COPY", "ADD"):
                _copy(build, keyword, _expand(rest, {**arguments, **build.env}), files)
            elif keyword == "RUN":
                _run(build, rest)
            elif keyword == "USER":
                if _unquoted(rest) not in ("root", "0", "root:root", "0:0"):
                    raise NeedsBuild(f"runs as user {rest}")
            elif keyword not in _IGNORED:
                raise NeedsBuild(f"has {keyword}")
        except NeedsBuild as error:
            raise NeedsBuild(f"line {line} {error}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise NeedsBuild(f"line {line} cannot be parsed ({error})") from None
    if not stages:
        raise NeedsBuild("has no FROM")
    return build


def _statements(text: str) -> list[tuple[int, str]]:
    """(line number, statement) pairs, without comments and with continued lines joined."""
    found: list[tuple[int, str]] = []
    start, parts = 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not found and not parts and re.match(r"#\s*escape\s*=", stripped, re.IGNORECASE):
            raise NeedsBuild(f"line {number} changes the escape character")
        if not stripped or stripped.startswith("#"):
            continue
        start = start if parts else number
        parts.append(stripped.removesuffix("\\").strip())
        if not stripped.endswith("\\"):
            found.append((start, " ".join(parts)))
            parts = []
    return [*found, (start, " ".join(parts))] if parts else found


def _from(rest: str, arguments: Mapping[str, str], stages: int) -> None:
    image = next((word for word in rest.split() if not word.startswith("--")), "")
    image = _expand(image, arguments)
    if stages > 1:
        raise NeedsBuild("starts a second build stage")
    if not is_plain_image(image):
        raise NeedsBuild(f"is built from {image or 'nothing'}, not from a plain Debian, Ubuntu or Python image")


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0] else value


def _expand(value: str, variables: Mapping[str, str]) -> str:
    if "$" not in value:
        return value
    if "'" in value or "\\$" in value:
        raise NeedsBuild("mixes variables with quotes")

    def replace(match: re.Match[str]) -> str:
        name, default = match["plain"] or match["name"], match["default"]
        if variables.get(name):
            return variables[name]
        if default is None:
            raise NeedsBuild(f"uses the variable {name}, which the base image may set")
        return default

    expanded = re.sub(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::-(?P<default>[^{}]*))?\})", replace, value)
    if "$" in expanded:
        raise NeedsBuild("uses a variable in a way that needs a build")
    return expanded


def _assignments(rest: str, variables: Mapping[str, str], default: str | None = None) -> dict[str, str]:
    """The pairs of ``A=1 B="2 3"`` or, in the old form, ``A 1``. A name without a value gets ``default``."""
    words = shlex.split(_expand(rest, variables))
    if not words:
        raise NeedsBuild("sets nothing")
    if "=" not in words[0]:
        if default is not None:
            return dict.fromkeys(words, default)
        name, _, value = rest.partition(" ")
        return {name: _expand(value.strip(), variables)}
    pairs = [word.partition("=") for word in words]
    if bad := [name for name, equals, _ in pairs if not equals or not name]:
        raise NeedsBuild(f"has {bad[0]!r} in place of NAME=value")
    return {name: value for name, _, value in pairs}


def _copy(build: Build, keyword: str, rest: str, files: Mapping[str, TaskFile]) -> None:
    executable: bool | None = None
    while match := re.match(r"--(?P<flag>[\w-]+)(?:=(?P<value>\S+))?\s+", rest):
        flag, value = match["flag"], match["value"] or ""
        if flag == "chmod" and re.fullmatch("0?[0-7]{3}", value):
            executable = bool(int(value, 8) & 0o100)
        elif flag not in ("chown", "link"):
            raise NeedsBuild(f"has {keyword} --{flag}")
        rest = rest[match.end() :]
    if "<<" in rest:
        raise NeedsBuild("has a here-document")
    *sources, target = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if not sources or not all(isinstance(word, str) for word in (*sources, target)):
        raise NeedsBuild(f"has {keyword} without a source")
    dest = posixpath.normpath(posixpath.join(build.workdir, target))
    taken = [(source, *_matches(source, files)) for source in sources]
    many = sum(len(found) for _, found, _ in taken) > 1 or len(sources) > 1
    for source, found, is_folder in taken:
        if keyword == "ADD" and (
            "://" in source or source.startswith("git@") or re.search(r"\.(tar(\.\w+)?|tgz|txz|tbz2?)$", source)
        ):
            raise NeedsBuild(f"has ADD {source}, which is fetched or unpacked")
        if not found:
            raise NeedsBuild(f"copies {source!r}, which is not in environment/")
        for name, file in found.items():
            as_folder = is_folder or many or target.endswith("/") or target == "." or _is_folder(build, dest)
            path = posixpath.join(dest, name) if as_folder else dest
            build.files[path] = file if executable is None else replace(file, executable=executable)


def _matches(source: str, files: Mapping[str, TaskFile]) -> tuple[dict[str, TaskFile], bool]:
    """Path below the destination -> file; and whether ``source`` is a folder, whose content is copied."""
    plain = posixpath.normpath(source.lstrip("/")) if source.strip("/") else "."
    if plain == ".":
        return dict(files), True
    if plain.startswith(".."):
        raise NeedsBuild(f"copies {source!r} from outside environment/")
    if plain in files:
        return {PurePosixPath(plain).name: files[plain]}, False
    if any(char in plain for char in "*?["):
        if "/" in plain or any("/" in path and fnmatch.fnmatchcase(path.split("/")[0], plain) for path in files):
            raise NeedsBuild(f"copies the pattern {source!r}, which may match folders")
        return {
            path: file for path, file in files.items() if "/" not in path and fnmatch.fnmatchcase(path, plain)
        }, False
    prefix = plain + "/"
    return {path.removeprefix(prefix): file for path, file in files.items() if path.startswith(prefix)}, True


def _is_folder(build: Build, path: str) -> bool:
    known = {build.workdir, *build.folders}
    return path in known or any(PurePosixPath(other).is_relative_to(path) and other != path for other in build.files)


def _run(build: Build, rest: str) -> None:
    if "<<" in rest or rest.startswith("--"):
        raise NeedsBuild("has RUN with a here-document or a mount")
    commands = [json.loads(rest)] if rest.startswith("[") else [shlex.split(c) for c in re.split(r"&&|;", rest)]
    for words in commands:
        if not words:
            continue
        text = " ".join(words)
        if re.search(r"[|<>$`(){}&]", text) or not _harmless(build, words):
            raise NeedsBuild(f"needs an image build: RUN {text[:80]}")


def _harmless(build: Build, words: list[str]) -> bool:
    """Apply a supported command. Returns ``False`` for any other command."""
    name, arguments = words[0], [word for word in words[1:] if not word.startswith("-")]
    paths = [posixpath.normpath(posixpath.join(build.workdir, path)) for path in arguments]
    flags = "".join(word for word in words[1:] if word.startswith("-")).replace("-", "")
    if name != "rm" and any(char in path for path in paths for char in "*?[~"):
        return False
    if name == "mkdir" and set(flags) <= set("pv"):
        build.folders.update(paths)
    elif name == "touch" and not flags:
        build.files.update({path: TaskFile("empty", b"") for path in paths if path not in build.files})
    elif name == "chmod" and not flags and paths and re.fullmatch(r"[au]?\+x|0?[75][0-7]{2}", arguments[0]):
        for path in paths[1:]:
            if path in build.files:
                build.files[path] = replace(build.files[path], path="executable", executable=True)
            elif path not in build.folders:
                return False
    elif name in ("apt-get", "apt"):
        return arguments in (["update"], ["clean"]) or (arguments[:1] == ["install"] and set(arguments[1:]) <= _PRESENT)
    elif name == "rm":
        return all(path.startswith("/var/lib/apt/") for path in paths)
    else:
        return name in ("true", ":") or (name == "set" and all(re.fullmatch("-[eux]+", w) for w in words[1:]))
    return True
