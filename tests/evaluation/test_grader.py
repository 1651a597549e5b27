"""The record of what grades a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clawgym import verifiers
from clawgym.evaluation.grader import describe_grader
from clawgym.sandbox import Backend


async def digest(backend: Backend) -> str:
    return (await describe_grader((), backend))["code"]


async def test_code_digest_covers_subfolders(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await digest(backend)
    folder = Path(shutil.copytree(Path(verifiers.__file__).parent, tmp_path / "verifiers"))
    monkeypatch.setattr(verifiers, "__file__", str(folder / "__init__.py"))
    assert await digest(backend) == before  # wherever the code is

    below = folder / "mounted" / "deeper.py"
    below.parent.mkdir()
    below.write_text("LIMIT = 1\n")
    added = await digest(backend)
    below.write_text("LIMIT = 2\n")
    changed = await digest(backend)
    below.rename(folder / "mounted" / "renamed.py")
    renamed = await digest(backend)
    assert len({before, added, changed, renamed}) == 4

    (folder / "mounted" / "__pycache__").mkdir()
    (folder / "mounted" / "__pycache__" / "left_over.py").write_text("")
    assert await digest(backend) == renamed
