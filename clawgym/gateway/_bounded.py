"""Chat templates that end: a bound on the time and on the memory of one rendering.

A template belongs to the model's folder, so it is somebody else's program. Jinja's sandbox keeps it from reaching
anything; it does not keep it from ``{% for %}`` in ``{% for %}``, nor from ``'x' * 10**10``. Here every turn of a loop,
call, filter, output and piece of text costs what it may make, before it makes it.

Invariant: no operation of a template makes more than what is left of the budget of its rendering.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

__all__ = ["BUDGET", "SECONDS", "RenderBudget", "compiled"]

BUDGET = 2**29
"""Characters that one rendering may make in all; what holds others counts :data:`_HOLDER` for each."""
SECONDS = 10.0
"""That one rendering may take."""
_HOLDER = 64
_ADDING = frozenset(
    {
        *("capitalize", "count", "endswith", "find", "index", "isdigit", "lower", "lstrip", "partition", "rpartition"),
        *("removeprefix", "removesuffix", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title"),
        "upper",
    }
)
"""Methods of a text whose result is no larger than it."""
_FREE = frozenset(
    {
        *("attr", "count", "d", "default", "first", "items", "last", "length", "map", "reject", "rejectattr"),
        *("safe", "select", "selectattr"),
    }
)
_WIDENING = frozenset(
    {
        *("batch", "center", "format", "indent", "join", "replace", "slice", "sum", "tojson", "truncate", "urlize"),
        *("wordwrap", "xmlattr"),
    }
)
"""Filters that copy nothing, and those whose result may be larger than what they are given."""
_WIDE = re.compile(r"\*|\d{4}")
"""A width in a format that is given apart, or is large."""


class RenderBudget(threading.local):
    """What is left of the rendering that runs in this thread."""

    left = BUDGET
    until = float("inf")

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Inside, one rendering."""
        self.left, self.until = BUDGET, time.monotonic() + SECONDS
        yield

    def spend(self, cost: int) -> None:
        """Raises :class:`jinja2.TemplateRuntimeError` where this is more than what is left."""
        left = self.left = self.left - cost
        if left < 0:
            raise TemplateRuntimeError("it makes too much text")
        if time.monotonic() > self.until:
            raise TemplateRuntimeError(f"it takes over {SECONDS:g} s")


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    budget: RenderBudget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Asking(self).visit(super()._parse(source, name, filename))
        for body in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            text = sum(len(data.data) for data in body.find_all(nodes.TemplateData))
            body.body.insert(0, nodes.ExprStmt(self.asked("tick", nodes.Const(1 + text)), lineno=body.lineno))
        return tree

    def asked(self, name: str, argument: Any) -> nodes.Expr:
        """A call of our own method ``name`` with the expression ``argument``."""
        asked = nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None)
        asked.set_lineno(argument.lineno or 1).set_environment(self)
        return asked

    def tick(self, cost: int) -> None:
        self.budget.spend(cost)

    def sized(self, value: Any) -> Any:
        """``value``, once there is room for it as text."""
        self.budget.spend(len(value) if type(value) is str else _size(value, self.budget.left))  # mostly
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match left, right:
            case int(), int() if operator in ("*", "**"):
                bits = left.bit_length() * (max(1, right) if operator == "**" else right.bit_length())
                self.budget.spend(bits * bits // 64 if operator == "**" else bits // 64)
            case ((str() | list() | tuple()), _) if operator == "+":
                self.budget.spend(sum(_shallow(side) for side in (left, right)))
            case str(), _ if operator == "%":
                _narrow(left)
                self.sized([left, right])
            case _ if operator == "*":
                self.budget.spend(_shallow(left) * _shallow(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _narrow(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, owner, name = __self, getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        given = [*args, *kwargs.values()]
        match owner:
            case _ if owner is self:  # asked by :class:`_Asking`: nothing in a template has this object
                return __obj(*args)
            case _ if isinstance(__obj, Macro):
                pass
            case None:
                self.budget.spend(sum(abs(value) for value in given if isinstance(value, int)))
                if name == "strftime_now":
                    _narrow(str(given[0]))
            case list() | tuple() | Mapping():
                self.budget.spend(_shallow(owner))
            case str() if name in _ADDING:
                self.budget.spend(len(owner))
            case _:
                self.budget.spend(_product(self.budget.left, owner, *given))
        return super().call(__context, __obj, *args, **kwargs)


class _Asking(NodeTransformer):
    """Lets what holds or joins others be sized when it is made."""

    def __init__(self, environment: _Bounded) -> None:
        self._environment = environment

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._environment.asked("sized", self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._environment.asked("sized", self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else self._environment.asked("sized", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._environment.asked("sized", part) for part in node.nodes]
        return node


def compiled(source: str) -> tuple[Template, RenderBudget]:
    """The template as transformers compiles it, with bounds, and what is left to the rendering of a thread."""
    made: Any = chat_template_utils._compile_jinja_template("").environment  # pyright: ignore[reportPrivateUsage]
    environment = made.overlay()  # its filters, globals and extensions
    environment.__class__ = _Bounded
    environment.budget = RenderBudget()
    environment.finalize = environment.sized
    environment.filters = {name: _bounded(environment, name, filter) for name, filter in made.filters.items()}
    environment.globals = {name: value for name, value in made.globals.items() if name != "lipsum"}
    with environment.budget.fresh():  # what is constant is worked out now
        return environment.from_string(source), environment.budget


def _bounded(environment: _Bounded, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    cost = _product if name in _WIDENING else lambda left, *values: sum(_size(value, left) for value in values)

    @functools.wraps(made)  # with what Jinja is to hand it first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        environment.budget.spend(cost(environment.budget.left, *args, *kwargs.values()))
        if name == "format":
            _narrow(args[0])
        return made(*args, **kwargs)

    return made if name in _FREE else bounded


def _product(left: int, *values: Any) -> int:
    """The most that can be made of ``values``: the largest as often as the next one says."""
    sizes = sorted((abs(v) if isinstance(v, int) else _size(v, left) for v in values), reverse=True)
    return max(1, sizes[0] if sizes else 1) * max(1, sizes[1] if len(sizes) > 1 else 1)


def _size(value: Any, most: int) -> int:
    """Characters of ``value`` as text, about; once over ``most`` it is not counted further."""
    size, waiting = 0, [value]
    while waiting and size <= most:
        match waiting.pop():
            case str() | bytes() as text:
                size += len(text)
            case Mapping() as found:
                size += _HOLDER * (1 + len(found))
                waiting += [*found.keys(), *found.values()]
            case list() | tuple() as found:
                size += _HOLDER * (1 + len(found))
                waiting += found
            case int() as number:
                size += 1 + number.bit_length() // 3
            case _:
                size += 1
    return size


def _shallow(value: Any) -> int:
    """What copying ``value`` takes; of a number, how often."""
    match value:
        case str() | bytes():
            return len(value)
        case list() | tuple() | Mapping():
            return _HOLDER * (1 + len(value))
        case int():
            return abs(value)
    return 1


def _narrow(form: Any) -> None:
    if _WIDE.search(str(form)):
        raise TemplateRuntimeError("it asks for a wide column")
