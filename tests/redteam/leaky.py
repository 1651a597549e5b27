"""Real sandboxes with one promise broken each, so that a probe which finds nothing in a good backend is seen to find
it."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from typing import Any

from clawgym.errors import SandboxError
from clawgym.records import TaskFile
from clawgym.sandbox import Archive, Backend, ExecResult, Sandbox, SandboxSpec, Snapshot


class Leaky:
    """A backend whose sandboxes break the promises in ``leaks``."""

    def __init__(self, inner: Backend, *leaks: str) -> None:
        self.inner = inner
        self.leaks = leaks
        self.name = "leaky"
        self._first: LeakySandbox | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def create(self, spec: SandboxSpec) -> Any:
        if "one sandbox for all" in self.leaks and self._first is not None:
            return self._first
        readonly = spec.readonly
        if "readonly is not" in self.leaks:
            spec = replace(spec, readonly={})
        mounts = spec.mounts
        if "mounts are copies" in self.leaks:
            spec = replace(spec, mounts={})
        sandbox = LeakySandbox(await self.inner.create(spec), self.leaks)
        if "readonly is not" in self.leaks:
            for folder, files in readonly.items():
                await sandbox.put(files, folder)
        if "mounts are copies" in self.leaks:
            for folder, source in mounts.items():
                await sandbox.put([TaskFile(path.name, path.read_bytes()) for path in source.iterdir()], folder)
        self._first = self._first or sandbox
        return sandbox

    async def fork(self, snapshot: Any, spec: SandboxSpec | None = None) -> Any:
        if isinstance(snapshot, Archive):
            sandbox = await self.inner.create(SandboxSpec())
            await sandbox.put_archive(snapshot, sandbox.spec.workdir)
            return sandbox
        return LeakySandbox(await self.inner.fork(snapshot, spec), self.leaks)

    async def drop(self, snapshot: Any) -> None:
        if isinstance(snapshot, Snapshot):
            await self.inner.drop(snapshot)


class LeakySandbox:
    """A sandbox that breaks the promises in ``leaks``."""

    def __init__(self, inner: Sandbox, leaks: tuple[str, ...]) -> None:
        self.inner = inner
        self.leaks = leaks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def connect(self, port: int) -> socket.socket:
        if "connects nowhere" in self.leaks:
            raise SandboxError("no connections here")
        aim = await self.inner.exec(["readlink", f"/tmp/port-{port}"])
        if aim.exit_code or "connects by path" not in self.leaks:
            return await self.inner.connect(port)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(aim.text.strip())
        return sock

    def tool(self, name: str) -> list[str]:
        return [name] if "tools are not pristine" in self.leaks else self.inner.tool(name)

    async def stop(self) -> None:
        if "never stops" not in self.leaks and "one sandbox for all" not in self.leaks:
            await self.inner.stop()

    async def close(self) -> None:
        if "never stops" not in self.leaks and "one sandbox for all" not in self.leaks:
            await self.inner.close()

    async def snapshot(self) -> Any:
        if "copies a moving sandbox" in self.leaks:
            return await self.inner.get_archive(self.inner.spec.workdir)
        return await self.inner.snapshot()

    async def get_archive(self, path: str, **caps: Any) -> Archive:
        if "archives by the sandbox's tar" in self.leaks:
            done = await self.inner.exec(["tar", "-cf", "-", "-C", path, "."], stdout_only=True, max_output=1 << 24)
            return Archive(done.output)
        return await self.inner.get_archive(path, **caps)

    async def shell(self, *, pty: bool = False) -> Any:
        return LeakyShell(await self.inner.shell(pty=pty), self.leaks)


class LeakyShell:
    """A shell that reads the end of a command, or text, in what the command prints."""

    def __init__(self, inner: Any, leaks: tuple[str, ...]) -> None:
        self.inner = inner
        self.leaks = leaks

    async def run(self, command: str, **limits: Any) -> ExecResult:
        if "exit code in the output" in self.leaks:
            done = await self.inner.run(f'{command}\necho; echo "[exit $?]"', **limits)
            found = re.search(rb"\[exit (\d+)\]", done.output)
            return replace(done, output=done.output.split(b"\n[exit ")[0], exit_code=int(found[1]) if found else 1)
        done = await self.inner.run(command, **limits)
        if "output is text" in self.leaks:
            return replace(done, output=done.output.decode("utf-8", "replace").encode())
        return done
