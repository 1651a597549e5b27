"""The built wheel and source archive, and imports from outside the clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import clawgym

ROOT = Path(__file__).parents[1]
PARTS = ("clawgym", "tasks", "verifiers", "trainers", "leaderboards")
"""The folders of the library. All but the first are packages below ``clawgym``, by a symbolic link."""


def _run(*argv: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(argv, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _tracked(*under: str) -> list[str]:
    """The regular files that git knows below these folders."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a clone: git does not know its files")
    lines = _run("git", "ls-files", "--stage", "-z", *under, cwd=ROOT).split("\0")
    found = [line.partition("\t") for line in lines if line]
    return [path for about, _, path in found if not about.startswith("120000") and (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, in a folder called ``clawgym``."""
    folder = tmp_path_factory.mktemp("wheel") / "clawgym"
    folder.mkdir()
    _tracked()
    names = _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    names = "\0".join(name for name in names.split("\0") if name and os.path.lexists(ROOT / name))
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names.encode(), capture_output=True, check=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
    return folder


@pytest.fixture(scope="module")
def built(clone: Path) -> Path:
    """The folder with the source archive, and with the wheel built from it."""
    out = clone.parent / "dist"
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ".", cwd=clone)
    return out


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """A folder with the installed wheel and nothing else."""
    (wheel,) = built.glob("*.whl")
    folder = built.parent / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder)
    _run(*pip, wheel, cwd=built)
    return folder


def _without_the_clone(first: Path) -> str:
    """A ``PYTHONPATH`` of this folder and of what the library needs."""
    return os.pathsep.join([str(first), *(path for path in sys.path if path.endswith("-packages"))])


def test_wheel_has_every_file_once(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    wanted = [path if path.startswith("clawgym/") else f"clawgym/{path}" for path in _tracked(*PARTS)]
    assert len(names) == len(set(names))
    assert not set(wanted) - set(names), "pyproject.toml does not ship these: see package-data"
    assert not {name for name in names if not name.startswith("clawgym/")}
    assert not {name for name in names if not (ROOT / name).is_file()}


def test_source_archive_has_no_links_and_no_tests(built: Path) -> None:
    """The wheel beside it was built from it."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    inside = {member.name.partition("/")[2] for member in members}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "src/clawgym/tasks/__init__.py"} <= inside
    assert not [name for name in inside if name.startswith("tests")]


def test_versions_agree(built: Path, installed: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.split("-")[1] == clawgym.__version__
    code = "import importlib.metadata as m, clawgym; print(clawgym.__version__, m.version('clawgym'))"
    said = _run(sys.executable, "-c", code, cwd=installed.parent, PYTHONPATH=_without_the_clone(installed))
    assert said.split() == [clawgym.__version__] * 2


def test_every_module_is_importable_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """And the folders of the clone are not importable under their short names."""
    code = """
import importlib.util, json, pkgutil, clawgym
found = [m.name for m in pkgutil.walk_packages(clawgym.__path__, "clawgym.")]
short = [n for n in ("tasks", "verifiers", "trainers", "leaderboards") if importlib.util.find_spec(n)]
print(json.dumps([clawgym.__file__, found, short]))
"""
    said = _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=_without_the_clone(installed))
    file, found, short = json.loads(said)
    assert Path(file).is_relative_to(installed)
    assert {"clawgym.tasks.packs", "clawgym.verifiers", "clawgym.trainers.local", "clawgym.leaderboards"} <= set(found)
    assert not short


def test_readme_first_steps_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = (sys.executable, "-c", "from clawgym.cli import main; main()")
    env = {"PYTHONPATH": _without_the_clone(installed)}
    assert "Usage: " in _run(*program, "--help", cwd=tmp_path, **env)
    assert "terminal-basic" in _run(*program, "tasks", "list", cwd=tmp_path, **env)
    evaluation = ("eval", "terminal-basic", "--agent", "oracle", "--limit", "2", "--out", "run")
    if sys.platform == "linux":
        _run(*program, *evaluation, cwd=tmp_path, **env)
        assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize("name", ["clawgym", "tasks", "verifiers", "trainers", "leaderboards"])
def test_import_from_above_a_clone_named_clawgym(clone: Path, name: str) -> None:
    """An editable install is a path in site-packages. A folder without ``__init__.py`` that comes first on the path, as
    the clone itself does, is a namespace package only where no real package is found."""
    path = _without_the_clone(clone / "src")
    code = "import importlib, sys; m = importlib.import_module(sys.argv[1]); print(m.__file__)"
    dotted = name if name == "clawgym" else f"clawgym.{name}"
    said = _run(sys.executable, "-c", code, dotted, cwd=clone.parent, PYTHONPATH=path)
    assert said.strip() == str(clone / "src" / dotted.replace(".", "/") / "__init__.py")
    if name != "clawgym":
        code = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]))"
        assert _run(sys.executable, "-c", code, name, cwd=clone.parent, PYTHONPATH=path).strip() == "None"


def test_pyright_resolves_every_package_from_outside(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("".join(f"import clawgym.{part}\n" for part in PARTS[1:]))
    try:
        _run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "mine.py", cwd=tmp_path)
    except AssertionError as error:
        if "npm" in str(error) or "getaddrinfo" in str(error):
            pytest.skip("pyright needs Node and its own package: the npm registry does not answer")
        raise
