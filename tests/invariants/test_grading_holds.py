"""What must never earn a point: the exploits that work on a grader inside the agent's own box."""

from __future__ import annotations

import gzip
import secrets

import pytest

from clawgym.agents import ScriptAgent
from clawgym.records import Limits, Outcome, Task, TaskFile, VerifierSpec
from clawgym.rollout import run_episode
from clawgym.sandbox import Backend, SandboxSpec
from clawgym.verifiers.stock import STOCK_REWARD_SH

PERFECT = """print('{"made": 1.0, "right": 1.0}', flush=True); import os; os._exit(0)"""
WRITE_PERFECT = f"printf '%s\\n' '{PERFECT.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}' > "

EXPLOITS = {
    "planted-json": f"mkdir reward; {WRITE_PERFECT} reward/json.py; cp reward/json.py json.py",
    "planted-checker": f"mkdir reward; {WRITE_PERFECT} reward/check.py; echo 'echo 1' > reward/reward.sh",
    "reward-is-a-link": "mkdir /tmp/r; echo 'echo 1' > /tmp/r/reward.sh; ln -s /tmp/r reward",
    "sitecustomize": f"{WRITE_PERFECT} sitecustomize.py; cp sitecustomize.py usercustomize.py; "
    "for d in /usr/local/lib/python3*/dist-packages /usr/lib/python3/dist-packages /usr/lib/python3*; "
    "do cp sitecustomize.py $d/; done",
    "python-shadowed": f"{WRITE_PERFECT} /tmp/p.py; for p in /usr/local/bin /usr/bin; do mv $p/python3 $p/was; "
    "printf '#!/bin/sh\\nexec was /tmp/p.py\\n' > $p/python3; chmod +x $p/python3; done",
    "daemon": "setsid bash -c 'while :; do mkdir -p output; echo 6 > output/sum.txt; done' >/dev/null 2>&1 &",
    "output-links-to-the-verifier": "mkdir output; ln -s /verifier/answer.txt output/sum.txt",
    "output-links-through-a-link": "mkdir -p output a/b; ln -s ../.. a/b/up; ln -s a/b/up/../verifier output/v; "
    "ln -s v/answer.txt output/sum.txt",
    "payload-link": "ln -s /etc/passwd .openclaw_reward_payload.json",
    "workspace-replaced": "cd /; rm -rf /root/.openclaw/workspace; ln -s /verifier /root/.openclaw/workspace",
    "edited-input": "echo 0 > input/numbers.txt; mkdir output; echo 0 > output/sum.txt",
    "forged-last-line": "mkdir output; printf '0\\n1.0\\n' > output/sum.txt; echo 1.0",
    "fifo": "mkdir output; mkfifo output/sum.txt",
    "folder": "mkdir -p output/sum.txt",
    "fork-bomb": "b() { b | b & }; b; sleep 1",
    "memory-hog": "python3 -c 'x = bytearray(2**31)'",
    "full-disk": "cat /dev/zero > big; true",
    "kill-everything": "kill -9 1; kill -9 -1",
    "crash-the-grader": "mkdir output; python3 -c \"open('output/sum.txt','wb').write(bytes(range(128, 256)) * 999)\"",
    "hunt-the-verifier": "mkdir output; cp $(find / -name answer.txt 2>/dev/null | head -1) output/sum.txt",
}

CHECK = b"""
import json, os, sys
answer = open(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "answer.txt")).read()
path = os.path.join(sys.argv[1], "output/sum.txt")
text = open(path).read() if os.path.exists(path) else None
print(json.dumps({"made": float(text is not None), "right": float(text == answer)}))
"""


def task(answer: str, check: bytes = CHECK) -> Task:
    """The answer is in a file beside the checker and nowhere else."""
    files = {"reward.sh": STOCK_REWARD_SH.encode(), "check.py": check, "answer.txt": answer.encode()}
    spec = VerifierSpec("reward_sh", tuple(TaskFile(name, data) for name, data in files.items()))
    limits = Limits(agent_seconds=20, verify_seconds=10, memory_mb=256, disk_mb=64, pids=64, command_seconds=5)
    inputs = (TaskFile("input/numbers.txt", b"1 2 3\n"),)
    return Task("guarded", "Guess the secret; write it to output/sum.txt.", spec, inputs, limits=limits)


@pytest.mark.parametrize("name", EXPLOITS)
async def test_exploit_earns_nothing(backend: Backend, name: str) -> None:
    made = task(secrets.token_hex(8))
    episode = await run_episode(made, ScriptAgent(EXPLOITS[name].encode(), name), backend, seed=0)
    assert episode.outcome in (Outcome.FAILED, Outcome.TRUNCATED), (episode.outcome, episode.cause)
    assert episode.result is not None
    assert episode.result.strict == 0.0
    assert episode.result.checks.get("right", 0.0) == 0.0, episode.result.log


async def test_the_task_can_be_solved(backend: Backend) -> None:
    """The tests above could not fail otherwise."""
    honest = ScriptAgent(b"mkdir output; printf 42 > output/sum.txt", "honest")
    assert (await run_episode(task("42"), honest, backend, seed=0)).outcome is Outcome.SOLVED


async def test_the_exploits_work_on_a_grader_inside_the_box(backend: Backend) -> None:
    """They are real: graded where the agent worked, planting a module is enough."""
    made = task("42")
    box = await backend.create(SandboxSpec(workdir=made.workspace))
    await box.exec(["bash", "-c", EXPLOITS["planted-json"]])
    await box.put(made.verifier.files, f"{made.workspace}/reward")
    done = await box.exec(["python3", f"{made.workspace}/reward/check.py", made.workspace])
    await box.close()
    assert '"right": 1.0' in done.text


async def test_a_checker_cannot_change_what_was_kept(backend: Backend) -> None:
    made = task("42", b"import sys; open(sys.argv[1] + '/written-by-checker', 'w'); print('{\"a\": 1}')")
    episode = await run_episode(made, ScriptAgent(b"true", "x"), backend, seed=0)
    assert episode.outcome is Outcome.SOLVED
    assert episode.workspace is not None
    assert b"written-by-checker" not in gzip.decompress(episode.workspace)


async def test_the_checker_cannot_change_itself(backend: Backend) -> None:
    """Code that a checker runs finds the verifier read-only."""
    check = b"""
import json, os
def refused(path):
    try:
        open(path, "a").close()
    except OSError:
        return 1.0
    return 0.0
paths = ("/verifier/check.py", "/root/.openclaw/workspace/reward/check.py", "/verifier/x")
print(json.dumps({p: refused(p) for p in paths}))
"""
    episode = await run_episode(task("42", check), ScriptAgent(b"true", "x"), backend, seed=0)
    assert episode.outcome is Outcome.SOLVED, episode.result


async def test_the_grader_has_no_network(backend: Backend) -> None:
    check = b"""
import json
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]]
print(json.dumps({"loopback_only": float(devices in ([], ["lo"]))}))
"""
    episode = await run_episode(task("42", check), ScriptAgent(b"true", "x"), backend, seed=0)
    assert episode.outcome is Outcome.SOLVED, episode.result
