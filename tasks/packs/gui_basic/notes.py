"""Family ``notes``: an editor, with texts to extend, to correct, to write and to combine."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import Action
from ._native import Chore, Names, click_at, press, write

NOTES: dict[str, Generator[Chore]] = {}
generator = partial(_generator, family="notes", into=NOTES)

_REPLACE_ALL = (569, 480)
"""The button, which no key presses: the window that has it opens in the middle of the screen."""


class _Desk:
    """Four texts of lines such as ``maple: 120``, in which no word comes twice."""

    def __init__(self, rng: random.Random, number: int = 4) -> None:
        self.rng = rng
        self.names = Names(rng)
        self.files = {self.names.file("txt"): _text(self.lines()) for _ in range(number)}

    def lines(self, number: int = 6) -> list[str]:
        return [f"{word}: {self.rng.randint(10, 999)}" for word in self.rng.sample(WORDS, number)]

    def line(self) -> str:
        """One to add."""
        return f"{self.rng.choice(FIRST)}: {self.rng.randint(10, 999)} {self.names.word()}"

    def pick(self, number: int) -> list[str]:
        return self.rng.sample(sorted(self.files), number)

    def chore(self, end: dict[str, str] | None, opened: str = "", **rest: Any) -> Chore:
        program = ("xfwrite", opened) if opened else ("xfwrite",)
        return Chore(program=program, files=self.files, end=end, **rest)


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _append(line: str) -> list[Action]:
    return [*press("ctrl+end"), *write(line)]


def _open(name: str) -> list[Action]:
    """From the list of files, by its name."""
    return [*press("ctrl+o"), *write(name), *press("enter")]


def _save_as(name: str) -> list[Action]:
    """A text that has no name yet."""
    return [*press("ctrl+s", "alt+f", "ctrl+a"), *write(name), *press("enter")]


def _overwrite(number: int, line: str) -> list[Action]:
    """Write over a line, counted from 0."""
    return [*press("ctrl+home", *["down"] * number, "shift+end"), *write(line)]


def _replace(old: str, new: str) -> list[Action]:
    return [*press("ctrl+r"), *write(old), *press("tab", "tab", "tab"), *write(new), *click_at(*_REPLACE_ALL)]


@generator("notes-append", level=1)
def notes_append(rng: random.Random) -> Chore:
    """Add a line to the text that is open."""
    desk = _Desk(rng)
    (name,) = desk.pick(1)
    line = desk.line()
    return desk.chore(
        {**desk.files, name: desk.files[name] + line},
        opened=name,
        instruction=f'Add the line "{line}" at the end of "{name}", which is open, and save it.',
        calls=[*_append(line), *press("ctrl+s")],
        wrong={
            "does-not-save": _append(line),
            "at-the-top": [*press("ctrl+home"), *write(line + "\n"), *press("ctrl+s")],
            "half-of-it": [*_append(line.split()[0]), *press("ctrl+s")],
            "twice": [*_append(f"{line}\n{line}"), *press("ctrl+s")],
        },
    )


@generator("notes-figure", level=1)
def notes_figure(rng: random.Random) -> Chore:
    """Correct one figure."""
    desk = _Desk(rng)
    (name,) = desk.pick(1)
    lines = desk.files[name].splitlines()
    place, near = rng.sample(range(1, len(lines)), 2)
    word, old = lines[place].split(": ")
    new = str(int(old) + rng.randint(1, 99))

    def correct(place: int, line: str, *last: str) -> list[Action]:
        return [*_overwrite(place, line), *press(*last)]

    fixed = f"{word}: {new}"
    return desk.chore(
        {**desk.files, name: _text([*lines[:place], fixed, *lines[place + 1 :]])},
        opened=name,
        instruction=f'In "{name}", which is open, the figure of {word} is wrong. Make it {new}, and save the file.',
        calls=correct(place, fixed, "ctrl+s"),
        wrong={
            "does-not-save": correct(place, fixed),
            "another-line": correct(near, f"{lines[near].split(':')[0]}: {new}", "ctrl+s"),
            "adds-a-line": [*_append(fixed), *press("ctrl+s")],
            "adds-to-the-figure": correct(place, f"{word}: {old}{new}", "ctrl+s"),
        },
    )


@generator("notes-replace", level=2)
def notes_replace(rng: random.Random) -> Chore:
    """Replace a word everywhere."""
    desk = _Desk(rng)
    (name,) = desk.pick(1)
    old, new = desk.names.word(), desk.names.word()
    lines = [f"{first}: {rng.choice((old, desk.names.word()))}" for first in rng.sample(FIRST, 8)]
    for place in rng.sample(range(8), 3):
        lines[place] = f"{lines[place].split(':')[0]}: {old}"
    desk.files[name] = _text(lines)
    place = next(n for n, line in enumerate(lines) if line.endswith(old))
    once = [*_overwrite(place, lines[place].replace(old, new)), *press("ctrl+s")]
    return desk.chore(
        {**desk.files, name: desk.files[name].replace(old, new)},
        opened=name,
        instruction=f'Replace "{old}" by "{new}" everywhere in "{name}", which is open, and save it.',
        calls=[*_replace(old, new), *press("ctrl+s")],
        wrong={
            "once-only": once,
            "the-other-way-round": [*_replace(new, old), *press("ctrl+s")],
            "does-not-save": _replace(old, new),
            "another-word": [*_replace(old, new[::-1]), *press("ctrl+s")],
        },
    )


@generator("notes-open", level=2)
def notes_open(rng: random.Random) -> Chore:
    """Add a line to one of several texts."""
    return _opened(rng, there=True)


@generator("notes-open-gone", level=2)
def notes_open_gone(rng: random.Random) -> Chore:
    """Add a line to a text that does not exist; infeasible."""
    return _opened(rng, there=False)


def _opened(rng: random.Random, there: bool) -> Chore:
    desk = _Desk(rng, number=6)
    name, near = desk.pick(2)
    line = desk.line()
    if not there:
        del desk.files[name]
    new = [*write(line), *_save_as(name)]
    return desk.chore(
        {**desk.files, name: desk.files[name] + line} if there else None,
        instruction=f'Open the file "{name}", add the line "{line}" at its end, and save it.',
        calls=[*_open(name), *_append(line), *press("ctrl+s")] if there else press("ctrl+o", "escape"),
        wrong={
            "another-file": [*_open(near), *_append(line), *press("ctrl+s")],
            "does-not-save": [*_open(name if there else near), *_append(line)],
            **({} if there else {"makes-it": new}),
        },
        why="" if there else f"There is no {name}.",
    )


@generator("notes-write", level=2)
def notes_write(rng: random.Random) -> Chore:
    """Write a new text."""
    desk = _Desk(rng)
    name, lines = desk.names.file("txt"), desk.lines(3)
    text = "\n".join(lines)
    told = ", ".join(f'"{line}"' for line in lines)
    return desk.chore(
        {**desk.files, name: text},
        instruction=f'Write a new text of three lines, {told}, and save it here as "{name}".',
        calls=[*write(text), *_save_as(name)],
        wrong={
            "another-name": [*write(text), *_save_as(f"new-{name}")],
            "in-one-line": [*write(" ".join(lines)), *_save_as(name)],
            "two-lines-only": [*write("\n".join(lines[:2])), *_save_as(name)],
            "over-another": [*_open(desk.pick(1)[0]), *press("ctrl+a"), *write(text), *press("ctrl+s")],
        },
    )


@generator("notes-combine", level=3)
def notes_combine(rng: random.Random) -> Chore:
    """Append the lines of one text to another."""
    desk = _Desk(rng)
    first, second, near = desk.pick(3)

    def take(name: str, into: str) -> list[Action]:
        return [*_open(name), *press("ctrl+a", "ctrl+c"), *_open(into), *press("ctrl+end", "ctrl+v", "ctrl+s")]

    return desk.chore(
        {**desk.files, first: desk.files[first] + desk.files[second]},
        instruction=f'Put all lines of "{second}" at the end of "{first}", and save it. Leave "{second}" as it is.',
        calls=take(second, first),
        wrong={
            "the-other-way-round": take(first, second),
            "another-text": take(near, first),
            "in-its-place": [
                *_open(second),
                *press("ctrl+a", "ctrl+c"),
                *_open(first),
                *press("ctrl+a", "ctrl+v", "ctrl+s"),
            ],
        },
    )


@generator("notes-total", level=3)
def notes_total(rng: random.Random) -> Chore:
    """Add up the figures of one text, and write the sum into another."""
    desk = _Desk(rng)
    source, target, near = desk.pick(3)
    total, other = (sum(int(line.split(": ")[1]) for line in desk.files[name].splitlines()) for name in (source, near))

    def note(name: str, figure: int) -> list[Action]:
        return [*_open(name), *_append(f"total: {figure}"), *press("ctrl+s")]

    return desk.chore(
        {**desk.files, target: desk.files[target] + f"total: {total}"},
        opened=source,
        instruction=f'Add up the figures of "{source}", which is open, and write the sum as a line such as "total: 12" '
        f'at the end of "{target}".',
        calls=note(target, total),
        wrong={
            "another-sum": note(target, total + 1),
            "the-sum-of-another": note(target, other),
            "into-the-same": note(source, total),
        },
    )
