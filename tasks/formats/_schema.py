"""Pydantic models of ``data_entry.json``, of Hub rows, and of the ``clawgym`` object in both.

This module is imported only when a task is read or written. Unknown keys of the published formats are ignored, as in
their original harness. An unknown key in the ``clawgym`` object is an error, since it is probably a typo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from clawgym.errors import TaskError
from clawgym.records import (
    DEFAULT_WORKSPACE,
    Desktop,
    DesktopStep,
    Dialogue,
    GradingMode,
    Layer,
    Limits,
    Site,
    Task,
    TaskFile,
    ToolServer,
    VerifierSpec,
)
from clawgym.registry import graders, users
from clawgym.tasks.curation.mutable import inputs_to_change
from clawgym.tasks.formats._files import flag_agent_tools, packages_for

__all__ = ["TaskEntry", "Extras", "Row", "validated"]

Model = TypeVar("Model", bound=BaseModel)
Text = Annotated[str, Field(pattern=r"\S")]
_LIMITS = TypeAdapter(Limits)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ServerEntry(_Strict):
    """A tool server. Its files are in ``tools/<name>/``."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str
    argv: Annotated[list[str], Field(min_length=1)]
    env: dict[str, str] = {}


class SiteServer(_Strict):
    """The web server of a desktop. Its files are in ``site/``."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    argv: Annotated[list[str], Field(min_length=1)]


class StepEntry(_Strict):
    """One step on a desktop."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    kind: Literal["run", "start", "focus", "close", "act", "wait"]
    words: list[str] = []


class Screen(_Strict):
    """A desktop."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    width: int = Desktop().width
    height: int = Desktop().height
    programs: list[Annotated[list[str], Field(min_length=1)]] = []
    page: str = ""
    site: SiteServer | None = None
    opening: list[StepEntry] = []
    closing: list[StepEntry] = []


class DialogueEntry(_Strict):
    """A dialogue."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    opening: list[Annotated[list[str], Field(min_length=2, max_length=2)]]
    """Role and text."""
    user: str = ""
    """A registered user. ``module:thing`` is not allowed: a task file must not choose what is imported."""
    options: dict[str, Any] = {}
    functions: list[dict[str, Any]] = []
    withheld: list[str] = []
    private: str = ""


class Extras(_Strict):
    """The ``clawgym`` object: fields of a task that the published formats lack. A missing key means the default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    protocol: Literal["reward_sh", "harbor"] | None = None
    """The verifier's protocol, if it is not that of the format. Its entry script was then added by the writer."""
    workspace: str = DEFAULT_WORKSPACE
    image: str = "default"
    mode: Literal["clean", "fork", "live"] | None = None
    mutable_inputs: list[str] | None = None
    """``None``: derived from the instruction by :mod:`clawgym.tasks.curation.mutable`."""
    env: dict[str, str] = {}
    verifier_env: dict[str, str] = {}
    limits: dict[str, int | float] = {}
    unsupported: str | None = None
    grader: str = ""
    """A registered grader in place of a verifier. ``module:thing`` is not allowed: a task file must not choose what is
    imported."""
    grader_options: dict[str, Any] = {}
    protected: list[str] = []
    """Protected files of the verifier (:attr:`~clawgym.records.VerifierSpec.protected`)."""
    layers: dict[str, dict[str, Any]] = {}
    """Folder in the sandbox -> lock of the layer mounted there (:meth:`clawgym.tasks.layers.Lock.as_dict`)."""
    tools: list[ServerEntry] = []
    desktop: Screen | None = None
    dialogue: DialogueEntry | None = None
    metadata: dict[str, Any] | None = None
    """For rows only; folders have metadata in ``data_entry.json``."""

    def read_grader(self, where: str) -> VerifierSpec:
        """The verifier with this grader. Raises :class:`TaskError` if no grader of this name is registered."""
        if self.grader not in graders:
            raise TaskError(
                f"{where}: field clawgym.grader: no grader {self.grader!r} is registered: install the package that has "
                "it, or use one that `clawgym list graders` shows"
            )
        return VerifierSpec("grader", grader=self.grader, grader_options=self.grader_options)

    def read_limits(self, where: str, base: Limits | None = None) -> Limits:
        """``base`` changed by these limits. Raises :class:`TaskError` naming an invalid limit."""
        if not self.limits and base is None:
            return Limits()
        known = {field.name for field in dataclasses.fields(Limits)}
        if unknown := sorted(set(self.limits) - known):
            raise TaskError(f"{where}: limits.{unknown[0]} is not a limit: use one of {', '.join(sorted(known))}")
        merged = {**dataclasses.asdict(base or Limits()), **self.limits}
        try:
            return _LIMITS.validate_python(merged)
        except ValidationError as error:
            raise _task_error(error, f"{where}: limits") from error

    def read_mutable(self, instruction: str, inputs: Iterable[TaskFile]) -> tuple[str, ...]:
        """These patterns, or those derived from the instruction."""
        if self.mutable_inputs is not None:
            return tuple(self.mutable_inputs)
        return inputs_to_change(instruction, [file.path for file in inputs])

    def read_layers(self, where: str) -> dict[str, Layer]:
        """These layers, prepared on this machine or not. Raises :class:`TaskError` for an invalid folder or lock."""
        if not self.layers:
            return {}
        from clawgym.tasks.layers import layer_folder, lock_of

        found: dict[str, Layer] = {}
        for target, body in self.layers.items():
            check_workspace(target, f"{where}: clawgym.layers")
            lock = lock_of(body, f"{where}: clawgym.layers[{target!r}]")
            found[target] = Layer(lock.name, lock.digest, layer_folder(lock))
        return found

    def read_tools(self, where: str, files: Iterable[TaskFile]) -> tuple[ToolServer, ...]:
        """These servers, each with its ``files`` (``<name>/<path>``). Raises :class:`TaskError` for duplicate names and
        files without a server."""
        parts: dict[str, list[TaskFile]] = {server.name: [] for server in self.tools}
        if len(parts) < len(self.tools):
            raise TaskError(f"{where}: clawgym.tools: two servers have the same name: rename one")
        for file in files:
            name, _, path = file.path.partition("/")
            if name not in parts or not path:
                raise TaskError(
                    f"{where}: tools/{file.path} belongs to no server in clawgym.tools: add the server, or "
                    "move the file"
                )
            parts[name].append(dataclasses.replace(file, path=path))
        try:
            return tuple(ToolServer(s.name, tuple(s.argv), tuple(parts[s.name]), s.env) for s in self.tools)
        except TaskError as error:
            raise TaskError(f"{where}: clawgym.tools: {error}") from error

    def read_desktop(self, where: str, files: tuple[TaskFile, ...]) -> Desktop | None:
        """This desktop, with the ``files`` of its site. Raises :class:`TaskError` if it is invalid."""
        spec = self.desktop
        if files and (spec is None or spec.site is None):
            raise TaskError(f"{where}: site/{files[0].path} needs clawgym.desktop.site: set that, or move the file")
        if spec is None:
            return None
        if self.tools:
            raise TaskError(f"{where}: clawgym has both tools and desktop: remove one of them")
        site = Site(tuple(spec.site.argv), files) if spec.site else None
        try:
            steps = [tuple(DesktopStep(s.kind, tuple(s.words)) for s in part) for part in (spec.opening, spec.closing)]
            return Desktop(spec.width, spec.height, tuple(map(tuple, spec.programs)), site, spec.page, *steps)
        except TaskError as error:
            raise TaskError(f"{where}: clawgym.desktop: {error}") from error

    def read_dialogue(self, where: str) -> Dialogue | None:
        """This dialogue. Raises :class:`TaskError` if no such user is registered."""
        given = self.dialogue
        if given is None:
            return None
        if given.user and given.user not in users:
            raise TaskError(
                f"{where}: field clawgym.dialogue: no user {given.user!r} is registered: install the package that has "
                "it, or use one that `clawgym list users` shows"
            )
        opening = tuple((role, text) for role, text in given.opening)
        if strange := [role for role, _ in opening if role not in ("system", "user", "assistant")]:
            raise TaskError(
                f"{where}: field clawgym.dialogue.opening: role {strange[0]!r}: use system, user or assistant"
            )
        return Dialogue(
            opening, given.user, given.options, tuple(given.functions), tuple(given.withheld), given.private
        )

    def task(
        self,
        where: str,
        verifier: VerifierSpec,
        *,
        tool_files: Iterable[TaskFile] = (),
        site_files: tuple[TaskFile, ...] = (),
        **fields: Any,
    ) -> Task:
        """A task with these fields. Raises :class:`TaskError` for an invalid limit, workspace, layer, tool server or
        desktop."""
        check_workspace(self.workspace, where)
        verifier = dataclasses.replace(
            verifier,
            mode=GradingMode(self.mode) if self.mode else verifier.mode,
            mutable_inputs=self.read_mutable(fields["instruction"], fields["inputs"]),
            env=self.verifier_env or verifier.env,
            protected=tuple(self.protected),
        )
        given: dict[str, Any] = {"workspace": self.workspace, "image": self.image, "env": self.env}
        layers = self.read_layers(where)
        given |= {"layers": layers, "tools": self.read_tools(where, tool_files)}
        given["desktop"] = self.read_desktop(where, site_files)
        given["dialogue"] = self.read_dialogue(where)
        given["packages"] = packages_for((*verifier.files, *fields["inputs"]))
        given["unsupported"] = self.unsupported or unprepared_layer(layers)
        verifier = flag_agent_tools(verifier)
        return Task(**{**given, "limits": self.read_limits(where), "verifier": verifier, **fields})

    @classmethod
    def of(cls, task: Task, protocol: Literal["reward_sh", "harbor"]) -> dict[str, Any]:
        """The ``clawgym`` object of ``task`` as JSON values, without defaults. ``protocol`` is that of the format."""
        default = dataclasses.asdict(Limits())
        found = inputs_to_change(task.instruction, [file.path for file in task.inputs])
        extras = cls(
            protocol=_other_protocol(task.verifier, protocol),
            grader=task.verifier.grader,
            grader_options=dict(task.verifier.grader_options),
            workspace=task.workspace,
            image=task.image,
            mode=task.verifier.mode.value if task.verifier.mode != GradingMode.CLEAN else None,
            mutable_inputs=None if task.verifier.mutable_inputs == found else list(task.verifier.mutable_inputs),
            env=dict(task.env),
            verifier_env=dict(task.verifier.env),
            limits={k: v for k, v in dataclasses.asdict(task.limits).items() if v != default[k]},
            unsupported=task.unsupported,
            protected=list(task.verifier.protected),
            layers=_locks(task),
            tools=[ServerEntry(name=s.name, argv=list(s.argv), env=dict(s.env)) for s in task.tools],
            desktop=_screen(task.desktop),
            dialogue=_dialogue(task.dialogue),
        )
        return extras.model_dump(exclude_defaults=True)


def check_folders_only(what: Extras | Task, where: str, format: str) -> None:
    """Raise :class:`TaskError` for layers, tools, a desktop, a dialogue or a grader, which only ClawGym folders can
    store."""
    grader = what.verifier.grader if isinstance(what, Task) else what.grader
    parts = {"layers": what.layers, "tools": what.tools, "a desktop": what.desktop, "a dialogue": what.dialogue}
    if kind := next((name for name, part in parts.items() if part), "a grader" if grader else ""):
        raise TaskError(f"{where}: has {kind}, which {format} cannot hold: use ClawGym folders")


def _other_protocol(
    verifier: VerifierSpec, own: Literal["reward_sh", "harbor"]
) -> Literal["reward_sh", "harbor"] | None:
    """The protocol of ``verifier``, or None if it is ``own`` or a grader."""
    return None if verifier.protocol in ("grader", own) else verifier.protocol


def unprepared_layer(layers: Mapping[str, Layer]) -> str | None:
    """Why a task with ``layers`` cannot run on this machine, or None if all are prepared."""
    for layer in layers.values():
        if not layer.folder.is_dir():
            return f"its layer {layer.name} is not prepared on this machine: run clawgym tasks prepare FOLDER"
    return None


def _screen(desktop: Desktop | None) -> Screen | None:
    if desktop is None:
        return None
    site = SiteServer(argv=list(desktop.site.argv)) if desktop.site else None
    programs = [list(argv) for argv in desktop.programs]
    opening, closing = (
        [StepEntry(kind=step.kind, words=list(step.words)) for step in steps]
        for steps in (desktop.opening, desktop.closing)
    )
    return Screen(
        width=desktop.width,
        height=desktop.height,
        programs=programs,
        page=desktop.page,
        site=site,
        opening=opening,
        closing=closing,
    )


def _dialogue(given: Dialogue | None) -> DialogueEntry | None:
    if given is None:
        return None
    opening = [list(turn) for turn in given.opening]
    functions = [dict(function) for function in given.functions]
    return DialogueEntry(
        opening=opening,
        user=given.user,
        options=dict(given.options),
        functions=functions,
        withheld=list(given.withheld),
        private=given.private,
    )


def _locks(task: Task) -> dict[str, dict[str, Any]]:
    if not task.layers:
        return {}
    if why := unprepared_layer(task.layers):
        raise TaskError(f"task {task.id} cannot be written: {why}")
    from clawgym.tasks.layers import lock_of_layer

    return {target: lock_of_layer(layer).as_dict() for target, layer in task.layers.items()}


class TaskEntry(_Strict):
    """``data_entry.json``."""

    task_id: str
    user_query: Text
    metadata: dict[str, Any]
    input_mount_dir: str | None = None
    clawgym: Extras = Extras()


class RowFile(_Strict):
    """One entry of a row's ``input_files``. This library adds ``executable``."""

    file_path: str
    content: str
    executable: bool = False

    def task_file(self, path: str) -> TaskFile:
        return TaskFile(path, self.content.encode(), self.executable)


class Row(_Strict):
    """One line of the Hub's JSONL. This library adds ``clawgym``, ``solution`` and ``wrong``."""

    prompt: Text
    hook_code: str | None = None
    input_files: list[RowFile] | None = None
    rule: Any = None
    origin_template: str | None = None
    solution: list[RowFile] = []
    wrong: list[RowFile] = []
    clawgym: Extras = Extras()


def validated(model: type[Model], value: Mapping[str, Any], where: str) -> Model:
    """``value`` as ``model``. Raises :class:`TaskError` naming ``where`` and the first bad field."""
    try:
        return model.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise _task_error(error, where) from error


def _task_error(error: ValidationError | RecursionError, where: str) -> TaskError:
    if isinstance(error, RecursionError):
        return TaskError(f"{where}: is nested too deeply: flatten it")
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"])) or "it"
    message = "must not be empty" if first["type"] == "string_pattern_mismatch" else first["msg"]
    return TaskError(f"{where}: field {field}: {message}: correct it")


def check_workspace(path: str, where: str) -> str:
    """Return ``path`` if it is an absolute, normalized POSIX path other than ``/``. Raises :class:`TaskError`
    otherwise."""
    pure = PurePosixPath(path)
    if (
        not pure.is_absolute()
        or ".." in pure.parts
        or str(pure) != path
        or path in ("/", "//")
        or not path.isprintable()
    ):
        raise TaskError(f"{where}: {path!r} is not a plain absolute folder: use one like {DEFAULT_WORKSPACE}")
    return path
