"""Instances are made of a package from an index, tried in real boxes, and the same ones come out again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from clawgym import cli
from clawgym.agents.noop import NoopAgent
from clawgym.agents.oracle import OracleAgent
from clawgym.agents.script import ScriptAgent
from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Layer, Outcome
from clawgym.sandbox import Backend
from clawgym.tasks import load
from clawgym.tasks.layers import Lock, Wheel
from clawgym.tasks.swe import make, recipes, resolve, sources
from clawgym.tasks.swe.make import Baseline, Candidate, Journal
from clawgym.tasks.swe.mutations import Edit
from clawgym.tasks.swe.recipes import Recipe
from clawgym.tasks.swe.sources import Source
from clawgym.tasks.swe.words import reveals

from ...rollouts import episode_of
from ..local_index import SHOP, Index, add_pytest, sdist, serving, wheel

LIBRARY = "src/shop/__init__.py"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index with the package ``shop``, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(tmp_path) as made:
        monkeypatch.setenv("PIP_INDEX_URL", made.address)
        for name in [name for name in os.environ if name.startswith("PIP_") and name != "PIP_INDEX_URL"]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        made.add("shop", *sdist("shop", "1.0", SHOP))
        yield made


@pytest.fixture
def source(index: Index) -> Source:
    return sources.read_source(resolve.find_sdist("shop", None))


LOCK = Lock("test/pytest", (Wheel("pytest", "1", "pytest-1-py3-none-any.whl", "0" * 64),))


def journal() -> Journal:
    return Journal(None, {})


# -- sources


def test_repository_of_a_source(source: Source):
    paths = [file.path for file in source.files]
    assert paths == sorted(paths)
    assert LIBRARY in paths
    assert "docs/index.md" not in paths
    assert source.root == "src"
    assert source.library == (LIBRARY,)
    about = source.by_path["src/shop-1.0.dist-info/METADATA"].read()
    assert b"Name: shop" in about


def test_resolve_chooses_versions(index: Index):
    for version in ("0.9", "1.10", "2.0rc1"):
        index.add("shop", *sdist("shop", version, SHOP))
    assert resolve.find_sdist("shop", None).version == "1.10"
    assert resolve.find_sdist("shop", "0.9").version == "0.9"
    with pytest.raises(TaskSetNotFound, match="has no source archive"):
        resolve.find_sdist("shop", "3.0")


def test_hostile_archives_leave_nothing(index: Index, tmp_path: Path):
    for name, files in (("climbs", {"../../evil.py": ""}), ("starts", {"/evil.py": ""})):
        index.add(name, *sdist(name, "1.0", files))
        with pytest.raises(TaskError, match="not a plain relative path"):
            sources.read_source(resolve.find_sdist(name, None))
    assert not list(tmp_path.rglob("evil.py"))
    index.add("broken", "broken-1.0.tar.gz", b"\x1f\x8b nothing")
    with pytest.raises(TaskError, match="is damaged"):
        sources.read_source(resolve.find_sdist("broken", None))


def test_package_code_is_not_run(index: Index, tmp_path: Path):
    index.add("loud", *sdist("loud", "1.0", {"setup.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n", "loud.py": ""}))
    assert "setup.py" in sources.read_source(resolve.find_sdist("loud", None)).by_path
    assert not (tmp_path / "ran").exists()


def test_impure_package_is_named(index: Index, source: Source):
    add_pytest(index)
    lock, left_out = resolve.resolve(source)
    assert {wheel.project for wheel in lock.wheels} >= {"pytest", "pluggy"}
    assert left_out == ()
    machine = "fast-1.0-cp311-cp311-manylinux_2_17_x86_64.whl"
    index.add("fast", machine, wheel("fast", "1.0", {"fast.py": ""})[1])
    with pytest.raises(TaskError, match="fast has no matching pure-Python wheel"):
        resolve.resolve(source, ["fast"])
    with pytest.raises(TaskError, match="pytest depends on it"):
        resolve.resolve(dataclasses.replace(source, sdist=dataclasses.replace(source.sdist, project="pluggy")))


# -- candidates and trials


def test_candidates_depend_on_seed(source: Source):
    first = list(make.candidates(source, 1))
    assert first == list(make.candidates(source, 1))
    assert first != (other := list(make.candidates(source, 2)))
    assert sorted(first, key=repr) == sorted(other, key=repr)
    assert len({candidate.edit.operator for candidate in first[:8]}) == 8


async def test_kept_instances(source: Source, site_layer: Layer, backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """A bug that breaks nothing, one that breaks all, one that ends the collection, one that hangs, and a good one."""
    base = await make.baseline(backend, source, site_layer)
    assert len(base.tests) == 19
    assert base.dropped == 0
    good = source.by_path[LIBRARY].read().decode()

    async def found(old: str, new: str, base: Baseline = base) -> dict:
        at = len(good[: good.index(old)].encode())
        edit = Edit(at, at + len(old.encode()), new, "comparison")
        return await make.try_candidate(backend, source, site_layer, base, Candidate(LIBRARY, edit))

    assert (await found("whole = 0", "whole = 0 or 0"))["why"] == "breaks nothing"
    assert (await found("def total(", "def sum_of("))["why"] == "collection"
    start = '"""Prices of a small shop."""'
    spoilt = f"{start}\nsorted = divmod = None\n"
    assert (await found(start, spoilt))["why"] == "breaks too much"
    assert (await found(start, f"{start}\nraise SystemExit"))["why"] in ("collection", "crash")
    with monkeypatch.context() as patch:
        patch.setattr(make, "_LEAST_SECONDS", 2.0)
        assert (await found("whole = 0", "while True: pass", dataclasses.replace(base, seconds=0.0)))["why"] == "hang"
    kept = (await found("count < 1", "count < 2"))["kept"]
    assert kept["fail"] == ["tests/test_shop.py::test_cheapest[1-found1]"]
    assert kept["shown"][0]["message"].startswith("assert [] == [1]")


@pytest.fixture
async def recipe(source: Source, site_layer: Layer, backend: Backend) -> Recipe:
    return await make.make(backend, source, LOCK, site_layer, number=2, seed=3, journal=journal())


async def test_instance_is_sound(recipe: Recipe, source: Source, site_layer: Layer, backend: Backend):
    """Made again it is the same; its solution solves it, nothing and what is wrong does not; its words do not tell."""
    again = recipes.read_recipe(recipes.write_recipe(recipe), "recipe")
    assert again == recipe
    assert [i.id for i in recipe.instances] == ["shop-1.0-001", "shop-1.0-002"]
    tasks = [recipes.build(again, instance, source, site_layer) for instance in again.instances]
    assert [recipes.instance_hash(task) for task in tasks] == [instance.hash for instance in recipe.instances]
    text = recipes.write_recipe(recipe).decode()
    for line in "".join(SHOP.values()).splitlines():
        assert len(line.strip()) < 16 or line.strip() not in text, "a recipe holds no package's code"
    for task, instance in zip(tasks, recipe.instances, strict=True):
        edit = Edit(instance.edit.start, instance.edit.end, instance.edit.text, instance.edit.operator)
        assert reveals(task.instruction, instance.path, source.by_path[instance.path].read(), edit) is None
        assert len(task.wrong_solutions) >= 3
    task = tasks[0]
    episode = await episode_of(task, OracleAgent(), backend)
    assert episode.outcome is Outcome.SOLVED, episode.result
    assert set(episode.result.checks) == set(recipe.tests)
    for agent in (NoopAgent(), *(ScriptAgent(file.read(), file.path) for file in task.wrong_solutions)):
        failed = await episode_of(task, agent, backend)
        assert failed.outcome is Outcome.FAILED, agent.name
        assert failed.result.strict == 0


def test_recipe_for_another_file_raises(source: Source, site_layer: Layer):
    good = source.by_path[LIBRARY].read()
    row = {"start": 0, "end": 0, "text": "#", "operator": "constant"}
    instance = recipes.Instance(
        id="x", path=LIBRARY, edit=row, before="0" * 64, after="", fail=["t::a"], shown=[], others=[], hash=""
    )
    recipe = Recipe(
        format=1,
        project="shop",
        version="1.0",
        licence="",
        sdist={"filename": "shop-1.0.tar.gz", "sha256": "0" * 64},
        lock=LOCK.as_dict(),
        arguments=[],
        tests=["t::a", "t::b"],
        seconds=1,
        seed=0,
        tried=1,
        instances=[instance],
    )
    with pytest.raises(TaskError, match="is not the file it was made for"):
        recipes.build(recipe, instance, source, site_layer)
    import hashlib

    right = instance.model_copy(update={"before": hashlib.sha256(good).hexdigest()})
    with pytest.raises(TaskError, match="gives another text"):
        recipes.build(recipe, right, source, site_layer)


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"{", "is not a recipe"), (b"[]", "is not a recipe"), (b"\x1f\x8b", "is not a recipe"), (b"{}", "field")],
)
def test_invalid_recipes_raise(data: bytes, said: str):
    with pytest.raises(TaskError, match=said):
        recipes.read_recipe(data, "some.json")


async def test_suite_that_cannot_run_is_named(index: Index, site_layer: Layer, backend: Backend):
    files = {"many.py": "X = 1\n", "test_many.py": "import nowhere\n\n\ndef test():\n    assert True\n"}
    index.add("many", *sdist("many", "1.0", files))
    source = sources.read_source(resolve.find_sdist("many", None))
    with pytest.raises(TaskError, match=r"(?s)many 1\.0: its suite does not run in a sandbox.*--with.*nowhere"):
        await make.baseline(backend, source, site_layer)


async def test_flaky_tests_are_dropped(index: Index, site_layer: Layer, backend: Backend):
    tests = (
        "import time, many, pytest\n\n@pytest.mark.parametrize('n', range(12))\ndef test_it(n):\n    assert many.X\n"
    )
    tests += "\n@pytest.mark.parametrize('n', [time.time()])\ndef test_now(n):\n    pass\n"
    tests += "\ndef test_never():\n    assert 0\n"
    index.add("many", *sdist("many", "1.0", {"many.py": "X = 1\n", "test_many.py": tests}))
    source = sources.read_source(resolve.find_sdist("many", None))
    base = await make.baseline(backend, source, site_layer)
    assert sorted(base.tests) == sorted(f"test_many.py::test_it[{n}]" for n in range(12))
    assert base.dropped == 3


# -- the command


def _command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["tasks", "make", "swe", *arguments])


def test_command_resumes(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    add_pytest(index)
    monkeypatch.chdir(tmp_path)
    done = _command("shop", "--count", "1")
    assert done.exit_code == 0, (done.output, done.exception)
    folder = tmp_path / "swe-shop-1.0"
    first = (folder / "journal.jsonl").read_text()
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    recipe = recipes.read_recipe((folder / "recipe.json").read_bytes(), "recipe")
    read = load(str(folder / "tasks")).tasks
    assert [recipes.instance_hash(task) for task in read] == [instance.hash for instance in recipe.instances]
    asked = len(index.asked)
    assert _command("shop", "--count", "1").exit_code == 0
    assert (folder / "journal.jsonl").read_text() == first, "nothing is tried again"
    assert not [path for path in index.asked[asked:] if path.endswith(".tar.gz")]
    rows = [json.loads(line) for line in first.splitlines()]
    assert rows[0]["package"] == "shop"
    assert len(rows) >= 3
    assert "was started with another seed" in str(_command("shop", "--seed", "9").exception)
    assert "shpo: the package index" in str(_command("shpo").exception)
