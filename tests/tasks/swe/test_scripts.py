"""Scripts that make a wrong source of another: what they replace, and by what."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from clawgym.tasks.swe.scripts import _difference

texts = st.lists(st.sampled_from([b"a", b"b", b"\n", b"ab"]), max_size=12).map(b"".join)


@given(texts, texts)
@example(b"", b"")
@example(b"abab", b"ab")
@example(b"return a - b\n", b"return a + b\n")
@example(b"xaaaa", b"xaabaa")
@example(b"cdab", b"zdbb")
def test_difference_is_the_smallest_replacement(old: bytes, new: bytes) -> None:
    start, end, text = _difference(old, new)
    assert 0 <= start <= end <= len(old)
    assert old[:start] + text + old[end:] == new
    if start < end and text:
        assert old[start] != text[0]
        assert old[end - 1] != text[-1]
