"""Choose the files that are needed to test a package: its source archive, and wheels of pytest and all dependencies.

pip chooses the versions (``pip install --dry-run --report``) from the user's package index. Nothing is installed. Only
pure-Python wheels are used, so no build is run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.package_index import index_of
from clawgym.tasks.layers import Lock, Wheel
from clawgym.tasks.swe.sources import Sdist, Source

__all__ = ["find_sdist", "normal", "resolve"]

_PYTHON = "3.11"
"""The oldest Python that the library supports; wheels for it also work with later versions."""
_RUNS_PYTEST = frozenset(("pytest", "pluggy", "iniconfig", "packaging", "pygments"))
_TOOLS = """
black build coverage covdefaults flake8 furo isort mypy nox pre-commit pylint pyright pytest-benchmark pytest-codspeed
pytest-cov pytest-mypy pytest-ruff pytest-xdist pytest-randomly ruff setuptools sphinx tox tox-uv twine wheel
"""
_NO_TESTS = frozenset(_TOOLS.split())
"""Tools that packages list in their test requirements although the tests do not need them."""
_EXTRA = re.compile(r"extra\s*==\s*['\"](tests?|testing)['\"]")


def normal(name: str) -> str:
    """A project's name in the normalized form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_sdist(project: str, version: str | None) -> Sdist:
    """The source archive of a version, or of the latest release.

    Raises :class:`TaskSetNotFound` if there is none, :class:`TaskError` if the index gives no digest, and
    :class:`MissingDependency` without the extra ``packages``.
    """
    with index_of(project) as index:
        from packaging.version import InvalidVersion, Version

        found = []
        for package in index.packages:
            if package.package_type != "sdist" or not package.filename.endswith(".tar.gz") or not package.version:
                continue
            try:
                parsed = Version(package.version)
            except InvalidVersion:
                continue
            if package.version == version or (version is None and not parsed.is_prerelease and not package.is_yanked):
                found.append((parsed, package))
        if not found:
            raise TaskSetNotFound(
                f"{project}: the package index ({index.address}) has no source archive (.tar.gz) of "
                f"{f'version {version}' if version else 'a release'}: choose another version or package"
            )
        package = max(found, key=lambda pair: pair[0])[1]
        if "sha256" not in package.digests:
            raise TaskError(f"{project}: the package index gives no SHA-256 for {package.filename}: use another index")
        return Sdist(normal(project), package.version, package.filename, package.digests["sha256"])


def resolve(source: Source, extra: Sequence[str] = ()) -> tuple[Lock, tuple[str, ...]]:
    """A lock with wheels of pytest, of the requirements of ``source`` and its tests, and of ``extra``; and the names of
    optional test requirements that were left out.

    Raises :class:`TaskError` naming a required package that has no pure-Python wheel.
    """
    project = source.sdist.project
    if normal(project) in _RUNS_PYTEST:
        raise TaskError(f"{project}: pytest depends on it, so a bug in it would break pytest: choose another package")
    needed = ["pytest", *extra, *(line for line in source.requirements if not re.search(r"\bextra\b", line))]
    wished = [line.split(";")[0].strip() for line in source.requirements if _EXTRA.search(line)]
    wished = [line for line in wished if _name(line) not in _NO_TESTS | {"pytest"}]
    left_out: list[str] = []
    while True:
        wheels, missing = _ask_pip([*needed, *wished], project)
        if missing is None:
            break
        droppable = [line for line in wished if _name(line) == missing]
        if not droppable:
            raise TaskError(
                f"{project}: its requirement {missing} has no matching pure-Python wheel: choose another package"
            )
        wished.remove(droppable[0])
        left_out.append(missing)
    own = [wheel for wheel in wheels if normal(wheel.project) != normal(project)]
    return Lock(f"swe/{project}", tuple(own)), tuple(left_out)


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return normal(match[0]) if match else ""


def _ask_pip(requirements: Sequence[str], project: str) -> tuple[list[Wheel], str | None]:
    """The wheels that pip would install, and None; or no wheels, and the name of a package that it cannot install."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--platform=any", "--implementation=py"]
        command += ["--abi=none", f"--python-version={_PYTHON}", f"--target={folder}/site"]
        command += [f"--report={folder}/report.json", "--", *requirements]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TaskError(f"{project}: pip does not run ({error}): repair it (python -m ensurepip)") from error
        if done.returncode:
            if "No module named pip" in done.stderr:
                raise TaskError(f"{project}: pip is not installed: run python -m ensurepip")
            if (found := re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)", done.stderr)) is not None:
                return [], normal(found[1])
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise TaskError(f"{project}: pip finds no compatible versions ({' '.join(errors)[-400:]}): choose another")
        with open(f"{folder}/report.json", encoding="utf-8") as file:
            report = json.load(file)
    wheels = []
    for row in report["install"]:
        info, url = row["download_info"], row["download_info"]["url"]
        digest = info.get("archive_info", {}).get("hashes", {}).get("sha256", "")
        filename = url.split("#")[0].split("?")[0].rpartition("/")[2]
        wheels.append(Wheel(normal(row["metadata"]["name"]), row["metadata"]["version"], filename, digest))
    return wheels, None
