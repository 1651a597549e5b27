"""What the checkers of BFCL tasks compare: calls by the rules of its documentation, and the states that calls leave.

Standard library only: it is mounted beside the checker, as ``bfcl_checks.py``. The classes whose methods the multi-turn
tasks call come from the set's own package; their files are mounted below :data:`CLASSES`, and run here.

Rules for one call (single turn). The name must be that of the function, with ``_`` for each ``.``. No required
parameter may be missing, and none may be there that function or answer do not have. A value must have the declared
type (a whole number may stand for a float), or the type of the accepted values, which is how a variable is written. It
must equal one of the accepted values: text without case, blanks and ``,./-_*^``, lists in their order, objects by key.
An accepted value ``""`` makes a parameter optional. In Java and JavaScript all values are texts that hold a literal.

Rules for turns. After each turn that has reference calls, the public attributes of all classes must be as those calls
leave them, and each of their results must be among those that the agent got so far.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["answered", "calls_of_first_reply", "called", "played", "turns"]

CLASSES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""Class -> module below :data:`CLASSES`."""
STEPS = 20
"""Replies with calls that a turn may have. The set's own harness ends the conversation after one more."""
REFUSED = frozenset({"kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run"})
"""Names that the set's own harness does not call."""

Call = tuple[str, Mapping[str, Any]]


def transcript(path: str | None = None) -> list[Any]:
    """The messages of the episode."""
    path = path or os.environ.get("OPENCLAW_REWARD_PAYLOAD", "/payload/openclaw_reward_payload.json")
    with open(path, encoding="utf-8", errors="replace") as file:
        return json.load(file)["transcript"]


def turns(messages: Sequence[Mapping[str, Any]]) -> list[list[list[Call] | None]]:
    """By turn of the user, the calls of each reply; None for a reply that had unreadable calls."""
    found: list[list[list[Call] | None]] = []
    for message in messages:
        if message["role"] == "user":
            found.append([])
        elif message["role"] == "assistant" and found:
            calls = [(call["name"], call["arguments"]) for call in message.get("tool_calls") or ()]
            broken = any(result["id"] is None for result in message.get("results") or ())
            found[-1].append(None if broken else calls)
    return found


def calls_of_first_reply() -> list[Call] | None:
    """The calls of the agent's first reply; none without a reply, None if they were unreadable."""
    replies = [reply for turn in turns(transcript()) for reply in turn]
    return replies[0] if replies else []


def called() -> bool:
    """Whether the first reply has a readable call."""
    return bool(calls_of_first_reply())


# -- one call against its accepted values


def answered(data: Mapping[str, Any]) -> bool:
    """Whether the first reply has the calls of ``data``: ``functions``, ``answers``, ``language``, ``ordered``."""
    calls = calls_of_first_reply()
    answers = data["answers"]
    if calls is None or len(calls) != len(answers):
        return False
    documents = {function["name"]: function for function in data["functions"]}
    left = list(calls)
    for answer in answers:
        ((name, accepted),) = answer.items()
        document = data["functions"][0] if data["only"] else documents.get(name)
        fits = [n for n, call in enumerate(left) if document and _fits(call, document, accepted, data["language"])]
        if not fits:
            return False
        del left[fits[0]]
    return True


def _fits(call: Call, document: Mapping[str, Any], accepted: Mapping[str, list[Any]], language: str) -> bool:
    name, arguments = call
    declared = document["parameters"]["properties"]
    if name != document["name"].replace(".", "_"):
        return False
    if any(parameter not in arguments for parameter in document["parameters"]["required"]):
        return False
    if any(parameter not in declared or parameter not in accepted for parameter in arguments):
        return False
    if any("" not in values for parameter, values in accepted.items() if parameter not in arguments):
        return False
    try:
        return all(_equal(value, declared[p], accepted[p], language) for p, value in arguments.items())
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return False  # the function is not described as its kind must be


_PYTHON: Mapping[str, type] = {"string": str, "integer": int, "float": float, "boolean": bool, "array": list}
_PYTHON = {**_PYTHON, "tuple": list, "dict": dict, "any": str}
_JAVA: Mapping[str, type] = {"byte": int, "short": int, "integer": int, "long": int, "float": float, "double": float}
_JAVA = {**_JAVA, "boolean": bool, "char": str, "String": str, "any": str, "Array": list, "ArrayList": list}
_JAVA = {**_JAVA, "HashMap": dict}
_SCRIPT: Mapping[str, type] = {"String": str, "integer": int, "float": float, "Bigint": int, "Boolean": bool}
_SCRIPT = {**_SCRIPT, "dict": dict, "array": list, "any": str}
_TYPES = {"python": _PYTHON, "java": _JAVA, "javascript": _SCRIPT}
_LISTS = {"python": ("array", "tuple"), "java": ("Array", "ArrayList"), "javascript": ("array",)}


def _equal(value: Any, declared: Mapping[str, Any], accepted: list[Any], language: str) -> bool:
    """Whether ``value`` is one of ``accepted``, as the parameter ``declared`` takes it."""
    types = _TYPES[language]
    kind = types[declared["type"]]
    inner = types[declared["items"]["type"]] if declared["type"] in _LISTS[language] else None
    if language != "python":
        if type(value) is not str:
            return False
        items = declared["items"]["type"] if inner else None
        value = (_java if language == "java" else _script)(value, declared["type"], items)
    elif kind is float and type(value) is int:
        value = float(value)
    written = _kind_of(accepted)
    return _same(value, kind, inner, written, accepted)


def _same(value: Any, kind: type, inner: type | None, written: type | None, accepted: list[Any]) -> bool:
    """Whether a value is one of ``accepted``. ``kind``: its declared type, ``inner``: that of its items, ``written``:
    that of the accepted values."""
    if type(value) is not kind:
        return type(value) is written and value in accepted
    if inner is not None and not any(_holds(value, inner, one) for one in accepted):
        return False
    if written not in (None, kind):
        return value in accepted
    if kind is str:
        return _plain(value) in [_plain(one) for one in accepted if type(one) is str]
    if kind is dict:
        return any(one != "" and _same_object(value, one) for one in accepted)
    if inner is dict:
        return any(len(value) == len(one) and all(map(_same_object, value, one)) for one in accepted)
    if kind is list:
        return [_plain(one) for one in value] in [[_plain(item) for item in one] for one in accepted]
    return value in accepted


def _kind_of(accepted: list[Any]) -> type | None:
    """The type of the first accepted value; None if the parameter can only be left out."""
    return next((type(one) for one in accepted if one != ""), None)


def _holds(items: list[Any], inner: type, accepted: Any) -> bool:
    """Whether the items have a type that the accepted list allows."""
    return not isinstance(accepted, list) or all(type(item) in (inner, _kind_of(accepted)) for item in items)


def _plain(value: Any) -> Any:
    """Text without what does not count; other values as they are."""
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if type(value) is str else value


def _same_object(value: Mapping[str, Any], accepted: Mapping[str, list[Any]]) -> bool:
    if any(key not in value and "" not in values for key, values in accepted.items()):
        return False
    return all(key in accepted and _plain(one) in [_plain(a) for a in accepted[key]] for key, one in value.items())


# -- literals of Java and JavaScript

_NUMBER = r"-?\d+(\.\d+)?"
_JAVA_FLOAT = _NUMBER + r"([eE][+-]?\d+)?"
_WHOLE = re.compile(r"-?\d+")


def _java(text: str, kind: str, items: str | None = None) -> Any:
    """The value of a Java literal of the type ``kind``; the text itself if it is none."""
    if kind in ("Array", "ArrayList"):
        return _java_list(text, kind, items)
    if kind == "HashMap":
        return _java_map(text)
    return _literal(
        text, kind, {"float": (_JAVA_FLOAT, "[fF]"), "double": (_JAVA_FLOAT, ""), "long": (r"-?\d+", "[lL]")}
    )


def _literal(text: str, kind: str, numbers: Mapping[str, tuple[str, str]]) -> Any:
    if kind in ("byte", "short", "integer"):
        return int(text) if _WHOLE.fullmatch(text) else text
    if kind in ("boolean", "Boolean"):
        return {"true": True, "false": False}.get(text, text)
    pattern, suffix = numbers.get(kind, ("", ""))
    if not pattern or not re.fullmatch(f"{pattern}{suffix}", text):
        return text
    number = text[: len(text) - bool(suffix)]
    return float(number) if kind in ("float", "double") else int(number)


def _java_list(text: str, kind: str, items: str | None) -> Any:
    def item(one: str) -> Any:
        if kind == "ArrayList" and items in ("char", "String"):
            return one[1:-1]  # without its quotes
        return _java(one, items) if items else _java_value(one)

    if kind == "Array":
        if not (found := re.search(r"new\s+\w+\[\]\s*\{(.*?)\}", text)):
            return text
        return [item(one.strip()) for one in found[1].split(",") if one.strip()]
    if found := re.search(r"new\s+ArrayList<\w*>\(Arrays\.asList\((.+?)\)\)", text):
        return [item(one.strip()) for one in found[1].split(",")]
    if found := re.search(r"new\s+ArrayList<\w*>\(\)\s*\{\{\s*(.+?)\s*\}\}", text, re.DOTALL):
        return [item(one.strip()) for one in re.findall(r"add\((.+?)\)", found[1])]
    return [] if re.search(r"new\s+ArrayList<\w*>\(\)", text) else text


def _java_map(text: str) -> Any:
    if found := re.search(r"new\s+HashMap<.*?>\s*\(\)\s*\{\s*\{?\s*(.*?)\s*\}?\s*\}", text, re.DOTALL):
        return {key: _java_value(one.strip()) for key, one in re.findall(r'put\("(.*?)",\s*(.*?)\)', found[1])}
    return {} if re.search(r"new\s+HashMap<.*?>\s*\(\)", text) else text


def _java_value(text: str) -> Any:
    """The value of a literal of any type."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    for kind in ("boolean", "long", "float"):
        if (value := _java(text, kind)) is not text:
            return value
    return _number(text)


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _script(text: str, kind: str, items: str | None = None) -> Any:
    """The value of a JavaScript literal of the type ``kind``; the text itself if it is none."""
    if kind == "String":
        return text[1:-1] if _quoted(text) else text
    if kind == "array":
        return _script_list(text.strip(), items)
    if kind == "dict":
        return _script_object(text.strip())
    return _literal(text, kind, {"float": (_NUMBER, ""), "Bigint": (r"-?\d+", "n")})


def _quoted(text: str) -> bool:
    return any(text.startswith(quote) and text.endswith(quote) for quote in "\"'")


def _script_list(text: str, items: str | None) -> Any:
    rows = r"\[\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\]|\bnew\s+Array\(\s*\[.*?\]\s*(,\s*\[.*?\]\s*)*\)"
    if found := re.match(rows, text):
        inner = [row.strip().removeprefix("[") for row in re.findall(r"\[(.*?)\]", found[0])]
        return [[_script_value(one) for one in row.split(",")] for row in inner]
    if not (found := re.match(r"\[(.*?)\]|\bnew\s+Array\((.*?)\)", text)):
        return text
    held = (found[1] if found[1] is not None else found[2]).strip()
    parts = [part.strip() for part in held.split(",")] if held else []
    return [_script(part, items) if items else _script_value(part) for part in parts]


def _script_object(text: str) -> Any:
    if not (found := re.match(r"\{(.*?)\}", text)):
        return text
    pairs = re.findall(r"([^:]+):\s*(.*?)(?:,\s*(?=[^,]+:)|$)", found[1])
    return {key.strip().strip("'\""): _script_member(one.strip()) for key, one in pairs}


def _script_member(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return _script_list(text, None)
    if text.startswith("{") and text.endswith("}"):
        return _script_object(text)
    return _script_value(text.strip("'\""))


def _script_value(text: str) -> Any:
    text = text.strip()
    if text in ("true", "false"):
        return text == "true"
    return text[1:-1] if _quoted(text) else _number(text)


# -- turns


class ClassStage:
    """The objects that calls act on: one of each class, made from ``config``."""

    def __init__(self, names: Sequence[str], config: Mapping[str, Any], long: bool) -> None:
        self.objects: dict[str, Any] = {}
        self.methods: dict[str, Callable[..., Any]] = {}
        for name in names:
            made = getattr(importlib.import_module(f"{CLASSES}.{MODULES[name]}"), name)()
            if hasattr(made, "_load_scenario"):
                made._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long)
            self.objects[name] = made
            for method in dir(made):
                if not method.startswith("_") and callable(getattr(made, method)):
                    self.methods[method] = getattr(made, method)

    def call(self, name: str, /, *given: Any, **named: Any) -> str:
        """The result as text, as the set's own harness shows it to a model."""
        try:
            if name in REFUSED:
                raise Exception(f"Function call {name} is not allowed.")
            if name not in self.methods:
                raise NameError(f"name {name!r} is not defined")
            result = self.methods[name](*given, **named)
        except Exception as error:  # of the set's classes
            return f"Error during execution: {error}"
        if isinstance(result, dict):
            with contextlib.suppress(TypeError, ValueError):
                return json.dumps(result)
        return str(result)

    def run(self, text: str) -> str:
        """The result of a reference call, written as ``name(value, key=value)``."""
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(f"{text!r} is no call")
        given = [ast.literal_eval(value) for value in call.args]
        return self.call(call.func.id, *given, **{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})

    def same(self, other: ClassStage) -> bool:
        """Whether the public attributes of all objects are those of ``other``."""
        return all(_public(made) == _public(other.objects[name]) for name, made in self.objects.items())


def _public(made: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(made).items() if not name.startswith("_")}


def played(data: Mapping[str, Any], libraries: Sequence[str] = ()) -> bool:
    """Whether the episode went as the reference calls of ``data``: ``classes``, ``config``, ``long``, ``answers``."""
    sys.path += [os.path.dirname(os.path.abspath(__file__)), *libraries]
    with contextlib.redirect_stdout(sys.stderr):  # a class may print
        return _played(data)


def _played(data: Mapping[str, Any]) -> bool:
    made = turns(transcript())
    if len(made) != len(data["answers"]):
        return False
    agent, reference = (ClassStage(data["classes"], data["config"], data["long"]) for _ in range(2))
    seen: list[str] = []
    for number, (replies, answers) in enumerate(zip(made, data["answers"], strict=True), start=1):
        acting = [calls for calls in replies if calls]
        if len(acting) > STEPS and number < len(made):
            return False
        del acting[STEPS + 1 :]
        seen += [agent.call(name, **arguments) for calls in acting for name, arguments in calls]
        wanted = [reference.run(text) for text in answers]
        if wanted and not (acting and agent.same(reference) and _contains(seen, wanted)):
            return False
    return True


def _contains(seen: Sequence[str], wanted: Sequence[str]) -> bool:
    left = list(seen)
    for one in wanted:
        if one not in left:
            return False
        left.remove(one)
    return True
