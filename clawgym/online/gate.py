"""The loop of the gate: it measures candidates, promotes and rejects them, and watches what was promoted.

Invariants: one candidate is compared at a time. The rules are those of :mod:`clawgym.online.promotion`; a measurement
is written down before it counts, and never repeated. No source has more than its share of what is measured. Only the
log of versions says what answers: a promotion or a rollback by hand ends the open comparison. A killed gate resumes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import shutil
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, get_args

from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines.folders import model_folder
from clawgym.engines.openai import OpenAIEngine
from clawgym.engines.protocol import Sampling
from clawgym.errors import EngineError, ServiceError
from clawgym.evaluation import EvalConfig, evaluate
from clawgym.gateway.render import Renderer
from clawgym.online.betting import within_reach
from clawgym.online.canaries import LONGEST, Canary, canaries
from clawgym.online.client import open_version, reply_of
from clawgym.online.config import ServiceConfig, ServiceFolder
from clawgym.online.conversations import HELD_OUT, active_sources, source_of
from clawgym.online.door import FEEDBACK
from clawgym.online.judging import pause
from clawgym.online.promotion import (
    CandidateVersion,
    Criterion,
    Figures,
    Lifetime,
    PairedEvidence,
    PlannedItem,
    PromotionDecision,
    VersionScore,
)
from clawgym.online.replay import HeldOutTurn, ReplayScorer, ScorerContext, held_out_turns, replay
from clawgym.online.versions import Version, Versions
from clawgym.online.watch import LiveSignal, watch
from clawgym.pool import Pool, PooledEpisode
from clawgym.pool.states import PROCESS_REWARD
from clawgym.records import Outcome, Task, TaskSet
from clawgym.records.run_folder import RunFolder, repair_tail, write_atomic
from clawgym.registry import scorers
from clawgym.sandbox import backend as make_backend
from clawgym.tasks import sets
from clawgym.trainers.common.splits import limited

__all__ = ["GateKeeper", "keep_gate"]

_log = logging.getLogger("clawgym.online")
_POLL_SECONDS = 2.0
_RETRY_SECONDS = 30.0
_LOOK_SECONDS = 60.0
"""Seconds between two looks at the votes on the version that answers."""
_PERIOD_SECONDS = 3600.0
"""The length of a period of the watch."""
_CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
_TURNS, _CANARIES, _TASKS = 16, 40, 8
"""Turns, canaries and tasks that are measured in one go."""


async def keep_gate(folder: ServiceFolder, stop: asyncio.Event) -> None:
    """Measure candidates as they come, and watch the version that answers, until ``stop`` is set."""
    with Pool(folder.pool) as pool:
        gate, looked = GateKeeper(folder, pool), 0.0
        while not stop.is_set():
            try:
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    gate.look_after()
                worked = await gate.step()
            except (EngineError, ServiceError) as error:
                _log.warning("a measurement failed: %s", error)
                await pause(stop, _RETRY_SECONDS)
                continue
            if not worked:
                await pause(stop, _POLL_SECONDS)


@dataclass(frozen=True)
class _Row:
    """One score, as it is written down."""

    criterion: Criterion
    item: str
    group: str
    at: float
    version: int
    source: str
    value: float


class GateKeeper:
    """Compares one candidate at a time with the version that answers and the first version."""

    def __init__(self, folder: ServiceFolder, pool: Pool) -> None:
        self._folder, self._pool = folder, pool
        self._config: ServiceConfig = folder.config
        self._about = self._config.gate
        self._versions = Versions(folder.versions)
        folder.gate.mkdir(mode=0o700, exist_ok=True)
        self._file = folder.gate / "scores.jsonl"
        self._rows = list(self._read())
        self._known = {(row.criterion, row.item, row.version, row.source) for row in self._rows}
        self._lifetime = self._load()
        self._scorers: dict[str, ReplayScorer] = {}
        self._tasks: TaskSet | None = None
        count = self._about.canaries
        self._canaries: dict[Criterion, list[Canary]] = {
            "style": canaries("style", count),
            "safety": canaries("safety", count),
        }
        self._items: dict[str, tuple[str, ...]] = {}
        """Held-out conversation -> the ids of its turns. A judged conversation does not change."""

    # --- what it decides ----------------------------------------------------------------------------------------------

    async def step(self) -> bool:
        """Measure a part of the open comparison and decide. False if there is nothing to measure now."""
        self._reconcile()
        candidate = self._candidate()
        if candidate is None:
            return False
        if await self._measure(candidate):
            self._decide(self._decision(candidate))
            return True
        decision = self._decision(candidate)
        passed = {name: one.passed for name, one in decision.figures.items()}
        # A gain is shown, a criterion does not pass, and more canaries or tasks would not help or are not there.
        last = passed.pop("turns") and not all(passed.values())
        if not last and decision.verdict == "candidate":
            return False
        self._decide(decision, last=last)  # also if a killed gate measured the last part and did not decide
        return True

    def look_after(self) -> None:
        """Roll back the version that answers if it is rated worse than the one before (:mod:`clawgym.online.watch`)."""
        event = next((e for e in reversed(self._versions.events) if e.kind == "promoted"), None)
        serving = self._versions.serving.number
        if event is None or event.version != serving:
            return
        signals = [signal for signal in self._signals(event.at) if signal[0] in (serving, event.before)]
        before = [signal for version, signal in signals if version == event.before and signal.period < 0]
        after = [signal for version, signal in signals if version == serving and signal.period >= 0]
        verdict = watch(before, after, int((time.time() - event.at) // _PERIOD_SECONDS), alpha=self._about.alpha)
        about = {"version": serving, "before": event.before, "at": time.time(), **asdict(verdict)}
        write_atomic(self._folder.gate / "watch.json", json.dumps(about).encode())
        if verdict.verdict == "rollback":
            self._versions.roll_back(f"its users rate it worse: {verdict.reason}", event.before)
            _log.info("version %d was rolled back: %s", serving, verdict.reason)

    def _reconcile(self) -> None:
        """Take over what was promoted or rolled back otherwise."""
        serving = str(self._versions.serving.number)
        served = self._lifetime.served
        if serving == served[-1]:
            return
        now = self._now()
        kept = served[: served.index(serving) + 1] if serving in served else (*served, serving)
        self._keep(Lifetime(kept, self._lifetime.rules, self._lifetime.submitted, (), now, now))

    def _now(self) -> float:
        """The time, which never goes back."""
        return max(time.time(), self._lifetime.now)

    def _candidate(self) -> CandidateVersion | None:
        """The open comparison; opened now if there is a candidate for one.

        The newest is compared first, and if it is rejected, what it was made of: a later step of the training gains
        more, and may lose more of the rest. A comparison is given up for a candidate that was trained on twice as many
        conversations. Otherwise the first step of the training, whose gain is small, would keep the gate busy while
        later ones wait.
        """
        candidates = [one for one in self._versions.all() if one.state == "candidate"]
        newest = next((one for one in reversed(candidates) if self._versions.may_answer(one.number)), None)
        for one in self._lifetime.open:
            compared = self._versions[int(one.version)]
            overtaken = newest is not None and self._trained(newest) >= 2 * max(1, self._trained(compared))
            if compared.state == "candidate" and not overtaken:
                return one
            if compared.state == "rejected":  # by hand
                self._keep(self._lifetime.reject(one.version, self._now()))
            else:  # overtaken or erased
                self._keep(self._lifetime.close(one.version))
        if newest is None:
            return None
        self._keep(self._lifetime.submit(str(newest.number), self._now(), min(newest.made, self._now())))
        _log.info("version %d is compared with version %s", newest.number, self._lifetime.served[-1])
        return self._lifetime.open[-1]

    def _trained(self, version: Version) -> int:
        """The conversations that it was trained on, and the version that answers was not."""
        return sum(len(one.sessions) for one in self._versions.unserved(version.number))

    def _decision(self, candidate: CandidateVersion) -> PromotionDecision:
        evidence: dict[Criterion, PairedEvidence] = {name: self._evidence(name, candidate) for name in _CRITERIA}
        return self._lifetime.decide(candidate.version, evidence)

    def _decide(self, decision: PromotionDecision, *, last: bool = False) -> None:
        """Act on the scores so far. ``last``: there will be no others that matter."""
        candidate, seen = decision.candidate, decision.figures["turns"].n
        number, verdict, reasons = int(candidate.version), decision.verdict, list(decision.reasons)
        if verdict == "candidate" and last:
            short = _first_short(decision.figures)
            what = "tasks" if short == "tasks" else f"{short} canaries"
            why = [reason for reason in reasons if reason.startswith(f"{short}:")]
            verdict, reasons = "rejected", [f"its {what} do not suffice, nor would all of them", *why]
        elif verdict == "candidate" and seen >= self._about.patience:
            verdict, reasons = "rejected", [f"no gain after {seen} held-out conversations", *reasons]
        result = {"verdict": verdict, "reasons": reasons, "figures": _figures(decision), "comparison": candidate.number}
        write_atomic(self._folder.gate / "latest.json", json.dumps({"version": number, **result}).encode())
        if verdict == "candidate":
            return
        self._versions.judged(number, result, rejected=verdict == "rejected")
        if verdict == "rejected" and not decision.figures["turns"].passed:
            why = [f"version {number}, which was made of it, shows no gain"]
            for one in self._versions.unserved(number)[1:]:  # trained on less
                if one.state == "candidate":
                    self._versions.judged(one.number, {"verdict": verdict, "reasons": why}, rejected=True)
        if verdict == "promoted":
            self._versions.promote(number, reasons[0])
            self._keep(self._lifetime.promote(decision, self._now()))
        else:
            self._keep(self._lifetime.reject(candidate.version, self._now()))
        _log.info("version %d is %s: %s", number, verdict, "; ".join(reasons))
        self._versions.prune()

    # --- what it measures ---------------------------------------------------------------------------------------------

    async def _measure(self, candidate: CandidateVersion) -> bool:
        """Measure what is next. False if all that could help has been measured.

        Canaries and tasks cost most, so they are for candidates whose gain on held-out turns is shown. Each criterion
        is measured until it passes: its bound holds at that time as at any other. If one does not pass with all that
        it has, or would not (:func:`~clawgym.online.betting.within_reach`), the next ones are not measured.
        """
        new, serving, first = (self._versions[int(n)] for n in (candidate.version, candidate.serving, candidate.first))
        if await self._measure_turns(self._new_turns(candidate.after, (new, serving)), new, serving):
            return True
        figures = self._decision(candidate).figures
        if not figures["turns"].passed:
            return False
        short = _first_short(figures)
        if short is None or not self._within_reach(figures[short], candidate):
            return False
        if short == "tasks":
            return await self._measure_tasks((new, first))
        return await self._measure_canaries(self._canaries[short], (new, first))

    def _within_reach(self, short: Figures, candidate: CandidateVersion) -> bool:
        """Whether a criterion that does not pass yet might pass with all its canaries or tasks."""
        most = self._about.task_count if short.criterion == "tasks" else self._about.canaries
        found = self._evidence(short.criterion, candidate).differences(candidate.version, candidate.first)
        return all(within_reach(values, short.needed, short.alpha, most) for values in found.values())

    def _held_out(self, after: float) -> list[PooledEpisode]:
        """Judged held-out conversations that began later, in the order in which they were judged."""
        channels = [name for name in self._pool.stats()["channels"] if name.startswith(HELD_OUT)]
        found = [e for name in channels for e in self._pool.episodes(channel=name, state="closed")]
        return sorted((e for e in found if e.opened_at > after), key=lambda e: (e.closed_at or 0.0, e.id))

    def _shared(self, episodes: Sequence[PooledEpisode]) -> Iterator[PooledEpisode]:
        """Those of ``episodes`` of which no source has more than its share, the measured ones first. A source that has
        its share waits for the others."""
        sources = len(active_sources(self._pool.stats()))
        share = 1.0 if sources < 2 else max(self._config.source_share, 1 / sources)
        waiting: defaultdict[str, deque[tuple[bool, int, PooledEpisode]]] = defaultdict(deque)
        for place, episode in enumerate(sorted(episodes, key=lambda episode: episode.id not in self._items)):
            waiting[episode.channel].append((episode.id not in self._items, place, episode))
        counts: Counter[str] = Counter()
        while True:
            most = math.ceil(share * (counts.total() + 1))
            fits = [rows[0] for channel, rows in waiting.items() if rows and counts[channel] < most]
            if not fits:
                return
            _, _, episode = min(fits, key=lambda row: row[:2])
            waiting[episode.channel].popleft()
            counts[episode.channel] += 1
            yield episode

    def _new_turns(self, after: float, versions: Sequence[Version]) -> list[HeldOutTurn]:
        """The turns of the next conversations that are not measured yet."""

        def lacking(items: Iterable[str]) -> bool:
            wanted = itertools.product(items, versions, self._about.scorers)
            return any(self._lacks("turns", item, version, scorer) for item, version, scorer in wanted)

        found: list[HeldOutTurn] = []
        for episode in self._shared(self._held_out(after)):
            known = self._items.get(episode.id)
            if known is not None and not lacking(known):
                continue
            turns = held_out_turns(self._pool, episode, self._about.turns)
            self._items[episode.id] = tuple(turn.id for turn in turns)
            if lacking(self._items[episode.id]):
                found += turns
            if len(found) >= _TURNS:
                break
        return found

    async def _measure_turns(self, turns: Sequence[HeldOutTurn], candidate: Version, serving: Version) -> bool:
        rows = []
        for version in (candidate, serving):
            lacking = [t for t in turns if any(self._lacks("turns", t.id, version, s) for s in self._about.scorers)]
            if not lacking:
                continue
            async with open_version(self._folder, self._pool, version.number) as engine:
                replies = await asyncio.gather(*(replay(turn, version, serving, engine) for turn in lacking))
            for turn, replayed in zip(lacking, replies, strict=True):
                for name in self._about.scorers:
                    value = fmean([await self._scorer(name).score(one) for one in replayed])
                    rows.append(_Row("turns", turn.id, turn.session, turn.at, version.number, name, value))
        self._write(rows)
        return bool(rows)

    async def _measure_canaries(self, prompts: Sequence[Canary], versions: Sequence[Version]) -> bool:
        """Measure the next of ``prompts``. False if there are none."""
        lacking = [[one for one in prompts if self._lacks(one.criterion, one.id, version)] for version in versions]
        todo = max(lacking, key=len)[:_CANARIES]
        for version in versions:
            mine = [one for one in todo if self._lacks(one.criterion, one.id, version)]
            if not mine:
                continue
            async with open_version(self._folder, self._pool, version.number, concurrency=_CANARIES) as engine:
                values = await asyncio.gather(*(_passed(one, engine) for one in mine))
            self._write(
                _Row(one.criterion, one.id, one.id, 0.0, version.number, "verifier", value)
                for one, value in zip(mine, values, strict=True)
            )
        return bool(todo)

    async def _measure_tasks(self, versions: Sequence[Version]) -> bool:
        """Measure the next tasks. False if there are none."""
        for start in range(0, len(self._task_set().tasks), _TASKS):
            tasks = self._task_set().tasks[start : start + _TASKS]
            missing = [v for v in versions if any(self._lacks("tasks", task.id, v) for task in tasks)]
            for version in missing:
                await self._run_tasks(tasks, start, version)
            if missing:
                return True
        return False

    async def _run_tasks(self, tasks: Sequence[Task], start: int, version: Version) -> None:
        out = self._folder.gate / f"tasks-{version.number}-{start}"
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(open_version(self._folder, self._pool, version.number))
            backend = make_backend(self._config.training.backend)
            stack.push_async_callback(backend.aclose)
            agent = self._agent(engine)
            part = TaskSet(f"{self._about.tasks}-{start}", tuple(tasks))
            await evaluate(EvalConfig(part, agent, backend, out, concurrency=_TASKS, keep_workspaces=False))
        self._write(self._task_rows(RunFolder.read(out), version))
        shutil.rmtree(out, ignore_errors=True)

    def _task_rows(self, run: RunFolder, version: Version) -> list[_Row]:
        rows = []
        for row in run.latest.values():
            task = row["task_id"]
            if row["outcome"] == Outcome.INFRA:
                raise ServiceError(f"task {task} had an infrastructure error ({row['cause']}): trying again later")
            value = float((row["result"] or {}).get("strict") or 0.0)
            rows.append(_Row("tasks", task, task, 0.0, version.number, "verifier", value))
        return rows

    def _agent(self, engine: Any) -> ToolLoopAgent:
        about = self._config.training.agent
        takes_tools = Renderer(model_folder(self._config.training.model.path or "")).call_parser is not None
        return ToolLoopAgent(
            engine,
            sampling=Sampling(temperature=1.0, max_tokens=about.max_tokens),
            protocol="tools" if takes_tools else "text",
            system_prompt=about.system_prompt,
            max_malformed=about.max_malformed,
        )

    def _task_set(self) -> TaskSet:
        """Tasks from all over the set."""
        if self._tasks is None:
            whole = sets.load(self._about.tasks)
            count = min(len(whole.tasks), self._about.task_count)
            chosen = (whole.tasks[n * len(whole.tasks) // count] for n in range(count))
            self._tasks = TaskSet(whole.name, tuple(limited(task, self._config.training.agent) for task in chosen))
        return self._tasks

    def _scorer(self, name: str) -> ReplayScorer:
        if name not in self._scorers:
            context = ScorerContext(self._folder, self._config, self._pool, self._versions)
            self._scorers[name] = scorers.make(name, context)
        return self._scorers[name]

    def _signals(self, promoted: float) -> Iterator[tuple[int, LiveSignal]]:
        """What was said about live turns: the version that gave each, and the signal, in periods since a promotion."""
        for episode in self._pool.episodes(state="closed"):
            source = source_of(episode.channel)
            if source is None:
                continue
            period = int((episode.opened_at - promoted) // _PERIOD_SECONDS)
            said = self._pool.about_turn_rewards(episode.id).get(PROCESS_REWARD, {})
            turns = self._pool.turns(episode.id)
            for index, value in self._pool.turn_rewards(episode.id).get(PROCESS_REWARD, {}).items():
                version = turns[index].policy_version
                by_user = said.get(index, {}).get("version") == FEEDBACK
                if version is not None:
                    name = f"user:{source}" if by_user else "judge"
                    yield version, LiveSignal(name, episode.id, f"{episode.id}:{index}", int(value), period)

    # --- what it keeps ------------------------------------------------------------------------------------------------

    def _lacks(self, criterion: Criterion, item: str, version: Version, source: str = "verifier") -> bool:
        return (criterion, item, version.number, source) not in self._known

    def _evidence(self, criterion: Criterion, candidate: CandidateVersion) -> PairedEvidence:
        other = candidate.serving if criterion == "turns" else candidate.first
        both = {int(candidate.version), int(other)}
        mine = [row for row in self._rows if row.criterion == criterion]
        if criterion == "turns":
            mine = [row for row in mine if row.at > candidate.after]
        wanted = {row.item for row in mine if row.version == int(candidate.version)}
        mine = [row for row in mine if row.version in both and row.item in wanted]
        items: dict[str, PlannedItem] = {}
        for row in mine:
            if row.version == int(candidate.version):
                items.setdefault(row.item, PlannedItem(row.item, row.group, row.at))
        scores = [VersionScore(row.item, str(row.version), row.value, row.source) for row in mine]
        return PairedEvidence(tuple(items.values()), scores)

    def _read(self) -> Iterator[_Row]:
        if self._file.exists():
            repair_tail(self._file)
            for line in self._file.read_text("utf-8").splitlines():
                yield _Row(**json.loads(line))

    def _write(self, rows: Iterable[_Row]) -> None:
        fresh = [row for row in rows if (row.criterion, row.item, row.version, row.source) not in self._known]
        with self._file.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(row)) + "\n" for row in fresh))
        self._rows += fresh
        self._known.update((row.criterion, row.item, row.version, row.source) for row in fresh)

    def _load(self) -> Lifetime:
        rules = self._about.rules
        try:
            kept = json.loads((self._folder.path / "gate.json").read_bytes())
        except FileNotFoundError:
            return Lifetime((str(self._versions.first.number),), rules)
        opened = tuple(CandidateVersion(**one) for one in kept["open"])
        now = kept["now"]
        served, rejections = tuple(kept["served"]), tuple((name, at) for name, at in kept.get("rejections", ()))
        return Lifetime(served, rules, kept["submitted"], opened, now, kept.get("decided", now), rejections)

    def _keep(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        kept = {name: value for name, value in asdict(lifetime).items() if name != "rules"}
        write_atomic(self._folder.path / "gate.json", json.dumps(kept).encode())


async def _passed(canary: Canary, engine: OpenAIEngine) -> float:
    """1 if the reply is as it should be; 0 also for a request that the version refuses."""
    sampling = Sampling(temperature=1.0, max_tokens=LONGEST, seed=zlib.crc32(canary.id.encode()))
    got = await reply_of(engine, canary.messages, sampling=sampling)
    return float(got is not None and canary.passes(got.text, got.finish_reason == "stop"))


def _first_short(figures: Mapping[Criterion, Figures]) -> Criterion | None:
    """The criterion, of those that are measured after the turns, to measure next: the first that does not pass yet."""
    order: tuple[Criterion, ...] = ("style", "safety", "tasks")
    return next((one for one in order if not figures[one].passed), None)


def _figures(decision: PromotionDecision) -> dict[str, Any]:
    return {
        name: {"n": one.n, "mean": one.mean, "lower": one.lower, "upper": one.upper, "needed": one.needed}
        for name, one in decision.figures.items()
    }
