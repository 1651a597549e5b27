"""A model request in canonical form (:class:`ChatCall`), whatever its dialect, and its refusal (:class:`Refusal`).

Invariant: a :class:`ChatCall` is checked data: every message has a known role, every text is valid UTF-8, every image
is bytes with their digest. Only dialects read raw request bodies.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clawgym.bounds import LONGEST_REQUEST
from clawgym.engines.chat import storable
from clawgym.engines.protocol import CallDelta, Delta, Image, Sampling
from clawgym.errors import GatewayError

__all__ = [
    "ChatCall",
    "ReplyBuilder",
    "Message",
    "Refusal",
    "canonical_messages",
    "chat_body",
    "check_length",
    "image_from_url",
    "request_field",
]

Message = dict[str, Any]
"""One message in canonical chat form.

``role``: system, user, assistant or tool. ``content``: a string, or with images a list of ``{"type": "text", "text"}``
and ``{"type": "image", "sha256"}``. An assistant message may have ``tool_calls`` (``arguments`` is JSON text) and
``reasoning_content``; a tool message has ``tool_call_id``."""


_LONGEST = 1000
"""Most characters of a refusal's message."""


class Refusal(GatewayError):
    """A request is answered with an HTTP error and an error body.

    Args:
        status: HTTP status.
        message: what is wrong, and how to correct it.
        code: machine-readable code of the error, if any.
        param: the field of the request that is wrong, if any.
        retry_after: seconds after which the client may try again, if it may.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(
            message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."
        )  # it may quote the request
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after


@dataclass(frozen=True)
class ChatCall:
    """One request to the model."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI chat form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    tool_choice: str | Mapping[str, Any] = "auto"
    """``auto``, ``none``, ``required``, or ``{"type": "function", "function": {"name"}}``."""
    parallel_tool_calls: bool = True
    response_format: Mapping[str, Any] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    images: Mapping[str, Image] = field(default_factory=dict)
    """By digest: every image that the messages name."""
    model: str = ""
    role: str | None = None
    """The role that the agent declares in the header ``x-clawgym-role``, if any."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    """Id of the response."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the request, passed unchanged to text engines."""


def request_field(body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
    """Return ``body[name]``, or ``default`` if it is absent or null.

    Raises :class:`Refusal` (400) if it is not of one of ``kinds``.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(_KINDS.get(kind, kind.__name__) for kind in kinds)
        raise Refusal(400, f"'{name}' must be {names}, not {_kind(value)}: correct the request", param=name)
    return value


_KINDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "an array",
    dict: "an object",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def canonical_messages(raw: Any, images: dict[str, Image]) -> list[Message]:
    """Check the messages of a chat-completions request and return them in canonical form.

    Images are added to ``images`` by digest. Raises :class:`Refusal`.
    """
    if not isinstance(raw, list) or not raw:
        raise Refusal(400, "'messages' must be a non-empty array: give the conversation", param="messages")
    return [_message(item, f"messages[{n}]", images) for n, item in enumerate(raw)]


def _message(raw: Any, where: str, images: dict[str, Image]) -> Message:
    role = raw.get("role") if isinstance(raw, dict) else None
    match role:
        case "system" | "developer":
            return {"role": "system", "content": _content(raw.get("content"), where, images)}
        case "user":
            return {"role": "user", "content": _content(raw.get("content"), where, images)}
        case "tool" | "function":
            call_id = raw.get("tool_call_id") or raw.get("name") or ""
            if not isinstance(call_id, str):
                raise Refusal(400, f"'{where}.tool_call_id' must be a string: correct the request", param=where)
            return {
                "role": "tool",
                "tool_call_id": storable(call_id),
                "content": _content(raw.get("content"), where, images),
            }
        case "assistant":
            return _assistant(raw, where, images)
    raise Refusal(
        400,
        f"'{where}.role' is {role!r}: use one of system, developer, user, assistant, tool",
        param=f"{where}.role",
    )


def _assistant(raw: Mapping[str, Any], where: str, images: dict[str, Image]) -> Message:
    content = _content(raw.get("content"), where, images) if raw.get("content") is not None else None
    message: Message = {"role": "assistant", "content": content}
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = storable(reasoning)
    calls = raw.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Refusal(400, f"'{where}.tool_calls' must be an array: correct the request", param=where)
    if calls:
        message["tool_calls"] = [_call(item, f"{where}.tool_calls[{n}]") for n, item in enumerate(calls)]
    return message


def _call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise Refusal(400, f"'{where}' is not a function call with a name: correct the request", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    call_id = raw.get("id")
    return {
        "id": storable(call_id) if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": storable(name), "arguments": storable(arguments)},
    }


def _content(raw: Any, where: str, images: dict[str, Image]) -> str | list[dict[str, Any]]:
    if raw is None:
        return ""
    if isinstance(raw, str):
        return storable(raw)
    if not isinstance(raw, list):
        raise Refusal(400, f"'{where}.content' must be a string or an array of parts: correct it", param=where)
    parts: list[dict[str, Any]] = []
    for n, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            parts.append({"type": "text", "text": storable(part[kind])})
        elif kind == "image_url":
            url = part.get("image_url")
            image = image_from_url(url.get("url") if isinstance(url, dict) else url, f"{where}.content[{n}]")
            images[image.sha256] = image
            parts.append({"type": "image", "sha256": image.sha256})
        else:
            at = f"{where}.content[{n}]"
            raise Refusal(400, f"'{at}' has type {kind!r}: use only text and image_url parts", param=at)
    return merged(parts)


def merged(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Join parts that are all text to one string, since the split has no meaning; return others unchanged."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def image_from_url(url: Any, where: str) -> Image:
    """Decode the image in a ``data:`` URL. Raises :class:`Refusal` for any other URL, since nothing is fetched."""
    head, comma, payload = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise Refusal(
            400, f"'{where}' is not a data:image/...;base64 URL: send the image itself, nothing is fetched", param=where
        )
    return image_from_base64(payload, head[5:-7], where)


def image_from_base64(payload: Any, media_type: str, where: str) -> Image:
    """Decode a base64 image. Raises :class:`Refusal`."""
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise Refusal(400, f"'{where}' is not base64: correct the image's data", param=where) from None
    return Image(hashlib.sha256(data).hexdigest(), data, media_type)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def check_length(call: ChatCall) -> None:
    """Raise :class:`Refusal` if the call has more text than fits into any context window."""
    length = 0
    for message in call.messages:
        length += len(text_of(message)) + len(message.get("reasoning_content", ""))
        length += sum(len(one["function"]["arguments"]) for one in message.get("tool_calls", ()))
    if length > LONGEST_REQUEST:
        raise Refusal(
            400,
            f"the messages have {length} characters, over {LONGEST_REQUEST} (LONGEST_REQUEST), which is beyond any "
            "model's maximum context length: reduce the length of the messages",
            code="context_length_exceeded",
            param="messages",
        )


def chat_body(call: ChatCall) -> dict[str, Any]:
    """Return ``call`` as a chat-completions request body, for text engines."""
    body: dict[str, Any] = {**call.extra, "messages": [_to_wire(message, call) for message in call.messages]}
    if call.tools:
        body["tools"] = [dict(tool) for tool in call.tools]
        if call.tool_choice != "auto":
            body["tool_choice"] = call.tool_choice
        if not call.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    if call.response_format is not None:
        body["response_format"] = call.response_format
    for name in ("temperature", "top_p", "max_tokens", "seed", "top_k"):
        if (value := getattr(call.sampling, name)) is not None:
            body[name] = value
    if call.sampling.stop:
        body["stop"] = list(call.sampling.stop)
    return body


def _to_wire(message: Message, call: ChatCall) -> dict[str, Any]:
    if not isinstance(message["content"], list):
        return message
    parts: list[dict[str, Any]] = []
    for part in message["content"]:
        if part["type"] == "image":
            image = call.images[part["sha256"]]
            url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
            part = {"type": "image_url", "image_url": {"url": url}}
        parts.append(part)
    return {**message, "content": parts}


class ReplyBuilder:
    """Builds an assistant message from streamed deltas."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def take(self, delta: Delta) -> None:
        if delta.text:
            self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for piece in delta.calls:
            self._take_call(piece)

    def _take_call(self, piece: CallDelta) -> None:
        call = self._calls.setdefault(
            piece.index,
            {
                "id": piece.id or f"call{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": "", "arguments": ""},
            },
        )
        call["function"]["name"] += piece.name or ""
        call["function"]["arguments"] += piece.arguments

    @property
    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "".join(self._text) or None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [self._calls[n] for n in sorted(self._calls)]
        return message
