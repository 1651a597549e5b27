"""The model that a run starts from: a folder, the best checkpoint of a run, a name on the Hub, or a model made from
scratch.

Invariant: a run starts from a folder with weights and a tokenizer, and never changes these weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from clawgym.engines.folders import HUB_NAME, load_weights, local_name, model_folder, read_settings
from clawgym.engines.lora import add_adapter, read_adapter
from clawgym.engines.tiny import BRIEF_TEMPLATE, SPECIAL_TOKENS, make_tiny_model
from clawgym.errors import EngineError, TrainingError
from clawgym.gateway.template import Template, for_template
from clawgym.records import Task
from clawgym.records.run_folder import MANIFEST, RunFolder
from clawgym.tasks.packs.seeded import FIRST, WORDS
from clawgym.trainers.common.checkpoints import TOKENIZER, Checkpoints
from clawgym.trainers.config import TrainConfig

__all__ = [
    "base_folder",
    "base_of_adapter",
    "given_model",
    "merge_adapter",
    "model_origin",
    "checkpoint_model",
    "merged_model",
]

_MAX_VOCABULARY = 8192
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


def given_model(config: TrainConfig, *, weights: bool = True) -> Path | None:
    """The model ``model.path``; ``None`` if it is not set.

    It is a folder, or the best checkpoint of the run in that folder (a model or LoRA adapters). If there is no such
    folder, it is downloaded from the Hub. With ``weights=False`` only the configuration is downloaded. Raises
    :class:`~clawgym.errors.TrainingError` if it is not found."""
    if config.model.path is None:
        return None
    given = Path(config.model.path).expanduser()
    if not given.is_dir():
        return _checked(config.model.path, weights)
    if (best := Checkpoints(given).best()) is not None:
        return _checked(checkpoint_model(best), weights)
    if (given / MANIFEST).exists():
        raise TrainingError(
            f"model.path {given}: this run has no checkpoint yet: resume it until it has one, then start this one"
        )
    return _checked(given, weights)


def model_origin(config: TrainConfig) -> str | None:
    """The name of the model that training starts from, without local paths; ``None`` for a model made from scratch.

    For the folder of a run: the model that this run started from.
    """
    path = config.model.path
    if path is None:
        return None
    given = Path(path).expanduser()
    if not (given / MANIFEST).exists():
        return local_name(str(given.resolve()) if given.is_dir() else path)
    manifest = RunFolder.read(given).manifest
    known = manifest.engine.get("model")
    return str(known) if known else given.resolve().name


def checkpoint_model(checkpoint: Path) -> Path:
    """The folder of the model, or of the LoRA adapters, in a checkpoint."""
    model = checkpoint / "model"
    return model if model.is_dir() else checkpoint / "adapter"


def base_of_adapter(model: Path, *, weights: bool = True) -> Path:
    """``model``, or its base model if it holds LoRA adapters; ``weights`` as for :func:`given_model`. Raises
    :class:`~clawgym.errors.TrainingError` if the base model is not found."""
    settings = model / "adapter_config.json"
    if not settings.exists():
        return model
    try:
        base = str(read_settings(settings)["base_model_name_or_path"])
    except (EngineError, KeyError) as error:
        raise TrainingError(f"{settings}: names no base model ({error}): put its name there") from error
    if Path(base).is_dir() or HUB_NAME.fullmatch(base):
        return _checked(base, weights)
    raise TrainingError(f"{settings}: its base model {base} is no folder here: put that there, or correct the name")


def merge_adapter(adapter: Path, folder: Path) -> None:
    """Merge LoRA adapters into their base model and write it, with the tokenizer, to ``folder``.

    The weights keep their stored type. ``folder`` appears when it is complete. Raises
    :class:`~clawgym.errors.TrainingError` if it cannot be merged or written."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from clawgym.engines.load import sees

    base = base_of_adapter(_checked(adapter, True))
    auto: Any = AutoModelForImageTextToText if sees(base) else AutoModelForCausalLM
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        model = load_weights(auto, base, dtype="auto")
        add_adapter(model, read_adapter(adapter, None, model))
        model.save_pretrained(part)
        for name in TOKENIZER:
            if found := next((f / name for f in (adapter, base) if (f / name).exists()), None):
                shutil.copyfile(found, part / name)
        part.replace(folder)
    except (EngineError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainingError(
            f"{adapter}: cannot be merged into {base} ({why}): make room, or correct base_model_name_or_path in its "
            "settings"
        ) from error


def merged_model(model: Path, made: Path) -> Path:
    """``model``; for LoRA adapters the folder ``made``, with the merged model. It is made once."""
    if not (model / "adapter_config.json").exists():
        return model
    if not made.exists():
        merge_adapter(model, made)
    return made


def base_folder(config: TrainConfig, run: Path, tasks: Sequence[Task], said: Iterable[Mapping[str, Any]]) -> Path:
    """The folder of the model that a run starts from: :func:`given_model`, or ``run/base``.

    ``run/base`` is made once. It holds LoRA adapters merged into their base model, or a random model. The tokenizer of
    a random model is trained on the instructions of ``tasks`` and the conversations ``said``, rendered with the chat
    template."""
    folder, given = run / "base", given_model(config)
    if given is not None:
        return merged_model(given, folder)
    if not folder.exists():
        about = config.model.scratch
        make_tiny_model(
            folder,
            seed=config.seed,
            hidden=about.hidden,
            layers=about.layers,
            heads=about.heads,
            kv_heads=about.kv_heads,
            head_dim=about.head_dim,
            context_window=about.context_window,
            vocab=_MAX_VOCABULARY,
            corpus=_texts(tasks, said),
            brief=True,
            spread=0.05,
        )
    return folder


def _checked(model: str | Path, weights: bool) -> Path:
    try:
        return model_folder(model, weights=weights)
    except EngineError as error:
        raise TrainingError(f"model.path {error}") from error


def _texts(tasks: Sequence[Task], said: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for word in (*WORDS, *FIRST):
        for form in (word, f" {word}", word.capitalize(), f" {word.capitalize()}"):
            yield from (form, form)
    template = Template(BRIEF_TEMPLATE, {})
    asked: list[Mapping[str, Any]] = [{"messages": [{"role": "user", "content": t.instruction}]} for t in tasks]
    for row in (*asked, *said):
        text = template([for_template(m) for m in row["messages"]], row.get("tools") or (), generation=False)
        yield from _SPECIAL.split(text)
