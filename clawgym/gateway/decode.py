"""Decode sampled ids to text while they are streamed.

Invariant: the texts returned by :meth:`Decoder.push` and :meth:`Decoder.finish`, joined, equal the decoding of all
visible ids at once. Returned text never changes later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Alphabet", "Decoder"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 3
"""Most bytes of an incomplete UTF-8 sequence, and so the most ids that it can consist of."""


@dataclass(frozen=True)
class Alphabet:
    """Properties of a tokenizer that decoders need; shared by all decoders."""

    tokenizer: Tokenizer
    hidden: frozenset[int] = frozenset()
    """Ids that are not text: ends of turns and other special tokens."""
    size: int = field(init=False)
    """Ids from here on exist in the model, whose vocabulary is padded, but not in the tokenizer. They are not text."""
    bytes_ids: frozenset[int] = field(init=False)
    """Ids of single bytes, if the tokenizer has byte fallback. A run of them is decoded together."""
    anchor: tuple[int, ...] = field(init=False)
    """Ids of a plain letter. It is put in front of ids whose decoding differs at the beginning of a text."""
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
        """Decode all visible ``ids`` at once."""
        return self.tokenizer.decode(self.visible(ids), skip_special_tokens=False)

    def visible(self, ids: Iterable[int]) -> list[int]:
        """Return those of ``ids`` that are text."""
        return [i for i in ids if i not in self.hidden and i < self.size]


class Decoder:
    """Decodes one reply.

    It holds back text that the next id may still change: an incomplete character, or a run of single-byte ids.
    """

    def __init__(self, alphabet: Alphabet) -> None:
        self._alphabet = alphabet
        self._pending: list[int] = []
        self._returned = 0
        """Characters of the pending ids that were returned already."""
        self._started = False

    def push(self, ids: Iterable[int]) -> str:
        """Add ``ids`` and return the new text."""
        self._pending += self._alphabet.visible(ids)
        return self._take(final=False) if self._pending else ""

    def finish(self) -> str:
        """Return the text that is still held back."""
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
        if not final and text.endswith(_REPLACEMENT) and not self._alphabet.bytes_ids:
            new = text[self._returned : -1]
            self._returned = len(text) - 1
            self._started = self._started or self._returned > 0
            if len(ids) > 2 * _LONGEST and self._started:  # noise: keep the window small
                self._pending = ids[-_LONGEST:]
                self._returned = len(self._decoded(self._pending)) - 1
            return new
        if not text and not final:
            return ""
        new = text[self._returned :]
        self._pending = ids[settled:]
        self._returned = 0
        self._started = True
        return new

    def _decoded(self, ids: list[int]) -> str:
        alphabet = self._alphabet
        if not self._started or not ids:
            return alphabet.tokenizer.decode(ids, skip_special_tokens=False)
        whole = alphabet.tokenizer.decode([*alphabet.anchor, *ids], skip_special_tokens=False)
        return whole[alphabet.anchor_length :]
