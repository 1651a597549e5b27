"""Chat templates: what they are given, and texts that look like special tokens.

A template belongs to the model's folder and is run in Jinja's immutable sandbox (that of transformers), with a bound on
its time and memory (:mod:`clawgym.gateway._bounded`). Texts of users,
tools and agents are hostile: :class:`Guard` breaks every text in them that a tokenizer would read as one of the tokens
that structure a conversation, so that ``<|im_end|>`` in a file stays seven signs and never ends a turn.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clawgym.engines.chat import storable
from clawgym.errors import GatewayError
from clawgym.gateway.calls import Message, Refusal

__all__ = ["Guard", "Template", "for_template"]


class Template:
    """One chat template with its variables (``bos_token``, ..., and the caller's own)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        from clawgym.gateway._bounded import compiled

        self.source = source
        self.variables = dict(variables)
        try:
            self._compiled, self._budget = compiled(source)
        except Exception as error:  # whatever a template makes Jinja raise
            raise GatewayError(f"the model's chat template cannot be read ({error}): correct it") from error

    def __call__(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation: bool = True
    ) -> str:
        """The text of ``messages``, with the opening of an assistant's turn if ``generation``. Raises
        :class:`~clawgym.gateway.calls.Refusal` where the template refuses them, or takes too long for them."""
        try:
            with self._budget.fresh():
                rendered = self._compiled.render(
                    messages=list(messages),
                    tools=[dict(tool) for tool in tools] or None,
                    documents=None,
                    add_generation_prompt=generation,
                    **self.variables,
                )
        except Exception as error:  # a template is foreign code: it raises what it likes
            raise Refusal(
                400,
                f"the model's chat template refuses this conversation ({error}): change its messages, or the template",
                param="messages",
            ) from error
        return storable(rendered)


def for_template(message: Message) -> dict[str, Any]:
    """``message`` as templates want it: arguments as objects (as the string they are, where they are none), no
    ``None`` for a text, image parts without our digest."""
    content = message.get("content")
    out: dict[str, Any] = {"role": message["role"], "content": "" if content is None else content}
    if isinstance(content, list):
        out["content"] = _parts(content)
    if message.get("reasoning_content"):
        out["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_call_id"):
        out["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return out


def _parts(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [dict(part) if part["type"] == "text" else {"type": "image"} for part in parts]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id", ""), "type": "function", "function": function}


class Guard:
    """Puts a mark, which nobody outside can guess, into texts that a tokenizer might read as one of ``tokens``;
    :meth:`split` cuts the rendered text there."""

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = sorted({t for t in tokens if t.strip()})
        self.mark = "".join(secrets.choice("0123456789") for _ in range(32))  # digits: no filter changes their case
        self._whole = re.compile(_any_of(tokens) or r"(?!)")
        # A token may also come about where a text meets what the template, or another text, puts beside it.
        self._beginnings = _signs(t[:n] for t in tokens for n in range(1, len(t)))
        self._endings = _signs(t[n:] for t in tokens for n in range(1, len(t)))
        self._middles = _signs(t[n:m] for t in tokens for n in range(1, len(t)) for m in range(n + 1, len(t)))
        self._longest = max(map(len, tokens), default=1)
        self._first, self._last = frozenset(t[0] for t in tokens), frozenset(t[-1] for t in tokens)

    def text(self, text: str) -> str:
        """``text``, marked where it must be."""
        inner = text.strip()
        if not inner:
            return text
        n = self._longest
        head = inner in self._middles or (
            not self._last.isdisjoint(inner[:n]) and any(inner[:m] in self._endings for m in range(1, n))
        )
        tail = not self._first.isdisjoint(inner[-n:]) and any(inner[-m:] in self._beginnings for m in range(1, n))
        guarded = self._whole.sub(self._broken, inner)
        if not head and not tail and guarded is inner:
            return text
        start = text.index(inner)
        guarded = self.mark * head + guarded + self.mark * tail
        return text[:start] + guarded + text[start + len(inner) :]

    def _broken(self, match: re.Match[str]) -> str:
        return match.group()[0] + self.mark + match.group()[1:]

    def value(self, value: Any) -> Any:
        """All texts in ``value``, keys included."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {self.value(key): self.value(item) for key, item in value.items()}
            case list() | tuple():
                return [self.value(item) for item in value]
        return value

    def split(self, text: str) -> list[str]:
        """``text`` without the marks, cut where they were."""
        return text.split(self.mark)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of ``texts``, by their common beginnings: some models have hundreds of tokens."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[0], []).append(text)
    patterns: list[str] = []
    for group in groups.values():
        start = os.path.commonprefix(group)  # noqa: RUF071
        rests = [text[len(start) :] for text in group]
        longer = _any_of(rest for rest in rests if rest)
        patterns.append(
            re.escape(start) + (f"(?:{longer})" if longer else "") + ("?" if longer and "" in rests else "")
        )
    return "|".join(patterns)


def _signs(texts: Iterable[str]) -> frozenset[str]:
    """Those of ``texts`` that are no plain word: words are everywhere, and no template puts signs around them."""
    return frozenset(text for text in texts if not text.isalnum())
