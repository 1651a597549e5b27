"""``clawgym push``: what a run made, to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clawgym.console import Console

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Put what a run made on the Hugging Face Hub.")


@app.callback()
def _push() -> None: ...


@app.command()
def checkpoint(
    run: Annotated[Path, typer.Argument(help="Run folder of a training.")],
    repo: Annotated[str | None, typer.Option(help="NAME or OWNER/NAME; the run's name if left out.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step.")] = "best",
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base model first.")] = False,
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; else private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and the card, upload nothing.")] = False,
) -> None:
    """Push a checkpoint with its tokenizer, a card made from the receipt, and its evaluations.

    Weights are safetensors; optimiser states and pickles stay. Refuses when something that would be uploaded looks like
    a secret. Interrupt it, and the same command goes on; where nothing has changed, it commits nothing.
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
