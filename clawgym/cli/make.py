"""``clawgym tasks make``: make tasks from real source code, which is downloaded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawgym.cli._options import Concurrency, Out, SandboxName, Seed
from clawgym.console import Console, progress
from clawgym.errors import TaskError

if TYPE_CHECKING:
    from clawgym.sandbox import Backend
    from clawgym.tasks.layers import Progress as Tell
    from clawgym.tasks.swe.make import Journal
    from clawgym.tasks.swe.recipes import Recipe

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Make tasks from real source code.", pretty_exceptions_enable=False)

shown = Console()
err = Console(stderr=True)
_DEFAULT_CONCURRENCY = 2


@app.callback()
def _group() -> None: ...


@app.command()
def swe(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="A Python package of the index that pip uses.")],
    version: Annotated[str | None, typer.Option(help="Version of the package. Default: the latest release.")] = None,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="How many tasks.")] = 10,
    seed: Seed = 0,
    out: Out = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="PACKAGE", help="A further package that its tests need. May be given several times."
        ),
    ] = None,
    sandbox: SandboxName = "auto",
    concurrency: Concurrency = None,
) -> None:
    """Put bugs into a package, keep those that its tests detect, and write a recipe and a folder of tasks.

    The folder is swe-PACKAGE-VERSION unless --out is given. The same command resumes. The code of the package runs only
    in sandboxes.
    """
    from clawgym.tasks import write
    from clawgym.tasks.layers import prepare
    from clawgym.tasks.swe.make import Journal, make
    from clawgym.tasks.swe.recipes import build_all, write_recipe
    from clawgym.tasks.swe.resolve import find_sdist, resolve
    from clawgym.tasks.swe.sources import read_source

    with _shown(count) as tell:
        tell(f"looking for {package}", 0, count)
        source = read_source(find_sdist(package, version))
        folder = out or Path(f"swe-{source.sdist.project}-{source.sdist.version}")
        lock, left_out = resolve(source, extra or ())
        head = {
            "package": source.sdist.project,
            "version": source.sdist.version,
            "sha256": source.sdist.sha256,
            "lock": lock.digest,
            "seed": seed,
        }
        journal = Journal.open(folder / "journal.jsonl", head)
        site = prepare(lock)
        for name in left_out:
            err.say(f"left out: {name} has no pure-Python wheel; tests that import it are not used")

        async def make_recipe(backend: Backend) -> Recipe:
            return await make(
                backend,
                source,
                lock,
                site,
                number=count,
                seed=seed,
                journal=journal,
                jobs=concurrency or _DEFAULT_CONCURRENCY,
                progress=tell,
            )

        recipe = asyncio.run(_with_backend(sandbox, make_recipe))
        (folder / "recipe.json").write_bytes(write_recipe(recipe))
        tasks = build_all([(str(folder / "recipe.json"), recipe)])
        if not (folder / "tasks").exists():
            write(tasks, folder / "tasks")
        elif sorted(entry.name for entry in (folder / "tasks").iterdir()) != sorted(task.id for task in tasks):
            raise TaskError(f"{folder}/tasks contains other instances: move it and run the same command again")
    _print_summary(recipe, journal, folder)


async def _with_backend(name: str, work: Callable[[Backend], Awaitable[Recipe]]) -> Recipe:
    from clawgym.sandbox import backend as make_backend

    backend = make_backend(name)
    try:
        await backend.probe()
        return await work(backend)
    finally:
        await backend.aclose()


def _print_summary(recipe: Recipe, journal: Journal, folder: Path) -> None:
    found = Counter(row.get("why", "kept") for key, row in journal.rows.items() if key != "baseline")
    why = ", ".join(f"{what} {count}" for what, count in found.most_common())
    shown.say(
        f"{len(recipe.instances)} instances of {recipe.project} {recipe.version} ({recipe.licence}), "
        f"{len(recipe.tests)} tests, {recipe.seconds:.1f} s per run; tried {recipe.tried} bugs: {why}"
    )
    shown.say(f"Validate them with: clawgym tasks validate {folder}/tasks")


@contextlib.contextmanager
def _shown(number: int) -> Iterator[Tell]:
    with progress(err) as shown:
        bar = shown.add_task("", total=number)

        def tell(what: str, done: int, total: int) -> None:
            shown.update(bar, description=what, completed=done, total=total or None)

        yield tell
