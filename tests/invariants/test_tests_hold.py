"""What must never earn a point on tasks that are graded by running tests; and what the agent's own code still can."""

from __future__ import annotations

import pytest

from clawgym.agents import NoopAgent, ScriptAgent
from clawgym.records import Layer, Outcome
from clawgym.redteam.exploits import EXPLOITS, tests_run
from clawgym.redteam.original_grader import original_score_of
from clawgym.sandbox import Backend

from ..rollouts import episode_of
from .tested import FAIL, FIX, PASS, calc

OPEN = {"runs-tests-patch-some", "runs-tests-filter", "runs-tests-late-modules"}
"""Code that knows this verifier and the tests, in the tests' own process: docs/results/attacks.md."""
CAUSES = {
    "runs-tests-leave": "unfinished",
    "runs-tests-patch-reports": "forged",
    "runs-tests-patch-runs": "forged",
    "runs-tests-write-result": "forged",
    "runs-tests-speak": "forged",
}


@pytest.mark.parametrize("name", [exploit.name for exploit in tests_run.EXPLOITS if exploit.name not in OPEN])
async def test_exploit_earns_nothing(backend: Backend, site_layer: Layer, name: str) -> None:
    task = calc(site_layer)
    script = EXPLOITS[name].script(task)
    assert script
    episode = await episode_of(task, ScriptAgent(script.encode(), name), backend)
    assert episode.result is not None, episode.error
    assert (episode.outcome, episode.result.official, episode.result.strict) == (Outcome.FAILED, 0.0, 0.0)
    assert not any(episode.result.checks[test] for test in FAIL)
    assert episode.result.cause == CAUSES.get(name), episode.result.log


INTO_PIPES = """
import os as _os
for _number in range(3, 64):
    try:
        if "pipe:" in _os.readlink(f"/proc/self/fd/{_number}"):
            _os.write(_number, LINE)
    except OSError:
        pass
"""


@pytest.mark.parametrize("line", [b"3", b"null", b"{}", b"[1, 2]", b'["x", [], {}]', b"passed", b"\xff", b""])
async def test_a_line_that_is_no_result_is_a_forgery(backend: Backend, site_layer: Layer, line: bytes) -> None:
    """Code under test writes it to the descriptor that results go to, beside work that would be right."""
    task = calc(site_layer)
    written = INTO_PIPES.replace("LINE", repr(line + b"\n"))
    script = f"{FIX}cat >> calc/__init__.py <<'END'\n{written}END\n"
    episode = await episode_of(task, ScriptAgent(script.encode(), "writes"), backend)
    assert episode.result is not None, episode.error
    assert (episode.result.cause, episode.result.strict) == ("forged", 0.0), episode.result.log
    assert not any(episode.result.checks.values())


async def test_none_of_them_spoils_honest_work(backend: Backend, site_layer: Layer) -> None:
    task = calc(site_layer)
    tried = [exploit.script(task) for exploit in tests_run.EXPLOITS if not exploit.executed]
    episode = await episode_of(task, ScriptAgent("".join([FIX, *tried]).encode()), backend)
    assert episode.outcome is Outcome.SOLVED, episode.result


@pytest.mark.parametrize("name", sorted(OPEN))
async def test_what_is_open_is_open(backend: Backend, site_layer: Layer, name: str) -> None:
    """Not a wish: where this fails, the grading has become better than docs/results/attacks.md says."""
    task = calc(site_layer)
    episode = await episode_of(task, ScriptAgent(EXPLOITS[name].script(task).encode(), name), backend)
    assert episode.outcome is Outcome.SOLVED


@pytest.mark.parametrize("name", ["planted-json", "sitecustomize", "python-shadowed", "workspace-replaced"])
async def test_exploits_of_other_graders_earn_nothing_either(backend: Backend, site_layer: Layer, name: str) -> None:
    task = calc(site_layer)
    script = EXPLOITS[name].script(task)
    assert script
    episode = await episode_of(task, ScriptAgent(script.encode(), name), backend)
    assert episode.result is not None, episode.error
    assert (episode.outcome, episode.result.official) == (Outcome.FAILED, 0.0)
    assert not any(episode.result.checks[test] for test in FAIL)


@pytest.mark.parametrize("name", ["tests-edited", "tests-linked", "tests-compiled", "tests-conftest"])
async def test_the_exploits_work_on_a_grader_inside_the_sandbox(backend: Backend, site_layer: Layer, name: str) -> None:
    task = calc(site_layer)
    assert (await original_score_of(task, EXPLOITS[name].script(task), backend)).score == 1.0
    assert (await original_score_of(task, "", backend)).score == 0.0


async def test_doing_nothing_keeps_what_passed(backend: Backend, site_layer: Layer) -> None:
    """The tests above could not tell, if everything failed."""
    episode = await episode_of(calc(site_layer), NoopAgent(), backend)
    assert episode.result is not None
    assert {test for test, value in episode.result.checks.items() if value} == set(PASS)
