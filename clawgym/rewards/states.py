"""The next state of each turn, and the input of a judge. Pure functions of the recorded turns.

Invariants: a next state belongs to the turn that it followed in the tree of turns, and contains the results of all
calls of that turn. If the record is ambiguous, or nothing followed a turn, the turn has no next state and is not
scored. Only turns of the main agent have one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from clawgym.records import Episode, Image, Observation, Outcome, Step, Task, Turn
from clawgym.records.judge import Judgeable, Message, NextState, Setting

__all__ = ["judgeables", "next_states", "outcome_words", "setting_of"]

_UNFINISHED = frozenset({"aborted", "error"})
_SAYS = frozenset({"user", "tool", "function"})


def next_states(
    turns: Sequence[Turn], *, steps: Sequence[Step] = (), outcome: str | None = None
) -> dict[int, NextState]:
    """Index of a turn -> its next state, for the finished turns with role ``main`` that have one.

    The next state of a turn consists of the new messages of the first main turn that continues it. If none does (the
    history branched or was compacted), the same reply is searched in the prompts of later branches; the messages after
    it are used if the reply occurs only once. The results of the last turn are only in the transcript ``steps``, and
    are used if its last entry made the same calls. ``outcome`` is added to the last turn.
    """
    main = [index for index, turn in enumerate(turns) if turn.role == "main"]
    finished = [index for index in main if turns[index].finish_reason not in _UNFINISHED and turns[index].reply]
    first_child: dict[int, int] = {}
    for index in main:
        parent = turns[index].parent
        if parent is not None:
            first_child.setdefault(parent, index)
    found: dict[int, NextState] = {}
    for index in finished:
        child = first_child.get(index)
        messages = _replayed(turns, finished, index) if child is None else _heard(turns[child].messages)
        last = index == main[-1]
        if last and not messages:
            messages = _observed(turns[index], steps)
        shown_outcome = outcome if last else None
        if messages or shown_outcome is not None:
            found[index] = NextState(index, messages, shown_outcome)
    return found


def _heard(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages of users and tools before the next assistant message."""
    found: list[Message] = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        if message.get("role") in _SAYS:
            found.append(message)
    return tuple(found)


def _replayed(turns: Sequence[Turn], finished: Sequence[int], index: int) -> tuple[Message, ...]:
    """What follows the reply of turn ``index`` in the first later branch whose prompt contains it."""
    for later in range(index + 1, len(turns)):
        turn = turns[later]
        if turn.role != "main" or turn.parent is not None:
            continue
        places = [
            n for n, m in enumerate(turn.messages) if m.get("role") == "assistant" and _same(turns[index].reply, m)
        ]
        if not places:
            continue
        doubles = [n for n in finished if n < later and _same(turns[n].reply, turn.messages[places[0]])]
        return _heard(turn.messages[places[0] + 1 :]) if len(places) == 1 and doubles == [index] else ()
    return ()


def _same(stored: Message, shown: Message) -> bool:
    from clawgym.gateway.stitch import same_reply  # imported late: it needs the gateway's dependencies

    try:
        return same_reply({"content": None, **stored}, {"content": None, **shown}) is not None
    except (KeyError, TypeError, AttributeError, ValueError):  # not a message written by the gateway
        return False


def _observed(turn: Turn, steps: Sequence[Step]) -> tuple[Message, ...]:
    """The observations of the transcript's last step, if it belongs to this turn."""
    step = next((step for step in reversed(steps) if step.source == "agent"), None)
    if step is None or not step.observations or step.message.strip() != _text(turn.reply.get("content")).strip():
        return ()
    if [(call.name, dict(call.arguments)) for call in step.tool_calls] != list(_calls(turn.reply)):
        return ()
    return tuple(map(_message, step.observations))


def _message(seen: Observation) -> Message:
    role = {"role": "user"} if seen.call_id is None else {"role": "tool", "tool_call_id": seen.call_id}
    if seen.image is None:
        return {**role, "content": seen.content}
    picture = {"type": "image", "sha256": seen.image.sha256}
    return {**role, "content": [{"type": "text", "text": seen.content}, picture] if seen.content else [picture]}


def _calls(reply: Message) -> Iterator[tuple[str, Any]]:
    for call in reply.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):
            arguments = None
        yield str(function.get("name")), arguments


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def outcome_words(episode: Episode) -> str | None:
    """The verifier's result as text for a judge; None if it is unknown, or after an infrastructure error."""
    result = episode.result
    if episode.outcome is Outcome.INFRA or result is None:
        return None
    passed = sum(value >= 1.0 for value in result.checks.values())
    lines = [f"The hidden checks: {passed} of {len(result.checks)} passed; the task is {episode.outcome}."]
    if episode.cause:
        lines.append(f"cause: {episode.cause}")
    return "\n".join([*lines, *(f"{name}: {value:g}" for name, value in result.checks.items())])


def setting_of(task: Task | str) -> Setting:
    """The setting of a task: ``gui`` with a desktop, ``toolcall`` with tools, ``swe`` with protected tests, else
    ``terminal``. A text is ``chat``."""
    if isinstance(task, str):
        return "chat"
    if task.desktop is not None:
        return "gui"
    if task.tools:
        return "toolcall"
    return "swe" if task.verifier.protected else "terminal"


def judgeables(
    task: Task | str,
    episode: Episode | Sequence[Turn],
    *,
    id: str | None = None,
    setting: Setting | None = None,
    outcome: bool = False,
    images: Mapping[str, Image] | None = None,
) -> list[Judgeable]:
    """The turns of an episode that can be judged, in order.

    Args:
        task: the task, or its instruction, which may be empty.
        episode: the episode, or its turns.
        id: id of the episode; by default its key.
        setting: by default that of the task (:func:`setting_of`).
        outcome: show the verifier's result to the judge, at the last turn.
        images: images of the turns by SHA-256; those of an episode's transcript are added.

    Raises:
        ValueError: an unknown setting, or ``outcome`` without an episode.
    """
    if setting is not None and setting not in get_args(Setting):
        raise ValueError(f"setting {setting!r} is not one of {', '.join(get_args(Setting))}: choose one of them")
    turns, steps, shown_outcome, key = episode, (), None, ""
    if isinstance(episode, Episode):
        turns, steps, key = episode.turns, episode.steps, episode.key
        shown_outcome = outcome_words(episode) if outcome else None
    elif outcome:
        raise ValueError("turns alone have no outcome: give the episode, or outcome=False")
    assert not isinstance(turns, Episode)
    shown = dict(images or {})
    shown |= {seen.image.sha256: seen.image for step in steps for seen in step.observations if seen.image is not None}
    instruction = task if isinstance(task, str) else task.instruction
    return [
        Judgeable(
            episode=key if id is None else id,
            turn=index,
            setting=setting or setting_of(task),
            task=instruction,
            history=tuple(_history(turns, index)),
            action=turns[index].reply,
            after=after,
            malformed_calls=turns[index].malformed_calls,
            images=shown,
        )
        for index, after in next_states(turns, steps=steps, outcome=shown_outcome).items()
    ]


def _history(turns: Sequence[Turn], index: int) -> list[Message]:
    """The messages on the path to the turn ``index``, without its reply."""
    parts: list[Sequence[Message]] = [turns[index].messages]
    parent = turns[index].parent
    while parent is not None:
        if parent >= index:
            raise ValueError(f"turn {index} continues turn {parent}: a parent comes before its child")
        index = parent
        parts.append([*turns[index].messages, turns[index].reply])
        parent = turns[index].parent
    return [message for part in reversed(parts) for message in part]
