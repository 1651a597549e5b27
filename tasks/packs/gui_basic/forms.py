"""Family ``forms``: forms to fill in and send."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import date
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import TODAY, Action, GuiDraft, choose, click, day, fill, written

FORMS: dict[str, Generator[GuiDraft]] = {}
generator = partial(_generator, family="forms", into=FORMS)

_MEALS = ("Anything", "Vegetarian", "Vegan", "Halal", "Kosher")
_NEEDS = ("Hotel", "Rental car", "Insurance", "Visa")
_PAID = ("Cash", "Own card", "Company card")
_KINDS = ("Taxi", "Train", "Hotel", "Meals", "Supplies", "Books")
_CITIES = ("Lisbon", "Vienna", "Oslo", "Krakow", "Turin", "Ghent", "Riga", "Malaga")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _field(id: str, label: str, kind: str = "text", *options: str, required: bool = True, help: str = "") -> dict:
    field: dict[str, Any] = {"id": id, "label": label, "kind": kind}
    if options:
        field["options"] = list(options)
    if required:
        field["required"] = True
    if help:
        field["help"] = help
    return field


def _person(rng: random.Random) -> tuple[str, str]:
    """Name, address."""
    first, last = rng.choice(FIRST), rng.choice(WORDS)
    return f"{first} {last.title()}", f"{first.lower()}.{last}@example.org"


def _signup(topic: str, tracks: list[str]) -> dict[str, Any]:
    return {
        "id": "signup",
        "title": f"{topic} workshop",
        "lead": "Sign up for the workshop.",
        "fields": [
            _field("name", "Name"),
            _field("email", "E-mail", "email"),
            _field("track", "Track", "select", *tracks),
            _field("meal", "Meal", "radio", *_MEALS),
            _field("newsletter", "Newsletter", "check", required=False, help="Send me the newsletter"),
            _field("note", "Note", required=False),
        ],
    }


def _expense(projects: list[str]) -> dict[str, Any]:
    return {
        "id": "expense",
        "title": "Expense claim",
        "lead": "Get back what you paid for the company.",
        "fields": [
            _field("name", "Name"),
            _field("kind", "What for", "select", *_KINDS),
            _field("day", "Day", "day", help="YYYY-MM-DD"),
            _field("amount", "Amount", "amount", help="euros"),
            _field("project", "Project", "select", *projects),
            _field("paid", "Paid by", "radio", *_PAID),
            _field("receipt", "Receipt", "check", required=False, help="The receipt is attached"),
            _field("comment", "Comment", "lines", required=False),
        ],
    }


def _travel() -> dict[str, Any]:
    return {
        "id": "travel",
        "title": "Travel request",
        "lead": "Ask before you book.",
        "fields": [
            _field("name", "Name"),
            _field("city", "Destination", "select", *_CITIES),
            _field("leaves", "First day", "day", help="YYYY-MM-DD"),
            _field("returns", "Last day", "day", help="YYYY-MM-DD"),
            _field("by", "Travel by", "radio", "Train", "Plane", "Car"),
            _field("needs", "Also needed", "checks", *_NEEDS, required=False),
            _field("cost", "Cost", "amount", help="euros, all together"),
        ],
    }


def _do(form: Mapping[str, Any], values: Mapping[str, str], send: bool = True) -> list[Action]:
    """Fill in an empty form."""
    calls: list[Action] = []
    for field in form["fields"]:
        name, value = field["id"], values.get(field["id"], "")
        if field["kind"] == "select" and value:
            calls += choose(f"#{name}", value)
        elif field["kind"] == "check":
            calls += click(f"#{name}") * (value == "yes")
        elif field["kind"] in ("radio", "checks"):
            picked = value.split(", ") if value else []
            calls += click(*(f"#{name}-{option.lower().replace(' ', '-')}" for option in picked))
        elif value:
            calls += fill(f"#{name}", value)
    return [*calls, *(click("#send") if send else ())]


def _sent(form: Mapping[str, Any], values: Mapping[str, str], number: int = 1) -> dict[str, list[list[Any]]]:
    """The rows that a sent form leaves."""
    return {
        "entries": [[number, form["id"]]],
        "answers": [[number, field["id"], values.get(field["id"], "")] for field in form["fields"]],
    }


def _draft(forms: list[dict], form: dict, values: dict[str, str], **rest: Any) -> GuiDraft:
    """A draft in which ``form`` is filled in with ``values``."""
    rest = {"tables": {}, "calls": _do(form, values), "end": _sent(form, values), **rest}
    return GuiDraft(app="forms", start={"forms": forms}, **rest)


@generator("forms-signup", level=1)
def forms_signup(rng: random.Random) -> GuiDraft:
    """Sign somebody up for a workshop."""
    return _workshop(rng, simple=True)


@generator("forms-option", level=2)
def forms_option(rng: random.Random) -> GuiDraft:
    """Sign somebody up for one of many tracks."""
    return _workshop(rng)


@generator("forms-option-gone", level=2)
def forms_option_gone(rng: random.Random) -> GuiDraft:
    """Sign somebody up for a track that is not offered; infeasible."""
    return _workshop(rng, there=False)


def _workshop(rng: random.Random, simple: bool = False, there: bool = True) -> GuiDraft:
    name, email = _person(rng)
    topic, *words = [word.title() for word in rng.sample(WORDS, 10)]
    tracks = sorted(words[: 4 if simple else 8])
    track = rng.choice(tracks) if there else words[8]
    form = _signup(topic, tracks)
    meal, letter = rng.choice(_MEALS), rng.choice(["yes", "no"])
    values = {"name": name, "email": email, "track": track, "meal": meal, "newsletter": letter, "note": ""}
    forms = [form, _travel(), _expense(["Amber", "Basil"])]
    wish = "the newsletter is wanted" if letter == "yes" else "no newsletter"
    instruction = (
        f"Sign {name} ({email}) up for the {topic} workshop, in the track {track}. Meal: {meal.lower()}; {wish}. "
        "Send the form."
    )
    other = rng.choice([t for t in tracks if t != track])
    page = "/form?form=signup" if simple else "/"
    way = [] if simple else click("#open-signup")
    if not there:
        near = {**values, "track": other}
        return _draft(
            forms,
            form,
            near,
            instruction=instruction,
            page=page,
            calls=[*way, *click("#track"), {"action": "key", "keys": ["escape"]}],
            wrong={
                "another-track": [*way, *_do(form, near)],
                "track-in-the-note": [*way, *_do(form, {**near, "note": track})],
            },
            end=None,
            why=f"There is no track {track} in the {topic} workshop.",
        )
    changed = {"yes": "no", "no": "yes"}[letter]
    return _draft(
        forms,
        form,
        values,
        instruction=instruction,
        page=page,
        calls=[*way, *_do(form, values)],
        wrong={
            "does-not-send": [*way, *_do(form, values, send=False)],
            "another-track": [*way, *_do(form, {**values, "track": other})],
            "wrong-newsletter": [*way, *_do(form, {**values, "newsletter": changed})],
            "no-meal": [*way, *_do(form, {**values, "meal": ""})],
        },
    )


def _claim(rng: random.Random) -> tuple[list[dict], dict, dict[str, str]]:
    """The forms, the expense claim among them, and what it is filled in with."""
    projects = sorted(word.title() for word in rng.sample(WORDS, 6))
    form = _expense(projects)
    values = {
        "name": _person(rng)[0],
        "kind": rng.choice(_KINDS),
        "day": day(-rng.randint(1, 40)),
        "amount": f"{rng.randint(4, 400)}.{rng.choice((5, 10, 25, 40, 75, 90)):02d}",
        "project": rng.choice(projects),
        "paid": rng.choice(_PAID),
        "receipt": rng.choice(["yes", "no"]),
        "comment": " ".join(rng.sample(WORDS, 2)),
    }
    return [_signup("Summer", ["Amber", "Basil"]), _travel(), form], form, values


@generator("forms-expense", level=2)
def forms_expense(rng: random.Random) -> GuiDraft:
    """Find the expense claim and fill it in."""
    forms, form, values = _claim(rng)
    way = click("#open-expense")
    receipt = "with the receipt" if values["receipt"] == "yes" else "without a receipt"
    when = date.fromisoformat(values["day"])
    return _draft(
        forms,
        form,
        values,
        instruction=(
            f"Send an expense claim for {values['name']}: {values['amount']} euros for {values['kind'].lower()} on "
            f"{written(values['day'])}, project {values['project']}, paid by {values['paid'].lower()}, {receipt}. "
            f"Comment: {values['comment']}"
        ),
        calls=[*way, *_do(form, values)],
        wrong={
            "day-as-it-is-said": [*way, *_do(form, {**values, "day": written(values["day"])})],
            "wrong-amount": [*way, *_do(form, {**values, "amount": values["amount"].replace(".", "")[:6]})],
            "day-off-by-one": [*way, *_do(form, {**values, "day": date.fromordinal(when.toordinal() + 1).isoformat()})],
            "no-comment": [*way, *_do(form, {**values, "comment": ""})],
        },
    )


@generator("forms-correct", level=3)
def forms_correct(rng: random.Random) -> GuiDraft:
    """Withdraw a claim that was sent with a mistake, and send it again."""
    forms, form, values = _claim(rng)
    number = rng.randint(20, 60)
    values["receipt"] = "no"
    kind = rng.choice([kind for kind in _KINDS if kind != values["kind"]])
    better = {**values, "amount": f"{rng.randint(401, 800)}.50", "kind": kind, "receipt": "yes"}
    names = {_person(rng)[0] for _ in range(9)} - {values["name"]}
    others = [{**values, "name": name, "amount": f"{rng.randint(3, 99)}.00"} for name in sorted(names)[:2]]
    rows: dict[str, list[list[Any]]] = {"entries": [], "answers": []}
    for k, sent in enumerate([others[0], values, others[1]]):
        for table, more in _sent(form, sent, number - 1 + k).items():
            rows[table] += more
    fresh = _sent(form, better, number + 2)
    end = {table: [row for row in rows[table] if row[0] != number] + fresh[table] for table in rows}
    off = click(f"#entry-{number}", "#withdraw")
    again = [*click("#open-expense"), *_do(form, better)]
    return _draft(
        forms,
        form,
        better,
        tables=rows,
        end=end,
        instruction=(
            f"The expense claim of {values['name']} that was sent has mistakes: it was {better['amount']} euros, for "
            f"{better['kind'].lower()}, and the receipt is attached. Withdraw it, and send it again, right in these "
            "things and otherwise as it was."
        ),
        calls=[*off, *again],
        wrong={
            "withdraws-nothing": again,
            "sends-nothing": off,
            "withdraws-another": [*click(f"#entry-{number - 1}", "#withdraw"), *again],
            "the-same-again": [*off, *click("#open-expense"), *_do(form, values)],
        },
    )


@generator("forms-travel", level=3)
def forms_travel(rng: random.Random) -> GuiDraft:
    """Calculate days and costs of a journey, and request it."""
    form = _travel()
    name, city = _person(rng)[0], rng.choice(_CITIES)
    weekday, nights = rng.randrange(5), rng.randint(2, 6)
    first = next(n for n in range(5, 10) if date.fromisoformat(day(n)).weekday() == weekday)
    ticket, night = rng.randint(60, 400), rng.randint(50, 180)
    needs = ", ".join(need for need in _NEEDS if need == "Hotel" or rng.random() < 0.4)
    values = {
        "name": name,
        "city": city,
        "leaves": day(first),
        "returns": day(first + nights),
        "by": rng.choice(["Train", "Plane", "Car"]),
        "needs": needs,
        "cost": f"{ticket + nights * night}.00",
    }
    way = click("#open-travel")
    said = {**values, "cost": str(ticket + nights * night)}
    return _draft(
        [_expense(["Amber", "Basil"]), form, _signup("Spring", ["Amber", "Basil"])],
        form,
        values,
        instruction=(
            f"Today is Wednesday, {written(TODAY)}. {name} wants to go to {city} by {values['by'].lower()} on "
            f"{_WEEKDAYS[weekday]} of next week"
            f" and return {nights} days later, after {nights} nights there. The journey is {ticket} euros there and "
            f"back, the hotel {night} euros a night; nothing else costs anything. Also needed: {needs.lower()}. Send "
            "the travel request."
        ),
        calls=[*way, *_do(form, said)],
        wrong={
            "one-night-only": [*way, *_do(form, {**said, "cost": str(ticket + night)})],
            "this-week": [*way, *_do(form, {**said, "leaves": day(first - 7), "returns": day(first - 7 + nights)})],
            "needs-nothing": [*way, *_do(form, {**said, "needs": ""})],
        },
    )
