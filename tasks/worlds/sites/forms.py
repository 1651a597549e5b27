"""Forms that are filled in and sent; what was sent can be looked at and withdrawn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ._fields import Fields, Refused, amount, day
from ._page import Again, App, e, hidden, option_list, page

__all__ = ["Forms"]

_EMAIL = re.compile(r"[^@\s]{1,60}@[^@\s]{1,60}\.[a-z]{2,10}")


class Forms(App):
    """``forms`` of the start: ``id``, ``title``, ``lead`` and ``fields``, each with ``id``, ``label``, ``kind`` (text,
    email, day, amount, lines, select, radio, check, checks), and where it applies ``options``, ``required``, ``help``.
    """

    TABLES: ClassVar = {
        "entries": "id INTEGER PRIMARY KEY, form TEXT NOT NULL",
        "answers": "entry INTEGER NOT NULL REFERENCES entries, field TEXT NOT NULL, value TEXT NOT NULL, "
        "PRIMARY KEY (entry, field)",
    }
    PART_OF: ClassVar = {"answers": ["entry", "entries"]}
    PAGES: ClassVar = {"/": "index", "/form": "form", "/entry": "entry"}
    ACTIONS: ClassVar = {"/send": "send", "/withdraw": "withdraw"}

    def _page(self, title: str, body: str, here: str = "", notice: str = "") -> str:
        nav = [("nav-forms", "/", "Forms")]
        return page(title, body, brand="Staff portal", nav=nav, here=here, notice=notice)

    def _form(self, fields: Fields) -> Mapping[str, Any]:
        """The form that the field ``form`` names."""
        forms = {form["id"]: form for form in self.start["forms"]}
        return forms[fields.choice("form", forms)]

    # -- pages

    def index(self, query: Fields) -> str:
        """All forms, and what was sent."""
        notice = self.note(query, {"withdrawn": "The form was withdrawn."})
        links = "".join(
            f'<tr><td><a id="open-{e(form["id"])}" href="/form?form={e(form["id"])}">{e(form["title"])}</a></td>'
            f'<td class="quiet">{e(form["lead"])}</td></tr>'
            for form in self.start["forms"]
        )
        titles = {form["id"]: form["title"] for form in self.start["forms"]}
        sent = "".join(
            f'<tr><td><a id="entry-{row["id"]}" href="/entry?id={row["id"]}">No. {row["id"]}</a></td>'
            f"<td>{e(titles.get(row['form'], row['form']))}</td></tr>"
            for row in self.rows("SELECT id, form FROM entries ORDER BY id DESC LIMIT 10")
        )
        sent = sent or '<tr><td class="quiet">Nothing yet.</td></tr>'
        body = f"<h1>Forms</h1><table>{links}</table><br><h2>Sent</h2><table>{sent}</table>"
        return self._page("Forms", body, "nav-forms", notice)

    def form(self, query: Fields) -> str:
        """One form, empty."""
        form = self._form(query)
        return self._filled(form, {field["id"]: [] for field in form["fields"]}, {})

    def _filled(self, form: Mapping[str, Any], values: Mapping[str, list[str]], wrong: Mapping[str, str]) -> str:
        rows = []
        for field in form["fields"]:
            star = " *" if field.get("required") else ""
            problem = wrong.get(field["id"])
            told = f'<div class="wrong" id="wrong-{field["id"]}">{e(problem)}</div>' if problem else ""
            rows.append(
                f'<label class="name" for="{field["id"]}">{e(field["label"])}{star}</label>'
                f"<div>{_control(field, values[field['id']])}{told}</div>"
            )
        told = '<p class="problem" id="problem">Nothing was sent yet: see what is marked below.</p>' if wrong else ""
        body = (
            f'<h1>{e(form["title"])}</h1><div class="panel"><p class="quiet">{e(form["lead"])} Fields with * must be '
            f'filled in.</p>{told}<form method="post" action="/send" autocomplete="off" novalidate>'
            f'{hidden(form=form["id"])}<div class="fields">{"".join(rows)}</div>'
            '<div class="buttons"><button class="main" id="send">Send</button>'
            '<a class="button" id="cancel" href="/">Cancel</a></div></form></div>'
        )
        return self._page(form["title"], body)

    def entry(self, query: Fields) -> str:
        """What was sent."""
        entry = self.row("form", "SELECT id, form FROM entries WHERE id = ?", query.number("id"))
        form = next((form for form in self.start["forms"] if form["id"] == entry["form"]), None)
        if form is None:
            raise Refused("There is no such form.", 404)
        values = dict(self.rows("SELECT field, value FROM answers WHERE entry = ?", entry["id"]))
        rows = "".join(
            f"<tr><th>{e(field['label'])}</th><td>{e(values[field['id']]) or '-'}</td></tr>"
            for field in form["fields"]
            if field["id"] in values
        )
        body = (
            f'<h1>{e(form["title"])}</h1><p id="number">Number {entry["id"]}</p><table>{rows}</table>'
            f'<form method="post" action="/withdraw"><div class="buttons">{hidden(id=entry["id"])}'
            '<a class="button" id="back" href="/">All forms</a>'
            '<button class="danger" id="withdraw">Withdraw</button></div></form>'
        )
        return self._page(form["title"], body, notice=self.note(query, {"sent": "Thank you: the form was sent."}))

    # -- what they do

    def send(self, fields: Fields) -> str:
        """Keep a form that is filled in rightly."""
        form = self._form(fields)
        given: dict[str, list[str]] = {}
        kept: dict[str, str] = {}
        wrong: dict[str, str] = {}
        for field in form["fields"]:
            name, options = field["id"], field.get("options", ())
            if field["kind"] in ("radio", "check", "checks"):
                given[name] = fields.many(name)
                allowed = options or ["yes"]
                few = field["kind"] != "checks"
                if not set(given[name]) <= set(allowed) or len(given[name]) > (1 if few else len(allowed)):
                    raise Refused(f"The field {name} has a value that is not offered.")
                kept[name] = ", ".join(option for option in allowed if option in given[name])
                if field["kind"] == "check":
                    kept[name] = kept[name] or "no"
            elif field["kind"] == "select":
                kept[name] = fields.choice(name, ["", *options])
                given[name] = [kept[name]]
            else:
                lines = field["kind"] == "lines"
                kept[name] = fields.text(name, 1000 if lines else 200, lines=lines)
                given[name] = [kept[name]]
                if kept[name] and (problem := _problem(field["kind"], kept[name])):
                    wrong[name] = problem
                elif field["kind"] == "amount" and kept[name]:
                    kept[name] = amount(kept[name]) or ""
            if field.get("required") and kept[name] in ("", *(["no"] if field["kind"] == "check" else [])):
                wrong[name] = "This is needed."
        if wrong:
            raise Again(self._filled(form, given, wrong))
        number = self.change("INSERT INTO entries (form) VALUES (?)", form["id"])
        for name, value in kept.items():
            self.change("INSERT INTO answers VALUES (?, ?, ?)", number, name, value)
        return f"/entry?id={number}&note=sent"

    def withdraw(self, fields: Fields) -> str:
        """Take a form back."""
        entry = self.row("form", "SELECT id FROM entries WHERE id = ?", fields.number("id"))
        self.change("DELETE FROM answers WHERE entry = ?", entry["id"])
        self.change("DELETE FROM entries WHERE id = ?", entry["id"])
        return "/?note=withdrawn"


def _problem(kind: str, value: str) -> str:
    """Why ``value`` is not right, or nothing."""
    if kind == "email" and not _EMAIL.fullmatch(value):
        return "This is no e-mail address."
    if kind == "day" and not day(value):
        return "Write the day as YYYY-MM-DD."
    if kind == "amount" and amount(value) is None:
        return "Write an amount such as 12.50."
    return ""


def _control(field: Mapping[str, Any], values: list[str]) -> str:
    name, kind = field["id"], field["kind"]
    value = values[0] if values else ""
    about = f' <span class="quiet small">{e(field["help"])}</span>' if field.get("help") else ""
    if kind == "select":
        options = {"": "Please choose", **{option: option for option in field["options"]}}
        return f'<select id="{name}" name="{name}">{option_list(options, value)}</select>{about}'
    if kind == "lines":
        return f'<textarea id="{name}" name="{name}" rows="3">{e(value)}</textarea>{about}'
    if kind == "check":
        checked = " checked" if value else ""
        return f'<input type="checkbox" id="{name}" name="{name}" value="yes"{checked}>{about}'
    if kind in ("radio", "checks"):
        shown = "".join(
            f'<label><input type="{"radio" if kind == "radio" else "checkbox"}" id="{name}-{e(_slug(option))}" '
            f'name="{name}" value="{e(option)}"{" checked" if option in values else ""}>{e(option)}</label>'
            for option in field["options"]
        )
        return f'<div class="choices" id="{name}">{shown}</div>{about}'
    return f'<input type="text" id="{name}" name="{name}" value="{e(value)}">{about}'


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())
