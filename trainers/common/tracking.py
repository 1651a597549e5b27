"""Where the figures of a run go while it runs: a terminal, Weights & Biases, TensorBoard.

Invariant: a figure is shown as it was measured; what shows it never changes the run, and never ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clawgym.errors import MissingDependency
from clawgym.trainers.config import TrainConfig
from clawgym.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clawgym.console import Console

__all__ = ["LiveView", "PlainView", "Tracker", "View", "sinks"]

_log = logging.getLogger("clawgym.trainers")


class Tracker(Protocol):
    """A place for figures."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def sinks(config: TrainConfig, path: Path, method: str) -> Sequence[Tracker]:
    """The trackers that were asked for. Raises :class:`~clawgym.errors.MissingDependency` without their package."""
    found: list[Tracker] = []
    if config.tracking.wandb != "off":
        found.append(_Wandb(config, path, method))
    if config.tracking.tensorboard:
        found.append(_TensorBoard(path))
    return found


class _Wandb:
    def __init__(self, config: TrainConfig, path: Path, method: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingDependency(f"tracking.wandb needs wandb ({error}): pip install 'clawgym[train]'") from error
        # The same name each time: a run that goes on is one curve.
        self._run: Any = wandb.init(
            project=config.tracking.project,
            name=path.name,
            id=f"{config.name}-{method}-{config.seed}-{path.name}".replace("/", "-")[:120],
            resume="allow",
            mode=config.tracking.wandb,  # type: ignore[arg-type]
            dir=str(path),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        try:
            self._run.log({"step": step, **figures})
        except Exception as error:  # a tracker that fails loses a curve, not the run
            _log.warning("wandb: %s", error)

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            _log.warning("wandb: %s", error)


class _TensorBoard:
    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                f"tracking.tensorboard needs tensorboard ({error}): pip install 'clawgym[train]'"
            ) from error
        self._writer = SummaryWriter(str(path / "tensorboard"))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        try:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        except Exception as error:
            _log.warning("tensorboard: %s", error)

    def close(self) -> None:
        try:
            self._writer.close()
        except Exception as error:
            _log.warning("tensorboard: %s", error)


class View(Protocol):
    """What a run tells somebody who waits for it."""

    def say(self, text: str) -> None: ...

    def step(self, step: int, figures: Mapping[str, float]) -> None: ...

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
    """A line for each measurement and each tenth step."""

    def __init__(self, console: Console, *, every: int = 10) -> None:
        self._console = console
        self._every = every

    def say(self, text: str) -> None:
        self._console.say(text)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        if step % self._every == 0:
            shown = [f"{label} {figures[name]:.4g}" for name, label in _SHOWN if name in figures]
            self.say(f"step {step}: {', '.join(shown)}")

    def measuring(self, part: str, episodes: int) -> None:
        pass

    def measured(self, row: Mapping[str, Any]) -> None:
        self.say(_measured(row))


_SHOWN = (
    ("rollout/avg_reward_submitted", "reward"),
    ("rollout/group_mixed_frac", "mixed groups"),
    ("reward/process_mean", "process"),
    ("sft/loss", "loss"),
    ("actor/pg_loss", "loss"),
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


class LiveView:
    """A table that changes in place, with the measurements above it. Use as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        from rich.live import Live

        self._console, self._title = console, visible(title)
        self._figures: Mapping[str, float] = {}
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

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        self._step, self._before, self._figures, self._doing = step, self._figures, figures, ""
        self._live.update(self._table())

    def measuring(self, part: str, episodes: int) -> None:
        self._doing = f"measuring {part}: {episodes} episodes"
        self._live.update(self._table())

    def measured(self, row: Mapping[str, Any]) -> None:
        self._doing = ""
        self.say(_measured(row))

    def _table(self) -> RenderableType:
        from rich.table import Table

        table = Table(title=f"{self._title} · step {self._step}", caption=self._doing or None, title_justify="left")
        table.add_column("figure")
        table.add_column("now", justify="right")
        table.add_column("before", justify="right", style="dim")
        for name, _ in _SHOWN:
            if name in self._figures:
                before = f"{self._before[name]:.4g}" if name in self._before else ""
                table.add_row(name, f"{self._figures[name]:.4g}", before)
        return table
