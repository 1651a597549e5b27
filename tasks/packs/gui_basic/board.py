"""Family ``board``: cards to drag from place to place."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import Action, GuiDraft, day, drag

BOARD: dict[str, Generator[GuiDraft]] = {}
generator = partial(_generator, family="board", into=BOARD)

_COLUMNS = {"ideas": "Ideas", "next": "Next", "doing": "In progress", "done": "Done"}
_VERBS = ("Paint", "Check", "Order", "Measure", "Repair", "Sort")
_ID, _STACK, _PLACE, _TITLE, _OWNER, _DUE = range(6)

Row = list[Any]
Move = tuple[int, str, int | None]
"""A card, the column it goes to, and the card that it is then right above (None: it is the last one)."""


class _Cards:
    """A board with cards of four people; no two titles or days are the same."""

    def __init__(self, rng: random.Random, sizes: Sequence[int] = (4, 4, 3, 3)) -> None:
        number = sum(sizes)
        self.people = rng.sample(FIRST, 4)
        self.name = f"{rng.choice(WORDS).title()} house"
        ids, days = iter(rng.sample(range(11, 99), number)), iter(rng.sample(range(1, 80), number))
        titles = iter(rng.sample([f"{verb} the {word}" for verb in _VERBS for word in WORDS], number + 1))
        self.rows: list[Row] = [
            [next(ids), stack, place, next(titles), rng.choice(self.people), day(next(days))]
            for stack, size in zip(_COLUMNS, sizes, strict=True)
            for place in range(1, size + 1)
        ]
        self.missing = next(titles)

    def stack(self, name: str) -> list[Row]:
        """The cards of a column, from the top."""
        return sorted((row for row in self.rows if row[_STACK] == name), key=lambda row: row[_PLACE])

    def after(self, moves: Sequence[Move]) -> list[Row]:
        """The cards once ``moves`` were made, one after another."""
        order = {name: [row[_ID] for row in self.stack(name)] for name in _COLUMNS}
        for card, column, before in moves:
            for cards in order.values():
                if card in cards:
                    cards.remove(card)
            order[column].insert(len(order[column]) if before is None else order[column].index(before), card)
        where = {card: (name, place) for name, cards in order.items() for place, card in enumerate(cards, 1)}
        return [[row[_ID], *where[row[_ID]], *row[_TITLE:]] for row in self.rows]

    def draft(self, moves: Sequence[Move] | None, *, wrong: dict[str, Sequence[Move]], **rest: Any) -> GuiDraft:
        """A draft with the reference ``moves``, or one that cannot be done."""
        start = {"title": self.name, "columns": _COLUMNS}
        rest = {"calls": _drags(moves or ()), **rest}
        return GuiDraft(
            app="board",
            start=start,
            tables={"cards": self.rows},
            end=None if moves is None else {"cards": self.after(moves)},
            wrong={what: _drags(wrong_moves) for what, wrong_moves in wrong.items()},
            **rest,
        )


def _drags(moves: Sequence[Move]) -> list[Action]:
    return [
        action
        for card, column, before in moves
        for action in drag(f"#card-{card}", f"#end-{column}" if before is None else f"#card-{before}")
    ]


@generator("board-last", level=1)
def board_last(rng: random.Random) -> GuiDraft:
    """Put a card at the end of another column."""
    return _last(rng, there=True)


@generator("board-last-gone", level=1)
def board_last_gone(rng: random.Random) -> GuiDraft:
    """Put a card that does not exist at the end of a column; infeasible."""
    return _last(rng, there=False)


def _last(rng: random.Random, there: bool) -> GuiDraft:
    cards = _Cards(rng)
    row, near = rng.sample(cards.rows, 2)
    column, other = rng.sample([name for name in _COLUMNS if name not in (row[_STACK], near[_STACK])], 2)
    title = row[_TITLE] if there else cards.missing
    first = cards.stack(column)[0][_ID]
    instruction = f'On the board of the {cards.name}, move the card "{title}" to the end of "{_COLUMNS[column]}".'
    if not there:
        return cards.draft(
            None,
            instruction=instruction,
            calls=[{"action": "screenshot"}],
            wrong={"another-card": [(near[_ID], column, None)], "a-third-card": [(row[_ID], column, None)]},
            why=f'There is no card "{title}".',
        )
    return cards.draft(
        [(row[_ID], column, None)],
        instruction=instruction,
        wrong={
            "another-card": [(near[_ID], column, None)],
            "another-column": [(row[_ID], other, None)],
            "to-the-top": [(row[_ID], column, first)],
        },
    )


@generator("board-above", level=2)
def board_above(rng: random.Random) -> GuiDraft:
    """Put two cards directly above others."""
    cards = _Cards(rng)
    names = rng.sample(sorted(_COLUMNS), 4)
    one, two = (rng.choice(cards.stack(name)) for name in names[:2])
    above, over = (rng.choice(cards.stack(name)[:-1]) for name in names[2:])
    first, second = (one[_ID], names[2], above[_ID]), (two[_ID], names[3], over[_ID])
    return cards.draft(
        [first, second],
        instruction=(
            f'On the board of the {cards.name}, put "{one[_TITLE]}" right above "{above[_TITLE]}", and '
            f'"{two[_TITLE]}" right above "{over[_TITLE]}".'
        ),
        wrong={
            "one-only": [first],
            "the-other-way-round": [(above[_ID], names[0], one[_ID]), (over[_ID], names[1], two[_ID])],
            "at-the-end": [(one[_ID], names[2], None), second],
        },
    )


@generator("board-collect", level=2)
def board_collect(rng: random.Random) -> GuiDraft:
    """Put all cards of one person from a column to the end of another, in their order."""
    while True:
        cards = _Cards(rng, (5, 3, 4, 2))
        source, target = rng.sample(["ideas", "next", "doing"], 2)
        who = rng.choice(cards.people)
        mine = [row for row in cards.stack(source) if row[_OWNER] == who]
        elsewhere = [row for row in cards.rows if row[_OWNER] == who and row[_STACK] not in (source, target)]
        if len(mine) in (2, 3) and elsewhere and len(cards.stack(target)) <= 4:
            break
    moves: list[Move] = [(row[_ID], target, None) for row in mine]
    return cards.draft(
        moves,
        instruction=(
            f'On the board of the {cards.name}, move all cards of {who} that are in "{_COLUMNS[source]}" to the end '
            f'of "{_COLUMNS[target]}", in the order that they have now. Other cards stay.'
        ),
        wrong={
            "one-is-left": moves[:-1],
            "in-the-other-order": moves[::-1],
            "from-elsewhere-too": [*moves, (elsewhere[0][_ID], target, None)],
        },
    )


@generator("board-sort", level=3)
def board_sort(rng: random.Random) -> GuiDraft:
    """Move the card of a column that is due first into another column, and sort the rest by due date."""
    while True:
        cards = _Cards(rng, (5, 5, 2, 2))
        source = rng.choice(["ideas", "next"])
        stack = cards.stack(source)
        ordered = sorted(stack, key=lambda row: row[_DUE])
        if stack[0] not in ordered[:2] and sum(a is b for a, b in zip(stack, ordered, strict=True)) <= 1:
            break
    top = cards.stack("doing")[0][_ID]
    take: Move = (ordered[0][_ID], "doing", top)
    # From the end: each to the end, in order, is a sorted column.
    sort: list[Move] = [(row[_ID], source, None) for row in ordered[1:]]
    return cards.draft(
        [take, *sort],
        instruction=(
            f'On the board of the {cards.name}, move the card of "{_COLUMNS[source]}" that is due first to the top '
            f'of "{_COLUMNS["doing"]}". Then sort the cards that are left in "{_COLUMNS[source]}" by the day they are '
            "due, the earliest at the top."
        ),
        wrong={
            "takes-it-only": [take],
            "sorts-only": sort,
            "the-latest-at-the-top": [take, *sort[::-1]],
            "to-the-end": [(ordered[0][_ID], "doing", None), *sort],
        },
    )
