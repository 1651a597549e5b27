"""Family ``mail``: a mailbox to read, to answer, to tidy up."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TODAY, Action, GuiDraft, choose, click, day, fill, refill, written

MAIL: dict[str, Generator[GuiDraft]] = {}
generator = partial(_generator, family="mail", into=MAIL)

_ME = "me@example.org"
_TOPICS = ("invoice", "meeting", "offer", "delivery", "contract", "visit", "report", "plan")
_ID, _FOLDER, _SENDER, _RECIPIENT, _DAY, _SUBJECT, _BODY, _STARRED, _REPLY = range(9)
_ANSWERS = ("I agree", "That suits me", "I will be there", "Please wait", "This is not for me", "I have sent it")

Row = list[Any]


class _Box:
    """A mailbox with mails of six people in the inbox and in two further folders; no two subjects are the same."""

    def __init__(self, rng: random.Random, number: int = 16) -> None:
        self.rng = rng
        names = zip(rng.sample(FIRST, 7), rng.sample(WORDS, 7), strict=True)
        self.people = [f"{first.lower()}.{last}@example.org" for first, last in names]
        self.folders = {word: word.title() for word in rng.sample(WORDS, 2)}
        self._topics = iter(rng.sample([(w, t) for w in WORDS for t in _TOPICS], 120))
        self._ids = iter(rng.sample(range(101, 999), 120))
        self.mails: list[Row] = []
        for _ in range(number):
            self.add(rng.choice(self.people[:6]), rng.choice(["inbox"] * 6 + ["archive", *self.folders]))

    def subject(self) -> str:
        """One that no other mail has."""
        word, topic = next(self._topics)
        return f"{word.title()} {topic}"

    def add(self, sender: str, folder: str = "inbox", ago: int = 0, body: str = "", subject: str = "") -> Row:
        """One more mail, ``ago`` days old."""
        word = self.rng.choice(WORDS)
        text = body or f"Hello,\nthis is about the {word}. More of it soon.\nBest wishes"
        when = day(-(ago or self.rng.randint(1, 60)))
        self.mails.append([next(self._ids), folder, sender, _ME, when, subject or self.subject(), text, 0, None])
        return self.mails[-1]

    def inbox(self) -> list[Row]:
        """As it is shown: the latest first."""
        mine = [row for row in self.mails if row[_FOLDER] == "inbox"]
        return sorted(mine, key=lambda row: (row[_DAY], row[_ID]), reverse=True)

    def draft(self, end: list[Row] | None, **rest: Any) -> GuiDraft:
        unread = sorted(row[_ID] for row in self.mails if row[_ID] % 3 == 0)
        start = {"owner": _ME, "folders": self.folders, "unread": unread}
        tables = {"mails": self.mails}
        return GuiDraft(app="mail", start=start, tables=tables, end=None if end is None else {"mails": end}, **rest)

    def with_sent(self, to: str, subject: str, body: str, reply: int | None = None) -> list[Row]:
        return [*self.mails, [9999, "sent", _ME, to, TODAY, subject, body, 0, reply]]

    def with_(self, column: int, value: Any, *changed: Row) -> list[Row]:
        return [[*row[:column], value, *row[column + 1 :]] if row in changed else row for row in self.mails]


def _find(words: str) -> list[Action]:
    return [*refill("#words", words), *click("#search")]


def _open(row: Row) -> list[Action]:
    """Search for a mail by its subject, and read it."""
    return [*_find(row[_SUBJECT]), *click(f"#mail-{row[_ID]}")]


def _answer(text: str, send: bool = True) -> list[Action]:
    return [*click("#reply"), *fill("#body", text), *click("#send" if send else "#cancel")]


def _move(row: Row, name: str) -> list[Action]:
    return [*click(f"#mail-{row[_ID]}"), *choose("#folder", name), *click("#move")]


@generator("mail-star", level=1)
def mail_star(rng: random.Random) -> GuiDraft:
    """Star one mail."""
    box = _Box(rng)
    row, near = rng.sample(box.inbox(), 2)
    return box.draft(
        box.with_(_STARRED, 1, row),
        instruction=f'Star the mail "{row[_SUBJECT]}" from {row[_SENDER]}.',
        calls=[*_open(row), *click("#star")],
        wrong={
            "another-mail": [*_open(near), *click("#star")],
            "stars-it-twice": [*_open(row), *click("#star", "#star")],
            "reads-it-only": _open(row),
        },
    )


@generator("mail-write", level=1)
def mail_write(rng: random.Random) -> GuiDraft:
    """Write a mail."""
    box = _Box(rng)
    to, cc = rng.sample(box.people, 2)
    subject, body = box.subject(), " ".join(rng.sample(WORDS, 4))

    def write(to: str = to, subject: str = subject, last: str = "#send") -> list[Action]:
        return [*click("#compose"), *fill("#to", to), *fill("#subject", subject), *fill("#body", body), *click(last)]

    return box.draft(
        box.with_sent(to, subject, body),
        instruction=f'Write a mail to {to} with the subject "{subject}" and the text "{body}", and send it.',
        calls=write(),
        wrong={
            "does-not-send": write(last="#cancel"),
            "to-another": write(cc),
            "no-subject": [*click("#compose"), *fill("#to", to), *fill("#body", body), *click("#send")],
            "twice": [*write(), *write()],
        },
    )


@generator("mail-reply", level=2)
def mail_reply(rng: random.Random) -> GuiDraft:
    """Answer one mail."""
    return _reply(rng, there=True)


@generator("mail-reply-gone", level=2)
def mail_reply_gone(rng: random.Random) -> GuiDraft:
    """Answer a mail that nobody sent; infeasible."""
    return _reply(rng, there=False)


def _reply(rng: random.Random, there: bool) -> GuiDraft:
    box = _Box(rng, 18 if there else 19)
    row = rng.choice(box.inbox())
    near = box.add(row[_SENDER])
    if not there:
        box.mails.remove(row)
    body = f"{rng.choice(_ANSWERS)}, {' '.join(rng.sample(WORDS, 2))}."
    subject = f"Re: {row[_SUBJECT]}"
    instruction = f'Reply to the mail "{row[_SUBJECT]}" from {row[_SENDER]}: "{body}"'
    fresh = [*click("#compose"), *fill("#to", row[_SENDER]), *fill("#subject", subject), *fill("#body", body)]
    wrong = {
        "another-mail-of-the-same": [*_open(near), *_answer(body)],
        "a-new-mail": [*fresh, *click("#send")],
    }
    if not there:
        return box.draft(
            None,
            instruction=instruction,
            calls=_find(row[_SUBJECT]),
            wrong=wrong,
            why=f'There is no mail "{row[_SUBJECT]}".',
        )
    return box.draft(
        box.with_sent(row[_SENDER], subject, body, row[_ID]),
        instruction=instruction,
        calls=[*_open(row), *_answer(body)],
        wrong={**wrong, "discards": [*_open(row), *_answer(body, send=False)]},
    )


@generator("mail-file", level=2)
def mail_file(rng: random.Random) -> GuiDraft:
    """Move all mails of one person from the inbox to a folder."""
    while True:
        box = _Box(rng)
        who = rng.choice(box.people[:6])
        mine = [row for row in box.inbox() if row[_SENDER] == who]
        if len(mine) == 2:
            break
    folder, other = rng.sample(sorted(box.folders), 2)
    kept = box.add(who, "archive")

    def steps(rows: list[Row], name: str = folder) -> list[Action]:
        # A move ends in the inbox.
        return [call for row in rows for call in [*_find(row[_SUBJECT]), *_move(row, box.folders[name])]]

    return box.draft(
        box.with_(_FOLDER, folder, *mine),
        instruction=(
            f"Move all mails from {who} that are in the inbox to the folder {box.folders[folder]}. Those in other "
            "folders stay there."
        ),
        calls=steps(mine),
        wrong={
            "one-is-left": steps(mine[:-1]),
            "another-folder": steps(mine, other),
            "from-the-archive-too": steps([*mine, kept]),
        },
    )


@generator("mail-clean", level=3)
def mail_clean(rng: random.Random) -> GuiDraft:
    """Delete the old mails of a kind, and star the one that is kept."""
    box = _Box(rng, 12)
    word, sender = rng.choice(WORDS).title(), box.people[6]
    limit = rng.randint(12, 40)
    ages = [limit - rng.randint(2, 8), *(limit + more for more in rng.sample(range(1, 21), 3))]
    new, *old = (box.add(sender, ago=ago, subject=f"{word} news {500 - ago}") for ago in ages)
    near = box.add(box.people[0], ago=limit + 3, subject=f"About {word} news")
    seek = _find(f"{word} news")

    def delete(rows: list[Row]) -> list[Action]:
        return [call for row in rows for call in [*seek, *click(f"#mail-{row[_ID]}", "#delete")]]

    star = [*seek, *click(f"#star-{new[_ID]}")]
    starred = [*new[:_STARRED], 1, *new[_STARRED + 1 :]]
    end = [starred if row is new else row for row in box.with_(_FOLDER, "trash", *old)]
    return box.draft(
        end,
        instruction=(
            f'Put every "{word} news" mail that {sender} sent before {written(day(-limit))} into the trash, and star '
            "the one that came later. Leave all other mails alone."
        ),
        calls=[*delete(old), *star],
        wrong={
            "one-is-left": [*delete(old[:-1]), *star],
            "deletes-the-later-one": [*delete(old), *seek, *click(f"#mail-{new[_ID]}", "#delete")],
            "one-of-somebody-else": [*delete(old), *star, *delete([near])],
            "no-star": delete(old),
        },
    )


@generator("mail-pass-on", level=3)
def mail_pass_on(rng: random.Random) -> GuiDraft:
    """Find a code in one mail, and answer another with it."""
    box = _Box(rng, 12)
    asker, knower, third = box.people[:3]
    place = rng.choice(WORDS)
    code, old, other = (f"{rng.choice(WORDS)}-{rng.randint(1000, 9999)}" for _ in range(3))
    question = f"Hello,\nwhat is the code of the {place} room? {knower} must have told you.\nThanks"
    asked = box.add(asker, ago=1, body=question)
    said = f"Hello,\nthe code of the {place} room is now {code}; {old} is no longer valid.\nBest wishes"
    box.add(knower, "archive", ago=rng.randint(3, 20), body=said)
    box.add(knower, "archive", ago=rng.randint(30, 60), body=f"Hello,\nthe code of the {place} room is {old}.")
    box.add(third, ago=rng.randint(3, 20), body=f"Hello,\nthe code of the {rng.choice(WORDS)} store is {other}.")
    box.rng.shuffle(box.mails)
    way = _open(asked)
    subject = f"Re: {asked[_SUBJECT]}"
    look = [*_find(f"code of the {place}")]
    fresh = [*click("#compose"), *fill("#to", asker), *refill("#subject", asked[_SUBJECT]), *fill("#body", code)]
    return box.draft(
        box.with_sent(asker, subject, code, asked[_ID]),
        instruction=(
            f"{asker} asked for a code in a mail of yesterday. {knower} once told it to us by mail. Reply to the "
            "question with the code that is valid, and with nothing else in the text."
        ),
        calls=[*look, *way, *_answer(code)],
        wrong={
            "the-old-code": [*way, *_answer(old)],
            "with-more-words": [*way, *_answer(f"The code is {code}")],
            "a-new-mail": [*fresh, *click("#send")],
            "another-code": [*way, *_answer(other)],
        },
    )
