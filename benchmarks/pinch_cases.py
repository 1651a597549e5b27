"""Workspaces and transcripts for tasks of PinchBench: untouched, and with texts that a grading function looks for.

The model that judges is a script: :func:`answer`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from typing import Any

from clawgym.records import Task

_TRIES = 8
"""Cases with files for each task."""
_FILE = re.compile(r"[\"']([\w./-]+\.(?:md|txt|json|ics|py|csv|yaml|xml|html|log|toml|cfg|png))[\"']")
_WORD = re.compile(r"[\"']([^\"'\n]{1,60})[\"']")


def cases(task: Task) -> Iterator[dict[str, Any]]:
    """Objects with ``file`` (of the task), ``files`` (path -> text) and ``transcript``, the same for every run."""
    rng = random.Random(task.id)
    texts = {file.path: file.read().decode() for file in task.verifier.files}
    judged = json.loads(texts["task.json"]) if "task.json" in texts else {}
    code = texts.get("grade.txt") or judged["automated_checks"] or f"'{task.instruction}' 'notes.md' 'yes' 'done'"
    names = [name for name in dict.fromkeys(_FILE.findall(code)) if not name.startswith(("/", "."))]
    words = [re.sub(r"\\[a-zA-Z]", " ", word) for word in dict.fromkeys(_WORD.findall(code))]
    start = {file.path: file.read().decode("utf-8", "replace") for file in task.inputs}
    yield {"file": task.origin, "files": start, "transcript": []}
    for number in range(_TRIES):
        share = (number + 1) / _TRIES
        files = dict(start)
        for name in names:
            if rng.random() < 0.8 and ".." not in name:
                files[name] = _text(words, share, rng)
        steps = [_step(name, words, share, rng) for name in names or ["notes.md"]]
        user = {"role": "user", "content": task.instruction}
        last = {"role": "assistant", "content": _text(words, share, rng)}
        yield {"file": task.origin, "files": files, "transcript": [user, *steps, last]}


def _text(words: list[str], share: float, rng: random.Random) -> str:
    kept = [word for word in words if rng.random() < share]
    return "\n".join(f"# {word}\n{word} {rng.randrange(100)}\n" for word in kept)


def _step(name: str, words: list[str], share: float, rng: random.Random) -> dict[str, Any]:
    called = rng.choice(["read", "read_file", "write", "write_file", "edit", "exec", "bash"])
    given = {"path": name, "file_path": name, "files": [name], "command": f"cat {name}", "content": rng.choice(words)}
    call = {"id": f"call_{rng.randrange(10**6)}", "name": called, "arguments": given}
    result = {"id": call["id"], "content": _text(words, share, rng)}
    text = rng.choice(["", "I read the file first."])
    return {"role": "assistant", "content": text, "tool_calls": [call], "results": [result]}


def answer(prompt: str) -> str:
    """Scores by the text of the question, in one of the forms that models give."""
    number = hashlib.sha256(prompt.encode()).digest()[0]
    scores = {"care": number % 11 / 10, "tone": number % 7 / 10}
    said = json.dumps({"scores": scores, "total": number % 9 / 10, "notes": "as scripted"})
    nested = json.dumps({"criteria_scores": {name: {"score": score} for name, score in scores.items()}})
    return (said, f"Well.\n```json\n{said}\n```", nested, f"I think so.\nTotal score: 0.{number % 10}")[number % 4]
