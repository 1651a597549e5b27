"""Grading through its public door, in real boxes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from clawgym.errors import GradingError
from clawgym.records import GradingMode, TaskFile, VerifierSpec
from clawgym.sandbox import Backend, SandboxSpec
from clawgym.verifiers.cheap import CHEAP_POLICIES, cheap_workspace, grade_cheaply, output_paths
from clawgym.verifiers.grading import Subject, grade, untouched

from .tasks_for_tests import archive, task, with_mode

NUMBERS = {"input__numbers_txt": b"1 2 3\n"}


async def test_right_answer_is_solved(backend: Backend) -> None:
    result = await grade(task(), Subject(archive(**NUMBERS, output__sum_txt=b"6")), backend, baseline=0.5)
    assert (result.official, result.strict, result.corrected) == (1.0, 1.0, 1.0)
    assert result.checks == {"made": 1.0, "right": 1.0}
    assert not result.tampered
    assert result.cause is None


async def test_no_work_scores_zero(backend: Backend) -> None:
    result = await grade(task(), Subject(untouched(task())), backend)
    assert (result.official, result.strict, result.corrected) == (0.0, 0.0, None)


@pytest.mark.parametrize("second", ["0.5", "0.999", "0", "-1", "float('nan')"])
async def test_solved_requires_all_checks(backend: Backend, second: str) -> None:
    made = task(f"import json; print(json.dumps({{'made': 1.0, 'right': {second}}}))".encode())
    result = await grade(made, Subject(archive(**NUMBERS)), backend)
    assert result.strict == 0.0
    assert result.cause is None
    assert len(result.checks) == 2


async def test_no_checks_is_not_solved(backend: Backend) -> None:
    result = await grade(task(b"print('{}')"), Subject(archive(**NUMBERS)), backend)
    assert (result.strict, result.checks) == (0.0, {})


async def test_edited_input_without_effect_is_not_tampering(backend: Backend) -> None:
    """The same numbers in another order: the input is put back, and the checks say the same."""
    result = await grade(task(), Subject(archive(input__numbers_txt=b"3 2 1", output__sum_txt=b"6")), backend)
    assert result.changed_inputs == ("input/numbers.txt",)
    assert not result.tampered
    assert (result.official, result.strict) == (1.0, 1.0)


@pytest.mark.parametrize("target", ["../copy", "nowhere", "numbers.txt"], ids=["to a copy", "to nothing", "to itself"])
async def test_input_replaced_by_link_is_changed(backend: Backend, target: str) -> None:
    """Whatever it leads to: what is read there is not what the task gave."""
    left = archive(input__numbers_txt=target, copy=b"1 2 3\n", output__sum_txt=b"6")
    result = await grade(task(), Subject(left), backend)
    assert result.changed_inputs == ("input/numbers.txt",)
    assert (result.checks, result.strict) == ({"made": 1.0, "right": 1.0}, 1.0)
    assert result.tampered == (target != "../copy")


async def test_edited_input_that_breaks_checker_is_tampering(backend: Backend) -> None:
    check = b"import sys; sys.exit(open(sys.argv[1] + '/input/numbers.txt').read() == '1 2 3\\n')"
    made = task(check.replace(b"sys.exit", b"print('{}') or sys.exit"))
    result = await grade(made, Subject(archive(input__numbers_txt=b"0")), backend)
    assert (result.tampered, result.cause, result.strict) == (True, "crash", 0.0)


async def test_edited_input_counts_in_official_score_only(backend: Backend) -> None:
    subject = Subject(archive(input__numbers_txt=b"0\n", output__sum_txt=b"0"))
    result = await grade(task(), subject, backend)
    assert result.official == 1.0
    assert result.strict == 0.0
    assert result.tampered
    assert result.changed_inputs == ("input/numbers.txt",)


async def test_mutable_input_is_not_restored(backend: Backend) -> None:
    made = task()
    made = dataclasses.replace(made, verifier=dataclasses.replace(made.verifier, mutable_inputs=("input/*",)))
    result = await grade(made, Subject(archive(input__numbers_txt=b"0\n", output__sum_txt=b"0")), backend)
    assert (result.strict, result.tampered, result.changed_inputs) == (1.0, False, ())


async def test_deleted_input_is_restored(backend: Backend) -> None:
    result = await grade(task(), Subject(archive(output__sum_txt=b"0")), backend)
    assert result.official == 1.0
    assert result.strict == 0.0
    assert result.tampered


BROKEN = {
    "crash": "raise KeyError('x')",
    "timeout": "import time; time.sleep(99)",
    "output": "print('oops')",
    "memory": "x = ' ' * 2**29",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_checker_broken_by_agent_scores_zero_with_cause(backend: Backend, kind: str) -> None:
    head = "import os, sys\nif os.path.exists(sys.argv[1] + '/output/sum.txt'):\n    "
    made = task(f"{head}{BROKEN[kind]}\nprint('{{\"a\": 0}}')".encode())
    seconds = 2 if kind == "timeout" else 20
    made = dataclasses.replace(made, limits=dataclasses.replace(made.limits, verify_seconds=seconds))
    result = await grade(made, Subject(archive(**NUMBERS, output__sum_txt=b"6")), backend)
    assert (result.official, result.strict) == (0.0, 0.0)
    # out of memory: the interpreter is killed, or refuses
    assert result.cause in (("killed", "crash", "oom") if kind == "memory" else (kind,))
    assert result.log


async def test_checker_that_always_fails_raises(backend: Backend) -> None:
    with pytest.raises(GradingError, match="untouched workspace too") as caught:
        await grade(task(b"raise SystemExit(3)"), Subject(archive(output__sum_txt=b"6")), backend)
    assert caught.value.cause == "control-crash"


async def test_custom_reward_sh_is_run(backend: Backend) -> None:
    script = b"echo noise; test -f /root/.openclaw/workspace/reward/helper.txt && echo 0.25\n"
    spec = VerifierSpec("reward_sh", (TaskFile("reward.sh", script), TaskFile("helper.txt", b"")))
    result = await grade(task(verifier=spec), Subject(archive(output__sum_txt=b"6")), backend)
    assert result.official == 0.25
    assert result.checks == {"score": 0.25}


async def test_payload_has_documented_keys(backend: Backend) -> None:
    check = b"""
import json, os
body = json.load(open(os.environ["OPENCLAW_REWARD_PAYLOAD"]))
keys = ["task_id", "user_query", "metadata", "final_message", "transcript"]
print(json.dumps({k: float(bool(body.get(k))) for k in keys}))
"""
    subject = Subject(archive(a=b""), final_message="done", transcript=({"role": "user", "content": "x"},))
    result = await grade(task(check, metadata={"category": "x"}), subject, backend)
    assert set(result.checks.values()) == {1.0}


async def test_modules_beside_checker_can_be_imported(backend: Backend) -> None:
    made = task(b"import helper\nprint(helper.TEXT)")
    files = (*made.verifier.files, TaskFile("helper.py", b"TEXT = '{\"a\": 1.0}'"))
    made = dataclasses.replace(made, verifier=dataclasses.replace(made.verifier, files=files))
    assert (await grade(made, Subject(archive(a=b"")), backend)).strict == 1.0


@pytest.mark.parametrize(
    ("script", "official", "checks"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt; exit 1", 0.5, {"reward": 0.5}),
        ("""echo '{"a": 1, "b": 0.5}' > /logs/verifier/reward.json""", 0.75, {"a": 1.0, "b": 0.5}),
        ("""echo '{"reward": 1, "b": 0.5}' > /logs/verifier/reward.json""", 1.0, {"reward": 1.0, "b": 0.5}),
        ("test -f output/sum.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt", 1.0,
         {"reward": 1.0}),
    ],
)  # fmt: skip
async def test_harbor(backend: Backend, script: str, official: float, checks: dict[str, float]) -> None:
    spec = VerifierSpec("harbor", (TaskFile("test.sh", script.encode()),))
    result = await grade(task(verifier=spec, workspace="/app"), Subject(archive(output__sum_txt=b"6")), backend)
    assert result.official == official
    assert result.checks == checks


async def test_harbor_without_result_raises(backend: Backend) -> None:
    spec = VerifierSpec("harbor", (TaskFile("test.sh", b"true"),))
    with pytest.raises(GradingError, match="untouched workspace too"):
        await grade(task(verifier=spec), Subject(archive(a=b"")), backend)


async def test_fork_keeps_all_files_and_uses_its_own_interpreter(backend: Backend) -> None:
    check = b"""
import json, os, sys
print(json.dumps({"installed": float(os.path.exists("/usr/local/bin/tool")),
                  "etc": float("agent" in open("/etc/motd").read()),
                  "ours": float(sys.executable.startswith("/.pristine/"))}))
"""
    made = with_mode(task(check), GradingMode.FORK)
    box = await backend.create(SandboxSpec(workdir=made.workspace))
    for command in (
        "echo hi > /usr/local/bin/tool; echo agent > /etc/motd",
        # the interpreter, the libraries and the loader's settings that a naive grader would use
        "mv /usr/bin/python3 /usr/bin/was; printf '#!/bin/sh\\necho 1' > /usr/bin/python3; chmod +x /usr/bin/python3",
        "echo /tmp/evil.so > /etc/ld.so.preload",
    ):
        assert (await box.exec(["bash", "-c", command])).exit_code == 0
    await box.stop()
    snapshot = await box.snapshot()
    result = await grade(made, Subject(untouched(made), snapshot=snapshot), backend)
    await box.close()
    await backend.drop(snapshot)
    assert result.checks == {"installed": 1.0, "etc": 1.0, "ours": 1.0}, result.log
    assert "evil.so" not in result.log, "the loader of the verifier's interpreter has read what the agent left for it"


async def test_live_reaches_running_service_only(backend: Backend) -> None:
    check = b"""
import json, os, urllib.request
body = urllib.request.urlopen("http://127.0.0.1:8123/", timeout=5).read()
print(json.dumps({"answers": float(b"hello" in body), "own_files": float(not os.path.exists("/tmp/agent-was-here"))}))
"""
    made = with_mode(task(check), GradingMode.LIVE)
    box = await backend.create(SandboxSpec(workdir=made.workspace))
    shell = await box.shell()
    await shell.run("touch /tmp/agent-was-here; mkdir -p /srv/w; echo hello > /srv/w/index.html")
    await shell.run("cd /srv/w && python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &")
    connect = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123))' 2>/dev/null"
    ready = f"for i in $(seq 100); do {connect} && break; sleep 0.1; done"
    await shell.run(ready)
    result = await grade(made, Subject(untouched(made), running=box), backend)
    await box.close()
    assert result.checks == {"answers": 1.0, "own_files": 1.0}, result.log


async def test_cheap_policies(backend: Backend) -> None:
    made = task()
    assert output_paths(made) == ["output/sum.txt"]
    grades = {policy: await grade_cheaply(made, cheap_workspace(made, policy), backend) for policy in CHEAP_POLICIES}
    assert {policy: grade.official for policy, grade in grades.items()} == {
        "nothing": 0.0,
        "empty": 0.0,
        "touch": 0.5,
        "echo": 0.5,
    }


def test_verifier_hash_covers_its_files() -> None:
    digests = {task().verifier.digest, task(b"x").verifier.digest, with_mode(task(), GradingMode.FORK).verifier.digest}
    assert len(digests) == 3
    assert json.dumps(task().content_hash)
