"""The one console: every text that the command line shows a person goes through it.

Invariants: strings are never markup, so a task's name cannot style, link or hide anything; what reaches the terminal
beside rich's own styles has no control or format character (:mod:`clawgym.visible`). Ruff refuses ``print``,
``typer.echo`` and rich's own console in this package; what libraries and Python itself print is covered by
:func:`guard_streams`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from clawgym.visible import visible, visible_lines

__all__ = ["Console", "Progress", "guard_streams", "progress"]


class Console(rich.console.Console):
    """rich's console, with its options, for texts of others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False, emoji=False, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """Print one line, not folded; newlines in ``text`` are shown as escapes."""
        self.print(Text(visible(text), style), soft_wrap=True)

    def json(self, value: Any) -> None:
        """Print ``value`` as JSON, in ASCII."""
        for line in json.dumps(value, indent=2).replace("\x7f", "\\u007f").split("\n"):
            self.say(line)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of ``renderable`` whose texts are visible. Texts are escaped before they are laid out."""
        if isinstance(renderable, str):
            renderable = self.render_str(renderable)
        if isinstance(renderable, Text) and (plain := visible_lines(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = plain
        for text, style, control in super().render(renderable, options):
            if style and style.link:
                style = style.update_link(None)
            yield Segment(text if control else visible_lines(text), style, control)

    @property
    def file(self) -> IO[str]:  # pyright: ignore[reportIncompatibleMethodOverride] nobody sets it
        """Where the console writes: the stream itself, not its guard."""
        return getattr(super().file, "guarded", super().file)


class _Doing(ProgressColumn):
    """What is being done: a column of rich's own would take it for markup."""

    def render(self, task: Task) -> Text:
        return Text(visible(task.description))


def progress(console: Console, *, transient: bool = True) -> Progress:
    """A bar: what is being done, how much of how much is done, and how long the rest will take."""
    columns = (
        _Doing(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # What goes away leaves nothing on what is no terminal either: not even a line.
    return Progress(*columns, console=console, transient=transient, disable=transient and not console.is_terminal)


class _Guard:
    """A text stream that escapes what is written to it. It is no terminal, so nobody writes styles to it."""

    def __init__(self, stream: TextIO) -> None:
        self.guarded = stream
        self.encoding, self.errors = stream.encoding, stream.errors

    def write(self, text: str) -> int:
        self.guarded.write(visible_lines(text.replace("\r", "\n")))  # a bar of a library: a line for each state
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.guarded.flush()

    def fileno(self) -> int:
        return self.guarded.fileno()

    def isatty(self) -> bool:
        return False


class _OneLine(logging.Formatter):
    """A record on one line; its traceback, if it has one, below."""

    def format(self, record: logging.LogRecord) -> str:
        text = visible(record.getMessage())
        return f"{text}\n{visible_lines(self.formatException(record.exc_info))}" if record.exc_info else text


def guard_streams() -> None:
    """Escape what anything but a :class:`Console` writes to this process's stdout and stderr, and log warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(handlers=[handler])
    sys.stdout, sys.stderr = cast(TextIO, _Guard(sys.stdout)), cast(TextIO, _Guard(sys.stderr))
