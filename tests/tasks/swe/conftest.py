"""A layer with pytest in it, made of the packages that run these tests: no network is needed."""

from __future__ import annotations

import compileall
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from clawgym.records import Layer

__all__ = ["site_layer"]

_PURE = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


@pytest.fixture(scope="session")
def site_layer(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    """``/opt/layers/site`` of a task whose tests run with pytest."""
    folder = tmp_path_factory.mktemp("layer")
    folder.parent.chmod(0o755)
    for name in _PURE:
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        shutil.copytree(Path(found.origin).parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shim = find_spec("py")
    if shim is not None and shim.origin is not None:
        shutil.copy(shim.origin, folder / "py.py")
    # pytest is read from .pyc files where the box has the Python of these tests, as in a prepared layer
    compileall.compile_dir(folder, quiet=1)
    return Layer("test/pytest", "0" * 64, folder)
