"""Run chat templates on untrusted messages.

A template comes with the model's folder and runs in Jinja's immutable sandbox, as in transformers, with bounds on time
and memory (:mod:`clawgym.gateway._bounded`). Texts of users, tools and agents are untrusted: :class:`Guard` makes sure
that special tokens in them are encoded as plain text, so ``<|im_end|>`` in a file does not end a turn.
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
        except Exception as error:  # a template can make Jinja raise anything
            raise GatewayError(f"the model's chat template cannot be compiled ({error}): correct it") from error

    def __call__(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, generation: bool = True
    ) -> str:
        """Render ``messages``, with the opening of an assistant's turn if ``generation``.

        Raises :class:`~clawgym.gateway.calls.Refusal` if the template raises, takes too long or produces too much.
        """
        try:
            with self._budget.fresh():
                rendered = self._compiled.render(
                    messages=list(messages),
                    tools=[dict(tool) for tool in tools] or None,
                    documents=None,
                    add_generation_prompt=generation,
                    **self.variables,
                )
        except Exception as error:  # a template is untrusted code and may raise anything
            raise Refusal(
                400,
                f"the model's chat template refuses this conversation ({error}): change its messages, or the template",
                param="messages",
            ) from error
        return storable(rendered)


def for_template(message: Message) -> dict[str, Any]:
    """Return ``message`` in the form for templates.

    Arguments are objects (or the original string if it is not a JSON object), content is never None, and image parts
    have no digest.
    """
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
    """Keeps untrusted text from being encoded as one of ``tokens``.

    It inserts a random mark into texts that contain such a token or a part of one at their ends. :meth:`split` cuts the
    rendered text at the marks, and the pieces are encoded separately.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = sorted({t for t in tokens if t.strip()})
        self.mark = "".join(secrets.choice("0123456789") for _ in range(32))  # digits: no filter changes their case
        self._whole = re.compile(_any_of(tokens) or r"(?!)")
        # A token may also arise where a text touches the template's text or another text.
        self._beginnings = _with_symbols(t[:n] for t in tokens for n in range(1, len(t)))
        self._endings = _with_symbols(t[n:] for t in tokens for n in range(1, len(t)))
        self._middles = _with_symbols(t[n:m] for t in tokens for n in range(1, len(t)) for m in range(n + 1, len(t)))
        self._longest = max(map(len, tokens), default=1)
        self._first, self._last = frozenset(t[0] for t in tokens), frozenset(t[-1] for t in tokens)

    def text(self, text: str) -> str:
        """Return ``text`` with marks where they are needed."""
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
        """Return ``value`` with marks in all its texts, including keys."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {self.value(key): self.value(item) for key, item in value.items()}
            case list() | tuple():
                return [self.value(item) for item in value]
        return value

    def split(self, text: str) -> list[str]:
        """Split ``text`` at the marks, which are removed."""
        return text.split(self.mark)


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern for the longest of ``texts``, grouped by prefixes: some models have hundreds of tokens."""
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


def _with_symbols(texts: Iterable[str]) -> frozenset[str]:
    """Return those of ``texts`` that are not plain words. Words are common, and templates do not complete them."""
    return frozenset(text for text in texts if not text.isalnum())
