"""Draws the start of worlds: people, an office calendar, a mailbox, a store room, a ledger.

Dates are ISO dates, and moments are ``YYYY-MM-DDTHH:MM``.
"""

from __future__ import annotations

import random
from datetime import date, datetime, timedelta
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS

from ._build import TODAY

__all__ = ["ME", "Office", "day", "euros", "ledger", "mailbox", "people", "stock"]

ME = "me@example.org"
"""The address of the agent's user."""

Person = tuple[str, str]
"""Name, address."""


def people(rng: random.Random, number: int) -> list[Person]:
    """Draw ``number`` people, at least two. Names are unique; the first two people have the same first name."""
    first = rng.sample(FIRST, number - 1)
    last = rng.sample(WORDS, number)
    return [(f"{a} {b.title()}", f"{a.lower()}.{b}@example.org") for a, b in zip([first[0], *first], last, strict=True)]


def day(offset: int) -> str:
    """Return the date ``offset`` days after :data:`TODAY`."""
    return (date.fromisoformat(TODAY) + timedelta(days=offset)).isoformat()


def euros(cents: int) -> str:
    """Format an amount: 1234 cents are ``12.34``."""
    return f"{cents // 100}.{cents % 100:02d}"


class Office:
    """An office calendar: rooms, and events that do not overlap in a room.

    Args:
        group: the people who organize and attend events.
        rooms: the number of rooms.
    """

    KINDS = ("review", "planning", "call", "workshop", "briefing", "interview")

    def __init__(self, rng: random.Random, group: list[Person], *, rooms: int = 4) -> None:
        self.rng, self.group = rng, group
        names = rng.sample(WORDS, rooms)
        seats = rng.sample(range(3, 20), rooms)
        self.rooms = {name.title(): number for name, number in zip(names, seats, strict=True)}
        self.events: dict[int, dict[str, Any]] = {}
        self._words = iter(rng.sample(WORDS, len(WORDS)))
        self._ids = iter(rng.sample(range(101, 999), 200))

    def title(self) -> str:
        """Draw a title that no other event has."""
        return f"{next(self._words).title()} {self.rng.choice(self.KINDS)}"

    def free(self, room: str, start: str, end: str, but: int = 0) -> bool:
        """Whether ``room`` is free from ``start`` to ``end``, without the event number ``but``."""
        return not any(
            e["room"] == room and e["start"] < end and e["end"] > start for i, e in self.events.items() if i != but
        )

    def add(self, title: str, start: str, minutes: int, room: str, organizer: str, attendees: list[str]) -> int | None:
        """Add an event and return its number, or None if the room is not free."""
        end = after(start, minutes)
        if not self.free(room, start, end):
            return None
        number = next(self._ids)
        self.events[number] = {
            "title": title,
            "start": start,
            "end": end,
            "room": room,
            "organizer": organizer,
            "attendees": sorted(attendees),
        }
        return number

    def anything(self, offset: int, organizer: str = "", attendees: list[str] | None = None, title: str = "") -> int:
        """Add an event on the day ``offset`` days after today and return its number. What is not given is drawn."""
        while True:
            start = f"{day(offset)}T{self.rng.randint(8, 16):02d}:{self.rng.choice(('00', '30'))}"
            host = organizer or self.rng.choice(self.group)[1]
            guests = attendees or [a for _, a in self.rng.sample(self.group, 3) if a != host][:2]
            room = self.rng.choice(list(self.rooms))
            made = self.add(title or self.title(), start, self.rng.choice((30, 60, 90)), room, host, guests)
            if made is not None:
                return made

    def start(self) -> dict[str, Any]:
        """Return the tables of the calendar: table -> rows."""
        events = sorted(self.events.items())
        return {
            "people": sorted([address, name] for name, address in self.group),
            "rooms": sorted([name, seats] for name, seats in self.rooms.items()),
            "events": [[i, e["title"], e["start"], e["end"], e["room"], e["organizer"]] for i, e in events],
            "attendees": [[i, person] for i, e in events for person in e["attendees"]],
        }


def after(moment: str, minutes: int) -> str:
    """Return the moment ``minutes`` after ``moment``."""
    return (datetime.fromisoformat(moment) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M")


def mailbox(rng: random.Random, group: list[Person], mails: list[tuple[str, str, int, str, str]]) -> dict[str, Any]:
    """Draw a mailbox with ``mails`` (sender, folder, days ago, subject, body) in this order, among 8 to 12 others.

    Returns its tables, table -> rows, and under ``numbers`` the numbers of ``mails``.
    """
    noise = []
    for _ in range(rng.randint(8, 12)):
        word = rng.choice(WORDS)
        sender = rng.choice(group)[1]
        folder = rng.choice(("inbox", "inbox", "archive"))
        noise.append((sender, folder, rng.randint(0, 20), f"About the {word}", f"The {word} is fine, thank you."))
    places = sorted(rng.sample(range(len(mails) + len(noise)), len(mails)))
    rows, rest = [], iter(noise)
    wanted = dict(zip(places, mails, strict=True))
    number, numbers = rng.randint(20, 60), []
    for place in range(len(mails) + len(noise)):
        number += rng.randint(1, 5)
        if place in wanted:
            numbers.append(number)
        sender, folder, ago, subject, body = wanted[place] if place in wanted else next(rest)
        rows.append([number, folder, day(-ago), sender, subject, body, None])
    return {
        "contacts": sorted([address, name] for name, address in group),
        "mails": rows,
        "recipients": [[row[0], ME] for row in rows],
        "labels": [],
        "numbers": numbers,
    }


def stock(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Draw ``number`` items of a store room. The first two have similar names."""
    materials = rng.sample(("oak", "steel", "glass", "cork", "wool", "clay", "linen", "brass"), 5)
    things = rng.sample(("lamp", "stool", "shelf", "vase", "clock", "basket", "mirror", "tray", "stand"), 6)
    names = [f"{m} {t}" for m in materials for t in things]
    twin = names[0]
    rng.shuffle(names)
    names.remove(twin)
    other = next(name for name in names if name.split()[1] == twin.split()[1])
    names.remove(other)
    codes = rng.sample(range(100, 999), number)
    return [
        {
            "sku": f"{name.split()[0][:2].upper()}-{code}",
            "name": name,
            "stock": rng.randint(20, 60),
            "reserved": 0,
            "reorder_below": rng.randint(4, 12),
            "price_cents": rng.randint(500, 9_000),
        }
        for name, code in zip([twin, other, *names], codes, strict=False)
    ]


def ledger(rng: random.Random, group: list[Person]) -> list[list[Any]]:
    """Draw a checking and a savings account for each person. Returns the rows of the table ``accounts``."""
    codes = iter(rng.sample(range(1000, 9999), 2 * len(group)))
    return [
        [f"{kind[0].upper()}{next(codes)}", name, kind, rng.randint(200_000, 900_000), 0]
        for name, _ in group
        for kind in ("checking", "savings")
    ]
