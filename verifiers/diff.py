"""The agent's changes as a diff in git's format.

Invariant: ``git apply`` on the task's inputs gives the graded files with their modes. Protected files, caches and links
are in neither (:mod:`clawgym.verifiers.workspace`). Format: ``git help diff-format``. A binary file is a ``literal``: a
zlib stream in base 85, 52 bytes per line.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence

from clawgym.records import Task, TaskFile
from clawgym.verifiers.workspace import submitted, unprotected

__all__ = ["DIFF_FILE", "diff", "submission_diff"]

DIFF_FILE = "submission.diff"
"""The name of the diff in :attr:`clawgym.records.Episode.files`."""
_CONTEXT = 3
_MOST_PAIRS = 4_000_000
"""Limit of old lines times new lines, over all files. Beyond it a changed part is one hunk, because comparing would
take minutes."""
_MAX_BYTES = 16 * 2**20
_NOTHING = "/dev/null"
_Code = tuple[str, int, int, int, int]
"""An opcode of :meth:`difflib.SequenceMatcher.get_opcodes`."""


def submission_diff(task: Task, tar: bytes) -> bytes:
    """The changes of the workspace ``tar`` to the inputs of ``task`` that are graded.

    At most 16 MiB. Files beyond that are only named in a ``#`` line; such a diff cannot be applied.
    """
    return diff(unprotected(task.inputs, task.verifier), submitted(tar, task.verifier))


def diff(before: Mapping[str, TaskFile], after: Mapping[str, TaskFile]) -> bytes:
    """A git patch that changes the files ``before`` to ``after`` (path -> file)."""
    parts: list[bytes] = []
    size, left_out, budget = 0, [], [_MOST_PAIRS]
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        large = max(len(file.read()) for file in (old, new) if file) > _MAX_BYTES
        part = b"" if large else _of_file(path, old, new, budget)
        if (large and (not old or not new or old.read() != new.read())) or size + len(part) > _MAX_BYTES:
            left_out.append(path)
            continue
        size += len(part)
        parts.append(part)
    parts += (b"# too large to be shown: " + _quoted(path) + b"\n" for path in left_out)
    return b"".join(parts)


def _of_file(path: str, old: TaskFile | None, new: TaskFile | None, budget: list[int]) -> bytes:
    was, now = old.read() if old else b"", new.read() if new else b""
    if old and new and was == now and old.executable == new.executable:
        return b""
    ours, theirs = _quoted("a/" + path), _quoted("b/" + path)
    head = [b"diff --git " + ours + b" " + theirs]
    if old is None:
        head.append(b"new file mode " + _mode(new))
    elif new is None:
        head.append(b"deleted file mode " + _mode(old))
    elif old.executable != new.executable:
        head += [b"old mode " + _mode(old), b"new mode " + _mode(new)]
    names = [_hash(old, was), _hash(new, now)]
    if was == now and old and new:
        return b"\n".join(head) + b"\n"
    tail = b" " + _mode(new) if old and new and old.executable == new.executable else b""
    head.append(b"index " + b"..".join(names) + tail)
    if b"\0" in was or b"\0" in now:
        return b"\n".join([*head, b"GIT binary patch", *_literal(now), b"", *_literal(was), b"", b""])
    body = b"".join(_hunks(was.split(b"\n"), now.split(b"\n"), budget))
    if not body:  # an empty file is added or deleted
        return b"\n".join(head) + b"\n"
    # git ends a name that contains blanks with a tab
    head.append(b"--- " + (_named(ours) if old else _NOTHING.encode()))
    head.append(b"+++ " + (_named(theirs) if new else _NOTHING.encode()))
    return b"\n".join(head) + b"\n" + body


def _mode(file: TaskFile | None) -> bytes:
    return b"100755" if file and file.executable else b"100644"


def _hash(file: TaskFile | None, data: bytes) -> bytes:
    """The id of a git blob: SHA-1 of ``blob <size>``, a zero byte, and the content; zeros if there is no file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest().encode() if file else b"0" * 40


def _quoted(path: str) -> bytes:
    """``path`` quoted as in git: in C style if it has a control character, a quote, a backslash, or non-ASCII bytes."""
    raw = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return raw
    known = {byte: b"\\" + letter.encode() for byte, letter in zip(b'\a\b\t\n\v\f\r"\\', 'abtnvfr"\\', strict=True)}
    return b'"' + b"".join(known.get(b, bytes([b]) if 32 <= b < 127 else b"\\%03o" % b) for b in raw) + b'"'


def _named(name: bytes) -> bytes:
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name


def _literal(data: bytes) -> Iterator[bytes]:
    packed = zlib.compress(data, 9)
    yield b"literal %d" % len(data)
    for start in range(0, len(packed), 52):
        chunk = packed[start : start + 52]
        length = len(chunk)
        letter = bytes([64 + length]) if length <= 26 else bytes([96 + length - 26])
        yield letter + base64.b85encode(chunk, pad=True)


def _hunks(was: list[bytes], now: list[bytes], budget: list[int]) -> Iterator[bytes]:
    """The hunks between two texts, which are split at line feeds."""
    old, new = _lines(was), _lines(now)
    for group in _groups(old, new, budget):
        first, last = group[0], group[-1]
        yield b"@@ -%s +%s @@\n" % (_range(first[1], last[2]), _range(first[3], last[4]))
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                yield from (b" " + line for line in old[old_from:old_to])
                continue
            yield from (b"-" + line for line in old[old_from:old_to])
            yield from (b"+" + line for line in new[new_from:new_to])


def _lines(text: list[bytes]) -> list[bytes]:
    *whole, rest = (line + b"\n" for line in text)
    return whole if rest == b"\n" else [*whole, rest + b"\\ No newline at end of file\n"]


def _groups(old: Sequence[bytes], new: Sequence[bytes], budget: list[int]) -> Iterator[list[_Code]]:
    """As :meth:`difflib.SequenceMatcher.get_grouped_opcodes`, in bounded time."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    inner_old, inner_new = old[head : len(old) - tail], new[head : len(new) - tail]
    codes: list[_Code] = [("equal", 0, head, 0, head)]
    budget[0] -= len(inner_old) * len(inner_new)
    if budget[0] < 0:
        codes.append(("replace", head, len(old) - tail, head, len(new) - tail))
    else:
        inside = difflib.SequenceMatcher(None, inner_old, inner_new).get_opcodes()
        codes += ((t, a + head, b + head, c + head, d + head) for t, a, b, c, d in inside)
    codes.append(("equal", len(old) - tail, len(old), len(new) - tail, len(new)))
    group: list[_Code] = []
    for number, (tag, a, b, c, d) in enumerate(codes):
        if tag != "equal" or (0 < number < len(codes) - 1 and b - a <= 2 * _CONTEXT):
            group.append((tag, a, b, c, d))
        else:  # the end of one hunk and the beginning of the next
            after = min(_CONTEXT, b - a)
            if len(group) > 1:
                yield [*group, (tag, a, a + after, c, c + after)]
            group = [(tag, b - after, b, d - after, d)]


def _range(start: int, stop: int) -> bytes:
    """A range in a hunk header. An empty range starts at the line before."""
    length = stop - start
    return b"%d,%d" % (start + 1 if length else start, length)
