"""The tiny model: a complete, deterministic folder, whose template only appends to histories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawgym.engines.folders import load_config, load_weights, model_folder
from clawgym.engines.tiny import SPECIAL_TOKENS, make_tiny_model
from clawgym.errors import EngineError

pytest.importorskip("torch")

TOOLS = [{"type": "function", "function": {"name": "exec", "description": "Run <b>é", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "exec", "arguments": '{"command":  "ls"}'}}
CALL_2 = {"id": "2", "type": "function", "function": {"name": "exec", "arguments": {"command": "é"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " 日本"}]},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL, CALL_2]},
    {"role": "tool", "tool_call_id": "1", "content": "a.txt"},
    {"role": "tool", "tool_call_id": "2", "content": "nothing"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def test_same_files_each_time_and_other_weights_for_another_seed(folder: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again")
    other = make_tiny_model(tmp_path / "other", seed=1)
    names = sorted(p.name for p in folder.iterdir())
    assert names == sorted(p.name for p in again.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (again / name).read_bytes(), name
    assert (folder / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(EngineError, match="choose another"):
        make_tiny_model(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="negative dimension"):
        make_tiny_model(tmp_path / "model", hidden=-1)
    assert list(tmp_path.iterdir()) == []


def test_transformers_loads_it(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.eos_token == "<|im_end|>"
    text = 'Run "ls -R" é 日本\n\n  then\t42 <tool_call>\n{"name": "x"}\n</tool_call>'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_template(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    head, tail = text.split("</tool_call><|im_end|>\n", 1)
    assert head.startswith("<|im_start|>system\nBe brief.\n\nThese functions")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in head
    assert tail == (
        "<|im_start|>user\nHello 日本<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "exec", "arguments": {"command":  "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "exec", "arguments": {"command": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na.txt\n</tool_response>\n"
        "<tool_response>\nnothing\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(MESSAGES[1:2], tokenize=False) == "<|im_start|>user\nHello 日本<|im_end|>\n"


def test_a_brief_template_names_tools_and_is_the_same_otherwise(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    asked = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "read", "parameters": asked}}]
    tools.append({"type": "function", "function": {"name": "wait"}})
    texts = {}
    for name, place in (("whole", folder), ("brief", make_tiny_model(tmp_path / "model", brief=True))):
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        texts[name] = tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False)
    head, tail = texts["brief"].split("<|im_end|>\n", 1)
    assert head == "<|im_start|>system\nBe brief.\n\n<tools>\nexec()\nread(path, lines)\nwait()\n</tools>"
    assert texts["whole"].split("<|im_end|>\n", 1)[1] == tail


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6])  # not 4: tool results share one user turn
def test_a_longer_history_only_appends(folder: Path, length: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    whole = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False)
    assert whole.startswith(tokenizer.apply_chat_template(MESSAGES[:length], tools=TOOLS, tokenize=False))


def test_images_are_refused(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    with pytest.raises(Exception, match="text only, not image_url"):
        tokenizer.apply_chat_template([message], tokenize=False)


@pytest.mark.parametrize("weights", [True, False])
def test_of_a_name_on_the_hub_only_what_is_needed_is_fetched(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    asked: list[str] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_folder("team/tiny", weights=weights) == folder
    assert asked[0] == "team/tiny"
    assert {"*.json", "tokenizer.model"} <= set(asked)
    assert ("*.safetensors" in asked) == weights


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_hidden_layers": 1_001}, "num_hidden_layers is over 1000"),
        ({"text_config": {"num_layers": 10**9}}, "num_layers is over 1000"),
        ({"parts": [{"more": [{"num_local_experts": 4_097}]}]}, "num_local_experts is over 4096"),
        ({"max_position_embeddings": 2**28}, "max_position_embeddings is over"),
        ({"attn_implementation": "someone/kernel"}, "names the kernel 'someone/kernel'"),
        ({"vision_config": {"_attn_implementation": "a/b"}}, "names the kernel 'a/b'"),
    ],
)
def test_sizes_that_no_model_has_and_kernels_from_elsewhere_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert load_config(folder).num_hidden_layers < 1_001
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changed))
    with pytest.raises(EngineError, match=said):
        load_config(folder)


@pytest.mark.parametrize(("share", "refused"), [(7.9, False), (8.1, True), (8.9, True)])
def test_description_larger_than_the_files_is_refused(share: float, refused: bool, tmp_path: Path) -> None:
    """Each weight takes at least one bit."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path / "tiny")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    made = load_weights(AutoModelForCausalLM, folder)
    there, table = sum(weight.numel() for weight in made.parameters()), made.get_input_embeddings().weight
    settings = json.loads((folder / "config.json").read_text())
    tables = 1 if settings.get("tie_word_embeddings") else 2
    more = int((share * size - there) / (tables * table.shape[1]))
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": table.shape[0] + more}))
    with pytest.raises(EngineError) as error:
        load_weights(AutoModelForCausalLM, folder)
    assert ("more than its files can hold" in str(error.value)) == refused
