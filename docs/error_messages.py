"""The page ``reference/errors.md``: every message of an error, read from the source without importing it.

A message is built where it is raised, before that, or by a function that returns the error. What varies in it stands
in braces. ``tests/test_docs.py`` checks that no text of a ``raise`` is missing on the page.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("clawgym", "tasks", "verifiers", "trainers", "leaderboards")
BASE = "ClawGymError"
OTHERS = {
    "BadParameter": "An option or argument of a command has a wrong value.",
    "ValueError": "An argument has a wrong value.",
    "TypeError": "An argument or a returned value has the wrong type.",
    "NotImplementedError": "A class that you wrote lacks a method.",
    "ResetNeeded": "`gymnasium.error.ResetNeeded`: call `reset()` first.",
    "AlreadyPendingCallError": "`gymnasium.error.AlreadyPendingCallError`: an environment still works on an action.",
    "RuntimeError": "An object is used after it was closed.",
    "TimeoutError": "Something did not happen in time.",
    "warning": "Messages in the log. The work goes on.",
}
"""What else the page has, where it says what to do: exception -> when it is raised."""
PARTS = {
    "EndpointFailure": ("EngineError", "{host} ({status}): {}: check that the endpoint is up, and run again"),
    "NeedsBuild": ("UnsupportedTask", "task {id} cannot run here (environment/Dockerfile {}): choose another task"),
    "NotSupported": ("UnsupportedTask", "task {id} cannot run here ({}): choose another task"),
    "BadPatch": ("UnsupportedTask", "{repo} at {commit}: test_patch: {}: leave the row out"),
}
"""Class whose text becomes a part of a message -> the class of that error, and the message."""
NOT_SHOWN = {"Again", "AssertionError", "BadCall", "ClawStopped", "Failed", "OSError", "Refused", "ToolError"}
NOT_SHOWN |= {"Unanswered", "ValidationError", "_over", "reason"}
"""Exceptions that only programs see: answers to agents and to the page of ``clawgym view``, lines in the log of a
verifier, causes of other errors, reasons why a task is unsupported."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Made = tuple[str, list[str], str]


@dataclass(frozen=True, order=True)
class Message:
    """One message of errors of the class ``kind``, raised in ``module``."""

    kind: str
    room: str
    text: str
    module: str


def read() -> dict[str, str]:
    """The source files by module name."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "clawgym" else ("clawgym", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path.read_text("utf-8")
    return found


def error_classes(sources: Mapping[str, str]) -> dict[str, str]:
    """The classes of errors of the library, parents first, with their docstrings."""
    found: dict[str, str] = {}
    defined = [node for text in sources.values() for node in _parse(text).body if isinstance(node, ast.ClassDef)]
    for _ in range(4):  # the depth of the hierarchy
        for node in defined:
            if node.name == BASE or any(ast.unparse(base) in found for base in node.bases):
                found[node.name] = ast.get_docstring(node) or ""
    return found


def messages(sources: Mapping[str, str]) -> list[Message]:
    """Every message in ``sources`` (module name -> text). Messages of a class with the same fixed words are one."""
    kinds = set(error_classes(sources))
    modules = [_Module(name, _parse(text), kinds) for name, text in sources.items()]
    named = [item for module in modules for item in module.constants().items()]
    often = Counter(name for name, _ in set(named))
    for module in modules:
        module.known = {name: value for name, value in named if often[name] == 1} | module.constants()
    makers = {name: made for module in modules for name, made in module.makers().items()}
    found: dict[tuple[str, str], Message] = {}
    for module in modules:
        for kind, text in module.messages(makers):
            text = " ".join(text.split())
            if _worded(text) and (kind in kinds or kind == "warning" or (kind in OTHERS and re.search("[:;] ", text))):
                found.setdefault((kind, slug(text)), Message(kind, _room(module.name), text, module.name))
    return sorted(found.values())


def anchors(found: list[Message]) -> dict[Message, str]:
    """The anchor of each message: its first words; if a shorter message has these, all its words, or also its class."""
    chosen: dict[str, Message] = {}
    for message in sorted(found, key=lambda one: (len(slug(one.text)), one)):
        words = slug(message.text)
        for anchor in ("-".join(words.split("-")[:9]), words, f"{words}-{message.kind.lower()}"):
            if anchor not in chosen:
                chosen[anchor] = message
                break
    return {message: anchor for anchor, message in chosen.items()}


def page(sources: Mapping[str, str]) -> str:
    """The page, as Markdown."""
    found = messages(sources)
    anchor = anchors(found)
    by_kind = {kind: list(group) for kind, group in groupby(found, key=lambda message: message.kind)}
    docs = {**error_classes(sources), **OTHERS}
    lines = [
        "# Errors",
        "",
        "Every message of the library, by class and by part of the library. The end of a message says what to do.",
        "",
        "To find yours, search this site for some of its words. Leave out names and numbers: they stand as `{name}` "
        "here. [Troubleshooting](../how-to/troubleshooting.md) explains the messages that newcomers meet first.",
        "",
        "A command prints `clawgym:` and the message, and exits with status 2. In Python, catch "
        "[`clawgym.errors.ClawGymError`](api/clawgym.md), or one of the classes below.",
        "",
    ]
    for kind in sorted(by_kind, key=lambda kind: list(docs).index(kind) if kind in docs else len(docs)):
        lines += [f"## {kind} {{#{kind.lower()}}}", "", _markdown(docs.get(kind, "")), ""]
        several = len({message.room for message in by_kind[kind]}) > 1
        for room, group in groupby(by_kind[kind], key=lambda message: message.room):
            lines += [f"### {kind} in {room} {{#{kind.lower()}-{room}}}", ""] if several else []
            for message in group:
                link = f'<a class="headerlink" href="#{anchor[message]}" title="Permanent link">&para;</a>'
                lines += [f'<h4 id="{anchor[message]}"><code>{escape(message.text)}</code>{link}</h4>', ""]
                lines += [f"<p>Raised in <code>{message.module}</code>.</p>", ""]
    return "\n".join(lines)


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


class _Module:
    """A parsed file: where it makes errors, and what its names may stand for."""

    def __init__(self, name: str, tree: ast.Module, kinds: set[str]) -> None:
        self.name, self._kinds = name, kinds
        self.known: Mapping[str, str] = {}
        self._function: dict[ast.AST, _Function] = {}
        self._values: dict[tuple[ast.AST | None, str], list[ast.expr]] = {}
        self._calls: list[ast.Call] = []
        self._raised: set[ast.AST | None] = set()
        self._enter(tree, None)

    def constants(self) -> dict[str, str]:
        """The texts that the module gives names to, such as ``DATA_VARIABLE``."""
        return {
            name: value.value
            for (function, name), (value, *_) in self._values.items()
            if function is None and name.isupper() and isinstance(value, ast.Constant) and isinstance(value.value, str)
        }

    def makers(self) -> dict[str, list[_Made]]:
        """The functions that return an error: class, parameters and text of what each makes."""
        found: dict[str, list[_Made]] = {}
        for kind, frame, call in self._errors():
            function = self._function.get(call)
            if function is not None and self._is_maker(function):
                parameters = [one.arg for one in function.args.args if one.arg != "self"]
                made = [(kind, parameters, text) for text in self._message(frame, call)]
                found.setdefault(function.name, []).extend(made)
        return found

    def messages(self, makers: Mapping[str, list[_Made]]) -> Iterator[tuple[str, str]]:
        """Class and text of each message, also of those that ``makers`` make here."""
        makers = {**makers, **self.makers()}
        for kind, frame, call in self._errors():
            made = makers.get(_last(call.func), []) if kind == BASE else []
            if not made:
                yield from ((kind, text) for text in self._message(frame, call))
            for listed, parameters, text in made:
                texts = [text]
                for name, value in zip(parameters, call.args, strict=False):
                    texts = [one.replace(f"{{{name}}}", told) for one in texts for told in self._texts(value)]
                yield from ((listed, text) for text in texts)

    def _enter(self, node: ast.AST, function: _Function | None) -> None:
        for child in ast.iter_child_nodes(node):
            if function is not None:
                self._function[child] = function
            match child:
                case ast.Assign(targets=[target], value=value):
                    self._bind(function, target, value)
                case ast.For(target=target, iter=ast.Tuple(elts=values)):
                    for value in values:
                        self._bind(function, target, value)
                case ast.Return(value=ast.expr() as value) if function is not None:
                    self._values.setdefault((None, f"{function.name}()"), []).append(value)
                    if self._is_maker(function):
                        self._raised.add(value)
                case ast.Raise(exc=value):
                    self._raised.add(value)
                case ast.Call():
                    self._calls.append(child)
                case _:
                    pass
            self._enter(child, child if isinstance(child, _Function) else function)

    def _bind(self, function: _Function | None, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                self._values.setdefault((function, name), []).append(value)
            case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                for one, its in zip(targets, values, strict=False):
                    self._bind(function, one, its)
            case _:
                pass

    def _is_maker(self, function: _Function) -> bool:
        return function.returns is not None and _last(function.returns) in self._kinds

    def _errors(self) -> Iterator[tuple[str, str, ast.Call]]:
        """Each call that makes an error: the class it is listed under, the frame of its message, the call."""
        for call in self._calls:
            name = _last(call.func)
            if name in self._kinds or name == "warning":
                yield name, "{}", call
            elif name in PARTS:
                yield *PARTS[name], call
            elif call in self._raised and name not in NOT_SHOWN:
                yield name if name.strip("_")[:1].isupper() else BASE, "{}", call

    def _message(self, frame: str, call: ast.Call) -> list[str]:
        """The texts of an error: ``frame`` with the first argument that has words, or else that is no number."""
        given = [self._texts(one) for one in call.args if not _is_number(one)]
        texts = next((texts for texts in given if any(map(_worded, texts))), given[0] if given else [])
        if frame != "{}":
            texts = [text for text in texts if _worded(text)]
        for keyword in call.keywords:
            if keyword.arg == "do":  # in place of the advice that the frame ends with
                start = frame.partition("{}")[0]
                return [f"{start}{text}: {do}" for text in texts for do in self._texts(keyword.value)]
        return [frame.replace("{}", text) for text in texts]

    def _texts(self, node: ast.expr, depth: int = 0) -> list[str]:
        """What an expression may evaluate to. Names stand for what is assigned to them, calls for what they return."""
        match node:
            case ast.Constant(value=str(value)):
                return [re.sub(r"%[sdr]", "{...}", value)]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right) if not _is_number(right):
                return self._joined([left, right], depth)
            case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other]) if _has_text(node):
                return self._texts(one, depth) + self._texts(other, depth)
            case ast.FormattedValue(value=value):
                return self._texts(value, depth + 1)
            case ast.Call(func=ast.Attribute(value=text, attr="format" | "strip")) if _has_text(text):
                return self._texts(text, depth)
            case (
                ast.Subscript(value=ast.Name() as table)
                | ast.Call(func=ast.Attribute(value=ast.Name() as table, attr="get"))
            ):
                told = [text for text in self._texts(table, depth) if _worded(text)]
                return told or [_hole(node)]
            case ast.Dict(values=values):
                return [text for value in values for text in self._texts(value, depth)]
            case ast.Name(id=name) if depth < 3:
                told = self._told((self._function.get(node), name), depth) or self._told((None, name), depth)
                return told or [self.known.get(name, _hole(node))]
            case ast.Call(func=ast.Name() | ast.Attribute() as called) if depth < 3:
                return self._told((None, f"{_last(called)}()"), depth) or [_hole(node)]
            case _:
                return [_hole(node)]

    def _told(self, name: tuple[ast.AST | None, str], depth: int) -> list[str]:
        """The phrases that ``name`` may stand for, and a part that varies if it may also be something else."""
        texts = [text for value in self._values.get(name, []) for text in self._texts(value, depth + 1)]
        phrases = [text for text in texts if " " in text and _worded(text)]
        rest = ["" if "" in texts else f"{{{name[1].strip('_()')}}}"] if len(phrases) < len(texts) else []
        return [*phrases, *rest] if phrases else []

    def _joined(self, parts: list[ast.expr], depth: int) -> list[str]:
        texts = [""]
        for part in parts:
            texts = [text + more for text in texts for more in self._texts(part, depth)][:32]
        return texts


def _last(node: ast.expr) -> str:
    """The last name of ``a.b.c``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
        case _:
            return ""


def _hole(node: ast.expr) -> str:
    """What stands for a part that varies: the name of the value, in braces."""
    match node:
        case ast.Attribute(attr="__name__"):
            return "{type}"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"{{{name.strip('_')}}}"
        case ast.BinOp(op=ast.Div()):
            return "{path}"
        case ast.Call(func=ast.Name(id=name), args=[inner, *_]) if hasattr(builtins, name):
            return _hole(inner)
        case ast.Call(func=ast.Attribute(attr="join"), args=[inner]) | ast.Call(func=ast.Attribute(value=inner)):
            return _hole(inner)
        case ast.Subscript(value=inner) | ast.Await(value=inner) | ast.BinOp(left=inner) | ast.Call(func=inner):
            return _hole(inner)
        case ast.FormattedValue(value=inner) | ast.GeneratorExp(elt=inner):
            return _hole(inner)
        case _:
            return "{...}"


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _has_text(node: ast.expr) -> bool:
    """Whether a literal text with words is in ``node``."""
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) and _worded(one.value) for one in ast.walk(node)
    )


def _worded(text: str) -> bool:
    """Whether there is a word outside of the parts that vary."""
    return re.search(r"[a-z]{3}", _fixed(text)) is not None


def _fixed(text: str) -> str:
    return re.sub(r"\{[^{}]*\}", " ", text)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", _fixed(text).lower()).strip("-")


def _room(module: str) -> str:
    return next(iter(module.split(".")[1:]), "clawgym")


def _markdown(doc: str) -> str:
    """A docstring as Markdown."""
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", doc).replace("``", "`")
