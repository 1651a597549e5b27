"""Settings on several tabs; each tab is saved as a whole, or left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ._fields import Fields
from ._page import Again, App, e, hidden, option_list, page

__all__ = ["Settings"]


class Settings(App):
    """``owner`` of the start: a name; ``tabs``: ``id``, ``title`` and ``settings``, each with ``id`` (unique over all
    tabs), ``label``, ``kind`` (toggle, select, slider, text), and ``options``, or ``least``, ``most`` and ``step``.
    Values are text: ``on`` and ``off`` of a toggle."""

    TABLES: ClassVar = {"settings": "name TEXT PRIMARY KEY, value TEXT NOT NULL"}
    PAGES: ClassVar = {"/": "tab"}
    ACTIONS: ClassVar = {"/save": "save"}

    def _tab(self, fields: Fields) -> Mapping[str, Any]:
        tabs = {tab["id"]: tab for tab in self.start["tabs"]}
        return tabs[fields.choice("tab", tabs)] if fields.has("tab") else self.start["tabs"][0]

    # -- pages

    def tab(self, query: Fields) -> str:
        """One tab, as it was saved."""
        tab = self._tab(query)
        notice = self.note(query, {"saved": "Your changes were saved."})
        return self._shown(tab, dict(self.rows("SELECT name, value FROM settings")), notice)

    def _shown(self, tab: Mapping[str, Any], values: Mapping[str, str], notice: str = "", wrong: str = "") -> str:
        nav = [(f"tab-{tab['id']}", f"/?tab={tab['id']}", tab["title"]) for tab in self.start["tabs"]]
        rows = "".join(
            f'<label class="name" for="{s["id"]}">{e(s["label"])}</label><div>{_control(s, values[s["id"]])}</div>'
            for s in tab["settings"]
        )
        told = f'<p class="problem" id="problem">{e(wrong)}</p>' if wrong else ""
        body = (
            f'<h1>{e(tab["title"])}</h1>{told}<div class="panel"><form id="settings" method="post" action="/save" '
            f'autocomplete="off">{hidden(tab=tab["id"])}<div class="fields wide">{rows}</div>'
            '<div class="row buttons"><button class="main" id="save">Save changes</button>'
            f'<a class="button" id="discard" href="/?tab={tab["id"]}">Discard</a>'
            '<span class="quiet" id="unsaved"></span></div></form></div>'
        )
        here = f"tab-{tab['id']}"
        title, brand = f"{tab['title']} settings", f"Preferences of {self.start['owner']}"
        return page(title, body, brand=brand, nav=nav, here=here, scripts=["/settings.js"], notice=notice)

    # -- what they do

    def save(self, fields: Fields) -> str:
        """Keep all settings of a tab."""
        tab = self._tab(fields)
        values: dict[str, str] = {}
        wrong = ""
        for setting in tab["settings"]:
            name, kind = setting["id"], setting["kind"]
            if kind == "toggle":
                values[name] = fields.choice(name, ["on"]) if fields.has(name) else "off"
            elif kind == "select":
                values[name] = fields.choice(name, setting["options"])
            elif kind == "slider":
                steps = range(setting["least"], setting["most"] + 1, setting["step"])
                values[name] = fields.choice(name, [str(step) for step in steps])
            else:
                values[name] = fields.text(name, 60)
                wrong = wrong or ("" if values[name] else f"{setting['label']}: write something.")
        if wrong:
            raise Again(self._shown(tab, values, wrong=wrong))
        for name, value in values.items():
            self.change("UPDATE settings SET value = ? WHERE name = ?", value, name)
        return f"/?tab={tab['id']}&note=saved"


def _control(setting: Mapping[str, Any], value: str) -> str:
    name, kind = setting["id"], setting["kind"]
    if kind == "toggle":
        checked = " checked" if value == "on" else ""
        return f'<input type="checkbox" class="toggle" id="{name}" name="{name}" value="on"{checked}>'
    if kind == "select":
        options = option_list({option: option for option in setting["options"]}, value)
        return f'<select id="{name}" name="{name}">{options}</select>'
    if kind == "slider":
        limits = f'min="{setting["least"]}" max="{setting["most"]}" step="{setting["step"]}"'
        slider = f'<input type="range" id="{name}" name="{name}" {limits} value="{e(value)}">'
        return f'<div class="row">{slider}<output id="{name}-value">{e(value)}</output></div>'
    return f'<input type="text" id="{name}" name="{name}" value="{e(value)}">'
