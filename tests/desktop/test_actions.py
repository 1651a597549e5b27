"""Arguments of ``computer_use`` are checked and converted to pixels of the screen."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.desktop import KINDS, parse, schema
from clawgym.desktop._keys import keysym_of
from clawgym.errors import SandboxError

WIDTH, HEIGHT = 800, 600
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
names = st.sampled_from(["coordinate", "start_coordinate", "text", "keys", "amount", "direction", "seconds", "unit"])


@given(st.sampled_from(KINDS), st.dictionaries(names, anything))
def test_any_arguments_give_an_action_on_the_screen_or_an_error(kind: str, more: dict) -> None:
    try:
        action = parse({"action": kind, **more}, WIDTH, HEIGHT)
    except SandboxError:
        return
    assert action.kind == kind
    for x, y in [(action.x, action.y), action.start or (None, None)]:
        assert (x is None) == (y is None)
        assert x is None or y is None or (0 <= x < WIDTH and 0 <= y < HEIGHT)
    assert len(action.text) <= 10_000
    assert 0 <= action.seconds <= 10
    assert abs(action.steps) <= 50


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_relative_coordinates_scale_with_the_screen(x: float, y: float) -> None:
    for width, height in [(800, 600), (1024, 768), (1920, 1080)]:
        action = parse({"action": "mouse_move", "coordinate": [x, y], "unit": "relative"}, width, height)
        assert action.x is not None
        assert action.y is not None
        assert abs(action.x - x * width / 1000) <= 1
        assert abs(action.y - y * height / 1000) <= 1


GOOD: list[dict[str, Any]] = [
    {"action": "screenshot"},
    {"action": "left_click"},
    {"action": "left_click", "coordinate": [799, 599]},
    {"action": "left_click_drag", "start_coordinate": [1, 2], "coordinate": [3, 4]},
    {"action": "scroll", "amount": -3, "direction": "horizontal"},
    {"action": "type", "text": "é"},
    {"action": "key", "keys": ["ctrl", "s"]},
    {"action": "wait", "seconds": 0.5},
    {"action": "fail", "text": "there is no such mail"},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "use one of"),
    ({"action": "fly"}, "use one of"),
    ({"action": "mouse_move"}, "without coordinate"),
    ({"action": "left_click", "coordinate": [800, 0]}, "outside"),
    ({"action": "left_click", "coordinate": [float("nan"), 0]}, "give"),
    ({"action": "left_click", "coordinate": [1001, 0], "unit": "relative"}, "0 to 1000"),
    ({"action": "left_click", "coordinate": [1, 1], "unit": "inch"}, "'pixel' or 'relative'"),
    ({"action": "scroll", "amount": 0}, "1 to 50"),
    ({"action": "type", "text": ""}, "without text"),
    ({"action": "key", "keys": []}, "without keys"),
    ({"action": "wait", "seconds": 11}, "at most 10"),
]


@pytest.mark.parametrize("arguments", GOOD)
def test_valid_actions_fit_the_schema(arguments: dict[str, Any]) -> None:
    parse(arguments, WIDTH, HEIGHT)
    jsonschema.validate(arguments, schema(WIDTH, HEIGHT)["function"]["parameters"])
    json.dumps(schema(WIDTH, HEIGHT))


@pytest.mark.parametrize(("arguments", "why"), BAD)
def test_invalid_actions_are_explained(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(SandboxError, match=why):
        parse(arguments, WIDTH, HEIGHT)


@given(st.characters())
def test_every_character_has_a_key_or_is_refused(character: str) -> None:
    try:
        sym = keysym_of(character)
    except SandboxError:
        assert not character.isprintable()
        return
    assert 0 < sym <= 0x0110FFFF


def test_names_of_keys() -> None:
    assert keysym_of("Page_Down") == keysym_of("pagedown") == 0xFF56
    assert keysym_of("F12") == 0xFFC9
    with pytest.raises(SandboxError, match="backspace"):
        keysym_of("hyperspace")


@pytest.mark.parametrize(("width", "height"), [(800, 600), (1024, 768), (3, 2)])
def test_schema_names_the_last_pixel(width: int, height: int) -> None:
    told = json.dumps(schema(width, height))
    assert f"x from 0 (left) to {width - 1}, y from 0 (top) to {height - 1}" in told
    action = parse({"action": "left_click", "coordinate": [width - 1, height - 1]}, width, height)
    assert (action.x, action.y) == (width - 1, height - 1)
    for beyond in ([width, height - 1], [width - 1, height]):
        with pytest.raises(SandboxError):
            parse({"action": "left_click", "coordinate": beyond}, width, height)
