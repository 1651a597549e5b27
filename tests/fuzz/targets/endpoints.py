"""What a model's endpoint answers: chat completions, whole and as chunks, and token ids of vLLM and SGLang."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

from clawgym.engines.openai import OpenAIEngine
from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.sglang import SGLangEngine
from clawgym.engines.vllm import VLLMEngine
from clawgym.errors import ClawGymError
from clawgym.pool._pack import pack
from clawgym.records import Turn

from ..source import Source, run

READS = ("engines._chunks", "engines.chat", "engines._http", "engines._sse", "bounds")

_ASKED = [{"role": "user", "content": "hi"}]
_CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
# fmt: off
_WHOLE = {"model": "m", "usage": _USAGE, "choices": [{"finish_reason": "tool_calls", "message": {
    "content": [{"type": "text", "text": "a"}], "reasoning_content": "hm", "tool_calls": [_CALL]}}]}
_CHUNK = {"id": "i", "model": "m", "usage": _USAGE, "choices": [{"index": 0, "finish_reason": "stop", "delta": {
    "content": "a", "reasoning": "hm", "tool_calls": [_CALL]}}]}
_ERROR = {"error": {"message": "Unsupported parameter: 'seed'", "param": "seed", "code": "unsupported", "type": "t"}}
_MODELS = {"data": [{"id": "m", "root": "m", "max_model_len": 100}]}
_VLLM = {"choices": [{"token_ids": [5], "prompt_token_ids": [1, 2, 3, 4], "finish_reason": "length", "logprobs": {
    "token_logprobs": [-0.5], "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.5}]}}], "usage": _USAGE}
_SGLANG = {"output_ids": [5], "prompt_token_ids": [1, 2, 3, 4], "meta_info": {
    "output_token_logprobs": [[-0.5, 5, None]], "output_top_logprobs": [[[-0.5, 5, None], [-1.5, 6, None]]],
    "prompt_tokens": 4, "completion_tokens": 1, "weight_version": "1", "cached_tokens": 1, "finish_reason": {"type": "length"}}}
# fmt: on


class _Answer:
    """One answer over HTTP, as the input has it."""

    def __init__(self, source: Source, like: Any, *, events: bool) -> None:
        self.status = source.pick((200, 200, 200, 200, 400, 429, 503, 302))
        self.headers = {source.pick(("x", "retry-after", "retry-after-ms", "location")): source.pick(_WAITS)}
        self.headers["content-type"] = "text/event-stream" if events and self.status == 200 else "application/json"
        self.reason = "because"
        if self.status != 200:
            self._pieces = [source.json(_ERROR)]
        elif events:
            stream = b"".join(b"data: " + source.json(like) + b"\n\n" for _ in range(1 + source.number(0, 2)))
            self._pieces = source.pieces(
                stream + source.pick((b"data: [DONE]\n\n", b"", b"data: {", b"event: error\ndata: 1\n\n"))
            )
        else:
            self._pieces = [source.json(like)]
        self.content = self

    async def read(self, most: int = -1) -> bytes:
        return b"".join(self._pieces)[: most if most >= 0 else None]

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def iter_chunks(self) -> AsyncIterator[tuple[bytes, bool]]:
        while piece := await self.readany():
            yield piece, True

    def close(self) -> None: ...

    async def __aenter__(self) -> _Answer:
        return self

    async def __aexit__(self, *_: object) -> None: ...


_WAITS = (
    "1",
    "inf",
    "nan",
    "-1",
    "1e999",
    "x",
    "Wed, 21 Oct 2015 07:28:00 GMT",
    "Wed, 21 Oct 2015 07:28:00",
    "400" * 99,
)


class _Session:
    """Answers what an engine asks a server."""

    def __init__(self, source: Source, like: Any) -> None:
        self._source, self._like = source, like

    async def request(self, method: str, url: str, *, data: bytes | None, **_: Any) -> _Answer:
        events = data is not None and b'"stream":true' in data
        return _Answer(self._source, _MODELS if method == "GET" else self._like, events=events)

    async def close(self) -> None: ...


def fuzz(data: bytes) -> None:
    source = Source(data)
    try:
        run(asyncio.wait_for((_text if source.byte() & 1 else _ids)(source), 20))
    except ClawGymError as error:
        assert str(error)
        assert len(str(error)) < 3000


async def _text(source: Source) -> None:
    engine = OpenAIEngine("m", base_url="http://127.0.0.1:1/v1", api_key="k", max_retries=0)
    whole = source.byte() & 1
    engine._endpoint._session = _Session(source, _WHOLE if whole else _CHUNK)  # pyright: ignore[reportAttributeAccessIssue]
    if whole:
        completion = await engine.complete(_ASKED, sampling=Sampling(seed=1))
        repr(completion).encode()
        return
    async for delta in engine.stream({"messages": _ASKED, "seed": 1}):
        repr(delta).encode()


async def _ids(source: Source) -> None:
    kind, like = source.pick(((VLLMEngine, _VLLM), (SGLangEngine, _SGLANG)))
    engine = kind("http://127.0.0.1:1", "m", tokenizer="t", patience=0.0)
    engine._endpoint._session = _Session(source, like)
    ids: list[int] = []
    logprobs: list[float] = []
    try:
        stream: AsyncIterator[Any] = engine.generate(
            GenerateRequest([1, 2, 3, 4], Sampling(max_tokens=3), stop_ids=frozenset({9}))
        )
        async for tokens in stream:
            ids += tokens.ids
            logprobs += tokens.logprobs
        assert all(math.isfinite(value) or value < 0 for value in logprobs)
        flaw = "no-logprobs" if len(logprobs) != len(ids) else None
        pack("e", 0, Turn(sampled_ids=tuple(ids), logprobs=tuple(logprobs), flaw=flaw))
    finally:
        await engine.aclose()
