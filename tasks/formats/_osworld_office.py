"""Comparisons of OSWorld's checkers for documents, slides and spreadsheets.

Mounted beside the checker, as ``osworld_office.py``, together with the layer that has openpyxl, python-docx and
python-pptx. The arguments and the result are those of ``osworld_texts.py``.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import datetime
import difflib
import io
import math
import os
import re
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import osworld_texts as texts

Options = Mapping[str, Any]
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_A = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_P = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_OOR = "{http://openoffice.org/2001/registry}"
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_STYLE = "{urn:oasis:names:tc:opendocument:xmlns:style:1.0}"
_FO = "{urn:oasis:names:tc:opendocument:xmlns:xsl-fo-compatible:1.0}"
_X = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


# -- documents


def _document(path: str) -> Any:
    from docx import Document

    return Document(path)


def _odt(path: str) -> ElementTree.Element:
    with zipfile.ZipFile(path) as archive:
        return ElementTree.fromstring(archive.read("content.xml"))


def _odt_text(paragraph: ElementTree.Element) -> str:
    """The text of a paragraph and of its spans, without what is nested deeper."""
    parts = [paragraph.text or ""]
    for child in paragraph:
        if child.tag == f"{_TEXT}span":
            parts += [child.text or "", *(inner.tail or "" for inner in child)]
        parts.append(child.tail or "")
    return "".join(parts)


def _paragraphs(path: str) -> list[str] | None:
    if path.endswith(".docx"):
        return [paragraph.text for paragraph in _document(path).paragraphs]
    if path.endswith(".odt"):
        return [_odt_text(paragraph) for paragraph in _odt(path).iter(f"{_TEXT}p")]
    return None


def compare_docx_files(got: Any, expected: Any, options: Options) -> float:
    if os.path.splitext(got)[1] != os.path.splitext(expected)[1]:
        return 0.0
    both = [_paragraphs(path) for path in (got, expected)]
    if both[0] is None or both[1] is None:
        return 0.0
    one, other = both[0], both[1]
    fold = str.lower if options.get("ignore_case") else str
    if options.get("ignore_order"):
        one, other = sorted(one), sorted(other)
    if options.get("delete_empty_lines"):
        one, other = ([text for text in lines if text.strip()] for lines in (one, other))
    if options.get("content_only") or options.get("ignore_blanks", True):
        whole = [fold(re.sub(r"\s+", " ", "\n".join(lines)).strip()) for lines in (one, other)]
        if options.get("content_only") or options.get("fuzzy_match"):
            return texts.ratio(*whole)
        return float(whole[0] == whole[1])
    if len(one) != len(other):
        return 0.0
    pairs = [(fold(text), fold(wanted)) for text, wanted in zip(one, other, strict=True)]
    if options.get("fuzzy_match"):
        return sum(texts.ratio(*pair) for pair in pairs) / len(pairs) if pairs else 1.0
    return float(all(text == wanted for text, wanted in pairs))


def compare_docx_files_and_ignore_new_lines(got: Any, expected: Any, options: Options) -> float:
    if not (got.endswith(".docx") and expected.endswith(".docx")):
        return 0.0
    both = [[p.text for p in _document(path).paragraphs if p.text != ""] for path in (got, expected)]
    if options.get("ignore_blanks", True):
        whole = [re.sub(r"\s+", " ", "\n".join(lines)).strip() for lines in both]
        return float(whole[0] == whole[1])
    return float(both[0] == both[1])


def compare_docx_tables(got: Any, expected: Any, options: Options) -> float:
    def cells(path: str) -> list[list[list[str]]]:
        return [
            [[table.cell(row, column).text.strip() for column in range(len(table.columns))]
             for row in range(len(table.rows))]
            for table in _document(path).tables
        ]  # fmt: skip

    return float(cells(got) == cells(expected))


def compare_docx_images(got: Any, expected: Any, options: Options) -> float:
    from PIL import Image

    def images(path: str) -> list[bytes]:
        parts = (rel for rel in _document(path).part.rels.values() if "image" in rel.reltype)
        return [Image.open(io.BytesIO(rel.target_part.blob)).tobytes() for rel in parts]

    return float(images(got) == images(expected))


def compare_line_spacing(got: Any, expected: Any, options: Options) -> float:
    if not compare_docx_files(got, expected, {}):
        return 0.0
    both = [[p.paragraph_format.line_spacing for p in _document(path).paragraphs] for path in (got, expected)]
    return float(both[0] == both[1])


def compare_subscript_contains(got: Any, expected: Any, options: Options) -> float:
    pairs = zip(_document(got).paragraphs, _document(expected).paragraphs, strict=False)
    runs = (pair for one, other in pairs for pair in zip(one.runs, other.runs, strict=False))
    return float(any(one.font.subscript and other.font.subscript for one, other in runs))


def compare_font_names(got: Any, rules: Any, options: Options) -> float:
    fonts = (run.font.name for paragraph in _document(got).paragraphs for run in paragraph.runs)
    return float(all(font == rules["font_name"] for font in fonts))


def has_page_numbers_in_footers(got: Any, rules: Any, options: Options) -> float:
    """Every section has a digit in the first paragraph of its footer."""
    footers = [section.footer.paragraphs for section in _document(got).sections]
    return float(all(any(sign.isdigit() for sign in found[0].text) if found else False for found in footers))


def is_first_line_centered(got: Any, rules: Any, options: Options) -> float:
    from docx.enum.text import WD_PARAGRAPH_ALIGNMENT

    return float(_document(got).paragraphs[0].paragraph_format.alignment == WD_PARAGRAPH_ALIGNMENT.CENTER)


def contains_page_break(got: Any, rules: Any, options: Options) -> float:
    runs = (run for paragraph in _document(got).paragraphs for run in paragraph.runs)
    breaks = sum(one.get(f"{_W}type") == "page" for run in runs for one in run.element.iter(f"{_W}br"))
    wanted = (rules or {}).get("page_break_count")
    return float(breaks > 0 and wanted in (None, breaks))


def check_tabstops(got: Any, expected: Any, options: Options) -> float:
    from docx.enum.text import WD_TAB_ALIGNMENT

    documents = [_document(path) for path in (got, expected)]
    one, other = ([p for p in document.paragraphs if p.text.strip()] for document in documents)
    if len(one) != len(other):
        return 0.0
    if (number := options.get("word_number_split_by_tabstop")) is not None:
        for paragraph in one:
            words = paragraph.text.split("\t")[options.get("index", 0)].split()
            if len(words) != number:
                return 0.0
    section = documents[1].sections[0]
    width = section.page_width - section.left_margin - section.right_margin

    def stops(paragraph: Any) -> list[Any]:
        found = paragraph.paragraph_format.tab_stops
        left, clear = WD_TAB_ALIGNMENT.LEFT, WD_TAB_ALIGNMENT.CLEAR
        return [t for t in found if t.alignment != clear and not (t.alignment == left and t.position == 0)]

    off = 0.0
    for pair in zip(one, other, strict=True):
        first, second = map(stops, pair)
        if [stop.alignment for stop in first] != [stop.alignment for stop in second]:
            return 0.0
        off += sum(abs(a.position - b.position) for a, b in zip(first, second, strict=True)) / width
    return 1 - off / len(one)


def evaluate_strike_through_last_paragraph(got: Any, expected: Any, options: Options) -> float:
    if not compare_docx_files(got, expected, {}):
        return 0.0
    return float(all(run.font.strike for run in _document(got).paragraphs[-1].runs))


def check_italic_font_size_14(got: Any, expected: Any, options: Options) -> float:
    if not compare_docx_files(got, expected, {}):
        return 0.0
    italic = (run for paragraph in _document(got).paragraphs for run in paragraph.runs if run.italic)
    return float(all(run.font.size is not None and run.font.size.pt == 14 for run in italic))


def check_highlighted_words(got: Any, expected: Any, options: Options) -> float:
    """The same text, and no span of an ODT file is highlighted in yellow."""
    if not compare_docx_files(got, expected, {}):
        return 0.0
    root = _odt(got)
    yellow = {
        style.get(f"{_STYLE}name")
        for style in root.iter(f"{_STYLE}style")
        if any(part.get(f"{_FO}background-color") == "#ffff00" for part in style)
    }
    return float(not any(span.get(f"{_TEXT}style-name") in yellow for span in root.iter(f"{_TEXT}span")))


def compare_references(got: Any, expected: Any, options: Options) -> float:
    """The mean similarity of the references, rescaled so that ``reference_base_result`` is 0."""
    if not (got.endswith(".docx") and expected.endswith(".docx")):
        return 0.0
    indicator, base = options.get("reference_indicator", "References"), options.get("reference_base_result", 0.5)
    both = [[p.text for p in _document(path).paragraphs] for path in (got, expected)]
    there = [indicator in lines for lines in both]
    if not any(there):
        return 1.0
    if not all(there):
        return 0.0
    one, other = ([line for line in lines[lines.index(indicator) + 1 :] if line.strip()] for lines in both)
    if len(one) != len(other):
        return 0.0
    mean = sum(texts.ratio(a, b) for a, b in zip(one, other, strict=True)) / len(one)
    return (mean - base) / (1 - base) if mean >= base else 0.0


def fuzzy_place_math(got: Any, rules: Any, options: Options) -> float:
    words = [word for paragraph in _document(got).paragraphs for word in paragraph.text.split()]
    return sum(max(texts.ratio(word, place) for place in rules["expected"]) for word in words) / 3 * (len(words) == 3)


def compare_unique_train_records(got: Any, expected: Any, options: Options) -> float:
    """``expected``: the gold file, and the file before. Only lines of before, as many as in gold, each train once."""
    lines, gold, before = (
        [text for p in _document(path).paragraphs if (text := p.text.strip())] for path in (got, *expected[:2])
    )

    def trains(rows: Sequence[str]) -> list[str]:
        return [parts[1].strip() for row in rows if len(parts := row.split(",")) == 4]

    found = trains(lines)
    once = len(found) == len(set(found)) and set(found) == set(trains(gold))
    return float(once and set(lines) <= set(before) and len(lines) == len(gold))


def evaluate_colored_words_in_tables(got: Any, expected: Any, options: Options) -> float:
    """In tables, words that begin with a vowel are red and others blue, up to a difference that nobody sees."""
    if not compare_docx_files(got, expected, {}):
        return 0.0
    for table in _document(got).tables:
        cells = (cell for row in table.rows for cell in row.cells)
        for run in (run for cell in cells for paragraph in cell.paragraphs for run in paragraph.runs):
            if run.text:
                wanted = (255, 0, 0) if run.text[0].lower() in "aeiou" else (0, 0, 255)
                if _difference(run.font.color.rgb, wanted) > options.get("threshold", 3.5):
                    return 0.0
    return 1.0


def _lab(color: Sequence[int]) -> tuple[float, float, float]:
    """An sRGB colour in CIELAB with the white of D65."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in color)]
    rows = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
    white = (0.95047, 1.0, 1.08883)
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in (sum(a * b for a, b in zip(row, linear, strict=True)) / w for row, w in zip(rows, white, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _difference(one: Sequence[int], other: Sequence[int]) -> float:
    """The colour difference CIEDE2000."""
    (l1, a1, b1), (l2, a2, b2) = _lab(one), _lab(other)
    mean = ((math.hypot(a1, b1) + math.hypot(a2, b2)) / 2) ** 7
    scale = 1 + 0.5 * (1 - math.sqrt(mean / (mean + 25**7)))
    c1, c2 = math.hypot(a1 * scale, b1), math.hypot(a2 * scale, b2)
    h1, h2 = (math.atan2(b, a * scale) % (2 * math.pi) for a, b in ((a1, b1), (a2, b2)))
    turn = h2 - h1
    if c1 * c2 == 0:
        turn = 0.0
    elif abs(turn) > math.pi:
        turn -= math.copysign(2 * math.pi, turn)
    hue = h1 + h2 if c1 * c2 == 0 else (h1 + h2) / 2
    if c1 * c2 and abs(h1 - h2) > math.pi:
        hue += math.pi if h1 + h2 < 2 * math.pi else -math.pi
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    t = 1 - 0.17 * math.cos(hue - math.pi / 6) + 0.24 * math.cos(2 * hue)
    t += 0.32 * math.cos(3 * hue + math.radians(6)) - 0.2 * math.cos(4 * hue - math.radians(63))
    spread = math.radians(60) * math.exp(-(((math.degrees(hue) - 275) / 25) ** 2))
    turned = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(spread)
    dl = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2))
    dc = (c2 - c1) / (1 + 0.045 * chroma)
    dh = 2 * math.sqrt(c1 * c2) * math.sin(turn / 2) / (1 + 0.015 * chroma * t)
    return math.sqrt(max(0.0, dl**2 + dc**2 + dh**2 + turned * dc * dh))


# -- books and music


def compare_epub(got: Any, expected: Any, options: Options) -> float:
    """The mean similarity of the parts of two books: table of contents, description, and pages in one order."""
    one, other = (_parts(path) for path in (got, expected))
    pairs = zip(one, other, strict=False)
    return sum(difflib.SequenceMatcher(a=a, b=b).ratio() for a, b in pairs) / len(one) if one else 0.0


def _parts(path: str) -> list[list[str]]:
    from lxml import html

    if not zipfile.is_zipfile(path):
        return []
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            changing = {"toc.ncx": "navPoint", "content.opf": "dc:identifier"}.get(name)
            if changing:
                found[name] = [line for line in archive.read(name).decode().splitlines() if changing not in line]
            elif name.endswith(".html"):
                text = archive.read(name).decode().replace("\n", "").replace("\r", "")
                tree = html.fromstring(text.encode())
                found[name] = html.tostring(tree, pretty_print=True, encoding="unicode").splitlines()
    return [found[name] for name in sorted(found)]


def check_mp3_meta(got: Any, rules: Any, options: Options) -> float:
    from mutagen.easyid3 import EasyID3

    tags = EasyID3(got)
    values = {name: tags.get(name, "") for name in rules}
    return float(
        all(texts.fits_rule(",".join(v) if isinstance(v, list) else v, rules[name]) for name, v in values.items())
    )


# -- settings of LibreOffice


def _registry(path: str, item: str, name: str) -> list[str]:
    found = []
    for one in ElementTree.parse(path).getroot().iter("item"):
        if one.get(f"{_OOR}path") == item:
            found += [prop.findtext("value", "") for prop in one.iter("prop") if prop.get(f"{_OOR}name") == name]
    return found


def find_default_font(got: Any, rules: Any, options: Options) -> float:
    found = _registry(got, "/org.openoffice.Office.Writer/DefaultFont", "Standard")
    return float(bool(found) and found[-1] == rules["font_name"])


def check_auto_saving_time(got: Any, rules: Any, options: Options) -> float:
    found = _registry(got, "/org.openoffice.Office.Common/Save/Document", "AutoSaveTimeIntervall")
    return float(bool(found) and int(found[-1]) == rules["minutes"])


def check_presenter_console_disable(got: Any, rules: Any, options: Options) -> float:
    found = _registry(got, "/org.openoffice.Office.Impress/Misc/Start", "EnablePresenterScreen")
    return float(bool(found) and found[0].lower() == "false")


# -- slides

_PICTURE, _TABLE, _FREEFORM = 13, 19, 5
_SOLID, _INHERITED = 1, 5


def _presentation(path: str) -> Any:
    from pptx import Presentation

    return Presentation(path)


def compare_pptx_files(got: Any, expected: Any, options: Options) -> float:
    return float(_SlideComparison(options).same(_presentation(got), _presentation(expected)))


class _SlideComparison:
    """Whether two presentations agree in what the options examine. Options that are off by default are special rules
    of single tasks."""

    _OFF = (
        *("title_bottom_position", "table_bottom_position", "right_position", "top_position", "shape_for_shift_size"),
        *("image_size", "modify_height"),
    )

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tolerance = options.get("approximately_tolerance", 0.005)

    def on(self, name: str) -> bool:
        return bool(self._options.get(f"examine_{name}", name not in self._OFF))

    def same(self, one: Any, other: Any) -> bool:
        if self.on("number_of_slides") and len(one.slides) != len(other.slides):
            return False
        pairs = zip(one.slides, other.slides, strict=False)
        return all(self._slides(number, *pair) for number, pair in enumerate(pairs, 1))

    def _slides(self, number: int, one: Any, other: Any) -> bool:
        if _background(one) != _background(other) and self.on("background_color"):
            return False
        notes = [slide.notes_slide.notes_text_frame.text.strip() for slide in (one, other)]
        if notes[0] != notes[1] and self.on("note"):
            return False
        if len(one.shapes) != len(other.shapes):
            return False
        self._bullets: bool | None = None
        for shape, wanted in zip(one.shapes, other.shapes, strict=True):
            if not (self._placed(number, shape, wanted) and self._tables(shape, wanted)):
                return False
            if hasattr(shape, "text") and hasattr(wanted, "text") and not self._texts(shape, wanted):
                return False
        nested, wanted_nested = list(_text_shapes(one.shapes)), list(_text_shapes(other.shapes))
        if len(nested) != len(wanted_nested):
            return False
        return not self.on("alignment") or all(map(self._aligned, nested, wanted_nested))

    # -- positions

    def _near(self, one: Any, other: Any) -> bool:
        if one == other:
            return True
        return 0 not in (one, other) and abs(one - other) / max(abs(one), abs(other)) <= self._tolerance

    def _box(self, one: Any, other: Any) -> bool:
        return all(self._near(getattr(one, n), getattr(other, n)) for n in ("left", "top", "width", "height"))

    def _placed(self, number: int, one: Any, other: Any) -> bool:
        box, kinds = self._box(one, other), (one.shape_type, other.shape_type)
        written = [hasattr(shape, "text") for shape in (one, other)]
        same_text = all(written) and one.text == other.text
        if self.on("title_bottom_position"):
            if same_text:
                if one.text == "Product Comparison" and (one.top <= other.top or one.top < 3600000):
                    return False
            elif not box:
                return False
        if self.on("table_bottom_position"):
            if number == 3 and kinds == (_TABLE, _TABLE):
                if one.top <= other.top or one.top < 3600000:
                    return False
            elif not box:
                return False
        second = number == 2
        if self.on("right_position") and second and not any(written) and one.left <= max(other.left, 4319999):
            return False
        pictures = kinds == (_PICTURE, _PICTURE)
        if self.on("top_position") and second and pictures and one.top >= min(other.top, 1980001):
            return False
        moved = same_text and one.text == "Elaborate on what you want to discuss."
        if self.on("shape_for_shift_size") and not box and not moved:
            return False
        if self.on("shape") and not box:
            return False
        if self.on("image_size"):
            sized = self._near(one.width, other.width) and self._near(one.height, other.height)
            if not (sized if pictures else box):
                return False
        if self.on("modify_height"):
            only_height = not any(written) or kinds == (_FREEFORM, _FREEFORM)
            return self._near(one.height, other.height) if only_height else box
        return True

    # -- texts

    def _tables(self, one: Any, other: Any) -> bool:
        if one.shape_type != _TABLE:
            return True
        one, other = one.table, other.table
        if (len(one.rows), len(one.columns)) != (len(other.rows), len(other.columns)):
            return False
        for row in range(len(one.rows)):
            for column in range(len(one.columns)):
                frames = [table.cell(row, column).text_frame.paragraphs for table in (one, other)]
                if len(frames[0]) != len(frames[1]):
                    return False
                for pair in zip(*frames, strict=True):
                    runs = [paragraph.runs for paragraph in pair]
                    if len(runs[0]) != len(runs[1]) or not all(map(self._table_runs, *runs)):
                        return False
        return True

    def _table_runs(self, one: Any, other: Any) -> bool:
        return self._coloured(one, other) and _flag(one, other, "bold") and _flag(one, other, "italic") and _lined(
            one, other
        )  # fmt: skip

    def _texts(self, one: Any, other: Any) -> bool:
        if self.on("text") and one.text.strip() != other.text.strip():
            return False
        both = [shape.text_frame.paragraphs for shape in (one, other)]
        return len(both[0]) == len(both[1]) and all(map(self._paragraphs, *both))

    def _paragraphs(self, one: Any, other: Any) -> bool:
        if self.on("alignment") and _alignment(one) != _alignment(other):
            return False
        if self.on("text") and one.text != other.text:
            return False
        if self.on("indent") and one.level != other.level:
            return False
        return len(one.runs) == len(other.runs) and all(map(self._runs, one.runs, other.runs))

    def _runs(self, one: Any, other: Any) -> bool:
        first, second = one.font, other.font
        if self.on("font_name") and first.name != second.name:
            return False
        if self.on("font_size") and first.size != second.size:
            return False
        if self.on("font_bold") and not _flag(one, other, "bold"):
            return False
        if self.on("font_italic") and not _flag(one, other, "italic"):
            return False
        if not self._coloured(one, other):
            return False
        if self.on("font_underline") and not _lined(one, other):
            return False
        struck = [font._element.get("strike", "noStrike") for font in (first, second)]
        if self.on("strike_through") and struck[0] != struck[1]:
            return False
        if self.on("bullets"):
            if self._bullets is None:
                self._bullets = _same_bullets(one.part.blob, other.part.blob)
            return self._bullets
        return True

    def _coloured(self, one: Any, other: Any) -> bool:
        if not (hasattr(one.font.color, "rgb") and hasattr(other.font.color, "rgb")):
            return True
        return one.font.color.rgb == other.font.color.rgb or not self.on("color_rgb")

    def _aligned(self, one: Any, other: Any) -> bool:
        if self.on("text") and one.text.strip() != other.text.strip():
            return False
        both = [[_alignment(p) for p in shape.text_frame.paragraphs] for shape in (one, other)]
        return both[0] == both[1]


def _background(slide: Any) -> Any:
    fill = slide.background.fill
    if fill.type == _INHERITED:
        fill = slide.slide_layout.slide_master.background.fill
    return fill.fore_color.rgb if fill.type == _SOLID else None


def _text_shapes(shapes: Any) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "text") and hasattr(shape, "text_frame"):
            yield shape
        yield from _text_shapes(getattr(shape, "shapes", ()))


def _alignment(paragraph: Any) -> Any:
    from pptx.enum.text import PP_ALIGN

    return PP_ALIGN.LEFT if paragraph.alignment is None else paragraph.alignment


def _flag(one: Any, other: Any, name: str) -> bool:
    """Whether both have the flag or both have not; None is no."""
    first, second = getattr(one.font, name), getattr(other.font, name)
    return first == second or not (first or second)


def _lined(one: Any, other: Any) -> bool:
    """The same underline. None differs only from a plain underline."""
    first, second = one.font.underline, other.font.underline
    if first == second:
        return True
    return (first is None or second is None) and True not in (first, second)


def _same_bullets(one: bytes, other: bytes) -> bool:
    """Whether the paragraphs with text have the same texts, bullets and levels. A slide that is not XML is."""
    try:
        both = [_bullets(ElementTree.fromstring(data)) for data in (one, other)]
    except (ElementTree.ParseError, TypeError):
        return True
    return both[0] == both[1]


def _bullets(root: ElementTree.Element) -> list[tuple[str, str, str]]:
    found = []
    for paragraph in root.iter(f"{_A}p"):
        text = "".join(part.text for part in paragraph.iter(f"{_A}t"))  # type: ignore[reportArgumentType]  # see above
        if not text.strip():
            continue
        form = paragraph.find(f"{_A}pPr")
        char = None if form is None else form.find(f"{_A}buChar")
        level = "No Level" if form is None else form.get("lvl") or "0"
        found.append((level, "No Bullet" if char is None else char.get("char") or "", text))
    return found


def check_image_stretch_and_center(got: Any, expected: Any, options: Options) -> float:
    """The first picture of the first slide fills the slide, up to half an inch."""
    one, other = _presentation(got), _presentation(expected)
    pictures = [[s for s in deck.slides[0].shapes if s.shape_type == _PICTURE] for deck in (one, other)]
    if not pictures[1]:
        return 0.0
    same = [picture for picture in pictures[0] if picture.image.blob == pictures[1][0].image.blob]
    if not same:
        return 0.0
    width, height, image = other.slide_width, other.slide_height, same[-1]
    off = (
        *(image.width - width, image.height - height),
        *(image.left - (width - image.width) / 2, image.top - (height - image.height) / 2),
    )
    return float(all(abs(distance) <= 457200 for distance in off))


def check_slide_orientation_Portrait(got: Any, rules: Any, options: Options) -> float:  # its name
    deck = _presentation(got)
    return float(deck.slide_width < deck.slide_height)


def evaluate_presentation_fill_to_rgb_distance(got: Any, rules: Any, options: Options) -> float:
    """1 minus the mean distance of the slides' backgrounds from a colour. A slide that has none, or that of before,
    counts as far as possible."""

    def distance(slide: Any) -> float:
        fill = slide.background.fill
        if fill.type == _INHERITED:
            fill = slide.slide_layout.slide_master.background.fill
        color = getattr(fill.fore_color, "rgb", None) if fill.type == _SOLID else None
        if color is None or list(color) == list(rules.get("original_rgb") or ()):
            return 1.0
        return math.dist(color, rules["rgb"]) / math.dist((0, 0, 0), (255, 255, 255))

    slides = _presentation(got).slides
    return 1 - sum(map(distance, slides)) / len(slides)


def check_transition(got: Any, rules: Any, options: Options) -> float:
    with zipfile.ZipFile(got) as archive:
        root = ElementTree.fromstring(archive.read(f"ppt/slides/slide{rules['slide_idx'] + 1}.xml"))
    first = next(root.iter(f"{_P}transition"), None)
    return float(first is not None and next(first.iter(f"{_P}{rules['transition_type']}"), None) is not None)


def check_page_number_colors(got: Any, rules: Any, options: Options) -> float:
    """The last but one colour of the first master is of this kind."""
    with zipfile.ZipFile(got) as archive:
        root = ElementTree.fromstring(archive.read("ppt/slideMasters/slideMaster1.xml"))
    colors = [one for fill in root.iter(f"{_A}solidFill") for one in fill.iter(f"{_A}srgbClr")]
    value = colors[-2].get("val")
    if value is None:
        return 0.0
    # OSWorld drops the first digit, as if there were a "#" before them.
    red, green, blue = (int(value[at : at + 2], 16) for at in (1, 3, 5))
    return {
        "red": float(red > green + 50 and red > blue + 50),
        "blue": float(blue > green + 50 and blue > red + 50),
        "green": float(green > red + 50 and green > blue + 50),
        "black": float(max(red, green, blue) < 50),
    }.get(rules["color"], 1.0)


# -- spreadsheets


def compare_table(got: Any, expected: Any, options: Options) -> float:
    return float(_TableComparison(got, expected).same(options["rules"]))


class _TableComparison:
    """The rules of ``compare_table`` over one workbook and the one to compare with.

    A sheet is given by its number, ``RI0`` (number in the result), ``RNname``, ``EI0`` or ``ENname`` (expected).
    """

    def __init__(self, got: str, expected: str | None) -> None:
        from openpyxl import load_workbook

        self._paths = {"R": got, "E": expected}
        self._books = {side: load_workbook(path) if path else None for side, path in self._paths.items()}
        values = {side: load_workbook(path, data_only=True) if path else None for side, path in self._paths.items()}
        self._values = values

    def same(self, rules: Sequence[Options]) -> bool:
        return all(getattr(self, f"_{rule['type']}")(rule) for rule in rules)

    def _at(self, given: int | str) -> tuple[str, str]:
        """Side and name of a sheet; an empty name if there is none."""
        if isinstance(given, int):
            given = f"RI{given}"
        side, how, what = given[0], given[1], given[2:]
        if side not in "RE" or how not in "IN":
            raise ValueError(given)
        if how == "N":
            return side, what
        book = self._books[side]
        names = book.sheetnames if book is not None else []
        return side, names[int(what)] if -len(names) <= int(what) < len(names) else ""

    def _sheet(self, given: int | str) -> Any:
        side, name = self._at(given)
        book = self._books[side]
        return book[name] if book is not None and name in book.sheetnames else None

    def _both(self, rule: Options) -> list[Any]:
        return [self._sheet(rule[key]) for key in ("sheet_idx0", "sheet_idx1")]

    # -- rules

    def _sheet_name(self, rule: Options) -> bool:
        one, other = self._books["R"], self._books["E"]
        return one is not None and other is not None and one.sheetnames == other.sheetnames

    def _sheet_data(self, rule: Options) -> bool:
        frames = []
        for given in (rule["sheet_idx0"], rule["sheet_idx1"]):
            side, name = self._at(given)
            book = self._values[side]
            if book is None or name not in book.sheetnames:
                return False
            frames.append(_frame(book[name], rule.get("precision", 4)))
        return frames[0] == frames[1]

    def _sheet_print(self, rule: Options) -> bool:
        printed = []
        for given in (rule["sheet_idx0"], rule["sheet_idx1"]):
            side, name = self._at(given)
            path = self._paths[side]
            with open(f"{os.path.splitext(path or '')[0]}-{name}.csv", encoding="utf-8") as file:
                text = file.read().lower() if rule.get("ignore_case") else file.read()
            lines = [line.strip() for line in text.split("\n")]
            while lines and not lines[-1]:
                lines.pop()
            printed.append(lines)
        return printed[0] == printed[1]

    def _sheet_fuzzy(self, rule: Options) -> bool:
        sides = [self._at(rule[key]) for key in ("sheet_idx0", "sheet_idx1")]
        return all(self._fuzzy_cells(one, sides) for one in rule["rules"])

    def _fuzzy_cells(self, rule: Options, sides: list[tuple[str, str]]) -> bool:
        from openpyxl.worksheet.cell_range import MultiCellRange

        for area in MultiCellRange(rule["range"]):
            for place in area.cells:
                one, other = (_trimmed(str(self._stored(*side, *place)), rule) for side in sides)
                fits = {
                    "includes": other in one,
                    "included_by": one in other,
                    "exact_match": one == other,
                    "fuzzy_match": 100 * texts.ratio(one, other) >= rule.get("threshold", 85.0),
                }[rule["type"]]
                if not fits:
                    return False
        return True

    def _stored(self, side: str, name: str, row: int, column: int) -> Any:
        """The value of a cell as the file stores it: a number as float, a text; None if there is none."""
        from openpyxl.utils import get_column_letter

        path = self._paths[side]
        return _stored(path, name, f"{get_column_letter(column)}{row}") if path else None

    def _chart(self, rule: Options) -> bool:
        one, other = self._both(rule)
        return _charts(one, rule) == _charts(other, rule)

    def _style(self, rule: Options) -> bool:
        both = []
        for key, sheet in zip(("sheet_idx0", "sheet_idx1"), self._both(rule), strict=True):
            both.append(_styles(sheet, rule, partial(self._stored, *self._at(rule[key]))))
        return both[0] == both[1]

    def _freeze(self, rule: Options) -> bool:
        one, other = self._both(rule)
        return one is not None and one.freeze_panes == other.freeze_panes

    def _zoom(self, rule: Options) -> bool:
        sheet = self._sheet(rule["sheet_idx"])
        return sheet is not None and texts.fits_rule(sheet.sheet_view.zoomScale or 100.0, rule)

    def _data_validation(self, rule: Options) -> bool:
        sheet = self._sheet(rule["sheet_idx"])
        if sheet is None:
            return False
        found = sheet.data_validations.dataValidation
        wanted = rule["dv_props"]
        return len(found) >= len(wanted) and all(
            any(all(_fits(getattr(one, name), part) for name, part in props.items()) for props in wanted)
            for one in found
        )

    def _row_props(self, rule: Options, kind: str = "row") -> bool:
        def dimensions(sheet: Any) -> dict[Any, dict[str, Any]]:
            if sheet is None:
                return {}
            found = getattr(sheet, f"{kind}_dimensions").items()
            return {number: {name: getattr(one, name) for name in rule.get("props", ())} for number, one in found}

        one, other = self._both(rule)
        return dimensions(one) == dimensions(other)

    def _col_props(self, rule: Options) -> bool:
        return self._row_props(rule, "column")

    def _pivot_table(self, rule: Options) -> bool:
        one, other = self._both(rule)
        return _pivots(one, rule) == _pivots(other, rule)

    def _check_cell(self, rule: Options) -> bool:
        from openpyxl.utils import coordinate_to_tuple

        sheet = self._sheet(rule["sheet_idx"])
        if sheet is None:
            return False
        cell = sheet[rule["coordinate"]]
        for name, part in rule["props"].items():
            if name == "value":
                value = self._stored(*self._at(rule["sheet_idx"]), *coordinate_to_tuple(rule["coordinate"]))
            else:
                try:
                    value = _style(name, cell)
                except AttributeError:
                    value = None
            if not texts.fits_rule(value, part):
                return False
        return True


def _fits(value: Any, rule: Options) -> bool:
    from openpyxl.worksheet.cell_range import MultiCellRange

    if rule["method"] != "spreadsheet_range":
        return texts.fits_rule(value, rule)
    least, most = MultiCellRange(rule["ref"][0]), MultiCellRange(rule["ref"][1])
    return all(area in value for area in least) and all(area in most for area in value)


def _trimmed(value: str, rule: Options) -> str:
    for old, new in rule.get("normalization", ()):
        value = value.replace(old, new)
    if "trim_leadings" in rule:
        value = value.lstrip(rule["trim_leadings"])
    if "trim_trailings" in rule:
        value = value.rstrip(rule["trim_trailings"])
    value = "".join(sign for sign in value if sign not in rule.get("ignore_chars", ""))
    return value.lower() if rule.get("ignore_case") else value


# The words that pandas takes for a missing value.
_MISSING = frozenset(
    (
        *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
        *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
    )
)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")


def _frame(sheet: Any, digits: int) -> tuple[list[Any], int, list[Any]]:
    """The sheet as pandas reads it: names of the columns, number of rows, and of each column its kind and values. A
    column of numbers only is rounded; a missing value is None."""
    rows = [[_converted(cell) for cell in row] for row in sheet.iter_rows()]
    for row in rows:
        while row and row[-1] == "":
            row.pop()
    while rows and not rows[-1]:
        rows.pop()
    width = max(map(len, rows), default=0)
    rows = [row + [""] * (width - len(row)) for row in rows]
    if width == 1:
        rows = [row for row in rows if not (isinstance(row[0], str) and not row[0].strip())]
    if not rows:
        return [], 0, []
    names: list[Any] = []
    seen: dict[Any, int] = {}
    for number, name in enumerate(rows[0]):
        if name == "" or name != name:
            name = f"Unnamed: {number}"
        count = seen.get(name, 0)
        seen[name] = count + 1
        names.append(f"{name}.{count}" if count else name)
    columns = [_column([row[number] for row in rows[1:]], digits) for number in range(width)]
    return names, len(rows) - 1, columns


def _converted(cell: Any) -> Any:
    value = cell.value
    if value is None:
        return ""
    if cell.data_type == "e":
        return math.nan
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _column(values: list[Any], digits: int) -> tuple[str, list[Any]]:
    missing = [value != value or (isinstance(value, str) and value in _MISSING) for value in values]
    kept = [None if gone else value for value, gone in zip(values, missing, strict=True)]
    given = [value for value in kept if value is not None]
    if given and all(isinstance(value, bool) for value in given):
        return ("bool" if not any(missing) else "object"), kept
    numbers = [_as_number(value) for value in given]
    if all(number is not None for number in numbers):
        whole = values and not any(missing) and all(isinstance(number, int) for number in numbers)
        if whole:
            return "int", numbers
        found = iter(numbers)
        return ("float" if values else "object"), [
            None if value is None else round(float(next(found)), digits) for value in kept  # type: ignore[arg-type]
        ]  # fmt: skip
    return "object", kept


def _as_number(value: Any) -> int | float | None:
    if isinstance(value, int | float) and not isinstance(value, datetime.date):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        try:
            return int(value)
        except ValueError:
            return float(value)
    return None


def _stored(path: str, name: str, place: str) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            ids = {
                sheet.get("name"): sheet.get("sheetId")
                for sheet in ElementTree.fromstring(archive.read("xl/workbook.xml")).iter(f"{_X}sheet")
            }
            root = ElementTree.fromstring(archive.read(f"xl/worksheets/sheet{ids[name]}.xml"))
            cell = next((one for one in root.iter(f"{_X}c") if one.get("r") == place), None)
            if cell is None:
                return None
            kind, value = cell.get("t", "n"), cell.findtext(f"{_X}v")
            if kind == "inlineStr":
                return cell.findtext(f"{_X}is/{_X}t")
            if value is None:
                return None
            if kind == "n":
                return float(value)
            if kind == "s":
                shared = ElementTree.fromstring(archive.read("xl/sharedStrings.xml"))
                item = shared.findall(f"{_X}si")[int(value)]
                return "".join(part.text or "" for part in item.iter(f"{_X}t"))
            return value if kind in ("str", "e") else None
    except (KeyError, ValueError, IndexError, zipfile.BadZipFile, ElementTree.ParseError):
        return None


def _style(name: str, cell: Any, difference: Any = None) -> Any:
    """One property of a cell, or of the conditional format that is in force there."""
    from openpyxl.cell.cell import MergedCell

    source = difference or cell
    if name == "merge":
        return isinstance(cell, MergedCell)
    if name in ("bgcolor", "fgcolor"):
        try:
            return difference.fill.bgColor.rgb if difference is not None else cell.fill.fgColor.rgb
        except AttributeError:
            return None
    if name == "fill_type":
        try:
            return source.fill.tagname
        except AttributeError:
            return None
    if cell.value is None:
        return None
    match name:
        case "number_format":
            if cell.data_type != "n":
                return None
            return cell.number_format if difference is None else difference.numFmt.formatCode
        case "hyperlink":
            return cell.hyperlink or ""
        case "font_color":
            return source.font.color.rgb
        case "font_name" | "font_family" | "font_bold" | "font_italic" | "font_underline" | "font_size":
            return getattr(source.font, name.removeprefix("font_"))
    raise ValueError(name)


_COMPARED: dict[str, Callable[[Any, list[Any]], bool]] = {
    "lessThan": lambda value, refs: value < refs[0],
    "lessThanOrEqual": lambda value, refs: value <= refs[0],
    "equal": lambda value, refs: value == refs[0],
    "notEqual": lambda value, refs: value != refs[0],
    "greaterThan": lambda value, refs: value > refs[0],
    "greaterThanOrEqual": lambda value, refs: value >= refs[0],
    "between": lambda value, refs: min(refs) <= value <= max(refs),
    "notBetween": lambda value, refs: not min(refs) <= value <= max(refs),
}


def _styles(sheet: Any, rule: Options, stored: Callable[[int, int], Any]) -> dict[str, list[Any]]:
    """Coordinate -> the properties. Of conditional formats only comparisons with constants are taken."""
    if sheet is None:
        return {}
    found = {
        cell.coordinate: [_style(name, cell) for name in rule.get("props", ())]
        for column in sheet.iter_cols()
        for cell in column
    }
    for area in sheet.conditional_formatting:
        for condition in area.rules:
            refs = [_constant(text) for text in condition.formula]
            compare = _COMPARED.get(condition.operator) if condition.type == "cellIs" else None
            if compare is None or None in refs:
                continue
            for place in (place for part in area.cells for place in part.cells):
                value = stored(*place)
                try:
                    active = value is not None and compare(value, refs)
                except TypeError:
                    active = False
                if active:
                    cell = sheet.cell(*place)
                    found[cell.coordinate] = [_style(name, cell, condition.dxf) for name in rule.get("props", ())]
    return found


def _constant(text: str) -> float | str | None:
    if re.fullmatch(r'"[^"]*"', text):
        return text[1:-1]
    try:
        return float(text)
    except ValueError:
        return None


def _charts(sheet: Any, rule: Options) -> dict[str, dict[str, Any]]:
    """The references of a chart's series -> its properties."""
    if sheet is None:
        return {}
    wanted = set(rule.get("chart_props", ()))

    def reference(data: Any) -> str:
        for name in ("numRef", "strRef"):
            if hasattr(data, name) and hasattr(getattr(data, name), "f"):
                return getattr(data, name).f
        return ""

    def title(owner: Any) -> Any:
        try:
            return owner.title.tx.rich.p[0].r[0].t
        except (AttributeError, TypeError, IndexError):
            return None

    properties: dict[str, Callable[[Any], Any]] = {
        "title": title,
        "legend": lambda chart: chart.legend.position if chart.legend is not None else None,
        "anchor": lambda chart: [
            *(chart.anchor.editAs, chart.anchor._from.col, chart.anchor.to.row),
            *(chart.anchor.to.col, chart.anchor.to.row),
        ],
        "width": lambda chart: chart.width,
        "height": lambda chart: chart.height,
        "type": lambda chart: chart.tagname,
        "direction": lambda chart: chart.barDir,
        "xtitle": lambda chart: title(getattr(chart, "x_axis", None)),
        "ytitle": lambda chart: title(getattr(chart, "y_axis", None)),
        "ztitle": lambda chart: title(getattr(chart, "z_axis", None)),
    }
    return {
        ";".join(f"{reference(one.val)},{reference(one.cat)}" for one in chart.series): {
            name: read(chart) for name, read in properties.items() if name in wanted
        }
        for chart in sheet._charts
    }


def _pivots(sheet: Any, rule: Options) -> dict[str, dict[str, Any]]:
    """The source of a pivot table -> its properties. Empty fields at both ends are left out of the source."""
    from openpyxl.utils import coordinate_to_tuple

    if sheet is None:
        return {}
    wanted = set(rule.get("pivot_props", ()))
    found = {}
    for pivot in sheet._pivots:
        fields = [[(item.h, item.x) for item in field.items if item.x is not None] for field in pivot.pivotFields]
        filled = [number for number, field in enumerate(fields) if field]
        first, last = (filled[0], filled[-1]) if filled else (len(fields), len(fields) - 1)
        selection = fields[first : last + 1]
        source = pivot.cache.cacheSource
        start, end = map(coordinate_to_tuple, source.worksheetSource.ref.split(":"))
        start, end = (start[0], start[1] + first), (end[0], end[1] - (len(fields) - 1 - last if filled else 0))
        info: dict[str, Any] = {}
        for name, attribute in (
            *(("name", "name"), ("show_total", "visualTotals"), ("show_empty_row", "showEmptyRow")),
            *(("show_empty_col", "showEmptyCol"), ("show_headers", "showHeaders"), ("location", "location")),
        ):
            if name in wanted:
                info[name] = getattr(pivot, attribute)
        if wanted & {"filter", "selection"}:
            info["selection"] = selection if "ordered" in wanted else [set(field) for field in selection]
        if "filter" in wanted:
            info["filter_fields"] = {field.fld for field in pivot.pageFields}
        if "col_fields" in wanted:
            info["col_fields"] = [field.x - first for field in pivot.colFields]
        if "row_fields" in wanted:
            info["row_fields"] = [field.x - first for field in pivot.rowFields]
        if "data_fields" in wanted:
            named = "data_fields_name" in wanted
            info["data_fields"] = [
                f"{field.fld - first};{field.name if named else ''};{field.subtotal};{field.showDataAs}"
                for field in pivot.dataFields
            ]
        found[f"{source.type};{start}:{end};{source.worksheetSource.sheet}"] = info
    return found


METRICS: dict[str, Callable[[Any, Any, Options], float]] = {
    metric.__name__: metric
    for metric in (
        *(compare_docx_files, compare_docx_files_and_ignore_new_lines, compare_docx_tables, compare_docx_images),
        *(compare_line_spacing, compare_subscript_contains, compare_font_names, has_page_numbers_in_footers),
        *(is_first_line_centered, contains_page_break, check_tabstops, evaluate_strike_through_last_paragraph),
        *(check_italic_font_size_14, check_highlighted_words, compare_references, fuzzy_place_math),
        compare_unique_train_records,
        *(find_default_font, check_auto_saving_time, check_presenter_console_disable, compare_pptx_files),
        *(check_image_stretch_and_center, check_slide_orientation_Portrait, check_transition),
        *(evaluate_presentation_fill_to_rgb_distance, check_page_number_colors, compare_table),
        *(evaluate_colored_words_in_tables, compare_epub, check_mp3_meta),
    )
}
"""Name -> comparison."""
texts.METRICS.update(METRICS)
