"""Inspect AI: our sandboxes and task sets in its evaluations, its tasks in ours, and our runs as its logs.

    inspect eval my_evals.py --sandbox clawgym                               # its tasks, in our sandboxes
    inspect eval clawgym/taskset -T name=terminal-basic:heldout              # our tasks, by its agents
    clawgym eval inspect:my_evals.my_task --agent tool-loop --model MODEL    # its tasks, by our agents
    write_log("runs/mine", "mine.eval")                                      # our run, for its viewer

Needs the package ``inspect-ai``.

Invariants: a sample's sandbox ends with the sample. Our tasks are graded by the same code as in ``clawgym eval``, after
the sandbox was stopped. Files of a sandbox are read on this machine without following links.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel

from clawgym.errors import MissingDependency, SandboxDied, SandboxError, TaskError
from clawgym.files import read_below
from clawgym.interop._backend import loop_backend
from clawgym.records import Limits, Step, Submission, Task, TaskFile, TaskSet, VerifierSpec
from clawgym.records.atif import steps_from_atif
from clawgym.records.run_folder import TRANSCRIPT, RunFolder, safe_name
from clawgym.reporting.transcripts import LARGEST_TRANSCRIPT
from clawgym.rollout import Attempt, EpisodeRequest
from clawgym.sandbox import Archive, Sandbox, SandboxSpec, Shell
from clawgym.tasks.sets import load

try:
    import inspect_ai as ai  # pyright: ignore[reportMissingImports]
    from inspect_ai import agent, dataset, log, model, scorer, solver, tool, util  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency(f"Inspect AI is needed ({error}): pip install inspect-ai") from error

__all__ = ["ClawGymSandbox", "ClawGymSandboxConfig", "InspectGrader", "InspectTasks", "eval_log", "pack", "write_log"]

_FOREVER = 10.0**6
"""Seconds of a command without a time limit: Inspect cancels it with its sample."""
_WORKSPACE = "/workspace"
_UNREADABLE, _UNWRITABLE, _FOLDER, _MISSING = 41, 42, 43, 44
_LOOK = f"""\
p=$1
if [ -d "$p" ]; then exit {_FOLDER}; fi
if [ "$2" = write ]; then
  if [ -e "$p" ] && ! [ -w "$p" ]; then exit {_UNWRITABLE}; fi
  realpath -z -m -- "$p"; exit 0
fi
if ! [ -e "$p" ]; then exit {_MISSING}; fi
if ! [ -r "$p" ]; then exit {_UNREADABLE}; fi
realpath -z -e -- "$p"
"""
"""Finds the file that a path leads to, with the eyes of the sandbox's user."""
_CUT = 10 * 2**20
"""Characters of one message in a log."""


# -- our sandboxes, in its evaluations


class ClawGymSandboxConfig(BaseModel, frozen=True):
    """``sandbox=SandboxEnvironmentSpec("clawgym", ClawGymSandboxConfig(...))``. A plain text names the image."""

    image: str = "default"
    """As in :class:`~clawgym.sandbox.SandboxSpec`."""
    workdir: str = _WORKSPACE
    cpus: float = 1.0
    memory_mb: int = 1024
    disk_mb: int = 512
    """Limits, as in :class:`~clawgym.records.Limits`."""
    taskset: str = ""
    """With ``task_id``: the sandbox is that of this task, with its files."""
    task_id: str = ""


_PYTHON = 'exec "$(command -v python || echo python3)" "$@"'
"""Scorers of others call ``python``, which this machine's ``/usr`` may only have as ``python3``."""


@util.sandboxenv(name="clawgym")
class ClawGymSandbox(util.SandboxEnvironment):  # type: ignore[misc]
    """A sandbox of this library. Its only user is root."""

    def __init__(self, sandbox: Sandbox, attempt: Attempt | None = None) -> None:
        super().__init__()
        self._sandbox = sandbox
        self.attempt = attempt
        """The attempt at a task of ours; None in a sandbox for another task."""
        self._shell: Shell | None = None

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, Any]:
        if config is None or isinstance(config, str):
            config = ClawGymSandboxConfig(image=config or "default")
        if not isinstance(config, ClawGymSandboxConfig):
            raise ValueError(
                f"the sandbox clawgym takes an image or a ClawGymSandboxConfig, not {type(config).__name__}"
            )
        backend = await loop_backend()
        if config.taskset:
            task = _task_of(config.taskset, config.task_id)
            attempt = Attempt(EpisodeRequest(task=task, seed=0, reward="official"), backend, "inspect")
            await attempt.open()
            return {"default": cls(attempt.sandbox, attempt)}
        limits = Limits(pids=1024, cpus=config.cpus, memory_mb=config.memory_mb, disk_mb=config.disk_mb)
        spec = SandboxSpec(image=config.image, workdir=config.workdir, limits=limits)
        return {"default": cls(await backend.create(spec))}

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any, environments: dict[str, Any], interrupted: bool) -> None:
        for environment in environments.values():
            made = environment.as_type(ClawGymSandbox)
            if made.attempt is not None and made.attempt.stop is None:
                await made.attempt.abandon()
            await made._sandbox.close()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return ClawGymSandboxConfig(**config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> Any:
        """Run a command; see Inspect AI. Output above its limit raises ``OutputLimitExceededError``."""
        if user not in (None, "root", "0"):
            raise util.SandboxUserUnsupportedError(f"sandboxes of ClawGym have one user, root, and no {user!r}")
        limit = util.SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            done = await self._sandbox.exec(
                ["sh", "-c", _PYTHON, *cmd] if cmd[:1] == ["python"] else cmd,
                cwd=self._path(cwd or ""),
                env=env,
                stdin=input.encode() if isinstance(input, str) else input or b"",
                timeout=timeout or _FOREVER,
                max_output=limit,
                stdout_only=True,
            )
        except SandboxDied as error:
            raise util.SandboxUnavailableError(str(error)) from error
        if done.timed_out:
            raise TimeoutError(f"the command took over {timeout} seconds")
        stdout, stderr = (text.decode(errors="replace") for text in (done.output, done.stderr))
        if done.omitted_bytes:
            raise util.OutputLimitExceededError(util.SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stdout)
        if done.exit_code == 126 and "ermission denied" in stdout + stderr:
            raise PermissionError(f"no permission to run {cmd[0]}")
        return util.ExecResult(done.exit_code == 0, done.exit_code, stdout, stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        path = PurePosixPath(await self._found(file, "write"))
        data = contents.encode() if isinstance(contents, str) else contents
        await self._sandbox.put([TaskFile(path.name, data)], str(path.parent))

    async def read_file(self, file: str, text: bool = True) -> Any:
        path, limit = await self._found(file, "read"), util.SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self._sandbox.get(path, max_bytes=limit)
        except SandboxError as error:
            size = await self.exec(["stat", "-c", "%s", path])
            if size.success and int(size.stdout) > limit:
                raise util.OutputLimitExceededError(
                    util.SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None
                ) from error
            raise FileNotFoundError(f"{file} cannot be read ({error})") from error
        return data.decode() if text else data

    async def shell(self, command: str) -> str:
        """Run a command in a persistent shell, as ``ClawGym/terminal-v0`` does, and return the output."""
        if self._shell is None:
            self._shell = await self._sandbox.shell()
        return (await self._shell.run(command)).text

    def _path(self, path: str) -> str:
        return str(PurePosixPath(self._sandbox.spec.workdir, path))

    async def _found(self, file: str, way: str) -> str:
        path = self._path(file)
        done = await self._sandbox.exec(["/bin/sh", "-c", _LOOK, "sh", path, way], timeout=60, stdout_only=True)
        if done.exit_code == _FOLDER:
            raise IsADirectoryError(f"{file} is a directory")
        if done.exit_code == _MISSING:
            raise FileNotFoundError(f"there is no file {file}")
        if done.exit_code in (_UNREADABLE, _UNWRITABLE):
            raise PermissionError(f"permission denied for {file}")
        found = done.output.decode(errors="surrogateescape").rstrip("\0")
        return found if done.exit_code == 0 and found.startswith("/") else path


# -- our task sets, as its tasks


def _task_of(taskset: str, task_id: str) -> Task:
    return load(taskset, ids=[task_id]).tasks[0]


@tool.tool
def clawgym_bash() -> Any:
    """The tool ``bash`` with a persistent shell."""

    async def bash(command: str) -> str:
        """Run a command in a persistent bash shell. Working directory, variables and background jobs stay.

        Args:
            command: Any bash text, one line or many.
        """
        return await util.sandbox().as_type(ClawGymSandbox).shell(command)

    return tool.ToolDef(bash, name="bash").as_tool()


@scorer.scorer(metrics=[scorer.mean(), scorer.stderr()])
def clawgym_verifier() -> Any:
    """The official score of the task: its sandbox is stopped, and a clean one grades the workspace."""

    async def score(state: Any, target: Any) -> Any:
        attempt = util.sandbox().as_type(ClawGymSandbox).attempt
        if attempt is None:
            raise ValueError("the scorer clawgym_verifier is for tasks of clawgym/taskset: use another scorer")
        attempt.final_message = state.output.completion
        ended = await attempt.finish()
        if ended.reward is None:
            raise RuntimeError(f"infrastructure error ({ended.episode.error}): run the sample again")
        result = ended.episode.result
        assert result is not None
        about = {"outcome": str(ended.episode.outcome), "strict": result.strict, "checks": dict(result.checks)}
        return scorer.Score(value=ended.reward, answer=attempt.final_message, metadata=about)

    return score


@ai.task
def taskset(name: str = "terminal-basic:heldout", limit: int | None = None) -> Any:
    """A task set of this library, for a ReAct agent with a shell."""
    tasks = load(name, limit=limit)
    samples = [
        dataset.Sample(
            id=task.id,
            input=task.instruction,
            sandbox=util.SandboxEnvironmentSpec("clawgym", ClawGymSandboxConfig(taskset=name, task_id=task.id)),
            metadata={"task_hash": task.content_hash},
        )
        for task in tasks.tasks
        if not task.unsupported and not task.brings_tools
    ]
    return ai.Task(
        dataset=dataset.MemoryDataset(samples, name=tasks.name),
        solver=agent.react(tools=[clawgym_bash()]),
        scorer=clawgym_verifier(),
        version=tasks.version,
    )


# -- its tasks, as a task set


def pack(target: str) -> InspectTasks:
    """The tasks of ``inspect:MODULE.FUNCTION``."""
    return InspectTasks(target)


class InspectTasks:
    """A pack whose tasks are the samples of a task of Inspect AI (``inspect:MODULE.FUNCTION``).

    The agent is ours, in place of the task's solver. Answers are scored by the task's scorers, on this machine, with a
    sandbox that has the frozen workspace.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._task = _inspect_task(target)

    @property
    def version(self) -> str:
        return str(self._task.version)

    def load(self, split: str = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
        tasks = tuple(self._one(sample, number) for number, sample in enumerate(self._task.dataset, 1))
        return TaskSet(f"inspect:{self.target}", tasks, self.version)

    def _one(self, sample: Any, number: int) -> Task:
        name = str(sample.id if sample.id is not None else number)
        needs = _needs(sample, self._task)
        return Task(
            id=name,
            instruction=_text_of(sample.input),
            verifier=VerifierSpec(
                "grader",
                grader="clawgym.interop.inspect:InspectGrader",
                grader_options={"task": self.target, "sample": name},
                mutable_inputs=("*",),
            ),
            inputs=() if needs else _inputs(sample),
            workspace=_WORKSPACE,
            unsupported=needs,
            metadata={"category": self._task.name},
            origin=self.target,
        )


def _inspect_task(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
        made = found() if callable(found) else found
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskError(
            f"inspect:{target} was not found ({error}): write inspect:MODULE.FUNCTION, and let Python find the module "
            "(PYTHONPATH=folder)"
        ) from error
    if not isinstance(made, ai.Task):
        raise TaskError(f"inspect:{target} is {type(made).__name__}, not a task of Inspect AI: name a @task function")
    return made


def _needs(sample: Any, task: Any) -> str | None:
    """What a sample needs that our tasks do not have."""
    sandbox = sample.sandbox or task.sandbox
    config = sandbox[1] if isinstance(sandbox, tuple) else getattr(sandbox, "config", None)
    if config is not None and not isinstance(config, ClawGymSandboxConfig):
        return f"it needs the sandbox configuration {config!r}"
    if sample.choices:
        return "it is a multiple choice, whose prompt its solver writes"
    if sample.setup:
        return "it has a setup script"
    if task.setup is not None:
        return "it has a setup solver"
    if not isinstance(sample.input, str) and any(message.role != "user" for message in sample.input):
        return "its input is a conversation"
    return None


def _text_of(given: Any) -> str:
    return given if isinstance(given, str) else "\n\n".join(message.text for message in given)


def _inputs(sample: Any) -> tuple[TaskFile, ...]:
    files = []
    for path, content in (sample.files or {}).items():
        relative = PurePosixPath(path)
        if relative.is_absolute():
            relative = relative.relative_to(_WORKSPACE) if relative.is_relative_to(_WORKSPACE) else relative
        files.append(TaskFile(str(relative), _content(content)))
    return tuple(files)


def _content(content: str) -> bytes:
    """The bytes of an entry of ``Sample.files``: a path, a data URL, or the text itself."""
    if content.startswith("data:"):
        from base64 import b64decode

        return b64decode(content.partition(",")[2])
    try:
        return Path(content).read_bytes()
    except (OSError, ValueError):
        return content.encode()


class InspectGrader:
    """Scores an answer with the scorers of a task of Inspect AI.

    Args:
        task: MODULE.FUNCTION of the task.
        sample: the id of the sample.
    """

    name, version, model = "inspect", "1", ""

    def __init__(self, task: str, sample: str) -> None:
        self._target, self._sample = task, sample

    async def grade(self, submission: Submission) -> Mapping[str, float]:
        """Return a check for each scorer, and for each key of a score with several values."""
        task = _inspect_task(self._target)
        samples = {str(one.id if one.id is not None else n): one for n, one in enumerate(task.dataset, 1)}
        sample = samples[self._sample]
        scorers = task.scorer if isinstance(task.scorer, list) else [task.scorer]
        if not scorers or scorers[0] is None:
            raise ValueError(f"{self._target} has no scorer: give its Task one")
        state = solver.TaskState(
            model=model.ModelName("none/none"),
            sample_id=self._sample,
            epoch=1,
            input=sample.input,
            messages=[*_messages(submission), model.ChatMessageAssistant(content=submission.final_message)],
            target=scorer.Target(sample.target),
            output=model.ModelOutput.from_content("none", submission.final_message),
            metadata=sample.metadata or {},
            completed=True,
        )
        backend = await loop_backend()
        sandbox = await backend.create(SandboxSpec(workdir=_WORKSPACE))
        environments = {"default": ClawGymSandbox(sandbox)}
        try:
            await sandbox.put_archive(Archive(submission.tar), _WORKSPACE)
            context = importlib.import_module("inspect_ai.util._sandbox.context")  # what util.sandbox() reads
            context.sandbox_environments_context_var.set(environments)
            context.sandbox_with_environments_context_var.set({})
            context.sandbox_default_context_var.set("default")
            found: dict[str, float] = {}
            for number, score in enumerate(scorers, 1):
                name = _scorer_name(score, number)
                value = (await score(state, state.target)).value
                parts = value if isinstance(value, dict) else {"": value}
                found |= {f"{name}:{key}" if key else name: scorer.value_to_float()(one) for key, one in parts.items()}
            return found
        finally:
            await sandbox.close()


def _scorer_name(score: Any, number: int) -> str:
    try:
        return util.registry_info(score).name.rpartition("/")[2]
    except ValueError:
        return f"scorer{number}"


def _messages(submission: Submission) -> list[Any]:
    return [model.ChatMessageUser(content=submission.instruction)]


# -- our runs, as its logs


def eval_log(run: str | Path) -> Any:
    """Return the ``EvalLog`` of a run folder of ``clawgym eval``: a sample for each episode, with its transcript.

    The score ``strict`` is 1 for a solved task; ``official`` is that of the original grader. Episodes that ended by an
    infrastructure error have an error and no score.

    Raises :class:`~clawgym.errors.RunFolderError` if it is no run folder.
    """
    folder = RunFolder.read(run)
    manifest = folder.manifest
    name = str(manifest.agent.get("model") or manifest.agent.get("name"))
    samples = [_sample(folder, row, name) for row in folder.latest.values() if row["outcome"] != "unsupported"]
    scored = [one for one in samples if one.scores]
    scores = []
    for which in ("strict", "official"):
        values = [one.scores[which].value for one in scored]
        metrics = {"mean": log.EvalMetric(name="mean", value=sum(values) / len(values))} if values else {}
        scores.append(log.EvalScore(name=which, scorer=which, scored_samples=len(values), metrics=metrics))
    ended = [one.completed_at for one in samples if one.completed_at]
    began = min((one.started_at for one in samples if one.started_at), default=manifest.created)
    return log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=manifest.created,
            task=manifest.task_set.get("name", "clawgym"),
            task_id=manifest.task_set.get("name", "clawgym"),
            task_version=manifest.task_set.get("version") or 0,
            solver=str(manifest.agent.get("name")),
            dataset=log.EvalDataset(name=manifest.task_set.get("name"), samples=len({one.id for one in samples})),
            model=f"clawgym/{name}",
            config=log.EvalConfig(epochs=manifest.samples),
            metadata={"clawgym": {"seed": manifest.seed}},
        ),
        results=log.EvalResults(total_samples=len(samples), completed_samples=len(scored), scores=scores),
        stats=log.EvalStats(started_at=began, completed_at=max(ended, default=manifest.created)),
        samples=samples,
    )


def write_log(run: str | Path, location: str | Path) -> None:
    """Write :func:`eval_log` of ``run`` to the file ``location`` (``.eval`` or ``.json``)."""
    log.write_eval_log(eval_log(run), str(location))


def _sample(folder: RunFolder, row: Mapping[str, Any], name: str) -> Any:
    steps: Sequence[Step] = ()
    with contextlib.suppress(FileNotFoundError):
        inner = f"episodes/{safe_name(row['task_id'], row['sample'])}/{TRANSCRIPT}"
        steps = steps_from_atif(json.loads(read_below(folder.path, inner, LARGEST_TRANSCRIPT)))
    messages = [message for step in steps for message in _chat(step)]
    result, usage = row.get("result"), row.get("usage") or {}
    used = model.ModelUsage(
        input_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
        total_tokens=usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0),
    )
    scores = None
    if result is not None:
        about = {"checks": result["checks"], "outcome": row["outcome"], "cause": row["cause"]}
        answer = row.get("final_message") or None
        scores = {
            which: scorer.Score(value=result[which], answer=answer, metadata=about) for which in ("strict", "official")
        }
    failed = row["cause"] if row["outcome"] == "infra" else None
    return log.EvalSample(
        id=row["task_id"],
        epoch=row["sample"] + 1,
        input=next((message.text for message in messages if message.role == "user"), ""),
        target="",
        messages=messages,
        output=model.ModelOutput.from_content(name, row.get("final_message") or ""),
        scores=scores,
        metadata={"task_hash": row["task_hash"], "seed": row["seed"], "outcome": row["outcome"]},
        model_usage={name: used},
        started_at=steps[0].timestamp if steps else None,
        completed_at=row["finished"],
        total_time=sum((row.get("seconds") or {}).values()),
        error=None if failed is None else log.EvalError(message=failed, traceback="", traceback_ansi=""),
    )


def _chat(step: Any) -> list[Any]:
    if step.source == "system":
        return [model.ChatMessageSystem(content=step.message[:_CUT])]
    if step.source == "user":
        return [model.ChatMessageUser(content=step.message[:_CUT])]
    calls = [tool.ToolCall(id=call.id, function=call.name, arguments=dict(call.arguments)) for call in step.tool_calls]
    said = [model.ChatMessageAssistant(content=step.message[:_CUT], tool_calls=calls or None)]
    names = {call.id: call.name for call in step.tool_calls}
    for seen in step.observations:
        if seen.call_id in names:
            text = seen.content[:_CUT]
            said.append(model.ChatMessageTool(content=text, tool_call_id=seen.call_id, function=names[seen.call_id]))
        else:
            said.append(model.ChatMessageUser(content=seen.content[:_CUT]))
    return said
