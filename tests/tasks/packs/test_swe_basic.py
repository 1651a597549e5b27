"""The pack ``swe-basic``: recipes without a package's code, packages on one side only, and two instances for real."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents.noop import NoopAgent
from clawgym.agents.oracle import OracleAgent
from clawgym.agents.script import ScriptAgent
from clawgym.errors import DownloadError, TaskError, TaskSetNotFound
from clawgym.records import Outcome
from clawgym.sandbox import Backend
from clawgym.tasks import load
from clawgym.tasks.packs import swe_basic as pack
from clawgym.tasks.swe.mutations import OPERATORS
from clawgym.tasks.swe.recipes import Recipe, instance_hash
from clawgym.tasks.swe.sources import read_source
from clawgym.tasks.swe.words import Example, describe

from ...rollouts import episode_of

EVERY = [name for packages in pack.PACKAGES.values() for name in packages]
each_package = pytest.mark.parametrize("name", EVERY)


def shipped() -> list[Recipe]:
    return [pack.recipe(name) for name in EVERY]


def test_sizes_of_splits():
    recipes = shipped()
    assert len(recipes) >= 6
    assert sum(len(recipe.instances) for recipe in recipes) >= 60
    operators = {instance.edit.operator for recipe in recipes for instance in recipe.instances}
    assert len(operators) >= 8
    assert "body" in operators
    assert operators <= set(OPERATORS)


def test_no_package_is_in_both_splits():
    assert not set(pack.PACKAGES["train"]) & set(pack.PACKAGES["heldout"])
    assert min(len(packages) for packages in pack.PACKAGES.values()) >= 3
    ids = [instance.id for recipe in shipped() for instance in recipe.instances]
    assert len(ids) == len(set(ids))


def test_every_file_is_a_recipe_of_the_pack():
    files = [p.name for p in resources.files(pack).iterdir() if p.name.endswith(".gz")]
    assert sorted(files) == sorted(f"{name}.json.gz" for name in EVERY)
    assert sum((Path(pack.__file__).parent / name).stat().st_size for name in files) < 500_000


@each_package
def test_recipes_are_consistent(name: str):
    recipe = pack.recipe(name)
    assert recipe.project == name
    assert recipe.source.filename.endswith(".tar.gz")
    assert {wheel.project for wheel in recipe.layer.wheels} >= {"pytest", "pluggy"}
    assert len(set(recipe.tests)) == len(recipe.tests)
    edits = [(i.path, i.edit.start, i.edit.end, i.edit.text) for i in recipe.instances]
    assert len(set(edits)) == len(edits)
    for instance in recipe.instances:
        assert instance.id.startswith(f"{name}-{recipe.version}-")
        assert 1 <= len(instance.fail) <= max(1, 0.3 * len(recipe.tests))
        assert set(instance.fail) <= set(recipe.tests)
        assert instance.shown
        assert {shown.test for shown in instance.shown} <= set(instance.fail)
        assert len(instance.edit.text) < 200
        assert "\n" not in instance.edit.text or instance.edit.operator == "arguments"
        examples = [Example(s.test, "", s.type, s.message) for s in instance.shown]
        words = describe(recipe.project, recipe.version, frozenset(), examples, len(instance.fail))
        assert not re.search(rf"(?<![\w-]){re.escape(instance.path)}(?!\w)", words)


def test_unknown_split_seed_or_package_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(TaskSetNotFound, match="choose 'train' or 'heldout'"):
        pack.load("test")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="leave the seeds out"):
        pack.load("train", [1])
    with pytest.raises(TaskSetNotFound, match="Known: h11"):
        pack.recipe("numpy")
    with pytest.raises(TaskSetNotFound, match="Did you mean 'h11'"):
        pack.recipe("h12")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(DownloadError, match=r"swe-basic:heldout needs packages .*: go online, or set PIP_INDEX"):
        load("swe-basic:heldout")


@pytest.fixture(scope="module")
def smallest() -> str:
    """The package to try for real; skips without the index."""
    try:
        read_source(pack.recipe("inflection").source)
        pack.taskset("try", ["inflection"])
    except DownloadError as error:
        pytest.skip(str(error))
    return "inflection"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def test_built_tasks_match_recorded_hashes(smallest: str, monkeypatch: pytest.MonkeyPatch):
    recipe = pack.recipe(smallest)
    tasks = pack.taskset("try", [smallest]).tasks
    assert [instance_hash(task) for task in tasks] == [instance.hash for instance in recipe.instances]
    source = read_source(recipe.source)
    code = b"\n".join(source.by_path[path].read() for path in source.library).decode()
    for text in _texts(recipe.model_dump()):
        assert len(text) < 24 or text not in code, "a recipe holds no package's code"
    bent = recipe.instances[0].model_copy(update={"hash": hashlib.sha256(b"").hexdigest()})
    other = recipe.model_copy(update={"instances": [bent]})
    monkeypatch.setattr(pack, "recipe", lambda name: other)
    with pytest.raises(TaskError, match="differs from the recorded task"):
        pack.taskset("try", [smallest])


async def test_two_instances_are_sound(smallest: str, backend: Backend):
    for task in pack.taskset("try", [smallest]).tasks[:2]:
        solved = await episode_of(task, OracleAgent(), backend)
        assert solved.outcome is Outcome.SOLVED, solved.result
        idle = await episode_of(task, NoopAgent(), backend)
        assert idle.outcome is Outcome.FAILED
        failing = [test for test, value in idle.result.checks.items() if value < 1]
        assert len(failing) == task.metadata["failing"]
        script = task.wrong_solutions[-1]
        wrong = await episode_of(task, ScriptAgent(script.read(), script.path), backend)
        assert wrong.outcome is Outcome.FAILED, script.path
