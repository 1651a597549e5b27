"""Reader of the Berkeley Function Calling Leaderboard (BFCL), as its package ``bfcl-eval`` holds it.

The path is the folder ``bfcl_eval`` of the package. Categories with one turn become dialogues of one reply, whose calls
are recorded and not run. Categories with several turns have a user with a script, and a tool server in which calls act
on the set's own classes; their files are mounted from the package, in the sandboxes only. The rules of the comparison
are in :mod:`clawgym.tasks.formats._bfcl_checks`.

Functions are offered as the set's own harness offers them to models with tool calls: types of JSON Schema, ``_`` for
``.`` in names, and a sentence about the language in each description.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from clawgym.errors import ClawGymError
from clawgym.records import Dialogue, Layer, Limits, Task, TaskFile, ToolServer, VerifierSpec
from clawgym.registry import formats
from clawgym.tasks import layers
from clawgym.tasks.formats._bfcl_checks import MODULES
from clawgym.tasks.formats._files import check_task_id, malformed_as_task_error
from clawgym.tasks.formats._tables import iter_values
from clawgym.tasks.formats.protocol import Reader, TaskFormat
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["BfclFormat"]

_SINGLE = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple")
_SINGLE = (*_SINGLE, "irrelevance", "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
_SINGLE = (*_SINGLE, "live_irrelevance", "live_relevance")
_TURNS = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
_UNSUPPORTED: Mapping[str, tuple[str, str]] = {
    "memory_kv": ("memory", "image not here: its memory needs numpy and rank_bm25 in the sandbox"),
    "memory_vector": ("memory", "network: the model of its memory comes from the Hugging Face Hub"),
    "memory_rec_sum": ("memory", "ours: an episode would have to begin with what earlier conversations left"),
    "web_search_base": ("web_search", "network: it searches the web"),
    "web_search_no_snippet": ("web_search", "network: it searches the web"),
}
"""Category -> file, and why it cannot run."""
_SOURCE = "eval_checker/multi_turn_eval/func_source_code"
_DOCUMENTS = {"TwitterAPI": "posting_api", "TradingBot": "trading_bot"}
_STEPS = 20
"""Replies with calls in one turn, as in the set's own harness."""
_MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
_MPMATH = layers.Wheel(
    "mpmath",
    "1.3.0",
    "mpmath-1.3.0-py3-none-any.whl",
    "a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c",
)
_LIBRARY = "/opt/layers/mpmath"

_JSON_TYPES = {"float": "number", "double": "number", "bool": "boolean", "list": "array", "dict": "object"}
_JSON_TYPES |= {"tuple": "array", "any": "string", "byte": "integer", "short": "integer", "long": "integer"}
_JSON_TYPES |= {name: name for name in ("integer", "number", "string", "boolean", "array", "object")}
_LANGUAGES = {"simple_java": "java", "simple_javascript": "javascript"}
_HINTS = {
    "python": " Note that the provided function is in Python 3 syntax.",
    "java": " Note that the provided function is in Java 8 SDK syntax.",
    "javascript": " Note that the provided function is in JavaScript syntax.",
}

_CHECK_PY = '''\
"""Grades one BFCL task: prints one check as a JSON object."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bfcl_checks

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "answers.json"), encoding="utf-8") as file:
    DATA = json.load(file)
print(json.dumps({{"correct": float({check})}}))
'''


@formats.register("bfcl")
class BfclFormat(TaskFormat):
    """The Berkeley Function Calling Leaderboard: the folder ``bfcl_eval`` of its package."""

    def holds(self, path: Path) -> bool:
        return (path / "data/BFCL_v4_simple_python.json").is_file()

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        data = path / "data"
        for category in _SINGLE:
            answers = _answers(data, category)
            for where, row in iter_values(data / f"BFCL_v4_{category}.json"):
                yield where, partial(_single, row, answers, category, where)
        for category in _TURNS:
            answers = _answers(data, category)
            for where, row in iter_values(data / f"BFCL_v4_{category}.json"):
                yield where, partial(_several, row, answers, category, where, path)
        for category, (file, why) in _UNSUPPORTED.items():
            for where, row in iter_values(data / f"BFCL_v4_{file}.json"):
                yield f"{category}: {where}", partial(_unsupported, row, category, file, why, where)


def _answers(data: Path, category: str) -> dict[str, Any]:
    path = data / f"possible_answer/BFCL_v4_{category}.json"
    if not path.is_file():
        return {}
    with malformed_as_task_error(str(path), "file of answers"):
        rows = [row() for _, row in iter_values(path)]
        return {str(row.get("id")): row.get("ground_truth") for row in rows}


def _single(row: Any, answers: Mapping[str, Any], category: str, where: str) -> Task:
    """A task of one reply."""
    value = row()
    with malformed_as_task_error(where, "task of BFCL"):
        task_id, functions = check_task_id(value["id"], where), value["function"]
        opening = tuple((message["role"], message["content"]) for message in value["question"][0])
        language = _LANGUAGES.get(category, "python")
        offered = tuple(_offered(function, language) for function in functions)
        truth = answers.get(task_id) or ()
        if "relevance" in category:
            check, data = ("not " * ("irrelevance" in category) + "bfcl_checks.called()"), {}
            calls = [] if "irrelevance" in category else [{"name": _sent(functions[0]["name"]), "arguments": {}}]
        else:
            only = "multiple" not in category and "parallel" not in category
            check = "bfcl_checks.answered(DATA)"
            data = {"functions": functions, "answers": truth, "language": language, "only": only}
            documents = {function["name"]: function for function in functions}
            calls = [_call(documents.get(name, functions[0]), a, language) for one in truth for name, a in one.items()]
        instruction = "\n\n".join(text for role, text in opening if role == "user")
        solution = [*calls, {"name": "submit"}]
        return _task(task_id, category, instruction, check, data, solution, Dialogue(opening, functions=offered), where)


def _several(row: Any, answers: Mapping[str, Any], category: str, where: str, path: Path) -> Task:
    """A task of several turns."""
    value = row()
    with malformed_as_task_error(where, "task of BFCL"):
        task_id, names, config = check_task_id(value["id"], where), value["involved_classes"], value["initial_config"]
        missed = {int(turn): functions for turn, functions in value.get("missed_function", {}).items()}
        said = [
            _MORE_FUNCTIONS if number in missed else "\n\n".join(message["content"] for message in turn)
            for number, turn in enumerate(value["question"])
        ]
        lines = [{"text": text, "tools": missed.get(n + 1, [])} for n, text in enumerate(said[1:])]
        withheld = tuple(name for functions in missed.values() for name in functions)
        dialogue = Dialogue((("user", said[0]),), "script", {"lines": lines}, withheld=withheld)
        documents = [function for name in names for function in _documents(path, name)]
        scene = {"classes": names, "config": config, "long": "long_context" in category}
        offered = [_offered(function, "python")["function"] for function in documents]
        tools = [
            {"name": one["name"], "description": one["description"], "inputSchema": one["parameters"]}
            for one in offered
        ]
        truth = answers[task_id]
        parameters = {function["name"]: [*function["parameters"]["properties"]] for function in documents}
        solution = [
            call for turn in truth for call in (*(_written(one, parameters) for one in turn), {"name": "submit"})
        ]
        classes = _classes(path, tuple(names))
        library, missing = _mpmath() if "MathAPI" in names else (None, None)
        argv = ("python3", "-E", "-s", "-S", "-B", "/tools/bfcl/server.py", *([_LIBRARY] if library else []))
        served = (
            TaskFile("server.py", Path(__file__).with_name("_bfcl_server.py")),
            TaskFile("tool_server.py", Path(__file__).with_name("_tool_server.py")),
            TaskFile("bfcl_checks.py", Path(__file__).with_name("_bfcl_checks.py")),
            TaskFile("scene.json", json.dumps({**scene, "tools": tools}, ensure_ascii=False).encode()),
            *classes,
        )
        check = f"bfcl_checks.played(DATA, {[_LIBRARY] if library else []})"
        task = _task(task_id, category, said[0], check, {**scene, "answers": truth}, solution, dialogue, where, classes)
        limits = Limits(max_steps=(_STEPS + 1) * len(said))
        layer = {_LIBRARY: library} if library else {}
        return replace(
            task, tools=(ToolServer("bfcl", argv, served),), layers=layer, limits=limits, unsupported=missing
        )


def _unsupported(row: Any, category: str, file: str, why: str, where: str) -> Task:
    value = row()
    with malformed_as_task_error(where, "task of BFCL"):
        task_id = check_task_id(value["id"].replace(file, category, 1), where)
        opening = tuple((message["role"], message["content"]) for message in value["question"][0])
        task = _task(task_id, category, opening[-1][1], "False", {}, [], Dialogue(opening), where)
        return replace(task, unsupported=why)


def _task(
    task_id: str,
    category: str,
    instruction: str,
    check: str,
    data: Mapping[str, Any],
    solution: list[dict[str, Any]],
    dialogue: Dialogue,
    where: str,
    beside: tuple[TaskFile, ...] = (),
) -> Task:
    files = (
        TaskFile("reward.sh", standard_reward_sh(), executable=True),
        TaskFile("check.py", _CHECK_PY.format(check=check).encode()),
        TaskFile("answers.json", json.dumps(data, ensure_ascii=False).encode()),
        TaskFile("bfcl_checks.py", Path(__file__).with_name("_bfcl_checks.py")),
        *beside,
    )
    return Task(
        id=task_id,
        instruction=instruction,
        verifier=VerifierSpec("reward_sh", files),
        metadata={"category": category},
        dialogue=dialogue,
        solution=(TaskFile("solve.json", json.dumps(solution, ensure_ascii=False).encode()),),
        limits=Limits(max_steps=1),
        origin=where,
    )


# -- functions as they are offered


def _offered(function: Mapping[str, Any], language: str) -> dict[str, Any]:
    """The OpenAI schema of a function."""
    description = function["description"] + _HINTS[language]
    if "response" in function:
        description += f" The response field has the following schema: {json.dumps(function['response'])}"
    parameters = dict(function["parameters"])
    declared = parameters["properties"]
    if language != "python":
        declared = {key: _as_text(one, language) for key, one in declared.items()}
    parameters |= {"type": "object", "properties": _json_properties(declared)}
    return {
        "type": "function",
        "function": {"name": _sent(function["name"]), "description": description, "parameters": parameters},
    }


def _as_text(declared: Mapping[str, Any], language: str) -> dict[str, Any]:
    """A parameter of Java or JavaScript: a text that holds a literal."""
    shown = {"java": "Java", "javascript": "JavaScript"}[language]
    kind, about = declared["type"], declared.get("description", "")
    if kind == "any":
        about += f" This parameter can be of any type of {shown} object in string representation."
    else:
        about += f" This is {shown} {kind} type parameter in string representation."
    kept = {key: one for key, one in declared.items() if key not in ("items", "properties")}
    if kind in ("Array", "ArrayList", "array"):
        items = declared["items"]["type"]
        about += f" The list elements are of type {items}; they are not in string representation."
    if "properties" in declared:
        fields = json.dumps(declared["properties"])
        about += f" The dictionary entries have the following schema; they are not in string representation. {fields}"
    return {**kept, "type": "string", "description": about}


def _json_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _json_type(declared) for key, declared in properties.items()}


def _json_type(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A declared type in JSON Schema's words."""
    kind = declared.get("type", "string")
    made = {**declared, "type": _JSON_TYPES.get(kind, "string")}
    if kind == "float":
        made |= {"format": "float", "description": declared.get("description", "") + " This is a float type value."}
    if isinstance(declared.get("properties"), Mapping):
        made["properties"] = _json_properties(declared["properties"])
    elif isinstance(declared.get("items"), Mapping):
        made["items"] = _json_type(declared["items"])
    return made


# -- reference calls


def _call(function: Mapping[str, Any], accepted: Mapping[str, list[Any]], language: str) -> dict[str, Any]:
    """A call with the first accepted value of each parameter that cannot be left out."""
    declared = function["parameters"]["properties"]
    arguments = {
        key: _value(next(one for one in values if one != ""), declared.get(key, {}), language)
        for key, values in accepted.items()
        if any(one != "" for one in values) and ("" not in values or key in function["parameters"]["required"])
    }
    return {"name": _sent(function["name"]), "arguments": arguments}


def _value(value: Any, declared: Mapping[str, Any], language: str) -> Any:
    kind = declared.get("type")
    if language != "python":
        return _literal(value, str(kind), (declared.get("items") or {}).get("type"), language)
    if isinstance(value, dict):
        return {key: next(one for one in values if one != "") for key, values in value.items() if "" not in values}
    if isinstance(value, list):
        return [_value(one, declared.get("items") or {}, language) if isinstance(one, dict) else one for one in value]
    return value


def _literal(value: Any, kind: str, items: str | None, language: str) -> str:
    """``value`` written in Java or JavaScript."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and kind == "ArrayList":
        held = ", ".join(_quoted(one, items) for one in value)
        return f"new ArrayList<>(Arrays.asList({held}))" if value else "new ArrayList<>()"
    if isinstance(value, list) and language == "java":  # the set takes texts in arrays as they are, with quotes
        held = ", ".join(one if items == "String" else _quoted(one, items) for one in value)
        return f"new Object[]{{{held}}}"
    if isinstance(value, dict) and language == "java":
        puts = " ".join(f'put("{key}", {_quoted(_first(one), None)});' for key, one in value.items())
        return f"new HashMap<>() {{{{ {puts} }}}}" if puts else "new HashMap<>()"
    if isinstance(value, list):
        return f"[{', '.join(_quoted(one, items) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_quoted(_first(one), None)}" for key, one in value.items()) + "}"
    suffix = {"long": "L", "Bigint": "n", "float": "f" if language == "java" else ""}.get(kind, "")
    return f"{value}{suffix}" if isinstance(value, int | float) else str(value)


def _first(values: Any) -> Any:
    return next((one for one in values if one != ""), "") if isinstance(values, list) else values


def _quoted(value: Any, items: str | None) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_quoted(one, None) for one in value)}]"
    return f'"{value}"' if isinstance(value, str) and items != "any" else f"{value}{'L' if items == 'long' else ''}"


def _sent(name: str) -> str:
    """The name of a function as it is offered."""
    return name.replace(".", "_")


def _written(text: str, parameters: Mapping[str, list[str]]) -> dict[str, Any]:
    """A reference call ``name(value, key=value)`` as a tool call."""
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r} is no call")
    given = dict(zip(parameters[call.func.id], (ast.literal_eval(one) for one in call.args), strict=False))
    given |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return {"name": call.func.id, "arguments": given}


# -- files of the package


@cache
def _documents(path: Path, name: str) -> list[dict[str, Any]]:
    """The functions of a class."""
    module = MODULES[name]
    return [row() for _, row in iter_values(path / f"data/multi_turn_func_doc/{module}.json")]


@cache
def _classes(path: Path, names: tuple[str, ...]) -> tuple[TaskFile, ...]:
    """The files of the classes, with what they import."""
    modules = sorted({"long_context", *(MODULES[name] for name in names)})
    return tuple(
        TaskFile(f"bfcl_eval/{_SOURCE}/{module}.py", path / _SOURCE / f"{module}.py", within=path) for module in modules
    )


@cache
def _mpmath() -> tuple[Layer, str | None]:
    """The layer with mpmath, which is prepared at first use; and the reason if it cannot be prepared, or None."""
    lock = layers.Lock("mpmath", (_MPMATH,))
    try:
        return layers.prepare(lock), None
    except ClawGymError as error:
        return Layer(lock.name, lock.digest, layers.layer_folder(lock)), f"image not here: mpmath ({error})"
