"""One training run with verl, from its configuration to its report.

Invariants: the run folder has the same files as with the local trainer. The same call on it resumes from the last
checkpoint, however the last call ended. A group is acknowledged after its checkpoint is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from clawgym.errors import TrainingError
from clawgym.pool import Pool
from clawgym.registry import trainers
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.advantages import TurnAdvantages, write_advantages
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.demonstrations import load_imitation_data
from clawgym.trainers.common.imitation import ImitationData
from clawgym.trainers.common.judging import Agreement
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.services import EpisodeScore, pool_file, summarize
from clawgym.trainers.common.splits import Splits, load_splits
from clawgym.trainers.common.start_model import base_folder
from clawgym.trainers.common.tracking import View, on_terminal
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ScoredEpisode
from clawgym.trainers.verl.cluster import cause_of, cluster, require
from clawgym.trainers.verl.merging import merge_adapters
from clawgym.trainers.verl.settings import check_supported, verl_settings, window_of
from clawgym.trainers.verl.timeline import Span, merged

__all__ = ["train"]


class _Stopped(Exception):
    """``stop`` was set, or the budget is used up."""


@trainers.register("verl")
async def train(
    config: TrainConfig,
    out: Path,
    method: str = "rl",
    view: View | None = None,
    stop: asyncio.Event | None = None,
) -> Progress:
    """Trains on a Ray cluster with verl, by ``rl``.

    See :class:`~clawgym.trainers.protocols.Trainer`. Also raises :class:`~clawgym.errors.TrainingError` for another
    ``method``, :class:`~clawgym.errors.RunFolderError` for the folder of another run, and
    :class:`~clawgym.errors.MissingDependency` without the extra ``verl``."""
    if method != "rl":
        raise TrainingError(
            f"trainer: verl has no method {method!r}: run sft with trainer: local, then rl from its checkpoint with "
            "trainer: verl"
        )
    check_supported(config)
    require(config)
    splits = await asyncio.to_thread(load_splits, config.tasks, config.agent)
    with Run.open(out, config, "rl", splits, view or on_terminal(), stop) as run:
        work = _VerlRun(config, run, splits)
        if config.algorithm.imitation:
            await work.demonstrate()
        with cluster(config):
            return await asyncio.to_thread(work.run)


class _VerlRun:
    """One call of :func:`train`. Its methods run in the thread of verl's trainer."""

    def __init__(self, config: TrainConfig, run: Run, splits: Splits) -> None:
        self.config = config
        self._run = run
        self._splits = splits
        self._checkpoints = Checkpoints(run.path)
        self._progress = Progress()
        self._agreement = Agreement(config, self._progress.extra)
        self._counts: dict[str, float] = {}
        self._unacked: list[int] = []
        self._spans: list[Span] = []
        self._hosts: list[Any] = []
        self._episodes: Any = None
        self._imitation: ImitationData | None = None

    async def demonstrate(self) -> None:
        """Load the imitation data; make demonstrations that an earlier call has not made."""
        with Pool(pool_file(self._run.path)) as pool:
            self._imitation, _ = await load_imitation_data(self.config, self._splits, pool, self._run)
            if (last := self._checkpoints.last()) is not None:
                self._imitation.restore_solved(_progress_of(last).extra.get("solved", {}), pool)

    def run(self) -> Progress:
        import ray
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from ray.exceptions import RayError
        from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

        from clawgym.trainers.verl.trainer import EpisodeDispatcher, verl_trainer_name

        last = self._checkpoints.last()
        if last is not None:
            self._progress = _progress_of(last)
            self._agreement = Agreement(self.config, self._progress.extra)
        self._run.rewind(self._progress.step)
        model = base_folder(self.config, self._run.path, self._splits.demonstrations, ()).absolute()
        check_supported(self.config, model)
        self._model = model
        window = window_of(self.config, model)
        resume = None if last is None else (last / "verl" / f"global_step_{self._progress.step}").absolute()
        settings = verl_settings(self.config, model, window=window, run=self._run.path.absolute(), resume=resume)
        settings.transfer_queue.enable = True
        OmegaConf.resolve(settings)
        tq.init(settings.transfer_queue)
        try:
            made: Any = get_trainer_cls(verl_trainer_name(self.config.verl.mode))
            trainer = made(settings, self)
            trainer.init()
            self._hosts = self._open_hosts(trainer, model, window)
            try:
                if not self._over():
                    self._episodes = EpisodeDispatcher(self._hosts, lambda: trainer.version)
                    with contextlib.suppress(_Stopped):
                        trainer.fit(self._episodes)
                if self._over():
                    self._ends(trainer)
            finally:
                with contextlib.suppress(RayError):
                    ray.get([host.aclose.remote() for host in self._hosts], timeout=60)
        except RayError as error:
            raise TrainingError(
                f"a process of the run failed or died ({cause_of(error)}): run the same command again to resume from "
                f"checkpoint {self._progress_name()}"
            ) from error
        finally:
            tq.close()
        return self._progress

    def _open_hosts(self, trainer: Any, model: Path, window: int) -> list[Any]:
        """Start a host, with its own pool, on each node that has ranks."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from clawgym.trainers.verl.host import Host

        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU"))
        hosts = []
        for place, node in enumerate(nodes[: self.config.verl.nodes]):
            pool = pool_file(self._run.path.absolute())
            pool = pool if place == 0 else pool.with_name(f"pool-{place}.db")
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            actor: Any = ray.remote(Host).options(num_cpus=1, scheduling_strategy=where, max_concurrency=4096)
            client, reader = trainer.get_llm_client(), trainer.reader()
            hosts.append(actor.remote(self.config, pool, model, client, reader, context_window=window))
        ray.get([host.open.remote() for host in hosts])
        return hosts

    # --- callbacks of verl's trainer (clawgym.trainers.verl.trainer.RunCallbacks) ---

    def check(self) -> None:
        if self._run.stop.is_set():
            raise _Stopped
        self._episodes.check()

    def on_train_begin(self, trainer: Any) -> None:
        self._unacked = list(self._progress.extra.get("groups", ()))
        self._acknowledge()
        self._advance(self._progress.step)
        if self._progress.step == 0 and self._checkpoints.last() is None:
            for greedy in (False, True) if self.config.evaluation.before else ():
                self._measure("heldout", 0, greedy=greedy)
            self._validate()
            self._save(trainer)

    def process_weight(self, setting: str) -> float:
        return self._agreement.process_weight(setting)

    def imitation(self, number: int) -> Sequence[MaskedSequence]:
        assert self._imitation is not None
        return self._imitation.batch(number)

    def add_solved(self, episodes: Sequence[tuple[str, str, MaskedSequence]]) -> None:
        assert self._imitation is not None
        for task, episode, row in episodes:
            self._imitation.keep(task, row)
            self._progress.extra.setdefault("solved", {})[task] = episode
        self._counts["sft/solved_tasks"] = float(self._imitation.solved)

    def add_episodes(self, scored: list[ScoredEpisode]) -> Mapping[str, float]:
        return self._agreement.add(scored)

    def on_advantages(self, group: int, advantages: TurnAdvantages) -> None:
        write_advantages(self._run.path, group, advantages)  # the pools' consumer takes one group a step

    def on_step_trained(self, trainer: Any, groups: list[int]) -> None:
        progress = self._progress
        progress.step = trainer.global_steps
        progress.seconds += trainer.seconds
        progress.tokens += trainer.tokens
        self._unacked += groups
        progress.extra["groups"] = list(self._unacked)
        if self._validates():
            self._counts |= self._validate()
        self._advance(progress.step)
        self._run.timeline(progress.step, merged([*self._spans, *trainer.spans]))
        self._spans = []

    def on_metrics(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        counts, self._counts = self._counts, {}
        step = self._progress.step
        self._run.log(step, {**metrics, **counts, "timing/learning_seconds": self._progress.seconds})
        if self._validates() or step % self.config.checkpoint_every == 0:
            self._save(trainer)
        if self._run.stop.is_set() or self._over():
            raise _Stopped

    def budget_used(self) -> float:
        return self._progress.used(self.config.budget)

    # --- helpers ---

    def _acknowledge(self) -> None:
        """Acknowledge to the hosts all groups in the newest checkpoint."""
        import ray

        trained, self._unacked = self._unacked, []
        count = len(self._hosts)
        ray.get(
            [
                host.acknowledge.remote([n for n in trained if n % count == place])
                for place, host in enumerate(self._hosts)
            ]
        )

    def _advance(self, version: int) -> None:
        """Tell the hosts the version of the servers' weights, and collect their counts."""
        import ray

        for said in ray.get([host.advance.remote(version) for host in self._hosts]):
            self._spans += said.pop("spans")
            for name, value in said.items():
                self._counts[name] = self._counts.get(name, 0.0) + value

    def _measure(self, part: str, step: int, *, greedy: bool | None = None) -> float:
        import ray

        greedy = self.config.evaluation.greedy if greedy is None else greedy
        tasks, count = len(getattr(self._splits, part)), len(self._hosts)
        samples = self._run.start_measurement(part, tasks, greedy)
        started = time.monotonic()
        calls = [
            host.measure.remote(part, list(range(place, tasks, count)), samples, greedy)
            for place, host in enumerate(self._hosts)
        ]
        score = summarize([EpisodeScore(*one) for some in ray.get(calls) for one in some])
        self._run.record_measurement(score, part, step, tasks, greedy=greedy, seconds=time.monotonic() - started)
        return score.estimate.value

    def _validate(self) -> dict[str, float]:
        """Evaluate on the validation split. Returns metrics of the canaries."""
        import ray

        progress = self._progress
        first_scores = progress.extra.setdefault("canary", {})
        metrics, warnings, progress.extra["canary"] = ray.get(self._hosts[0].canaries.remote(first_scores))
        for text in warnings:
            self._run.say(f"warning: {text}")
        progress.record_score(self._measure("validation", progress.step))
        return metrics

    def _save(self, trainer: Any) -> None:
        """Write a checkpoint and acknowledge its groups."""
        # The weights, two moments of each, and the model again in Hugging Face format.
        need = 4 * sum(file.stat().st_size for file in self._model.glob("*.safetensors")) + 2**26
        self._checkpoints.put(self._progress, need, partial(self._fill, trainer))
        self._acknowledge()

    def _fill(self, trainer: Any, part: Path) -> None:
        inner = part / "verl" / f"global_step_{self._progress.step}"
        trainer.write_checkpoint(inner)
        shutil.move(inner / "actor" / "huggingface", part / "model")
        if (lora := self.config.model.lora) is not None:
            merge_adapters(part / "model", lora.alpha / lora.rank)
        (part / "state.json").write_text(json.dumps(asdict(self._progress)), "utf-8")

    def _ends(self, trainer: Any) -> None:
        import ray

        best = self._checkpoints.best()
        if best is None:
            raise TrainingError(f"{self._run.path}: there is no checkpoint to evaluate: train first")
        step = int(best.name)
        ray.get([host.halt.remote() for host in self._hosts])
        if not (missing := self._run.unmeasured(step)):
            return
        trainer.load_checkpoint(best / "verl" / f"global_step_{step}")
        self._advance(step)
        for greedy in missing:
            self._measure("heldout", step, greedy=greedy)

    def _over(self) -> bool:
        return self.budget_used() >= 1.0

    def _validates(self) -> bool:
        return self._progress.step % self.config.evaluation.every == 0 or self._over()

    def _progress_name(self) -> str:
        last = self._checkpoints.last()
        return "none yet" if last is None else last.name


def _progress_of(folder: Path) -> Progress:
    try:
        return Progress(**json.loads((folder / "state.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(
            f"{folder}: cannot be resumed from ({error}): use the trainer it was written with, or name another --out"
        ) from error
