"""The folder of a training run: configuration, run manifest, metrics, evaluations, report.

Invariants: a line of metrics is complete or absent. The metrics of a step are written before its checkpoint; after a
kill, repeated steps replace their old metrics. Only one process writes a folder at a time, and only with the
configuration that the run started with (budget, tracking, guards, compute, checkpoint interval and learning rate may
change).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from clawgym.errors import TrainingError
from clawgym.records import Task, TaskSet
from clawgym.records.run_folder import MANIFEST, RunFolder, make_manifest, repair_tail, write_atomic
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.services import LoopPolicy, Services, SplitScore
from clawgym.trainers.common.splits import Splits
from clawgym.trainers.common.start_model import given_model, model_origin
from clawgym.trainers.common.tracking import TrackedRun, Trackers, View
from clawgym.trainers.config import TrainConfig

__all__ = ["EVALUATIONS", "METRICS", "Run"]

METRICS, EVALUATIONS, TIMELINE = "metrics.jsonl", "evaluations.jsonl", "timeline.jsonl"
_CHANGEABLE = ("budget", "tracking", "compute", "checkpoint_every", "guards")
"""Settings that may change when a run is resumed. In the local trainer ``optimizer.lr`` may change too; the run
manifest keeps the first value. verl resumes with the learning rate of its checkpoint."""
_T = TypeVar("_T")


class Run:
    """Writes the run folder. Use as a context manager."""

    def __init__(
        self, folder: RunFolder, config: TrainConfig, method: str, view: View, stop: asyncio.Event | None = None
    ) -> None:
        self.stop = stop or asyncio.Event()
        """Once it is set, the run writes a checkpoint and ends."""
        self.folder = folder
        self.path = folder.path
        self.config = config
        self.method = method
        self._view = view
        for name in (METRICS, EVALUATIONS, TIMELINE):
            if (self.path / name).exists():
                repair_tail(self.path / name)
        self._trackers = Trackers(TrackedRun(self.path, method, config))

    @classmethod
    def open(
        cls,
        path: Path,
        config: TrainConfig,
        method: str,
        splits: Splits,
        view: View,
        stop: asyncio.Event | None = None,
    ) -> Self:
        """Start a run in ``path``, or resume it.

        Raises :class:`~clawgym.errors.RunFolderError` as :meth:`~clawgym.records.run_folder.RunFolder.open` does, and
        :class:`~clawgym.errors.TrainingError` if the model or the data are not found, before anything is written."""
        given_model(config, weights=config.trainer != "tinker")
        if method == "sft" and config.sft.data is not None and not Path(config.sft.data).expanduser().is_file():
            raise TrainingError(f"sft.data {config.sft.data}: no such file: name a file of exported episodes")
        settings = config.model_dump(mode="json")
        fixed = {name: value for name, value in settings.items() if name not in _CHANGEABLE}
        # The learning rate may change; the run manifest keeps the first one.
        if config.trainer == "local" and (path / MANIFEST).exists():
            begun = RunFolder.read(path).manifest.config.get("optimizer")
            if isinstance(begun, Mapping) and "lr" in begun:
                fixed["optimizer"] = {**fixed["optimizer"], "lr": begun["lr"]}
        origin = model_origin(config)
        engine = {} if origin is None else {"model": origin}
        manifest = make_manifest(
            "train",
            TaskSet(f"{config.tasks.set}:heldout", splits.heldout),
            agent={"name": config.agent.name, "protocol": config.agent.protocol, "engine": engine},
            seed=config.seed,
            samples=config.evaluation.samples,
            config={"method": method, **fixed, "parts": splits.about()},
        )
        folder = RunFolder.open(path, manifest)
        try:
            import yaml

            folder.write("config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
            return cls(folder, config, method, view, stop)
        except BaseException:
            folder.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            self._trackers.close()
            from clawgym.trainers.common.report import render

            self.folder.write("report.html", render(self.path).encode())
        except Exception:
            if error is None:  # otherwise the error that ended the run is raised
                raise
        finally:
            self.folder.close()

    def say(self, text: str) -> None:
        """Show a message."""
        self._view.say(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show the metrics of a step."""
        row = {"step": step, "time": time.time(), **metrics}
        self._line(METRICS, row)
        self._view.step(step, metrics)
        self._trackers.log(step, metrics)

    def timeline(self, step: int, spans: Iterable[tuple[str, float, float]]) -> None:
        """Write when each loop was busy: (loop, start, end), in seconds since 1970."""
        for loop, start, end in spans:
            self._line(TIMELINE, {"step": step, "loop": loop, "start": start, "end": end})

    def rewind(self, step: int) -> None:
        """Remove metrics of steps after ``step``, which will be repeated."""
        for name in (METRICS, EVALUATIONS, TIMELINE):
            if lines := self._lines(name):
                kept = "".join(json.dumps(row) + "\n" for row in lines if row["step"] <= step)
                write_atomic(self.path / name, kept.encode())

    async def measure(self, services: Services, part: str, tasks: Sequence[Task], step: int, *,
                      greedy: bool | None = None) -> SplitScore | None:  # fmt: skip
        """Evaluate the engine's policy on a split and write the score; ``None`` if the run was stopped meanwhile."""
        greedy = self.config.evaluation.greedy if greedy is None else greedy
        samples = self.start_measurement(part, len(tasks), greedy)
        started = time.monotonic()
        score = await self.unless_stopped(services.measure(tasks, samples=samples, greedy=greedy, channel=part))
        if score is not None:
            self.record_measurement(score, part, step, len(tasks), greedy=greedy, seconds=time.monotonic() - started)
        return score

    async def unless_stopped(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """The result of ``work``; ``None`` if :attr:`stop` is set before, which cancels it."""
        doing, stopped = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({doing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            stopped.cancel()
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    def start_measurement(self, part: str, tasks: int, greedy: bool) -> int:
        """Show that an evaluation starts. Returns the number of episodes per task."""
        samples = 1 if greedy else self.config.evaluation.samples
        self._view.measuring(part, tasks * samples)
        return samples

    def record_measurement(
        self, score: SplitScore, part: str, step: int, tasks: int, *, greedy: bool, seconds: float
    ) -> None:
        """Write the result of an evaluation."""
        samples = 1 if greedy else self.config.evaluation.samples
        found = score.estimate
        row: dict[str, Any] = {
            "step": step,
            "task_set": self.config.tasks.set,
            "split": part,
            "score": found.value,
            "low": found.low,
            "high": found.high,
            "episodes": tasks * samples,
            "samples": samples,
            "greedy": greedy,
            "by_generator": score.by_generator,
            "partial": score.partial,
            "infra": score.infra,
            "seconds": seconds,
        }
        self._line(EVALUATIONS, row)
        self._view.measured(row)
        name = f"eval/{part}{'_greedy' if greedy else ''}"
        self._trackers.log(step, {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high})

    async def validate(self, services: Services, tasks: Sequence[Task], progress: Progress) -> None:
        """Evaluate on the validation split and update the best step of ``progress``, unless the run is stopped."""
        score = await self.measure(services, "validation", tasks, progress.step)
        if score is None:
            return
        progress.record_score(score.estimate.value)
        progress.extra["partial"] = score.partial

    async def measure_best(
        self, services: Services, policy: LoopPolicy, checkpoints: Checkpoints, tasks: Sequence[Task]
    ) -> None:
        """Evaluate the best checkpoint on the held-out split, sampled and greedy, unless this was done before or the
        run is stopped."""
        if self.stop.is_set():
            return
        best = checkpoints.best()
        if best is None:
            raise TrainingError(f"{self.path}: there is no checkpoint to evaluate: train first")
        step = int(best.name)
        missing = self.unmeasured(step)
        if missing:
            await policy.restore(best, services.engine, step)
        for greedy in missing:
            await self.measure(services, "heldout", tasks, step, greedy=greedy)

    def unmeasured(self, step: int) -> list[bool]:
        """The decoding modes (greedy: False, True) in which ``step`` was not evaluated yet on the held-out split."""
        known = [(row["split"], row["step"], row["greedy"]) for row in self._lines(EVALUATIONS)]
        return [greedy for greedy in (False, True) if ("heldout", step, greedy) not in known]

    def unvalidated(self, step: int) -> bool:
        """Whether ``step`` was not evaluated on the validation split, as the run was stopped meanwhile."""
        return not any(row["split"] == "validation" and row["step"] == step for row in self._lines(EVALUATIONS))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def _line(self, name: str, row: Mapping[str, Any]) -> None:
        left = memoryview(json.dumps(row).encode() + b"\n")
        try:
            with (self.path / name).open("ab", buffering=0) as file:
                before = os.fstat(file.fileno()).st_size
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(before)
                    raise
        except OSError as error:
            raise TrainingError(
                f"{self.path / name}: cannot be written ({error.strerror}); nothing was overwritten: free disk space, "
                "or repair the disk, and run the same command again to resume from the last checkpoint"
            ) from error
