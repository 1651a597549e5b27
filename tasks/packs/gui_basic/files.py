"""Family ``files``: a file manager, with files to rename, to move, to copy, to delete, to find and to sort."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import Action
from ._native import HERE, Chore, Names, press, without, write

FILES: dict[str, Generator[Chore]] = {}
generator = partial(_generator, family="files", into=FILES)

_KINDS = {"txt": "texts", "csv": "tables", "log": "logs"}


class _Pile:
    """A few files, and two folders with three files each."""

    def __init__(self, rng: random.Random, loose: int = 5) -> None:
        self.rng = rng
        self.names = Names(rng)
        self.folders = [self.names.word() for _ in range(2)]
        self.files: dict[str, str] = {}
        self.loose = [self.add() for _ in range(loose)]
        self.inside = {folder: [self.add(folder) for _ in range(3)] for folder in self.folders}

    def add(self, folder: str = "", ending: str = "") -> str:
        """One more file; its name."""
        name = self.names.file(ending)
        self.files[f"{folder}/{name}" if folder else name] = self.names.text()
        return name

    def moved(self, *pairs: tuple[str, str]) -> dict[str, str]:
        """The tree after some files went from one path to another."""
        return {**without(self.files, *(old for old, _ in pairs)), **{new: self.files[old] for old, new in pairs}}

    def chore(self, end: dict[str, str] | None, **rest: Any) -> Chore:
        return Chore(program=("xfe",), files=self.files, end=end, **rest)


def _select(name: str) -> list[Action]:
    """By its name, typed; the key before ends what was typed for another."""
    return [*press("home"), *write(name)]


def _open(*folders: str) -> list[Action]:
    return [action for folder in folders for action in [*_select(folder), *press("enter")]]


def _rename(name: str, to: str) -> list[Action]:
    return [*_select(name), *press("f2", "ctrl+a"), *write(to), *press("enter")]


def _move(name: str, to: str) -> list[Action]:
    return [*_select(name), *press("f6", "ctrl+a"), *write(f"{HERE}/{to}"), *press("enter")]


def _copy(name: str, to: str) -> list[Action]:
    return [*_select(name), *press("f5", "ctrl+a"), *write(f"{HERE}/{to}"), *press("enter")]


def _trash(name: str) -> list[Action]:
    return [*_select(name), *press("delete", "alt+o")]


def _make(folder: str) -> list[Action]:
    return [*press("f7", "ctrl+a"), *write(folder), *press("enter")]


@generator("files-rename", level=1)
def files_rename(rng: random.Random) -> Chore:
    """Rename one file."""
    return _renamed(rng, there=True)


@generator("files-rename-gone", level=1)
def files_rename_gone(rng: random.Random) -> Chore:
    """Rename a file that does not exist; infeasible."""
    return _renamed(rng, there=False)


def _renamed(rng: random.Random, there: bool) -> Chore:
    pile = _Pile(rng, loose=6)
    old, near = rng.sample(pile.loose, 2)
    new = pile.names.file(old.rpartition(".")[2])
    if not there:
        del pile.files[old]
    return pile.chore(
        pile.moved((old, new)) if there else None,
        instruction=f'In the file manager, rename "{old}" to "{new}".',
        calls=_rename(old, new) if there else press("end"),
        wrong={
            "another-file": _rename(near, new),
            "copies-it": _copy(old if there else near, new),
            "makes-a-folder": _make(new),
        },
        why="" if there else f"There is no {old}.",
    )


@generator("files-move", level=1)
def files_move(rng: random.Random) -> Chore:
    """Move two files into a folder."""
    pile = _Pile(rng)
    first, second, near = rng.sample(pile.loose, 3)
    here, there = rng.sample(pile.folders, 2)
    return pile.chore(
        pile.moved((first, f"{here}/{first}"), (second, f"{here}/{second}")),
        instruction=f'Move "{first}" and "{second}" into the folder "{here}".',
        calls=[*_move(first, here), *_move(second, here)],
        wrong={
            "one-of-them": _move(first, here),
            "to-another-folder": [*_move(first, there), *_move(second, there)],
            "another-file-too": [*_move(first, here), *_move(second, here), *_move(near, here)],
            "copies-them": [*_copy(first, here), *_copy(second, here)],
        },
    )


@generator("files-copy", level=2)
def files_copy(rng: random.Random) -> Chore:
    """Copy a file of one folder into another, under a new name."""
    pile = _Pile(rng)
    here, there = rng.sample(pile.folders, 2)
    name, near = rng.sample(pile.inside[here], 2)
    new = pile.names.file(name.rpartition(".")[2])
    end = {**pile.files, f"{there}/{new}": pile.files[f"{here}/{name}"]}
    return pile.chore(
        end,
        instruction=f'Put a copy of "{name}" of the folder "{here}" into the folder "{there}", under the name "{new}".',
        calls=[*_open(here), *_copy(name, f"{there}/{new}")],
        wrong={
            "under-its-old-name": [*_open(here), *_copy(name, there)],
            "moves-it": [*_open(here), *_move(name, f"{there}/{new}")],
            "another-file": [*_open(here), *_copy(near, f"{there}/{new}")],
            "beside-it": [*_open(here), *_copy(name, f"{here}/{new}")],
        },
    )


@generator("files-clean", level=2)
def files_clean(rng: random.Random) -> Chore:
    """Delete the backup files of one folder."""
    pile = _Pile(rng)
    here, there = rng.sample(pile.folders, 2)
    gone = [pile.add(here, "bak") for _ in range(rng.randint(2, 3))]
    kept = pile.add(there, "bak")
    pile.add("", "bak")
    return pile.chore(
        without(pile.files, *(f"{here}/{name}" for name in gone)),
        instruction=f'Delete all files of the folder "{here}" whose names end in ".bak", and no others.',
        calls=[*_open(here), *(action for name in gone for action in _trash(name))],
        wrong={
            "one-of-them": [*_open(here), *_trash(gone[0])],
            "those-of-another-folder": [*_open(there), *_trash(kept)],
            "the-folder": _trash(here),
            "one-that-is-none": [
                *_open(here),
                *(action for name in [*gone, pile.inside[here][0]] for action in _trash(name)),
            ],
        },
    )


@generator("files-gather", level=2)
def files_gather(rng: random.Random) -> Chore:
    """Make a folder, and move all files of one kind into it."""
    pile = _Pile(rng, loose=0)
    ending = rng.choice(sorted(_KINDS))
    mine = [pile.add("", ending) for _ in range(3)]
    others = [pile.add("", kind) for kind in sorted(_KINDS) if kind != ending]
    new = pile.names.word()

    def gather(folder: str, *names: str) -> list[Action]:
        return [*_make(folder), *(action for name in names for action in _move(name, folder))]

    return pile.chore(
        pile.moved(*((name, f"{new}/{name}") for name in mine)),
        instruction=f'Make a folder "{new}", and move all ".{ending}" files that lie beside it into it.',
        calls=gather(new, *mine),
        wrong={
            "the-folder-only": gather(new),
            "all-but-one": gather(new, *mine[1:]),
            "another-name": gather(f"{new}s", *mine),
            "all-files": gather(new, *mine, *others),
        },
    )


@generator("files-find", level=3)
def files_find(rng: random.Random) -> Chore:
    """Find a file in nested folders, and move it to the top folder."""
    return _found(rng, there=True)


@generator("files-find-gone", level=3)
def files_find_gone(rng: random.Random) -> Chore:
    """Find a file that is in none of the folders; infeasible."""
    return _found(rng, there=False)


def _found(rng: random.Random, there: bool) -> Chore:
    pile = _Pile(rng, loose=3)
    places = [f"{folder}/{pile.names.word()}" for folder in pile.folders for _ in range(2)]
    inner = {place: [pile.add(place) for _ in range(2)] for place in places}
    place = rng.choice(places)
    name, near = inner[place]
    if not there:
        del pile.files[f"{place}/{name}"]
    return pile.chore(
        pile.moved((f"{place}/{name}", name)) if there else None,
        instruction=f'Somewhere in these folders is the file "{name}". Move it out of its folder to here, "{HERE}".',
        calls=[*_open(*place.split("/")), *(_move(name, "") if there else press("end"))],
        wrong={
            "another-file": [*_open(*place.split("/")), *_move(near, "")],
            "copies-one": [*_open(*place.split("/")), *_copy(name if there else near, "")],
            "makes-a-folder": _make(name),
        },
        why="" if there else f"{name} is in none of the folders.",
    )


@generator("files-sort", level=3)
def files_sort(rng: random.Random) -> Chore:
    """Sort a pile of files into folders by their kind."""
    pile = _Pile(rng, loose=0)
    loose = {pile.add("", kind): folder for kind, folder in _KINDS.items()}
    loose |= {pile.add("", kind): _KINDS[kind] for kind in rng.sample(sorted(_KINDS), 2)}
    for folder in _KINDS.values():
        pile.add(folder, "md")
    told = ", ".join(f'".{kind}" files into "{folder}"' for kind, folder in _KINDS.items())
    first, last = next(iter(loose)), list(loose)[-1]

    def put(places: dict[str, str]) -> list[Action]:
        return [action for name, folder in places.items() for action in _move(name, folder)]

    keep = pile.names.file("md")
    pile.files[keep] = pile.names.text()
    return pile.chore(
        pile.moved(*((name, f"{folder}/{name}") for name, folder in loose.items())),
        instruction=f'Sort the files that lie here: {told}. Leave "{keep}" where it is.',
        calls=put(loose),
        wrong={
            "all-but-one": put({name: folder for name, folder in loose.items() if name != last}),
            "two-changed-about": put(
                {**loose, first: loose[last], last: loose[first]}
                if loose[first] != loose[last]
                else {**loose, last: pile.folders[0]}
            ),
            "the-one-to-leave-too": put({**loose, keep: "texts"}),
        },
    )
