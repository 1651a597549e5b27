"""Transcripts as the answers of ``clawgym view`` and of reports: steps, file changes and tokens.

Invariants: a transcript comes from an agent. It is read without following links, up to a size; every text is cut to a
number of characters, and the answer says how many are left out. Nothing in it raises: what cannot be read is a note.

The answers have the types ``Step`` and ``Tokens`` of ``web/src/api.ts``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawgym.bounds import read_json
from clawgym.errors import TaskError
from clawgym.files import read_below
from clawgym.records import Image, Step, Usage
from clawgym.records.atif import steps_from_atif
from clawgym.records.run_folder import TRANSCRIPT, safe_name
from clawgym.visible import cut

__all__ = [
    "LARGEST_TRANSCRIPT",
    "TEXT",
    "Transcript",
    "cut",
    "read_transcript",
    "step_answers",
    "stored_steps",
    "token_answers",
    "usage_answer",
]

LARGEST_TRANSCRIPT = 64 * 2**20
"""Most bytes of a transcript that is shown."""
TEXT = 20_000
"""Most characters of one text, unless another limit is asked for."""
_CALLS = 50
"""Most tool calls, and observations, of a step that are shown."""
_LINES = 400
"""Most lines of a file that are compared line by line; larger changes are shown as a replacement."""
_DIFFS = 200
"""Most changes of one answer that are compared line by line."""
_CONTEXT = 3
"""Lines that a diff shows before and after a change."""
_LINE_NUMBER = re.compile(r"([-+])(\d+)")
_DIFF = 8_000
"""Most characters of a diff."""
_TRACKED = 64 * 2**10
"""Most characters of a file whose content is followed through the transcript."""
_WORK = 200 * 2**20
"""Most characters that are searched to follow files through one transcript."""
_TOKENS = 20_000
"""Most tokens of a part of a turn that are shown."""
_PATHS = ("path", "file_path", "filename", "file", "filePath")
_CONTENTS = ("content", "file_text", "text", "contents")
_OLD = ("old", "old_string", "oldText", "old_str", "old_text")
_NEW = ("new", "new_string", "newText", "new_str", "new_text")

Address = Callable[[Image], str | None]
"""Gives the address of a picture; None if it cannot be shown."""


@dataclass(frozen=True)
class Transcript:
    """The steps of an episode, and what else its document holds."""

    steps: tuple[Step, ...] = ()
    turns: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Index of the step -> ids and log-probs of its turn, as ATIF's ``metrics`` hold them."""
    others: Sequence[Mapping[str, Any]] = ()
    """Turns that belong to no single step, in order."""
    note: str = ""
    """Why there are no steps; otherwise empty."""

    @property
    def token_turns(self) -> list[Mapping[str, Any]]:
        """All turns with token ids, in order."""
        return [*self.turns.values(), *self.others]

    def pictures(self) -> Iterator[tuple[int, Image]]:
        """Index of the step and picture, in the order in which the agent saw them."""
        for n, step in enumerate(self.steps):
            for seen in step.observations:
                if seen.image is not None:
                    yield n, seen.image


def read_transcript(folder: Path, name: str) -> Transcript:
    """Read the transcript ``name`` below ``folder``; what is wrong with it is its ``note``."""
    try:
        document = json.loads(read_below(folder, name, LARGEST_TRANSCRIPT))
        steps = steps_from_atif(document)
        raw = [step for step in document["steps"] if not (step.get("extra") or {}).get("clawgym_placeholder")]
        own = (document.get("extra") or {}).get("clawgym") or {}
        turns = {n: step["metrics"] for n, step in enumerate(raw) if _has_ids(step.get("metrics"))}
        return Transcript(steps, turns, [turn for turn in own.get("turns") or () if _has_ids(turn)])
    except FileNotFoundError:
        return Transcript(note="No transcript was stored.")
    except OSError as error:
        return Transcript(note=f"The transcript cannot be read: it {error.strerror}.")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, TaskError) as error:
        return Transcript(note=f"The transcript cannot be read ({type(error).__name__}).")


def stored_steps(run: Path, task_id: str, sample: int) -> list[Any]:
    """The steps of an episode of the run folder ``run``, as its ATIF document holds them; empty without a transcript.

    Raises OSError and ValueError if it cannot be read, or is larger than :data:`LARGEST_TRANSCRIPT`."""
    run = run.absolute()
    try:
        inner = f"{run.name}/episodes/{safe_name(task_id, sample)}/{TRANSCRIPT}"
        return read_json(read_below(run.parent, inner, LARGEST_TRANSCRIPT))["steps"]
    except FileNotFoundError:
        return []


def _has_ids(metrics: Any) -> bool:
    return isinstance(metrics, Mapping) and isinstance(metrics.get("completion_token_ids"), list)


def usage_answer(usage: Usage | None) -> dict[str, Any] | None:
    """``Usage`` of the answers."""
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "cost_usd": usage.cost_usd,
    }


def step_answers(
    steps: Sequence[Step],
    start: int = 0,
    end: int | None = None,
    *,
    turns: Mapping[int, Mapping[str, Any]] | None = None,
    address: Address = lambda _: None,
    text: int = TEXT,
) -> list[dict[str, Any]]:
    """``Step`` of the answers for ``steps[start:end]``.

    ``turns``: index of the step -> what is known of its turn (``turn``, ``role``, ``policy_version``,
    ``finish_reason``, ``flaw``, ``rewards``). ``text``: most characters of one text.
    """
    files = _Files()
    end = len(steps) if end is None else min(end, len(steps))
    for step in steps[:start]:
        for call in step.tool_calls:
            files.writes(call.arguments)
    return [
        _step_answer(n, steps[n], files, (turns or {}).get(n, {}), address, text) for n in range(min(start, end), end)
    ]


def _step_answer(
    n: int, step: Step, files: _Files, turn: Mapping[str, Any], address: Address, most: int
) -> dict[str, Any]:
    left_out = 0

    def short(value: str) -> str:
        nonlocal left_out
        shown, missing = cut(value, most)
        left_out += missing
        return shown

    return {
        "n": n,
        "source": step.source,
        "time": str(step.timestamp or "")[:40],
        "text": short(step.message),
        "reasoning": short(str(step.reasoning or "")),
        "model": str(step.model or "")[:200],
        "usage": usage_answer(step.usage),
        "calls": [
            {
                "id": call.id[:80],
                "name": call.name[:80],
                "arguments": short(call.arguments_text),
                "changes": files.changes(call.arguments),
            }
            for call in step.tool_calls[:_CALLS]
        ],
        "observations": [
            {
                "call": (seen.call_id or "")[:80],
                "text": short(seen.content),
                "picture": _picture(n, seen.image, address),
            }
            for seen in step.observations[:_CALLS]
        ],
        "cut": left_out,
        "role": "",
        "policy_version": None,
        "finish_reason": "",
        "flaw": "",
        "turn": None,
        "rewards": [],
        **turn,
    }


def _picture(n: int, image: Image | None, address: Address) -> dict[str, Any] | None:
    src = None if image is None else address(image)
    return None if src is None else {"src": src, "step": n}


def _text_under(arguments: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((value for name in names if isinstance(value := arguments.get(name), str)), None)


class _Files:
    """What the calls of a transcript wrote into files so far, as their arguments say."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._work = _WORK
        self._diffs = _DIFFS

    def changes(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``Change`` of the answers for the file that a call writes; empty if its arguments name none."""
        found = self.writes(arguments)
        if found is None:
            return []
        path, before, after = found
        self._diffs -= 1
        diff = _diff(before or "", after, _LINES if self._diffs >= 0 else 0)
        return [{"path": cut(path, 400)[0], "diff": cut(diff, _DIFF)[0], "whole": before is None}]

    def writes(self, arguments: Mapping[str, Any]) -> tuple[str, str | None, str] | None:
        """Path, content before and content after of the file that a call writes; the content before is None if it is
        not known. For a replacement in a file that is not known, they are the replaced and the new text."""
        path = _text_under(arguments, _PATHS)
        if path is None:
            return None
        before = self._known.pop(path, None)
        old, new = _text_under(arguments, _OLD), _text_under(arguments, _NEW)
        if old is None or new is None:
            after = _text_under(arguments, _CONTENTS)
            if after is None:
                return None
            self._keep(path, after)
            return path, before, after
        if not before or not old or old not in before:
            return path, old, new
        times = before.count(old) if arguments.get("replace_all") else 1
        if len(before) + times * (len(new) - len(old)) > _TRACKED:
            return path, old, new
        after = before.replace(old, new, times)
        self._keep(path, after)
        return path, before, after

    def _keep(self, path: str, content: str) -> None:
        self._work -= len(content)
        if len(content) <= _TRACKED and self._work > 0:
            self._known[path] = content


def _diff(before: str, after: str, most: int) -> str:
    """A unified diff without its header; beyond ``most`` changed lines, one replacement."""
    old, new = before.splitlines(), after.splitlines()
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    first = max(0, start - _CONTEXT)
    old, new = old[first : len(old) - max(0, end - _CONTEXT)], new[first : len(new) - max(0, end - _CONTEXT)]
    if max(len(old), len(new)) <= most + 2 * _CONTEXT:
        lines = list(difflib.unified_diff(old, new, lineterm="", n=_CONTEXT))[2:]
    else:
        head = f"@@ -1,{len(old)} +1,{len(new)} @@"
        lines = [head, *(f"-{line}" for line in old), *(f"+{line}" for line in new)]
    return "\n".join(_moved(line, first) if line.startswith("@@") else line for line in lines)


def _moved(head: str, by: int) -> str:
    """The head of a hunk, with line numbers of the whole file."""
    return _LINE_NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + by}", head)


def token_answers(
    context: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float],
    *,
    trained: bool,
    advantage: float | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> dict[str, Any]:
    """``context`` and ``sampled`` of the answer ``Tokens``; long parts keep their ends."""

    def tokens(ids: Sequence[int], values: Sequence[float] | None, used: bool) -> list[dict[str, Any]]:
        kept = range(len(ids)) if len(ids) <= _TOKENS else range(len(ids) - _TOKENS, len(ids))
        return [
            {
                "id": ids[n],
                "text": None if decode is None else decode([ids[n]]),
                "logprob": values[n] if values is not None and n < len(values) else None,
                "advantage": advantage if used else None,
                "trained": used,
            }
            for n in kept
        ]

    return {"context": tokens(context, None, False), "sampled": tokens(sampled, logprobs, trained)}
