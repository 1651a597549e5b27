"""The ``evaluator`` of an OSWorld task as a checker: what it looks at, what it expects, and how it compares.

The comparisons of :mod:`~clawgym.tasks.formats._osworld_checks` take texts. A task that needs no other keeps the
checker, and so the hash, that it had. For the others the checker puts every file into one folder, under the name that
the task gives it, as OSWorld does.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from clawgym.errors import ClawGymError, TaskError
from clawgym.records import Layer, TaskFile, VerifierSpec
from clawgym.tasks import layers
from clawgym.tasks.formats._files import read_text
from clawgym.tasks.formats._osworld_checks import METRICS, OPTIONS
from clawgym.tasks.formats._osworld_programs import reason
from clawgym.tasks.formats._osworld_setup import Setup, check_reading, command_text, text_field
from clawgym.tasks.mathematics import checker

__all__ = ["OFFICE_FOLDER", "Evaluator", "CheckPlan", "ConfigStep", "Strict", "office_layer", "plan"]

OFFICE_FOLDER = "/opt/layers/office"
"""The folder in a sandbox with openpyxl, python-docx, python-pptx and mutagen."""
_LONGEST = 1 << 20
_PYTHON = Path("/usr/lib/python3/dist-packages")
_PACKAGES = {"lxml": "python3-lxml", "PIL": "python3-pil", "numpy": "python3-numpy", "fitz": "python3-fitz"}
"""Module -> the Debian package that has it."""

_TEXTS = {
    *("match_in_list", "diff_text_file", "compare_config", "compare_python_pure_text", "file_contains"),
    *("check_line_number", "is_extension_installed", "is_in_vm_clickboard", "compare_csv", "check_csv", "check_json"),
    *("check_json_settings", "check_json_keybindings", "check_direct_json_object", "run_sqlite3", "compare_archive"),
    *("compare_zip_files", "check_image_file_size", "check_config_status", "is_vlc_recordings_folder"),
    *("check_qt_slider_colours", "check_global_key_play_pause", "check_thunderbird_prefs", "check_thunderbird_filter"),
    *("is_expected_bookmarks", "check_enabled_experiments", "check_font_size", "check_qt_bgcone"),
    *("check_qt_max_volume", "check_qt_minimal_view", "check_one_instance_when_started_from_file"),
}
_OFFICE = {
    *("compare_docx_files", "compare_docx_files_and_ignore_new_lines", "compare_docx_tables", "compare_docx_images"),
    *("compare_line_spacing", "compare_subscript_contains", "compare_font_names", "has_page_numbers_in_footers"),
    *("is_first_line_centered", "contains_page_break", "check_tabstops", "evaluate_strike_through_last_paragraph"),
    *("check_italic_font_size_14", "check_highlighted_words", "compare_references", "fuzzy_place_math"),
    *("compare_unique_train_records", "find_default_font", "check_auto_saving_time"),
    *("check_presenter_console_disable", "compare_pptx_files", "check_image_stretch_and_center"),
    *("check_slide_orientation_Portrait", "check_transition", "evaluate_presentation_fill_to_rgb_distance"),
    *("check_page_number_colors", "compare_table", "check_mp3_meta", "compare_epub"),
    "evaluate_colored_words_in_tables",
}
_IMAGES = {
    *("compare_images", "compare_image_list", "check_brightness_decrease_and_structure_sim", "check_structure_sim"),
    *("check_saturation_increase_and_structure_sim", "check_contrast_increase_and_structure_sim"),
    *("check_structure_sim_resized", "check_palette_and_structure_sim", "check_image_mirror"),
    *("check_triangle_position", "check_textbox_on_leftside", "check_green_background", "check_image_size"),
    "check_file_exists_and_structure_sim",
}
_PDF = {"compare_pdfs", "check_pdf_pages"}
_ALONE = {
    *("check_triangle_position", "check_textbox_on_leftside", "has_page_numbers_in_footers", "is_first_line_centered"),
    *("check_presenter_console_disable", "check_slide_orientation_Portrait"),
}
"""Comparisons that expect nothing."""
# What only OSWorld's machine knows, or only pages of the web.
_PLATFORM = {
    *("accessibility_tree", "vm_terminal_output", "vm_wallpaper", "vm_screen_size", "vm_window_size"),
    *("default_video_player", "vlc_playing_info", "vscode_config"),
}
_GNOME = {"is_utc_0", "check_gnome_favorite_apps", "check_text_enlarged"}
_NETWORK = {
    *("active_tab_html_parse", "active_tab_info", "active_tab_url_parse", "active_url_from_accessTree"),
    *("open_tabs_info", "url_dashPart", "url_path_parse", "page_info", "googledrive_file", "pdf_from_url"),
    *("info_from_website", "gotoRecreationPage_and_get_html_content", "rule_relativeTime", "time_diff_range"),
    *("cookie_data", "shortcuts_on_desktop", "find_installed_extension_name"),
}
_PROFILE = ".config/google-chrome"
_PREFERENCES = {
    # getter -> file of the profile, and how its value is read from the parsed file (see `got` in the checker)
    "bookmarks": ("Default/Bookmarks", "roots"),
    "default_search_engine": ("Default/Preferences", "search"),
    "profile_name": ("Default/Preferences", "profile"),
    "enabled_experiments": ("Local State", "experiments"),
    "chrome_font_size": ("Default/Preferences", "fonts"),
    "data_delete_automacally": ("Default/Preferences", "deletes"),
    "new_startup_page": ("Default/Preferences", "startup"),
    "enable_do_not_track": ("Default/Preferences", "track"),
    "enable_enhanced_safety_browsing": ("Default/Preferences", "enhanced"),
    "enable_safe_browsing": ("Default/Preferences", "safe"),
    "find_unpacked_extension_path": ("Default/Preferences", "extensions"),
}

_BODY = """
import osworld_checks as ow

def got(source):
    path = checks.workspace / source["path"]
    if source["kind"] == "folder":
        return [entry.name for entry in path.iterdir() if entry.name != ".gitkeep"]
    if source["kind"] == "file":
        return cg.read_text(path)
    return cg.run_program(["bash", "-c", source["command"]], cwd=checks.workspace, timeout=10).out

def holds(test):
    try:
        return ow.METRICS[test["func"]](got(test["result"]), test["expected"], test["options"])
    except (cg.Failed, OSError, TypeError, KeyError, AttributeError):
        return False

@checks("right")
def _():
    if DATA["infeasible"] or ow.last_word() == "fail":
        return DATA["infeasible"] and ow.last_word() == "fail"
    found = [holds(test) for test in DATA["tests"]]
    return bool(found) and (any(found) if DATA["conj"] == "or" else all(found))
"""

_LARGER_BODY = """
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [DATA["library"], "/usr/lib/python3/dist-packages"]
import osworld_checks as ow
import osworld_texts as ot
{modules}
HERE = Path(__file__).parent
CACHE = Path(tempfile.mkdtemp())
PREFERENCES = {{
    "roots": lambda d: d.get("roots", {{}}),
    "search": lambda d: d.get("default_search_provider_data", {{}})
    .get("template_url_data", {{}}).get("short_name", "Google"),
    "profile": lambda d: d.get("profile", {{}}).get("name"),
    "experiments": lambda d: d.get("browser", {{}}).get("enabled_labs_experiments", []),
    "fonts": lambda d: d.get("webkit", {{}}).get("webprefs", {{"default_font_size": 16}}),
    "deletes": lambda d: "true" if "default_content_setting_values" in d["profile"] else "false",
    "startup": lambda d: "true" if d.get("session", {{}}).get("restore_on_startup", 5) == 5 else "false",
    "track": lambda d: "true" if d.get("enable_do_not_track") else "false",
    "enhanced": lambda d: "true" if d.get("safebrowsing", {{}}).get("enhanced") else "false",
    "safe": lambda d: "true"
    if any(d.get("safebrowsing", {{}}).get(key) for key in ("enhanced", "enabled")) else "false",
    "extensions": lambda d: [one["path"] for one in d["extensions"]["settings"].values() if "path" in one],
}}

for place, name in DATA["late"].items():
    target = checks.workspace / place
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copyfile(HERE / name, target)

def cached(path, name):
    target = CACHE / name
    target.parent.mkdir(parents=True, exist_ok=True)
    data = cg.read_bytes(path, 256 << 20)
    target.unlink(missing_ok=True)
    target.write_bytes(data)
    return str(target)

def got(source, text):
    kind = source["kind"]
    if kind in ("file", "gold"):
        paths = []
        for number, (path, name) in enumerate(source["paths"]):
            try:
                path = cached((HERE if kind == "gold" else checks.workspace) / path, name)
            except cg.Failed:
                path = None
            paths += [path] if number in source["gives"] else []
        if text:
            return cg.read_text(paths[0])
        return paths[0] if len(paths) == 1 else paths
    if kind == "folder":
        return [entry.name for entry in (checks.workspace / source["path"]).iterdir() if entry.name != ".gitkeep"]
    if kind == "background":
        return ot.slide_background(cached(checks.workspace / source["path"], "slides.pptx"), int(source["slide"]))
    if kind == "profile":
        return PREFERENCES[source["read"]](json.loads(cg.read_bytes(checks.workspace / source["path"], 32 << 20)))
    if kind == "rule":
        return source["rules"]
    if kind == "nothing":
        return None
    done = cg.run_program(["bash", "-c", source["command"]], cwd=checks.workspace, timeout=30)
    if source["name"]:
        target = CACHE / source["name"]
        target.write_text(done.out)
        return cg.read_text(target) if text else str(target)
    return done.out

def score(test):
    old = test["func"] in ow.METRICS and test["func"] not in ot.METRICS
    try:
        result = got(test["result"], old)
        if result is None or (isinstance(result, list) and None in result):
            return 0.0
        compare = ow.METRICS[test["func"]] if old else ot.METRICS[test["func"]]
        return float(compare(result, got(test["expected"], False), test["options"]))
    except Exception as error:
        print(f"{{test['func']}}: {{type(error).__name__}}: {{str(error)[:200]!a}}", file=sys.stderr)
        return 0.0

@checks("right")
def _():
    if ow.last_word() == "fail":
        return 0.0
    found = [score(test) for test in DATA["tests"]]
    if DATA["conj"] == "or":
        return max(found)
    return 0.0 if 0.0 in found else sum(found) / len(found)
"""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ConfigStep(Strict):
    type: str
    parameters: dict[str, Any] = {}


def _many(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Many = Annotated[list[Any], BeforeValidator(_many)]


class Evaluator(Strict):
    func: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_many), Field(min_length=1)]
    result: Many = [None]
    expected: Many = [None]
    options: Many = [None]
    conj: Literal["and", "or"] = "and"
    postconfig: list[ConfigStep] = []


@dataclass
class CheckPlan:
    """What the checker of a task needs."""

    infeasible: bool = False
    conj: str = "and"
    tests: list[dict[str, Any]] = field(default_factory=list)
    late: dict[str, Path] = field(default_factory=dict)
    golds: list[Path] = field(default_factory=list)
    """Local files that the checker compares with, in the order in which it names them."""
    profile: bool = False
    """Whether it looks at the settings of the browser."""

    @property
    def _funcs(self) -> set[str]:
        kinds = {"pdf": "compare_pdfs", "docx": "compare_docx_files", "ppt": "compare_pptx_files"}
        kinds |= {"image": "compare_images", "table": "compare_table"}
        inner = {kinds.get(test["options"].get("file_type", "")) for test in self.tests}
        return {test["func"] for test in self.tests} | {name for name in inner if name}

    @property
    def _larger(self) -> bool:
        return any(test.get("larger") for test in self.tests) or bool(self.late)

    @property
    def packages(self) -> tuple[str, ...]:
        """The Debian packages that the checker imports."""
        needs: set[str] = set()
        funcs = self._funcs
        needs |= {"lxml", "PIL"} if funcs & _OFFICE else set()
        needs |= {"PIL", "numpy"} if funcs & (_IMAGES | _PDF) else set()
        needs |= {"fitz"} if funcs & _PDF else set()
        return tuple(sorted(_PACKAGES[name] for name in needs))

    def check(self) -> None:
        """Raise :class:`NotSupported` if a package of the checker is not on this machine."""
        for module, package in _PACKAGES.items():
            if package in self.packages and not (_PYTHON / module).exists():
                raise reason("image not here", f"its checker needs {package}: install it")
        if self._layered and (missing := office_layer()[1]):
            raise reason("image not here", missing)

    @property
    def _layered(self) -> bool:
        return bool(self._funcs & _OFFICE)

    def layers(self) -> dict[str, Layer]:
        """The layer of the checker, if it needs it."""
        return {OFFICE_FOLDER: office_layer()[0]} if self._layered else {}

    def verifier(self) -> VerifierSpec:
        """The checker with its files."""
        data: dict[str, Any] = {"infeasible": self.infeasible, "conj": self.conj, "tests": self.tests}
        here = Path(__file__)
        modules = ["checks"]
        body, files = _BODY, []
        if self._larger:
            modules.append("texts")
            modules += ["office"] if self._funcs & _OFFICE else []
            modules += ["images"] if self._funcs & (_IMAGES | _PDF) else []
            imports = "".join(f"import osworld_{name}\n" for name in modules[2:])
            body = _LARGER_BODY.format(modules=imports)
            late = {place: f"late/{number}" for number, place in enumerate(self.late)}
            data |= {"library": OFFICE_FOLDER, "late": late}
            files = [TaskFile(late[place], path) for place, path in self.late.items()]
            files += [TaskFile(f"gold/{number}", path) for number, path in enumerate(self.golds)]
        spec = checker("a task of OSWorld", data, body)
        beside = [TaskFile(f"osworld_{name}.py", here.with_name(f"_osworld_{name}.py")) for name in modules]
        return dataclasses.replace(spec, files=(*spec.files, *beside, *files), mutable_inputs=("*",))


@cache
def office_layer() -> tuple[Layer, str | None]:
    """The layer at :data:`OFFICE_FOLDER`, which is prepared at first use; and the reason if it cannot be prepared."""
    lock = layers.read_lock(resources.files("clawgym.tasks").joinpath("office_lock.json").read_text("utf-8"))
    try:
        return layers.prepare(lock), None
    except ClawGymError as error:
        return Layer(lock.name, lock.digest, layers.layer_folder(lock)), f"its checker's packages are missing: {error}"


def plan(evaluator: Evaluator, setup: Setup, where: str) -> CheckPlan:
    """The checker of a task. Raises :class:`NotSupported`, and :class:`TaskError` naming ``where`` if it is invalid."""
    if evaluator.func == ["infeasible"]:
        return CheckPlan(infeasible=True)
    _supported(evaluator, where)
    for number, step in enumerate(evaluator.postconfig):
        setup.close(step.type, step.parameters, f"{where}.postconfig.{number}.parameters")
    count = len(evaluator.func)
    parts = {"result": evaluator.result, "expected": evaluator.expected, "options": evaluator.options}
    for name, part in parts.items():
        if len(part) != count and part != [None]:
            raise TaskError(f"{where}.{name}: has {len(part)} entries for {count} functions: correct it")
    found = CheckPlan(conj=evaluator.conj, late=setup.late)
    tests: list[tuple[str, Any, Any, Mapping[str, Any]]] = []
    for number, func in enumerate(evaluator.func):
        result, expected, options = (part[number] if len(part) == count else None for part in parts.values())
        tests.append((func, result, expected, _mapping(options or {}, f"{where}.options")))
    if all(map(_is_small, tests)) and not setup.late and not setup.kept:
        found.tests = [_small_test(test, setup, where) for test in tests]
    else:
        found.tests = [_larger_test(test, setup, found, where) for test in tests]
    return found


def _supported(evaluator: Evaluator, where: str) -> None:
    known = METRICS.keys() | _TEXTS | _OFFICE | _IMAGES | _PDF
    for part in (*evaluator.result, *evaluator.expected):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str | None):
            raise TaskError(f"{where}: a result or expected value has the type {str(kind)[:80]}: give its name")
        if kind in _PLATFORM:
            raise reason("platform", f"its evaluator looks at {kind!r}")
        if kind in _NETWORK:
            raise reason("network", f"its evaluator looks at {kind!r}")
    for func in evaluator.func:
        if func in _GNOME:
            raise reason("platform", f"its evaluator is {func!r}")
        if func not in known:
            raise reason("ours", f"its evaluator is {func!r}")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TaskError(f"{where}: is not an object: correct it")
    return value


# -- tests of texts


def _is_small(test: tuple[str, Any, Any, Mapping[str, Any]]) -> bool:
    """Whether the comparisons of texts are enough for a test."""
    func, result, expected, options = test
    if func not in METRICS or set(options) - set(OPTIONS.get(func, ())):
        return False
    if not isinstance(result, Mapping) or not isinstance(expected, Mapping):
        return True  # invalid: the message is made there
    small = ("vm_file", "list_directory", "vm_command_line")
    return result.get("type") in small and not result.get("multi") and not expected.get("multi")


def _small_test(test: tuple[str, Any, Any, Mapping[str, Any]], setup: Setup, where: str) -> dict[str, Any]:
    func, result, expected, options = test
    return {
        "func": func,
        "result": _result(_mapping(result, f"{where}.result"), setup, f"{where}.result"),
        "expected": _expected(func, _mapping(expected, f"{where}.expected"), setup, f"{where}.expected"),
        "options": options,
    }


def _result(given: Mapping[str, Any], setup: Setup, where: str) -> dict[str, Any]:
    if given["type"] == "vm_command_line":
        return {"kind": "command", "path": "", "command": _command(given, setup, where)}
    kind = "file" if given["type"] == "vm_file" else "folder"
    return {"kind": kind, "path": setup.place(text_field(given, "path", where))}


def _command(given: Mapping[str, Any], setup: Setup, where: str) -> str:
    text = command_text(given.get("command"), f"{where}.command")
    if not _own_script(text, setup):
        check_reading(text)
    return re.sub(r"^python ", "python3 ", text)


def _own_script(text: str, setup: Setup) -> bool:
    """Whether ``text`` runs a script that the task brings. The checker puts its own copy there."""
    script = re.fullmatch(r"(?:(?:bash|python3?) (?:\./)?|\./)([^\s;&|]+)( [^;&|$`]*)?", text, re.DOTALL)
    place = setup.place(script[1]) if script else ""
    if place in setup.files and isinstance(source := setup.files[place].source, Path):
        setup.late.setdefault(place, source)
    return place in setup.late


def _expected(func: str, given: Mapping[str, Any], setup: Setup, where: str) -> Any:
    kind = given.get("type")
    if func == "compare_text_file":
        if kind != "cloud_file":
            raise reason("ours", f"its evaluator expects {kind!r}")
        name = given.get("dest") or given.get("path")
        path = setup.local(text_field(given, "path", where), text_field({"dest": name}, "dest", where))
        if path.stat().st_size > _LONGEST:
            raise TaskError(f"{path}: is longer than {_LONGEST} bytes: use a shorter text to compare with")
        return read_text(path.parent, path.name)
    if kind != "rule":
        raise reason("ours", f"its evaluator expects {kind!r}")
    return _rules(func, given, where)


def _rules(func: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    rules = _mapping(given.get("rules"), f"{where}.rules")
    if func in ("check_include_exclude", "check_list"):
        for name in ("include", "exclude", "expect", "unexpect"):
            found = rules.get(name, [])
            if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
                raise TaskError(f"{where}.rules.{name}: is not a list of texts: correct it")
        for pattern in (*rules.get("expect", ()), *rules.get("unexpect", ())):
            try:
                re.compile(pattern)
            except re.error as error:
                raise TaskError(f"{where}.rules: {pattern!r} is not a valid pattern ({error}): correct it") from error
    elif func in METRICS and "expected" not in rules:
        raise TaskError(f"{where}.rules.expected: is missing: add the expected value")
    return dict(rules)


# -- tests of files


def _larger_test(
    test: tuple[str, Any, Any, Mapping[str, Any]], setup: Setup, found: CheckPlan, where: str
) -> dict[str, Any]:
    func, result, expected, options = test
    alone = func in _ALONE or (func == "compare_table" and expected is None)
    source = _source(_mapping(result, f"{where}.result"), setup, found, f"{where}.result", func)
    wanted: dict[str, Any] = {"kind": "nothing"}
    if expected is not None or not alone:
        wanted = _source(_mapping(expected, f"{where}.expected"), setup, found, f"{where}.expected", func)
    if wanted["kind"] == "rule":
        wanted["rules"] = _rules(func, {"rules": wanted["rules"]}, f"{where}.expected")
    if func == "compare_table":
        _check_table(options, where)
    return {"func": func, "result": source, "expected": wanted, "options": dict(options), "larger": True}


_TABLE_RULES = {
    *("sheet_name", "sheet_data", "sheet_print", "sheet_fuzzy", "chart", "style", "freeze", "zoom"),
    *("data_validation", "row_props", "col_props", "pivot_table", "check_cell"),
}


def _check_table(options: Mapping[str, Any], where: str) -> None:
    rules = options.get("rules")
    if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
        raise TaskError(f"{where}.options.rules: is not a list of rules: correct it")
    for rule in rules:
        if rule.get("type") not in _TABLE_RULES:
            raise reason("ours", f"its evaluator compares tables by {rule.get('type')!r}")


def _source(given: Mapping[str, Any], setup: Setup, found: CheckPlan, where: str, func: str) -> dict[str, Any]:
    kind = given.get("type")
    match kind:
        case "vm_file":
            pairs = _pairs(given, where)
            if all(urls(path) for path, _ in pairs):  # the agent's machine has no such file: OSWorld means the address
                return _gold(pairs, given, setup, found)
            return {
                "kind": "file",
                "paths": [[setup.place(path), _name(name)] for path, name in pairs],
                "gives": _gives(given, where),
            }
        case "cloud_file":
            return _gold(_pairs(given, where), given, setup, found, where)
        case "rule":
            return {"kind": "rule", "rules": given.get("rules")}
        case "background_image_in_slide":
            path = setup.place(text_field(given, "ppt_file_path", where))
            return {"kind": "background", "path": path, "slide": given.get("slide_index")}
        case "list_directory":
            return {"kind": "folder", "path": setup.place(text_field(given, "path", where))}
        case "vm_command_line":
            return {"kind": "command", "command": _command(given, setup, where), "name": ""}
        case "cache_file":
            name = text_field(given, "path", where)
            if name not in setup.kept:
                raise reason("ours", f"its evaluator looks at {name!r}, which it does not make")
            text = setup.kept[name]
            if not _own_script(text, setup):
                check_reading(text)
            return {"kind": "command", "command": re.sub(r"^python ", "python3 ", text), "name": _name(name)}
        case "vlc_config":
            return _settings(".config/vlc/vlcrc", given, where)
        case "gimp_config_file":
            return _settings(f".config/GIMP/2.10/{_name(text_field(given, 'file_name', where))}", given, where)
    if kind in _PREFERENCES:
        path, read = _PREFERENCES[kind]
        found.profile = True
        return {"kind": "profile", "path": f"{_PROFILE}/{path}", "read": read}
    raise reason("ours", f"its evaluator looks at {kind!r}")


def urls(path: str) -> bool:
    """Whether ``path`` is an address."""
    return re.match(r"https?://", path) is not None


def _settings(path: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"kind": "file", "paths": [[path, _name(text_field(given, "dest", where))]], "gives": [0]}


def _gold(
    pairs: list[tuple[str, str]], given: Mapping[str, Any], setup: Setup, found: CheckPlan, where: str = ""
) -> dict[str, Any]:
    paths = []
    for url, name in pairs:
        paths.append([f"gold/{len(found.golds)}", _name(name)])
        found.golds.append(setup.local(url, name))
    return {"kind": "gold", "paths": paths, "gives": _gives(given, where)}


def _pairs(given: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Path or address, and name in the checker's folder, of each file."""
    paths, names = given.get("path"), given.get("dest")
    if not isinstance(paths, list):
        path = text_field(given, "path", where)
        return [(path, text_field({"dest": names or posixpath.basename(path)}, "dest", where))]
    if not isinstance(names, list) or len(names) != len(paths):
        raise TaskError(f"{where}.dest: is not a list as long as path: correct it")
    return [
        (text_field({"path": path}, "path", where), text_field({"dest": name}, "dest", where))
        for path, name in zip(paths, names, strict=True)
    ]


def _gives(given: Mapping[str, Any], where: str) -> list[int]:
    gives = given.get("gives", [0])
    if not isinstance(gives, list) or not all(isinstance(number, int) for number in gives):
        raise TaskError(f"{where}.gives: is not a list of numbers: correct it")
    return sorted(set(gives))


def _name(name: str) -> str:
    """The name of a file in the checker's folder. Raises :class:`NotSupported` for a path out of it."""
    if posixpath.normpath(name).startswith(("/", "..")):
        raise reason("ours", f"its evaluator names a file {name!r}")
    return posixpath.normpath(name)
