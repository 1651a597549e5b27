"""Applies a unified diff in a box, where there may be no ``git`` or ``patch``. Standard library only; Python >= 3.8.

    python3 -I -S patching.py FOLDER < fix.patch

Strict: every hunk must lie where its head says, with every line of context as it is, else nothing is changed and the
exit status is 1. It takes what ``git diff`` writes (files that come, go, change, are renamed or change mode) and plain
unified diffs; no binary patches, no copies, no fuzz. The file is its own program, so that a ``solve.sh`` can bring it
along (:mod:`clawgym.tasks.swe.solution`).
"""

import os
import re
import sys

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
ESCAPES = bytes.maketrans(b"abtnvfr", b"\a\b\t\n\v\f\r")


class BadPatch(ValueError):
    """The patch cannot be read, or does not fit."""


def name_of(text, strip):
    """A path of a ``---``, ``+++`` or ``rename`` line; ``None`` for ``/dev/null``."""
    if text.startswith(b'"'):
        text = re.sub(rb"\\([0-7]{3}|.)", _unescaped, text[1 : text.rindex(b'"')])
    else:
        text = text.split(b"\t")[0].rstrip(b"\r\n")
    if text == b"/dev/null":
        return None
    path = os.fsdecode(text.split(b"/", 1)[1] if strip and b"/" in text else text)
    if path.startswith("/") or ".." in path.split("/") or not path:
        raise BadPatch(f"{path!r} leads out of the folder")
    return path


def _unescaped(match):
    mark = match[1]
    return bytes([int(mark, 8)]) if len(mark) == 3 else mark.translate(ESCAPES)


class Change:
    """What a patch does to one file: ``old`` and ``new`` path (``None``: there is none), ``mode``, ``hunks``."""

    def __init__(self):
        self.old = self.new = self.mode = None
        self.hunks = []  # (first line, lines before, lines after)


def parse(patch):
    """The changes of ``patch`` (bytes). Raises :class:`BadPatch`."""
    try:
        return _changes(patch)
    except BadPatch:
        raise
    except (IndexError, ValueError) as error:
        raise BadPatch(f"it is no patch ({error})") from None


def _changes(patch):
    lines = patch.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    changes, at = [], 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(b"diff --git "):
            changes.append(Change())
            changes[-1].old, changes[-1].new = _both(line[11:].rstrip(b"\n"))
        elif line.startswith((b"GIT binary patch", b"Binary files ")):
            raise BadPatch(f"line {at + 1}: a binary file")
        elif line.startswith((b"copy from", b"copy to")):
            raise BadPatch(f"line {at + 1}: a copy")
        elif changes and line.startswith((b"new file mode ", b"new mode ")):
            changes[-1].mode = int(line.split()[-1], 8)
            if line.startswith(b"new file"):
                changes[-1].old = None
        elif changes and line.startswith(b"deleted file mode "):
            changes[-1].new = None
        elif line.startswith(b"rename from "):
            changes[-1].old = name_of(line[12:].rstrip(b"\n"), False)
        elif line.startswith(b"rename to "):
            changes[-1].new = name_of(line[10:].rstrip(b"\n"), False)
        elif line.startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            if not changes or changes[-1].hunks:  # a diff without git's heads
                changes.append(Change())
            changes[-1].old = name_of(line[4:].rstrip(b"\n"), True)
            changes[-1].new = name_of(lines[at + 1][4:].rstrip(b"\n"), True)
            at += 1
        elif changes and (head := HUNK.match(line)):
            at = _hunk(lines, at, head, changes[-1])
            continue
        at += 1
    if not changes:
        raise BadPatch("it changes no file")
    return changes


def _both(names):
    """The two paths of ``diff --git a/x b/x``, which differ only where other lines name them, too."""
    if names.startswith(b'"'):
        parts = re.findall(rb'"(?:[^"\\]|\\.)*"', names)
        return name_of(parts[0], True), name_of(parts[-1], True)
    half = names[: len(names) // 2]
    path = name_of(half, True) if names[len(names) // 2 + 1 :].split(b"/", 1)[-1] == half.split(b"/", 1)[-1] else None
    return path, path


def _hunk(lines, at, head, change):
    start, olds, news = int(head[1]), int(head[2] or 1), int(head[4] or 1)
    first = start - 1 if olds else start  # an empty range lies behind its line
    before, after = [], []
    at += 1
    while len(before) < olds or len(after) < news:
        if at >= len(lines) or lines[at][:1] not in (b" ", b"-", b"+", b"\n"):
            raise BadPatch(f"line {at + 1}: a hunk ends too early")
        sign, text = lines[at][:1], lines[at][1:] if lines[at] != b"\n" else lines[at]
        if at + 1 < len(lines) and lines[at + 1].startswith(b"\\"):
            text = text[:-1]
        if sign != b"+":
            before.append(text)
        if sign != b"-":
            after.append(text)
        at += 2 if at + 1 < len(lines) and lines[at + 1].startswith(b"\\") else 1
    if len(before) != olds or len(after) != news:
        raise BadPatch(f"line {at}: a hunk is longer than its head says")
    change.hunks.append((first, before, after))
    return at


def apply(patch, read):
    """What ``patch`` makes: path -> (content, or ``None`` where the file goes; mode, or ``None`` as it is).

    ``read(path)`` gives the content of a file, or ``None``. Raises :class:`BadPatch` if anything does not fit.
    """
    done = {}
    for change in parse(patch):
        if change.old is None and change.new is None:
            raise BadPatch("it does not say which file")
        data = b""
        if change.old is None:
            if read(change.new) is not None and done.get(change.new, (b"",))[0] is not None:
                raise BadPatch(f"{change.new}: is there already")
        else:
            data = read(change.old)
            if data is None:
                raise BadPatch(f"{change.old}: is missing")
        data = _patched(data, change)
        if change.new is None and data:
            raise BadPatch(f"{change.old}: has more in it than the patch takes out")
        if change.old is not None and change.old != change.new:
            done.setdefault(change.old, (None, None))
        if change.new is not None:
            done[change.new] = (data, change.mode)
    return done


def _patched(data, change):
    lines = data.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    made, at = [], 0
    for first, before, after in change.hunks:
        if first < at or lines[first : first + len(before)] != before:
            raise BadPatch(f"{change.old or change.new}: line {first + 1} is not as the patch has it")
        made += lines[at:first] + after
        at = first + len(before)
    return b"".join(made + lines[at:])


def main():
    folder = sys.argv[1]

    def read(path):
        try:
            with open(os.path.join(folder, path), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    try:
        done = apply(sys.stdin.buffer.read(), read)
    except BadPatch as error:
        sys.exit(f"the patch does not fit: {error}")
    for path, (data, _) in done.items():
        if data is None:
            os.unlink(os.path.join(folder, path))
    for path, (data, mode) in done.items():
        if data is None:
            continue
        place = os.path.join(folder, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(data)
        if mode is not None:
            os.chmod(place, mode & 0o777)


if __name__ == "__main__":
    main()
