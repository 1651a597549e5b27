"""The agent's side of a task's dialogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clawgym.agents.protocol import AgentContext
from clawgym.records import Step, UserTurn
from clawgym.records.manifest import now

__all__ = ["Conversation"]


class Conversation:
    """Opens the dialogue of the task in ``context``, and passes messages to its user.

    What the user says is recorded, after the instruction that the caller has recorded.
    """

    def __init__(self, context: AgentContext) -> None:
        assert context.task.dialogue is not None
        self._context = context
        self._dialogue = context.task.dialogue
        self.withheld = set(self._dialogue.withheld)
        """Names of tools that are not offered now."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of the tools that are offered now."""
        schemas = self._context.tools.schemas
        return [schema for schema in schemas if schema["function"]["name"] not in self.withheld]

    async def open(self) -> list[dict[str, Any]]:
        """The first messages, the last of which is the user's. Raises the errors of the user."""
        messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in self._dialogue.opening]
        for role, text in self._dialogue.opening:
            if role == "system":
                self._context.record(Step("system", text, now()))
        if not messages or messages[-1]["role"] != "user":
            await self.say(messages[-1]["content"] if messages else "", messages)
        return messages

    async def say(self, text: str, messages: list[dict[str, Any]]) -> bool:
        """Pass ``text`` to the user, and append the answer to ``messages``. False if the conversation is over.

        Raises the errors of the user.
        """
        user, tools = self._context.user, getattr(self._context.tools, "of_user", None)
        turn: UserTurn | None = await user.answer(text, tools) if user is not None else None
        if turn is None:
            return False
        self.withheld -= {*turn.tools}
        self._context.record(Step("user", turn.text, now()))
        messages.append({"role": "user", "content": turn.text})
        return True
