"""OpenEnv: our environments behind its protocol, and its environments behind ``gym.make``.

    clawgym serve-env ClawGym/terminal-v0                                   # its clients step our environments
    gym.make("ClawGym/openenv-v0", url="http://127.0.0.1:8000", field="message")      # its environments step here

Needs the package ``openenv``.

Invariants: every session has an environment of its own, which is closed with its connection. The server listens on
loopback alone and answers only those who have its secret. Observations and rewards are those of ``gym.make``.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import json
import socket
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from clawgym.envs.spaces import AnyText, counter
from clawgym.errors import ClawGymError, EnvError, MissingDependency, SnapshotRefused, TaskError
from clawgym.records import Episode, Task, TaskSet, VerifierSpec
from clawgym.records.atif import json_safe
from clawgym.registry import envs
from clawgym.rollout import RewardName
from clawgym.sandbox import Backend

__all__ = ["OpenEnvEpisodeRunner", "OpenEnvRunnerFactory", "make_app", "serve"]

_PATHS = ("/ws", "/health", "/schema", "/metadata")
"""What is served. The stateless routes of OpenEnv would make a sandbox for each request."""
_LARGEST_MB = 64
"""Largest message of a server, in MiB."""

Application = Callable[[dict[str, Any], Callable[..., Any], Callable[..., Any]], Any]
"""An ASGI application."""


def _openenv(module: str) -> Any:
    try:
        with _without_fastmcp():
            return importlib.import_module(f"openenv.core.{module}")
    except ImportError as error:
        raise MissingDependency(f"OpenEnv is needed ({error}): pip install openenv") from error


@contextlib.contextmanager
def _without_fastmcp() -> Iterator[None]:
    """Let OpenEnv be imported where fastmcp does not work, which needs mcp 1, while our tools need mcp 2.

    Its server imports three classes of them, for environments that are MCP servers. Ours are none.
    """
    try:
        importlib.import_module("fastmcp.client.client")
        importlib.import_module("mcp.types")
    except ImportError:
        empty = {"fastmcp": "Client", "fastmcp.client": "", "fastmcp.client.client": "CallToolResult"}
        before = {name: sys.modules.get(name) for name in (*empty, "mcp.types")}
        for name, used in {**empty, "mcp.types": "TextContent"}.items():
            sys.modules[name] = types.ModuleType(name)
            if used:
                setattr(sys.modules[name], used, object)
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module
    else:
        yield


# -- our environments, served


def make_app(make: Callable[[], gym.Env[Any, Any]], *, sessions: int, secret: str) -> Application:
    """Return an ASGI application that serves environments by OpenEnv's protocol.

    Args:
        make: makes the environment of one session, such as ``lambda: gym.make("ClawGym/terminal-v0")``.
        sessions: most sessions at a time; another one is refused.
        secret: what clients send, as ``Authorization: Bearer SECRET`` or in the URL, ``http://HOST/s/SECRET``.

    ``reset`` takes ``seed``, ``episode_id`` and ``task_id``. An action is an object with the keys of a Dict space, or
    else with the key ``action``. The reward is that of ``gym.make``, and None after an infrastructure error.
    ``metadata`` is the ``info`` of the step, with ``truncated``.
    """
    server = _openenv("env_server")
    making = threading.Lock()  # sessions open in threads of their own, and share one backend
    with making:
        first = make()  # its spaces; and it keeps the backend open
    action_cls, read = _action_model(server.Action, first.action_space)
    observation_cls = _observation_model(server.Observation, first.observation_space)

    class _Session(server.Environment):
        """One environment of one client."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            with making:
                self._env = make()
            self._state = server.State()

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, task_id: str | None = None, **other: Any
        ) -> Any:
            if other:
                raise ValueError(f"reset does not take {', '.join(other)}: give seed, episode_id or task_id")
            options = None if task_id is None else {"task_ids": [task_id]}
            observation, info = self._env.reset(seed=seed, options=options)
            self._state = server.State(episode_id=episode_id or str(uuid.uuid4()), task_id=info.get("task_id"))
            return observation_cls(**plain(observation), reward=None, done=False, metadata=plain(info))

        def step(self, action: Any, timeout_s: float | None = None, **other: Any) -> Any:
            observation, reward, terminated, truncated, info = self._env.step(read(action))
            self._state.step_count += 1
            return observation_cls(
                **plain(observation),
                reward=None if info.get("outcome") == "infra" else float(reward),
                done=terminated or truncated,
                metadata={**plain(info), "truncated": truncated},
            )

        @property
        def state(self) -> Any:
            return self._state

        def close(self) -> None:
            with making:
                self._env.close()

    app = server.create_fastapi_app(_Session, action_cls, observation_cls, sessions, env_name="ClawGym")
    return _guarded(app, secret)


def serve(
    make: Callable[[], gym.Env[Any, Any]],
    *,
    port: int = 0,
    sessions: int,
    secret: str,
    say: Callable[[str], None],
) -> None:
    """Serve environments on 127.0.0.1 until the process is interrupted. ``say`` gets the address once it listens.

    Raises :class:`~clawgym.errors.EnvError` if the port is taken.
    """
    app = make_app(make, sessions=sessions, secret=secret)
    import uvicorn  # pyright: ignore[reportMissingImports]

    with socket.socket() as listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise EnvError(f"port {port} cannot be used ({error.strerror}): choose another --port, or 0") from error
        listening.listen(sessions + 16)
        say(f"http://127.0.0.1:{listening.getsockname()[1]}")
        config = uvicorn.Config(app, log_level="warning", ws_ping_timeout=None)  # a busy trainer is no dead one
        uvicorn.Server(config).run(sockets=[listening])


def _guarded(app: Any, secret: str) -> Application:
    bearer, prefix = f"Bearer {secret}".encode(), f"/s/{secret}"

    async def guarded(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "lifespan":
            return await app(scope, receive, send)
        path = scope["path"]
        given = dict(scope["headers"]).get(b"authorization", b"")
        known = hmac.compare_digest(given, bearer)
        if path.startswith("/s/"):
            known = hmac.compare_digest(path[: len(prefix)].encode(), prefix.encode())
            path = path[len(prefix) :]
        if known and path in _PATHS:
            return await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 404 if known else 401, "headers": []})
        return await send({"type": "http.response.body", "body": b""})

    return guarded


def plain(value: Any) -> Any:
    """``value`` as JSON data: arrays become lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(below) for key, below in value.items()}
    return json_safe(value)


def _action_model(base: type, space: gym.Space[Any]) -> tuple[type, Callable[[Any], Any]]:
    """The class of actions, and the function that reads a member of ``space`` from one."""
    import pydantic

    if isinstance(space, gym.spaces.Dict):
        parts = dict(space.items())
        fields: Any = {name: (_type_of(part), ...) for name, part in parts.items()}
        model = pydantic.create_model("EnvAction", __base__=base, **fields)
        return model, lambda action: {name: _member(part, getattr(action, name)) for name, part in parts.items()}
    model = pydantic.create_model("EnvAction", __base__=base, action=(_type_of(space), ...))
    return model, lambda action: _member(space, action.action)


def _observation_model(base: type, space: gym.Space[Any]) -> type:
    import pydantic

    assert isinstance(space, gym.spaces.Dict)
    fields: Any = {name: (_type_of(part), ...) for name, part in space.items()}
    return pydantic.create_model("EnvObservation", __base__=base, **fields)


def _type_of(space: gym.Space[Any]) -> Any:
    if isinstance(space, gym.spaces.Text):
        return str
    return int if isinstance(space, gym.spaces.Discrete) or space.shape == () else list[Any]


def _member(space: gym.Space[Any], value: Any) -> Any:
    return value if isinstance(space, gym.spaces.Text | gym.spaces.Discrete) else np.asarray(value, dtype=space.dtype)


# -- environments of OpenEnv, as ours


class OpenEnvEpisodeRunner:
    """One session with a server (:class:`~clawgym.envs._runner.EpisodeRunner`)."""

    last: Episode | None = None
    """None: the reward is the server's, and no workspace is graded."""

    def __init__(self, client: Callable[[], Any], field: str, max_steps: int) -> None:
        self._make_client = client
        self._client: Any = None
        self._field = field
        self._max_steps = max_steps
        self._step = -1
        """Number of actions; -1 if no episode runs."""
        self._seen = "{}"

    async def reset(self, task: Task, seed: int, baseline: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """See :class:`~clawgym.envs._runner.EpisodeRunner`."""
        if task.id not in OpenEnvRunnerFactory.default_tasks.by_id:
            raise TaskError(f"task {task.id}: an OpenEnv server has tasks of its own: leave tasks= out")
        info: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "instruction": task.instruction}
        self._step, self._seen = 0, "{}"
        try:
            if self._client is None:
                self._client = self._make_client()
                await self._client.connect()
            result = await self._client.reset(seed=seed)
        except Exception as error:  # of the connection, or an answer that their client cannot read
            await self.close()
            self._step = 0
            return self._observe(), {**info, "error": _lost(error)}
        self._seen = _text(result.observation)
        return self._observe(), {**info, "metadata": result.metadata or {}}

    async def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """See :class:`~clawgym.envs._runner.EpisodeRunner`."""
        if self._step < 0:
            raise ClawGymError("the episode is over or was never started: call reset() first")
        self._step += 1
        done, reward, info = False, 0.0, {}
        try:
            if self._client is None:
                raise ConnectionError("not connected")
            result = await self._client.step(self._sent(str(action)))
        except RuntimeError as error:  # the server's own answer: it refuses this action
            self._seen = _text({"error": str(error)})
        except ValueError as error:
            self._seen = _text({"error": f"the action is not a JSON object ({error})"})
        except Exception as error:
            info, number = {"outcome": "infra", "cause": "endpoint", "error": _lost(error)}, self._step
            await self.close()
            self._step = number
            observation, self._step = self._observe(), -1
            return observation, 0.0, False, True, info
        else:
            done, reward = bool(result.done), float(result.reward or 0.0)
            self._seen, info = _text(result.observation), {"metadata": result.metadata or {}}
        truncated = not done and self._step >= self._max_steps
        observation = self._observe()
        if done or truncated:
            self._step = -1
        return observation, reward, done, truncated, info

    def _sent(self, action: str) -> dict[str, Any]:
        if self._field:
            return {self._field: action}
        sent = json.loads(action)
        if not isinstance(sent, dict):
            raise ValueError("it is another value")
        return sent

    def _observe(self) -> dict[str, Any]:
        return {
            "observation": self._seen,
            "step": np.array(self._step, dtype=np.int64),
            "remaining_steps": np.array(max(0, self._max_steps - self._step), dtype=np.int64),
        }

    async def snapshot(self, method: str | None) -> Any:
        """Refuse: the state is the server's."""
        raise SnapshotRefused("the state of an OpenEnv server cannot be saved: reset() with the same seed instead")

    async def restore(self, saved: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        raise SnapshotRefused("an episode of an OpenEnv server cannot be restored: reset() the environment")

    async def drop(self, saved: Any) -> None:
        """Do nothing: there are no snapshots."""

    def discard(self) -> None:
        """See :class:`~clawgym.envs._runner.EpisodeRunner`."""
        self._client = None

    async def close(self) -> None:
        """See :class:`~clawgym.envs._runner.EpisodeRunner`."""
        client, self._client, self._step = self._client, None, -1
        if client is not None:
            await client.close()


@envs.register("ClawGym/openenv-v0")
class OpenEnvRunnerFactory:
    """An environment of an OpenEnv server, which runs already.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        token: sent as ``Authorization: Bearer TOKEN``; empty: nothing is sent.
        field: the field of the server's actions that is the whole action; empty: actions are JSON objects.
        max_steps: actions of an episode, which is then truncated.
        seconds: time limit of one answer of the server.

    Actions (str): JSON text of an object with the fields of the server's actions, or any text if ``field`` is given. An
    action that the server refuses is no error: the observation says so.

    Observation: ``observation``, str, JSON text of the server's observation; ``step`` and ``remaining_steps``. The
    reward of each step is the server's, 0 where it has none. ``info["metadata"]`` is the server's.

    End: ``terminated`` when the server says ``done``; ``truncated`` after ``max_steps``, or with the outcome ``infra``
    if the connection is lost. ``env.episode`` stays None: nothing is graded here.

    Needs the package ``openenv``.
    """

    default_tasks = TaskSet("openenv", (Task("openenv", "Act in the environment.", VerifierSpec("reward_sh")),))
    render_mode = "ansi"

    def __init__(
        self, url: str, *, token: str = "", field: str = "", max_steps: int = 100, seconds: float = 60.0
    ) -> None:
        self.action_space: gym.Space[Any] = AnyText(1 << 20)
        parts: dict[str, gym.Space[Any]] = {"observation": AnyText(_LARGEST_MB << 20)}
        self.observation_space = gym.spaces.Dict({**parts, "step": counter(), "remaining_steps": counter()})
        self._field, self._max_steps = field, max_steps
        self._client: dict[str, Any] = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {token}"} if token else None,
            "message_timeout_s": seconds,
            "max_message_size_mb": _LARGEST_MB,
        }
        self._client_cls = _openenv("generic_client").GenericEnvClient

    async def open(self, backend: Backend, num_envs: int) -> None:
        """Do nothing: sessions open with their first episode."""

    def runner(self, reward: RewardName) -> OpenEnvEpisodeRunner:
        return OpenEnvEpisodeRunner(lambda: self._client_cls(**self._client), self._field, self._max_steps)

    def frame(self, observation: dict[str, Any]) -> str:
        return observation["observation"]

    async def aclose(self) -> None:
        """Do nothing: the runners close their sessions."""


def _text(observation: Any) -> str:
    return json.dumps(json_safe(observation), ensure_ascii=False)


def _lost(error: Exception) -> str:
    return f"the OpenEnv server does not answer ({type(error).__name__}: {error}): check its url, token and log"
