"""Tool-call parsers: how a model writes the calls of tools in its text, and how they are read back.

>>> import json
>>> class Brackets(CallParser):
...     open, close = "[CALL]", "[/CALL]"  # [CALL]name {"key": "value"}[/CALL]
...
...     def read(self, body, tools):
...         name, _, arguments = body.partition(" ")
...         json.loads(arguments)
...         return name, arguments
...
...     def write(self, name, arguments):
...         return f"[CALL]{name} {json.dumps(arguments)}[/CALL]"
>>> Brackets().read('ls {"path": "."}', ())
('ls', '{"path": "."}')

docs/registry.md says how it gets a name. The gateway finds out which parser reads the calls that a chat template
writes, and takes the first one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from clawgym.gateway._bodies import CLOSE, OPEN, JsonScanner, MarkupScanner, Scanner, read_json, read_markup
from clawgym.registry import parsers

__all__ = ["CallParser", "HermesParser", "QwenCoderParser"]


class CallParser:
    """What an author of a parser writes: the two markers of a call, :meth:`read` and :meth:`write`.

    Holds no state: one object reads any number of replies at once. What it reads comes from a model and may be
    anything.
    """

    open: ClassVar[str]
    """What a call begins with. Text up to here is content."""
    close: ClassVar[str]
    """What a call ends with. Several calls are several pairs of markers."""

    def read(self, body: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Name and arguments (the text of a JSON object) of the call whose text between the markers is ``body``.

        ``tools`` are those that the request offers, in OpenAI's form. Raises ValueError, LookupError or TypeError if
        ``body`` is malformed; it then stays text, and is counted.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read(): write `def read(self, body, tools)`")

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A whole call, with its markers, as a model would sample it: what samples of an action space are made of."""
        raise NotImplementedError(f"{type(self).__name__} has no write(): write `def write(self, name, arguments)`")

    def scanner(self) -> Scanner:
        """What finds the end of one call while its text comes: by default the first :attr:`close`.

        Write one where that marker may also stand inside of a call.
        """
        return _UntilClose(self.close)


class _UntilClose:
    def __init__(self, close: str) -> None:
        self._close, self._tail = close, ""

    def feed(self, text: str) -> int | None:
        work, before = self._tail + text, len(self._tail)
        at = work.find(self._close)
        if at >= 0:
            return at + len(self._close) - before
        self._tail = work[max(0, len(work) - len(self._close) + 1) :]
        return None


@parsers.register("hermes")
class HermesParser(CallParser):
    """JSON in ``<tool_call>``: Hermes, Qwen 2.5, Qwen 3 and many others."""

    open, close = OPEN, CLOSE

    def read(self, body: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        return read_json(body)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSE}"

    def scanner(self) -> Scanner:
        return JsonScanner()


@parsers.register("qwen3-coder")
class QwenCoderParser(CallParser):
    """Markup in ``<tool_call>``: Qwen3-Coder. Values are converted by the schemas of the tools."""

    open, close = OPEN, CLOSE

    def read(self, body: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        functions = [tool.get("function", {}) for tool in tools]
        return read_markup(body, {f.get("name"): f.get("parameters") for f in functions})

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"{OPEN}\n<function={name}>\n{given}</function>\n{CLOSE}"

    def scanner(self) -> Scanner:
        return MarkupScanner()
