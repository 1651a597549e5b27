"""Interpret the ``config`` of an OSWorld task: the files, folders and programs that it puts on the desktop.

Commands that make files are interpreted; an interpreted step gives the same files as running it. Other commands, and
programs beside the file manager and the editor, become steps of the desktop (:class:`~clawgym.records.DesktopStep`),
which runs them in the sandbox. What neither can do raises :class:`NotSupported`.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from clawgym.errors import TaskError
from clawgym.records import DesktopStep, TaskFile
from clawgym.tasks.formats import _osworld_programs as programs
from clawgym.tasks.formats._osworld_programs import NotSupported, reason

__all__ = ["HOME", "NotSupported", "Setup", "check_reading", "command_text", "is_text", "text_field", "web"]

HOME = "/home/user"
CACHE = "ubuntu_osworld_file_cache"
"""A copy of the files, as they are published, beside the folder ``examples``: ``<app>/<id>/<file>``."""
_EDITORS = {"gedit", "mousepad", "xfwrite"}
_MANAGERS = {"nautilus", "thunar", "xfe"}
_TEXTS = {
    *("", ".bib", ".c", ".conf", ".cpp", ".css", ".csv", ".h", ".html", ".ini", ".java", ".js", ".json", ".log", ".md"),
    *(".py", ".sh", ".srt", ".tex", ".txt", ".xml", ".yaml", ".yml"),
}
_READERS = {
    *("[", "test", "true", "false", "echo", "printf", "cat", "ls", "find", "grep", "egrep", "stat", "wc", "sort"),
    *("uniq", "diff", "cmp", "md5sum", "sha1sum", "sha256sum", "head", "tail", "cut", "tr", "awk", "sed", "basename"),
}
_WORDS = {"if", "then", "else", "elif", "fi", "while", "until", "do", "done", "!", "{", "}"}
_ENDS = {";", "&&", "||", "|"}
# Pauses, and clicks that only focus the desktop.
_IDLE = re.compile(r"(?:\s|;|import \w+|time\.sleep\([\d.]+\)|pyautogui\.click\([\d., ]*\))*")


# What OSWorld's own machine has: GNOME and its settings, sound, users.
_PLATFORM = re.compile(r"\b(gsettings|dconf|pactl|pulseaudio|timedatectl|gio|su|useradd|systemctl|xdg-mime)\b")
_ONLINE = re.compile(r"\b(apt|apt-get|pip3?|wget|curl|git clone|npm|snap)\b|--install-extension")
_VALUES = {
    "{CLIENT_PASSWORD}": "password",
    "{SCREEN_WIDTH}": "1920",
    "{SCREEN_HEIGHT}": "1080",
    "{SCREEN_WIDTH_HALF}": "960",
    "{SCREEN_HEIGHT_HALF}": "540",
}
_TERMINALS = re.compile(r"(?:export [^\n]*\n)?gnome-terminal(?: --maximize)?(?: --working-directory=(\S+))?\s*")
_OPENS = re.compile(r"(?:export [^\n]*\n)?xdg-open (\S+)\s*")
_ASSIGNED = re.compile(r"\b[a-z_]+=\$\(((?:[^()\"']|\"[^\"]*\"|'[^']*')*)\)")
_INSTALLS = re.compile(
    r"(?:echo \S+ \| )?(?:sudo -S )?apt(?:-get)? "
    r"(?:update(?: -y)?|install (?:-y )?(?P<name>[a-z0-9-]+)(?: -y)?)\s*(?:&&|;|$)\s*"
)


@dataclass
class Setup:
    """The state of the desktop so far. Paths are relative to :data:`HOME`."""

    beside: Path
    """The local folder with the files that the task downloads."""
    files: dict[str, TaskFile] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"Desktop"})
    programs: list[tuple[str, ...]] = field(default_factory=list)
    opening: list[DesktopStep] = field(default_factory=list)
    """Steps that cannot be interpreted."""
    closing: list[DesktopStep] = field(default_factory=list)
    """Steps after the agent's last action."""
    used: list[programs.DesktopProgram] = field(default_factory=list)
    late: dict[str, Path] = field(default_factory=dict)
    """Place -> local file, that the evaluator puts there before it looks."""
    kept: dict[str, str] = field(default_factory=dict)
    """Name -> command of the evaluator, whose output it looks at."""

    @property
    def inputs(self) -> tuple[TaskFile, ...]:
        """The files, with those that programs start with; an empty folder has an empty file ``.gitkeep``."""
        files = {file.path: file for file in programs.presets(self.used)} | self.files
        filled = {str(parent) for path in (*files, *self.folders) for parent in PurePosixPath(path).parents}
        kept = (TaskFile(f"{folder}/.gitkeep", b"") for folder in self.folders - filled)
        return tuple(sorted((*files.values(), *kept), key=lambda file: file.path))

    def step(self, kind: str, given: Mapping[str, Any], where: str) -> None:
        """Interpret one step. Raises :class:`NotSupported`, and :class:`TaskError` naming ``where`` if it is
        invalid."""
        match kind:
            case "sleep":
                pass
            case "download":
                self._download(given.get("files"), where)
            case "execute" | "command":
                self._execute(given.get("command"), f"{where}.command")
            case "open":
                self._open(text_field(given, "path", where))
            case "launch":
                self._launch(given.get("command"), f"{where}.command")
            case "activate_window":
                self.opening.append(DesktopStep("focus", (text_field(given, "window_name", where),)))
            case "chrome_open_tabs":
                urls = given.get("urls_to_open")
                if not isinstance(urls, list) or not urls or web(urls):
                    raise reason("network", "its config opens pages of the web (chrome_open_tabs)")
                self._start(*programs.of_command("google-chrome", *map(str, urls)))
            case "googledrive" | "login" | "chrome_close_tabs":
                raise reason("network", f"its config has a step {kind!r}")
            case _:
                raise reason("ours", f"its config has a step {kind!r}")

    def close(self, kind: str, given: Mapping[str, Any], where: str) -> None:
        """Interpret one step that the evaluator takes after the agent's last action. Raises like :meth:`step`."""
        match kind:
            case "sleep":
                pass
            case "launch":  # a program is started again only so that OSWorld can ask it
                if _ends(given.get("command")):
                    self._end(_split(command_text(given.get("command"), f"{where}.command")))
            case "activate_window":
                self.closing.append(DesktopStep("focus", (text_field(given, "window_name", where),)))
            case "close_window":
                name = text_field(given, "window_name", where)
                self.closing.append(DesktopStep("close", (name,)))
                if "thunderbird" in name.lower():  # it writes its settings when it ends
                    self.closing.append(programs.stop("thunderbird"))
            case "download":
                for place, path in self._files(given.get("files"), where):
                    self.late[place] = path
            case "execute" | "command":
                self._finish(given, f"{where}.command")
            case _:
                raise reason("ours", f"its evaluator begins with a step {kind!r}")

    def _finish(self, given: Mapping[str, Any], where: str) -> None:
        text = _filled(command_text(given.get("command"), where))
        if isinstance(name := given.get("stdout"), str):
            self.kept[name] = text
            return
        script = re.fullmatch(r"python3? -c (.*)", text, re.DOTALL)
        if script and (steps := programs.acts("".join(_split(script[1])))) is not None:
            self.closing += steps
            return
        words = _split(text)
        if _ends(words):
            self._end(words)
        elif not re.fullmatch(r"chmod \+x \S+", text) or words[-1] not in self.late:
            self.closing.append(_run(text, "evaluator"))

    def _end(self, words: list[str]) -> None:
        self.closing.append(programs.stop(posixpath.basename(words[-1])))

    def _start(self, program: programs.DesktopProgram, arguments: Sequence[str]) -> None:
        self.use(program)
        self.opening.append(program.start(*arguments))

    def use(self, program: programs.DesktopProgram) -> None:
        """Note that the task needs ``program``. Raises :class:`NotSupported` if it is not on this machine."""
        program.check()
        if program not in self.used:
            self.used.append(program)

    def local(self, url: str, name: str) -> Path:
        """The local file for ``url``. Raises :class:`NotSupported` if it is missing."""
        with contextlib.suppress(ValueError, OSError):  # an invalid URL, or an invalid file name
            names = dict.fromkeys((posixpath.basename(name), posixpath.basename(urlsplit(url).path)))
            tail = PurePosixPath(unquote(urlsplit(url).path)).parts[-3:]
            candidates = [self.beside / found for found in names if found not in ("", ".", "..")]
            if len(tail) == 3 and ".." not in tail:
                candidates.append(self.beside.parents[2].joinpath(CACHE, *tail))
            for candidate in candidates:
                if candidate.is_file() and not candidate.is_symlink():
                    return candidate
        raise reason("network", f"it downloads {posixpath.basename(name)!r}: put the file into {self.beside}")

    def place(self, path: str, cwd: str = "") -> str:
        """``path`` relative to the home folder. Raises :class:`NotSupported` if it is outside."""
        full = posixpath.normpath(posixpath.join(HOME, cwd, HOME + path[1:] if path[:2] in ("~", "~/") else path))
        if full != HOME and not full.startswith(f"{HOME}/"):
            raise reason("platform", f"it needs {path}, which is outside of {HOME}")
        return full[len(HOME) + 1 :]

    def _download(self, files: Any, where: str) -> None:
        for place, path in self._files(files, where):
            self.files[place] = TaskFile(place, path)

    def _files(self, files: Any, where: str) -> Iterator[tuple[str, Path]]:
        if not isinstance(files, list):
            raise TaskError(f"{where}.files: is not a list of url and path: correct it")
        for number, file in enumerate(files):
            at = f"{where}.files.{number}"
            url, path = text_field(file, "url", at), text_field(file, "path", at)
            place = self.place(path)
            if not place:
                raise TaskError(f"{at}.path: {path!r} names a folder: give the file's name")
            yield place, self.local(url, path)

    def _open(self, path: str) -> None:
        place = self.place(path)
        if place in ("", *self.folders):
            self.programs.append(("xfe", place or "."))
        elif place not in self.files and not self.opening:
            raise NotSupported(f"it opens {place!r}, which its config does not make")
        elif is_text(place):
            self.programs.append(("xfwrite", place))
        else:
            self._start(programs.of_file(place), (f"{HOME}/{place}",))

    def _launch(self, command: Any, where: str) -> None:
        text = _filled(command_text(command, where))
        name, *rest = _split(re.sub(r"^(\w+=\S* )+", "", text))
        base, paths = posixpath.basename(name), [word for word in rest if not word.startswith("-")]
        if base == "socat":  # leads OSWorld's host to the browser
            return
        if known := programs.of_argv([name, *rest]):
            if "$(" in text or "`" in text:
                raise reason("ours", f"it starts {base!r} with a command inside of a command")
            if web(paths):
                raise reason("network", f"it starts {base!r} with a page of the web")
            self._start(*known)
            return
        if base not in _EDITORS | _MANAGERS or len(paths) > 1:
            raise reason("platform", f"it starts the program {base!r}")
        place = self.place(paths[0]) if paths else ""
        editor = base in _EDITORS
        self.programs.append(("xfwrite", *([place] if place else [])) if editor else ("xfe", place or "."))

    def _execute(self, command: Any, where: str) -> None:
        text = _filled(command_text(command, where))
        text = _INSTALLS.sub(lambda found: "" if not found["name"] or shutil.which(found["name"]) else found[0], text)
        script = re.fullmatch(r"python3? -c (.*)", text, re.DOTALL)
        if script and "pyautogui" in text:
            source = "".join(_split(script[1]))
            if _IDLE.fullmatch(source):
                return
            steps = programs.acts(source)
            if steps is None:
                raise reason("ours", "its config has a script of pyautogui that is not simple")
            self.opening += steps
            return
        if found := _TERMINALS.fullmatch(text):
            self._start(*programs.of_command("gnome-terminal", f"--working-directory={found[1] or HOME}"))
            return
        if found := _OPENS.fullmatch(text):
            self.programs.append(("xfe", self.place(found[1]) or "."))
            return
        before = dict(self.files), set(self.folders)
        try:
            if self.opening and any(step.kind == "run" for step in self.opening):
                raise NotSupported("it follows a command that runs")
            self._interpret(text)
        except NotSupported as error:
            self.files, self.folders = before
            self.opening.append(_run(text, "config", str(error)))

    def _interpret(self, text: str) -> None:
        cwd = ""
        for words, ended in _simple_commands(text):
            if ended not in ("", ";", "&&"):
                raise NotSupported(f"its config joins commands by {ended!r}")
            cwd = self._command(words, cwd)

    def _command(self, words: list[str], cwd: str) -> str:
        """Interpret one simple command. Returns the working folder of the next one."""
        name, *rest = words
        options, paths = [w for w in rest if w.startswith("-")], [w for w in rest if not w.startswith("-")]
        if any(c in word for word in rest for c in "$`*?{["):
            raise NotSupported(f"its config has {name!r} with variables or patterns")
        if name != "echo" and any(">" in word for word in rest):
            raise NotSupported(f"its config has {name!r} with a redirection")
        match name:
            case "cd" if len(paths) == 1 and not options:
                return self.place(paths[0], cwd)
            case "mkdir" if set(options) <= {"-p", "--parents", "-v"}:
                self.folders |= {place for path in paths if (place := self.place(path, cwd))}
            case "touch" if not options:
                for place in (self.place(path, cwd) for path in paths):
                    self.files.setdefault(place, TaskFile(place, b""))
            case "chmod" if set(options) <= {"-R"} and paths:
                for place in (self.place(path, cwd) for path in paths[1:]):
                    if place not in self.files and place not in self.folders:
                        raise NotSupported(f"its config changes the mode of {place}")
            case "echo" if len(rest) >= 2 and rest[-2] in (">", ">>") and not set(options) - {"-n"}:
                body = " ".join(word for word in rest[:-2] if word != "-n") + ("" if "-n" in options else "\n")
                place = self.place(rest[-1], cwd)
                before = self.files[place].read() if rest[-2] == ">>" and place in self.files else b""
                self.files[place] = TaskFile(place, before + body.encode())
            case _:
                raise NotSupported(f"its config runs {name!r}")
        return cwd


def web(urls: Iterable[Any]) -> bool:
    """Whether one of these is an address outside of the desktop."""
    return any(re.match(r"(?i)(https?|ftp|rtsp|mms)://(?!localhost|127\.0\.0\.1)", str(url)) for url in urls)


def _filled(text: str) -> str:
    """``text`` with the values of OSWorld's variables."""
    for name, value in _VALUES.items():
        text = text.replace(name, value)
    return text


def _ends(command: Any) -> bool:
    """Whether a command only ends a program."""
    words = command.split() if isinstance(command, str) else command if isinstance(command, list) else []
    if len(words) == 3 and words[1] == "-c":
        words = str(words[2]).split()
    return len(words) == 2 and words[0] in ("pkill", "killall")


def _run(text: str, part: str, why: str = "") -> DesktopStep:
    """The step that runs shell code in the sandbox. Raises :class:`NotSupported` if it cannot do there what it does on
    OSWorld's machine."""
    if "outside of" in why:
        raise NotSupported(why)
    if found := _PLATFORM.search(text):
        raise reason("platform", f"its {part} runs {found[1]!r}")
    if found := _ONLINE.search(text):
        raise reason("network", f"its {part} runs {found[0].strip()!r}")
    if "pyautogui" in text:
        raise reason("ours", f"its {part} has a script of pyautogui that is not simple")
    text = re.sub(r"echo \S+ \| sudo -S |\bsudo (-S )?", "", text)  # root is the only user
    text = re.sub(r"(^|[;&|\n]\s*)python (?=\S)", r"\1python3 ", text)
    return DesktopStep("run", ("bash", "-c", text))


def is_text(path: str) -> bool:
    """Whether the text editor can open this file."""
    return posixpath.splitext(path)[1].lower() in _TEXTS


def text_field(given: Any, name: str, where: str) -> str:
    """The non-empty text at ``name``. Raises :class:`TaskError` for anything else."""
    value = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(value, str) or not value or "\0" in value:
        raise TaskError(f"{where}.{name}: must be a non-empty text: correct it")
    return value


def command_text(command: Any, where: str) -> str:
    """A command as shell code. Raises :class:`TaskError` if it is not a text or a list of texts."""
    if isinstance(command, str) and command.strip() and "\0" not in command:
        return command
    if isinstance(command, Sequence) and command and all(isinstance(w, str) and "\0" not in w for w in command):
        if len(command) == 3 and posixpath.basename(command[0]) in ("bash", "sh") and command[1] == "-c":
            return command[2] or "true"
        return shlex.join(command)
    raise TaskError(f"{where}: must be a command or a list of its words: correct it")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise NotSupported("its config has a command that is not simple") from None


def _simple_commands(text: str) -> list[tuple[list[str], str]]:
    """The simple commands of ``text``, each with the operator after it. Raises :class:`NotSupported` for any other
    syntax."""
    if re.search(r"""(["'])[;&|<>()]+\1|\\\n|<<""", text):
        raise NotSupported("its config has a command that is not simple")
    lexer = shlex.shlex(text.strip().replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    try:
        tokens = list(lexer)
    except ValueError:
        raise NotSupported("its config has a command that is not simple") from None
    found: list[tuple[list[str], str]] = []
    words: list[str] = []
    for token in [*tokens, None]:
        if token is None or token in _ENDS:
            if words:
                found.append((words, token or ""))
            words = []
        elif re.fullmatch(r"[&()<|;]+", token):
            raise NotSupported(f"its config has a command with {token!r}")
        else:
            words.append(token)
    # OSWorld passes the password of its machine: `echo password | sudo -S command`.
    plain = [n for n, (words, end) in enumerate(found) if not (words[0] == "echo" and end == "|" and _sudo(found, n))]
    return [(_without_sudo(found[n][0]), found[n][1]) for n in plain]


def _sudo(found: list[tuple[list[str], str]], number: int) -> bool:
    return number + 1 < len(found) and found[number + 1][0][:2] == ["sudo", "-S"]


def _without_sudo(words: list[str]) -> list[str]:
    return [word for word in words[words[0] == "sudo" :] if word != "-S"] or ["sudo"] if words[0] == "sudo" else words


def check_reading(text: str) -> None:
    """Raise :class:`NotSupported` if ``text`` might do more than read files below :data:`HOME`."""
    if found := re.search(rf"{_PLATFORM.pattern}|\bps\b", text):
        raise reason("platform", f"its evaluator runs {found[0]!r}")
    if found := re.search(r"\b(which|apt|pip3?|dpkg)\b", text):
        raise reason("network", f"its evaluator looks with {found[0]!r} for what its agent installs")
    for inner in _ASSIGNED.findall(text):  # name=$(command)
        check_reading(inner)
    text = _ASSIGNED.sub("true", text)
    if re.search(r"\$\(|`|-exec|-delete", text):
        raise NotSupported("its evaluator runs commands inside of a command")
    if other := re.search(r"\$\{?(?!HOME\b)([A-Z][A-Z_]*)", text):
        raise NotSupported(f"its evaluator reads the variable {other[1]}")
    try:
        commands = _simple_commands(re.sub(r"[12]?>(?:&[12]|\s*/dev/null)", " ", text))
    except NotSupported as error:
        raise NotSupported(str(error).replace("config", "evaluator")) from None
    for words, _ in commands:
        while words and words[0] in _WORDS:
            words = words[1:]
        if words and posixpath.basename(words[0]) not in _READERS and words[0] != "for":
            raise NotSupported(f"its evaluator runs {posixpath.basename(words[0])!r}")
        for word in words[1:]:
            if re.fullmatch(r"[<>&]+", word):
                raise NotSupported("its evaluator writes files")
            if word.startswith("/") and word != HOME and not word.startswith(f"{HOME}/"):
                raise NotSupported(f"its evaluator reads {word}, which is outside of {HOME}")
