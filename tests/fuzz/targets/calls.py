"""What a model writes, read as reasoning, text and calls: the same, however it comes in pieces."""

from __future__ import annotations

import json

from clawgym.gateway.calls import ReplyBuilder
from clawgym.gateway.parsers import ReplyParser, StopStrings
from clawgym.registry import parsers

from ..source import Source

READS = ("gateway.parsers", "gateway.calls")

_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {name: {"type": name} for name in _TYPES}}}},
]  # fmt: skip
_WORDS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", '{"name": "f", "arguments": {', "}}", "}"),
    *(
        "<function=f>",
        "<parameter=integer>",
        "</parameter>",
        "</function>",
        '"x": ',
        '"',
        "\\",
        "\\ud800",
        "1",
        "[",
        "{",
    ),
    *("<parameter=object>", "NaN", "1e999", "9" * 5000, "[" * 200, "<", "</", "é\U0001f600", '"name": "f"', ","),
)


def fuzz(data: bytes) -> None:
    source = Source(data)
    style = source.pick(("hermes", "qwen3-coder"))
    reasoning = source.byte() & 1 == 1
    text = ""
    while source.left > 1 and source.byte() < 250:
        text += source.pick(_WORDS)
    text += source.rest().decode("utf-8", "replace")
    whole = _read([text], style, reasoning)
    assert len(text) > 3000 or _read(list(text), style, reasoning) == whole
    pieces = [piece.decode("utf-32") for piece in _cut(Source(data), text)]
    assert _read(pieces, style, reasoning) == whole

    cut, stops = ("", False), StopStrings(("</", "xx", text[:3]))
    for letter in text:
        new, stopped = stops.push(letter)
        cut = cut[0] + new, stopped
        if stopped:
            break
    assert text.startswith(cut[0] + ("" if cut[1] else stops.finish()))


def _cut(source: Source, text: str) -> list[bytes]:
    sizes = [source.byte() or 1 for _ in range(50)]
    pieces, at = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[at : at + size].encode("utf-32"))
        at += size
    return pieces


def _read(pieces: list[str], style: str, reasoning: bool) -> object:
    parser = ReplyParser(parsers.make(style), _TOOLS, reasoning=reasoning)
    reply = ReplyBuilder()
    for delta in [delta for piece in pieces for delta in parser.push(piece)] + parser.finish():
        reply.take(delta)
    for call in parser.calls:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    said = [(call["function"]["name"], call["function"]["arguments"]) for call in parser.calls]
    json.dumps(reply.message, ensure_ascii=False).encode()
    assert (reply.message["content"] or None) == (parser.content or None)
    return parser.content, parser.reasoning, said, parser.malformed
