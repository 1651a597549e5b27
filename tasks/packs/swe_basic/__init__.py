"""The pack ``swe-basic``: bugs in well-tested packages, as recipes. The packages are downloaded at first use.

A recipe (``<package>.json.gz``) has digests, positions and replacements, but no code of the package. The splits have
different packages, so no repository is in both. docs/how-to/swe.md describes how the recipes were made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Literal

from clawgym.errors import DownloadError, TaskError, TaskSetNotFound
from clawgym.records import TaskSet
from clawgym.registry import did_you_mean, packs

if TYPE_CHECKING:
    from clawgym.tasks.layers import Progress
    from clawgym.tasks.swe.recipes import Recipe

__all__ = ["NAME", "PACKAGES", "VERSION", "SweBasic", "load", "recipe", "taskset"]

NAME = "swe-basic"
VERSION = "1"

PACKAGES: dict[str, tuple[str, ...]] = {
    "train": ("h11", "inflection", "munch", "parse", "tinydb", "voluptuous", "xmltodict"),
    "heldout": ("isodate", "schema", "webcolors"),
}
"""Split -> the packages whose instances are in it."""


def recipe(package: str) -> Recipe:
    """Return the recipe of one package. Raises :class:`TaskSetNotFound` if there is none."""
    from clawgym.tasks.swe.recipes import read_recipe

    known = [name for split in PACKAGES.values() for name in split]
    if package not in known:
        raise TaskSetNotFound(
            f"{NAME} has no package {package!r}.{did_you_mean(package, known)} Known: {', '.join(known)}"
        )
    name = f"{package}.json.gz"
    return read_recipe(resources.files(__name__).joinpath(name).read_bytes(), f"{name} of {NAME}")


def load(split: Literal["train", "heldout"] = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
    """Return the tasks of a split. Missing packages are downloaded, with progress on stderr.

    Raises :class:`TaskSetNotFound` for an unknown split, :class:`DownloadError` if a package cannot be downloaded,
    :class:`TaskError` if ``seeds`` are given, and :class:`MissingDependency` if a download needs the extra
    ``packages``.
    """
    if split not in PACKAGES:
        raise TaskSetNotFound(f"{NAME} has no split {split!r}: choose 'train' or 'heldout'")
    if seeds is not None:
        raise TaskError(f"{NAME}: its instances are recorded, not drawn from seeds: leave the seeds out")
    return taskset(f"{NAME}:{split}", PACKAGES[split])


def taskset(name: str, packages: Sequence[str]) -> TaskSet:
    """Return the tasks of some packages as the task set ``name``. Raises as :func:`load` does."""
    from clawgym.tasks.swe.recipes import build_all

    wanted = [(f"{NAME}, {package}", recipe(package)) for package in packages]
    try:
        with _shown() as progress:
            tasks = build_all(wanted, progress=progress)
    except DownloadError as error:
        raise DownloadError(f"{name} needs packages that are not on this machine: {error}") from error
    return TaskSet(name, tuple(tasks), VERSION)


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """A status line on stderr, from the first download on."""
    from rich.text import Text

    from clawgym.console import Console

    status = Console(stderr=True).status("", spinner="line")
    started = False

    def tell(what: str, done: int, total: int) -> None:
        nonlocal started
        if not started:
            status.start()
            started = True
        share = f" {done * 100 // total} %" if total else ""
        status.update(Text(f"{NAME}: {what}{share}"))

    try:
        yield tell
    finally:
        if started:
            status.stop()


@packs.register("swe-basic")
class SweBasic:
    """Bugs in the repositories of Python packages."""

    version = VERSION
    where = "recipes built in, packages downloaded at first use"

    def load(self, split: Literal["train", "heldout"] = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
        """See :func:`load`."""
        return load(split, seeds)
