from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clawgym.errors import RunFolderError
from clawgym.records import Episode, Image, Observation, Outcome, Step, Task, TaskSet, VerifierResult, VerifierSpec
from clawgym.records.run_folder import RunFolder, checksum_of, make_manifest, repair_tail, safe_name


def task_set(n: int = 2, **kwargs) -> TaskSet:
    spec = VerifierSpec("reward_sh", ())
    return TaskSet("demo", tuple(Task(f"t{i}", f"do {i}", spec, **kwargs) for i in range(n)))


def manifest(**kwargs):
    kwargs.setdefault("agent", {"name": "noop", "version": "1"})
    return make_manifest(kwargs.pop("kind", "eval"), task_set(), **kwargs)


def episode(task_id: str = "t0", sample: int = 0, outcome: Outcome = Outcome.SOLVED, **kwargs) -> Episode:
    result = None if outcome == Outcome.INFRA else VerifierResult({"a": 1.0}, 1.0, 1.0, None, log="the log")
    return Episode(task_id, "hash", sample, 7, "noop", outcome, result=result, **kwargs)


def test_recorded_episode_is_read_back(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode(workspace=b"tar", steps=(Step("agent", "hi", ""),)), attempt=2)
    back = RunFolder.read(tmp_path / "run")
    assert back.done == {"t0#0"}
    row = back.latest["t0#0"]
    assert row["result"]["checks"] == {"a": 1.0}
    assert row["attempt"] == 2
    assert "log" not in row["result"]
    folder = back.episode_folder("t0", 0)
    assert (folder / "workspace.tar.gz").read_bytes() == b"tar"
    assert (folder / "verifier.log").read_text() == "the log"
    assert json.loads((folder / "transcript.json").read_text())["steps"][0]["message"] == "hi"
    assert not list(tmp_path.rglob("*.tmp"))


def test_run_folder_is_private_for_any_umask_and_after_resuming(tmp_path: Path):
    before = os.umask(0)
    try:
        with RunFolder.open(tmp_path / "runs" / "mine", manifest()) as run:
            run.record(episode())
        assert run.path.stat().st_mode & 0o777 == 0o700
        run.path.chmod(0o755)  # as earlier versions left it
        with RunFolder.open(run.path, manifest()):
            assert run.path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def saw(*data: bytes) -> tuple[Step, ...]:
    images = [Image(hashlib.sha256(d).hexdigest(), d) for d in data]
    return tuple(Step("agent", "", "", observations=(Observation("", None, image),)) for image in images)


def test_pictures_are_stored_once_per_run(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        episodes = [episode("t0", n, steps=saw(b"first", b"then", b"own %d" % n)) for n in range(8)]
        threads = [threading.Thread(target=run.record, args=(e,)) for e in episodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert run.done == {f"t0#{n}" for n in range(8)}
    pictures = tmp_path / "run" / "pictures"
    kept = {path.name: path.read_bytes() for path in pictures.iterdir()}
    assert sorted(kept.values()) == sorted([b"first", b"then", *(b"own %d" % n for n in range(8))])
    assert all(name == f"{hashlib.sha256(data).hexdigest()}.png" for name, data in kept.items())
    folder = run.episode_folder("t0", 3)
    results = [
        step["observation"]["results"][0] for step in json.loads((folder / "transcript.json").read_text())["steps"]
    ]
    paths = [result["content"][0]["source"]["path"] for result in results]
    assert [(folder / path).read_bytes() for path in paths] == [b"first", b"then", b"own 3"]


def test_partial_pictures_are_removed_when_resuming(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode(steps=(Step("agent", "hi", ""),)))
    pictures = tmp_path / "run" / "pictures"
    assert not pictures.exists()
    pictures.mkdir()
    (pictures / ".ab.png.tmp").write_bytes(b"half")
    RunFolder.open(tmp_path / "run", manifest()).close()
    assert not list(pictures.iterdir())


def test_infrastructure_error_is_not_done_and_later_attempt_counts(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode(outcome=Outcome.INFRA, cause="fork"))
        assert run.done == set()
        run.record(episode(), attempt=1)
        assert run.done == {"t0#0"}
    assert len(RunFolder.read(tmp_path / "run").rows) == 2


def test_same_configuration_resumes_and_is_recorded_in_the_manifest(tmp_path: Path):
    for _ in range(3):
        RunFolder.open(tmp_path / "run", manifest(seed=4)).close()
    stored = RunFolder.read(tmp_path / "run").manifest
    assert len(stored.resumed) == 2
    assert stored.resumed[0]["library"] == stored.library


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 0 there, 1 asked for"),
        ({"samples": 1}, "give -k 2 (or more)"),
        ({"kind": "train", "samples": 3}, "samples"),
        ({"agent": {"name": "noop", "version": "2"}}, "agent.version"),
        ({"agent": {"name": "noop", "version": "1", "engine": {"model": "m"}}}, "engine.model"),
        ({"config": {"grading": "live"}}, "config.grading"),
        ({"isolation": {"backend": "docker", "tier": "docker"}}, "isolation.backend"),
    ],
)
def test_other_configuration_is_refused_with_the_field(tmp_path: Path, change, named):
    there = {"samples": 2, "kind": change.get("kind", "eval")}
    RunFolder.open(tmp_path / "run", manifest(**there)).close()
    with pytest.raises(RunFolderError, match=r"choose another --out") as caught:
        RunFolder.open(tmp_path / "run", manifest(**there | change))
    assert named in str(caught.value)


@pytest.mark.parametrize("stored", [None, "http://127.0.0.1:1/v1"])
def test_other_endpoint_is_refused_with_advice(tmp_path: Path, stored: str | None):
    def made(url: str | None):
        engine = {"name": "openai", "host": "127.0.0.1"} | ({} if url is None else {"base_url": url})
        return manifest(agent={"name": "tool-loop", "version": "1", "engine": engine})

    RunFolder.open(tmp_path / "run", made(stored)).close()
    with pytest.raises(RunFolderError, match=r"two endpoints are never mixed.*choose another --out") as caught:
        RunFolder.open(tmp_path / "run", made("http://127.0.0.1:2/v1"))
    assert stored is None or f"give --base-url {stored}" in str(caught.value)
    RunFolder.open(tmp_path / "run", made(stored)).close()


@pytest.mark.parametrize("change", [{"samples": 10**12}, {"samples": 0}, {"samples": "4"}, {"tasks": 3}])
def test_stored_plan_is_bounded(tmp_path: Path, change: dict[str, Any]):
    RunFolder.open(tmp_path / "run", manifest()).close()
    file = tmp_path / "run/receipt.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RunFolderError, match=rf"field {next(iter(change))}: .*restore the file"):
        RunFolder.read(tmp_path / "run")


def test_samples_can_be_raised(tmp_path: Path):
    RunFolder.open(tmp_path / "run", manifest()).close()
    RunFolder.open(tmp_path / "run", manifest(samples=5)).close()
    assert RunFolder.read(tmp_path / "run").manifest.samples == 5


def test_changed_task_is_refused(tmp_path: Path):
    RunFolder.open(tmp_path / "run", manifest()).close()
    other = make_manifest("eval", task_set(workspace="/elsewhere"), agent={"name": "noop", "version": "1"})
    with pytest.raises(RunFolderError, match=r"task_set\.hash|tasks\.t0\.hash"):
        RunFolder.open(tmp_path / "run", other)


def test_second_writer_is_refused_with_the_pid(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", manifest()):
        began = time.monotonic()
        with pytest.raises(RunFolderError, match=rf"process {os.getpid()}: wait"):
            RunFolder.open(tmp_path / "run", manifest())
        assert time.monotonic() - began < 3, "a living owner is not waited for"
    RunFolder.open(tmp_path / "run", manifest()).close()


def test_lock_is_released_when_its_owner_dies(tmp_path: Path):
    program = textwrap.dedent(
        f"""
        import time
        from clawgym.records.run_folder import *
        from clawgym.records import TaskSet
        run = RunFolder.open({str(tmp_path / "run")!r}, make_manifest("serve"))
        print("open", flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        with pytest.raises(RunFolderError, match=f"process {owner.pid}"):
            RunFolder.open(tmp_path / "run", make_manifest("serve"))
        owner.send_signal(signal.SIGKILL)
    RunFolder.open(tmp_path / "run", make_manifest("serve")).close()


def test_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match="contains other files"):
        RunFolder.open(tmp_path, manifest())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_reading_needs_a_run_manifest_and_never_writes(tmp_path: Path):
    with pytest.raises(RunFolderError, match=r"no receipt\.json"):
        RunFolder.read(tmp_path)
    RunFolder.open(tmp_path / "run", manifest()).close()
    with pytest.raises(RunFolderError, match="reading only"):
        RunFolder.read(tmp_path / "run").append({"key": "x", "outcome": "failed"})


def test_run_manifest_has_no_secret_and_no_host_path(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    dirty = {
        "name": "a",
        "api_key": "hunter2-hunter2",
        "header": "Bearer abcdef",
        "base_url": "https://user:pw@api.example.org/v1",
        "note": "sk-abcdefghijklmnop",
        "model": str(tmp_path / "models" / "m"),
        "binary": f"{tmp_path}/home/bin/agent",
        "max_tokens": 5,
    }
    tasks = TaskSet("demo", (), problems={"bad": "/srv/data/bad/task.toml: no name: add it"})
    RunFolder.open(tmp_path / "run", make_manifest("eval", tasks, agent=dirty)).close()
    text = (tmp_path / "run" / "receipt.json").read_text()
    for leaked in ("hunter2", "abcdef", "user:pw", str(tmp_path), "/srv/data", os.uname().nodename):
        assert leaked not in text
    assert "api.example.org/v1" in text
    assert "task.toml: no name" in text
    assert json.loads(text)["agent"]["max_tokens"] == 5


def test_damaged_line_is_reported(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode())
    path = tmp_path / "run" / "results.jsonl"
    path.write_bytes(b"\x00\x00\n" + path.read_bytes())
    with pytest.raises(RunFolderError, match="line 1 is damaged: delete the line"):
        RunFolder.open(tmp_path / "run", manifest())
    path.write_bytes(path.read_bytes()[3:])  # and the failed opening gave the lock back:
    RunFolder.open(tmp_path / "run", manifest()).close()


def test_failed_append_leaves_no_partial_line(tmp_path: Path, monkeypatch):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode())
        before = (tmp_path / "run" / "results.jsonl").read_bytes()

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunFolderError, match=r"No space left on device\): free space"):
            run.append({"key": "t1#0", "outcome": "failed"})
        assert (tmp_path / "run" / "results.jsonl").read_bytes() == before
        assert "t1#0" not in run.done


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40), max_size=3), max_size=6),
    data=st.data(),
)
def test_repair_tail_keeps_complete_lines(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("torn") / "results.jsonl"
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    removed = repair_tail(path)
    kept = path.read_bytes()
    expected = b""
    for line in lines:
        if len(expected) + len(line) > cut:
            break
        expected += line
    assert kept == expected
    assert removed == cut - len(expected)
    assert repair_tail(path) == 0


def test_repair_tail_removes_a_long_partial_line(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"{}\n" + b"x" * 300_000)
    assert repair_tail(path) == 300_000
    assert path.read_bytes() == b"{}\n"


ids = st.one_of(st.text(min_size=1, max_size=140), st.from_regex(r"[a-zA-Z0-9._~-]{1,12}", fullmatch=True))


@given(first=st.tuples(ids, st.integers(0, 12)), second=st.tuples(ids, st.integers(0, 12)))
@example(first=("a/b", 0), second=("a-b", 0))
@example(first=("A", 0), second=("a", 0))
@example(first=("a.1", 0), second=("a", 10))
@example(first=("x" * 200, 0), second=("x" * 201, 0))
def test_safe_names_are_safe_and_unique(first, second):
    names = [safe_name(*first), safe_name(*second)]
    for name in names:
        assert re.fullmatch(r"[a-z0-9_][a-z0-9._~-]{0,150}", name)
        assert ".." not in name or "/" not in name
    assert (names[0].casefold() == names[1].casefold()) == (first == second)


@pytest.mark.parametrize("task_id", ["../../etc/passwd", "..", ".", "a/b", "a\0b", "A", "\ud800", "x" * 500])
def test_hostile_task_ids_stay_below_the_folder(tmp_path: Path, task_id: str):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode(task_id))
        assert run.episode_folder(task_id, 0).parent == tmp_path / "run" / "episodes"
        assert run.episode_folder(task_id, 0).is_dir()
    assert len(list((tmp_path / "run" / "episodes").iterdir())) == 1


def test_row_has_digests_of_its_files_and_a_checksum(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        row = run.record(episode(workspace=b"tar", steps=(Step("agent", "hi", ""),)))
        folder = run.episode_folder("t0", 0)
        assert row["files"] == {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("transcript.json", "workspace.tar.gz")
        }
        later = run.record(episode(), attempt=1)
        assert "workspace.tar.gz" not in later["files"]
        assert not (folder / "workspace.tar.gz").exists(), (
            "an earlier attempt's workspace would be taken for this one's"
        )
    for row in RunFolder.read(tmp_path / "run").rows:
        assert row["seal"] == checksum_of(row)
        assert row["seal"] != checksum_of(row | {"attempt": 9})


def test_too_large_workspace_is_not_stored_and_listed_as_dropped(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("clawgym.records.run_folder.MAX_WORKSPACE", 2 * 2**20)
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        kept = run.record(episode("t0", workspace=bytes(2 * 2**20)))
        left = run.record(episode("t1", workspace=bytes(3 * 2**20), dropped=("pipe: a FIFO",)))
    assert kept["dropped"] == []
    assert left["dropped"] == ["pipe: a FIFO", "workspace.tar.gz: not stored: 3 MiB, limit 2 MiB"]
    assert len(list(tmp_path.rglob("workspace.tar.gz"))) == 1


def test_grader_of_each_start_is_recorded(tmp_path: Path):
    for code in ("a", "b", "c"):
        RunFolder.open(tmp_path / "run", manifest(grader={"code": code})).close()
    stored = RunFolder.read(tmp_path / "run").manifest
    assert [stored.grader, *(opening["grader"] for opening in stored.resumed)] == [{"code": c} for c in "abc"]


@pytest.mark.parametrize("name", ["receipt.json", "results.jsonl", ".lock", "episodes", "pictures", "metrics.jsonl"])
def test_resuming_never_writes_through_a_planted_link(tmp_path: Path, name: str):
    mine = tmp_path / "mine"
    mine.write_text("{}")
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode())
    place = tmp_path / "run" / name
    if place.exists():
        place.rename(tmp_path / "away")
    place.symlink_to(mine)
    with pytest.raises(RunFolderError, match=rf"{re.escape(str(place))} is a link"):
        RunFolder.open(tmp_path / "run", manifest())
    assert mine.read_text() == "{}"


def test_planted_temporary_files_and_episode_folders_are_not_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        (run.path / ".summary.json.tmp").symlink_to(outside / "file")
        run.write_json("summary.json", {})
        assert (run.path / "summary.json").read_text() == "{}\n"
        (run.path / "episodes").mkdir()
        run.episode_folder("t0", 0).symlink_to(outside)
        with pytest.raises(RunFolderError, match="is a link"):
            run.record(episode())
    assert [file.name for file in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["receipt.json", "results.jsonl"])
def test_reading_never_follows_a_planted_link(tmp_path: Path, name: str):
    with RunFolder.open(tmp_path / "run", manifest()) as run:
        run.record(episode())
    (tmp_path / "run" / name).rename(tmp_path / name)
    (tmp_path / "run" / name).symlink_to(tmp_path / name)
    with pytest.raises(RunFolderError, match=r"is a link.*restore it"):
        RunFolder.read(tmp_path / "run")
    with pytest.raises(OSError, match="is a link"):
        run.read_file(name)
