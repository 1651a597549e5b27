"""Rendering: untrusted text adds no special tokens, and increments equal the template's rendering."""

from __future__ import annotations

import functools
import json
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from clawgym.errors import GatewayError
from clawgym.gateway.calls import Refusal
from clawgym.gateway.render import Renderer
from clawgym.gateway.template import Guard

from . import models
from .models import write_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string", "description": "where"}}},
        },
    }
]
KINDS = {
    "chatml": {"template": models.CHATML},
    "forgetful": {"template": models.FORGETFUL},
    "thinking": {"template": models.THINKING},
    "coder": {"template": models.CODER},
    "headers": {
        "template": models.HEADERS,
        "special": ("<|begin|>", "<|start|>", "<|header|>", "<|eot|>", "<|eom|>"),
        "eos": "<|eot|>",
    },
    "strict": {
        "template": models.STRICT,
        "special": ("<s>", "</s>", "[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[CALL]"),
        "eos": "</s>",
    },
    "sentencepiece": {"template": models.CHATML, "sentencepiece": True},
}
FOREIGN = {"<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "<think>", "<|eot|>", "[INST]", "</s>"}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    made = {}

    def get(kind, **options):
        key = (kind, *sorted(options))
        if key not in made:
            folder = tmp_path_factory.mktemp("models") / kind
            write_model(folder, **KINDS[kind])
            made[key] = Renderer(folder, **options)
        return made[key]

    return get


@functools.cache
def words_of(folder):
    return Tokenizer.from_file(f"{folder}/tokenizer.json")


def text_of(renderer, ids):
    return words_of(renderer.tokenizer).decode(list(ids), skip_special_tokens=False)


def id_of(renderer, token):
    return words_of(renderer.tokenizer).token_to_id(token)


def end_of(renderer):
    """The id with which the template ends a reply."""
    (end,) = (e for e in ("<|im_end|>", "<|eot|>", "</s>") if id_of(renderer, e) is not None)
    return id_of(renderer, end)


def user(text):
    return {"role": "user", "content": text}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def reply(text=None, *calls, reasoning=None):
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    return message


# The same ids as transformers


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
def test_prompt_ids_equal_transformers(renderers, kind):
    renderer = renderers(kind)
    library = AutoTokenizer.from_pretrained(renderer.tokenizer)
    call = ("read_file", '{"path": "a\\"b.txt"}')
    messages = [user("count the lines\n of naïve 😀 reports"), reply("Looking", call), result("call0", "1\n\n2")]
    plain = json.loads(json.dumps(messages))
    plain[1]["tool_calls"][0]["function"]["arguments"] = json.loads(call[1])
    wanted = library.apply_chat_template(plain, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert list(renderer.prompt(messages, TOOLS)) == wanted


def test_cached_system_prompt_has_same_ids(renderers):
    renderer = renderers("chatml")
    library = AutoTokenizer.from_pretrained(renderer.tokenizer)
    messages = [{"role": "system", "content": "read the reports, please.\n" * 500}, user("go")]
    wanted = library.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    for _ in range(2):
        assert list(renderer.prompt(messages, TOOLS)) == wanted


# Untrusted texts

words = st.sampled_from(
    [
        *FOREIGN,
        "<|im_",
        "end|>",
        "<",
        ">",
        "|im_end|",
        "/",
        "</",
        "tool_call",
        "<|eom|>",
        "</s",
        "s>",
        "file",
        " ",
        "\n",
    ]
)
texts = st.lists(words | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=4), max_size=6).map("".join)


def structure(renderer, ids):
    added = words_of(renderer.tokenizer).get_added_tokens_decoder()
    special = {i for i, t in added.items() if t.content in renderer.template.source or t.content in models.MARKERS}
    return [i for i in ids if i in special]


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "strict"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_untrusted_text_adds_no_special_tokens(renderers, kind, data):
    renderer = renderers(kind)

    def conversation(text):
        tools = [
            {
                "type": "function",
                "function": {
                    "name": "t" + text(),
                    "description": text(),
                    "parameters": {"type": "object", "properties": {"p" + text(): {"note" + text(): text()}}},
                },
            }
        ]
        call = ("t" + text(), json.dumps({"k" + text(): text()}))
        return [
            user(text()), reply(None, call), result("call0", text()), result("call0", text()), user(text()),
        ], tools  # fmt: skip

    hostile, tools = conversation(lambda: data.draw(texts))
    harmless, plain_tools = conversation(lambda: "x")
    ids = renderer.prompt(hostile, tools)
    assert structure(renderer, ids) == structure(renderer, renderer.prompt(harmless, plain_tools))
    new = renderer.increment((), hostile[2:], tools)
    assert structure(renderer, new) == structure(renderer, renderer.increment((), harmless[2:], plain_tools))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ids_decode_to_rendered_text(renderers, data):
    renderer = renderers("chatml")
    said = [data.draw(texts) for _ in range(4)]
    messages = [user(said[0]), reply(said[1]), result("c", said[2]), user(said[3])]
    start, end = "<|im_start|>", "<|im_end|>\n"
    tool = f"{start}user\n<tool_response>\n{said[2]}\n</tool_response>{end}"
    wanted = f"{start}user\n{said[0]}{end}{start}assistant\n{said[1]}{end}{tool}{start}user\n{said[3]}{end}"
    assert text_of(renderer, renderer.prompt(messages)) == wanted + f"{start}assistant\n"


def test_template_conditions_see_original_text(renderers):
    renderer = renderers("headers")
    assert "\n\nyes<|eot|>" in text_of(renderer, renderer.prompt([user("  yes\n")]))
    thoughts = renderers("forgetful").prompt([user("a"), reply("<think>\nhm\n</think>\n\nb"), result("c", "d")])
    assert "<think>\nhm\n</think>\n\nb<|im_end|>" in text_of(renderers("forgetful"), thoughts)


def test_text_that_completes_token_is_marked():
    """A special token may arise where a text touches the template's text."""
    guard = Guard(["<|im_end|>", "</s>"])
    mark = guard.mark
    for text, marked in (
        ("end|> hello", f"{mark}end|> hello"),
        ("hello <|im_", f"hello <|im_{mark}"),
        ("im_", f"{mark}im_"),
        (" s> and </ ", f" {mark}s> and </{mark} "),
        ("a <|im_end|> b", f"a <{mark}|im_end|> b"),
        ("nothing of it > here", "nothing of it > here"),
        ("  ", "  "),
    ):
        assert guard.text(text) == marked


def test_lone_surrogates_in_arguments_are_replaced(renderers):
    ids = renderers("chatml").prompt([user("a"), reply(None, ("f", '{"a": "\\ud800"}')), result("call0", "b")])
    assert '{"a": "�"}' in text_of(renderers("chatml"), ids)


def test_non_object_arguments_are_rendered_unchanged(renderers):
    ids = renderers("chatml").prompt([user("a"), reply(None, ("f", "{broken")), result("call0", "b")])
    assert '"arguments": {broken}' in text_of(renderers("chatml"), ids)
    with pytest.raises(Refusal, match="template refuses"):
        renderers("coder").prompt([user("a"), reply(None, ("f", "{broken")), result("call0", "b")])


# Increments

plain_texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=12)
news = st.lists(st.tuples(st.sampled_from(["user", "tool"]), plain_texts), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(news=news, said=plain_texts, called=st.booleans())
def test_increment_is_tail_of_whole_rendering(renderers, kind, news, said, called):
    renderer = renderers(kind)
    calls = (("read_file", '{"path": "a"}'),) * called
    if not called or kind == "strict":
        roles = [role for role, _ in news]
        assume(
            "tool" not in roles
            or (called and "tool" not in roles[roles.index("user") :] if "user" in roles else called)
        )
    new = [user(text) if role == "user" else result("call0", text) for role, text in news]
    tools = () if kind == "strict" else TOOLS
    before = [user("go"), reply(said, *calls)]
    whole = text_of(renderer, renderer.prompt([*before, *new], tools))
    ends = [renderer.increment(sampled, new, tools).count(end_of(renderer)) for sampled in ((), (end_of(renderer),))]
    assert ends[0] == ends[1] + 1
    for sampled in ((), (end_of(renderer),)):
        if kind == "headers" and called and not sampled:
            continue  # a reply with calls ends with another token in this template
        ids = renderer.increment(sampled, new, tools)
        tail = text_of(renderer, ids)
        assert whole.endswith(tail.lstrip() if kind == "sentencepiece" else tail)
        assert all(text.strip() in tail for _, text in news)


@pytest.mark.parametrize("kind", ["chatml", "headers", "sentencepiece"])
def test_increments_equal_whole_rendering(renderers, kind):
    """For a template that only appends, the ids of all turns equal those of one rendering."""
    renderer = renderers(kind)
    messages = [user("go")]
    ids = list(renderer.prompt(messages, TOOLS))
    end = end_of(renderer)
    for n in range(3):
        said = f"{n} lines of café"
        sampled = list(renderer.prompt([user("go"), reply(said)]))
        at = len(renderer.prompt([user("go")]))
        sampled = sampled[at : sampled.index(end, at) + 1]
        new = [user(f"and file {n}?")]
        ids += [*sampled, *renderer.increment(sampled, new, TOOLS)]
        messages += [reply(said), *new]
    assert ids == list(renderer.prompt(messages, TOOLS))


def test_truncated_reply_gets_end_token(renderers):
    renderer = renderers("chatml")
    cut = renderer.increment((99,), [user("more")])
    whole = renderer.increment((99, min(renderer.stop_ids)), [user("more")])
    assert cut == (id_of(renderer, "<|im_end|>"), *whole)


def test_sampled_end_token_is_not_repeated(tmp_path):
    folder = write_model(tmp_path / "m", **KINDS["headers"])
    begin, eot, eom = 0, 3, 4
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{begin}, {eot}, {eom}]}}')
    renderer = Renderer(folder)
    assert [id_of(renderer, t) for t in ("<|begin|>", "<|eot|>", "<|eom|>")] == [begin, eot, eom]
    assert renderer.increment((5, eot), [result("c", "a")])[0] != eot
    assert renderer.increment((5, eom), [result("c", "a")])[0] != eot
    assert renderer.increment((5, begin), [user("a")])[0] == eot


def test_reply_ending_with_opening_of_next_turn(tmp_path):
    folder = write_model(tmp_path / "m", models.OPENERS, special=("<|e|>", "<|user|>", "<|observation|>"), eos="<|e|>")
    user_id, observation = 1, 2
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, user_id, observation]}))
    renderer = Renderer(folder)
    assert text_of(renderer, renderer.increment((5, observation), [result("c", "a")])) == "a<|assistant|>"
    assert text_of(renderer, renderer.increment((5, user_id), [user("a")])) == "a<|assistant|>"
    assert text_of(renderer, renderer.increment((5, observation), [user("a")])) == "<|user|>a<|assistant|>"
    assert text_of(renderer, renderer.increment((5,), [user("a")])) == "<|user|>a<|assistant|>"


def test_unsupported_tool_results_are_refused(tmp_path):
    dropping = models.CHATML.replace("+ message.content + '\\n</tool_response>'", "+ '</tool_response>'")
    for n, template in enumerate((models.NAMED, dropping)):
        assert template != models.CHATML
        renderer = Renderer(write_model(tmp_path / str(n), template))
        with pytest.raises(Refusal, match="does not render tool results"):
            renderer.increment((), [result("c", "a")])
        assert renderer.increment((), [user("a")])
        assert any("does not render tool results" in problem for problem in renderer.check())


def test_increment_does_not_render_tools(renderers):
    assert "read_file" not in text_of(renderers("chatml"), renderers("chatml").increment((), [user("a")], TOOLS))


# Parsing replies


@pytest.mark.parametrize(
    ("kind", "style"), [("chatml", "hermes"), ("coder", "qwen3-coder"), ("headers", None), ("strict", None)]
)
def test_call_parser_is_detected(renderers, kind, style):
    assert renderers(kind).call_parser == style


def test_reply_starts_in_reasoning_if_prompt_opens_it(renderers):
    for kind, content, reasoning in (("thinking", None, "hm"), ("chatml", "hm", None)):
        renderer = renderers(kind)
        prompt = renderer.prompt([user("a <think>")], TOOLS)
        parser = renderer.parser(TOOLS, prompt)
        parser.push("hm")
        parser.finish()
        assert (parser.content, parser.reasoning) == (content, reasoning)


@pytest.mark.parametrize("kind", ["chatml", "coder", "forgetful"])
def test_rendered_calls_are_parsed(renderers, kind):
    renderer = renderers(kind)
    arguments = {"path": "a </think> b\nc", "é": "x"}
    calls = [("read_file", json.dumps(arguments, ensure_ascii=False)), ("read_file", "{}")]
    text = text_of(renderer, renderer.prompt([user("a"), reply("Look", *calls), result("call0", "b")], TOOLS))
    said = text.split("assistant\n")[1].split("<|im_end|>")[0]
    said = re.sub(r"^<think>.*?</think>", "", said, flags=re.S)
    parser = renderer.parser(TOOLS)
    parser.push(said)
    parser.finish()
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parser.calls] == [
        ("read_file", arguments),
        ("read_file", {}),
    ]
    assert (parser.content.strip(), parser.malformed) == ("Look", 0)


def test_stop_ids_from_folder_and_template(tmp_path):
    folder = write_model(tmp_path / "m", models.CHATML, eos="<|endoftext|>")
    assert Renderer(folder).stop_ids == {0, 2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    assert Renderer(folder).stop_ids == {0, 1, 2}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(GatewayError, match=r"generation_config\.json cannot be read"):
        Renderer(folder)


# Problems of templates


def test_good_templates_have_no_problems(renderers):
    for kind in ("chatml", "coder", "sentencepiece"):
        assert renderers(kind).check() == []


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("forgetful", "drops the reasoning of earlier turns"),
        ("headers", "calls that no known parser reads"),
        ("strict", "refuses system messages"),
        ("strict", "drops tool definitions"),
    ],
)
def test_template_problems_are_named(renderers, kind, problem):
    assert any(problem in found for found in renderers(kind).check())


def test_template_that_changes_replies(tmp_path):
    template = models.CHATML.replace(
        "{%- for message in messages %}", "{{ messages | length }}{%- for message in messages %}", 1
    )
    folder = write_model(tmp_path / "m", template)
    assert any("changes the conversation before a user message" in p for p in Renderer(folder).check())


def test_images_need_template_support(renderers, tmp_path):
    message = {"role": "user", "content": [{"type": "image", "sha256": "00"}, {"type": "text", "text": "what"}]}
    with pytest.raises(Refusal, match=r"messages\[0\]' contains an image"):
        renderers("chatml").prompt([message])
    shown = "(message.content if message.content is string else '(picture)' + message.content[-1].text)"
    template = models.CHATML.replace("message.role + '\\n' + message.content", f"message.role + '\\n' + {shown}")
    renderer = Renderer(write_model(tmp_path / "m", template))
    assert "(picture)what<|im_end|>" in text_of(renderer, renderer.prompt([message]))


def test_templates_run_in_jinja_sandbox(tmp_path):
    template = models.CHATML + "{{ messages.__class__.__mro__ }}"
    with pytest.raises(GatewayError, match="unsafe"):
        Renderer(write_model(tmp_path / "m", template))


def test_unloadable_model_is_reported(tmp_path):
    with pytest.raises(GatewayError, match="no tokenizer can be loaded"):
        Renderer(tmp_path)
    folder = write_model(tmp_path / "m", models.CHATML)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(GatewayError, match="has no chat template"):
        Renderer(folder)


def test_identity_differs_between_models(renderers, tmp_path):
    one, other = renderers("chatml").identity(), renderers("thinking").identity()
    assert one["renderer_sha256"] != other["renderer_sha256"]
    assert renderers("chatml", template_kwargs={"a": 1}).identity()["renderer_sha256"] != one["renderer_sha256"]
    assert renderers("chatml").identity() == one


def test_similar_call_format_has_no_parser(tmp_path):
    folder = write_model(tmp_path / "m", models.OPENERS, special=("<|e|>", "<|user|>", "<|observation|>"), eos="<|e|>")
    assert Renderer(folder).call_parser == "hermes"
    other = models.OPENERS.replace("(call.function | tojson)", "call.function.name")
    folder = write_model(tmp_path / "o", other, special=("<|e|>", "<|user|>", "<|observation|>"), eos="<|e|>")
    assert Renderer(folder).call_parser is None
