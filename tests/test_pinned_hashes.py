"""The tasks, their verifiers and their solutions are what the pins say; see ``pin_hashes.py``."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

import pytest

from clawgym.errors import TaskSetNotFound

from .pin_hashes import PINS, PUBLIC, SEEDED, library_files, read_pins

WHOLE = "CLAWGYM_WHOLE" in os.environ
SHOWN = 10
"""Number of differences shown."""


def check(name: str, found: Iterable[str]) -> None:
    """Fail with the first lines that differ."""
    pairs = [(old, new) for old, new in zip_longest(read_pins(name), found) if old != new]
    if pairs:
        shown = "\n".join(f"pinned {old}\nfound  {new}" for old, new in pairs[:SHOWN])
        pytest.fail(f"{name}: {len(pairs)} lines differ from the pins, first:\n{shown}", pytrace=False)


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_pack_is_pinned(name: str) -> None:
    check(name, PINS[name]())


def test_swe_pack_is_pinned() -> None:
    """The bugs are applied to source archives, which come from the package index or the cache."""
    try:
        found = list(PINS["swe-basic"]())
    except TaskSetNotFound as error:
        pytest.skip(f"source archives are missing: {error}")
    check("swe-basic", found)


@pytest.mark.skipif(not WHOLE, reason="CLAWGYM_WHOLE is not set: takes a minute")
def test_first_hundred_seeds_are_pinned() -> None:
    check("seeds", PINS["seeds"]())


@pytest.mark.data
@pytest.mark.parametrize("folder", PUBLIC)
def test_public_set_is_pinned(clawgym_data: Path, folder: str) -> None:
    check(folder, PINS[folder]())


def test_tasks_in_other_formats_are_pinned() -> None:
    check("formats", PINS["formats"]())


def test_files_copied_into_tasks_keep_their_bytes() -> None:
    """The pinned files may move; a file of the same name must still have the same bytes."""
    pinned = dict(line.split(" ") for line in read_pins("files"))
    digests: dict[str, set[str]] = {name: set() for name in pinned}
    for path in library_files():
        if path.name in pinned:
            digests[path.name].add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert [name for name, digest in pinned.items() if digest not in digests[name]] == []


def test_hashes_do_not_depend_on_the_machine(tmp_path: Path) -> None:
    """The same hashes without a package index, with an empty cache, in another folder, with another hash seed.

    Tasks that need a layer are marked as unsupported then, but their hashes stay.
    """
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('pin_hashes', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "from clawgym.tasks import load\n"
        "assert any(task.unsupported for task in load('toolcall-basic:train').tasks)\n"
        "print(*module.PINS['toolcall-basic'](), sep='\\n')\n"
    )
    env = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).with_name("pin_hashes.py"))],
        cwd=tmp_path,
        env={**os.environ, **env, "PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Asia/Tokyo"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    check("toolcall-basic", done.stdout.splitlines())
