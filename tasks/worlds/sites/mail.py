"""A mailbox: folders, mails that are read, answered, moved, starred and deleted."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode

from ._fields import Fields
from ._page import Again, App, e, hidden, option_list, page

__all__ = ["Mail"]

_EMAIL = re.compile(r"[a-zA-Z0-9._+-]{1,60}@[a-zA-Z0-9.-]{1,60}\.[a-z]{2,10}")
_FIXED = {"inbox": "Inbox", "archive": "Archive", "sent": "Sent", "trash": "Trash"}
_PAGE = 10
_NOTES = {
    "moved": "The mail was moved.",
    "trash": "The mail is in the trash.",
    "gone": "The mail was deleted for good.",
    "sent": "The mail was sent.",
}


class Mail(App):
    """``owner`` of the start: the address of whose mailbox it is; ``folders``: id -> name of further folders;
    ``unread``: numbers of mails. Which of them were opened is nowhere kept: to look at a mail changes nothing."""

    TABLES: ClassVar = {
        "mails": "id INTEGER PRIMARY KEY, folder TEXT NOT NULL, sender TEXT NOT NULL, recipient TEXT NOT NULL, "
        "day TEXT NOT NULL, subject TEXT NOT NULL, body TEXT NOT NULL, starred INTEGER NOT NULL, reply_to INTEGER",
    }
    PAGES: ClassVar = {"/": "folder", "/read": "read", "/compose": "compose"}
    ACTIONS: ClassVar = {"/send": "send", "/move": "move", "/star": "star", "/delete": "delete"}

    def __init__(self, db: sqlite3.Connection, start: Mapping[str, Any]) -> None:
        super().__init__(db, start)
        self._unread = set(start["unread"])
        self._folders = {"inbox": "Inbox", **start["folders"], **_FIXED}

    def _page(self, title: str, body: str, here: str = "", notice: str = "") -> str:
        nav = [("compose", "/compose", "Write")]
        counts = dict(self.rows("SELECT folder, count(*) FROM mails GROUP BY folder"))
        links = "".join(
            f'<a id="folder-{e(i)}" href="/?folder={e(i)}"{" class=here" if i == here else ""}>{e(name)} '
            f'<span class="quiet">{counts.get(i, 0)}</span></a>'
            for i, name in self._folders.items()
        )
        body = f'<div class="sides"><div class="side">{links}</div><div>{body}</div></div>'
        brand = f"Mail of {self.start['owner']}"
        return page(title, body, brand=brand, nav=nav, notice=notice)

    def _mail(self, number: int) -> Any:
        return self.row("mail", "SELECT * FROM mails WHERE id = ?", number)

    # -- pages

    def folder(self, query: Fields) -> str:
        """The mails of a folder, or those that have some words, latest first."""
        notice = self.note(query, _NOTES)
        folder = query.choice("folder", self._folders) if query.has("folder") else "inbox"
        words = query.text("words", 60) if query.has("words") else ""
        number = query.number("page", 1, 1000) if query.has("page") else 1
        where, values = "folder = ?", [folder]
        if words:
            where = "instr(lower(sender || char(10) || recipient || char(10) || subject || char(10) || body), lower(?))"
            values = [words]
        ((count,),) = self.rows(f"SELECT count(*) FROM mails WHERE {where}", *values)
        pages = max(1, -(-count // _PAGE))
        number = min(number, pages)
        found = self.rows(
            f"SELECT * FROM mails WHERE {where} ORDER BY day DESC, id DESC LIMIT {_PAGE} OFFSET ?",
            *values,
            (number - 1) * _PAGE,
        )
        here = {"folder": folder, **({"words": words} if words else {})}
        rows = "".join(self._row(row, {**here, "page": number}, bool(words)) for row in found)
        rows = rows or '<tr><td class="quiet" id="none">No mails.</td></tr>'
        before, after = (f"/?{urlencode({**here, 'page': number + step})}" for step in (-1, 1))
        title = f"Mails with {words}" if words else self._folders[folder]
        body = (
            f'<div class="row between"><h1>{e(title)}</h1><form class="row" method="get" action="/" autocomplete="off">'
            f'<input type="text" id="words" name="words" value="{e(words)}" aria-label="Search all folders">'
            f'<button id="search">Search</button></form></div><table class="mails">{rows}</table>'
            '<div class="row between pager"><div class="row">'
            f'<a class="button{"" if number > 1 else " off"}" id="previous" href="{e(before)}">Later</a>'
            f'<a class="button{"" if number < pages else " off"}" id="next" href="{e(after)}">Earlier</a></div>'
            f'<span class="quiet" id="count">{count} mails, page {number} of {pages}</span></div>'
        )
        return self._page(title, body, "" if words else folder, notice)

    def _row(self, row: Mapping[str, Any], here: Mapping[str, Any], everywhere: bool) -> str:
        kind = ' class="unread"' if row["id"] in self._unread else ""
        other = f"To: {row['recipient']}" if row["folder"] == "sent" else row["sender"]
        place = f'<td class="quiet">{e(self._folders[row["folder"]])}</td>' if everywhere else ""
        fields = {f"view_{name}": value for name, value in {"words": "", **here}.items()}
        mark = "&#9733;" if row["starred"] else "&#9734;"
        return (
            f'<tr{kind}><td class="mark"><form method="post" action="/star">{hidden(id=row["id"], **fields)}'
            f'<button class="star" id="star-{row["id"]}" title="Star">{mark}</button></form></td><td>{e(other)}</td>'
            f'<td><a id="mail-{row["id"]}" href="/read?id={row["id"]}">{e(row["subject"]) or "(no subject)"}</a></td>'
            f'{place}<td class="quiet day">{e(row["day"])}</td></tr>'
        )

    def read(self, query: Fields) -> str:
        """One mail."""
        row = self._mail(query.number("id"))
        self._unread.discard(row["id"])
        number = hidden(id=row["id"])
        folders = {i: name for i, name in self._folders.items() if i not in ("sent", row["folder"])}
        text = "".join(f"<p>{e(line)}</p>" for line in row["body"].split("\n"))
        star = "&#9733; Starred" if row["starred"] else "&#9734; Star"
        body = (
            f'<h1>{e(row["subject"]) or "(no subject)"}</h1><div class="panel"><p><b>{e(row["sender"])}</b> '
            f'<span class="quiet">to {e(row["recipient"])}, {e(row["day"])}</span></p>{text}</div>'
            f'<div class="row buttons"><a class="button go" id="reply" href="/compose?reply={row["id"]}">Reply</a>'
            f'<form method="post" action="/star">{number}<button id="star">{star}</button></form>'
            f'<form class="row" method="post" action="/move">{number}<select id="folder" name="folder" '
            f'aria-label="Folder">{option_list(folders, "")}</select><button id="move">Move</button></form>'
            f'<form method="post" action="/delete">{number}<button class="danger" id="delete">Delete</button></form>'
            "</div>"
        )
        return self._page(row["subject"], body, row["folder"])

    def compose(self, query: Fields) -> str:
        """A mail to be written, perhaps an answer."""
        if not query.has("reply"):
            return self._written({"to": "", "subject": "", "body": ""}, None)
        row = self._mail(query.number("reply"))
        subject = row["subject"] if row["subject"].startswith("Re: ") else f"Re: {row['subject']}"
        return self._written({"to": row["sender"], "subject": subject, "body": ""}, row)

    def _written(self, values: Mapping[str, str], to: Mapping[str, Any] | None, wrong: str = "") -> str:
        told = f'<p class="problem" id="problem">{e(wrong)}</p>' if wrong else ""
        quote = ""
        if to is not None:
            lines = "".join(f"<p>{e(line)}</p>" for line in to["body"].split("\n"))
            quote = f'<br><div class="quote quiet"><p>{e(to["sender"])} wrote:</p>{lines}</div>'
        back = f"/read?id={to['id']}" if to is not None else "/"
        body = (
            f'<h1>{"Reply" if to is not None else "New mail"}</h1>{told}<div class="panel">'
            f'<form method="post" action="/send" autocomplete="off">{hidden(reply=to["id"] if to is not None else "")}'
            '<div class="fields mail"><label class="name" for="to">To</label>'
            f'<input type="text" id="to" name="to" value="{e(values["to"])}">'
            '<label class="name" for="subject">Subject</label>'
            f'<input type="text" id="subject" name="subject" value="{e(values["subject"])}">'
            '<label class="name" for="body">Text</label>'
            f'<textarea id="body" name="body" rows="6">{e(values["body"])}</textarea></div><div class="buttons">'
            f'<button class="main" id="send">Send</button><a class="button" id="cancel" href="{back}">Discard</a></div>'
            f"</form></div>{quote}"
        )
        return self._page("Write", body)

    # -- what they do

    def send(self, fields: Fields) -> str:
        """Send a mail: it is then in ``sent``."""
        reply = fields.maybe("reply")
        to = None if reply is None else self._mail(reply)
        values = {"to": fields.text("to", 300), "subject": fields.text("subject")}
        values["body"] = fields.text("body", 4000, lines=True)
        people = [one.strip() for one in values["to"].replace(";", ",").split(",") if one.strip()]
        if not people or not all(map(_EMAIL.fullmatch, people)):
            raise Again(self._written(values, to, "Write to one e-mail address or more, with commas between them."))
        if not values["body"]:
            raise Again(self._written(values, to, "The mail has no text."))
        self.change(
            "INSERT INTO mails (folder, sender, recipient, day, subject, body, starred, reply_to) "
            "VALUES ('sent', ?, ?, ?, ?, ?, 0, ?)",
            *(self.start["owner"], ", ".join(people), self.today, values["subject"], values["body"]),
            to["id"] if to is not None else None,
        )
        return "/?note=sent"

    def move(self, fields: Fields) -> str:
        """Put a mail into another folder; nothing but what is written gets into ``sent``."""
        row = self._mail(fields.number("id"))
        folder = fields.choice("folder", [i for i in self._folders if i not in ("sent", row["folder"])])
        self.change("UPDATE mails SET folder = ? WHERE id = ?", folder, row["id"])
        return f"/?folder={row['folder']}&note=moved"

    def star(self, fields: Fields) -> str:
        """Star a mail, or take its star away."""
        row = self._mail(fields.number("id"))
        to = f"/read?id={row['id']}"
        if fields.has("view_folder"):
            view = {
                "folder": fields.choice("view_folder", self._folders),
                "words": fields.text("view_words", 60),
                "page": fields.number("view_page", 1, 1000),
            }
            to = f"/?{urlencode({name: value for name, value in view.items() if value})}"
        self.change("UPDATE mails SET starred = 1 - starred WHERE id = ?", row["id"])
        return to

    def delete(self, fields: Fields) -> str:
        """Put a mail into the trash; from there, delete it for good."""
        row = self._mail(fields.number("id"))
        if row["folder"] == "trash":
            self.change("DELETE FROM mails WHERE id = ?", row["id"])
        else:
            self.change("UPDATE mails SET folder = 'trash' WHERE id = ?", row["id"])
        return f"/?folder={row['folder']}&note={'gone' if row['folder'] == 'trash' else 'trash'}"
