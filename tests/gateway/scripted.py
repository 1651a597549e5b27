"""A token engine with scripted replies, which records its inputs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from clawgym.engines.protocol import GenerateRequest, Sampling, Tokens
from clawgym.errors import EngineError


@dataclass
class Seen:
    """One call of the engine: its inputs and outputs."""

    prompt: tuple[int, ...]
    sampling: Sampling
    session: str
    adapter: str | None
    images: tuple[str, ...]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0


class ScriptedEngine:
    """Replies with ``say(prompt text, number of the call)``: a text, ids, or an exception to raise.

    A text is tokenized by the model's tokenizer, or with ``spell`` to random other ids of the same text, since a model
    seldom samples the ids that a tokenizer gives. It ends with the model's end of turn, unless it exceeds
    ``max_tokens``.
    """

    name = "scripted"

    def __init__(
        self,
        folder: Path,
        say: Callable[[str, int], str | Sequence[int] | Exception],
        *,
        spell: random.Random | None = None,
        at_once: int = 1,
        pause: float = 0.0,
        context_window: int = 8192,
    ) -> None:
        self.tokenizer = str(folder)
        self.context_window = context_window
        self.policy_version = 0
        self.seen: list[Seen] = []
        self.open = 0
        self.before_end: asyncio.Event | None = None
        self.called = asyncio.Event()
        self._words = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._say = say
        self._spell = spell
        self._at_once = at_once
        self._pause = pause
        self._end = self._words.token_to_id("<|im_end|>")

    async def generate(self, request: GenerateRequest):
        prompt_ids, sampling = request.prompt_ids, request.sampling
        seen = Seen(
            tuple(prompt_ids), sampling, request.session, request.adapter, tuple(i.sha256 for i in request.images)
        )
        seen.version = self.policy_version
        number = len(self.seen)
        self.seen.append(seen)
        self.called.set()
        said = self._say(self._words.decode(list(prompt_ids), skip_special_tokens=False), number)
        if isinstance(said, Exception):
            raise said
        ids = list(said) if not isinstance(said, str) else [*self.encode(said), self._end]
        cut = sampling.max_tokens is not None and len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        self.open += 1
        try:
            for start in range(0, len(ids), self._at_once):
                piece = tuple(ids[start : start + self._at_once])
                last = start + len(piece) >= len(ids)
                logprobs = tuple(-0.5 - 0.25 * ((number + start + n) % 7) for n in range(len(piece)))
                if last and self.before_end is not None:
                    await self.before_end.wait()
                await asyncio.sleep(self._pause)
                seen.sampled += piece
                seen.logprobs += logprobs
                yield Tokens(piece, logprobs, seen.version, ("length" if cut else "stop") if last else None)
        finally:
            self.open -= 1

    def encode(self, text: str) -> list[int]:
        ids = self._words.encode(text, add_special_tokens=False).ids
        return ids if self._spell is None else self._respell(ids)

    def _respell(self, ids: list[int]) -> list[int]:
        """Return other ids of the same text, with some tokens split."""
        rng, out = self._spell, []
        assert rng is not None
        for token in ids:
            text = self._words.decode([token], skip_special_tokens=False)
            parts = [i for c in text for i in self._words.encode(c, add_special_tokens=False).ids]
            whole = self._words.decode(parts, skip_special_tokens=False) == text
            out += parts if whole and len(text) > 1 and text[0] != "<" and rng.random() < 0.5 else [token]
        return out

    def identity(self):
        return {"name": self.name}

    async def aclose(self) -> None: ...


def refused(status: int, *, retryable: bool = False) -> EngineError:
    return EngineError(f"endpoint returned {status}: wait", retryable=retryable, status=status)
