from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from clawgym.trainers.verl.timeline import Span, Spans, merged

SPANS = st.lists(
    st.tuples(st.sampled_from(["serving", "training"]), st.integers(0, 40), st.integers(0, 9)).map(
        lambda s: (s[0], float(s[1]), float(s[1] + s[2]))
    )
)


def covered(spans: list[Span], loop: str) -> set[float]:
    """The quarters of a second in which a loop was busy."""
    return {q / 4 for name, a, b in spans if name == loop for q in range(int(4 * a), int(4 * b) + 1)}


@given(SPANS)
def test_merged_spans_keep_union_without_overlap(spans: list[Span]) -> None:
    found = merged(spans)
    for loop in ("serving", "training"):
        assert covered(found, loop) == covered(spans, loop)
        own = [(a, b) for name, a, b in found if name == loop]
        assert all(first[1] < second[0] for first, second in pairwise(own))


def test_spans_are_taken_once() -> None:
    spans = Spans()
    with spans.busy("judging"), spans.busy("judging"):
        pass
    ((loop, start, end),) = spans.take()
    assert loop == "judging"
    assert start <= end
    assert spans.take() == []
