"""Engine ``replay``: replays recorded completions or turns, for tests and demos without a model.

Invariant: an answer of :class:`ReplayEngine` depends on the conversation only (its n-th answer is its n-th recorded
completion), so episodes can share an engine in any order, and be resumed. :class:`ReplayTokens` answers a prompt only
with ids that were sampled after exactly the same ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.engines.protocol import CallDelta, Completion, Delta, GenerateRequest, Sampling, Tokens
from clawgym.errors import EngineError
from clawgym.records import ToolCall, Turn, Usage, prompt_ids
from clawgym.registry import engines

__all__ = ["Recorded", "ReplayEngine", "ReplayTokens", "completion_from_json", "completion_to_json", "replay_engine"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded completion, and the conversations it belongs to."""

    completion: Completion
    match: str = ""
    """Text that the first user message must contain; empty: all conversations."""


class ReplayEngine:
    """Answers each conversation with the completions in ``recorded``, in order."""

    name = "replay"

    def __init__(self, recorded: Iterable[Recorded | Completion]) -> None:
        self._recorded = tuple(r if isinstance(r, Recorded) else Recorded(r) for r in recorded)
        rows = [(r.match, completion_to_json(r.completion)) for r in self._recorded]
        self._digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_file(cls, path: str | Path) -> ReplayEngine:
        """Read a JSON Lines file with completions ``{"text": ..., "tool_calls": [{"id", "name", "arguments"}]}``.

        Each may have a ``match``. Raises :class:`EngineError` for an unreadable file or line.
        """
        recorded: list[Recorded] = []
        try:
            lines = Path(path).read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise EngineError(f"{path}: recorded completions cannot be read ({error}): check the path") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                recorded.append(Recorded(completion_from_json(data), str(data.get("match", ""))))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise EngineError(
                    f"{path}:{number}: not a recorded completion ({error!r}): correct the line"
                ) from error
        return cls(recorded)

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """The next recorded answer of this conversation. Raises :class:`EngineError` (status 422) if there is none."""
        first = next((str(m.get("content")) for m in messages if m.get("role") == "user"), "")
        index = sum(m.get("role") == "assistant" for m in messages)
        mine = [r.completion for r in self._recorded if r.match in first]
        if index >= len(mine):
            raise EngineError(
                f"the recording has {len(mine)} answers for this conversation and number {index + 1} was asked for: "
                "record more, or lower max_steps",
                status=422,
            )
        return mine[index]

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncGenerator[Delta, None]:
        """The next recorded answer of this conversation, in pieces."""
        answer = await self.complete(body["messages"], sampling=Sampling())
        if answer.reasoning:
            yield Delta(reasoning=answer.reasoning)
        for word in answer.text.splitlines(keepends=True):
            yield Delta(word)
        for index, call in enumerate(answer.tool_calls):
            yield Delta(calls=(CallDelta(index, call.id, call.name),))
            yield Delta(calls=(CallDelta(index, arguments=json.dumps(call.arguments, ensure_ascii=False)),))
        reason = "tool_calls" if answer.tool_calls and answer.finish_reason == "stop" else answer.finish_reason
        yield Delta(finish_reason=reason, usage=answer.usage)

    def identity(self) -> dict[str, Any]:
        """The digest of the recording."""
        return {"name": self.name, "recording_sha256": self._digest}

    async def aclose(self) -> None: ...


@engines.register("replay")
def replay_engine(model: Path) -> ReplayEngine:
    """Replays recorded completions in order, without a model.

    Args:
        model: a JSON Lines file; see :meth:`ReplayEngine.from_file`.
    """
    return ReplayEngine.from_file(model)


class ReplayTokens:
    """Replays the sampled ids of ``episodes`` (each a list of turns), token by token.

    A prompt that occurs several times gets its answers in order, repeatedly. Unfinished turns are left out.
    ``tokenizer`` is the tokenizer that rendered the prompts.
    """

    name = "replay-tokens"

    def __init__(
        self, episodes: Iterable[Sequence[Turn]], *, tokenizer: str | Path, context_window: int = 1 << 20
    ) -> None:
        self.tokenizer = str(tokenizer)
        self.context_window = context_window
        self._answers: dict[tuple[int, ...], list[Turn]] = {}
        self._given: dict[tuple[int, ...], int] = {}
        digest = hashlib.sha256()
        for turns in episodes:
            for index, turn in enumerate(turns):
                if turn.finish_reason in ("stop", "length", "tool_calls") and turn.sampled_ids:
                    prompt = prompt_ids(turns, index)
                    self._answers.setdefault(prompt, []).append(turn)
                    digest.update(repr((prompt, turn.sampled_ids, turn.logprobs)).encode())
        self._digest = digest.hexdigest()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Tokens, None]:
        """The next recorded answer to exactly these ids. Raises :class:`EngineError` for other ids."""
        key = tuple(request.prompt_ids)
        turns = self._answers.get(key)
        if turns is None:
            raise EngineError(
                f"nothing was recorded after this prompt of {len(key)} ids: replay it with the tokenizer, the messages "
                "and the tools of the recording",
                status=404,
            )
        count = self._given.get(key, 0)
        self._given[key] = count + 1
        turn = turns[count % len(turns)]
        ids = turn.sampled_ids[: request.sampling.max_tokens]
        for n, token in enumerate(ids):
            reason = None
            if n == len(ids) - 1:
                whole = len(ids) == len(turn.sampled_ids) and turn.finish_reason != "length"
                reason = "stop" if whole else "length"
            yield Tokens((token,), turn.logprobs[n : n + 1], turn.policy_version, reason)

    def identity(self) -> dict[str, Any]:
        """The digest of the recording."""
        return {"name": self.name, "recording_sha256": self._digest}

    async def aclose(self) -> None: ...


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """The completion as JSON data, without exact tokens; see :func:`completion_from_json`."""
    usage = completion.usage
    return {
        "text": completion.text,
        "tool_calls": [{"id": c.id, "name": c.name, "arguments": dict(c.arguments)} for c in completion.tool_calls],
        "malformed_calls": list(completion.malformed_calls),
        "reasoning": completion.reasoning,
        "finish_reason": completion.finish_reason,
        "usage": {name: getattr(usage, name) for name in usage.__slots__},
        "model": completion.model,
    }


def completion_from_json(data: Mapping[str, Any]) -> Completion:
    """Read a completion from JSON data; only ``text`` or ``tool_calls`` is required."""
    if "text" not in data and "tool_calls" not in data:
        raise ValueError("neither text nor tool_calls")
    calls = data.get("tool_calls") or ()
    return Completion(
        text=str(data.get("text") or ""),
        tool_calls=tuple(
            ToolCall(str(c.get("id") or f"call_{i + 1}"), str(c["name"]), dict(c.get("arguments") or {}))
            for i, c in enumerate(calls)
        ),
        malformed_calls=tuple(str(m) for m in data.get("malformed_calls") or ()),
        reasoning=data.get("reasoning"),
        finish_reason=str(data.get("finish_reason") or "stop"),
        usage=Usage(**(data.get("usage") or {})),
        model=str(data.get("model") or "replay"),
    )
