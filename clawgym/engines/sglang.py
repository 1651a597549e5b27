"""Engine ``sglang``: token ids in, sampled ids and log-probs out, from an SGLang server (0.4.9 or newer).

Each turn is one streamed ``POST /generate`` with ``input_ids`` and ``return_logprob``. Events are cumulative, or
incremental if the server was started with ``--incremental-streaming-output`` (formerly ``--stream-output``), which is
cheaper for long answers; both are supported. Ids are taken from ``meta_info.output_token_logprobs``, which is not
trimmed by stop handling.

SGLang's log-probs are log softmax(logits / temperature) before top-p and top-k, unless
``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set on the server; the first call finds that out (``_scale.py``). If the server
reports a number as ``weight_version``, it is the policy version of the tokens, and a change during a stream is an
error. After :meth:`~clawgym.engines._served.ServedEngine.update_weights`, every event must have its ``weight_version``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from clawgym.bounds import MOST_EVENTS
from clawgym.engines._failures import EndpointFailure
from clawgym.engines._http import SAME
from clawgym.engines._scale import COLD, TOP, Scale, scale_of
from clawgym.engines._served import PROBE, Checked, LoadedWeights, ServedEngine
from clawgym.engines.protocol import GenerateRequest, Tokens
from clawgym.errors import EngineError
from clawgym.registry import engines

__all__ = ["SGLangEngine"]

_SINCE = "SGLang 0.4.9 or newer"


@engines.register("sglang")
class SGLangEngine(ServedEngine):
    """``model`` on the SGLang server at ``base_url`` (``http://127.0.0.1:30000``).

    The server uses ``seed`` only if it was started with ``--enable-deterministic-inference``. Belongs to one event
    loop.

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
        shared: folder that the server reads, too; weights are written there.
    """

    name = "sglang"
    _cut_after = True
    _sleep_path, _wake_path = "/release_memory_occupation", "/resume_memory_occupation"
    _start_to_sleep = "--enable-memory-saver"
    _wakes_empty = True

    async def _load_weights(self, weights: LoadedWeights) -> None:
        body = {"model_path": str(weights.folder), "weight_version": weights.mark, "flush_cache": True}
        with self._advised("the same model, in " + _SINCE):
            answer = await self._endpoint.post("/update_weights_from_disk", body)
            if not answer.get("success"):
                raise EngineError(f"{self._endpoint.host} did not load the weights ({answer.get('message')})")

    async def _first_look(self) -> Scale:
        tops: list[list[float]] = []
        for temperature in (1.0, COLD):
            body = _body(list(PROBE), {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True})
            answer = await self._endpoint.post("/generate", body | {"top_logprobs_num": TOP})
            meta = answer.get("meta_info") or {}
            if not meta.get("output_token_logprobs"):
                raise self._stripped("meta_info.output_token_logprobs", _SINCE)
            top = (meta.get("output_top_logprobs") or [None])[0] or []
            tops.append([float(row[0]) for row in top if row and row[0] is not None])
        return scale_of(*tops)

    async def _stream(self, request: GenerateRequest, checked: Checked) -> AsyncGenerator[Tokens, None]:
        params: dict[str, Any] = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "max_new_tokens": checked.most,
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": True,  # the caller decides what ends a turn
        }
        if (seed := request.seed) is not None:
            params["sampling_seed"] = seed
        if request.sampling.json_schema is not None:
            params["json_schema"] = json.dumps(request.sampling.json_schema or {"type": "object"})
        body = _body(request.prompt_ids, params) | {"stream": True}
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        pairs = _Pairs(checked)
        echo = ("input_ids", "prompt_token_ids")
        async with aclosing(self._endpoint.events("/generate", body, MOST_EVENTS + checked.most, echo)) as several:
            async for events in several:
                held: list[Tokens] = []
                for event in events:
                    tokens, end = self._read(event, request, checked, pairs)
                    held.append(tokens)
                    if end is not None:
                        yield checked.end(_joined(held), *end)
                        return
                if (tokens := _joined(held)).ids:  # ids that arrived together are yielded together
                    yield tokens
        raise self._endpoint.error(EndpointFailure("the stream ended before the answer did", 503, retryable=True))

    def _read(
        self, event: dict[str, Any], request: GenerateRequest, checked: Checked, pairs: _Pairs
    ) -> tuple[Tokens, tuple[str, int] | None]:
        """Parse one event: its tokens and, for the last one, the finish reason and the number of cached ids."""
        if event.get("error"):
            raise self._endpoint.error(self._endpoint.failure_of(event["error"]))
        meta = event.get("meta_info") or {}
        finish = meta.get("finish_reason")
        if isinstance(finish, dict) and finish.get("type") == "abort":
            failure = self._endpoint.failure_of(finish)
            raise self._endpoint.error(
                EndpointFailure(failure.text, failure.status or 503, retryable=failure.retryable)
            )
        if meta.get("output_token_logprobs") is None:
            raise self._stripped("meta_info.output_token_logprobs", _SINCE)
        self._check_prompt(event, meta, request, checked)
        self._check_version(meta, checked)
        tokens = checked.take(*pairs.new(event, meta))
        if not finish:
            return tokens, None
        reason = finish.get("type") if isinstance(finish, dict) else finish
        return tokens, (str(reason), meta.get("cached_tokens") or 0)

    def _check_prompt(
        self, event: dict[str, Any], meta: dict[str, Any], request: GenerateRequest, checked: Checked
    ) -> None:
        echo, count = event.get("prompt_token_ids"), meta.get("prompt_tokens")
        prompt = request.prompt_ids
        if (echo is not None and echo != SAME and echo != list(prompt)) or count != len(prompt):
            checked.broken(
                f"it worked on another prompt ({count} ids) than it was sent ({len(prompt)} ids)",
                "a server without --allow-auto-truncate",
            )

    def _check_version(self, meta: dict[str, Any], checked: Checked) -> None:
        if self._weights is not None:
            self._confirm(meta.get("weight_version"))
            return
        try:
            version = int(meta.get("weight_version"))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return  # "default": the server has no version
        if checked.count and version != checked.version:
            raise self._endpoint.error(
                EndpointFailure(
                    f"the weights changed from version {checked.version} to {version} in the middle of an answer",
                    409,
                    do="let answers end before the weights change",
                )
            )
        checked.version = version

    def _why_not(self) -> str:
        mend = {
            "raw": "its log-probs ignore the temperature; start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
            "logits": "it gives logits for log-probs; use " + _SINCE,
        }
        unknown = "which log-probs it gives could not be found out; sample at temperature 1"
        return f"log-probs are left out, and turns cannot be trained on: {mend.get(self.scale, unknown)}"


def _joined(pieces: Sequence[Tokens]) -> Tokens:
    """Join items of one stream."""
    if len(pieces) == 1:
        return pieces[0]
    ids = tuple(token for piece in pieces for token in piece.ids)
    return Tokens(ids, tuple(p for piece in pieces for p in piece.logprobs), pieces[-1].policy_version)


class _Pairs:
    """Extracts the new ids of an event, whether events are cumulative or incremental."""

    def __init__(self, checked: Checked) -> None:
        self._checked = checked

    def new(self, event: dict[str, Any], meta: dict[str, Any]) -> tuple[list[int], list[float]]:
        seen = self._checked.count
        rows = meta["output_token_logprobs"]
        total = meta.get("completion_tokens")
        if total != len(rows):
            if total != seen + len(rows):
                self._checked.broken(f"{len(rows)} log-probs for {total} tokens, {seen} of them known", _SINCE)
        else:
            rows = rows[seen:]
        ids = [row[1] for row in rows]
        given = event.get("output_ids")
        if given is not None and given[len(given) - len(ids) :] != ids:
            self._checked.broken("output_ids that are not the ids of the log-probs", _SINCE)
        return ids, [row[0] for row in rows]


def _body(prompt: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
    neutral = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": False,
        "n": 1,
    }
    return {
        "input_ids": prompt,
        "sampling_params": neutral | params,
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
