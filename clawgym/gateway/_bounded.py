"""Bounds on the time and memory of rendering a chat template.

A template comes with the model's folder and is untrusted code. Jinja's sandbox denies it access to Python, but does not
stop nested loops or ``'x' * 10**10``. Here each loop iteration, call, filter, output and text is charged for the
characters that it may produce, before it runs.

Invariant: no operation of a template produces more than what is left of the budget of its rendering.
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
"""Most characters that one rendering may produce; an item of a list or mapping counts as :data:`_HOLDER` characters."""
SECONDS = 10.0
"""Longest time of one rendering."""
_HOLDER = 64
_ADDING = frozenset(
    {
        *("capitalize", "count", "endswith", "find", "index", "isdigit", "lower", "lstrip", "partition", "rpartition"),
        *("removeprefix", "removesuffix", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title"),
        "upper",
    }
)
"""Methods of a string whose result is not longer than the string."""
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
"""``_FREE``: filters that copy nothing. ``_WIDENING``: filters whose result may be larger than their arguments."""
_WIDE = re.compile(r"\*|\d{4}")
"""A width in a format string that is large, or given as an argument."""


class RenderBudget(threading.local):
    """The remaining budget of the rendering in this thread."""

    left = BUDGET
    until = float("inf")

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Start the budget of one rendering."""
        self.left, self.until = BUDGET, time.monotonic() + SECONDS
        yield

    def spend(self, cost: int) -> None:
        """Charge ``cost`` characters. Raises :class:`jinja2.TemplateRuntimeError` if the budget is used up."""
        left = self.left = self.left - cost
        if left < 0:
            raise TemplateRuntimeError("it produces too much text")
        if time.monotonic() > self.until:
            raise TemplateRuntimeError(f"it takes over {SECONDS:g} s")


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    budget: RenderBudget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _InsertChecks(self).visit(super()._parse(source, name, filename))
        for body in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            text = sum(len(data.data) for data in body.find_all(nodes.TemplateData))
            body.body.insert(0, nodes.ExprStmt(self.check_call("tick", nodes.Const(1 + text)), lineno=body.lineno))
        return tree

    def check_call(self, name: str, argument: Any) -> nodes.Expr:
        """Return an expression that calls this object's method ``name`` with the expression ``argument``."""
        check_call = nodes.Call(nodes.EnvironmentAttribute(name), [argument], [], None, None)
        check_call.set_lineno(argument.lineno or 1).set_environment(self)
        return check_call

    def tick(self, cost: int) -> None:
        self.budget.spend(cost)

    def sized(self, value: Any) -> Any:
        """Charge for ``value`` as text and return it."""
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
            case _ if owner is self:  # inserted by :class:`_InsertChecks`: templates cannot access it
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


class _InsertChecks(NodeTransformer):
    """Inserts a charge wherever a list, a mapping, a tuple or a concatenation is made."""

    def __init__(self, environment: _Bounded) -> None:
        self._environment = environment

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._environment.check_call("sized", self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._environment.check_call("sized", self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else self._environment.check_call("sized", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._environment.check_call("sized", part) for part in node.nodes]
        return node


def compiled(source: str) -> tuple[Template, RenderBudget]:
    """Compile a template as transformers does, with bounds. Returns it with the budget of its renderings."""
    made: Any = chat_template_utils._compile_jinja_template("").environment  # pyright: ignore[reportPrivateUsage]
    environment = made.overlay()  # its filters, globals and extensions
    environment.__class__ = _Bounded
    environment.budget = RenderBudget()
    environment.finalize = environment.sized
    environment.filters = {name: _bounded(environment, name, filter) for name, filter in made.filters.items()}
    environment.globals = {name: value for name, value in made.globals.items() if name != "lipsum"}
    with environment.budget.fresh():  # constants are evaluated during compilation
        return environment.from_string(source), environment.budget


def _bounded(environment: _Bounded, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    cost = _product if name in _WIDENING else lambda left, *values: sum(_size(value, left) for value in values)

    @functools.wraps(made)  # keeps the attributes by which Jinja passes the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        environment.budget.spend(cost(environment.budget.left, *args, *kwargs.values()))
        if name == "format":
            _narrow(args[0])
        return made(*args, **kwargs)

    return made if name in _FREE else bounded


def _product(left: int, *values: Any) -> int:
    """Return the largest result of an operation on ``values``: the largest times the second largest."""
    sizes = sorted((abs(v) if isinstance(v, int) else _size(v, left) for v in values), reverse=True)
    return max(1, sizes[0] if sizes else 1) * max(1, sizes[1] if len(sizes) > 1 else 1)


def _size(value: Any, most: int) -> int:
    """Return the approximate length of ``value`` as text. Counting stops beyond ``most``."""
    size, waiting = 0, [value]
    while waiting and size <= most:
        match waiting.pop():
            case str() | bytes() as text:
                size += len(text)
            case dict() | Mapping() as found:  # a test for dict takes much less time than one for Mapping
                size += _HOLDER * (1 + len(found))
                waiting += found
                waiting += found.values()
            case list() | tuple() as found:
                size += _HOLDER * (1 + len(found))
                waiting += found
            case int() as number:
                size += 1 + number.bit_length() // 3
            case _:
                size += 1
    return size


def _shallow(value: Any) -> int:
    """Return the cost of copying ``value``; for a number, its absolute value."""
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
        raise TemplateRuntimeError("it formats with a large width")
