"""Family ``desk``: mails that ask for changes in the calendar, and their answers."""

from __future__ import annotations

import random
from functools import partial

from clawgym.tasks.packs.seeded import Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TODAY, ToolCallDraft, call
from ._start import ME, Office, after, day, mailbox, people

DESK: dict[str, Generator[ToolCallDraft]] = {}
generator = partial(_generator, family="desk", into=DESK)

_PARTS = ("calendar", "mail")


def _office(rng: random.Random, group: list[tuple[str, str]], events: int) -> Office:
    office = Office(rng, [("Me", ME), *group])
    for k in range(events):
        office.anything(1 + k % 10)
    return office


def _start(office: Office, box: dict) -> dict:
    return {**office.start(), **{table: rows for table, rows in box.items() if table != "numbers"}}


@generator("desk-invite", level=1)
def desk_invite(rng: random.Random) -> ToolCallDraft:
    """Book the event that a mail proposes."""
    group = people(rng, 6)
    office = _office(rng, group, 14)
    (name, sender), (guest, guest_at) = group[2], group[3]
    title, minutes = office.title(), rng.choice((30, 45, 60))
    while True:
        room, start = rng.choice(list(office.rooms)), f"{day(rng.randint(2, 9))}T{rng.randint(9, 16):02d}:00"
        if office.free(room, start, after(start, minutes + 60)):
            break
    earlier = f"{day(11)}{start[10:]}"
    letter = "Shall we meet on {} at {} for {} minutes, in the room {}? Please call it {} and invite {} and me."
    mails = [
        (sender, "archive", 6, title, letter.format(earlier[:10], start[11:], minutes, room, title, guest)),
        (
            sender,
            "inbox",
            1,
            title,
            "New proposal. " + letter.format(start[:10], start[11:], minutes, room, title, guest),
        ),
    ]
    box = mailbox(rng, group, mails)
    new = {"title": title, "start": start, "end": after(start, minutes), "room": room, "organizer": ME}
    guests = [sender, guest_at]
    book = call("create_event", **new, attendees=guests)
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}, and I am {ME}. {name} has written to me about a meeting called {title}. Book it as "
            "the mail in my inbox proposes, with me as the organizer and the people it names (the writer too) as the "
            "invited, and archive that mail."
        ),
        parts=_PARTS,
        start=_start(office, box),
        calls=[
            call("search_mails", words=title),
            call("read_mail", mail=box["numbers"][1]),
            call("list_people"),
            book,
            call("archive_mail", mail=box["numbers"][1]),
        ],
        wrong={
            "the-old-proposal": (
                [
                    call("create_event", **{**new, "start": earlier, "end": after(earlier, minutes)}, attendees=guests),
                    call("archive_mail", mail=box["numbers"][1]),
                ],
                "",
            ),
            "forgets-the-writer": (
                [call("create_event", **new, attendees=[guest_at]), call("archive_mail", mail=box["numbers"][1])],
                "",
            ),
            "forgets-the-archive": ([book], ""),
            "answers-instead": ([call("reply_mail", mail=box["numbers"][1], body="Yes.")], ""),
        },
    )


@generator("desk-move", level=2)
def desk_move(rng: random.Random) -> ToolCallDraft:
    """Move an event as a mail asks, into another room if necessary, and answer the mail."""
    group = people(rng, 6)
    office = _office(rng, group, 12)
    name, sender = group[2]
    title = office.title()
    event = office.anything(rng.randint(2, 5), organizer=sender, title=title)
    other = office.anything(rng.randint(6, 8), organizer=group[3][1], title=title)
    room, spare = office.events[event]["room"], ""
    while spare in ("", room):
        spare = rng.choice(list(office.rooms))
    while True:
        to = f"{day(rng.randint(3, 10))}T{rng.randint(9, 16):02d}:30"
        if all(office.free(r, to, after(to, 90), but=event) for r in (room, spare)):
            break
    taken = rng.random() < 0.7
    if taken:
        office.add(office.title(), to, 30, room, group[4][1], [group[5][1]])
    mails = [
        (sender, "inbox", 2, f"{title}: another time", f"Please move our {title} to {to[:10]}, {to[11:]}. Thank you!"),
        (group[3][1], "inbox", 1, f"{title}: agenda", f"I will bring notes to the {title}."),
    ]
    box = mailbox(rng, group, mails)
    mail = box["numbers"][0]
    found = spare if taken else room

    def steps(event: int = event, place: str = found, to: str = to, reply: int = mail) -> list:
        body = f"Moved to {to[:10]} {to[11:]}, room {place}."
        move = {"event": event, "start": to, **({"room": place} if place != room else {})}
        return [call("move_event", **move), call("reply_mail", mail=reply, body=body)]

    later = f"{to[:11]}{int(to[11:13]) + 1:02d}:30"
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. {name} asks in a mail for another time for the event called {title} that this person "
            "organizes. Move it there, in the room where it is; only if that room is taken then, into the room "
            f"{spare}. Then reply to the mail with `Moved to YYYY-MM-DD HH:MM, room ROOM.`"
        ),
        parts=_PARTS,
        start=_start(office, box),
        calls=[
            call("search_mails", words=title),
            call("read_mail", mail=mail),
            call("search_events", words=title),
            call("list_events", first_day=to[:10], last_day=to[:10]),
            *steps(),
        ],
        wrong={
            "the-other-event": (steps(event=other), ""),
            "an-hour-later": (steps(to=later), ""),
            "replies-to-another-mail": (steps(reply=box["numbers"][1]), ""),
            "forgets-the-reply": (steps()[:1], ""),
            "replies-only": (steps()[1:], ""),
        },
    )


@generator("desk-absence", level=3)
def desk_absence(rng: random.Random) -> ToolCallDraft:
    """Cancel the events that an absent person organizes, and write to those who attend."""
    group = people(rng, 7)
    office = _office(rng, group[1:], 10)
    office.group.append(group[0])
    name, sender = group[0]
    first = rng.randint(2, 5)
    last = first + rng.randint(2, 4)
    others = [address for _, address in group[1:]]
    inside = [
        office.anything(offset, organizer=sender, attendees=rng.sample(others, rng.randint(1, 3)))
        for offset in sorted(rng.sample(range(first, last + 1), 3) if last - first >= 3 else [first, last, last])
    ]
    outside = office.anything(last + 1, organizer=sender, attendees=rng.sample(others, 2))
    invited = office.anything(first, organizer=others[2], attendees=[sender, others[3]])
    mails = [
        (sender, "inbox", 1, "Away", f"I shall be away from {day(first)} to {day(last)}, both included."),
        (group[1][1], "inbox", 3, "Away", f"I shall be away from {day(first - 1)} to {day(last + 2)}, both included."),
    ]
    box = mailbox(rng, group[1:], mails)
    box["contacts"] = sorted([address, who] for who, address in group)

    def steps(events: list[int]) -> list:
        calls = []
        for number in events:
            event = office.events[number]
            body = f"{event['title']} on {event['start'][:10]} is cancelled."
            calls += [
                call("cancel_event", event=number),
                call("send_mail", to=event["attendees"], subject=f"Cancelled: {event['title']}", body=body),
            ]
        return calls

    right = steps(inside)
    return ToolCallDraft(
        instruction=(
            f"Today is {TODAY}. {name} has written when this person will be away. Cancel every event of these days "
            f"that {name} organizes; events of others stay. For each cancelled event send one mail, to all that were "
            "invited to it and nobody else, with the subject `Cancelled: TITLE` and the body `TITLE on YYYY-MM-DD is "
            "cancelled.`"
        ),
        parts=_PARTS,
        start=_start(office, box),
        calls=[
            call("search_mails", words="Away"),
            *(call("read_mail", mail=number) for number in box["numbers"]),
            call("list_events", first_day=day(first), last_day=day(last)),
            *(call("get_event", event=number) for number in inside),
            *right,
        ],
        wrong={
            "forgets-the-mails": (right[::2], ""),
            "a-day-too-many": (steps([*inside, outside]), ""),
            "cancels-invitations-too": (steps([*inside, invited]), ""),
            "forgets-the-last-day": (right[:-2], ""),
        },
    )
