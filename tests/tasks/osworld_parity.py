"""Run by a Python that has OSWorld's packages: score made documents by OSWorld's own functions and by ours.

``argv``: a copy of OSWorld, our folder ``tasks/formats``, an empty folder for the documents, and one of
:data:`SECTIONS`. Prints lines of
``[function, case, OSWorld's score, our score]``; a function that raises has the score 0, as an evaluation has then.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import json
import logging
import random
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import docx
import fitz
import numpy as np
import openpyxl
import pptx
from docx.enum.text import WD_PARAGRAPH_ALIGNMENT, WD_TAB_ALIGNMENT
from docx.shared import Pt, RGBColor
from openpyxl.chart import BarChart, LineChart, Reference
from openpyxl.formatting.rule import CellIsRule
from openpyxl.styles import Font, PatternFill
from openpyxl.worksheet.datavalidation import DataValidation
from PIL import Image, ImageDraw, ImageEnhance
from pptx.dml.color import RGBColor as SlideColor
from pptx.enum.text import PP_ALIGN
from pptx.util import Emu, Inches

COPY, OURS, FOLDER = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
Case = tuple[str, Any, Any, dict[str, Any]]


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds large packages that the functions under test do not need."""

    NAMES = frozenset(("acoustid", "borb", "easyocr", "fastdtw", "librosa", "playwright", "pydrive", "torch"))

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, module: Any) -> None:
        pass


def theirs() -> Any:
    for name in ("desktop_env", "desktop_env.evaluators"):
        sys.modules[name] = package = type(sys)(name)
        package.__path__ = [f"{COPY}/{name.replace('.', '/')}"]
    sys.path.insert(0, COPY)
    sys.meta_path.append(Missing())
    return importlib.import_module("desktop_env.evaluators.metrics")


def ours() -> dict[str, Any]:
    for name in ("texts", "office", "images"):
        spec = importlib.util.spec_from_file_location(f"osworld_{name}", OURS / f"_osworld_{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[f"osworld_{name}"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["osworld_texts"].METRICS


def pairs(paths: list[Any]) -> Iterator[tuple[Any, Any]]:
    return itertools.product(paths, repeat=2)


def some(paths: list[str]) -> Iterator[tuple[str, str]]:
    """Each path with itself, with the first and with the next one."""
    for number, path in enumerate(paths):
        yield path, path
        yield path, paths[0]
        yield path, paths[(number + 1) % len(paths)]


def file(name: str, data: str | bytes) -> str:
    path = FOLDER / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


# -- texts and settings


def of_texts() -> Iterator[Case]:
    texts = ["", "a\n", "a", "A b\tc\n", "a  b c", "a b c\n\n", "x\ny\nz\n", "x\ny\nw\n", "Ä ö\n"]
    paths = [file(f"t{number}.txt", text) for number, text in enumerate(texts)]
    for one, other in pairs(paths):
        yield "diff_text_file", one, other, {}
        yield "compare_python_pure_text", one, other, {}
        for options in (
            {},
            {"ignore_blanks": True},
            {"ignore_case": True},
            {"ignore_blanks": True, "ignore_case": True},
        ):
            yield "compare_text_file", one, other, options
        for options in ({}, {"strict": False}, {"ignore_case": True}):
            yield "compare_csv", one, other, options
            yield "compare_csv", one, [other, paths[1]], options
    for path, text in itertools.product(paths, texts):
        yield "compare_config", path, {"expected": text}, {}
        yield "file_contains", path, {"expected": [text, "a"]}, {}
    for one, other in pairs(["a", "A", ["a", "b"], ["A", "b"], 1, "1"]):
        for options in ({}, {"ignore_case": True}, {"type": "list"}, {"type": "list", "ignore_case": True}):
            yield "literal_match", one, other, options
        yield "match_in_list", one, {"expected": ["a", "1"]}, {}
    lines = file("times.txt", "at 10:20:30\nat 25:00:00\n09:59:59 23:00:00\n")
    for count in (1, 2, 3):
        yield "check_line_number", lines, {"expected": str(count)}, {}
    for kind, text in itertools.product(("contain", "not_contain"), ("python", "x")):
        yield "is_extension_installed", "ms-python.python\n", {"type": kind, "expected": text}, {}
    table = file("t.csv", 'url,user\nimap://a,ann\n"smtp://b",ben\n')
    for rules in ({"expect": [{"user": "ann"}]}, {"expect": [{"user": "x"}]}, {"unexpect": [{"url": "imap://a"}]}, {}):
        yield "check_csv", table, rules, {}
    body = {"a": {"b": [1, 2], "c": "words here"}, "t": True, "n": 2.5}
    path = file("body.json", json.dumps(body))
    methods = [
        ("eq", 2.5),
        ("ne", 2),
        ("lt", 3),
        ("ge", 2.5),
        ("approx:0.1", 2.45),
        ("range.te", [2, 2.5]),
        ("range.tt", [2, 2.5]),
    ]
    for method, ref in methods:
        rule = {"key": ["n"], "method": method, "ref": ref}
        yield "check_json", path, {"expect": [rule]}, {}
        yield "check_json", path, {"unexpect": [rule]}, {}
    for keys, method, ref in (
        (["a", "c"], "re", "w.*e"),
        (["a", "c"], "re.I", "WORDS"),
        (["a", "x"], "eq", 1),
        (["z"], "eq", 1),
    ):
        yield "check_json", path, {"expect": [{"key": keys, "method": method, "ref": ref}]}, {}
        yield "check_json", path, {"unexpect": [{"key": keys, "method": method, "ref": ref}]}, {}
    for expected in ({"t": True}, {"t": False}, {"a": {"b": [1, 2], "c": "words here"}}, {"q": 1}, {}):
        yield "check_json_settings", path, {"expected": expected}, {}
        yield "check_direct_json_object", json.dumps(body), {"expected": expected}, {}
    for expected in ({"c": "words"}, {"c": "x"}, {"b": [1, 7]}, {"b": [7]}, {"c": 1}):
        yield (
            "check_direct_json_object",
            {"b": [1], "c": "words here"},
            {"expected": expected, "expect_in_result": True},
            {},
        )
    keys = [{"key": "ctrl+j", "command": "x"}]
    for text in (json.dumps(keys), "// comment\n" + json.dumps(keys), "{}", "broken"):
        for wanted in (keys[0], {"key": "ctrl+k"}):
            yield "check_json_keybindings", file("keys.json", text), {"expected": wanted}, {}
            yield "check_json_keybindings", file(f"keys{len(text)}.json", text), {"expected": wanted}, {}
    yield from of_settings()
    yield from of_archives()


def of_settings() -> Iterator[Case]:
    gimp = file(
        "gimprc", '# comment\n(undo-levels 100)\n(theme "Light")\n(hide-docks yes)\n(layer-new "x" (y "Square"))\n\n'
    )
    for key, value in (
        ("undo-levels", "100"),
        ("undo-levels", "50"),
        ("theme", '"Light"'),
        (["layer-new", '"x"'], '"Square"'),
    ):
        yield "check_config_status", gimp, {"key": key, "value": value}, {}
    for number, text in enumerate(
        (
            "",
            "#qt-bgcone=1\nqt-bgcone=0\nqt-max-volume=200\nqt-minimal-view=1\nglobal-key-play-pause=Space\n",
            "input-record-path=/home/user/Desktop\nqt-slider-colours=1;2;3;50;60;70\n#global-key-play-pause=\n",
            "#input-record-path=/home/user/Desktop\nqt-slider-colours=1;2;3;150;60;70\none-instance-when-started-from-file=0\n",
        )
    ):
        path = file(f"vlcrc{number}", text)
        for wanted in (0, 1, "1"):
            yield "check_qt_bgcone", path, {"expected_qt_bgcone": wanted}, {}
            yield "check_qt_minimal_view", path, {"expected_qt_minimal_view": wanted}, {}
            yield "check_global_key_play_pause", path, {"expected_global_key_play_pause": wanted}, {}
            yield (
                "check_one_instance_when_started_from_file",
                path,
                {"expected_one_instance_when_started_from_file": wanted},
                {},
            )
        for volume in (125, 200):
            yield "check_qt_max_volume", path, {"expected_qt_max_volume": volume}, {}
        yield "check_qt_slider_colours", path, {"type": "blackish"}, {}
        yield "check_qt_slider_colours", path, {"type": "match", "expected_qt_slider_colours": "1;2;3;50;60;70"}, {}
        yield "is_vlc_recordings_folder", path, {"recording_file_path": "/home/user/Desktop"}, {}
    prefs = file("prefs.js", 'user_pref("a.b", true);\nuser_pref("text", "x\\ny dark");\n// no\nuser_pref("n", 3);\n')
    for expect in (
        {"a.b": {"method": "eq", "ref": True}},
        {"text": {"method": "re", "ref": "dark"}},
        {"n": {"method": "lt", "ref": 2}},
        {"q": {"method": "eq", "ref": 1}},
    ):
        yield "check_thunderbird_prefs", prefs, {"expect": expect}, {}
        yield "check_thunderbird_prefs", prefs, {"unexpect": expect}, {}
    rules = file(
        "msgFilterRules.dat",
        'version="9"\nname="P"\nenabled="yes"\ntype="17"\naction="Move to folder"\nactionValue="mailbox://x/P"\n'
        'condition="AND (subject,contains,discount)"\n'
        'name="Q"\nenabled="no"\naction="Forward"\nactionValue="a@b"\ncondition="ALL"\n',
    )
    for wanted in (
        {"enabled": "yes", "condition": ["AND (subject,contains,discount)"]},
        {"action": "Forward", "condition": ["ALL"]},
        {"action": "Delete"},
    ):
        yield "check_thunderbird_filter", rules, {"expect": [wanted]}, {}
        yield "check_thunderbird_filter", rules, {"unexpect": [wanted]}, {}
    bar = [{"type": "folder", "name": "Favorites", "children": []}, {"type": "url", "name": "x", "url": "https://x/"}]
    liked = {"type": "folder", "name": "Liked Authors", "children": [{"type": "url", "url": "https://a/"}]}
    for children in ([], bar, [*bar, liked]):
        roots = {"bookmark_bar": {"children": children}}
        yield "is_expected_bookmarks", roots, {"type": "bookmark_bar_folders_names", "names": ["Favorites"]}, {}
        yield "is_expected_bookmarks", roots, {"type": "bookmark_bar_websites_urls", "urls": ["https://x/"]}, {}
        for urls in (["https://a/"], [["https://b/", "https://a/"]], ["https://b/"]):
            yield "is_expected_bookmarks", roots, {"type": "liked_authors_websites_urls", "urls": urls}, {}
    for size in (15, 16, 17):
        yield "check_font_size", {"default_font_size": size}, {"type": "range", "min": 16, "max": 99}, {}
        yield "check_font_size", {"default_font_size": size}, {"type": "value", "value": 16}, {}
    for names in ([], ["a@2"], ["a@2", "b@1"]):
        yield "check_enabled_experiments", names, {"type": "names", "names": ["a", "b"]}, {}


def of_archives() -> Iterator[Case]:
    archives = []
    for number, texts in enumerate(({"a.txt": "1\n"}, {"a.txt": "2\n"}, {"a.txt": "1\n", "b.txt": ""})):
        zipped, tarred = FOLDER / f"z{number}.zip", FOLDER / f"z{number}.tar.gz"
        with zipfile.ZipFile(zipped, "w") as archive, tarfile.open(tarred, "w:gz") as tar:
            for name, text in texts.items():
                archive.writestr(name, text)
                tar.add(file(f"{number}-{name}", text), name)
        archives.append((str(zipped), str(tarred)))
    for one, other in pairs(archives):
        yield "compare_zip_files", one[0], other[0], {}
        yield "compare_archive", one[1], other[1], {}


# -- documents


def of_documents() -> Iterator[Case]:
    paths = [document(number) for number in range(14)]
    for one, other in some(paths):
        for options in (
            *({}, {"ignore_blanks": False}, {"ignore_case": True}, {"ignore_order": True}, {"content_only": True}),
            *({"fuzzy_match": True}, {"fuzzy_match": True, "ignore_blanks": False}, {"delete_empty_lines": True}),
        ):
            yield "compare_docx_files", one, other, options
        for name in (
            *("compare_docx_tables", "compare_line_spacing", "compare_subscript_contains", "compare_docx_images"),
            *(
                "evaluate_strike_through_last_paragraph",
                "check_italic_font_size_14",
                "evaluate_colored_words_in_tables",
            ),
        ):
            yield name, one, other, {}
        yield "check_tabstops", one, other, {}
        yield "check_tabstops", one, other, {"word_number_split_by_tabstop": 3, "index": 0}
        yield "compare_references", one, other, {}
        yield "compare_docx_files_and_ignore_new_lines", one, other, {}
        yield "compare_unique_train_records", one, [other, paths[0]], {}
    for path in paths:
        yield "compare_font_names", path, {"font_name": "Times New Roman"}, {}
        yield "has_page_numbers_in_footers", path, None, {}
        yield "is_first_line_centered", path, None, {}
        yield "fuzzy_place_math", path, {"expected": ["one", "two", "three", "Paris"]}, {}
        for rules in ({}, {"page_break_count": 1}, {"page_break_count": 2}):
            yield "contains_page_break", path, rules, {}
    texts = [
        "<text:p>one <text:span text:style-name='T1'>two</text:span> three</text:p>",
        "<text:p>one two three</text:p>",
    ]
    odts = [
        odt(f"{number}.odt", text, color)
        for number, (text, color) in enumerate(itertools.product(texts, ("#ffff00", "#ff0000")))
    ]
    for one, other in pairs(odts):
        yield "compare_docx_files", one, other, {}
        yield "check_highlighted_words", one, other, {}
    for font, minutes, screen in (("Times New Roman", 3, "false"), ("Liberation", 10, "true")):
        path = file(
            f"{minutes}.xcu",
            '<oor:items xmlns:oor="http://openoffice.org/2001/registry">'
            '<item oor:path="/org.openoffice.Office.Writer/DefaultFont"><prop oor:name="Standard" oor:op="fuse">'
            f"<value>{font}</value></prop></item>"
            '<item oor:path="/org.openoffice.Office.Common/Save/Document"><prop oor:name="AutoSaveTimeIntervall">'
            f"<value>{minutes}</value></prop></item>"
            '<item oor:path="/org.openoffice.Office.Impress/Misc/Start"><prop oor:name="EnablePresenterScreen">'
            f"<value>{screen}</value></prop></item></oor:items>",
        )
        yield "find_default_font", path, {"font_name": "Times New Roman"}, {}
        yield "check_auto_saving_time", path, {"minutes": 3}, {}
        yield "check_presenter_console_disable", path, None, {}


def document(number: int) -> str:
    made = docx.Document()
    lines = ["One two three", "second line", "a, T1, x, 1", "", "References", "[1] A book", "[2] A paper"]
    if number == 1:
        lines[1] = "second  line"
    if number == 2:
        lines[1] = "Second line"
    if number == 3:
        lines = lines[::-1]
    if number == 4:
        lines[5] = "[1] Another book"
    if number == 5:
        lines.remove("")
    if number == 6:
        lines = ["one", "two", "tree"]
    if number == 7:
        lines = lines[:4]
    for place, line in enumerate(lines):
        paragraph = made.add_paragraph()
        run = paragraph.add_run(line)
        run.font.name = "Times New Roman" if number % 2 else None
        if number == 8:
            run.font.strike = True
            run.font.subscript = True
        if number == 9:
            run.italic = True
            run.font.size = Pt(14 if place else 12)
            paragraph.alignment = WD_PARAGRAPH_ALIGNMENT.CENTER
        if number == 10:
            run.italic = True
            run.font.size = Pt(14)
            paragraph.paragraph_format.line_spacing = 1.5
            paragraph.paragraph_format.tab_stops.add_tab_stop(Inches(2), WD_TAB_ALIGNMENT.RIGHT)
        if number == 11:
            run.font.subscript = True
            paragraph.paragraph_format.tab_stops.add_tab_stop(Inches(3), WD_TAB_ALIGNMENT.RIGHT)
    if number in (9, 10, 11):
        for _ in range(number - 9):
            made.add_page_break()
        made.sections[0].footer.paragraphs[0].text = "page 1" if number == 10 else "page"
    if number in (12, 13, 8):
        table = made.add_table(2, 2)
        for place, word in enumerate(("apple", "pear", "egg", f"x{number}")):
            run = table.cell(place // 2, place % 2).paragraphs[0].add_run(word)
            vowel = word[0] in "aeiou"
            run.font.color.rgb = RGBColor(255, 0, 0) if vowel else RGBColor(0, 2 if number == 12 else 90, 255)
    if number in (12, 7):
        made.add_picture(picture("in-docx", number))
    made.save(FOLDER / f"d{number}.docx")
    return str(FOLDER / f"d{number}.docx")


def odt(name: str, text: str, color: str) -> str:
    from odf import opendocument, style
    from odf import text as odf_text

    made = opendocument.OpenDocumentText()
    form = style.Style(name="T1", family="text")
    form.addElement(style.TextProperties(backgroundcolor=color))
    made.automaticstyles.addElement(form)
    paragraph = odf_text.P(text="one " if "span" in text else "one two three")
    if "span" in text:
        paragraph.addElement(odf_text.Span(stylename=form, text="two"))
        paragraph.addText(" three")
    made.text.addElement(paragraph)
    made.save(FOLDER / name)
    return str(FOLDER / name)


# -- slides


def of_slides() -> Iterator[Case]:
    paths = [slides(number) for number in range(26)]
    names = (
        *("number_of_slides", "shape", "text", "indent", "font_name", "font_size", "font_bold", "font_italic"),
        *("color_rgb", "font_underline", "strike_through", "alignment", "bullets", "background_color", "note"),
    )
    extra = (
        *("title_bottom_position", "table_bottom_position", "right_position", "top_position", "shape_for_shift_size"),
        *("image_size", "modify_height"),
    )
    chosen = [{}, *({f"examine_{name}": False} for name in names), *({f"examine_{name}": True} for name in extra)]
    chosen += [{f"examine_{name}": True, "examine_shape": False} for name in extra]
    for number, path in enumerate(paths):
        for place, options in enumerate(chosen):
            if not options or (number + place) % 4 == 0:
                yield "compare_pptx_files", path, paths[0], options
        yield "compare_pptx_files", path, paths[(number + 1) % len(paths)], {}
        yield "check_image_stretch_and_center", path, paths[0], {}
        yield "check_slide_orientation_Portrait", path, None, {}
        for rules in ({"rgb": [0, 0, 255]}, {"rgb": [255, 0, 0], "original_rgb": [0, 0, 255]}):
            yield "evaluate_presentation_fill_to_rgb_distance", path, rules, {}
        yield "check_transition", path, {"slide_idx": 0, "transition_type": "dissolve"}, {}
        for color in ("red", "blue", "green", "black"):
            yield "check_page_number_colors", path, {"color": color}, {}


def slides(number: int) -> str:
    made = pptx.Presentation()
    for place in range(3 if number != 1 else 2):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text = "Product Comparison" if place == 1 else f"Title {place}"
        frame = slide.placeholders[1].text_frame
        frame.text = "Elaborate on what you want to discuss." if place == 2 else "first"
        frame.add_paragraph().text = "second"
        box = slide.shapes.add_textbox(Inches(1), Inches(2), Inches(3), Inches(1))
        run = box.text_frame.paragraphs[0].add_run()
        run.text = "words"
        slide.shapes.add_picture(picture("in-pptx", 0), Inches(1), Inches(1), Inches(2), Inches(2))
        if place == 2:
            grid = slide.shapes.add_table(2, 2, Inches(1), Inches(3), Inches(4), Inches(1))
            grid.table.cell(0, 0).text = "cell"
    slide = made.slides[min(1, len(made.slides) - 1)]
    box, image = slide.shapes[2], slide.shapes[3]
    run, paragraph = box.text_frame.paragraphs[0].runs[0], box.text_frame.paragraphs[0]
    match number:
        case 2:
            run.text = "other"
        case 3:
            run.font.bold = True
        case 4:
            run.font.bold = False
        case 5:
            run.font.italic = True
        case 6:
            run.font.underline = True
        case 7:
            run.font.underline = False
        case 8:
            run.font.color.rgb = SlideColor(255, 0, 0)
        case 9:
            run.font.size = Emu(254000)
        case 10:
            run.font.name = "Arial"
        case 11:
            run.font._element.set("strike", "sngStrike")
        case 12:
            paragraph.alignment = PP_ALIGN.LEFT
        case 13:
            paragraph.alignment = PP_ALIGN.CENTER
        case 14:
            paragraph.level = 2
        case 15:
            box.left = box.left + 100
        case 16:
            box.left = box.left + Inches(2)
            image.left = Inches(7)
        case 17:
            slide.notes_slide.notes_text_frame.text = "a note"
        case 18:
            fill = slide.background.fill
            fill.solid()
            fill.fore_color.rgb = SlideColor(0, 0, 255)
        case 19:
            image.width, image.height = made.slide_width, made.slide_height
            image.left = image.top = 0
            first = made.slides[0].shapes[3]
            first.width, first.height, first.left, first.top = made.slide_width, made.slide_height, 0, 0
        case 20:
            slide.shapes.add_textbox(0, 0, 100, 100)
        case 21:
            made.slide_width, made.slide_height = Inches(5), Inches(9)
        case 22:
            form = paragraph._p.get_or_add_pPr()
            form.append(
                form.makeelement("{http://schemas.openxmlformats.org/drawingml/2006/main}buChar", {"char": "*"})
            )
        case 23:
            made.slides[2].shapes[4].table.cell(0, 0).text_frame.paragraphs[0].runs[0].font.bold = True
        case 24:
            group = slide.shapes.add_group_shape()
            group.shapes.add_textbox(0, 0, 100, 100).text_frame.text = "inside"
        case 25:
            image.top, box.height = Inches(0.5), Inches(2)
            made.slides[2].shapes[4].top = Inches(6)
    made.save(FOLDER / f"s{number}.pptx")
    if number == 2:
        with_transition(FOLDER / f"s{number}.pptx")
    return str(FOLDER / f"s{number}.pptx")


def with_transition(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    slide = parts["ppt/slides/slide1.xml"]
    parts["ppt/slides/slide1.xml"] = slide.replace(b"</p:sld>", b"<p:transition><p:dissolve/></p:transition></p:sld>")
    master = "ppt/slideMasters/slideMaster1.xml"
    colors = b"<a:solidFill><a:srgbClr val='FF0000'/></a:solidFill><a:solidFill><a:srgbClr val='00FF00'/></a:solidFill>"
    parts[master] = parts[master].replace(b"<p:bg>", b"<p:bg><p:bgPr>" + colors + b"</p:bgPr>", 1)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


# -- spreadsheets


def of_tables() -> Iterator[Case]:
    rng = random.Random(7)
    values: list[Any] = [
        1,
        2,
        2.5,
        1.00004,
        1.0004,
        "a",
        "b ",
        "007",
        "1.5",
        "NA",
        "",
        None,
        True,
        False,
        datetime(2024, 1, 2),  # noqa: DTZ001  # as a cell has it
    ]
    paths = []
    for number in range(16):
        book = openpyxl.Workbook()
        sheet = book.active
        sheet.title = "Sheet1"
        kinds = [rng.sample(values, rng.randint(1, 4)) for _ in range(rng.randint(1, 4))]
        sheet.append([rng.choice(["x", "y", None, 3]) for _ in kinds])
        for _ in range(rng.randint(0, 4)):
            sheet.append([rng.choice(kind) for kind in kinds])
        book.save(FOLDER / f"b{number}.xlsx")
        paths.append(str(FOLDER / f"b{number}.xlsx"))
    paths += [sheet_of(number) for number in range(14)]
    rules: list[dict[str, Any]] = [
        {"type": "sheet_name"},
        {"type": "sheet_data", "sheet_idx0": 0, "sheet_idx1": "EI0"},
        {"type": "sheet_data", "sheet_idx0": "RI0", "sheet_idx1": "ENSheet1", "precision": 2},
        {"type": "sheet_data", "sheet_idx0": "RI3", "sheet_idx1": "EI0"},
        {
            "type": "sheet_fuzzy",
            "sheet_idx0": "RNSheet1",
            "sheet_idx1": "ENSheet1",
            "rules": [{"range": ["A1:B3"], "type": "exact_match"}],
        },
        {
            "type": "sheet_fuzzy",
            "sheet_idx0": "RNSheet1",
            "sheet_idx1": "ENSheet1",
            "rules": [
                {
                    "range": ["A1:A3", "B2"],
                    "type": "includes",
                    "ignore_case": True,
                    "ignore_chars": " ()",
                    "normalization": [["x", "y"]],
                },
                {
                    "range": ["B1:B3"],
                    "type": "fuzzy_match",
                    "threshold": 50,
                    "trim_leadings": "+ ",
                    "trim_trailings": " ",
                },
            ],
        },
        {
            "type": "chart",
            "sheet_idx0": 0,
            "sheet_idx1": "EI0",
            "chart_props": ["type", "title", "legend", "width", "height", "xtitle", "ytitle"],
        },
        {"type": "chart", "sheet_idx0": 0, "sheet_idx1": "EI0", "chart_props": []},
        {"type": "style", "sheet_idx0": 0, "sheet_idx1": "EI0", "props": ["bgcolor", "font_bold", "number_format"]},
        {
            "type": "style",
            "sheet_idx0": 0,
            "sheet_idx1": "EI0",
            "props": ["font_name", "font_size", "fill_type", "merge", "hyperlink"],
        },
        {"type": "freeze", "sheet_idx0": 0, "sheet_idx1": "EI0"},
        {"type": "zoom", "sheet_idx": 0, "method": "lt", "ref": 100},
        {"type": "row_props", "sheet_idx0": 0, "sheet_idx1": "EI0", "props": ["hidden", "height"]},
        {"type": "col_props", "sheet_idx0": 0, "sheet_idx1": "EI0", "props": ["hidden", "width"]},
        {
            "type": "data_validation",
            "sheet_idx": 0,
            "dv_props": [
                {
                    "ranges": {"method": "spreadsheet_range", "ref": ["D2:D4", "D2:D9"]},
                    "type": {"method": "eq", "ref": "list"},
                }
            ],
        },
        {
            "type": "data_validation",
            "sheet_idx": 0,
            "dv_props": [{"formula1": {"method": "str_set_eq", "ref": ["Fail", "Pass"]}}],
        },
        *(
            {"type": "check_cell", "sheet_idx": 0, "coordinate": "B2", "props": {name: rule}}
            for name, rule in (
                ("value", {"method": "eq", "ref": 2.0}),
                ("value", {"method": "approx:0.5", "ref": 2}),
                ("bgcolor", {"method": "eq", "ref": "FFFFFF00"}),
                ("font_bold", {"method": "eq", "ref": True}),
            )
        ),
        {"type": "pivot_table", "sheet_idx0": 0, "sheet_idx1": "EI0", "pivot_props": ["col_fields", "filter"]},
        {"type": "sheet_print", "sheet_idx0": "RNSheet1", "sheet_idx1": "ENSheet1"},
        {"type": "sheet_print", "sheet_idx0": "RNSheet1", "sheet_idx1": "ENSheet1", "ignore_case": True},
    ]
    for number, path in enumerate(paths[:-4:3]):
        file(f"{Path(path).stem}-Sheet1.csv", ["a,b\n1,2\n\n", "A,b\n1,2\n", "a,b \n1,2\n , \n"][number % 3])
    for number, (one, other) in enumerate(some(paths)):
        for place, rule in enumerate(rules):
            if place != 1 and paths.index(one) < 16 and (number + place) % 6:
                continue
            yield "compare_table", one, other, {"rules": [rule]}
    yield "compare_table", paths[-1], None, {"rules": [{"type": "zoom", "sheet_idx": 0, "method": "lt", "ref": 100}]}


def sheet_of(number: int) -> str:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Sheet1"
    for row in (["a", "b", "c"], ["x", 2, 3], ["y", 4, 5], ["z", 6, 7]):
        sheet.append(row)
    match number:
        case 1:
            sheet.freeze_panes = "B2"
        case 2:
            sheet.sheet_view.zoomScale = 80
        case 3:
            sheet["B2"].fill = PatternFill("solid", fgColor="FFFFFF00")
        case 4:
            sheet["B2"].font = Font(bold=True, name="Arial", size=14)
        case 5:
            sheet["B2"].number_format = "0.00"
            sheet.row_dimensions[2].height = 40
        case 6:
            sheet.column_dimensions["B"].hidden = True
            sheet.merge_cells("A3:B3")
        case 7 | 8:
            chart = BarChart() if number == 7 else LineChart()
            chart.title, chart.x_axis.title = "Prices", "fruit"
            chart.add_data(Reference(sheet, min_col=2, min_row=1, max_row=4), titles_from_data=True)
            chart.set_categories(Reference(sheet, min_col=1, min_row=2, max_row=4))
            sheet.add_chart(chart, "E2")
        case 9:
            rule = DataValidation(type="list", formula1='"Pass,Fail"')
            rule.add("D2:D4")
            sheet.add_data_validation(rule)
        case 10:
            fill = PatternFill(bgColor="FFFF0000")
            sheet.conditional_formatting.add("B2:B4", CellIsRule(operator="greaterThan", formula=["3"], fill=fill))
        case 11:
            book.create_sheet("Other")
        case 12:
            sheet["D1"], sheet["D2"] = "=1/0", "#DIV/0!"
        case 13:
            sheet["A1"].hyperlink = "https://x/"
            sheet.sheet_view.zoomScale = 120
    book.save(FOLDER / f"x{number}.xlsx")
    return str(FOLDER / f"x{number}.xlsx")


# -- pictures and PDF


def picture(name: str, number: int) -> str:
    rng = np.random.default_rng(3)
    pixels = np.kron(rng.integers(0, 255, (12, 16, 3)), np.ones((5, 5, 1))).astype(np.uint8)
    image = Image.fromarray(pixels)
    match number:
        case 1:
            image = ImageEnhance.Brightness(image).enhance(0.6)
        case 2:
            image = ImageEnhance.Color(image).enhance(1.6)
        case 3:
            image = ImageEnhance.Contrast(image).enhance(1.5)
        case 4:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        case 5:
            image = image.quantize(16)
        case 6:
            image = image.resize((120, 90))
        case 7 | 8 | 9:
            image = Image.new("RGB", (60, 60), "white")
            at = 28 if number == 7 else 1
            ImageDraw.Draw(image).rectangle((at, 28, at + 4, 32), "black" if number == 9 else "yellow")
        case 10 | 11:
            image = Image.new("RGB", (60, 60), (0, 200, 0) if number == 10 else (200, 0, 0))
        case 12:
            image = image.convert("RGBA")
            image.putalpha(Image.new("L", image.size, 0))
            image.paste(Image.new("RGBA", (20, 30), (9, 9, 200, 255)), (3, 4))
    path = FOLDER / f"{name}-{number}.png"
    image.save(path)
    return str(path)


def of_pictures() -> Iterator[Case]:
    paths = [picture("p", number) for number in range(13)]
    for one, other in some(paths):
        for name in (
            *("compare_images", "compare_image_list", "check_brightness_decrease_and_structure_sim"),
            *("check_saturation_increase_and_structure_sim", "check_contrast_increase_and_structure_sim"),
            *("check_structure_sim", "check_structure_sim_resized", "check_palette_and_structure_sim"),
            *("check_image_mirror", "check_file_exists_and_structure_sim"),
        ):
            yield name, one, other, {}
        yield "compare_images", one, other, {"reference_base_result": 0.11}
        if "p-7" in other or "p-1" in other:
            yield "check_green_background", one, other, {}
    for path in paths:
        yield "check_triangle_position", path, None, {}
        yield "check_textbox_on_leftside", path, None, {}
        for rules in ({"height": 60}, {"height": 30, "ignore_transparent": True}, {"width": 80, "height": 60}):
            yield "check_image_size", path, rules, {}
        yield "check_image_file_size", path, {"max_size": 300}, {}
    pdfs = []
    for number, texts in enumerate((["one two"], ["one too"], ["one two", "three"], [])):
        made = fitz.open()
        for text in texts or [""]:
            made.new_page().insert_text((72, 72), text)
        made.save(FOLDER / f"{number}.pdf")
        pdfs.append(str(FOLDER / f"{number}.pdf"))
    pdfs.append(file("broken.pdf", "no pdf"))
    for one, other in pairs(pdfs):
        yield "compare_pdfs", one, other, {}
    yield "compare_pdfs", pdfs[:2], pdfs[1:3], {}
    for path, relation in itertools.product(pdfs[:4], ("lt", "eq", "ge")):
        yield "check_pdf_pages", path, {"relation": relation, "ref_value": 2}, {}


SECTIONS = {
    "texts": of_texts,
    "documents": of_documents,
    "slides": of_slides,
    "tables": of_tables,
    "pictures": of_pictures,
}


def main() -> None:
    out, sys.stdout = sys.stdout, io.StringIO()  # OSWorld's functions print and log what they compare
    logging.disable(logging.CRITICAL)
    their, our = theirs(), ours()
    cases = list(SECTIONS[sys.argv[4]]())
    random.Random(0).shuffle(cases)  # so that the first ones are of all functions
    for func, result, expected, options in cases:
        scores = []
        for call in (
            lambda f=func, r=result, e=expected, o=options: getattr(their, f)(*([r] if e is None else [r, e]), **o),
            lambda f=func, r=result, e=expected, o=options: our[f](r, e, o),
        ):
            try:
                scores.append(min(1.0, max(0.0, float(call()))))
            except Exception as error:
                print(f"{func}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                scores.append(0.0)
        shown = [Path(v).name if isinstance(v, str) and v.startswith("/") else v for v in (result, expected)]
        print(json.dumps([func, json.dumps([*shown, options], default=str)[:400], *scores]), file=out, flush=True)


main()
