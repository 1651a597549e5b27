"""The parser of the plain-text protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.agents.text_protocol import HOW_TO, Command, MalformedCall, Submit, parse_reply

pieces = st.sampled_from(
    [
        "```",
        "```bash",
        "````",
        "```python",
        "`",
        "<submit/>",
        "<think>",
        "</think>",
        "ls",
        "\n",
        "\r\n",
        " ",
        "EOF",
        "é",
    ]
)
texts = st.text(max_size=60) | st.lists(pieces, max_size=20).map("".join) | st.lists(pieces, max_size=12).map("\n".join)


@given(texts)
def test_parse_reply_accepts_any_text(reply: str):
    parsed = parse_reply(reply)
    if isinstance(parsed, Command):
        assert parsed.text.strip()
        assert parsed.text in reply.replace("\r\n", "\n")
    elif isinstance(parsed, MalformedCall):
        assert parsed.why


@given(st.text(st.characters(exclude_characters="`\r"), min_size=1), st.text(st.characters(exclude_characters="`\r")))
def test_fenced_command_is_returned_unchanged(command: str, prose: str):
    prose = prose.replace("<", "(")
    parsed = parse_reply(f"{prose}\n```bash\n{command}\n```\n{prose}")
    if not command.strip():
        assert isinstance(parsed, MalformedCall)
    elif "</think>" not in command:
        assert parsed == Command(command)


@given(st.integers(0, 6), st.integers(3, 6))
def test_longer_fence_may_contain_shorter_fences(inner: int, outer: int):
    command = f"cat > a.md <<'EOF'\n{'`' * inner}python\nx\n{'`' * inner}\nEOF"
    parsed = parse_reply(f"{'`' * outer}bash\n{command}\n{'`' * outer}")
    assert (parsed == Command(command)) == (inner < outer)


@pytest.mark.parametrize(
    ("reply", "parsed"),
    [
        ("```bash\nls\n```", Command("ls")),
        ("I look.\n```sh\nls\npwd\n```\nThen we see.", Command("ls\npwd")),
        ("```bash\r\nls\r\n```\r\n", Command("ls")),
        ("```json\n{}\n```\n```bash\nls\n```", Command("ls")),
        ("```text\n<submit/>\n```\n```bash\nls\n```", Command("ls")),
        ("<think>```bash\nrm -rf x\n```</think>\n```bash\nls\n```", Command("ls")),
        ("I could\n```bash\nrm -rf x\n```\n</think>\n```bash\nls\n```", Command("ls")),
        ("All done.\n<submit/>", Submit("All done.")),
        (" <submit /> ", Submit("")),
        ("I will write <submit/> soon", MalformedCall("there is no bash block and no submit marker", prose=True)),
        ("", MalformedCall("there is no bash block and no submit marker")),
        ("```bash\nls", MalformedCall("the block opened with ```bash is never closed")),
        ("```bash\n\n```", MalformedCall("the bash block is empty")),
        ("```bash\nls\n```\n```bash\npwd\n```", MalformedCall("there are 2 bash blocks: write exactly one")),
        ("```bash\nls\n```\n<submit/>", MalformedCall("there is a command and the submit marker: do one of the two")),
    ],
)
def test_parse_reply(reply: str, parsed: object):
    assert parse_reply(reply) == parsed


def test_instructions_show_command_and_submit():
    assert "```bash" in HOW_TO
    assert "<submit/>" in HOW_TO
