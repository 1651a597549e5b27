"""The screenshots of an episode, embedded in a page.

Invariant: the run folder is hostile. Only PNG files up to the size of a screen are decoded; unreadable ones are left
out, never raised. Number and bytes are bounded.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from clawgym.files import read_below
from clawgym.records import Image
from clawgym.records.atif import PICTURES, picture_name

__all__ = ["stills", "thinned"]

_WIDTH = 512
"""Width of an embedded picture in pixels."""
_COLOURS = 128
_LARGEST_FILE, _LARGEST_SIDE = 64 * 2**20, 4096


def stills(run: Path, pictures: Sequence[Image], *, frames: int, size: int) -> dict[str, str]:
    """The digests of ``pictures`` -> small versions of them as ``data:`` URLs; without Pillow, none.

    Over ``frames`` pictures or ``size`` bytes, pictures are dropped evenly; the last one is kept.
    """
    try:
        library = import_module("PIL.Image")
    except ImportError:
        return {}
    distinct = list({picture.sha256: picture for picture in pictures}.values())
    found = {
        picture.sha256: url
        for picture in (thinned(distinct, frames) if frames else [])
        if (url := _still(library, run, picture))
    }
    while found and sum(map(len, found.values())) > size:
        found = {name: found[name] for name in thinned(list(found), len(found) // 2)} if len(found) > 1 else {}
    return found


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` items at even distances, including the last one."""
    count, most = len(items), max(1, most)
    if count <= most:
        return list(items)
    return [items[(n + 1) * count // most - 1] for n in range(most)]


def _still(library: Any, run: Path, picture: Image) -> str:
    """A picture of a run folder, scaled down, as a ``data:`` URL; empty if it cannot be read."""
    buffer = io.BytesIO()
    try:
        data = read_below(run, f"{PICTURES}/{picture_name(picture)}", _LARGEST_FILE)
        with library.open(io.BytesIO(data), formats=["PNG"]) as image:
            if max(image.size) > _LARGEST_SIDE:
                return ""
            frame = image.convert("RGB")
        width = min(_WIDTH, frame.width)
        frame = frame.resize((width, max(1, frame.height * width // frame.width)), library.Resampling.BOX)
        frame.quantize(_COLOURS, library.Quantize.FASTOCTREE, dither=library.Dither.NONE).save(
            buffer, "PNG", optimize=True
        )
    except Exception:  # a damaged file makes Pillow raise nearly anything
        return ""
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
