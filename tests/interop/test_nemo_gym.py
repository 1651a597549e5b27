"""NeMo Gym's own servers, agent and collection of rollouts on our resources server, over HTTP.

They run in one process, as NeMo Gym's classes, so that no Ray cluster is needed. Needs the package ``nemo-gym``.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import clawgym

pytest.importorskip("nemo_gym", reason="needs NeMo Gym: clawgym interop check nemo_gym")

import uvicorn
from nemo_gym import global_config
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
from nemo_gym.server_utils import HeadServer, ServerClient, SimpleServer
from omegaconf import OmegaConf

from clawgym.interop.nemo_gym import ClawGymResourcesServer, ClawGymSession, rows

EXAMPLE = Path(__file__).parents[2] / "examples/tasks/three_files.py"
TASKS = clawgym.load(EXAMPLE)
SCRIPTS = {
    "solved": ["echo one > a; cat a a > b", "pwd; cat a b > c; cat c"],
    "failed": ["echo one > a", "cat b"],
    "nothing": [],
    "wrong arguments": [None, "echo one > a"],
    "no sandbox": ["touch lost"],
    "over": ["echo one > a; cat a a > b; cat a b > c", "submit", "ls"],
}
"""The commands of an episode; None is a call with arguments that the tool does not have."""
Held = Callable[..., None]


class Model(BaseHTTPRequestHandler):
    """Answers Responses requests with what the script that the instruction names says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script = SCRIPTS[body["input"][0]["content"].rpartition("script: ")[2]]
        turn = sum(item.get("type") == "function_call" for item in body["input"])
        if turn < len(script):
            command = script[turn]
            arguments = json.dumps({"cmd": "ls"} if command is None else {"command": command})
            about = {"type": "function_call", "id": f"f{turn}", "call_id": f"c{turn}", "status": "completed"}
            output: dict[str, Any] = {**about, "name": "bash", "arguments": arguments}
        else:
            content = [{"type": "output_text", "text": "done", "annotations": []}]
            output = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
        answer = {
            **{"id": "r", "object": "response", "created_at": 1, "model": "fake", "output": [output]},
            **{"parallel_tool_calls": False, "tool_choice": "auto", "tools": body.get("tools", [])},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    """The address of an OpenAI-compatible server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def _server(kind: str, name: str) -> type[SimpleServer]:
    """A server of NeMo Gym's package."""
    names = {"simple_agent": "SimpleAgent", "openai_model": "SimpleModelServer"}
    return getattr(importlib.import_module(f"{kind}.{name}.app"), names[name])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _settings(model: str) -> dict[str, Any]:
    """What NeMo Gym makes of its YAML."""

    def instance(kind: str, name: str, **more: Any) -> dict[str, Any]:
        return {kind: {name: {"host": "127.0.0.1", "port": _free_port(), "entrypoint": "app.py", **more}}}

    resources = {"type": "resources_servers", "name": "clawgym_server"}
    policy = {"type": "responses_api_models", "name": "policy_model"}
    endpoint = {"openai_base_url": model, "openai_api_key": "none", "openai_model": "fake"}
    return {
        "head_server": {"host": "127.0.0.1", "port": _free_port()},
        "clawgym_server": instance("resources_servers", "clawgym", tasks=str(EXAMPLE), options={"reward": "official"}),
        "clawgym_agent": instance(
            "responses_api_agents", "simple_agent", resources_server=resources, model_server=policy
        ),
        "policy_model": instance("responses_api_models", "openai_model", **endpoint),
    }


async def _collect(settings: dict[str, Any], folder: Path) -> None:
    everything = OmegaConf.create(settings)
    running = []
    for name, about in settings.items():
        if name == "head_server":
            continue
        ((kind, of_kind),) = about.items()
        ((program, config),) = of_kind.items()
        cls = ClawGymResourcesServer if program == "clawgym" else _server(kind, program)
        client = ServerClient(head_server_config=settings["head_server"], global_config_dict=everything)
        parsed = cls.model_fields["config"].annotation.model_validate({**config, "name": name})  # type: ignore[union-attr]
        server = cls(config=parsed, server_client=client)
        app = server.setup_webserver()
        server.setup_exception_middleware(app)
        serving = uvicorn.Server(uvicorn.Config(app, port=config["port"], log_level="warning"))
        running.append((serving, asyncio.create_task(serving.serve())))
    files = {"input_jsonl_fpath": folder / "tasks.jsonl", "output_jsonl_fpath": folder / "rollouts.jsonl"}
    config = {name: str(path) for name, path in files.items()}
    await RolloutCollectionHelper().run_from_config(
        RolloutCollectionConfig(**config, upload_rollouts_to_wandb=False, disable_aggregation=True)
    )
    for serving, _ in running:
        serving.should_exit = True
    await asyncio.gather(*(task for _, task in running))


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a collection of rollouts wrote."""
    folder = tmp_path_factory.mktemp("nemo")
    with (folder / "tasks.jsonl").open("w") as file:
        for name in SCRIPTS:
            (row,) = rows(TASKS, "clawgym_agent")
            row["responses_create_params"]["input"][0]["content"] += f"\n\nscript: {name}"
            file.write(json.dumps(row) + "\n")
    settings = _settings(model)
    graded = ClawGymSession.grade

    def grade(session: ClawGymSession) -> tuple[float, dict[str, Any]]:
        lost = "lost" in session.bash("ls")
        return (0.0, {"outcome": "infra"}) if lost else graded(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, OmegaConf.to_yaml(OmegaConf.create(settings)))
        patch.setattr(ClawGymSession, "grade", grade)
        head, thread, _ = HeadServer.run_webserver()
        asyncio.run(_collect(settings, folder))
        head.should_exit = True
        thread.join()
    return folder


def _named(file: Path) -> dict[str, dict[str, Any]]:
    """Name of a script -> its rollout."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["responses_create_params"]["input"][0]["content"].rpartition("script: ")[2]: row for row in found}


@pytest.fixture(scope="module")
def collected(folder: Path) -> dict[str, dict[str, Any]]:
    """Name of a script -> its rollout."""
    return _named(folder / "rollouts.jsonl")


def _outputs(rollout: dict[str, Any]) -> list[str]:
    return [item["output"] for item in rollout["response"]["output"] if item["type"] == "function_call_output"]


def _played(commands: list[str]) -> tuple[list[str], float]:
    """The outputs and the reward of the same commands by ``gym.make``."""
    env = gym.make("ClawGym/terminal-v0", tasks=TASKS, reward="official")
    env.reset(options={"task_ids": [TASKS.tasks[0].id]})
    outputs, ended = [], None
    for command in commands:
        observation, reward, terminated, truncated, _ = env.step(command)
        outputs.append(observation["output"])
        if terminated or truncated:
            ended = float(reward)
            break
    if ended is None:
        ended = float(env.step("submit")[1])
    env.close()
    return outputs, ended


def test_rewards_are_those_of_gym_make(collected: dict[str, dict[str, Any]], record_property: Held) -> None:
    assert set(collected) == set(SCRIPTS) - {"no sandbox"}
    for name, rollout in collected.items():
        _, reward = _played([command for command in SCRIPTS[name] if command is not None])
        assert rollout["reward"] == pytest.approx(reward), name
    assert collected["solved"]["reward"] == 1.0
    assert 0 < collected["failed"]["reward"] < 1
    assert collected["nothing"]["reward"] == 0.0
    record_property("held", f"the rewards of {len(collected)} rollouts of NeMo Gym's agent are those of `gym.make`")
    outcomes = {name: rollout["outcome"] for name, rollout in collected.items()}
    assert (outcomes["solved"], outcomes["failed"]) == ("solved", "failed")
    record_property("held", "a rollout has the outcome and the cause of its episode")


def test_outputs_are_those_of_gym_make(collected: dict[str, dict[str, Any]], record_property: Held) -> None:
    for name in ("solved", "failed", "nothing"):
        assert _outputs(collected[name]) == _played(SCRIPTS[name])[0], name  # type: ignore[arg-type]
    record_property("held", "the model sees the outputs that `gym.make` returns")
    refused, output = _outputs(collected["wrong arguments"])
    assert "command" in refused
    assert output == ""
    assert _outputs(collected["over"])[-1] == "[the episode is over]"
    record_property("held", "a call with wrong arguments is answered to the model, and the rollout goes on")


def test_infrastructure_errors_are_failures(folder: Path, record_property: Held) -> None:
    failed = _named(folder / "rollouts_failures.jsonl")
    assert set(failed) == {"no sandbox"}
    assert failed["no sandbox"]["_ng_failure_class"] == "infra"
    record_property(
        "held", "an episode with an infrastructure error is in NeMo Gym's file of failures, to be tried again"
    )
