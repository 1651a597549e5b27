"""Records refuse what makes no sense, and name the field."""

from __future__ import annotations

import dataclasses
import math

import pytest

from clawgym.errors import TaskError
from clawgym.records import Limits, ToolServer

FIELDS = [field.name for field in dataclasses.fields(Limits)]


def test_default_limits() -> None:
    """Published scores rest on them."""
    assert dataclasses.asdict(Limits()) == {
        "memory_mb": 1024,
        "pids": 256,
        "cpus": 1.0,
        "disk_mb": 512,
        "file_mb": 256,
        "setup_seconds": 60.0,
        "agent_seconds": 900.0,
        "verify_seconds": 120.0,
        "teardown_seconds": 30.0,
        "command_seconds": 60.0,
        "output_bytes": 65536,
        "max_steps": 50,
    }


@pytest.mark.parametrize("name", FIELDS)
def test_limits_must_be_positive_and_bounded(name: str) -> None:
    assert getattr(Limits(**{name: 2**53}), name) == 2**53
    assert getattr(Limits(**{name: 1}), name) == 1
    for wrong, shown in (
        (2**53 + 1, r"2\*\*53"),
        (math.inf, r"2\*\*53"),
        (0, "not 0"),
        (-1, "not -1"),
        (math.nan, "nan"),
    ):
        with pytest.raises(TaskError, match=rf"limits\.{name} must be a positive number.*{shown}"):
            Limits(**{name: wrong})


def test_limits_plus() -> None:
    assert Limits(memory_mb=100, pids=7).plus(memory_mb=28) == Limits(memory_mb=128, pids=7)


@pytest.mark.parametrize("name", ["mail", "a", "my-mail", "2"])
def test_valid_tool_server_names(name: str) -> None:
    assert ToolServer(name, ("true",)).name == name


@pytest.mark.parametrize("name", ["", "-", "a b", "a/b", "..", "a.b", "a_b", "a\n"])
def test_invalid_tool_server_names_are_refused(name: str) -> None:
    with pytest.raises(TaskError, match="letters, digits and '-' only"):
        ToolServer(name, ("true",))
