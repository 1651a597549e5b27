"""Make a tiny random model for tests, examples and benchmarks, without downloads.

Its output is random text, but its folder is complete: transformers, vLLM and the gateway load it like a real Qwen3
model, with a tokenizer and a chat template for tool calls. The same arguments and library versions give the same files.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clawgym.errors import EngineError, MissingDependency

__all__ = ["BRIEF_TEMPLATE", "CHAT_TEMPLATE", "SPECIAL_TOKENS", "VISION_TOKENS", "make_tiny_model"]

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Special tokens in the order of their ids, from 0. Only the first three are skipped when decoding."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""The additional special tokens of a vision-language model."""

_CHAT = """\
{%- macro text_of(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none and content is defined -%}
    {%- for part in content -%}
      {%- if part.type != 'text' -%}{{ raise_exception('this model reads text only, not ' ~ part.type) }}{%- endif -%}
      {{ part.text }}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set rest = messages -%}
{%- set opening = '' -%}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
  {%- set opening = text_of(messages[0].content) -%}
  {%- set rest = messages[1:] -%}
{%- endif -%}
{%- if tools or opening -%}
  {{ '<|im_start|>system\\n' ~ opening }}
  {%- if tools -%}
TOOLS  {%- endif -%}
  {{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in rest -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\\n<tool_response>\\n' ~ text_of(message.content) ~ '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {{ '<|im_start|>assistant\\n' }}
    {%- set thought = message.reasoning_content -%}
    {%- if thought -%}{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif -%}
    {%- set said = text_of(message.content) -%}
    {{ said }}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function if call.function is defined else call -%}
      {{ '\\n' if said or not loop.first else '' }}
      {{- '<tool_call>\\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' }}
      {{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
      {{- '}\\n</tool_call>' }}
    {%- endfor -%}
    {{ '<|im_end|>\\n' }}
  {%- else -%}
    {{ '<|im_start|>' ~ message.role ~ '\\n' ~ text_of(message.content) ~ '<|im_end|>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_TOOLS = """\
    {{ ('\\n\\n' if opening else '') ~ 'These functions can be called. Each line describes one, as JSON:\\n<tools>' }}
    {%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
    {{ '\\n</tools>\\nA call is one JSON object with the name and the arguments, between two tags:\\n' }}
    {{- '<tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call>' }}
"""
_NAMES = """\
    {{ ('\\n\\n' if opening else '') ~ '<tools>' }}
    {%- for tool in tools -%}
      {%- set about = tool.function -%}
      {{ '\\n' ~ about.name ~ '(' ~ (((about.parameters or {}).properties or {}) | join(', ')) ~ ')' }}
    {%- endfor -%}
    {{ '\\n</tools>' }}
"""
CHAT_TEMPLATE = _CHAT.replace("TOOLS", _TOOLS)
"""ChatML with tools in the Hermes style. Histories are only appended to: reasoning of earlier turns is kept."""

BRIEF_TEMPLATE = _CHAT.replace("TOOLS", _NAMES)
"""The same, but with only the names of tools and of their parameters, for models too small to use descriptions."""

_SEEING = CHAT_TEMPLATE.replace(
    "{%- if part.type != 'text' -%}{{ raise_exception('this model reads text only, not ' ~ part.type) }}{%- endif -%}",
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- endif -%}",
)

_WORDS = """
system user assistant the a of in to and is for with all that file files folder line lines name names path value
values number count table row column report total sum date time day month list order sort first last new old same
next each every write read make find count copy move remove rename replace change keep check run show give answer
say use need data text json csv log error message result output input command shell script test task agent model
tool function call arguments string object integer type description required properties parameters content workspace
reports notes north south east west january march june apple pear mint olive amber done ok please then when if not
only which was were it its there here one two three four five ten hundred thousand percent average
""".split()  # noqa: SIM905


def make_tiny_model(
    folder: str | Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 704,
    context_window: int = 32768,
    vision: bool = False,
    corpus: Iterable[str] | None = None,
    brief: bool = False,
    spread: float = 0.15,
) -> Path:
    """Write a random Qwen3 model of about 200,000 weights (float32) with tokenizer and chat template to ``folder``.

    With ``vision`` it is a Qwen2-VL model; an image of 1024 x 768 pixels is 70 tokens. If ``corpus`` is given, the
    tokenizer is trained on it: each of its words is one token, and ``vocab`` is the most ids. ``brief`` selects
    :data:`BRIEF_TEMPLATE` instead of :data:`CHAT_TEMPLATE`. ``spread`` is the standard deviation of the weights; use
    0.05 or less for training.

    Returns ``folder``. Raises :class:`~clawgym.errors.EngineError` if it exists and is not empty, and
    :class:`~clawgym.errors.MissingDependency` without torch and transformers.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise EngineError(f"{target}: is there already, and not an empty folder: choose another, or remove it")
    try:
        import torch
        import transformers
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependency(
            f"a tiny model is made with torch and transformers ({error}): pip install 'clawgym[local]'"
        ) from error

    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        template = _SEEING if vision else BRIEF_TEMPLATE if brief else CHAT_TEMPLATE
        size = _write_tokenizer(made, vocab, context_window, template, vision, _text() if corpus is None else corpus)
        eos, pad = SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>")
        shape = {
            "vocab_size": size,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": context_window,
            "initializer_range": spread,  # wide enough that the most likely token exceeds rounding errors
            "tie_word_embeddings": True,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "bos_token_id": None,
            "dtype": "float32",
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if vision:
                model: Any = transformers.Qwen2VLForConditionalGeneration(_seeing(shape))
                (made / "preprocessor_config.json").write_text(json.dumps(_IMAGES, indent=2) + "\n", "utf-8")
            else:
                model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
        weights = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}  # tied
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(made)
        transformers.GenerationConfig(eos_token_id=eos, pad_token_id=pad).save_pretrained(made)
        made.chmod(0o755)
        (made / "model.safetensors").chmod(0o644)
        made.replace(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return target


_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 256 * 256,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def _seeing(shape: dict[str, Any]) -> Any:
    """The configuration of a Qwen2-VL model with a text model of ``shape``."""
    import transformers

    hidden, head = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [head // 8, head // 8, head // 4]}
    text = {name: value for name, value in shape.items() if name != "head_dim"}
    places = dict(zip(VISION_TOKENS, range(len(SPECIAL_TOKENS), 99), strict=False))
    return transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": hidden,
            "num_heads": 2,
            "mlp_ratio": 2,
            **{"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2},
        },
        vision_start_token_id=places["<|vision_start|>"],
        vision_end_token_id=places["<|vision_end|>"],
        image_token_id=places["<|image_pad|>"],
        video_token_id=places["<|video_pad|>"],
        **{name: shape[name] for name in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "dtype")},
    )


def _write_tokenizer(
    folder: Path, vocab: int, context_window: int, template: str, vision: bool, corpus: Iterable[str]
) -> int:
    """Train and write a byte-level BPE tokenizer. Returns its number of ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Splits into words with their space, single digits, runs of other characters and line ends, as most models do.
    split = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[
            AddedToken(t, special=t not in SPECIAL_TOKENS[3:], normalized=False)
            for t in (*SPECIAL_TOKENS, *(VISION_TOKENS if vision else ()))
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "model_max_length": context_window,
                "clean_up_tokenization_spaces": False,
                "chat_template": template,
            },
            indent=2,
        )
        + "\n",
        "utf-8",
    )
    return tokenizer.get_vocab_size()


def _text() -> Iterator[str]:
    """The training text of the tokenizer: deterministic sentences, commands and JSON."""
    rng = random.Random("clawgym tiny")
    word = rng.choice
    for _ in range(2000):
        yield " ".join(word(_WORDS) for _ in range(rng.randint(3, 12))).capitalize() + word(".:?,") + word(" \n")
        call: dict[str, Any] = {
            "name": f"{word(_WORDS)}_{word(_WORDS)}",
            "arguments": {word(_WORDS): f"{word(_WORDS)}/{word(_WORDS)}.{word(('csv', 'json', 'md', 'txt'))}"},
        }
        yield json.dumps(call) + "\n"
        yield f"- {word(_WORDS)}: {rng.randint(0, 9999)}\n"
        yield f"{word(('cat', 'ls -R', 'grep', 'sed'))} '{word(_WORDS)}' | sort\n"
