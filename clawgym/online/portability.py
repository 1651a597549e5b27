"""Check whether a model fits for ``clawgym serve`` and ``clawgym train`` on this machine.

Each check gives a :class:`ModelFinding` with figures and what to do. The model is loaded twice, as by a service: once
for sampling and once for training.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clawgym.errors import ClawGymError, MissingDependency, TrainingError
from clawgym.online.config import ServiceConfig

if TYPE_CHECKING:
    from clawgym.engines.transformers import TransformersEngine
    from clawgym.gateway.render import Renderer
    from clawgym.trainers.common.policy import Policy
    from clawgym.trainers.config import TrainConfig

__all__ = ["CLIENTS", "ModelFinding", "check_model"]

Status = Literal["ok", "warning", "failed"]

CLIENTS = {"chats": 2_048, "tasks of the gate": 8_192, "OpenClaw": 32_768}
"""Client -> the smallest context window that it can work with. OpenClaw's instructions and tools alone take 10,000
tokens and more; a task of the gate has up to ten replies of 512 tokens, with their results."""
_BOUNDS = {"float32": (1e-3, 1e-3), "rounded": (0.05, 0.2)}
"""Mean difference of log-probs, in nats: up to the first is ok, above the second has failed."""
_MOVED = 1.0
"""Nats by which the adapter of the check changes the log-probs of a prompt, at least."""
_STREAMS, _TOKENS, _SECONDS = 8, 32, 60.0
"""Streams that are sampled at once, tokens of each, and the longest time."""
_SLOW = 5.0
"""Tokens per second of one stream, below which a reply is hard to wait for."""
_PROCESS_BYTES = 500 * 2**20
"""Python with torch and transformers, in one process."""
_TOOL_PROBLEMS = ("writes calls", "drops tool", "does not render tool results", "refuses calls")
_HISTORY_PROBLEMS = ("drops the reasoning", "changes the conversation")
_MILD_PROBLEMS = ("ends a reply without", "the tokenizer does not", "refuses two user messages")
_OTHER_TEMPLATE = "put another chat_template.jinja into a copy of the model's folder, and name that folder"


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """The result of one check."""

    what: str
    """What was checked."""
    status: Status
    detail: str
    advice: str = ""
    """What to do; empty if ``status`` is ``ok``."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, for programs."""


async def check_model(config: ServiceConfig, *, weights: bool = True) -> list[ModelFinding]:
    """Check the model of ``config``. Takes about a minute for a small model; without ``weights`` only what can be said
    of its description.

    Raises:
        EngineError: there is no such model.
        MissingDependency: the packages for serving and training are not installed.
    """
    _require()
    from clawgym.engines.folders import model_folder

    about = config.training
    folder = await asyncio.to_thread(model_folder, about.model.path or "", weights=weights)
    renderer, found = await asyncio.to_thread(_template, folder)
    window = _window(folder, about)
    memory = await asyncio.to_thread(_memory, folder, config)
    found += [window, memory]
    if not weights:
        return found
    if not memory.figures.get("copies_fit", True):
        return [*found, *_left_out(("engine", "LoRA", "log-probs", "speed"), "the model does not fit into memory")]
    return found + await _computed(folder, about, renderer)


def _require() -> None:
    try:
        import accelerate  # noqa: F401
        import peft  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"a model is checked with torch, transformers, accelerate and peft ({error}): pip install 'clawgym[serve]'"
        ) from error


def _failed(what: str, error: Exception) -> ModelFinding:
    """The finding for an error, which ends with what to do."""
    detail, found, advice = str(error).rpartition(": ")
    return ModelFinding(what, "failed", detail, advice) if found else ModelFinding(what, "failed", advice, advice)


def _left_out(names: Sequence[str], why: str) -> list[ModelFinding]:
    return [ModelFinding(name, "failed", f"not checked: {why}", "correct that first") for name in names]


# --- template and tools -----------------------------------------------------------------------------------------------


def _template(folder: Path) -> tuple[Renderer | None, list[ModelFinding]]:
    from clawgym.gateway.render import Renderer

    try:
        renderer = Renderer(folder)
        problems = renderer.check()
        return renderer, [_histories(renderer, problems), _tools(renderer, problems)]
    except MissingDependency:
        raise
    except ClawGymError as error:
        why = "the chat template cannot be used"
        return None, [_failed("template", error), *_left_out(["tool calls"], why)]


def _histories(renderer: Renderer, problems: Sequence[str]) -> ModelFinding:
    from clawgym.online._histories import history_rewrites, inserts_date

    rest = [p for p in problems if not p.startswith((*_TOOL_PROBLEMS, *_HISTORY_PROBLEMS))]
    grave = [p for p in rest if not p.startswith(_MILD_PROBLEMS)]
    mild = [p for p in rest if p not in grave]
    advice = [_OTHER_TEMPLATE] if rest else []
    rewrites = history_rewrites(renderer)
    if hard := [r for r in rewrites if not r.reasoning]:
        one = hard[0]
        grave.append(
            f"rewrites {one.part} when the conversation goes on ({one.conversation}): {one.before!r} becomes "
            f"{one.after!r}"
            if one.before
            else f"renders {one.part} by its place in the conversation ({one.conversation}): {one.after!r}"
        )
        advice = [_OTHER_TEMPLATE]
    if any(r.reasoning for r in rewrites):
        mild.append("drops the reasoning or the opening of earlier replies; a service keeps both, as they were sampled")
        advice.append("expect longer prompts than the model's own template makes, or use a model that does not reason")
    if inserts_date(renderer.template):
        mild.append("inserts the current date: a conversation keeps that of its first request")
        advice.append("nothing, unless runs are to be repeated exactly: then fix the date in the template")
    figures = {
        "rewrites": [
            {name: getattr(r, name) for name in ("conversation", "part", "before", "after", "reasoning")}
            for r in rewrites
        ],
        "problems": list(problems),
    }
    if not grave and not mild:
        return ModelFinding(
            "template", "ok", "each rendering begins with that of the shorter conversation", figures=figures
        )
    status: Status = "failed" if grave else "warning"
    return ModelFinding("template", status, "; ".join([*grave, *mild]), "; ".join(advice), figures)


def _tools(renderer: Renderer, problems: Sequence[str]) -> ModelFinding:
    from clawgym.online._histories import shows_tools

    shown, parser = shows_tools(renderer.template), renderer.call_parser
    lost = any(p.startswith("does not render tool results") for p in problems)
    figures = {"shows_tools": shown, "parser": parser, "shows_results": not lost}
    if shown and parser and not lost:
        return ModelFinding("tool calls", "ok", f"shown by the template; calls are read by {parser}", figures=figures)
    why = (
        "the template shows no tools" if not shown
        else "the template's calls are read by no known parser" if not parser
        else "the template renders no tool results after a reply"
    )  # fmt: skip
    return ModelFinding(
        "tool calls",
        "warning",
        f"{why}: clients' tool calls do not work; tasks use the protocol text",
        "for chats, nothing; for clients with tools, such as OpenClaw, name a model whose template has tools",
        figures,
    )


# --- window and memory ------------------------------------------------------------------------------------------------


def _context_window(folder: Path, about: TrainConfig) -> int:
    """The context window that a service would have. Raises :class:`~clawgym.errors.EngineError` without one."""
    from clawgym.engines.folders import load_config
    from clawgym.engines.load import fitting_window
    from clawgym.errors import EngineError

    own = getattr(load_config(folder).get_text_config(), "max_position_embeddings", None)
    if not isinstance(own, int):
        raise EngineError(f"{folder}: config.json names no max_position_embeddings: add it")
    return fitting_window(about.model.context_window, own)


def _window(folder: Path, about: TrainConfig) -> ModelFinding:
    try:
        window = _context_window(folder, about)
    except ClawGymError as error:
        return _failed("window", error)
    small = [f"{client} ({least:,})" for client, least in CLIENTS.items() if window < least]
    detail = f"{window:,} tokens" + (f"; too few for {', '.join(small)}" if small else ", enough for OpenClaw")
    figures = {"context_window": window, "fits": {client: window >= least for client, least in CLIENTS.items()}}
    if not small:
        return ModelFinding("window", "ok", detail, figures=figures)
    status: Status = "failed" if window < min(CLIENTS.values()) else "warning"
    return ModelFinding("window", status, detail, "to use these, name a model with a larger window", figures)


def _memory(folder: Path, config: ServiceConfig) -> ModelFinding:
    """Compare what the processes of a service, and `clawgym train`, need with the available memory."""
    import torch

    from clawgym.engines.transformers import memory_of_device
    from clawgym.sandbox.machine import Machine
    from clawgym.trainers.common.memory import ModelShape, estimate

    about = config.training
    try:
        shape = ModelShape.of(about.model, folder)
        window = _context_window(folder, about)
    except Exception as error:  # the library raises many kinds for a model that it does not know
        return _failed("memory", error)
    device = torch.device(about.compute.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    free = memory_of_device(device) if device.type == "cuda" else Machine.this().memory_mb() * 2**20

    usual = estimate(shape, about)
    longest = estimate(
        shape, about.model_copy(update={"model": about.model.model_copy(update={"context_window": window})})
    )
    alone = estimate(shape, about.model_copy(update={"trainer": "local"}))  # of a process with the whole model
    elsewhere = bool(about.compute.vllm)
    cache = usual.items.get("keys and values of rollouts", 0)
    engine = ("weights of the engine", "rounded weights of the engine")
    sampling, of_ranks = (sum(each.items.get(name, 0) for name in engine) for each in (alone, usual))
    sampling += alone.items.get("keys and values of rollouts", 0)
    weights = alone.items["weights of the policy"]
    scores = config.gate.on and "likelihood" in config.gate.scorers
    ranked = about.trainer == "verl"
    each = usual.update - of_ranks + _PROCESS_BYTES
    # On a CPU the ranks of verl share the memory. Otherwise each has a GPU, and one of them also serves.
    shared = about.verl.ranks if ranked and about.verl.engine == "transformers" else 1
    parts = {
        "serving": 0 if elsewhere else weights + sampling + _PROCESS_BYTES,
        "training": each * shared,
        "gate": (weights + alone.items["logits"] + _PROCESS_BYTES) * scores,
    }
    total = sum(parts.values())
    train = max(usual.peaks.values()) + _PROCESS_BYTES
    most = total + longest.update - usual.update
    copies = 2 * weights + _PROCESS_BYTES
    figures = {
        "device": str(device),
        "available_bytes": None if free == float("inf") else int(free),
        "parts_bytes": parts,
        "serve_bytes": total,
        "serve_longest_bytes": most,
        "train_bytes": train,
        "cache_bytes": cache,
        "copies_fit": copies <= free,
    }
    shares = ", ".join(f"{name} {_gib(part)}" for name, part in parts.items() if part)
    if ranked:
        count = about.verl.nodes * about.verl.ranks
        figures |= {"ranks": count, "rank_bytes": each}
        shares += f"; each of {count} ranks {_gib(each)}"
    detail = f"clawgym serve {_gib(total)} ({shares}), clawgym train {_gib(train)}; available {_gib(free)} ({device})"
    advice = (
        "name a smaller model, or lower the need by --set training.model.dtype=bfloat16, "
        "training.compute.checkpointing=true, training.compute.micro_tokens=2048 or "
        f"training.model.context_window=N (now {window})"
    )
    if max(total - cache, usual.update + _PROCESS_BYTES) > free:
        return ModelFinding("memory", "failed", detail, advice, figures)
    if max(total, train) > free:
        detail += f"; too little once the cache of keys and values is full ({_gib(cache)} of it)"
        return ModelFinding("memory", "warning", detail, advice, figures)
    if most > free:
        detail += f"; {_gib(most)} to train on a conversation of {window:,} tokens"
        return ModelFinding("memory", "warning", detail, advice, figures)
    return ModelFinding("memory", "ok", detail, figures=figures)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


# --- what runs the model ----------------------------------------------------------------------------------------------


async def _computed(folder: Path, about: TrainConfig, renderer: Renderer | None) -> list[ModelFinding]:
    """The checks that run the model: engine, LoRA, log-probs and speed."""
    prompt = _prompt(renderer)
    found: list[ModelFinding] = []
    policy = engine = None
    with tempfile.TemporaryDirectory() as scratch:
        version = Path(scratch, "version")
        version.mkdir()
        try:
            engine, finding = await asyncio.to_thread(_engine, folder, about)
            policy, lora = await asyncio.to_thread(_lora, folder, about, version, prompt)
            found += [finding, lora]
            if engine is None or policy is None:
                why = "the engine does not load the model" if engine is None else "the model takes no LoRA adapter"
                return [*found, *_left_out(("log-probs", "speed"), why)]
            try:
                return found + await _sampled(engine, policy, about, version, prompt)
            except ClawGymError as error:
                return [*found, _failed("log-probs", error), *_left_out(["speed"], "nothing could be sampled")]
        finally:
            if engine is not None:
                await engine.aclose()


def _engine(folder: Path, about: TrainConfig) -> tuple[TransformersEngine | None, ModelFinding]:
    from clawgym.engines.transformers import TransformersEngine

    began = time.monotonic()
    try:
        engine = TransformersEngine(
            folder,
            device=about.compute.device,
            dtype=about.model.dtype,
            context_window=about.model.context_window,
            kernels=about.compute.kernels,
            quantize=about.model.quantize,
        )
    except MissingDependency:
        raise
    except ClawGymError as error:
        return None, _failed("engine", error)
    seconds = time.monotonic() - began
    identity = engine.identity()
    detail = f"loaded in {seconds:.1f} s ({identity['dtype']}, {identity['device']}); samples exactly"
    return engine, ModelFinding("engine", "ok", detail, figures={"seconds": round(seconds, 2), **identity})


def _lora(folder: Path, about: TrainConfig, version: Path, prompt: Sequence[int]) -> tuple[Policy | None, ModelFinding]:
    """Load the policy, and write a version with random weights to the folder ``version``."""
    from clawgym.engines.lora import write_adapter
    from clawgym.trainers.common.policy import load_policy

    assert about.model.lora is not None, "the configuration was checked"
    try:
        policy = load_policy(about.model, folder, about.compute)
        _randomize(policy, about, prompt)
    except MissingDependency:
        raise
    except ClawGymError as error:
        return None, _failed("LoRA", error)
    weights = policy.trained()
    write_adapter(version, weights, policy.adapter_config())
    layers = Counter(
        name.removesuffix(".lora_A.weight").rpartition(".")[2] for name in weights if name.endswith(".lora_A.weight")
    )
    targets = about.model.lora.targets
    missing = [name for name in targets if not layers[name]]
    trained = sum(weight.numel() for weight in weights.values())
    size = sum(file.stat().st_size for file in version.iterdir())
    figures = {
        "rank": about.model.lora.rank,
        "layers": {name: layers[name] for name in targets},
        "trained_parameters": trained,
        "version_bytes": size,
    }
    detail = f"{sum(layers.values())} layers, {trained:,} trained parameters; a version takes {size / 1e6:.1f} MB"
    if missing:
        return policy, ModelFinding(
            "LoRA",
            "warning",
            f"{detail}; the model has no layers {', '.join(missing)}",
            "name its own linear layers: --set 'training.model.lora.targets=[...]'",
            figures,
        )
    return policy, ModelFinding("LoRA", "ok", detail, figures=figures)


def _randomize(policy: Policy, about: TrainConfig, prompt: Sequence[int]) -> None:
    """Give the adapter random weights that change the log-probs of ``prompt`` by :data:`_MOVED` nats or more."""
    import torch

    from clawgym.trainers.batching import MaskedSequence

    row = [MaskedSequence(tuple(prompt), (0,) + (1,) * (len(prompt) - 1))]
    parts = [p for name, p in policy.module.named_parameters() if ".lora_B." in name]
    generator = torch.Generator().manual_seed(0)
    first = _trained_logprobs(policy, row, about)
    with torch.no_grad():
        for part in parts:
            part.copy_(torch.randn(part.shape, generator=generator) * 1e-4)
        for _ in range(16):
            if float((_trained_logprobs(policy, row, about) - first).abs().mean()) >= _MOVED:
                return
            for part in parts:
                part.mul_(2)


def _trained_logprobs(policy: Policy, rows: Sequence[Any], about: TrainConfig) -> Any:
    """(S,) log-probs of the trained ids of all ``rows``, by the forward pass of training. Raises
    :class:`~clawgym.errors.TrainingError` if that fails."""
    import torch

    from clawgym.trainers.batching import micro_batches, pack
    from clawgym.trainers.common.policy import token_logprobs

    batches = micro_batches(pack(rows, row_tokens=about.compute.row_tokens), tokens=about.compute.micro_tokens)
    logp = torch.empty(sum(sum(row.mask) for row in rows))
    try:
        with torch.no_grad():
            for batch in batches:
                logp[batch.places] = token_logprobs(policy.module, policy.ready(batch))[0].cpu()
    except Exception as error:  # the code of the model may raise anything
        raise TrainingError(
            f"the forward pass of training fails ({type(error).__name__}: {error}): name another model"
        ) from error
    return logp


def _prompt(renderer: Renderer | None) -> tuple[int, ...]:
    """The ids of a short conversation, or arbitrary ids without a renderer."""
    from clawgym.online._histories import CONVERSATION

    try:
        if renderer is not None:
            return renderer.prompt(CONVERSATION)
    except ClawGymError:
        pass
    return tuple(range(1, 33))


async def _sampled(
    engine: TransformersEngine, policy: Policy, about: TrainConfig, version: Path, prompt: Sequence[int]
) -> list[ModelFinding]:
    """Sample with the adapter in the folder ``version``; compare log-probs with those of training, and the speed."""
    await engine.load_adapter("candidate", version, 1)
    await _sample(engine, prompt, 1, 4)  # what is done once does not count
    one, one_rate = await _sample(engine, prompt, 1, _TOKENS)
    many, many_rate = await _sample(engine, prompt, _STREAMS, _TOKENS)
    agreement = await asyncio.to_thread(_agreement, policy, about, prompt, [*one, *many])
    rates = f"{one_rate:.1f} tokens/s in one stream, {many_rate:.1f} in {_STREAMS} together"
    figures = {"one_stream": round(one_rate, 2), f"{_STREAMS}_streams": round(many_rate, 2)}
    if one_rate >= _SLOW:
        return [agreement, ModelFinding("speed", "ok", rates, figures=figures)]
    advice = "use a GPU, or a smaller model"
    return [agreement, ModelFinding("speed", "warning", f"{rates}: replies take minutes", advice, figures)]


async def _sample(
    engine: TransformersEngine, prompt: Sequence[int], streams: int, tokens: int
) -> tuple[list[tuple[list[int], list[float]]], float]:
    """The ids and log-probs of each stream, and tokens per second of all together; ends after :data:`_SECONDS`."""
    from clawgym.engines.protocol import GenerateRequest, Sampling

    found: list[tuple[list[int], list[float]]] = [([], []) for _ in range(streams)]

    async def run(number: int) -> None:
        sampling = Sampling(temperature=1.0, max_tokens=tokens, seed=streams + number)
        async for part in engine.generate(GenerateRequest(prompt, sampling, adapter="candidate")):
            found[number][0].extend(part.ids)
            found[number][1].extend(part.logprobs)

    began = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS):
            await asyncio.gather(*map(run, range(streams)))
    return found, sum(len(ids) for ids, _ in found) / (time.monotonic() - began)


def _agreement(
    policy: Policy, about: TrainConfig, prompt: Sequence[int], sampled: Sequence[tuple[list[int], list[float]]]
) -> ModelFinding:
    """Compare sampled log-probs with those of the forward pass of training."""
    import torch

    from clawgym.trainers.batching import MaskedSequence

    sampled = [(ids, logprobs) for ids, logprobs in sampled if ids]
    if not sampled:
        return ModelFinding(
            "log-probs", "failed", f"no token was sampled in {_SECONDS:g} s", "use a GPU, or a smaller model"
        )
    rows = [MaskedSequence((*prompt, *ids), (0,) * len(prompt) + (1,) * len(ids)) for ids, _ in sampled]
    served = torch.tensor([value for _, logprobs in sampled for value in logprobs])
    own = _trained_logprobs(policy, rows, about)
    with policy.module.disable_adapter():
        moved = float((_trained_logprobs(policy, rows, about) - own).abs().mean())
    apart = (served - own).abs()
    mean, most = float(apart.mean()), float(apart.max())
    exact = about.model.dtype == "float32" and about.compute.kernels == "float32"
    fine, bad = _BOUNDS["float32" if exact else "rounded"]
    figures = {"tokens": len(own), "mean_nats": mean, "max_nats": most, "bound_nats": bad, "adapter_nats": moved}
    detail = (
        f"serving and training differ by {mean:.2g} nats on average, {most:.2g} at most, over {len(own)} tokens "
        f"(bound: {bad:g}; the adapter changes {moved:.2g})"
    )
    if mean <= fine:
        return ModelFinding("log-probs", "ok", detail, figures=figures)
    if mean <= bad:
        advice = "prefer --set training.model.dtype=float32, where there is memory for it"
        return ModelFinding("log-probs", "warning", detail, advice, figures)
    advice = "do not train this model here: serve it with vLLM (training.compute.vllm), or name another model"
    return ModelFinding("log-probs", "failed", detail, advice, figures)
