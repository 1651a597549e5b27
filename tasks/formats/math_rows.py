"""Rows of mathematics: DAPO-Math-17k and similar sets (``prompt``, ``reward_model``), AIME (``Problem``, ``Answer``).

A row becomes a task with the code interpreter. The answer is read from the closing message (``Answer: \\boxed{...}``)
and compared by math-verify. A layer provides math-verify, and sympy for the agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clawgym.errors import TaskError
from clawgym.records import Task, TaskFile
from clawgym.tasks.formats._files import check_task_id
from clawgym.tasks.mathematics import MATH_FOLDER, math_layer, math_verifier
from clawgym.tasks.worlds.servers import interpreter_server

__all__ = ["is_row", "read_row"]

_LONGEST_ANSWER = 400
_QUESTIONS = ("problem", "question")
_FORM = "\n\nEnd with a line `Answer: \\boxed{...}`."


def is_row(value: Mapping[str, Any]) -> bool:
    """Whether ``value`` is a row of mathematics."""
    keys = {key.lower() for key in value}
    if "prompt" in keys:
        return bool(keys & {"reward_model", "label"}) and not keys & {"hook_code", "input_files", "clawgym"}
    return "answer" in keys and bool(keys & set(_QUESTIONS)) and "repo" not in keys


def read_row(value: Mapping[str, Any], where: str = "row", default_id: str = "") -> Task:
    """The task in one row. Raises :class:`TaskError`, naming ``where`` and the field, for an invalid row."""
    fields = {key.lower(): item for key, item in value.items()}
    if "prompt" in fields:
        instruction = _prompt(fields["prompt"], where)
        answer = _answer(*_truth(fields, where))
    else:
        name = next(name for name in _QUESTIONS if name in fields)
        instruction = _text(fields[name], f"{where}: field {name}") + _FORM
        answer = _answer(fields["answer"], f"{where}: field answer")
    number, from_field = _number(fields, where)
    task_id = check_task_id(number or default_id or "row", f"{where}: field {from_field}")
    layer, missing = math_layer()
    source = fields.get("data_source")
    closing = [{"name": "submit", "arguments": {"message": f"Answer: \\boxed{{{answer}}}"}}]
    return Task(
        id=task_id,
        instruction=instruction,
        verifier=math_verifier("a question of mathematics", answer),
        layers={MATH_FOLDER: layer},
        tools=(interpreter_server(path=MATH_FOLDER),),
        metadata={"category": "math", **({"data_source": source} if isinstance(source, str) else {})},
        solution=(TaskFile("solve.json", json.dumps(closing).encode()),),
        unsupported=missing,
        origin=where,
    )


def _prompt(value: Any, where: str) -> str:
    """The text of a prompt: a text, or the joined texts of a list of messages."""
    if isinstance(value, str):
        return _text(value, f"{where}: field prompt")
    if not isinstance(value, list) or not value:
        raise TaskError(f"{where}: field prompt: must be a text or a list of messages: correct it")
    texts = []
    for index, message in enumerate(value):
        field = f"{where}: field prompt[{index}].content"
        texts.append(_text(message.get("content") if isinstance(message, dict) else None, field))
        if message.get("role") not in ("system", "user"):
            raise TaskError(f"{where}: field prompt[{index}].role: is not 'system' or 'user': leave the message out")
    return "\n\n".join(texts)


def _truth(fields: Mapping[str, Any], where: str) -> tuple[Any, str]:
    if "reward_model" not in fields:
        return fields["label"], f"{where}: field label"
    model = fields["reward_model"]
    if not isinstance(model, dict):
        raise TaskError(f"{where}: field reward_model: is not an object with ground_truth: correct it")
    return model.get("ground_truth"), f"{where}: field reward_model.ground_truth"


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"{field}: must be a non-empty text: correct it")
    return value.strip()


def _answer(value: Any, field: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    text = _text(value, field).strip("$ ")
    if len(text) > _LONGEST_ANSWER:
        raise TaskError(f"{field}: has more than {_LONGEST_ANSWER} characters, too long for an answer: leave it out")
    return text


def _number(fields: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The name of the row and the field it is from; an empty name if there is none."""
    extra = fields.get("extra_info")
    index = extra.get("index") if isinstance(extra, dict) else None
    for value, field in ((index, "extra_info.index"), (fields.get("id"), "id")):
        if isinstance(value, int) and not isinstance(value, bool):
            return f"row-{value:05d}", field
        if isinstance(value, str) and value.strip():
            return value.strip(), field
    return "", "id"
