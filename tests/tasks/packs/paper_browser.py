"""A browser without a screen, for pages that hardly need one: it carries out lists of ``computer_use`` calls over HTTP.

An element that a page does not have, or that such a call could not mean, is an error.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from clawgym.records import Site, Task, TaskFile
from clawgym.tasks.worlds.sites import SITE_FILE, server

from ..served import RUN_CHECK, put

_VOID = {"input", "br", "meta", "link"}


class Element:
    def __init__(self, tag: str, attrs: dict[str, str], parent: Element | None) -> None:
        self.tag, self.attrs, self.parent = tag, attrs, parent
        self.children: list[Element] = []
        self.text = ""
        self.replaced = False

    def __iter__(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            yield from child

    @property
    def words(self) -> str:
        return self.text + "".join(child.words for child in self.children)

    def above(self, tag: str) -> Element:
        element: Element | None = self
        while element is not None and element.tag != tag:
            element = element.parent
        assert element is not None, f"{self.attrs} is in no {tag}"
        return element


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = self.at = Element("root", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(element)
        if tag not in _VOID:
            self.at = element

    def handle_endtag(self, tag: str) -> None:
        assert self.at.tag == tag, f"</{tag}> closes <{self.at.tag}>"
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.text += data


def parsed(html: str) -> Element:
    parser = _Parser()
    parser.feed(html)
    assert parser.at is parser.root, f"<{parser.at.tag}> is never closed"
    ids = [element.attrs["id"] for element in parser.root if "id" in element.attrs]
    assert len(ids) == len(set(ids)), "an id is given twice"
    return parser.root


class Served:
    """A site as a plain process, in a temporary folder, at a free port."""

    def __init__(self, site: Site, folder: Path) -> None:
        home = put(site.files, folder / "site")
        self.workspace = folder / "workspace"
        self.workspace.mkdir(parents=True, exist_ok=True)
        argv = [arg.replace("/tools/site", str(home)) for arg in site.argv]
        self.log = folder / "site.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *argv[1:-1], "0"], cwd=self.workspace, env={}, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout
        self.port = int(self.process.stdout.readline() or 0)

    def __enter__(self) -> Served:
        assert self.port, self.log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str, str]:
        """Status, location and text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Location", ""), answer.read().decode()
        finally:
            connection.close()

    def send(self, path: str, **fields: object) -> tuple[int, str, str]:
        """A form, as a page would send it."""
        kind = "application/x-www-form-urlencoded"
        return self.ask("POST", path, urlencode(fields, doseq=True).encode(), Content_Type=kind)


class Local:
    """A site in this process, asked as :class:`Served` is."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.workspace = folder / "workspace"
        self.workspace.mkdir(parents=True)
        start = next(json.loads(file.read()) for file in site.files if file.path == "start.json")
        self.site = server.Site(str(self.workspace / SITE_FILE), start)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str, str]:
        path, _, query = path.partition("?")
        reply = self.site.get(path, query) if method == "GET" else self.site.post(path, (body or b"").decode())
        return reply.status, reply.location, reply.body.decode()

    def send(self, path: str, **fields: object) -> tuple[int, str, str]:
        return self.ask("POST", path, urlencode(fields, doseq=True).encode())

    def dump(self) -> list[str]:
        """All that is kept."""
        return list(self.site.db.iterdump())


class Browser:
    """What a hand does at a page that is shown on paper."""

    def __init__(self, served: Served | Local, page: str) -> None:
        self.served = served
        self.said: list[dict[str, Any]] = []
        self.go(page)

    def go(self, path: str) -> None:
        status, location, html = self.served.ask("GET", path)
        assert (status, location) == (200, ""), (path, status, parsed(html).words)
        self.show(html)

    def show(self, html: str) -> None:
        self.page = parsed(html)
        self.focus: Element | None = None

    def find(self, selector: str) -> Element:
        assert selector.startswith("#")
        found = [element for element in self.page if element.attrs.get("id") == selector[1:]]
        assert found, f"no {selector} in: {self.page.words}"
        return found[0]

    def submit(self, button: Element) -> None:
        form = button.above("form")
        fields: list[tuple[str, str]] = []
        for element in form:
            name, kind = element.attrs.get("name"), element.attrs.get("type", "text")
            if element.tag == "input" and name and (kind not in ("checkbox", "radio") or "checked" in element.attrs):
                fields.append((name, element.attrs.get("value", "")))
            elif element.tag == "textarea" and name:
                fields.append((name, element.text))
            elif element.tag == "select" and name:
                options = [option for option in element.children if option.tag == "option"]
                chosen = next((option for option in options if "selected" in option.attrs), options[0])
                fields.append((name, chosen.attrs["value"]))
            elif element is button and name:
                fields.append((name, element.attrs.get("value", "")))
        self.send(form.attrs["action"], fields, form.attrs.get("method", "get"))

    def send(self, action: str, fields: list[tuple[str, str]], method: str = "post") -> None:
        if method == "get":
            self.go(f"{action}?{urlencode(fields)}")
            return
        kind = "application/x-www-form-urlencoded"
        status, location, html = self.served.ask("POST", action, urlencode(fields).encode(), Content_Type=kind)
        assert status in (303, 422), (action, fields, status, parsed(html).words)
        if status == 303:
            self.go(location)
        else:
            self.show(html)

    def click(self, element: Element) -> None:
        kind = element.attrs.get("type", "")
        if element.tag == "a":
            assert element.attrs.get("class") != "button off", f"{element.attrs['id']} is off"
            self.go(element.attrs["href"])
        elif element.tag == "button":
            self.submit(element)
        elif kind == "checkbox":
            if element.attrs.pop("checked", None) is None:
                element.attrs["checked"] = ""
        elif kind == "radio":
            for other in element.above("form"):
                if other.attrs.get("name") == element.attrs["name"]:
                    other.attrs.pop("checked", None)
            element.attrs["checked"] = ""
        else:
            assert element.tag in ("input", "textarea", "select"), f"{element.attrs} does nothing"
            if kind == "range":
                low, high = int(element.attrs["min"]), int(element.attrs["max"])
                element.attrs["value"] = str((low + high) // 2)
            self.focus = element

    def type(self, text: str) -> None:
        focus = self.focus
        assert focus is not None, f"{text!r} is typed into nothing"
        if focus.tag == "select":
            options = [option for option in focus.children if option.text.lower().startswith(text.lower())]
            assert len(options) == 1, (text, [option.text for option in focus.children])
            for option in focus.children:
                option.attrs.pop("selected", None)
            options[0].attrs["selected"] = ""
        elif focus.tag == "textarea":
            focus.text = text if focus.replaced else focus.text + text
        else:
            focus.attrs["value"] = text if focus.replaced else focus.attrs.get("value", "") + text
        focus.replaced = False

    def key(self, name: str) -> None:
        focus = self.focus
        if name == "enter" and focus is not None and focus.tag == "input":
            buttons = [element for element in focus.above("form") if element.tag == "button"]
            self.submit(buttons[0])
        elif name in ("right", "left"):
            assert focus is not None
            assert focus.attrs["type"] == "range"
            step = int(focus.attrs["step"]) * (1 if name == "right" else -1)
            value = int(focus.attrs["value"]) + step
            focus.attrs["value"] = str(min(max(value, int(focus.attrs["min"])), int(focus.attrs["max"])))
        elif name == "ctrl+a":
            assert focus is not None
            focus.replaced = True
        else:
            assert name in ("enter", "escape"), name

    def drag(self, thing: str, to: str) -> None:
        """As board.js does: what is dropped on a card takes its place."""
        card, place = self.find(thing), self.find(to)
        column = place.above("section").attrs["data-column"]
        before = place.attrs.get("data-card", "")
        self.send("/move", [("card", card.attrs["data-card"]), ("column", column), ("before", before)])

    def run(self, calls: TaskFile) -> None:
        for call in json.loads(calls.read()):
            assert call["name"] == "computer_use"
            self.said.append(call)
            self.act(**call["arguments"])

    def act(
        self, action: str, coordinate: str = "", start_coordinate: str = "", text: str = "", keys: Any = ()
    ) -> None:
        if action == "left_click":
            self.click(self.find(coordinate))
        elif action == "type":
            self.type(text)
        elif action == "key":
            self.key("+".join(keys))
        elif action == "left_click_drag":
            self.drag(start_coordinate, coordinate)
        else:
            assert action in ("screenshot", "done", "fail"), action


def scores(task: Task, workspace: Path, calls: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """The checks, from an isolated interpreter in another folder."""
    verifier = put(task.verifier.files, folder / "verifier")
    payload = folder / "payload.json"
    steps = [{"role": "user", "content": task.instruction}]
    steps += [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    payload.write_text(json.dumps({"final_message": "", "transcript": steps}))
    command = [sys.executable, "-I", "-S", "-c", RUN_CHECK, str(verifier / "check.py"), str(workspace)]
    env = {"OPENCLAW_REWARD_PAYLOAD": str(payload)}
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
