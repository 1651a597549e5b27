"""The strict applier: what git or difflib writes it applies, and what does not fit changes nothing."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clawgym.records import TaskFile
from clawgym.tasks.swe import patching
from clawgym.tasks.swe.solution import patch_solution
from clawgym.verifiers.diff import diff

LINES = st.lists(
    st.sampled_from([b"a", b"b", b"", b"\r", b"-- x", b"--- a/b", b"+++ b/c", b"\\ x", b"\xff"]), max_size=12
)
TEXT = st.builds(lambda lines, end: b"\n".join(lines) + end, LINES, st.sampled_from([b"", b"\n"]))
NAMES = st.sampled_from(["a", "b", "a b", "d/x", 'q"uote', "back\\slash", "tab\there", "ä"])
FILES = st.dictionaries(NAMES, TEXT, max_size=4)
Texts = Mapping[str, bytes]


def applied(before: Texts, patch: bytes) -> Texts:
    made = dict(before)
    for path, (data, _) in patching.apply(patch, before.get).items():
        if data is None:
            del made[path]
        else:
            made[path] = data
    return made


@given(FILES, FILES)
@example({"a": b"x"}, {"a": b"x\n"})
@example({"a": b""}, {})
def test_diff_applies_in_both_directions(before: Texts, after: Texts) -> None:
    old, new = ({path: TaskFile(path, data) for path, data in files.items()} for files in (before, after))
    if patch := diff(old, new):
        assert applied(before, patch) == after
        assert applied(after, diff(new, old)) == before


@given(TEXT, TEXT)
def test_plain_diffs(before: bytes, after: bytes) -> None:
    before, after = before.replace(b"\r", b"") + b"\n", after.replace(b"\r", b"") + b"\n"
    texts = [data.decode("latin-1").split("\n")[:-1] for data in (before, after)]
    lines = difflib.unified_diff(*texts, "a/f.py", "b/f.py", lineterm="")
    if patch := "".join(line + "\n" for line in lines).encode("latin-1"):
        assert applied({"f.py": before}, patch) == {"f.py": after}


def test_rename_with_a_change() -> None:
    patch = b"""diff --git a/old.py b/new.py
similarity index 80%
rename from old.py
rename to new.py
index 1..2 100644
--- a/old.py
+++ b/new.py
@@ -1,2 +1,2 @@
 one
-two
+2
"""
    assert applied({"old.py": b"one\ntwo\n"}, patch) == {"new.py": b"one\n2\n"}


def test_renames_after_other_changes() -> None:
    patch = b"""diff --git a/first b/first
--- a/first
+++ b/first
@@ -1 +1 @@
-1
+one
diff --git a/old one b/new one
similarity index 100%
rename from old one
rename to new one
diff --git a/old two b/new two
similarity index 100%
rename from old two
rename to new two
"""
    before = {"first": b"1\n", "old one": b"x", "old two": b"y"}
    assert applied(before, patch) == {"first": b"one\n", "new one": b"x", "new two": b"y"}


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (b"", "changes no file"),
        (b"hello\n", "changes no file"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-other\n+x\n", "line 1 is not as the patch has it"),
        (b"--- a/f\n+++ b/f\n@@ -2 +2 @@\n-one\n+x\n", "line 2 is not as the patch has it"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-one\n", "ends too early"),
        (b"--- a/g\n+++ b/g\n@@ -1 +1 @@\n-one\n+x\n", "g: is missing"),
        (b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "f: is there already"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n", "has more in it"),
        (b"--- a/../f\n+++ b/../f\n@@ -1 +1 @@\n-one\n+x\n", "leads out"),
        (b"--- a//f\n+++ b//f\n@@ -1 +1 @@\n-one\n+x\n", "leads out"),
        (b"diff --git a/f b/f\nGIT binary patch\n", "binary"),
    ],
)
def test_patch_that_does_not_apply_raises(patch: bytes, why: str) -> None:
    with pytest.raises(patching.BadPatch, match=why):
        patching.apply(patch, {"f": b"one\ntwo\n"}.get)


def test_program_writes_all_or_nothing(tmp_path: Path) -> None:
    solution = {file.path: file.read() for file in patch_solution(b"")}
    program, work = tmp_path / "patching.py", tmp_path / "work"
    program.write_bytes(solution["patching.py"])
    work.mkdir()
    (work / "a").write_bytes(b"one\n")
    (work / "run.sh").write_bytes(b"x\n")
    before = {path: TaskFile(path, (work / path).read_bytes()) for path in ("a", "run.sh")}
    after = {"new/b": TaskFile("new/b", b"b\n"), "run.sh": TaskFile("run.sh", b"y\n", executable=True)}

    def run(patch: bytes) -> int:
        argv = [sys.executable, "-I", "-S", str(program), str(work)]
        return subprocess.run(argv, input=patch, capture_output=True, check=False).returncode

    patch = diff(before, after)
    assert run(patch.replace(b"-x", b"-z")) == 1
    assert sorted(path.name for path in work.iterdir()) == ["a", "run.sh"]
    assert run(patch) == 0
    assert sorted(str(p.relative_to(work)) for p in work.rglob("*")) == ["new", "new/b", "run.sh"]
    assert (work / "run.sh").stat().st_mode & 0o777 == 0o755
