"""Sampled ids to text, as they come.

Invariant: the pieces that :meth:`Decoder.push` and :meth:`Decoder.finish` return, joined, are what the tokenizer makes
of all visible ids at once; a piece never has to be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Alphabet", "Decoder"]

_UNSURE = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 3
"""Bytes of an unfinished UTF-8 sequence, and so the most ids that one can be spread over."""


@dataclass(frozen=True)
class Alphabet:
    """What decoding needs to know of a tokenizer; one for all decoders."""

    tokenizer: Tokenizer
    hidden: frozenset[int] = frozenset()
    """Ids that are not text (turn ends and other special tokens)."""
    size: int = field(init=False)
    """Ids from here on are in the model (padded to a round number) but not in the tokenizer: no text either."""
    bytes_ids: frozenset[int] = field(init=False)
    """Ids of single bytes, where the tokenizer falls back to bytes: a run of them is decoded as one."""
    anchor: tuple[int, ...] = field(init=False)
    """Ids of a plain letter. Decoded in front of others, it keeps decoders from taking them for a beginning."""
    anchor_length: int = field(init=False)

    def __post_init__(self) -> None:
        found: set[int] = set()
        decoder = self.tokenizer.decoder
        if decoder is not None and b"ByteFallback" in decoder.__getstate__():
            names = (f"<0x{n:02X}>" for n in range(256))
            found = {i for name in names if (i := self.tokenizer.token_to_id(name)) is not None}
        known = set(self.tokenizer.get_vocab().values())
        size = max(known) + 1
        anchor = self.tokenizer.encode("a", add_special_tokens=False).ids
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "hidden", self.hidden | (set(range(size)) - known))
        object.__setattr__(self, "bytes_ids", frozenset(found))
        object.__setattr__(self, "anchor", tuple(anchor))
        object.__setattr__(self, "anchor_length", len(self.text(anchor)))

    def text(self, ids: Iterable[int]) -> str:
        """All visible ``ids`` at once."""
        return self.tokenizer.decode(self.visible(ids), skip_special_tokens=False)

    def visible(self, ids: Iterable[int]) -> list[int]:
        """Those of ``ids`` that are text."""
        return [i for i in ids if i not in self.hidden and i < self.size]


class Decoder:
    """The text of one reply. Holds back what the next id may still change: an unfinished character, or a run of
    single-byte ids."""

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._pending: list[int] = []
        self._told = 0
        """Characters of the pending ids that were returned already."""
        self._begun = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` add."""
        self._pending += self._alphabet.visible(ids)
        return self._take(final=False) if self._pending else ""

    def finish(self) -> str:
        """What is still held back."""
        return self._take(final=True) if self._pending else ""

    def _take(self, *, final: bool) -> str:
        ids = self._pending
        settled = len(ids)
        if not final and self._alphabet.bytes_ids:
            while settled and ids[settled - 1] in self._alphabet.bytes_ids:
                settled -= 1
            if not settled:
                return ""
        text = self._decoded(ids[:settled])
        if not final and text.endswith(_UNSURE) and not self._alphabet.bytes_ids:
            new = text[self._told : -1]
            self._told = len(text) - 1
            self._begun = self._begun or self._told > 0
            if len(ids) > 2 * _LONGEST and self._begun:  # noise, or a window that would grow for ever
                self._pending = ids[-_LONGEST:]
                self._told = len(self._decoded(self._pending)) - 1
            return new
        if not text and not final:
            return ""
        new = text[self._told :]
        self._pending = ids[settled:]
        self._told = 0
        self._begun = True
        return new

    def _decoded(self, ids: list[int]) -> str:
        alphabet = self._alphabet
        if not self._begun or not ids:
            return alphabet.tokenizer.decode(ids, skip_special_tokens=False)
        whole = alphabet.tokenizer.decode([*alphabet.anchor, *ids], skip_special_tokens=False)
        return whole[alphabet.anchor_length :]
