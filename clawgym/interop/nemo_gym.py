"""NeMo Gym: a resources server whose sessions are episodes of ``ClawGym/terminal-v0``.

    # resources_servers/clawgym/app.py
    from clawgym.interop.nemo_gym import ClawGymResourcesServer

    if __name__ == "__main__":
        ClawGymResourcesServer.run_webserver()

Needs the package ``nemo-gym``, and so Python 3.12.

Invariants: a session has one environment, which is closed when it is verified, seeded again, or not used for long. The
reward is that of ``gym.make``. A rollout with an infrastructure error is marked as a failure, never as a reward of 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
from pydantic import Field, PrivateAttr

from clawgym.errors import MissingDependency
from clawgym.records import TaskSet
from clawgym.tasks.sets import load

try:
    from fastapi import FastAPI, HTTPException, Request, Response  # pyright: ignore[reportMissingImports]
    from nemo_gym.base_resources_server import (  # pyright: ignore[reportMissingImports]
        BaseResourcesServerConfig,
        BaseSeedSessionRequest,
        BaseSeedSessionResponse,
        BaseVerifyRequest,
        SimpleResourcesServer,
    )
    from nemo_gym.server_utils import SESSION_ID_KEY  # pyright: ignore[reportMissingImports]
    from pydantic import BaseModel
    from starlette.concurrency import run_in_threadpool  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency(f"NeMo Gym is needed ({error}): pip install nemo-gym, with Python 3.12 or later") from error

__all__ = ["ClawGymResourcesConfig", "ClawGymResourcesServer", "ClawGymSession", "rows"]

_TOOL = {
    "type": "function",
    "name": "bash",
    "description": "Run a command in a persistent bash shell. Working directory, variables and background jobs stay.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "Any bash text, one line or many."}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "strict": True,
}
_FAILURE = "_ng_failure_class"
"""The key that sends a rollout to NeMo Gym's file of failures, from which it is tried again."""


def rows(tasks: TaskSet, agent: str) -> Iterator[dict[str, Any]]:
    """The rows of a data set for ``ng_collect_rollouts``, one for each task that can run here.

    Args:
        tasks: the task set that the server is configured with.
        agent: the name of the agent server in NeMo Gym's configuration.
    """
    for task in tasks.tasks:
        if not task.unsupported:
            yield {
                "responses_create_params": {
                    "input": [{"role": "user", "content": task.instruction}],
                    "tools": [_TOOL],
                },
                "task_id": task.id,
                "agent_ref": {"type": "responses_api_agents", "name": agent},
            }


class ClawGymResourcesConfig(BaseResourcesServerConfig):  # type: ignore[misc]
    """What the YAML of the server may say."""

    tasks: str = "terminal-basic:train"
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of ``gym.make``, such as ``backend`` and ``reward``."""
    sessions: int = 256
    """Most sessions at a time; another one is refused."""
    idle_seconds: float = 3600.0
    """A session that was not used for so long is closed when another one begins."""


class ClawGymSession:
    """One episode."""

    def __init__(self, tasks: TaskSet, task_id: str, seed: int | None, options: dict[str, Any]) -> None:
        self._env = gym.make("ClawGym/terminal-v0", tasks=tasks, **options)
        self.one_at_a_time = asyncio.Lock()
        self.used = time.monotonic()
        self._ended: tuple[float, dict[str, Any]] | None = None
        try:
            self._env.reset(seed=seed, options={"task_ids": [task_id]})
        except BaseException:
            self._env.close()
            raise

    def bash(self, command: str) -> str:
        """Run a command. Returns its output."""
        if self._ended is not None:
            return "[the episode is over]"
        observation, reward, terminated, truncated, info = self._env.step(command)
        if terminated or truncated:
            self._ended = float(reward), info
        return observation["output"]

    def grade(self) -> tuple[float, dict[str, Any]]:
        """End the episode. Returns the reward and ``info``."""
        if self._ended is None:
            self.bash("submit")
        assert self._ended is not None
        return self._ended

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


class _Seed(BaseSeedSessionRequest):  # type: ignore[misc]
    task_id: str
    seed: int | None = None


class _Command(BaseModel):
    command: str


class _Verify(BaseVerifyRequest):  # type: ignore[misc]
    task_id: str


class ClawGymResourcesServer(SimpleResourcesServer):  # type: ignore[misc]
    """Tasks of this library, with the tool ``bash``."""

    config: ClawGymResourcesConfig
    _tasks: TaskSet = PrivateAttr()
    _sessions: dict[str, ClawGymSession] = PrivateAttr(default_factory=dict)
    _starting: int = PrivateAttr(default=0)

    def setup_webserver(self) -> FastAPI:
        self._tasks = load(self.config.tasks)
        app = super().setup_webserver()
        app.post("/bash")(self.bash)
        return app

    async def seed_session(self, request: Request, body: _Seed) -> BaseSeedSessionResponse:
        """Start the episode of a session, with a sandbox of its own."""
        now = time.monotonic()
        id = request.session[SESSION_ID_KEY]
        for name, session in list(self._sessions.items()):
            if name == id or now - session.used > self.config.idle_seconds:
                await run_in_threadpool(self._sessions.pop(name).close)
        if len(self._sessions) + self._starting >= self.config.sessions:
            raise HTTPException(503, f"{self.config.sessions} sessions are open, verify some of them or raise sessions")
        options = self.config.options
        self._starting += 1
        try:
            started = await run_in_threadpool(ClawGymSession, self._tasks, body.task_id, body.seed, options)
        finally:
            self._starting -= 1
        if (other := self._sessions.pop(id, None)) is not None:  # begun at the same time
            await run_in_threadpool(other.close)
        self._sessions[id] = started
        return BaseSeedSessionResponse()

    def _session(self, request: Request) -> ClawGymSession:
        session = self._sessions.get(request.session[SESSION_ID_KEY])
        if session is None:
            raise HTTPException(409, "the session has no episode, call /seed_session first")
        session.used = time.monotonic()
        return session

    async def bash(self, request: Request, body: _Command) -> Response:
        """The tool: the output of a command, as plain text."""
        session = self._session(request)
        async with session.one_at_a_time:
            output = await run_in_threadpool(session.bash, body.command)
        return Response(output.encode(errors="replace"), media_type="text/plain; charset=utf-8")

    async def verify(self, request: Request, body: _Verify) -> dict[str, Any]:
        """Grade the workspace in a clean sandbox, and close the session."""
        session = self._session(request)
        async with session.one_at_a_time:
            self._sessions.pop(request.session[SESSION_ID_KEY], None)
            try:
                reward, info = await run_in_threadpool(session.grade)
            finally:
                await run_in_threadpool(session.close)
        found = {"reward": reward, "outcome": str(info.get("outcome")), "cause": info.get("cause")}
        if info.get("outcome") == "infra":
            found[_FAILURE] = "infra"
        return {**body.model_dump(), **found}
