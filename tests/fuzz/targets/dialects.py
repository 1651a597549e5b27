"""Bodies of requests in every dialect, several in one session, answered by a text engine, whole and as events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from clawgym.agents.blackbox.transcript import steps_of
from clawgym.engines._sse import EventReader
from clawgym.engines.protocol import CallDelta, Delta
from clawgym.errors import ClawGymError
from clawgym.gateway.calls import chat_body
from clawgym.gateway.core import Core
from clawgym.gateway.dialects.chat import ChatDialect
from clawgym.gateway.dialects.errors import failure_of
from clawgym.gateway.dialects.gemini import GeminiDialect
from clawgym.gateway.dialects.messages import MessagesDialect
from clawgym.gateway.dialects.responses import ResponsesDialect
from clawgym.gateway.gate import Gate
from clawgym.gateway.server import read_object
from clawgym.gateway.sessions import Session
from clawgym.pool._pack import pack
from clawgym.records import Turn, Usage

from ..source import Posted, Source, run

READS = (
    *("gateway.dialects.chat", "gateway.dialects.responses", "gateway.dialects.messages", "gateway.dialects.gemini"),
    *("gateway.calls", "bounds"),
)

DIALECTS = (ChatDialect(), ResponsesDialect(), MessagesDialect(), GeminiDialect())
_IMAGE = "data:image/png;base64,aGk="
_SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": _IMAGE}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}],
    "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1, "max_tokens": 5, "seed": 1,
    "stop": ["x"], "stream_options": {"include_usage": True}, "response_format": {"type": "text"},
}  # fmt: skip
_RESPONSES = {
    "model": "m", "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": _IMAGE}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ],
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": _SCHEMA}],
    "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low"}, "metadata": {"a": "b"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}, "max_output_tokens": 5,
}  # fmt: skip
_MESSAGES = {
    "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "x-anthropic-billing-header: 1\nBe brief."}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "hi"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "done"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled"}, "stop_sequences": ["x"], "output_config": {"format": {"schema": _SCHEMA}},
}  # fmt: skip
_GEMINI = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": "aGk="}}]},
        {"role": "model", "parts": [
            {"text": "hm", "thought": True}, {"text": "ok"}, {"functionCall": {"name": "f", "args": {"x": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "done"}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": _SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {"temperature": 1.0, "topP": 1, "topK": 3, "maxOutputTokens": 5, "stopSequences": ["x"],
                         "responseMimeType": "application/json", "responseSchema": _SCHEMA, "seed": 1,
                         "thinkingConfig": {"includeThoughts": True}},
}  # fmt: skip
_LIKE: Mapping[str, Any] = {
    "chat/completions": _CHAT,
    "responses": _RESPONSES,
    "messages": _MESSAGES,
    GeminiDialect.path: _GEMINI,
}


class _Engine:
    """Says what the input says."""

    name = "fuzz"

    def __init__(self, source: Source) -> None:
        self._source = source

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        orjson.dumps(body)
        source = self._source
        for _ in range(source.number(0, 5)):
            call = CallDelta(
                source.number(0, 2), source.pick((None, "c9")), source.pick((None, "f")), source.pick(_SAID)
            )
            yield Delta(source.pick(_SAID), source.pick(_SAID), (call,) * source.number(0, 2))
        yield Delta(
            finish_reason=source.pick(("stop", "length", "tool_calls", "content_filter", "odd")), usage=Usage(3, 2, 1)
        )

    def identity(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None: ...


_SAID = ("", "text", '{"x": 1}', "[" * 100_000, '{"x":', '{"x":' * 400 + "1" + "}" * 400, '{"x": 1e400, "y": [NaN]}')


class Writer:
    """Packs what is to be stored, as the pool does."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def append(self, session: str, index: int, turn: Turn, images: Any) -> None:
        pack(session, index, turn)
        self.turns.append(turn)


def fuzz(data: bytes) -> None:
    source, writer = Source(data), Writer()
    run(converse(source, Core(_Engine(source), writer, Gate(streams=1, waiting=1)), writer))  # type: ignore[arg-type]


async def converse(source: Source, core: Core, writer: Writer) -> None:
    """Several requests of one session to ``core``."""
    session = Session("s", "")
    said: list[Any] = []
    for _ in range(1 + source.number(0, 3)):
        dialect = source.pick(DIALECTS)
        like = _LIKE[dialect.path]
        if said and source.byte() > 100:  # the conversation goes on
            dialect, like = DIALECTS[0], {**_CHAT, "messages": [*said, {"role": "user", "content": "on"}]}
        try:
            body = await read_object(Posted(source.json(like)))  # type: ignore[arg-type]
            call = dialect.call(body, source.pick((None, "main", "subagent", "odd")))
            said = chat_body(call)["messages"]
            if source.byte() & 1:
                orjson.dumps(await dialect.whole(core.answer(session, call), call, body))
            else:
                reader = EventReader()
                async for events in dialect.events(core.answer(session, call), call, body):
                    for event in reader.feed(events):
                        assert event == b"[DONE]" or orjson.loads(event)
            said = [*said, writer.turns[-1].reply]
        except ClawGymError as error:
            told = dialect.error(failure_of(error))
            assert len(told["error"]["message"]) < 2000
            dialect.error_event(failure_of(error))
    for step in steps_of(writer.turns, "hi"):
        json.dumps(asdict(step))
