"""``evaluate``: a task set times k samples through one agent, into a run folder.

Invariants: an episode depends on its seed (run seed, task, sample) and on nothing that ran beside it; the
order of starting is fixed; stopping at any moment loses at most the episodes in flight, and the same call
goes on from there; an infrastructure error is retried and never scored.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from clawgym.agents.protocol import Agent
from clawgym.errors import AgentError, RunFolderError, SandboxUnavailable, UnsupportedTask, traceback_of
from clawgym.evaluation.grader import describe_grader
from clawgym.evaluation.progress import NoProgress, ProgressView
from clawgym.evaluation.schedule import ATTEMPTS, Schedule, finished_writing
from clawgym.evaluation.summary import Summary, summarize
from clawgym.records import Episode, Outcome, Task, TaskSet
from clawgym.records.run_folder import SUMMARY, RunFolder, RunManifest, make_manifest, now
from clawgym.rollout import Ended, EpisodeRequest, fault_of
from clawgym.sandbox.machine import machine_of
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.graders import judged_by

__all__ = ["ATTEMPTS", "EpisodeFunction", "EvalConfig", "episode_seed", "evaluate"]


class EpisodeFunction(Protocol):
    """The shape of :func:`clawgym.rollout.run_episode`."""

    async def __call__(self, request: EpisodeRequest, agent: Agent, backend: Backend) -> Ended: ...


@dataclass(frozen=True)
class EvalConfig:
    """What to evaluate, and where the results go."""

    task_set: TaskSet
    agent: Agent
    backend: Backend
    out: Path
    """The run folder; an existing one of the same configuration is continued."""
    samples: int = 1
    """Episodes per task. A run folder that has fewer gets the others; one that has more is refused."""
    seed: int = 0
    concurrency: int | None = None
    """Most episodes at once; ``None``: as many as the machine carries."""
    keep_workspaces: bool = True
    floors: Mapping[str, float] = field(default_factory=dict)
    """Floor by task id, for the corrected score; :func:`~clawgym.verifiers.floors.known_floor` where it is not here."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that change results; they go into the run manifest and its identity."""


def episode_seed(run_seed: int, task_hash: str, sample: int) -> int:
    """The seed of one episode: 31 bits of SHA-256 over the run's seed, the task's content and the sample."""
    digest = hashlib.sha256(f"{run_seed}:{task_hash}:{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


async def evaluate(
    config: EvalConfig,
    *,
    run_episode: EpisodeFunction | None = None,
    progress: ProgressView | None = None,
    stop: asyncio.Event | None = None,
    retry_seconds: float = 1.0,
) -> Summary:
    """Run what is missing from the run folder, then write ``summary.json`` and ``report.html``.

    The agent and the backend stay open; who made them closes them. Setting ``stop`` cancels what is in
    flight and returns an incomplete summary; so do many infrastructure errors in a row.

    Raises :class:`~clawgym.errors.RunFolderError` if the folder belongs to another configuration, and
    :class:`~clawgym.errors.SandboxUnavailable` if the backend cannot work here.
    """
    isolation = await config.backend.probe()
    floors = _floors(config)
    manifest = make_manifest(
        "eval",
        config.task_set,
        agent={"name": config.agent.name, "version": config.agent.version, **config.agent.identity()},
        seed=config.seed,
        samples=config.samples,
        config=config.settings,
        isolation=isolation.as_dict(),
        floors=floors,
        grader=await describe_grader(config.task_set.tasks, config.backend),
        judged={task.id: judged_by(task.verifier) for task in config.task_set.tasks},
    )
    with RunFolder.open(config.out, manifest) as folder:
        run = _Run(config, folder, floors, run_episode or _default_episode())
        schedule = Schedule(
            folder,
            config.task_set.tasks,
            run.attempt,
            progress or NoProgress(),
            samples=config.samples,
            concurrency=config.concurrency,
            machine=machine_of(config.backend),
            retry_seconds=retry_seconds,
        )
        await schedule.run(stop or asyncio.Event())
        summary = summarize(folder)
        folder.write_json(SUMMARY, summary.to_dict())
        await asyncio.to_thread(_report, folder)
    return summary


def _floors(config: EvalConfig) -> dict[str, float]:
    """The floors of the tasks that have one."""
    from clawgym.verifiers.floors import known_floor

    known = {task.id: known_floor(task) for task in config.task_set.tasks if task.id not in config.floors}
    return {task: floor for task, floor in (known | dict(config.floors)).items() if floor is not None}


def _default_episode() -> EpisodeFunction:
    from clawgym.rollout import run_episode

    return run_episode


def _report(folder: RunFolder) -> None:
    from clawgym.evaluation.report import render_report

    folder.write("report.html", render_report(folder).encode())


class _Run:
    """One call of :func:`evaluate`: how an attempt is made and recorded."""

    def __init__(
        self, config: EvalConfig, folder: RunFolder, floors: Mapping[str, float], run_episode: EpisodeFunction
    ) -> None:
        self._config = config
        self._folder = folder
        self._floors = floors
        self._run_episode = run_episode

    async def attempt(self, task: Task, sample: int, attempt: int) -> Mapping[str, Any]:
        """See :class:`~clawgym.evaluation.schedule.JobFunction`."""
        episode, row = await self._episode(task, sample)
        if row is not None:
            return self._folder.append(row)
        assert episode is not None
        return await self._record(episode, attempt)

    async def _episode(self, task: Task, sample: int) -> tuple[Episode | None, dict[str, Any] | None]:
        """The episode, or the row of a task that cannot run here."""
        config = self._config
        seed = episode_seed(config.seed, task.content_hash, sample)
        try:
            request = EpisodeRequest(
                task=task,
                seed=seed,
                sample=sample,
                baseline=self._floors.get(task.id),
                keep_workspace=config.keep_workspaces,
            )
            ended = await self._run_episode(request, config.agent, config.backend)
            return ended.episode, None
        except (UnsupportedTask, AgentError) as error:
            return None, {
                "key": f"{task.id}#{sample}",
                "task_id": task.id,
                "task_hash": task.content_hash,
                "sample": sample,
                "outcome": Outcome.UNSUPPORTED,
                "cause": str(error),
                "finished": now(),
            }
        except (SandboxUnavailable, RunFolderError):
            raise
        except Exception as error:  # one episode's accident is data, not the end of the run
            trace = traceback_of(error)
            cause = f"{type(error).__name__}: {error}"[:300]
            name = config.agent.name
            episode = Episode(
                task.id, task.content_hash, sample, seed, name, Outcome.INFRA,
                cause=cause, fault=fault_of(error), error=trace,
            )  # fmt: skip
            return episode, None

    async def _record(self, episode: Episode, attempt: int) -> Mapping[str, Any]:
        return await finished_writing(
            asyncio.create_task(
                asyncio.to_thread(
                    self._folder.record,
                    episode,
                    attempt=attempt,
                    agent_version=self._config.agent.version,
                    model=_model(self._folder.manifest),
                )
            )
        )


def _model(manifest: RunManifest) -> str | None:
    model = manifest.engine.get("model") or manifest.agent.get("model")
    return str(model) if model else None
