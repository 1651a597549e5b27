"""The language of README, site and docstrings: short sentences, and one term for one thing."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _readability() -> Any:
    """``benchmarks/readability.py``; not by a path of imports, where other benchmarks have the names of packages."""
    spec = spec_from_file_location("readability", ROOT / "benchmarks/readability.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


readability = _readability()

TERMS = {
    r"(?<!black-)(?<!white )\bbox(?:es)?\b": "sandbox",
    r"\breceipts?\b": "run manifest",
    r"\bseal(?:s|ed)?\b": "checksum",
    r"\bfloors?\b": "no-model baseline",
    r"\bcorrected scores?\b": "baseline-adjusted score",
    r"\bupstreams?\b": "endpoint",
    r"\bhost faults?\b": "infrastructure error",
    r"\blearn(?:s|t|ed)? from\b": "train on",
    r"\bgroups? of equals\b": "zero-variance group",
    r"\bgoes on where\b": "resumes",
    r"\bhow-manieth\b": "the index of",
    r"\bthe stock way\b": "the original grader",
}
"""A word that only we would use -> the field's term (docs/concepts/glossary.md)."""
OTHER_MEANING = (
    "tasks/worlds/",  # bytes that enter task hashes
    "tasks/swe/patching.py",
    "verifiers/answers.py",  # \boxed{}
    "docs/how-to/tool-calls.md",
    "docs/results/audits.md",  # box-drawing characters
    "docs/results/environments.md",  # what programs print
    "docs/results/sandboxes.md",
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[str, str]]]:
    return readability.parts(None)


@pytest.mark.parametrize("part", ["README", "site", "docstrings"])
def test_few_sentences_are_long(found: dict[str, list[tuple[str, str]]], part: str) -> None:
    long = [f"{name}: {sentence}" for name, sentence in found[part] if readability.is_long(sentence)]
    assert len(found[part]) > 5
    assert len(long) / len(found[part]) < readability.MOST_LONG, f"over {readability.LONG} words:\n" + "\n".join(long)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 600


def test_terms_are_those_of_the_field(found: dict[str, list[tuple[str, str]]]) -> None:
    wrong = [
        f"{name}: say {term}: {sentence}"
        for part in found.values()
        for name, sentence in part
        if not name.startswith(OTHER_MEANING) and name != "docs/concepts/glossary.md"
        for word, term in TERMS.items()
        if re.search(word, sentence, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_running_prose_is_counted() -> None:
    page = (
        "# A title of words\n\nOne [short](x.md) sentence here. And `code x y` is one.\n\n```\nnot this\n```\n| no |\n"
    )
    assert readability.sentences(readability.prose(page)) == ["One short sentence here.", "And code is one."]
