"""The submission as a patch: git makes of it exactly what is graded."""

from __future__ import annotations

import dataclasses
import io
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clawgym.records import TaskFile
from clawgym.verifiers.diff import diff, submission_diff
from clawgym.verifiers.workspace import packed, submitted, unprotected, with_protected

from .tasks_for_tests import task

Files = Mapping[str, tuple[bytes, bool]]

LINES = st.lists(
    st.sampled_from([b"a", b"b", b"c", b"", b"\r", b" ", b"-- x", b"\\ No newline", b"\xff\xe4"]), max_size=12
)
TEXT = st.builds(lambda lines, end: b"\n".join(lines) + end, LINES, st.sampled_from([b"", b"\n"]))
DATA = st.one_of(TEXT, st.binary(max_size=200).map(lambda data: b"\0" + data))
NAMES = st.sampled_from(
    ["a", "b", "a b", "d/x", "d/y z", "d/e/f", 'q"uote', "back\\slash", "tab\there", "ä", "n\nl", " "]
)


def made(files: Files) -> dict[str, TaskFile]:
    return {path: TaskFile(path, data, mode) for path, (data, mode) in files.items()}


def applied(before: Files, patch: bytes) -> Files:
    """What ``git apply`` makes of ``before``."""
    with TemporaryDirectory() as name:
        root = Path(name)
        for path, (data, mode) in before.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
            (root / path).chmod(0o755 if mode else 0o644)
        if patch:
            git = ["git", "-c", "core.fileMode=true", "apply", "--whitespace=nowarn", "-"]
            env = {"PATH": "/usr/bin:/bin", "HOME": name, "GIT_CEILING_DIRECTORIES": str(root.parent)}
            done = subprocess.run(git, cwd=root, input=patch, capture_output=True, env=env, check=False)
            assert done.returncode == 0, (done.stderr, patch)
        found = [path for path in root.rglob("*") if path.is_file()]
        return {str(p.relative_to(root)): (p.read_bytes(), bool(p.stat().st_mode & 0o100)) for p in found}


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
FILES = st.dictionaries(NAMES, st.tuples(DATA, st.booleans()), max_size=4)


@needs_git
@settings(max_examples=50)
@given(FILES, FILES)
@example({"a": (b"x\n", False)}, {"a": (b"x\n", True)})
@example({"a": (b"x", False)}, {"a": (b"x\n", True)})
@example({"a": (b"", False)}, {})
@example({}, {"a b": (b"", True)})
@example({"d": (b"x\n", False)}, {"d/x": (b"x\n", False)})
def test_git_apply_gives_the_graded_files(before: Files, after: Files) -> None:
    assert applied(before, diff(made(before), made(after))) == after


def numbered(changed: Mapping[int, bytes], count: int = 3000) -> bytes:
    return b"".join(changed.get(n, b"line %d\n" % n) for n in range(count))


@needs_git
@pytest.mark.parametrize(
    "changed", [{5: b"other\n"}, {0: b"", 1500: b"x\ny\n", 2999: b"end"}, dict.fromkeys(range(3000), b"z\n")]
)
def test_large_files(changed: Mapping[int, bytes]) -> None:
    before, after = {"a": (numbered({}), False)}, {"a": (numbered(changed), False)}
    patch = diff(made(before), made(after))
    assert applied(before, patch) == after
    assert len(patch) < (1000 if len(changed) == 1 else 200_000)


def test_expensive_comparison_is_one_hunk() -> None:
    before = b"".join(b"%d\n" % (n % 1999) for n in range(30_000))
    after = b"".join(b"%d\n" % (n * 7 % 1999) for n in range(30_000))
    patch = diff(made({"a": (before, False)}), made({"a": (after, False)}))
    assert patch.count(b"@@ -") == 1


def test_unchanged_workspace_has_empty_diff() -> None:
    files = made({"a": (b"x", False), "b": (b"\0", True)})
    assert diff(files, files) == b""


def test_too_large_file_is_only_named() -> None:
    text = diff({}, made({"big": (b"x\n" * 10 * 2**20, False), "small": (b"x\n", False)}))
    assert len(text) < 1000
    assert b"# too large to be shown: big" in text
    assert b"+++ b/small" in text


def protecting(*patterns: str, overlay: tuple[TaskFile, ...] = ()):
    base = task(inputs=(TaskFile("a.py", b"1\n"), TaskFile("tests/test_a.py", b"assert 1\n")))
    files = (*base.verifier.files, *(TaskFile(f"overlay/{f.path}", f.source, f.executable) for f in overlay))
    return dataclasses.replace(base, verifier=dataclasses.replace(base.verifier, protected=patterns, files=files))


def tree_of(made_task, files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """What is graded where the agent left ``files``."""
    tar = io.BytesIO(packed([TaskFile(path, data) for path, data in files.items()]))
    if links:
        with tarfile.open(fileobj=tar, mode="a") as out:
            for name, target in links.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                out.addfile(entry)
    spec = made_task.verifier
    return {f.path: f.read() for f in with_protected(submitted(tar.getvalue(), spec), made_task.inputs, spec)}


GIVEN = {"tests/test_a.py": b"assert 1\n"}


@pytest.mark.parametrize(
    ("left", "links"),
    [
        ({"a.py": b"2\n", "tests/test_a.py": b"pass\n"}, {}),
        ({"a.py": b"2\n"}, {}),
        ({"a.py": b"2\n", "tests": b"a file"}, {}),
        ({"a.py": b"2\n", "mine/test_a.py": b"pass\n"}, {"tests": "mine"}),
        ({"a.py": b"2\n", "tests/test_a.py/x.py": b"pass\n", "tests/conftest.py": b"x"}, {}),
        ({"a.py": b"2\n", "conftest.py": b"x", "deep/er/conftest.py": b"x"}, {"deep/conftest.py": "../a.py"}),
        ({"a.py": b"2\n", "__pycache__/a.cpython-311.pyc": b"x", "x/__pycache__/y.py": b"", "z.pyc": b""}, {}),
        ({"a.py": b"2\n", "e.egg-info/entry_points.txt": b"x", ".git/hooks/x": b"", "s/e.dist-info/f": b""}, {}),
        ({"a.py": b"2\n"}, {"b": "tests", "c": "a.py", "tests/test_b.py": "../a.py"}),
    ],
)
def test_protected_files_are_restored(left: dict[str, bytes], links: dict[str, str]) -> None:
    made_task = protecting("tests/*", "conftest.py", "*/conftest.py")
    found = tree_of(made_task, left, links)
    mine = {path: data for path, data in found.items() if path.startswith("mine/")}
    assert {path: data for path, data in found.items() if path not in mine} == {"a.py": b"2\n", **GIVEN}


def test_overlay_is_graded_but_not_in_diff() -> None:
    hidden = TaskFile("tests/test_b.py", b"assert 2\n")
    made_task = protecting("tests/*", overlay=(hidden, TaskFile("new/test_c.py", b"assert 3\n")))
    left = {"a.py": b"2\n", "new/test_c.py/deep": b"x", "tests/test_b.py": b"mine"}
    assert tree_of(made_task, left) == {
        "a.py": b"2\n",
        **GIVEN,
        "tests/test_b.py": b"assert 2\n",
        "new/test_c.py": b"assert 3\n",
    }
    text = submission_diff(made_task, packed([TaskFile(path, data) for path, data in left.items()]))
    assert b"b/a.py" in text
    assert b"test_" not in text


@given(st.dictionaries(st.sampled_from(["a.py", "b.py", "tests/test_a.py", "x/conftest.py"]), TEXT, max_size=4))
def test_diff_matches_graded_files(left: dict[str, bytes]) -> None:
    made_task = protecting("tests/*", "*/conftest.py")
    tar = packed([TaskFile(path, data) for path, data in left.items()])
    after = submitted(tar, made_task.verifier)
    text = submission_diff(made_task, tar)
    assert (text == b"") == ({p: f.read() for p, f in after.items()} == {"a.py": b"1\n"})
    assert set(unprotected(made_task.inputs, made_task.verifier)) == {"a.py"}
    assert tree_of(made_task, left) == {**{p: f.read() for p, f in after.items()}, **GIVEN}
