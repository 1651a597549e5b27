"""Family ``calendar``: events to book, to move and to cancel."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

from clawgym.tasks.packs.seeded import Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TODAY, ToolCallDraft, call
from ._start import Office, after, day, people

CALENDAR: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="calendar", into=CALENDAR)

_PARTS = ("calendar",)


@generator("calendar-book", level=1)
def calendar_book(rng: random.Random) -> ToolCallDraft:
    """Book an event that is described in full."""
    group = people(rng, 7)
    office = Office(rng, group)
    for offset in range(1, 9):
        for _ in range(2):
            office.anything(offset)
    title, minutes = office.title(), rng.choice((30, 45, 60, 90))
    (host, at), (_, other), (guest, guest_at) = group[2], group[0], group[1]
    while True:
        room, start = rng.choice(list(office.rooms)), f"{day(rng.randint(1, 8))}T{rng.randint(8, 16):02d}:15"
        if office.free(room, start, after(start, minutes)):
            break
    new = {"title": title, "start": start, "end": after(start, minutes), "room": room, "organizer": at}
    book = call("create_event", **new, attendees=[guest_at])
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. Put an event into the calendar: {title}, on {start[:10]} at {start[11:]} for {minutes} "
            f"minutes in the room {room}. {host} organizes it, and {guest} is the only one invited."
        ),
        parts=_PARTS,
        start=office.start(),
        calls=[call("list_people"), book],
        wrong={
            "answers-without-acting": ([], ""),
            "wrong-person": ([call("create_event", **new, attendees=[other])], ""),
            "invites-the-organizer": ([call("create_event", **new, attendees=[guest_at, at])], ""),
            "an-hour-later": (
                [call("create_event", **{**new, "end": after(new["end"], 60)}, attendees=[guest_at])],
                "",
            ),
            "also-cancels-another": ([book, call("cancel_event", event=min(office.events))], ""),
        },
    )


@generator("calendar-move", level=2)
def calendar_move(rng: random.Random) -> ToolCallDraft:
    """Move one event of a series by some days, and cancel another."""
    group = people(rng, 7)
    office = Office(rng, group)
    series, twin = office.title(), office.title()
    host, other = group[3][1], group[4][1]
    offsets = sorted(rng.sample(range(1, 13), 4))
    mine = [office.anything(offset, organizer=host, title=series) for offset in offsets]
    for offset in offsets[:3]:
        office.anything(offset, organizer=other, title=series)
    office.anything(offsets[0], organizer=host, title=twin)
    for offset in range(1, 13):
        office.anything(offset)
    moved, cancelled = rng.sample(mine, 2)
    event, gone = office.events[moved], office.events[cancelled]
    while True:
        to = f"{day(rng.randint(14, 17))}{event['start'][10:]}"
        if office.free(event["room"], to, after(to, 90)):
            break
    others = [i for i in mine if i not in (moved, cancelled)]
    name = group[3][0]
    move, cancel = call("move_event", event=moved, start=to), call("cancel_event", event=cancelled)
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. Of the events called {series} that {name} organizes, move the one on "
            f"{event['start'][:10]} to {to[:10]}, at the same time and in the same room, and cancel the one on "
            f"{gone['start'][:10]}."
        ),
        parts=_PARTS,
        start=office.start(),
        calls=[call("list_people"), call("search_events", words=series), move, cancel],
        wrong={
            "forgets-to-cancel": ([move], ""),
            "cancels-another-day": ([move, call("cancel_event", event=others[0])], ""),
            "books-a-copy": (
                [
                    call(
                        "create_event",
                        title=series,
                        start=to,
                        end=after(to, 30),
                        room=event["room"],
                        organizer=host,
                        attendees=[],
                    ),
                    cancel,
                ],
                "",
            ),
            "cancels-the-series": ([move, cancel, *(call("cancel_event", event=i) for i in others)], ""),
        },
    )


@generator("calendar-free", level=3)
def calendar_free(rng: random.Random) -> ToolCallDraft:
    """Find the first time at which some people and a large enough room are free."""
    while True:
        group = people(rng, 7)
        office = Office(rng, group)
        date, minutes = rng.randint(1, 6), rng.choice((60, 90))
        for offset in range(1, 7):
            for _ in range(16 if offset == date else 2):
                office.anything(offset)
        (host, at), (one, one_at), (two, two_at) = group[2], group[3], group[4]
        seats = sorted(office.rooms.values())[1]
        slots = _slots(office, day(date), minutes)
        if not slots:
            continue
        busy = {at, one_at, two_at}
        right = _first(office, slots, minutes, seats, busy)
        crowded = _first(office, slots, minutes, seats, set())
        small = _first(office, slots, minutes, 1, busy)
        if right and crowded and small and len({right, crowded, small}) == 3:
            break
    title = office.title()

    def book(place: tuple[str, str], room: str = "") -> list:
        start, found = place
        new = {"title": title, "start": start, "end": after(start, minutes), "room": room or found, "organizer": at}
        return [call("create_event", **new, attendees=[one_at, two_at])]

    largest = max((r for s, r in slots if s == right[0]), key=lambda r: office.rooms[r])
    wrong = {
        "ignores-people": (book(crowded), ""),
        "ignores-seats": (book(small), ""),
        "answers-without-acting": ([], ""),
        "books-twice": (book(right) + book(small), ""),
    }
    if largest != right[1]:
        wrong["largest-room"] = (book(right, largest), "")
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. {host} wants to hold an event called {title} of {minutes} minutes on {day(date)} and "
            f"invites {one} and {two}. Book it at the first full or half hour, from 08:00 on and ending by 18:00 at "
            "the latest, at which none of the three is in another event (as organizer or invited) and a room with at "
            f"least {seats} seats is free. Of several such rooms, take the one with the fewest seats."
        ),
        parts=_PARTS,
        start=office.start(),
        calls=[
            call("list_people"),
            call("list_rooms"),
            call("list_events", first_day=day(date), last_day=day(date)),
            *(call("get_event", event=i) for i, e in office.events.items() if e["start"][:10] == day(date)),
            *book(right),
        ],
        wrong=wrong,
    )


def _slots(office: Office, date: str, minutes: int) -> list[tuple[str, str]]:
    """(start, room) of every free place of a day, by start, smallest room first."""
    starts = [f"{date}T{hour:02d}:{half}" for hour, half in product(range(8, 18), ("00", "30"))]
    rooms = sorted(office.rooms, key=lambda room: office.rooms[room])
    ends = {start: after(start, minutes) for start in starts}
    return [(s, r) for s in starts if ends[s] <= f"{date}T18:00" for r in rooms if office.free(r, s, ends[s])]


def _first(
    office: Office, slots: list[tuple[str, str]], minutes: int, seats: int, busy: set[str]
) -> tuple[str, str] | None:
    """The first slot with enough seats at which nobody of ``busy`` is elsewhere."""
    for start, room in slots:
        end = after(start, minutes)
        clash = any(
            e["start"] < end and e["end"] > start and busy & {e["organizer"], *e["attendees"]}
            for e in office.events.values()
        )
        if office.rooms[room] >= seats and not clash:
            return start, room
    return None
