"""``clawgym gateway`` as a person starts it: prints a session that works, leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from functools import partial
from pathlib import Path

import aiohttp
import anthropic
import openai
import pytest

from clawgym.engines import OpenAIEngine
from clawgym.pool import Pool

PROGRAM = "from clawgym.cli import main; main()"


async def start(*argv: str, cwd: Path) -> tuple[asyncio.subprocess.Process, dict[str, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", PROGRAM, "gateway", *argv, cwd=cwd, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode() for _ in range(6)]
    return process, {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_gateway_with_replay_engine(tmp_path):
    recording = tmp_path / "answers.jsonl"
    recording.write_text('{"text": "one"}\n{"text": "two"}\n')
    process, shown = await start("--engine", "replay", "--model", str(recording), cwd=tmp_path)
    try:
        assert shown["base_url"].startswith("http://127.0.0.1:")
        async with openai.AsyncOpenAI(base_url=shown["base_url"], api_key=shown["api_key"]) as client:
            assert [model.id async for model in client.models.list()] == [shown["model"]] == ["answers.jsonl"]
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hello"}]
            )
            assert answer.choices[0].message.content == "one"
        async with anthropic.AsyncAnthropic(base_url=shown["base_url"], api_key=shown["api_key"]) as client:
            reply = await client.messages.create(
                model="policy", max_tokens=9, messages=[{"role": "user", "content": "hello again"}]
            )
            assert [part.text for part in reply.content if part.type == "text"] == ["one"]
        connector = aiohttp.UnixConnector(path=shown["control"])
        headers = {"Authorization": f"Bearer {Path(shown['token']).read_text().strip()}"}
        async with aiohttp.ClientSession(connector=connector, headers=headers) as client:
            async with client.post("http://gateway/sessions", data=json.dumps({"channel": "eval"})) as response:
                assert (await response.json())["base_url"] != shown["base_url"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    assert not Path(shown["control"]).exists()
    assert not Path(shown["token"]).exists()
    with Pool(tmp_path / "pool.db") as pool:
        turns = pool.turns(shown["base_url"].split("/s/")[1].split("/")[0])
        assert {turn.flaw for turn in turns} == {"text-only"}, "a recording is text: never trained"
        assert len(turns) == 2


async def test_recorded_tasks_need_no_line_for_the_check_before_a_run(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"match": "coral", "text": "one"}\n')
    process, shown = await start("--engine", "replay", "--model", "answers.jsonl", cwd=tmp_path)
    engine = OpenAIEngine(shown["model"], base_url=shown["base_url"], api_key=shown["api_key"])
    try:
        await engine.check()
    finally:
        await engine.aclose()
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def test_session_closed_in_the_pool_refuses_calls(tmp_path):
    recording = tmp_path / "answers.jsonl"
    recording.write_text('{"text": "one"}\n{"text": "two"}\n')
    process, shown = await start("--engine", "replay", "--model", str(recording), cwd=tmp_path)
    try:
        async with openai.AsyncOpenAI(base_url=shown["base_url"], api_key=shown["api_key"], max_retries=0) as client:
            ask = partial(client.chat.completions.create, model="m", messages=[{"role": "user", "content": "hello"}])
            await ask()
            closing = (sys.executable, "-c", PROGRAM, "pool", "close", "pool.db", "--all")
            done = await asyncio.create_subprocess_exec(*closing, cwd=tmp_path)
            assert await done.wait() == 0
            for _ in range(2):
                with pytest.raises(openai.PermissionDeniedError, match="this session is closed"):
                    await ask()
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    with Pool(tmp_path / "pool.db") as pool:
        (episode,) = pool.episodes()
    assert (episode.state, episode.n_turns) == ("closed", 1)


async def test_conflicting_options_are_refused(tmp_path):
    for argv, reply in [
        (("--engine", "vllm", "--model", "m"), "engine 'vllm' needs base_url, tokenizer"),
        (("--engine", "replay", "--model", "none.jsonl"), "none.jsonl"),
        (("--engine", "vlm", "--model", "m"), "Did you mean 'vllm'"),
        (("--engine", "replay", "--tokenizer", "x"), "engine 'replay' does not take tokenizer"),
        (("--engine", "openai", "--model", "m", "--tls-cert", "x.pem"), "--tls-key"),
    ]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, "gateway", *argv, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert reply in errors.decode()
