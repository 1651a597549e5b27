"""Render ``report.html``: one file that shows a whole run, without a server or a network.

Invariants:

- The page loads nothing. Its Content-Security-Policy allows only its own style and script, by hash.
- Texts of tasks, agents and verifiers are untrusted. They reach the page escaped or through ``textContent``, with
  control and format characters as visible escapes.
- The size is bounded. Long texts are cut, with a note that names the file with the full text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from clawgym.errors import TaskError
from clawgym.evaluation import summary
from clawgym.evaluation.progress import duration
from clawgym.records import Outcome, Step
from clawgym.records.atif import steps_from_atif
from clawgym.records.run_folder import RunFolder, safe_name
from clawgym.reporting import charts
from clawgym.reporting.pictures import animate, pictures_of, seen_text
from clawgym.statistics import Estimate
from clawgym.visible import visible_value

__all__ = ["render_report", "write_report"]

_HERE = Path(__file__).parent
_TOTAL = 20 * 2**20
"""Approximate limit of the embedded transcripts together, in bytes."""
_TEXT_CAPS = (16_000, 4_000, 1_000, 240)
"""Characters per text. The first that makes a transcript fit its budget is used."""
_MAX_TRANSCRIPT = 64 * 2**20
_OUTCOME_LABELS = {Outcome.INFRA: "infrastructure error"}


def write_report(path: str | Path) -> Path:
    """Write ``report.html`` into the run folder at ``path`` and return its path."""
    run = RunFolder.read(path)
    target = run.path / "report.html"
    target.write_text(render_report(run), encoding="utf-8")
    return target


def render_report(run: RunFolder, *, total: int = _TOTAL) -> str:
    """Render the page of a run folder. ``total``: approximate limit of the embedded transcripts, in bytes."""
    environment = _environment()
    css = (_HERE / "report.css.j2").read_text(encoding="utf-8")
    rows = _shown(run)
    budget = max(2_000, min(400_000, total // max(1, len(rows))))
    details = [_detail(run, row, budget) for row in rows]
    pictures = animate(run.path, details)
    script = environment.get_template("report.js.j2").render(pictures=pictures) + "\n"
    page = environment.get_template("report.html.j2")
    scores = summary.summarize(run)
    graded = [row for row in rows if row["outcome"] in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED)]
    return page.render(
        css=Markup(css),
        script=Markup(script),
        css_hash=_csp_hash(css),
        script_hash=_csp_hash(script),
        manifest=run.manifest,
        manifest_json=_cut(_manifest_json(run), 60_000, "receipt.json"),
        about=_about(run),
        s=scores,
        rows=[_table_row(run, row) for row in rows],
        categories=sorted({category for row in rows if (category := _category(run, row))}),
        distribution=charts.histogram(
            [
                ("solved", [summary.official(row) for row in graded if summary.strict(row) == 1]),
                ("unsolved", [summary.official(row) for row in graded if summary.strict(row) < 1]),
            ]
        ),
        tiles=_tiles(scores, graded),
        data=Markup(_script_json(details)),
        pictures=pictures,
        whisker=charts.whisker,
        bar=charts.bar,
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        finalize=visible_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"pct": _percent, "interval": _interval, "count": _count, "duration": duration}
    environment.filters["outcome"] = lambda outcome: _OUTCOME_LABELS.get(outcome, outcome)
    environment.globals["labels"] = summary.SCORE_LABELS
    return environment


def _percent(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{100 * estimate.value:.1f}"


def _interval(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{100 * estimate.low:.1f} – {100 * estimate.high:.1f}"


def _count(number: float) -> str:
    if number < 10_000:
        return f"{number:,.0f}"
    return f"{number / 1e6:,.2f} M" if number >= 1e6 else f"{number / 1e3:,.1f} k"


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script_json(value: Any) -> str:
    """JSON that cannot close its ``<script>`` element."""
    text = json.dumps(visible_value(value), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _task(run: RunFolder, row: Mapping[str, Any]) -> Mapping[str, Any]:
    return run.manifest.tasks.get(row["task_id"], {})


def _category(run: RunFolder, row: Mapping[str, Any]) -> str:
    return str(_task(run, row).get("category") or "")[:120]


def _manifest_json(run: RunFolder) -> str:
    return json.dumps(run.manifest.to_dict() | {"tasks": f"{len(run.manifest.tasks)} tasks"}, indent=2)


def _shown(run: RunFolder) -> list[dict[str, Any]]:
    """The last row of each episode, in the task set's order."""
    order = {task: n for n, task in enumerate(run.manifest.tasks)}
    return sorted(run.latest.values(), key=lambda row: (order.get(row["task_id"], len(order)), row["sample"]))


def _about(run: RunFolder) -> list[tuple[str, str]]:
    """The main fields of the run manifest, as (label, value)."""
    manifest = run.manifest
    task_set, agent, engine = manifest.task_set, manifest.agent, manifest.engine
    facts = [
        ("Agent", " ".join(str(agent.get(key, "")) for key in ("name", "version")).strip()),
        ("Model", str(engine.get("model") or agent.get("model") or "")),
        ("Task set hash", str(task_set.get("hash", ""))[:12]),
        ("Samples", str(manifest.samples)),
        ("Seed", str(manifest.seed)),
        ("Isolation", str(manifest.isolation.get("tier", ""))),
        ("ClawGym", manifest.library),
        ("Started", manifest.created.replace("T", " ").replace("+00:00", " UTC")),
    ]
    return [(name, value[:200]) for name, value in facts if value]


def _table_row(run: RunFolder, row: Mapping[str, Any]) -> dict[str, Any]:
    result, usage = row.get("result") or {}, row.get("usage") or {}
    checks = result.get("checks") or {}
    graded = row["outcome"] not in (Outcome.INFRA, Outcome.UNSUPPORTED)
    about = _task(run, row)
    return {
        "task": row["task_id"][:300],
        "sample": row["sample"],
        "category": _category(run, row),
        "outcome": str(row["outcome"]),
        "official": summary.official(row) if graded else None,
        "corrected": summary.baseline_adjusted(row) if graded else None,
        "passed": sum(value >= 1 for value in checks.values()),
        "checks": len(checks),
        "steps": row.get("steps", 0),
        "tokens": usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0),
        "seconds": sum((row.get("seconds") or {}).values()),
        "cause": (summary.cause(row) if graded and summary.strict(row) < 1 else row.get("cause") or "")[:300],
        "tampered": bool(result.get("tampered")),
        "runs_agent_code": bool(about.get("executes_agent_code")),
        "judged_by": summary.judged_by(run.manifest, row)[:200],
    }


def _tiles(scores: summary.Summary, graded: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Cost, tokens and time as (label, value, note)."""
    usage = scores.usage
    episodes = max(1, len(graded))
    tiles = []
    if usage.prompt_tokens or usage.completion_tokens:
        cached = f"{100 * usage.cached_tokens / usage.prompt_tokens:.0f}% cached" if usage.prompt_tokens else ""
        tiles.append(("Tokens in", _count(usage.prompt_tokens), cached))
        tiles.append(
            ("Tokens out", _count(usage.completion_tokens), f"{_count(usage.completion_tokens / episodes)} per episode")
        )
    if scores.tokens_per_solved is not None:
        note = "in and out, over all episodes"
        tiles.append(("Tokens per solved episode", _count(scores.tokens_per_solved), note))
    if usage.cost_usd is not None:
        note = "" if scores.cost_per_solved is None else f"${scores.cost_per_solved:.4f} per solved episode"
        tiles.append(("Cost", f"${usage.cost_usd:,.2f}", note))
    for by, found in scores.judging.items():
        agreement = "–" if found.alpha is None else f"{found.alpha:.2f}"
        tiles.append(("Agreement of votes", agreement, f"{by[:100]}: {found}"))
    totals = sorted(sum((row.get("seconds") or {}).values()) for row in graded)
    if totals:
        note = f"median {duration(statistics.median(totals))} per episode"
        tiles.append(("Sandbox time", duration(sum(totals)), note))
        p95 = totals[int(0.95 * (len(totals) - 1))]
        tiles.append(("Slowest episode", duration(totals[-1]), f"95% within {duration(p95)}"))
    for phase, label in (("agent", "Agent"), ("verify", "Grading")):
        if scores.seconds.get(phase):
            seconds = scores.seconds[phase]
            tiles.append((label, duration(seconds), f"{seconds / episodes:.2g} s per episode"))
    return tiles


def _detail(run: RunFolder, row: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """The details of one episode, shown on a click; about ``budget`` bytes of JSON at most."""
    name = f"episodes/{safe_name(row['task_id'], row['sample'])}"
    result = row.get("result") or {}
    facts: dict[str, Any] = {
        "files": name,
        "checks": {str(k)[:200]: v for k, v in list((result.get("checks") or {}).items())[:300]},
        "facts": [
            [label, _cut(str(value), 400, name)]
            for label, value in (
                ("Cause", row.get("cause")),
                ("Verifier error", result.get("cause")),
                ("Grading mode", result.get("mode")),
                ("No-model baseline", result.get("floor")),
                ("Changed inputs", ", ".join(result.get("changed_inputs") or ())),
                ("Not stored", "; ".join(row.get("dropped") or ())),
                ("Seed", row.get("seed")),
                ("Attempt", row.get("attempt") or None),
                ("Seconds", ", ".join(f"{k} {v:.2f}" for k, v in (row.get("seconds") or {}).items())),
            )
            if value not in (None, "")
        ],
        "final": _cut(str(row.get("final_message") or ""), 4_000, name),
        "log": _cut(_read_text(run.path / name / "verifier.log"), min(8_000, budget // 8), f"{name}/verifier.log"),
        "note": "",
        "steps": [],
    }
    steps, facts["note"] = _steps(run.path / name / "transcript.json")
    if pictures := pictures_of(steps):
        facts["pictures"] = pictures
    where = f"{name}/transcript.json"
    shown: list[dict[str, Any]] = []
    for cap in _TEXT_CAPS:
        shown = [dict(_shown_step(step, cap, where)) for step in steps]
        if len(json.dumps(shown)) <= budget:
            break
    else:
        keep = max(1, budget // 1_500)
        if len(shown) > 2 * keep:
            facts["note"] = f"{len(shown) - 2 * keep} steps in the middle are left out; see {where} for all."
            shown = shown[:keep] + shown[-keep:]
    facts["steps"] = shown
    return facts


def _steps(path: Path) -> tuple[tuple[Step, ...], str]:
    try:
        if path.stat().st_size > _MAX_TRANSCRIPT:
            return (), f"The transcript is too large to show; see {path.parent.name}/{path.name}."
        return steps_from_atif(json.loads(path.read_bytes())), ""
    except FileNotFoundError:
        return (), "No transcript was stored."
    except (OSError, ValueError, TaskError) as error:
        return (), f"The transcript cannot be read ({type(error).__name__})."


def _shown_step(step: Step, cap: int, where: str) -> Iterator[tuple[str, Any]]:
    yield "from", step.source
    if step.message:
        yield "text", _cut(step.message, cap, where)
    if step.reasoning:
        yield "why", _cut(step.reasoning, cap, where)
    if step.tool_calls:
        yield (
            "calls",
            [
                [_cut(call.name, 80, where), _cut(_arguments(call.arguments), cap, where), call.id[:80]]
                for call in step.tool_calls[:50]
            ],
        )
    if step.observations:
        yield (
            "seen",
            [[_cut(seen_text(seen), cap, where), (seen.call_id or "")[:80]] for seen in step.observations[:50]],
        )
    if step.usage:
        yield "tokens", [step.usage.prompt_tokens, step.usage.completion_tokens]


def _arguments(arguments: Mapping[str, Any]) -> str:
    """A single string argument unchanged, anything else as JSON."""
    if len(arguments) == 1 and isinstance(only := next(iter(arguments.values())), str):
        return only
    return json.dumps(dict(arguments), ensure_ascii=False, indent=1)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(2**20).decode("utf-8", "replace")
    except OSError:
        return ""


def _cut(text: str, cap: int, where: str) -> str:
    """Keep both ends of a text longer than ``cap`` characters, with a note between them."""
    if len(text) <= cap:
        return text
    half = cap // 2
    note = f"\n[... {len(text) - 2 * half:,} characters left out; see {where} for the full text ...]\n"
    return text[:half] + note + text[len(text) - half :]
