"""Agent ``tool-loop``: a model, and the tools of the task. The whole algorithm is :meth:`ToolLoopAgent.run`.

Invariant: each model call is one recorded step, with everything that was done because of it, also when the
episode is cut off in the middle of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import Any, Literal

from clawgym.agents._calls import VERSION, now
from clawgym.agents._dialects import LoopProtocol, Message, TextDialect, ToolsDialect
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.engines.protocol import Checkable, Engine, Sampling
from clawgym.errors import AgentError, BudgetExceeded
from clawgym.records import Observation, Step, Usage
from clawgym.registry import agents
from clawgym.tools import CallRefused, closing

__all__ = ["SYSTEM_PROMPT", "TOOLS_PROMPT", "ToolLoopAgent"]

SYSTEM_PROMPT = """\
You work on a Linux machine, on your own, until the task you are given is done. Nobody answers questions.
The task's files are in {workspace}, where your shell starts; leave your results there. There is no network.
A command may run for {command_seconds:g} seconds and must not wait for keyboard input.
Look at the files before you change them, and check your results before you finish."""

TOOLS_PROMPT = """\
You work with the tools you are given, on your own, until the task is done. Nobody answers questions.
A call may take {command_seconds:g} seconds. What a tool answers is all that you can see: look before you change
things, and check your results before you finish."""

_ALWAYS = ("temperature", "top_p", "max_tokens", "seed")
"""Settings that a run manifest names also where they are open: runs that began before there were others go on."""
_DIALECTS: dict[str, type[LoopProtocol]] = {"tools": ToolsDialect, "text": TextDialect}


@agents.register("tool-loop")
class ToolLoopAgent:
    """Lets a model call tools until it submits or a budget ends.

    Closing the agent closes its engine.

    Args:
        engine: what it samples from; on the command line, --model and --base-url name one.
        sampling: how; a seed that it leaves open is the episode's.
        protocol: ``tools`` (OpenAI tool calls) or ``text`` (one bash block per reply, for models without tool calls,
            on tasks without tools of their own).
        system_prompt: replaces :data:`SYSTEM_PROMPT` and, for tasks with tools, :data:`TOOLS_PROMPT`; how to call
            tools is added to either.
        max_malformed: replies in a row with nothing to do in them, after which the episode ends: submitted if the
            model only talked, an error if it kept calling wrongly.
    """

    name = "tool-loop"
    version = VERSION

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: Sampling | None = None,
        protocol: Literal["tools", "text"] = "tools",
        system_prompt: str | None = None,
        max_malformed: int = 3,
    ) -> None:
        if protocol not in _DIALECTS:
            raise AgentError(f"there is no protocol {protocol!r}: use 'tools' or 'text'")
        self._engine = engine
        self._sampling = sampling or Sampling()
        self._dialect = _DIALECTS[protocol]()
        self._system_prompt = system_prompt
        self._max_malformed = max_malformed

    async def run(self, context: AgentContext) -> AgentReport:
        """Work on the task. See the class."""
        task = context.task
        dialect = self._dialect
        if task.brings_tools and not dialect.offers_tools:
            raise AgentError(f"task {task.id} brings tools, which protocol 'text' cannot call: use protocol 'tools'")
        tools = context.tools.schemas if dialect.offers_tools else ()
        sampling = self._sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=context.seed & 0x7FFFFFFF)
        system = f"{self._system(context)}\n\n{dialect.how_to}"
        messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task.instruction},
        ]
        context.record(Step("system", system, now()))
        usage = Usage()
        malformed = 0
        for number in range(1, task.limits.max_steps + 1):
            try:
                completion = await self._engine.complete(messages, tools=tools, sampling=sampling)
            except BudgetExceeded as error:
                return AgentReport("budget", error.cause, usage=usage)
            usage += completion.usage
            if completion.turn is not None:
                context.record_turn(completion.turn)
            started = now()
            adaptations = self._engine.identity().get("adaptations")
            reply = dialect.read(completion, number)
            observations: list[Observation] = []
            try:
                observations = await context.tools.call_all(reply.calls, on_observation=observations.append)
                if reply.complaint:
                    observations.append(Observation(reply.complaint))
            finally:
                context.record(
                    Step(
                        "agent",
                        completion.text,
                        started,
                        tool_calls=reply.calls,
                        observations=tuple(observations),
                        reasoning=completion.reasoning,
                        model=completion.model or None,
                        usage=completion.usage,
                        extra={"adaptations": adaptations} if adaptations else {},
                    )
                )
            done = [c for c, o in zip(reply.calls, observations, strict=False) if not isinstance(o, CallRefused)]
            if words := [said for call in done if (said := closing(call)) is not None]:
                return AgentReport(final_message=words[-1] or completion.text, usage=usage)
            malformed = 0 if done else malformed + 1
            if malformed >= self._max_malformed:
                if reply.prose:
                    return AgentReport(final_message=completion.text, usage=usage)
                return AgentReport("error", "malformed", final_message=completion.text, usage=usage)
            messages += dialect.write(completion, reply, observations)
        return AgentReport("budget", "steps", usage=usage)

    def identity(self) -> dict[str, Any]:
        """Name, version, protocol, sampling, a digest of the prompt, and the engine's run manifest."""
        prompt = f"{self._system_prompt or SYSTEM_PROMPT}\n\n{self._dialect.how_to}"
        return {
            "name": self.name,
            "version": self.version,
            "protocol": self._dialect.name,
            "sampling": {k: v for k, v in asdict(self._sampling).items() if v is not None or k in _ALWAYS},
            "system_prompt_sha256": hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest(),
            "max_malformed": self._max_malformed,
            "engine": self._engine.identity(),
        }

    async def check(self) -> None:
        """See :class:`~clawgym.engines.protocol.Checkable`."""
        if isinstance(self._engine, Checkable):
            await self._engine.check()

    async def aclose(self) -> None:
        await self._engine.aclose()

    def _system(self, context: AgentContext) -> str:
        if self._system_prompt is not None:
            return self._system_prompt
        task = context.task
        prompt = TOOLS_PROMPT if task.brings_tools else SYSTEM_PROMPT
        return prompt.format(workspace=task.workspace, command_seconds=task.limits.command_seconds)
