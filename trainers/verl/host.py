"""Episodes on one node of a cluster: sandboxes, gateway, judge and pool.

Invariants: a group runs on one host. Training sequences come from the pool, with ids and log-probs as the engine gave
them. The end of a group is always reported, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from clawgym.errors import TrainingError
from clawgym.gateway.render import Renderer
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.pool.states import Batch, BatchGroup
from clawgym.records import Episode, Task
from clawgym.sandbox import backend as make_backend
from clawgym.trainers.common.canary import Canaries
from clawgym.trainers.common.collector import GroupPlayer, MissingSamples, Player, group_id
from clawgym.trainers.common.judging import judging
from clawgym.trainers.common.services import EpisodeScore, score_tasks
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.teaching import Teachers, find_teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.verl.queue_entries import queue_entry
from clawgym.trainers.verl.servers import VerlEngine, VerlScorer

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient

__all__ = ["CONSUMER", "Host"]

CONSUMER = "verl"
_MAX_FAILURES = 20
"""A run gives up after this many infrastructure errors in a row."""
_LEASE = 24 * 3600.0


class Host:
    """A Ray actor on one node. The trainer's process calls its methods, many at the same time."""

    def __init__(
        self,
        config: TrainConfig,
        pool: Path,
        model: Path,
        client: LLMServerClient,
        reader: LLMServerClient,
        *,
        context_window: int,
    ) -> None:
        self._config = config
        self._pool_file = pool
        self._engine = VerlEngine(client, model, engine=config.verl.engine, context_window=context_window)
        self._reader = VerlScorer(reader, context_window=context_window)
        self._model = model
        self._renderer: Renderer | None = None
        self._teacher_counts: Counter[str] = Counter()
        self._stack = contextlib.AsyncExitStack()
        self._unfinished: dict[int, MissingSamples] = {}
        self._playing: set[asyncio.Task[None]] = set()
        self._late = 0

    async def open(self) -> None:
        """Open sandboxes, gateway, judge and pool. Raises their errors."""
        config, stack = self._config, self._stack
        self._splits = await asyncio.to_thread(load_splits, config.tasks, config.agent)
        self._pool = stack.enter_context(Pool(self._pool_file))
        self._backend = make_backend(config.backend)
        stack.push_async_callback(self._backend.aclose)
        await self._backend.probe()
        gateway = await stack.enter_async_context(Gateway(self._engine, self._pool))
        await gateway.listen()
        self._judge = await stack.enter_async_context(judging(config, gateway))
        self._player = Player(config, gateway, self._backend, judging=None if self._judge is None else self._judged)
        stack.push_async_callback(self._player.aclose)
        self._groups = GroupPlayer(config, self._splits.train, self._pool, self._player)
        self._unfinished = await self._groups.unfinished()
        judge = None if self._judge is None else self._judge.canary_pool
        self._canaries = Canaries(config, self._splits.validation, self._pool, self._backend, judge)
        tq.init()

    async def group(self, uid: str, number: int, version: int) -> None:
        """Run the missing episodes of a group and put its training sequences into verl's queue under ``uid``.

        Raises :class:`~clawgym.errors.TrainingError` after too many infrastructure errors in a row."""
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "running"})
        missing, late = self._unfinished.pop(number, None), False
        if missing is None or missing:
            playing = asyncio.create_task(self._groups.play(number, missing))
            self._playing.add(playing)
            playing.add_done_callback(self._playing.discard)
            with self._engine.spans.busy("rollouts"):
                done, _ = await asyncio.wait({playing}, timeout=self._config.rollout.deadline)
            late = not done
            if late:
                self._late += 1
                playing.cancel()
            error = (await asyncio.gather(playing, return_exceptions=True))[0]
            if isinstance(error, asyncio.CancelledError) and not late:  # cancelled by halt()
                return
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
        if self._groups.failures_in_a_row >= _MAX_FAILURES:
            raise TrainingError(
                f"{self._groups.failures_in_a_row} infrastructure errors in a row (the last: "
                f"{self._groups.last_cause}): run `clawgym doctor`, repair that, and run the same command again"
            )
        batch = await asyncio.to_thread(
            self._pool.fetch,
            CONSUMER,
            number,
            only=group_id(number),
            policy_version=max(version, self._engine.policy_version),
            max_staleness=self._config.rollout.staleness,
            lease_seconds=_LEASE,
            wait=2.0 if late else 0.0,
        )
        if batch is None:
            await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "failure"})
            return
        await self._give(uid, number, version, batch.groups[0], await self._teachers(batch))
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "finished"})

    async def _teachers(self, batch: Batch) -> Teachers:
        """The teachers of a batch; empty without ``distillation.hints``."""
        about = self._config.distillation
        if not about.hints:
            return {}
        self._renderer = self._renderer or Renderer(self._model)
        with self._engine.spans.busy("judging"):
            teachers, said = await find_teachers(batch, about, self._pool, self._renderer, self._reader)
        self._teacher_counts.update({name: int(n) for name, n in said.items() if name != "opd/overlap"})
        return teachers

    async def _give(self, uid: str, number: int, version: int, group: BatchGroup, teachers: Teachers) -> None:
        keys: list[str] = []
        fields: list[dict[str, Any]] = []
        tags: list[dict[str, Any]] = []
        for member in group.episodes:
            for place, sample in enumerate(member.sequences):
                keys.append(f"{uid}_{member.episode.sample}_{place}")
                field, tag = queue_entry(member, sample, group.id, self._config, teachers)
                fields.append({"uid": uid, **field})
                tags.append({"global_steps": version + 1, "number": number, **tag})
        await tq.async_kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train"
        )

    async def measure(self, part: str, tasks: Sequence[int], samples: int, greedy: bool) -> list[EpisodeScore]:
        """Evaluate on ``tasks``, which are indices into the split ``part``."""
        chosen = [getattr(self._splits, part)[place] for place in tasks]
        return await score_tasks(self._player, self._config, chosen, samples=samples, greedy=greedy, channel=part)

    async def canaries(
        self, first: dict[str, dict[str, float]]
    ) -> tuple[dict[str, float], list[str], dict[str, dict[str, float]]]:
        """Check the canaries. Returns metrics, warnings, and ``first`` for the next call."""
        metrics, warnings = await self._canaries.check(first)
        warnings += [] if self._judge is None else self._judge.warnings()
        return metrics, warnings, first

    async def acknowledge(self, groups: Sequence[int]) -> None:
        """Acknowledge groups of this host that are in a checkpoint."""
        for number in groups:
            await asyncio.to_thread(self._pool.ack, CONSUMER, number)

    async def advance(self, version: int) -> dict[str, Any]:
        """Tell the host that the servers have the weights of ``version``.

        Returns counts since the start; counts of teachers and busy spans since the last call."""
        self._engine.policy_version = version
        stats = await asyncio.to_thread(self._pool.stats)
        groups = stats["channels"].get("train", {}).get("groups", {})
        judged = {}
        if self._judge is not None:
            judge = self._judge.pool
            judged = {"judge/scored": float(judge.scored), "judge/unscored": float(sum(judge.unscored.values()))}
        teachers, self._teacher_counts = self._teacher_counts, Counter()
        return {
            **{name: float(n) for name, n in teachers.items()},
            "rollout/infra": float(self._groups.infra),
            "rollout/late_groups": float(self._late),
            "rollout/groups_dropped": float(groups.get("dropped", 0)),
            **judged,
            **self._player.milestone_metrics(),
            "spans": self._engine.spans.take(),
        }

    async def _judged(self, task: Task, session: str, episode: Episode, within: float) -> None:
        assert self._judge is not None
        with self._engine.spans.busy("judging"):
            await self._judge(task, session, episode, within)

    async def halt(self) -> None:
        """Cancel running groups. A resumed run completes them."""
        playing = list(self._playing)
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def aclose(self) -> None:
        """Close sandboxes, gateway and pool."""
        await self.halt()
        await self._stack.aclose()
