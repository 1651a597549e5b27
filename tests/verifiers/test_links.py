"""Which links lead into a folder: as the kernel would find it, and in time."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from clawgym.verifiers._links import links_into

PARTS = st.sampled_from(["a", "b", "c", "reward", "..", ".", ""])
LINKS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d/a", "d/b", "d/e/a", "reward"]),
    st.lists(PARTS, min_size=1, max_size=5).map("/".join).filter(bool),
)


def passes(name: str, links: dict[str, str], tree: str) -> bool | None:
    """Step by step, as the kernel goes; None if there is no end to it."""
    place: list[str] = []
    ahead, followed, found = name.split("/")[::-1], 0, False
    while ahead:
        part = ahead.pop()
        if part == "..":
            place = place[:-1]
        elif part not in ("", "."):
            place.append(part)
        found = found or place[:1] == [tree]
        if part != ".." and "/".join(place) in links:
            followed += 1
            if followed > 40:
                return None
            ahead += links["/".join(place)].split("/")[::-1]
            place.pop()
    return found


@given(LINKS)
def test_links_match_kernel_resolution(links: dict[str, str]) -> None:
    found = links_into(links, ["reward"])
    for name in links:
        expected = passes(name, links, "reward")
        assert expected is None or (name in found) == expected, (name, links)


def test_longest_chains_and_names_are_fast() -> None:
    chain = {f"{i:05}" + "n" * 200: f"{i + 1:05}" + "n" * 200 for i in range(20_000)} | {
        "20000" + "n" * 200: "reward/x"
    }
    far = {f"f{i}": "a/../" * 800 + "reward/x" for i in range(2_000)}
    circle = {f"c{i}": f"c{(i + 1) % 20_000}" for i in range(20_000)}
    started = time.process_time()
    found = links_into(chain | far | circle, ["reward"])
    assert time.process_time() - started < 10  # some two seconds; a way for each link took minutes
    assert set(far) <= found
    assert found.isdisjoint(circle)
    assert {name for name in chain if name > "19970"} <= found
