"""Run one agent on every task of a set, k samples each, and write a run folder.

Invariants:

- An episode depends on its seed (run seed, task, sample), not on the episodes that run at the same time.
- Episodes start in a fixed order.
- Stopping at any moment loses at most the episodes in flight. The same call resumes.
- Infrastructure errors are retried and never scored.
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
from clawgym.evaluation.schedule import MAX_ATTEMPTS, Schedule, finished_writing
from clawgym.evaluation.summary import Summary, summarize
from clawgym.records import Episode, Outcome, Task, TaskSet
from clawgym.records.run_folder import SUMMARY, RunFolder, RunManifest, make_manifest, now
from clawgym.registry import users
from clawgym.rollout import Ended, EpisodeRequest, fault_of
from clawgym.sandbox.machine import machine_of
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.graders import judged_by

__all__ = ["MAX_ATTEMPTS", "EpisodeFunction", "EvalConfig", "episode_seed", "evaluate"]


class EpisodeFunction(Protocol):
    """The signature of :func:`clawgym.rollout.run_episode`."""

    async def __call__(self, request: EpisodeRequest, agent: Agent, backend: Backend) -> Ended: ...


@dataclass(frozen=True)
class EvalConfig:
    """What :func:`evaluate` runs, and where the results go."""

    task_set: TaskSet
    agent: Agent
    backend: Backend
    out: Path
    """The run folder. If it exists with the same configuration, the run is resumed."""
    samples: int = 1
    """Episodes per task. May be larger than in an existing run folder, but not smaller."""
    seed: int = 0
    concurrency: int | None = None
    """Most episodes at once; ``None``: as many as the machine can run."""
    keep_workspaces: bool = True
    """Store the final workspace of each episode in the run folder."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """No-model baseline by task id, in [0, 1], for the baseline-adjusted score. For other tasks
    :func:`~clawgym.verifiers.baselines.known_baseline` is used."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that change results. Stored in the run manifest as part of its identity."""


def episode_seed(run_seed: int, task_hash: str, sample: int) -> int:
    """The seed of one episode: the first 31 bits of SHA-256 over the run's seed, the task hash and the sample."""
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
    """Run the episodes that the run folder lacks, then write ``summary.json`` and ``report.html``.

    The caller closes the agent and the backend. Setting ``stop`` cancels the episodes in flight and returns an
    incomplete summary; so do many infrastructure errors in a row. ``retry_seconds``: pause before the first retry of
    an episode that ended by an infrastructure error.

    Raises :class:`~clawgym.errors.RunFolderError` if the folder belongs to another configuration, and
    :class:`~clawgym.errors.SandboxUnavailable` if the backend cannot work here.
    """
    isolation = await config.backend.probe()
    baselines = _baselines(config)
    manifest = make_manifest(
        "eval",
        config.task_set,
        agent={"name": config.agent.name, "version": config.agent.version, **config.agent.identity()},
        seed=config.seed,
        samples=config.samples,
        config=config.settings,
        isolation=isolation.as_dict(),
        baselines=baselines,
        grader=await describe_grader(config.task_set.tasks, config.backend),
        judged={task.id: judged_by(task.verifier) for task in config.task_set.tasks},
        users={task.id: _user_of(task) for task in config.task_set.tasks},
    )
    with RunFolder.open(config.out, manifest) as folder:
        run = _Run(config, folder, baselines, run_episode or _default_episode())
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


def _user_of(task: Task) -> str:
    """The user of a dialogue and the model that speaks, such as ``customer (gpt-5)``."""
    if task.dialogue is None or not task.dialogue.user:
        return ""
    speaker = getattr(users.get(task.dialogue.user), "speaker", None)
    return f"{task.dialogue.user} ({speaker()})" if speaker is not None else task.dialogue.user


def _baselines(config: EvalConfig) -> dict[str, float]:
    """The no-model baselines that are known, by task id."""
    from clawgym.verifiers.baselines import known_baseline

    known = {task.id: known_baseline(task) for task in config.task_set.tasks if task.id not in config.baselines}
    return {task: value for task, value in (known | dict(config.baselines)).items() if value is not None}


def _default_episode() -> EpisodeFunction:
    from clawgym.rollout import run_episode

    return run_episode


def _report(folder: RunFolder) -> None:
    from clawgym.evaluation.report import render_report

    folder.write("report.html", render_report(folder).encode())


class _Run:
    """One call of :func:`evaluate`: runs and records the attempts."""

    def __init__(
        self, config: EvalConfig, folder: RunFolder, baselines: Mapping[str, float], run_episode: EpisodeFunction
    ) -> None:
        self._config = config
        self._folder = folder
        self._baselines = baselines
        self._run_episode = run_episode

    async def attempt(self, task: Task, sample: int, attempt: int) -> Mapping[str, Any]:
        """See :class:`~clawgym.evaluation.schedule.AttemptFunction`."""
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
                baseline=self._baselines.get(task.id),
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
        except Exception as error:  # recorded as an infrastructure error of this episode; the run continues
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
