"""Agent ``script``: runs one given bash script, whatever the task; or makes one list of calls, for tasks with tools."""

from __future__ import annotations

import hashlib
from typing import Any

from clawgym.agents._calls import VERSION, run_calls
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import AgentError, TaskError
from clawgym.tools.calls import read_calls
from clawgym.tools.shell import bash_call

__all__ = ["ScriptAgent", "script_command"]

_FOLDER = "/tmp/.clawgym-script"


def script_command(script: str) -> str:
    """One bash command that writes ``script`` outside the workspace, runs it and removes it; so the transcript
    holds all that is needed to do the same again."""
    end = "END_OF_SCRIPT"
    while end in script:
        end += "_"
    body = script if script.endswith("\n") else script + "\n"
    return (
        f"mkdir -p {_FOLDER} && cat > {_FOLDER}/run.sh <<'{end}'\n{body}{end}\n"
        f"bash {_FOLDER}/run.sh\nscript_status=$?; rm -rf {_FOLDER}; (exit $script_status)"
    )


class ScriptAgent:
    """Runs ``script`` with bash in the workspace; where a task brings tools, it is a JSON list of calls of them (as
    ``solve.json``). For wrong solutions, and for demos."""

    version = VERSION

    def __init__(self, script: bytes, name: str = "script") -> None:
        self.name = name
        self._script = script
        self._digest = hashlib.sha256(script).hexdigest()
        try:
            self._command = script_command(script.decode())
        except UnicodeDecodeError as error:
            raise AgentError(f"the script of agent {name!r} is not UTF-8 text ({error}): save it as UTF-8") from error
        if "\0" in self._command:
            raise AgentError(f"the script of agent {name!r} holds a NUL character: take it out")

    async def run(self, context: AgentContext) -> AgentReport:
        """Run the script. One that fails is graded like any other work."""
        if context.task.brings_tools:
            try:
                calls = read_calls(self._script, f"task {context.task.id} has tools, and the script of {self.name!r}")
            except TaskError as error:
                raise AgentError(str(error)) from error
            return await run_calls(context, calls)
        return await run_calls(context, [bash_call(self._command)], timeout=context.task.limits.agent_seconds)

    def identity(self) -> dict[str, Any]:
        """Name, version and the script's digest."""
        return {"name": self.name, "version": self.version, "script_sha256": self._digest}

    async def aclose(self) -> None: ...
