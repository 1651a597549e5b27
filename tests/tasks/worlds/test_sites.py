"""The web server of the sites: whatever is sent to it, only what a page offers is done, and it goes on."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records import Site
from clawgym.tasks.packs import gui_basic
from clawgym.tasks.worlds.sites import APPS, SITE_FILE, shape, tables
from clawgym.tasks.worlds.sites._fields import Fields, Refused, amount, day

from ..packs.paper_browser import Local, Served, parsed

GENERATORS = {
    "board": "board-last",
    "forms": "forms-signup",
    "mail": "mail-star",
    "settings": "settings-switch",
    "shop": "shop-adjust",
    "table": "table-edit",
}
EVIL = (
    "'; DROP TABLE orders; --",
    '"><script>alert(1)</script>',
    "x' OR '1'='1",
    "\x00",
    "\udcff",
    "%s%n",
    "../../etc",
)


def site(app: str) -> Site:
    desktop = gui_basic.make(GENERATORS[app], 1).desktop
    assert desktop is not None
    assert desktop.site is not None
    return desktop.site


@pytest.fixture(params=sorted(APPS))
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Local:
    return Local(site(request.param), tmp_path)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(site("table"), tmp_path) as running:
        yield running


def rows(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def raw(served: Served, data: bytes) -> bytes:
    """All that comes back for ``data`` until the server closes, or has answered and waits."""
    with socket.create_connection(("127.0.0.1", served.port), 20) as connection:
        got = b""
        with suppress(OSError):  # what is refused before it was read ends with a reset
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while more := connection.recv(65536):
                got += more
        return got


def test_every_app_has_a_site() -> None:
    assert set(GENERATORS) == set(APPS)
    for app in APPS:
        assert set(tables(app, {})) == set(shape(app)) == set(APPS[app].TABLES)


def test_pages_stand_and_change_nothing(local: Local) -> None:
    """Every link of every page that links lead to is a page, with its parts in order."""
    before, seen, ahead = local.dump(), set(), ["/"]
    while ahead and len(seen) < 150:
        path = ahead.pop()
        if path in seen:
            continue
        seen.add(path)
        status, _, html = local.ask("GET", path)
        assert status == 200, path
        for element in parsed(html):
            if element.tag == "a" and element.attrs.get("class") != "button off":
                ahead.append(element.attrs["href"])
            if element.tag in ("script", "link"):
                assert local.ask("GET", element.attrs.get("src") or element.attrs["href"])[0] == 200
    assert len(seen) >= (1 if local.site.app.start["app"] == "board" else 3)
    assert local.dump() == before


def test_numbers_stand_below_their_heading(tmp_path: Path) -> None:
    _, _, html = Local(site("table"), tmp_path).ask("GET", "/")
    (table,) = [element for element in parsed(html) if element.tag == "table"]
    heads = [element.attrs.get("class") for element in table if element.tag == "th"]
    assert heads.count("number") == 1
    for row in (element for element in table if element.tag == "tr"):
        if cells := [element.attrs.get("class") for element in row if element.tag == "td"]:
            assert cells[: len(heads)] == heads[: len(cells)]


def test_a_folder_says_that_it_has_no_mails_if_it_has_none(tmp_path: Path) -> None:
    mail = Local(site("mail"), tmp_path)
    shown = parsed(mail.ask("GET", "/")[2])
    assert any(element.attrs.get("id", "").startswith("mail-") for element in shown)
    assert "No mails." not in shown.words
    shown = parsed(mail.ask("GET", "/?words=nowhere-to-be-found")[2])
    assert "No mails." in shown.words


def test_stars_have_one_digit_after_the_point(tmp_path: Path) -> None:
    shop = Local(site("shop"), tmp_path)
    with closing(sqlite3.connect(shop.workspace / SITE_FILE)) as db:
        products = db.execute("SELECT id, stars FROM products").fetchall()
    assert products
    for number, tenths in products:
        shown = parsed(shop.ask("GET", f"/product?id={number}")[2]).words
        assert re.findall(r"★ (\S+) of 5", shown) == [f"{tenths / 10:.1f}"]


def test_the_file_is_a_plain_one(local: Local) -> None:
    assert [path.name for path in local.workspace.iterdir()] == [SITE_FILE]
    (mode,) = local.site.db.execute("PRAGMA journal_mode").fetchone()
    assert mode == "delete"


def test_crafted_requests_change_nothing(local: Local) -> None:
    """Of each form of the page, a field with another value, twice, missing, or one too many."""
    before = local.dump()
    asked = 0
    for path in local.site.app.ACTIONS:
        for fields in ({}, {"id": 1}, {"id": "1 OR 1=1"}, {"id": 2**70}, {"form": "no"}, {"tab": "no"}, {"card": -1}):
            for more in ({}, {"x": "y"}, {"id": ["1", "2"]}, *({"words": evil} for evil in EVIL[:3])):
                if path == "/uncoupon" and not fields and not more:
                    continue
                status, _, html = local.send(path, **{**fields, **more})
                assert status in (400, 404, 422), (path, fields, more, html)
                asked += 1
    assert asked
    assert local.dump() == before


@given(st.binary(max_size=200) | st.text(max_size=80).map(lambda text: urlencode({"id": text}).encode()))
def test_no_body_makes_the_server_fail(body: bytes) -> None:
    text = body.decode("latin-1")
    try:
        fields = Fields(text)
    except Refused:
        return
    pairs = parse_qsl(text, keep_blank_values=True)
    for name in dict(pairs):
        values = [value.replace("\r\n", "\n") for key, value in pairs if key == name]
        try:
            assert [fields.text(name)] == [value.strip() for value in values]
        except Refused:
            assert len(values) > 1 or len(values[0]) > 200 or not values[0].strip().isprintable()
    fields.done()


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=5))
def test_fields_come_as_they_were_sent(sent: dict[str, str]) -> None:
    fields = Fields(urlencode(sent))
    for name, value in sent.items():
        assert fields.has(name)
        assert fields.many(name) == [value.replace("\r\n", "\n")]
        assert not fields.has(name)
    fields.done()


@given(st.integers(0, 10**7), st.text(max_size=6))
def test_amounts_and_days(cents: int, text: str) -> None:
    said = f"{cents // 100}.{cents % 100:02d}"
    assert amount(said) == (said if cents < 10**8 else None)
    assert amount(said.replace(".", ",")) == amount(said)
    assert amount(text) is None or re.fullmatch(r"\d+\.\d\d", amount(text) or "")
    assert not day(text)


def test_words_of_users_stay_words(tmp_path: Path) -> None:
    box = Local(site("mail"), tmp_path)
    for evil in EVIL:
        text = evil.encode("utf-8", "surrogateescape")
        body = f"reply=&to=a%40b.org&subject={quote(text)}&body={quote(text)}".encode()
        status, location, _ = box.ask("POST", "/send", body)
        assert status == (303 if evil.isprintable() else 400), evil
        if status == 303:
            assert location == "/?note=sent"
            _, _, html = box.ask("GET", "/?folder=sent")
            assert evil in parsed(html).words
            assert "<script>alert" not in html
            (kept,) = box.site.db.execute("SELECT body FROM mails ORDER BY id DESC").fetchone()
            assert kept == evil


FORM = b"Content-Type: application/x-www-form-urlencoded\r\n"
RUBBISH = {
    "nothing": b"",
    "binary": bytes(range(256)) * 20,
    "half-a-line": b"GET /",
    "no-version": b"GET /\r\n\r\n",
    "unknown-method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "long-line": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    "many-headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n",
    "no-length": b"POST /save HTTP/1.1\r\n" + FORM + b"\r\nid=1",
    "odd-length": b"POST /save HTTP/1.1\r\n" + FORM + b"Content-Length: -5\r\n\r\nid=1",
    "huge-length": b"POST /save HTTP/1.1\r\n" + FORM + b"Content-Length: 99999999999999\r\n\r\nid=1",
    "too-long": b"POST /save HTTP/1.1\r\n" + FORM + b"Content-Length: 65537\r\n\r\n" + b"a" * 65537,
    "cut-off": b"POST /delete HTTP/1.1\r\n" + FORM + b"Content-Length: 500\r\n\r\nid=1001",
    "chunked": b"POST /save HTTP/1.1\r\n" + FORM + b"Transfer-Encoding: chunked\r\n\r\n4\r\nid=1\r\n0\r\n\r\n",
    "another-kind": b"POST /delete HTTP/1.1\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\nid=1",
    "no-text": b"POST /delete HTTP/1.1\r\n" + FORM + b"Content-Length: 6\r\n\r\nid=\xff\xfe\x00",
    "files": b"GET /../../start.json HTTP/1.1\r\nHost: x\r\n\r\n",
}


def test_rubbish_is_answered_and_survived(served: Served) -> None:
    before = rows(served.workspace / SITE_FILE)
    for kind, data in RUBBISH.items():
        answer = raw(served, data)
        assert not answer.startswith(b"HTTP/1.1 2"), kind
        assert b"Traceback" not in answer, kind
    assert served.ask("GET", "/")[0] == 200
    assert rows(served.workspace / SITE_FILE) == before
    assert "Traceback" not in served.log.read_text()


def test_connections_are_kept_and_counted(served: Served) -> None:
    """Several requests on one connection; and so many silent ones that further ones are closed, until they go."""
    one = b"GET /style.css HTTP/1.1\r\nHost: x\r\n\r\n"
    assert raw(served, one * 3).count(b"HTTP/1.1 200") == 3
    silent = [socket.create_connection(("127.0.0.1", served.port), 20) for _ in range(64)]
    with closing(socket.create_connection(("127.0.0.1", served.port), 20)) as refused:
        assert refused.recv(10) == b""
    for connection in silent:
        connection.close()
    for _ in range(1000):
        try:
            if served.ask("GET", "/")[0] == 200:
                return
        except OSError:
            continue
    pytest.fail("it does not come back")


def test_a_start_that_is_none_is_said(tmp_path: Path) -> None:
    good = site("table")
    start = next(file for file in good.files if file.path == "start.json")
    bad = json.loads(start.read()) | {"app": "nothing"}
    files = tuple(type(file)(file.path, json.dumps(bad).encode()) if file is start else file for file in good.files)
    running = Served(Site(good.argv, files), tmp_path)
    running.__exit__()
    assert "the site cannot begin" in running.log.read_text()
