"""verifiers: our task sets as its environments, our sandboxes as its runtime, its environments in ``clawgym eval``.

    # my_tasks.py: then `eval my-tasks --env.taskset.tasks terminal-basic:train`
    from clawgym.interop.verifiers import ClawGymEnv, ClawGymHarness, ClawGymTaskset
    __all__ = ["ClawGymEnv", "ClawGymHarness", "ClawGymTaskset"]

    async with sandbox_runtime() as runtime:            # in an environment of its own: any harness, in our sandbox
        await agents.agent.run(task, runtime=runtime)

    clawgym eval verifiers:gsm8k-v1 --agent tool-loop --model MODEL

Needs the package ``verifiers``.

Invariants: model calls of our agent go through the endpoint that verifiers gives, so that its trace has them with their
token ids. Our tasks are graded by the same code as in ``clawgym eval``. A runtime has no network but for the routes of
verifiers, which lead to this machine's loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines.openai import OpenAIEngine
from clawgym.engines.protocol import Sampling
from clawgym.errors import ClawGymError, MissingDependency, SandboxDied, TaskError
from clawgym.interop._backend import loop_backend
from clawgym.records import Limits, Outcome, Submission, Task, TaskFile, TaskSet, VerifierSpec
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import Archive, Sandbox, SandboxSpec
from clawgym.tasks.sets import load

try:
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.configs.runtime import NetworkPolicyConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.runtimes import SubprocessRuntimeInfo  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.decorators import discover_decorated  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency(f"verifiers is needed ({error}): pip install verifiers") from error

__all__ = [
    "ClawGymEnv",
    "ClawGymHarness",
    "ClawGymRuntime",
    "ClawGymTaskset",
    "VerifiersGrader",
    "VerifiersTasks",
    "pack",
    "sandbox_runtime",
]

_FOREVER = 10.0**6
"""Seconds of a command: verifiers cancels it at its own deadlines."""
_WORKSPACE = "/workspace"
_MOST = 256 * 2**20
"""Bytes of one file that is read, and of the output of a command."""
_CHUNK = 65536


# -- our task sets, as its environments


class ClawGymTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """``--env.taskset.tasks NAME``, ``--env.taskset.most N``."""

    tasks: str = "terminal-basic:train"
    """A task set (``clawgym tasks list``)."""
    most: int | None = None
    """Only the first tasks."""


class ClawGymTaskData(vf.TaskData):  # type: ignore[misc]
    """A task of ours, by name."""

    taskset: str
    task_hash: str


class ClawGymTask(vf.Task[ClawGymTaskData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """A task whose reward is the official score of its verifier."""

    @vf.reward
    async def official(self, trace: Any) -> float:
        return trace.info["clawgym"]["official"]

    @vf.metric
    async def strict(self, trace: Any) -> float:
        return trace.info["clawgym"]["strict"]


class ClawGymTaskset(vf.Taskset[ClawGymTask, ClawGymTasksetConfig]):  # type: ignore[misc]
    """A task set of this library."""

    def load(self) -> Iterable[ClawGymTask]:
        for task in load(self.config.tasks, limit=self.config.most).tasks:
            if not task.unsupported:
                data = ClawGymTaskData(
                    id=task.id,
                    name=task.id,
                    prompt=task.instruction,
                    taskset=self.config.tasks,
                    task_hash=task.content_hash,
                )
                yield ClawGymTask(data, self.config.task)


class ClawGymHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """``--env.agent.harness.protocol text``."""

    protocol: Literal["tools", "text"] = "tools"
    """How the model calls the shell (:class:`~clawgym.agents.tool_loop.ToolLoopAgent`)."""
    system: str | None = None
    """Replaces the system prompt of our agent."""


class ClawGymHarness(vf.Harness[ClawGymHarnessConfig]):  # type: ignore[misc]
    """Our agent ``tool-loop``, in this process, with the task's sandbox. The runtime of verifiers is not used."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Play one episode, and grade it. Raises ``verifiers.v1.SandboxError`` for an infrastructure error."""
        task = load(data.taskset, ids=[data.id]).tasks[0]
        if task.content_hash != data.task_hash:
            raise TaskError(f"task {task.id} of {data.taskset} has changed since it was listed: list the tasks again")
        engine = OpenAIEngine(ctx.model, base_url=endpoint, api_key=secret, max_retries=0)
        # The settings of sampling are those of verifiers, which sets them on every request.
        agent = ToolLoopAgent(
            engine, sampling=Sampling(), protocol=self.config.protocol, system_prompt=self.config.system
        )
        try:
            seed = int(trace.id[:7], 16)
            request = EpisodeRequest(task=task, seed=seed, reward="official", keep_workspace=False)
            ended = await run_episode(request, agent, await loop_backend())
        finally:
            await engine.aclose()
        episode = ended.episode
        if episode.outcome is Outcome.INFRA or episode.result is None:
            raise vf.SandboxError(f"infrastructure error ({episode.error or episode.cause}): run it again")
        trace.info["clawgym"] = {
            "official": episode.result.official,
            "strict": episode.result.strict,
            "checks": dict(episode.result.checks),
            "outcome": str(episode.outcome),
            "cause": episode.cause,
            "outputs": [seen.content for step in episode.steps for seen in step.observations],
        }
        return vf.ProgramResult(0, episode.final_message, "")


class ClawGymEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """One agent, whose sandboxes are ours."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class ClawGymEnv(vf.Env[ClawGymEnvConfig]):  # type: ignore[misc]
    """Our tasks, played by :class:`ClawGymHarness`."""

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)


# -- our sandboxes, as its runtime


class ClawGymRuntimeConfig(NetworkPolicyConfig):  # type: ignore[misc]
    """What a sandbox is made from."""

    type: Literal["clawgym"] = "clawgym"
    allow: list[str] = Field(default_factory=list)
    image: str = "default"
    workdir: str = _WORKSPACE
    cpus: float = 1.0
    memory_mb: int = 1024
    disk_mb: int = 512


class ClawGymRuntime(vf.Runtime):  # type: ignore[misc]
    """A sandbox of this library. Its programs reach the routes of verifiers at the same ports of their loopback."""

    def __init__(self, config: ClawGymRuntimeConfig, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config
        # A trace can be read back only with a type that verifiers knows.
        self.info = SubprocessRuntimeInfo()
        self.sandbox: Sandbox | None = None
        self._servers: dict[int, asyncio.Server] = {}

    async def start(self) -> None:
        config = self.config
        limits = Limits(pids=1024, cpus=config.cpus, memory_mb=config.memory_mb, disk_mb=config.disk_mb)
        spec = SandboxSpec(image=config.image, workdir=config.workdir, limits=limits)
        await self.attach(await (await loop_backend()).create(spec))

    async def attach(self, sandbox: Sandbox) -> None:
        """Use a sandbox that is there already; it is closed with this runtime."""
        self.sandbox = sandbox
        self.info.id = f"clawgym:{sandbox.id}"

    def _running(self) -> Sandbox:
        if self.sandbox is None:
            raise vf.SandboxError("the runtime was not started: await start() first")
        return self.sandbox

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        try:
            done = await self._running().exec(
                argv, env=self.process_env(env), timeout=_FOREVER, max_output=_MOST, stdout_only=True
            )
        except SandboxDied as error:
            raise vf.SandboxError(f"the sandbox ended ({error}): see its limits") from error
        stdout, stderr = (text.decode(errors="replace") for text in (done.output, done.stderr))
        return vf.ProgramResult(done.exit_code, stdout, stderr)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None:  # reads at most so much in the sandbox
            return await super()._read(path, max_bytes)
        try:
            return await self._running().get(self._path(path), max_bytes=_MOST)
        except ClawGymError as error:
            raise vf.SandboxError(f"{path} cannot be read ({error}): check the path") from error

    async def write(self, path: str, data: bytes) -> None:
        target = PurePosixPath(self._path(path))
        await self._running().put([TaskFile(target.name, data)], str(target.parent))

    def _path(self, path: str) -> str:
        return str(PurePosixPath(self.config.workdir, path))

    async def prepare_execution(self, routes: list[str] | None) -> None:
        """Let the sandbox's loopback lead to the ports of ``routes`` on this machine's, and nowhere else."""
        for route in routes or ():
            url = urlsplit(route)
            port = url.port or (443 if url.scheme == "https" else 80)
            if url.hostname not in ("127.0.0.1", "localhost"):
                raise vf.SandboxError(f"{url.hostname} is not this machine: the sandbox has no network")
            if port not in self._servers:
                listening = await self._running().listen(port)
                self._servers[port] = await asyncio.start_server(_to_loopback(port), sock=listening)

    async def teardown(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        if self.sandbox is not None:
            await self.sandbox.close()

    def cleanup(self) -> None:
        """Do nothing: a sandbox ends with this process."""


def _to_loopback(port: int) -> Any:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ours, theirs = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copied(reader, theirs), _copied(ours, writer))

    return connected


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            return
    writer.close()


@contextlib.asynccontextmanager
async def sandbox_runtime(**settings: Any) -> AsyncIterator[ClawGymRuntime]:
    """A running :class:`ClawGymRuntime`, with the settings of :class:`ClawGymRuntimeConfig`."""
    runtime = ClawGymRuntime(ClawGymRuntimeConfig(**settings))
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()


# -- its environments, as a task set


def pack(target: str) -> VerifiersTasks:
    """The tasks of ``verifiers:ID``."""
    return VerifiersTasks(target)


def _taskset(target: str) -> Any:
    try:
        return load_taskset(taskset_config_type(target)(id=target))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise TaskError(
            f"verifiers:{target} was not found ({error}): name an installed taskset package, and let Python find it "
            "(PYTHONPATH=folder)"
        ) from error


class VerifiersTasks:
    """A pack whose tasks are those of a taskset of verifiers (``verifiers:ID``).

    The agent is ours, in place of the harness. The task's rewards and judges score a trace with the prompt and the
    agent's last message, and a runtime that has the frozen workspace.
    """

    version = ""

    def __init__(self, target: str) -> None:
        self.target = target
        self._taskset = _taskset(target)
        if not self._taskset.bounded:
            raise TaskError(f"verifiers:{target} has endlessly many tasks: make a taskset of those that you want")

    def load(self, split: str = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
        try:
            tasks = tuple(map(self._one, self._taskset))
        except OSError as error:
            raise TaskError(
                f"verifiers:{self.target}: its data cannot be read ({error}): fetch its data set first"
            ) from error
        return TaskSet(f"verifiers:{self.target}", tasks, self.version)

    def _one(self, task: Any) -> Task:
        data = task.data
        given = (data.system_prompt, data.prompt_text)
        return Task(
            id=str(data.id or data.name or data.idx),
            instruction="\n\n".join(text for text in given if text),
            verifier=VerifierSpec(
                "grader",
                grader="clawgym.interop.verifiers:VerifiersGrader",
                grader_options={"taskset": self.target, "index": data.idx, "task_hash": task.hash},
                mutable_inputs=("*",),
            ),
            workspace=_WORKSPACE,
            unsupported=_needs(task, self._taskset),
            metadata={"category": self.target},
            origin=self.target,
        )


def _needs(task: Any, taskset: Any) -> str | None:
    """What a task needs that ours do not have."""
    data = task.data
    if data.image is not None:
        return f"it needs the image {data.image!r}"
    if data.prompt is None or (not isinstance(data.prompt, str) and any(m.role != "user" for m in data.prompt)):
        return "its prompt is a conversation"
    if task.toolsets(task.config) or taskset.toolsets(taskset.config):
        return "it has tool servers"
    if type(task).setup is not vf.Task.setup:
        return "it has a setup hook"
    if discover_decorated(task, "intercept"):
        return "it intercepts messages of the conversation"
    if not task.hooks("reward") and not task.config.judges:
        return "it has no reward or judge of its own"
    return None


class VerifiersGrader:
    """Scores an answer with the rewards of a task of verifiers: a check for each, without its weight.

    Args:
        taskset: its id.
        index: the position of the task in it.
        task_hash: the hash of its data when it was listed.
    """

    name, version, model = "verifiers", "1", ""

    def __init__(self, taskset: str, index: int, task_hash: str) -> None:
        self._target, self._index, self._hash = taskset, index, task_hash

    async def grade(self, submission: Submission) -> Mapping[str, float]:
        """Return the score of each reward. Raises ValueError if the task has changed, or has no rewards."""
        task = next(iter(_taskset(self._target).skip(self._index).take(1)))
        if task.hash != self._hash:
            raise ValueError(
                f"task {self._index} of {self._target} has changed since it was listed: list the tasks again"
            )
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
            nodes=[
                vf.MessageNode(message=vf.UserMessage(content=submission.instruction)),
                vf.MessageNode(parent=0, message=vf.AssistantMessage(content=submission.final_message), sampled=True),
            ],
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )
        async with sandbox_runtime() as runtime:
            await runtime._running().put_archive(Archive(submission.tar), _WORKSPACE)
            await task.finalize(trace, runtime)
            await task.score(trace, runtime)
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        if not scores:
            raise ValueError(f"{self._target} gave no reward: give its tasks a method with @vf.reward")
        return scores
