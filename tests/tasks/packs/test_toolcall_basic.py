"""The pack ``toolcall-basic``: every generator's solution passes, nothing cheap or wrong does, and seeds stay apart.

Most of it runs the worlds in this process; ``tests/envs`` and the last tests here use real boxes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym.agents import make_agent
from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Task
from clawgym.sandbox import Backend
from clawgym.tasks.packs import toolcall_basic as pack
from clawgym.tasks.packs.seeded import draft_of
from clawgym.tasks.packs.toolcall_basic import _build
from clawgym.tasks.worlds import servers

from ...rollouts import episode_of
from ..served import Host, Running

CASES = [(name, seed) for name in pack.GENERATORS for seed in (0, 1)]
each_case = pytest.mark.parametrize(("name", "seed"), CASES if os.environ.get("CLAWGYM_WHOLE") else CASES[1::2])
each_generator = pytest.mark.parametrize("name", pack.GENERATORS)
WORLDS = [name for name in pack.GENERATORS if pack.make(name, 1).tools[0].name == "world"]


def made(name: str, seed: int) -> Task:
    task = pack.make(name, seed)
    if task.unsupported:
        pytest.skip(task.unsupported)
    return task


@each_case
def test_solution_passes_and_noop_fails(name: str, seed: int, tmp_path: Path) -> None:
    task = made(name, seed)
    host = Host(task, tmp_path)
    assert set(host.scores().values()) == {0.0}, "doing nothing must be worth nothing"
    assert not [result for result in host.run(task.solution[0]) if result["isError"]]
    scores = host.scores()
    assert set(scores.values()) == {1.0}, scores
    assert 1 <= len(scores) <= 8


@each_case
def test_wrong_solutions_fail(name: str, seed: int, tmp_path: Path) -> None:
    task = made(name, seed)
    assert len({file.path for file in task.wrong_solutions}) >= 3
    for file in task.wrong_solutions:
        assert re.fullmatch(r"[a-z0-9-]+\.json", file.path)
        host = Host(task, tmp_path / Path(file.path).stem)
        host.run(file)
        assert min(host.scores().values()) < 1.0, f"{file.path} passes"


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", [3, 4, 6, 9])
def test_more_seeds_of_the_worlds(name: str, seed: int) -> None:
    """Building runs the solution; what is wrong must leave another state than the right one, or another answer."""
    task = pack.make(name, seed)
    data = json.loads(re.search(r'r"""\n(.*)\n"""', task.verifier.files[1].read().decode(), re.DOTALL)[1])  # type: ignore[index]
    assert data["world"]["start"] != data["world"]["end"] or data["answer"]


@each_generator
def test_reference_computes_its_answer(name: str, tmp_path: Path) -> None:
    """What the interpreter prints at last is what the solution answers."""
    task = made(name, 1)
    data = task.verifier.files[1].read().decode()
    steps = json.loads(task.solution[0].read())
    code = [step["arguments"] for step in steps if step["name"] == "code_interpreter"]
    if not code:
        return
    server = next(server for server in task.tools if server.name == "python")
    for target, layer in task.layers.items():
        server = type(server)(
            server.name,
            server.argv,
            server.files,
            {k: v.replace(target, str(layer.folder)) for k, v in server.env.items()},
        )
    with Running(server, tmp_path) as running:
        for file in task.inputs:
            (tmp_path / "workspace" / file.path).write_bytes(file.read())
        printed = [running.call("code_interpreter", **arguments)[0] for arguments in code]
    message = steps[-1]["arguments"]["message"]
    said = message.removeprefix("Answer: ")
    if name == "math-radical":
        assert re.sub(r"\D", " ", printed[-1]).split() == re.findall(r"\d+", said)[::-1]
    elif '"answer"' in data and name != "math-fraction":
        assert printed[-1] == (message if name == "data-words" else said)
    assert not any("Traceback" in text for text in printed)


GARBAGE: dict[str, Callable[[Path], object]] = {
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "huge": lambda path: path.write_bytes(b"x" * (17 << 20)),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("/dev/zero"),
    "fifo": os.mkfifo,
    "empty": lambda path: path.write_bytes(b""),
    "another-database": lambda path: _database(path, "CREATE TABLE t (a); INSERT INTO t VALUES (1)"),
    "views": lambda path: _database(
        path,
        "CREATE VIEW accounts AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c;"
        "CREATE VIEW events AS SELECT 1; CREATE VIEW mails AS SELECT 1; CREATE VIEW items AS SELECT 1",
    ),
    "header-only": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(4080)),
}


def _database(path: Path, script: str) -> None:
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()


@pytest.mark.parametrize("name", ["desk-absence", "lookup-customer"])
def test_checker_survives_garbage(name: str, tmp_path: Path) -> None:
    for kind, leave in GARBAGE.items():
        host = Host(made(name, 1), tmp_path / kind)
        host.run(host.task.solution[0])
        assert host.world
        host.world.db.close()
        path = host.workspace / servers.WORLD_FILE
        path.unlink()
        leave(path)
        scores = host.scores()
        assert {value for check, value in scores.items() if check != "answer"} == {0.0}, kind


def test_truncated_file_scores_zero(tmp_path: Path) -> None:
    host = Host(made("bank-settle", 1), tmp_path)
    host.run(host.task.solution[0])
    assert host.world
    host.world.db.close()
    path = host.workspace / servers.WORLD_FILE
    path.write_bytes(path.read_bytes()[:9000])
    assert set(host.scores().values()) == {0.0}


def test_order_and_ids_do_not_count(tmp_path: Path) -> None:
    host = Host(made("desk-absence", 1), tmp_path)
    steps = json.loads(host.task.solution[0].read())
    assert host.world
    detour = host.world.call("create_event", _any_event(host))
    assert not detour["isError"]
    changing = [step for step in steps if step["name"] in ("cancel_event", "send_mail")]
    for step in reversed(changing):
        assert not host.world.call(step["name"], step["arguments"])["isError"]
    assert host.scores()["nothing_else"] == 0.0
    made_id = json.loads(detour["content"][0]["text"])["id"]
    host.world.call("cancel_event", {"event": made_id})
    assert set(host.scores().values()) == {1.0}


def _any_event(host: Host) -> dict:
    assert host.world
    (room,) = host.world.db.execute("SELECT name FROM rooms LIMIT 1").fetchone()
    (who,) = host.world.db.execute("SELECT address FROM people LIMIT 1").fetchone()
    when = {"start": "2033-01-01T09:00", "end": "2033-01-01T10:00"}
    return {"title": "Detour", **when, "room": room, "organizer": who, "attendees": []}


@each_generator
def test_splits_have_different_instances(name: str) -> None:
    seeds = (*range(12), 10**12, 10**12 + 1)
    drafts = {seed: draft_of(pack.GENERATORS[name], seed, _build.chain_of) for seed in seeds}
    for seed, draft in drafts.items():
        for text in (draft.instruction, _build.chain_of(draft)):
            assert hashlib.sha256(text.encode()).digest()[0] % 2 == seed % 2
    for of in (lambda d: d.instruction, _build.chain_of):
        sides = [{of(draft) for seed, draft in drafts.items() if seed % 2 == side} for side in (0, 1)]
        assert not sides[0] & sides[1]
        assert len(sides[0]) + len(sides[1]) == len(seeds)


@each_generator
def test_form(name: str) -> None:
    task = pack.make(name, 1)
    assert [f.path for f in task.solution] == ["solve.json"]
    assert task.verifier.executes_agent_code is None
    for file in (*task.solution, *task.wrong_solutions):
        steps = json.loads(file.read())
        assert all(set(step) == {"name", "arguments"} for step in steps)
        assert [step["name"] for step in steps].count("submit") == 1 == [s["name"] for s in steps[-1:]].count("submit")
    reachable = {file.sha256 for server in task.tools for file in server.files}
    assert not reachable & {file.sha256 for file in task.verifier.files}


def test_families_and_levels() -> None:
    levels: dict[str, set[int]] = {}
    for generator in pack.GENERATORS.values():
        levels.setdefault(generator.family, set()).add(generator.level)
    assert len(levels) >= 8
    assert all(found == {1, 2, 3} for found in levels.values())


def test_load() -> None:
    tasks = pack.load()
    assert (tasks.name, tasks.version) == ("toolcall-basic:heldout", pack.VERSION)
    assert 48 <= len(tasks) == 2 * len(pack.GENERATORS) <= 60
    assert [t.id for t in pack.load("train", [4]).tasks][:2] == ["math-digits-t0004", "math-count-t0004"]


def test_errors_say_what_to_do() -> None:
    with pytest.raises(TaskSetNotFound, match="Did you mean 'bank-settle'"):
        pack.make("bank-setle", 1)
    with pytest.raises(TaskError, match="seeds that are odd"):
        pack.load("heldout", [1, 2])
    with pytest.raises(TaskSetNotFound, match="choose 'train' or 'heldout'"):
        pack.load("test")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="negative"):
        pack.make("bank-settle", -1)


SAMPLE = ["math-digits", "data-join", "bank-settle", "desk-absence", "lookup-customers"]


@pytest.mark.parametrize("name", SAMPLE)
async def test_in_real_sandboxes(name: str, backend: Backend) -> None:
    task = made(name, 1)
    for agent, strict in (("oracle", 1.0), ("noop", 0.0)):
        episode = await episode_of(task, make_agent(agent), backend)
        assert episode.result is not None, episode.error
        assert episode.result.strict == strict, (agent, episode.result)
        assert set(episode.result.checks.values()) == {strict}
