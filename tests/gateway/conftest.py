"""Fixtures: a gateway on a real port, with a scripted engine and a real pool."""

from __future__ import annotations

import contextlib

import pytest

from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool

from .scripted import ScriptedEngine


@pytest.fixture
def pool(tmp_path):
    with contextlib.closing(Pool(tmp_path / "pool.db")) as pool:
        yield pool


class GatewaySetup:
    """A running gateway and one open session."""

    def __init__(self, gateway, engine, session):
        self.gateway, self.engine, self.session = gateway, engine, session
        self.pool = gateway.pool
        self.base_url = gateway.base_url(session)

    @property
    def turns(self):
        return self.pool.turns(self.session.id)

    @contextlib.asynccontextmanager
    async def openai(self):
        import openai

        async with openai.AsyncOpenAI(base_url=self.base_url, api_key=self.session.secret, max_retries=0) as client:
            yield client

    async def chat(self, messages, **more):
        """Send one request without streaming; return the SDK's response."""
        async with self.openai() as client:
            return await client.chat.completions.create(model="policy", messages=messages, **more)


@pytest.fixture
async def make_gateway(model_folder, pool):
    """``await make_gateway(say, **engine options)``: a gateway with a scripted engine and one session."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(say, *, session=None, gateway=None, engine=None, **options):
            if engine is None:
                engine = ScriptedEngine(
                    model_folder, say if callable(say) else lambda _, n: reply_text(say, n), **options
                )
            running = await stack.enter_async_context(Gateway(engine, pool, **(gateway or {})))
            await running.listen()
            return GatewaySetup(running, engine, await running.open_session(SessionRequest(**(session or {}))))

        yield make


def reply_text(answers, n):
    return answers if isinstance(answers, str) else answers[n]
