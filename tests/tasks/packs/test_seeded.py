"""What holds for every pack that is made from seeds."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from clawgym.tasks.packs import gui_basic, injection_basic, terminal_basic, toolcall_basic

PACKS = {
    "gui_basic_hashes.json": gui_basic,
    "injection_basic_hashes.json": injection_basic,
    "terminal_basic_hashes.json": terminal_basic,
    "toolcall_basic_hashes.json": toolcall_basic,
}
each_instance = pytest.mark.parametrize(
    ("golden", "pack", "name"),
    [pytest.param(golden, pack, name, id=name) for golden, pack in PACKS.items() for name in pack.GENERATORS],
)


@each_instance
def test_instances_are_pinned(golden: str, pack: ModuleType, name: str) -> None:
    """The golden hashes change with every change of an instance, a server or a checker: raise VERSION when they do."""
    task = pack.make(name, 7)
    assert task.content_hash == pack.make(name, 7).content_hash
    hashes = json.loads((Path(__file__).parent / golden).read_text())
    assert task.content_hash == hashes.get(name)


@each_instance
def test_form(golden: str, pack: ModuleType, name: str) -> None:
    task, generator = pack.make(name, 1), pack.GENERATORS[name]
    assert task.id == f"{name}-h0001"
    assert task.metadata == {
        "category": generator.family,
        "family": generator.family,
        "generator": name,
        "level": generator.level,
        "seed": 1,
    }
    assert generator.level in range(1, 6)
    assert (generator.draft.__doc__ or "").partition("\n")[0].endswith(".")
