"""Runs the environments of tau2-bench in a sandbox: the set's own tools, over small stand-ins for what they import.

Standard library only: it is mounted as ``tau2_stage.py`` beside ``stand_ins.py`` and the folder ``tau2`` of the set's
package, which needs pydantic and others that the sandbox does not have.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from stand_ins import install_pydantic, same, stand_in  # pyright: ignore[reportMissingImports]

__all__ = ["DomainStage"]


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


def _toml(file: Any) -> Any:
    import tomllib

    return tomllib.loads(file.read())


def _install() -> None:
    """Put the stand-ins where the package imports from."""
    install_pydantic()
    stand_in("loguru", logger=_Quiet())
    stand_in("addict", Dict=_Nested)
    stand_in("deepdiff", DeepDiff=dict)
    stand_in("dotenv", load_dotenv=lambda *given: True)
    stand_in("toml", load=_toml)
    stand_in("yaml")
    stand_in("docstring_parser", parse=_parsed)
    stand_in("typing_extensions", override=same, Annotated=typing.Annotated)


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
