"""Work on tasks of Claw-Eval, in the set's form: none, and calls and messages that are more or less right."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from clawgym.records import Task, TaskFile

_TRIES = 4
"""Cases with calls for each task."""


def cases(task: Task, data: Mapping[str, Any], graders: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, case), the same for every run. ``data``: the task's ``task.yaml``; ``graders``: texts of its graders."""
    rng = random.Random(task.id)
    known = _known(task)
    texts = [str(data.get("reference_solution") or ""), " ".join(dict.fromkeys(_words(graders)))]
    yield "noop", _case(data, [], "", None)
    for number in range(_TRIES):
        calls = []
        for tool in [*(data.get("tools") or ())] * (number + 1) if task.tools else ():
            if number != 1 or rng.random() < 0.7:  # the second leaves some tools out
                calls.append({"name": tool["name"], "arguments": _arguments(tool["input_schema"], known, rng)})
        if number == 3:
            rng.shuffle(calls)
        snapshot = {
            f"cmd:{command}": {"exit_code": 0, "stdout": _printed(graders, rng), "stderr": ""}
            for command in data.get("env_snapshot_commands") or ()
        }
        final = (texts[0], texts[1], "\n".join(texts), rng.choice(texts)[: rng.randrange(2000)])[number]
        yield "work", _case(data, calls, final, snapshot or None)


def _case(data: Mapping[str, Any], calls: list[Any], final: str, snapshot: Any) -> dict[str, Any]:
    return {"task": data, "calls": calls, "final": final, "snapshot": snapshot}


def _known(task: Task) -> dict[str, list[Any]]:
    """Field -> values, of everything that the services open."""
    found: dict[str, list[Any]] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                if isinstance(one, str | int | float):
                    found.setdefault(str(key), []).append(one)
                collect(one)
        elif isinstance(value, list):
            for one in value:
                collect(one)

    opened: list[TaskFile] = [file for server in task.tools for file in server.files]
    for file in opened:
        if file.path.startswith("claw/tasks/") and file.path.endswith(".json"):
            collect(json.loads(file.read()))
    return found


def _arguments(schema: Mapping[str, Any], known: Mapping[str, list[Any]], rng: random.Random) -> dict[str, Any]:
    required = set(schema.get("required") or ())
    given = {}
    for name, about in (schema.get("properties") or {}).items():
        if (name in required and rng.random() < 0.97) or rng.random() < 0.3:
            given[name] = _value(name, about, known, rng)
    return given


def _value(name: str, about: Mapping[str, Any], known: Mapping[str, list[Any]], rng: random.Random) -> Any:
    if rng.random() < 0.03:
        return rng.choice([None, [], "x", -1, {"a": 1}])
    if about.get("enum"):
        return rng.choice(about["enum"])
    kind = about.get("type", "string")
    plain = {"integer": rng.randrange(1, 40), "number": 1.5, "boolean": True, "object": {}}
    if kind in plain:
        return plain[kind]
    if kind == "array":
        return [_value(name.removesuffix("s"), about.get("items") or {}, known, rng)]
    close = known.get(name) or [v for key in known if key.endswith("_id") and name.endswith("_id") for v in known[key]]
    return str(rng.choice(close or ["2026-03-02", "a text", "a@b.c"]))


def _words(graders: list[str]) -> Iterator[str]:
    """The short texts of graders, which look for some of them."""
    for text in graders:
        yield from re.findall(r"[\"']([^\"'\n\\]{2,60})[\"']", text)


def _printed(graders: list[str], rng: random.Random) -> str:
    """What a command that checks a workspace could print."""
    names = {name for text in graders for name in re.findall(r"\.get\([\"'](\w+)[\"']", text)}
    values: list[Any] = [True, True, True, False, 0, 0.5, 1, 7]
    return json.dumps({name: rng.choice(values) for name in sorted(names)}) + "\n"
