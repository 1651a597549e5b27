"""Mutations: small edits of a Python file that change its behaviour.

An edit is found in the syntax tree and replaces the bytes from ``start`` to ``end`` of the text.

Invariants: the edits of a file depend only on its bytes, not on the running version of Python (3.11 to 3.13). A usable
edit gives valid Python with another syntax tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["OPERATORS", "Edit", "apply", "edits", "usable"]


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """One change of one file."""

    start: int
    """Byte offset."""
    end: int
    replacement: str
    operator: str
    """One of :data:`OPERATORS`."""
    scope: str = ""
    """The enclosing function, such as ``Class.method``."""


Change = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class _Text:
    """A file's bytes; converts positions in the syntax tree to byte offsets."""

    data: bytes
    lines: tuple[int, ...]

    def start(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def token(self, left: ast.AST, right: ast.AST, token: str) -> tuple[int, int] | None:
        """Byte range of ``token`` between two nodes; None if it is not there exactly once, or there is a comment."""
        start, end = self.end(left), self.start(right)
        between = self.data[start:end].decode()
        if "#" in between:
            return None
        border = r"\b" if token[0].isalpha() else r"(?![=<>*/])"
        pattern = (r"\b" if token[0].isalpha() else r"(?<![=<>*/!])") + r"\s+".join(map(re.escape, token.split()))
        found = list(re.finditer(pattern + border, between))
        return (start + found[0].start(), start + found[0].end()) if len(found) == 1 else None


Operator = Callable[[ast.AST, _Text], Iterator[Change]]

_COMPARE: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<",)),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">",)),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}


def _swap(text: _Text, left: ast.AST, right: ast.AST, old: str, *new: str) -> Iterator[Change]:
    if (at := text.token(left, right, old)) is not None:
        for token in new:
            yield *at, token


def _comparison(node: ast.AST, text: _Text) -> Iterator[Change]:
    """``<`` for ``<=``, ``==`` for ``!=``, ``in`` for ``not in``, ..."""
    if isinstance(node, ast.Compare):
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            old, new = _COMPARE[type(op)]
            yield from _swap(text, left, right, old, *new)


def _boolean(node: ast.AST, text: _Text) -> Iterator[Change]:
    """``and`` for ``or``."""
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            if len(node.values) == 2:
                yield from _swap(text, left, right, old, new)


def _arithmetic(node: ast.AST, text: _Text) -> Iterator[Change]:
    """``-`` for ``+``, ``//`` for ``/``, ..., unless an operand is a text literal."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        yield from _swap(text, node.left, node.right, *_ARITHMETIC[type(node.op)])


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _constant(node: ast.AST, text: _Text) -> Iterator[Change]:
    """An integer off by one; ``True`` for ``False``."""
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield text.start(node), text.end(node), str(not node.value)
    elif isinstance(node.value, int) and text.of(node).isdigit():
        yield text.start(node), text.end(node), str(node.value + 1)
        if node.value > 0:
            yield text.start(node), text.end(node), str(node.value - 1)


def _negation(node: ast.AST, text: _Text) -> Iterator[Change]:
    """A negated condition."""
    if isinstance(node, ast.If | ast.IfExp):
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield text.start(test), text.start(test.operand), ""
        elif isinstance(test, ast.Name | ast.Call | ast.Attribute | ast.Subscript):
            yield text.start(test), text.start(test), "not "
        elif not isinstance(test, ast.NamedExpr):
            yield text.start(test), text.end(test), f"not ({text.of(test)})"


def _result(node: ast.AST, text: _Text) -> Iterator[Change]:
    """``return None`` in place of a value."""
    if isinstance(node, ast.Return) and node.value is not None and text.of(node.value) != "None":
        yield text.start(node), text.end(node), "return None"


def _arguments(node: ast.AST, text: _Text) -> Iterator[Change]:
    """The first two arguments of a call swapped."""
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        one, two = node.args[:2]
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(one, ast.Starred) or isinstance(two, ast.Starred) or called in ("isinstance", "issubclass"):
            return
        between = text.data[text.end(one) : text.start(two)].decode()
        if between.strip() == "," and text.of(one) != text.of(two):
            yield text.start(one), text.end(two), text.of(two) + between + text.of(one)


def _slice(node: ast.AST, text: _Text) -> Iterator[Change]:
    """A slice without one of its bounds, or with a bound increased by one."""
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield text.start(bound), text.end(bound), ""
                if not isinstance(bound, ast.Constant):
                    yield text.end(bound), text.end(bound), " + 1"


def _loop(node: ast.AST, text: _Text) -> Iterator[Change]:
    """``continue`` for ``break``."""
    if isinstance(node, ast.Break | ast.Continue):
        yield text.start(node), text.end(node), "continue" if isinstance(node, ast.Break) else "break"


def _default(node: ast.AST, text: _Text) -> Iterator[Change]:
    """A changed default of a parameter."""
    if isinstance(node, ast.arguments):
        for value in (*node.defaults, *node.kw_defaults):
            if not isinstance(value, ast.Constant):
                continue
            at = text.start(value), text.end(value)
            if isinstance(value.value, bool):
                yield *at, str(not value.value)
            elif isinstance(value.value, int):
                yield *at, str(value.value + 1)
            elif isinstance(value.value, str) and value.value:
                yield *at, "None"


def _statement(node: ast.AST, text: _Text) -> Iterator[Change]:
    """A removed statement: a call, an assignment to an attribute or item, a guard, a ``raise``, a ``del``."""
    dropped = isinstance(node, ast.AugAssign | ast.Raise | ast.Delete)
    if isinstance(node, ast.Expr):
        dropped = isinstance(node.value, ast.Call)
    elif isinstance(node, ast.Assign):
        dropped = all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    elif isinstance(node, ast.If):
        leaves = isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
        dropped = leaves and not node.orelse and not text.of(node).startswith("elif")
    if dropped:
        yield text.start(node), text.end(node), "pass"


def _body(node: ast.AST, text: _Text) -> Iterator[Change]:
    """A function without its body; its docstring stays."""
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        body = node.body[1:] if documented else node.body
        if sum(1 for statement in body for _ in ast.walk(statement)) >= 12:
            yield text.start(body[0]), text.end(body[-1]), "raise NotImplementedError"


OPERATORS: dict[str, Operator] = {
    "comparison": _comparison,
    "boolean": _boolean,
    "arithmetic": _arithmetic,
    "constant": _constant,
    "negation": _negation,
    "result": _result,
    "arguments": _arguments,
    "slice": _slice,
    "loop": _loop,
    "default": _default,
    "statement": _statement,
    "body": _body,
}
"""Name -> operator."""


def edits(source: bytes) -> tuple[Edit, ...]:
    """All edits of a file, sorted; none for a file that is not plain UTF-8 Python with Unix line ends."""
    try:
        source.decode()
        tree = ast.parse(source)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ()
    if b"\r" in source or b"\f" in source or not source.endswith(b"\n") or source.startswith(b"\xef\xbb\xbf"):
        return ()
    starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
    text = _Text(source, tuple(starts))
    found = {
        Edit(*change, operator, scope)
        for node, scope in _nodes(tree, "")
        for operator, changes in OPERATORS.items()
        for change in changes(node, text)
    }
    return tuple(sorted(found))


def _nodes(node: ast.AST, scope: str) -> Iterator[tuple[ast.AST, str]]:
    """All nodes that may be edited, with the enclosing function. Annotations, decorators and main blocks are excluded.

    f-strings are excluded too, because positions inside of them depend on the version of Python.
    """
    if isinstance(node, ast.JoinedStr) or type(node).__name__ == "TemplateStr":
        return
    if isinstance(node, ast.If) and re.search(r"__name__|TYPE_CHECKING|version_info|platform", ast.dump(node.test)):
        return
    within = scope
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        within = f"{scope}.{node.name}" if scope else node.name
    yield node, within
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, within)


def apply(source: bytes, edit: Edit) -> bytes:
    """``source`` with the edit applied."""
    return source[: edit.start] + edit.replacement.encode() + source[edit.end :]


def usable(source: bytes, edit: Edit) -> bool:
    """Whether the edit gives valid Python with another syntax tree."""
    try:
        changed = ast.parse(apply(source, edit))
        compile(changed, "edited", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))
