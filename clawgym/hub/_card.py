"""The model card, its training curve, and ``.eval_results``, generated deterministically from the run folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jinja2
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from clawgym.engines.folders import local_name
from clawgym.hub._checkpoint import Checkpoint
from clawgym.hub._upload import render
from clawgym.tasks.sets import PUBLISHED
from clawgym.trainers.common.data_use import data_uses

__all__ = ["CURVE", "card", "curve", "eval_results", "model_name", "portable"]

CURVE = "curve.svg"
_PATH = re.compile(
    r"(?:file://|(?<![\w.:/~]))(?:~|[A-Za-z]:)?/(?:[^\s/:'\"|]+/)*(?=[^\s/])|(?<!\w)[A-Za-z]:\\(?:[^\s\\]+\\)*"
)
"""Matches the folders of an absolute path."""
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 240, 48, 16


def portable(text: str) -> str:
    """``text`` with every absolute path replaced by its last component."""
    return _PATH.sub("", text)


def model_name(name: str) -> str:
    """A model's name without local paths: the Hub's name if it was downloaded, else the last part of the path."""
    return portable(local_name(name))


def _table(value: Mapping[str, Any], where: str = "") -> Iterable[tuple[str, str]]:
    """(name, value) pairs; names in inner tables are written ``outer.inner``."""
    for key, inner in value.items():
        name = f"{where}.{key}" if where else str(key)
        if isinstance(inner, Mapping) and inner:
            yield from _table(inner, name)
        else:
            shown = inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
            yield portable(name), portable(shown)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "set"


def _published(name: str) -> str | None:
    """The dataset on the Hub of a task set; None if it has none."""
    found = PUBLISHED.get(re.split("[@:]", name)[0])
    return found.repo if found else None


def _how(row: Mapping[str, Any], library: str) -> str:
    words = [f"{row['split']} split", *filter(None, [row["decoding"]])]
    if row.get("low") is not None and row.get("high") is not None:
        words.append(f"95 % interval {row['low']:.3f} to {row['high']:.3f}")
    words += [f"{row[name]} {name}" for name in ("episodes", "samples") if row.get(name) is not None]
    return ", ".join([*words, f"ClawGym {library}"])


def card(made: Checkpoint, base: str, merged: bool, curved: bool) -> str:
    """The text of ``README.md``. ``base`` is the model that training started from."""
    manifest = made.manifest
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=_published(row["task_set"]) or _slug(portable(row["task_set"])),
            dataset_name=portable(row["task_set"]),
            dataset_split=row["split"],
            metric_type="score",
            metric_name=", ".join(filter(None, ("mean score", row["decoding"]))),
            metric_value=row["score"],
        )
        for row in made.scores
    ]
    name = portable(made.name)
    kind = "adapter" if made.adapter and not merged else "model"
    data = ModelCardData(
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["clawgym", "reinforcement-learning"],
        model_name=name,
        eval_results=results or None,
        base_model=base if re.fullmatch(r"[\w.-]+/[\w.-]+", base) else None,
    )
    return render(
        "card.md.j2",
        header=data.to_yaml(),
        name=name,
        kind=kind,
        merged=made.adapter and merged,
        base=base,
        step=made.step,
        manifest=manifest,
        settings=list(_table({"seed": manifest.seed, **manifest.sampling, **manifest.config})),
        data=[replace(one, name=portable(one.name)) for one in data_uses(manifest)],
        scores=[{**row, "task_set": portable(row["task_set"])} for row in made.scores],
        curve=CURVE if curved else "",
    )


def eval_results(made: Checkpoint) -> dict[str, bytes]:
    """Files ``.eval_results/*.yaml`` by name, for each task set that is a dataset on the Hub."""
    files: dict[str, list[EvalResultEntry]] = {}
    # The format has one value per split: of two, take the sampled one.
    for row in {(row["task_set"], row["split"]): row for row in sorted(made.scores, key=_greedy_first)}.values():
        if repo := _published(row["task_set"]):
            entry = EvalResultEntry(repo, _slug(row["split"]), row["score"], notes=_how(row, made.manifest.library))
            files.setdefault(f".eval_results/clawgym-{_slug(row['task_set'])}.yaml", []).append(entry)
    return {
        name: yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False).encode()
        for name, entries in files.items()
    }


def curve(made: Checkpoint) -> bytes | None:
    """An SVG of the training reward and of the evaluations with their intervals; None with fewer than two points."""
    metric = _reward(made.metrics)
    line = [(row["step"], float(row[metric])) for row in made.metrics if metric and _number(row.get(metric))]
    dots = [(row["step"], row["score"], _ends(row)) for row in made.evaluations]
    heights = [0.0, 1.0, *(y for _, y in line), *(y for _, score, ends in dots for y in (score, *ends))]
    steps = [x for x, _ in line] + [x for x, *_ in dots]
    if len(set(steps)) < 2:
        return None
    low, high = min(heights), max(heights)
    first, last = min(steps), max(steps)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - first) / (last - first), (y - low) / (high - low)
        return round(_LEFT + across * (_WIDTH - _LEFT - 16), 1), round(_TOP + (1 - up) * (_HEIGHT - _TOP - 40), 1)

    template = jinja2.Environment(loader=jinja2.PackageLoader("clawgym.hub", "."), autoescape=True)
    text = template.get_template("curve.svg.j2").render(
        width=_WIDTH,
        height=_HEIGHT,
        metric=metric,
        line=[at(x, y) for x, y in line],
        dots=[(*at(x, score), *(at(x, y)[1] for y in ends)) for x, score, ends in dots],
        ticks=[(at(first, y)[1], f"{y:g}") for y in (low, high)],
        ends=[(at(x, low)[0], x) for x in (first, last)],
    )
    return text.encode()


def _greedy_first(row: Mapping[str, Any]) -> bool:
    return row["decoding"] != "greedy"


def _ends(row: Mapping[str, Any]) -> tuple[float, ...]:
    """The interval of an evaluation; empty if it has none."""
    low, high = row.get("low"), row.get("high")
    return (float(low), float(high)) if low is not None and high is not None else ()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _reward(rows: Iterable[Mapping[str, Any]]) -> str:
    """The metric to plot: the first whose name contains ``reward``, else ``score``."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _number(value))
    return next((name for word in ("reward", "score") for name in names if word in name), "")
