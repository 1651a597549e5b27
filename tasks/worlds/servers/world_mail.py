"""A mailbox: folders, labels, contacts."""

from __future__ import annotations

import sqlite3
from typing import Annotated, Any, ClassVar, Literal

from . import _text as check
from .clawgym_tools import ToolError

__all__ = ["Mail"]

_PAGE = 25


class Mail:
    """One person's mails. What is sent stays in ``sent``; nothing is ever deleted."""

    TABLES: ClassVar = {
        "contacts": "address TEXT PRIMARY KEY, name TEXT NOT NULL",
        "mails": "id INTEGER PRIMARY KEY, folder TEXT NOT NULL CHECK (folder IN ('inbox', 'archive', 'sent')), "
        "day TEXT NOT NULL, sender TEXT NOT NULL, subject TEXT NOT NULL, body TEXT NOT NULL, "
        "reply_to INTEGER REFERENCES mails",
        "recipients": "mail INTEGER NOT NULL REFERENCES mails, address TEXT NOT NULL, PRIMARY KEY (mail, address)",
        "labels": "mail INTEGER NOT NULL REFERENCES mails, label TEXT NOT NULL, PRIMARY KEY (mail, label)",
    }
    TOOLS = (
        *("list_contacts", "list_mails", "search_mails", "read_mail", "send_mail", "reply_mail"),
        *("label_mail", "unlabel_mail", "archive_mail"),
    )
    OWNER = "me@example.org"

    def __init__(self, db: sqlite3.Connection, today: str) -> None:
        self._db, self._today = db, today

    def list_contacts(self) -> list[dict]:
        """The address book: address and name."""
        rows = self._db.execute("SELECT address, name FROM contacts ORDER BY address")
        return [{"address": a, "name": n} for a, n in rows]

    def list_mails(
        self, folder: Literal["inbox", "archive", "sent"], offset: Annotated[int, "leave out so many"] = 0
    ) -> dict:
        """The mails of a folder without their bodies, newest first; at most 25 at a time."""
        return self._page("folder = ?", (folder,), offset)

    def search_mails(
        self,
        words: Annotated[str, "part of sender, subject, body or a label, in any case"],
        offset: Annotated[int, "leave out so many"] = 0,
    ) -> dict:
        """The mails of all folders that hold some text, newest first; at most 25 at a time."""
        where = (
            "instr(lower(sender || char(10) || subject || char(10) || body), lower(?)) "
            "OR id IN (SELECT mail FROM labels WHERE instr(lower(label), lower(?)))"
        )
        words = check.text(words, "words")
        return self._page(where, (words, words), offset)

    def read_mail(self, mail: Annotated[int, "its id"]) -> dict:
        """One mail, whole."""
        row = self._db.execute("SELECT id, folder, day, sender, subject, body FROM mails WHERE id = ?", (mail,))
        values = row.fetchone()
        if values is None:
            raise self._unknown(mail)
        found: dict[str, Any] = dict(zip(("id", "folder", "day", "sender", "subject", "body"), values))
        for key, column, table in (("to", "address", "recipients"), ("labels", "label", "labels")):
            rows = self._db.execute(f"SELECT {column} FROM {table} WHERE mail = ? ORDER BY 1", (mail,))
            found[key] = [value for (value,) in rows]
        return found

    def send_mail(
        self,
        to: Annotated[list[str], "addresses"],
        subject: str,
        body: str,
    ) -> dict:
        """Send a new mail."""
        return self._send(to, check.text(subject, "subject"), body, None)

    def reply_mail(self, mail: Annotated[int, "its id"], body: str) -> dict:
        """Answer a mail: to its sender, with `Re: ` before its subject."""
        row = self._db.execute("SELECT sender, subject FROM mails WHERE id = ?", (mail,)).fetchone()
        if row is None:
            raise self._unknown(mail)
        return self._send([row[0]], f"Re: {row[1]}", body, mail)

    def label_mail(self, mail: Annotated[int, "its id"], label: str) -> str:
        """Put a label on a mail."""
        self._known(mail)
        label = check.text(label, "label", 40)
        self._db.execute("INSERT OR IGNORE INTO labels VALUES (?, ?)", (mail, label))
        return f"mail {mail} has the label {label}"

    def unlabel_mail(self, mail: Annotated[int, "its id"], label: str) -> str:
        """Take a label off a mail."""
        self._known(mail)
        if not self._db.execute("DELETE FROM labels WHERE mail = ? AND label = ?", (mail, label)).rowcount:
            raise ToolError(f"mail {mail} has no label {label[:40]!r}: see read_mail")
        return f"mail {mail} has the label {label} no more"

    def archive_mail(self, mail: Annotated[int, "its id"]) -> str:
        """Move a mail from the inbox to the archive."""
        self._known(mail)
        if not self._db.execute(
            "UPDATE mails SET folder = 'archive' WHERE id = ? AND folder = 'inbox'", (mail,)
        ).rowcount:
            raise ToolError(f"mail {mail} is not in the inbox, so it cannot be archived: see read_mail")
        return f"mail {mail} is in the archive"

    def _send(self, to: list[str], subject: str, body: str, answers: object) -> dict:
        people = [check.address(address) for address in to]
        if not people or len(set(people)) != len(people) or len(people) > 50:
            raise ToolError("a mail goes to 1 to 50 different addresses: call it again")
        values = (self._today, self.OWNER, subject, check.text(body, "body", 20_000), answers)
        made = self._db.execute(
            "INSERT INTO mails (folder, day, sender, subject, body, reply_to) VALUES ('sent', ?, ?, ?, ?, ?)", values
        ).lastrowid
        self._db.executemany("INSERT INTO recipients VALUES (?, ?)", [(made, address) for address in people])
        return {"id": made}

    def _page(self, where: str, values: tuple, offset: int) -> dict:
        if offset < 0:
            raise ToolError("offset must not be negative: call it again")
        rows = self._db.execute(
            f"SELECT id, folder, day, sender, subject FROM mails WHERE {where} ORDER BY day DESC, id DESC "
            f"LIMIT {_PAGE} OFFSET ?",
            (*values, offset),
        ).fetchall()
        (number,) = self._db.execute(f"SELECT count(*) FROM mails WHERE {where}", values).fetchone()
        mails = [dict(zip(("id", "folder", "day", "sender", "subject"), row)) for row in rows]
        return {"mails": mails, "more": max(0, number - offset - len(rows))}

    def _known(self, mail: int) -> None:
        if not self._db.execute("SELECT 1 FROM mails WHERE id = ?", (mail,)).fetchone():
            raise self._unknown(mail)

    def _unknown(self, mail: int) -> ToolError:
        return ToolError(f"there is no mail {mail}: find its id with list_mails or search_mails")
