"""Sizes of the code at two commits, side by side: lines, files, functions.

    python benchmarks/sizes.py BEFORE [AFTER]

A line counts if it holds code: no blank line, comment or docstring. The core is ``clawgym/`` without its attacks on
sandboxes and graders.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from statistics import median, quantiles

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_FOLDERS = ("clawgym/", "tasks/", "verifiers/", "trainers/", "leaderboards/")
_ATTACKS = ("clawgym/redteam/", "clawgym/evaluation/attack", "clawgym/evaluation/escape", "clawgym/evaluation/exploits")


def sources(commit: str) -> dict[str, str]:
    """Path -> text of the library's Python files at ``commit``."""
    packed = subprocess.run(["git", "archive", commit], check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
        for member in archive:
            if member.isreg() and member.name.endswith(".py") and member.name.startswith(_FOLDERS):
                content = archive.extractfile(member)
                assert content is not None
                found[member.name] = content.read().decode()
    return found


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docs


def functions(text: str) -> list[int]:
    """Lines of code of each function, its inner functions included."""
    code = code_lines(text)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds)
    ]


def figures(commit: str) -> dict[str, str]:
    """What the table shows of one commit."""
    texts = sources(commit)
    code = {path: len(code_lines(text)) for path, text in texts.items()}
    core = [n for path, n in code.items() if path.startswith("clawgym/") and not path.startswith(_ATTACKS)]
    sizes = [n for text in texts.values() for n in functions(text)]
    files = [n for n in code.values() if n]
    return {
        "lines of code, core": f"{sum(core):,}",
        "lines of code, all but tests": f"{sum(code.values()):,}",
        "files": f"{len(texts):,}",
        "lines of a file, median / 95 % / largest": _spread(files),
        "functions": f"{len(sizes):,}",
        "lines of a function, median / 95 % / largest": _spread(sizes),
        "functions over 50 lines": f"{sum(n > 50 for n in sizes):,}",
    }


def _spread(values: list[int]) -> str:
    return f"{median(values):.0f} / {quantiles(values, n=20)[-1]:.0f} / {max(values)}"


def main() -> None:
    """Print the table."""
    before, after = sys.argv[1], (sys.argv[2:] or ["HEAD"])[0]
    old, new = figures(before), figures(after)
    print(f"| | before ({before[:7]}) | after |\n|---|---:|---:|")
    for name in old:
        print(f"| {name} | {old[name]} | {new[name]} |")


if __name__ == "__main__":
    main()
