"""Tasks of BFCL: how they are read, offered, played and graded. The data and the class here are made for the test."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents import ScriptAgent, make_agent
from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Outcome, Task
from clawgym.sandbox import Backend
from clawgym.tasks import load, read
from clawgym.tasks.formats import _bfcl_checks as checks
from clawgym.tasks.formats import bfcl, read_task, write

from ..conftest import benchmark
from ..engines.fake_openai import FakeOpenAI, call, fake_openai, reply
from ..rollouts import episode_of

__all__ = ["fake_openai"]

TRAIN = {
    "name": "train.find",
    "description": "Find a train.",
    "parameters": {
        "type": "dict",
        "properties": {
            "to": {"type": "string", "description": "Where to."},
            "price": {"type": "float", "description": "At most."},
            "days": {"type": "array", "items": {"type": "integer"}, "description": "Days."},
            "who": {"type": "dict", "properties": {"age": {"type": "integer"}}, "description": "Who."},
        },
        "required": ["to"],
    },
}
ACCEPTED = {"to": ["New York, NY"], "price": [30.0, ""], "days": [[1, 2], ""], "who": [{"age": [7, 8]}, ""]}
TICKETS = """
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context import EXTRA

class TicketAPI:
    def __init__(self):
        self.tickets, self._log = [], []

    def _load_scenario(self, scenario, long_context=False):
        self.tickets = scenario["tickets"] + (EXTRA if long_context else [])

    def open_ticket(self, title, tags=None):
        self.tickets.append(title)
        return {"id": len(self.tickets)}

    def close_ticket(self, title):
        self.tickets.remove(title)
        print("closed")
"""


def lines(path: Path, *rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small folder ``bfcl_eval``."""
    folder = tmp_path / "bfcl_eval"
    data = folder / "data"
    for category in (*bfcl._SINGLE, *bfcl._TURNS):
        lines(data / f"BFCL_v4_{category}.json")
    asked = {"question": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A train to NY?"}]]}
    lines(data / "BFCL_v4_simple_python.json", {"id": "simple_python_0", "function": [TRAIN], **asked})
    lines(data / "possible_answer/BFCL_v4_simple_python.json", truth("simple_python_0", [{"train.find": ACCEPTED}]))
    lines(data / "BFCL_v4_irrelevance.json", {"id": "irrelevance_0", "function": [TRAIN], **asked})
    lines(data / "BFCL_v4_memory.json", {"id": "memory_0", "question": [[{"role": "user", "content": "My name?"}]]})
    lines(data / "BFCL_v4_web_search.json", {"id": "web_search_0", "question": [[{"role": "user", "content": "Who?"}]]})
    turns = [[{"role": "user", "content": "Open a ticket on rain."}], [], [{"role": "user", "content": "Close it."}]]
    row = {"id": "multi_turn_miss_func_0", "question": turns, "initial_config": {"TicketAPI": {"tickets": ["sun"]}}}
    row |= {"involved_classes": ["TicketAPI"], "missed_function": {"1": ["open_ticket"]}}
    lines(data / "BFCL_v4_multi_turn_miss_func.json", row)
    answers = [[], ["open_ticket('rain')"], ["close_ticket(title='rain')"]]
    lines(data / "possible_answer/BFCL_v4_multi_turn_miss_func.json", truth("multi_turn_miss_func_0", answers))
    described = {"description": "d", "parameters": {"type": "dict", "required": ["title"]}}
    text = {"title": {"type": "string", "description": "The title."}}
    documents = [{**described, "name": name} for name in ("open_ticket", "close_ticket")]
    for document in documents:
        document["parameters"] = {**described["parameters"], "properties": text}
    lines(data / "multi_turn_func_doc/ticket_api.json", *documents)
    source = folder / bfcl._SOURCE
    source.mkdir(parents=True)
    (source / "ticket_api.py").write_text(TICKETS)
    (source / "long_context.py").write_text("EXTRA = ['wind']\n")
    return folder


def truth(task_id: str, answers: Any) -> dict[str, Any]:
    return {"id": task_id, "ground_truth": answers}


@pytest.fixture
def tasks(package: Path) -> dict[str, Task]:
    found = read(package)
    assert found.problems == {}
    return found.by_id


def test_tasks_have_the_functions_and_reasons(tasks: dict[str, Task]):
    one = tasks["simple_python_0"]
    assert one.dialogue is not None
    assert one.dialogue.opening == (("system", "Be brief."), ("user", "A train to NY?"))
    (schema,) = (function["function"] for function in one.dialogue.functions)
    assert schema["name"] == "train_find"
    assert schema["description"] == "Find a train. Note that the provided function is in Python 3 syntax."
    properties = schema["parameters"]["properties"]
    assert {name: declared["type"] for name, declared in properties.items()} == {
        "to": "string",
        "price": "number",
        "days": "array",
        "who": "object",
    }
    reasons = {task.id: str(task.unsupported).partition(":")[0] for task in tasks.values() if task.unsupported}
    assert reasons == {
        "memory_kv_0": "image not here",
        "memory_vector_0": "network",
        "memory_rec_sum_0": "ours",
        "web_search_base_0": "network",
        "web_search_no_snippet_0": "network",
    }


@pytest.mark.parametrize("task_id", ["simple_python_0", "irrelevance_0", "multi_turn_miss_func_0"])
async def test_only_the_reference_calls_solve(tasks: dict[str, Task], backend: Backend, task_id: str):
    assert (await episode_of(tasks[task_id], make_agent("oracle"), backend)).outcome is Outcome.SOLVED
    calls = json.dumps([{"name": "train_find", "arguments": {"to": "Boston"}}, {"name": "submit"}])
    wrong = await episode_of(tasks[task_id], ScriptAgent(calls.encode()), backend)
    assert wrong.outcome is Outcome.FAILED
    assert wrong.result is not None
    assert wrong.result.checks == {"correct": 0.0}
    nothing = await episode_of(tasks[task_id], make_agent("noop"), backend)
    assert (nothing.outcome is Outcome.SOLVED) is (task_id == "irrelevance_0"), "doing nothing is right there"


async def test_model_gets_one_reply_where_calls_are_not_run(
    tasks: dict[str, Task], backend: Backend, fake_openai: FakeOpenAI
):
    fake_openai.script += [reply("", tool_calls=[call("train_find", {"to": "new york ny"}, "x")])]
    agent = make_agent("tool-loop", model="m", base_url=fake_openai.base_url, api_key="k")
    episode = await episode_of(tasks["simple_python_0"], agent, backend)
    await agent.aclose()
    assert (episode.outcome, episode.cause) == (Outcome.SOLVED, None)
    (request,) = fake_openai.requests
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["messages"][0]["content"] == "Be brief."
    assert [tool["function"]["name"] for tool in request["tools"]] == ["train_find"], "there is no submit"


async def test_user_speaks_by_the_script_and_offers_the_missing_function(
    tasks: dict[str, Task], backend: Backend, fake_openai: FakeOpenAI
):
    fake_openai.script += [
        reply("I cannot."),
        reply("", tool_calls=[call("open_ticket", {"title": "rain"}, "x")]),
        reply("Done."),
        reply("", tool_calls=[call("close_ticket", {"title": 7, "extra": None}, "y")]),
        reply("", tool_calls=[call("close_ticket", {"title": "rain"}, "z")]),
        reply("Closed."),
    ]
    agent = make_agent("tool-loop", model="m", base_url=fake_openai.base_url, api_key="k")
    episode = await episode_of(tasks["multi_turn_miss_func_0"], agent, backend)
    await agent.aclose()
    assert (episode.outcome, episode.final_message) == (Outcome.SOLVED, "Closed.")
    offered = [[tool["function"]["name"] for tool in request["tools"]] for request in fake_openai.requests]
    assert offered == [["close_ticket"], *[["open_ticket", "close_ticket"]] * 5]
    assert [step.message for step in episode.steps if step.source == "user"] == [
        "Open a ticket on rain.",
        "I have updated some more functions you can choose from. What about now?",
        "Close it.",
    ]
    results = [message["content"] for message in fake_openai.requests[-1]["messages"] if message["role"] == "tool"]
    assert results[0] == '{"id": 2}'
    assert results[1].startswith("Error during execution: ")
    assert "extra" in results[1], "arguments reach the class as the model wrote them"
    assert results[2] == "None"


def test_a_category_can_be_named(package: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLAWGYM_DATA", str(package.parent))
    tasks = load("BFCL:irrelevance")
    assert (tasks.name, [task.id for task in tasks.tasks]) == ("BFCL:irrelevance", ["irrelevance_0"])
    assert tasks.license == "Apache-2.0"
    with pytest.raises(TaskSetNotFound, match=r"no category 'irelevance'\. Did you mean 'irrelevance'\?"):
        load("BFCL:irelevance")


def test_answers_are_not_in_the_agents_sandbox(tasks: dict[str, Task]):
    task = tasks["multi_turn_miss_func_0"]
    assert {file.path for file in task.tools[0].files} >= {"server.py", "scene.json"}
    assert not any(b"open_ticket('rain')" in file.read() for file in task.tools[0].files)
    assert any(b"open_ticket('rain')" in file.read() for file in task.verifier.files)


async def test_a_task_folder_keeps_the_dialogue(tasks: dict[str, Task], tmp_path: Path):
    for task_id in ("simple_python_0", "multi_turn_miss_func_0"):
        write([tasks[task_id]], tmp_path / task_id)
        again = read_task(tmp_path / task_id / task_id)
        assert again.content_hash == tasks[task_id].content_hash
        assert again.dialogue == tasks[task_id].dialogue


@pytest.mark.parametrize(
    "changes", [{"function": None}, {"question": []}, {"id": "a/b"}, {"function": [{"name": 1}]}, {"question": [[{}]]}]
)
def test_malformed_rows_are_problems(package: Path, changes: dict[str, Any]):
    row = {"id": "simple_python_0", "function": [TRAIN], "question": [[{"role": "user", "content": "Hi"}]]} | changes
    lines(package / "data/BFCL_v4_simple_python.json", row)
    found = read(package)
    assert list(found.problems) == ["BFCL_v4_simple_python.json:1"]


def test_source_that_is_a_link_out_of_the_package_is_not_read(package: Path, tmp_path: Path):
    (tmp_path / "secret.py").write_text("secret")
    source = package / bfcl._SOURCE / "ticket_api.py"
    source.unlink()
    source.symlink_to(tmp_path / "secret.py")
    bfcl._classes.cache_clear()
    task = read(package).by_id["multi_turn_miss_func_0"]
    with pytest.raises(TaskError, match="cannot be read"):
        task.content_hash  # noqa: B018


def said(monkeypatch: pytest.MonkeyPatch, *calls: tuple[str, dict[str, Any]], broken: bool = False) -> None:
    made = [{"name": name, "arguments": arguments} for name, arguments in calls]
    results = [{"id": None, "content": ""}] if broken else []
    messages = [{"role": "user"}, {"role": "assistant", "tool_calls": made, "results": results}]
    monkeypatch.setattr(checks, "transcript", lambda path=None: messages)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"to": "New York, NY"}, True),
        ({"to": "new-york ny"}, True),
        ({"to": "New York"}, False),
        ({}, False),
        ({"to": "New York, NY", "from": "x"}, False),
        ({"to": "New York, NY", "price": 30}, True),
        ({"to": "New York, NY", "price": "30"}, False),
        ({"to": "New York, NY", "price": True}, False),
        ({"to": "New York, NY", "days": [1, 2]}, True),
        ({"to": "New York, NY", "days": [2, 1]}, False),
        ({"to": "New York, NY", "days": ["1", 2]}, False),
        ({"to": "New York, NY", "who": {"age": 8}}, True),
        ({"to": "New York, NY", "who": {}}, False),
        ({"to": "New York, NY", "who": {"age": 8, "x": 1}}, False),
        ({"to": None}, False),
    ],
)
def test_rules_of_one_call(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], right: bool):
    data = {"functions": [TRAIN], "answers": [{"train.find": ACCEPTED}], "language": "python", "only": True}
    said(monkeypatch, ("train_find", arguments))
    assert checks.answered(data) is right
    said(monkeypatch, ("train_find", arguments), ("train_find", arguments))
    assert checks.answered(data) is False
    said(monkeypatch, ("train_find", arguments), broken=True)
    assert checks.answered(data) is False


@pytest.mark.parametrize(
    ("text", "kind", "items", "value"),
    [
        ("12", "integer", None, 12),
        ("1.5f", "float", None, 1.5),
        ("7L", "long", None, 7),
        ("7", "long", None, "7"),
        ("true", "boolean", None, True),
        ("new int[]{1, 2}", "Array", "integer", [1, 2]),
        ('new ArrayList<String>(Arrays.asList("a", "b"))', "ArrayList", "String", ["a", "b"]),
        ("new ArrayList<>() {{ add(1); add(2); }}", "ArrayList", "integer", [1, 2]),
        ('new HashMap<>() {{ put("a", 1); put("b", "c"); }}', "HashMap", None, {"a": 1, "b": "c"}),
        ("anything", "any", None, "anything"),
    ],
)
def test_literals_of_java(text: str, kind: str, items: str | None, value: Any):
    assert checks._java(text, kind, items) == value


@pytest.mark.parametrize(
    ("text", "kind", "items", "value"),
    [
        ("'a'", "String", None, "a"),
        ("12n", "Bigint", None, 12),
        ("false", "Boolean", None, False),
        ('[1, "a", true]', "array", None, [1, "a", True]),
        ("new Array(1, 2)", "array", "integer", [1, 2]),
        ("[[1, 2], [3]]", "array", None, [[1, 2], [3]]),
        ("{a: 1, 'b': [2, 3]}", "dict", None, {"a": 1, "b": [2, 3]}),
    ],
)
def test_literals_of_javascript(text: str, kind: str, items: str | None, value: Any):
    assert checks._script(text, kind, items) == value


@pytest.mark.parametrize(("replies", "right"), [(20, True), (21, False)])
def test_a_turn_before_the_last_has_at_most_twenty_replies_with_calls(monkeypatch, replies: int, right: bool):
    class Counter:
        def __init__(self) -> None:
            self.value = 0

        def add(self) -> int:
            self.value += 1
            return self.value

    monkeypatch.setitem(sys.modules, f"{checks.CLASSES}.ticket_api", types.SimpleNamespace(TicketAPI=Counter))
    once = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}
    messages = [{"role": "user"}, *[once] * replies, {"role": "user"}, *[once] * 25]
    monkeypatch.setattr(checks, "transcript", lambda path=None: messages)
    answers = [["add()"] * replies, ["add()"] * 21]
    data = {"classes": ["TicketAPI"], "config": {}, "long": False, "answers": answers}
    assert checks.played(data) is right, "in the last turn, calls after the 21st reply do not count"


@pytest.mark.timeout(900)
def test_checker_of_the_set_agrees_on_every_task():
    """The set's own code, from its pinned wheel, on right, no and changed replies to all tasks."""
    try:
        tasks = load("BFCL")
    except TaskSetNotFound as error:
        pytest.skip(str(error))
    found = benchmark("task_sets").bfcl_parity([task for task in tasks.tasks if not task.unsupported])
    assert found["differ"] == 0
    assert found["agree"] > 60_000
    assert found["noop, accepted"] == 240 + 884, "the tasks in which no function is relevant"
    assert found["right"] - found["right, accepted"] == 8, "tasks whose accepted values the set's checker refuses"
