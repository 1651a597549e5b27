"""The cheap policies' rule for output paths, and what they leave."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records import Task, TaskFile, VerifierSpec
from clawgym.sandbox import Archive
from clawgym.verifiers.cheap import cheap_workspace, output_files, output_paths

WORD = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,7}", fullmatch=True)
PATH = st.builds(
    lambda folders, name, ending: "/".join([*folders, f"{name}.{ending}"]),
    st.lists(WORD, min_size=1, max_size=3),
    WORD,
    st.sampled_from(["json", "csv", "md", "txt", "py", "sha256", "R", "xlsx"]),
)
AROUND = st.sampled_from(
    [" {} ", "`{}`", '"{}",', "({})", "\n- {}: ", " {}.", "/root/.openclaw/workspace/{} ", "./{} "]
)


def task(instruction: str, *inputs: str) -> Task:
    files = tuple(TaskFile(path, b"in") for path in inputs)
    return Task("t", instruction, VerifierSpec("reward_sh", ()), inputs=files)


def files_in(archive: Archive) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}  # type: ignore[union-attr]


@given(st.lists(st.tuples(PATH, AROUND), max_size=5))
def test_paths_in_prose_are_found_once_in_order(mentions):
    instruction = " Write ".join(around.format(path) for path, around in [("x", " {} "), *mentions])
    assert output_paths(task(instruction)) == list(dict.fromkeys(path for path, _ in mentions))


@given(PATH)
def test_inputs_are_not_outputs(path):
    assert output_paths(task(f"Read {path}.", path)) == []


@given(st.text(max_size=200))
def test_output_paths_are_new_and_in_the_instruction(instruction):
    for path in output_paths(task(instruction)):
        assert path in instruction
        assert "/" in path
        assert ".." not in path
        assert not path.startswith(("/", "./"))


@pytest.mark.parametrize(
    "instruction",
    [
        "Write report.md.",
        "Write ../out/a.txt.",
        "Write out/../a.txt.",
        "Write /etc/app/a.conf.",
        "See https://host/a/b.json.",
        "Write out/a.docx.",
        "Write out/a.json-lines.",
    ],
)
def test_texts_without_output_paths(instruction):
    assert output_paths(task(instruction)) == []


def test_extension_is_not_truncated():
    assert output_paths(task("out/a.jsonl out/b.tar.gz out/c.md5.txt")) == [
        "out/a.jsonl",
        "out/b.tar.gz",
        "out/c.md5.txt",
    ]


@given(st.lists(PATH, max_size=6), st.lists(PATH, max_size=2))
def test_cheap_workspaces_can_be_unpacked(named, inputs):
    """No file is above or below another one."""
    made = task(" ".join(f"`{path}`" for path in named), *inputs)
    new = [f.path for f in output_files(made, lambda path: path.encode())]
    for path in new:
        assert not any(other != path and other.startswith(path + "/") for other in [*new, *inputs])
        assert not any(path.startswith(other + "/") for other in inputs)
    assert set(new) <= set(named)


def test_four_cheap_workspaces():
    made = task("Read in/a.csv, write out/b.json and out/b.json/c.md.", "in/a.csv")
    untouched = {"in/a.csv": b"in"}
    assert files_in(cheap_workspace(made, "nothing")) == untouched
    assert files_in(cheap_workspace(made, "empty")) == {}
    assert files_in(cheap_workspace(made, "touch")) == untouched | {"out/b.json": b""}
    assert files_in(cheap_workspace(made, "echo")) == untouched | {"out/b.json": made.instruction.encode()}
