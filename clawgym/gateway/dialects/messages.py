"""Anthropic's messages API.

If a request has ``thinking`` of type ``enabled`` or ``adaptive``, reasoning is sent as ``thinking`` blocks with the
signature ``unsigned``. Whether the model reasons depends on its chat template.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import orjson

from clawgym.engines.protocol import Delta, Image, Sampling
from clawgym.gateway.calls import ChatCall, Refusal, canonical_messages, request_field
from clawgym.gateway.dialects._blocks import Block, BlockChange, Blocks, arguments_object
from clawgym.gateway.dialects._sse import event
from clawgym.gateway.dialects.chat import count, number
from clawgym.gateway.dialects.errors import ApiFailure
from clawgym.records import Usage
from clawgym.registry import dialects

__all__ = ["MessagesDialect"]

_UNSIGNED = "unsigned"
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""A line that Claude Code puts at the start of its system prompt. Its hash differs in each request, so no turn could
continue another. It is removed."""


@dialects.register("messages")
class MessagesDialect:
    """Anthropic messages: ``POST /v1/messages``."""

    path = "messages"
    stream_path: str | None = None
    count_path: str | None = "messages/count_tokens"
    comment = event(b'{"type":"ping"}', "ping")

    def call(self, body: Mapping[str, Any], role: str | None) -> ChatCall:
        """Parse a request body. Raises :class:`~clawgym.gateway.calls.Refusal`."""
        raw = _system(body.get("system"))
        turns = request_field(body, "messages", list, [])
        for n, turn in enumerate(turns):
            raw += _turn(turn, f"messages[{n}]")
        if turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant":
            raise Refusal(
                400,
                "the last message is the assistant's: prefilled replies are not supported, leave it out",
                param="messages",
            )
        images: dict[str, Image] = {}
        choice = request_field(body, "tool_choice", dict, {})
        max_tokens = count(body, "max_tokens")
        if max_tokens is None:
            raise Refusal(400, "'max_tokens' is missing: give the token limit of the reply", param="max_tokens")
        stop = request_field(body, "stop_sequences", list, [])
        if not all(isinstance(s, str) and s for s in stop):
            raise Refusal(400, "'stop_sequences' must be non-empty strings: correct it", param="stop_sequences")
        return ChatCall(
            messages=canonical_messages(raw, images),
            tools=_tools(body),
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
            response_format=_format(body),
            sampling=Sampling(
                temperature=number(body, "temperature", 0, 100),
                top_p=number(body, "top_p", 0, 1),
                top_k=count(body, "top_k", 0),
                max_tokens=max_tokens,
                stop=tuple(stop),
            ),
            images=images,
            model=request_field(body, "model", str, ""),
            role=role,
            id=f"msg_{uuid.uuid4().hex}",
        )

    async def whole(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response as one JSON body."""
        blocks = Blocks(reasoning=_thinks(body))
        last = await blocks.take_all(deltas)
        message = _message(call, [_block(block, full=True) for block in blocks.all])
        return {**message, **_reason(last), "usage": _usage(last.usage or Usage())}

    async def events(
        self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]
    ) -> AsyncGenerator[bytes]:
        """Yield the response as server-sent events, for each delta as soon as it arrives."""
        blocks = Blocks(reasoning=_thinks(body))
        started = False
        async for delta in deltas:
            # The usage is known at the end; clients use the last one.
            out = b"" if started else _event("message_start", message=_message(call, []))
            started = True
            for change in blocks.take(delta):
                out += b"".join(_events_of(change))
            if delta.finish_reason is not None:
                for change in blocks.end():
                    out += b"".join(_events_of(change))
                out += _event("message_delta", delta=_reason(delta), usage=_usage(delta.usage or Usage()))
                out += _event("message_stop")
            if out:
                yield out

    def error(self, failure: ApiFailure) -> dict[str, Any]:
        """Return the body of an error response."""
        kind = _KINDS.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
        # Agents recognise these words and shorten the conversation.
        too_long = "prompt is too long: " * (failure.code == "context_length_exceeded")
        return {"type": "error", "error": {"type": kind, "message": too_long + failure.message}}

    def error_event(self, failure: ApiFailure) -> bytes:
        """Return the event for an error in the middle of a stream."""
        return event(orjson.dumps(self.error(failure)), "error")


# Requests to chat messages


def _system(raw: Any) -> list[dict[str, Any]]:
    if raw is None:
        return []
    blocks = [{"type": "text", "text": raw}] if isinstance(raw, str) else raw
    if not isinstance(blocks, list):
        raise Refusal(400, "'system' must be a string or an array of text blocks: correct it", param="system")
    text = "".join(_BILLING.sub("", _text(block, f"system[{n}]"), count=1) for n, block in enumerate(blocks))
    return [{"role": "system", "content": text}] if text else []


def _text(block: Any, where: str) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        return block["text"]
    raise _no_block(block, where, "text")


def _no_block(block: Any, where: str, taken: str) -> Refusal:
    kind = block.get("type") if isinstance(block, dict) else None
    return Refusal(400, f"'{where}' has type {kind!r}: use only {taken} blocks", param=where)


def _turn(raw: Any, where: str) -> list[dict[str, Any]]:
    """Convert one message to chat messages: tool results in a user message become messages of their own."""
    role = raw.get("role") if isinstance(raw, dict) else None
    if role not in ("user", "assistant", "system"):
        raise Refusal(400, f"'{where}.role' is {role!r}: use user, assistant or system", param=f"{where}.role")
    content = raw.get("content")
    if role == "system":
        return _system(content)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise Refusal(400, f"'{where}.content' must be a string or an array of blocks: correct it", param=where)
    return _from_assistant(blocks, where) if role == "assistant" else _from_user(blocks, where)


def _from_user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for n, block in enumerate(blocks):
        at = f"{where}.content[{n}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            content = block.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            shown = [_part(part, f"{at}.content[{m}]") for m, part in enumerate(parts)]
            messages.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": shown})
            continue
        if not messages or messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": []})
        messages[-1]["content"].append(_part(block, at))
    return messages


def _part(block: Any, where: str) -> dict[str, Any]:
    if isinstance(block, dict) and block.get("type") == "image":
        source = block.get("source")
        if not isinstance(source, dict) or source.get("type") != "base64":
            raise Refusal(
                400, f"'{where}.source' is not base64: send the image itself, nothing is fetched", param=where
            )
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if isinstance(block, dict) and block.get("type") != "text":
        raise _no_block(block, where, "text, image and tool_result")
    return {"type": "text", "text": _text(block, where)}


def _from_assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for n, block in enumerate(blocks):
        at = f"{where}.content[{n}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(_text(block, at))
            case "thinking":
                thoughts.append(_string(block, "thinking", at))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {"name": _string(block, "name", at), "arguments": block.get("input")}
                calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
            case _:
                raise _no_block(block, at, "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise Refusal(400, f"'{where}.{name}' must be a string: correct the request", param=f"{where}.{name}")
    return value


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for n, tool in enumerate(request_field(body, "tools", list, [])):
        at = f"tools[{n}]"
        kind = tool.get("type", "custom") if isinstance(tool, dict) else None
        if kind not in ("custom", None) or not isinstance(tool, dict):
            raise Refusal(
                400, f"'{at}' is of type {kind!r}: server tools are not supported, use tools of your own", param=at
            )
        function = {"name": _string(tool, "name", at), "parameters": tool.get("input_schema") or {"type": "object"}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: Mapping[str, Any]) -> str | Mapping[str, Any]:
    match choice.get("type", "auto"):
        case "auto" | "none" as kind:
            return kind
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    raise Refusal(400, "'tool_choice.type' must be auto, any, tool or none: correct it", param="tool_choice")


def _format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = request_field(body, "output_config", dict, {}).get("format") or body.get("output_format")
    if not isinstance(wanted, dict):
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.get("schema")}}


def _thinks(body: Mapping[str, Any]) -> bool:
    wanted = request_field(body, "thinking", dict, {})
    return wanted.get("type") in ("enabled", "adaptive") and wanted.get("display") != "omitted"


# Replies to responses


def _event(kind: str, **fields: Any) -> bytes:
    return event(orjson.dumps({"type": kind, **fields}), kind)


def _message(call: ChatCall, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(Usage()),
    }


def _reason(last: Delta) -> dict[str, Any]:
    if last.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
    return {"stop_reason": _STOP_REASONS.get(last.finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return token counts in Anthropic's form: ``input_tokens`` does not include cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _block(block: Block, *, full: bool) -> dict[str, Any]:
    """Return ``block`` as content, empty or in full."""
    text = block.text if full else ""
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": _UNSIGNED if full else ""}
        case "text":
            return {"type": "text", "text": text}
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": arguments_object(text) if full else {},
    }


_ADDED = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _events_of(change: BlockChange) -> Iterator[bytes]:
    """Yield the events for a change."""
    block = change.block
    if change.what == "begin":
        yield _event("content_block_start", index=block.index, content_block=_block(block, full=False))
    elif change.what == "add":
        kind, name = _ADDED[block.kind]
        yield _event("content_block_delta", index=block.index, delta={"type": kind, name: change.piece})
    else:
        if block.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": _UNSIGNED}
            yield _event("content_block_delta", index=block.index, delta=signed)
        yield _event("content_block_stop", index=block.index)
