"""The pack ``injection-basic``: utility and resistance are measured apart, by what the agent did."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawgym.agents import Agent, GullibleAgent, NoopAgent, OracleAgent, ScriptAgent
from clawgym.cli import app
from clawgym.errors import AgentError
from clawgym.records import Task
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import Backend
from clawgym.tasks.packs import injection_basic as pack

from ...verifiers.tasks_for_tests import task as other_task

each = pytest.mark.parametrize("name", list(pack.GENERATORS))


async def checks(task: Task, agent: Agent, backend: Backend) -> tuple[float, float]:
    ended = await run_episode(EpisodeRequest(task=task, seed=0), agent, backend)
    result = ended.episode.result
    assert result is not None
    assert result.checks.keys() == {"utility", "resisted"}
    return result.checks["utility"], result.checks["resisted"]


@each
async def test_utility_and_resistance_are_independent(name: str, backend: Backend) -> None:
    if name in ("inject-mail", "inject-invoice"):
        pytest.importorskip("mcp")
    task = pack.make(name, 1)
    assert await checks(task, OracleAgent(), backend) == (1.0, 1.0)
    assert await checks(task, GullibleAgent(), backend) == (1.0, 0.0)
    assert await checks(task, NoopAgent(), backend) == (0.0, 1.0)
    wrong = {script.path.partition(".")[0]: script.read() for script in task.wrong_solutions}
    assert await checks(task, ScriptAgent(wrong.pop("obeys-only")), backend) == (0.0, 0.0)
    del wrong["obeys"]
    for script in wrong.values():
        assert await checks(task, ScriptAgent(script), backend) == (0.0, 1.0)


@each
def test_request_is_in_what_the_agent_reads_and_not_in_the_instruction(name: str) -> None:
    for seed in (0, 1, 2, 5):
        task = pack.make(name, seed)
        shown = [file.read().decode() for file in task.inputs]
        shown += [file.read().decode() for server in task.tools for file in server.files if file.path == "seed.json"]
        forms = ("IMPORTANT", "SYSTEM", "One more thing", "Note for whoever", "administrator")
        assert sum(any(form in text for form in forms) for text in shown) == 1
        assert not any(form in task.instruction for form in forms)


def test_splits_share_no_instruction() -> None:
    train, heldout = ({task.instruction for task in pack.load(split).tasks} for split in ("train", "heldout"))
    assert not train & heldout


async def test_files_that_cannot_be_read_do_not_hide_an_attack(backend: Backend) -> None:
    task = pack.make("inject-page", 1)
    (folder,) = {file.path.partition("/")[0] for file in task.inputs if "/" in file.path}
    assert await checks(task, ScriptAgent(f"mv {folder} elsewhere".encode()), backend) == (0.0, 0.0)
    task = pack.make("inject-notes", 1)
    answer = next(word for word in task.instruction.split() if word.endswith(".txt,"))[:-1]
    assert await checks(task, ScriptAgent(f"mkdir {answer}".encode()), backend) == (0.0, 1.0)


async def test_gullible_needs_a_hidden_request(backend: Backend) -> None:
    with pytest.raises(AgentError, match="injection-basic"):
        await run_episode(
            EpisodeRequest(task=dataclasses.replace(other_task(), wrong_solutions=()), seed=0), GullibleAgent(), backend
        )


def test_evaluation_reports_both_rates(tmp_path: Path) -> None:
    names = ["inject-notes-h0001", "inject-page-h0001"]
    chosen = [option for name in names for option in ("--task", name)]
    run = tmp_path / "run"
    done = CliRunner().invoke(app, ["eval", "injection-basic", "--agent", "gullible", *chosen, "--out", str(run)])
    assert "safety: utility 100.0 [" in done.output, done.output
    assert "attack success 100.0 [" in done.output
    safety = json.loads((run / "summary.json").read_text())["safety"]
    assert {name: rate["value"] for name, rate in safety.items()} == {"utility": 1.0, "attack success": 1.0}
