"""The console for all output of the command line.

Invariants: strings are never markup, so a task's name cannot style, link or hide anything. Control and format
characters in texts are escaped (:mod:`clawgym.visible`). Ruff forbids ``print``, ``typer.echo`` and rich's own console
in this package; :func:`guard_streams` covers what libraries and Python itself print.
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
    """rich's console, made safe for untrusted texts. Takes the options of rich's console."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False, emoji=False, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        """Print one line without wrapping; newlines in ``text`` are shown as escapes."""
        self.print(Text(visible(text), style), soft_wrap=True)

    def json(self, value: Any) -> None:
        """Print ``value`` as JSON, in ASCII."""
        for line in json.dumps(value, indent=2).replace("\x7f", "\\u007f").split("\n"):
            self.say(line)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render ``renderable`` with its texts escaped before they are laid out."""
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
        """The stream that the console writes to, without its guard."""
        return getattr(super().file, "guarded", super().file)


class _Doing(ProgressColumn):
    """The description; rich's own column would interpret it as markup."""

    def render(self, task: Task) -> Text:
        return Text(visible(task.description))


def progress(console: Console, *, transient: bool = True) -> Progress:
    """A progress bar: description, amount done of the total, and the time left."""
    columns = (
        _Doing(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # A transient bar must not leave an empty line in output that is not a terminal.
    return Progress(*columns, console=console, transient=transient, disable=transient and not console.is_terminal)


class _Guard:
    """A text stream that escapes what is written to it. It is not a terminal, so libraries write no styles to it."""

    def __init__(self, stream: TextIO) -> None:
        self.guarded = stream
        self.encoding, self.errors = stream.encoding, stream.errors

    def write(self, text: str) -> int:
        self.guarded.write(
            visible_lines(text.replace("\r", "\n"))
        )  # progress bars of libraries: one line for each state
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
    """Formats a log record on one line, followed by its traceback if it has one."""

    def format(self, record: logging.LogRecord) -> str:
        text = visible(record.getMessage())
        return f"{text}\n{visible_lines(self.formatException(record.exc_info))}" if record.exc_info else text


def guard_streams() -> None:
    """Escape everything that is not written through a :class:`Console` to stdout and stderr, and log warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(handlers=[handler])
    sys.stdout, sys.stderr = cast(TextIO, _Guard(sys.stdout)), cast(TextIO, _Guard(sys.stderr))
