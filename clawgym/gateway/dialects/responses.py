"""OpenAI's responses API.

Responses are not stored: a request must have the whole conversation as ``input``, and ``previous_response_id`` is
refused. Reasoning is sent unencrypted, as ``reasoning_text``.

Chat templates have no namespaces of tools: the model sees the function ``f`` of the namespace ``n`` as ``n__f``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any

import orjson

from clawgym.engines.protocol import Delta, Image, Sampling
from clawgym.gateway.calls import ChatCall, Refusal, canonical_messages, request_field
from clawgym.gateway.dialects._blocks import Block, BlockChange, Blocks
from clawgym.gateway.dialects._sse import event
from clawgym.gateway.dialects.chat import count, number
from clawgym.gateway.dialects.errors import ApiFailure, envelope
from clawgym.records import Usage
from clawgym.registry import dialects

__all__ = ["ResponsesDialect"]

_STORED = {
    "previous_response_id": "send the whole conversation as 'input'",
    "conversation": "send the whole conversation as 'input'",
    "prompt": "send its text as 'instructions'",
}
_Spaces = Mapping[str, tuple[str, str]]
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dialects.register("responses")
class ResponsesDialect:
    """OpenAI responses: ``POST /v1/responses``."""

    path = "responses"
    stream_path: str | None = None
    count_path: str | None = None
    comment = b": keep-alive\n\n"

    def call(self, body: Mapping[str, Any], role: str | None) -> ChatCall:
        """Parse a request body. Raises :class:`~clawgym.gateway.calls.Refusal`."""
        for name, instead in _STORED.items():
            if body.get(name) is not None:
                raise Refusal(400, f"'{name}' is not supported, since nothing is stored: {instead}", param=name)
        if request_field(body, "background", bool, False):
            raise Refusal(400, "'background' is not supported: wait for the response, or stream it", param="background")
        if request_field(body, "top_logprobs", int, 0):
            raise Refusal(
                400,
                "log-probs are recorded, but not sent to agents: leave 'top_logprobs' out",
                param="top_logprobs",
            )
        instructions = request_field(body, "instructions", str)
        raw = [{"role": "system", "content": instructions}] if instructions else []
        raw += _messages(body.get("input"))
        images: dict[str, Image] = {}
        effort = request_field(body, "reasoning", dict, {}).get("effort")
        return ChatCall(
            messages=canonical_messages(raw, images),
            tools=_tools(request_field(body, "tools", list, [])),
            tool_choice=_tool_choice(request_field(body, "tool_choice", (str, dict), "auto")),
            parallel_tool_calls=request_field(body, "parallel_tool_calls", bool, True),
            response_format=_format(request_field(body, "text", dict, {}).get("format")),
            sampling=Sampling(
                temperature=number(body, "temperature", 0, 100),
                top_p=number(body, "top_p", 0, 1),
                max_tokens=count(body, "max_output_tokens"),
            ),
            images=images,
            model=request_field(body, "model", str, ""),
            role=role,
            id=f"resp_{uuid.uuid4().hex}",
            extra={"reasoning_effort": effort} if effort is not None else {},
        )

    async def whole(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response as one JSON body."""
        blocks = Blocks()
        last = await blocks.take_all(deltas)
        return _response(call, body, int(time.time()), blocks, last, _spaces(body))

    async def events(
        self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]
    ) -> AsyncGenerator[bytes]:
        """Yield the response as server-sent events, for each delta as soon as it arrives."""
        created = int(time.time())
        blocks = Blocks()
        spaces = _spaces(body)
        number = 0

        def numbered(kind: str, fields: Mapping[str, Any]) -> bytes:
            nonlocal number
            data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
            number += 1
            return event(data, kind)

        async for delta in deltas:
            out = b""
            if not number:
                initial = {"response": _response(call, body, created, Blocks(), None, spaces)}
                out = numbered("response.created", initial) + numbered("response.in_progress", initial)
            changes = [*blocks.take(delta), *(blocks.end() if delta.finish_reason is not None else ())]
            for change in changes:
                out += b"".join(numbered(kind, fields) for kind, fields in _events_of(change, call, delta, spaces))
            if delta.finish_reason is not None:
                response = _response(call, body, created, blocks, delta, spaces)
                out += numbered(f"response.{response['status']}", {"response": response})
            yield out

    def error(self, failure: ApiFailure) -> dict[str, Any]:
        """Return the body of an error response."""
        return envelope(failure)

    def error_event(self, failure: ApiFailure) -> bytes:
        """Return the event for an error in a stream. OpenAI's clients raise on the envelope in it."""
        fields = {"type": "error", "code": failure.code, "message": failure.message, "param": failure.param}
        return event(orjson.dumps({**fields, "sequence_number": 0, **envelope(failure)}), "error")


# Requests to chat messages


def _messages(raw: Any) -> list[dict[str, Any]]:
    """Convert the items of ``input`` to chat messages: the output items between two inputs are one reply."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if not isinstance(raw, list) or not raw:
        raise Refusal(
            400, "'input' must be a string or a non-empty array of items: give the conversation", param="input"
        )
    messages: list[dict[str, Any]] = []
    for n, item in enumerate(raw):
        _item(item, f"input[{n}]", messages)
    return messages


def _item(item: Any, where: str, messages: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message" if item.get("role") == "assistant":
            reply = _reply(messages)
            reply["content"] = (reply["content"] or "") + _plain(item.get("content"), f"{where}.content")
        case "message":
            content = _content(item.get("content"), f"{where}.content")
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                at = f"{where}.role"
                raise Refusal(400, f"'{at}' is {role!r}: use user, assistant, system or developer", param=at)
            messages.append({"role": role, "content": content})
        case "reasoning":
            # Reasoning starts a new reply.
            reply = _reply(messages)
            if reply["content"] is not None or reply["tool_calls"]:
                reply = _reply(messages, new=True)
            thoughts = item.get("content") or item.get("summary") or []
            reply["reasoning_content"] = reply.get("reasoning_content", "") + _plain(thoughts, f"{where}.content")
        case "function_call":
            name = _string(item, "name", where)
            name = _joined(_string(item, "namespace", where), name) if item.get("namespace") is not None else name
            function = {"name": name, "arguments": _string(item, "arguments", where)}
            call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
            _reply(messages)["tool_calls"].append(call)
        case "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})
        case _:
            raise Refusal(
                400,
                f"'{where}' has type {kind!r}: use only message, reasoning, function_call and function_call_output "
                "items",
                param=where,
            )


def _reply(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Return the reply that is being built."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None, "tool_calls": []})
    return messages[-1]


def _content(raw: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise Refusal(400, f"'{where}' must be a string or an array of parts: correct it", param=where)
    parts: list[dict[str, Any]] = []
    for n, part in enumerate(raw):
        if isinstance(part, dict) and part.get("type") == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            parts.append({"type": "text", "text": _plain([part], where, n)})
    return parts


_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"} | {
    "reasoning_text": "text",
    "summary_text": "text",
}


def _plain(raw: Any, where: str, offset: int = 0) -> str:
    """Return the text of parts, which must all be text."""
    if isinstance(raw, str):
        return raw
    texts: list[str] = []
    for n, part in enumerate(raw if isinstance(raw, list) else [raw], start=offset):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            at = f"{where}[{n}]"
            raise Refusal(400, f"'{at}' has type {kind!r}: use only text and input_image parts", param=at)
        texts.append(text)
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise Refusal(400, f"'{where}.{name}' must be a string: correct the request", param=f"{where}.{name}")
    return value


def _tools(raw: list[Any]) -> list[dict[str, Any]]:
    """Convert tools and those of namespaces to chat functions."""
    tools: list[dict[str, Any]] = []
    for n, tool in enumerate(raw):
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            space = _string(tool, "name", f"tools[{n}]")
            for k, inner in enumerate(request_field(tool, "tools", list, [])):
                made = _tool(inner, f"tools[{n}].tools[{k}]")
                made["function"]["name"] = _joined(space, made["function"]["name"])
                tools.append(made)
        else:
            tools.append(_tool(tool, f"tools[{n}]"))
    return tools


def _joined(space: str, name: str) -> str:
    return f"{space.rstrip('_')}__{name}"


def _spaces(body: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the namespace and the name in it of each function in a namespace, by the name that the model sees."""
    spaces = [tool for tool in body.get("tools") or () if tool["type"] == "namespace"]
    return {
        _joined(space["name"], tool["name"]): (space["name"], tool["name"])
        for space in spaces
        for tool in space.get("tools") or ()
    }


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise Refusal(400, f"'{where}' is of type {kind!r}: server tools are not supported, use functions", param=where)
    function = {"name": _string(tool, "name", where), "parameters": tool.get("parameters") or {"type": "object"}}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    if choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    raise Refusal(400, "'tool_choice' must be auto, none, required or a function: correct it", param="tool_choice")


def _format(wanted: Any) -> dict[str, Any] | None:
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}
    return wanted


# Replies to responses


def _response(
    call: ChatCall, body: Mapping[str, Any], created: int, blocks: Blocks, last: Delta | None, spaces: _Spaces
) -> dict[str, Any]:
    """Return the response object; without ``last`` delta it is in progress."""
    why = _INCOMPLETE.get(last.finish_reason or "") if last else None
    status = "in_progress" if last is None else "incomplete" if why else "completed"
    return {
        "id": call.id,
        "object": "response",
        "created_at": created,
        "status": status,
        "model": call.model,
        "output": [
            _output(block, call, status if block is blocks.all[-1] else "completed", spaces) for block in blocks.all
        ],
        "error": None,
        "incomplete_details": {"reason": why} if why else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": call.sampling.max_tokens,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": call.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": call.extra.get("reasoning_effort"), "summary": None},
        "store": False,
        "temperature": call.sampling.temperature,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": call.sampling.top_p,
        "truncation": "disabled",
        "usage": _usage(last.usage or Usage()) if last else None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def _item_id(block: Block, call: ChatCall) -> str:
    return f"{_PREFIXES[block.kind]}_{call.id.removeprefix('resp_')}{block.index:02}"


def _content_part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _output(block: Block, call: ChatCall, status: str, spaces: _Spaces) -> dict[str, Any]:
    """Return ``block`` as an output item; one in progress has no content."""
    item_id = _item_id(block, call)
    initial = status == "in_progress"
    if block.kind == "call":
        arguments = "" if initial else block.text
        space, name = spaces.get(block.name, (None, block.name))
        about = {"call_id": block.call_id, "name": name, "arguments": arguments}
        about |= {} if space is None else {"namespace": space}
        return {"type": "function_call", "id": item_id, **about, "status": status}
    content = [] if initial else [_content_part(block, block.text)]
    if block.kind == "reasoning":
        return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}


def _events_of(
    change: BlockChange, call: ChatCall, delta: Delta, spaces: _Spaces
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events for a change, as type and fields."""
    block = change.block
    place = {"output_index": block.index}
    inside = {**place, "item_id": _item_id(block, call)}
    if change.what == "begin":
        yield "response.output_item.added", {**place, "item": _output(block, call, "in_progress", spaces)}
        if block.kind != "call":
            yield "response.content_part.added", {**inside, "content_index": 0, "part": _content_part(block, "")}
        return
    kind, more = {
        "reasoning": ("response.reasoning_text", {"content_index": 0}),
        "text": ("response.output_text", {"content_index": 0, "logprobs": []}),
        "call": ("response.function_call_arguments", {}),
    }[block.kind]
    if change.what == "add":
        yield f"{kind}.delta", {**inside, **more, "delta": change.piece}
        return
    text, named = block.text, spaces.get(block.name, ("", block.name))[1]
    yield (
        f"{kind}.done",
        {**inside, **more, **({"arguments": text, "name": named} if block.kind == "call" else {"text": text})},
    )
    if block.kind != "call":
        yield "response.content_part.done", {**inside, "content_index": 0, "part": _content_part(block, text)}
    cut = _INCOMPLETE.get(delta.finish_reason or "") is not None
    yield (
        "response.output_item.done",
        {**place, "item": _output(block, call, "incomplete" if cut else "completed", spaces)},
    )
