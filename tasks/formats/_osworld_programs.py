"""The programs of OSWorld's tasks on a desktop of ours, and scripts of ``pyautogui`` as steps.

OSWorld's desktop is GNOME on Ubuntu. Here a program is Debian's package of the same name; Chrome is Chromium, the
terminal is LXTerminal, and Chromium shows what a viewer of pictures or PDF would.
"""

from __future__ import annotations

import ast
import json
import posixpath
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym.desktop import parse
from clawgym.errors import SandboxError
from clawgym.records import DesktopStep, TaskFile

__all__ = [
    "APPS",
    "NotSupported",
    "DesktopProgram",
    "acts",
    "of_app",
    "of_argv",
    "of_command",
    "of_file",
    "presets",
    "reason",
    "stop",
]

Kind = str
_SCREEN = 1920, 1080


class NotSupported(Exception):
    """The task needs something that is not supported; the message names it."""


def reason(kind: Kind, text: str) -> NotSupported:
    """``kind``: ``image not here`` (programs or packages that this machine lacks), ``network``, ``platform`` (GNOME and
    what else only OSWorld's machine has) or ``ours`` (not written yet)."""
    return NotSupported(f"{kind}: {text}")


@dataclass(frozen=True, slots=True)
class DesktopProgram:
    """A program of this desktop."""

    command: str
    """Its name in the PATH."""
    package: str
    """What installs it."""
    options: tuple[str, ...] = ()
    """Before its other arguments."""
    presets: Mapping[str, str] | None = None
    """File in the home folder -> text: settings with which it starts without dialogs."""
    process: str = ""
    """The name of its process, if that is not the command's."""
    script: str = ""
    """Shell code that starts it with its arguments, if that takes more than its command."""

    def start(self, *arguments: str) -> DesktopStep:
        """Start it. Raises :class:`NotSupported` if it is not on this machine."""
        self.check()
        start = ("bash", "-c", self.script, self.command) if self.script else (self.command,)
        return DesktopStep("start", (*start, *self.options, *arguments))

    def check(self) -> None:
        """Raise :class:`NotSupported` if it is not on this machine."""
        if not shutil.which(self.command):
            raise reason("image not here", f"it needs the program {self.command!r}: install {self.package}")


def _registry(*settings: tuple[str, str, str]) -> str:
    items = "".join(
        f'<item oor:path="{path}"><prop oor:name="{name}" oor:op="fuse"><value>{value}</value></prop></item>\n'
        for path, name, value in settings
    )
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<oor:items xmlns:oor="http://openoffice.org/2001/registry">\n'
    return f"{head}{items}</oor:items>\n"


_OFFICE = DesktopProgram(
    "soffice",
    "libreoffice-calc libreoffice-writer libreoffice-impress libreoffice-gtk3",
    ("--norestore", "--nologo"),
    {
        ".config/libreoffice/4/user/registrymodifications.xcu": _registry(
            ("/org.openoffice.Office.Common/Misc", "ShowTipOfTheDay", "false"),
            ("/org.openoffice.Office.Common/Misc", "FirstRun", "false"),
            ("/org.openoffice.Office.Common/Save/Document", "WarnAlienFormat", "false"),
            ("/org.openoffice.Setup/Product", "ooSetupLastVersion", "7.4"),
            ("/org.openoffice.Setup/Product", "LastTimeDonateShown", "4102444800"),
            ("/org.openoffice.Setup/Product", "LastTimeGetInvolvedShown", "4102444800"),
            ("/org.openoffice.Office.Impress/Misc/Start", "EnableSdremote", "false"),
        )
    },
    "soffice.bin",
)
_CHROME = DesktopProgram(
    "chromium",
    "chromium",
    (
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-default-browser-check"),
        *("--password-store=basic", "--disable-background-networking", "--disable-component-update"),
        *("--disable-search-engine-choice-screen", "--force-device-scale-factor=1", "--start-maximized"),
        "--test-type",
        "--user-data-dir=/home/user/.config/google-chrome",
    ),
)
_TERMINAL = DesktopProgram("lxterminal", "lxterminal", ("--no-remote",))
_VLC = DesktopProgram(
    "vlc",
    "vlc vlc-plugin-qt",
    presets={".config/vlc/vlcrc": "[qt]\nqt-privacy-ask=0\n[core]\nmetadata-network-access=0\n"},
    # It refuses to run as root, the only user of a sandbox: this copy asks for the parent's id instead.
    script='sed s/geteuid/getppid/ /usr/bin/vlc >/tmp/vlc && chmod +x /tmp/vlc && exec /tmp/vlc "$@"',
)
_CODE = DesktopProgram(
    "code",
    "the package of VS Code, which is not Debian's",
    ("--no-sandbox", "--disable-gpu", "--disable-workspace-trust", "--user-data-dir=/home/user/.config/Code"),
)
_GIMP = DesktopProgram("gimp", "gimp", ("--no-splash",))
_MAIL = DesktopProgram("thunderbird", "thunderbird")
_COMMANDS = {
    **dict.fromkeys(("soffice", "libreoffice", "localc", "lowriter", "loimpress"), _OFFICE),
    **dict.fromkeys(("google-chrome", "chromium", "chromium-browser"), _CHROME),
    **dict.fromkeys(("gnome-terminal", "x-terminal-emulator"), _TERMINAL),
    **{"vlc": _VLC, "code": _CODE, "gimp": _GIMP, "thunderbird": _MAIL},
}
APPS: dict[str, DesktopProgram | None] = {
    **dict.fromkeys(("os", "file_manager", "nautilus", "text_editor", "gedit")),
    **dict.fromkeys(("calc", "writer", "impress", "libreoffice"), _OFFICE),
    **dict.fromkeys(("libreoffice_calc", "libreoffice_writer", "libreoffice_impress"), _OFFICE),
    **dict.fromkeys(("chrome", "browser", "pdf", "image"), _CHROME),
    **{"terminal": _TERMINAL, "vlc": _VLC, "gimp": _GIMP, "thunderbird": _MAIL},
    **dict.fromkeys(("vscode", "vs_code"), _CODE),
}
"""Name in ``related_apps`` -> its program; None for what every desktop here has."""
_OFFICE_FILES = {
    *(".doc", ".docx", ".odt", ".rtf", ".xls", ".xlsx", ".xlsm", ".ods", ".ppt", ".pptx", ".odp", ".odg"),
}
_SHOWN = {".pdf", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".svg", ".html", ".htm"}
_PLAYED = {".mp4", ".mp3", ".avi", ".mkv", ".webm", ".wav", ".ogg", ".m4a", ".flac", ".mov"}


def of_app(name: str) -> DesktopProgram | None:
    """The program of an app in ``related_apps``. Raises :class:`NotSupported` for an app without one."""
    key = name.lower().replace(" ", "_")
    if key not in APPS:
        raise reason("platform", f"it needs the app {name!r}")
    return APPS[key]


def of_file(path: str) -> DesktopProgram:
    """The program that opens a file. Raises :class:`NotSupported`."""
    ending = posixpath.splitext(path)[1].lower()
    for endings, program in ((_OFFICE_FILES, _OFFICE), (_SHOWN, _CHROME), (_PLAYED, _VLC)):
        if ending in endings:
            return program
    raise reason("platform", f"it opens a file {ending}")


def of_argv(argv: Sequence[str]) -> tuple[DesktopProgram, tuple[str, ...]] | None:
    """The program of a command, with its arguments as that program takes them here; None for another command."""
    return of_command(*argv) if posixpath.basename(argv[0]) in _COMMANDS else None


def of_command(command: str, *words: str) -> tuple[DesktopProgram, tuple[str, ...]]:
    """Like :func:`of_argv` for a command that is known."""
    name = posixpath.basename(command)
    program = _COMMANDS[name]
    arguments = [word for word in words if not word.startswith(("--remote-debugging-port", "--maximize"))]
    if name in ("localc", "lowriter", "loimpress"):
        arguments.insert(0, f"--{name[2:]}")
    return program, tuple(arguments)


def presets(programs: Iterator[DesktopProgram] | Sequence[DesktopProgram]) -> tuple[TaskFile, ...]:
    """The settings with which these programs start."""
    texts = {path: text for program in programs for path, text in (program.presets or {}).items()}
    return tuple(TaskFile(path, text.encode()) for path, text in sorted(texts.items()))


def stop(name: str) -> DesktopStep:
    """End a program as a logout does, and wait until it has written its settings."""
    known = {"chrome": _CHROME, "gnome-terminal-server": _TERMINAL}.get(name) or _COMMANDS.get(name)
    process = (known.process or known.command) if known else name
    # A process name has at most 15 characters.
    script = 'pkill -TERM -x "$0"; for p in $(pgrep -x "$0"); do tail --pid="$p" -f /dev/null; done'
    return DesktopStep("run", ("timeout", "10", "bash", "-c", script, process[:15]))


# -- pyautogui


def acts(source: str) -> list[DesktopStep] | None:
    """The steps of a Python script that only calls ``pyautogui`` and sleeps; None for another script.

    Raises :class:`NotSupported` for a call that is not known."""
    try:
        tree = ast.parse(source.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found: list[DesktopStep] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return None
        owner, name = call.func.value, call.func.attr
        if not isinstance(owner, ast.Name) or owner.id not in ("pyautogui", "time"):
            return None
        try:
            given = [ast.literal_eval(argument) for argument in call.args]
            named = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg}
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        if owner.id == "pyautogui":
            found += _act(name, given, named)
    return found


def _act(name: str, given: list[Any], named: Mapping[str, Any]) -> list[DesktopStep]:
    def step(**arguments: Any) -> DesktopStep:
        try:
            parse(arguments, *_SCREEN)
        except SandboxError as error:
            raise reason("ours", f"its script has pyautogui.{name}, which cannot be done ({error})") from error
        return DesktopStep("act", (json.dumps(arguments),))

    def keys(value: Any) -> list[str]:
        words = [key for one in value for key in (one if isinstance(one, list | tuple) else [one])]
        return [str(word) for word in words]

    def point() -> dict[str, Any]:
        where = [*given[:2]] or [named[key] for key in ("x", "y") if key in named]
        return {"coordinate": where} if where else {}

    match name:
        case "hotkey" if set(map(str.lower, keys(given))) == {"ctrl", "alt", "t"}:  # GNOME's key for a terminal
            return [_TERMINAL.start()]
        case "hotkey":
            return [step(action="key", keys=keys(given))]
        case "press":
            times = named.get("presses", given[1] if len(given) > 1 else 1)
            return [step(action="key", keys=[key]) for key in keys(given[:1]) for _ in range(min(int(times), 50))]
        case "write" | "typewrite":
            return [step(action="type", text=str(given[0]))]
        case "click" | "leftClick":
            return [step(action="left_click", **point())]
        case "doubleClick":
            return [step(action="double_click", **point())]
        case "rightClick":
            return [step(action="right_click", **point())]
        case "scroll":  # up if positive, unlike here
            return [step(action="scroll", amount=max(-50, min(50, -int(given[0]))))]
        case "mouseDown":
            return [step(action="left_click")]
        case "mouseUp":  # after mouseDown
            return []
        case "moveTo":
            return [step(action="mouse_move", **point())]
    raise reason("ours", f"its script has pyautogui.{name}")
