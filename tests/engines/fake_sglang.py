"""A server with SGLang's wire format, with real log-probs of a toy model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from .fake_model import Sampler
from .fake_server import FakeServer


class FakeSGLang(FakeServer):
    """``mode``: ``scaled``, or ``raw`` as with SGLANG_RETURN_ORIGINAL_LOGPROB."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "scaled"
        self.incremental = False
        self.weight_version: Any = "default"
        self.asleep = False
        self.versions: list[Any] = []
        """Of the next events, in order; then ``weight_version``."""
        self.strip: frozenset[str] = frozenset()
        self.truncates = 0
        """Ids that it cuts off a prompt."""
        self.abort: dict[str, Any] | None = None
        """How it ends an answer after the first token."""
        self.at_once = 1

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update)
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            app.router.add_post(path, self._sleep)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        found = (Path(body["model_path"]) / "model.safetensors").exists()
        if found:
            self.weight_version = body["weight_version"]
        message = "Succeeded to update model weights." if found else "Failed to load"
        return web.json_response({"success": found, "message": message}, status=200 if found else 400)

    async def _sleep(self, request: web.Request) -> web.Response:
        self.asleep = request.path == "/release_memory_occupation"
        self.weight_version = "lost" if self.asleep else self.weight_version
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        row = {"id": "tiny", "object": "model", "root": "tiny", "max_model_len": 64}
        return web.json_response({"object": "list", "data": [row]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, fault = await self.take(request)
        if fault.status:
            return self.refusal(fault)
        if len(body["input_ids"]) >= 64:
            message = "The input (64 tokens) is longer than the model's context length (64 tokens)."
            return web.json_response({"error": {"message": message}}, status=400)
        if not body.get("stream"):
            return web.json_response([event async for event in self._events(body)][-1])
        return await self.stream(request, fault, self._events(body), {"error": {"message": "scheduler died"}})

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        params = body["sampling_params"]
        sampler = Sampler(
            body["input_ids"], params["temperature"], params["top_k"], params.get("sampling_seed"), self.mode
        )
        rows: list[Any] = []
        tops: list[Any] = []
        sent = 0
        for token, logprob, top, reason in sampler.run(
            params["max_new_tokens"], frozenset(params.get("stop_token_ids") or ())
        ):
            rows.append([logprob, token, None])
            tops.append([[v, t, None] for t, v in top[: body.get("top_logprobs_num", 0)]])
            if len(rows) - sent < self.at_once and reason is None:
                continue
            finish: dict[str, Any] | None = None
            if reason == "stop":
                finish = {"type": "stop", "matched": token}
            elif reason == "length":
                finish = {"type": "length", "length": params["max_new_tokens"]}
            if self.abort is not None:
                finish = self.abort
            since = sent if self.incremental else 0
            meta: dict[str, Any] = {
                "id": "1",
                "finish_reason": finish,
                "prompt_tokens": len(body["input_ids"]) - self.truncates,
                "completion_tokens": len(rows),
                "cached_tokens": len(body["input_ids"]) // 2,
                "weight_version": self.versions.pop(0) if self.versions else self.weight_version,
                "output_token_logprobs": rows[since:],
                "output_top_logprobs": tops[since:],
            }
            for name in self.strip:
                meta.pop(name, None)
            yield {"text": "x", "output_ids": [row[1] for row in rows[since:]], "meta_info": meta}
            sent = len(rows)
            await asyncio.sleep(0)
            if self.abort is not None:
                return


@pytest.fixture
async def fake_sglang() -> AsyncIterator[FakeSGLang]:
    """A running server."""
    server = FakeSGLang()
    await server.start()
    yield server
    await server.stop()
