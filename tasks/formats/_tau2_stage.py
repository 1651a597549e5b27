"""Runs the environments of tau2-bench in a sandbox: the set's own tools, over small stand-ins for what they import.

Standard library only: it is mounted as ``tau2_stage.py`` beside the folder ``tau2`` of the set's package. The package
needs pydantic and others, which the sandbox does not have; the stand-ins have what the tools and their data use.
"""

from __future__ import annotations

import abc
import copy
import datetime
import enum
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["DomainStage"]

_MISSING: Any = object()


class ValidationError(ValueError):
    """A value that does not fit a field."""


class FieldInfo:
    """What a class says of a field."""

    def __init__(self, default: Any = _MISSING, *, default_factory: Any = None, description: str = "", **_: Any):
        self.default = _MISSING if default is ... else default
        self.factory, self.description = default_factory, description

    def make(self) -> Any:
        return self.factory() if self.factory else copy.deepcopy(self.default)

    @property
    def required(self) -> bool:
        return self.factory is None and self.default is _MISSING


class BaseModel(abc.ABC):  # noqa: B024
    """Classes with fields, as pydantic has them."""

    model_config: typing.ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **data: Any) -> None:
        fields = _fields(type(self))
        if self.model_config.get("extra") == "forbid" and (more := data.keys() - fields.keys()):
            raise ValidationError(f"{type(self).__name__}: extra fields {sorted(more)}")
        for name, (kind, info) in fields.items():
            if name in data:
                object.__setattr__(self, name, _converted(kind, data[name], f"{type(self).__name__}.{name}"))
            elif info.required:
                raise ValidationError(f"{type(self).__name__}: field {name} is required")
            else:
                object.__setattr__(self, name, info.make())

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        return _converted(cls, value, cls.__name__)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {name: _dumped(self.__dict__[name]) for name in _fields(type(self))}

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self.model_dump(), default=str)

    def model_copy(self, *, deep: bool = False, **_: Any) -> Any:
        return copy.deepcopy(self) if deep else copy.copy(self)

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        fields = _fields(cls)
        properties: dict[str, Any] = {}
        for name, (kind, info) in fields.items():
            about = {"description": info.description} if info.description else {}
            default = {} if info.required or info.factory else {"default": _dumped(info.default)}
            properties[name] = {**_schema(kind), **about, **default}
        required = [name for name, (_, info) in fields.items() if info.required]
        return {"type": "object", "properties": properties, "required": required}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return " ".join(f"{name}={self.__dict__[name]!r}" for name in _fields(type(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={self.__dict__[n]!r}' for n in _fields(type(self)))})"


_known: dict[type, dict[str, tuple[Any, FieldInfo]]] = {}


def _fields(cls: type) -> dict[str, tuple[Any, FieldInfo]]:
    """Name -> annotation and info, of the class and its bases."""
    if cls in _known:
        return _known[cls]
    found: dict[str, tuple[Any, FieldInfo]] = {}
    for name, kind in typing.get_type_hints(cls, include_extras=True).items():
        if name.startswith("_") or name == "model_config" or typing.get_origin(kind) is typing.ClassVar:
            continue
        given = getattr(cls, name, _MISSING)
        info = given if isinstance(given, FieldInfo) else None
        for extra in getattr(kind, "__metadata__", ()):
            info = info or (extra if isinstance(extra, FieldInfo) else None)
        if given is not _MISSING and not isinstance(given, FieldInfo):
            info = FieldInfo(given, description=info.description if info else "")
        found[name] = kind, info or FieldInfo()
    _known[cls] = found
    return found


def _converted(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``. Raises :class:`ValidationError`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or isinstance(kind, typing.TypeVar):
        return value
    if origin is typing.Annotated:
        return _converted(arguments[0], value, where)
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is typing.Literal:
        if value in arguments:
            return value
    elif origin is list and isinstance(value, list | tuple):
        return [_converted(arguments[0], one, where) for one in value]
    elif origin is dict and isinstance(value, dict):
        return {_converted(arguments[0], k, where): _converted(arguments[1], v, where) for k, v in value.items()}
    elif origin in (tuple, set):
        return origin(value)
    elif origin is not None:
        return value
    elif kind is type(None):
        if value is None:
            return value
    elif isinstance(kind, type):
        return _plain(kind, value, where)
    raise ValidationError(f"{where}: {value!r:.200} does not fit")


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:  # of the very type
        if isinstance(kind, type) and type(value) is kind:
            return value
    for kind in kinds:
        try:
            return _converted(kind, value, where)
        except ValidationError:
            continue
    raise ValidationError(f"{where}: {value!r:.200} fits none of its types")


def _plain(kind: type, value: Any, where: str) -> Any:
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    try:
        if issubclass(kind, BaseModel) and isinstance(value, dict):
            return kind(**value)
        if issubclass(kind, enum.Enum):
            return kind(value)
        if kind is float and isinstance(value, int | str):
            return float(value)
        if kind is int and (isinstance(value, str | bool) or (isinstance(value, float) and value.is_integer())):
            return int(value)
        if kind is bool and value in (0, 1, "true", "false"):
            return value in (1, "true")
        if kind in (datetime.date, datetime.datetime) and isinstance(value, str):
            return kind.fromisoformat(value)  # type: ignore[attr-defined]
        if kind is datetime.date and isinstance(value, datetime.datetime):
            return value.date()
    except (TypeError, ValueError) as error:
        raise ValidationError(f"{where}: {error}") from error
    raise ValidationError(f"{where}: {value!r:.200} is no {kind.__name__}")


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _dumped(one) for key, one in value.items()}
    return type(value)(map(_dumped, value)) if isinstance(value, list | tuple | set) else value


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def _schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of an annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _schema(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if one is type(None) else _schema(one) for one in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (list, set, tuple):
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_json_schema()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [one.value for one in kind]}
    return {"type": _JSON_TYPES[kind]} if kind in _JSON_TYPES else {}


def _create_model(name: str, **fields: tuple[Any, Any]) -> type:
    body: dict[str, Any] = {"__annotations__": {key: kind for key, (kind, _) in fields.items()}}
    body |= {key: FieldInfo(default) if default is ... else default for key, (_, default) in fields.items()}
    return type(name, (BaseModel,), body)


class _Nested(dict[str, Any]):
    """A dict whose update goes into nested ones."""

    def update(self, other: Mapping[str, Any]) -> None:  # type: ignore[override]
        for key, value in other.items():
            mine = self.get(key)
            if isinstance(mine, dict) and isinstance(value, dict):
                nested = _Nested(mine)
                nested.update(value)
                self[key] = dict(nested)
            else:
                self[key] = value

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def _parsed(text: str) -> Any:
    """A docstring in Google's style."""
    text = inspect.cleandoc(text)
    head, *_ = re.split(r"^(?:Args|Returns|Raises|Examples?|Note):[ ]*$", text, maxsplit=1, flags=re.M)
    short, _, long = head.strip().partition("\n\n") if "\n\n" in head else head.strip().partition("\n")
    section = re.search(r"^Args:[ ]*\n((?:[ \t]+.*\n?|\n)*)", text, re.M)
    found = re.findall(
        r"^[ \t]{2,4}(\w+)(?:[ ]*\([^)]*\))?:[ ]*(.*(?:\n[ \t]{5,}.*)*)", section[1] if section else "", re.M
    )
    params = [types.SimpleNamespace(arg_name=n, description=inspect.cleandoc(d), type_name=None) for n, d in found]
    return types.SimpleNamespace(
        short_description=short, long_description=long.strip(), params=params, returns=None, raises=[], examples=[]
    )


class _Quiet:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


def _stand_in(name: str, **things: Any) -> None:
    module: Any = types.ModuleType(name)
    vars(module).update(things)
    sys.modules[name] = module


def _toml(file: Any) -> Any:
    import tomllib

    return tomllib.loads(file.read())


def _install() -> None:
    """Put the stand-ins where the package imports from."""
    same = lambda thing: thing  # noqa: E731
    decorator = lambda *given, **named: same  # noqa: E731
    _stand_in(
        "pydantic",
        BaseModel=BaseModel,
        ConfigDict=dict,
        Field=FieldInfo,
        ValidationError=ValidationError,
        create_model=_create_model,
        field_serializer=decorator,
        field_validator=decorator,
        model_validator=decorator,
    )
    _stand_in("loguru", logger=_Quiet())
    _stand_in("addict", Dict=_Nested)
    _stand_in("deepdiff", DeepDiff=dict)
    _stand_in("dotenv", load_dotenv=lambda *given: True)
    _stand_in("toml", load=_toml)
    _stand_in("yaml")
    _stand_in("docstring_parser", parse=_parsed)
    _stand_in("typing_extensions", override=same, Annotated=typing.Annotated)


class DomainStage:
    """One environment, in the state in which a task begins. ``folder`` holds the package; ``start`` has the calls that
    change it at first, as ``{"env_type", "func_name", "arguments"}``."""

    def __init__(self, folder: str, domain: str, start: list[Mapping[str, Any]]) -> None:
        if "pydantic" not in sys.modules:
            _install()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self.environment = importlib.import_module(f"tau2.domains.{domain}.environment").get_environment()
        for call in start:
            self.run(call)
        self.environment.sync_tools()

    def run(self, call: Mapping[str, Any]) -> Any:
        """The result of any function of a side, also of one that is not offered as a tool."""
        side = self.environment.user_tools if call["env_type"] == "user" else self.environment.tools
        result = getattr(side, call["func_name"])(**call["arguments"])
        self.environment.sync_tools()
        return result

    def schemas(self, requestor: str) -> list[dict[str, Any]]:
        """The OpenAI schemas of the tools of ``assistant`` or ``user``."""
        side = self.environment.user_tools if requestor == "user" else self.environment.tools
        return [] if side is None else [tool.openai_schema for tool in side.get_tools().values()]

    def call(self, requestor: str, name: str, arguments: Mapping[str, Any], *, sync: bool = True) -> tuple[str, bool]:
        """The result as text, and whether it is an error."""
        try:
            result = self.environment.make_tool_call(name, requestor=requestor, **arguments)
            if sync:
                self.environment.sync_tools()
        except Exception as error:  # of the set's tools
            return f"Error: {error}", True
        return self.environment.to_json_str(result), False

    def state(self) -> list[Any]:
        """The databases of both sides."""
        sides = (self.environment.tools, self.environment.user_tools)
        return [json.dumps(side.db.model_dump(), sort_keys=True, default=str) if side else None for side in sides]
