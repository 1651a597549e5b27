"""Engine ``transformers``: samples from a small model in this process, on a CPU or one GPU.

It takes token ids and returns sampled ids with exact log-probs, for many sequences at a time. Weights and LoRA adapters
can be changed while it runs. It supports decoders of the transformers library with full attention, which is checked
when the model is loaded.

Invariants: a stream is sampled by one version of the weights. The yielded ids are those sampled. Closing an iterator
stops its computation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import random
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from clawgym.engines.protocol import GenerateRequest, TokenEngine, Tokens
from clawgym.errors import EngineError, MissingDependency
from clawgym.registry import engines

try:
    import torch
    import transformers

    from clawgym.engines._batch import RunningBatch
    from clawgym.engines._kernels import Kernels
    from clawgym.engines._stream import Stream
    from clawgym.engines._worker import ModelWorker, Request
    from clawgym.engines.load import Quantize, fitting_window, load_model, prepare, read_weights, sees, set_weights
    from clawgym.engines.lora import Adapter, read_adapter
except ImportError as error:
    raise MissingDependency(
        f"the transformers engine needs torch and transformers ({error}): pip install 'clawgym[local]'"
    ) from error

__all__ = ["KEPT_TOKENS", "Kernels", "TransformersEngine", "memory_of_device", "transformers_engine"]

KEPT_TOKENS = 2**18
"""Most tokens whose keys and values are kept by default."""


class TransformersEngine:
    """A :class:`~clawgym.engines.protocol.TokenEngine`; see ``docs/how-to/engines.md``.

    ``model`` is a folder, a Hub name, or a loaded module; with a module, ``tokenizer`` names the folder of its
    tokenizer. A module keeps its device and dtype, and may be shared with a trainer, which must only run or change it
    inside :meth:`update_weights`.

    ``kv_tokens`` is the total number of tokens whose keys and values are stored, for running sequences and for reuse
    (default: 262,144, or what fits a quarter of the memory). ``prefill_chunk`` is the number of tokens of new prompts
    computed in one step, while decoding sequences wait. ``threads`` sets torch's threads, for the whole process; they
    compute parts of a step beside each other where that is faster.
    ``kernels``: the precision of linear layers on a CPU, and with ``bfloat16`` of attention, keys and values; the
    log-probs are those of what was computed. Layers with an adapter stay in float32. ``quantize``: the weights of
    linear layers, as in training with ``model.quantize``.

    Raises :class:`~clawgym.errors.EngineError` if the model cannot be loaded, or is of a kind that would not be
    sampled exactly (sliding windows, recurrent layers, positions that depend on the length).
    """

    name = "transformers"

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        *,
        tokenizer: str | Path | None = None,
        device: str | None = None,
        dtype: torch.dtype | str | None = None,
        max_batch: int = 64,
        context_window: int | None = None,
        kv_tokens: int | None = None,
        prefill_chunk: int = 512,
        threads: int | None = None,
        policy_version: int = 0,
        kernels: Kernels = "float32",
        quantize: Quantize | None = None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk), ("kv_tokens", kv_tokens)):
            if value is not None and value < 1:
                raise EngineError(f"{name}={value}: must be 1 or more: correct it")
        if threads is not None:
            torch.set_num_threads(threads)
        if isinstance(model, torch.nn.Module):
            if tokenizer is None:
                raise EngineError("a loaded module does not say what its tokenizer is: give tokenizer=FOLDER")
            self._model, self._source = model, type(model).__name__
        else:
            self._model, self._source = load_model(model, device, dtype, quantize=quantize), str(model)
        self.tokenizer = str(tokenizer if tokenizer is not None else model)
        self._model, run, shape, window, undo = prepare(self._model, kernels)
        self._kernels: Kernels = kernels
        self.context_window = fitting_window(context_window, window)
        self._vocab = self._model.get_input_embeddings().num_embeddings
        if kv_tokens is None:
            kv_tokens = max(1, min(KEPT_TOKENS, memory_of_device(shape.device) // 4 // shape.token_bytes))
        self._batch: RunningBatch[Request] = RunningBatch(
            self._model,
            run,
            shape,
            window=self.context_window,
            rows=max_batch,
            kv_tokens=kv_tokens,
            chunk=prefill_chunk,
        )
        self._worker = ModelWorker(self._batch, policy_version)
        self._worker.start()

        def end(worker: ModelWorker = self._worker) -> None:
            worker.stop()
            undo()

        self._end = weakref.finalize(self, end)  # also without aclose(), and at exit

    @property
    def policy_version(self) -> int:
        """Version of the base weights."""
        return self._worker.version

    @property
    def adapters(self) -> dict[str, int]:
        """Name -> version of each loaded adapter."""
        return {name: a.version for name, a in self._worker.adapters.copy().items()}

    @property
    def vocab_size(self) -> int:
        return self._vocab

    def occupancy(self) -> dict[str, int]:
        """Numbers of ``waiting`` and ``running`` requests, and of tokens with memory for running sequences (``held``)
        and for reuse (``kept``)."""
        return self._worker.occupancy()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """See :meth:`~clawgym.engines.protocol.TokenEngine.generate`.

        Defaults: temperature 1, no top-k, no top-p, a random seed. At temperature 0 the most likely id is taken, with
        its log-prob at temperature 1. The same seed and prompt give the same ids whatever else runs, except when
        rounding, which depends on the batch size, decides a choice. ``session`` is ignored: prefixes are found by their
        ids.
        """
        running = self._running(request)
        self._worker.submit(running)
        try:
            while True:
                tokens = await running.stream.next()
                yield tokens
                if tokens.finish_reason is not None:
                    return
        finally:
            running.cancelled = True

    async def update_weights(
        self,
        source: str | Path | Mapping[str, torch.Tensor] | Callable[[torch.nn.Module], object],
        version: int,
    ) -> None:
        """Change the weights. Running requests finish with the old ones; new requests wait for the new ones.

        ``source`` is a folder with safetensors, a state dict with all parameters, or a function that changes the module
        (nothing is sampled while it runs). Raises :class:`~clawgym.errors.EngineError` if the weights do not fit; then
        nothing has changed. If the function raises, requests are refused until the weights are set again.
        """
        weights = source if callable(source) else await asyncio.to_thread(read_weights, source, self._model)

        def change() -> None:
            try:
                if callable(weights):
                    weights(self._model)
                else:
                    set_weights(self._model, weights)
            except BaseException as error:
                self._worker.unusable = (
                    f"the weights were left half changed ({type(error).__name__}: {error}): set them by update_weights"
                )
                self._batch.forget()
                raise
            self._model.eval()
            self._worker.new_weights(version)

        await asyncio.wrap_future(self._worker.change(change, alone=True))

    async def load_adapter(
        self,
        name: str,
        source: str | Path | Mapping[str, torch.Tensor],
        version: int,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Load or replace a LoRA adapter. Running requests finish with the old one.

        ``source`` is a folder written by peft, or a state dict, with ``config`` as in ``adapter_config.json``. Raises
        :class:`~clawgym.errors.EngineError` if it is not a plain LoRA adapter of linear layers of this model.
        """
        layers = await asyncio.to_thread(read_adapter, source, config, self._model)

        def change() -> None:
            self._worker.set_adapter(name, Adapter(name, version, self._batch.prefixes.root(), layers))

        await asyncio.wrap_future(self._worker.change(change))

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that run with it finish; waiting ones fail."""
        if name not in self.adapters:
            raise _refused(self._no_adapter(name))
        await asyncio.wrap_future(self._worker.change(lambda: self._worker.set_adapter(name, None)))

    async def sleep(self) -> None:
        """Free the memory of keys and values, for a trainer that needs it. Waits for running requests, and forgets
        known prefixes. The next request takes memory again."""

        def free() -> None:
            self._batch.release()
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc, which keeps what it can
                trim(0)

        await asyncio.wrap_future(self._worker.change(free, alone=True))

    def identity(self) -> dict[str, Any]:
        """Model, versions of weights, adapters and libraries, dtype and device."""
        parameter = next(self._model.parameters())
        return {
            "name": self.name,
            "model": self._source,
            "revision": getattr(self._model.config, "_commit_hash", None),
            "policy_version": self.policy_version,
            "adapters": self.adapters,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            **({} if self._kernels == "float32" else {"kernels": self._kernels}),
            "device": str(parameter.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    async def aclose(self) -> None:
        """End the thread. Running requests fail."""
        await asyncio.to_thread(self._end)

    def _running(self, request: GenerateRequest) -> Request:
        ids, sampling, adapter = list(request.prompt_ids), request.sampling, request.adapter
        if request.images:
            raise _refused("this engine reads no images: take them out of the messages, or use an engine that does")
        if sampling.json_schema is not None:
            raise _refused("this engine does not constrain what is sampled: ask for JSON in the prompt, or use vLLM")
        if not ids:
            raise _refused("the prompt has no ids: send at least one message")
        if min(ids) < 0 or max(ids) >= self._vocab:
            wrong = next(i for i in ids if not 0 <= i < self._vocab)
            raise _refused(
                f"prompt id {wrong} is not in the vocabulary of {self._vocab} ids: render with the tokenizer of this "
                f"model ({self.tokenizer})"
            )
        temperature, top_p, most = request.temperature, request.top_p, request.max_tokens(self.context_window)
        for good, name, value, want in (
            (math.isfinite(temperature) and temperature >= 0, "temperature", temperature, "0 or more"),
            (0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1"),
            (most >= 1, "max_tokens", sampling.max_tokens, "1 or more"),
        ):
            if not good:
                raise _refused(f"{name}={value}: must be {want}: correct it")
        if adapter is not None and adapter not in self.adapters:
            raise _refused(self._no_adapter(adapter))
        return Request(
            ids=ids,
            temperature=temperature,
            top_k=request.top_k if request.top_k < self._vocab else 0,
            top_p=top_p,
            uniform=random.Random(request.seed).random,
            stream=Stream(),
            max_tokens=most,
            stop_ids=request.stop_ids,
            adapter_name=adapter,
        )

    def _no_adapter(self, name: str) -> str:
        return f"no adapter {name!r} here, only {sorted(self.adapters) or 'the base model'}: load it first"


@engines.register("transformers")
def transformers_engine(
    model: str,
    *,
    tokenizer: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    context_window: int | None = None,
    kernels: Kernels = "float32",
    quantize: Quantize | None = None,
) -> TokenEngine:
    """A model in this process, sampled by transformers.

    Args:
        model: a folder or a Hub name. A vision-language model samples one sequence at a time.
        tokenizer: folder of the tokenizer; by default the model's.
        device: torch device; by default a GPU if there is one.
        dtype: by default float32 on a CPU, the model's own on a GPU.
        context_window: most tokens of prompt and reply; by default the model's maximum.
        kernels: precision of the linear layers of a float32 model on a CPU, and with bfloat16 of attention: lower is
            faster, and samples from a slightly different policy, whose own log-probs are given.
        quantize: 4bit: the weights of linear layers as NF4, by bitsandbytes.
    """
    if sees(model):
        from clawgym.engines.vision import VisionEngine

        if kernels != "float32" or quantize:
            raise EngineError(f"kernels, quantize: are not for vision-language models such as {model}: leave them out")
        return VisionEngine(model, tokenizer=tokenizer, device=device, dtype=dtype, context_window=context_window)
    return TransformersEngine(
        model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        context_window=context_window,
        kernels=kernels,
        quantize=quantize,
    )


def _refused(message: str) -> EngineError:
    return EngineError(message, status=400)


def memory_of_device(device: torch.device) -> int:
    """Free bytes of a GPU, or the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 * 2**30
