"""Google's Gemini API: ``generateContent``, and ``streamGenerateContent`` as server-sent events.

Its clients name the model in the path and may leave out the ids of function calls. Results without an id belong to the
first call of their name that has none yet. With ``thinkingConfig.includeThoughts``, reasoning is sent as parts marked
``thought``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any

import orjson

from clawgym.engines.protocol import Delta, Image, Sampling
from clawgym.gateway.calls import ChatCall, Refusal, canonical_messages, request_field
from clawgym.gateway.dialects._blocks import Block, Blocks, arguments_object
from clawgym.gateway.dialects._sse import event
from clawgym.gateway.dialects.chat import count, number
from clawgym.gateway.dialects.errors import ApiFailure
from clawgym.records import Usage
from clawgym.registry import dialects

__all__ = ["GeminiDialect"]

_FINISH = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_CHOICES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "MODE_UNSPECIFIED": "auto", "VALIDATED": "auto"}


@dialects.register("gemini")
class GeminiDialect:
    """Gemini: ``POST /v1beta/models/MODEL:generateContent`` and ``:streamGenerateContent``."""

    path = "models/{model}:generateContent"
    stream_path: str | None = "models/{model}:streamGenerateContent"
    count_path: str | None = None
    comment = b": keep-alive\n\n"

    def call(self, body: Mapping[str, Any], role: str | None) -> ChatCall:
        """Parse a request body. Raises :class:`~clawgym.gateway.calls.Refusal`."""
        images: dict[str, Image] = {}
        config = request_field(body, "generationConfig", dict, {})
        if request_field(config, "candidateCount", int, 1) != 1:
            raise Refusal(400, "'candidateCount' must be 1: send the request again for another sample")
        return ChatCall(
            messages=canonical_messages(_system(body) + _messages(body), images),
            tools=_tools(body),
            tool_choice=_tool_choice(body),
            response_format=_format(config),
            sampling=Sampling(
                temperature=number(config, "temperature", 0, 100),
                top_p=number(config, "topP", 0, 1),
                top_k=_whole(config, "topK"),
                max_tokens=count(config, "maxOutputTokens"),
                seed=request_field(config, "seed", int),
                stop=_stop(config),
            ),
            images=images,
            model=request_field(body, "model", str, ""),
            role=role,
            id=f"gem_{uuid.uuid4().hex}",
        )

    async def whole(self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response as one JSON body."""
        blocks = Blocks(reasoning=_thinks(body))
        last = await blocks.take_all(deltas)
        return _response(call, [_part(block, block.text) for block in blocks.all], last)

    async def events(
        self, deltas: AsyncIterator[Delta], call: ChatCall, body: Mapping[str, Any]
    ) -> AsyncGenerator[bytes]:
        """Yield the response as server-sent events: text as soon as it arrives, a function call once it is complete."""
        blocks = Blocks(reasoning=_thinks(body))
        async for delta in deltas:
            ended = delta.finish_reason is not None
            parts: list[dict[str, Any]] = []
            for change in [*blocks.take(delta), *(blocks.end() if ended else ())]:
                if change.block.kind != "call" and change.what == "add":
                    parts.append(_part(change.block, change.piece))
                elif change.block.kind == "call" and change.what == "end":
                    parts.append(_part(change.block, change.block.text))
            if parts or ended:
                yield event(orjson.dumps(_response(call, parts, delta)))

    def error(self, failure: ApiFailure) -> dict[str, Any]:
        """Return the body of an error response."""
        status = _STATUS.get(failure.status, "INTERNAL" if failure.status >= 500 else "FAILED_PRECONDITION")
        return {"error": {"code": failure.status, "message": failure.message, "status": status}}

    def error_event(self, failure: ApiFailure) -> bytes:
        """Return the event for an error in the middle of a stream, on which Google's clients raise."""
        return event(orjson.dumps(self.error(failure)))


# Requests to chat messages


def _system(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    raw = body.get("systemInstruction")
    if raw is None:
        return []
    parts = _parts(raw, "systemInstruction")
    text = "".join(_text(part, f"systemInstruction.parts[{n}]") for n, part in enumerate(parts))
    return [{"role": "system", "content": text}] if text else []


def _parts(raw: Any, where: str) -> list[Any]:
    parts = raw.get("parts") if isinstance(raw, dict) else None
    if not isinstance(parts, list):
        raise Refusal(400, f"'{where}.parts' must be an array of parts: correct the request", param=where)
    return parts


def _text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        names = ", ".join(sorted(map(str, part))[:4]) if isinstance(part, dict) else type(part).__name__
        raise Refusal(
            400,
            f"'{where}' has {names}: use only text, inlineData, functionCall and functionResponse parts",
            param=where,
        )
    return text


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    raw = body.get("contents")
    if not isinstance(raw, list) or not raw:
        raise Refusal(400, "'contents' must be a non-empty array: give the conversation", param="contents")
    messages: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # name and id of the calls without a result
    for n, content in enumerate(raw):
        where = f"contents[{n}]"
        parts = _parts(content, where)
        role = content.get("role", "user")
        if role == "model":
            message = _from_model(parts, where, len(messages))
            waiting = [(call["function"]["name"], call["id"]) for call in message.get("tool_calls", ())]
            messages.append(message)
        elif role in ("user", "function"):
            messages += _from_user(parts, where, waiting)
        else:
            raise Refusal(400, f"'{where}.role' is {role!r}: use user or model", param=f"{where}.role")
    return messages


def _from_model(parts: list[Any], where: str, position: int) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for n, part in enumerate(parts):
        at = f"{where}.parts[{n}]"
        if isinstance(part, dict) and isinstance(call := part.get("functionCall"), dict):
            function = {"name": _name(call, at), "arguments": call.get("args")}
            call_id = call.get("id")
            call_id = call_id if isinstance(call_id, str) and call_id else f"call{position}n{len(calls)}"
            calls.append({"id": call_id, "type": "function", "function": function})
        elif isinstance(part, dict) and part.get("thought") is True:
            thoughts.append(_text(part, at))
        else:
            texts.append(_text(part, at))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _from_user(parts: list[Any], where: str, waiting: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Convert one content: function responses become messages of their own."""
    messages: list[dict[str, Any]] = []
    for n, part in enumerate(parts):
        at = f"{where}.parts[{n}]"
        if isinstance(part, dict) and isinstance(found := part.get("functionResponse"), dict):
            messages.append({"role": "tool", "tool_call_id": _answered(found, at, waiting), "content": _result(found)})
            continue
        if not messages or messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": []})
        messages[-1]["content"].append(_user_part(part, at))
    return messages


def _user_part(part: Any, where: str) -> dict[str, Any]:
    data = part.get("inlineData") if isinstance(part, dict) else None
    if isinstance(data, dict):
        url = f"data:{data.get('mimeType')};base64,{data.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": _text(part, where)}


def _answered(found: Mapping[str, Any], where: str, waiting: list[tuple[str, str]]) -> str:
    """Return the id of the call that a function response answers."""
    given, name = found.get("id"), _name(found, where)
    for place, (called, call_id) in enumerate(waiting):
        if call_id == given or (not given and called == name):
            del waiting[place]
            return call_id
    return given if isinstance(given, str) and given else name


def _result(found: Mapping[str, Any]) -> str:
    """Return a function's result as text: that of ``{"output": TEXT}`` itself, anything else as JSON."""
    response = found.get("response")
    if isinstance(response, dict) and response.keys() == {"output"} and isinstance(response["output"], str):
        return response["output"]
    return json.dumps(response, ensure_ascii=False)


def _name(call: Mapping[str, Any], where: str) -> str:
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise Refusal(400, f"'{where}' is a function without a name: correct the request", param=where)
    return name


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for n, tool in enumerate(request_field(body, "tools", list, [])):
        at = f"tools[{n}]"
        if not isinstance(tool, dict) or any(name != "functionDeclarations" for name in tool):
            raise Refusal(400, f"'{at}' has server tools, which are not supported: use functionDeclarations", param=at)
        for m, given in enumerate(request_field(tool, "functionDeclarations", list, [])):
            where = f"{at}.functionDeclarations[{m}]"
            if not isinstance(given, dict):
                raise Refusal(400, f"'{where}' must be an object: correct the request", param=where)
            schema = given.get("parametersJsonSchema") or _json_schema(given.get("parameters")) or {"type": "object"}
            function = {"name": _name(given, where), "parameters": schema}
            if isinstance(given.get("description"), str):
                function["description"] = given["description"]
            tools.append({"type": "function", "function": function})
    return tools


def _json_schema(schema: Any) -> Any:
    """Return Google's form of a schema as a JSON schema: its types are in capitals."""
    if not isinstance(schema, dict):
        return None
    made: dict[str, Any] = {}
    stack: list[tuple[Any, Any]] = [(schema, made)]
    while stack:
        old, new = stack.pop()
        pairs: Iterable[tuple[Any, Any]] = old.items() if isinstance(old, dict) else enumerate(old)
        for key, value in pairs:
            if key == "type" and isinstance(value, str):
                value = value.lower()
            copy: Any = {} if isinstance(value, dict) else [None] * len(value) if isinstance(value, list) else value
            new[key] = copy
            if isinstance(value, dict | list):
                stack.append((value, copy))
    return made


def _tool_choice(body: Mapping[str, Any]) -> str | Mapping[str, Any]:
    config = request_field(request_field(body, "toolConfig", dict, {}), "functionCallingConfig", dict, {})
    mode = request_field(config, "mode", str, "AUTO")
    if mode not in _CHOICES:
        raise Refusal(400, f"'functionCallingConfig.mode' is {mode!r}: use AUTO, ANY or NONE", param="toolConfig")
    return _CHOICES[mode]


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    """Return a field that clients send as a number with or without a fraction."""
    value = number(config, name, 0, 2**31)
    return None if value is None else int(value) or None


def _stop(config: Mapping[str, Any]) -> tuple[str, ...]:
    stop = request_field(config, "stopSequences", list, [])
    if len(stop) > 16 or not all(isinstance(s, str) and s for s in stop):
        raise Refusal(400, "'stopSequences' must be up to 16 non-empty strings: correct it", param="stopSequences")
    return tuple(stop)


def _format(config: Mapping[str, Any]) -> dict[str, Any] | None:
    if request_field(config, "responseMimeType", str, "text/plain") != "application/json":
        return None
    schema = config.get("responseJsonSchema") or _json_schema(config.get("responseSchema"))
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _thinks(body: Mapping[str, Any]) -> bool:
    config = request_field(body, "generationConfig", dict, {})
    return request_field(config, "thinkingConfig", dict, {}).get("includeThoughts") is True


# Replies to responses


def _part(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"text": text, "thought": True}
        case "text":
            return {"text": text}
    return {"functionCall": {"id": block.call_id, "name": block.name, "args": arguments_object(text)}}


def _response(call: ChatCall, parts: list[dict[str, Any]], last: Delta) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    response: dict[str, Any] = {
        "candidates": [candidate],
        "modelVersion": call.model or "policy",
        "responseId": call.id,
    }
    if last.finish_reason is not None:
        candidate["finishReason"] = _FINISH.get(last.finish_reason, "STOP")
        usage = last.usage or Usage()
        response["usageMetadata"] = {
            "promptTokenCount": usage.prompt_tokens,
            "candidatesTokenCount": usage.completion_tokens,
            "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
            "cachedContentTokenCount": usage.cached_tokens,
        }
    return response
