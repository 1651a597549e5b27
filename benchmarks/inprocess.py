"""A workspace in this process, for experiments with very many episodes of ``clawgym.trainers.recipes.chains``, of
``text-steps``, and of the family ``inventory`` of ``toolcall-basic``.

    clawgym train rl ... --set backend=inprocess:InProcess        # with this folder on PYTHONPATH

It isolates nothing, because there is nothing to isolate: the few commands of these tasks are done in Python, on files
in memory, and every other command is "not found". The server of a store room is the task's own, over a database in
memory. The checkers are the tasks' own, and run in this process, so no other task set is graded.

    python benchmarks/inprocess.py runs/sparse/milestones-0 --episodes 200

plays recorded episodes again in sandboxes, and prints how many observations and scores are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import shlex
import socket
import sys
import tarfile
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from clawgym.agents.text_protocol import Command, parse_reply
from clawgym.errors import SandboxError
from clawgym.pool import Pool
from clawgym.records import TaskFile, ToolCall, Turn
from clawgym.sandbox import backend
from clawgym.sandbox.protocol import Archive, Backend, ExecResult, Isolation, SandboxSpec, Snapshot
from clawgym.tasks.packs import pack
from clawgym.tasks.worlds.servers.world import World
from clawgym.tools import open_tools, sandbox_spec
from clawgym.tools.shell import bash_call
from clawgym.trainers.recipes import chains
from clawgym.verifiers.grading import Subject, grade

__all__ = ["InProcess"]

Lines = list[str]
KINDS = (b"chain-", b"text-steps", b"inventory-")
"""Of tasks whose checkers run here."""
MISSING = {  # what the tools say when they cannot open a file, and their exit codes
    "sort": ("sort: cannot read: {0}: No such file or directory", 2),
    "tac": ("tac: failed to open '{0}' for reading: No such file or directory", 1),
    "head": ("head: cannot open '{0}' for reading: No such file or directory", 1),
    "tail": ("tail: cannot open '{0}' for reading: No such file or directory", 1),
    "sed": ("sed: can't read {0}: No such file or directory", 2),
    "cat": ("cat: {0}: No such file or directory", 1),
    "grep": ("grep: {0}: No such file or directory", 2),
}


def program(words: list[str]) -> tuple[Callable[[list[Lines]], Lines], list[str]] | None:
    """What a command does to the lines of files, and the names of the files; None for another command."""
    match words:
        case ["sort", "-r", *names] if names:
            return lambda files: sorted(_joined(files), reverse=True), names
        case ["sort", *names] if names:
            return lambda files: sorted(_joined(files)), names
        case ["tac", *names] if names:
            return lambda files: [line for lines in files for line in lines[::-1]], names
        case ["cat", *names] if names:
            return _joined, names
        case ["head", "-n", count, name] if count.isdecimal():
            return lambda files: _joined(files)[: int(count)], [name]
        case ["tail", "-n", count, name] if count.isdecimal():
            return lambda files: _joined(files)[max(0, len(_joined(files)) - int(count)) :], [name]
        case ["sed", "1d", *names] if names:
            return lambda files: _joined(files)[1:], names
        case ["sed", "$d", *names] if names:
            return lambda files: _joined(files)[:-1], names
        case ["grep", "-c", word, name] if word.isalpha():
            return lambda files: [str(sum(word in line for line in _joined(files)))], [name]
    return None


def _joined(files: list[Lines]) -> Lines:
    return [line for lines in files for line in lines]


class Shell:
    """The part of bash that these tasks need."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._cwd = box.spec.workdir

    async def run(self, command: str, *, timeout: float | None = None, max_output: int | None = None) -> ExecResult:
        del timeout, max_output
        said, code = self._do(command.strip())
        return ExecResult(said.encode(), code, self._cwd)

    async def write(self, data: bytes) -> None:
        raise SandboxError("there is no terminal")

    async def close(self) -> None: ...

    def _do(self, command: str) -> tuple[str, int]:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=">")
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = [*lexer]
        except ValueError:
            return "bash: eval: line 6: unexpected EOF while looking for matching `''\n", 2
        if words[:2] == ["cd", "--"] and len(words) == 3:
            self._cwd = words[2]
            return "", 0
        targets: list[str] = []
        while ">" in words[:-1]:
            at = words.index(">")
            targets.append(self._path(words[at + 1]))
            self._box.files[targets[-1]] = b""  # bash opens it first
            del words[at : at + 2]
        if words[:1] == ["LC_ALL=C"]:
            del words[0]
        if not words:
            return "", 0
        found = program(words)
        if found is None:
            return f"bash: line 6: {words[0]}: command not found\n", 127
        change, names = found
        contents = [self._box.files.get(self._path(name)) for name in names]
        text, code = MISSING[words[0]]
        said = "".join(text.format(n) + "\n" for n, c in zip(names, contents, strict=True) if c is None)
        if said and words[0] in ("sort", "grep"):
            return said.partition("\n")[0] + "\n", code
        made = change([content.decode().splitlines() for content in contents if content is not None])
        output = "".join(line + "\n" for line in made)
        none = words[0] == "grep" and made == ["0"]
        if targets:
            self._box.files[targets[-1]] = output.encode()
            output = ""
        return output + said, code if said else int(none)

    def _path(self, name: str) -> str:
        return str(PurePosixPath(self._cwd, name))


class Box:
    """Files in memory: absolute path -> content."""

    def __init__(self, spec: SandboxSpec, files: Mapping[str, bytes], isolation: Isolation) -> None:
        self.id = f"inprocess-{id(self)}"
        self.spec = spec
        self.isolation = isolation
        self._files = dict(files)
        self._worlds: dict[str, World] = {}
        self._ends: list[socket.socket] = []
        self._serving: list[asyncio.Task[None]] = []

    @property
    def files(self) -> dict[str, bytes]:
        """Absolute path -> content; with the worlds as they are."""
        self._files.update({path: world.db.serialize() for path, world in self._worlds.items()})
        return self._files

    def tool(self, name: str) -> list[str]:
        return [name]

    async def shell(self, *, pty: bool = False) -> Shell:
        del pty
        return Shell(self)

    async def exec(self, argv: Iterable[str], *, stdin: bytes = b"", **_: Any) -> ExecResult:
        match [*argv]:
            case [*_, check, workspace] if check.endswith("/check.py"):
                said = graded(self, check.rpartition("/")[0], workspace)
                return ExecResult(said.encode(), 0, "/", stderr=stdin)
            case [_, "-I", "-S", "-c", _, _, *_, seed, path, "inventory"]:  # clawgym.sandbox.program
                self._serve(seed, str(PurePosixPath(self.spec.workdir, path)))
                return ExecResult(b"", 0, "/")
            case ["true"]:
                return ExecResult(b"", 0, "/")
        return ExecResult(b"", 127, "/")

    def _serve(self, seed: str, path: str) -> None:
        world = self._worlds[path] = World(":memory:", ["inventory"], json.loads(self._files[seed]))
        (said, far), (errors, other) = socket.socketpair(), socket.socketpair()
        other.close()
        self._ends = [said, errors]
        self._serving.append(asyncio.create_task(answer(world, far)))

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        self._files |= {str(PurePosixPath(dest, file.path)): file.read() for file in files}

    async def put_archive(self, archive: Archive, dest: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(archive.tar), mode="r:") as tar:
            for member in tar:
                if member.isreg() and (file := tar.extractfile(member)) is not None:
                    self._files[str(PurePosixPath(dest, member.name))] = file.read()

    async def get(self, path: str, *, max_bytes: int = 0) -> bytes:
        del max_bytes
        if path not in self.files:
            raise SandboxError(f"{path}: no such file")
        return self.files[path]

    async def get_archive(self, path: str, *, max_bytes: int = 0, max_files: int = 0) -> Archive:
        del max_bytes, max_files
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            for name, content in sorted(self.files.items()):
                if PurePosixPath(name).is_relative_to(path):
                    info = tarfile.TarInfo(str(PurePosixPath(name).relative_to(path)))
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        return Archive(made.getvalue())

    async def listen(self, port: int) -> socket.socket:
        raise SandboxError(f"port {port}: there is no network")

    async def connect(self, port: int) -> socket.socket:
        if not self._ends:
            raise SandboxError(f"port {port}: there is no network")
        end = self._ends.pop(0)
        end.setblocking(False)
        return end

    async def stop(self) -> None:
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.id, "inprocess", self.spec, dict(self.files))

    async def close(self) -> None:
        await self.stop()


async def answer(world: World, end: socket.socket) -> None:
    """Answer the requests of a client at the other end, a line each."""
    reader, writer = await asyncio.open_connection(sock=end)
    try:
        while line := await reader.readline():
            if (said := world.answer(json.loads(line))) is not None:
                writer.write(json.dumps(said).encode("ascii") + b"\n")
    finally:
        writer.close()


class InProcess:
    """Makes workspaces; a :class:`clawgym.sandbox.protocol.Backend`."""

    name = "inprocess"

    async def probe(self) -> Isolation:
        return Isolation("inprocess", "none", {}, ("nothing is isolated: for experiments with a few families",))

    async def create(self, spec: SandboxSpec) -> Box:
        mounted = {f"{folder}/{file.path}": file.read() for folder, files in spec.readonly.items() for file in files}
        return Box(spec, mounted, await self.probe())

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Box:
        return Box(spec or snapshot.spec, snapshot.handle, await self.probe())

    async def drop(self, snapshot: Snapshot) -> None: ...

    async def aclose(self) -> None: ...


def graded(box: Box, folder: str, workspace: str) -> str:
    """What the checker in ``folder`` prints about the files in ``workspace``."""
    source = box.files[f"{folder}/check.py"]
    if not source.startswith(tuple(b'"""Grades one instance of ' + kind for kind in KINDS)):
        raise SandboxError("only the checkers of chain-N, text-steps and inventory run here: use a sandbox")
    for name in ("clawgym_checks", "clawgym_answers", "clawgym_state"):
        if (path := f"{folder}/{name}.py") in box.files:
            sys.modules[name] = library(name, box.files[path])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as real:
        for name, content in box.files.items():
            path = PurePosixPath(name)
            if path.parent == PurePosixPath(workspace) and path.name != ".." and len(path.name.encode()) <= 255:
                Path(real, path.name).write_bytes(content)
        argv, sys.argv = sys.argv, ["check.py", real]
        try:
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
                exec(compiled(source), {"__name__": "__main__"})
        finally:
            sys.argv = argv
    json.loads(out.getvalue())
    return out.getvalue()


@cache
def library(name: str, source: bytes) -> types.ModuleType:
    """A module of checks. It may end no process: here they are its own siblings."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look there
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    if name == "clawgym_checks":
        module.__dict__["kill_strays"] = lambda: None
    return module


@cache
def compiled(source: bytes) -> types.CodeType:
    return compile(source, "check.py", "exec")


async def again(number: str, turns: Sequence[Turn], sandboxes: Backend) -> tuple[int, int, float]:
    """Play the calls of an episode again: how many observations are the same, how many there are, and the score."""
    kind, _, seed = number.rpartition("-")
    name = "toolcall-basic" if kind.startswith("inventory-") else "terminal-basic"
    task = (chains.pack() if kind.startswith("chain-") else pack(name)).make(kind, int(seed[1:]))
    sandbox = await sandboxes.create(sandbox_spec(task))
    same = count = 0
    try:
        await sandbox.put(task.inputs, task.workspace)
        tools = await open_tools(task, sandbox, sandboxes)
        for turn, after in zip(turns, (*turns[1:], None), strict=True):
            calls = calls_of(turn.reply or {}, text=not task.tools)
            observations = await tools.call_all(calls)
            if after is not None and calls:
                seen = [str(message["content"]) for message in after.messages[-len(calls) :]]
                count += len(calls)
                same += sum(str(one.content) == other for one, other in zip(observations, seen, strict=True))
        await tools.aclose()
        archive = await sandbox.get_archive(task.workspace)
        return same, count, (await grade(task, Subject(archive), sandboxes)).official
    finally:
        await sandbox.close()


def calls_of(reply: Mapping[str, Any], *, text: bool) -> list[ToolCall]:
    """The calls of a reply in OpenAI's form; with ``text`` the command that its text is."""
    if text:
        said = parse_reply(str(reply.get("content") or ""))
        return [bash_call(said.text)] if isinstance(said, Command) else []
    functions = [(call["id"], call["function"]) for call in reply.get("tool_calls") or ()]
    return [ToolCall(id, function["name"], json.loads(function["arguments"])) for id, function in functions]


async def compare(run: Path, episodes: int) -> None:
    sandboxes = backend("namespace")
    same = count = scores = 0
    try:
        with Pool(run / "pool.db") as pool:
            found = list(pool.episodes(channel="train", state="closed"))
            found = random.Random(0).sample(found, min(episodes, len(found)))
            for episode in found:
                alike, of, score = await again(episode.task_id, pool.turns(episode.id), sandboxes)
                same, count = same + alike, count + of
                scores += abs(score - episode.rewards["official"]) < 1e-9
    finally:
        await sandboxes.aclose()
    print(f"{len(found)} episodes: {same} of {count} observations and {scores} scores are those of a sandbox")


if __name__ == "__main__":
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("run", type=Path)
    ask.add_argument("--episodes", type=int, default=200)
    said = ask.parse_args()
    asyncio.run(compare(said.run, said.episodes))
