"""Write the lock files of this folder: every package that `make demo` and `make test` install, with its hashes.

Versions stay as they are where pyproject.toml allows it; arguments go to uv (`--upgrade`, `--upgrade-package NAME`).

- demo.txt, test.txt: all packages of the extras ``train`` and ``dev``, for every platform, without PyTorch.
- torch.txt: PyTorch as its authors publish it on the package index, with the CUDA libraries that this build needs.
- torch-cpu.txt: its CPU build, which needs none of them. Kept by hand: the package index does not have it.
- build.txt: what builds packages that have no wheel, and ClawGym itself.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.11.5"
OF_TORCH = re.compile(r"(torch|triton|cuda-\S+|nvidia-\S+)==")
HEAD = "# Written by `make lock` (requirements/lock.py): do not edit.\n"


def blocks(text: str) -> list[str]:
    """One text for each package: its line, and the lines of its hashes."""
    return re.findall(r"^\w.*\n(?: +--hash=.*\n)+", text, re.MULTILINE)


def compiled(source: Path, pins: str, *options: str) -> list[str]:
    """The packages that ``source`` needs, in the versions of ``pins`` where they will do."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"
        out.write_text(pins)
        wanted = ("--universal", "--generate-hashes", "--python-version", PYTHON, "--no-annotate", "--no-header")
        uv = (sys.executable, "-m", "uv", "pip", "compile", "--quiet", *wanted, *options, "-o", str(out), str(source))
        subprocess.run(uv, check=True, stdout=subprocess.DEVNULL)
        return blocks(out.read_text())


def kept(*names: str) -> str:
    """The pins of lock files that are there."""
    return "".join(path.read_text() for name in names if (path := HERE / name).exists())


def main() -> None:
    pyproject, upgrade = HERE.parent / "pyproject.toml", sys.argv[1:]
    test = compiled(pyproject, kept("test.txt", "torch.txt"), "--extra", "dev", *upgrade)
    demo = compiled(pyproject, "".join(test), "--extra", "train")
    with tempfile.NamedTemporaryFile("w", suffix=".in") as build:
        build.write("setuptools>=80\n")
        build.flush()
        builder = compiled(Path(build.name), "".join(test))
    files = {
        "test.txt": [block for block in test if not OF_TORCH.match(block)],
        "demo.txt": [block for block in demo if not OF_TORCH.match(block)],
        "torch.txt": [block for block in test if OF_TORCH.match(block)],
        "build.txt": builder,
    }
    for name, packages in files.items():
        (HERE / name).write_text(HEAD + "".join(packages))


if __name__ == "__main__":
    main()
