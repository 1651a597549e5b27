"""``clawgym push``: upload checkpoints of a run to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from clawgym.cli._options import DryRun, RunPath
from clawgym.console import Console

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Upload checkpoints of a run to the Hugging Face Hub.")


@app.callback()
def _push() -> None: ...


@app.command()
def checkpoint(
    run: RunPath,
    repo: Annotated[str | None, typer.Option(help="NAME or OWNER/NAME. Default: the run's name.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step.")] = "best",
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base model first.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public. Default: private.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Push a checkpoint of a training run with its tokenizer, a card made from the run manifest, and its evaluations.

    Weights are uploaded as safetensors; optimiser states and pickles are not uploaded. Fails if a file looks like it
    contains a secret. The same command resumes, and makes no commit if nothing has changed. --dry-run shows the files
    and the card.
    """
    from clawgym.errors import MissingDependency

    try:
        from clawgym import hub
    except ImportError as error:
        raise MissingDependency(f"pushing needs huggingface_hub ({error}): pip install 'clawgym[hub]'") from error
    out = Console()
    with hub.plan_push(hub.read_checkpoint(run, checkpoint), merge=merge) as plan:
        for note in plan.notes:
            Console(stderr=True).say(f"note: {note}")
        if dry_run:
            for upload in plan.uploads:
                out.say(f"{upload.size:>14,}  {upload.path}")
            for line in ("", *plan.card.split("\n")):
                out.say(line)
            return
        pushed = hub.push(plan, repo, public=public)
    out.say(f"{pushed.url}: {'commit ' + pushed.commit if pushed.changed else 'nothing has changed, no commit'}")
