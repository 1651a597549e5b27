"""Interpret the ``config`` of an OSWorld task: the files, folders and programs that it puts on the desktop.

Invariant: an interpreted step gives the same files as running it. Any other step raises :class:`NotSupported`.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from clawgym.errors import TaskError
from clawgym.records import TaskFile

__all__ = ["HOME", "NotSupported", "Setup", "check_reading", "command_text", "is_text", "text_field"]

HOME = "/home/user"
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


class NotSupported(Exception):
    """The task needs something that is not supported; the message names it."""


@dataclass
class Setup:
    """The state of the desktop so far. Paths are relative to :data:`HOME`."""

    beside: Path
    """The local folder with the files that the task downloads."""
    files: dict[str, TaskFile] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"Desktop"})
    programs: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[TaskFile, ...]:
        """The files; an empty folder has an empty file ``.gitkeep``."""
        filled = {str(parent) for path in (*self.files, *self.folders) for parent in PurePosixPath(path).parents}
        kept = (TaskFile(f"{folder}/.gitkeep", b"") for folder in self.folders - filled)
        return tuple(sorted((*self.files.values(), *kept), key=lambda file: file.path))

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
            case _:
                raise NotSupported(f"its config has a step {kind!r}")

    def local(self, url: str, name: str) -> Path:
        """The local file for ``url``. Raises :class:`NotSupported` if it is missing."""
        with contextlib.suppress(ValueError, OSError):  # an invalid URL, or an invalid file name
            names = dict.fromkeys((posixpath.basename(name), posixpath.basename(urlsplit(url).path)))
            for candidate in (self.beside / found for found in names if found not in ("", ".", "..")):
                if candidate.is_file() and not candidate.is_symlink():
                    return candidate
        raise NotSupported(f"it downloads {posixpath.basename(name)!r}: put the file into {self.beside}")

    def place(self, path: str, cwd: str = "") -> str:
        """``path`` relative to the home folder. Raises :class:`NotSupported` if it is outside."""
        full = posixpath.normpath(posixpath.join(HOME, cwd, HOME + path[1:] if path[:2] in ("~", "~/") else path))
        if full != HOME and not full.startswith(f"{HOME}/"):
            raise NotSupported(f"it needs {path}, which is outside of {HOME}")
        return full[len(HOME) + 1 :]

    def _download(self, files: Any, where: str) -> None:
        if not isinstance(files, list):
            raise TaskError(f"{where}.files: is not a list of url and path: correct it")
        for number, file in enumerate(files):
            at = f"{where}.files.{number}"
            url, path = text_field(file, "url", at), text_field(file, "path", at)
            place = self.place(path)
            if not place:
                raise TaskError(f"{at}.path: {path!r} names a folder: give the file's name")
            self.files[place] = TaskFile(place, self.local(url, path))

    def _open(self, path: str) -> None:
        place = self.place(path)
        if place in ("", *self.folders):
            self.programs.append(("xfe", place or "."))
        elif not is_text(place):
            raise NotSupported(f"it opens a file {posixpath.splitext(place)[1]}")
        elif place not in self.files:
            raise NotSupported(f"it opens {place!r}, which its config does not make")
        else:
            self.programs.append(("xfwrite", place))

    def _launch(self, command: Any, where: str) -> None:
        name, *rest = _split(command_text(command, where))
        name, paths = posixpath.basename(name), [word for word in rest if not word.startswith("-")]
        if name not in _EDITORS | _MANAGERS or len(paths) > 1:
            raise NotSupported(f"it starts the program {name!r}")
        place = self.place(paths[0]) if paths else ""
        editor = name in _EDITORS
        self.programs.append(("xfwrite", *([place] if place else [])) if editor else ("xfe", place or "."))

    def _execute(self, command: Any, where: str) -> None:
        text = command_text(command, where)
        idle = re.fullmatch(r"python3? -c (.*)", text, re.DOTALL)
        if idle and "pyautogui" in text:
            if not _IDLE.fullmatch("".join(_split(idle[1]))):
                raise NotSupported("its config presses keys by pyautogui")
            return
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
