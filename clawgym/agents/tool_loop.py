"""Agent ``tool-loop``: a model that calls the task's tools. The whole algorithm is :meth:`ToolLoopAgent.run`.

Invariant: each model call is recorded as one step with the results of its tool calls, also if the episode is cut off
while they run.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import Any, Literal

from clawgym.agents._calls import VERSION, now
from clawgym.agents._dialogue import Conversation
from clawgym.agents._protocols import LoopProtocol, TextProtocol, ToolCallProtocol
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
"""Sampling parameters that the run manifest lists even if they are None, so that manifests of older runs match."""
_PROTOCOLS: dict[str, type[LoopProtocol]] = {"tools": ToolCallProtocol, "text": TextProtocol}


@agents.register("tool-loop")
class ToolLoopAgent:
    """Lets a model call tools until it submits or a budget is used up. Closing the agent closes its engine.

    In a task with a dialogue, a reply without calls is a message to the user, and the work ends when the user has
    nothing more to say.

    Args:
        engine: the engine to sample from; on the command line, --model and --base-url name one.
        sampling: sampling parameters. Without a seed, the seed of the episode is used.
        protocol: ``tools`` (OpenAI tool calls) or ``text`` (one bash block per reply, for models without tool calls,
            on tasks without tools of their own). ``auto``: ``text`` for a model in this process whose chat template has
            no tools, else ``tools``.
        system_prompt: replaces :data:`SYSTEM_PROMPT` and, for tasks with tools of their own, :data:`TOOLS_PROMPT`.
            Instructions for the protocol are appended to it.
        max_malformed: the episode ends after so many replies in a row without a valid call: as submitted if the last
            one was plain text, as failed if it was a malformed call.

    Raises:
        AgentError: ``protocol`` is unknown.
    """

    name = "tool-loop"
    version = VERSION

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: Sampling | None = None,
        protocol: Literal["auto", "tools", "text"] = "auto",
        system_prompt: str | None = None,
        max_malformed: int = 3,
    ) -> None:
        if protocol == "auto":
            protocol = "tools" if getattr(engine, "takes_tools", True) else "text"
        if protocol not in _PROTOCOLS:
            raise AgentError(f"unknown protocol {protocol!r}: use 'auto', 'tools' or 'text'")
        self._engine = engine
        self._sampling = sampling or Sampling()
        self._protocol = _PROTOCOLS[protocol]()
        self._system_prompt = system_prompt
        self._max_malformed = max_malformed

    async def run(self, context: AgentContext) -> AgentReport:
        """Work on the task.

        Raises:
            AgentError: the task has tools of its own, and the protocol is ``text``.
        """
        task = context.task
        protocol = self._protocol
        if task.brings_tools and not protocol.offers_tools:
            raise AgentError(
                f"task {task.id} has tools of its own, which protocol 'text' cannot call: use protocol 'tools'"
            )
        dialogue = Conversation(context) if task.dialogue is not None else None
        tools = context.tools.schemas if protocol.offers_tools else ()
        sampling = self._sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=context.seed & 0x7FFFFFFF)
        if dialogue is not None:
            messages = await dialogue.open()
        else:
            system = f"{self._system(context)}\n\n{protocol.how_to}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": task.instruction}]
            context.record(Step("system", system, now()))
        usage = Usage()
        malformed = 0
        for number in range(1, task.limits.max_steps + 1):
            if dialogue is not None:
                tools = dialogue.tools
            try:
                completion = await self._engine.complete(messages, tools=tools, sampling=sampling)
            except BudgetExceeded as error:
                return AgentReport("budget", error.cause, usage=usage)
            usage += completion.usage
            if completion.turn is not None:
                context.record_turn(completion.turn)
            started = now()
            adaptations = self._engine.identity().get("adaptations")
            reply = protocol.read(completion, number)
            speaks = dialogue is not None and not reply.calls and not completion.malformed_calls
            observations: list[Observation] = []
            try:
                observations = await context.tools.call_all(reply.calls, on_observation=observations.append)
                if reply.complaint and not speaks:
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
            if dialogue is not None and (speaks or context.user is None):
                messages += protocol.write(completion, reply, observations)
                if not await dialogue.say(completion.text, messages):
                    return AgentReport(final_message=completion.text, usage=usage)
                malformed = 0
                continue
            accepted = [c for c, o in zip(reply.calls, observations, strict=False) if not isinstance(o, CallRefused)]
            if messages_at_end := [text for call in accepted if (text := closing(call)) is not None]:
                return AgentReport(final_message=messages_at_end[-1] or completion.text, usage=usage)
            malformed = 0 if accepted else malformed + 1
            if malformed >= self._max_malformed:
                if reply.prose:
                    return AgentReport(final_message=completion.text, usage=usage)
                return AgentReport("error", "malformed", final_message=completion.text, usage=usage)
            messages += protocol.write(completion, reply, observations)
        return AgentReport("budget", "steps", usage=usage)

    def identity(self) -> dict[str, Any]:
        """Return name, version, protocol, sampling, the SHA-256 of the system prompt, and the engine's identity."""
        prompt = f"{self._system_prompt or SYSTEM_PROMPT}\n\n{self._protocol.how_to}"
        return {
            "name": self.name,
            "version": self.version,
            "protocol": self._protocol.name,
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
