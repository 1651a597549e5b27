"""The layer by which answers of mathematics are compared: math-verify, and what it stands on, from pinned wheels."""

from __future__ import annotations

import sys
from functools import cache
from importlib import resources
from pathlib import Path

from clawgym.errors import ClawGymError
from clawgym.records import Layer
from clawgym.tasks import layers

__all__ = ["MATH_FOLDER", "math_layer"]

MATH_FOLDER = "/opt/layers/math"
"""Where it is in a box."""


@cache
def math_layer() -> tuple[Layer, str | None]:
    """The layer, made at the first use; and why it cannot be had, or None. Its digest is the same either way."""
    lock = layers.read_lock(resources.files("clawgym.tasks").joinpath("math_lock.json").read_text("utf-8"))
    if layers.cached(lock) is None:
        print("math-verify is made ready on this machine, once ...", file=sys.stderr)
    try:
        return layers.prepare(lock), None
    except ClawGymError as error:
        return Layer(lock.name, lock.digest, Path("/nowhere")), f"math-verify is not here: {error}"
