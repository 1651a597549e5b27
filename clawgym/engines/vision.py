"""Engine ``transformers-vision``: samples from a small vision-language model in this process, on a CPU or one GPU.

It takes token ids and images, and returns sampled ids with exact log-probs. In prompt ids, and in recorded turns, each
image is the single placeholder of the chat template. The model's input for it is computed here from the image's bytes
and the processor's settings only (:class:`ImageReader`), so that a trainer computes the same from the recorded turn.

Invariants: those of :mod:`clawgym.engines.transformers`, but one sequence at a time and without a prefix cache. The
placeholder is never sampled, as the next prompt would treat it as an image; log-probs are still over all ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clawgym.engines.protocol import GenerateRequest, Image, Tokens
from clawgym.errors import EngineError, MissingDependency

try:
    import PIL.Image
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from clawgym.engines._sample import sample
    from clawgym.engines.folders import load_weights, model_folder
    from clawgym.engines.load import fitting_window, sees, set_weights
except ImportError as error:
    raise MissingDependency(
        f"the vision engine needs torch, transformers and Pillow ({error}): pip install 'clawgym[local,gui]'"
    ) from error

__all__ = ["ImageReader", "VisionEngine", "expanded", "sees"]

_MOST_PIXELS = 2**25


def expanded(ids: Sequence[int], counts: Sequence[int], placeholder: int) -> list[int]:
    """``ids`` with the n-th ``placeholder`` repeated ``counts[n]`` times.

    Raises :class:`EngineError` if the numbers of placeholders and counts differ.
    """
    places = sum(token == placeholder for token in ids)
    if places != len(counts):
        raise EngineError(
            f"the prompt has {places} places for images, and {len(counts)} images came: render it with the template "
            "of this model",
            status=400,
        )
    each = iter(counts)
    return [token for i in ids for token in ([i] * next(each) if i == placeholder else [i])]


class ImageReader:
    """The image processor of a model of the Qwen-VL family. ``folder`` has ``preprocessor_config.json``.

    Raises :class:`EngineError` for other processors.
    """

    def __init__(self, folder: str | Path) -> None:
        file = Path(folder, "preprocessor_config.json")
        try:
            kind = json.loads(file.read_text())["image_processor_type"]
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{file}: cannot be read ({error}): fetch the whole folder of the model") from error
        if not str(kind).startswith("Qwen2VLImageProcessor"):
            raise EngineError(f"{file}: images of {kind} are not read here, only those of the Qwen-VL family: use vLLM")
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        self.digest = hashlib.sha256(settings.encode()).hexdigest()
        """Hex SHA-256 of the settings, which together with an image's bytes determine the model's input."""

    def __call__(self, images: Sequence[Image]) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Process ``images``.

        Returns:
            ``pixel_values`` (float32, patches of all images x values) and ``image_grid_thw`` (int64, images x 3), and
            the number of placeholders of each image.

        Raises:
            EngineError: an image cannot be read.
        """
        if not images:
            return {}, []
        try:
            made = self._processor(images=[_opened(image) for image in images], return_tensors="pt")
        except ValueError as error:  # such as one of 400 x 1 pixels
            raise EngineError(f"the images cannot be read ({error}): send others", status=400) from error
        counts = [int(grid.prod()) // self._processor.merge_size**2 for grid in made["image_grid_thw"]]
        return {name: made[name] for name in ("pixel_values", "image_grid_thw")}, counts


def _opened(image: Image) -> PIL.Image.Image:
    try:
        opened = PIL.Image.open(io.BytesIO(image.data))
        if opened.width * opened.height > _MOST_PIXELS:
            raise ValueError(f"it has over {_MOST_PIXELS} pixels")
        return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise EngineError(f"image {image.sha256} cannot be read ({error}): send a PNG or JPEG", status=400) from error


class VisionEngine:
    """A :class:`~clawgym.engines.protocol.TokenEngine` for models of the Qwen-VL family (``docs/how-to/engines.md``).

    ``model`` is a folder or a loaded module; with a module, ``tokenizer`` names the folder of its tokenizer and image
    processor, and the module must not be run or changed except by :meth:`update_weights`. Raises :class:`EngineError`
    if it cannot be loaded, or processes images in another way.
    """

    name = "transformers-vision"

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        *,
        tokenizer: str | Path | None = None,
        device: str | None = None,
        dtype: torch.dtype | str | None = None,
        context_window: int | None = None,
        policy_version: int = 0,
    ) -> None:
        if isinstance(model, torch.nn.Module):
            if tokenizer is None:
                raise EngineError("a loaded module does not say what its tokenizer is: give tokenizer=FOLDER")
            self._model: Any = model.eval()
            self._source = type(model).__name__
        else:
            self._model, self._source = _loaded(model, device, dtype), str(model)
        self.tokenizer = str(tokenizer if tokenizer is not None else model)
        self._device = next(self._model.parameters()).device
        config = self._model.config
        self.images = ImageReader(self.tokenizer)
        self.placeholder: int = config.image_token_id
        text = config.get_text_config()
        self.context_window = fitting_window(context_window, int(text.max_position_embeddings))
        self._vocab = int(text.vocab_size)
        self.policy_version = policy_version
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "clawgym-vision")  # an abandoned request ends before the next one starts

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """See :meth:`~clawgym.engines.protocol.TokenEngine.generate`."""
        prompt, sampling = request.prompt_ids, request.sampling
        if request.adapter is not None:
            raise EngineError("this engine has no adapters: merge it into the model", status=400)
        if sampling.json_schema is not None:
            raise EngineError("this engine does not constrain what is sampled: ask for JSON in the prompt", status=400)
        if not prompt or min(prompt) < 0 or max(prompt) >= self._vocab:
            raise EngineError("the prompt has ids that this model has not: render it with its tokenizer", status=400)
        features, counts = await asyncio.to_thread(self.images, request.images)
        ids = expanded(prompt, counts, self.placeholder)
        most = request.max_tokens(self.context_window, len(ids))
        temperature, top_k, top_p = request.temperature, request.top_k, request.top_p
        if not (math.isfinite(temperature) and temperature >= 0 and 0 < top_p <= 1 and most >= 1):
            raise EngineError(f"these settings cannot be sampled with: {sampling}: correct them", status=400)
        rng = random.Random(request.seed)
        async with self._turn:  # the model stores the positions of one sequence
            new, cache, loop = ids, None, asyncio.get_running_loop()
            for count in range(1, most + 1):
                logits, cache = await loop.run_in_executor(self._thread, self._forward, new, cache, features)
                drawn = logits.float().clone()
                drawn[:, self.placeholder] = -math.inf
                (token,), _ = sample(drawn, [temperature], [top_k], [top_p], [rng.random()])
                logprob = float((logits[0].float() / (temperature or 1.0)).log_softmax(-1)[token])
                if math.isnan(logprob):
                    raise EngineError(
                        "the model gives no finite numbers: its weights are damaged, set others", retryable=False
                    )
                reason = "stop" if token in request.stop_ids else "length" if count == most else None
                yield Tokens((token,), (logprob,), self.policy_version, reason)
                if reason is not None:
                    return
                new, features = [token], {}

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Change the named weights, after the running request has ended.

        Raises :class:`EngineError` if they do not fit; then nothing has changed.
        """
        mine = {**dict(self._model.named_buffers()), **dict(self._model.named_parameters(remove_duplicate=False))}
        wrong = [name for name, tensor in weights.items() if name not in mine or mine[name].shape != tensor.shape]
        if wrong:
            raise EngineError(f"the model has no weight {wrong[0]!r} of this shape: give the weights of this model")

        def change() -> None:
            set_weights(self._model, weights)
            self.policy_version = version

        async with self._turn:
            await asyncio.get_running_loop().run_in_executor(self._thread, change)

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], cache: Any, features: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        given = torch.tensor([ids], device=self._device)
        more = {name: value.to(self._device) for name, value in features.items()}
        if cache is None:
            self._model.model.rope_deltas = None  # left from the previous sequence
            more["mm_token_type_ids"] = (given == self.placeholder).int()
        out = self._model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1, **more)
        return out.logits[0], out.past_key_values

    def identity(self) -> dict[str, Any]:
        """Model, versions of weights and libraries, dtype, device, and the digest of the image processor's settings."""
        parameter = next(self._model.parameters())
        return {
            "name": self.name,
            "model": self._source,
            "policy_version": self.policy_version,
            "images": self.images.digest,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    async def aclose(self) -> None:
        """End the thread."""
        await asyncio.to_thread(self._thread.shutdown)


def _loaded(model: str | Path, device: str | None, dtype: torch.dtype | str | None) -> Any:
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or (torch.float32 if where.type == "cpu" else "auto")
    return load_weights(transformers.AutoModelForImageTextToText, model_folder(model), dtype=kind).to(where).eval()
