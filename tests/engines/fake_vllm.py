"""A server with the wire format of vLLM's OpenAI server, with real log-probs of a toy model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from .fake_model import Sampler
from .fake_server import FakeServer


class FakeVLLM(FakeServer):
    """``mode`` is its ``--logprobs-mode``: ``raw``, ``processed`` or ``logits``."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "raw"
        self.models: list[dict[str, Any]] = [
            {"id": "tiny", "object": "model", "root": "/models/tiny", "max_model_len": 64},
            {"id": "lora-a", "object": "model", "root": "/adapters/a", "parent": "tiny", "max_model_len": 64},
        ]
        self.strip: frozenset[str] = frozenset()
        """Fields that a router leaves out."""
        self.strip_streams_only = False
        self.prompt_as_seen: list[int] | None = None
        """What it says that the prompt was."""
        self.at_once = 1
        """Tokens an event."""
        self.pace = 0.0
        """Seconds between events."""
        self.heeds_stop = True
        self.loads = True
        """Adapters, while it runs."""
        self.dev = True
        """VLLM_SERVER_DEV_MODE."""
        self.weights = self.weight_version = "default"
        """The folder of the weights that it samples with, and their name."""
        self.busy = 0
        """How often it keeps its prefixes."""
        self.asleep = False
        self.sampled: list[str] = []
        """The version of the weights for each token of a stream."""

    def routes(self, app: web.Application) -> None:
        if self.loads:
            app.router.add_post("/v1/load_lora_adapter", self._load)
            app.router.add_post("/v1/unload_lora_adapter", self._unload)
        if self.dev:
            app.router.add_post("/collective_rpc", self._reload)
            app.router.add_post("/reset_prefix_cache", self._reset)
            app.router.add_post("/update_weight_version", self._name)
            app.router.add_get("/weight_info", self._info)
            app.router.add_post("/sleep", self._sleep)
            app.router.add_post("/wake_up", self._sleep)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)

    async def start(self) -> None:
        """It starts with the weights of its model."""
        self.weights = self.weight_version = "default"
        self.asleep = False
        await super().start()

    async def _reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = body["kwargs"]["weights_path"]
        if not (Path(folder) / "model.safetensors").exists():
            return self._error(500, "Cannot find any model weights")
        assert body["method"] == "reload_weights"
        self.weights = folder
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request) -> web.Response:
        self.busy -= 1
        return web.json_response({"success": self.busy < 0})

    async def _name(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.asleep = request.path == "/sleep"
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not (Path(body["lora_path"]) / "adapter_model.safetensors").exists():
            return self._error(404, f"No adapter found for {body['lora_path']}")
        row = {"id": body["lora_name"], "object": "model", "root": body["lora_path"], "parent": "tiny"}
        self.models = [*self.models, row | {"max_model_len": 64}]
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.models = [row for row in self.models if row["id"] != name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body, fault = await self.take(request)
        assert not self.asleep
        if fault.status:
            return self.refusal(fault)
        if body["model"] not in [model["id"] for model in self.models]:
            return self._error(404, f"The model `{body['model']}` does not exist.")
        length = len(body["prompt"]) + body["max_tokens"]
        if length > 64:
            return self._error(
                400, f"This model's maximum context length is 64 tokens. However, you asked for {length}"
            )
        chunks = self._chunks(body)
        if not body.get("stream"):
            return web.json_response(next(chunks))
        error = {"error": {"message": "engine core died", "type": "InternalServerError", "code": 500}}
        return await self.stream(request, fault, self._events(chunks, body), error)

    async def _events(self, chunks: Any, body: dict[str, Any]) -> AsyncIterator[Any]:
        for chunk in chunks:
            assert not self.asleep
            self.sampled.append(self.weight_version)
            yield chunk
            await asyncio.sleep(self.pace)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": 1}
        usage["prompt_tokens_details"] = {"cached_tokens": len(body["prompt"]) // 2}  # type: ignore[assignment]
        yield {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [], "usage": usage}

    def _chunks(self, body: dict[str, Any]) -> Any:
        prompt = body["prompt"] if self.prompt_as_seen is None else self.prompt_as_seen
        sampler = Sampler(body["prompt"], body["temperature"], body["top_k"], body.get("seed"), self.mode)
        stop = frozenset(body.get("stop_token_ids") or ()) if self.heeds_stop else frozenset()
        held: list[Any] = []
        first = True
        for row in sampler.run(body["max_tokens"], stop):
            held.append(row)
            reason = row[3]
            if len(held) < self.at_once and reason is None:
                continue
            count = body["logprobs"]
            choice: dict[str, Any] = {
                "index": 0,
                "text": "x" * len(held),
                "logprobs": {
                    "text_offset": [0] * len(held),
                    "token_logprobs": [logprob for _, logprob, _, _ in held],
                    "tokens": [f"token_id:{token}" for token, _, _, _ in held],
                    "top_logprobs": [
                        {f"token_id:{t}": v for t, v in [(token, logprob), *top[:count]]}
                        for token, logprob, top, _ in held
                    ],
                },
                "finish_reason": reason,
                "stop_reason": held[-1][0] if reason == "stop" else None,
                "prompt_token_ids": prompt if first else None,
                "token_ids": [token for token, _, _, _ in held],
            }
            if body.get("stream") or not self.strip_streams_only:
                for name in self.strip:
                    choice.pop(name, None)
            yield {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}
            held, first = [], False

    def _error(self, status: int, message: str) -> web.Response:
        return web.json_response(
            {"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status
        )


@pytest.fixture
async def fake_vllm() -> AsyncIterator[FakeVLLM]:
    """A running server."""
    server = FakeVLLM()
    await server.start()
    yield server
    await server.stop()
