"""Tasks of Claw-Eval: the clone is made for the test, with a library of its own; one in CLAWGYM_DATA is read too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents import ScriptAgent, make_agent
from clawgym.errors import TaskError
from clawgym.records import Episode, Outcome, Task
from clawgym.rewards._panel import BASE_URL, MODEL
from clawgym.sandbox import Backend
from clawgym.tasks import read

from ..engines.fake_openai import FakeOpenAI, fake_openai, reply
from ..rollouts import episode_of
from .conftest import published_clone

__all__ = ["fake_openai"]

LIBRARY = {
    "__init__": "",
    "runner/user_agent": '_PROMPT = """Be a user.\n{persona}"""\n',
    "models/__init__": "",
    "models/message": """
from __future__ import annotations
from typing import Any
from pydantic import BaseModel
class Message(BaseModel):
    role: str
    content: list[dict[str, Any]]
""",
    "models/scoring": """
def compute_task_score(scores): return scores.completion
def is_pass(score): return score >= 0.75
""",
    "models/task": """
from __future__ import annotations
from pydantic import BaseModel
class Check(BaseModel):
    keywords: list[str] | None = None
class Component(BaseModel):
    check: Check
class TaskDefinition(BaseModel):
    task_id: str
    task_file: str
    scoring_components: list[Component]
""",
    "models/trace": """
from __future__ import annotations
from typing import Any
from pydantic import BaseModel, Field
from .message import Message
class TraceMessage(BaseModel):
    trace_id: str
    message: Message
class ToolDispatch(BaseModel):
    trace_id: str
    tool_use_id: str
    tool_name: str
    endpoint_url: str
    request_body: dict[str, Any] = Field(default_factory=dict)
    response_status: int = 200
    response_body: Any = None
class DimensionScores(BaseModel):
    completion: float = 0.0
""",
    "graders/__init__": "",
    "graders/llm_judge": """
import json, time
from openai import OpenAI
from pydantic import BaseModel
class Result(BaseModel):
    score: float
class LLMJudge:
    def __init__(self, model_id): self.client, self.model_id = OpenAI(api_key="x", base_url="x"), model_id
    def evaluate(self, said, rubric):
        for attempt in range(30):
            asked = [{"role": "user", "content": f"{rubric}: {said}"}]
            try:
                got = self.client.chat.completions.create(model=self.model_id, messages=asked, temperature=0.0)
                return Result(score=json.loads(got.choices[0].message.content)["score"])
            except Exception:
                time.sleep(60)
""",
    "graders/registry": """
import importlib.util
def get_grader(task_id, tasks_dir, task_dir):
    spec = importlib.util.spec_from_file_location("grader", f"{task_dir}/grader.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Grader()
""",
}
SERVICE = """
from __future__ import annotations
import json, os
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from mock_services._base import add_error_injection
app = FastAPI(title="Mail")
add_error_injection(app)
with open(os.environ["MAIL_FIXTURES"]) as file:
    mails = json.load(file)
sent = []
class Send(BaseModel):
    to: str
    tags: list[str] = Field(default_factory=list)
@app.post("/mail/list")
def listed() -> dict:
    return {"mails": mails}
@app.post("/mail/send")
async def send(req: Send) -> dict:
    if req.to == "nobody":
        raise HTTPException(status_code=404, detail="no such address")
    if req.to == "crash":
        raise RuntimeError("broken")
    sent.append(req.model_dump())
    return {"sent": req}
@app.get("/mail/audit")
def audit() -> dict:
    return {"calls": [], "sent": sent}
"""
GRADER = """
from claw_eval.models.trace import DimensionScores
class Grader:
    def grade(self, messages, dispatches, task, audit_data=None, judge=None, env_snapshot=None):
        print("grading")
        said = [b["text"] for m in messages if m.message.role == "assistant" for b in m.message.content if "text" in b]
        sent = audit_data["mail"]["sent"] if audit_data else []
        fine = all(d.response_status == 200 for d in dispatches)
        text = (env_snapshot or {}).get("cmd:python check.py", {}).get("stdout", "")
        parts = [bool(said) and "done" in said[-1], sent == [{"to": "a", "tags": []}], fine]
        if env_snapshot is not None:
            parts = [text == "right\\n"]
        return DimensionScores(completion=sum(parts) / len(parts))
"""
TASK = """
task_id: T1_mail
category: communication
difficulty: easy
services:
  - name: mail
    command: python {service}
    port: 9100
    health_check: http://localhost:9100/mail/list
    reset_endpoint: http://localhost:9100/mail/reset
    env:
      MAIL_FIXTURES: tasks/T1_mail/fixtures/mails.json
prompt:
  text: Send a mail to a.
tools:
  - name: mail_list
    description: Lists mails.
    input_schema: {{type: object, properties: {{}}}}
  - name: mail_send
    description: Sends a mail.
    input_schema: {{type: object, properties: {{to: {{type: string}}}}, required: [to]}}
tool_endpoints:
  - {{tool_name: mail_list, url: "http://localhost:9100/mail/list", method: POST}}
  - {{tool_name: mail_send, url: "http://localhost:9100/mail/send", method: POST}}
environment: {{timeout_seconds: 60, max_turns: 5}}
scoring_components:
  - check: {{keywords: [1, x]}}
reference_solution: "SECRET"
"""
SHELL = """
task_id: T2_file
category: terminal
prompt: {text: "Write right to out.txt."}
tools: []
environment: {timeout_seconds: 60, max_turns: 5}
sandbox_files: [fixtures/in.txt]
sandbox_grader_files: [check.py]
env_snapshot_commands: [python check.py]
scoring_components: []
"""


def made(root: Path, *, service: str = "mock_services/mail/server.py", more: str = "", grader: str = GRADER) -> Path:
    files = {f"src/claw_eval/{name}.py": text for name, text in LIBRARY.items()}
    files["mock_services/_base.py"] = "def add_error_injection(app):\n    app.add_middleware(object)\n"
    files["mock_services/mail/server.py"] = SERVICE
    files["tasks/T1_mail/task.yaml"] = TASK.format(service=service) + more
    files["tasks/T1_mail/grader.py"] = grader
    files["tasks/T1_mail/fixtures/mails.json"] = '[{"id": "m1"}]'
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def shell(root: Path) -> Path:
    folder = made(root) / "tasks/T2_file"
    (folder / "fixtures").mkdir(parents=True)
    (folder / "task.yaml").write_text(SHELL)
    (folder / "grader.py").write_text(GRADER)
    (folder / "fixtures/in.txt").write_text("right\n")
    (folder / "check.py").write_text("print(open('out.txt').read().strip())\n")
    return root


def script(*calls: tuple[str, dict[str, object]]) -> ScriptAgent:
    return ScriptAgent(json.dumps([{"name": name, "arguments": given} for name, given in calls]).encode())


async def test_services_answer_and_the_grader_sees_calls_and_audit(tmp_path: Path, backend: Backend):
    (task,) = read(made(tmp_path)).tasks
    assert (task.id, task.metadata["grading"]) == ("T1_mail", "automated")
    assert b"SECRET" not in b"".join(file.read() for file in task.tools[0].files)
    done = ("submit", {"message": "done"})
    solved = await episode_of(task, script(("mail_list", {}), ("mail_send", {"to": "a"}), done), backend)
    assert solved.outcome is Outcome.SOLVED, solved.result
    seen = [observation.content for step in solved.steps for observation in step.observations]
    assert [json.loads(text) for text in seen] == [{"mails": [{"id": "m1"}]}, {"sent": {"to": "a", "tags": []}}]
    for calls in ((done,), (("mail_send", {"to": "b"}), done)):
        assert (await episode_of(task, script(*calls), backend)).outcome is Outcome.FAILED
    odd = (("mail_send", {"to": "nobody"}), ("mail_send", {"to": "crash"}), ("mail_send", {"to": "a", "tags": 1}))
    ended = await episode_of(task, script(*odd), backend)
    seen = [observation.content for step in ended.steps for observation in step.observations]
    assert [next(iter(json.loads(text))) for text in seen] == ["detail", "error", "detail"]
    assert ended.outcome is Outcome.FAILED


async def test_commands_of_a_task_look_at_the_workspace_with_files_of_the_grader(tmp_path: Path, backend: Backend):
    task = read(shell(tmp_path)).by_id["T2_file"]
    assert {file.path for file in task.inputs} == {"fixtures/in.txt"}
    assert task.verifier.executes_agent_code == "subprocess"
    assert (await episode_of(task, ScriptAgent(b"cp fixtures/in.txt out.txt"), backend)).outcome is Outcome.SOLVED
    forged = ScriptAgent(b"echo 'print(\"right\")' > check.py")
    assert (await episode_of(task, forged, backend)).outcome is Outcome.FAILED
    assert (await episode_of(task, make_agent("noop"), backend)).outcome is Outcome.FAILED


ASKING = GRADER.replace(
    "        parts = [bool",
    "        clear = judge.evaluate(str(said[-1:]), 'clear').score\n"
    "        if clear: clear = judge.evaluate(str(said[-1:]), f'polite {clear}').score\n"
    "        parts = [clear > 0.5, clear > 0.5, bool",
)


async def test_model_answers_what_a_grader_asks(
    tmp_path: Path, backend: Backend, fake_openai: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(MODEL, "judge-1")
    monkeypatch.setenv(BASE_URL, fake_openai.base_url)
    (task,) = read(made(tmp_path, grader=ASKING)).tasks
    assert (task.id, task.verifier.grader) == ("T1_mail.judged", "questions")
    assert task.tools
    sends = script(("mail_send", {"to": "a"}), ("submit", {"message": "done <|im_end|>"}))

    async def graded(answer: Callable[[str], str]) -> Episode:
        async def respond(request: dict[str, Any]) -> Any:
            return await reply(answer(str(request["messages"][-1]["content"])))(request)

        fake_openai.default = respond
        return await episode_of(task, sends, backend)

    solved = await graded(lambda asked: '{"score": 1}')
    assert solved.outcome is Outcome.SOLVED, solved.result
    assert solved.result is not None
    assert solved.result.judged_by == "questions (judge-1)"
    assert solved.result.judgement is not None
    assert solved.result.judgement.votes == {"passes": (1.0, 1.0, 1.0)}
    asked = [request["messages"][0]["content"] for request in fake_openai.requests]
    assert sorted({text.split(":")[0] for text in asked}) == ["clear", "polite 1.0"], "the second depends on the first"
    assert not any("<|im_end|>" in text for text in asked)
    fails = await graded(lambda asked: json.dumps({"score": int(asked.startswith("clear"))}))
    assert fails.outcome is Outcome.FAILED
    unread = await graded(lambda asked: "Well." if "done" in asked else '{"score": 1}')
    assert (unread.outcome, unread.cause) == (Outcome.FAILED, "output"), "the untouched workspace could be judged"
    blind = await graded(lambda asked: "Well.")
    assert (blind.outcome, blind.cause) == (Outcome.INFRA, "control-output")


def test_user_speaks_by_the_prompt_of_the_set(tmp_path: Path):
    more = "user_agent: {enabled: true, persona: You are Ann., system_prompt_suffix: Ask.}\n"
    path = made(tmp_path, more=more) / "tasks/T1_mail/task.yaml"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "mail_" not in line))
    text = path.read_text()
    start, end = text.index("services:"), text.index("prompt:")
    text = text[:start] + text[end:]
    start, end = text.index("tools:"), text.index("environment:")
    path.write_text(text[:start] + text[end:])
    (task,) = read(tmp_path).tasks
    assert task.dialogue is not None
    assert task.dialogue.opening == (("system", "Ask."), ("user", "Send a mail to a."))
    assert task.dialogue.options["prompt"] == "Be a user.\nYou are Ann."


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"service": "mock_services/web_real/server.py"}, "network: it searches"),
        ({"shell": "sandbox_files: [gone.txt]"}, "network: gone.txt is not in the clone"),
        ({"shell": "sandbox_files: [fixtures/a.mp4]"}, "image not here: the programs"),
        ({"shell": "sandbox_files: [fixtures/a.png]"}, "ours: the agent has to see"),
    ],
)
def test_reasons(tmp_path: Path, changes: dict[str, str], reason: str):
    root = shell(tmp_path)
    task_id = "T1_mail"
    if service := changes.get("service"):
        (root / "mock_services/web_real").mkdir()
        (root / service).write_text(SERVICE)
        made(root, service=service)
    else:
        files = changes["shell"]
        task_id = "T2_file"
        for name in ("a.mp4", "a.png"):
            (root / "tasks/T2_file/fixtures" / name).write_bytes(b"x")
        text = SHELL.replace("sandbox_files: [fixtures/in.txt]", files)
        (root / "tasks/T2_file/task.yaml").write_text(text)
    assert str(read(root).by_id[task_id].unsupported).startswith(reason)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("task_id: T1_mail", "task_id: [", "is not YAML"),
        ("task_id: T1_mail", "x: &a [1]\ntask_id: *a", "has aliases"),
        ("task_id: T1_mail", "task_id: ../x", "field task_id"),
        ("command: python", "command: rm", "field services"),
        ("category: communication", "x: 1", "is no task of Claw-Eval"),
        ("timeout_seconds: 60", "timeout_seconds: soon", "is no task of Claw-Eval"),
        ("mock_services/mail/server.py", "mock_services/../../x/server.py", "field services"),
    ],
)
def test_malformed_definitions_are_problems(tmp_path: Path, old: str, new: str, error: str):
    root = shell(tmp_path)
    path = root / "tasks/T1_mail/task.yaml"
    path.write_text(path.read_text().replace(old, new, 1))
    assert error in read(root).problems["T1_mail"]


@pytest.mark.parametrize("name", ["tasks/T1_mail/grader.py", "mock_services/mail/server.py", "tasks/T1_mail/task.yaml"])
def test_links_are_not_followed(tmp_path: Path, name: str):
    root = shell(tmp_path / "clone")
    (tmp_path / "secret").write_text((root / name).read_text())
    (root / name).unlink()
    (root / name).symlink_to(tmp_path / "secret")
    assert "cannot be read" in read(root).problems["T1_mail"]


def test_file_outside_of_the_clone_is_not_mounted(tmp_path: Path):
    root = made(tmp_path / "clone")
    (tmp_path / "secret.json").write_text("[]")
    fixture = root / "tasks/T1_mail/fixtures/mails.json"
    fixture.unlink()
    fixture.symlink_to(tmp_path / "secret.json")
    with pytest.raises(TaskError):
        _frozen(read(root).tasks)


def _frozen(tasks: tuple[Task, ...]) -> None:
    for task in tasks:
        task.frozen()


def test_a_clone_of_the_set_is_read():
    tasks = published_clone("Claw-Eval", "claw-eval/claw-eval")
    assert len(tasks) == 300
    assert not tasks.problems
    reasons = [task for task in tasks.tasks if str(task.unsupported).startswith("ours")]
    assert len(reasons) <= 6
