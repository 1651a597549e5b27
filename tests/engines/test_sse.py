"""Event streams: events depend on the bytes, not on how they were split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.bounds import OutOfBounds
from clawgym.engines import _sse
from clawgym.engines._http import _without
from clawgym.engines._sse import EventReader


def read(*pieces: bytes) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": comment\n\ndata: a\n\n:\n\n", [b"a"]),
        (b"event: x\nid: 3\nretry: 1\ndata: a\n\n", [b"a"]),
        (b"event: x\n\n", []),
        (b"data\n\n", [b""]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"database: a\n\n", []),
    ],
)
def test_events(stream: bytes, events: list[bytes]) -> None:
    assert read(stream) == events
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == events


LINES = st.lists(
    st.one_of(
        st.binary(max_size=12).map(lambda b: b"data: " + b.replace(b"\n", b"").replace(b"\r", b"")),
        st.sampled_from([b"", b"", b": hello", b"event: x", b"data", b"data:", b"id"]),
    ),
    max_size=20,
)


@given(LINES, st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1, max_size=5), st.data())
def test_however_it_is_cut(lines: list[bytes], ends: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + ends[i % len(ends)] for i, line in enumerate(lines))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(*pieces) == read(stream)


@given(st.lists(st.binary(min_size=1, max_size=30).filter(lambda b: not set(b) & set(b"\r\n")), max_size=8))
def test_every_event_comes_out(contents: list[bytes]) -> None:
    assert read(b"".join(b"data: " + c + b"\n\n" for c in contents)) == contents


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 90, b"data: x\n" * 20])
def test_an_event_without_end_is_refused(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sse, "LARGEST_EVENT", 1000)
    with pytest.raises(OutOfBounds, match="LARGEST_EVENT"):
        read(*[piece] * 100)


@pytest.mark.parametrize(
    ("event", "same"),
    [
        (b'{"a":[{"ids":[1,2,3]}]}', True),
        (b'{"a": [{"ids": [1,2,3]}]}', True),
        (b'{"ids":[1,2,3,4]}', False),
        (b'{"ids":[[1,2,3]]}', False),
        (b'{"other":[1,2,3]}', False),
        (b'{"ids":[1, 2, 3]}', False),  # parsed and compared as usual
        (b'{"text":"\\"ids\\":[1,2,3]"}', False),
    ],
)
def test_only_ids_that_are_repeated_byte_for_byte_are_left_out(event: bytes, same: bool) -> None:
    short = _without(event, b'"ids":', b"[1,2,3]")
    assert (short == event) is not same
    assert json.loads(short) != json.loads(event) if same else json.loads(short) == json.loads(event)
