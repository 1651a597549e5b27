"""``clawgym tasks``: list, show, start, validate, audit, prepare, import and export tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from clawgym.cli import make
from clawgym.cli._options import Concurrency, JsonFlag, Limit, SandboxName, TaskIds, TaskSetName
from clawgym.cli.audit import audit_command
from clawgym.console import Console, progress
from clawgym.evaluation.validate import MAX_WRONG_SCORE, MIN_WRONG_SOLUTIONS, RUNS, Finding, validate_task
from clawgym.records import Task, TaskSet
from clawgym.tasks import available, load, names, read, write
from clawgym.tasks.scaffold import new_python, new_task
from clawgym.tasks.sets import about
from clawgym.visible import visible

app = typer.Typer(
    help="List, show, start, validate, audit, prepare and convert tasks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(make.app, name="make")
app.command("audit")(audit_command)

out = Console()
err = Console(stderr=True)

_DEFAULT_CONCURRENCY = 2
"""Tasks that ``validate`` runs at once by default."""
FormatName = Annotated[str, typer.Option(metavar="NAME", help="Format to write: see `clawgym list formats`.")]


def _print_problems(tasks: TaskSet) -> None:
    for where, problem in tasks.problems.items():
        err.say(f"{where}: {problem}", style="yellow")


@app.command("list")
def list_sets() -> None:
    """List the named task sets, and where each is loaded from."""
    table = Table("name", "what", Column("where", overflow="fold"))
    for name in names():
        table.add_row(name, about(name), available(name))
    out.print(table)


@app.command()
def show(
    taskset: TaskSetName,
    task_id: Annotated[str | None, typer.Argument(help="Show one task of the set.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a summary of a task set, or all details of one task."""
    tasks = load(taskset, ids=[task_id] if task_id else None)
    found = _task_summary(tasks.tasks[0]) if task_id else _set_summary(tasks)
    if as_json:
        out.json(found)
        return
    instruction = found.pop("instruction", None)
    table = Table("", Column(overflow="fold"), show_header=False, box=None)
    for key, value in found.items():
        lines = [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else value
        lines = lines if isinstance(lines, list) else [lines]
        table.add_row(Text(key, "bold"), "\n".join(visible(str(line)) for line in lines))
    out.print(table)
    if instruction:
        out.rule("instruction")
        out.print(Padding(instruction, (0, 0, 0, 2)))  # indented, so that untrusted lines cannot imitate ours


def _set_summary(tasks: TaskSet) -> dict[str, Any]:
    return {
        "name": tasks.name,
        "version": tasks.version,
        "tasks": len(tasks),
        "content hash": tasks.content_hash,
        "categories": dict(Counter(str(task.metadata.get("category", "")) for task in tasks.tasks).most_common()),
        "with a reference solution": sum(bool(task.solution) for task in tasks.tasks),
        "checkers that run the agent's code": dict(
            Counter(task.verifier.executes_agent_code or "no" for task in tasks.tasks)
        ),
        "unsupported": {task.id: task.unsupported for task in tasks.tasks if task.unsupported},
        "problems": dict(tasks.problems),
    }


def _task_summary(task: Task) -> dict[str, Any]:
    verifier = task.verifier
    return {
        "id": task.id,
        "content hash": task.content_hash,
        "workspace": task.workspace,
        "image": task.sandbox_image,
        "inputs": [file.path for file in task.inputs],
        "may change": list(verifier.mutable_inputs),
        "verifier": f"{verifier.protocol}, {verifier.mode}: "
        + (verifier.grader or ", ".join(file.path for file in verifier.files)),
        "runs the agent's code": verifier.executes_agent_code or "no",
        "solution": "yes" if task.solution else "no",
        "wrong solutions": [file.path for file in task.wrong_solutions],
        "unsupported": task.unsupported or "no",
        "metadata": dict(task.metadata),
        "origin": task.origin,
        "instruction": task.instruction,
    }


@app.command()
def prepare(
    folder: Annotated[Path, typer.Argument(help="A task folder, or a folder of them.", exists=True, file_okay=False)],
) -> None:
    """Prepare the layers (folders of packages) that the tasks of a folder need, once per machine. The same command
    resumes."""
    from clawgym.tasks.formats.clawgym import is_task, read_locks
    from clawgym.tasks.layers import prepare as make_layer

    found = [folder] if is_task(folder) else [entry for entry in sorted(folder.iterdir()) if is_task(entry)]
    locks = {lock.digest: lock for task in found for lock in read_locks(task)}
    with progress(err) as shown:
        bar = shown.add_task("preparing", total=len(locks))
        for lock in locks.values():
            make_layer(lock, progress=lambda what, *_: shown.update(bar, description=what))
            shown.advance(bar)
    out.say(f"{len(found)} tasks, {len(locks)} layers ready")


@app.command()
def validate(
    taskset: TaskSetName,
    task: TaskIds = None,
    limit: Limit = None,
    sandbox: SandboxName = "auto",
    concurrency: Concurrency = None,
) -> None:
    """Run each task's solution and a no-op agent three times, and its wrong solutions once.

    Exit status 1 if a task is invalid.
    """
    tasks = load(taskset, ids=task, limit=limit)
    _print_problems(tasks)
    findings = asyncio.run(_validate(tasks, sandbox, concurrency or _DEFAULT_CONCURRENCY))
    bad = [finding for finding in findings if finding.status in ("fail", "infra")]
    for (status, detail, log), where in _grouped(bad).items():
        out.say(f"{status} {where}: {detail}", style="red")
        for line in log.splitlines():
            out.say(f"    {line}", style="dim")
    counts = Counter(f"{finding.rule.partition('/')[0]} {finding.status}" for finding in findings)
    summary = ", ".join(f"{what} {count}" for what, count in counts.items())
    out.say(f"{len(tasks)} readable, {len(tasks.problems)} unreadable; {summary}")
    out.say(
        f"Required: the solution scores 1 in {RUNS} runs. The no-op agent ({RUNS} runs) and at least "
        f"{MIN_WRONG_SOLUTIONS} wrong solutions fail, with an official score below {MAX_WRONG_SCORE}. "
        "Repeated runs have the same scores."
    )
    if bad or tasks.problems:
        raise typer.Exit(1)


def _grouped(findings: list[Finding]) -> dict[tuple[str, str, str], str]:
    """Status, detail and log of equal findings -> their tasks and rules; at most three are named."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        places.setdefault((finding.status, finding.detail, finding.log), []).append(f"{finding.task_id} {finding.rule}")
    return {
        key: ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        for key, where in places.items()
    }


async def _validate(tasks: TaskSet, sandbox: str, concurrency: int) -> list[Finding]:
    from clawgym.sandbox import backend as make_backend

    backend = make_backend(sandbox)
    slots = asyncio.Semaphore(concurrency)
    try:
        await backend.probe()
        with progress(err) as shown:
            bar = shown.add_task("validating", total=len(tasks))

            async def one(task: Task) -> list[Finding]:
                async with slots:
                    findings = await validate_task(task, backend)
                shown.advance(bar)
                return findings

            return [finding for found in await asyncio.gather(*map(one, tasks.tasks)) for finding in found]
    finally:
        await backend.aclose()


@app.command("import")
def import_tasks(
    source: Annotated[Path, typer.Argument(help="A task folder, a folder of them, or a JSONL file.", exists=True)],
    dest: Annotated[Path, typer.Argument(help="The new folder or file.")],
    format: FormatName = "clawgym",
    source_format: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="Format to read. Default: detected.")
    ] = None,
) -> None:
    """Read tasks in any format and write them as ClawGym folders (or another format)."""
    _convert(read(source.resolve(), format=source_format), dest, format)


@app.command()
def export(
    taskset: TaskSetName,
    dest: Annotated[Path, typer.Argument(help="The new folder or file.")],
    format: FormatName = "harbor",
) -> None:
    """Write a task set as Harbor folders (or another format)."""
    _convert(load(taskset), dest, format)


def _convert(tasks: TaskSet, dest: Path, format: str) -> None:
    _print_problems(tasks)
    with progress(err) as shown:
        bar = shown.add_task("writing", total=len(tasks))
        count = write(tasks.tasks, dest, format, on_task=lambda _: shown.advance(bar))
    out.say(f"{count} tasks written to {dest}")
    if tasks.problems:
        raise typer.Exit(1)


@app.command()
def new(
    path: Annotated[Path, typer.Argument(metavar="NAME", help="The new file (NAME.py), or the new folder.")],
    format: Annotated[
        Literal["python", "clawgym"],
        typer.Option(help="python: a file that makes tasks from seeds. clawgym: a folder with one task."),
    ] = "python",
) -> None:
    """Start a task set from a small working example."""
    if format == "python":
        path = path if path.suffix == ".py" else path.with_name(f"{path.name}.py")
        new_python(path)
    else:
        new_task(path)
    shown = path if path.is_absolute() else f"./{path}"
    what = "has working tasks" if format == "python" else "is a working task"
    out.say(f"{path} {what}. Change it, then: clawgym tasks validate {shown}")
