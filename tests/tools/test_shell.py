"""Shell and file tools in a real sandbox; the tests of agents have the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records import Limits
from clawgym.sandbox import Backend
from clawgym.tools import CallRefused, Tools
from clawgym.tools.protocol import clipped

from ..agents.conftest import make_task
from .conftest import Opened, opened
from .tasks_with_tools import call

LIMITS = Limits(output_bytes=400, command_seconds=5, memory_mb=256, disk_mb=64)


@pytest.fixture
async def shell(backend: Backend):
    async with opened(make_task(limits=LIMITS), backend) as made:
        yield made


async def test_some_lines_of_a_file(shell: Opened) -> None:
    await shell(call("write_file", path="f", content="".join(f"line {n}\n" for n in range(1, 101))))
    one, few, end, none, wide, whole = await shell(
        call("read_file", path="f", first_line=3, last_line=3),
        call("read_file", path="f", last_line=2),
        call("read_file", path="f", first_line=99, last_line=500),
        call("read_file", path="f", first_line=200),
        call("read_file", path="f", first_line=1, last_line=100),
        call("read_file", path="f"),
    )
    assert one == "line 3\n[lines 3 to 3 of 100]"
    assert few == "line 1\nline 2\n[lines 1 to 2 of 100]"
    assert end == "line 99\nline 100\n[lines 99 to 100 of 100]"
    assert none == "[error: there are no lines 200 to 100: the file has 100]"
    assert "ask for fewer lines" in wide
    assert "ask for some of the lines" in whole
    assert all(len(text) < 600 for text in (wide, whole))
    assert (await shell(call("read_file", path="f", first_line=0)))[0].startswith("[error: read_file")


async def test_edits(shell: Opened) -> None:
    await shell(call("bash", command="printf 'a b a\\r\\nc\\000d\\377' > f; chmod 750 f; ln -s f link; mkdir folder"))
    none, two, every, one, binary, away, folder, link = await shell(
        call("edit_file", path="f", old="x", new="y"),
        call("edit_file", path="f", old="a", new="z"),
        call("edit_file", path="f", old="a", new="zz", replace_all=True),
        call("edit_file", path="f", old="b", new="\0é", replace_all=None),
        call("edit_file", path="f", old="c\0d", new=""),
        call("edit_file", path="gone", old="a", new="b"),
        call("edit_file", path="folder", old="a", new="b"),
        call("edit_file", path="link", old="zz", new="b"),
    )
    assert "does not stand in f" in none
    assert "stands in f 2 times" in two
    assert [every, one, binary] == ["[replaced 2 times]", "[replaced 1 time]", "[replaced 1 time]"]
    assert await shell.sandbox.get("/root/.openclaw/workspace/f") == "zz \0é zz\r\n".encode() + b"\xff"
    assert all(text.startswith("[error: ") for text in (away, folder, link))
    assert "exit code 0" in (await shell(call("bash", command="test -x f")))[0]


async def test_an_edit_is_checked_before_it_is_made(shell: Opened) -> None:
    tools: Tools = shell.tools
    seen = await tools.call_all(
        [
            call("edit_file", "1", path="f", old="", new="x"),
            call("edit_file", "2", path="f", old="a"),
            call("bash", "3", command="true", timeout=9),
            call("read_file", "4", path="x\0"),
            call("submit", "5", message=None),
        ]
    )
    assert [type(one) is CallRefused for one in seen] == [True, True, True, True, False]
    assert [one.call_id for one in seen] == list("12345")
    assert "does not take 'timeout', but 'command'" in seen[2].content


@given(st.binary(max_size=300), st.integers(2, 100))
def test_clipped_text_keeps_both_ends(data: bytes, limit: int) -> None:
    text = clipped(data, limit)
    if len(data) <= limit // 2 * 2:
        assert text == data.decode("utf-8", "backslashreplace")
    else:
        keep = limit // 2
        assert text.startswith(data[:keep].decode("utf-8", "backslashreplace"))
        assert text.endswith(data[-keep:].decode("utf-8", "backslashreplace"))
        assert f"[{len(data) - 2 * keep} bytes left out]" in text
