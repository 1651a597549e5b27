"""``clawgym push`` and ``clawgym pull``: the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clawgym.cli._options import DryRun, Out, RunPath, TaskSetName
from clawgym.console import Console

if TYPE_CHECKING:
    from clawgym.hub import UploadPlan

__all__ = ["app", "pull_app"]

app = typer.Typer(
    no_args_is_help=True, help="Upload checkpoints, results, task sets, traces and boards to the Hugging Face Hub."
)
pull_app = typer.Typer(
    no_args_is_help=True, help="Download checkpoints, results, task sets and traces from the Hugging Face Hub."
)

Repo = Annotated[str | None, typer.Option(help="NAME or OWNER/NAME. Default: the name of what is pushed.")]
Public = Annotated[bool, typer.Option("--public", help="Make the repository public. Default: private.")]


def _hub() -> ModuleType:
    from clawgym.errors import MissingDependency

    try:
        from clawgym import hub
    except ImportError as error:
        raise MissingDependency(f"the Hub needs huggingface_hub ({error}): pip install 'clawgym[hub]'") from error
    return hub


@app.command()
def checkpoint(
    run: RunPath,
    repo: Repo = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step.")] = "best",
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base model first.")] = False,
    public: Public = False,
    dry_run: DryRun = False,
) -> None:
    """Push a checkpoint of a training run with its tokenizer, a card made from the run manifest, and its evaluations.

    Weights are uploaded as safetensors; optimiser states and pickles are not uploaded. Fails if a file looks like it
    contains a secret. The same command resumes, and makes no commit if nothing has changed. --dry-run shows the files
    and the card.
    """
    hub = _hub()
    with hub.plan_checkpoint(hub.read_checkpoint(run, checkpoint), merge=merge) as plan:
        _push(plan, repo, public, dry_run)


@app.command()
def results(
    run: RunPath,
    repo: Repo = None,
    transcripts: Annotated[bool, typer.Option("--transcripts", help="Also push the transcripts.")] = False,
    workspaces: Annotated[
        bool, typer.Option("--workspaces", help="Also push the final workspaces and the transcripts.")
    ] = False,
    public: Public = False,
    dry_run: DryRun = False,
) -> None:
    """Push the results of an evaluation as a data set: run manifest, results, summary and report, with a card.

    With --workspaces others can grade the episodes again. Fails if a file looks like it contains a secret. The same
    command resumes. --dry-run shows the files and the card.
    """
    _push(_hub().plan_results(run, transcripts=transcripts, workspaces=workspaces), repo, public, dry_run)


@app.command()
def tasks(
    taskset: TaskSetName,
    repo: Repo = None,
    audit: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of `clawgym tasks audit` on this set, for the card.")
    ] = None,
    attack: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of `clawgym redteam exploits` on this set, for the card."),
    ] = None,
    public: Public = False,
    dry_run: DryRun = False,
) -> None:
    """Push a task set as a benchmark data set, with eval.yaml and a card.

    `clawgym eval hf://OWNER/NAME` runs it, and datasets.load_dataset reads it. Reference solutions are pushed too.
    Fails if a file looks like it contains a secret. --dry-run shows the files and the card.
    """
    from clawgym.tasks import load

    with _hub().plan_tasks(load(taskset), audit=audit, attack=attack) as plan:
        _push(plan, repo, public, dry_run)


@app.command()
def traces(
    source: Annotated[str, typer.Argument(metavar="POOL|RUN", help="A pool, postgresql://..., or a run folder.")],
    repo: Repo = None,
    public: Public = False,
    dry_run: DryRun = False,
) -> None:
    """Push the episodes of a pool or an evaluation as a Parquet table, which datasets.load_dataset reads.

    Of a pool, one row per turn, lossless; of a run folder, one row per episode with its ATIF transcript. Fails if a
    text looks like it contains a secret. --dry-run shows the files and the card.
    """
    with _hub().plan_traces(source) as plan:
        _push(plan, repo, public, dry_run)


@app.command()
def board(
    board: Annotated[Path, typer.Argument(metavar="BOARD", help="The folder of a board, such as a clone of it.")],
    repo: Repo = None,
    public: Public = False,
    dry_run: DryRun = False,
) -> None:
    """Push a board as a data set: rules, tasks in a file, entries and the records of their checks, with a card that
    shows the ranking.

    `clawgym leaderboard show hf://OWNER/NAME` reads it. Fails if a file looks like it contains a secret. The same
    command resumes. --dry-run shows the files and the card.
    """
    _push(_hub().plan_board(board), repo, public, dry_run)


def _push(plan: UploadPlan, repo: str | None, public: bool, dry_run: bool) -> None:
    out = Console()
    for note in plan.notes:
        Console(stderr=True).say(f"note: {note}")
    if dry_run:
        for upload in plan.uploads:
            out.say(f"{upload.size:>14,}  {upload.path}")
        for line in ("", *plan.card.split("\n")):
            out.say(line)
        return
    pushed = _hub().push(plan, repo, public=public)
    out.say(f"{pushed.url}: {'commit ' + pushed.commit if pushed.changed else 'nothing has changed, no commit'}")


RepoName = Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME or OWNER/NAME@REVISION.")]
Revision = Annotated[str | None, typer.Option(help="A branch, a tag or a commit. Default: the main branch.")]
MaxGib = Annotated[float, typer.Option(min=0.001, metavar="N", help="Most GiB of all files together.")]


@pull_app.command("checkpoint")
def pull_checkpoint(
    repo: RepoName, revision: Revision = None, out: Out = None, max_gib: MaxGib = 20, dry_run: DryRun = False
) -> None:
    """Pull a checkpoint: safetensors, settings and tokenizer. Pickles and code of the repository are not downloaded.

    `--model FOLDER` of other commands takes the folder. The same command resumes.
    """
    _pull("checkpoint", repo, revision, out, max_gib, dry_run)


@pull_app.command("results")
def pull_results(
    repo: RepoName, revision: Revision = None, out: Out = None, max_gib: MaxGib = 20, dry_run: DryRun = False
) -> None:
    """Pull the results of an evaluation as a run folder. Summary and report are made here from the results.

    `clawgym runs verify` grades them again if the workspaces were pushed. The same command resumes.
    """
    _pull("results", repo, revision, out, max_gib, dry_run)


@pull_app.command("tasks")
def pull_tasks(
    repo: RepoName, revision: Revision = None, out: Out = None, max_gib: MaxGib = 20, dry_run: DryRun = False
) -> None:
    """Pull a task set as task folders, below FOLDER/tasks. Every task has the content hash that it names.

    `clawgym eval hf://OWNER/NAME` runs a set without this command. The same command resumes.
    """
    _pull("tasks", repo, revision, out, max_gib, dry_run)


@pull_app.command("traces")
def pull_traces(
    repo: RepoName, revision: Revision = None, out: Out = None, max_gib: MaxGib = 20, dry_run: DryRun = False
) -> None:
    """Pull episodes: the table of a pool, or the transcripts of an evaluation, also as ATIF. The same command
    resumes."""
    _pull("traces", repo, revision, out, max_gib, dry_run)


def _pull(
    kind: Literal["checkpoint", "results", "tasks", "traces"],
    repo: str,
    revision: str | None,
    out: Path | None,
    max_gib: float,
    dry_run: bool,
) -> None:
    hub = _hub()
    console = Console()
    files = hub.plan_pull(kind, repo, revision, max_bytes=int(max_gib * 2**30))
    if dry_run:
        for file in files.files:
            console.say(f"{file.size:>14,}  {file.path}")
        console.say(f"commit {files.commit}")
        return
    done = hub.pull(kind, files, out or Path(files.remote.repo.partition("/")[2]))
    console.say(f"{done.folder}: {done.files} files, {done.size:,} bytes, commit {done.commit}")
    for note in done.notes:
        console.say(note.replace("FOLDER", str(done.folder)))
