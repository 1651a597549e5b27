"""ClawGym as a server of MCP: any assistant lists task sets, runs an evaluation, and reads and compares runs.

    clawgym mcp RUNS                        # on standard input and output, as assistants start their servers

Needs ``clawgym[tools]``, the official SDK.

Invariants: only folders directly below the root are read and written. Unless the server is started with ``trusted``, no
caller names a path, a module, an endpoint or an option of an agent: these could run code or send keys away. One
evaluation runs at a time, of a bounded number of episodes. Every answer is bounded, and what agents wrote is escaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from clawgym.errors import AgentError, ClawGymError, MissingDependency, RunFolderError, TaskSetNotFound
from clawgym.evaluation.progress import ResultStore
from clawgym.records.atif import json_safe
from clawgym.records.run_folder import RunFolder
from clawgym.registry import agents
from clawgym.reporting.transcripts import stored_steps
from clawgym.visible import visible_lines

if TYPE_CHECKING:
    from mcp.server.mcpserver import Context, MCPServer

    from clawgym.evaluation.runner import EvalConfig

__all__ = ["make_mcp_server"]

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TEXT, _ITEMS = 4000, 60
"""Most characters of one text, and most items of one list, in an answer."""
_ANSWER = 40_000
"""Most characters of an answer, as JSON."""
_RUNS = 200
"""Most runs that are listed."""

RunName = Annotated[str, Field(description="Name of a run: a folder below the root of this server.")]


@dataclass
class _Job:
    """An evaluation in the background. It is the view of its own progress."""

    run: str
    total: int
    state: str = "measuring baselines"
    done: int = 0
    solved: int = 0
    infrastructure_errors: int = 0
    error: str | None = None
    work: asyncio.Task[None] | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, store: ResultStore, to_run: int) -> None:
        self.state = "running"
        for key, row in store.latest.items():
            if key in store.done:
                self._count(row)
        self.total = self.done + to_run
        self.changed.set()

    def running(self, now: int, limit: int) -> None: ...

    def finished(self, row: Mapping[str, Any]) -> None:
        self._count(row)
        self.changed.set()

    def stop(self, aborted: str | None) -> None:
        self.error = aborted

    def _count(self, row: Mapping[str, Any]) -> None:
        if row["outcome"] == "infra":
            self.infrastructure_errors += 1
        else:
            self.done += 1
            self.solved += row["outcome"] == "solved"

    @property
    def over(self) -> bool:
        return self.work is not None and self.work.done()

    def told(self) -> dict[str, Any]:
        return _bounded(
            {
                "run": self.run,
                "state": self.state,
                "done": self.done,
                "total": self.total,
                "solved": self.solved,
                "infrastructure_errors": self.infrastructure_errors,
                "error": self.error,
            }
        )


def make_mcp_server(
    root: Path,
    *,
    base_url: str | None = None,
    api_key_env: str | None = None,
    sandbox: str = "auto",
    most_episodes: int = 100,
    trusted: bool = False,
) -> MCPServer[Any]:
    """Return the server; ``run()`` serves it.

    Args:
        root: the folder of runs. It is created if it does not exist.
        base_url: the endpoint of models.
        api_key_env: the environment variable with its key.
        sandbox: the backend.
        most_episodes: most episodes of one evaluation.
        trusted: also take options of agents, and names that are paths or modules.
    """
    try:
        from mcp.server.mcpserver import Context, MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError as error:
        raise MissingDependency(f"MCP is needed ({error}): pip install 'clawgym[tools]'") from error
    from clawgym import __version__

    root.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, _Job] = {}
    endpoint = {"base_url": base_url, "api_key_env": api_key_env}

    @contextlib.asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for job in jobs.values():
                job.stopping.set()
            await asyncio.gather(*(job.work for job in jobs.values() if job.work is not None), return_exceptions=True)

    server: MCPServer[Any] = MCPServer("clawgym", version=__version__, lifespan=lifespan, instructions=_INSTRUCTIONS)

    def tool(function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a tool. Our errors become its answer."""

        @functools.wraps(function)
        async def answering(*args: Any, **named: Any) -> Any:
            try:
                return await function(*args, **named)
            except (ClawGymError, OSError) as error:
                raise ToolError(visible_lines(str(error))[:_TEXT]) from error

        # The SDK reads the parameters from it; Context is imported here alone.
        read = inspect.signature(function, eval_str=True, globals=globals() | {"Context": Context})
        answering.__signature__ = read  # pyright: ignore[reportAttributeAccessIssue]
        answering.__annotations__ = {name: one.annotation for name, one in read.parameters.items()}
        answering.__annotations__["return"] = read.return_annotation
        server.add_tool(answering)
        return answering

    def folder(run: str) -> Path:
        if not _RUN.fullmatch(run) or (root / run).is_symlink():
            raise RunFolderError(f"{run[:100]!r} is no name of a run: use letters, digits, '.', '_' and '-'")
        return root / run

    @tool
    async def list_task_sets() -> dict[str, Any]:
        """List the task sets, and whether each is on this machine. A pack is used as NAME:train or NAME:heldout."""
        from clawgym.tasks import sets

        def described() -> list[dict[str, str]]:
            return [{"name": name, "about": sets.about(name), "where": sets.available(name)} for name in sets.names()]

        return _bounded({"task_sets": await asyncio.to_thread(described)})

    @tool
    async def list_agents() -> dict[str, Any]:
        """List the agents that can work on tasks."""
        entries = await asyncio.to_thread(agents.entries)
        return _bounded({"agents": [{"name": entry.name, "about": entry.summary} for entry in entries]})

    @tool
    async def start_evaluation(
        task_set: Annotated[str, Field(description="One of list_task_sets, such as terminal-basic:heldout.")],
        agent: Annotated[str, Field(description="One of list_agents.")],
        run: Annotated[str, Field(description="Name of the run. The same name and arguments resume a run.")],
        model: Annotated[str | None, Field(description="Model of the agent, by the name its endpoint uses.")] = None,
        tasks: Annotated[list[str] | None, Field(description="Only the tasks of these ids.", max_length=1000)] = None,
        limit: Annotated[int, Field(description="Only the first tasks.", ge=1)] = 5,
        samples: Annotated[int, Field(description="Episodes of each task.", ge=1)] = 1,
        seed: int = 0,
        agent_options: Annotated[
            dict[str, str] | None, Field(description="Options of the agent. Refused unless the server allows them.")
        ] = None,
    ) -> dict[str, Any]:
        """Let an agent attempt tasks, in the background. Follow it with wait_for_evaluation."""
        where = folder(run)
        if busy := next((job for job in jobs.values() if not job.over), None):
            raise RunFolderError(f"the run {busy.run} is in progress: wait for it, or stop it")
        if not trusted:
            _check_names(task_set, agent, model, agent_options)
        job = jobs[run] = _Job(run, 0, state="loading")
        settings = {**endpoint, **(agent_options or {}), "model": model}
        arguments = (task_set, agent, settings, where, tasks, limit, samples, seed, sandbox)
        try:
            config = await asyncio.to_thread(_config, *arguments)
        except BaseException:
            del jobs[run]
            raise
        job.total = len(config.task_set.tasks) * samples
        if job.total > most_episodes:
            del jobs[run]
            await _close(config)
            raise RunFolderError(f"{job.total} episodes are too many (at most {most_episodes}): give a smaller limit")
        job.work = asyncio.create_task(_evaluate(job, config))
        return job.told()

    @tool
    async def wait_for_evaluation(
        context: Context,
        run: RunName,
        seconds: Annotated[float, Field(description="Return after this time at the latest.", ge=0, le=600)] = 30,
    ) -> dict[str, Any]:
        """Wait until an evaluation of this server is over, and tell how far it is. Reports progress."""
        job = _job(jobs, run)
        assert job.work is not None
        deadline = asyncio.get_running_loop().time() + seconds
        while not job.over and (left := deadline - asyncio.get_running_loop().time()) > 0:
            job.changed.clear()
            await context.report_progress(job.done, job.total, f"{job.solved} solved")
            changed = asyncio.create_task(job.changed.wait())
            await asyncio.wait([job.work, changed], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        return job.told()

    @tool
    async def stop_evaluation(run: RunName) -> dict[str, Any]:
        """Stop an evaluation. Finished episodes are kept, and start_evaluation resumes it."""
        job = _job(jobs, run)
        assert job.work is not None
        job.stopping.set()
        await asyncio.wait([job.work])
        return job.told()

    @tool
    async def list_runs() -> dict[str, Any]:
        """List the runs, newest first."""

        def found() -> list[str]:
            paths = [path for path in root.iterdir() if _RUN.fullmatch(path.name) and not path.is_symlink()]
            paths = [path for path in paths if (path / "receipt.json").is_file()]
            return [path.name for path in sorted(paths, key=lambda path: -path.stat().st_mtime)[:_RUNS]]

        return {"runs": await asyncio.to_thread(found)}

    @tool
    async def get_run(run: RunName) -> dict[str, Any]:
        """Show the scores of a run, and the outcome of each episode."""
        return await asyncio.to_thread(_run_of, folder(run))

    @tool
    async def get_episode(
        run: RunName,
        task_id: str,
        sample: Annotated[int, Field(ge=0)] = 0,
        from_step: Annotated[int, Field(description="Index of the first step that is shown.", ge=0)] = 0,
    ) -> dict[str, Any]:
        """Show an episode: its result, and its steps from one on. next_step is where to continue, if there are more."""
        return await asyncio.to_thread(_episode_of, folder(run), task_id, sample, from_step)

    @tool
    async def compare_runs(first: RunName, second: RunName) -> dict[str, Any]:
        """Compare two runs over the same tasks, paired by task: differences, intervals and whether they differ."""
        from clawgym.evaluation.compare import compare

        comparison = await asyncio.to_thread(compare, folder(first), folder(second))
        return _bounded(comparison.to_dict())

    return server


_INSTRUCTIONS = (
    "Evaluates agents on tasks in sandboxes. Choose a task set and an agent, call start_evaluation, then call "
    "wait_for_evaluation until the state is finished. Read it with get_run and get_episode; compare_runs compares two."
)


def _job(jobs: Mapping[str, _Job], run: str) -> _Job:
    job = jobs.get(run)
    if job is None or job.work is None:
        raise RunFolderError(f"this server runs no evaluation {run[:100]!r}: call start_evaluation, or get_run")
    return job


def _check_names(task_set: str, agent: str, model: str | None, options: object) -> None:
    """Raise a :class:`ClawGymError` for what could run code, or read files elsewhere."""
    from clawgym.tasks import sets

    remedy = "start the server with --trusted to allow it"
    if re.split("[@:]", task_set)[0] not in sets.names() or "/" in task_set:
        raise TaskSetNotFound(f"{task_set[:100]!r} is not one of list_task_sets: choose one, or {remedy}")
    if ":" in agent or agent not in agents:
        raise AgentError(f"{agent[:100]!r} is not one of list_agents: choose one, or {remedy}")
    if options:
        raise AgentError(f"options of agents may run code: leave agent_options out, or {remedy}")
    if model is not None and Path(model).expanduser().exists():
        raise AgentError(f"the model {model[:100]!r} is a path: name a model of the endpoint, or {remedy}")


def _config(
    task_set: str,
    agent: str,
    settings: dict[str, Any],
    out: Path,
    ids: list[str] | None,
    limit: int,
    samples: int,
    seed: int,
    sandbox: str,
) -> EvalConfig:
    from clawgym.agents import make_agent
    from clawgym.evaluation.runner import EvalConfig
    from clawgym.sandbox import backend
    from clawgym.tasks import sets

    tasks = sets.load(task_set, limit=limit, ids=ids)
    made = make_agent(agent, **settings)
    return EvalConfig(task_set=tasks, agent=made, backend=backend(sandbox), out=out, samples=samples, seed=seed)


async def _evaluate(job: _Job, config: EvalConfig) -> None:
    """Run the evaluation of a job; its state says how it ended."""
    import dataclasses

    from clawgym.engines import Checkable
    from clawgym.evaluation.baselines import measure_baselines
    from clawgym.evaluation.runner import evaluate

    try:
        job.state = "measuring baselines"
        if isinstance(config.agent, Checkable):
            await config.agent.check()
        await config.backend.probe()
        baselines = await measure_baselines(config.task_set, config.backend, lambda done, total: None)
        config = dataclasses.replace(config, baselines=baselines)
        summary = await evaluate(config, progress=job, stop=job.stopping)
        job.state = "finished" if summary.complete else "stopped"
    except Exception as error:
        job.state, job.error = "failed", f"{type(error).__name__}: {error}"
    finally:
        await _close(config)
        job.changed.set()


async def _close(config: EvalConfig) -> None:
    await config.agent.aclose()
    await config.backend.aclose()


def _run_of(path: Path) -> dict[str, Any]:
    from clawgym.evaluation.summary import summarize

    run = RunFolder.read(path)
    summary = summarize(run).to_dict()
    summary.pop("missing", None)
    episodes = [
        {name: row.get(name) for name in ("task_id", "sample", "outcome", "cause")} for row in run.latest.values()
    ]
    about = {"run": path.name, "task_set": run.manifest.task_set, "agent": run.manifest.agent}
    return _bounded({**about, "summary": summary, "number_of_episodes": len(episodes), "episodes": episodes})


def _episode_of(path: Path, task_id: str, sample: int, first: int) -> dict[str, Any]:
    run = RunFolder.read(path)
    row = run.latest.get(f"{task_id}#{sample}")
    if row is None:
        raise RunFolderError(f"{path.name} has no episode {sample} of {task_id[:100]!r}: get_run lists them")
    shown = {name: row.get(name) for name in ("task_id", "sample", "outcome", "cause", "result", "usage", "seconds")}
    steps = stored_steps(path, task_id, sample)
    answer = {**_bounded(shown, _ANSWER // 2), "number_of_steps": len(steps), "from_step": first, "next_step": None}
    page: list[Any] = []
    room = _ANSWER // 2
    for index, step in enumerate(steps[first:], first):
        kept = ("step_id", "source", "message", "tool_calls", "observation")
        one = _bounded({name: step[name] for name in kept if name in step}, _ANSWER // 2)
        room -= len(json.dumps(one))
        if page and room < 0:
            answer["next_step"] = index
            break
        page.append(one)
    return {**answer, "steps": page}


def _bounded(value: Mapping[str, Any], most: int = _ANSWER) -> dict[str, Any]:
    """``value`` as JSON of at most ``most`` characters, with control characters escaped."""
    safe, text, items = json_safe(value), _TEXT, _ITEMS * 16
    while True:
        cut = _cut(safe, text, items)
        if len(json.dumps(cut)) <= most or items < 2:
            break
        text, items = text // 2, items // 2
    return cut if len(json.dumps(cut)) <= most else {"error": f"the answer is larger than {most} characters"}


def _cut(value: Any, text: int, items: int) -> Any:
    if isinstance(value, str):
        shown = visible_lines(value[:text])
        return shown if len(value) <= text else f"{shown} [{len(value) - text} more characters]"
    if isinstance(value, Mapping):
        kept = {str(_cut(key, 200, 0)): _cut(one, text, items) for key, one in list(value.items())[:items]}
        return kept if len(value) <= items else {**kept, "...": f"{len(value) - items} more"}
    if isinstance(value, (list, tuple)):
        kept = [_cut(one, text, items) for one in value[:items]]
        return kept if len(value) <= items else [*kept, f"[{len(value) - items} more]"]
    return value
