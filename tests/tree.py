"""Lists the modules of the library, for tests of all modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules() -> dict[str, Path]:
    """Module name -> file, for every Python file of the package (the folders behind its links too)."""
    found: dict[str, Path] = {}
    for folder, folders, files in os.walk(ROOT / "clawgym", followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if file == "__init__.py" else parts)] = path
    return found
