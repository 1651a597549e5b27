"""Tasks with tools without boxes: for programs and lists of calls that are our own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clawgym.records import Task, TaskFile, ToolServer
from clawgym.tasks.mathematics import MATH_FOLDER
from clawgym.tasks.worlds import servers
from clawgym.tasks.worlds.servers.world import World

RUN_CHECK = (
    "import sys, runpy; path = sys.argv[1]; sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, path.rpartition('/')[0]); runpy.run_path(path, run_name='__main__')"
)
"""As the grader runs a checker: isolated, with the checker's own folder to import from."""


def put(files: Sequence[TaskFile], folder: Path) -> Path:
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Running:
    """A tool server as a plain process, spoken to line by line."""

    def __init__(self, server: ToolServer, folder: Path) -> None:
        home = put(server.files, folder / "tools" / server.name)
        workspace = folder / "workspace"
        workspace.mkdir(parents=True, exist_ok=True)
        argv = [arg.replace(f"/tools/{server.name}", str(home)) for arg in server.argv]
        self.process = subprocess.Popen(
            [sys.executable, *argv[1:]],
            cwd=workspace,
            env={"PATH": "/usr/bin:/bin", **server.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._number = 0

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def raw(self, line: bytes) -> dict[str, Any]:
        """The answer to one line."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        answer = self.raw(
            json.dumps({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}).encode()
        )
        assert answer["id"] == self._number
        return answer

    def call(self, name: str, **arguments: Any) -> tuple[str, bool]:
        """The text of a call's result, and whether it is an error."""
        result = self.ask("tools/call", name=name, arguments=arguments)["result"]
        return result["content"][0]["text"], result["isError"]


class Host:
    """A task's world in a temporary folder, with the verifier beside it."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self.workspace = put(task.inputs, folder / "workspace")
        self.verifier = put(task.verifier.files, folder / "verifier")
        if MATH_FOLDER in task.layers:
            check = self.verifier / "check.py"
            check.write_text(check.read_text().replace(MATH_FOLDER, str(task.layers[MATH_FOLDER].folder)))
        self.message = ""
        self.world: World | None = None
        first = task.tools[0]
        if first.name == "world":
            seed = next(json.loads(file.read()) for file in first.files if file.path == "seed.json")
            parts = [part for part in first.argv if part in servers.PARTS]
            self.world = World(str(self.workspace / servers.WORLD_FILE), parts, seed)

    def run(self, calls: TaskFile) -> list[dict[str, Any]]:
        """Carry out what changes a world; results of these calls."""
        results = []
        for step in json.loads(calls.read()):
            if step["name"] == "submit":
                self.message = step["arguments"]["message"]
            elif self.world and step["name"] in self.world.tools:
                results.append(self.world.call(step["name"], step["arguments"]))
        return results

    def scores(self) -> dict[str, float]:
        """The checks, from an isolated interpreter in another folder."""
        payload = self.verifier.parent / "payload.json"
        payload.write_text(json.dumps({"final_message": self.message}))
        command = [sys.executable, "-I", "-S", "-c", RUN_CHECK, str(self.verifier / "check.py"), str(self.workspace)]
        env = {"OPENCLAW_REWARD_PAYLOAD": str(payload)}
        done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
