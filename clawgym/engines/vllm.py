"""Engine ``vllm``: token ids in, sampled ids and log-probs out, from vLLM's OpenAI server (0.10.2 or newer).

Each turn is one streamed ``POST /v1/completions`` with ``prompt`` as ids and ``return_token_ids``. The first event
repeats the prompt's ids, which must equal those sent; each event has ``token_ids`` and their log-probs. The server
knows a LoRA adapter as a model name.

By default log-probs are those at temperature 1. To train on other temperatures, start the server with
``--logprobs-mode processed_logprobs``; top-p and top-k then also cut the vocabulary of the log-probs. The first call
finds out which log-probs the server returns (``_scale.py``). If they are not log softmax(logits / temperature) over the
whole vocabulary, they are left out, and the run manifest and a warning say why.

:meth:`~clawgym.engines._served.ServedEngine.update_weights` and ``sleep`` use endpoints that the server has with
``VLLM_SERVER_DEV_MODE=1`` only. Each stream asks for the name of the server's weights (``/weight_info``) before its
first token.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawgym.bounds import MOST_EVENTS
from clawgym.engines._failures import EndpointFailure
from clawgym.engines._http import SAME
from clawgym.engines._retry import Patience, persist_call
from clawgym.engines._scale import COLD, TOP, Scale, scale_of
from clawgym.engines._served import CLOSING, PROBE, Checked, LoadedWeights, ServedEngine
from clawgym.engines.protocol import GenerateRequest, Tokens
from clawgym.errors import EngineError
from clawgym.registry import engines

if TYPE_CHECKING:
    import torch

__all__ = ["VLLMEngine"]

_SINCE = "vLLM 0.10.2 or newer"


@dataclass(eq=False)
class _Adapter:
    """One version of an adapter that was loaded into the server."""

    version: int
    folder: Path
    named: str = ""
    """The server's name for it; new for each attempt, as the server keeps what it loaded under a name."""
    streams: int = 0
    """Number of streams that use it."""


@engines.register("vllm")
class VLLMEngine(ServedEngine):
    """``model`` on the vLLM server at ``base_url`` (``http://127.0.0.1:8000/v1``).

    Belongs to one event loop.

    Args:
        base_url: URL of the server.
        model: its name at the server.
        tokenizer: folder or Hub name that the server was started with.
        api_key: key of the server, if it wants one.
        context_window: in tokens; the server's by default.
        policy_version: version of the weights, recorded with each token.
        patience: seconds that a request is retried while the server is down, busy (429) or failing (5xx), before its
            first token; later failures are final.
        first_token_seconds: most seconds to the first token.
        between_seconds: most seconds between two pieces of a reply.
        shared: folder that the server reads, too; weights and adapters are written there.
    """

    name = "vllm"
    _sleep_path, _wake_path = "/sleep", "/wake_up"
    _start_to_sleep = "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        tokenizer: str,
        api_key: str | None = None,
        context_window: int | None = None,
        policy_version: int = 0,
        patience: float = 120.0,
        first_token_seconds: float = 300.0,
        between_seconds: float = 60.0,
        shared: Path | None = None,
    ) -> None:
        super().__init__(
            base_url,
            model,
            tokenizer=tokenizer,
            api_key=api_key,
            context_window=context_window,
            policy_version=policy_version,
            patience=patience,
            first_token_seconds=first_token_seconds,
            between_seconds=between_seconds,
            shared=shared,
        )
        self._adapters: dict[str, _Adapter] = {}
        self._replaced: list[_Adapter] = []

    async def load_adapter(
        self,
        name: str,
        source: str | Path | Mapping[str, torch.Tensor],
        version: int,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a LoRA adapter into the server, or replace it. Running streams finish with the old one.

        ``source`` is a folder written by peft, or a state dict, with ``config`` as in ``adapter_config.json``. The
        server needs ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``, and must see :attr:`shared` (which is
        emptied at first) at the same path. Raises :class:`~clawgym.errors.EngineError` if the server refuses.
        """
        if self.shared is None:
            raise EngineError("adapters need a folder that the server reads, too: set shared")
        if not self._adapters:
            await asyncio.to_thread(shutil.rmtree, self.shared, ignore_errors=True)
        if isinstance(source, str | Path):
            from clawgym.engines.lora import adapter_files

            source, config = await asyncio.to_thread(adapter_files, Path(source))
        given = _Adapter(version, self.shared / f"{name}-{version}-{secrets.token_hex(4)}")
        try:
            await asyncio.to_thread(_write, given.folder, source, config or {})
            if self._asleep:
                await self.wake()
            await persist_call(partial(self._load_one, given), Patience(self._patience))
        except BaseException:
            shutil.rmtree(given.folder, ignore_errors=True)
            raise
        if name in self._adapters:
            self._replaced.append(self._adapters.pop(name))
        self._adapters[name] = given
        for one in [one for one in self._replaced if not one.streams]:
            self._replaced.remove(one)
            await self._unload(one)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that run with it finish."""
        self._replaced.append(self._adapters.pop(name))
        for one in [one for one in self._replaced if not one.streams]:
            self._replaced.remove(one)
            await self._unload(one)

    async def aclose(self) -> None:
        """Unload the adapters, and close the connections. Idempotent."""
        for one in (*self._adapters.values(), *self._replaced):
            await self._unload(one)
        if self._adapters and self.shared is not None:
            await asyncio.to_thread(shutil.rmtree, self.shared, ignore_errors=True)
        self._adapters, self._replaced = {}, []
        await super().aclose()

    def identity(self) -> dict[str, Any]:
        """The entry of a served engine, plus the versions of adapters."""
        return super().identity() | {"adapters": {name: one.version for name, one in self._adapters.items()}}

    async def _load_one(self, given: _Adapter) -> None:
        named = f"{given.folder.name}-{secrets.token_hex(4)}"
        with self._advised("--enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await self._endpoint.tell("/v1/load_lora_adapter", {"lora_name": named, "lora_path": str(given.folder)})
        given.named = named

    async def _load_weights(self, weights: LoadedWeights) -> None:
        post = self._endpoint.post
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
        with self._advised("VLLM_SERVER_DEV_MODE=1 (vLLM 0.31; older ones have no /weight_info)"):
            await post("/collective_rpc", rpc)
            if not (await post("/reset_prefix_cache", {})).get("success"):
                raise EngineError(
                    f"{self._endpoint.host} keeps prefixes of the old weights, as others sample from it: let only the "
                    "trainer use this server",
                    status=503,
                    retryable=True,
                )
            await post("/update_weight_version", {"new_version": weights.mark})
            self._confirm((await self._endpoint.get("/weight_info")).get("weight_version"))

    async def _unload(self, given: _Adapter) -> None:
        with suppress(EngineError, TimeoutError):  # a server that is gone has no adapters
            async with asyncio.timeout(CLOSING):
                await self._endpoint.tell("/v1/unload_lora_adapter", {"lora_name": given.named})
        await asyncio.to_thread(shutil.rmtree, given.folder, ignore_errors=True)

    @contextmanager
    def _serving(self, adapter: str | None) -> Iterator[tuple[str | None, int | None]]:
        given = self._adapters.get(adapter or "")
        if given is None:
            yield adapter, self.policy_version
            return
        given.streams += 1
        try:
            yield given.named, given.version
        finally:
            given.streams -= 1

    async def _look_once(self) -> None:
        await super()._look_once()
        if self._adapters:
            listed = await self._endpoint.get("/v1/models")
            known = {row.get("id") for row in listed.get("data") or () if isinstance(row, dict)}
            for one in self._adapters.values():
                if one.named not in known:  # the server was restarted
                    await self._load_one(one)

    async def _first_look(self) -> Scale:
        tops: list[list[float]] = []
        for temperature in (1.0, COLD):
            body = {"temperature": temperature, "max_tokens": 1, "logprobs": TOP, "ignore_eos": True}
            answer = await self._endpoint.post("/v1/completions", {**self._body(list(PROBE), None), **body})
            choice = _choice(answer)
            if choice.get("token_ids") is None or choice.get("prompt_token_ids") is None:
                missing = [name for name in ("prompt_token_ids", "token_ids") if choice.get(name) is None]
                raise self._stripped(" and ".join(missing), _SINCE)
            logprobs = choice.get("logprobs") or {}
            if not logprobs.get("token_logprobs"):
                raise self._stripped("log-probs", _SINCE)
            top = (logprobs.get("top_logprobs") or [None])[0] or {}
            tops.append([float(v) for v in top.values() if v is not None])
        return scale_of(*tops)

    def _body(self, prompt: Sequence[int], adapter: str | None) -> dict[str, Any]:
        return {
            "model": adapter or self.model,
            "prompt": prompt,
            "n": 1,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }

    async def _stream(self, request: GenerateRequest, checked: Checked) -> AsyncGenerator[Tokens, None]:
        body = self._body(request.prompt_ids, request.adapter) | {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "max_tokens": checked.most,
            "logprobs": 0,  # for the sampled token only
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": True,  # the caller decides what ends a turn
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if (seed := request.seed) is not None:
            body["seed"] = seed
        if request.sampling.json_schema is not None:
            schema = {"name": "answer", "schema": request.sampling.json_schema or {"type": "object"}}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        ids: list[int] = []
        logprobs: list[Any] = []
        reason, cached, echoed = "", 0, False
        echo = ("prompt", "prompt_token_ids")
        stream = self._endpoint.events("/v1/completions", body, MOST_EVENTS + checked.most, echo)
        try:
            async with aclosing(stream) as several:
                async for events in several:
                    for event in events:
                        if event.get("error") or event.get("object") == "error":
                            if reason:
                                break  # the answer was complete
                            raise self._endpoint.error(self._endpoint.failure_of(event.get("error") or event))
                        if usage := event.get("usage"):
                            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or cached
                        choice = _choice(event)
                        if not choice:
                            continue
                        if not echoed:
                            self._check_prompt(choice, request, checked)
                            if self._weights is not None and request.adapter is None:
                                # The stream is open, so the same process answers.
                                self._confirm((await self._endpoint.get("/weight_info")).get("weight_version"))
                            echoed = True
                        if choice.get("token_ids") is None:
                            raise self._stripped("token_ids", _SINCE)
                        ids += choice["token_ids"]
                        logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
                        reason = choice.get("finish_reason") or reason
                    if ids and not reason:  # ids that arrived together are yielded together
                        yield checked.take(ids, logprobs)
                        ids, logprobs = [], []
        except EngineError as error:
            if error.status == 404 and any(body["model"] == one.named for one in self._adapters.values()):
                raise EngineError(
                    f"{error}: the server was started again; its adapters are loaded anew", status=503, retryable=True
                ) from error
            raise
        if not reason:
            raise self._endpoint.error(EndpointFailure("the stream ended before the answer did", 503, retryable=True))
        yield checked.end(checked.take(ids, logprobs), reason, cached)

    def _check_prompt(self, choice: dict[str, Any], request: GenerateRequest, checked: Checked) -> None:
        seen = choice.get("prompt_token_ids")
        if seen is None:
            raise self._stripped("prompt_token_ids", _SINCE)
        if seen != SAME and seen != list(request.prompt_ids):
            checked.broken(
                f"it worked on another prompt ({len(seen)} ids) than it was sent ({len(request.prompt_ids)} ids)",
                "a server that takes token ids as they are",
            )

    def _why_not(self) -> str:
        mend = {
            "raw": "its log-probs ignore the temperature; start it with --logprobs-mode processed_logprobs, or sample "
            "at temperature 1",
            "scaled": "its log-probs are of the vocabulary that top_p and top_k leave; sample without them",
            "logits": "it gives logits for log-probs; start it with --logprobs-mode processed_logprobs",
            "unknown": "which log-probs it gives is not known; sample at temperature 1 without top_p and top_k",
        }
        return f"log-probs are left out, and turns cannot be trained on: {mend[self.scale]}"


def _write(folder: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    from clawgym.engines.lora import write_adapter

    folder.mkdir(parents=True)
    write_adapter(folder, weights, config)


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    """The first choice of a completion or of an event of one; {} where there is none."""
    choices = answer.get("choices")
    return choices[0] if choices else {}
