"""A program of a box whose stdin and stdout are a socket that we hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

from clawgym.errors import SandboxError
from clawgym.sandbox.linux.listen import box_path_of
from clawgym.sandbox.protocol import Sandbox

__all__ = ["Program"]

_KEPT = 4096
"""Bytes of stderr."""


@cache
def _launcher() -> str:
    return resources.files("clawgym.sandbox.inside").joinpath("become.py").read_text(encoding="utf-8")


class Program:
    """Made by :meth:`start`. What it writes is the box's word: hostile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        """Its stdout."""
        self.writer = writer
        """Its stdin."""
        self._errors: Errors | None = None
        self._other: asyncio.StreamWriter | None = None

    @classmethod
    async def start(
        cls,
        box: Sandbox,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        port: int = 9017,
        limit: int = 1 << 16,
    ) -> Program:
        """Start ``argv`` in the working folder of ``box``. ``port`` is taken there until both are connected; ``limit``
        is how much of its stdout is held unread.

        Raises :class:`SandboxError`. A program that cannot be started ends, and says why on its stderr.
        """
        place = str(port) if box.isolation.features.get("loopback", True) else box_path_of(port)
        python = [*box.tool("python3"), "-I", "-S", "-c", _launcher()]
        done = await box.exec([*python, place, *argv], cwd=box.spec.workdir, env=env)
        if done.exit_code != 0:
            raise SandboxError(f"exit code {done.exit_code}: {done.text[-500:].strip()}")
        made = cls(*await asyncio.open_connection(sock=await box.connect(port), limit=limit))
        try:
            reader, made._other = await asyncio.open_connection(sock=await box.connect(port))
        except BaseException:
            made.writer.close()
            raise
        made._errors = Errors(reader)
        return made

    @property
    def said(self) -> str:
        """The end of what it wrote to stderr, as it goes into a message; empty if there is nothing."""
        return self._errors.text if self._errors is not None else ""

    async def aclose(self, patience: float = 0.0) -> None:
        """Let go of it, after ``patience`` seconds for what is under way on its stderr; it ends with its box.
        Idempotent."""
        try:
            if self._errors is not None:
                await self._errors.aclose(patience)
        finally:
            self.writer.close()
            if self._other is not None:
                self._other.close()


class Errors:
    """The end of what a server writes to stderr. Read at a pace that costs nobody anything."""

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
        """As it goes into a message; empty if there is nothing."""
        said = self._kept.decode("utf-8", "backslashreplace").strip()
        return f"; it wrote: {said}" if said else ""

    async def aclose(self, patience: float = 0.0) -> None:
        """Stop reading, after ``patience`` seconds for what is under way."""
        try:
            await asyncio.wait([self._task], timeout=patience)
        finally:
            self._task.cancel()
