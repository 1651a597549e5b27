"""The trained model, its copy in the engine, and the forward pass of training.

Invariants: model and engine share no trained weight, so an update does not change tokens that are being sampled. Logits
are computed for trained tokens only, and for a bounded number of them at a time.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from clawgym.engines.folders import model_folder
from clawgym.engines.load import choose_attention, load_module, sees
from clawgym.engines.lora import write_adapter
from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.sglang import SGLangEngine
from clawgym.engines.transformers import Kernels, TransformersEngine
from clawgym.engines.vllm import VLLMEngine
from clawgym.errors import EngineError, MissingDependency, TrainingError
from clawgym.rewards.scoring import TorchScorer
from clawgym.trainers.algorithms import topk_reverse_kl
from clawgym.trainers.batching import MaskedSequence, MicroBatch, micro_batches, pack
from clawgym.trainers.common.checkpoints import load_weights as load_trained
from clawgym.trainers.config import Compute, Model

if TYPE_CHECKING:
    from clawgym.engines.vision import ImageReader, VisionEngine

    Sampler = TransformersEngine | VisionEngine | VLLMEngine | SGLangEngine
    """The engines that sample episodes."""

__all__ = ["ADAPTER", "Policy", "hidden_states", "load_policy", "logprobs_of", "reverse_kl_of", "token_logprobs"]

ADAPTER = "policy"
"""The name of the LoRA adapter in the engine."""

MAX_LOGITS = 2**24
"""Most logits in memory at a time (64 MiB in float32)."""

_MAX_APART = 0.2
"""Nats by which log-probs of a server may differ from those of the policy, on average. Rounding to bfloat16 is less."""


class Policy:
    """A transformers model that is trained: all weights, or only its LoRA adapters."""

    def __init__(self, module: Any, folder: Path, *, reference: Any = None, reader: ImageReader | None = None) -> None:
        self.module = module
        self.folder = folder
        """The folder that the model was loaded from, with its tokenizer and chat template."""
        self.reference = reference
        """A copy of the initial policy, if needed (:meth:`first`)."""
        self._reader = reader

    @property
    def adapter(self) -> str | None:
        """The name of the adapter to request from the engine; ``None`` if the engine's own weights are updated."""
        return ADAPTER if self.lora and self._reader is None else None

    @property
    def lora(self) -> bool:
        """Whether LoRA adapters are trained."""
        return hasattr(self.module, "peft_config")

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def trained(self) -> dict[str, torch.Tensor]:
        """The trained weights (not copied), under their names in the engine and in a checkpoint."""
        if self.lora:
            from peft import get_peft_model_state_dict

            return get_peft_model_state_dict(self.module)
        weights = {name: p.detach() for name, p in self.module.named_parameters()}
        return weights | {name: b for name, b in self.module.named_buffers() if name in self.module.state_dict()}

    def load(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Replace the trained weights; None: by a LoRA adapter that changes nothing, as at the start. Raises
        :class:`ValueError` if they are other weights."""
        if weights is None:
            with torch.no_grad():
                for name, weight in self.module.named_parameters():
                    if "lora_B" in name:
                        weight.zero_()
        elif self.lora:
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(self.module, dict(weights))
        else:
            own = self.trained()
            if weights.keys() != own.keys():
                raise ValueError(f"it has {len(weights)} weights, the model {len(own)}")
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(weights[name])

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write ``weights`` in the format of transformers, or of peft."""
        if self.lora:
            write_adapter(folder, weights, self.adapter_config())
            return
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        self.module.config.save_pretrained(folder)
        if self.module.generation_config is not None:
            self.module.generation_config.save_pretrained(folder)

    def adapter_config(self) -> dict[str, Any]:
        """The configuration of the LoRA adapter, as peft writes it."""
        return self.module.peft_config["default"].to_dict()

    def engine(
        self,
        *,
        context_window: int | None = None,
        max_batch: int = 64,
        policy_version: int = 0,
        kernels: Kernels = "float32",
    ) -> TransformersEngine | VisionEngine:
        """Make an engine for rollouts in this process. It shares frozen weights and copies trained ones.

        Arguments are as for :class:`~clawgym.engines.transformers.TransformersEngine`. A vision model samples one
        sequence at a time."""
        shared = {id(p): p for p in self.module.parameters() if not p.requires_grad}
        inner = copy.deepcopy(self.module, shared)
        if self._reader is not None:
            from clawgym.engines.vision import VisionEngine

            inner = base_of(inner).requires_grad_(False)
            return VisionEngine(
                inner, tokenizer=self.folder, context_window=context_window, policy_version=policy_version
            )
        if self.lora:
            inner = inner.unload()
        inner = inner.requires_grad_(False).eval() if not self.lora else inner.eval()
        return TransformersEngine(
            inner,
            tokenizer=self.folder,
            context_window=context_window,
            max_batch=max_batch,
            policy_version=policy_version,
            kernels=kernels,
        )

    async def served(
        self, compute: Compute, shared: Path, *, context_window: int | None = None
    ) -> VLLMEngine | SGLangEngine:
        """The server ``compute.vllm`` or ``compute.sglang``, which serves the initial model. Weights and adapters go
        through the folder ``shared``.

        Raises :class:`~clawgym.errors.TrainingError` for a vision model, and :class:`~clawgym.errors.EngineError` for
        an unsuitable server."""
        if self._reader is not None:
            raise TrainingError("compute.vllm, compute.sglang: are for text models: leave them out")
        kind, key = (VLLMEngine, "VLLM_API_KEY") if compute.vllm else (SGLangEngine, "SGLANG_API_KEY")
        made = kind(
            compute.vllm or compute.sglang or "",
            str(self.folder),
            tokenizer=str(self.folder),
            api_key=os.environ.get(key),
            context_window=context_window,
            shared=shared,
        )
        try:
            await made.ready()
            if not self.lora:
                await self.check_loading(made)
        except BaseException:
            await made.aclose()
            raise
        return made

    async def check_loading(self, engine: Sampler) -> None:
        """Check that the engine samples with every weight that it is given. Publish afterwards.

        It gets all weights upside down, and must sample as this model does with them. Some servers keep packed copies
        of their first weights, and a small update would not show that. Raises
        :class:`~clawgym.errors.TrainingError`."""
        prompt = (1, 2, 3, 4)
        self._turn_over()
        try:
            await engine.update_weights(self.trained(), -1)
            request = GenerateRequest(prompt, Sampling(max_tokens=8, seed=0))
            tokens = [part async for part in engine.generate(request)]
            ids = tuple(token for part in tokens for token in part.ids)
            found = torch.tensor([value for part in tokens for value in part.logprobs])
            row = MaskedSequence((*prompt, *ids), (0,) * len(prompt) + (1,) * len(ids))
            (batch,) = micro_batches(pack([row], row_tokens=len(row.ids)), tokens=len(row.ids))
            with torch.no_grad():
                own, _ = token_logprobs(self.module, self.ready(batch))
        finally:
            self._turn_over()
        apart = float((found - own.cpu()).abs().mean()) if len(found) == len(ids) else math.inf
        if not apart <= _MAX_APART:
            raise TrainingError(
                "compute.vllm, compute.sglang: the server does not sample with all weights that it was given (its "
                f"log-probs differ by {apart:.2g} nats): set model.lora with compute.vllm, or leave out the server"
            )

    @torch.no_grad()
    def _turn_over(self) -> None:
        """Reverse the order of the rows of each weight; twice is nothing."""
        for weight in self.module.parameters():
            weight.copy_(weight.flip(0))

    async def publish(self, engine: Sampler, version: int) -> None:
        """Copy these weights into the engine, as ``version``. Do not train meanwhile."""
        if self._reader is not None:
            named = base_of(self.module).named_parameters()
            await engine.update_weights({name: p.detach() for name, p in named if p.requires_grad}, version)
        elif self.lora:
            assert isinstance(engine, TransformersEngine | VLLMEngine)
            await engine.load_adapter(ADAPTER, self.trained(), version, config=self.adapter_config())
        else:
            await engine.update_weights(self.trained(), version)

    async def restore(self, checkpoint: Path, engine: Sampler, version: int) -> None:
        """Load the trained weights of a checkpoint, and publish them as ``version``. Do not train meanwhile."""
        load_trained(checkpoint, self)
        await self.publish(engine, version)

    @contextlib.contextmanager
    def first(self) -> Iterator[Any]:
        """The module of the initial policy, for a KL term. With LoRA it is the model with its adapters disabled."""
        if self.lora:
            with self.module.disable_adapter():
                yield self.module
        else:
            yield self.reference

    def scorer(self, *, tokens: int) -> TorchScorer:
        """A scorer with these weights, for at most ``tokens`` ids at a time. It runs the module, so do not train at the
        same time."""
        return TorchScorer(self.module if self.lora else base_of(self.module), tokens=tokens)

    def ready(self, batch: MicroBatch) -> MicroBatch:
        """``batch`` on this policy's device, with its images processed as in the engine.

        Raises :class:`~clawgym.errors.TrainingError` for images with a text model, and for placeholders without an
        image."""
        if self._reader is not None:
            batch = _read(batch, self._reader, self.module.config.image_token_id)
        elif batch.images:
            raise TrainingError("these episodes have images, but the model reads none: correct model.path")
        return batch.to(self.device)


def _read(batch: MicroBatch, reader: ImageReader, placeholder: int) -> MicroBatch:
    place = batch.ids == placeholder
    if int(place.sum()) != len(batch.images):
        raise TrainingError(
            f"a sequence has {int(place.sum())} image placeholders and {len(batch.images)} images: train on episodes "
            "that the gateway recorded (imitation with images is not supported)"
        )
    if not batch.images:
        return batch
    features, counts = reader(batch.images)
    repeats = torch.ones_like(batch.ids[0])
    repeats[place[0]] = torch.tensor(counts)
    ids = batch.ids[0].repeat_interleave(repeats)[None]
    predicts = (repeats.cumsum(0) - 1)[batch.predicts]
    return replace(
        batch, ids=ids, predicts=predicts, features={**features, "mm_token_type_ids": (ids == placeholder).int()}
    )


def load_policy(model: Model, folder: Path, compute: Compute, *, reference: bool = False, seed: int = 0) -> Policy:
    """Load the policy that ``model`` describes from ``folder`` (a model in the format of transformers).

    ``reference`` keeps a copy of the initial policy; ``seed`` initialises LoRA adapters. Raises
    :class:`~clawgym.errors.TrainingError` if it cannot be loaded or has nothing to train, and
    :class:`~clawgym.errors.MissingDependency` without the packages for it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    device = torch.device(compute.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    choose_attention(device)
    auto: Any = AutoModelForImageTextToText if sees(folder) else AutoModelForCausalLM
    kind = getattr(torch, model.dtype)
    try:
        module = load_module(auto, model_folder(folder), device, kind, model.quantize, attn_implementation="sdpa")
    except EngineError as error:
        raise TrainingError(f"model.path {error}") from error
    first = copy.deepcopy(module).requires_grad_(False).eval() if reference and model.lora is None else None
    if model.lora is not None:
        module = _with_adapters(module, model, seed)
    if compute.checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()
    for part in module.modules():  # with dropout, trainer and engine would be different policies
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    reader = None
    if sees(folder):
        from clawgym.engines.vision import ImageReader

        reader = ImageReader(folder)
    return Policy(module, folder, reference=first, reader=reader)


def _with_adapters(module: Any, model: Model, seed: int) -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingDependency(f"model.lora needs peft ({error}): pip install 'clawgym[local]'") from error
    assert model.lora is not None
    about = peft.LoraConfig(
        r=model.lora.rank,
        lora_alpha=model.lora.alpha,  # type: ignore[arg-type]
        target_modules=list(model.lora.targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(module, about)
        except ValueError as error:
            raise TrainingError(f"model.lora.targets: {error}: name linear layers of this model") from error


def base_of(model: Any) -> Any:
    """The transformers model inside ``model``, with its adapters in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def hidden_states(model: Any, batch: MicroBatch) -> torch.Tensor:
    """(S, H) the last hidden states of the tokens that predict a trained token."""
    inner = base_of(model)
    # With images, the model computes positions itself; they differ from those of a text.
    where = batch.features or {"position_ids": batch.positions, "attention_mask": batch.seen}
    hidden = inner.model(input_ids=batch.ids, use_cache=False, **where).last_hidden_state
    return hidden.flatten(0, 1)[batch.predicts]


def token_logprobs(
    model: Any, batch: MicroBatch, *, temperature: float = 1.0, learn_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (S,) of ``batch.targets`` and entropies (S,), in nats, float32.

    Log-probs are at ``temperature`` over the whole vocabulary, as recorded during sampling. The entropies carry a
    gradient only with ``learn_entropy``."""
    hidden = hidden_states(model, batch)
    return logprobs_of(model, hidden, batch.targets, temperature=temperature, learn_entropy=learn_entropy)


def logprobs_of(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0, learn_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`token_logprobs` from the (S, H) ``hidden`` states that predict the (S,) ``targets``."""

    def of(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = logits.log_softmax(-1)
        with torch.set_grad_enabled(learn_entropy and torch.is_grad_enabled()):
            entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(1, targets[:, None])[:, 0], entropy

    logp, entropy = zip(*_of_logits(of, model, temperature, hidden, targets), strict=True)
    return torch.cat(logp), torch.cat(entropy)


def reverse_kl_of(
    model: Any, hidden: torch.Tensor, ids: torch.Tensor, teacher_logp: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """(S,) :func:`~clawgym.trainers.algorithms.topk_reverse_kl` from the (S, H) ``hidden`` states of the policy, with
    (S, K) ``ids`` and ``teacher_logp``."""
    return torch.cat([*_of_logits(topk_reverse_kl, model, temperature, hidden, ids, teacher_logp)])


def _of_logits(
    function: Callable[..., Any], model: Any, temperature: float, hidden: torch.Tensor, *others: torch.Tensor
) -> Iterator[Any]:
    """``function(logits, *others)`` for a bounded number of tokens at a time; their logits are computed again in the
    backward pass. Once, with no tokens, for an empty ``hidden``."""
    head = base_of(model).get_output_embeddings()

    def call(hidden: torch.Tensor, *others: torch.Tensor) -> Any:
        logits = head(hidden).float()
        return function(logits if temperature == 1 else logits / temperature, *others)

    step = max(1, MAX_LOGITS // head.weight.shape[0])
    for start in range(0, max(1, len(hidden)), step):
        part = [each[start : start + step] for each in (hidden, *others)]
        if len(hidden) > step and torch.is_grad_enabled():
            yield checkpoint(call, *part, use_reentrant=False)
        else:
            yield call(*part)
