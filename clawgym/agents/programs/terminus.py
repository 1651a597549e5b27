"""Terminus 2, Harbor's agent that types into a terminal, on the gateway's chat API.

Harbor runs it on the host and gives it a container. Here it runs in the sandbox itself: the small program below is the
environment that Harbor's class asks for, which is the sandbox that it runs in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clawgym.agents.blackbox.loopback import SUPPORT_FOLDER
from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.programs.command import HOME, CommandClaw, Needs, RunningCommand
from clawgym.records import TaskFile
from clawgym.registry import agents
from clawgym.sandbox.protocol import SandboxSpec

__all__ = ["Terminus"]

_FOLDER = f"{HOME}/.terminus"
_PROGRAM = '''"""Run Terminus 2 in this sandbox on the task in stdin: terminus.py OPTIONS LOGS."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Here:
    """This sandbox, as Harbor's agents see an environment."""

    default_user = None
    session_id = "sandbox"

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # a server would keep a pipe open
            process = await asyncio.create_subprocess_exec(
                "bash", "-c", command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err,
                cwd=cwd, env={**os.environ, **(env or {})},
            )
            try:
                code = await asyncio.wait_for(process.wait(), timeout_sec)
            except asyncio.TimeoutError:
                process.kill()
                raise
            out.seek(0)
            err.seek(0)
            said = [file.read(1 << 24).decode(errors="replace") for file in (out, err)]
        return ExecResult(stdout=said[0], stderr=said[1], return_code=code)

    async def is_dir(self, path, user=None):
        return Path(path).is_dir()


async def main():
    logs = Path(sys.argv[2])
    logs.mkdir(parents=True, exist_ok=True)
    agent = Terminus2(logs_dir=logs, **json.loads(Path(sys.argv[1]).read_text()))
    here, context = Here(), AgentContext()
    await agent.setup(here)
    await agent.run(sys.stdin.read(), here, context)


asyncio.run(main())
'''


@agents.register("terminus")
class Terminus(CommandClaw):
    """Harbor's Terminus 2. It needs tmux in the sandbox, and takes one message: it cannot resume a conversation."""

    name = "terminus"
    needs = Needs(memory_mb=1024)
    history = f"{_FOLDER}/logs"

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`~clawgym.agents.blackbox.Claw`."""
        spec = super().spec(spec)
        program = TaskFile("terminus.py", _PROGRAM.encode())
        return replace(spec, readonly={**spec.readonly, SUPPORT_FOLDER: (program,)})

    def files(self, link: ModelLink) -> Mapping[str, Any]:
        """See :class:`CommandClaw`."""
        options = {
            "model_name": f"openai/{link.model}",
            "api_base": link.base_url,
            "llm_kwargs": {"api_key": link.api_key},
            "model_info": {
                "max_input_tokens": link.context_window,
                "max_output_tokens": link.max_tokens,
                "input_cost_per_token": 0,
                "output_cost_per_token": 0,
            },
            "record_terminal_session": False,
        }
        return {f"{_FOLDER}/options.json": options}

    def environment(self, link: ModelLink) -> Mapping[str, str]:
        """See :class:`CommandClaw`."""
        return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": link.api_key}

    def command(self, link: ModelLink, message: str, *, first: bool) -> RunningCommand:
        """See :class:`CommandClaw`."""
        if not first and message:
            raise ClawStopped("Terminus cannot resume a conversation", cause="agent-one-message")
        start = f"{self.installation.mount}/python/start"
        argv = [start, f"{SUPPORT_FOLDER}/terminus.py", f"{_FOLDER}/options.json", f"{_FOLDER}/logs"]
        return RunningCommand(argv, message.encode())
