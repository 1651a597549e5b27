"""The gemini dialect over HTTP, with requests as Google's clients send them."""

from __future__ import annotations

import asyncio
import base64
import json

import aiohttp
import pytest

from .scripted import refused

TOOLS = [
    {
        "functionDeclarations": [
            {
                "name": "exec",
                "description": "Run a command",
                "parameters": {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}},
            }
        ]
    }
]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>'
OTHER = CALL.replace("ls", "pwd")
THOUGHT = "<think>\ntwo and two\n</think>\n\n"
ASK = [{"role": "user", "parts": [{"text": "hello"}]}]


def posted(client, setup, what, body, key=None):
    url = f"{setup.base_url}/v1beta/models/policy:{what}"
    return client.post(url, json=body, headers={"x-goog-api-key": key or setup.session.secret})


async def generate(setup, contents=ASK, *, status=200, **more):
    async with aiohttp.ClientSession() as client:
        async with posted(client, setup, "generateContent", {"contents": contents, **more}) as answer:
            found = await answer.json()
            assert answer.status == status, found
            return found


async def events(setup, contents=ASK, **more):
    async with aiohttp.ClientSession() as client:
        async with posted(client, setup, "streamGenerateContent?alt=sse", {"contents": contents, **more}) as answer:
            text = await answer.text()
            return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def parts(answer):
    return answer["candidates"][0]["content"]["parts"]


async def test_response_and_stored_turn(make_gateway):
    setup = await make_gateway("the total is four")
    config = {"temperature": 0.7, "topP": 0.9, "topK": 64.0, "maxOutputTokens": 200}
    answer = await generate(setup, systemInstruction={"parts": [{"text": "be brief"}]}, generationConfig=config)
    assert parts(answer) == [{"text": "the total is four"}]
    assert answer["candidates"][0]["finishReason"] == "STOP"
    (seen,), (turn,) = setup.engine.seen, setup.turns
    usage = answer["usageMetadata"]
    assert (usage["promptTokenCount"], usage["candidatesTokenCount"]) == (len(seen.prompt), len(seen.sampled))
    asked = seen.sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.7, 0.9, 64, 200)
    assert turn.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"})
    assert answer["responseId"] == turn.id


@pytest.mark.parametrize("ids", [True, False])
async def test_function_responses_continue_turn(make_gateway, ids):
    """With and without the ids of the calls, which clients may leave out."""
    setup = await make_gateway([f"Look\n{CALL}\n{OTHER}", "done"])
    answer = await generate(setup, tools=TOOLS)
    text, one, other = parts(answer)
    assert (text["text"].strip(), one["functionCall"]["args"]) == ("Look", {"command": "ls"})
    shown = [{**part, "functionCall": {**part["functionCall"]}} for part in (one, other)]
    results = []
    for part, output in zip(shown, ({"output": "a.csv"}, {"error": "no"}), strict=True):
        call = part["functionCall"]
        results.append({"functionResponse": {"id": call["id"], "name": "exec", "response": output}})
        if not ids:
            del call["id"], results[-1]["functionResponse"]["id"]
    history = [*ASK, {"role": "model", "parts": [text, *shown]}, {"role": "user", "parts": results}]
    await generate(setup, history, tools=TOOLS)
    first, second = setup.turns
    assert second.parent == 0
    assert [m["content"] for m in second.messages] == ["a.csv", '{"error": "no"}']
    assert [m["tool_call_id"] for m in second.messages] == [c["id"] for c in first.reply["tool_calls"]]
    start = setup.engine.seen[0].prompt + tuple(setup.engine.seen[0].sampled)
    assert setup.engine.seen[1].prompt[: len(start)] == start


async def test_schema_types_are_json_schema(make_gateway):
    setup = await make_gateway("four")
    await generate(setup, tools=TOOLS)
    prompt = setup.engine._words.decode(list(setup.engine.seen[0].prompt), skip_special_tokens=False)
    assert '"string"' in prompt
    assert "STRING" not in prompt


async def test_stream_equals_response(make_gateway):
    setup = await make_gateway(f"{THOUGHT}Look\n{CALL}\n{OTHER}", pause=0.0005)
    found = await events(setup, tools=TOOLS, generationConfig={"thinkingConfig": {"includeThoughts": True}})
    pieces = [part for answer in found for part in parts(answer)]
    assert "".join(p["text"] for p in pieces if p.get("thought")) == "two and two"
    assert "".join(p["text"] for p in pieces if "text" in p and not p.get("thought")).strip() == "Look"
    calls = [p["functionCall"] for p in pieces if "functionCall" in p]
    assert [call["args"] for call in calls] == [{"command": "ls"}, {"command": "pwd"}]
    assert [answer["candidates"][0].get("finishReason") for answer in found][-2:] == [None, "STOP"]
    (turn,) = setup.turns
    assert [c["id"] for c in turn.reply["tool_calls"]] == [call["id"] for call in calls]
    assert found[-1]["usageMetadata"]["candidatesTokenCount"] == len(turn.sampled_ids)


async def test_text_streams_token_by_token(make_gateway):
    setup = await make_gateway("the total is four")
    setup.engine.before_end = asyncio.Event()
    got = b""
    async with aiohttp.ClientSession() as client:
        async with posted(client, setup, "streamGenerateContent?alt=sse", {"contents": ASK}) as answer:
            async for piece in answer.content.iter_any():
                got += piece
                if not setup.engine.before_end.is_set():
                    assert not setup.turns, "the engine has not ended, and text is here"
                    setup.engine.before_end.set()
    assert b'"STOP"' in got


async def test_token_limit_and_stop_sequences(make_gateway):
    setup = await make_gateway("one two three four")
    cut = await generate(setup, generationConfig={"maxOutputTokens": 2})
    assert cut["candidates"][0]["finishReason"] == "MAX_TOKENS"
    stopped = await generate(setup, generationConfig={"stopSequences": ["three"]})
    assert "".join(part["text"] for part in parts(stopped)) == "one two "


async def test_errors_have_googles_form(make_gateway):
    setup = await make_gateway(lambda _, n: refused(429, retryable=True))
    error = (await generate(setup, [], status=400))["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert "contents" in error["message"]
    assert (await generate(setup, status=429))["error"]["status"] == "RESOURCE_EXHAUSTED"
    async with aiohttp.ClientSession() as client:
        async with posted(client, setup, "generateContent", {"contents": ASK}, key="other") as answer:
            assert answer.status == 401
            assert (await answer.json())["error"]["status"] == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tools": [{"googleSearch": {}}]}, "server tools"),
        ({"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "gs://x"}}]}]}, "use only text"),
        ({"contents": [{"role": "system", "parts": []}]}, "use user or model"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "use AUTO, ANY or NONE"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "text/x", "data": "AA"}}]}]}, "base64"),
    ],
)
async def test_unsupported_requests_are_refused(make_gateway, asked, says):
    setup = await make_gateway("four")
    answer = await generate(setup, **{"contents": ASK, **asked}, status=400)
    assert says in answer["error"]["message"]
    assert not setup.engine.seen


async def test_images_are_read(make_gateway):
    setup = await make_gateway("four")
    picture = {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(b"\x89PNG").decode()}}
    answer = await generate(setup, [{"role": "user", "parts": [{"text": "what?"}, picture]}], status=400)
    assert "takes none" in answer["error"]["message"]
