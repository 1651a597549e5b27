"""The ledger's rule: is what a trace says about its tokens exact?

One rule for our own episodes and for other people's trace files. Three answers: ``exact`` (nothing contradicts it,
and nothing is missing), ``unproved`` (something is missing, or looks made up), ``broken`` (it contradicts itself).
Pure: no files, no network. What the rule cannot see is listed in ``docs/pool.md``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from numbers import Integral, Real
from typing import Any, Literal, Protocol, get_args

import numpy as np

from clawgym.records import Role, Turn, prompt_ids

__all__ = ["Finding", "TraceTurn", "Verdict", "Words", "check", "trace_of"]

MAX_ID = 2**31 - 1
RUN = 8
"""So many equal log-probs in a row are no coincidence."""
SLACK = 8
"""A chat template may end a prompt with so many ids (``<think>``) that it leaves out of the history."""
_ROLES = frozenset(get_args(Role))


@dataclass(frozen=True)
class TraceTurn:
    """One model call, or one row of training, as a trace recorded it; ``None`` where it recorded nothing."""

    prompt: Sequence[int] | None = None
    """All ids that the engine was given."""
    response: Sequence[int] | None = None
    """What came after the prompt."""
    mask: Sequence[int] | None = None
    """(len(response),) 1 where an id was sampled; ``None``: everywhere."""
    logprobs: Sequence[float] | None = None
    """One per sampled id, or one per id of ``response``."""
    parent: int | None = None
    """Which turn it continues, where ``declared``."""
    declared: bool = False
    """The trace says which turn it continues, or that it continues none."""
    role: str = "main"
    versions: Sequence[Any] = ()
    """Of the policy: one, or one per id of ``response``."""
    flaw: str | None = None
    text: Sequence[str] | None = None
    """Texts that the decoded sample must contain."""
    greedy: bool = False
    """It was sampled (nearly) without chance: log-probs of 0 are right."""
    problems: tuple[str, ...] = ()
    """What its reader found that cannot be: broken."""


@dataclass(frozen=True)
class Finding:
    """One thing that keeps an episode from being exact, or (``note``) that is worth knowing."""

    turn: int | None
    level: Literal["broken", "unproved", "note"]
    code: str
    text: str


@dataclass
class Verdict:
    """What the rule says of one episode."""

    episode: str
    turns: int = 0
    sampled: int = 0
    """Sampled ids."""
    branches: int = 0
    """Turns that continue no earlier one; 1 for an episode without branches."""
    reencoded: int = 0
    """Sampled ids that came back as other ids in a later prompt."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def status(self) -> Literal["exact", "unproved", "broken"]:
        levels = {finding.level for finding in self.findings}
        return "broken" if "broken" in levels else "unproved" if "unproved" in levels else "exact"

    def add(self, turn: int | None, level: Literal["broken", "unproved", "note"], code: str, text: str) -> None:
        self.findings.append(Finding(turn, level, code, text))


class Words(Protocol):
    """A tokenizer, as far as the rule needs one."""

    size: int
    """One more than the highest id."""

    def decode(self, ids: Sequence[int]) -> str: ...
    def encode(self, text: str) -> Sequence[int]: ...


def trace_of(turns: Sequence[Turn]) -> list[TraceTurn]:
    """Turns of our own, for :func:`check`."""
    made = []
    for index, turn in enumerate(turns):
        reply = turn.reply
        temperature = turn.sampling.get("temperature")
        said = [reply.get("content"), reply.get("reasoning_content")]
        said += [(call.get("function") or {}).get("name") for call in reply.get("tool_calls") or ()]
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
                text=[part.strip() for part in said if isinstance(part, str) and part.strip()],
                greedy=isinstance(temperature, int | float) and temperature < 0.2,
            )
        )
    return made


def check(episode: str, turns: Sequence[TraceTurn], words: Words | None = None) -> Verdict:
    """Apply the rule to the turns of one episode, in the order in which they were made."""
    verdict = Verdict(episode, len(turns))
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
    """(n,) int64, or ``None`` if something in it is no token id."""
    values = list(values)
    if set(map(type, values)) <= {int}:  # quick, for long prompts
        good = not values or (min(values) >= 0 and max(values) <= MAX_ID)
        return np.array(values, dtype=np.int64) if good else None
    good = all(isinstance(v, Integral) and not isinstance(v, bool) and 0 <= int(v) <= MAX_ID for v in values)
    return np.array(values, dtype=np.int64) if good else None


def _ids(
    verdict: Verdict, index: int, turn: TraceTurn, words: Words | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Prompt, response and the sampled places of the response; or ``None``, with the reason."""
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


def _versions(verdict: Verdict, index: int, turn: TraceTurn, mask: np.ndarray) -> None:
    versions = list(turn.versions)
    if not versions:
        verdict.add(index, "note", "version", "no policy version")
    elif len(versions) == len(mask) and len(mask) > 1:  # one per id: constant in each piece that was sampled
        pieces = groupby(zip(mask.tolist(), versions, strict=True), key=lambda pair: pair[0])
        if any(bit and _different(version for _, version in piece) > 1 for bit, piece in pieces):
            verdict.add(index, "broken", "version", "more than one policy version in one turn")
    elif _different(versions) > 1:
        pieces_sampled = sum(bit for bit, _ in groupby(mask.tolist()))
        if len(versions) != pieces_sampled:
            verdict.add(index, "broken", "version", f"{_different(versions)} policy versions in one turn")


def _different(versions: Iterable[Any]) -> int:
    """How many different ones there are; what somebody else's file has for a version may be any JSON."""
    return len({version if isinstance(version, Hashable) else repr(version) for version in versions})


def _logprobs(verdict: Verdict, index: int, turn: TraceTurn, mask: np.ndarray) -> np.ndarray | None:
    """(sampled,) the log-probs of the sampled ids; or ``None``, with the reason."""
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
    if not all(isinstance(v, Real) and math.isfinite(v) and v <= 0 for v in values):
        verdict.add(index, "broken", "logprobs", "a log-prob is not a finite number of at most 0")
        return None
    return np.array(values, dtype=np.float64)


def _padded(verdict: Verdict, series: Sequence[tuple[int, np.ndarray]]) -> None:
    """Log-probs that no model gave. A certain token has exactly 0, but such tokens come anywhere in a turn."""
    ends, before = [0], []  # lengths of the runs of 0: at the end of each turn, and before
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


def _edges(verdict: Verdict, index: int, prompt: np.ndarray) -> None:
    for edge, name in ((prompt[:RUN], "begins"), (prompt[-RUN:], "ends")):
        if len(edge) == RUN and (edge == edge[0]).all():
            verdict.add(index, "unproved", "padding", f"the prompt {name} with {RUN} times id {edge[0]}: padded")


def _history(
    verdict: Verdict, index: int, turn: TraceTurn, prompt: np.ndarray, kept: list[tuple[int, np.ndarray, np.ndarray]]
) -> None:
    """Whether the prompt continues an earlier turn, and how much of an earlier sample came back as other ids."""
    if turn.declared and turn.parent is not None:
        above = next((whole for number, _, whole in kept if number == turn.parent), None)
        if above is None:
            verdict.add(index, "unproved", "history", f"continues turn {turn.parent}, which is not proved")
        elif not np.array_equal(prompt[: len(above)], above):
            verdict.add(index, "broken", "history", f"continues turn {turn.parent}, which is no prefix of its prompt")
        return
    common = [_common(prompt, whole) for _, _, whole in kept]
    # What it continues whole; and what it continues further than that, but not to the end.
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
    verdict: Verdict, index: int, turn: TraceTurn, response: np.ndarray, sampled: np.ndarray, words: Words
) -> bool:
    """Compare with the recorded text; returns whether the sample is what its own text encodes to."""
    ids = sampled.tolist()
    decoded = words.decode(response.tolist())
    for part in turn.text or ():
        if part.strip() not in decoded:
            verdict.add(index, "broken", "text", f"decodes to {decoded[:60]!r}, the trace says {part[:60]!r}")
            break
    return list(words.encode(words.decode(ids))) == ids
