"""Tasks with tool servers, layers and protected files, in and out of folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from clawgym.cli.tasks import app
from clawgym.errors import TaskError
from clawgym.records import Layer, Task, TaskFile, ToolServer, VerifierSpec
from clawgym.tasks import layers
from clawgym.tasks.formats import clawgym, harbor
from clawgym.tasks.formats.rows import read_row, write_row
from clawgym.tasks.layers import Lock, Wheel
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

LOCK = Lock("test/site", (Wheel("one", "1", "one-1-py3-none-any.whl", "a" * 64),))
CALLS = b'[{"name": "submit", "arguments": {"message": "x"}}]'


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layer:
    """A layer as one that was made here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = layers.layer_folder(LOCK)
    folder.mkdir(parents=True)
    folder.with_name(folder.name + ".json").write_text(json.dumps(LOCK.as_dict()))
    return Layer(LOCK.name, LOCK.digest, folder)


def made(**changes: Any) -> Task:
    files = (TaskFile("server.py", b"print(1)"), TaskFile("lib/a.py", b"", executable=True))
    script = TaskFile("reward.sh", standard_reward_sh(), executable=True)
    fields: dict[str, Any] = {
        "id": "the-task",
        "instruction": "Do it.",
        "verifier": VerifierSpec("reward_sh", (script, TaskFile("check.py", b"print(1)")), protected=("tests/*", "x")),
        "tools": (ToolServer("one", ("python3", "/tools/one/server.py"), files, {"A": "b"}), ToolServer("two", ("x",))),
        "solution": (TaskFile("solve.json", CALLS),),
        "wrong_solutions": (TaskFile("w.json", CALLS),),
    }
    return Task(**{**fields, **changes})


def entry(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "data_entry.json").read_text())


def change(folder: Path, **changes: Any) -> None:
    body = entry(folder)
    body["clawgym"] |= changes
    (folder / "data_entry.json").write_text(json.dumps(body))


def test_folder_keeps_tools_and_layers(tmp_path: Path, layer: Layer):
    task = made(layers={"/opt/layers/site": layer})
    clawgym.write_task(task, tmp_path / "the-task")
    copy = clawgym.read_task(tmp_path / "the-task")
    assert copy.content_hash == task.content_hash
    assert copy.unsupported is None
    assert copy.layers == task.layers
    assert copy.verifier.protected == task.verifier.protected
    assert [(s.name, s.argv, dict(s.env), len(s.files)) for s in copy.tools] == [
        ("one", ("python3", "/tools/one/server.py"), {"A": "b"}, 2),
        ("two", ("x",), {}, 0),
    ]
    assert [f.path for f in (*copy.solution, *copy.wrong_solutions)] == ["solve.json", "w.json"]


def test_hash_covers_servers_layers_and_protected_files():
    hashes = {
        made(**changes).content_hash
        for changes in (
            {},
            {"tools": (made().tools[0],)},
            {"tools": tuple(reversed(made().tools))},
            {"tools": (dataclasses.replace(made().tools[0], files=()), made().tools[1])},
            {"layers": {"/opt/x": Layer("n", "a" * 64, Path("/x"))}},
            {"layers": {"/opt/x": Layer("other name", "b" * 64, Path("/x"))}},
            {"verifier": dataclasses.replace(made().verifier, protected=())},
        )
    }
    assert len(hashes) == 7


def test_unprepared_layer_is_unsupported_with_same_hash(tmp_path: Path, layer: Layer):
    task = made(layers={"/opt/layers/site": layer})
    clawgym.write_task(task, tmp_path / "the-task")
    layer.folder.rmdir()
    copy = clawgym.read_task(tmp_path / "the-task")
    assert copy.content_hash == task.content_hash
    assert copy.unsupported is not None
    assert "test/site is not prepared on this machine: run clawgym tasks prepare" in copy.unsupported
    with pytest.raises(TaskError, match="clawgym tasks prepare"):
        clawgym.write_task(copy, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_prepare_makes_layers_of_a_folder(tmp_path: Path, layer: Layer, monkeypatch: pytest.MonkeyPatch):
    clawgym.write_task(made(layers={"/opt/layers/site": layer}), tmp_path / "set" / "the-task")
    clawgym.write_task(made(), tmp_path / "set" / "other")
    asked: list[str] = []
    monkeypatch.setattr(layers, "prepare", lambda lock, *, progress: asked.append(lock.digest))
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "set")])
    assert (result.exit_code, asked) == (0, [LOCK.digest])
    assert "2 tasks, 1 layers ready" in result.stdout


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"tools": [{"name": "one", "argv": []}]}, "argv"),
        ({"tools": [{"name": "one"}]}, "argv"),
        ({"tools": [{"name": "a b", "argv": ["x"]}, {"name": "one", "argv": ["x"]}]}, "letters, digits"),
        ({"tools": [{"name": "one", "argv": ["x"]}] * 2}, "the same name"),
        ({"tools": [{"name": "other", "argv": ["x"]}]}, "belongs to no server"),
        ({"tools": [{"name": "one", "argv": ["x"], "command": "y"}]}, "command"),
        ({"tools": []}, "belongs to no server"),
        ({"layers": {"relative": LOCK.as_dict()}}, "absolute folder"),
        ({"layers": {"/opt/x": {"name": "n"}}}, "layers['/opt/x']"),
        ({"protected": "x"}, "protected"),
    ],
)
def test_invalid_field_is_named(tmp_path: Path, changes: dict[str, Any], part: str):
    folder = tmp_path / "the-task"
    clawgym.write_task(made(solution=(), wrong_solutions=()), folder)
    change(folder, **changes)
    with pytest.raises(TaskError) as error:
        clawgym.read_task(folder)
    assert part in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("path", "content"), [("solution/solve.json", "{}"), ("wrong/w.json", '[{"name": 3}]'), ("wrong/v.sh", "true")]
)
def test_solutions_are_lists_of_calls(tmp_path: Path, path: str, content: str):
    folder = tmp_path / "the-task"
    clawgym.write_task(made(), folder)
    (folder / path).write_text(content)
    with pytest.raises(TaskError, match=path.split("/")[1].split(".")[0]):
        clawgym.read_task(folder)
    clawgym.write_task(made(solution=()), tmp_path / "other")
    (tmp_path / "other" / "solution").mkdir()
    (tmp_path / "other" / "solution" / "solve.sh").write_text("true")
    with pytest.raises(TaskError, match=r"solve\.json"):
        clawgym.read_task(tmp_path / "other")


def test_other_formats_raise(tmp_path: Path, layer: Layer):
    with_layer = made(tools=(), layers={"/opt/x": layer}, solution=(), wrong_solutions=())
    protected = made(tools=(), solution=(), wrong_solutions=())
    for task, what in ((made(), "tools"), (with_layer, "layers")):
        for write in (write_row, lambda t: harbor.write_task(t, tmp_path / "h")):
            with pytest.raises(TaskError, match=f"has {what}, which"):
                write(task)
    with pytest.raises(TaskError, match="Harbor does not support"):
        harbor.write_task(protected, tmp_path / "h")
    assert not (tmp_path / "h").exists()
    assert read_row(json.loads(write_row(protected))).content_hash == protected.content_hash
    row = json.loads(write_row(protected))
    row["clawgym"]["tools"] = [{"name": "one", "argv": ["x"]}]
    with pytest.raises(TaskError, match="rows cannot hold"):
        read_row(row)


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
servers = st.lists(
    st.builds(
        ToolServer,
        st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True),
        st.lists(words, min_size=1, max_size=3).map(tuple),
        st.lists(
            st.builds(TaskFile, st.sampled_from(["a", "b/c", "é"]), words.map(str.encode), st.booleans()),
            max_size=2,
            unique_by=lambda f: f.path,
        ).map(tuple),
        st.dictionaries(st.sampled_from(["A", "B"]), words),
    ),
    max_size=3,
    unique_by=lambda s: s.name,
).map(tuple)


@settings(max_examples=30, deadline=None)
@given(servers=servers, protected=st.lists(words, max_size=2).map(tuple))
def test_any_task_survives_writing_and_reading(
    servers: tuple[ToolServer, ...], protected: tuple[str, ...], tmp_path_factory: Any
):
    task = made(tools=servers, solution=(), wrong_solutions=())
    task = dataclasses.replace(task, verifier=dataclasses.replace(task.verifier, protected=protected))
    folder = tmp_path_factory.mktemp("set") / "the-task"
    clawgym.write_task(task, folder)
    copy = clawgym.read_task(folder)
    assert copy.content_hash == task.content_hash
    assert copy.verifier.protected == task.verifier.protected
