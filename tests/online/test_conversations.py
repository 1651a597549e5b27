"""Which conversation a request belongs to, and when it ends, by a clock of the test's own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clawgym.gateway.calls import Refusal
from clawgym.gateway.dialects.chat import ChatDialect
from clawgym.gateway.server import Gateway
from clawgym.gateway.sessions import Session
from clawgym.online.conversations import Conversations
from clawgym.pool import Pool

from ..gateway.scripted import ScriptedEngine


class Service:
    """Conversations over a scripted engine."""

    def __init__(self, gateway: Gateway, **rules: Any) -> None:
        self.now = 0.0
        self.gateway = gateway
        self.conversations = Conversations(gateway, clock=lambda: self.now, **rules)

    async def ask(self, *messages: tuple[str, str], source: str = "user", **about: Any) -> Session:
        """Send a history of (role, text), and return its session."""
        headers = about.pop("headers", {})
        body = {"messages": [{"role": role, "content": text} for role, text in messages], **about}
        call = ChatDialect().call(body, None)
        session = await self.conversations.session(source, headers, body, call)
        async for _ in self.gateway.core.answer(session, call):
            pass
        return session


@pytest_asyncio.fixture
async def gateway(model_folder: Path, tmp_path: Path) -> AsyncIterator[Gateway]:
    engine = ScriptedEngine(model_folder, lambda _, n: "Sure.")
    with contextlib.closing(Pool(tmp_path / "pool.db")) as pool:
        async with Gateway(engine, pool) as running:
            yield running


async def test_a_conversation_ends_when_it_was_idle(gateway: Gateway) -> None:
    service = Service(gateway, idle=10, held_out=0)
    session = await service.ask(("user", "Hi"))
    service.now = 9
    assert await service.conversations.end_idle() == 0
    assert await service.ask(("user", "Hi"), ("assistant", "Sure."), ("user", "More")) is session
    service.now = 18
    assert await service.conversations.end_idle() == 0, "its last request was at 9"
    service.now = 19
    assert await service.conversations.end_idle() == 1
    assert session.closed
    history = ("user", "Hi"), ("assistant", "Sure."), ("user", "More"), ("assistant", "Sure."), ("user", "Again")
    assert await service.ask(*history) is not session


async def test_the_clients_own_id_decides(gateway: Gateway) -> None:
    service = Service(gateway, idle=10, held_out=0)
    one = await service.ask(("user", "Hi"), headers={"x-session-id": "a"})
    two = await service.ask(("user", "Hi"), prompt_cache_key="b")
    assert one is not two
    assert await service.ask(("user", "Other words"), headers={"x-session-id": "a"}) is one
    assert await service.ask(("user", "Other words"), prompt_cache_key="b") is two
    assert await service.ask(("user", "Hi"), ("assistant", "Sure."), ("user", "More")) not in (one, two)
    assert await service.ask(("user", "Hi"), prompt_cache_key="b", source="other") is not two


async def test_calls_beside_a_conversation_belong_to_it(gateway: Gateway) -> None:
    """A rewritten history does; but a chat that begins alike is another one."""
    service = Service(gateway, idle=10, held_out=0)
    system = ("system", "You help with a garden, and answer briefly and kindly.")
    first = ("user", "Please plan the beds of my vegetable garden for the spring.")
    session = await service.ask(system, first)
    rewritten = (system, first, ("assistant", "Sure!"), ("user", "And the autumn?"))
    assert await service.ask(*rewritten) is session
    latest = await service.ask(system, first)
    assert latest is not session
    assert await service.ask(*rewritten, ("assistant", "Sure!"), ("user", "Thanks")) is latest, "of two, the latest"


async def test_two_sessions_with_the_same_greeting_are_two_conversations(gateway: Gateway) -> None:
    """OpenClaw 2026.4.1 begins each session after /new with the same messages, one of which looks like a reply."""
    service = Service(gateway, idle=10, held_out=0)
    begin = (
        ("system", "You are a personal assistant running inside OpenClaw."),
        ("user", "(session bootstrap)"),
        ("assistant", "✅ New session started · model: svc/policy"),
        ("user", "A new session was started via /new or /reset. Run your Session Startup sequence."),
    )
    one, two = await service.ask(*begin), await service.ask(*begin)
    assert one is not two
    assert await service.ask(*begin, ("assistant", "Sure."), ("user", "Plan a garden.")) in (one, two)


async def test_a_request_for_a_title_belongs_to_its_conversation(gateway: Gateway) -> None:
    service = Service(gateway, idle=10, held_out=0)
    gateway.engine._say = lambda prompt, n: "Begin with the beds that get the most sun."  # type: ignore[attr-defined]
    asked = "Please plan the beds of my vegetable garden."
    session = await service.ask(("user", asked))
    other = await service.ask(("user", "Something else entirely, and as long as that."))
    about = "Generate a short slug.\n\nConversation summary:\nuser: {}\nassistant: {}"
    title = about.format(asked, "Begin with the beds that get the most sun.")
    assert await service.ask(("system", "You are an assistant."), ("user", title)) is session
    assert await service.ask(("user", about.format("What else?", "Nothing at all."))) not in (session, other)


async def test_heartbeats_keep_no_conversation_open(gateway: Gateway) -> None:
    service = Service(gateway, idle=10, held_out=0)
    session = await service.ask(("user", "Hi"))
    service.now = 8
    poll = "Read HEARTBEAT.md if it exists. If nothing needs attention, reply HEARTBEAT_OK.\nCurrent time: 7:36 AM"
    assert await service.ask(("user", "Hi"), ("assistant", "Sure."), ("user", poll)) is session
    service.now = 10
    assert await service.conversations.end_idle() == 1


async def test_the_oldest_conversation_ends_when_there_are_too_many(gateway: Gateway) -> None:
    service = Service(gateway, idle=10, held_out=0, most=2)
    sessions = [await service.ask(("user", f"Chat {n}")) for n in range(3)]
    assert [one.closed for one in sessions] == [True, False, False]


async def test_conversations_that_wait_for_replies_are_not_ended(gateway: Gateway) -> None:
    service = Service(gateway, idle=10, held_out=0, most=1)
    session = await service.ask(("user", "Chat"))
    service.now = 100
    with session.handled():
        assert await service.conversations.end_idle() == 0
        with pytest.raises(Refusal, match="1 conversations of this key wait"):
            await service.ask(("user", "Another chat"))
    assert not session.closed
    await service.ask(("user", "Another chat"))
    assert session.closed


async def test_held_out_conversations_have_a_channel_of_their_own(gateway: Gateway) -> None:
    service = Service(gateway, idle=10, held_out=0.5)
    for n in range(60):
        await service.ask(("user", f"Chat {n}"), headers={"x-session-id": "always the same" if n % 2 else str(n)})
    held_out = [episode.channel for episode in gateway.pool.episodes()].count("held-out:user")
    assert 5 <= held_out <= 28, "of 31, and a client cannot choose it"
