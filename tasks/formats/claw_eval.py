"""Reader of Claw-Eval: folders with a ``task.yaml``, a grader in Python, and services that stand for a user's accounts.

The path is a clone of the set. The services and the grader are the set's own, whose code is mounted from the clone and
runs in sandboxes only (:mod:`clawgym.tasks.formats._claw_stage`). A task whose grader asks a model has our grader
``questions``, which gets its answers from the host, and the ending ``.judged``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

from clawgym.errors import TaskError
from clawgym.records import Dialogue, Limits, Task, TaskFile, ToolServer, VerifierSpec
from clawgym.registry import formats
from clawgym.tasks.formats._files import check_files, check_task_id, malformed_as_task_error, read_text, walk
from clawgym.tasks.formats.protocol import Reader, TaskFormat
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["ClawEvalFormat"]

_LONGEST = 2**20
_WORKSPACE = "/workspace"
_LIBRARY = "src/claw_eval"
_SHELL = {"Bash", "Read", "Write", "Edit", "Glob", "Grep"}
"""Tools of the set's own sandbox; a shell stands for them here."""
_TEXTS = {".csv", ".html", ".js", ".json", ".md", ".py", ".txt", ".xml", ".yaml", ".yml"}
_PICTURES = {".gif", ".jpeg", ".jpg", ".png", ".webp"}
_FILMS = {".avi", ".mkv", ".mov", ".mp4", ".webm"}
_WEB = {"web_real", "web_real_injection"}
_SERVICE = re.compile(r"python3? (mock_services/(\w+)/server\.py)\s*")
_DEFAULT = re.compile(r'"tasks"((?:\s*/\s*"[^"]+")+)')
"""Where a service says which file it opens if no variable names one."""

_CHECK_PY = '''\
"""Runs the grader of a Claw-Eval task: prints whether the work passes, by the set's own threshold."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import asking
import claw_stage


def said(payload):
    """The conversation in the set's form."""
    yield {"role": "user", "content": [{"type": "text", "text": payload["user_query"]}]}
    last = ""
    for number, message in enumerate(payload["transcript"]):
        text = message.get("content") or ""
        if message["role"] == "assistant":
            calls = [c for c in message.get("tool_calls") or () if c["name"] != "submit"]
            last = text or last
            blocks = [{"type": "text", "text": text}] if text else []
            blocks += [
                {"type": "tool_use", "id": str(c["id"]), "name": c["name"], "input": c["arguments"]} for c in calls
            ]
            yield {"role": "assistant", "content": blocks}
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": str(result["id"]),
                    "content": [{"type": "text", "text": str(result.get("content") or "")}],
                }
                for result in message.get("results") or ()
            ]
            if results:
                yield {"role": "user", "content": results}
        elif message["role"] == "user" and number:
            yield {"role": "user", "content": [{"type": "text", "text": "[user_agent]\\n" + text}]}
    if payload["final_message"] and payload["final_message"] != last:
        yield {"role": "assistant", "content": [{"type": "text", "text": payload["final_message"]}]}


def snapshot(task, workspace):
    """What the task's commands print about the workspace, with files that the agent never saw."""
    if not task.get("env_snapshot_commands"):
        return None
    home = os.path.join(FOLDER, "claw", "tasks", task["folder"])
    for name in task.get("sandbox_grader_files") or ():
        target = os.path.join(workspace, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(os.path.join(home, name), target)
    programs = tempfile.mkdtemp()
    os.symlink(sys.executable, os.path.join(programs, "python"))
    env = {**os.environ, "PATH": programs + ":" + os.environ.get("PATH", "/usr/bin:/bin")}
    found = {}
    seconds = task["environment"].get("env_snapshot_timeout", 10)
    for command in task["env_snapshot_commands"]:
        argv = ["/bin/sh", "-c", command]
        try:
            done = subprocess.run(argv, capture_output=True, cwd=workspace, env=env, timeout=seconds)
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, out, err = -1, b"", b"timed out"
        texts = {"stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}
        found["cmd:" + command] = {"exit_code": code, **texts}
    return found


with open(os.path.join(FOLDER, "task.json"), encoding="utf-8") as file:
    task = json.load(file)
with open(os.environ["OPENCLAW_REWARD_PAYLOAD"], encoding="utf-8", errors="replace") as file:
    payload = json.load(file)
messages = list(said(payload))
log = os.path.join(sys.argv[1], "calls.jsonl")
if task.get("services"):
    calls = []
    if os.path.exists(log):
        with open(log, encoding="utf-8") as file:
            calls = [json.loads(line) for line in file]
else:
    made = (block for message in messages for block in message["content"] if block["type"] == "tool_use")
    calls = [{"name": block["name"], "arguments": block["input"]} for block in made]
with contextlib.redirect_stdout(sys.stderr):
    seen = snapshot(task, sys.argv[1])
    claw_stage.install(asking.answers())
    try:
        score, passes, scores = claw_stage.graded(os.path.join(FOLDER, "claw"), task, messages, calls, seen)
        said = {"passes": float(passes)}
        print(score, scores)
    except asking.Asks as asks:
        said = {"questions": asks.questions}
print(json.dumps(said))
'''


@formats.register("claw-eval")
class ClawEvalFormat(TaskFormat):
    """Claw-Eval: a clone of the set with ``tasks/*/task.yaml``, ``mock_services/`` and ``src/claw_eval/``."""

    def holds(self, path: Path) -> bool:
        return (path / _LIBRARY / "graders/registry.py").is_file() and (path / "mock_services/_base.py").is_file()

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        try:
            names = sorted(entry.name for entry in (path / "tasks").iterdir() if not entry.name.startswith("."))
        except OSError as error:
            raise TaskError(f"{path / 'tasks'}: cannot be listed ({error.strerror}): get a whole copy") from error
        for name in names:
            yield name, partial(_task, path, name)


def _yaml(path: Path, where: str) -> dict[str, Any]:
    """A YAML file without aliases, which could stand for more than memory holds."""
    import yaml

    text = read_text(path, where)
    if len(text) > _LONGEST:
        raise TaskError(f"{where}: has more than {_LONGEST >> 20} MiB: restore the file")

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise TaskError(f"{where}: has aliases: restore the file")
            return super().compose_node(parent, index)

    try:
        value = json.loads(json.dumps(yaml.load(text, Plain), default=str))
    except yaml.YAMLError as error:
        raise TaskError(f"{where}: is not YAML ({str(error)[:200]}): restore the file") from error
    if not isinstance(value, dict):
        raise TaskError(f"{where}: holds no object: restore the file")
    return value


def _definition(path: Path, name: str) -> dict[str, Any]:
    """The ``task.yaml`` in a folder, with ``folder``: its name."""
    data = _yaml(path, f"tasks/{name}/task.yaml")
    for part in data.get("scoring_components") or ():
        words = part.get("check", {}).get("keywords")
        if words is not None:  # numbers without quotation marks
            part["check"]["keywords"] = [str(word) for word in words]
    return {**data, "folder": name}


def _task(path: Path, name: str) -> Task:
    where = f"tasks/{name}/task.yaml"
    with malformed_as_task_error(where, "task of Claw-Eval"):
        data = _definition(path, name)
        services = _services(path, data, where)
        graders = _graders(path, name)
        judged = _asks(graders, "evaluate", "evaluate_actions", "evaluate_visual", "client")
        tools = [tool for tool in data.get("tools") or () if tool["name"] not in _SHELL]
        if tools and not services:
            raise TaskError(f"{where}: field services: has none for its tools: restore the file")
        surroundings = data["environment"]
        prompt = str(data["prompt"]["text"])
        unsupported = _why_not(path, data, services, graders)
        inputs = () if tools or unsupported else check_files(_inputs(path, data), where)
        return Task(
            id=check_task_id(f"{data['task_id']}{'.judged' * judged}", f"{where}: field task_id"),
            instruction=prompt,
            verifier=_verifier(path, data, graders, services, where, judged),
            inputs=inputs,
            workspace=_WORKSPACE,
            tools=(_server(data, tools, services),) if tools else (),
            dialogue=_dialogue(path, data) if tools or data.get("user_agent") else None,
            metadata={
                "category": str(data["category"]),
                "level": str(data.get("difficulty", "")),
                "grading": "judged" if judged else "automated",
            },
            limits=Limits(
                agent_seconds=float(surroundings["timeout_seconds"]), max_steps=int(surroundings["max_turns"])
            ),
            unsupported=unsupported,
            origin=where,
        )


def _why_not(
    path: Path, data: Mapping[str, Any], services: Mapping[str, TaskFile], graders: Mapping[str, str]
) -> str | None:
    """Why the task cannot run here."""
    commands = {PurePosixPath(name).parts[1] for name in services if name.endswith("/server.py")}
    if commands & _WEB:
        return "network: it searches the web"
    shell = not commands and not data.get("user_agent")
    home = path / "tasks" / data["folder"]
    seen = [*(data.get("sandbox_files") or ()), *(data["prompt"].get("attachments") or ())]
    wanted = [*seen, *(data.get("sandbox_grader_files") or ())] if shell or "documents" in commands else []
    if missing := [name for name in wanted if not any((base / name).is_file() for base in (home, path))]:
        return f"network: {missing[0][:200]} is not in the clone: it is in the set's data set on the Hub"
    if "documents" in commands:
        return "image not here: its service reads PDF files with pypdf"
    if data.get("user_agent") and data.get("tools"):
        return "ours: a conversation with a shell"
    kinds = {PurePosixPath(name).suffix.lower() for name in seen} if shell else set()
    if data["category"] == "doc_extraction" and not seen:
        return "network: it has to download a paper"
    helpers = [name for name in data.get("sandbox_grader_files") or () if name.endswith(".py")]
    if any("playwright" in read_text(home, name) for name in helpers):
        return "image not here: the browser of the set's image takes pictures of the page"
    if kinds & {*_FILMS, ".pdf"}:
        return "image not here: the programs for films and PDF files of the set's image"
    if kinds & _PICTURES:
        return "ours: the agent has to see pictures"
    if _asks(graders, "evaluate_visual"):
        return "ours: the model that judges has to see pictures"
    return None


# -- the set's code


def _part(path: Path, name: str) -> TaskFile:
    """A file of the clone, by its path there."""
    return TaskFile(f"claw/{name}", path / name, within=path)


def _texts(path: Path, folder: str) -> Iterator[TaskFile]:
    """The text files below a folder of the clone."""
    if (path / folder).is_dir():
        for file in walk(path / folder):
            if PurePosixPath(file.path).suffix.lower() in _TEXTS:
                yield TaskFile(f"claw/{folder}/{file.path}", file.source, within=file.within)


def _services(path: Path, data: Mapping[str, Any], where: str) -> dict[str, TaskFile]:
    """Path in the clone -> file, of the services and what they open."""
    found: dict[str, TaskFile] = {}
    for service in data.get("services") or ():
        command = _SERVICE.fullmatch(str(service["command"]))
        if command is None:
            raise TaskError(f"{where}: field services: runs no server.py of mock_services: restore the file")
        opened = [
            "/".join(("tasks", *re.findall(r'"([^"]+)"', chain)))
            for chain in _DEFAULT.findall(read_text(path, command[1]))
        ]
        opened += [str(value) for value in (service.get("env") or {}).values() if str(value).startswith("tasks/")]
        for name in (command[1], "mock_services/_base.py", *opened):
            if PurePosixPath(name) != PurePosixPath(TaskFile(name, b"").path) or not (path / name).exists():
                continue
            files = _texts(path, name) if (path / name).is_dir() else (_part(path, name),)
            found |= {file.path.removeprefix("claw/"): file for file in files}
    return found


def _graders(path: Path, name: str) -> dict[str, str]:
    """Path in the clone -> text, of a task's grader and what it takes from others."""
    waiting, found = [f"tasks/{name}/grader.py"], {}
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        text = found[file] = read_text(path, file)
        peers = re.findall(r"load_peer_grader\(\s*[\"']([^\"'/]+)[\"']", text)
        modules = re.findall(r"(?:claw_eval\.graders|from )\.?(\w+)(?= import)", text)
        waiting += [f"tasks/{peer}/grader.py" for peer in peers if peer not in (".", "..")]
        waiting += [
            f"{_LIBRARY}/graders/{one}.py" for one in modules if (path / _LIBRARY / f"graders/{one}.py").is_file()
        ]
    return found


@cache
def _attributes(text: str) -> frozenset[str]:
    """What is taken from ``judge`` in a Python program."""
    return frozenset(
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "judge"
    )


def _asks(graders: Mapping[str, str], *ways: str) -> bool:
    """Whether a grader asks a model in one of these ways."""
    return any(way in _attributes(text) for text in graders.values() for way in ways)


@cache
def _library(path: Path) -> tuple[TaskFile, ...]:
    """The set's classes for tasks, transcripts and graders."""
    found = [_part(path, f"{_LIBRARY}/__init__.py")]
    for part in ("models", "graders"):
        found += [file for file in _texts(path, f"{_LIBRARY}/{part}") if file.path.endswith(".py")]
    return tuple(found)


def _stage(data: Mapping[str, Any], services: Mapping[str, TaskFile]) -> list[TaskFile]:
    here = Path(__file__)
    parts = [TaskFile(f"{name}.py", here.with_name(f"_{name}.py")) for name in ("asking", "claw_stage", "stand_ins")]
    return [*parts, TaskFile("task.json", json.dumps(data, ensure_ascii=False).encode()), *services.values()]


def _server(data: Mapping[str, Any], tools: list[Any], services: Mapping[str, TaskFile]) -> ToolServer:
    """The tools, without anything that tells how the work is graded."""
    offered = {key: data.get(key) for key in ("services", "tool_endpoints")}
    here = Path(__file__)
    files = (
        TaskFile("server.py", here.with_name("_claw_server.py")),
        TaskFile("tool_server.py", here.with_name("_tool_server.py")),
        *_stage({**offered, "tools": tools}, services),
    )
    return ToolServer("claw", ("python3", "-E", "-s", "-S", "-B", "/tools/claw/server.py"), files)


def _dialogue(path: Path, data: Mapping[str, Any]) -> Dialogue:
    """The prompt, and a user who answers where the set has one; else the agent's first reply ends the work."""
    opening = (("user", str(data["prompt"]["text"])),)
    user = data.get("user_agent") or {}
    if not user.get("enabled"):
        return Dialogue(opening)
    if suffix := user.get("system_prompt_suffix"):
        opening = (("system", str(suffix)), *opening)
    tree = ast.parse(read_text(path, f"{_LIBRARY}/runner/user_agent.py"))
    texts = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    prompt = next(text for text in texts if "{persona}" in text).replace("{persona}", str(user["persona"]))
    return Dialogue(opening, "customer", {"prompt": prompt, "stops": ["[DONE]"], "script": []})


# -- what is graded


def _inputs(path: Path, data: Mapping[str, Any]) -> Iterator[TaskFile]:
    home = f"tasks/{data['folder']}"
    for name in data.get("sandbox_files") or ():
        source = f"{home}/{name}" if (path / home / name).is_file() else str(name)
        yield TaskFile(str(name), path / source, within=path)


def _verifier(
    path: Path,
    data: Mapping[str, Any],
    graders: Mapping[str, str],
    services: Mapping[str, TaskFile],
    where: str,
    judged: bool,
) -> VerifierSpec:
    """The set's own grader. ``judged``: a model answers its questions."""
    library = _library(path)
    parts = [_part(path, name) for name in graders]
    home = f"tasks/{data['folder']}"
    parts += [_part(path, f"{home}/{name}") for name in data.get("sandbox_grader_files") or ()]
    parts += _texts(path, f"{home}/fixtures")
    stage = _stage(data, services)
    others = {file.path: file for file in parts}
    for file in (*stage, *library):
        others.pop(file.path, None)
    files = (
        TaskFile("reward.sh", standard_reward_sh(), executable=True),
        TaskFile("check.py", _CHECK_PY.encode()),
        *stage,
        *library,
        *others.values(),
    )
    return VerifierSpec(
        "grader" if judged else "reward_sh",
        check_files(files, where),
        executes_agent_code="subprocess" if data.get("env_snapshot_commands") else None,
        mutable_inputs=("*",),
        grader="questions" if judged else "",
    )
