"""The function ``computer_use``: its schema, and checking its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, Literal, get_args

from clawgym.errors import SandboxError

__all__ = ["COMPUTER_USE", "KINDS", "Action", "Unit", "parse", "schema"]

COMPUTER_USE = "computer_use"
Unit = Literal["pixel", "relative"]
"""Units of coordinates. ``pixel``: screen pixels from 0. ``relative``: thousandths of width and height, 0 to 1000, as
models of the Qwen-VL family use them."""
Kind = Literal[
    "screenshot",
    "mouse_move",
    "left_click",
    "right_click",
    "middle_click",
    "double_click",
    "triple_click",
    "left_click_drag",
    "scroll",
    "type",
    "key",
    "wait",
    "done",
    "fail",
]
KINDS: tuple[str, ...] = get_args(Kind)
_POINTED = frozenset(
    ("mouse_move", "left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag")
)
_RELATIVE = 1000
_MAX_TEXT = 10_000
_LARGEST = 1e9
"""Largest number in a call; beyond the size of any screen."""
_MAX_STEPS = 50
_MAX_WAIT = 10.0


@dataclass(frozen=True, slots=True)
class Action:
    """A checked action, with coordinates in pixels."""

    kind: Kind
    x: int | None = None
    y: int | None = None
    start: tuple[int, int] | None = None
    """Start of a drag; None for the pointer's position."""
    text: str = ""
    """Text to type, or the final message."""
    keys: tuple[str, ...] = ()
    steps: int = 0
    """Steps of the wheel; positive is down."""
    sideways: bool = False
    seconds: float = 0.0


def schema(width: int, height: int) -> dict[str, Any]:
    """``computer_use`` as an OpenAI function tool for a screen of this size."""
    where = f"x from 0 (left) to {width - 1}, y from 0 (top) to {height - 1}"
    point = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    properties: dict[str, Any] = {
        "action": {
            "type": "string",
            "enum": list(KINDS),
            "description": (
                "screenshot: look. mouse_move, left_click, right_click, middle_click, double_click, triple_click: at "
                "coordinate, or where the pointer is. left_click_drag: from start_coordinate (or the pointer) to "
                "coordinate. scroll: amount steps, down if positive, at coordinate. type: text. key: keys together. "
                "wait: seconds. done: the task is done. fail: the task cannot be done at all."
            ),
        },
        "coordinate": {**point, "description": f"[x, y] {where}"},
        "start_coordinate": {**point, "description": "[x, y] where a drag begins"},
        "unit": {
            "type": "string",
            "enum": list(get_args(Unit)),
            "description": "Of coordinates: pixel (the default), or relative: thousandths, 0 to 1000 either way.",
        },
        "text": {"type": "string", "description": "What to type; with done or fail, a closing message."},
        "keys": {
            "type": "array",
            "items": {"type": "string"},
            "description": 'Pressed together, such as ["ctrl", "s"] or ["enter"].',
        },
        "amount": {"type": "integer", "description": "Steps of the wheel; negative is up."},
        "direction": {"type": "string", "enum": ["vertical", "horizontal"]},
        "seconds": {"type": "number", "description": f"At most {_MAX_WAIT:g}."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["action"], "additionalProperties": False}
    description = (
        f"Use the mouse and the keyboard of a desktop whose screen has {width} x {height} pixels. The answer is what "
        "the screen shows once it has settled."
    )
    return {
        "type": "function",
        "function": {"name": COMPUTER_USE, "description": description, "parameters": parameters},
    }


def parse(arguments: Mapping[str, Any], width: int, height: int) -> Action:
    """Parse the arguments of a ``computer_use`` call.

    Raises :class:`~clawgym.errors.SandboxError` if they are invalid.
    """
    kind, unit = arguments.get("action"), arguments.get("unit") or "pixel"
    if unit not in get_args(Unit):
        raise SandboxError(f"unit {shown(unit)}: use 'pixel' or 'relative'")
    if kind not in KINDS:
        raise SandboxError(f"action {shown(kind)}: use one of {', '.join(KINDS)}")
    given = {name for name, value in arguments.items() if value is not None}

    def point(name: str) -> tuple[int, int] | None:
        return _point(arguments[name], name, width, height, unit) if name in given else None

    at = point("coordinate") if kind in _POINTED or kind == "scroll" else None
    x, y = at if at is not None else (None, None)
    if kind in ("mouse_move", "left_click_drag") and at is None:
        raise SandboxError(f"{kind} without coordinate: give [x, y]")
    match kind:
        case "left_click_drag":
            return Action(kind, x, y, start=point("start_coordinate"))
        case "scroll":
            steps = arguments.get("amount")
            if not isinstance(steps, int) or isinstance(steps, bool) or not 0 < abs(steps) <= _MAX_STEPS:
                raise SandboxError(f"scroll by amount {shown(steps)}: give 1 to {_MAX_STEPS} steps, negative for up")
            return Action(kind, x, y, steps=steps, sideways=arguments.get("direction") == "horizontal")
        case "type":
            text = arguments.get("text")
            if not isinstance(text, str) or not 0 < len(text) <= _MAX_TEXT:
                raise SandboxError(f"type without text: give 1 to {_MAX_TEXT} characters")
            return Action(kind, text=text)
        case "key":
            keys = arguments.get("keys")
            if not isinstance(keys, list | tuple) or not keys or len(keys) > 8 or not all(map(_is_word, keys)):
                raise SandboxError('key without keys: give 1 to 8, such as ["ctrl", "s"]')
            return Action(kind, keys=tuple(keys))
        case "wait":
            seconds = arguments.get("seconds", 1.0)
            if not _is_number(seconds) or not 0 < seconds <= _MAX_WAIT:
                raise SandboxError(f"wait {shown(seconds)} seconds: give at most {_MAX_WAIT:g}")
            return Action(kind, seconds=float(seconds))
        case "done" | "fail":
            return Action(kind, text=str(arguments.get("text") or ""))
    return Action(kind, x, y)  # pyright: ignore[reportArgumentType]  # one of KINDS


def _point(value: Any, name: str, width: int, height: int, unit: str) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_number, value)):
        raise SandboxError(f"{name} {shown(value)}: give [x, y]")
    x, y = float(value[0]), float(value[1])
    if unit == "relative":
        if not (0 <= x <= _RELATIVE and 0 <= y <= _RELATIVE):
            raise SandboxError(f"{name} {value!r}: give thousandths of the screen, from 0 to 1000")
        return min(int(x * width / _RELATIVE), width - 1), min(int(y * height / _RELATIVE), height - 1)
    if not (0 <= x < width and 0 <= y < height):
        raise SandboxError(f"{name} {value!r} is outside of the screen of {width} x {height} pixels: stay inside")
    return int(x), int(y)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 40
