"""A program in a sandbox whose stdin and stdout are connected to this process by a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

from clawgym.errors import SandboxError
from clawgym.sandbox.linux.listen import sandbox_path_of
from clawgym.sandbox.protocol import Sandbox

__all__ = ["Program"]

_KEPT = 4096
"""Bytes of stderr to keep."""


@cache
def _launcher() -> str:
    return resources.files("clawgym.sandbox.inside").joinpath("become.py").read_text(encoding="utf-8")


class Program:
    """A running program; see :meth:`start`. Its output is untrusted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        """Its stdout."""
        self.writer = writer
        """Its stdin."""
        self._errors: StderrTail | None = None
        self._other: asyncio.StreamWriter | None = None

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        port: int = 9017,
        limit: int = 1 << 16,
    ) -> Program:
        """Start ``argv`` in the working folder of ``sandbox``.

        Args:
            sandbox: where to start it.
            argv: the program and its arguments.
            env: added to the sandbox's environment.
            port: a port in the sandbox that is used until both sockets are connected.
            limit: bytes of unread stdout to buffer.

        Raises:
            SandboxError: the launcher failed. A program that cannot be started ends at once, with the reason on its
                stderr (:attr:`stderr_note`).
        """
        place = str(port) if sandbox.isolation.features.get("loopback", True) else sandbox_path_of(port)
        python = [*sandbox.tool("python3"), "-I", "-S", "-c", _launcher()]
        done = await sandbox.exec([*python, place, *argv], cwd=sandbox.spec.workdir, env=env)
        if done.exit_code != 0:
            raise SandboxError(f"exit code {done.exit_code}: {done.text[-500:].strip()}")
        made = cls(*await asyncio.open_connection(sock=await sandbox.connect(port), limit=limit))
        try:
            reader, made._other = await asyncio.open_connection(sock=await sandbox.connect(port))
        except BaseException:
            made.writer.close()
            raise
        made._errors = StderrTail(reader)
        return made

    @property
    def stderr_note(self) -> str:
        """The end of its stderr, worded for an error message; empty if it wrote nothing."""
        return self._errors.text if self._errors is not None else ""

    async def aclose(self, patience: float = 0.0) -> None:
        """Close the connection, after waiting up to ``patience`` seconds for stderr that is still arriving.

        The program itself ends with its sandbox. Idempotent.
        """
        try:
            if self._errors is not None:
                await self._errors.aclose(patience)
        finally:
            self.writer.close()
            if self._other is not None:
                self._other.close()


class StderrTail:
    """Keeps the end of a program's stderr. It reads slowly, so that a flood of output costs little CPU."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._kept = b""
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while chunk := await self._reader.read(2**16):
                self._kept = (self._kept + chunk)[-_KEPT:]
                await asyncio.sleep(0.01)
        except OSError:
            pass

    @property
    def text(self) -> str:
        """Worded for an error message; empty if nothing was written."""
        text = self._kept.decode("utf-8", "backslashreplace").strip()
        return f"; it wrote: {text}" if text else ""

    async def aclose(self, patience: float = 0.0) -> None:
        """Stop reading, after waiting up to ``patience`` seconds for the end of the stream."""
        try:
            await asyncio.wait([self._task], timeout=patience)
        finally:
            self._task.cancel()
