"""Agent ``script``: runs one given bash script, or one list of tool calls, whatever the task."""

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
    """Return one bash command that writes ``script`` outside the workspace, runs it and removes it.

    The transcript then contains the whole script, so a replay can repeat it.
    """
    end = "END_OF_SCRIPT"
    while end in script:
        end += "_"
    body = script if script.endswith("\n") else script + "\n"
    return (
        f"mkdir -p {_FOLDER} && cat > {_FOLDER}/run.sh <<'{end}'\n{body}{end}\n"
        f"bash {_FOLDER}/run.sh\nscript_status=$?; rm -rf {_FOLDER}; (exit $script_status)"
    )


class ScriptAgent:
    """Runs ``script`` with bash in the workspace. Used for wrong solutions and demos.

    For a task with tools of its own, ``script`` is a JSON list of calls, in the format of ``solve.json``.

    Raises:
        AgentError: ``script`` is not UTF-8 text, or contains a NUL character.
    """

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
            raise AgentError(f"the script of agent {name!r} contains a NUL character: remove it")

    async def run(self, context: AgentContext) -> AgentReport:
        """Run the script. A failing script is graded like any other work.

        Raises:
            AgentError: the task has tools of its own, and the script is not a JSON list of calls.
        """
        if context.task.brings_tools:
            try:
                calls = read_calls(self._script, f"task {context.task.id} has tools, and the script of {self.name!r}")
            except TaskError as error:
                raise AgentError(str(error)) from error
            return await run_calls(context, calls)
        return await run_calls(context, [bash_call(self._command)], timeout=context.task.limits.agent_seconds)

    def identity(self) -> dict[str, Any]:
        """Return name, version and the SHA-256 of the script."""
        return {"name": self.name, "version": self.version, "script_sha256": self._digest}

    async def aclose(self) -> None: ...
