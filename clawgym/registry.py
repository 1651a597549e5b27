"""One registry for every kind of thing that others may add.

A name is found in one of three places, in this order:

1. built in: a module of this library registers it with the decorator below;
2. an entry point of an installed package, in the group of its kind (``clawgym.agents``, ``clawgym.sandboxes``);
3. ``package.module:thing``: any object that Python can import. Names that start with a prefix of their kind are made
   by a function instead: ``verl:gpg`` is verl's own loss ``gpg``.

>>> from clawgym.registry import agents
>>> @agents.register("lazy")
... class LazyAgent:
...     \"\"\"Submits at once.\"\"\"

makes ``lazy`` known in this process. Another package makes it known everywhere with::

    [project.entry-points."clawgym.agents"]
    lazy = "my_package:LazyAgent"

The options of a thing are the keyword parameters of its constructor (or of the function that makes it): their
annotations are the types that :meth:`Registry.make` validates, their defaults the defaults. Where the library calls
the thing with arguments of its own (an advantage, a loss, a scorer, a tracker, a trainer), these come first, and the
options are the keyword-only parameters.

Invariants: looking for a name imports only the module that has it; listing names imports none.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from clawgym.errors import (
    AgentError,
    ClawGymError,
    EngineError,
    EnvError,
    GatewayError,
    GradingError,
    MissingDependency,
    SandboxUnavailable,
    ServiceError,
    TaskError,
    TaskSetNotFound,
    TrainingError,
)

__all__ = ["KINDS", "RegistryEntry", "Option", "Registry", "did_you_mean"]

_Thing = TypeVar("_Thing", bound=Callable[..., Any])
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_log = logging.getLogger("clawgym.registry")


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """One registered name."""

    kind: str
    name: str
    target: str
    """``package.module:thing``."""
    source: str
    """``built in``, ``registered here``, or the distribution whose entry point it is."""
    summary: str = ""
    """First line of its docstring; empty where reading that would need an import that fails."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a thing."""

    name: str
    type: str
    """As annotated."""
    default: str
    """As Python shows it; empty for an option that must be given."""
    about: str = ""
    """Its line in the ``Args:`` section of the docstring."""


class Registry:
    """The things of one kind, by name.

    Args:
        kind: what one thing is called in messages: ``agent``.
        group: the entry point group, which is also its plural: ``clawgym.agents``.
        packages: packages of this library whose modules register things of this kind.
        error: raised for an unknown name and for options that do not fit.
        called: whether the library calls a thing with arguments of its own, which come first; its options are then
            its keyword-only parameters.
        prefixes: prefix -> ``package.module:function``, which makes the thing called ``prefix:NAME`` from NAME.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        packages: Sequence[str],
        error: type[ClawGymError] = ClawGymError,
        *,
        called: bool = False,
        prefixes: Mapping[str, str] = {},
    ) -> None:
        self.kind, self.group, self.error, self._called = kind, group, error, called
        self._packages, self._prefixes = tuple(packages), prefixes
        self._here: dict[str, Any] = {}
        self.on_register: Callable[[str, Any], None] = lambda name, thing: None
        """Told of each name that is registered in this process, with its thing."""

    @property
    def plural(self) -> str:
        """``agents``."""
        return self.group.rpartition(".")[2]

    def register(self, name: str) -> Callable[[_Thing], _Thing]:
        """Decorator: make a class, or a function that makes one, known as ``name`` in this process."""

        def keep(thing: _Thing) -> _Thing:
            self._here[name] = thing
            self.on_register(name, thing)
            return thing

        return keep

    def names(self) -> tuple[str, ...]:
        """Every known name, in alphabetical order."""
        return tuple(sorted({*self._built_in, *self._here, *self._entry_points()}))

    def __contains__(self, name: str) -> bool:
        return name in self._here or name in self._built_in or name in self._entry_points()

    def get(self, name: str) -> Any:
        """The thing called ``name``.

        Raises the kind's error if there is none, or if its module cannot be imported.
        """
        if name in self._here:
            return self._here[name]
        if module := self._built_in.get(name):
            importlib.import_module(module)
            return self._here[name]
        if point := self._entry_points().get(name):
            try:
                return point.load()
            except (ImportError, AttributeError) as error:
                owner = point.dist.name if point.dist else "a package"
                raise self.error(
                    f"{self.kind} {name!r} of {owner} cannot be imported ({error}): repair or uninstall {owner}"
                ) from error
        prefix, colon, rest = name.partition(":")
        if colon and prefix in self._prefixes:
            return self._import(self._prefixes[prefix])(rest)
        if colon:
            return self._import(name)
        raise self.unknown(name)

    def things(self) -> Iterator[tuple[str, Any]]:
        """Every known name and its thing, those that are built in first.

        Imports all of them. Those that cannot be imported are left out, with a warning.
        """
        for name in sorted(self.names(), key=lambda name: name not in self._built_in):
            try:
                yield name, self.get(name)
            except (self.error, MissingDependency) as error:
                _log.warning("%s", error)

    def make(self, name: str, /, *given: Any, **options: Any) -> Any:
        """The thing called ``name``, made with ``options``, after what the library gives it.

        Raises the kind's error for an unknown name, an option it does not take, or a value of another type.
        """
        thing = self.get(name)
        return thing(*given, **self.validated(name, thing, options))

    def validated(self, name: str, thing: Any, options: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
        """``options`` as ``thing`` takes them: texts of a command line become numbers, paths and so on.

        With ``partial``, more will be given later. Raises the kind's error for an option that it does not take, one
        that is missing, or a value of another type.
        """
        import pydantic

        parameters = {p.name: p for p in self._parameters(thing)}
        if not any(p.kind is p.VAR_KEYWORD for p in _signature(thing).parameters.values()):
            for option in options:
                if option not in parameters:
                    takes = f"it takes {', '.join(sorted(parameters))}" if parameters else "it takes no options"
                    hint = did_you_mean(option, parameters)
                    raise self.error(f"{self.kind} {name!r} does not take {option}: {takes}{hint and '.' + hint}")
        missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
        if missing and not partial:
            raise self.error(f"{self.kind} {name!r} needs {', '.join(missing)}: give {missing[0]}=...")
        hints = _hints(thing)
        checked: dict[str, Any] = {}
        for option, value in options.items():
            checked[option] = value
            annotation = hints.get(option, Any)
            if value is parameters.get(option, inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY)).default:
                continue
            try:
                adapter = pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
            except pydantic.PydanticUserError:  # a model that brings its own configuration
                adapter = pydantic.TypeAdapter(annotation)
            except Exception:  # an annotation that is no type for pydantic: the constructor checks it
                continue
            try:
                checked[option] = adapter.validate_python(value)
            except pydantic.ValidationError as error:
                why = "; ".join(str(one["msg"]) for one in error.errors()[:2])
                raise self.error(
                    f"{self.kind} {name!r}: option {option}={value!r}: {why}: see `clawgym list {self.plural} {name}`"
                ) from error
        return checked

    def options(self, name: str) -> list[Option]:
        """What the thing called ``name`` can be made with. Raises as :meth:`get` does."""
        thing = self.get(name)
        told = _told(inspect.getdoc(thing) or "")
        hints = _hints(thing)
        return [
            Option(
                p.name,
                _shown(hints.get(p.name, p.annotation)),
                "" if p.default is p.empty else repr(p.default),
                told.get(p.name, ""),
            )
            for p in self._parameters(thing)
        ]

    def entries(self) -> list[RegistryEntry]:
        """Every known name with its first line. Imports nothing."""
        found = {name: RegistryEntry(self.kind, name, *self._static(name)) for name in self._built_in}
        for name, thing in self._here.items():
            if name not in found:
                target = f"{thing.__module__}:{thing.__qualname__}"
                found[name] = RegistryEntry(self.kind, name, target, "registered here", _first_line(thing.__doc__))
        for name, point in self._entry_points().items():
            owner = f"{point.dist.name} {point.dist.version}" if point.dist else "an entry point"
            found.setdefault(name, RegistryEntry(self.kind, name, point.value, owner, _summary_of(point.value)))
        return [found[name] for name in sorted(found)]

    def unknown(self, name: str) -> ClawGymError:
        """The error for a name that is not known, with the closest one."""
        known = self.names()
        hint = did_you_mean(name, known)
        return self.error(
            f"there is no {self.kind} {name!r}.{hint} Known {self.plural}: {', '.join(known)}, or package.module:thing"
        )

    def _parameters(self, thing: Any) -> list[inspect.Parameter]:
        named = [inspect.Parameter.KEYWORD_ONLY, *([] if self._called else [inspect.Parameter.POSITIONAL_OR_KEYWORD])]
        return [p for p in _signature(thing).parameters.values() if p.kind in named]

    # -- where names come from

    @cached_property
    def _built_in(self) -> dict[str, str]:
        """Name -> module. Found in the text of the modules, without importing them."""
        pattern = re.compile(rf'^@{self.plural}\.register\("([^"\n]+)"\)', re.MULTILINE)
        return {
            name: module
            for package in self._packages
            for module, path in _modules(package)
            for name in pattern.findall(path.read_text("utf-8"))
        }

    def _static(self, name: str) -> tuple[str, str, str]:
        """Target, source and summary of a built-in name."""
        module = self._built_in[name]
        for node in ast.parse(_path_of(module).read_text("utf-8")).body:
            if isinstance(node, _Definition) and any(
                isinstance(call, ast.Call) and call.args and ast.unparse(call.args[0]) == repr(name)
                for call in node.decorator_list
            ):
                return f"{module}:{node.name}", "built in", _first_line(ast.get_docstring(node))
        return module, "built in", ""

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {point.name: point for point in importlib.metadata.entry_points(group=self.group)}

    def _import(self, path: str) -> Any:
        module, _, name = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            return found
        except (ImportError, AttributeError, ValueError) as error:
            raise self.error(
                f"{self.kind} {path!r} was not found ({error}): write package.module:thing, and let Python find the "
                "module (PYTHONPATH=folder)"
            ) from error


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """Name and file of every module of a package and its subpackages."""
    folder = _path_of(package).parent
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def _path_of(module: str) -> Path:
    """The file of a module, which is not imported. Raises LookupError if there is no such top-level module."""
    top, _, below = module.partition(".")
    found = importlib.util.find_spec(top)
    if found is None or found.origin is None:
        raise LookupError(module)
    if not below:
        return Path(found.origin)
    path = Path(found.origin).parent.joinpath(*below.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _summary_of(target: str) -> str:
    """The first line of an entry point's docstring, read without importing it."""
    module, _, name = target.partition(":")
    try:
        tree = ast.parse(_path_of(module).read_text("utf-8"))
    except (OSError, LookupError, ValueError, SyntaxError):
        return ""
    for node in tree.body:
        if isinstance(node, _Definition) and node.name == name:
            return _first_line(ast.get_docstring(node))
    return ""


def _first_line(doc: str | None) -> str:
    """The first sentence of a docstring, as plain text."""
    line = " ".join((doc or "").strip().partition("\n\n")[0].split())
    line = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`|``([^`]*)``", lambda found: found[1] or found[2], line)
    return re.split(r"(?<=[^.]{3}\.)\s", line, maxsplit=1)[0]


def _signature(thing: Any) -> inspect.Signature:
    try:
        return inspect.signature(thing)
    except (TypeError, ValueError):
        return inspect.Signature()


def _hints(thing: Any) -> dict[str, Any]:
    """The annotations of what makes a thing; none of those that only a type checker can resolve."""
    made_by = thing.__init__ if isinstance(thing, type) else thing
    try:
        return typing.get_type_hints(made_by, include_extras=True)
    except Exception:
        return {}


def _shown(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "Any"
    if isinstance(annotation, str):
        return annotation
    if typing.get_origin(annotation) is typing.Annotated:  # bounds are told in words
        annotation = typing.get_args(annotation)[0]
    return inspect.formatannotation(annotation).replace("typing.", "")


def _told(doc: str) -> dict[str, str]:
    """The ``Args:`` section of a docstring."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    told: dict[str, str] = {}
    last = ""
    for line in section[1].splitlines() if section else ():
        if start := re.match(r"[ \t]{1,4}(\w+)(?: \([^)]*\))?: (.*)", line):
            last = start[1]
            told[last] = start[2].strip()
        elif last and line.strip():
            told[last] += " " + line.strip()
    return told


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest of ``known``; empty where none is close."""
    folded = {one.casefold(): one for one in known}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    return f" Did you mean {folded[close[0]]!r}?" if close else ""


advantages = Registry(
    "advantage",
    "clawgym.advantages",
    ["clawgym.trainers"],
    TrainingError,
    called=True,
    prefixes={"verl": "clawgym.trainers.verl.from_verl:advantage"},
)
agents = Registry("agent", "clawgym.agents", ["clawgym.agents", "clawgym.interop"], AgentError)
dialects = Registry("dialect", "clawgym.dialects", ["clawgym.gateway.dialects"], GatewayError)
engines = Registry("engine", "clawgym.engines", ["clawgym.engines"], EngineError)
envs = Registry("env", "clawgym.envs", ["clawgym.envs", "clawgym.interop"], EnvError)
formats = Registry("format", "clawgym.formats", ["clawgym.tasks.formats"], TaskError)
graders = Registry("grader", "clawgym.graders", ["clawgym.rewards"], GradingError)
judges = Registry("judge", "clawgym.judges", ["clawgym.rewards", "clawgym.simulation"], TrainingError)
losses = Registry(
    "loss",
    "clawgym.losses",
    ["clawgym.trainers"],
    TrainingError,
    called=True,
    prefixes={"verl": "clawgym.trainers.verl.from_verl:loss"},
)
packs = Registry(
    "pack",
    "clawgym.packs",
    ["clawgym.tasks.packs"],
    TaskSetNotFound,
    prefixes={"inspect": "clawgym.interop.inspect:pack", "verifiers": "clawgym.interop.verifiers:pack"},
)
parsers = Registry("parser", "clawgym.parsers", ["clawgym.gateway"], GatewayError)
sandboxes = Registry("sandbox", "clawgym.sandboxes", ["clawgym.sandbox"], SandboxUnavailable)
scorers = Registry("scorer", "clawgym.scorers", ["clawgym.online", "clawgym.simulation"], ServiceError, called=True)
trackers = Registry("tracker", "clawgym.trackers", ["clawgym.trainers.common"], TrainingError, called=True)
users = Registry("user", "clawgym.users", ["clawgym.simulation"], AgentError)
trainers = Registry("trainer", "clawgym.trainers", ["clawgym.trainers"], TrainingError, called=True)

KINDS: Mapping[str, Registry] = {
    one.plural: one
    for one in (
        advantages,
        agents,
        dialects,
        engines,
        envs,
        formats,
        graders,
        judges,
        losses,
        packs,
        parsers,
        sandboxes,
        scorers,
        trackers,
        trainers,
        users,
    )
}
"""Plural -> registry."""
