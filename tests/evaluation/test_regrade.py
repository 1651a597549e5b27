"""Regrading finds edits, damage and changed graders, in real sandboxes."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.agents.script import ScriptAgent
from clawgym.errors import SandboxUnavailable
from clawgym.evaluation.regrade import regrade
from clawgym.evaluation.runner import EvalConfig, evaluate
from clawgym.evaluation.terminal import verification_lines
from clawgym.evaluation.verification import Verification, read_verification
from clawgym.leaderboards import load_entry, rank, to_markdown
from clawgym.records import GradingMode, Image, Limits, Observation, Step, Task, TaskFile, TaskSet, VerifierSpec
from clawgym.records.run_folder import RunFolder, checksum_of, make_manifest
from clawgym.sandbox import backend as make_backend
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

READS = """
import json, os, sys
root = sys.argv[1]
said = json.load(open(os.environ["OPENCLAW_REWARD_PAYLOAD"]))
path = os.path.join(root, "out.txt")
print(json.dumps({"made": float(os.path.exists(path)),
                  "right": float(os.path.exists(path) and open(path).read().strip() == WORD),
                  "asked": float(any("echo" in json.dumps(m) for m in said["transcript"]))}))
"""
RANDOM = "import json, random; print(json.dumps({'luck': random.random()}))"
SCRIPT = b"echo two > out.txt; echo kept > sub.txt"


def task(name: str, check: str | None = None, mode: GradingMode = GradingMode.CLEAN, **changes: Any) -> Task:
    text = check or READS.replace("WORD", "'two'" if name < "t2" else "'three'")
    files = (TaskFile("reward.sh", standard_reward_sh()), TaskFile("check.py", text.encode()))
    limits = Limits(verify_seconds=20, memory_mb=256, disk_mb=64)
    return Task(name, f"do {name} with echo", VerifierSpec("reward_sh", files, mode), limits=limits, **changes)


def task_set(*changed: Task) -> TaskSet:
    """Four tasks: the agent solves t0 and t1, and gets t2 and t3 half right."""
    items = {f"t{i}": task(f"t{i}") for i in range(4)} | {t.id: t for t in changed}
    return TaskSet("demo", tuple(items.values()))


_shared: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _backend() -> Iterator[None]:
    """One loop and one backend for the module."""
    with asyncio.Runner() as runner:
        made = make_backend("namespace")
        _shared.update(runner=runner, backend=made)
        try:
            runner.run(made.probe())
            yield
        except SandboxUnavailable as error:
            pytest.skip(f"namespace: {error}")
        finally:
            runner.run(made.aclose())


def run(path: Path, tasks: TaskSet, script: bytes = SCRIPT, **kwargs: Any) -> Path:
    config = EvalConfig(tasks, ScriptAgent(script), _shared["backend"], path, **kwargs)
    _shared["runner"].run(evaluate(config, retry_seconds=0))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "finished", task_set())


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def again(path: Path, tasks: TaskSet | None = None, **kwargs: Any) -> Verification:
    return _shared["runner"].run(regrade(RunFolder.read(path), tasks or task_set(), _shared["backend"], **kwargs))


def edit(path: Path, change: Callable[[list[dict[str, Any]]], object], *, checksum: bool = False) -> None:
    """Change the lines; with ``checksum``, recompute the checksums too."""
    file = path / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(rows)
    if checksum:
        for row in rows:
            row["seal"] = checksum_of(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return next(row for row in rows if row["key"] == key)


def outcomes(record: Verification) -> dict[str, str]:
    return {key.partition("#")[0]: entry["outcome"] for key, entry in record.episodes.items()}


def why(record: Verification, key: str = "t0#0") -> str:
    return "; ".join(record.episodes[key]["why"])


def lie(rows: list[dict[str, Any]], key: str = "t2#0") -> None:
    """Make a failed episode a solved one in every field of its line."""
    row = of(rows, key)
    assert row["outcome"] == "failed"
    row["outcome"] = "solved"
    row["result"] |= {"strict": 1.0, "official": 1.0, "checks": dict.fromkeys(row["result"]["checks"], 1.0)}


def test_unchanged_run_is_reproduced_and_not_modified(copy: Path):
    scores = {row["task_id"]: row["result"]["official"] for row in RunFolder.read(copy).rows}
    assert scores == pytest.approx({"t0": 1, "t1": 1, "t2": 2 / 3, "t3": 2 / 3})
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    record = again(copy)
    assert record.agrees
    assert outcomes(record) == dict.fromkeys(("t0", "t1", "t2", "t3"), "same")
    after = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert after.pop(copy / "verification.json")
    assert after == before
    read = read_verification(RunFolder.read(copy))
    assert read is not None
    assert read.agrees
    assert read.results == record.results


def test_edited_score_is_found_by_checksum_and_by_regrading(copy: Path):
    edit(copy, lambda rows: of(rows, "t2#0")["result"].update(official=1.0))
    record = again(copy)
    assert not record.agrees
    assert "was edited" in record.discrepancies["t2#0"][0]
    entry = record.episodes["t2#0"]
    assert entry["outcome"] == "changed"
    assert "the stored line was edited" in why(record, "t2#0")
    assert (entry["old"]["official"], entry["new"]["official"]) == (1.0, pytest.approx(2 / 3))
    assert outcomes(record) == {"t0": "same", "t1": "same", "t2": "changed", "t3": "same"}


def test_edit_with_recomputed_checksum_is_found_by_regrading(copy: Path):
    edit(copy, lie, checksum=True)
    (copy / "summary.json").unlink()
    record = again(copy)
    assert not record.discrepancies
    assert record.episodes["t2#0"]["outcome"] == "changed"
    assert "the stored result was changed" in why(record, "t2#0")
    assert not record.agrees


def test_edited_tampered_flag_is_found_by_regrading(copy: Path):
    edit(copy, lambda rows: of(rows, "t2#0")["result"].update(tampered=True), checksum=True)
    record = again(copy)
    entry = record.episodes["t2#0"]
    assert entry["outcome"] == "changed"
    assert (entry["old"]["tampered"], entry["new"]["tampered"]) == (True, False)
    assert not record.agrees


@pytest.mark.parametrize(
    "said",
    [{"tampered": True}, {"official": 1.0}, {"checks": {"made": 1.0, "right": 1.0, "asked": 0.0}}],
    ids=["tampered", "official", "checks"],
)
def test_each_edited_field_is_found_by_regrading(copy: Path, said: dict[str, Any]):
    edit(copy, lambda rows: of(rows, "t2#0")["result"].update(said), checksum=True)
    (copy / "summary.json").unlink()
    record = again(copy)
    assert outcomes(record) == {"t0": "same", "t1": "same", "t2": "changed", "t3": "same"}
    ((name, value),) = said.items()
    entry = record.episodes["t2#0"]
    assert (entry["old"][name], entry["new"][name] == value) == (value, False)


def test_contradictory_lines_are_reported(copy: Path):
    edit(copy, lambda rows: of(rows, "t2#0").update(outcome="solved"), checksum=True)
    edit(copy, lambda rows: of(rows, "t3#0")["result"].update(strict=1.0), checksum=True)
    edit(copy, lambda rows: of(rows, "t1#0").update(task_hash="0" * 64), checksum=True)
    found = again(copy).discrepancies
    assert "contradict each other" in found["t2#0"][0]
    assert "contradict each other" in found["t3#0"][0]
    assert "contradicts the run manifest" in found["t1#0"][0]


def test_line_that_replaces_a_final_result_is_reported(copy: Path):
    edit(copy, lambda rows: (rows.append(json.loads(json.dumps(of(rows, "t2#0")))), lie(rows[-1:])), checksum=True)
    record = again(copy)
    assert "replaces a final result" in record.discrepancies["t2#0"][0]
    assert record.episodes["t2#0"]["outcome"] == "changed"


def test_summary_with_other_scores_is_reported(copy: Path):
    summary = json.loads((copy / "summary.json").read_text())
    summary["scores"]["strict"]["value"] = 0.99
    (copy / "summary.json").write_text(json.dumps(summary))
    record = again(copy)
    assert list(record.discrepancies) == [""]
    assert not record.agrees


def tar_of(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, target
        tar.addfile(entry)
    return gzip.compress(buffer.getvalue())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "changed after this result was written"),
        (lambda path: path.write_bytes(tar_of("out.txt")), "changed after this result was written"),
    ],
    ids=["missing", "cut off", "another one"],
)
def test_missing_or_changed_workspace_is_damaged(copy: Path, change, said: str):
    change(copy / "episodes" / "t0.0" / "workspace.tar.gz")
    record = again(copy)
    assert record.episodes["t0#0"]["outcome"] == "damaged"
    assert said in why(record)
    assert outcomes(record)["t1"] == "same"
    assert not record.agrees


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive",
        gzip.compress(b"no tar either" * 100),
        gzip.compress(bytes(400 * 2**20), 1),
        tar_of("../verifier/check.py"),
        tar_of("/etc/passwd"),
        tar_of("pipe", tarfile.FIFOTYPE),
        tar_of("hard", tarfile.LNKTYPE, "../../x"),
    ],
    ids=["empty", "text", "no tar", "bomb", "climbs", "absolute", "fifo", "hard link"],
)
def test_hostile_archives_with_correct_digest_are_refused(copy: Path, data: bytes):
    (copy / "episodes" / "t0.0" / "workspace.tar.gz").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    edit(copy, lambda rows: of(rows, "t0#0")["files"].update({"workspace.tar.gz": digest}), checksum=True)
    record = again(copy)
    assert record.episodes["t0#0"]["outcome"] == "damaged"
    assert outcomes(record)["t1"] == "same"


@pytest.mark.parametrize(
    "row", [{"result": None}, {"result": "x"}, {"result": {"checks": 3}}, {"sample": "0"}, {"files": []}]
)
def test_malformed_lines_are_damaged_and_the_rest_is_regraded(copy: Path, row: dict[str, Any]):
    edit(copy, lambda rows: of(rows, "t0#0").update(row), checksum=True)
    record = again(copy)
    assert not record.agrees
    assert record.episodes["t0#0"]["outcome"] == "damaged"
    assert outcomes(record)["t1"] == "same"


def test_changed_transcript_is_damaged(copy: Path):
    path = copy / "episodes" / "t0.0" / "transcript.json"
    path.write_text(path.read_text().replace("echo", "ECHO"))
    assert "transcript.json changed after" in why(again(copy))


PICTURE = b"not looked into"


class Sees(ScriptAgent):
    """Runs its script and records an observation with a picture."""

    async def run(self, context: AgentContext) -> AgentReport:
        image = Image(hashlib.sha256(PICTURE).hexdigest(), PICTURE)
        context.record(Step("agent", "I look", "", observations=(Observation("", None, image),)))
        return await super().run(context)


def test_missing_or_changed_picture_is_damaged(tmp_path: Path):
    config = EvalConfig(task_set(), Sees(SCRIPT), _shared["backend"], tmp_path / "run")
    _shared["runner"].run(evaluate(config, retry_seconds=0))
    record = again(tmp_path / "run")
    assert record.agrees, record.episodes
    (kept,) = (tmp_path / "run" / "pictures").iterdir()
    kept.write_bytes(b"another")
    record = again(tmp_path / "run")
    assert set(outcomes(record).values()) == {"damaged"}
    assert f"pictures/{kept.name} changed after" in why(record)
    kept.unlink()
    assert f"pictures/{kept.name} is missing" in why(again(tmp_path / "run"))


def test_changed_verifier_is_reported_with_the_changed_scores(copy: Path):
    harder = task("t0", READS.replace("WORD", "'ten'"))
    record = again(copy, task_set(harder))
    assert record.episodes["t0#0"]["outcome"] == "changed"
    assert record.episodes["t0#0"]["new"]["checks"]["right"] == 0
    assert why(record).startswith("verifier changed")
    assert record.other_tasks == ("t0#0",)


def test_same_score_from_another_verifier_does_not_agree(copy: Path):
    record = again(copy, task_set(task("t0", READS.replace("WORD", "'two' or 0"))))
    assert outcomes(record)["t0"] == "same"
    assert why(record) == "verifier changed"
    assert not record.agrees


def test_changed_task_and_changed_verifier_are_distinguished(copy: Path):
    reworded = dataclasses.replace(task("t0"), instruction="do it otherwise, with echo")
    record = again(copy, task_set(reworded))
    assert why(record) == "task changed"
    assert not record.agrees
    both = dataclasses.replace(task("t0", READS.replace("WORD", "'two' or 0")), instruction="with echo")
    assert why(again(copy, task_set(both))) == "verifier changed; task changed"


def test_verifier_that_fails_without_agent_work_is_reported(copy: Path):
    record = again(copy, task_set(task("t0", "import sys; sys.exit(3)")))
    assert record.episodes["t0#0"]["outcome"] == "changed"
    assert "verifier changed" in why(record)
    assert "fails on the untouched workspace too" in why(record)


def test_missing_tasks_are_not_regradable(copy: Path):
    record = again(copy, TaskSet("demo", task_set().tasks[1:]))
    assert record.episodes["t0#0"]["outcome"] == "not re-gradable"
    assert "demo has no task t0 here" in why(record)


def test_nondeterministic_verifier_is_reported(tmp_path: Path):
    tasks = TaskSet("demo", (task("t0", RANDOM), task("t1")))
    record = again(run(tmp_path / "run", tasks), tasks)
    assert outcomes(record) == {"t0": "changed", "t1": "same"}
    assert "not deterministic" in why(record)


def test_changed_grader_is_reported_for_changed_results(copy: Path):
    manifest = json.loads((copy / "receipt.json").read_text())
    assert set(manifest["grader"]["images"]) == {"default"}
    manifest["grader"] = {"code": "0" * 32, "images": {"default": "1" * 32}}
    (copy / "receipt.json").write_text(json.dumps(manifest))
    assert again(copy).agrees, "another interpreter with the same results is not a failure"
    edit(copy, lie, checksum=True)
    record = again(copy)
    assert "ClawGym's grading code changed" in why(record, "t2#0")
    assert "image default changed" in why(record, "t2#0")
    manifest["library"], manifest["isolation"]["tier"] = "0.0.1", "elsewhere"
    (copy / "receipt.json").write_text(json.dumps(manifest))
    record = again(copy)
    assert "ClawGym changed (0.0.1 then" in why(record, "t2#0")
    assert "isolation changed (elsewhere then" in why(record, "t2#0")


def test_changed_image_is_reported_even_if_all_results_are_same(copy: Path):
    manifest = json.loads((copy / "receipt.json").read_text())
    grader = manifest["grader"]
    assert again(copy).images == ()
    contents = grader["contents"]["default"]
    assert "/usr/bin" in contents

    def changed(**image: object) -> str:
        manifest["grader"] = {**grader, "images": {"default": "1" * 32}, "contents": image}
        (copy / "receipt.json").write_text(json.dumps(manifest))
        record = again(copy)
        assert record.agrees
        (said,) = record.images
        assert said in verification_lines(record)
        return said

    assert "sandboxes saw all of the machine's /usr" in changed()
    yaml = "/usr/lib/python3/dist-packages/yaml"
    others = {folder: digest for folder, digest in contents.items() if folder != "/usr/sbin"}
    said = changed(default={**others, "/usr/bin": "0" * 16, yaml: "0" * 16})
    assert said == f"image default changed: {yaml} was removed, /usr/sbin is new, /usr/bin differs"


def test_checker_packages_are_part_of_the_image(copy: Path):
    wants = TaskSet("demo", tuple(dataclasses.replace(t, packages=("python3-none",)) for t in task_set().tasks))
    assert wants.content_hash == task_set().content_hash
    assert again(copy, wants).images == (), "the package is not installed, so the image is the same"
    manifest = json.loads((copy / "receipt.json").read_text())
    manifest["grader"]["images"]["default"] = "1" * 32
    (copy / "receipt.json").write_text(json.dumps(manifest))
    (said,) = again(copy, wants).images
    assert said.startswith("image default:python3-none changed (it was default)")


@pytest.mark.parametrize("mode", [GradingMode.FORK, GradingMode.LIVE])
def test_fork_and_live_gradings_are_not_regradable(tmp_path: Path, mode: GradingMode):
    tasks = TaskSet("demo", (task("t0", mode=mode), task("t1")))
    path = run(tmp_path / "run", tasks)
    if "t0#0" not in RunFolder.read(path).done:
        pytest.fail(f"mode {mode} does not work here")
    record = again(path, tasks)
    assert outcomes(record) == {"t0": "not re-gradable", "t1": "same"}
    assert f"graded in mode {mode}" in why(record)
    assert record.agrees
    alone = TaskSet("demo", tasks.tasks[:1])
    assert not again(run(tmp_path / "alone", alone), alone).agrees, "nothing was graded again"


def test_broken_sandbox_is_not_regradable(tmp_path: Path):
    tasks = TaskSet("demo", (task("t0"), task("t1")))
    path = run(tmp_path / "run", tasks, b"truncate -s 200M one two")
    record = again(path, tasks)
    assert set(outcomes(record).values()) == {"not re-gradable"}
    assert "because the agent broke its sandbox (workspace-size)" in why(record)


def test_episodes_without_stored_workspace_are_not_regradable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tasks = task_set()
    record = again(run(tmp_path / "none", tasks, keep_workspaces=False), tasks)
    assert "workspace.tar.gz was not stored" in why(record)
    assert not record.agrees
    monkeypatch.setattr("clawgym.records.run_folder.MAX_WORKSPACE", 10)
    record = again(run(tmp_path / "large", tasks), tasks)
    assert "workspace.tar.gz: not stored: 0 MiB, limit" in why(record)
    assert not list((tmp_path / "large").rglob("workspace.tar.gz"))


def test_unfinished_run_is_verified(copy: Path):
    edit(copy, lambda rows: rows.pop())
    record = again(copy)
    assert record.agrees
    assert len(record.episodes) == 3


class Watch:
    """Stops after ``after`` gradings and counts them."""

    def __init__(self, stop: asyncio.Event, after: int) -> None:
        self.stop_event, self.after, self.graded, self.asked = stop, after, 0, 0

    def start(self, folder: Any, to_run: int) -> None:
        self.asked = to_run

    def running(self, now: int, limit: int) -> None: ...

    def finished(self, row: Mapping[str, Any]) -> None:
        self.graded += 1
        if self.graded == self.after:
            self.stop_event.set()

    def stop(self, aborted: str | None) -> None: ...


def test_interrupted_verification_resumes(copy: Path):
    stop = asyncio.Event()
    first = Watch(stop, 2)
    record = again(copy, concurrency=1, stop=stop, progress=first)
    assert not record.complete
    assert not record.agrees
    assert first.asked == 4
    second = Watch(asyncio.Event(), 9)
    record = again(copy, progress=second)
    assert record.agrees
    assert second.asked == second.graded == 4 - first.graded
    third = Watch(asyncio.Event(), 9)
    assert again(copy, progress=third).agrees
    assert third.graded == 4, "after a finished verification everything is graded again"


def test_results_edited_during_an_interruption_are_regraded(copy: Path):
    stop = asyncio.Event()
    again(copy, concurrency=1, stop=stop, progress=Watch(stop, 3))
    edit(copy, lambda rows: of(rows, "t0#0")["result"].update(official=0.0), checksum=True)
    (copy / "episodes" / "t1.0" / "workspace.tar.gz").unlink()
    record = again(copy)
    assert record.episodes["t0#0"]["outcome"] == "changed"
    assert record.episodes["t1#0"]["outcome"] == "damaged"


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_record_is_saved_periodically(copy: Path, seconds: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("clawgym.evaluation.regrade._SAVE_SECONDS", seconds)
    kept: list[int] = []

    class Looks(Watch):
        def finished(self, row: Any) -> None:
            record = read_verification(RunFolder.read(copy))
            kept.append(0 if record is None else len(record.episodes))

    assert again(copy, concurrency=1, progress=Looks(asyncio.Event(), 9)).agrees
    assert kept == ([1, 2, 3, 4] if seconds == 0 else [0] * 4)


def test_at_most_six_changed_checks_are_shown():
    checks = {f"c{n}": 1.0 for n in range(9)}
    old = {"official": 1.0, "strict": 1.0, "corrected": None, "tampered": False, "checks": checks, "cause": None}
    entry = {"outcome": "changed", "why": ["luck"], "old": old, "new": old | {"checks": dict.fromkeys(checks, 0.0)}}
    shown = "\n".join(verification_lines(Verification("", {}, "", True, {"t0#0": entry})))
    assert "c5 1 -> 0 and 3 more" in shown
    assert "c6" not in shown
    entry["new"] = old | {"checks": checks | dict.fromkeys(list(checks)[:6], 0.0)}
    assert "c5 1 -> 0)" in "\n".join(verification_lines(Verification("", {}, "", True, {"t0#0": entry})))


def test_tasks_changed_during_an_interruption_are_regraded(copy: Path):
    stop = asyncio.Event()
    first = Watch(stop, 3)
    assert not again(copy, concurrency=1, stop=stop, progress=first).complete
    reworded = [dataclasses.replace(task(f"t{n}"), instruction="do it otherwise, with echo") for n in range(4)]
    second = Watch(asyncio.Event(), 9)
    record = again(copy, task_set(*reworded), progress=second)
    assert second.graded == 4, "entries of the other tasks are not reused"
    assert {why(record, f"t{n}#0") for n in range(4)} == {"task changed"}


def test_entries_of_another_task_with_the_same_name_are_not_reused(copy: Path):
    stop = asyncio.Event()
    again(copy, concurrency=1, stop=stop, progress=Watch(stop, 3))
    record = again(copy, task_set(task("t0", READS.replace("WORD", "'ten'"))))
    assert record.episodes["t0#0"]["outcome"] == "changed"
    assert why(record).startswith("verifier changed")


def test_leaderboard_shows_verification_of_these_results_only(copy: Path):
    assert load_entry(copy).verified == ""
    again(copy)
    entry = load_entry(copy)
    assert entry.verified == "4 of 4"
    assert not entry.flags
    text = to_markdown(rank([entry]))
    assert "4 of 4" in text
    assert "clawgym runs verify RUN" in text
    edit(copy, lie, checksum=True)
    assert load_entry(copy).verified == ""
    assert "its verification is for other results" in load_entry(copy).flags
    again(copy)
    assert load_entry(copy).verified == "no"
    (copy / "verification.json").write_text("{}")
    assert load_entry(copy).verified == ""


def test_leaderboard_flags_edited_lines(copy: Path):
    edit(copy, lie)
    assert "edited result lines: 1" in load_entry(copy).flags
    edit(copy, lambda rows: of(rows, "t2#0").pop("seal"))
    assert "edited result lines: 1" in load_entry(copy).flags


def test_run_without_results_does_not_agree(tmp_path: Path):
    RunFolder.open(tmp_path / "run", make_manifest("eval", task_set())).close()
    assert not again(tmp_path / "run").agrees


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), plain, max_size=5), st.text(max_size=6), plain)
def test_checksum_survives_json_and_detects_any_change(row: dict[str, Any], key: str, value: Any):
    stored = {**row, "seal": checksum_of(row)}
    assert checksum_of(json.loads(json.dumps(stored))) == stored["seal"]
    other = {**stored, key: value}
    if key != "seal" and json.dumps(other, sort_keys=True) != json.dumps(stored, sort_keys=True):
        assert checksum_of(other) != stored["seal"]
