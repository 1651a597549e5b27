"""Check an entry of a board, whose author may have cheated (``clawgym leaderboard check``).

Invariants:

- Nothing that the entry says about its tasks is used: tasks, verifiers and baselines are those of the checker.
- Which episodes are graded again is drawn after the entry is complete, from the digest of its files and a nonce of the
  checker. Without the nonce, an author could change an unimportant byte until the draw misses the forged episodes.
  With the digest, one nonce gives one draw for one entry, so anybody can repeat the check.
- The entry's folder is not changed.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import random
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clawgym.agents import make_agent
from clawgym.agents.protocol import Agent
from clawgym.agents.replay import ReplayAgent
from clawgym.errors import ClawGymError, InfraError
from clawgym.evaluation.integrity import discrepancies
from clawgym.evaluation.progress import NoProgress, ProgressView
from clawgym.evaluation.regrade import regrade
from clawgym.evaluation.runner import episode_seed
from clawgym.evaluation.summary import summarize
from clawgym.evaluation.verification import CHANGED, DAMAGED, NOT_GRADABLE, SAME
from clawgym.leaderboards._schema import GradedRow, ManifestEntry, OtherRow
from clawgym.leaderboards.boards import BoardFolder, EntryFiles
from clawgym.records import GradingMode, Outcome, Step, Task, TaskSet, ToolCall, VerifierResult, executed_step
from clawgym.records.atif import steps_from_atif
from clawgym.records.manifest import library_version, make_manifest, now
from clawgym.records.run_folder import MANIFEST, RESULTS, TRANSCRIPT, WORKSPACE, RunFolder
from clawgym.redteam.scan import scan
from clawgym.rollout import EpisodeRequest, run_episode, transcript_payload
from clawgym.sandbox.protocol import Archive, Backend
from clawgym.verifiers.baselines import known_baseline
from clawgym.verifiers.graders import judged_by
from clawgym.verifiers.grading import Subject, grade
from clawgym.visible import visible

__all__ = ["REVIEWABLE", "CheckedRule", "EntryCheck", "check_entry", "draw"]

Row = Mapping[str, Any]
REVIEWABLE = "scan"
"""The rule whose findings a person may accept."""
_LEAST = 8
"""Least number of episodes that are graded again."""
_SHOWN = 5
_POLICIES = ("noop", "oracle", "sloppy", "gullible")
"""Agents that have no model and run the task's own files: they are run again."""
_OURS = ("script", "replay", "tool-loop")
"""Agents whose tool calls are all in their transcripts, so that these can be replayed."""
_ABOUT = ("hash", "verifier", "mode", "executes_agent_code", "judged_by", "category", "level", "unsupported")

UNPROVEN = (
    "that the named model produced the text: a transcript can be written by another model or by hand",
    "that these are the first and only attempts: an author can repeat a run, or delete episodes and run them again",
    "that tokens, costs and times are what the provider counted",
    "that the model was not trained on these tasks",
)


@dataclass(frozen=True)
class CheckedRule:
    """One rule and what was found."""

    rule: str
    passed: bool
    text: str
    """What was checked, or the first violations; escaped."""


@dataclass(frozen=True)
class EntryCheck:
    """The result of a check; :meth:`to_dict` is the record that a board stores."""

    entry: str
    digest: str
    nonce: str
    checked: str
    """ISO 8601, UTC."""
    rules: tuple[CheckedRule, ...]
    drawn: tuple[str, ...]
    """Keys of the episodes that were graded again."""
    unproven: tuple[str, ...]
    reviewed: str = ""
    """Why a person accepts the findings of the rule ``scan``."""

    @property
    def accepted(self) -> bool:
        """Whether every rule holds."""
        return all(rule.passed or (rule.rule == REVIEWABLE and self.reviewed) for rule in self.rules)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return dataclasses.asdict(self) | {"accepted": self.accepted, "library": library_version()}


def draw(keys: Sequence[str], share: float, digest: str, nonce: str) -> list[str]:
    """The keys to grade again: ``share`` of them, but at least eight, drawn by ``digest`` and ``nonce``."""
    seed = hashlib.sha256(f"{digest}:{nonce}".encode()).hexdigest()
    count = min(len(keys), max(_LEAST, math.ceil(share * len(keys))))
    return sorted(random.Random(seed).sample(sorted(keys), count))


async def check_entry(
    folder: Path,
    board: BoardFolder,
    tasks: TaskSet,
    backend: Backend,
    *,
    nonce: str = "",
    reviewed: str = "",
    progress: ProgressView | None = None,
) -> EntryCheck:
    """Check the entry in ``folder`` by the rules of ``board``.

    ``tasks``: the board's task set. ``nonce``: repeats the draw of an earlier check; a new one by default.

    Raises :class:`~clawgym.leaderboards.boards.LeaderboardError` if the folder holds files that no entry has, and
    :class:`~clawgym.errors.SandboxUnavailable` if nothing can be graded here.
    """
    files = EntryFiles(folder)
    digest, nonce = files.digest(), nonce or secrets.token_hex(16)
    rules: list[CheckedRule] = []

    def apply(rule: str, said: str, found: Iterator[str]) -> bool:
        shown: list[str] = []
        count = 0
        try:
            for line in found:
                count += 1
                if count <= _SHOWN:
                    shown.append(visible(line)[:300])
        except (ClawGymError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            count += 1
            shown.append(visible(f"cannot be read ({type(error).__name__}: {error})")[:300])
        more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
        rules.append(CheckedRule(rule, not count, said if not count else "; ".join(shown) + more))
        return not count

    def result(drawn: Sequence[str] = (), unproven: Sequence[str] = ()) -> EntryCheck:
        return EntryCheck(
            folder.resolve().name,
            digest,
            nonce,
            now(),
            tuple(rules),
            tuple(drawn),
            (*UNPROVEN, *unproven),
            reviewed,
        )

    if not apply("schema", f"{len(files.names)} files, all of known kinds and sizes", _schema(files)):
        return result()
    run = RunFolder.read(folder)
    if not apply("tasks", f"{len(tasks)} tasks with the board's contents and verifiers", _tasks(run, tasks, board)):
        return result()
    graded = {key: row for key, row in run.latest.items() if row["outcome"] not in (Outcome.INFRA, Outcome.UNSUPPORTED)}
    complete = apply("counts", f"{len(graded)} episodes, each with one result", _counts(run, tasks))
    apply("rows", "checksums, seeds and scores fit the run manifest", _rows(run, tasks, graded))
    limit = board.rules.max_infra_rate
    rate = summarize(run).infra_rate
    apply("infrastructure", f"{100 * rate:.1f} % of the attempts, at most {100 * limit:g} %", _infra(rate, limit))
    apply("transcripts", "one for each episode, with its counts", _transcripts(run, files, graded, board, folder))
    apply("workspaces", "stored for each episode with a score", _workspaces(files, run, tasks, graded))
    whole = all(rule.passed for rule in rules)
    apply(REVIEWABLE, "no attempt at tampering found in transcripts and workspaces", _scan(folder))
    if not complete or not whole:
        return result()
    scored = [key for key, row in graded.items() if _scored(row)]
    drawn = draw(scored, board.rules.share, digest, nonce)
    outcome = await _Again(run, files, tasks, backend, progress or NoProgress()).grade(drawn)
    said = f"{len(drawn)} of {len(scored)} episodes with a score: the same results"
    apply("grading again", said, iter(outcome.changed))
    apply("replay", outcome.replays, iter(outcome.unexplained))
    notes = [_missed(len(scored), len(drawn))] if len(drawn) < len(scored) else []
    return result(drawn, [*outcome.unproven, *notes])


def _missed(scored: int, drawn: int) -> str:
    """How likely it is that the draw misses forged episodes."""
    forged = max(1, math.ceil(0.1 * scored))
    missed = math.comb(scored - forged, drawn) / math.comb(scored, drawn) if drawn <= scored - forged else 0.0
    return (
        f"the {scored - drawn} episodes that were not drawn: if {forged} of {scored} were forged, this draw would miss "
        f"all of them with probability {missed:.2f}"
    )


# -- rules; each yields the violations


def _schema(files: EntryFiles) -> Iterator[str]:
    for name, model in ((MANIFEST, ManifestEntry), (RESULTS, None)):
        lines = [files.read(name)] if model else files.read(name).split(b"\n")
        if model is None and lines.pop() != b"":
            yield f"{name} does not end with a whole line"
        for number, line in enumerate(lines, 1):
            where = name if model else f"{name}, line {number}"
            try:
                raw = json.loads(line)
                kind = raw.get("outcome") if isinstance(raw, dict) else None
                other = OtherRow if kind in ("infra", "unsupported") else GradedRow
                (model or other).model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                yield f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
            except (ValueError, RecursionError) as error:
                yield f"{where}: {error}"


def _tasks(run: RunFolder, tasks: TaskSet, board: BoardFolder) -> Iterator[str]:
    """The manifest must have exactly the tasks that the checker has."""
    manifest = run.manifest
    trusted = make_manifest(
        "eval",
        tasks,
        baselines={task.id: value for task in tasks.tasks if (value := known_baseline(task)) is not None},
        judged={task.id: judged_by(task.verifier) for task in tasks.tasks},
    )
    if manifest.task_set.get("hash") != tasks.content_hash:
        yield f"the task set has the hash {str(manifest.task_set.get('hash'))[:12]}, not {tasks.content_hash[:12]}"
    if list(manifest.tasks) != list(trusted.tasks):
        strange = [*(set(manifest.tasks) ^ set(trusted.tasks))]
        yield f"other tasks than the board's, or another order: {sorted(strange)[:3]}"
    for task, about in trusted.tasks.items():
        given = manifest.tasks.get(task, {})
        for name in _ABOUT:
            if given.get(name) != about.get(name) and not (name == "unsupported" and about.get(name)):
                yield f"task {task}: {name} is {str(given.get(name))[:40]!r}, not {str(about.get(name))[:40]!r}"
        if "floor" in about and given.get("floor") != about["floor"]:
            yield f"task {task}: the no-model baseline (floor) is {given.get('floor')}, not {about['floor']}"
    if manifest.samples < board.rules.samples:
        yield f"{manifest.samples} episodes per task, and the board needs {board.rules.samples}"
    for name, value in dict(manifest.config.get("limits") or {}).items():
        if any(value > getattr(task.limits, name) for task in tasks.tasks):
            yield f"the limit {name} was raised to {value}"


def _counts(run: RunFolder, tasks: TaskSet) -> Iterator[str]:
    manifest = run.manifest
    keys = {f"{task}#{sample}" for task in manifest.tasks for sample in range(manifest.samples)}
    finals: dict[str, int] = {}
    for number, row in enumerate(run.rows, 1):
        if row["key"] not in keys:
            yield f"line {number}: {row['key']} is no episode of this run"
        if row["outcome"] == Outcome.UNSUPPORTED and not tasks.by_id[row["task_id"]].unsupported:
            yield f"{row['key']}: unsupported, and the task can run here"
        if row["outcome"] != Outcome.INFRA:
            finals[row["key"]] = finals.get(row["key"], 0) + 1
    for key in sorted(keys):
        if finals.get(key, 0) != 1 and not tasks.by_id[key.rpartition("#")[0]].unsupported:
            yield f"{key}: {finals.get(key, 0)} results, not 1"


def _rows(run: RunFolder, tasks: TaskSet, graded: Mapping[str, Row]) -> Iterator[str]:
    for key, lines in discrepancies(run).items():
        yield f"{key}: {lines[0]}"
    agent = run.manifest.agent.get("name")
    for key, row in graded.items():
        task, result = tasks.by_id[row["task_id"]], row["result"] or {}
        if row["seed"] != episode_seed(run.manifest.seed, task.content_hash, row["sample"]):
            yield f"{key}: its seed is not the one of this run, task and sample"
        if row["agent"] != agent:
            yield f"{key}: by {row['agent']!r}, and the run is of {agent!r}"
        if not result and row["outcome"] == Outcome.SOLVED:
            yield f"{key}: solved without a result"
        if result and result["strict"] not in (0, 1):
            yield f"{key}: strict is {result['strict']}, not 0 or 1"
        if result and result["mode"] != str(task.verifier.mode):
            yield f"{key}: graded in mode {result['mode']}, and the task is graded in mode {task.verifier.mode}"
        if result and result["verifier_hash"] != task.verifier.digest and (result["checks"] or _scored(row)):
            yield f"{key}: graded by another verifier"
        if result and bool(result["judged_by"]) and not judged_by(task.verifier):
            yield f"{key}: judged by a model, and the task is graded by code"
        if result.get("cause") and _scored(row):
            yield f"{key}: has a score although its grading failed ({result['cause']})"


def _infra(rate: float, limit: float) -> Iterator[str]:
    if rate > limit:
        yield (
            f"{100 * rate:.1f} % of the attempts ended by an infrastructure error, more than {100 * limit:g} %: each "
            "was tried again"
        )


def _transcripts(
    run: RunFolder, files: EntryFiles, graded: Mapping[str, Row], board: BoardFolder, folder: Path
) -> Iterator[str]:
    elsewhere = _transcripts_elsewhere(board, folder)
    for key, row in graded.items():
        name = f"{run.place_of(row)}/{TRANSCRIPT}"
        if name not in files.names:
            yield f"{key}: no transcript"
            continue
        data = files.read(name)
        digest = hashlib.sha256(data).hexdigest()
        if digest != row["files"].get(TRANSCRIPT):
            yield f"{key}: its transcript is not the one of its result"
        if digest in elsewhere:
            yield f"{key}: its transcript is the one of entry {elsewhere[digest]}"
        yield from (f"{key}: {why}" for why in _transcript(json.loads(data), row))


def _transcripts_elsewhere(board: BoardFolder, folder: Path) -> dict[str, str]:
    """Digest -> entry, of the transcripts of the other entries."""
    found: dict[str, str] = {}
    for name in board.names:
        if board.entry(name).resolve() == folder.resolve():
            continue
        try:
            rows = RunFolder.read(board.entry(name)).rows
            found |= {str((row.get("files") or {}).get(TRANSCRIPT)): name for row in rows}
        except (ClawGymError, AttributeError):
            continue
    return found


def _transcript(document: Any, row: Row) -> Iterator[str]:
    """The contradictions between a transcript and its row."""
    steps = steps_from_atif(document)
    about, totals = document["extra"]["clawgym"], document["final_metrics"]
    same = {
        "task": (about["task_id"], row["task_id"]),
        "task content": (about["task_hash"], row["task_hash"]),
        "sample": (about["sample"], row["sample"]),
        "seed": (about["seed"], row["seed"]),
        "outcome": (about["outcome"], row["outcome"]),
        "final message": (about["final_message"][: len(row["final_message"])], row["final_message"]),
        "number of steps": (len(steps), row["steps"]),
        "number of tool calls": (sum(len(step.tool_calls) for step in steps), row["tool_calls"]),
        "prompt tokens": (totals["total_prompt_tokens"], row["usage"].get("prompt_tokens", 0)),
        "completion tokens": (totals["total_completion_tokens"], row["usage"].get("completion_tokens", 0)),
        "cost": (totals.get("total_cost_usd"), row["usage"].get("cost_usd")),
    }
    yield from (f"the {what} is {str(one)[:60]!r} in the transcript and {str(two)[:60]!r} in the result"
                for what, (one, two) in same.items() if one != two)  # fmt: skip
    counted = [step.usage for step in steps if step.usage is not None]
    for name in ("prompt_tokens", "completion_tokens"):
        total = sum(getattr(usage, name) for usage in counted)
        if total > row["usage"].get(name, 0):
            yield f"the steps have {total} {name}, more than the {row['usage'].get(name, 0)} of the result"


def _workspaces(files: EntryFiles, run: RunFolder, tasks: TaskSet, graded: Mapping[str, Row]) -> Iterator[str]:
    for key, row in graded.items():
        if not _scored(row) or not _gradable(tasks.by_id[row["task_id"]]):
            continue
        name = f"{run.place_of(row)}/{WORKSPACE}"
        if name not in files.names:
            yield f"{key}: has a score and no workspace"
        elif hashlib.sha256(files.read(name)).hexdigest() != row["files"].get(WORKSPACE):
            yield f"{key}: its workspace is not the one of its result"


def _scan(folder: Path) -> Iterator[str]:
    for one in scan(folder).findings:
        place = f"turn {one.turn}" if one.turn is not None else "workspace"
        yield f"{one.episode}, {place}: {one.kind}: {one.evidence[:160]}"


def _scored(row: Row) -> bool:
    result = row["result"] or {}
    return any((result.get(name) or 0) > 0 for name in ("strict", "official", "corrected"))


def _gradable(task: Task) -> bool:
    """Whether a workspace alone can be graded again: not in other modes, and not by a model."""
    return task.verifier.mode is GradingMode.CLEAN and not judged_by(task.verifier)


# -- grading again


@dataclass(frozen=True)
class _Graded:
    changed: list[str]
    unexplained: list[str]
    replays: str
    unproven: list[str]


class _Again:
    """Grades drawn episodes again, and replays their transcripts."""

    def __init__(
        self, run: RunFolder, files: EntryFiles, tasks: TaskSet, backend: Backend, progress: ProgressView
    ) -> None:
        self._run = run
        self._files = files
        self._tasks = tasks
        self._backend = backend
        self._progress = progress

    async def grade(self, keys: Sequence[str]) -> _Graded:
        rows = [self._run.latest[key] for key in keys]
        possible = [row for row in rows if _gradable(self._tasks.by_id[row["task_id"]])]
        changed = await self._changed(possible)
        unexplained: list[str] = []
        replayed, others = 0, 0
        for row in possible:
            outcome = await self._replayed(row)
            if outcome is None:
                others += 1
            else:
                replayed += 1
                unexplained += [f"{row['key']}: {outcome}"] if outcome else []
        unproven = []
        if others:
            unproven.append(f"that {others} drawn workspaces come from their transcripts, which cannot be replayed")
        if skipped := len(rows) - len(possible):
            unproven.append(f"the results of {skipped} drawn episodes, which need more than the workspace to be graded")
        said = f"{replayed} drawn episodes: their tool calls lead to the same results"
        return _Graded(changed, unexplained, said if replayed else "nothing to replay", unproven)

    async def _changed(self, rows: Sequence[Row]) -> list[str]:
        if not rows:
            return []
        with tempfile.TemporaryDirectory(prefix="clawgym-check-") as scratch:
            copy = self._copy(rows, Path(scratch))
            record = await regrade(RunFolder.read(copy), self._tasks, self._backend, progress=self._progress)
        found = []
        for row in rows:
            entry = record.episodes.get(row["key"], {"outcome": DAMAGED, "why": ["it was not graded"]})
            if entry["outcome"] != SAME or entry.get("other_task"):
                words = {CHANGED: "another result", NOT_GRADABLE: "cannot be graded", DAMAGED: "damaged"}
                new = entry.get("new") or {}
                scores = f" (strict {new.get('strict')}, official {new.get('official')})" if new else ""
                what = words.get(str(entry["outcome"]), "no result because of an infrastructure error: check again")
                found.append(f"{row['key']}: {what}{scores}: {'; '.join(entry['why'])}")
        return found

    def _copy(self, rows: Sequence[Row], scratch: Path) -> Path:
        """A run folder with these rows only, and the files of their episodes."""
        manifest = json.loads(self._files.read(MANIFEST))
        ids = {row["task_id"] for row in rows}
        manifest["tasks"] = {task: about for task, about in manifest["tasks"].items() if task in ids}
        (scratch / MANIFEST).write_text(json.dumps(manifest))
        (scratch / RESULTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        places = tuple(f"{self._run.place_of(row)}/" for row in rows)
        for name in self._files.names:
            if name.startswith(places) or name.startswith("pictures/"):
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                (scratch / name).write_bytes(self._files.read(name))
        return scratch

    async def _replayed(self, row: Row) -> str | None:
        """Empty if the tool calls of the transcript lead to the stored result, a description if they do not, and
        ``None`` if they cannot be replayed."""
        task = self._tasks.by_id[row["task_id"]]
        document = json.loads(self._files.read(f"{self._run.place_of(row)}/{TRANSCRIPT}"))
        steps = steps_from_atif(document)
        calls = [call for step in steps for call in executed_step(step).tool_calls]
        policy, ours = row["agent"] in _POLICIES, row["agent"] in _OURS
        if not policy and (task.brings_tools or (not ours and not _shell_only(calls))):
            return None
        agent = make_agent(row["agent"]) if policy else ReplayAgent({task.id: [calls]})
        try:
            result = await self._from_agent(task, row, agent, steps, document)
        except InfraError as error:
            return f"an infrastructure error ({error}): check again"
        except ClawGymError as error:
            return f"its tool calls cannot be replayed ({str(error)[:120]})" if ours else None
        stored = row["result"]
        if result.strict >= stored["strict"] and result.official >= stored["official"] - 1e-9:
            return ""
        return (
            f"its tool calls lead to strict {result.strict:g} and official {result.official:g}, not to "
            f"{stored['strict']:g} and {stored['official']:g}"
        )

    async def _from_agent(
        self, task: Task, row: Row, agent: Agent, steps: Sequence[Step], document: Mapping[str, Any]
    ) -> VerifierResult:
        """Let ``agent`` work in a fresh sandbox, and grade what it leaves with the stored transcript."""
        request = EpisodeRequest(task=task, seed=row["seed"], sample=row["sample"])
        episode = (await run_episode(request, agent, self._backend)).episode
        if episode.outcome == Outcome.INFRA or episode.workspace is None:
            raise InfraError(str(episode.cause or "no workspace"))
        subject = Subject(
            Archive(gzip.decompress(episode.workspace)),
            final_message=str(document["extra"]["clawgym"]["final_message"]),
            transcript=transcript_payload(steps),
        )
        return await grade(task.frozen(), subject, self._backend, baseline=(row["result"] or {}).get("floor"))


def _shell_only(calls: Sequence[ToolCall]) -> bool:
    return bool(calls) and all(call.name == "bash" and set(call.arguments) <= {"command"} for call in calls)
