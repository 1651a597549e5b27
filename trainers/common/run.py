"""The folder of a training run: configuration, run manifest, figures, measurements, report.

Invariants: a figure is a line that is whole or not there; those of a step are written before its checkpoint, and those
of steps that are done again, after a run was killed, take the place of the old ones; one process at a time writes a
folder, and only with the configuration it began with (budget, tracking, the rate of learning and what the machine does
at once may change).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from clawgym.errors import TrainingError
from clawgym.records import Task, TaskSet
from clawgym.records.run_folder import MANIFEST, RunFolder, make_manifest, repair_tail, write_atomic
from clawgym.trainers.common.checkpoints import Checkpoints, Progress, load_weights
from clawgym.trainers.common.parts import Parts
from clawgym.trainers.common.policy import Policy
from clawgym.trainers.common.scratch import given_model, model_origin
from clawgym.trainers.common.services import Measured, Setting
from clawgym.trainers.common.tracking import TrackedRun, Trackers, View
from clawgym.trainers.config import TrainConfig

__all__ = ["EVALUATIONS", "METRICS", "Run"]

METRICS, EVALUATIONS, TIMELINE = "metrics.jsonl", "evaluations.jsonl", "timeline.jsonl"
_FREE = ("budget", "tracking", "compute", "checkpoint_every", "guards")
"""Settings that a run may go on with changed; so is ``optimizer.lr``, of which the run manifest keeps the first, in the
local trainer: verl goes on with that of its checkpoint."""


class Run:
    """Writes what a run says of itself. Use as a context manager."""

    def __init__(self, folder: RunFolder, config: TrainConfig, method: str, view: View) -> None:
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
    def open(cls, path: Path, config: TrainConfig, method: str, parts: Parts, view: View) -> Self:
        """Begin a run at ``path``, or go on with one. Raises :class:`~clawgym.errors.RunFolderError` as
        :meth:`~clawgym.records.run_folder.RunFolder.open` does, and :class:`~clawgym.errors.TrainingError` for a model
        or data that are not there, before anything is written."""
        given_model(config)
        if method == "sft" and config.sft.data is not None and not Path(config.sft.data).expanduser().is_file():
            raise TrainingError(f"sft.data {config.sft.data}: no such file: name one of exported episodes")
        settings = config.model_dump(mode="json")
        fixed = {name: value for name, value in settings.items() if name not in _FREE}
        # The rate may change: the run manifest keeps the one it began with.
        if config.trainer == "local" and (path / MANIFEST).exists():
            begun = RunFolder.read(path).manifest.config.get("optimizer")
            if isinstance(begun, Mapping) and "lr" in begun:
                fixed["optimizer"] = {**fixed["optimizer"], "lr": begun["lr"]}
        origin = model_origin(config)
        engine = {} if origin is None else {"model": origin}
        manifest = make_manifest(
            "train",
            TaskSet(f"{config.tasks.set}:heldout", parts.heldout),
            agent={"name": config.agent.name, "protocol": config.agent.protocol, "engine": engine},
            seed=config.seed,
            samples=config.evaluation.samples,
            config={"method": method, **fixed, "parts": parts.about()},
        )
        folder = RunFolder.open(path, manifest)
        try:
            import yaml

            folder.write("config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
            return cls(folder, config, method, view)
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
            if error is None:  # else what ended the run is what is said
                raise
        finally:
            self.folder.close()

    def say(self, text: str) -> None:
        """Tell whoever watches."""
        self._view.say(text)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of a step."""
        row = {"step": step, "time": time.time(), **figures}
        self._line(METRICS, row)
        self._view.step(step, figures)
        self._trackers.log(step, figures)

    def timeline(self, step: int, spans: Iterable[tuple[str, float, float]]) -> None:
        """When which loop was busy, until the end of a step: (loop, begin, end), seconds since 1970."""
        for loop, start, end in spans:
            self._line(TIMELINE, {"step": step, "loop": loop, "start": start, "end": end})

    def rewind(self, step: int) -> None:
        """Forget figures of steps after ``step``: they are done again."""
        for name in (METRICS, EVALUATIONS, TIMELINE):
            if lines := self._lines(name):
                kept = "".join(json.dumps(row) + "\n" for row in lines if row["step"] <= step)
                write_atomic(self.path / name, kept.encode())

    async def measure(self, setting: Setting, part: str, tasks: Sequence[Task], step: int, *,
                      greedy: bool | None = None) -> Measured:  # fmt: skip
        """The score of the engine's policy on a part, written down."""
        greedy = self.config.evaluation.greedy if greedy is None else greedy
        samples = self.measuring(part, len(tasks), greedy)
        started = time.monotonic()
        score = await setting.measure(tasks, samples=samples, greedy=greedy, channel=part)
        self.measured(score, part, step, len(tasks), greedy=greedy, seconds=time.monotonic() - started)
        return score

    def measuring(self, part: str, tasks: int, greedy: bool) -> int:
        """A measurement begins; how many episodes of each task it takes."""
        samples = 1 if greedy else self.config.evaluation.samples
        self._view.measuring(part, tasks * samples)
        return samples

    def measured(self, score: Measured, part: str, step: int, tasks: int, *, greedy: bool, seconds: float) -> None:
        """Write a measurement down."""
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
            "infra": score.infra,
            "seconds": seconds,
        }
        self._line(EVALUATIONS, row)
        self._view.measured(row)
        name = f"eval/{part}{'_greedy' if greedy else ''}"
        self._trackers.log(step, {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high})

    async def validate(self, setting: Setting, tasks: Sequence[Task], progress: Progress) -> None:
        """Measure on the validation part; the policy may be the best from now on."""
        score = await self.measure(setting, "validation", tasks, progress.step)
        progress.weigh(score.estimate.value)

    async def measure_best(
        self, setting: Setting, policy: Policy, checkpoints: Checkpoints, tasks: Sequence[Task]
    ) -> None:
        """The score of the best checkpoint on what is held out, sampled and greedy, unless it is known."""
        best = checkpoints.best()
        if best is None:
            raise TrainingError(f"{self.path}: no checkpoint is there to measure: train first")
        step = int(best.name)
        missing = self.unmeasured(step)
        if missing:
            load_weights(best, policy)
            await policy.publish(setting.engine, step)
        for greedy in missing:
            await self.measure(setting, "heldout", tasks, step, greedy=greedy)

    def unmeasured(self, step: int) -> list[bool]:
        """In which ways (greedy or not) the policy of ``step`` was not measured yet on what is held out."""
        known = [(row["split"], row["step"], row["greedy"]) for row in self._lines(EVALUATIONS)]
        return [greedy for greedy in (False, True) if ("heldout", step, greedy) not in known]

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
                f"{self.path / name}: cannot be written ({error.strerror}); nothing was overwritten: make room, or "
                "mend that, and give the same command again; it goes on from the last checkpoint"
            ) from error
