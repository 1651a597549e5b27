"""Applies a unified diff: ``python3 apply_patch.py fix.patch``, in the repository. Standard library only.

Part of the reference solutions, for boxes without git and patch. Strict: every line of context has to stand where the
diff says, or nothing is written.
"""

import re
import sys


def apply(old, hunks, path):
    new, at = [], 0
    for start, lines in hunks:
        new += old[at:start]
        at = start
        for line in lines:
            mark, text = line[:1], line[1:]
            if mark in (" ", "-"):
                if old[at : at + 1] != [text]:
                    raise SystemExit(f"{path}: line {at + 1} is not what the patch expects: nothing was changed")
                at += 1
            if mark in (" ", "+"):
                new.append(text)
    return new + old[at:]


def main():
    with open(sys.argv[1], encoding="utf-8", newline="") as file:
        lines = file.read().splitlines(keepends=True)
    files, hunks = {}, []
    for line in lines:
        if hunks and hunks[-1][2] and line[:1] in (" ", "-", "+"):
            hunks[-1][1].append(line)
            hunks[-1][2] -= (line[0] != "+") + (line[0] != "-")
        elif line.startswith("+++ b/"):
            hunks = files.setdefault(line[6:].rstrip("\n"), [])
        elif line.startswith("@@"):
            start, removed, added = re.findall(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)[0]
            counts = [int(count or 1) for count in (removed, added)]
            hunks.append([int(start) - (counts[0] > 0), [], sum(counts)])
    done = {}
    for path, hunks in files.items():
        with open(path, encoding="utf-8", newline="") as file:
            done[path] = apply(file.read().splitlines(keepends=True), [hunk[:2] for hunk in hunks], path)
    for path, text in done.items():
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write("".join(text))


main()
