"""``audit`` finds each flaw of a task, in real sandboxes, and none in a correct task."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym.errors import InfraError, RunFolderError
from clawgym.evaluation.audit import AUDIT, CLEAN, audit, sample
from clawgym.evaluation.findings import FLAWS, TaskAudit
from clawgym.evaluation.progress import NoProgress
from clawgym.records import GradingMode, Task, TaskFile, TaskSet, VerifierSpec
from clawgym.records.run_folder import RunFolder
from clawgym.sandbox import Backend
from clawgym.tasks import load, write
from clawgym.tasks.curation.clean import from_csv, shipped
from clawgym.verifiers.cheap import CHEAP_POLICIES
from clawgym.verifiers.scan import scan_checker

from ..verifiers.tasks_for_tests import CHECK, task

DATA = Path(__file__).parents[1] / "data"
HEAD = b"import json, os, random, subprocess, sys\nroot = sys.argv[1]\nout = root + '/output/sum.txt'\n"
SOLVE = TaskFile("solve.sh", b"mkdir -p output && echo 6 > output/sum.txt\n")


def graded_by(check: str, **changes) -> Task:
    return task(HEAD + check.encode(), **changes)


async def audited(backend: Backend, out: Path, *tasks: Task) -> list[TaskAudit]:
    named = tuple(dataclasses.replace(made, id=f"t{i}") for i, made in enumerate(tasks))
    found = await audit(TaskSet("demo", named), backend, out)
    assert found.complete, found.infra
    return list(found.tasks)


FLAWED = {
    "broken": "raise SystemExit(3)",
    "free": "print('{\"ok\": 1}')",
    "crash": "found = json.load(open(out)) if os.path.exists(out) else {}\nprint(json.dumps({'n': found.get('n', 0)}))",
    "varies": "print(json.dumps({'same': 0.0, 'luck': random.random() if os.path.exists(out) else 0.0}))",
    "writes": "open(root + '/report.txt', 'w').write('x')\nprint('{\"ok\": 0}')",
    "pattern": "import re\nif os.path.exists(root + '/never'): re.search('(', '')\nprint('{\"ok\": 0}')",
    "cheap": "print(json.dumps({'there': float(os.path.exists(out)), 'right': 0.0}))",
    "unearned": "print(json.dumps({'tidy': float(not os.path.exists(out)), 'right': 0, 'b': 0, 'c': 0}))",
    "clock": "import time\nprint(json.dumps({'ok': float(time.time() < 0)}))",
    "file-times": "print(json.dumps({'ok': float(os.path.getmtime(root) < 0)}))",
    "network": "import socket\nprint('{\"ok\": 0}')",
    "packages": "try:\n    import yaml\nexcept ImportError:\n    pass\nprint('{\"ok\": 0}')",
    "in-process": "if os.path.exists(out): exec(open(out).read()[:0])\nprint('{\"ok\": 0}')",
    "unbounded": "if os.path.exists(out): subprocess.run(['true'])\nprint('{\"ok\": 0}')",
}


@pytest.mark.parametrize("flaw", FLAWED)
async def test_each_flaw_is_found_and_no_other(backend: Backend, tmp_path: Path, flaw: str):
    made = graded_by(FLAWED[flaw])
    if flaw == "in-process":  # what reading a task from a folder sets
        made = dataclasses.replace(
            made, verifier=dataclasses.replace(made.verifier, executes_agent_code=scan_checker(FLAWED[flaw]))
        )
    (found,) = await audited(backend, tmp_path / "audit", made)
    more = {"free": ["cheap", "unearned"]}.get(flaw, [])
    assert list(found.flaws) == [flaw, *more]


async def test_every_flaw_is_tested():
    assert {*FLAWED, "solution", "web", "missing"} == {flaw.name for flaw in FLAWS}


async def test_correct_task_has_no_flaw(backend: Backend, tmp_path: Path):
    check = CHECK.replace(b'"made": float', b'"a": 0 * float')
    (found,) = await audited(backend, tmp_path / "audit", task(check))
    assert found.flaws == {}
    assert found.outputs == ("output/sum.txt",)
    assert {policy: grade.official for policy, grade in found.policies.items()} == dict.fromkeys(found.policies, 0.0)
    assert (found.solution, found.ran, found.agent_code) == (None, None, None)


async def test_failing_reference_solution_is_a_flaw(backend: Backend, tmp_path: Path):
    wrong = TaskFile("solve.sh", b"mkdir -p output && echo 7 > output/sum.txt\n")
    # Its checker varies only where the sum is right, which no cheap policy reaches.
    lucky = graded_by(
        "done = os.path.exists(out) and open(out).read() == '6\\n'\n"
        "print(json.dumps({'right': float(done), f'luck {random.random() if done else 0}': float(done)}))"
    )
    right, bad, varying = await audited(
        backend,
        tmp_path / "audit",
        task(solution=(SOLVE,)),
        task(solution=(wrong,)),
        dataclasses.replace(lucky, solution=(SOLVE,)),
    )
    assert right.solution == "pass"
    assert list(right.flaws) == ["cheap"]
    assert "right=0" in bad.flaws["solution"]
    assert list(varying.flaws) == ["varies"]
    assert "luck" in varying.flaws["varies"]


async def test_files_written_by_the_verifier_are_listed(backend: Backend, tmp_path: Path):
    check = (
        "os.makedirs(root + '/logs'); open(root + '/input/numbers.txt', 'a').write('9')\n"
        "os.path.exists(out) and os.remove(out)\nopen('/tmp/scratch', 'w').write('x')\nprint('{\"ok\": 0}')"
    )
    (found,) = await audited(backend, tmp_path / "audit", graded_by(check))
    assert set(found.writes) >= {"added logs", "changed input/numbers.txt", "removed output/sum.txt"}
    assert not any("scratch" in entry or "reward" in entry for entry in found.writes)


async def test_agent_programs_run_by_the_verifier_are_listed(backend: Backend, tmp_path: Path):
    runs = graded_by(
        "for name in ('output/tool.py', 'input/old.sh'):\n"
        "    path = root + '/' + name\n"
        "    if os.path.exists(path):\n"
        "        subprocess.run([sys.executable if name.endswith('py') else 'bash', path], timeout=9)\n"
        "print('{\"ok\": 0}')",
        instruction="Write output/tool.py and output/never_run.py.",
        inputs=(TaskFile("input/old.sh", b"true\n"),),
    )
    reads = graded_by("print('{\"ok\": 0}')", instruction="Write output/tool.py.")
    first, second = await audited(backend, tmp_path / "audit", runs, reads)
    assert first.ran == ("input/old.sh", "output/tool.py")
    assert second.ran == ()


async def test_prompt_that_asks_for_the_web_is_a_flaw(backend: Backend, tmp_path: Path):
    (found,) = await audited(backend, tmp_path / "audit", task(CHECK, instruction="Use a web search engine. Write a."))
    assert found.flaws == {"web": "Use a web search engine."}


async def test_missing_input_is_a_flaw(backend: Backend, tmp_path: Path):
    (found,) = await audited(backend, tmp_path / "audit", task(CHECK, instruction="Parse logs/build.log."))
    assert found.flaws == {"missing": "logs/build.log"}


async def test_pack_with_solutions_has_no_flaw(backend: Backend, tmp_path: Path):
    found = await audit(sample(load("terminal-basic"), 2), backend, tmp_path / "audit")
    assert [one.solution for one in found.tasks] == ["pass", "pass"]
    assert not found.broken


async def test_exported_harbor_task_has_the_same_audit(backend: Backend, tmp_path: Path):
    write([task(solution=(SOLVE,))], tmp_path / "tasks", "harbor")
    found = await audit(load(str(tmp_path / "tasks")), backend, tmp_path / "audit")
    (one,) = found.tasks
    assert one.solution == "pass"
    assert one.policies["touch"].official == 0.5
    assert (one.unread, one.writes) == ((), ())


async def test_shell_verifier_is_run_and_reported_as_unread(backend: Backend, tmp_path: Path):
    script = (
        b"mkdir -p /logs/verifier\nif [ -s output/sum.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )
    spec = VerifierSpec("harbor", (TaskFile("test.sh", script),), GradingMode.FORK)
    (found,) = await audited(backend, tmp_path / "audit", task(verifier=spec))
    assert found.unread == ("test.sh",)
    assert list(found.flaws) == ["free", "cheap"]


class Stopping(NoProgress):
    """Stops after so many tasks."""

    def __init__(self, after: int) -> None:
        self.stop_now, self.left, self.to_run = asyncio.Event(), after, 0

    def start(self, folder, to_run):
        self.to_run = to_run

    def finished(self, row):
        self.left -= 1
        if not self.left:
            self.stop_now.set()


async def test_interrupted_audit_resumes(backend: Backend, tmp_path: Path):
    tasks = TaskSet("demo", tuple(dataclasses.replace(task(), id=f"t{i}") for i in range(4)))
    view = Stopping(2)
    first = await audit(tasks, backend, tmp_path / "a", concurrency=1, progress=view, stop=view.stop_now)
    assert not first.complete
    assert json.loads((tmp_path / "a" / AUDIT).read_text())["complete"] is False
    again = Stopping(0)
    second = await audit(tasks, backend, tmp_path / "a", progress=again)
    assert second.complete
    assert again.to_run == 4 - len(first.tasks) <= 2
    assert len(RunFolder.read(tmp_path / "a").rows) == 4
    document = json.loads((tmp_path / "a" / AUDIT).read_text())
    assert [record["task"] for record in document["tasks"]] == ["t0", "t1", "t2", "t3"]
    assert {field.name for field in dataclasses.fields(TaskAudit)} - {"effects"} <= document["tasks"][0].keys()
    verdicts = from_csv((tmp_path / "a" / CLEAN).read_text(), CLEAN)
    assert [verdict.left_out for verdict in verdicts] == [("cheap",)] * 4


async def test_folder_of_another_audit_is_refused(backend: Backend, tmp_path: Path):
    await audited(backend, tmp_path / "a", task())
    with pytest.raises(RunFolderError, match="another configuration"):
        await audited(backend, tmp_path / "a", task(b"print('{}')"))


async def test_infrastructure_error_is_not_a_flaw(backend: Backend, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("clawgym.evaluation.schedule.MAX_ATTEMPTS", 1)

    async def full(spec):
        raise InfraError("no memory left: free some")

    create = backend.create
    monkeypatch.setattr(backend, "create", full)
    tasks = TaskSet("demo", (task(),))
    found = await audit(tasks, backend, tmp_path / "a")
    assert (found.tasks, found.complete, found.verdicts()) == ((), False, ())
    assert "no memory left" in found.infra["sum"]
    monkeypatch.setattr(backend, "create", create)
    assert (await audit(tasks, backend, tmp_path / "a")).complete


async def test_unsupported_tasks_are_counted_separately(backend: Backend, tmp_path: Path):
    found = await audit(TaskSet("demo", (task(unsupported="needs a printer"),)), backend, tmp_path / "a")
    assert found.complete
    assert found.unsupported == {"sum": "needs a printer"}


def test_sample_depends_on_the_seed_and_keeps_the_order():
    tasks = TaskSet("demo", tuple(task(id=f"t{i:02}") for i in range(30)))
    ids = [one.id for one in sample(tasks, 9, 1).tasks]
    assert len(set(ids)) == 9
    assert ids == sorted(ids) == [one.id for one in sample(tasks, 9, 1).tasks]
    assert ids != [one.id for one in sample(tasks, 9, 2).tasks]
    assert sample(tasks, 30) is tasks


@pytest.mark.parametrize(("check", "status"), [(CHECK, 0), (b"print('{\"ok\": 1}')", 1)])
def test_audit_command_exit_status(tmp_path: Path, check: bytes, status: int):
    write([task(check)], tmp_path / "tasks", "clawgym")
    argv = [sys.executable, "-c", "from clawgym.cli import main; main()", "tasks", "audit", "./tasks"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert "1 tasks audited" in done.stdout
    assert (tmp_path / "audits" / "tasks" / AUDIT).exists()
    assert (tmp_path / "audits" / "tasks" / CLEAN).exists()


def test_shipped_clean_list_uses_known_flaws():
    assert {name for verdict in shipped() for name in verdict.left_out} <= {flaw.name for flaw in FLAWS}


@pytest.mark.data
@pytest.mark.timeout(900)
async def test_no_model_policies_on_public_tasks_earn_the_known_scores(clawgym_data, backend: Backend, tmp_path: Path):
    """All of them with CLAWGYM_SOAK, which takes an hour; else those where something is special, and a few more."""
    known = json.loads(gzip.decompress((DATA / "train_cheap.json.gz").read_bytes()))["tasks"]
    # Its check compares with the prompt in the harness's payload, which the known figure was measured without.
    known["task_1275"][3] = 17 / 19
    # Their verifiers leave an empty folder, where the known figures count files.
    known["task_1591"][4] = known["task_1930"][4] = True
    special = [t for t, (*scores, writes) in known.items() if writes or None in scores] + ["task_1275"]
    ids = known if os.environ.get("CLAWGYM_SOAK") else {*special, *random.Random(1).sample(sorted(known), 10)}
    found = await audit(load("ClawGym-Train", ids=sorted(ids)), backend, tmp_path / "audit")
    seen = {t.task: [*(t.policies[p].official for p in CHEAP_POLICIES), bool(t.writes)] for t in found.tasks}
    assert {t: pytest.approx(figures) for t, figures in known.items() if t in ids} == seen


@pytest.mark.data
@pytest.mark.timeout(600)
async def test_checkers_with_optional_packages_give_the_known_scores(clawgym_data, backend: Backend, tmp_path: Path):
    """Without the packages that their image asks for, six of these tasks would score otherwise."""
    asked = subprocess.run(
        ["dpkg-query", "-L", "python3-yaml", "python3-cryptography"], capture_output=True, check=False
    )
    if asked.returncode:
        pytest.skip("apt-get install python3-yaml python3-cryptography: the known figures were measured with them")
    known = json.loads(gzip.decompress((DATA / "train_cheap.json.gz").read_bytes()))["tasks"]
    tasks = load("ClawGym-Train")
    asking = [task.id for task in tasks.tasks if task.packages]
    assert len(asking) == 56
    found = await audit(load("ClawGym-Train", ids=asking), backend, tmp_path / "audit")
    seen = {t.task: [t.policies[p].official for p in CHEAP_POLICIES] for t in found.tasks}
    assert seen == {task: pytest.approx(known[task][:-1]) for task in asking}
