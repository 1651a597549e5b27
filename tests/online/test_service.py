"""The service from end to end: clients that know nothing of it, feedback, judging, training, and the next reply."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

import anthropic  # noqa: E402
import openai  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from clawgym.cli import app  # noqa: E402
from clawgym.errors import EngineError, GatewayError  # noqa: E402
from clawgym.online.config import ServiceFolder, load_service_config  # noqa: E402
from clawgym.online.service import Service, forget, open_service  # noqa: E402
from clawgym.online.training import VersionTrainer  # noqa: E402
from clawgym.online.versions import Versions  # noqa: E402
from clawgym.pool import Pool  # noqa: E402
from clawgym.simulation.users import THANKS  # noqa: E402
from clawgym.trainers.common.answers import advantages_file  # noqa: E402

from .conftest import SETTINGS, Client, judged  # noqa: E402


@asynccontextmanager
async def serving(folder: ServiceFolder) -> AsyncIterator[tuple[Service, Any]]:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service(folder, loops=()))

        async def client(source: str = "user") -> Client:
            made = openai.AsyncOpenAI(base_url=service.base_url, api_key=service.keys.make(source), max_retries=0)
            return Client(await stack.enter_async_context(made))

        yield service, client


async def trained(folder: ServiceFolder) -> bool:
    with Pool(folder.pool) as pool:
        return await VersionTrainer(folder, pool).step()


async def test_a_service_trains_on_its_use(folder: ServiceFolder) -> None:
    async with serving(folder) as (service, client):
        told = []
        for score in (1, -1):
            user = await client()
            await user.say("Tell me about rivers.")
            told.append(await user.tell("feedback", score=score))
            await user.say("And lakes?")
            assert (await user.tell("end"))["ended"]
        with Pool(folder.pool) as pool:
            held = list(pool.episodes())
            assert [(e.channel, e.n_turns, e.secret_sha256) for e in held] == [("live:user", 2, "")] * 2
            assert [e.id for e in held] == [one["session"] for one in told]
            assert all(turn.flaw is None for e in held for turn in pool.turns(e.id)), "exact tokens"
        assert not await trained(folder), "nothing is judged yet"
        await judged(folder)
        assert await trained(folder)
        assert not await trained(folder), "each conversation is trained on once"
        made = service.versions.serving
        assert (made.number, made.parent) == (1, 0)
        assert sorted(made.sessions) == sorted(one["session"] for one in told)
        user = await client()
        await user.say("Hello?")
        with Pool(folder.pool) as pool:
            newest = list(pool.episodes())[-1]
            assert [turn.policy_version for turn in pool.turns(newest.id)] == [1]
            assert pool.stats()["channels"]["live:user"]["groups"] == {"consumed": 2, "open": 1}


async def test_a_step_that_makes_no_version_is_shown(folder: ServiceFolder, model: Path) -> None:
    folder.create(load_service_config(None, str(model), [*SETTINGS, "training.guards.min_entropy=100"]))
    async with serving(folder) as (service, client):
        for score in (1, -1):
            user = await client()
            await user.say("Tell me about rivers.")
            await user.tell("feedback", score=score)
            await user.tell("end")
        await judged(folder)
        assert folder.failed_step() is None
        assert await trained(folder)
        assert service.versions.serving.number == 0
    shown = CliRunner().invoke(app, ["serve", "status", "--dir", str(folder.path)])
    assert "Training step 0 made no version (" in shown.output
    assert "guards.min_entropy" in shown.output


async def test_conversations_are_told_apart_without_ids(folder: ServiceFolder) -> None:
    """Interleaved, with the same beginning, and from another dialect."""
    async with serving(folder) as (service, client):
        one, two = await client(), await client()
        await one.say("Hello")
        await two.say("Hello")
        await two.say("Two")
        await one.say("One")
        claude = anthropic.AsyncAnthropic(
            base_url=service.base_url.removesuffix("/v1"), api_key=service.keys.make("user"), max_retries=0
        )
        messages: list[Any] = [{"role": "user", "content": "Hello from Claude"}]
        for text in ("More", None):
            got = await claude.messages.create(model="any", max_tokens=5, messages=messages)
            said = "".join(block.text for block in got.content if block.type == "text")
            if text:
                messages += [{"role": "assistant", "content": said or "-"}, {"role": "user", "content": text}]
        await claude.close()
        with Pool(folder.pool) as pool:
            held = [(e, pool.turns(e.id)) for e in pool.episodes()]
        assert [len(turns) for _, turns in held] == [2, 2, 2]
        assert [turns[1].messages[-1]["content"] for _, turns in held] == ["One", "Two", "More"]
        assert all(turns[1].parent == 0 for _, turns in held)


async def test_a_source_reaches_its_own_conversations_only(folder: ServiceFolder) -> None:
    async with serving(folder) as (service, client):
        owner, thief = await client("owner"), await client("thief")
        await owner.say("My own words")
        thief.messages, thief.replies = list(owner.messages), list(owner.replies)
        await thief.say("Go on")
        thief.replies = owner.replies
        for path in ("feedback", "private", "end"):
            with pytest.raises(openai.NotFoundError):
                await thief.tell(path, score=-1)
        with Pool(folder.pool) as pool:
            assert [(e.channel, e.n_turns) for e in pool.episodes()] == [("live:owner", 1), ("live:thief", 1)]
        service.keys.remove("thief")
        with pytest.raises(openai.AuthenticationError):
            await thief.say("Once more")
        await owner.say("Still here")


async def test_one_key_cannot_take_all_places(folder: ServiceFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym.online.door.MOST_RUNNING", 2)
    async with serving(folder) as (_, client):
        greedy, other = [await client("greedy") for _ in range(6)], await client("other")
        got = await asyncio.gather(*(one.say("Hello") for one in greedy), return_exceptions=True)
        refused = [one for one in got if isinstance(one, openai.RateLimitError)]
        assert len(refused) in range(1, 5), "how many run at once depends on their timing"
        await other.say("Hello")
        await greedy[0].say("And now?")


async def test_feedback_on_a_judged_conversation_is_refused(folder: ServiceFolder) -> None:
    async with serving(folder) as (_, client):
        user = await client()
        await user.say("Hello")
        await user.tell("feedback", score=1)
        with pytest.raises(openai.ConflictError, match="already"):
            await user.tell("feedback", score=-1)
        await user.tell("end")
        await judged(folder)
        with pytest.raises(openai.NotFoundError, match="judged already"):
            await user.tell("feedback", score=1)
        await user.say("Once more")
        for bad in ({"score": 0}, {"score": "up"}, {}):
            with pytest.raises(openai.BadRequestError):
                await user.tell("feedback", **bad)


async def test_what_is_redacted_is_stored_without_ids(model: Path, tmp_path: Path) -> None:
    """The client's conversation goes on, and nothing of it is trained on from there."""
    pytest.importorskip("phonenumbers")
    folder = ServiceFolder(tmp_path / "service")
    folder.create(load_service_config(None, str(model), [one for one in SETTINGS if not one.startswith("redact")]))
    async with serving(folder) as (_, client):
        user = await client()
        for text in ("Hello", "My address is jane.roe@mail-service.net", "And now?"):
            await user.say(text)
        with Pool(folder.pool) as pool:
            (episode,) = pool.episodes()
            turns = pool.turns(episode.id)
            assert [turn.flaw for turn in turns] == [None, "redacted", "redacted"]
            assert [turn.parent for turn in turns] == [None, 0, 1]
            assert turns[1].messages[0]["content"] == "My address is <EMAIL_ADDRESS>"
            assert not turns[1].context_ids
            assert turns[2].context_ids, "its own text is harmless, but its prompt is not complete"
        assert all(b"jane.roe" not in file.read_bytes() for file in folder.path.glob("pool.db*"))


async def test_private_conversations_are_deleted_unread(folder: ServiceFolder) -> None:
    async with serving(folder) as (_, client):
        user = await client()
        await user.say("My s3cret")
        await user.tell("private")
        await user.tell("feedback", score=1)
        await user.tell("end")
        await judged(folder)
        with Pool(folder.pool) as pool:
            assert list(pool.episodes()) == []
        assert all(b"s3cret" not in file.read_bytes() for file in folder.path.glob("pool.db*"))


def stored_advantages(folder: ServiceFolder) -> str:
    return "".join(file.read_text() for file in advantages_file(folder.path, 0).parent.iterdir())


async def test_a_forgotten_conversation_takes_its_versions_along(folder: ServiceFolder) -> None:
    async with serving(folder) as (_, client):
        for _ in range(2):
            user = await client()
            await user.say("Hello")
            told = await user.tell("feedback", score=1)
            await user.tell("end")
        await judged(folder)
        assert await trained(folder)
        session = told["session"]
        versions = Versions(folder.versions)
        assert [version.number for version in versions.exposed(session)] == [1]
        assert session in stored_advantages(folder)
        with pytest.raises(Exception, match="roll back to version 0 first"):
            forget(folder, session)
        versions.roll_back("to forget", versions.last_without([session]).number)
        assert forget(folder, session) == (1,)
        with Pool(folder.pool) as pool:
            assert session not in [e.id for e in pool.episodes()]
        assert session not in json.dumps([version.sessions for version in versions.all()])
        assert session not in stored_advantages(folder)
        await user.say("Again")  # a new conversation, answered by version 0
        with Pool(folder.pool) as pool:
            assert [t.policy_version for t in pool.turns(list(pool.episodes())[-1].id)] == [0]


async def test_a_conversation_that_is_forgotten_while_a_step_trains_on_it_leaves_nothing(folder: ServiceFolder) -> None:
    async with serving(folder) as (_, client):
        for _ in range(2):
            user = await client()
            await user.say("Hello")
            session = (await user.tell("feedback", score=1))["session"]
            await user.tell("end")
        await judged(folder)
        with Pool(folder.pool) as pool:

            class Forgetting:
                """The pool; the conversation is forgotten as soon as the step has it."""

                def __getattr__(self, name: str) -> Any:
                    return getattr(pool, name)

                def fetch(self, *args: Any, **options: Any) -> Any:
                    found = pool.fetch(*args, **options)
                    assert found is not None
                    assert session in [e.episode.id for g in found.groups for e in g.episodes]
                    forget(folder, session)
                    return found

            assert await VersionTrainer(folder, Forgetting()).step()
    assert [version.number for version in Versions(folder.versions).all()] == [0]
    assert session not in stored_advantages(folder)
    (state,) = folder.training.rglob("state.json")
    assert session not in state.read_text()


def test_commands_count_versions_and_conversations(folder: ServiceFolder, model: Path) -> None:
    versions = Versions.create(folder.versions, model)
    where = ["--dir", str(folder.path)]
    assert "Version 0 answers, of 1 version.\n" in CliRunner().invoke(app, ["serve", "status", *where]).output
    versions.add(lambda part: None, parent=0, sessions=["a"])
    assert "Version 0 answers, of 2 versions.\n" in CliRunner().invoke(app, ["serve", "status", *where]).output
    assert "trained on 1 conversation\n" in CliRunner().invoke(app, ["serve", "history", *where]).output


def test_a_loop_warns_in_its_log(tmp_path: Path) -> None:
    code = "import sys, warnings; from clawgym.online.loops import _log_to; _log_to(sys.argv[1]); warnings.warn('odd')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "loop.log"], capture_output=True, check=True)
    assert done.stderr == b""
    assert "UserWarning: odd" in (tmp_path / "loop.log").read_text()


async def test_a_restarted_service_goes_on_with_its_conversations(folder: ServiceFolder) -> None:
    async with serving(folder) as (_, client):
        user = await client()
        await user.say("Hello")
    async with serving(folder) as (_, client):
        again = await client()
        again.messages = user.messages
        await again.say("I am back")
        with Pool(folder.pool) as pool:
            (episode,) = pool.episodes()
            assert [turn.parent for turn in pool.turns(episode.id)] == [None, 0]


async def test_a_client_with_a_larger_window_is_refused(folder: ServiceFolder) -> None:
    async with serving(folder) as (service, _):
        window = service.gateway.engine.context_window
        made = openai.AsyncOpenAI(base_url=service.base_url, api_key=service.keys.make("user"), max_retries=0)
        async with made:
            with pytest.raises(openai.BadRequestError, match=f"whole window has {window}: set the model's context"):
                await made.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "Hi"}], max_tokens=window
                )
            (listed,) = [one async for one in made.models.list()]
            assert listed.model_dump()["max_model_len"] == window


async def test_a_simulated_person_is_heard(folder: ServiceFolder) -> None:
    """What the next message says is a vote on the reply before it."""
    async with serving(folder) as (_, client):
        user = await client()
        await user.say("Hello")
        await user.say(THANKS)
        await user.tell("end")
        await judged(folder)
        with Pool(folder.pool) as pool:
            (episode,) = pool.episodes()
            assert pool.turn_rewards(episode.id)["judge"] == {0: 1.0}


async def test_a_service_that_cannot_serve_says_so_at_its_start(folder: ServiceFolder, model: Path) -> None:
    with pytest.raises(GatewayError, match="give a certificate"):
        async with open_service(folder, host="0.0.0.0", loops=()):
            pass
    assert not folder.versions.exists(), "nothing was loaded"
    elsewhere = ServiceFolder(folder.path.with_name("elsewhere"))
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        vllm = f"training.compute.vllm=http://127.0.0.1:{bound.getsockname()[1]}"
        elsewhere.create(load_service_config(None, str(model), [*SETTINGS, vllm]))
        with pytest.raises(EngineError, match=r"cannot be reached|no connection"):
            async with open_service(elsewhere, loops=()):
                pass


async def test_old_conversations_are_deleted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    just_started = SimpleNamespace(monotonic=lambda: 60.0, time=time.time)
    monkeypatch.setattr("clawgym.online.service.time", just_started)  # the machine
    folder = ServiceFolder(tmp_path / "service")
    folder.create(load_service_config(None, str(model), [*SETTINGS, "keep_days=1e-9"]))
    async with serving(folder) as (_, client):
        for text in ("My s3cret", "Still talking"):
            user = await client()
            await user.say(text)
            if text == "My s3cret":
                await user.tell("feedback", score=1)
                await user.tell("end")
        await judged(folder)
    async with serving(folder):  # it deletes when it starts, and each hour
        with Pool(folder.pool) as pool:
            async with asyncio.timeout(30):
                while len(list(pool.episodes())) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            (left,) = pool.episodes()
            assert pool.turns(left.id)[0].messages[0]["content"] == "Still talking", "only what has ended"
