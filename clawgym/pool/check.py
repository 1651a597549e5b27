"""Check whether the tokens recorded in a trace are exact.

The same check applies to ClawGym's own episodes and to trace files of other tools. Results: ``exact`` (no
contradiction, nothing missing), ``unproved`` (something is missing, or looks made up), ``broken`` (it contradicts
itself), ``empty`` (no turns). Pure functions, without files and network. ``docs/reference/pool.md`` lists what the
check cannot detect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args

import numpy as np

from clawgym.records import Role, Turn, prompt_ids
from clawgym.statistics import as_float

__all__ = ["TraceFinding", "TraceTurn", "TraceVerdict", "TokenizerLike", "check", "trace_of"]

MAX_ID = 2**31 - 1
RUN = 8
"""Least number of equal log-probs in a row that cannot be a coincidence."""
SLACK = 8
"""Most ids at the end of a prompt (such as ``<think>``) that a chat template may omit from the history."""
_ROLES = frozenset(get_args(Role))


@dataclass(frozen=True)
class TraceTurn:
    """One model call, or one training sequence, as recorded in a trace. None: not recorded."""

    prompt: Sequence[int] | None = None
    """All ids of the prompt."""
    response: Sequence[int] | None = None
    """All ids after the prompt."""
    mask: Sequence[int] | None = None
    """(len(response),): 1 where an id was sampled; None: everywhere."""
    logprobs: Sequence[float] | None = None
    """One per sampled id, or one per id of ``response``."""
    parent: int | None = None
    """Index of the turn that it continues, if ``declared``."""
    declared: bool = False
    """Whether the trace says which turn it continues, or that it continues none."""
    role: str = "main"
    versions: Sequence[Any] = ()
    """Policy versions: one, or one per id of ``response``."""
    flaw: str | None = None
    text: Sequence[str] | None = None
    """Texts that the decoded sample must contain."""
    greedy: bool = False
    """Whether it was sampled (almost) deterministically, so that log-probs of 0 are plausible."""
    problems: tuple[str, ...] = ()
    """Contradictions found by the reader of the trace, which make it broken."""


@dataclass(frozen=True)
class TraceFinding:
    """One reason why an episode is not exact, or a note."""

    turn: int | None
    level: Literal["broken", "unproved", "note"]
    code: str
    text: str


@dataclass
class TraceVerdict:
    """The result of the check of one episode."""

    episode: str
    turns: int = 0
    sampled: int = 0
    """Number of sampled ids."""
    branches: int = 0
    """Number of turns that continue no earlier one; 1 for an episode without branches."""
    reencoded: int = 0
    """Number of sampled ids that are different ids in a later prompt."""
    findings: list[TraceFinding] = field(default_factory=list)

    @property
    def status(self) -> Literal["exact", "unproved", "broken", "empty"]:
        """The worst level of the findings, ``exact`` without any; ``empty`` for an episode without turns."""
        levels = {finding.level for finding in self.findings}
        if not self.turns:
            return "empty"
        return "broken" if "broken" in levels else "unproved" if "unproved" in levels else "exact"

    def add(self, turn: int | None, level: Literal["broken", "unproved", "note"], code: str, text: str) -> None:
        self.findings.append(TraceFinding(turn, level, code, text))


class TokenizerLike(Protocol):
    """The parts of a tokenizer that the check uses."""

    size: int
    """The highest id plus 1."""
    special: Mapping[int, str]
    """Id -> text of each special token. The text of a sample may leave them out."""

    def decode(self, ids: Sequence[int]) -> str: ...
    def encode(self, text: str) -> Sequence[int]: ...


def trace_of(turns: Sequence[Turn]) -> list[TraceTurn]:
    """Convert ClawGym's own turns for :func:`check`."""
    made = []
    for index, turn in enumerate(turns):
        reply = turn.reply
        temperature = turn.sampling.get("temperature")
        texts = [reply.get("content"), reply.get("reasoning_content")]
        texts += [(call.get("function") or {}).get("name") for call in reply.get("tool_calls") or ()]
        made.append(
            TraceTurn(
                prompt=prompt_ids(turns, index),
                response=turn.sampled_ids,
                logprobs=turn.logprobs,
                parent=turn.parent,
                declared=True,
                role=turn.role,
                versions=() if turn.policy_version is None else (turn.policy_version,),
                flaw=turn.flaw,
                text=[part.strip() for part in texts if isinstance(part, str) and part.strip()],
                greedy=isinstance(temperature, int | float) and temperature < 0.2,
            )
        )
    return made


def check(episode: str, turns: Sequence[TraceTurn], words: TokenizerLike | None = None) -> TraceVerdict:
    """Check the turns of one episode, in the order of their calls."""
    verdict = TraceVerdict(episode, len(turns))
    if not turns:
        verdict.add(None, "note", "empty", "no turn was recorded")
    kept: list[tuple[int, np.ndarray, np.ndarray]] = []  # index, prompt, prompt and response
    series: list[tuple[int, np.ndarray]] = []
    canonical = 0
    for index, turn in enumerate(turns):
        for problem in turn.problems:
            verdict.add(index, "broken", "unreadable", problem)
        if turn.role not in _ROLES:
            verdict.add(index, "broken", "role", f"role {turn.role!r} is not known")
        elif turn.role == "unknown":
            verdict.add(index, "note", "role", "role unknown: never trained")
        if turn.flaw is not None:
            verdict.add(index, "unproved", "flaw", f"marked as {turn.flaw}")
            continue
        ids = _ids(verdict, index, turn, words)
        if ids is None:
            continue
        prompt, response, mask = ids
        sampled = response[mask]
        verdict.sampled += len(sampled)
        _versions(verdict, index, turn, mask)
        logprobs = _logprobs(verdict, index, turn, mask)
        if logprobs is not None and not turn.greedy:
            series.append((index, logprobs))
        _edges(verdict, index, prompt)
        _history(verdict, index, turn, prompt, kept)
        kept.append((index, prompt, np.concatenate([prompt, response])))
        if words is not None and len(sampled):
            canonical += _decoded(verdict, index, turn, response, sampled, words)
    _padded(verdict, series)
    if words is not None and verdict.sampled >= 1000 and canonical == sum(t.flaw is None for t in turns):
        text = "every sample is just what its text encodes to, as re-encoded ids are, and most sampled ones: no proof"
        verdict.add(None, "note", "canonical", text)
    return verdict


def _array(values: Iterable[Any]) -> np.ndarray | None:
    """(n,) int64; None if a value is not a token id."""
    values = list(values)
    if set(map(type, values)) <= {int}:  # fast path for long prompts
        good = not values or (min(values) >= 0 and max(values) <= MAX_ID)
        return np.array(values, dtype=np.int64) if good else None
    good = all(isinstance(v, Integral) and not isinstance(v, bool) and 0 <= int(v) <= MAX_ID for v in values)
    return np.array(values, dtype=np.int64) if good else None


def _ids(
    verdict: TraceVerdict, index: int, turn: TraceTurn, words: TokenizerLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Prompt, response and the mask of sampled ids; None, with a finding, if they are invalid."""
    if turn.response is None or turn.prompt is None:
        what = "token ids" if turn.response is None and turn.prompt is None else (
            "sampled ids" if turn.response is None else "ids of the prompt")  # fmt: skip
        verdict.add(index, "unproved", "no-ids", f"no {what}")
        return None
    prompt, response = _array(turn.prompt), _array(turn.response)
    if prompt is None or response is None:
        verdict.add(index, "broken", "ids", "an id is not a whole number in 0..2**31-1")
        return None
    if words is not None and max(prompt.max(initial=0), response.max(initial=0)) >= words.size:
        verdict.add(index, "broken", "ids", f"an id is beyond the tokenizer's {words.size}")
        return None
    if not len(prompt):
        verdict.add(index, "unproved", "no-ids", "no ids of the prompt")
    if turn.mask is None:
        return prompt, response, np.ones(len(response), dtype=bool)
    mask = list(turn.mask)
    if len(mask) != len(response) or any(bit not in (0, 1) for bit in mask):
        verdict.add(index, "broken", "mask", f"a mask of {len(mask)} for {len(response)} ids, or not of 0 and 1")
        return None
    return prompt, response, np.array(mask, dtype=bool)


def _versions(verdict: TraceVerdict, index: int, turn: TraceTurn, mask: np.ndarray) -> None:
    versions = list(turn.versions)
    if not versions:
        verdict.add(index, "note", "version", "no policy version")
    elif len(versions) == len(mask) and len(mask) > 1:  # one per id: constant within each sampled run
        pieces = groupby(zip(mask.tolist(), versions, strict=True), key=lambda pair: pair[0])
        if any(bit and _different(version for _, version in piece) > 1 for bit, piece in pieces):
            verdict.add(index, "broken", "version", "more than one policy version in one turn")
    elif _different(versions) > 1:
        pieces_sampled = sum(bit for bit, _ in groupby(mask.tolist()))
        if len(versions) != pieces_sampled:
            verdict.add(index, "broken", "version", f"{_different(versions)} policy versions in one turn")


def _different(versions: Iterable[Any]) -> int:
    """The number of different versions, which may be any JSON in an untrusted file."""
    return len({version if isinstance(version, Hashable) else repr(version) for version in versions})


def _logprobs(verdict: TraceVerdict, index: int, turn: TraceTurn, mask: np.ndarray) -> np.ndarray | None:
    """(sampled,) the log-probs of the sampled ids; None, with a finding, if they are invalid."""
    count = int(mask.sum())
    if turn.logprobs is None:
        if count:
            verdict.add(index, "unproved", "no-logprobs", "no log-probs")
        return None
    values = list(turn.logprobs)
    if len(values) == len(mask):
        values = [value for value, bit in zip(values, mask, strict=True) if bit]
    if len(values) != count:
        verdict.add(index, "broken", "logprobs", f"{len(turn.logprobs)} log-probs for {count} sampled ids")
        return None
    if not all(isinstance(v, Real) and math.isfinite(as_float(v)) and v <= 0 for v in values):
        verdict.add(index, "broken", "logprobs", "a log-prob is not a finite number of at most 0")
        return None
    return np.array(values, dtype=np.float64)


def _padded(verdict: TraceVerdict, series: Sequence[tuple[int, np.ndarray]]) -> None:
    """Find log-probs that are padding. A certain token has a log-prob of 0 too, but those occur anywhere in a turn."""
    ends, before = [0], []  # lengths of runs of 0 at the end of each turn, and elsewhere
    for index, values in series:
        runs = [(value, sum(1 for _ in run)) for value, run in groupby(values.tolist())]
        same = max((length for value, length in runs if value < -1e-5), default=0)
        if same >= RUN or same == len(values) > 2:
            verdict.add(index, "unproved", "padding", f"{same} log-probs in a row are the same: made up")
        zeros = [length if value == 0 else 0 for value, length in runs] or [0]
        ends.append(zeros[-1])
        before += [length for length in zeros[:-1] if length]
    total = sum(len(values) for _, values in series)
    certain = sum(ends) + sum(before)
    if total > 2 and certain == total:
        verdict.add(None, "unproved", "padding", "all log-probs are 0: padded, or sampled without chance")
    elif (max(ends) > 1 and not before and total - certain >= 2 * RUN) or (
        max(ends, default=0) >= RUN and max(before, default=0) < RUN // 2
    ):
        text = f"log-probs of 0 at the end of {sum(map(bool, ends))} turns, {max(ends)} at most, and not before: padded"
        verdict.add(None, "unproved", "padding", text)
    elif max(before, default=0) >= RUN and min(before) >= RUN:
        text = f"log-probs of 0 in blocks of {min(before)} or more only: what was not sampled counts as sampled"
        verdict.add(None, "unproved", "padding", text)


def _edges(verdict: TraceVerdict, index: int, prompt: np.ndarray) -> None:
    for edge, name in ((prompt[:RUN], "begins"), (prompt[-RUN:], "ends")):
        if len(edge) == RUN and (edge == edge[0]).all():
            verdict.add(index, "unproved", "padding", f"the prompt {name} with {RUN} times id {edge[0]}: padded")


def _history(
    verdict: TraceVerdict,
    index: int,
    turn: TraceTurn,
    prompt: np.ndarray,
    kept: list[tuple[int, np.ndarray, np.ndarray]],
) -> None:
    """Check whether the prompt continues an earlier turn, and count sampled ids that are different in it."""
    if turn.declared and turn.parent is not None:
        above = next((whole for number, _, whole in kept if number == turn.parent), None)
        if above is None:
            verdict.add(index, "unproved", "history", f"continues turn {turn.parent}, which is not proved")
        elif not np.array_equal(prompt[: len(above)], above):
            verdict.add(index, "broken", "history", f"continues turn {turn.parent}, which is no prefix of its prompt")
        return
    common = [_common(prompt, whole) for _, _, whole in kept]
    # The turn that it continues completely; and one that it continues further, but not to its end.
    full = max((same for same, (_, _, whole) in zip(common, kept, strict=True) if same == len(whole)), default=0)
    best, lost, of = 0 if turn.declared else full, 0, None
    for same, (number, before, whole) in zip(common, kept, strict=True):
        if len(prompt) > len(before) > SLACK and same >= len(before) - SLACK and best < same < len(whole):
            best, lost, of = same, len(whole) - max(same, len(before)), number
    if turn.declared or not full:
        verdict.branches += 1
    if of is not None and lost > 0:
        verdict.reencoded += lost
        level = "note" if turn.declared else "unproved"
        verdict.add(
            index, level, "re-encoded", f"{lost} sampled ids of turn {of} are other ids, or gone, in this prompt"
        )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _decoded(
    verdict: TraceVerdict, index: int, turn: TraceTurn, response: np.ndarray, sampled: np.ndarray, words: TokenizerLike
) -> bool:
    """Compare with the recorded text. Returns whether encoding the decoded sample gives the same ids."""
    ids = sampled.tolist()
    decoded = words.decode(response.tolist())
    shown = words.decode([id for id in response.tolist() if id not in words.special])
    special = re.compile("|".join(map(re.escape, words.special.values())) or "(?!)")
    for part in turn.text or ():
        if part.strip() not in decoded and special.sub("", part).strip() not in shown:
            verdict.add(index, "broken", "text", f"decodes to {decoded[:60]!r}, the trace says {part[:60]!r}")
            break
    return list(words.encode(words.decode(ids))) == ids
