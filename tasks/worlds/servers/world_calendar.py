"""A calendar: events in rooms, with people."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from typing import Annotated, Any, ClassVar

from . import _text as check
from .clawgym_tools import ToolError

__all__ = ["Calendar"]

_PAGE = 40


class Calendar:
    """No two events are in one room at one time."""

    TABLES: ClassVar = {
        "people": "address TEXT PRIMARY KEY, name TEXT NOT NULL",
        "rooms": "name TEXT PRIMARY KEY, seats INTEGER NOT NULL CHECK (seats > 0)",
        "events": "id INTEGER PRIMARY KEY, title TEXT NOT NULL, start TEXT NOT NULL, end TEXT NOT NULL, "
        "room TEXT NOT NULL REFERENCES rooms, organizer TEXT NOT NULL REFERENCES people, CHECK (start < end)",
        "attendees": "event INTEGER NOT NULL REFERENCES events ON DELETE CASCADE, "
        "person TEXT NOT NULL REFERENCES people, PRIMARY KEY (event, person)",
    }
    TOOLS = (
        *("list_people", "list_rooms", "list_events", "search_events", "get_event"),
        *("create_event", "move_event", "cancel_event"),
    )

    def __init__(self, db: sqlite3.Connection, today: str) -> None:
        self._db, self._today = db, today

    def list_people(self) -> list[dict]:
        """Everybody who can be invited: address and name."""
        rows = self._db.execute("SELECT address, name FROM people ORDER BY address")
        return [{"address": a, "name": n} for a, n in rows]

    def list_rooms(self) -> list[dict]:
        """Every room and its number of seats."""
        return [{"room": n, "seats": s} for n, s in self._db.execute("SELECT name, seats FROM rooms ORDER BY name")]

    def list_events(
        self,
        first_day: Annotated[str, "YYYY-MM-DD"],
        last_day: Annotated[str, "YYYY-MM-DD, included"],
        offset: Annotated[int, "leave out so many"] = 0,
    ) -> dict:
        """The events that begin in a range of days, by start; at most 40 at a time."""
        low, high = check.date(first_day, "first_day"), check.date(last_day, "last_day") + "T24"
        return self._page("start >= ? AND start < ?", (low, high), offset)

    def search_events(
        self, words: Annotated[str, "part of the title, in any case"], offset: Annotated[int, "leave out so many"] = 0
    ) -> dict:
        """The events whose title holds some text, by start; at most 40 at a time."""
        return self._page("instr(lower(title), lower(?))", (check.text(words, "words"),), offset)

    def get_event(self, event: Annotated[int, "its id"]) -> dict:
        """One event with its attendees."""
        row = self._row(event)
        people = self._db.execute("SELECT person FROM attendees WHERE event = ? ORDER BY person", (event,))
        return {**row, "attendees": [person for (person,) in people]}

    def create_event(
        self,
        title: str,
        start: Annotated[str, "YYYY-MM-DDTHH:MM"],
        end: Annotated[str, "YYYY-MM-DDTHH:MM"],
        room: str,
        organizer: Annotated[str, "address"],
        attendees: Annotated[list[str], "addresses; the organizer only if listed"],
    ) -> dict:
        """Make a new event."""
        start, end = check.moment(start, "start"), check.moment(end, "end")
        self._free(room, start, end)
        people = [self._person(person) for person in attendees]
        if len(set(people)) != len(people):
            raise ToolError("somebody is invited twice: name each attendee once")
        values = (check.text(title, "title"), start, end, room, self._person(organizer))
        made = self._db.execute(
            "INSERT INTO events (title, start, end, room, organizer) VALUES (?, ?, ?, ?, ?)", values
        ).lastrowid
        self._db.executemany("INSERT INTO attendees VALUES (?, ?)", [(made, person) for person in people])
        return {"id": made}

    def move_event(
        self,
        event: Annotated[int, "its id"],
        start: Annotated[str, "YYYY-MM-DDTHH:MM"],
        room: Annotated[str, "another room; leave out to keep it"] = "",
    ) -> dict:
        """Give an event another start; it stays as long as it was."""
        row, start = self._row(event), check.moment(start, "start")
        length = _parse(row["end"]) - _parse(row["start"])
        end = (_parse(start) + length).strftime("%Y-%m-%dT%H:%M")
        room = room or row["room"]
        self._free(room, start, end, but=event)
        self._db.execute("UPDATE events SET start = ?, end = ?, room = ? WHERE id = ?", (start, end, room, event))
        return {**row, "start": start, "end": end, "room": room}

    def cancel_event(self, event: Annotated[int, "its id"]) -> str:
        """Take an event out of the calendar."""
        title = self._row(event)["title"]
        self._db.execute("DELETE FROM events WHERE id = ?", (event,))
        return f"event {event} ({title}) is cancelled"

    def _page(self, where: str, values: tuple, offset: int) -> dict:
        if offset < 0:
            raise ToolError("offset must not be negative: call it again")
        rows = self._db.execute(
            f"SELECT id, title, start, end, room, organizer FROM events WHERE {where} ORDER BY start, id "
            f"LIMIT {_PAGE} OFFSET ?",
            (*values, offset),
        ).fetchall()
        (number,) = self._db.execute(f"SELECT count(*) FROM events WHERE {where}", values).fetchone()
        return {"events": [_event(row) for row in rows], "more": max(0, number - offset - len(rows))}

    def _row(self, event: int) -> dict[str, Any]:
        row = self._db.execute(
            "SELECT id, title, start, end, room, organizer FROM events WHERE id = ?", (event,)
        ).fetchone()
        if row is None:
            raise ToolError(f"there is no event {event}: find its id with search_events or list_events")
        return _event(row)

    def _person(self, person: str) -> str:
        person = check.address(person)
        if not self._db.execute("SELECT 1 FROM people WHERE address = ?", (person,)).fetchone():
            raise ToolError(f"nobody here has the address {person}: see list_people")
        return person

    def _free(self, room: str, start: str, end: str, but: int = 0) -> None:
        if start >= end:
            raise ToolError(f"an event cannot end at {end} when it starts at {start}: call it again")
        if not self._db.execute("SELECT 1 FROM rooms WHERE name = ?", (room,)).fetchone():
            raise ToolError(f"there is no room {room[:80]!r}: see list_rooms")
        other = self._db.execute(
            "SELECT id, title, start, end FROM events WHERE room = ? AND id != ? AND start < ? AND end > ? LIMIT 1",
            (room, but, end, start),
        ).fetchone()
        if other:
            raise ToolError(
                f"room {room} is taken by event {other[0]} ({other[1]}) from {other[2]} to {other[3]}: "
                "choose another time or room"
            )


def _parse(moment: str) -> datetime:
    return datetime.strptime(moment, "%Y-%m-%dT%H:%M")  # noqa: DTZ007 local times, all of one place


def _event(row: tuple) -> dict[str, Any]:
    return dict(zip(("id", "title", "start", "end", "room", "organizer"), row))
