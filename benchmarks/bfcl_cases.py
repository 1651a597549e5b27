"""Replies to BFCL tasks: right ones, none, and right ones with one change each."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from clawgym.records import Task

Turns = list[list[list[tuple[str, dict[str, Any]]]]]
"""By turn of the user, the calls of each reply."""


def right(task: Task) -> Turns:
    """The task's reference calls: one reply with all calls of a turn."""
    turns: Turns = [[[]]]
    for call in json.loads(task.solution[0].read()):
        if call["name"] == "submit":
            turns.append([[]])
        else:
            turns[-1][0].append((call["name"], call["arguments"]))
    return turns[:-1]


def cases(task: Task) -> Iterator[tuple[str, Turns]]:
    """(kind, replies): ``right``, ``noop`` and changed ones, the same for every run."""
    good = right(task)
    yield "right", good
    yield "noop", [[] for _ in good]
    rng = random.Random(task.id)
    for kind, change in CHANGES.items():
        turns = copy.deepcopy(good)
        replies = [reply for turn in turns for reply in turn if reply]
        if not replies and kind != "unknown":
            continue
        reply = rng.choice(replies) if replies else turns[0][0]
        if change(reply, rng, turns) is not False:
            yield kind, turns


def _some(reply: Any, rng: random.Random) -> tuple[Any, str] | None:
    """The arguments of a call, and the name of one."""
    calls = [arguments for _, arguments in reply if arguments]
    arguments = rng.choice(calls) if calls else None
    return (arguments, rng.choice(sorted(arguments))) if arguments else None


def _set(make: Any) -> Any:
    def change(reply: Any, rng: random.Random, turns: Any) -> Any:
        if (found := _some(reply, rng)) is None:
            return False
        arguments, name = found
        made = make(arguments[name], rng)
        if made is NotImplemented:
            return False
        arguments[name] = made
        return True

    return change


def _drop(reply: Any, rng: random.Random, turns: Any) -> Any:
    if (found := _some(reply, rng)) is None:
        return False
    del found[0][found[1]]
    return True


def _respelled(value: Any, rng: random.Random) -> Any:
    return value.upper().replace(" ", "-") if isinstance(value, str) else NotImplemented


def _nested(value: Any, rng: random.Random) -> Any:
    """Change something inside of a list or an object."""
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        kinds = [value[:-1], value[::-1], [*value, value[0]], [*value[:place], str(value[place]), *value[place + 1 :]]]
        return rng.choice([*kinds, []])
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return rng.choice(
            [{k: v for k, v in value.items() if k != key}, {**value, key: str(value[key])}, {**value, "x": 1}]
        )
    return NotImplemented


def _number(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NotImplemented
    return rng.choice([value + 1, float(value), -value, int(value), bool(value)])


def _renamed(reply: Any, rng: random.Random, turns: Any) -> None:
    place = rng.randrange(len(reply))
    reply[place] = (reply[place][0] + rng.choice(["_x", ".x"]), reply[place][1])


def _unknown(reply: Any, rng: random.Random, turns: Any) -> None:
    reply.append(("no_such_function", {"x": 1}))


def _split(reply: Any, rng: random.Random, turns: Any) -> Any:
    """One reply for each call; not where the set's own harness would end the conversation."""
    if any(len(one) > 20 for turn in turns for one in turn):
        return False
    for turn in turns:
        turn[:] = [[call] for one in turn for call in one]
    return None


CHANGES: dict[str, Any] = {
    "other": _set(lambda value, rng: rng.choice(["something else", 17, 0.5, True, None, [], {}, [1], {"a": "b"}, ""])),
    "respelled": _set(_respelled),
    "number": _set(_number),
    "as text": _set(lambda value, rng: str(value)),
    "nested": _set(_nested),
    "nested again": _set(_nested),
    "missing": _drop,
    "missing too": _drop,
    "extra": _set(lambda value, rng: NotImplemented),
    "renamed": _renamed,
    "without a call": lambda reply, rng, turns: reply.pop(rng.randrange(len(reply))) and None,
    "twice": lambda reply, rng, turns: reply.append(rng.choice(reply)),
    "other order": lambda reply, rng, turns: reply.reverse(),
    "shuffled": lambda reply, rng, turns: rng.shuffle(reply),
    "unknown": _unknown,
    "a turn fewer": lambda reply, rng, turns: turns.pop() and None,
    "an idle turn": lambda reply, rng, turns: rng.choice(turns).clear(),
    "one by one": _split,
    "a turn later": lambda reply, rng, turns: turns.insert(0, turns.pop()),
}


def _extra(reply: Any, rng: random.Random, turns: Any) -> Any:
    arguments = rng.choice(reply)[1]
    arguments["unexpected"] = 1


CHANGES["extra"] = _extra
