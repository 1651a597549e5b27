"""Find the symbolic links of a workspace that lead into given folders, in time linear in the lengths of the links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["links_into"]

_MOST_FOLLOWED = 40
"""The kernel's limit of followed links; a longer chain is an error."""


def links_into(links: Mapping[str, str], trees: Sequence[str]) -> set[str]:
    """The ``links`` (path -> target) that lead into ``trees``, directly or through other links, whether or not the
    target exists. All paths are relative to the top of the workspace."""
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
    """A node of the tree of paths: a link, a wanted tree, or a folder above one."""

    __slots__ = ("above", "inner", "target", "wanted", "way")

    def __init__(self, above: _Place | None) -> None:
        self.above = above or self  # the parent of the top is the top itself
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
    """The resolution of one link, as the kernel does it."""

    __slots__ = ("_ahead", "_followed", "beyond", "ended", "meets", "place")

    def __init__(self, link: _Place) -> None:
        self._ahead = (link.target or "").split("/")[::-1]
        self._followed = 1
        self.place = link.above
        self.beyond = 0
        """Number of folders below ``place`` at the current position; there is no link and no wanted tree in them."""
        self.meets = _is_wanted(link)
        self.ended = False

    def go(self) -> _Place | None:
        """Resolve to the end, or up to a link that must be resolved first; returns that link."""
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
        if not way.ended or self._followed > _MOST_FOLLOWED:  # a loop, or too long: an error in the kernel
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
    """Resolve ``link`` and the links that it needs. No recursion: a chain may have as many links as the workspace."""
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
