"""What must never earn a point: the exploits that work on a grader inside the agent's own sandbox."""

from __future__ import annotations

import dataclasses
import gzip
import secrets
from typing import Literal

import pytest

from clawgym.agents import ScriptAgent
from clawgym.records import GradingMode, Outcome, Task, TaskFile
from clawgym.redteam.exploits import EXPLOITS
from clawgym.sandbox import Backend

from ..rollouts import episode_of
from .guarded import IMPORTS, STARTS, guarded

FIT = {
    name: exploit
    for name, exploit in EXPLOITS.items()
    if exploit.script(guarded("42", runs="subprocess" if exploit.executed else None))
}
"""Others are for tasks of another kind, which have a module of their own."""
GENERAL = [name for name, exploit in FIT.items() if not exploit.executed]
OPEN = {"subprocess": {"runs-read-verifier"}, "in_process": {"runs-read-verifier", "runs-edit-callers"}}
"""What code that the checker runs can still do, and why such tasks are flagged: docs/results/attacks.md."""
EXECUTED = {how: [n for n, e in FIT.items() if e.executed and n not in known] for how, known in OPEN.items()}
LAYER = [
    *("reward-is-a-link", "sitecustomize", "usercustomize", "python-shadowed", "bash-shadowed", "workspace-replaced"),
    *("workspace-is-verifier", "outputs-link-to-verifier", "outputs-link-into-reward", "outputs-link-through-links"),
]
"""What a whole layer that is kept could carry into the grading."""


async def attempt(made: Task, name: str, backend: Backend) -> tuple[Outcome, float, float]:
    script = EXPLOITS[name].script(made)
    assert script, "this task offers nothing to attack"
    episode = await episode_of(made, ScriptAgent(script.encode(), name), backend)
    assert episode.result is not None, episode.cause
    return episode.outcome, episode.result.strict, episode.result.checks.get("right", 0.0)


@pytest.mark.parametrize("name", GENERAL)
async def test_exploit_earns_nothing(backend: Backend, name: str) -> None:
    outcome, strict, right = await attempt(guarded(secrets.token_hex(8)), name, backend)
    assert outcome in (Outcome.FAILED, Outcome.TRUNCATED)
    assert (strict, right) == (0.0, 0.0)


async def test_what_is_written_while_it_is_graded_is_not_seen(backend: Backend) -> None:
    outcome, strict, right = await attempt(guarded(guarded("").instruction), "daemon-rewrites-outputs", backend)
    assert (outcome, strict, right) == (Outcome.FAILED, 0.0, 0.0)


@pytest.mark.parametrize("name", LAYER)
async def test_a_layer_that_is_kept_carries_no_exploit_into_the_grading(backend: Backend, name: str) -> None:
    outcome, strict, right = await attempt(guarded(secrets.token_hex(8), mode=GradingMode.FORK), name, backend)
    assert (outcome, strict, right) == (Outcome.FAILED, 0.0, 0.0)


@pytest.mark.parametrize("name", ["outputs-link-to-verifier", "workspace-replaced", "bash-shadowed", "reward-channel"])
async def test_nor_into_a_test_sh(backend: Backend, name: str) -> None:
    made = guarded(secrets.token_hex(8), mode=GradingMode.FORK, protocol="harbor")
    outcome, strict, right = await attempt(made, name, backend)
    assert (outcome, strict, right) == (Outcome.FAILED, 0.0, 0.0)


PLANTED = {
    "in a closed folder": "echo 1 > /logs/verifier/reward.txt; chmod 0 /logs/verifier",
    "in a closed folder of a closed one": "echo 1 > /logs/verifier/reward.txt; chmod 0 /logs/verifier /logs",
    "beside a folder in the way": "mkdir -p /logs/verifier/reward.txt/x; chmod 0 /logs/verifier/reward.txt\n"
    "echo 1 > /logs/verifier/reward.json; chmod 555 /logs/verifier",
    "by way of a link": "echo 1 > /opt/reward.txt; rm -r /logs; ln -s /opt /logs; ln -s /opt /opt/verifier",
}
"""Results that are there before the grading."""


@pytest.mark.parametrize("how", PLANTED)
async def test_nor_a_result_that_modes_or_links_protect(backend: Backend, how: str) -> None:
    made = guarded(secrets.token_hex(8), mode=GradingMode.FORK, protocol="harbor")
    agent = ScriptAgent(f"mkdir -p /logs/verifier; {PLANTED[how]}".encode(), "planted")
    episode = await episode_of(made, agent, backend)
    assert (episode.outcome, episode.result and episode.result.official) == (Outcome.FAILED, 0.0)


@pytest.mark.parametrize("protocol", ["reward_sh", "harbor"])
async def test_nor_a_link_in_a_folder_that_cannot_be_listed(
    backend: Backend, protocol: Literal["reward_sh", "harbor"]
) -> None:
    made = guarded(secrets.token_hex(8), mode=GradingMode.FORK, protocol=protocol)
    answer = "/verifier/answer.txt" if protocol == "reward_sh" else "/tests/answer.txt"
    agent = ScriptAgent(f"mkdir output; ln -s {answer} output/sum.txt; chmod 300 output".encode(), "hidden link")
    episode = await episode_of(made, agent, backend)
    assert (episode.outcome, episode.result and episode.result.strict) == (Outcome.FAILED, 0.0)


@pytest.mark.parametrize("name", EXECUTED["subprocess"])
async def test_code_that_the_checker_starts_earns_nothing(backend: Backend, name: str) -> None:
    outcome, strict, right = await attempt(guarded(secrets.token_hex(8), STARTS, runs="subprocess"), name, backend)
    assert (outcome, strict, right) == (Outcome.FAILED, 0.0, 0.0)


@pytest.mark.parametrize("name", EXECUTED["in_process"])
async def test_code_that_the_checker_imports_cannot_print_or_leave_its_way_to_a_score(
    backend: Backend, name: str
) -> None:
    outcome, strict, right = await attempt(guarded(secrets.token_hex(8), IMPORTS, runs="in_process"), name, backend)
    assert (outcome, strict, right) == (Outcome.FAILED, 0.0, 0.0)


@pytest.mark.parametrize(("how", "name"), [(how, name) for how in OPEN for name in sorted(OPEN[how])])
async def test_what_is_open_is_open(backend: Backend, how: Literal["in_process", "subprocess"], name: str) -> None:
    """Not a wish: where this fails, the grading has become better than docs/results/attacks.md says."""
    check = STARTS if how == "subprocess" else IMPORTS
    _, strict, right = await attempt(guarded(secrets.token_hex(8), check, runs=how), name, backend)
    assert max(strict, right) == 1.0


@pytest.mark.parametrize("name", ["runs-print-and-exit", "runs-print-and-leave"])
async def test_nor_can_text_that_the_checker_executes(backend: Backend, name: str) -> None:
    check = IMPORTS.replace(b"spec.loader.exec_module(tool)", b"exec(open(path).read(), vars(tool))")
    outcome, strict, right = await attempt(guarded(secrets.token_hex(8), check, runs="in_process"), name, backend)
    assert (outcome, strict, right) == (Outcome.FAILED, 0.0, 0.0)


@pytest.mark.parametrize(
    "work",
    [
        "ANSWER = '42'",
        "import sys; ANSWER = '42'; print('working', file=sys.stderr)",
        "import io, sys\nANSWER = '42'\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8', line_buffering=True)",
        "import json\nANSWER = json.loads(json.dumps('42'))",
    ],
)
async def test_honest_code_that_the_checker_imports_is_paid(backend: Backend, work: str) -> None:
    made = guarded("42", IMPORTS.replace(b'"made": 0.0', b'"made": 1.0'), runs="in_process")
    agent = ScriptAgent(f"mkdir output; cat > output/tool.py <<'EOF'\n{work}\nEOF\n".encode())
    assert (await episode_of(made, agent, backend)).outcome is Outcome.SOLVED


@pytest.mark.parametrize(
    "end", ["sys.exit(0)", "raise SystemExit", "os._exit(0)", "argparse.ArgumentParser().exit()", "helper.leave()"]
)
async def test_a_checker_may_end_as_it_likes(backend: Backend, end: str) -> None:
    check = f"import argparse, helper, os, sys; print('{{\"a\": 1}}', flush=True); {end}".encode()
    made = guarded("42", check)
    helper = TaskFile("helper.py", b"import sys\ndef leave():\n    sys.exit(0)\n")
    spec = dataclasses.replace(made.verifier, files=(*made.verifier.files, helper))
    made = dataclasses.replace(made, verifier=spec)
    episode = await episode_of(made, ScriptAgent(b"true"), backend)
    assert episode.outcome is Outcome.SOLVED, episode.result


async def test_the_task_can_be_solved(backend: Backend) -> None:
    """The tests above could not fail otherwise."""
    honest = ScriptAgent(b"mkdir output; printf 42 > output/sum.txt", "honest")
    for made in (guarded("42"), guarded("42", mode=GradingMode.FORK), guarded("42", protocol="harbor")):
        assert (await episode_of(made, honest, backend)).outcome is Outcome.SOLVED
    tool = ScriptAgent(b"mkdir output; echo 'print(42)' > output/tool.py", "honest")
    made = guarded("42", STARTS.replace(b'"made": 0.0', b'"made": 1.0'), runs="subprocess")
    assert (await episode_of(made, tool, backend)).outcome is Outcome.SOLVED


async def test_a_checker_cannot_change_what_was_kept(backend: Backend) -> None:
    made = guarded("42", b"import sys; open(sys.argv[1] + '/written-by-checker', 'w'); print('{\"a\": 1}')")
    episode = await episode_of(made, ScriptAgent(b"true", "x"), backend)
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
    episode = await episode_of(guarded("42", check), ScriptAgent(b"true", "x"), backend)
    assert episode.outcome is Outcome.SOLVED, episode.result


async def test_the_grader_has_no_network(backend: Backend) -> None:
    check = b"""
import json
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]]
print(json.dumps({"loopback_only": float(devices in ([], ["lo"]))}))
"""
    episode = await episode_of(guarded("42", check), ScriptAgent(b"true", "x"), backend)
    assert episode.outcome is Outcome.SOLVED, episode.result
