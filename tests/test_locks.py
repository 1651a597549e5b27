"""The lock files have all requirements of pyproject.toml, with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, Requirement]:
    """The packages of a lock, each with at least one hash."""
    found: dict[str, Requirement] = {}
    for block in re.split(r"\n(?! )", re.sub(r"^#.*\n", "", (LOCKS / name).read_text(), flags=re.MULTILINE)):
        line, *hashes = [part.strip() for part in block.split("\\\n")]
        if not line:
            continue
        requirement = Requirement(line)
        assert hashes, line
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", part) for part in hashes), line
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), line
        assert requirement.url is None, line
        found[canonicalize_name(requirement.name)] = requirement
    return found


def asked(extra: str) -> list[Requirement]:
    """What ``extra`` asks for, through the extras that it names."""
    found, todo, seen = [*map(Requirement, PROJECT["dependencies"])], [extra], set()
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        for requirement in map(Requirement, PROJECT["optional-dependencies"][name]):
            if requirement.name == "clawgym":
                todo += requirement.extras
            else:
                found.append(requirement)
    return found


@pytest.mark.parametrize(("extra", "name"), [("train", "demo.txt"), ("dev", "test.txt")])
def test_lock_has_all_requirements(extra: str, name: str) -> None:
    packages = locked(name) | locked("torch.txt")
    for requirement in asked(extra):
        pin = packages.get(canonicalize_name(requirement.name))
        assert pin, f"{requirement.name} is not in requirements/{name}: make lock"
        version = str(pin.specifier).removeprefix("==")
        assert requirement.specifier.contains(version, prereleases=True), f"{pin}, asked for {requirement}: make lock"


def test_both_commands_install_the_same_versions() -> None:
    demo, test = locked("demo.txt"), locked("test.txt")
    assert demo.keys() <= test.keys()
    assert all(str(test[name].specifier) == str(pin.specifier) for name, pin in demo.items())
    assert str(locked("build.txt")["setuptools"].specifier) == str(test["setuptools"].specifier)


def test_both_builds_of_torch_have_the_same_version() -> None:
    index, cpu = (locked(name)["torch"].specifier for name in ("torch.txt", "torch-cpu.txt"))
    assert SpecifierSet(str(cpu).split("+")[0]) == index
    assert "torch" not in locked("test.txt")
    assert "torch" not in locked("demo.txt")


def test_everything_is_installed_with_hashes() -> None:
    """No install command of the set-up is without them, but that of the working tree itself."""
    makefile = (ROOT / "Makefile").read_text()
    setup = makefile[makefile.index("INSTALL :=") : makefile.index("lock:")]
    assert "--no-deps" in setup
    assert "--no-build-isolation" in setup
    assert "--require-hashes" in setup
    installs = re.findall(r"^\t.*\$\((?:INSTALL|LOCKED)\).*|^\t.*pip install.*", setup, re.MULTILINE)
    assert len(installs) == 4
    assert [line.strip() for line in installs if "LOCKED" not in line] == ["$(INSTALL) -e ."]
