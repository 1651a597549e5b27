"""One call before a run: what is wrong with model, key or URL is named."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from clawgym.engines import OpenAIEngine, _check
from clawgym.errors import EngineError

from .fake_openai import FakeOpenAI, error, raw, reply, slow

KEY = "sk-thisisasecretkey123"


def engine(server: FakeOpenAI, model: str = "m", **options: Any) -> OpenAIEngine:
    given: dict[str, Any] = {"base_url": server.base_url, "api_key": KEY, **options}
    return OpenAIEngine(model, **given)


async def problem(server: FakeOpenAI, model: str = "m", **options: Any) -> str:
    made = engine(server, model, **options)
    try:
        with pytest.raises(EngineError) as caught:
            await made.check()
    finally:
        await made.aclose()
    text = str(caught.value)
    assert KEY not in text
    return text


async def test_a_model_that_answers_takes_one_small_call(fake_openai: FakeOpenAI) -> None:
    made = engine(fake_openai, extra_body={"reasoning_effort": "low"})
    await made.check()
    (request,) = fake_openai.requests
    assert (request["model"], request["max_tokens"], request["reasoning_effort"]) == ("m", 16, "low")
    assert fake_openai.listed == 0
    assert made.identity()["adaptations"] == {}
    await made.aclose()


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_unknown_model_is_named_with_what_there_is(fake_openai: FakeOpenAI, status: int) -> None:
    fake_openai.models = ["qwen3-4b", "qwen3-30b", "\x1b[31mred", *(f"other-{n}" for n in range(20))]
    fake_openai.default = error(status, "no such thing")
    text = await problem(fake_openai, "qwen3-4")
    assert fake_openai.base_url in text
    assert "does not serve the model 'qwen3-4'. Did you mean 'qwen3-4b'? It serves: qwen3-4b, qwen3-30b" in text
    assert "and 11 more" in text
    assert len(fake_openai.requests) == fake_openai.listed == 1


async def test_unknown_model_without_a_list(fake_openai: FakeOpenAI) -> None:
    fake_openai.default = error(404, "gone", code="model_not_found")
    assert "does not serve the model 'm' (404: gone)" in await problem(fake_openai)


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_key_names_the_environment_variable(
    fake_openai: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    fake_openai.default = error(status, f"wrong key {KEY}")
    monkeypatch.setenv("MY_KEY", KEY)
    text = await problem(fake_openai, api_key=None, api_key_env="MY_KEY")
    assert f"refuses the API key ({status}:" in text
    assert "read from the environment variable MY_KEY:" in text
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert "OPENAI_API_KEY, which is not set" in await problem(fake_openai, api_key=None)
    assert fake_openai.listed == 0


async def test_variable_that_is_not_set_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(EngineError, match="set MY_KEY"):
        OpenAIEngine("m", base_url="http://127.0.0.1:1/v1", api_key_env="MY_KEY")


async def test_what_is_no_openai_server_is_named(fake_openai: FakeOpenAI) -> None:
    fake_openai.default = raw("<html>", content_type="text/html")
    assert "not JSON" in await problem(fake_openai)
    fake_openai.default = raw("{}")
    assert "does not answer as an OpenAI-compatible server" in await problem(fake_openai)
    wrong = fake_openai.base_url.removesuffix("/v1")
    text = await problem(fake_openai, base_url=wrong)
    assert f"{wrong} does not answer as an OpenAI-compatible server (404" in text
    assert "--base-url" in text
    fake_openai.default = error(302, headers={"location": "http://elsewhere"})
    assert "a redirect to http://elsewhere" in await problem(fake_openai)


async def test_url_that_nobody_serves_is_named_without_credentials(fake_openai: FakeOpenAI) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = await problem(fake_openai, base_url=f"http://me:pass@127.0.0.1:{port}/v1?token=secret")
    assert text.startswith(f"http://127.0.0.1:{port}/v1: no connection")
    assert "nothing listens there" in text
    assert "pass" not in text
    assert "secret" not in text
    text = await problem(fake_openai, base_url="http://no-such-host.invalid/v1")
    assert "the host name is not known" in text
    text = await problem(fake_openai, base_url=fake_openai.base_url.replace("http://", "https://"))
    assert "TLS" in text
    assert "check http:// or https://" in text


@pytest.mark.parametrize(
    "behaviour",
    [error(429, "slow down"), error(400, "max_tokens is too small"), error(422, "no"), reply(None)],
    ids=["busy", "picky", "picky-422", "empty"],
)
async def test_an_endpoint_that_is_there_may_start(fake_openai: FakeOpenAI, behaviour: Any) -> None:
    fake_openai.models = ["m"]
    fake_openai.default = behaviour
    made = engine(fake_openai)
    await made.check()
    await made.aclose()


async def test_other_failures_are_told(fake_openai: FakeOpenAI) -> None:
    fake_openai.default = error(429, "pay", code="insufficient_quota")
    assert "add credit" in await problem(fake_openai)
    fake_openai.models = ["m"]
    fake_openai.default = error(503, "loading")
    assert "fails (503: loading): see the log of the server" in await problem(fake_openai)


async def test_the_call_is_bounded_in_time_and_bytes(fake_openai: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_openai.default = error(404, "no")
    fake_openai.models = ["x" * 2**20] * 40
    text = await problem(fake_openai)
    assert len(text) < 2000, "the list is not read to its end"
    monkeypatch.setattr(_check, "CHECK_SECONDS", 0.2)
    fake_openai.default = slow(30, reply())
    before = asyncio.get_running_loop().time()
    assert "no answer within 0.2 s" in await problem(fake_openai)
    assert asyncio.get_running_loop().time() - before < 5
