"""Family ``settings``: switches, lists and sliders on several tabs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from clawgym.tasks.packs.seeded import FIRST, WORDS, Generator
from clawgym.tasks.packs.seeded import generator as _generator

from ._build import Action, GuiDraft, choose, click, keys, refill

SETTINGS: dict[str, Generator[GuiDraft]] = {}
generator = partial(_generator, family="settings", into=SETTINGS)

# Tab -> settings that it may have: name, label, and of a list the options, of a slider its step (0 to 100).
_ALL: dict[str, list[tuple[str, str, str, Any]]] = {
    "account": [
        ("nickname", "Display name", "text", None),
        ("language", "Language", "select", ("English", "German", "French", "Polish", "Spanish")),
        ("start", "Start page", "select", ("Overview", "Calendar", "Projects", "Reports")),
        ("week", "First day of the week", "select", ("Monday", "Saturday", "Sunday")),
        ("birthday", "Show my birthday to colleagues", "toggle", None),
        ("tips", "Show tips at the start", "toggle", None),
        ("beta", "Try new features early", "toggle", None),
    ],
    "alerts": [
        ("mail-mentions", "Mail me when I am mentioned", "toggle", None),
        ("mail-replies", "Mail me when somebody replies", "toggle", None),
        ("mail-summary", "Mail me a summary every week", "toggle", None),
        ("mail-deadlines", "Mail me before deadlines", "toggle", None),
        ("sound", "Play a sound for messages", "toggle", None),
        ("popup", "Show messages in a pop-up", "toggle", None),
        ("quiet-from", "Quiet hours begin", "select", ("Never", "18:00", "20:00", "21:00", "22:00")),
        ("volume", "Volume", "slider", 10),
    ],
    "display": [
        ("theme", "Theme", "select", ("Light", "Dark", "Automatic", "Contrast")),
        ("size", "Size of text", "select", ("Small", "Medium", "Large", "Huge")),
        ("brightness", "Brightness", "slider", 10),
        ("saver", "Turn the screen off after (minutes)", "slider", 10),
        ("motion", "Reduce motion", "toggle", None),
        ("compact", "Compact lists", "toggle", None),
        ("avatars", "Show pictures of people", "toggle", None),
        ("numbers", "Number the lines of lists", "toggle", None),
    ],
    "privacy": [
        ("online", "Show when I am online", "toggle", None),
        ("receipts", "Tell senders that I have read their messages", "toggle", None),
        ("search", "Let others find me by my telephone number", "toggle", None),
        ("statistics", "Send statistics of use", "toggle", None),
        ("keep", "Keep my history for", "select", ("Day", "Week", "Month", "Year")),
        ("profile", "Who sees my profile", "select", ("Everybody", "Colleagues", "Nobody")),
        ("location", "Show where I work from", "toggle", None),
    ],
}
_TITLES = {"account": "Account", "alerts": "Notifications", "display": "Display", "privacy": "Privacy"}

Known = dict[str, dict[str, Any]]
"""Name -> setting, with its ``tab``."""


def _page(rng: random.Random, least: int = 6) -> tuple[list[dict[str, Any]], Known, dict[str, str]]:
    """The tabs, each with ``least`` of the settings that it may have; all settings; their values."""
    tabs, known, values = [], {}, {}
    for tab in rng.sample(sorted(_ALL), len(_ALL)):
        some = set(rng.sample(range(len(_ALL[tab])), least))
        settings = [_setting(*row) for n, row in enumerate(_ALL[tab]) if n in some]
        tabs.append({"id": tab, "title": _TITLES[tab], "settings": settings})
        for setting in settings:
            known[setting["id"]] = {**setting, "tab": tab}
            values[setting["id"]] = _value(rng, setting)
    return tabs, known, values


def _setting(name: str, label: str, kind: str, more: Any) -> dict[str, Any]:
    setting: dict[str, Any] = {"id": name, "label": label, "kind": kind}
    if kind == "select":
        setting["options"] = list(more)
    elif kind == "slider":
        setting |= {"least": 0, "most": 100, "step": more}
    return setting


def _value(rng: random.Random, setting: Mapping[str, Any], but: str = "") -> str:
    """A value of a setting, another one than ``but``."""
    kind = setting["kind"]
    if kind == "toggle":
        return {"on": "off", "off": "on"}.get(but) or rng.choice(["on", "off"])
    if kind == "text":
        return f"{rng.choice(FIRST)} {rng.choice(WORDS).title()}"
    offered = setting["options"] if kind == "select" else [str(n) for n in range(0, 101, setting["step"])]
    return rng.choice([value for value in offered if value != but])


def _set(setting: Mapping[str, Any], value: str) -> list[Action]:
    """Bring a setting that is in sight to ``value``; of a toggle, to the other value."""
    here = f"#{setting['id']}"
    if setting["kind"] == "toggle":
        return click(here)
    if setting["kind"] == "select":
        return choose(here, value)
    if setting["kind"] == "slider":  # a click on its middle puts it there
        steps = (int(value) - 50) // setting["step"]
        return [*click(here), *keys(*(["right" if steps > 0 else "left"] * abs(steps)))]
    return refill(here, value)


def _to(known: Known, name: str) -> list[Action]:
    return click(f"#tab-{known[name]['tab']}")


def _wish(setting: Mapping[str, Any], value: str) -> str:
    """What is wanted, in words."""
    if setting["kind"] == "toggle":
        return f'turn "{setting["label"]}" {value}'
    return f'set "{setting["label"]}" to {value}'


def _owner(rng: random.Random) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(WORDS).title()}"


def _draft(
    tabs: list[dict], values: dict[str, str], changed: dict[str, str] | None, *, owner: str, **rest: Any
) -> GuiDraft:
    tables = {"settings": [list(row) for row in values.items()]}
    end = None if changed is None else {"settings": [list(row) for row in {**values, **changed}.items()]}
    return GuiDraft(app="settings", start={"tabs": tabs, "owner": owner}, tables=tables, end=end, **rest)


@generator("settings-switch", level=1)
def settings_switch(rng: random.Random) -> GuiDraft:
    """Turn one switch on or off."""
    return _switch(rng, there=True)


@generator("settings-switch-gone", level=1)
def settings_switch_gone(rng: random.Random) -> GuiDraft:
    """Turn a switch that does not exist on or off; infeasible."""
    return _switch(rng, there=False)


def _switch(rng: random.Random, there: bool) -> GuiDraft:
    tabs, known, values = _page(rng)
    offered = {row[0]: {**_setting(*row), "tab": tab} for tab in _ALL for row in _ALL[tab] if row[2] == "toggle"}
    name = rng.choice([name for name in offered if (name in known) == there])
    setting, tab = offered[name], offered[name]["tab"]
    new = _value(rng, setting, values.get(name, ""))
    others = [n for n, s in known.items() if s["kind"] == "toggle" and n != name]
    near = rng.choice([n for n in others if known[n]["tab"] == tab])
    far = rng.choice([n for n in others if known[n]["tab"] != tab])
    owner = _owner(rng)
    instruction = f"In the preferences of {owner}, {_wish(setting, new)}."
    save = click("#save")
    if not there:
        return _draft(
            tabs,
            values,
            None,
            owner=owner,
            instruction=instruction,
            calls=click(*(f"#tab-{each['id']}" for each in tabs)),
            wrong={
                "one-beside-it": [*_to(known, near), *_set(known[near], ""), *save],
                "one-elsewhere": [*_to(known, far), *_set(known[far], ""), *save],
            },
            why=f'There is no setting "{setting["label"]}".',
        )
    right = [*_to(known, name), *_set(setting, new)]
    return _draft(
        tabs,
        values,
        {name: new},
        owner=owner,
        instruction=instruction,
        calls=[*right, *save],
        wrong={
            "does-not-save": right,
            "discards": [*right, *click("#discard")],
            "one-beside-it": [*_to(known, near), *_set(known[near], ""), *save],
            "one-too-many": [*right, *_set(known[near], ""), *save],
        },
    )


@generator("settings-slider", level=2)
def settings_slider(rng: random.Random) -> GuiDraft:
    """Move a slider, and choose from a list on the same tab."""
    while True:
        tabs, known, values = _page(rng)
        tab = rng.choice(["display", "alerts"])
        sliders = [n for n, s in known.items() if s["tab"] == tab and s["kind"] == "slider"]
        lists = [n for n, s in known.items() if s["tab"] == tab and s["kind"] == "select"]
        if sliders and lists:
            break
    slider, choice = rng.choice(sliders), rng.choice(lists)
    changed = {n: _value(rng, known[n], values[n]) for n in (slider, choice)}
    way, save = _to(known, slider), click("#save")
    move, pick = _set(known[slider], changed[slider]), _set(known[choice], changed[choice])
    near = str((int(changed[slider]) + 20) % 110 // 10 * 10)
    owner = _owner(rng)
    return _draft(
        tabs,
        values,
        changed,
        owner=owner,
        instruction=(
            f"In the preferences of {owner}, on the tab {_TITLES[tab]}, {_wish(known[choice], changed[choice])} and "
            f"{_wish(known[slider], changed[slider])}. It is now {values[slider]}. Save it."
        ),
        calls=[*way, *pick, *move, *save],
        wrong={
            "the-list-only": [*way, *pick, *save],
            "too-far": [*way, *pick, *_set(known[slider], near), *save],
            "does-not-save": [*way, *pick, *move],
        },
    )


@generator("settings-tabs", level=2)
def settings_tabs(rng: random.Random) -> GuiDraft:
    """Change settings on three tabs, and save each tab."""
    tabs, known, values = _page(rng)
    chosen = rng.sample(sorted(_ALL), 3)
    easy = ("toggle", "select", "text")
    names = [rng.choice([n for n, s in known.items() if s["tab"] == tab and s["kind"] in easy]) for tab in chosen]
    changed = {name: _value(rng, known[name], values[name]) for name in names}
    steps = {name: [*_to(known, name), *_set(known[name], changed[name])] for name in names}
    save = click("#save")
    wishes = [_wish(known[name], changed[name]) for name in names]
    owner = _owner(rng)
    return _draft(
        tabs,
        values,
        changed,
        owner=owner,
        instruction=f"Change three preferences of {owner}: {wishes[0]}, {wishes[1]}, and {wishes[2]}.",
        calls=[call for name in names for call in [*steps[name], *save]],
        wrong={
            "saves-at-the-end-only": [*(call for name in names for call in steps[name]), *save],
            "forgets-the-last": [call for name in names[:2] for call in [*steps[name], *save]],
            "saves-nothing": [call for name in names for call in steps[name]],
        },
    )


@generator("settings-mails", level=3)
def settings_mails(rng: random.Random) -> GuiDraft:
    """Turn on one kind of mail and turn off the others, set a slider, and turn off all switches of another tab."""
    while True:
        tabs, known, values = _page(rng)
        mails = [n for n in known if n.startswith("mail-")]
        on = [n for n in mails if values[n] == "on"]
        rest = [n for n, s in known.items() if s["tab"] == "privacy" and s["kind"] == "toggle" and values[n] == "on"]
        if len(mails) >= 3 and len(on) >= 2 and len(rest) >= 2 and "volume" in known:
            break
    kept = rng.choice(mails)
    changed = {n: "on" if n == kept else "off" for n in mails} | dict.fromkeys(rest, "off")
    volume = str(rng.choice([n for n in range(20, 90, 10) if str(n) != values["volume"]]))
    changed["volume"] = volume
    flips = [n for n in mails if values[n] != changed[n]]
    save = click("#save")
    first = [*_to(known, kept), *click(*(f"#{n}" for n in flips)), *_set(known["volume"], volume), *save]
    then = [*_to(known, rest[0]), *click(*(f"#{n}" for n in rest)), *save]
    fewer = [*_to(known, kept), *click(*(f"#{n}" for n in flips[:-1])), *_set(known["volume"], volume), *save]
    owner = _owner(rng)
    return _draft(
        tabs,
        values,
        changed,
        owner=owner,
        instruction=(
            f'{owner} wants only one kind of mails: in the preferences, "{known[kept]["label"]}" is to be on, every '
            f'other switch that begins with "Mail me" off. The volume of notifications is to be {volume}. And on the '
            "tab Privacy, turn off every switch that is on; leave the rest."
        ),
        calls=[*first, *then],
        wrong={
            "one-switch-is-left": [*fewer, *then],
            "notifications-only": first,
            "privacy-only": then,
            "does-not-save-privacy": [*first, *then[:-1]],
        },
    )
