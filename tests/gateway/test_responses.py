"""The responses dialect with the real ``openai`` client."""

from __future__ import annotations

import asyncio
import base64

import openai
import pytest

from clawgym.errors import ContextLengthExceeded

from .scripted import refused

TOOLS = [
    {
        "type": "function",
        "name": "exec",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        "strict": False,
    }
]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>'
OTHER = CALL.replace("ls", "pwd")
THOUGHT = "<think>\ntwo and two\n</think>\n\n"
ASK = [{"role": "user", "content": "hello"}]


async def create(setup, given=ASK, **more):
    async with setup.openai() as client:
        return await client.responses.create(model="policy", input=given, **more)


async def stream(setup, given=ASK, **more):
    """Return the events, and the response that the client builds from them."""
    async with setup.openai() as client:
        events = []
        async with client.responses.stream(model="policy", input=given, **more) as answer:
            async for event in answer:
                events.append(event)
            return events, await answer.get_final_response()


def sent(answer):
    """The output of a response as a client sends it back."""
    return [item.model_dump(exclude_none=True) for item in answer.output]


async def test_response_and_stored_turn(make_gateway):
    setup = await make_gateway("the total is four")
    answer = await create(setup, "hello", instructions="be brief", temperature=0.7, max_output_tokens=50)
    assert answer.output_text == "the total is four"
    assert (answer.status, answer.store, answer.error) == ("completed", False, None)
    (seen,), (turn,) = setup.engine.seen, setup.turns
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(seen.prompt), len(seen.sampled))
    assert (seen.sampling.temperature, seen.sampling.max_tokens) == (0.7, 50)
    assert turn.messages == ({"role": "system", "content": "be brief"}, *ASK)
    assert answer.id.startswith("resp_")
    assert answer.id == turn.id


async def test_function_call_items_and_outputs_continue_turn(make_gateway):
    setup = await make_gateway([f"{THOUGHT}Look\n{CALL}\n{OTHER}", "done"])
    answer = await create(setup, tools=TOOLS, instructions="help")
    thought, text, one, other = answer.output
    assert (thought.type, thought.content[0].text, text.content[0].text) == ("reasoning", "two and two", "Look")
    assert (one.name, one.arguments, other.arguments) == ("exec", '{"command": "ls"}', '{"command": "pwd"}')
    outputs = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "a.csv"},
        {"type": "function_call_output", "call_id": other.call_id, "output": [{"type": "input_text", "text": "/root"}]},
    ]
    await create(setup, [*ASK, *sent(answer), *outputs], tools=TOOLS, instructions="help")
    first, second = setup.turns
    assert second.parent == 0
    assert [m["content"] for m in second.messages] == ["a.csv", "/root"]
    start = setup.engine.seen[0].prompt + tuple(setup.engine.seen[0].sampled)
    assert setup.engine.seen[1].prompt[: len(start)] == start
    assert first.reply["tool_calls"][0]["id"] == one.call_id


async def test_functions_of_namespaces(make_gateway):
    """The model sees flat names; clients get a call as namespace and name, send it back so, and the turn continues."""
    spaced = CALL.replace('"exec"', '"mcp__task__exec"')
    setup = await make_gateway([spaced, spaced, "done"])
    tools = [{"type": "namespace", "name": "mcp__task", "description": "Of the task", "tools": TOOLS}, *TOOLS]
    answer = await create(setup, tools=tools)
    (call,) = answer.output
    assert (call.namespace, call.name, call.arguments) == ("mcp__task", "exec", '{"command": "ls"}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a.csv"}
    events, streamed = await stream(setup, [*ASK, *sent(answer), output], tools=tools)
    (again,) = streamed.output
    assert (again.namespace, again.name) == ("mcp__task", "exec")
    assert [e.name for e in events if e.type == "response.function_call_arguments.done"] == ["exec"]
    first, second = setup.turns
    assert (first.reply["tool_calls"][0]["function"]["name"], second.parent) == ("mcp__task__exec", 0)


async def test_reasoning_and_ids_are_optional(make_gateway):
    setup = await make_gateway([f"{THOUGHT}Look\n{CALL}", "done"])
    answer = await create(setup, tools=TOOLS)
    items = [
        {k: v for k, v in item.items() if k not in ("id", "status")}
        for item in sent(answer)
        if item["type"] != "reasoning"
    ]
    output = {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "a"}
    await create(setup, [*ASK, *items, output], tools=TOOLS)
    assert setup.turns[1].parent == 0


async def test_text_around_call_is_one_reply(make_gateway):
    setup = await make_gateway([f"Look\n{CALL}\nthere", "done"])
    answer = await create(setup, tools=TOOLS)
    assert [item.type for item in answer.output] == ["message", "function_call", "message"]
    output = {"type": "function_call_output", "call_id": answer.output[1].call_id, "output": "a"}
    await create(setup, [*ASK, *sent(answer), output], tools=TOOLS)
    assert setup.turns[1].parent == 0


async def test_stream_equals_response(make_gateway):
    setup = await make_gateway(f"{THOUGHT}Look\n{CALL}\n{OTHER}", pause=0.0005)
    events, answer = await stream(setup, tools=TOOLS)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    assert (kinds[0], kinds[1], kinds[-1]) == ("created", "in_progress", "completed")
    places = [(k, e.output_index) for k, e in zip(kinds, events, strict=True) if k.startswith("output_item")]
    assert places == [(f"output_item.{what}", n) for n in range(4) for what in ("added", "done")]
    for n, kind in enumerate(("reasoning_text", "output_text")):
        deltas = [e.delta for e in events if e.type == f"response.{kind}.delta"]
        assert len(deltas) > 1
        assert "".join(deltas) == answer.output[n].content[0].text
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.arguments for item in answer.output[2:]] == ['{"command": "ls"}', '{"command": "pwd"}']
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [i.id for i in done] == [i.id for i in answer.output] == list(dict.fromkeys(i.id for i in done))
    (seen,), (turn,) = setup.engine.seen, setup.turns
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(seen.prompt), len(seen.sampled))
    assert [c["id"] for c in turn.reply["tool_calls"]] == [i.call_id for i in answer.output[2:]]


async def test_text_streams_token_by_token(make_gateway):
    setup = await make_gateway("the total is four")
    setup.engine.before_end = asyncio.Event()
    got = ""
    async with setup.openai() as client:
        async for event in await client.responses.create(model="policy", input="hello", stream=True):
            if event.type == "response.output_text.delta":
                got += event.delta
                if not setup.engine.before_end.is_set():
                    assert not setup.turns, "the engine has not ended, and text is here"
                    setup.engine.before_end.set()
    assert got == "the total is four"


async def test_incomplete_response(make_gateway):
    setup = await make_gateway("one two three four")
    answer = await create(setup, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    async with setup.openai() as client:
        events = [
            e async for e in await client.responses.create(model="p", input="a", max_output_tokens=2, stream=True)
        ]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


async def test_parts_and_roles(make_gateway):
    setup = await make_gateway("four")
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    await create(
        setup, [{"role": "developer", "content": "brief"}, {"type": "message", "role": "user", "content": parts}]
    )
    assert setup.turns[0].messages == ({"role": "system", "content": "brief"}, {"role": "user", "content": "ab"})


async def test_images_must_be_data_urls(make_gateway):
    setup = await make_gateway("four")
    inline = f"data:image/png;base64,{base64.b64encode(b'PNG').decode()}"
    for url, words in ((inline, "takes none"), ("http://127.0.0.1/x.png", "nothing is fetched")):
        with pytest.raises(openai.BadRequestError, match=words):
            await create(
                setup, [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
            )
    assert not setup.engine.seen


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"input": []}, "'input'"),
        ({"input": None}, "'input'"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\[0\].role"),
        ({"input": [{"role": "user", "content": 3}]}, r"input\[0\].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, r"input\[0\].content\[0\].*input_file"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "function_call", "name": "exec", "arguments": "{}"}]}, "call_id"),
        ({"input": [3]}, r"input\[0\]"),
        ({"previous_response_id": "resp_1"}, "whole conversation"),
        ({"conversation": "conv_1"}, "whole conversation"),
        ({"prompt": {"id": "x"}}, "instructions"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name"),
        ({"tools": [{"type": "namespace", "tools": TOOLS}]}, r"tools\[0\].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 7}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [3]}]}, r"tools\[0\].tools\[0\]"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "exec"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_unsupported_request_is_refused(make_gateway, asked, words):
    setup = await make_gateway("four")
    async with setup.openai() as client:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await client.post("/responses", body={"model": "policy", "input": "hello", **asked}, cast_to=object)
    assert caught.value.type == "invalid_request_error"
    assert not setup.engine.seen


async def test_openai_error_form(make_gateway):
    errors = [
        (ContextLengthExceeded("the prompt has 9 tokens"), openai.BadRequestError, "context_length_exceeded"),
        (refused(429, retryable=True), openai.RateLimitError, "rate_limit_exceeded"),
        (refused(500), openai.InternalServerError, "upstream_failed"),
    ]
    for error, kind, code in errors:
        setup = await make_gateway(lambda *_, error=error: error)
        with pytest.raises(kind) as caught:
            await create(setup)
        assert caught.value.code == code
        with pytest.raises(kind):
            await stream(setup)


async def test_engine_failure_in_stream(make_gateway):
    setup = await make_gateway("one two three")

    async def dies(*_, **__):
        async for tokens in generate(*_, **__):
            yield tokens
            raise refused(500)

    generate, setup.engine.generate = setup.engine.generate, dies
    with pytest.raises(openai.APIError, match="endpoint returned 500"):
        await stream(setup)
    assert setup.turns[0].finish_reason == "error"
