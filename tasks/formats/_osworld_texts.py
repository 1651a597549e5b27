"""Comparisons of OSWorld's checkers for texts, tables of text, settings of programs and profiles of browsers.

Standard library only: it is mounted beside the checker, as ``osworld_texts.py``. Each takes what was got (a path, a
text or a list; None if it is missing), what was expected (the rules of the task, or a path) and the options of the
task, and returns the score in [0, 1]. An exception is a score of 0.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import operator
import os
import re
import shutil
import sqlite3
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

__all__ = ["METRICS", "fits_rule", "ratio", "setting", "slide_background"]

Options = Mapping[str, Any]


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def ratio(one: str, other: str) -> float:
    """The similarity of two texts in [0, 1]: twice the length of the longest common subsequence, over both lengths."""
    if not one and not other:
        return 1.0
    masks: dict[str, int] = {}
    for place, sign in enumerate(one):
        masks[sign] = masks.get(sign, 0) | 1 << place
    full = state = (1 << len(one)) - 1
    for sign in other:  # one bit for each sign of `one`: Hyyro's bit-parallel algorithm
        kept = state & masks.get(sign, 0)
        state = ((state + kept) | (state - kept)) & full
    common = len(one) - state.bit_count()
    return 2 * common / (len(one) + len(other))


def fits_rule(value: Any, rule: Mapping[str, Any]) -> bool:
    """Whether ``value`` fits ``{"method", "ref"}``: ``eq`` and the other operators, ``re`` with flags, ``approx:0.1``,
    ``range.te`` (which ends are in), ``str_list_eq`` and ``str_set_eq``."""
    method, ref = rule["method"], rule["ref"]
    if method in ("eq", "ne", "le", "lt", "ge", "gt"):
        return bool(getattr(operator, method)(value, ref))
    if method.startswith("re"):
        flags = re.RegexFlag(0)
        for name in method.split(".")[1:]:
            flags |= getattr(re, name)
        return re.search(ref, value, flags) is not None
    if method.startswith("approx"):
        try:
            return abs(float(value) - ref) <= float(method.partition(":")[2])
        except (TypeError, ValueError):
            return False
    if method.startswith("range."):
        low, high = (getattr(operator, "l" + end) for end in method[6:8])
        return low(ref[0], value) and high(value, ref[1])
    if method in ("str_list_eq", "str_set_eq"):
        kind = list if method == "str_list_eq" else set
        return kind(value.strip("\"'").split(",")) == kind(ref)
    raise ValueError(method)


def _has(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(key in row and row[key] == value for key, value in wanted.items())


def _expected(rows: Iterable[Mapping[str, Any]], rules: Options) -> float:
    """Whether each of ``expect`` is one of the rows, and none of ``unexpect``."""
    rows = list(rows)
    wanted = all(any(_has(row, one) for row in rows) for one in rules.get("expect", []))
    return float(wanted and not any(_has(row, one) for row in rows for one in rules.get("unexpect", [])))


# -- texts


def match_in_list(got: Any, rules: Any, options: Options) -> float:
    return float(got in rules["expected"])


def compare_text_file(got: Any, expected: Any, options: Options) -> float:
    texts = [_read(got), _read(expected)]
    if options.get("ignore_blanks"):
        texts = [re.sub(r"\s+", " ", re.sub(r"[\t\n]", " ", text).strip()) for text in texts]
    if options.get("ignore_case"):
        texts = [text.lower() for text in texts]
    return float(texts[0] == texts[1])


def literal_match(got: Any, expected: Any, options: Options) -> float:
    fold = str.lower if options.get("ignore_case") else str
    if options.get("type", "str") == "str":
        return float(fold(str(got)) == fold(str(expected)))
    if not all(isinstance(value, list | tuple) for value in (got, expected)):
        return 0.0
    return float([fold(str(value)) for value in got] == [fold(str(value)) for value in expected])


def diff_text_file(got: Any, expected: Any, options: Options) -> float:
    lines = [_read(path).splitlines() for path in (got, expected)]
    return difflib.SequenceMatcher(a=lines[0], b=lines[1]).ratio()


def compare_config(got: Any, rules: Any, options: Options) -> float:
    return float(_read(got) == rules["expected"])


def compare_python_pure_text(got: Any, expected: Any, options: Options) -> float:
    """The same lines that are not empty, without a first line for the system or the encoding, up to trailing blanks."""

    def lines(path: str) -> list[str]:
        found = _read(path).splitlines()
        for _ in range(3):
            if found and found[0].strip().startswith(("#!", "# -*- coding:", "# coding:", "# coding=")):
                del found[0]
        return [line.expandtabs(4).rstrip() for line in found if line.strip()]

    return float(lines(got) == lines(expected))


def file_contains(got: Any, rules: Any, options: Options) -> float:
    text = _read(got)
    return float(all(part in text for part in rules["expected"]))


def check_line_number(got: Any, rules: Any, options: Options) -> float:
    times = sum(bool(re.search(r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d", line)) for line in _read(got).splitlines())
    return float(times == int(rules["expected"]))


def is_extension_installed(got: Any, rules: Any, options: Options) -> float:
    return float((rules["expected"] in got) == {"contain": True, "not_contain": False}[rules["type"]])


def is_in_vm_clickboard(got: Any, rules: Any, options: Options) -> float:
    wanted = rules["expected"] if isinstance(rules["expected"], list) else [rules["expected"]]
    return float(all(part in got for part in wanted))


def slide_background(path: str, number: int) -> str | None:
    """The picture that a slide (from 0) has as its background, unpacked beside the file; None if it has none."""
    drawing = "{http://schemas.openxmlformats.org/drawingml/2006/main}blip"
    office = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}embed"
    with zipfile.ZipFile(path) as archive:
        slide = f"ppt/slides/slide{number + 1}.xml"
        fills = ElementTree.fromstring(archive.read(slide)).iter(
            "{http://schemas.openxmlformats.org/presentationml/2006/main}bgPr"
        )
        wanted = next((blip.get(office) for fill in fills for blip in fill.iter(drawing)), None)
        if wanted is None:
            return None
        for one in ElementTree.fromstring(archive.read(f"ppt/slides/_rels/slide{number + 1}.xml.rels")):
            if one.get("Id") == wanted and "image" in one.get("Type", ""):
                name = os.path.normpath(os.path.join("ppt/slides", one.get("Target", "")))
                target = f"{path}.background"
                with open(target, "wb") as file:
                    file.write(archive.read(name))
                return target
    return None


# -- tables and objects


def compare_csv(got: Any, expected: Any, options: Options) -> float:
    """The lines of one of the expected files, up to blanks without ``strict`` and capitals with ``ignore_case``."""

    def lines(path: str) -> list[str]:
        for encoding in ("utf-8", "utf-8-sig", "latin-1"):
            try:
                with open(path, encoding=encoding) as file:
                    found = file.read().splitlines()
                break
            except UnicodeError:
                continue
        else:
            return []
        if not options.get("strict", True):
            found = [line.strip() for line in found]
        return [line.lower() for line in found] if options.get("ignore_case") else found

    return float(lines(got) in [lines(path) for path in ([expected] if isinstance(expected, str) else expected)])


def check_csv(got: Any, rules: Any, options: Options) -> float:
    with open(got, encoding="utf-8", newline=None) as file:
        return _expected(csv.DictReader(file), rules)


def check_json(got: Any, rules: Any, options: Options) -> float:
    body = json.loads(_read(got))

    def at(keys: list[Any]) -> Any:
        value = body
        for key in keys:
            value = value[key]
        return value

    for rule in rules.get("expect", []):
        if not fits_rule(at(rule["key"]), rule):
            return 0.0
    for rule in rules.get("unexpect", []):
        try:
            value = at(rule["key"])
        except KeyError:
            value = None
        if fits_rule(value, rule):
            return 0.0
    return 1.0


def check_json_settings(got: Any, rules: Any, options: Options) -> float:
    body = json.loads(_read(got))
    return float(all(key in body and body[key] == value for key, value in rules["expected"].items()))


def check_json_keybindings(got: Any, rules: Any, options: Options) -> float:
    """The binding is in the list, which may begin with a line of comment."""
    text = _read(got)
    for body in (text, text.partition("\n")[2]):
        try:
            found = json.loads(body)
        except ValueError:
            continue
        if isinstance(found, list):
            return float(rules["expected"] in found)
    return 0.0


def check_direct_json_object(got: Any, rules: Any, options: Options) -> float:
    body = json.loads(got.strip().replace("'", '"')) if isinstance(got, str) else got
    expected = rules["expected"]
    if not rules.get("expect_in_result"):
        return float(all(body.get(key) == value for key, value in expected.items()))
    for key, value in expected.items():
        if isinstance(value, list):
            found = isinstance(body.get(key), list) and any(one in body[key] for one in value)
        else:
            found = isinstance(value, str) and value in body.get(key)
        if not found:
            return 0.0
    return 1.0


def run_sqlite3(got: Any, rules: Any, options: Options) -> float:
    with closing(sqlite3.connect(f"file:{got}?mode=ro", uri=True)) as base:
        return float(base.execute(rules["sql"]).fetchone()[0] or 0)


def compare_archive(got: Any, expected: Any, options: Options) -> float:
    """The same names at ``file_path``, and the mean of the comparison of the files, chosen by ``file_type``."""
    folders = []
    for place, archive in (("got", got), ("expected", expected)):
        folder = f"{archive}.{place}"
        if ".tar" in archive:
            shutil.unpack_archive(archive, folder, filter="data")
        else:
            shutil.unpack_archive(archive, folder)
        folders.append(os.path.join(folder, options.get("file_path", "")))
    names = [sorted(os.listdir(folder)) for folder in folders]
    if names[0] != names[1]:
        return 0.0
    kinds = {
        **{"text": "compare_text_file", "csv": "compare_csv", "pdf": "compare_pdfs", "docx": "compare_docx_files"},
        **{"ppt": "compare_pptx_files", "table": "compare_table", "image": "compare_images"},
    }
    compare: Any = METRICS[kinds[options.get("file_type", "text")]]
    rest = {key: value for key, value in options.items() if key not in ("file_path", "file_type")}
    return sum(compare(*(os.path.join(f, name) for f in folders), rest) for name in names[0]) / len(names[0])


def compare_zip_files(got: Any, expected: Any, options: Options) -> float:
    with zipfile.ZipFile(got) as one, zipfile.ZipFile(expected) as other:
        if set(one.namelist()) != set(other.namelist()):
            return 0.0
        return float(all(one.read(name) == other.read(name) for name in one.namelist()))


def check_image_file_size(got: Any, rules: Any, options: Options) -> float:
    return float(os.path.getsize(got) < rules["max_size"])


# -- settings of programs


def check_config_status(got: Any, rules: Any, options: Options) -> float:
    """GIMP's settings, one ``(key ... value)`` in a line, have the value."""
    wanted = rules["key"] if isinstance(rules["key"], list) else [rules["key"]]
    for line in _read(got).splitlines():
        words = line.strip().lstrip("(").rstrip(")\n").split()
        if words and not line.startswith("#") and words[: len(wanted)] == wanted and words[-1] == rules["value"]:
            return 1.0
    return 0.0


def setting(path: str, key: str, default: str, *, inside: bool = False) -> str:
    """The last value of ``key`` in VLC's settings. ``inside``: of lines that contain it."""
    value = default
    for line in _read(path).splitlines():
        if (key in line) if inside else (f"{key}=" in line):
            value = line.split("=")[-1].strip()
    return value


def _vlc(key: str, default: str, name: str) -> Callable[[Any, Any, Options], float]:
    def check(got: Any, rules: Any, options: Options) -> float:
        return float(setting(got, key, default) == str(rules[name]))

    return check


def is_vlc_recordings_folder(got: Any, rules: Any, options: Options) -> float:
    lines = (line for line in _read(got).splitlines() if "input-record-path" in line and not line.startswith("#"))
    return float(next(lines, "").split("=")[-1].strip() == rules["recording_file_path"])


def check_qt_slider_colours(got: Any, rules: Any, options: Options) -> float:
    default = "153;210;153;20;210;20;255;199;15;245;39;29"
    value = setting(got, "qt-slider-colours", default, inside=True)
    if rules["type"] == "match":
        return float(value == rules["expected_qt_slider_colours"])
    numbers = [int(number) for number in value.split(";")]
    return float(all(number < 100 for number in numbers[: len(numbers) // 3 * 3]))


def check_global_key_play_pause(got: Any, rules: Any, options: Options) -> float:
    """Whether a key is bound to play and pause from everywhere."""
    bound = setting(got, "global-key-play-pause", "") != ""
    return float(str(int(bound)) == str(rules["expected_global_key_play_pause"]))


_PREF = re.compile(r'user_pref\("((?:[^"]|\\")+)", (.+)\);')


def check_thunderbird_prefs(got: Any, rules: Any, options: Options) -> float:
    expect, unexpect = rules.get("expect", {}), rules.get("unexpect", {})
    right = dict.fromkeys(expect, False)
    for line in _read(got).splitlines():
        if match := _PREF.fullmatch(line.strip()):
            key, value = match[1], json.loads(match[2])
            if key in expect:
                right[key] = fits_rule(value, expect[key])
            elif key in unexpect and fits_rule(value, unexpect[key]):
                return 0.0
    return float(all(right.values()))


_CONDITION = re.compile(r"""\b(?:AND|OR) \((?:[\w ]+),(?:[\w ']+),(?:"(?:(?:[^"]|\")+)"|(?:[^)]+))\)|\bALL\b""")


def check_thunderbird_filter(got: Any, rules: Any, options: Options) -> float:
    filters: list[dict[str, Any]] = []
    current: dict[str, Any] = {}
    with open(got, encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition("=")
            value = value[1:-2].replace('\\"', '"').replace("\\\\", "\\")
            if key == "name":
                current = {}
            if key in ("name", "enabled", "type", "action", "actionValue"):
                current[key] = value
            elif key == "condition":
                filters.append({**current, "condition": _CONDITION.findall(value)})
    return _expected(filters, rules)


# -- profiles of a browser


def is_expected_bookmarks(got: Any, rules: Any, options: Options) -> float:
    bar = got["bookmark_bar"]["children"]
    match rules["type"]:
        case "bookmark_bar_folders_names":
            return float({one["name"] for one in bar if one["type"] == "folder"} == set(rules["names"]))
        case "bookmark_bar_websites_urls":
            return float({one["url"] for one in bar if one["type"] == "url"} == set(rules["urls"]))
        case "liked_authors_websites_urls":
            named = [one for one in bar if one["type"] == "folder" and one["name"] == "Liked Authors"]
            found = {one["url"] for one in named[0]["children"] if one["type"] == "url"} if named else set()
            choices = [[one] if isinstance(one, str) else one for one in rules["urls"]]
            return float(bool(named) and any(set(chosen) == found for chosen in itertools.product(*choices)))
    raise ValueError(rules["type"])


def check_enabled_experiments(got: Any, rules: Any, options: Options) -> float:
    return float([name.split("@")[0] for name in got] == rules["names"])


def check_font_size(got: Any, rules: Any, options: Options) -> float:
    size = got["default_font_size"]
    return float(size == rules["value"] if rules["type"] == "value" else rules["min"] < size < rules["max"])


METRICS: dict[str, Callable[[Any, Any, Options], float]] = {
    metric.__name__: metric
    for metric in (
        *(match_in_list, compare_text_file, literal_match, diff_text_file, compare_config, compare_python_pure_text),
        *(file_contains, check_line_number, is_extension_installed, is_in_vm_clickboard, compare_csv, check_csv),
        *(check_json, check_json_settings, check_json_keybindings, check_direct_json_object, run_sqlite3),
        *(compare_archive, compare_zip_files, check_image_file_size, check_config_status, is_vlc_recordings_folder),
        *(check_qt_slider_colours, check_global_key_play_pause, check_thunderbird_prefs, check_thunderbird_filter),
        *(is_expected_bookmarks, check_enabled_experiments, check_font_size),
    )
}
METRICS |= {
    "check_qt_bgcone": _vlc("qt-bgcone", "1", "expected_qt_bgcone"),
    "check_qt_max_volume": _vlc("qt-max-volume", "125", "expected_qt_max_volume"),
    "check_qt_minimal_view": _vlc("qt-minimal-view", "0", "expected_qt_minimal_view"),
    "check_one_instance_when_started_from_file": _vlc(
        "one-instance-when-started-from-file", "1", "expected_one_instance_when_started_from_file"
    ),
}
"""Name -> comparison. Other modules beside the checker add theirs."""
