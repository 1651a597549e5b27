"""Property tests: every task survives every format; no input makes a reader raise anything but TaskError."""

from __future__ import annotations

import json
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from hypothesis import example, given, settings
from hypothesis import strategies as st

from clawgym.errors import TaskError
from clawgym.records import GradingMode, Limits, Task, TaskFile, VerifierSpec
from clawgym.tasks.formats import _toml, clawgym, harbor
from clawgym.tasks.formats._dockerfile import NeedsBuild, read_dockerfile
from clawgym.tasks.formats.rows import read_row, write_row
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

FEW = settings(max_examples=60, deadline=None)


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def problem_with(read: Callable[[], object]) -> str | None:
    """The message of the TaskError that ``read`` raises; any other exception fails the test."""
    try:
        read()
    except TaskError as error:
        return str(error)
    return None


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
name = st.text("abcXYZ019_-.é ß", min_size=1, max_size=8).filter(lambda s: s.strip(". ") == s and s[0] != "-")
path = st.lists(name, min_size=1, max_size=3).map("/".join)
utf8 = text.map(str.encode)


def collide(paths: list[str]) -> bool:
    folders = {str(parent) for p in paths for parent in PurePosixPath(p).parents}
    lowered = [p.casefold() for p in paths]
    return bool(folders & set(paths)) or len(set(lowered)) < len(lowered)


def files(content: st.SearchStrategy[bytes], first: str = "") -> st.SearchStrategy[tuple[TaskFile, ...]]:
    one = st.builds(TaskFile, path.map(lambda p: first + p), content, st.booleans())
    return st.lists(one, max_size=4).filter(lambda fs: not collide([f.path for f in fs])).map(tuple)


# Inputs go below "in/", verifier helpers below "lib/": names that the formats keep for themselves are tested elsewhere.
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
env = st.dictionaries(
    st.text("ABC_", min_size=1, max_size=4), text.filter(lambda v: not v.startswith("${")), max_size=2
)
seconds = st.floats(0.5, 1e6)
limits = st.builds(
    Limits,
    memory_mb=st.integers(1, 10**6),
    cpus=st.floats(0.1, 64) | st.integers(1, 8),
    agent_seconds=seconds,
    verify_seconds=seconds,
    max_steps=st.integers(1, 999),
)
tasks = st.builds(
    Task,
    id=st.just("the-task"),
    instruction=text.filter(str.strip),
    verifier=st.builds(
        lambda helpers, hook, mode, mutable, env: VerifierSpec(
            "reward_sh",
            (TaskFile("reward.sh", hook, executable=True), TaskFile("check.py", b"print(1)"), *helpers),
            mode=mode,
            mutable_inputs=mutable,
            env=env,
        ),
        files(utf8, "lib/"),
        st.sampled_from(
            [standard_reward_sh(), standard_reward_sh("cd /x && python3 check.py"), b"echo 0.5\n", b"\xc3\xa9\n"]
        ),
        st.sampled_from(GradingMode),
        st.lists(text, max_size=2).map(tuple),
        env,
    ),
    inputs=files(utf8, "in/"),
    workspace=st.sampled_from(["/root/.openclaw/workspace", "/app", "/srv/a b"]),
    image=st.sampled_from(["default", "org/own:1"]),
    limits=limits,
    env=env,
    metadata=st.dictionaries(text.filter(lambda k: k != "clawgym"), json_values, max_size=3),
    unsupported=st.none() | text.filter(bool),
)


@FEW
@given(tasks)
def test_every_format_keeps_hash_limits_and_reason(task: Task):
    with scratch() as folder:
        clawgym.write_task(task, folder / "c" / task.id)
        harbor.write_task(task, folder / "h" / task.id)
        copies = [
            clawgym.read_task(folder / "c" / task.id),
            harbor.read_task(folder / "h" / task.id),
            read_row(json.loads(write_row(task))),
        ]
        for copy in copies:
            assert copy.content_hash == task.content_hash
            assert copy.limits == task.limits
            assert copy.unsupported == task.unsupported
            assert (copy.id, copy.instruction, dict(copy.env)) == (task.id, task.instruction, dict(task.env))
            assert copy.verifier.digest == task.verifier.digest


@FEW
@given(tasks)
def test_writing_twice_gives_the_same_bytes(task: Task):
    again = read_row(json.loads(write_row(task)))
    assert write_row(again) == write_row(read_row(json.loads(write_row(again))))


def one_of(words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words.split())


entry_keys = one_of("task_id user_query metadata input_mount_dir clawgym")
row_keys = one_of("prompt hook_code input_files rule origin_template solution wrong clawgym")
paths = one_of("reward/test.py a a/b ../a /a reward/ reward/reward.sh ./a") | text
row_file = st.fixed_dictionaries(
    {"file_path": paths}, optional={"content": text | json_values, "executable": json_values}
)
row_files = st.lists(row_file | json_values, max_size=3)
rows = st.dictionaries(row_keys, json_values | text | row_files, max_size=8) | st.fixed_dictionaries(
    {"prompt": text, "input_files": st.lists(row_file, max_size=3)},
    optional={"hook_code": text, "origin_template": text, "solution": row_files, "clawgym": json_values},
)
entries = st.dictionaries(entry_keys, json_values | text, max_size=5)


@settings(max_examples=300, deadline=None)
@given(rows)
def test_any_row_is_a_task_or_a_task_error(value):
    problem = problem_with(lambda: read_row(value, "line 7", "some-id").content_hash)
    assert problem is None or "line 7" in problem


@FEW
@given(st.binary(max_size=200) | entries.map(lambda value: json.dumps(value).encode()))
def test_any_entry_is_a_task_or_a_task_error(data: bytes):
    with scratch() as folder:
        (folder / "reward").mkdir()
        (folder / "reward/reward.sh").write_text("echo 1\n")
        (folder / "data_entry.json").write_bytes(data)
        problem = problem_with(lambda: clawgym.read_task(folder).content_hash)
        assert problem is None or str(folder) in problem


toml_keys = one_of("schema_version version metadata environment agent verifier steps task solution")
setting_keys = one_of("timeout_sec memory memory_mb cpus env network_mode os user clawgym name workdir docker_image")
toml_values = json_values | st.dictionaries(setting_keys, json_values, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(toml_keys, toml_values, max_size=4), st.binary(max_size=80) | utf8)
def test_any_harbor_folder_is_a_task_or_a_task_error(document, other: bytes):
    with scratch() as root:
        folder = root / "task"
        for sub in ("environment", "tests"):
            (folder / sub).mkdir(parents=True)
        (folder / "task.toml").write_text(_toml.dumps(document), encoding="utf-8")
        (folder / "instruction.md").write_bytes(other)
        (folder / "environment/Dockerfile").write_bytes(other)
        (folder / "tests/test.sh").write_text("echo\n")
        problem = problem_with(lambda: harbor.read_task(folder).content_hash)
        assert problem is None or str(folder) in problem


docker_words = one_of(
    "FROM ubuntu WORKDIR COPY ADD RUN ENV USER A=1 $A ${B:-c} . /app a.txt d && mkdir touch chmod +x \\ --chmod=755 "
    '["a" [1] [[ ] " \' ARG apt-get install bash * # <<EOF'
) | st.just("\n")


@settings(max_examples=500, deadline=None)
@example("RUN touch touch \n WORKDIR touch")
@given(st.lists(docker_words, max_size=14).map(" ".join).map("FROM ubuntu\n".__add__) | text)
def test_any_dockerfile_is_interpreted_or_needs_build(dockerfile: str):
    with suppress(NeedsBuild):
        build = read_dockerfile(dockerfile, (TaskFile("a.txt", b""), TaskFile("d/b.txt", b"")))
        assert all(isinstance(file, TaskFile) for file in build.inputs(build.workdir))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(text, json_values, max_size=4))
def test_toml_reads_back_equal(document):
    def without_none(value):
        if isinstance(value, dict):
            return {k: without_none(v) for k, v in value.items() if v is not None}
        if isinstance(value, list):
            return [without_none(v) for v in value if v is not None]
        return value

    assert tomllib.loads(_toml.dumps(document)) == without_none(document)
