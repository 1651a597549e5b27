"""Whether a model fits for a service: what each check finds, and what must not pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from typer.testing import CliRunner

from clawgym.cli import app
from clawgym.engines.tiny import CHAT_TEMPLATE, make_tiny_model
from clawgym.engines.transformers import TransformersEngine
from clawgym.errors import EngineError, MissingDependency
from clawgym.gateway.render import Renderer
from clawgym.online._histories import history_rewrites, inserts_date
from clawgym.online.config import load_service_config
from clawgym.online.portability import ModelFinding, check_model
from clawgym.sandbox.machine import Machine

NAMES = ["template", "tool calls", "window", "memory", "engine", "LoRA", "log-probs", "speed"]
ASKED = "text_of(message.content) ~ '<|im_end|>\\n' }}"
THOUGHT = "{%- if thought -%}"
NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("small") / "model", spread=0.05, context_window=8192)


@pytest.fixture
def changed(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with other settings in one of its JSON files."""

    def change(file: str, **settings: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(model, folder)
        about = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**about, **settings}))
        return folder

    return change


async def findings(model: Path, *settings: str) -> dict[str, ModelFinding]:
    found = {f.what: f for f in await check_model(load_service_config(None, str(model), settings))}
    assert list(found) == NAMES
    for finding in found.values():
        assert finding.detail
        assert bool(finding.advice) == (finding.status != "ok")
    return found


def renderer(model: Path, template: str) -> Renderer:
    return Renderer(model, chat_template=template)


# --- a model that fits ------------------------------------------------------------------------------------------------


async def test_a_fitting_model_passes_all_checks(model: Path) -> None:
    found = await findings(model, "training.compute.micro_tokens=1024")
    assert {name: f.status for name, f in found.items()} == dict.fromkeys(NAMES, "ok")
    assert found["tool calls"].figures["parser"] == "hermes"
    assert found["window"].figures["context_window"] == 32768
    lora = found["LoRA"].figures
    assert lora["layers"]["q_proj"] == 2
    # rank 16, of 2 layers: in + out of q, k, v, o (64 to 128, 64, 64 and back) and of gate, up, down (64 to 192)
    assert lora["trained_parameters"] == 2 * 16 * (192 + 128 + 128 + 192 + 3 * 256)
    assert lora["version_bytes"] > 4 * lora["trained_parameters"]
    logprobs = found["log-probs"].figures
    assert logprobs["tokens"] == 9 * 32
    assert logprobs["mean_nats"] < 1e-4
    assert logprobs["adapter_nats"] > 2 * 0.2  # twice the bound of bfloat16
    assert found["speed"].figures["one_stream"] > 0


# --- templates --------------------------------------------------------------------------------------------------------


def test_an_appending_template_rewrites_nothing(model: Path) -> None:
    assert history_rewrites(renderer(model, CHAT_TEMPLATE)) == []
    assert history_rewrites(renderer(model, NO_TOOLS)) == []
    assert not inserts_date(renderer(model, CHAT_TEMPLATE).template)


def test_a_rewritten_question_is_named(model: Path) -> None:
    upper = CHAT_TEMPLATE.replace(ASKED, "(said if loop.last else said|upper) ~ '<|im_end|>\\n' }}").replace(
        "{%- for message in rest -%}", "{%- for message in rest -%}{%- set said = text_of(message.content) -%}"
    )
    found = history_rewrites(renderer(model, upper))
    assert {r.conversation for r in found} >= {"plain", "plain and a system message", "with tool results"}
    for one in found:
        assert not one.reasoning
        assert one.part == "user message 1"
        assert one.before.startswith("hich reports")
        assert one.after.startswith("HICH REPORTS")


def test_a_count_of_messages_at_the_start_is_found(model: Path) -> None:
    found = history_rewrites(renderer(model, "{{ messages|length }} messages\n" + CHAT_TEMPLATE))
    assert len(found) == 6
    assert {r.before[0] + r.after[0] for r in found if r.conversation == "plain"} == {"13"}


def test_dropped_reasoning_is_told_from_other_rewrites(model: Path) -> None:
    dropping = CHAT_TEMPLATE.replace(THOUGHT, "{%- if thought and loop.last -%}")
    found = history_rewrites(renderer(model, dropping))
    assert len(found) == 6
    assert all(r.reasoning for r in found)


def test_an_opening_that_is_dropped_later_is_told_from_other_rewrites(model: Path) -> None:
    opening = "{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    assert CHAT_TEMPLATE.rstrip().endswith(opening)
    found = history_rewrites(
        renderer(model, CHAT_TEMPLATE.rstrip().removesuffix(opening) + opening.replace("' }}", "Thoughts: ' }}"))
    )
    assert {(r.part, r.reasoning) for r in found} == {("the opening of the reply", True)}
    ended = "{%- if add_generation_prompt -%}"
    found = history_rewrites(renderer(model, CHAT_TEMPLATE.replace(ended, "<|im_end|>" + ended)))
    assert {r.reasoning for r in found} == {False}
    assert {r.part for r in found} == {"the end of user message 1"}


async def test_messages_rendered_by_their_place_are_found(changed: Callable[..., Path]) -> None:
    numbered = CHAT_TEMPLATE.replace(ASKED, "loop.index ~ '. ' ~ " + ASKED)
    finding = (await findings(changed("tokenizer_config.json", chat_template=numbered)))["template"]
    assert finding.status == "failed"
    assert "renders what follows a reply by its place in the conversation (plain)" in finding.detail
    assert "5. And the one of April" in finding.detail


async def test_a_model_whose_template_rewrites_history_fails(changed: Callable[..., Path]) -> None:
    folder = changed("tokenizer_config.json", chat_template="{{ messages|length }}\n" + CHAT_TEMPLATE)
    finding = (await findings(folder))["template"]
    assert finding.status == "failed"
    assert "rewrites user message 1 when the conversation goes on (plain)" in finding.detail
    assert "chat_template.jinja" in finding.advice


async def test_dropped_reasoning_and_a_date_are_warnings(changed: Callable[..., Path]) -> None:
    template = CHAT_TEMPLATE.replace(THOUGHT, "{%- if thought and loop.last -%}")
    template = template.replace("{%- set opening = '' -%}", "{%- set opening = strftime_now('%d %B %Y') -%}")
    finding = (await findings(changed("tokenizer_config.json", chat_template=template)))["template"]
    assert finding.status == "warning"
    assert "drops the reasoning or the opening" in finding.detail
    assert "date" in finding.detail


async def test_a_template_without_tools_is_found(changed: Callable[..., Path]) -> None:
    finding = (await findings(changed("tokenizer_config.json", chat_template=NO_TOOLS)))["tool calls"]
    assert finding.status == "warning"
    assert "shows no tools" in finding.detail
    assert not finding.figures["shows_tools"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('<tool_call>\\n{"name": \' ~', '<calling>\\n{"name": \' ~', "read by no known parser"),
        ("text_of(message.content) ~ '\\n</tool_response>'", "'\\n</tool_response>'", "renders no tool results"),
    ],
)
async def test_calls_and_results_that_get_lost_are_found(
    changed: Callable[..., Path], old: str, new: str, why: str
) -> None:
    assert old in CHAT_TEMPLATE
    template = CHAT_TEMPLATE.replace(old, new)
    finding = (await findings(changed("tokenizer_config.json", chat_template=template)))["tool calls"]
    assert finding.status == "warning"
    assert why in finding.detail


async def test_a_template_that_cannot_be_used_fails(changed: Callable[..., Path]) -> None:
    found = await findings(changed("tokenizer_config.json", chat_template="{% for %}"))
    assert found["template"].status == found["tool calls"].status == "failed"
    assert "cannot be compiled" in found["template"].detail
    assert found["log-probs"].status == "ok"


# --- window and memory ------------------------------------------------------------------------------------------------


async def test_a_window_too_small_for_openclaw_is_found(small: Path) -> None:
    window = (await findings(small))["window"]
    assert window.status == "warning"
    assert window.figures["fits"] == {"chats": True, "tasks of the gate": True, "OpenClaw": False}
    assert (await findings(small, "training.model.context_window=1024"))["window"].status == "failed"


@pytest.mark.parametrize(
    ("free_mb", "status"), [(1_500, "failed"), (2_100, "warning"), (2_700, "warning"), (64_000, "ok")]
)
async def test_memory_is_compared_with_what_is_free(
    model: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, status: str
) -> None:
    machine = Machine(2, lambda: float(free_mb), lambda: 0.0)
    monkeypatch.setattr(Machine, "this", classmethod(lambda cls: machine))
    found = await findings(model, "training.compute.device=cpu", "training.compute.micro_tokens=8192")
    assert found["memory"].status == status, found["memory"]
    assert found["engine"].status == "ok"
    assert ("cache" in found["memory"].detail) == (free_mb == 2_100)
    assert ("a conversation of 32,768 tokens" in found["memory"].detail) == (free_mb == 2_700)
    parts = found["memory"].figures["parts_bytes"]
    assert found["memory"].figures["serve_bytes"] == sum(parts.values())


async def test_a_model_that_does_not_fit_is_not_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2, lambda: 100.0, lambda: 0.0)
    monkeypatch.setattr(Machine, "this", classmethod(lambda cls: machine))
    monkeypatch.setattr(TransformersEngine, "__init__", lambda *_, **__: pytest.fail("loaded"))
    found = await findings(model, "training.compute.device=cpu")
    assert {found[name].status for name in NAMES[3:]} == {"failed"}


QWEN = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960}
SHAPES = {
    "Qwen/Qwen3-1.7B": {
        **QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16
    },
    "Qwen/Qwen3-8B": {
        **QWEN, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "gib", "devices"),
    [
        ("serve", 12.0, "two cores"),
        ("serve-24gb", 24.0, "one GPU of 24 GB"),
        ("serve-8gpu", 80e9 / 2**30, "eight GPUs of 80 GB"),
    ],
)
def test_each_recipe_fits_what_it_is_for(
    recipe: str, gib: float, devices: str, changed: Callable[..., Path], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its dry run, on a model of the same shape, without weights."""
    text = (files("clawgym.online") / f"{recipe}.yaml").read_text("utf-8")
    assert devices in text
    about = load_service_config(recipe, None if "path:" in text else str(small)).training.model
    if about.quantize:
        pytest.importorskip("bitsandbytes")
    if about.path in SHAPES:
        shape = SHAPES[about.path]
        folder = changed("config.json", **shape, layer_types=["full_attention"] * shape["num_hidden_layers"])
        (folder / "model.safetensors").unlink()
    else:
        folder = small
    context = 0.5 * (recipe != "serve")  # of CUDA, for each of three processes
    machine = Machine(2, lambda: (gib - 3 * context) * 2**10, lambda: 0.0)
    monkeypatch.setattr(Machine, "this", classmethod(lambda cls: machine))
    done = CliRunner().invoke(app, ["serve", "--config", recipe, "--model", str(folder), "--dry-run"])
    assert done.exit_code == 0, done.output
    rows = {row.split()[1]: row.split()[0] for row in done.output.splitlines() if not row.startswith(" ")}
    assert rows.keys() == {"template", "tool", "window", "memory"}
    assert rows["memory"] in ("ok", "warning"), done.output
    assert recipe == "serve" or rows["window"] == "ok", "OpenClaw fits"


async def test_the_memory_of_each_rank_is_told(model: Path) -> None:
    """Ranks share what is trained; on a CPU they share the memory too."""

    async def memory(*settings: str) -> ModelFinding:
        common = ["training.model.dtype=bfloat16", "training.compute.device=cpu"]
        found = await check_model(load_service_config(None, str(model), [*common, *settings]), weights=False)
        return next(finding for finding in found if finding.what == "memory")

    ranked = ["training.trainer=verl", "training.verl.engine=transformers"]
    whole, shard = [await memory(*ranked, f"training.verl.ranks={ranks}") for ranks in (1, 4)]
    assert "each of 4 ranks" in shard.detail
    parts = [one.figures["parts_bytes"] for one in (whole, shard)]
    assert parts[1]["training"] == 4 * shard.figures["rank_bytes"] < 4 * whole.figures["rank_bytes"]
    local = (await memory()).figures["parts_bytes"]
    assert [{name: each[name] for name in ("serving", "gate")} for each in parts] == [
        {name: local[name] for name in ("serving", "gate")}
    ] * 2


async def test_without_a_gate_there_is_no_third_copy(model: Path) -> None:
    found = await findings(model, "gate.on=false")
    assert found["memory"].figures["parts_bytes"]["gate"] == 0
    assert (await findings(model))["memory"].figures["parts_bytes"]["gate"] > 0


# --- loading, training and sampling -----------------------------------------------------------------------------------


async def test_a_model_that_cannot_be_loaded_fails_with_its_error(model: Path, changed: Callable[..., Path]) -> None:
    folder = changed("config.json")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    found = await findings(folder)
    assert {found[name].status for name in ("engine", "LoRA", "log-probs", "speed")} == {"failed"}
    assert "cannot be loaded" in found["engine"].detail
    assert found["engine"].advice.startswith("check the folder")


@pytest.mark.parametrize("trains", [True, False])
async def test_a_model_that_is_not_sampled_exactly_fails(changed: Callable[..., Path], trains: bool) -> None:
    folder = changed(
        "config.json",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=64,
        use_sliding_window=trains,  # without, the model has layers that need a window, and none
    )
    found = await findings(folder)
    assert found["engine"].status == found["log-probs"].status == "failed"
    assert "sliding_attention" in found["engine"].detail
    assert found["LoRA"].status == ("ok" if trains else "failed")
    assert ("forward pass of training fails" in found["LoRA"].detail) == (not trains)


async def test_missing_lora_targets_are_named(model: Path) -> None:
    some = (await findings(model, "training.model.lora.targets=[q_proj, wq]"))["LoRA"]
    assert some.status == "warning"
    assert "no layers wq" in some.detail
    found = await findings(model, "training.model.lora.targets=[wq]")
    assert found["LoRA"].status == found["log-probs"].status == "failed"
    assert found["engine"].status == "ok"


async def test_an_engine_that_ignores_the_adapter_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = TransformersEngine.load_adapter

    async def emptied(self: Any, name: str, source: Path, version: int) -> None:
        from clawgym.engines.lora import adapter_files

        weights, config = adapter_files(source)
        await load(self, name, {name: 0 * tensor for name, tensor in weights.items()}, version, config=config)

    monkeypatch.setattr(TransformersEngine, "load_adapter", emptied)
    finding = (await findings(model))["log-probs"]
    assert finding.status == "failed"
    assert finding.figures["mean_nats"] > 10 * finding.figures["bound_nats"]


async def test_slow_sampling_is_a_warning(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym.online.portability._SLOW", 1e9)
    assert (await findings(model))["speed"].status == "warning"


async def test_no_token_in_time_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym.online.portability._SECONDS", 0.0)
    found = await findings(model)
    assert found["log-probs"].status == "failed"
    assert "no token was sampled" in found["log-probs"].detail


async def test_an_unknown_model_and_a_missing_package_are_errors(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="no such folder"):
        await findings(tmp_path / "gone")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingDependency, match=r"clawgym\[serve\]"):
        await findings(model)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_findings_and_their_exit_status(model: Path, changed: Callable[..., Path]) -> None:
    done = CliRunner().invoke(app, ["doctor", "--model", str(model)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * len(NAMES)
    folder = changed("tokenizer_config.json", chat_template="{{ messages|length }}\n" + CHAT_TEMPLATE)
    done = CliRunner().invoke(app, ["doctor", "--json", "--model", str(folder)])
    assert done.exit_code == 1
    rows = {row["what"]: row for row in json.loads(done.stdout)}
    assert rows["template"]["status"] == "failed"
    assert rows["template"]["figures"]["rewrites"][0]["part"] == "user message 1"
    done = CliRunner().invoke(app, ["doctor", "--set", "gate.on=false"])
    assert done.exit_code == 2
