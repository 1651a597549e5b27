"""A workspace in this process, for experiments with very many episodes of ``clawgym.trainers.recipes.chains`` and of
``text-steps``.

    clawgym train rl ... --set backend=inprocess:InProcess        # with this folder on PYTHONPATH

It isolates nothing, because there is nothing to isolate: the few commands of these tasks are done in Python, on files
in memory, and every other command is "not found". The checkers are the tasks' own, and run in this process, so no other
task set is graded.

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
from clawgym.records import TaskFile, Turn
from clawgym.sandbox import backend
from clawgym.sandbox.protocol import Archive, Backend, ExecResult, Isolation, SandboxSpec, Snapshot
from clawgym.tasks.packs import pack
from clawgym.tools.shell import ShellTools, bash_call
from clawgym.trainers.recipes import chains
from clawgym.verifiers.grading import Subject, grade

__all__ = ["InProcess"]

Lines = list[str]
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
        self.files = dict(files)

    def tool(self, name: str) -> list[str]:
        return [name]

    async def shell(self, *, pty: bool = False) -> Shell:
        del pty
        return Shell(self)

    async def exec(self, argv: Iterable[str], *, stdin: bytes = b"", **_: Any) -> ExecResult:
        words = [*argv]
        if words[-2].endswith("/check.py"):
            said = graded(self, words[-2].rpartition("/")[0], words[-1])
            return ExecResult(said.encode(), 0, "/", stderr=stdin)
        return ExecResult(b"", 0, "/") if words == ["true"] else ExecResult(b"", 127, "/")

    async def put(self, files: Iterable[TaskFile], dest: str) -> None:
        self.files |= {str(PurePosixPath(dest, file.path)): file.read() for file in files}

    async def put_archive(self, archive: Archive, dest: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(archive.tar), mode="r:") as tar:
            for member in tar:
                if member.isreg() and (file := tar.extractfile(member)) is not None:
                    self.files[str(PurePosixPath(dest, member.name))] = file.read()

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
        raise SandboxError(f"port {port}: there is no network")

    async def stop(self) -> None: ...

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.id, "inprocess", self.spec, dict(self.files))

    async def close(self) -> None: ...


class InProcess:
    """Makes workspaces; a :class:`clawgym.sandbox.protocol.Backend`."""

    name = "inprocess"

    async def probe(self) -> Isolation:
        return Isolation("inprocess", "none", {}, ("nothing is isolated: for experiments with the tasks of chains",))

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
    if not source.startswith((b'"""Grades one instance of chain-', b'"""Grades one instance of text-steps')):
        raise SandboxError("only the checkers of chain-N and text-steps run here: use a sandbox")
    sys.modules["clawgym_checks"] = library(box.files[f"{folder}/clawgym_checks.py"])
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
def library(source: bytes) -> types.ModuleType:
    """The module of checks. It may end no process: here they are its own siblings."""
    module = types.ModuleType("clawgym_checks")
    exec(compile(source, "clawgym_checks.py", "exec"), module.__dict__)
    module.__dict__["kill_strays"] = lambda: None
    return module


@cache
def compiled(source: bytes) -> types.CodeType:
    return compile(source, "check.py", "exec")


async def again(number: str, turns: Sequence[Turn], sandboxes: Backend) -> tuple[int, int, float]:
    """Play the commands of an episode again: how many observations are the same, how many there are, and the score."""
    kind, _, seed = number.rpartition("-")
    tasks = chains.pack() if kind.startswith("chain-") else pack("terminal-basic")
    task = tasks.make(kind, int(seed[1:]))
    sandbox = await sandboxes.create(SandboxSpec(image=task.sandbox_image, limits=task.limits, workdir=task.workspace))
    same = count = 0
    try:
        await sandbox.put(task.inputs, task.workspace)
        tools = ShellTools(sandbox, task.workspace, task.limits)
        for turn, after in zip(turns, (*turns[1:], None), strict=True):
            said = parse_reply(str((turn.reply or {}).get("content") or ""))
            if isinstance(said, Command):
                (observation,) = await tools.call_all([bash_call(said.text)])
                if after is not None:
                    count += 1
                    same += str(observation.content) == str(after.messages[-1]["content"])
        archive = await sandbox.get_archive(task.workspace)
        return same, count, (await grade(task, Subject(archive), sandboxes)).official
    finally:
        await sandbox.close()


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
