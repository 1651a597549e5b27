"""OpenAI chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import orjson

from clawgym.engines.protocol import Delta, Image, Sampling
from clawgym.gateway.calls import ChatCall, Refusal, ReplyBuilder, canonical_messages, request_field
from clawgym.gateway.dialects._sse import event
from clawgym.gateway.dialects.errors import ApiFailure, envelope
from clawgym.records import Usage
from clawgym.registry import dialects

__all__ = ["ChatDialect", "count", "number"]

_READ = {
    "messages", "model", "tools", "functions", "tool_choice", "parallel_tool_calls", "response_format", "temperature",
    "top_p", "top_k", "seed", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n",
    "logprobs", "top_logprobs",
}  # fmt: skip
"""Fields that are parsed here; others are passed unchanged to text engines."""


def _call(body: Mapping[str, Any], role: str | None = None) -> ChatCall:
    """Parse a request body. Raises :class:`~clawgym.gateway.calls.Refusal`."""
    images: dict[str, Image] = {}
    messages = canonical_messages(body.get("messages"), images)
    if request_field(body, "n", int, 1) != 1:
        raise Refusal(400, "'n' must be 1: send the request again for another sample", param="n")
    if request_field(body, "logprobs", bool, False) or request_field(body, "top_logprobs", int, 0):
        raise Refusal(400, "log-probs are recorded, but not sent to agents: leave 'logprobs' out", param="logprobs")
    if "functions" in body:
        raise Refusal(400, "'functions' is deprecated and not supported: use 'tools'", param="functions")
    return ChatCall(
        messages=messages,
        tools=_tools(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=request_field(body, "parallel_tool_calls", bool, True),
        response_format=request_field(body, "response_format", dict),
        sampling=Sampling(
            temperature=number(body, "temperature", 0, 100),
            top_p=number(body, "top_p", 0, 1),
            top_k=count(body, "top_k", 0),
            max_tokens=count(body, "max_completion_tokens") or count(body, "max_tokens"),
            seed=request_field(body, "seed", int),
            stop=_stop(body),
        ),
        images=images,
        model=request_field(body, "model", str, ""),
        role=role,
        extra={name: value for name, value in body.items() if name not in _READ and value is not None},
    )


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """Return a number field, checked against its bounds. Raises :class:`~clawgym.gateway.calls.Refusal`."""
    value = request_field(body, name, (int, float))
    if value is not None and not low <= value <= high:
        raise Refusal(400, f"'{name}' must be between {low:g} and {high:g}, not {value}: correct it", param=name)
    return value


def count(body: Mapping[str, Any], name: str, low: int = 1) -> int | None:
    """Return an integer field of at least ``low``. Raises :class:`~clawgym.gateway.calls.Refusal`."""
    value = request_field(body, name, int)
    if value is not None and value < low:
        raise Refusal(400, f"'{name}' must be {low} or more, not {value}: correct it", param=name)
    return value or None


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = request_field(body, "tools", list, [])
    for n, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(400, f"'tools[{n}]' is not a function with a name: correct it", param=f"tools[{n}]")
    return tools


def _tool_choice(body: Mapping[str, Any]) -> str | Mapping[str, Any]:
    choice = request_field(body, "tool_choice", (str, dict), "auto")
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise Refusal(400, f"'tool_choice' is {choice!r}: use auto, none, required or a function", param="tool_choice")
    return choice


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = request_field(body, "stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > 16 or not all(isinstance(s, str) and s for s in stop):
        raise Refusal(400, "'stop' must be a string or up to 16 non-empty strings: correct it", param="stop")
    return tuple(stop)


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return token counts in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dialects.register("chat")
class ChatDialect:
    """OpenAI chat completions: ``POST /v1/chat/completions``."""

    path = "chat/completions"
    stream_path: str | None = None
    count_path: str | None = None
    comment = b": keep-alive\n\n"

    def call(self, body: Mapping[str, Any], role: str | None) -> ChatCall:
        """Parse a request body. Raises :class:`~clawgym.gateway.calls.Refusal`."""
        return _call(body, role)

    async def whole(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response as one JSON body."""
        reply = ReplyBuilder()
        last = Delta()
        async for delta in deltas:
            reply.take(delta)
            last = delta
        message = reply.message
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": last.finish_reason}
        return {
            **_head(call, "chat.completion"),
            "choices": [choice],
            "usage": usage_json(last.usage or Usage()),
        }

    async def events(
        self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]
    ) -> AsyncGenerator[bytes]:
        """Yield the response as server-sent events, for each delta as soon as it arrives."""
        include_usage = bool(request_field(body, "stream_options", dict, {}).get("include_usage"))
        head = orjson.dumps(_head(call, "chat.completion.chunk"))[:-1] + b',"choices":['
        tail = b'],"usage":null}' if include_usage else b"]}"

        def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return event(head + orjson.dumps(choice) + tail)

        started = False
        async for delta in deltas:
            out = b"" if started else chunk({"role": "assistant", "content": ""})
            started = True
            if delta.reasoning:
                out += chunk({"reasoning_content": delta.reasoning})
            if delta.text:
                out += chunk({"content": delta.text})
            for piece in delta.calls:
                call_json: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
                if piece.name is not None:
                    call_json["function"]["name"] = piece.name
                    call_json |= {"id": piece.id, "type": "function"}
                out += chunk({"tool_calls": [call_json]})
            if delta.finish_reason is not None:
                out += chunk({}, delta.finish_reason)
                if include_usage:
                    out += event(head + b'],"usage":' + orjson.dumps(usage_json(delta.usage or Usage())) + b"}")
                out += event(b"[DONE]")
            yield out

    def error(self, failure: ApiFailure) -> dict[str, Any]:
        """Return the body of an error response."""
        return envelope(failure)

    def error_event(self, failure: ApiFailure) -> bytes:
        """Return the event for an error in a stream, on which OpenAI's clients raise."""
        return event(orjson.dumps(envelope(failure)))


def _head(call: ChatCall, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": int(time.time()), "model": call.model}
