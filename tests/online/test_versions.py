"""Versions of a served model: which one answers, what it was trained on, and what a kill leaves."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.errors import ServiceError
from clawgym.online.versions import Versions


def weights(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_text(text)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    (tmp_path / "model").mkdir()
    return Versions.create(tmp_path / "versions", tmp_path / "model")


def test_a_candidate_answers_once_promoted_and_not_after_a_rollback(versions: Versions) -> None:
    one = versions.add(weights("1"), parent=0, sessions=["a", "b"])
    assert (one.number, one.state, versions.serving.number) == (1, "candidate", 0)
    versions.judged(1, {"verdict": "candidate", "n": 3})
    versions.promote(1, "better by 0.2")
    two = versions.add(weights("2"), parent=1, sessions=["c"])
    versions.promote(two.number, "better by 0.1")
    assert versions.serving.folder.joinpath("model.safetensors").read_text() == "2"
    event = versions.roll_back("worse in use")
    assert (event.version, event.before, versions.serving.number, versions[2].state) == (1, 2, 1, "withdrawn")
    with pytest.raises(ServiceError, match="version 2 is withdrawn: only a candidate can be promoted"):
        versions.promote(2, "again")
    versions.roll_back("worse still", to=0)
    with pytest.raises(ServiceError, match="version 0 answers, and there is none before it"):
        versions.roll_back("why not")
    assert [(e.kind, e.version) for e in versions.events] == [
        ("promoted", 1), ("promoted", 2), ("rolled-back", 1), ("rolled-back", 0),
    ]  # fmt: skip
    assert versions[1].gate == ({"verdict": "candidate", "n": 3},)
    again = Versions(versions.path)
    assert (again.all(), again.events) == (versions.all(), versions.events)


def test_what_can_never_answer_again_keeps_no_weights(versions: Versions) -> None:
    """It stays in the history. The newest eight candidates keep theirs, and so does what was promoted."""
    for parent in range(12):
        versions.add(weights(str(parent)), parent=parent, sessions=[f"s{parent}"])
    versions.promote(1, "better")
    versions.promote(2, "better")
    versions.roll_back("worse")
    versions.judged(12, {"verdict": "rejected", "reasons": ["worse"]}, rejected=True)
    versions.prune()
    states = {version.number: version.state for version in versions.all()}
    assert states == {0: "promoted", 1: "promoted", 2: "withdrawn", 3: "rejected"} | dict.fromkeys(
        range(4, 12), "candidate"
    ) | {12: "rejected"}
    assert {v.number for v in versions.all() if v.folder.exists()} == {0, 1, *range(4, 12)}
    assert versions[3].gate[-1]["reasons"] == ["there are 8 newer candidates"]
    versions.prune()
    assert versions.promote(4, "by hand").version == 4
    assert Versions.create(versions.path, versions.first.folder).serving.number == 4


def test_rolling_back_again_goes_further_back(versions: Versions) -> None:
    """Never to a version that was withdrawn or erased."""
    for parent in range(3):
        number = versions.add(weights(str(parent)), parent=parent, sessions=[f"s{parent + 1}"]).number
        versions.promote(number, "better")
    assert [versions.roll_back("worse").version for _ in range(3)] == [2, 1, 0]
    for session in ("a", "b"):
        number = versions.add(weights(session), parent=0, sessions=[session]).number
        versions.promote(number, "better")
    versions.forget("a")  # 5 was trained from 0, so it may stay
    assert versions.roll_back("worse").version == 0
    assert versions.last_without(["b"]).number == 0


def test_rejected_versions_never_answer(versions: Versions) -> None:
    versions.add(weights("1"), parent=0, sessions=["a"])
    versions.judged(1, {"verdict": "rejected"}, rejected=True)
    for change in (lambda: versions.promote(1, "please"), lambda: versions.roll_back("please", to=1)):
        with pytest.raises(ServiceError, match="version 1 is rejected"):
            change()
    assert versions.serving is versions[0]
    with pytest.raises(ServiceError, match="there is no version 7: choose one of 0 to 1"):
        versions.promote(7, "please")


def test_only_candidates_that_are_made_of_the_serving_version_may_answer(versions: Versions) -> None:
    for parent in (0, 1, 2, 0):
        versions.add(weights(str(parent)), parent=parent, sessions=[f"s{parent}"])

    def may() -> list[int]:
        return [version.number for version in versions.all() if versions.may_answer(version.number)]

    assert may() == [0, 1, 2, 3, 4]
    versions.judged(3, {"verdict": "rejected"}, rejected=True)
    assert may() == [0, 1, 2, 4]
    versions.promote(1, "better")
    assert may() == [1, 2], "neither what it was made of, nor what was made beside it"
    assert [version.number for version in versions.unserved(3)] == [3, 2]
    versions.promote(2, "better")
    versions.roll_back("worse", to=0)
    assert may() == [0, 4], "version 1 answered once, and what was made of it is not compared"


def test_a_forgotten_conversation_is_in_no_weights(versions: Versions) -> None:
    for parent, sessions in ((0, ["a"]), (1, ["b"]), (2, ["c"])):
        number = versions.add(weights(str(parent)), parent=parent, sessions=sessions).number
        versions.promote(number, "better")
    assert [v.number for v in versions.exposed("b")] == [2, 3]
    with pytest.raises(ServiceError, match="version 3 answers and was trained on b: roll back to version 1 first"):
        versions.forget("b")
    versions.roll_back("a person asked for it", to=versions.last_without(["b"]).number)
    assert [v.number for v in versions.forget("b")] == [2, 3]
    assert [v.state for v in versions.all()] == ["promoted", "promoted", "erased", "erased"]
    assert not any(v.folder.exists() for v in versions.all()[2:])
    assert versions.exposed("b") == ()
    assert [v.number for v in versions.exposed("c")] == [3]
    with pytest.raises(ServiceError, match="version 2 is erased"):
        versions.roll_back("back", to=2)
    with pytest.raises(ServiceError, match="version 3 is erased: train on from another one"):
        versions.add(weights("4"), parent=3, sessions=[])
    with pytest.raises(ServiceError, match="b was forgotten: train without it"):
        versions.add(weights("4"), parent=1, sessions=["d", "b"])
    assert versions.last_without(["a", "c"]).number == 0


def test_what_a_killed_process_leaves_is_no_version(versions: Versions) -> None:
    code = f"""
import os, signal
from pathlib import Path
from clawgym.online.versions import Versions
def fill(folder):
    (folder / "model.safetensors").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
Versions(Path({str(versions.path)!r})).add(fill, parent=0, sessions=["a"])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    with (versions.path / "log.jsonl").open("ab") as log:
        log.write(b'{"kind":"promoted","version":1,')  # killed while it wrote a line
    again = Versions.create(versions.path, versions[0].folder)
    assert [v.number for v in again.all()] == [0]
    assert sorted(os.listdir(versions.path)) == ["lock", "log.jsonl"]
    again.add(weights("1"), parent=0, sessions=[])
    again.promote(1, "better")
    assert versions.serving.number == 1  # a reader sees what another process wrote
    assert all(json.loads(line) for line in (versions.path / "log.jsonl").read_text().splitlines())


def test_a_failed_candidate_leaves_nothing(versions: Versions) -> None:
    def full(folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        versions.add(full, parent=0, sessions=["a"])
    assert len(versions.all()) == 1
    assert sorted(os.listdir(versions.path)) == ["lock", "log.jsonl"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        versions.add(weights("1"), parent=0, sessions=[], about={"loss": math.nan})
    versions.add(weights("2"), parent=0, sessions=[])
    assert (versions[1].folder / "model.safetensors").read_text() == "2"


def test_damage_is_named(versions: Versions, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="nowhere has no versions: name the folder of a service"):
        Versions(tmp_path / "nowhere")
    with (versions.path / "log.jsonl").open("ab") as log:
        log.write(b'{"kind":"promoted"}\n')
    with pytest.raises(ServiceError, match=r"log\.jsonl: a line is damaged .*: restore the file"):
        Versions(versions.path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("mprjf"), st.integers(0, 6), st.sampled_from("abc")), max_size=25))
def test_history_is_what_happened(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, str]]) -> None:
    """Whatever is tried: what answers has weights, was promoted, and is told the same by a fresh reader."""
    path = tmp_path_factory.mktemp("service")
    (path / "model").mkdir()
    versions = Versions.create(path / "versions", path / "model")
    for what, number, session in steps:
        try:
            match what:
                case "m":
                    versions.add(weights(session), parent=number, sessions=[session])
                case "p":
                    versions.promote(number, "p")
                case "r":
                    versions.roll_back("r", number)
                case "j":
                    versions.judged(number, {}, rejected=session == "a")
                case _:
                    versions.forget(session)
        except ServiceError:
            pass
        serving = versions.serving
        assert serving.state == "promoted"
        assert serving.folder.is_dir()
        assert all(v.folder.is_dir() != (v.state == "erased") for v in versions.all())
    fresh = Versions(versions.path)
    assert (fresh.all(), fresh.events, fresh.serving) == (versions.all(), versions.events, versions.serving)
