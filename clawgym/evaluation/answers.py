"""What ``clawgym view`` and ``report.html`` show of a run, with the types of ``web/src/api.ts``.

Invariants: a run folder is hostile. Its files are read without following links, up to a size. A row that has another
form than :func:`~clawgym.records.run_folder.result_row` gives raises ValueError, and nothing else. The scores are those
of :mod:`clawgym.evaluation.summary`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import statistics
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.errors import ComparisonRefused
from clawgym.evaluation import summary
from clawgym.evaluation.compare import compare_runs
from clawgym.files import open_below, read_below
from clawgym.records import Image, Outcome
from clawgym.records.manifest import RunManifest
from clawgym.records.run_folder import PROGRAM, TRANSCRIPT, WORKSPACE, RunFolder, safe_name
from clawgym.reporting.transcripts import Transcript, cut, read_transcript, step_answers, token_answers
from clawgym.statistics import as_float

__all__ = [
    "about",
    "compare_answer",
    "episode_answer",
    "episode_line",
    "ordered",
    "run_answer",
    "run_figures",
    "settings",
    "token_answer",
    "transcript_of",
    "turns_answer",
]

Row = Mapping[str, Any]
_BINS = 20
_LOG = 2**20
"""Most bytes of a log that are read."""
_SHOWN_LOG = 40_000
"""Most characters of a log that are shown."""
_CHECKS, _FAILED = 300, 8
"""Most checks of an episode that are shown, and most failed ones that its line names."""
_SEEN_LINES = 20
_TASKS = 5_000
"""Most tasks of a comparison that are listed."""
_LARGEST_ARCHIVE, _LARGEST_LISTED, _LISTED = 8 * 2**20, 64 * 2**20, 2_000
"""Most bytes of a compressed workspace that is listed, of its contents, and most names."""


def ordered(manifest: RunManifest) -> dict[str, int]:
    """Task id -> its position in the task set."""
    return {task: n for n, task in enumerate(manifest.tasks)}


def about(manifest: RunManifest) -> list[tuple[str, str]]:
    """The main fields of a run manifest, as (label, value)."""
    task_set, agent, engine = manifest.task_set, manifest.agent, manifest.engine
    facts = [
        ("Task set", " ".join(str(task_set.get(key) or "") for key in ("name", "version")).strip()),
        ("Task set hash", str(task_set.get("hash", ""))[:12]),
        ("Agent", " ".join(str(agent.get(key, "")) for key in ("name", "version")).strip()),
        ("Model", str(engine.get("model") or agent.get("model") or "")),
        ("Samples", str(manifest.samples)),
        ("Seed", str(manifest.seed)),
        ("Isolation", str(manifest.isolation.get("tier", ""))),
        ("ClawGym", manifest.library),
        ("Started", manifest.created.replace("T", " ").replace("+00:00", " UTC")),
    ]
    return [(name, value[:200]) for name, value in facts if value]


def settings(manifest: RunManifest) -> dict[str, Any]:
    """The run manifest without its tasks."""
    about = {**dataclasses.replace(manifest, tasks={}).to_dict(), "tasks": f"{len(manifest.tasks)} tasks"}
    return _short(about, 2_000)


def _short(value: Any, most: int) -> Any:
    """``value`` with texts, and names in mappings, of at most about ``most`` characters."""
    if isinstance(value, str):
        return cut(value, most)[0]
    if isinstance(value, Mapping):
        return {_short(str(key), most): _short(item, most) for key, item in value.items()}
    return [_short(item, most) for item in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn what a row of another form raises into a ValueError."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, OverflowError, ValueError) as error:
        raise ValueError(f"{what} is damaged ({type(error).__name__}: {str(error)[:100]})") from error


def _is_graded(row: Row) -> bool:
    return row["outcome"] not in (Outcome.INFRA, Outcome.UNSUPPORTED)


def _seconds(row: Row) -> float:
    return float(sum((row.get("seconds") or {}).values()))


def episode_line(manifest: RunManifest, order: Mapping[str, int], rows: Sequence[Row]) -> dict[str, Any]:
    """``EpisodeLine`` of the rows of one episode, oldest first. Raises ValueError for a damaged row."""
    row = rows[-1]
    with _readable(f"the line of {str(row.get('key'))[:80]!r}"):
        task, sample = str(row["task_id"]), int(row["sample"])
        result, usage = row.get("result") or {}, row.get("usage") or {}
        checks = {str(name)[:200]: as_float(score) for name, score in (result.get("checks") or {}).items()}
        tried, known = manifest.tasks.get(task) or {}, _is_graded(row)
        why = summary.cause(row) if known and summary.strict(row) < 1 else row.get("cause") or ""
        cost = usage.get("cost_usd")
        return {
            "name": safe_name(task, sample),
            "order": order.get(task, len(order)),
            "task": task[:300],
            "sample": sample,
            "category": str(tried.get("category") or "")[:120],
            "level": str(tried.get("level") or "")[:120],
            "outcome": str(Outcome(row["outcome"])),
            "strict": summary.strict(row) if known else None,
            "official": summary.official(row) if known else None,
            "corrected": summary.baseline_adjusted(row) if known else None,
            "passed": sum(score >= 1 for score in checks.values()),
            "checks": len(checks),
            "failed": [name for name, score in checks.items() if not score >= 1][:_FAILED],
            "cause": str(why)[:300],
            "fault": str(row.get("fault") or "")[:40],
            "steps": int(row.get("steps") or 0),
            "tool_calls": int(row.get("tool_calls") or 0),
            "prompt_tokens": int(usage.get("prompt_tokens") or 0),
            "completion_tokens": int(usage.get("completion_tokens") or 0),
            "cost_usd": None if cost is None else float(cost),
            "seconds": _seconds(row),
            "attempts": len(rows),
            "tampered": bool(result.get("tampered")),
            "runs_agent_code": bool(tried.get("executes_agent_code")),
            "judged_by": summary.judged_by(manifest, row)[:200],
            "finished": str(row.get("finished") or "")[:40],
        }


def run_answer(run: RunFolder, scores: summary.Summary) -> dict[str, Any]:
    """``Run`` of the answers, without ``id``, ``state``, ``changed`` and ``indexed``."""
    graded = [row for rows in summary.graded_by_task(run.manifest, run.rows).values() for row in rows]
    times = sorted(map(_seconds, graded))
    distribution = {name: [0] * _BINS for name in ("solved", "unsolved")}
    for row in graded:
        into = distribution["solved" if summary.strict(row) == 1 else "unsolved"]
        into[min(_BINS - 1, int(summary.official(row) * _BINS))] += 1
    tasks = run.manifest.tasks.values()
    return {
        "name": run.path.name,
        "path": str(run.path),
        "about": about(run.manifest),
        "manifest": settings(run.manifest),
        "summary": _short(scores.to_dict(), 400),
        "checks": _check_counts(graded),
        "distribution": distribution,
        "categories": sorted({str(task.get("category"))[:120] for task in tasks if task.get("category")}),
        "outcomes": sorted({str(row["outcome"]) for row in run.latest.values()}),
        "slowest": {"median": statistics.median(times), "p95": times[int(0.95 * (len(times) - 1))], "max": times[-1]}
        if times
        else None,
        "notes": [],
    }


def _check_counts(graded: Iterable[Row]) -> list[dict[str, Any]]:
    """``CheckCount`` for each check, not passed most often first."""
    values: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, list[str]] = defaultdict(list)
    for row in graded:
        for name, score in ((row["result"] or {}).get("checks") or {}).items():
            values[str(name)[:200]].append(score := as_float(score))
            if not score >= 1:
                failed[str(name)[:200]].append(row["task_id"])
    counts = [
        {
            "name": name,
            "failed": len(failed[name]),
            "graded": len(scores),
            "share": len(failed[name]) / len(scores),
            "mean": statistics.fmean(scores),
            "tasks": len(set(failed[name])),
        }
        for name, scores in values.items()
    ]
    return sorted(counts, key=lambda check: (-check["failed"], -check["share"], check["name"]))


def run_figures(manifest: RunManifest, scores: summary.Summary) -> dict[str, Any]:
    """``RunFigures`` of the answers: one line in a table of runs."""
    return {
        "task_set": " ".join(str(manifest.task_set.get(key) or "") for key in ("name", "version")).strip()[:200],
        "task_set_hash": str(manifest.task_set.get("hash") or ""),
        "agent": str(manifest.agent.get("name") or "unknown")[:200],
        "model": str(manifest.engine.get("model") or manifest.agent.get("model") or "")[:200],
        "samples": manifest.samples,
        "created": manifest.created,
        "planned": scores.planned,
        "episodes": scores.scores.episodes,
        "outcomes": dict(scores.outcomes),
        **{name: _estimate(getattr(scores.scores, name)) for name in summary.SCORE_LABELS},
        "cost_usd": scores.usage.cost_usd,
        "tokens": scores.usage.prompt_tokens + scores.usage.completion_tokens,
        "infra_rate": scores.infra_rate,
        "seconds": sum(scores.seconds.values()),
    }


def _estimate(found: Any) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)


def transcript_of(run: Path, name: str) -> Transcript:
    """The transcript of the episode in the folder ``name``."""
    return read_transcript(run, f"episodes/{name}/{TRANSCRIPT}")


def turns_answer(
    transcript: Transcript,
    start: int = 0,
    end: int | None = None,
    *,
    address: Callable[[Image], str | None],
    **limits: int,
) -> list[dict[str, Any]]:
    """``Step`` of the answers for a part of a transcript; ``limits``: see
    :func:`~clawgym.reporting.transcripts.step_answers`."""
    turns = {
        n: {"turn": turn, "policy_version": _version(metrics)}
        for turn, (n, metrics) in enumerate(transcript.turns.items())
    }
    return step_answers(transcript.steps, start, end, turns=turns, address=address, **limits)


def _version(metrics: Mapping[str, Any]) -> int | None:
    extra = metrics.get("extra")
    version = extra.get("policy_version") if isinstance(extra, Mapping) else None
    return version if isinstance(version, int) else None


def token_answer(transcript: Transcript, turn: int) -> dict[str, Any] | None:
    """``Tokens`` of the answers for a turn of a run; None if there is no such turn."""
    turns = transcript.token_turns
    if not 0 <= turn < len(turns):
        return None
    metrics = turns[turn]
    prompt, sampled = _numbers(metrics.get("prompt_token_ids")), _numbers(metrics["completion_token_ids"])
    before = 0
    for other in turns[:turn]:
        history = [*_numbers(other.get("prompt_token_ids")), *_numbers(other["completion_token_ids"])]
        if len(history) > before and prompt[: len(history)] == history:
            before = len(history)
    role = metrics.get("role")
    logprobs = [float(value) for value in _numbers(metrics.get("logprobs"))]
    return {
        "turn": turn,
        "turns": len(turns),
        "role": role[:40] if isinstance(role, str) else "",
        "policy_version": _version(metrics),
        "flaw": "",
        "before": before,
        **token_answers(prompt[before:], sampled, logprobs, trained=False),
        "reward": None,
        "advantages": None,
        "note": "A run folder stores ids and log-probs. It has no tokenizer, and nothing was trained on it.",
    }


def _numbers(values: Any) -> list[Any]:
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def episode_answer(
    run: Path,
    line: Mapping[str, Any],
    rows: Sequence[Row],
    transcript: Transcript,
    address: Callable[[Image], str | None],
    most: int = _SHOWN_LOG,
) -> dict[str, Any]:
    """``Episode`` of the answers, without ``run`` and ``pool``. Raises ValueError for a damaged row.

    Args:
        run: the run folder.
        line: its :func:`episode_line`.
        rows: the rows of the episode, oldest first.
        transcript: its :func:`transcript_of`.
        address: gives the address of a picture.
        most: characters of a log that are shown; also limits the list of the workspace.
    """
    row, name = rows[-1], line["name"]
    with _readable(f"the line of {name}"):
        result = row.get("result") or {}
        checks = list((result.get("checks") or {}).items())
        log = _log(run, f"episodes/{name}/verifier.log")
        notes = [str(note)[:400] for note in row.get("dropped") or ()]
        if len(checks) > _CHECKS:
            notes.append(f"{len(checks) - _CHECKS} of {len(checks)} checks are not shown.")
        if transcript.note:
            notes.append(transcript.note)
        workspace = _workspace(run, f"episodes/{name}/{WORKSPACE}", min(_LISTED, 10 + most // 100))
        notes.append(
            "No workspace is stored between the calls: changes of files are those that the arguments of calls show."
        )
        votes = (result.get("judgement") or {}).get("votes") or {}
        pictures = [{"src": src, "step": n} for n, image in transcript.pictures() if (src := address(image))]
        return {
            **line,
            "task_hash": str(row.get("task_hash") or ""),
            "seed": row.get("seed"),
            "checks_list": [
                {"name": str(check)[:200], "score": as_float(score), "seen": _lines_about(log, str(check))}
                for check, score in checks[:_CHECKS]
            ],
            "facts": _facts(row, result),
            "phases": {str(phase)[:40]: float(value) for phase, value in (row.get("seconds") or {}).items()},
            "history": [
                {
                    "attempt": int(one.get("attempt") or 0),
                    "outcome": str(Outcome(one["outcome"])),
                    "cause": str(one.get("cause") or "")[:300],
                    "fault": str(one.get("fault") or "")[:40],
                    "seconds": _seconds(one),
                    "finished": str(one.get("finished") or "")[:40],
                }
                for one in rows
            ],
            "final_message": str(row.get("final_message") or "")[:8_000],
            "verifier_log": cut(log, most)[0],
            "error_log": cut(_log(run, f"episodes/{name}/error.log"), most)[0],
            "votes": [
                {"criterion": str(criterion)[:400], "votes": [float(vote) for vote in _numbers(list(given))]}
                for criterion, given in votes.items()
            ],
            "files": _files(run, name),
            "workspace": workspace,
            "turns": len(transcript.steps),
            "pictures": pictures,
            "has_tokens": bool(transcript.token_turns),
            "notes": notes,
        }


def _facts(row: Row, result: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = (
        ("Cause", row.get("cause")),
        ("Verifier error", result.get("cause")),
        ("Grading mode", result.get("mode")),
        ("No-model baseline", result.get("floor")),
        ("Changed inputs", ", ".join(map(str, result.get("changed_inputs") or ()))),
        ("Checks out of range", ", ".join(map(str, result.get("out_of_range") or ()))),
        ("Judged by", result.get("judged_by")),
        ("Seed", row.get("seed")),
        ("Attempt", row.get("attempt") or None),
    )
    return [(label, cut(str(value), 400)[0]) for label, value in facts if value not in (None, "")]


def _lines_about(log: str, check: str) -> str:
    """The lines of a verifier's log that name a check."""
    found = [line[:400] for line in log.splitlines() if check in line] if check in log else []
    return "\n".join(found[:_SEEN_LINES])


def _log(run: Path, name: str) -> str:
    try:
        with open_below(run, name) as file:
            return file.read(_LOG).decode("utf-8", "replace")
    except OSError:
        return ""


def _files(run: Path, name: str) -> list[dict[str, Any]]:
    found = []
    for file in (TRANSCRIPT, WORKSPACE, PROGRAM, "verifier.log", "error.log"):
        with contextlib.suppress(OSError), open_below(run, f"episodes/{name}/{file}") as opened:
            found.append({"name": file, "size": opened.seek(0, io.SEEK_END)})
    return found


def _workspace(run: Path, name: str, most: int) -> dict[str, Any]:
    """``Workspace`` of the answers: the first ``most`` names in a stored workspace."""
    try:
        packed = read_below(run, name, _LARGEST_ARCHIVE)
    except FileNotFoundError:
        return {"files": [], "note": "No workspace was stored."}
    except OSError as error:
        return {"files": [], "note": f"The workspace is not listed: {name} {error.strerror}."}
    files: list[dict[str, Any]] = []
    note = ""
    try:
        with tarfile.open(fileobj=_Bounded(gzip.GzipFile(fileobj=io.BytesIO(packed))), mode="r|") as archive:
            for member in archive:
                if len(files) == most:
                    note = f"Only the first {most:,} names are listed."
                    break
                kind = (
                    "file" if member.isreg() else "folder" if member.isdir() else "link" if member.issym() else "other"
                )
                files.append({"path": member.name[:400], "size": member.size, "kind": kind})
    except _TooLarge:
        note = f"Only a part is listed: the files have more than {_LARGEST_LISTED >> 20} MiB."
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        note = f"Only a part is listed: the archive is damaged ({type(error).__name__})."
    return {"files": files, "note": note}


class _TooLarge(Exception):
    pass


class _Bounded(io.RawIOBase):
    """Reads at most :data:`_LARGEST_LISTED` bytes."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._left = _LARGEST_LISTED

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(data)
        if self._left <= 0:
            raise _TooLarge
        return data


def compare_answer(a: RunFolder, b: RunFolder) -> dict[str, Any]:
    """``Compare`` of the answers, without the ``id`` of its sides."""
    runs = a, b
    scores = [summary.summarize(run) for run in runs]
    refused, found = "", None
    try:
        found = compare_runs(a, b, scores)
    except ComparisonRefused as error:
        refused = str(error)
    plain = {"tasks": 0, "scores": {}, "left_out": {}, "notes": []} if found is None else found.to_dict()
    sides = []
    for run, one, side in zip(runs, scores, "ab", strict=True):
        known = {"name": run.manifest.label, "run": run.path.name, "samples": run.manifest.samples, "means": {},
                 "infra_share": one.infra_share, "missing": len(one.missing)}  # fmt: skip
        extra = {"usage": dataclasses.asdict(one.usage), "seconds": dict(one.seconds)}
        extra |= {"cost_per_solved": one.cost_per_solved, "tokens_per_solved": one.tokens_per_solved}
        sides.append({**plain.get(side, known), **extra})
    graded = [summary.graded_by_task(run.manifest, run.rows) for run in runs]
    common = [
        task
        for task in graded[0]
        if task in graded[1] and a.manifest.tasks[task].get("hash") == b.manifest.tasks[task].get("hash")
    ]
    means = {
        name: [summary.task_means({task: rows[task] for task in common}, name) for rows in graded]
        for name in ("strict", "official")
    }
    common.sort(key=lambda task: -abs(means["official"][1][task] - means["official"][0][task]))
    return {
        **plain,
        "a": sides[0],
        "b": sides[1],
        "refused": refused,
        "by_task": [
            {
                "task": task[:300],
                "category": str(a.manifest.tasks[task].get("category") or "")[:120],
                **{name: [pair[0][task], pair[1][task]] for name, pair in means.items()},
                "episodes": [safe_name(task, int(rows[task][0]["sample"])) for rows in graded],
            }
            for task in common[:_TASKS]
        ],
        "checks": _check_differences(graded, common),
        "alpha": plain.get("alpha", 0.05),
        "power": plain.get("power", 0.8),
    }


def _check_differences(graded: Sequence[Mapping[str, Sequence[Row]]], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """``CheckDifference`` of the checks that both runs have."""
    shares = [
        {check["name"]: check["share"] for check in _check_counts(row for task in tasks for row in rows[task])}
        for rows in graded
    ]
    both = [{"name": name, "a": share, "b": shares[1][name]} for name, share in shares[0].items() if name in shares[1]]
    return sorted(both, key=lambda check: (-abs(check["b"] - check["a"]), check["name"]))
