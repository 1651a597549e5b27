"""Load a tokenizer for :func:`clawgym.pool.check.check` from a folder, without network access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym.errors import MissingDependency, TraceError
from clawgym.pool.check import TokenizerLike

__all__ = ["load"]


class _Words:
    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependency("--tokenizer needs tokenizers: pip install 'clawgym[gateway]'") from error
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TraceError(f"{path}: not a tokenizer ({error}): give the folder of the model") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: Mapping[int, str] = {id: token.content for id, token in added.items() if token.special}
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def load(folder: str | Path) -> TokenizerLike:
    """Load ``tokenizer.json`` from ``folder``. Raises :class:`~clawgym.errors.TraceError` if that fails."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise TraceError(f"{folder}: no tokenizer.json in it: give the folder of the model's tokenizer")
    return _Words(path)
