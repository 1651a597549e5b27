"""The worlds: what always holds, whatever is called; and what their tools say when they refuse."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from clawgym.tasks.worlds.servers import WORLD_FILE, world_server
from clawgym.tasks.worlds.servers.world import PARTS, World

from ..served import Running, put

SEED = {
    "today": "2031-03-05",
    "accounts": [["A", "Ada", "checking", 1_000, 0], ["B", "Bo", "checking", 0, 500], ["C", "Cy", "savings", 70, 0]],
    "bookings": [],
    "people": [["ada@x.org", "Ada"], ["bo@x.org", "Bo"]],
    "rooms": [["Oak", 4], ["Elm", 9]],
    "events": [[5, "Plan", "2031-03-06T09:00", "2031-03-06T10:00", "Oak", "ada@x.org"]],
    "attendees": [[5, "bo@x.org"]],
    "contacts": [["ada@x.org", "Ada"]],
    "mails": [[3, "inbox", "2031-03-01", "ada@x.org", "Hi", "Text", None]],
    "recipients": [[3, "me@example.org"]],
    "labels": [[3, "new"]],
    "items": [["L-1", "oak lamp", 10, 4, 3, 100], ["S-2", "oak stool", 2, 0, 1, 900]],
    "orders": [[7, "Ada", "2031-03-01", "open"], [8, "Bo", "2031-03-02", "reserved"], [9, "Cy", "2031-03-02", "open"]],
    "order_lines": [[7, "L-1", 6], [7, "S-2", 1], [8, "L-1", 4], [9, "S-2", 5]],
}


def world() -> World:
    return World(":memory:", list(PARTS), SEED)


_WORDS = (
    *(
        "A",
        "B",
        "C",
        "zz",
        "Oak",
        "Elm",
        "ada@x.org",
        "bo@x.org",
        "L-1",
        "S-2",
        "Ada",
        "2031-03-06",
        "2031-03-06T09:30",
    ),
    *("2031-03-06T10:00", "2031-02-30", "", "open", "inbox", "new", "'; DROP TABLE accounts; --", "%", "\0", "é\n"),
)
TEXTS = st.sampled_from(_WORDS)
NUMBERS = st.sampled_from([0, 1, 3, 5, 7, 8, 9, 60, 400, 1_000, 10**30, -1])


def arguments(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    kinds = {"string": TEXTS, "integer": NUMBERS, "array": st.lists(TEXTS, max_size=3)}

    def of(field: dict[str, Any]) -> st.SearchStrategy[Any]:
        return st.sampled_from(field["enum"]) if "enum" in field else kinds[field["type"]]

    required = {name: of(field) for name, field in schema["properties"].items() if name in schema["required"]}
    optional = {name: of(field) for name, field in schema["properties"].items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


_TOOLS = world().tools
CALLS = st.lists(
    st.sampled_from(sorted(_TOOLS)).flatmap(
        lambda name: st.tuples(st.just(name), arguments(_TOOLS[name]["inputSchema"]))
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(CALLS)
def test_what_always_holds(calls: list[tuple[str, dict[str, Any]]]) -> None:
    made = world()
    deposited = 0
    for name, given_arguments in calls:
        before = made.tables()
        result = made.call(name, given_arguments)
        after = made.tables()
        text = result["content"][0]["text"]
        if result["isError"]:
            assert after == before, f"{name} failed and changed something"
            assert "Error:" not in text or "Overflow" in text, f"{name} refused without a word of help: {text}"
        elif name.startswith(("list_", "search_", "get_", "find_", "read_", "statement")):
            assert after == before, f"{name} only reads"
        if name == "deposit" and not result["isError"]:
            deposited += given_arguments["cents"]
        total = sum(row[3] for row in after["accounts"])
        assert total == 1_070 + deposited, "money is conserved"
        assert all(row[3] >= -row[4] for row in after["accounts"])
        assert all(0 <= row[3] <= row[2] for row in after["items"])
        reserved = dict.fromkeys((row[0] for row in after["items"]), 0)
        status = {row[0]: row[3] for row in after["orders"]}
        for order, sku, quantity in after["order_lines"]:
            reserved[sku] += quantity * (status[order] == "reserved")
        assert reserved == {row[0]: row[3] for row in after["items"]}
        spans = [(row[4], row[2], row[3]) for row in after["events"]]
        for i, (room, start, end) in enumerate(spans):
            assert start < end
            assert not any(r == room and s < end and e > start for r, s, e in spans[i + 1 :])
        assert len(after["mails"]) >= 1
    assert made.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert not made.db.execute("PRAGMA foreign_key_check").fetchall()
    made.db.close()


@pytest.mark.parametrize(
    ("name", "given_arguments", "says"),
    [
        ("get_account", {"account": "Z"}, "there is no account 'Z': see list_accounts"),
        ("transfer", {"source": "A", "target": "B", "cents": 1_001, "memo": "m"}, "can give 1000 cents at most"),
        ("transfer", {"source": "B", "target": "A", "cents": 501, "memo": "m"}, "can give 500 cents at most"),
        ("transfer", {"source": "A", "target": "A", "cents": 1, "memo": "m"}, "the same account"),
        ("transfer", {"source": "A", "target": "B", "cents": 0, "memo": "m"}, "must be from 1"),
        ("transfer", {"source": "A", "target": "B", "cents": 10, "memo": " "}, "memo must have"),
        ("move_event", {"event": 6, "start": "2031-03-06T09:00"}, "there is no event 6"),
        ("move_event", {"event": 5, "start": "tomorrow"}, "must look like 2031-03-04T09:30"),
        ("read_mail", {"mail": 4}, "there is no mail 4"),
        ("unlabel_mail", {"mail": 3, "label": "old"}, "has no label 'old'"),
        ("send_mail", {"to": ["nobody"], "subject": "s", "body": "b"}, "is no e-mail address"),
        ("reserve_order", {"order": 9}, "needs 5 of S-2, and 2 are free"),
        ("ship_order", {"order": 7}, "is open, and only reserved orders can be shipped"),
        ("restock_item", {"sku": "X", "quantity": 1}, "there is no item 'X'"),
    ],
)
def test_refusals_say_why(name: str, given_arguments: dict[str, Any], says: str) -> None:
    result = world().call(name, given_arguments)
    assert result["isError"]
    assert says in result["content"][0]["text"]


def test_a_room_is_not_booked_twice() -> None:
    made = world()
    new = {"title": "T", "room": "Oak", "organizer": "bo@x.org", "attendees": []}
    taken = made.call("create_event", {**new, "start": "2031-03-06T09:30", "end": "2031-03-06T11:00"})
    assert "room Oak is taken by event 5 (Plan) from 2031-03-06T09:00 to 2031-03-06T10:00" in str(taken)
    after = made.call("create_event", {**new, "start": "2031-03-06T10:00", "end": "2031-03-06T11:00"})
    assert json.loads(after["content"][0]["text"]) == {"id": 6}


def test_long_lists_come_in_pages() -> None:
    rows = [[n, "inbox", "2031-03-01", "ada@x.org", "Hi", "Text", None] for n in range(1, 61)]
    made = World(":memory:", ["mail"], {"today": "2031-03-05", "mails": rows})
    pages = [made.call("list_mails", {"folder": "inbox", "offset": k})["structuredContent"] for k in (0, 25, 50)]
    assert [len(page["mails"]) for page in pages] == [25, 25, 10]
    assert [page["more"] for page in pages] == [35, 10, 0]
    assert len({mail["id"] for page in pages for mail in page["mails"]}) == 60


def test_the_file_stays_and_is_whole_after_every_call(tmp_path: Path) -> None:
    server = world_server(["bank"], SEED)
    with Running(server, tmp_path) as running:
        assert running.call("transfer", source="A", target="B", cents=7, memo="m") == ('{"id": 1}', False)
        running.process.kill()
    path = tmp_path / "workspace" / WORLD_FILE
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT balance_cents FROM accounts ORDER BY id").fetchall() == [(993,), (7,), (70,)]
    with Running(server, tmp_path) as running:
        text, _ = running.call("get_account", account="A")
        assert json.loads(text)["balance_cents"] == 993


async def test_the_official_client_is_content(tmp_path: Path) -> None:
    server = world_server(["calendar", "mail"], SEED)
    home = put(server.files, tmp_path / "tools" / "world")
    argv = [arg.replace("/tools/world", str(home)) for arg in server.argv]
    parameters = StdioServerParameters(command=argv[0], args=argv[1:], cwd=tmp_path)
    async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
        await session.initialize()
        names = [tool.name for tool in (await session.list_tools()).tools]
        assert names == [*PARTS["calendar"].TOOLS, *PARTS["mail"].TOOLS]
        result = await session.call_tool("reply_mail", {"mail": 3, "body": "Yes."})
        assert result.content[0].text == '{"id": 4}'  # type: ignore[union-attr]
