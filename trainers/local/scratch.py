"""The folder of the model that a run begins with; made from scratch where none is named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.engines.tiny import BRIEF_TEMPLATE, SPECIAL_TOKENS, make_tiny_model
from clawgym.errors import TrainingError
from clawgym.gateway._template import Template, for_template
from clawgym.records import Task
from clawgym.tasks.packs._seeded import FIRST, WORDS
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.checkpoints import Checkpoints

__all__ = ["base_folder", "given_model"]

_MOST_IDS = 8192
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


def given_model(config: TrainConfig) -> Path | None:
    """The folder ``model.path``, or the best checkpoint of the run in it; a hub's name as it is; ``None`` where a model
    is to be made. Raises :class:`~clawgym.errors.TrainingError` for a folder that is not there."""
    if config.model.path is None:
        return None
    given = Path(config.model.path).expanduser()
    if not given.is_dir() and (given.is_absolute() or config.model.path.startswith((".", "~"))):
        raise TrainingError(f"model.path {config.model.path}: no such folder: correct it")
    best = Checkpoints(given).best()
    return given if best is None else best / "model"


def base_folder(config: TrainConfig, run: Path, tasks: Sequence[Task], said: Iterable[Mapping[str, Any]]) -> Path:
    """:func:`given_model`, or ``run/base``, which is made once: a random model, whose tokenizer knows the words of
    ``tasks`` and of the conversations ``said``, as the chat template puts them."""
    if (given := given_model(config)) is not None:
        return given
    folder = run / "base"
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
            vocab=_MOST_IDS,
            corpus=_texts(tasks, said),
            brief=True,
            spread=0.05,
        )
    return folder


def _texts(tasks: Sequence[Task], said: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for word in (*WORDS, *FIRST):
        for form in (word, f" {word}", word.capitalize(), f" {word.capitalize()}"):
            yield from (form, form)
    template = Template(BRIEF_TEMPLATE, {})
    asked: list[Mapping[str, Any]] = [{"messages": [{"role": "user", "content": t.instruction}]} for t in tasks]
    for row in (*asked, *said):
        text = template([for_template(m) for m in row["messages"]], row.get("tools") or (), generation=False)
        yield from _SPECIAL.split(text)
