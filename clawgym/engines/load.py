"""Load a model, check that the engine computes it exactly, and set its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from clawgym.engines._kernels import Kernels, adds_int8_exactly
from clawgym.engines._lean import Lean
from clawgym.engines._slots import ATTENTION, Decode, KVShape, Plan, Prefill, Slab, register_attention
from clawgym.engines.folders import load_weights, model_folder
from clawgym.errors import EngineError, MissingDependency

__all__ = [
    "Quantize",
    "choose_attention",
    "fitting_window",
    "load_model",
    "load_module",
    "prepare",
    "read_weights",
    "sees",
    "set_weights",
]

Quantize = Literal["4bit"]
"""Weights of linear layers as NF4 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes."""


def sees(model: str | Path) -> bool:
    """Whether the folder ``model`` contains a vision-language model."""
    try:
        return "vision_config" in json.loads(Path(model, "config.json").read_text())
    except (OSError, ValueError):
        return False


def load_model(
    model: str | Path, device: str | None, dtype: torch.dtype | str | None, *, quantize: Quantize | None = None
) -> Any:
    """Load a model from a folder or the Hub. Default ``dtype``: float32 on a CPU, the model's own on a GPU."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or (torch.float32 if where.type == "cpu" else "auto")
    return load_module(AutoModelForCausalLM, model_folder(model), where, kind, quantize)


def choose_attention(device: torch.device) -> None:
    """On a GPU, switch cuDNN's attention off in this process: it makes a plan for each new shape, and sequences grow by
    one with each token (120 tokens/s instead of 1,552 on an H100)."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def load_module(
    auto: Any, folder: Path, device: torch.device, dtype: torch.dtype | str, quantize: Quantize | None, **options: Any
) -> Any:
    """Load a module with the class ``auto`` of transformers, its linear layers with ``quantize`` if that is given.

    Raises :class:`~clawgym.errors.EngineError` if it cannot be loaded, and
    :class:`~clawgym.errors.MissingDependency` without bitsandbytes."""
    if quantize is None:
        return load_weights(auto, folder, dtype=dtype, **options).to(device)
    about = {"quantization_config": _nf4(dtype), "device_map": {"": str(device)}}
    module = load_weights(auto, folder, dtype=dtype, **about, **options)
    for part in module.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):  # it would round to bfloat16, and change shared weights
            part.support_avx512bf16_for_cpu = False
    return module


def _nf4(dtype: torch.dtype | str) -> Any:
    try:
        import bitsandbytes  # noqa: F401  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingDependency(
            f"4-bit weights need bitsandbytes ({error}): pip install 'clawgym[quantized]'"
        ) from error
    from transformers import BitsAndBytesConfig

    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, torch.bfloat16)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=kind)


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Plan], torch.Tensor]
"""The forward pass of a step: ids (T,), positions (T,), indices (E,) of the wanted logits, and the plan -> logits
(E, vocabulary)."""


def fitting_window(asked: int | None, made_for: int) -> int:
    """The requested context window, or the model's maximum.

    Raises :class:`~clawgym.errors.EngineError` if it is more than the maximum, or less than 2.
    """
    if asked is not None and not 1 < asked <= made_for:
        raise EngineError(f"context_window={asked}: the model has {made_for}: choose from 2 to that")
    return asked or made_for


def prepare(module: torch.nn.Module, kernels: Kernels = "float32") -> tuple[Any, Run, KVShape, int, Callable[[], None]]:
    """Replace the attention of a module, and its linear layers by ``kernels``, and check the result.

    Returns:
        The model, its forward pass, the shape of its keys and values, its context window, and a function that restores
        the original attention.

    Raises:
        EngineError: this engine would not compute the model exactly.
    """
    model: Any = module
    if hasattr(model, "get_base_model"):  # peft's wrapper around the model
        model = model.get_base_model()
    what = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "lm_head"):
        raise EngineError(f"{what} is no causal language model of transformers: load one")
    config: Any = model.config.get_text_config()
    odd = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - {"full_attention"}
    if odd:
        raise EngineError(f"{what} has layers of kind {', '.join(sorted(odd))}: {_REFUSED}")
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))
    if rope in ("dynamic", "longrope"):
        raise EngineError(f"{what}: its {rope} positions depend on how long the text will be: {_REFUSED}")
    window = getattr(config, "max_position_embeddings", None)
    if not isinstance(window, int):
        raise EngineError(f"{what} names no max_position_embeddings: {_REFUSED}")
    register_attention()
    choose_attention(next(model.parameters()).device)
    before: Any = model.config._attn_implementation

    def undo() -> None:
        model.set_attn_implementation(before)

    model.eval()
    try:
        model.set_attn_implementation(ATTENTION)
        run, shape = _try_out(model, int(config.num_hidden_layers), window, what, kernels)
    except BaseException:
        undo()
        raise
    return model, run, shape, window, undo


_REFUSED = "the transformers engine runs only full attention over all earlier tokens; serve this model with vLLM"


def _running(model: Any) -> Run:
    """The forward pass by the transformers module."""
    # The replaced attention ignores the mask; transformers passes a tensor with four dimensions on unchanged.
    no_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=next(model.parameters()).device)

    def run(ids: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, plan: Plan) -> torch.Tensor:
        return model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=no_mask,
            use_cache=False,
            logits_to_keep=ends,
            slots=plan,
        ).logits[0]

    return run


class _Recorder(Plan):
    """A plan that records the shapes passed to attention."""

    def __init__(self) -> None:
        super().__init__([])
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self.kind: tuple[torch.dtype, torch.device] | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        self.shapes[layer] = (key.shape, value.shape)
        self.kind = (key.dtype, key.device)
        # Attention over a single token returns the token's value.
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)


class _Place:
    """A minimal sequence for a slab."""

    row = 0

    def __init__(self, length: int) -> None:
        self.length = length


@torch.inference_mode()
def _try_out(model: Any, layers: int, window: int, what: str, kernels: Kernels) -> tuple[Run, KVShape]:
    """Run a few ids in one row, in pieces and beside others, and separately; the results must agree."""
    device = next(model.parameters()).device
    vocab = model.get_input_embeddings().num_embeddings
    run = _running(model)
    recorder = _Recorder()
    first, second = [[(7 * i + j) % vocab for i in range(9)] for j in (3, 5)]
    try:
        nothing = torch.zeros(1, dtype=torch.long, device=device)
        run(nothing, nothing, nothing, recorder)
        if set(recorder.shapes) != set(range(layers)) or len(set(recorder.shapes.values())) != 1 or not recorder.kind:
            raise EngineError(f"{what}: {len(recorder.shapes)} of {layers} layers attend the usual way: {_REFUSED}")
        keys, values = recorder.shapes[0]
        if keys != values:
            raise EngineError(f"{what}: its keys are {tuple(keys)} and its values {tuple(values)}: {_REFUSED}")
        shape = KVShape(layers, keys[1], keys[3], *recorder.kind)
        plain = _wanted(*(_log_probs(model, [x]) for x in (first, second)))
        alone = _wanted(*(_log_probs(model, [[i] for i in x]) for x in (first, second)))
        wrong = rounding_exceeded(_precision(model, shape.dtype), _in_pieces(run, shape, first, second), plain, alone)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        raise EngineError(f"{what}: does not run several sequences in one row ({error}): {_REFUSED}") from error
    if wrong:
        raise EngineError(f"{what}: in pieces, {wrong}: {_REFUSED}")
    lean = Lean.of(model, window, kernels)
    if kernels != "float32":
        if lean is None:
            raise EngineError(
                f"kernels={kernels}: {what} in {shape.dtype} on {shape.device} has none: they are for models of the "
                "Llama family in float32 on a CPU"
            )
        if kernels == "int8" and not adds_int8_exactly():
            raise EngineError("kernels=int8: sums of int8 overflow on this CPU, which has no VNNI: use bfloat16")
        shape = replace(shape, dtype=lean.kv_dtype)
        if wrong := rounding_exceeded(torch.bfloat16, _in_pieces(lean, shape, first, second), plain, alone):
            raise EngineError(f"kernels={kernels}: {what}: {wrong}: use float32")
        return lean, shape
    if lean is not None and not rounding_exceeded(shape.dtype, _in_pieces(lean, shape, first, second), plain, alone):
        run = lean
    return run, shape


def _precision(model: Any, dtype: torch.dtype) -> torch.dtype:
    """The lowest precision in which a model that computes in ``dtype`` computes anything."""
    kinds = {dtype, *(getattr(part, "compute_dtype", None) or dtype for part in model.modules())}
    return min(kinds, key=lambda kind: torch.finfo(kind).bits)


_FLOAT32 = 1e-3
"""Largest relative difference of probabilities that rounding causes in float32."""
_SHARE = 0.1
"""In lower precision: largest share of what the history is worth."""


def rounding_exceeded(dtype: torch.dtype, found: torch.Tensor, plain: torch.Tensor, alone: torch.Tensor) -> str | None:
    """How ``found`` differs from ``plain`` by more than rounding; None if it does not.

    All are log-probs (N, V). In float32 the bound is a relative difference of probabilities. In lower precision, deep
    models round differently by half of a probability where logits are large. So the mean KL(plain || found) is compared
    with KL(plain || alone), where ``alone`` has no history: what a kernel that reads the wrong tokens would lose. Where
    the history is worth less than rounding, no kernel can be told from another.
    """
    if dtype == torch.float32:
        apart = float((found - plain).exp().sub(1).abs().max())
        return None if apart <= _FLOAT32 else f"its probabilities differ by {apart:.2g} of themselves"
    lost, worth = _kl(plain, found), _kl(plain, alone)
    return None if lost <= _SHARE * worth + 1e-3 else f"it loses {lost:.2g} nats of the {worth:.2g} of its history"


def _kl(plain: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(plain || other) in nats; infinite if one is not a number."""
    found = float((plain.exp() * (plain - other)).sum(-1).mean())
    return found if found == found else float("inf")


def _log_probs(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """(all ids, V) log-probs of the plain forward pass, which computes each row alone."""
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    return model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)


def _wanted(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rows of the two sequences, in the order of :func:`_in_pieces`."""
    return torch.cat([first[:8], second[:6], first[8:9], second[6:7]])


def _in_pieces(run: Run, shape: KVShape, first: list[int], second: list[int]) -> torch.Tensor:
    """(16, V) log-probs of ``run`` for ids of two sequences: in pieces, and beside each other."""
    buffers = [shape.buffer(16), shape.buffer(16)]

    def forward(ids: list[int], positions: list[int], *parts: Prefill | Decode) -> torch.Tensor:
        a, b, c = (torch.tensor(x, device=shape.device) for x in (ids, positions, list(range(len(ids)))))
        return run(a, b, c, Plan(parts))

    # 5 tokens of the first; then 3 more of it together with 6 of the second; then one of each.
    rows = [forward(first[:5], list(range(5)), Prefill(buffers[0], 0, 5, 0))]
    beside = Prefill(buffers[0], 5, 3, 0), Prefill(buffers[1], 0, 6, 3)
    rows += [forward(first[5:8] + second[:6], [*range(5, 8), *range(6)], *beside)]
    slab: Slab[Any] = Slab(shape, 16)
    for buffer, length in zip(buffers, (8, 6), strict=True):
        slab.add(_Place(length), buffer)
    rows += [forward([first[8], second[6]], [8, 6], Decode(slab, 0, [8, 6]))]
    return torch.cat(rows).float().log_softmax(-1)


def read_weights(source: str | Path | Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Read all parameters of ``model`` from a folder or a state dict, by name."""
    if isinstance(source, Mapping):
        where, given = "state dict", dict(source)
    else:
        where, given = str(source), {}
        files = sorted(Path(source).glob("*.safetensors"))
        if not files or (Path(source) / "adapter_config.json").exists():
            raise EngineError(f"{where}: holds no safetensors of a whole model: check the folder, or use load_adapter")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for file in files:
            try:
                given.update(load_file(file))
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{file}: cannot be read ({error}): write it again") from error
    mine = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    chosen: dict[str, torch.Tensor] = {}
    set_by: set[int] = set()
    for name, tensor in given.items():
        target = mine.get(name, buffers.get(name))
        if target is None:
            raise EngineError(f"{where}: the model has no weight {name!r}: give the weights of this model")
        if target.shape != tensor.shape:
            raise EngineError(
                f"{where}: {name} has the shape {tuple(tensor.shape)}, the model's has {tuple(target.shape)}: give "
                "the weights of this model"
            )
        chosen[name] = tensor
        set_by.add(id(target))
    missing = [name for name, parameter in mine.items() if id(parameter) not in set_by]  # tied weights count as one
    if missing:
        raise EngineError(f"{where}: {len(missing)} weights are missing, such as {missing[0]!r}: give all of them")
    return chosen


@torch.no_grad()
def set_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy ``weights`` (see :func:`read_weights`) into ``model``."""
    mine = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}
    for name, tensor in weights.items():
        mine[name].copy_(tensor)
