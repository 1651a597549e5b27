"""Runs the services and the graders of Claw-Eval in a sandbox, over small stand-ins for what they import.

Standard library only: it is mounted as ``claw_stage.py`` beside ``stand_ins.py``, ``asking.py`` and the folder
``claw`` with files of the set's clone at their paths. A service is called in this process, without HTTP: its functions
are found by the routes that it registers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from asking import KnownAnswers  # pyright: ignore[reportMissingImports]
from stand_ins import (  # pyright: ignore[reportMissingImports]
    BaseModel,
    ValidationError,
    dumped,
    install_pydantic,
    stand_in,
)

__all__ = ["ServiceStage", "graded", "install"]


class HTTPException(Exception):
    def __init__(self, status_code: int, detail: Any = None, **_: Any) -> None:
        super().__init__(detail)
        self.status_code, self.detail = status_code, detail


class FastAPI:
    """The routes of a service. Middleware is not run: that of the set makes random errors, at a rate that is 0."""

    def __init__(self, **_: Any) -> None:
        self.routes: dict[tuple[str, str], Any] = {}

    def _route(self, method: str, path: str) -> Any:
        return lambda function: self.routes.setdefault((method, path), function)

    def get(self, path: str, **_: Any) -> Any:
        return self._route("GET", path)

    def post(self, path: str, **_: Any) -> Any:
        return self._route("POST", path)

    def add_middleware(self, *given: Any, **named: Any) -> None:
        """Middleware is not run."""

    def call(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """The status and the JSON value of a response."""
        function = self.routes.get((method, path))
        if function is None:
            return 404, {"detail": "Not Found"}
        try:
            given = _arguments(function, body)
        except ValidationError as error:
            return 422, {"detail": [{"msg": str(error)}]}
        try:
            result = function(**given)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return 200, json.loads(json.dumps(dumped(result), default=str))
        except HTTPException as error:
            return error.status_code, {"detail": error.detail}
        except Exception as error:  # of the set's service
            return 500, {"error": f"{type(error).__name__}: {error}"}


def _arguments(function: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body as the one model that a function takes."""
    for name, kind in typing.get_type_hints(function).items():
        models = [one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
        if name != "return" and models:
            return {name: models[0].model_validate(dict(body))}
    return {}


class _Client:
    """The client of a model, as graders use it: ``client.chat.completions.create``."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._answers = KnownAnswers(known)
        self.chat = types.SimpleNamespace(completions=types.SimpleNamespace(create=self._create))

    def _create(self, *, messages: list[dict[str, str]], **_: Any) -> Any:
        message = types.SimpleNamespace(content=self._answers.answer(messages))
        return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message, finish_reason="stop")])


def install(known: Mapping[str, str] | None = None) -> None:
    """Put the stand-ins where services and graders import from. ``known``: the model's answers, as
    :func:`asking.answers` gives them; None if no model is asked."""
    install_pydantic()
    stand_in("fastapi", FastAPI=FastAPI, HTTPException=HTTPException, Request=object)
    stand_in("fastapi.responses", JSONResponse=dict)
    for name in ("starlette", "starlette.middleware", "uvicorn", "yaml", "httpx"):
        stand_in(name)
    stand_in("starlette.middleware.base", BaseHTTPMiddleware=object)
    stand_in("openai", OpenAI=None if known is None else lambda **_: _Client(known))


class ServiceStage:
    """The services of a task, as they stand when it begins.

    Args:
        folder: the folder ``claw``; becomes the working directory, from which services open their data.
        task: the task's ``services`` and ``tool_endpoints``.
    """

    def __init__(self, folder: str, task: Mapping[str, Any]) -> None:
        os.chdir(folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self._services: dict[str, Any] = {}
        self._ports: dict[int, Any] = {}
        listed: list[dict[str, Any]] = task.get("services") or []
        for number, service in enumerate(listed):
            variables: dict[str, Any] = service.get("env") or {}
            os.environ.update({name: str(value) for name, value in variables.items()})
            path = service["command"].split()[1]
            spec = importlib.util.spec_from_file_location(f"claw_service_{number}", os.path.join(folder, path))
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self._services[service["name"]] = module.app, service.get("reset_endpoint")
            self._ports[int(service["port"])] = module.app
        self._endpoints = {one["tool_name"]: one for one in task.get("tool_endpoints") or ()}

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[int, Any]:
        """The status and the JSON value that a tool gives; 404 for a tool without a service."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            return 404, {"error": f"unknown tool '{name}'"}
        port, path = _address(endpoint["url"])
        app = self._ports.get(port)
        if app is None:
            return 500, {"error": f"nothing answers at port {port}"}
        return app.call(endpoint.get("method", "POST"), path, arguments)

    def audits(self) -> dict[str, Any]:
        """What each service that can be reset says that it did."""
        found = {}
        for name, (app, reset) in self._services.items():
            if reset:
                path = _address(reset)[1].rpartition("/reset")[0] + "/audit"
                found[name] = app.call("GET", path, {})[1]
        return found


def _address(url: str) -> tuple[int, str]:
    """Port and path of ``http://localhost:PORT/PATH``."""
    host, _, path = url.partition("://")[2].partition("/")
    return int(host.rpartition(":")[2]), f"/{path}"


def graded(
    folder: str,
    task: Mapping[str, Any],
    messages: list[dict[str, Any]],
    calls: list[Mapping[str, Any]],
    snapshot: Mapping[str, Any] | None,
) -> tuple[float, bool, dict[str, Any]]:
    """What the set's own grader says: the score, whether it passes, and the scores by dimension.

    ``folder`` is the folder ``claw``. ``messages`` have the set's form, ``calls`` are ``name`` and ``arguments``; those
    of services are made again.
    """
    sys.path[:0] = [os.path.join(folder, "src"), folder]
    from claw_eval.graders.registry import get_grader  # pyright: ignore[reportMissingImports]
    from claw_eval.models.message import Message  # pyright: ignore[reportMissingImports]
    from claw_eval.models.scoring import compute_task_score, is_pass  # pyright: ignore[reportMissingImports]
    from claw_eval.models.task import TaskDefinition  # pyright: ignore[reportMissingImports]
    from claw_eval.models.trace import ToolDispatch, TraceMessage  # pyright: ignore[reportMissingImports]

    services = ServiceStage(folder, task)
    dispatches = []
    for number, call in enumerate(calls):
        name, arguments = call["name"], call["arguments"]
        served = bool(task.get("services"))
        status, body = services.call(name, arguments) if served else (200, {})
        made = {"tool_use_id": f"call_{number}", "tool_name": name, "endpoint_url": "", "request_body": arguments}
        dispatches.append(ToolDispatch(trace_id="1", response_status=status, response_body=body, **made))
    home = os.path.join(folder, "tasks", task["folder"])
    definition = TaskDefinition.model_validate({**task, "task_file": os.path.join(home, "task.yaml")})
    said = [TraceMessage(trace_id="1", message=Message.model_validate(message)) for message in messages]
    grader = get_grader(task["task_id"], tasks_dir=os.path.join(folder, "tasks"), task_dir=home)
    wanted = inspect.signature(grader.grade).parameters
    more = {"media_events": [], "env_snapshot": snapshot}
    named = {name: value for name, value in more.items() if name in wanted and value is not None}
    scores = grader.grade(said, dispatches, definition, audit_data=services.audits(), judge=_judge(), **named)
    total = compute_task_score(scores)
    return total, bool(is_pass(total)), scores.model_dump()


def _judge() -> Any:
    """The set's own judge, which asks again without a pause; None if there is no model."""
    if sys.modules["openai"].OpenAI is None:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    from claw_eval.graders import llm_judge  # pyright: ignore[reportMissingImports]

    llm_judge.time = types.SimpleNamespace(sleep=lambda seconds: None)
    return llm_judge.LLMJudge("judge")
