"""Arguments and options that several commands share, so that they have the same name everywhere.

A command declares ``sandbox: SandboxName = "auto"``. An option that a second command needs is moved here.

| name | what |
|---|---|
| ``TASKSET`` | the task set, as a positional argument |
| ``RUN`` | a run folder, as a positional argument |
| ``--task ID`` | only this task (repeatable) |
| ``--limit N``, ``--sample N`` | the first N tasks; N tasks drawn at random |
| ``--seed`` | the seed of all random choices |
| ``--sandbox NAME`` | the sandbox backend |
| ``--concurrency``, ``-j`` | most tasks or episodes at once |
| ``--out``, ``-o`` | where results are written |
| ``--model``, ``--base-url`` | the model and its endpoint |
| ``--config``, ``-c``, ``--set`` | a configuration, and single settings of it |
| ``--json`` | print JSON |
| ``--dry-run`` | show what would be done, and do nothing |
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BaseUrl",
    "Concurrency",
    "ConfigName",
    "DryRun",
    "JsonFlag",
    "Limit",
    "Out",
    "PoolName",
    "RunPath",
    "Sample",
    "SandboxName",
    "Seed",
    "Settings",
    "TaskIds",
    "TaskSetName",
    "TokenizerPath",
    "named_values",
    "tls_of",
]

TaskSetName = Annotated[
    str, typer.Argument(metavar="TASKSET", help="A name, a pack (NAME:split), a folder, a JSONL or Python file.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
PoolName = Annotated[str, typer.Argument(metavar="POOL", help="A pool: its file, or postgresql://...")]
TaskIds = Annotated[
    list[str] | None, typer.Option("--task", metavar="ID", help="Only this task. May be given several times.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N tasks.")]
Sample = Annotated[int | None, typer.Option("--sample", min=1, metavar="N", help="Only N tasks, drawn at random.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of all random choices.")]
SandboxName = Annotated[
    str,
    typer.Option("--sandbox", metavar="NAME", help="Sandbox backend: auto, or one of `clawgym list sandboxes`."),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency", "-j", min=1, metavar="N", help="Most at once. Default: as many as the machine can run."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FOLDER", help="Where results are written. Default: named after the options."),
]
BaseUrl = Annotated[str | None, typer.Option("--base-url", metavar="URL", help="OpenAI-compatible endpoint.")]
TokenizerPath = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="FOLDER", help="Folder of the model's tokenizer.")
]
ConfigName = Annotated[str, typer.Option("--config", "-c", help="A YAML file, or the name of a recipe.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting: its name, with dots, and its value. May be given several times."
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]


def named_values(given: Sequence[str] | None, option: str) -> dict[str, str]:
    """Parse the ``NAME=VALUE`` words of the repeatable ``option``.

    Raises :class:`typer.BadParameter` for words of another form and for repeated names.
    """
    values: dict[str, str] = {}
    for word in given or ():
        name, found, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not found or not name:
            raise typer.BadParameter(f"{word!r} has no value: write NAME=VALUE", param_hint=option)
        if name in values:
            raise typer.BadParameter(f"{name} is given twice: give it once", param_hint=option)
        values[name] = value
    return values


def tls_of(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The certificate and the key of a server; None without them.

    Raises :class:`~clawgym.errors.GatewayError` for one without the other, and for files that are something else."""
    from clawgym.errors import GatewayError

    if (cert is None) != (key is None):
        raise GatewayError("a certificate and its key go together: give --tls-cert and --tls-key")
    if cert is None or key is None:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise GatewayError(f"{cert}, {key}: not a certificate and its key ({error}): give PEM files") from error
    return tls
