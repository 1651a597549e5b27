"""Trackers that fail never stop a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clawgym.trainers.common.tracking import TrackedRun, Trackers

from ..runs import small


class Noting:
    """Notes what it is told."""

    told: list[tuple[int, dict[str, float]]]

    def __init__(self, run: Any) -> None:
        Noting.told = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told.append((step, dict(metrics)))

    def close(self) -> None: ...


class Failing(Noting):
    """Fails whenever it is called."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("the disk is full")

    def close(self) -> None:
        raise OSError("the disk is full")


class Unreachable(Noting):
    """Does not start."""

    def __init__(self, run: Any) -> None:
        raise ConnectionError("nobody answers")


def trackers_of(path: Path, *names: str) -> Trackers:
    return Trackers(TrackedRun(path, "rl", small(tracking=dict.fromkeys(names))))


def test_failing_trackers_are_reported_and_others_get_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "clawgym.trainers")
    made = trackers_of(tmp_path, *(f"{__name__}:{one.__name__}" for one in (Unreachable, Failing, Noting)))
    made.log(1, {"actor/entropy": 0.5})
    made.close()
    assert Noting.told == [(1, {"actor/entropy": 0.5})]
    said = [record.getMessage() for record in caplog.records]
    assert ["nobody answers" in said[0], *("the disk is full" in text for text in said[1:])] == [True] * 3
