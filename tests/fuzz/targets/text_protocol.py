"""A reply in the plain-text protocol: a command that is returned stands in it word for word."""

from __future__ import annotations

from clawgym.agents.text_protocol import Command, parse_reply

from ..source import Source

READS = ("agents.text_protocol",)

_WORDS = (
    *("```", "````", "bash", "sh", "\n", " " * 500, "\t", "`", "<submit/>", "<submit />", "<think>", "</think>", "ls"),
    *("\r\n", " ", "python", "\n```bash\n", "\n```\n", "   "),
)


def fuzz(data: bytes) -> None:
    source = Source(data)
    text = ""
    while source.left > 1 and source.byte() < 250:
        text += source.pick(_WORDS) * (1 + source.number(0, 40))
    text += source.rest().decode("utf-8", "replace")
    read = parse_reply(text)
    if isinstance(read, Command):
        assert read.text in text.replace("\r\n", "\n")
