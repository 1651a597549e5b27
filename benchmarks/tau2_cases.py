"""Conversations of tau2-bench: the reference one, one without work, and changed ones."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from clawgym.records import Task

Messages = list[dict[str, Any]]


def right(task: Task) -> Messages:
    """The reference actions of both sides, in their order, and the information."""
    assert task.dialogue is not None
    script = list(task.dialogue.options["script"])
    messages: Messages = [{"role": "user", "content": script.pop(0)["text"]}]
    calls: list[Any] = []
    for call in json.loads(task.solution[0].read()):
        if call["name"] != "submit":
            calls.append(call)
            continue
        if calls:
            messages.append({"role": "assistant", "content": "", "calls": calls})
        messages.append({"role": "assistant", "content": call["arguments"]["message"]})
        line, calls = script.pop(0), []
        if line.get("calls"):
            messages += [{"role": "user", "content": "", "calls": line["calls"]}, {"role": "user", "content": "Done."}]
            messages.append({"role": "assistant", "content": "Thank you."})
    return messages


def cases(task: Task, others: list[Messages]) -> Iterator[tuple[str, Messages]]:
    """(kind, conversation), the same for every run. ``others``: reference conversations of the same domain."""
    good, rng = right(task), random.Random(task.id)
    yield "right", good
    yield "noop", [*list(good[:1]), {"role": "assistant", "content": "I cannot help."}]
    yield "unfinished", [*good, {"role": "user", "content": "And now?"}]
    acting = [place for place, message in enumerate(good) if message.get("calls")]
    yield "silent", [{**message, "content": "" if message.get("calls") else "Fine."} for message in good]
    for kind in ("a call less", "another argument", "a call more") if acting else ():
        messages = copy.deepcopy(good)
        calls = messages[rng.choice(acting)]["calls"]
        if kind == "a call less":
            del calls[rng.randrange(len(calls))]
        elif kind == "another argument":
            call = rng.choice(calls)
            if not call["arguments"]:
                continue
            name = rng.choice(sorted(call["arguments"]))
            call["arguments"][name] = rng.choice(["x", 1, [], None])
        else:
            more = [c for m in rng.choice(others) if m["role"] == "assistant" for c in m.get("calls", ())]
            if not more:
                continue
            messages.insert(1, {"role": "assistant", "content": "", "calls": [rng.choice(more)]})
        yield kind, [message for message in messages if message["content"] or message.get("calls")]
