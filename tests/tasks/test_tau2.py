"""Tasks of tau2-bench: how they are read, played and graded. The small domain here is made for the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents import make_agent
from clawgym.envs.toolcall import ToolCallEnv
from clawgym.errors import AgentError, TaskError, TaskSetNotFound
from clawgym.evaluation.runner import _user_of
from clawgym.records import Outcome, Task, TaskSet
from clawgym.records.manifest import make_manifest
from clawgym.sandbox import Backend
from clawgym.simulation.customer import BASE_URL, KEY, MODEL, SCRIPT, Customer
from clawgym.tasks import load, read
from clawgym.tasks.formats import _stand_ins as stand_ins

from ..conftest import benchmark
from ..engines.fake_openai import FakeOpenAI, call, fake_openai, reply
from ..rollouts import episode_of

__all__ = ["fake_openai"]

ENVIRONMENT = '''
import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field
from docstring_parser import parse

FOLDER = Path(__file__).parents[2] / "data/tau2/domains/telecom"

class Kind(str, Enum):
    LAND = "land"

class Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: str
    on: bool = Field(default=False, description="Whether it is on.")
    kind: Kind = Kind.LAND
    plan: Annotated[Optional[Union[int, str]], Field(default=None)]

class Book(BaseModel):
    lines: dict[str, Line]
    def get_hash(self): return self.model_dump_json()

class Tool:
    def __init__(self, call):
        arguments = {p.arg_name: {"type": "string", "description": p.description} for p in parse(call.__doc__).params}
        about = {"name": call.__name__, "description": parse(call.__doc__).short_description}
        self.openai_schema = {"function": {**about, "parameters": {"type": "object", "properties": arguments}}}

class Tools:
    def __init__(self, names):
        self.db = Book.model_validate(json.loads((FOLDER / "db.json").read_text()))
        self.names = names
    def get_tools(self): return {name: Tool(getattr(self, name)) for name in self.names}
    def switch(self, number: str):
        """Switch a line on.

        Args:
            number: Of the line.
        """
        self.db.lines[number].on = True
        print("switched")
        return self.db.lines[number]
    def is_on(self, number): return self.db.lines[number].on

class Environment:
    def __init__(self): self.tools, self.user_tools = Tools(["switch"]), Tools(["switch"])
    def sync_tools(self): pass
    def make_tool_call(self, name, requestor, **given):
        side = self.user_tools if requestor == "user" else self.tools
        if name not in side.names: raise ValueError(f"Tool '{name}' not found.")
        return getattr(side, name)(**given)
    def to_json_str(self, result): return json.dumps(result.model_dump(), default=str)

def get_environment(): return Environment()
'''
TASK: dict[str, Any] = {
    "id": "[line]off[PERSONA:None]",
    "user_scenario": {
        "persona": "Calm.",
        "instructions": {"domain": "telecom", "reason_for_call": "Line 1 is dead.", "task_instructions": "Insist."},
    },
    "initial_state": {"initialization_actions": []},
    "evaluation_criteria": {
        "actions": [
            {"requestor": "assistant", "name": "switch", "arguments": {"number": "1"}},
            {"requestor": "user", "name": "switch", "arguments": {"number": "2"}},
        ],
        "env_assertions": [
            {"env_type": "user", "func_name": "is_on", "arguments": {"number": "2"}, "assert_value": True}
        ],
        "communicate_info": ["1000"],
        "reward_basis": ["DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE"],
    },
}


def package_with(folder: Path, *tasks: Any) -> Path:
    """A small folder ``tau2``."""
    path = folder / "tau2"
    for part in ("utils", "data_model", "environment", "domains/airline", "domains/retail", "domains/telecom"):
        (path / part).mkdir(parents=True)
        (path / part / "__init__.py").write_text("")
    for part in ("__init__.py", "config.py", "domains/__init__.py"):
        (path / part).write_text("")
    (path / "domains/telecom/environment.py").write_text(ENVIRONMENT)
    for domain in ("airline", "retail", "telecom"):
        data = path / "data/tau2/domains" / domain
        data.mkdir(parents=True)
        chosen = list(tasks) if domain == "telecom" else []
        (data / "tasks.json").write_text(json.dumps(chosen))
        (data / "split_tasks.json").write_text(json.dumps({"base": [TASK["id"]]}))
        (data / "db.json").write_text(json.dumps({"lines": {"1": {"number": "1"}, "2": {"number": "2", "plan": 7}}}))
        for name in ("policy.md", "main_policy.md", "tech_support_manual.md"):
            (data / name).write_text(f"The {name}.")
    guidelines = path / "data/tau2/user_simulator"
    guidelines.mkdir()
    for name in ("simulation_guidelines.md", "simulation_guidelines_tools.md"):
        (guidelines / name).write_text("You are a customer.")
    return path


@pytest.fixture
def task(tmp_path: Path) -> Task:
    found = read(package_with(tmp_path, TASK, {**TASK, "id": "not in base"}))
    assert found.problems == {}
    (only,) = found.tasks
    return only


def test_task_has_policy_prompt_and_no_answers_for_the_agent(task: Task):
    assert task.id == "telecom-line-offPERSONA-None-"
    assert task.dialogue is not None
    (_, system), (role, greeting) = task.dialogue.opening
    assert "<main_policy>\nThe main_policy.md.\n</main_policy>" in system
    assert (role, greeting) == ("assistant", "Hi! How can I help you today?")
    assert "Reason for call:\n\t\tLine 1 is dead." in task.dialogue.options["prompt"]
    files = {file.path for file in task.tools[0].files}
    assert "tau2/data/tau2/domains/telecom/db.json" in files
    assert not any("tasks" in path for path in files)


async def test_reference_of_both_sides_solves_and_idleness_does_not(
    task: Task, backend: Backend, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(MODEL, SCRIPT)
    solved = await episode_of(task, make_agent("oracle"), backend)
    assert solved.outcome is Outcome.SOLVED, solved.result
    assert (await episode_of(task, make_agent("noop"), backend)).outcome is Outcome.FAILED


@pytest.mark.parametrize("honest", [True, False])
async def test_model_of_the_customer_has_tools_of_its_own(
    task: Task, backend: Backend, fake_openai: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, honest: bool
):
    monkeypatch.setenv(MODEL, "customer")
    monkeypatch.setenv(BASE_URL, fake_openai.base_url)
    monkeypatch.setenv(KEY, "k")
    fake_openai.script += [
        reply("My line is dead."),
        reply("", tool_calls=[call("switch", {"number": "1"}, "a"), call("user_switch", {"number": "2"}, "b")]),
        reply("Please switch line 2. It costs 1,000."),
        *([reply("", tool_calls=[call("switch", {"number": "2"}, "c")])] if honest else []),
        reply("It works. ###STOP###"),
    ]
    agent = make_agent("tool-loop", model="m", base_url=fake_openai.base_url, api_key="k")
    episode = await episode_of(task, agent, backend)
    await agent.aclose()
    assert episode.outcome is (Outcome.SOLVED if honest else Outcome.FAILED)
    first, second, *_ = fake_openai.requests
    assert first["messages"][0]["content"].startswith("You are a customer.")
    assert first["messages"][1] == {"role": "user", "content": "Hi! How can I help you today?"}
    for request in (first, second):
        assert [tool["function"]["name"] for tool in request["tools"]] == ["switch"]
    results = [seen.content for step in episode.steps for seen in step.observations]
    assert json.loads(results[0])["on"] is True
    assert results[1] == "[error: there is no tool 'user_switch']", "the agent cannot do what the customer must do"
    assert [step.message for step in episode.steps if step.source == "user"][1:] == ["My line is dead."]


def test_run_manifest_names_who_plays_the_customer(task: Task, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MODEL, "gpt-5")
    assert _user_of(task) == "customer (gpt-5)"
    manifest = make_manifest("eval", TaskSet("t", (task,)), users={task.id: _user_of(task)})
    assert manifest.tasks[task.id]["user"] == "customer (gpt-5)"


def test_an_environment_refuses_a_dialogue(task: Task):
    with pytest.raises(TaskError, match="use run_episode with tool-loop"):
        ToolCallEnv().check(task)


def test_customer_without_a_model_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(MODEL, raising=False)
    with pytest.raises(AgentError, match=f"set {MODEL}"):
        Customer("You are a customer.", [], [])


@pytest.mark.parametrize(
    "broken",
    [
        {"evaluation_criteria": 7},
        {"user_scenario": None},
        {"initial_state": {"message_history": [{"role": "user"}]}},
        {"evaluation_criteria": {"actions": [{"name": "x"}]}},
    ],
)
def test_malformed_tasks_are_problems(tmp_path: Path, broken: dict[str, Any]):
    path = package_with(tmp_path, {**TASK, **broken})
    write_more = json.dumps([{**TASK, **broken}, {**TASK, "id": "good"}])
    (path / "data/tau2/domains/telecom/tasks.json").write_text(write_more)
    (path / "data/tau2/domains/telecom/split_tasks.json").write_text(json.dumps({"base": [TASK["id"], "good"]}))
    assert list(read(path).problems) == ["telecom/tasks.json:0"]


class Point(stand_ins.BaseModel):
    x: int
    name: str = stand_ins.FieldInfo("p", description="A name.")  # type: ignore[assignment]
    tags: list[str] = stand_ins.FieldInfo(default_factory=list)  # type: ignore[assignment]


def test_stand_in_for_pydantic_checks_and_copies():
    point = Point(x="3", tags=("a",))
    assert point.model_dump() == {"x": 3, "name": "p", "tags": ["a"]}
    assert Point.model_validate(point.model_dump()) == point
    copy = point.model_copy(deep=True)
    copy.tags.append("b")
    assert point.tags == ["a"]
    with pytest.raises(stand_ins.ValidationError, match="x is required"):
        Point()
    with pytest.raises(stand_ins.ValidationError, match="invalid literal"):
        Point(x="three")
    assert Point.model_json_schema()["required"] == ["x"]


def test_stage_runs_without_packages(task: Task, tmp_path: Path):
    """The set's code runs in an interpreter that has the standard library only."""
    program = (
        "import sys, _stand_ins; sys.modules['stand_ins'] = _stand_ins;"
        "import _tau2_stage as s; t = s.DomainStage(sys.argv[1], 'telecom', []);"
        "before = t.state(); print(t.call('user', 'switch', {'number': '1'}));"
        "print(t.call('user', 'nope', {})); print(before == t.state(), t.schemas('user')[0]['function']['name'])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(stand_ins.__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", program, str(tmp_path)], capture_output=True, text=True, env=env, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line != "switched"]
    assert lines[0].endswith(", False)")
    assert lines[1:] == ["(\"Error: Tool 'nope' not found.\", True)", "False switch"]


@pytest.mark.timeout(7200)
@pytest.mark.skipif("CLAWGYM_WHOLE" not in os.environ, reason="CLAWGYM_WHOLE is not set: takes 20 minutes")
def test_evaluator_of_the_set_agrees():
    """The set's own code, with the packages it imports, on reference and changed conversations."""
    try:
        tasks = load("tau2-bench")
    except TaskSetNotFound as error:
        pytest.skip(str(error))
    program = benchmark("task_sets")
    found = program.tau2_parity(list(program.some(tasks, None)))
    assert found["differ"] == 0
    assert found["agree"] > 1800
    assert found["right, accepted"] == found["right"]
