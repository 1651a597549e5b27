"""Comparisons of OSWorld's checkers for pictures and PDF files.

Mounted beside the checker, as ``osworld_images.py``; needs the Debian packages of numpy, Pillow and, for PDF, PyMuPDF.
The arguments and the result are those of ``osworld_texts.py``.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import osworld_texts as texts
from PIL import Image, ImageChops, ImageStat

Options = Mapping[str, Any]
_WINDOW = 7


def _similarity(one: np.ndarray, other: np.ndarray) -> float:
    """The structural similarity of two grey pictures of bytes: the mean over all windows of 7 x 7 pixels."""
    x, y = one.astype(np.float64), other.astype(np.float64)

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.pad(values, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
        w = _WINDOW
        return (total[w:, w:] - total[:-w, w:] - total[w:, :-w] + total[:-w, :-w]) / w**2

    sample = _WINDOW**2 / (_WINDOW**2 - 1)
    mx, my = mean(x), mean(y)
    vx, vy, vxy = (sample * (mean(a * b) - mean(a) * mean(b)) for a, b in ((x, x), (y, y), (x, y)))
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    found = (2 * mx * my + c1) * (2 * vxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    return float(found.mean())


def _alike(one: Image.Image, other: Image.Image, threshold: float = 0.9) -> bool:
    """Whether two pictures of one size have at least this similarity, in RGB."""
    if min(*one.size, *other.size) < _WINDOW or one.size != other.size:
        return False
    arrays = [np.array(picture.convert("RGB")) for picture in (one, other)]
    return float(np.mean([_similarity(arrays[0][:, :, n], arrays[1][:, :, n]) for n in range(3)])) >= threshold


def _brightness(picture: Image.Image) -> float:
    return ImageStat.Stat(picture.convert("L")).mean[0]


def compare_images(got: Any, expected: Any, options: Options) -> float:
    """The similarity in grey; ``reference_base_result`` is rescaled to 0."""
    grey = [Image.open(path).convert("L") for path in (got, expected)]
    size = min(grey[0].size, grey[1].size)
    arrays = [np.array(picture.resize(size, Image.Resampling.LANCZOS)) for picture in grey]
    found, base = _similarity(*arrays), options.get("reference_base_result")
    if base is None:
        return found
    return (found - base) / (1 - base) if found >= base + 0.01 else 0.0


def compare_image_list(got: Any, expected: Any, options: Options) -> float:
    pairs = zip(*(value if isinstance(value, list) else [value] for value in (got, expected)), strict=False)
    for path, wanted in pairs:
        one, other = Image.open(path), Image.open(wanted)
        if one.size != other.size:
            one = one.resize(other.size, Image.Resampling.LANCZOS)
        if ImageChops.difference(one.convert(other.mode), other).getbbox():
            return 0.0
    return 1.0


def check_brightness_decrease_and_structure_sim(got: Any, expected: Any, options: Options) -> float:
    one, other = Image.open(got), Image.open(expected)
    if _brightness(other) <= _brightness(one):
        return 0.0
    even = []
    for picture in (one, other):
        factor = 128 / _brightness(picture)
        table = [min(255, max(0, int(value * factor))) for value in range(256)]
        even.append(picture.point(table * len(picture.getbands())))
    if even[0].size != even[1].size:
        even[0] = even[0].resize(even[1].size, Image.Resampling.LANCZOS)
    arrays = [np.array(picture.convert("RGB"), dtype=np.float32) / 255 for picture in even]
    return float(np.mean((arrays[0] - arrays[1]) ** 2) < options.get("threshold", 0.03))


def check_saturation_increase_and_structure_sim(got: Any, expected: Any, options: Options) -> float:
    one, other = (Image.open(path).convert("HSV").split() for path in (got, expected))
    more = np.mean(np.array(other[1])) < np.mean(np.array(one[1]))
    return float(more and _alike(one[0], other[0]) and _alike(one[2], other[2]))


def check_contrast_increase_and_structure_sim(got: Any, expected: Any, options: Options) -> float:
    one, other = Image.open(got), Image.open(expected)
    contrasts = [np.std(np.asarray(picture, dtype=np.float32)) for picture in (one, other)]
    return float(contrasts[1] < contrasts[0] and _alike(one, other, 0.65))


def check_structure_sim(got: Any, expected: Any, options: Options) -> float:
    return float(_alike(Image.open(got), Image.open(expected)))


def check_structure_sim_resized(got: Any, expected: Any, options: Options) -> float:
    """Alike once what is not transparent has the size of the other picture."""
    one, other = Image.open(got), Image.open(expected)
    if (area := _opaque(one)) is not None:
        one = one.convert("RGBA").crop(area).convert("RGB")
    elif _transparent(one):
        return 0.0
    return float(_alike(one.resize(other.size), other))


def check_palette_and_structure_sim(got: Any, expected: Any, options: Options) -> float:
    one = Image.open(got)
    return float(one.mode == "P" and _alike(one.convert("RGB"), Image.open(expected)))


def check_image_mirror(got: Any, expected: Any, options: Options) -> float:
    one = Image.open(got).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return float(_alike(one, Image.open(expected), 0.99))


def check_triangle_position(got: Any, rules: Any, options: Options) -> float:
    """The pixels of the second rarest colour have their centre in the middle of the picture, up to 5 %."""
    pixels = np.array(Image.open(got))
    colors, counts = np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0, return_counts=True)
    places = np.argwhere(np.all(pixels == colors[np.argsort(counts)][1], axis=2))
    size = np.array(pixels.shape[:2])
    return float(np.all(np.abs(places.mean(axis=0) - size / 2) < 0.05 * size))


def check_textbox_on_leftside(got: Any, rules: Any, options: Options) -> float:
    grey = np.array(Image.open(got).convert("L"))
    dark = np.flatnonzero((grey < 128).any(axis=0))
    return float(dark.size > 0 and dark[0] < grey.shape[1] * 0.05)


def check_green_background(got: Any, expected: Any, options: Options) -> float:
    """Green wherever the other picture is not black. Both are read with rows and columns exchanged, as OSWorld does:
    pictures that are not square do not fit."""
    one, other = Image.open(got), Image.open(expected)
    pixels, wanted = np.array(one), np.array(other)
    if other.width > wanted.shape[0] or other.height > wanted.shape[1]:
        return 0.0
    area = np.s_[: other.width, : other.height, :3]
    pixels, wanted = pixels[area].astype(int), wanted[area]
    if pixels.shape != wanted.shape:
        return 0.0
    green = (pixels[:, :, 1] > pixels[:, :, 0]) & (pixels[:, :, 1] > pixels[:, :, 2])
    return float(np.all(green | np.all(wanted == 0, axis=2)))


def _transparent(picture: Image.Image) -> bool:
    return picture.mode in ("RGBA", "LA") or "transparency" in picture.info


def _opaque(picture: Image.Image) -> tuple[int, int, int, int] | None:
    """The part that is not wholly transparent; None if there is none, or without transparency."""
    return picture.convert("RGBA").split()[-1].getbbox() if _transparent(picture) else None


def check_image_size(got: Any, rules: Any, options: Options) -> float:
    picture = Image.open(got)
    width, height = picture.size
    cut = (rules.get("ignore_transparent") and picture.mode in ("RGBA", "LA")) or "transparency" in picture.info
    if cut:
        left, top, right, bottom = _opaque(picture) or (0, 0, 0, 0)
        width, height = right - left, bottom - top
    wanted = ((rules.get("width"), width), (rules.get("height"), height))
    return float(all(want in (None, size) for want, size in wanted))


def compare_pdfs(got: Any, expected: Any, options: Options) -> float:
    """The mean similarity of the texts. A pair that cannot be read counts 0."""
    import fitz

    if not isinstance(expected, list):
        got, expected = [got], [expected]
    total = 0.0
    for pair in zip(got, expected, strict=False):
        try:
            found = []
            for path in pair:
                with fitz.open(path) as pdf:
                    found.append("".join(page.get_text() for page in pdf).strip())
        except Exception:  # whatever PyMuPDF raises
            continue
        total += texts.ratio(*found)
    return total / len(expected)


def check_pdf_pages(got: Any, rules: Any, options: Options) -> float:
    import fitz

    with fitz.open(got) as pdf:
        return float(getattr(operator, rules["relation"])(pdf.page_count, rules["ref_value"]))


METRICS: dict[str, Callable[[Any, Any, Options], float]] = {
    metric.__name__: metric
    for metric in (
        *(compare_images, compare_image_list, check_brightness_decrease_and_structure_sim),
        *(check_saturation_increase_and_structure_sim, check_contrast_increase_and_structure_sim),
        *(check_structure_sim, check_structure_sim_resized, check_palette_and_structure_sim, check_image_mirror),
        *(check_triangle_position, check_textbox_on_leftside, check_green_background, check_image_size),
        *(compare_pdfs, check_pdf_pages),
    )
}
METRICS["check_file_exists_and_structure_sim"] = check_structure_sim
"""Name -> comparison."""
texts.METRICS.update(METRICS)
