"""The console: for any text, the terminal gets no control characters except those of rich's styles."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from clawgym.console import Console, progress
from clawgym.visible import visible, visible_lines, visible_value

STYLES = re.compile(r"\x1b\[[0-9;]*m")
TEXTS = st.text(st.characters(codec=None) | st.sampled_from("\x1b\x9b\x07\r\n\t\u202e\u2066\u2028\u200f\u061c\ud800[]"))


def hidden(text: str) -> set[str]:
    """The characters of ``text``, newlines apart, that a terminal obeys, or that reorder what is read."""
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return {
        character
        for character in text
        if (unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character != "\n")
        or unicodedata.bidirectional(character) in directions
        or character in "\u200e\u200f\u061c\u200b\u2060\ufeff"
    }


def printed(*what: object, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=terminal, legacy_windows=False)
    for one in what:
        console.print(one)
    return out.getvalue()


@given(TEXTS)
def test_visible_text_is_one_line_without_control_characters(text: str):
    shown = visible(text)
    assert not hidden(shown)
    assert "\n" not in shown
    assert "\t" not in shown
    shown.encode()
    assert visible(shown) == shown
    assert visible_lines(text).count("\n") == text.count("\n")


@pytest.mark.parametrize("category", ["Cc", "Cs", "Zl", "Zp"])
def test_every_control_character_is_an_escape(category: str):
    for number in range(0x110000):
        if unicodedata.category(chr(number)) == category:
            assert visible(chr(number)).isascii()
            assert visible(chr(number)).startswith("\\")


def test_readable_text_stays_as_it_is():
    text = "naïve 東京 שלום नमस्ते 👩\u200d🔬 می\u200cخواهم [bold] C:\\x"
    assert visible(text) == text
    assert visible("a\n\x1b[0m\u202e\x7f\x9b\ud800") == r"a\n\x1b[0m\u202e\x7f\x9b\ud800"


@given(TEXTS)
def test_nothing_printed_holds_a_control_character(text: str):
    table = Table(title=text, caption=text)
    table.add_column(text)
    table.add_row(text)
    table.add_row(Text(text, style="bold"))
    shown = printed(text, Text(text), table, Panel(text, title=text))
    assert not hidden(shown)
    out = io.StringIO()
    console = Console(file=out)
    console.say(text)
    assert out.getvalue().count("\n") == 1
    console.json({"text": text, text: [text]})
    assert json.loads(out.getvalue().split("\n", 1)[1]) == {"text": text, text: [text]}
    assert not hidden(out.getvalue())


@given(TEXTS)
def test_terminal_gets_only_own_styles(text: str):
    shown = printed(Text(text, style="red"), Text(text, style="link http://evil"), terminal=True)
    assert not hidden(STYLES.sub("", shown))


def test_strings_are_no_markup():
    for text in ("[bold]x[/bold]", "[link=http://evil]x[/link]", ":smile:", "[/]"):
        assert printed(text, terminal=True) == f"{text}\n"
        out = io.StringIO()
        with progress(Console(file=out, force_terminal=True, width=100), transient=False) as bar:
            bar.add_task(f"{text}\x1bc\x9b", total=1)
        assert f"{text}\\x1bc\\x9b" in out.getvalue()


def test_visible_value_escapes_nested_strings():
    assert visible_value({"a\x1b": ["b\u202e", ("c\n\x07", 1, None)]}) == {
        r"a\x1b": [r"b\u202e", ["c\n\\x07", 1, None]]
    }


OTHERS = r"""
import logging, sys, warnings
from clawgym.console import guard_streams
guard_streams()
H = "\x1b]0;x\x07\x9b\u202e\ud800\nFORGED"
"""


@pytest.mark.parametrize(
    "code",
    [
        "print(H)",
        "sys.stderr.write(H)",
        "sys.stderr.writelines([H])",
        "warnings.warn(H)",
        "logging.getLogger('a').warning('%s', H)",
        "import typer; typer.echo(H)",
        "raise RuntimeError(H)",
        "import threading; t = threading.Thread(target=lambda: 1 / {}[H]); t.start(); t.join()",
        "import argparse; argparse.ArgumentParser(prog='x').parse_args([H])",
    ],
)
def test_output_of_libraries_is_escaped(code: str):
    done = subprocess.run([sys.executable, "-c", OTHERS + code], capture_output=True, timeout=60)
    shown = (done.stdout + done.stderr).decode()
    assert r"\x1b]0;x\x07\x9b\u202e\ud800" in shown
    assert not hidden(shown)


def test_log_records_are_one_line_each():
    code = OTHERS + "logging.getLogger('a').warning(H)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("\\nFORGED\n")
    assert done.stderr.count("\n") == 1
