"""Episodes on one node of a cluster: boxes, a gateway, a judge, and the pool of what was sampled there.

Invariants: a group is played on one host, whole; what goes to the trainer was read from the pool, ids and log-probs as
the engine gave them; a group that ends, however it does, is said to have ended.
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
from clawgym.trainers.common.collector import Groups, Missing, Player, group_id
from clawgym.trainers.common.judging import judging
from clawgym.trainers.common.parts import load_parts
from clawgym.trainers.common.services import Score, scores
from clawgym.trainers.common.teaching import Taught, teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.verl.rows import row_of
from clawgym.trainers.verl.servers import Reader, Servers

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient

__all__ = ["CONSUMER", "Host"]

CONSUMER = "verl"
_PATIENCE = 20
"""Attempts in a row that failed for no fault of the agent, after which a run gives up."""
_LEASE = 24 * 3600.0


class Host:
    """An actor of the run; its methods are called from the trainer's process, many at a time."""

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
        self._engine = Servers(client, model, engine=config.verl.engine, context_window=context_window)
        self._reader = Reader(reader, context_window=context_window)
        self._model = model
        self._renderer: Renderer | None = None
        self._taught: Counter[str] = Counter()
        self._stack = contextlib.AsyncExitStack()
        self._begun: dict[int, Missing] = {}
        self._playing: set[asyncio.Task[None]] = set()
        self._late = 0

    async def open(self) -> None:
        """Make everything ready. Raises as the parts do."""
        config, stack = self._config, self._stack
        self._parts = await asyncio.to_thread(load_parts, config.tasks, config.agent)
        self._pool = stack.enter_context(Pool(self._pool_file))
        self._backend = make_backend(config.backend)
        stack.push_async_callback(self._backend.aclose)
        await self._backend.probe()
        gateway = await stack.enter_async_context(Gateway(self._engine, self._pool))
        await gateway.listen()
        self._judge = await stack.enter_async_context(judging(config, gateway))
        self._player = Player(config, gateway, self._backend, judging=None if self._judge is None else self._judged)
        stack.push_async_callback(self._player.aclose)
        self._groups = Groups(config, self._parts.train, self._pool, self._player)
        self._begun = await self._groups.begun()
        judge = None if self._judge is None else self._judge.aside
        self._canaries = Canaries(config, self._parts.validation, self._pool, self._backend, judge)
        tq.init()

    async def group(self, uid: str, number: int, version: int) -> None:
        """Play a group, as far as an earlier run has not, and give its rows to the trainer under ``uid``.

        Raises :class:`~clawgym.errors.TrainingError` where attempts fail one after the other for no fault of the
        agent: waiting longer would change nothing."""
        await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "running"})
        missing, late = self._begun.pop(number, None), False
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
            if isinstance(error, asyncio.CancelledError) and not late:  # nobody waits for it any more
                return
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
        if self._groups.in_a_row >= _PATIENCE:
            raise TrainingError(
                f"{self._groups.in_a_row} attempts in a row failed for no fault of the policy "
                f"({self._groups.last_cause}): run `clawgym doctor`, mend it, and give the same command again"
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

    async def _teachers(self, batch: Batch) -> Taught:
        """What the policy, told the hints of its judge, thinks of what it sampled."""
        about = self._config.distillation
        if not about.hints:
            return {}
        self._renderer = self._renderer or Renderer(self._model)
        with self._engine.spans.busy("judging"):
            taught, said = await teachers(batch, about, self._pool, self._renderer, self._reader)
        self._taught.update({name: int(n) for name, n in said.items() if name != "opd/overlap"})
        return taught

    async def _give(self, uid: str, number: int, version: int, group: BatchGroup, taught: Taught) -> None:
        keys: list[str] = []
        fields: list[dict[str, Any]] = []
        tags: list[dict[str, Any]] = []
        for member in group.episodes:
            for place, sample in enumerate(member.sequences):
                keys.append(f"{uid}_{member.episode.sample}_{place}")
                field, tag = row_of(member, sample, group.id, self._config, taught)
                fields.append({"uid": uid, **field})
                tags.append({"global_steps": version + 1, "number": number, **tag})
        await tq.async_kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train"
        )

    async def measure(self, part: str, tasks: Sequence[int], samples: int, greedy: bool) -> list[Score]:
        """Play ``tasks`` (places in ``part``) to measure."""
        chosen = [getattr(self._parts, part)[place] for place in tasks]
        return await scores(self._player, self._config, chosen, samples=samples, greedy=greedy, channel=part)

    async def canaries(
        self, seen: dict[str, dict[str, float]]
    ) -> tuple[dict[str, float], list[str], dict[str, dict[str, float]]]:
        """A look at the canaries: figures, warnings, and ``seen`` for the next one."""
        figures, warnings = await self._canaries.look(seen)
        warnings += [] if self._judge is None else self._judge.warnings()
        return figures, warnings, seen

    async def learnt(self, groups: Sequence[int]) -> None:
        """These, which were played here, are in a checkpoint."""
        for number in groups:
            await asyncio.to_thread(self._pool.ack, CONSUMER, number)

    async def advance(self, version: int) -> dict[str, Any]:
        """The servers sample by ``version``.

        Returns counts since the start, of teachers and of when serving, rollouts and judging were busy since the last
        call."""
        self._engine.policy_version = version
        stats = await asyncio.to_thread(self._pool.stats)
        groups = stats["channels"].get("train", {}).get("groups", {})
        judged = {}
        if self._judge is not None:
            judge = self._judge.pool
            judged = {"judge/scored": float(judge.scored), "judge/unscored": float(sum(judge.unscored.values()))}
        taught, self._taught = self._taught, Counter()
        return {
            **{name: float(n) for name, n in taught.items()},
            "rollout/infra": float(self._groups.infra),
            "rollout/late_groups": float(self._late),
            "rollout/groups_dropped": float(groups.get("dropped", 0)),
            **judged,
            "spans": self._engine.spans.take(),
        }

    async def _judged(self, task: Task, session: str, episode: Episode, within: float) -> None:
        assert self._judge is not None
        with self._engine.spans.busy("judging"):
            await self._judge(task, session, episode, within)

    async def halt(self) -> None:
        """End the groups that are under way; a run that goes on plays what they lack."""
        playing = list(self._playing)
        for each in playing:
            each.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def aclose(self) -> None:
        """Close boxes, gateway and pool."""
        await self.halt()
        await self._stack.aclose()
