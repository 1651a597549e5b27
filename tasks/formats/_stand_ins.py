"""Stand-ins for packages that the code of published sets imports and sandboxes do not have.

Standard library only: it is mounted as ``stand_ins.py`` beside the set's code. The stand-in for pydantic has what
tools, their data and graders of these sets use; validators that a class defines are not run.
"""

from __future__ import annotations

import abc
import copy
import datetime
import enum
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

__all__ = ["BaseModel", "FieldInfo", "ValidationError", "dumped", "install_pydantic", "same", "stand_in"]

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
        return {name: dumped(self.__dict__[name]) for name in _fields(type(self))}

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
            default = {} if info.required or info.factory else {"default": dumped(info.default)}
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
    elif origin not in (None, list, dict):
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


def dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: dumped(one) for key, one in value.items()}
    return type(value)(map(dumped, value)) if isinstance(value, list | tuple | set) else value


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


def stand_in(name: str, **things: Any) -> None:
    """Make ``name`` importable, as a module that holds ``things``."""
    module: Any = types.ModuleType(name)
    vars(module).update(things)
    sys.modules[name] = module


def same(*given: Any, **named: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return given[0] if len(given) == 1 and not named and callable(given[0]) else lambda thing: thing


def install_pydantic() -> None:
    """Put the stand-in for pydantic where code imports it from."""
    stand_in(
        "pydantic",
        BaseModel=BaseModel,
        ConfigDict=dict,
        Field=FieldInfo,
        ValidationError=ValidationError,
        create_model=_create_model,
        field_serializer=same,
        field_validator=same,
        model_validator=same,
    )
