"""What is stored is exactly what the engine saw, whatever an agent does with its history."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import random
import sys
from pathlib import Path

import pytest

from clawgym.engines.protocol import Image
from clawgym.engines.tiny import CHAT_TEMPLATE, make_tiny_model
from clawgym.errors import EngineError
from clawgym.gateway.calls import ChatCall, Refusal
from clawgym.gateway.render import Renderer
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool, sequences_of
from clawgym.records import prompt_ids

sys.path.insert(0, str(Path(__file__).parent.parent / "gateway"))
from scripted import ScriptedEngine

HISTORIES = int(os.environ.get("CLAWGYM_SOAK", 0)) or 400
"""Conversations in one run; each has some ten requests."""

TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("exec", "spawn")]
PICTURES = [Image(hashlib.sha256(data).hexdigest(), data) for data in (b"one", b"two", b"three")]
"""What an image is does not matter here: the ledger holds it by its content."""
SEEING = CHAT_TEMPLATE.replace(
    "{{ raise_exception('this model reads text only, not ' ~ part.type) }}", "{{ '[image]' }}"
).replace("{{ part.text }}", "{{ part.text | default('') }}")
WORDS = ["total", "naïve", "😀", "<|im_end|>", "€", "line\nline", "  ", '"quoted"', "</tool_call>", "done", "日本"]


def words(rng: random.Random, most: int = 6) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def reply(rng: random.Random) -> str:
    """What the model says: text, thoughts, calls, broken calls."""
    out = ""
    if rng.random() < 0.2:
        out += f"<think>\n{words(rng)}\n</think>\n\n"
    out += words(rng).replace("<|im_end|>", "").replace("</tool_call>", "")
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        call = json.dumps({"name": rng.choice(["exec", "spawn"]), "arguments": {"command": words(rng)}})
        if rng.random() < 0.1:
            call = call[:-2]
        out += f"\n<tool_call>\n{call}\n</tool_call>"
    return out


class Agent:
    """Works in one session, and does to its history what agents do."""

    def __init__(self, rng: random.Random, gateway: Gateway, session) -> None:
        self.rng, self.gateway, self.session = rng, gateway, session
        self.histories = [[{"role": "system", "content": "You work."}, self.user()]]

    def user(self):
        text = f"{self.rng.random()} {words(self.rng)}"
        if self.rng.random() < 0.8:
            return {"role": "user", "content": text}
        shown = {"type": "image", "sha256": self.rng.choice(PICTURES).sha256}
        return {"role": "user", "content": [{"type": "text", "text": text}, shown]}

    async def ask(self, history, *, leave: bool = False, role: str | None = None):
        """Send a history; the assistant's message comes back, or ``None`` if something went wrong."""
        tools = TOOLS if history[0]["content"] == "You work." else []
        images = {picture.sha256: picture for picture in PICTURES}
        call = ChatCall(copy.deepcopy(history), tools, role=role, images=images)
        text, thought, calls = "", "", {}
        stream = self.gateway.core.answer(self.session, call)
        try:
            async for delta in stream:
                text += delta.text
                thought += delta.reasoning
                for piece in delta.calls:
                    one = calls.setdefault(piece.index, {"id": piece.id, "type": "function", "function": {
                        "name": piece.name, "arguments": ""}})  # fmt: skip
                    one["function"]["arguments"] += piece.arguments
                if leave:
                    await stream.aclose()
                    return None
        except (EngineError, Refusal):
            return None
        message = {"role": "assistant", "content": text or None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [calls[n] for n in sorted(calls)]
        return message

    def rewritten(self, message):
        """The message as an agent replays it."""
        out, rng = copy.deepcopy(message), self.rng
        if rng.random() < 0.3:
            out.pop("reasoning_content", None)
        for n, call in enumerate(out.get("tool_calls", ())):
            function = call["function"]
            if rng.random() < 0.5:
                call["id"] = f"call{rng.randrange(10**9)}n{n}"
            if rng.random() < 0.5:
                function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))
            if rng.random() < 0.1:
                function["name"] = "bash"
        return out

    async def step(self):
        rng = self.rng
        n = rng.randrange(len(self.histories))
        history = self.histories[n]
        match rng.choice(["go"] * 8 + ["edit", "again", "leave", "compact", "subagent", "both", "drop"]):
            case "edit":
                history = copy.deepcopy(history)
                at = rng.randrange(1, len(history))
                history[at]["content"] = f"{history[at]['role']} edited {rng.random()}"
                self.histories.append(history)
            case "again":
                await self.ask(history)
            case "leave":
                await self.ask(history, leave=True)
            case "compact":
                told = json.dumps(history, ensure_ascii=False)
                summary = await self.ask([{"role": "system", "content": "Sum up."}, {"role": "user", "content": told}])
                if summary and summary["content"]:
                    opening = {"role": "user", "content": f"So far: {summary['content']}"}
                    self.histories[n] = history = [history[0], opening]
            case "subagent":
                self.histories.append([{"role": "system", "content": "You help."}, self.user()])
                return
            case "both":
                await asyncio.gather(self.go(history), self.ask(copy.deepcopy(history)))
                return
            case "drop":
                self.histories[n] = history = [*history[:1], *history[max(1, len(history) - 2) :]]
        await self.go(history)

    async def go(self, history):
        message = await self.ask(history)
        if message is None:
            return
        shown = self.rewritten(message)
        history.append(shown)
        for call in shown.get("tool_calls", ()):
            history.append({"role": "tool", "tool_call_id": call["id"], "content": words(self.rng)})
        if not shown.get("tool_calls"):
            history.append(self.user())


def images_of(turns, index):
    """All images of a prompt, from the first turn on."""
    turn = turns[index]
    return (*(images_of(turns, turn.parent) if turn.parent is not None else ()), *turn.images)


def check(turns, seen, trained):
    """Every turn is what the engine saw, and every training sequence is made of nothing else."""
    assert len(turns) == len(seen)
    # Turns are stored in the order they ended, calls are seen in the order they began: join them by what was said.
    rest = list(seen)
    for index, turn in enumerate(turns):
        whole = prompt_ids(turns, index)
        same = next((s for s in rest if s.prompt == whole and tuple(s.sampled) == turn.sampled_ids), None)
        assert same is not None, f"turn {index} was never seen"
        rest.remove(same)
        assert tuple(same.logprobs) == turn.logprobs
        assert same.images == images_of(turns, index)
        assert turn.flaw or same.version == turn.policy_version
    rows = sequences_of(turns)
    ends = {prompt_ids(turns, i) + t.sampled_ids for i, t in enumerate(turns)}
    counted = 0
    for row in rows:
        assert row.ids in ends
        assert row.images == images_of(turns, row.turns[-1])
        assert len(row.ids) == len(row.mask)
        assert sum(row.mask) == len(row.logprobs) == len(row.policy_versions) == len(row.turn_of)
        trained_ids = [i for i, m in zip(row.ids, row.mask, strict=True) if m]
        expected = [i for n in dict.fromkeys(row.turn_of) for i in turns[n].sampled_ids]
        assert trained_ids == expected
        assert list(row.logprobs) == [p for n in dict.fromkeys(row.turn_of) for p in turns[n].logprobs]
        counted += sum(row.mask)
        trained["images"] += len(row.images)
    main = [t for t in turns if t.role == "main" and t.flaw is None]
    assert counted == sum(len(t.sampled_ids) for t in main)
    trained["ids"] += counted
    trained["rows"] += len(rows)


@pytest.mark.timeout(0)
async def test_what_is_stored_is_what_the_engine_saw(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    trained = {"ids": 0, "rows": 0, "images": 0}
    pool = Pool(tmp_path / "pool.db")
    rng = random.Random(20260401)
    engine = ScriptedEngine(model, lambda prompt, n: fault_or(reply(rng), rng), spell=rng, at_once=3)
    async with Gateway(engine, pool, renderer=Renderer(model, chat_template=SEEING)) as gateway:
        for _ in range(HISTORIES):
            engine.seen.clear()
            engine.policy_version += 1
            opened = await gateway.open_session()
            session = await gateway.sessions.get(opened.id)
            agent = Agent(rng, gateway, session)
            for _ in range(rng.randint(1, 14)):
                await agent.step()
            if rng.random() < 0.1:
                gateway.sessions.evict(opened.id)  # as after a restart
                agent.session = await gateway.sessions.get(opened.id)
                await agent.step()
            check(pool.turns(opened.id), engine.seen, trained)
        stats = gateway.stats()
    pool.close()
    assert trained["ids"] > 10 * HISTORIES
    assert trained["images"] > HISTORIES / 10
    assert stats["continued"] > HISTORIES
    assert {"ids", "spacing", "alias", "reasoning"} <= stats["rewrites"].keys()
    assert stats["malformed_calls"] > HISTORIES / 50


def fault_or(text, rng):
    return EngineError("endpoint died: wait") if rng.random() < 0.02 else text
