"""Tool-call parsers: read and write tool calls in the text of a model.

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

docs/reference/registry.md shows how to register it. The gateway uses the first parser that reads the calls
which the model's chat template writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from clawgym.gateway._bodies import CLOSE, OPEN, JsonScanner, MarkupScanner, Scanner, read_json, read_markup
from clawgym.registry import parsers

__all__ = ["CallParser", "HermesParser", "QwenCoderParser"]


class CallParser:
    """Base class of tool-call parsers: define the two markers of a call, :meth:`read` and :meth:`write`.

    A parser has no state: one object parses many replies at the same time. Its input comes from a model and may be
    anything. The module has an example.
    """

    open: ClassVar[str]
    """The start marker of a call. Text before it is content."""
    close: ClassVar[str]
    """The end marker of a call. Each of several calls has its own markers."""

    def read(self, body: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Parse the text between the markers and return the name and the arguments (text of a JSON object).

        Args:
            body: the text between the markers.
            tools: the tools of the request, in OpenAI's form.

        Raises:
            ValueError, LookupError, TypeError: ``body`` is malformed. The call then stays text and is counted.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read(): write `def read(self, body, tools)`")

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a whole call with its markers, as a model would sample it. Samples of action spaces use it."""
        raise NotImplementedError(f"{type(self).__name__} has no write(): write `def write(self, name, arguments)`")

    def scanner(self) -> Scanner:
        """Return a scanner that finds the end of one call in streamed text; by default at the first :attr:`close`.

        Override it if that marker may also occur inside a call.
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
