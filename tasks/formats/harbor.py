"""Reader and writer of Harbor task folders (``task.toml`` schema 1.0 to 1.4).

A folder holds ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and usually ``solution/solve.sh``.
Verifiers run in ``fork`` mode, since a Harbor test may read any file of the container.

A Dockerfile that only copies files and sets variables needs no build. For any other, the reason names the command that
builds its image; once it is on this machine, the task is supported.

Invariant: a task that needs features that ClawGym's sandboxes lack (network, an image that is not here, services, a
GPU) is read with ``unsupported`` set to the first reason, and never scored. Only a folder that is invalid in Harbor is
an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawgym.errors import TaskError, UnsupportedTask
from clawgym.records import GradingMode, Task, TaskFile, VerifierSpec, packages_of
from clawgym.registry import formats
from clawgym.sandbox.images import ImageStore
from clawgym.tasks.formats import _toml
from clawgym.tasks.formats._dockerfile import Build, NeedsBuild, is_plain_image, read_dockerfile, system_folder
from clawgym.tasks.formats._files import (
    check_task_id,
    executes_agent_code,
    flag_agent_tools,
    make_folder,
    read_text,
    write_files,
)
from clawgym.tasks.formats._reward import harbor_files
from clawgym.tasks.formats.clawgym import check_script, check_solution, check_wrong, read_verifier, walk_part
from clawgym.tasks.formats.protocol import TaskFormat

if TYPE_CHECKING:
    from clawgym.tasks.formats._harbor_schema import HarborConfig
    from clawgym.tasks.formats._schema import Extras

__all__ = [
    "HarborFormat",
    "HarborPlace",
    "MissingImage",
    "is_task",
    "place_of",
    "read_task",
    "script_needs",
    "user_needs",
    "write_task",
]

CONFIG = "task.toml"
BASE_IMAGE = "python:3.12-slim-bookworm"
_COMPOSE = frozenset({"docker-compose.yaml", "docker-compose.yml", "compose.yaml"})
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_FETCHES = re.compile(
    r"^[^#\n]*?\b(?P<call>apt(?:-get)? +(?:-\S+ +)*(?:update|install)|pip3? +install|uvx |uv +(?:pip|run|add|sync)"
    r"|(?:curl|wget)\b[^|;&\n]*?://(?!localhost|127\.)\S+|npx |npm +(?:i|ci|install)|git +clone|conda +install"
    r"|cargo +install)",
    re.MULTILINE,
)


def is_task(folder: Path) -> bool:
    """Whether ``folder`` looks like a Harbor task."""
    return (folder / CONFIG).is_file()


def read_task(folder: Path) -> Task:
    """Read one Harbor task folder. Its id is the name of the folder.

    Raises :class:`TaskError`, naming file and field, for a folder that is invalid in Harbor too.
    """
    from clawgym.tasks.formats._harbor_schema import HarborConfig, jsonable
    from clawgym.tasks.formats._schema import Extras, check_folders_only, validated

    where = str(folder / CONFIG)
    try:
        document = tomllib.loads(read_text(folder, CONFIG))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskError(f"{where}: is not TOML ({error}): correct it") from error
    config = validated(HarborConfig, document, where)
    metadata = jsonable(config.metadata)
    ours = metadata.pop("clawgym", None)
    extras = validated(Extras, ours, f"{where}: metadata.clawgym") if isinstance(ours, dict) else None
    if extras:
        check_folders_only(extras, f"{where}: metadata.clawgym", "Harbor folders")
    limits = config.limits(where)
    reasons: list[str] = []
    sandbox = _ours(folder, config, extras) if extras else None
    if sandbox is None:
        sandbox, reasons = _environment(folder, config, where)
        reasons = [
            _kinded(why) for why in (*config.unsupported(), *script_needs(folder), *_other_files(folder), *reasons)
        ]
    if extras:
        limits = extras.read_limits(f"{where}: metadata.clawgym", limits)
        reasons = [extras.unsupported] if extras.unsupported else reasons
    instruction = _instruction(folder, config, exact=extras is not None)
    verifier = _verifier(walk_part(folder, "tests"), config, extras, folder)
    # Harbor does not distinguish inputs from outputs: its tests expect the files as the agent left them.
    mutable = extras.read_mutable(instruction, sandbox.get("inputs", ())) if extras else ("*",)
    return Task(
        id=check_task_id(folder.name, str(folder)),
        instruction=instruction,
        verifier=dataclasses.replace(verifier, mutable_inputs=mutable),
        limits=limits,
        metadata={**config.package(), **metadata},
        solution=check_solution(walk_part(folder, "solution"), f"{folder}/solution"),
        wrong_solutions=check_wrong(walk_part(folder, "wrong"), f"{folder}/wrong"),
        unsupported=reasons[0] if reasons else None,
        origin=str(folder),
        **sandbox,
    )


_KINDS = (
    ("network", r"\bnetwork"),
    ("image not here", r"Dockerfile|container image|its image"),
    ("platform", r"a GPU|a TPU|operating system|host's variable"),
)
"""Kind of a reason -> pattern. What Harbor's own environments do and tasks here cannot say is ``ours``."""


def _kinded(why: str) -> str:
    """``why`` after its kind: ``network``, ``image not here``, ``platform`` (what this machine or its user lacks) or
    ``ours``."""
    return f"{next((kind for kind, pattern in _KINDS if re.search(pattern, why)), 'ours')}: {why}"


def write_task(task: Task, folder: Path) -> None:
    """Write ``task`` as a new Harbor folder. Reading it back gives the same content hash.

    Raises :class:`TaskError` if the folder exists or this format cannot store the task.
    """
    from clawgym.tasks.formats._schema import check_folders_only

    where = f"task {task.id}"
    check_task_id(task.id, where)
    check_folders_only(task, where, "Harbor folders")
    if task.verifier.protected:
        raise TaskError(f"{where}: has protected files, which Harbor does not support: use ClawGym folders")
    for name, value in (*task.env.items(), *task.verifier.env.items()):
        if re.fullmatch(r"\$\{.*\}", value, re.DOTALL):
            raise TaskError(f"{where}: variable {name} is {value!r}, which Harbor would fill from its host: change it")
    if task.verifier.protocol == "reward_sh" and any(f.path.split("/")[0] == "reward" for f in task.inputs):
        raise TaskError(f"{where}: has an input below reward/, where its verifier goes: move it")
    try:
        config = _toml.dumps(_config(task))
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: its metadata cannot be written as TOML ({error}): correct it") from error
    make_folder(folder)
    (folder / CONFIG).write_bytes(config.encode())
    (folder / "instruction.md").write_bytes(task.instruction.encode())
    environment = [dataclasses.replace(file, path=f"inputs/{file.path}") for file in task.inputs]
    write_files(folder / "environment", [TaskFile("Dockerfile", _dockerfile(task).encode()), *environment])
    write_files(folder / "tests", harbor_files(task))
    for name, files in (("solution", task.solution), ("wrong", task.wrong_solutions)):
        if files:
            write_files(folder / name, files)


def _config(task: Task) -> dict[str, Any]:
    from clawgym.tasks.formats._schema import Extras

    extras = Extras.of(task, "harbor")
    for elsewhere in ("env", "verifier_env"):
        extras.pop(elsewhere, None)
    in_toml = ("memory_mb", "cpus", "disk_mb", "agent_seconds", "verify_seconds")
    limits = {k: v for k, v in extras.pop("limits", {}).items() if k not in in_toml}
    extras |= {"protocol": task.verifier.protocol, "mode": task.verifier.mode.value}
    verifier: dict[str, Any] = {"timeout_sec": float(task.limits.verify_seconds)}
    environment: dict[str, Any] = {
        "network_mode": "no-network",
        "cpus": task.limits.cpus,
        "memory_mb": task.limits.memory_mb,
        "storage_mb": task.limits.disk_mb,
    }
    for section, env in ((verifier, task.verifier.env), (environment, task.env)):
        if env:
            section["env"] = dict(env)
    return {
        "schema_version": "1.4",
        "metadata": {**task.metadata, "clawgym": {**extras, **({"limits": limits} if limits else {})}},
        "agent": {"timeout_sec": float(task.limits.agent_seconds)},
        "verifier": verifier,
        "environment": environment,
    }


def _dockerfile(task: Task) -> str:
    return _dockerfile_text(task.image, task.workspace, bool(task.inputs))


def _dockerfile_text(image: str, workspace: str, inputs: bool) -> str:
    copy = f"COPY {json.dumps(['inputs/', workspace + '/'])}\n" if inputs else ""
    packages = packages_of(image)
    install = f"RUN apt-get update && apt-get install -y {' '.join(packages)}\n" if packages else ""
    return f"FROM {image if packages is None else BASE_IMAGE}\n\n{install}WORKDIR {workspace}\n{copy}"


def _ours(folder: Path, config: HarborConfig, extras: Extras) -> dict[str, Any] | None:
    """The sandbox of a folder that :func:`write_task` wrote, or ``None`` if its Dockerfile was changed since."""
    inputs = tuple(
        dataclasses.replace(file, path=file.path.removeprefix("inputs/"))
        for file in walk_part(folder, "environment")
        if file.path.startswith("inputs/")
    )
    if read_text(folder, "environment/Dockerfile") != _dockerfile_text(extras.image, extras.workspace, bool(inputs)):
        return None
    return {
        "inputs": inputs,
        "workspace": extras.workspace,
        "image": extras.image,
        "env": config.environment.variables()[0],
    }


def _environment(folder: Path, config: HarborConfig, where: str) -> tuple[dict[str, Any], list[str]]:
    """Inputs, workspace, image and variables of the sandbox; and the reasons why it is not supported."""
    from clawgym.tasks.formats._schema import check_workspace

    environment = config.environment
    context = walk_part(folder, "environment")
    names = {file.path for file in context}
    env, reasons = environment.variables()
    sandbox: dict[str, Any] = {"env": env}
    if compose := sorted(names & _COMPOSE):
        return sandbox, [*reasons, f"needs several containers (environment/{compose[0]})"]
    at = f"{where}: working folder"
    if "Dockerfile" not in names and not environment.docker_image:
        raise TaskError(_missing(folder / "environment"))
    try:
        build = _simple_build(folder / "environment", context, environment.docker_image)
        workspace = environment.workdir or (build.workdir if build else "/")
        sandbox["env"] = {**(build.env if build else {}), **env}
        if system_folder(workspace):
            raise NeedsBuild(f"works in {workspace}, a system folder of the sandbox")
        sandbox["workspace"] = check_workspace(workspace, at)
        sandbox["inputs"] = build.inputs(workspace) if build else context
    except NeedsBuild as error:
        named = None if "Dockerfile" in names else environment.docker_image
        name, how = _image(folder / "environment", named, context)
        found = ImageStore().find(name)
        sandbox["image"] = name if named or found else "default"
        workspace = environment.workdir or (found.workdir if found else "/")
        if found is not None and not system_folder(workspace):
            if named:  # Harbor copies the folder into the working folder
                sandbox["inputs"] = context
            return {**sandbox, "workspace": check_workspace(workspace, at)}, reasons
        if found is not None:
            how = f"its image works in {workspace}, a system folder"
        reasons.append(f"{'' if named else 'environment/Dockerfile '}{error}: {how}")
    return sandbox, reasons


def _simple_build(folder: Path, context: tuple[TaskFile, ...], docker_image: str | None) -> Build | None:
    """What the Dockerfile of ``folder`` does; None for a ``docker_image`` that the default sandbox can stand for.

    One of the two is there. Raises :class:`NeedsBuild` for anything else.
    """
    names = {file.path for file in context}
    if ".dockerignore" in names:
        raise NeedsBuild("needs an image build (.dockerignore)")
    if "Dockerfile" in names:
        return read_dockerfile(read_text(folder.parent, f"{folder.name}/Dockerfile"), context)
    if not is_plain_image(docker_image or ""):
        raise NeedsBuild(f"needs the container image {docker_image}")
    return None


def _missing(folder: Path) -> str:
    return f"{folder}/Dockerfile: is missing: add it, or set docker_image in {CONFIG}"


def _image(folder: Path, named: str | None, context: tuple[TaskFile, ...]) -> tuple[str, str]:
    """The name of the image, by default that of the build context ``folder``; and the command that makes it."""
    if named is not None:
        return named, f"clawgym images add docker://{named} --name {named}"
    digest = hashlib.sha256()
    for file in sorted(context, key=lambda file: file.path):
        digest.update(f"{file.path}\0{file.executable}\0".encode() + hashlib.sha256(file.read()).digest())
    name = f"harbor/{digest.hexdigest()[:16]}"
    return name, f"clawgym images build {shlex.quote(str(folder))} --name {name}"


def _verifier(files: tuple[TaskFile, ...], config: HarborConfig, extras: Extras | None, folder: Path) -> VerifierSpec:
    where = f"{folder}/tests"
    entry = next((file for file in files if file.path == "test.sh"), None)
    if entry is not None:
        check_script(entry.read(), f"{where}/test.sh")
    elif not config.unsupported():
        raise TaskError(f"{where}/test.sh: is missing: add it, every verifier needs this entry script")
    if extras and extras.protocol == "reward_sh":
        spec = read_verifier(tuple(file for file in files if file is not entry), where)
    else:
        runnable = tuple(dataclasses.replace(f, executable=f.executable or f is entry) for f in files)
        spec = VerifierSpec("harbor", runnable, GradingMode.FORK, executes_agent_code(files, where))
    mode = GradingMode(extras.mode) if extras and extras.mode else spec.mode
    return flag_agent_tools(dataclasses.replace(spec, mode=mode, env=config.verifier.variables()[0]))


def _instruction(folder: Path, config: HarborConfig, *, exact: bool) -> str:
    names = [f"steps/{step.name}/instruction.md" for step in config.steps or ()]
    if exact:
        path = folder / "instruction.md"
        if not path.is_file():
            raise TaskError(f"{path}: is missing: add the instruction")
        return read_text(folder, "instruction.md", keep_bom=True)
    text = "\n\n".join(_without_canary(read_text(folder, name)) for name in names or ["instruction.md"])
    if not text.strip():
        raise TaskError(f"{folder}/instruction.md: is empty: write the instruction")
    return text


def _without_canary(text: str) -> str:
    """The instruction as Harbor shows it: with LF line ends, without leading canary lines and blank lines."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def script_needs(folder: Path) -> list[str]:
    """Reasons why the scripts of the task in ``folder`` are not supported without a network."""
    reasons = []
    for part in ("", *(f"steps/{step.name}/" for step in sorted((folder / "steps").glob("*")))):
        for name in (f"{part}tests/test.sh", f"{part}solution/solve.sh"):
            path = folder / name
            if path.is_file() and (match := _FETCHES.search(read_text(folder, name))):
                reasons.append(f"{name} needs the network: {match['call'].strip()[:60]}")
    return reasons


def user_needs(folder: Path) -> list[str]:
    """A reason for each user other than root in the ``task.toml`` of ``folder``; none if it cannot be read."""
    config = _config_of(folder)
    return config.users() if config is not None else []


def _config_of(folder: Path) -> HarborConfig | None:
    from clawgym.tasks.formats._harbor_schema import HarborConfig
    from clawgym.tasks.formats._schema import validated

    try:
        return validated(HarborConfig, tomllib.loads(read_text(folder, CONFIG)), str(folder / CONFIG))
    except (TaskError, tomllib.TOMLDecodeError, RecursionError):
        return None


def _other_files(folder: Path) -> list[str]:
    """Reasons in files that have a meaning for Harbor."""
    meanings = {f"{part}/.harborignore": "leaves files out" for part in ("tests", "solution")}
    meanings["trajectory.json"] = "is a conversation that the agent continues"
    return [f"{name} {meaning}" for name, meaning in meanings.items() if (folder / name).is_file()]


class MissingImage(UnsupportedTask):
    """An image is not in the store. The message names the command that makes it; ``name`` is its name there, if it is
    built from a Dockerfile."""

    def __init__(self, message: str, name: str | None) -> None:
        super().__init__(message)
        self.name = name


@dataclasses.dataclass(frozen=True)
class HarborPlace:
    """What the sandbox of an ``environment`` folder is made from: an image, and what its Dockerfile adds."""

    image: str
    workdir: str | None = None
    """None: that of the image."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, TaskFile] = dataclasses.field(default_factory=dict)
    """Absolute path -> file."""
    folders: frozenset[str] = frozenset()
    """Absolute paths of empty folders."""


def place_of(folder: Path, docker_image: str | None = None) -> HarborPlace:
    """Find out what a folder with a Dockerfile, or with none and ``docker_image``, runs in.

    Like Harbor, it prefers ``docker_image``, if that is in the store. Otherwise a simple Dockerfile is interpreted, and
    any other needs its image in the store.

    Raises :class:`~clawgym.errors.UnsupportedTask`; :class:`MissingImage` if an image would help.
    """
    context = walk_part(folder.parent, folder.name)
    names = {file.path for file in context}
    if compose := sorted(names & _COMPOSE):
        raise UnsupportedTask(f"needs several containers ({folder.name}/{compose[0]}): use Harbor's docker environment")
    store = ImageStore()
    if docker_image and (found := store.find(docker_image)):
        return HarborPlace(docker_image, found.workdir)
    if folder.name == "environment" and (ours := _written_here(folder.parent)):
        return ours
    if "Dockerfile" not in names and docker_image is None:
        raise UnsupportedTask(_missing(folder))
    try:
        build = _simple_build(folder, context, docker_image)
        if build is None:
            return HarborPlace("default", "/")
        return HarborPlace("default", build.workdir, build.env, build.files, frozenset(build.folders))
    except NeedsBuild as error:
        named = None if "Dockerfile" in names else docker_image
        name, how = _image(folder, named, context)
        if found := store.find(name):
            return HarborPlace(name, found.workdir)
        message = f"{'' if named else f'{folder.name}/Dockerfile '}{error}: {how}"
        raise MissingImage(message, None if named else name) from error


def _written_here(folder: Path) -> HarborPlace | None:
    """The place of a folder that :func:`write_task` wrote and nobody changed."""
    from clawgym.tasks.formats._schema import Extras, validated

    config = _config_of(folder)
    if config is None or not isinstance(ours := config.metadata.get("clawgym"), dict):
        return None
    sandbox = _ours(folder, config, validated(Extras, ours, f"{folder / CONFIG}: metadata.clawgym"))
    if sandbox is None:
        return None
    workspace = sandbox["workspace"]
    return HarborPlace(
        sandbox["image"], workspace, files={f"{workspace}/{file.path}": file for file in sandbox["inputs"]}
    )


@formats.register("harbor")
class HarborFormat(TaskFormat):
    """Harbor folders: ``task.toml``, ``instruction.md``, tests."""

    def is_task(self, path: Path) -> bool:
        return is_task(path)

    def read_task(self, path: Path) -> Task:
        return read_task(path)

    def write_task(self, task: Task, path: Path) -> None:
        write_task(task, path)
