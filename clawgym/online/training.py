"""The loop that trains: each step makes a version from the conversations that have been judged.

Invariants: a conversation is trained on once, also if this process is killed at any moment: a checkpoint, then the
version, then the acknowledgement to the pool. Held-out and private conversations are in no batch. One source has at
most ``source_share`` of a step if several speak; training waits for the others. It goes on from versions that may still
answer: where one was rejected, rolled back or erased, it starts again from the newest that may. That is what the gate
compares next, or the version that answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clawgym.engines.folders import model_folder
from clawgym.errors import ServiceError, ServiceUnreachable, TrainingError
from clawgym.gateway.render import Renderer
from clawgym.offload import in_update_thread
from clawgym.online.config import FAILED_STEP, ServiceConfig, ServiceFolder
from clawgym.online.conversations import CHANNEL, active_sources, waiting_sources
from clawgym.online.corrections import accepted_replies
from clawgym.online.elsewhere import RemotePool, RemoteVersions, ServiceLink
from clawgym.online.judging import pause
from clawgym.online.rehearsal import rehearsed_replies
from clawgym.online.versions import Version, Versions
from clawgym.pool import Pool
from clawgym.pool.states import Batch, BatchEpisode, BatchGroup, TrainingPool
from clawgym.records.run_folder import write_atomic
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.advantages import trained_by_turn, write_advantages
from clawgym.trainers.common.answers import advantages_file
from clawgym.trainers.common.batch import images_of, make_batch
from clawgym.trainers.common.checkpoints import Checkpoints, Progress, load_adapter
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.common.teaching import find_teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner

__all__ = ["VersionTrainer", "train_elsewhere", "train_versions"]

_log = logging.getLogger("clawgym.online")
_POLL_SECONDS = 2.0
_LEASE_SECONDS = 10 * 365 * 86400.0
"""Nobody else trains on the conversations of a service."""
_MOST_IMITATED = 3
"""Most sequences of one conversation that are imitated: a long one has no more weight than that."""


async def train_versions(folder: ServiceFolder, stop: asyncio.Event) -> None:
    """Train as conversations come, until ``stop`` is set."""
    with Pool(folder.pool) as pool, contextlib.closing(VersionTrainer(folder, pool)) as trainer:
        while not stop.is_set():
            if not await trainer.step():
                await pause(stop, _POLL_SECONDS)


async def train_elsewhere(
    folder: ServiceFolder,
    link: ServiceLink,
    stop: asyncio.Event,
    settings: Sequence[str] = (),
    *,
    say: Callable[[str], None] = print,
) -> None:
    """Train the versions of a service on another machine, until ``stop`` is set.

    Args:
        folder: for the checkpoints. It is no folder of a service.
        link: the service.
        stop: ends the training after its step.
        settings: what is different on this machine, as ``training.compute.KEY=VALUE`` or ``training.model.path=PATH``.
        say: told when the service does not answer. This waits for it.

    Raises:
        ServiceError: the folder is that of a service, or of the trainer of another one; or a setting belongs to the
            service.
        ServiceUnreachable: the service does not answer at the start.
    """
    if folder.pool.exists():
        raise ServiceError(f"{folder.path}: a service is in it: give another --dir")
    folder.create(await asyncio.to_thread(link.config, settings))
    with folder.running():
        versions = RemoteVersions(folder.versions, link)
        trainer = await asyncio.to_thread(VersionTrainer, folder, RemotePool(link), versions)
        with contextlib.closing(trainer):
            said = ""
            while not stop.is_set():
                try:
                    worked = await trainer.step()
                    said = ""
                except ServiceUnreachable as error:
                    if str(error) != said:
                        said = str(error)
                        say(f"Waiting: {said}.")
                    worked = False
                if not worked:
                    await pause(stop, _POLL_SECONDS)


class VersionTrainer:
    """Makes versions, one for each training step. It takes up the state in the folder. Close it at the end."""

    def __init__(self, folder: ServiceFolder, pool: TrainingPool, versions: Versions | None = None) -> None:
        self._config: ServiceConfig = folder.config
        self._about = self._config.training
        self._pool = pool
        self._versions = versions or Versions(folder.versions)
        self._run = folder.training
        self._run.mkdir(mode=0o700, exist_ok=True)
        self._plan = self._run / "plan.json"
        """While a step is under way: its number, and how many conversations it takes from each source."""
        if self._about.compute.threads is not None:
            torch.set_num_threads(self._about.compute.threads)
        self._model = model_folder(self._about.model.path or "")
        self._renderer = Renderer(self._model)
        self._checkpoints, self._progress = Checkpoints(self._run), Progress()
        with contextlib.ExitStack() as stack:
            self._policy, self._learner_of = _load_policy(self._about, self._model, stack)
            self._learner = self._learner_of(self._policy, self._about)
            if (last := self._checkpoints.last()) is not None:
                self._progress = self._checkpoints.load(last, self._policy, self._learner)
            self.close = stack.pop_all().close
            """End the processes that train."""

    @property
    def current(self) -> Version:
        """The version that the next step trains on from."""
        number = self._extra.get("at", 0)
        made = self._of_step() if number is None else self._versions[number]
        if made is None:
            raise ServiceError(
                f"{self._run}: no version has the weights of step {self._progress.step}: restore versions/ from a copy"
            )
        return made

    async def step(self) -> bool:
        """Train one step, if there are conversations for it. False if there is nothing to do now."""
        self._finish()
        if self._plan.exists():  # a killed process began this step
            sources = json.loads(self._plan.read_bytes())["sources"]
        else:
            self._follow()
            unserved = self._versions.unserved(self.current.number)
            if not self._about.algorithm.imitation and len(unserved) > self._about.rollout.staleness:
                return False  # the gate is behind
            sources = self._choose()
            if not sources:
                return False
            self._write_plan(sources)
        batch = self._fetch(sources)
        if not await self._train(batch):
            self._stand(self.current)
        self._finish()
        return True

    @property
    def _extra(self) -> dict[str, Any]:
        """Of the checkpoint: ``at``, the version that has its weights; or None for the version of its step, whose
        ``parent``, ``sessions`` and ``metrics`` are there too."""
        return self._progress.extra

    def _of_step(self) -> Version | None:
        sessions = tuple(self._extra["sessions"])
        return next((version for version in self._versions.all() if version.sessions == sessions), None)

    def _stand(self, version: Version) -> None:
        """End a step with the weights of ``version``."""
        progress = self._progress
        progress.step += 1
        progress.extra = {"at": version.number}
        self._save()

    def _save(self) -> None:
        self._checkpoints.save(self._policy, self._learner, self._progress)

    def _finish(self) -> None:
        """Make the version of the newest checkpoint, and acknowledge what it was trained on, unless that was done."""
        if self._extra.get("at", 0) is None and self._of_step() is None:
            self._add()
        if self._plan.exists():
            plan = json.loads(self._plan.read_bytes())
            if plan["step"] < self._progress.step:
                for source in plan["sources"]:
                    self._pool.ack(_consumer(source), plan["step"])
                self._plan.unlink()

    def _write_plan(self, sources: Mapping[str, int]) -> None:
        plan = {"step": self._progress.step, "sources": dict(sources)}
        write_atomic(self._plan, json.dumps(plan).encode())

    def _follow(self) -> None:
        """Start again from the newest version that may answer, if the current one may not any more."""
        current = self.current
        if not self._versions.may_answer(current.number):
            start = next(one for one in reversed(self._versions.all()) if self._versions.may_answer(one.number))
            _log.info("version %d is given up: training starts again from version %d", current.number, start.number)
            self._load(start)
            self._stand(start)

    def _load(self, version: Version) -> None:
        """Take the weights of a version, with a new optimizer."""
        load_adapter(self._versions.adapter_of(version), self._policy)
        self._learner = self._learner_of(self._policy, self._about)

    def _choose(self) -> dict[str, int]:
        """How many judged conversations of each source the next step takes; empty if there are too few."""
        stats = self._pool.stats()
        ready = waiting_sources(stats)
        sources = len(active_sources(stats) | ready.keys())
        wanted = self._about.rollout.groups
        most = wanted if sources < 2 else math.ceil(wanted * max(self._config.source_share, 1 / sources))
        taken = dict.fromkeys(ready, 0)
        while sum(taken.values()) < wanted:
            open_ = [source for source, count in ready.items() if taken[source] < min(count, most)]
            if not open_:
                return {}
            taken[min(open_, key=lambda source: taken[source])] += 1
        return {source: count for source, count in taken.items() if count}

    def _fetch(self, sources: Mapping[str, int]) -> Batch:
        """The conversations of this step; fewer if some were forgotten since it was planned."""
        step, groups, there = self._progress.step, list[BatchGroup](), dict[str, int]()
        for source, planned in sources.items():
            for count in range(planned, 0, -1):
                found = self._pool.fetch(
                    _consumer(source),
                    step,
                    channel=f"{CHANNEL}{source}",
                    groups=count,
                    min_episodes=1,
                    lease_seconds=_LEASE_SECONDS,
                )
                if found is not None:
                    groups += found.groups
                    there[source] = count
                    break
        if there.keys() != sources.keys():
            self._write_plan(there)
        # Some were trained on already, if the folder of the trainer was lost.
        used = {session for version in self._versions.all() for session in version.sessions}
        batch = Batch("service", step, tuple(groups), 0.0)
        return _only(batch, lambda member: member.episode.id not in used)

    def _fresh(self, batch: Batch) -> Batch:
        """Without the conversations that were sampled by versions that are too old, or not ancestors."""
        lineage = self._versions.lineage(self.current.number)
        near = {version.number for version in lineage[: self._about.rollout.staleness + 1]}
        return _only(batch, lambda member: {v for s in member.sequences for v in s.policy_versions} <= near)

    async def _accepted(self, batch: Batch) -> dict[str, list[MaskedSequence]]:
        """Conversation -> its accepted replies, if it has some."""
        found: dict[str, list[MaskedSequence]] = {}
        if self._about.algorithm.imitation:
            rng = self._rng("accepted")
            for member in (member for group in batch.groups for member in group.episodes):
                turns = await asyncio.to_thread(self._pool.turns, member.episode.id)
                if accepted := list(accepted_replies(turns, member.process_rewards)):
                    found[member.episode.id] = rng.sample(accepted, min(len(accepted), _MOST_IMITATED))
        return found

    async def _rehearsed(self, accepted: int) -> list[MaskedSequence]:
        """For every three accepted replies one that is rehearsed."""
        if not accepted:
            return []
        known = await rehearsed_replies(self._run / "rehearsal.json", self._policy, self._renderer)
        return self._rng("rehearsed").sample(known, min(len(known), math.ceil(accepted / 3)))

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self._about.seed}:{self._progress.step}:{purpose}")

    async def _train(self, batch: Batch) -> bool:
        """One training step, and its checkpoint. False if there is none; then the weights are those of before."""
        began, progress, about, parent = time.monotonic(), self._progress, self._about, self.current
        accepted = await self._accepted(batch)
        batch = self._fresh(batch)
        if not batch.groups and not accepted:
            _log.info("step %d: its conversations are gone, or too old to train on", progress.step)
            return False
        sessions = sorted({member.episode.id for group in batch.groups for member in group.episodes} | accepted.keys())
        imitated = list(itertools.chain.from_iterable(accepted.values()))
        imitated += await self._rehearsed(len(imitated))
        policy, learner = self._policy, self._learner
        teachers, metrics = {}, {}
        if about.distillation.hints:
            scorer = policy.scorer(tokens=about.compute.micro_tokens)
            teachers, metrics = await find_teachers(batch, about.distillation, self._pool, self._renderer, scorer)
        images = await asyncio.to_thread(images_of, batch, self._pool)
        seed = about.seed * 1_000_003 + progress.step
        made = make_batch(batch, about, seed=seed, teachers=teachers, images=images, device=policy.device)
        try:
            imitation = (lambda _: imitated) if imitated else None
            train_step = partial(learner.train_step, made, seed=seed, imitation=imitation)
            metrics |= dict(made.metrics) | await in_update_thread(train_step)
            write_advantages(self._run.parent, progress.step, trained_by_turn(made, learner.advantages))
        except TrainingError as error:
            self._made_none(error)
            self._load(parent)
            return False
        progress.step += 1
        progress.seconds += time.monotonic() - began
        progress.extra = {"at": None, "parent": parent.number, "sessions": sessions, "metrics": metrics}
        await asyncio.to_thread(self._save)
        return True

    def _made_none(self, error: Exception) -> None:
        """Tell of a step that made no version; its conversations are not trained on again."""
        step = self._progress.step
        _log.warning("step %d made no version: %s", step, error)
        about = {"step": step, "time": time.time(), "reason": str(error)}
        write_atomic(self._run / FAILED_STEP, json.dumps(about).encode())

    def _add(self) -> None:
        """Make the version of the newest checkpoint."""
        last, extra = self._checkpoints.last(), self._extra
        assert last is not None
        try:
            version = self._versions.add(
                lambda part: shutil.copytree(last / "adapter", part, dirs_exist_ok=True),
                parent=extra["parent"],
                sessions=extra["sessions"],
                about={"step": self._progress.step, "metrics": extra["metrics"]},
            )
        except ServiceUnreachable:
            raise  # tried again with the checkpoint, which is safe
        except ServiceError as error:  # a conversation was forgotten meanwhile, or the parent erased
            self._made_none(error)
            advantages_file(self._run.parent, self._progress.step - 1).unlink(missing_ok=True)
            serving = self._versions.serving
            self._load(serving)
            self._stand(serving)
            return
        _log.info("version %d: trained on %d conversations", version.number, len(version.sessions))
        if not self._config.gate.on and self._versions[version.number].state == "candidate":
            self._versions.promote(version.number, "without a gate")


def _load_policy(about: TrainConfig, model: Path, stack: contextlib.ExitStack) -> tuple[Any, Callable[..., Any]]:
    """The policy and the class of its learner: in this process, or on ranks of verl, which ``stack`` ends."""
    if about.trainer == "verl":
        from clawgym.trainers.verl.learner import RankedLearner, open_ranks

        return stack.enter_context(open_ranks(about, model)), RankedLearner
    return load_policy(about.model, model, about.compute, seed=about.seed), Learner


def _only(batch: Batch, wanted: Callable[[BatchEpisode], bool]) -> Batch:
    """``batch`` with the wanted episodes only, and without groups that have none."""
    groups = (replace(group, episodes=tuple(filter(wanted, group.episodes))) for group in batch.groups)
    return replace(batch, groups=tuple(group for group in groups if group.episodes))


def _consumer(source: str) -> str:
    return f"service:{source}"
