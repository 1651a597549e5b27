"""Readability of README, site and docstrings: words a sentence, and the share of sentences over 30 words.

    python benchmarks/readability.py                 # of this tree
    python benchmarks/readability.py --commit REV    # of another commit
    python benchmarks/readability.py --long          # each sentence over 30 words, with its file

Counted is running prose: no code, tables, headings, lists of names or generated pages. Sentences are split and words
counted by textstat.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from textstat import textstat

ROOT = Path(__file__).resolve().parents[1]
LONG = 30
MOST_LONG = 0.05
"""Share of sentences over :data:`LONG` words that tests/test_language.py allows in each part."""
_SECTIONS = re.compile(r"^\s*(?:Args|Returns|Raises|Attributes|Examples?):\s*$", re.MULTILINE)
CODE = ("clawgym/", "tasks/", "verifiers/", "trainers/", "leaderboards/")


def texts(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of each file, in this tree or at ``commit``."""
    if commit is None:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            path = ROOT / name
            if name.endswith((".md", ".py")) and path.is_file() and not path.is_symlink():
                yield name, path.read_text()
        return
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
        for member in archive:
            if member.isreg() and member.name.endswith((".md", ".py")):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read().decode()


def prose(markdown: str) -> str:
    """The running text of a page, one paragraph a line; links and code spans become one word each."""
    text = re.sub(r"^[ \t]*(```|~~~).*?^[ \t]*\1\s*$", "\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|^---\n.*?^---$", "", text, flags=re.DOTALL | re.MULTILINE)
    kept: list[list[str]] = [[]]
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("#", "|", "!", "<", ":::", ">>>", "=")) or re.match(r"\[[^]]+\]:", bare):
            kept.append([])
            continue
        if item := re.match(r"(?:[-*+]|\d+\.)\s+", bare):
            kept.append([])
            bare = bare[item.end() :]
        kept[-1].append(bare)
    lines = (" ".join(part) for part in kept if part)
    return "\n".join(_plain(line) for line in lines)


def _plain(line: str) -> str:
    line = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", line)
    line = re.sub(r"``[^`]+``|`[^`]+`|:\w+:`[^`]+`", "code", line)
    return re.sub(r"[*_]{1,2}(\S[^*_]*)[*_]{1,2}", r"\1", line)


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of modules, classes, functions and attributes; of each the text before ``Args:`` and its like."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = _SECTIONS.split(node.value.value)[0]
            yield re.sub(r"::\n\n(?:[ ]{2,}.*\n?|\n)+", ".\n\n", text)


def sentences(text: str) -> list[str]:
    """The sentences of running prose that have three words or more."""
    found = [
        part.strip() for paragraph in text.splitlines() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(\[])", paragraph)
    ]
    return [sentence for sentence in found if textstat.lexicon_count(sentence) >= 3]


def is_long(sentence: str) -> bool:
    """Whether a sentence has more than :data:`LONG` words."""
    return textstat.lexicon_count(sentence) > LONG


def parts(commit: str | None) -> dict[str, list[tuple[str, str]]]:
    """Part -> (file, sentence): README, site, docstrings."""
    found: dict[str, list[tuple[str, str]]] = {"README": [], "site": [], "docstrings": []}
    for name, text in texts(commit):
        if name == "README.md":
            found["README"] += [(name, one) for one in sentences(prose(text))]
        elif name.startswith("docs/") and name.endswith(".md"):
            found["site"] += [(name, one) for one in sentences(prose(text))]
        elif name.endswith(".py") and name.startswith(CODE):
            for docstring in docstrings(text):
                found["docstrings"] += [(name, one) for one in sentences(prose(docstring))]
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--commit", help="a commit instead of this tree")
    parser.add_argument("--long", action="store_true", help="print each long sentence")
    given = parser.parse_args()
    print("| part | sentences | words a sentence | over 30 words |\n|---|---:|---:|---:|")
    for part, found in parts(given.commit).items():
        counts = [textstat.lexicon_count(one) for _, one in found]
        share = sum(count > LONG for count in counts) / max(1, len(counts))
        print(f"| {part} | {len(counts):,} | {mean(counts or [0]):.1f} | {share:.1%} |")
        if given.long:
            for (name, one), count in zip(found, counts, strict=True):
                if count > LONG:
                    print(f"{name}: ({count}) {one}")


if __name__ == "__main__":
    main()
