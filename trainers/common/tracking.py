"""Where metrics go during a run: the terminal, Weights & Biases, TensorBoard, MLflow, Trackio.

Invariant: trackers and views never change or stop a run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from clawgym.errors import ClawGymError, MissingDependency
from clawgym.registry import trackers
from clawgym.trainers.config import TrainConfig
from clawgym.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clawgym.console import Console

__all__ = ["LiveView", "PlainView", "TrackedRun", "Tracker", "Trackers", "View", "on_terminal"]

_log = logging.getLogger("clawgym.trainers")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker gets metrics of."""

    path: Path
    """The run folder."""
    method: str
    """``rl``, ``sft``, or a method of another trainer."""
    config: TrainConfig


class Tracker(Protocol):
    """Receives the metrics of a run, besides ``metrics.jsonl``.

    The constructor takes the :class:`TrackedRun`; options are keyword-only: ``tracking: {NAME: {option: value}}``. An
    exception from :meth:`log` or :meth:`close` is logged as a warning; the run continues.

    >>> from clawgym.registry import trackers
    >>> @trackers.register("lines")
    ... class Lines:
    ...     \"\"\"Appends metrics to a text file.\"\"\"
    ...
    ...     def __init__(self, run, *, file: Path = Path("figures.txt")):
    ...         self.path = run.path / file
    ...
    ...     def log(self, step, metrics):
    ...         with self.path.open("a") as out:
    ...             print(step, dict(metrics), file=out)
    ...
    ...     def close(self): ...
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of ``step``, by names such as ``actor/entropy``. A step that is repeated after a kill is
        logged again."""
        ...

    def close(self) -> None:
        """The run ends, possibly because of an error. It may be resumed later."""
        ...


class Trackers:
    """The trackers that a configuration names."""

    def __init__(self, run: TrackedRun) -> None:
        """Make the trackers. One that cannot start, for example because its server does not answer, is left out with a
        warning.

        Raises :class:`~clawgym.errors.TrainingError` for an unknown name or invalid options, and
        :class:`~clawgym.errors.MissingDependency` without the package of a tracker."""
        self._made: dict[str, Tracker] = {}
        for name, options in run.config.tracking.items():
            try:
                self._made[name] = trackers.make(name, run, **(options or {}))
            except ClawGymError:
                raise
            except Exception as error:
                _log.warning("tracker %s does not start, and gets no metrics: %s", name, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics to all trackers."""
        self._each(lambda one: one.log(step, metrics))

    def close(self) -> None:
        """Close all trackers."""
        self._each(lambda one: one.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, one in self._made.items():
            try:
                call(one)
            except Exception as error:
                _log.warning("tracker %s: %s", name, error)


def _id_of(run: TrackedRun) -> str:
    """A fixed id, so that a resumed run continues its curve."""
    about = run.config
    return f"{about.name}-{run.method}-{about.seed}-{run.path.name}".replace("/", "-")[:120]


@trackers.register("wandb")
class WandbTracker:
    """Weights & Biases.

    Args:
        mode: ``offline`` writes into the run folder only.
        project: the project of the run.
    """

    def __init__(
        self, run: TrackedRun, *, mode: Literal["online", "offline"] = "online", project: str = "clawgym"
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingDependency(f"the tracker wandb needs wandb ({error}): pip install 'clawgym[train]'") from error
        about = run.config
        self._run: Any = wandb.init(
            project=project,
            name=run.path.name,
            id=_id_of(run),
            resume="allow",
            mode=mode,
            dir=str(run.path),
            config=about.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


@trackers.register("tensorboard")
class TensorBoardTracker:
    """TensorBoard event files, in ``tensorboard/`` of the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                f"the tracker tensorboard needs tensorboard ({error}): pip install 'clawgym[train]'"
            ) from error
        self._writer = SummaryWriter(str(run.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@trackers.register("mlflow")
class MlflowTracker:
    """MLflow.

    Args:
        uri: the tracking server or database. Default: ``mlflow.db`` in the run folder.
        experiment: the experiment of the run.
    """

    def __init__(self, run: TrackedRun, *, uri: str | None = None, experiment: str = "clawgym") -> None:
        try:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingDependency(f"the tracker mlflow needs mlflow ({error}): pip install mlflow") from error
        # By default a server that does not answer would hold up every step for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._client: Any = MlflowClient(uri or f"sqlite:///{run.path.absolute() / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(experiment)
        folder = (run.path.absolute() / "mlflow").as_uri() if uri is None else None
        id = found.experiment_id if found else self._client.create_experiment(experiment, folder)
        name = _id_of(run).replace("'", "")
        runs = self._client.search_runs([id], f"tags.clawgym = '{name}'", max_results=1)
        if runs:
            self._run: str = runs[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
        else:
            self._run = self._client.create_run(id, run_name=run.path.name, tags={"clawgym": name}).info.run_id
            self._client.log_dict(self._run, run.config.model_dump(mode="json"), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in metrics.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


@trackers.register("trackio")
class TrackioTracker:
    """Trackio, in its own folder on this machine (``TRACKIO_DIR``), or in the Space that ``TRACKIO_SPACE_ID`` names.

    Args:
        project: the project of the run.
    """

    def __init__(self, run: TrackedRun, *, project: str = "clawgym") -> None:
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingDependency(f"the tracker trackio needs trackio ({error}): pip install trackio") from error
        with contextlib.redirect_stdout(io.StringIO()):
            self._run: Any = trackio.init(
                project=project,
                name=_id_of(run),  # Trackio finds a run that resumes by its name
                resume="allow",
                config=run.config.model_dump(mode="json"),
                auto_log_cpu=False,
                auto_log_gpu=False,
                embed=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class View(Protocol):
    """Shows the progress of a run: messages, steps, evaluations."""

    def say(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def measuring(self, part: str, episodes: int) -> None: ...

    def measured(self, row: Mapping[str, Any]) -> None: ...


def _measured(row: Mapping[str, Any]) -> str:
    by = ", ".join(f"{name} {value:.2f}" for name, value in row["by_generator"].items())
    how = "greedy" if row["greedy"] else "sampled"
    return (
        f"step {row['step']}: {row['split']} {row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}] {how}, "
        f"{row['episodes']} episodes in {row['seconds']:.0f} s ({by})"
    )


class PlainView:
    """One line for each evaluation and every tenth step."""

    def __init__(self, console: Console, *, every: int = 10) -> None:
        self._console = console
        self._every = every

    def say(self, text: str) -> None:
        self._console.say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % self._every == 0:
            shown = [f"{label} {metrics[name]:.4g}" for name, label in _SHOWN if name in metrics]
            self.say(f"step {step}: {', '.join(shown)}")

    def measuring(self, part: str, episodes: int) -> None:
        pass

    def measured(self, row: Mapping[str, Any]) -> None:
        self.say(_measured(row))


_SHOWN = (
    ("rollout/avg_reward_submitted", "reward"),
    ("rollout/group_mixed_frac", "mixed groups"),
    ("reward/process_mean", "process"),
    ("sft/loss", "imitation loss"),
    ("actor/pg_loss", "policy loss"),
    ("actor/entropy", "entropy"),
    ("actor/step_kl", "kl"),
    ("actor/clip_fraction", "clipped"),
    ("actor/grad_norm", "gradient"),
    ("sft/grad_norm", "gradient"),
    ("training/rollout_probs_diff", "mismatch"),
    ("staleness/mean", "staleness"),
    ("perf/trainer_idle_ratio", "idle"),
    ("timing/step", "s/step"),
    ("timing/update", "s/update"),
)


def on_terminal() -> View:
    """A :class:`PlainView` on standard error."""
    from clawgym.console import Console

    return PlainView(Console(stderr=True))


class LiveView:
    """A table that is updated in place, with evaluations above it. Use as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        from rich.live import Live

        self._console, self._title = console, visible(title)
        self._metrics: Mapping[str, float] = {}
        self._before: Mapping[str, float] = {}
        self._step = 0
        self._doing = ""
        self._live = Live(self._table(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._before, self._metrics, self._doing = step, self._metrics, metrics, ""
        self._live.update(self._table())

    def measuring(self, part: str, episodes: int) -> None:
        self._doing = f"evaluating {part}: {episodes} episodes"
        self._live.update(self._table())

    def measured(self, row: Mapping[str, Any]) -> None:
        self._doing = ""
        self.say(_measured(row))

    def _table(self) -> RenderableType:
        from rich.table import Table

        table = Table(title=f"{self._title} · step {self._step}", caption=self._doing or None, title_justify="left")
        table.add_column("metric")
        table.add_column("now", justify="right")
        table.add_column("before", justify="right", style="dim")
        for name, _ in _SHOWN:
            if name in self._metrics:
                before = f"{self._before[name]:.4g}" if name in self._before else ""
                table.add_row(name, f"{self._metrics[name]:.4g}", before)
        return table
