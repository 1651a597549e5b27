"""Which links of a workspace lead into some of its folders: in time that grows with the lengths of the links alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["links_into"]

_MOST_FOLLOWED = 40
"""As the kernel has it: a longer way leads nowhere."""


def links_into(links: Mapping[str, str], trees: Sequence[str]) -> set[str]:
    """The ``links`` (path to target) that lead into ``trees``, by way of other links too, whether or not there is
    anything now. Every path is from the top of the workspace."""
    top = _Place(None)
    for tree in trees:
        top.at(tree).wanted = True
    found = {name: top.at(name) for name in links}
    for name, place in found.items():
        place.target = links[name]
    for place in found.values():
        _follow(place)
    return {name for name, place in found.items() if place.way is not None and place.way.meets}


class _Place:
    """A path that is a link or a wanted tree, or leads to one."""

    __slots__ = ("above", "inner", "target", "wanted", "way")

    def __init__(self, above: _Place | None) -> None:
        self.above = above or self  # above the top is the top: a link that climbs further is in no workspace
        self.inner: dict[str, _Place] = {}
        self.wanted = False
        self.target: str | None = None
        self.way: _Way | None = None

    def at(self, path: str) -> _Place:
        place = self
        for part in path.split("/"):
            if part not in place.inner:
                place.inner[part] = _Place(place)
            place = place.inner[part]
        return place


class _Way:
    """What the kernel passes through when it follows one link."""

    __slots__ = ("_ahead", "_followed", "beyond", "ended", "meets", "place")

    def __init__(self, link: _Place) -> None:
        self._ahead = (link.target or "").split("/")[::-1]
        self._followed = 1
        self.place = link.above
        self.beyond = 0
        """Folders from ``place`` to where the way is: below them there is no link, and nothing that is wanted."""
        self.meets = _is_wanted(link)
        self.ended = False

    def go(self) -> _Place | None:
        """Go on to the end, or to a link that has to be followed before; returns that link."""
        while self._ahead:
            part = self._ahead.pop()
            if part == "..":
                if self.beyond:
                    self.beyond -= 1
                else:
                    self.place = self.place.above
                continue
            if part in ("", "."):
                continue
            inner = None if self.beyond else self.place.inner.get(part)
            if inner is None:
                self.beyond += 1
            elif inner.target is None:
                self.place, self.meets = inner, self.meets or inner.wanted
            elif inner.way is None:
                self._ahead.append(part)
                return inner
            else:
                self._through(inner, inner.way)
        self.ended = True
        return None

    def _through(self, link: _Place, way: _Way) -> None:
        self.meets = self.meets or link.wanted or way.meets
        self._followed += way._followed
        if not way.ended or self._followed > _MOST_FOLLOWED:  # a circle, or too long: it leads nowhere
            self._followed = _MOST_FOLLOWED + 1
            self._ahead.clear()
        self.place, self.beyond = way.place, way.beyond


def _is_wanted(place: _Place) -> bool:
    while place.above is not place:
        if place.wanted:
            return True
        place = place.above
    return False


def _follow(link: _Place) -> None:
    """Follow ``link``, and what it needs, without recursion: a chain may be as long as the workspace has entries."""
    waiting = [link]
    while waiting:
        place = waiting[-1]
        if place.way is None:
            place.way = _Way(place)
        further = place.way.go()
        if further is None:
            waiting.pop()
        else:
            waiting.append(further)
