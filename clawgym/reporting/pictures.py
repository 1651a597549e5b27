"""The screenshots of an episode as one animated GIF, embedded in a page.

Invariant: the run folder is hostile. Only PNG files up to the size of a screen are decoded; unreadable ones are noted,
never raised. Frames and bytes are bounded.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from clawgym.records import Image, Observation, Step
from clawgym.records.atif import PICTURES, picture_name

__all__ = ["animate", "animation", "pictures_of", "seen_text", "thinned"]

_ALL_FRAMES, _ALL_BYTES = 2_000, 12 * 2**20
"""Most frames and bytes of all animations of a page, so that rendering takes about a minute at most."""
_FRAMES, _BYTES = 60, 2**20
"""Most frames and bytes of one animation."""
_WIDTH = 512
"""Width of an animation in pixels."""
_COLOURS = 128
_SHOWN_MS, _LAST_MS = 900, 2700
_LARGEST_FILE, _LARGEST_SIDE = 64 * 2**20, 4096


def pictures_of(steps: Iterable[Step]) -> list[Image]:
    """The screenshots of a transcript, in order."""
    return [seen.image for step in steps for seen in step.observations if seen.image is not None]


def seen_text(seen: Observation) -> str:
    """The text of an observation, or the path of its screenshot if it has no text."""
    if seen.content or seen.image is None:
        return seen.content
    return f"[{PICTURES}/{picture_name(seen.image)}]"


def animate(run: Path, details: Iterable[dict[str, Any]]) -> bool:
    """Replace the ``pictures`` of each detail by ``gif`` and ``note``. Returns whether any detail has pictures."""
    seen = [detail for detail in details if "pictures" in detail]
    frames = min(_FRAMES, _ALL_FRAMES // max(1, len(seen)))
    size = min(_BYTES, _ALL_BYTES // max(1, len(seen)))
    for detail in seen:
        gif, note = animation(run, detail["pictures"], frames=frames, size=size)
        detail["pictures"] = {"gif": gif, "note": note}
    return bool(seen)


def animation(run: Path, pictures: Sequence[Image], *, frames: int, size: int) -> tuple[str, str]:
    """An animation of ``pictures``, as a ``data:`` URL of a GIF and a note. Either may be empty.

    A picture equal to the one before it extends that frame. Over ``frames`` frames or ``size`` bytes, frames are
    dropped evenly; the last one is kept.
    """
    about = f"Pictures: {len(pictures)}, in {PICTURES}/"
    try:
        library = import_module("PIL.Image")
    except ImportError:
        return "", f"{about}. To see them here: pip install 'clawgym[gui]', and run the same command again."
    shown = _read(library, run, thinned(pictures, frames))
    gif = _gif(shown)
    while len(gif) > size and len(shown) > 1:
        shown = thinned(shown, len(shown) // 2)
        gif = _gif(shown)
    if not gif or len(gif) > size:
        return "", f"{about}; they cannot be shown here."
    whole = len(shown) == len(pictures)
    note = "" if whole else f"{about}; shown are {len(shown)}."
    return "data:image/gif;base64," + base64.b64encode(gif).decode(), note


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` items at even distances, including the last one."""
    count, most = len(items), max(1, most)
    if count <= most:
        return list(items)
    return [items[(n + 1) * count // most - 1] for n in range(most)]


def _read(library: Any, run: Path, pictures: Iterable[Image]) -> list[Any]:
    """The readable pictures, scaled and quantized to frames."""
    frames: list[Any] = []
    for picture in pictures:
        path = run / PICTURES / str(picture_name(picture))
        try:
            if path.stat().st_size > _LARGEST_FILE:
                continue
            with library.open(path, formats=["PNG"]) as image:
                if max(image.size) > _LARGEST_SIDE:
                    continue
                frame = image.convert("RGB")
        except Exception:  # a damaged file makes Pillow raise nearly anything
            continue
        width = min(_WIDTH, frame.width)
        size = frames[0].size if frames else (width, max(1, frame.height * width // frame.width))
        frame = frame.resize(size, library.Resampling.BOX)
        frames.append(frame.quantize(_COLOURS, library.Quantize.FASTOCTREE, dither=library.Dither.NONE))
    return frames


def _gif(frames: Sequence[Any]) -> bytes:
    if not frames:
        return b""
    buffer = io.BytesIO()
    durations = [_SHOWN_MS] * (len(frames) - 1) + [_LAST_MS]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    return buffer.getvalue()
