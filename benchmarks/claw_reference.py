"""Calls the services of Claw-Eval and grades with its graders, over the real packages or over our stand-ins.

    python claw_reference.py theirs CLONE < cases.jsonl > said.jsonl  # with pydantic, fastapi, httpx, pyyaml, openai
    python -S claw_reference.py ours CLONE FORMATS < cases.jsonl > said.jsonl

A case has ``task`` (of the set), ``calls``, the ``final`` message and ``snapshot``. A line has the responses, score and
verdict, and how often a model was asked. The model is a script (:func:`answer`). Each case has its own process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import time
import types
from typing import Any
from urllib.parse import urlsplit

CLONE = os.path.realpath(sys.argv[2])
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ][\d:.]+(Z|[+-]\d\d:?\d\d)?)?")
"""The services move dates with the clock."""


def messages(case: dict[str, Any], responses: list[Any]) -> list[dict[str, Any]]:
    """The conversation, one call after the other."""
    made: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": case["task"]["prompt"]["text"]}]}
    ]
    for number, (call, (_, body)) in enumerate(zip(case["calls"], responses, strict=True)):
        name = f"call_{number}"
        use = {"type": "tool_use", "id": name, "name": call["name"], "input": call["arguments"]}
        result = [{"type": "text", "text": json.dumps(body, ensure_ascii=False)}]
        made.append({"role": "assistant", "content": [use]})
        made.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": result}]})
    return [*made, {"role": "assistant", "content": [{"type": "text", "text": case["final"]}]}]


def answer(messages: list[dict[str, str]], attempt: int) -> str:
    """A score by the text of the question, in one of the forms that models give; one in four first answers has none."""
    text = _TIME.sub("TIME", json.dumps(messages, sort_keys=True))
    number = hashlib.sha256(text.encode()).digest()[0]
    if attempt == 1 and number % 4 == 3:
        return "I cannot say."
    said = json.dumps({"score": number % 11 / 10, "reasoning": "as scripted"})
    return (said, f"```json\n{said}\n```", f"Well:\n{said}")[number % 3]


class Model:
    """The client of a model that gives :func:`answer`, as the set's judge uses it."""

    asked = 0

    def __init__(self, **_: Any) -> None:
        self._attempts: dict[str, int] = {}
        self.chat = types.SimpleNamespace(completions=types.SimpleNamespace(create=self._create))

    def _create(self, *, messages: list[dict[str, str]], **_: Any) -> Any:
        text = json.dumps(messages)
        attempt = self._attempts[text] = self._attempts.get(text, 0) + 1
        Model.asked += 1
        message = types.SimpleNamespace(content=answer(messages, attempt))
        return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message, finish_reason="stop")])


def theirs(case: dict[str, Any]) -> dict[str, Any]:
    """By the set's own classes, and an HTTP client in this process."""
    import inspect

    from fastapi.testclient import TestClient  # pyright: ignore[reportMissingImports]

    sys.path[:0] = [os.path.join(CLONE, "src")]
    from claw_eval.graders import llm_judge  # pyright: ignore[reportMissingImports]
    from claw_eval.graders.registry import get_grader  # pyright: ignore[reportMissingImports]
    from claw_eval.models.message import Message  # pyright: ignore[reportMissingImports]
    from claw_eval.models.scoring import compute_task_score, is_pass  # pyright: ignore[reportMissingImports]
    from claw_eval.models.task import TaskDefinition  # pyright: ignore[reportMissingImports]
    from claw_eval.models.trace import ToolDispatch, TraceMessage  # pyright: ignore[reportMissingImports]

    task = TaskDefinition.from_yaml(os.path.join(CLONE, "tasks", case["task"]["folder"], "task.yaml"))
    ports: dict[int | None, Any] = {}
    audits = []
    for number, service in enumerate(task.services):
        os.environ.update(service.env)
        path = os.path.join(CLONE, service.command.split()[1])
        spec = importlib.util.spec_from_file_location(f"service_{number}", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ports[service.port] = TestClient(module.app, raise_server_exceptions=False)
        if service.reset_endpoint:
            audits.append(
                (service.name, service.port, urlsplit(service.reset_endpoint).path.replace("/reset", "/audit"))
            )
    endpoints = task.get_endpoint_map()
    responses, dispatches = [], []
    for number, call in enumerate(case["calls"]):
        url = urlsplit(endpoints[call["name"]].url)
        answer = ports[url.port].request(endpoints[call["name"]].method, url.path, json=call["arguments"])
        responses.append((answer.status_code, answer.json() if answer.status_code != 500 else {}))
        dispatches.append(
            ToolDispatch(
                trace_id="1",
                tool_use_id=f"call_{number}",
                tool_name=call["name"],
                endpoint_url=endpoints[call["name"]].url,
                request_body=call["arguments"],
                response_status=answer.status_code,
                response_body=responses[-1][1],
            )
        )
    said = [TraceMessage(trace_id="1", message=Message.model_validate(m)) for m in messages(case, responses)]
    grader = get_grader(task.task_id, tasks_dir=f"{CLONE}/tasks", task_dir=f"{CLONE}/tasks/{case['task']['folder']}")
    more: dict[str, Any] = {"media_events": [], "env_snapshot": case["snapshot"]}
    wanted = inspect.signature(grader.grade).parameters
    named = {name: value for name, value in more.items() if name in wanted and value is not None}
    found = {name: ports[port].get(path).json() for name, port, path in audits}
    llm_judge.OpenAI, llm_judge.time = Model, types.SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    judge = llm_judge.LLMJudge("scripted")
    score = compute_task_score(grader.grade(said, dispatches, task, audit_data=found, judge=judge, **named))
    return {"responses": responses, "score": score, "passes": is_pass(score), "asked": Model.asked}


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """By what runs in our sandboxes."""
    stage = sys.modules["claw_stage"]
    known: dict[str, str] = {}
    stage.install(known)
    services = stage.ServiceStage(CLONE, case["task"])
    responses = [services.call(call["name"], call["arguments"]) for call in case["calls"]]
    said = messages(case, responses)
    while True:
        try:
            score, passes, _ = stage.graded(CLONE, case["task"], said, case["calls"], case["snapshot"])
            return {"responses": responses, "score": score, "passes": passes, "asked": len(known)}
        except sys.modules["asking"].Asks as asks:
            for name, asked in asks.questions.items():
                text = json.dumps(asked, sort_keys=True)
                tries = (n for n in (1, 2, 3) if hashlib.sha256(f"{n} {text}".encode()).hexdigest() == name)
                known[name] = answer(asked, next(tries))


def main() -> None:
    """One line for each case."""
    judge = theirs
    if sys.argv[1] == "ours":
        judge = ours
        for name in ("asking", "stand_ins", "claw_stage"):
            spec = importlib.util.spec_from_file_location(name, f"{os.path.realpath(sys.argv[3])}/_{name}.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    else:
        import fastapi.testclient  # pyright: ignore[reportMissingImports]  # noqa: F401  # before the processes part
    out = os.dup(1)
    os.dup2(2, 1)  # what graders print
    os.chdir(CLONE)
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                said: Any = judge(case)
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            os.write(out, (json.dumps(said, default=str) + "\n").encode())
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
