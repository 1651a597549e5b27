"""Tokenizers and chat templates of several kinds, written for these tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_HERMES_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""

_HERMES_CALLS = """\
{%- for call in message.tool_calls or [] %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
"""

_RESULTS = """\
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""

_OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"

CHATML = (
    _HERMES_TOOLS
    + "{%- for message in messages %}\n{%- if message.role == 'tool' %}\n"
    + _RESULTS
    + """\
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
"""
    + _HERMES_CALLS
    + """\
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
"""
    + _OPEN
)
"""Only appends to the conversation."""

FORGETFUL = (
    _HERMES_TOOLS
    + """\
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set last.question = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
"""
    + _RESULTS
    + """\
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = message.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.question and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
"""
    + _HERMES_CALLS
    + """\
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
"""
    + _OPEN
)
"""Drops the reasoning of replies before the last question, as reasoning models do."""

THINKING = CHATML.replace("assistant\\n' }}{%- endif %}\n", "assistant\\n<think>\\n' }}{%- endif %}\n")
"""Opens the reply inside its reasoning."""

CODER = (
    """\
{%- macro more(spec, seen) %}
{%- for key in spec %}{%- if key not in seen %}{{- '\\n<' ~ key ~ '>' ~ (spec[key] | tojson) ~ '</' ~ key ~ '>' }}\
{%- endif %}{%- endfor %}
{%- endmacro %}
{%- set opening = messages[0].content if messages[0].role == 'system' else '' %}
{%- if opening or tools %}
{{- '<|im_start|>system\\n' + opening }}
{%- if tools %}
{{- '\\n\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>\\n<description>' ~ (tool.function.description | trim) ~ \
'</description>' }}
{%- for name in tool.function.parameters.properties %}
{{- '\\n<parameter>\\n<name>' ~ name ~ '</name>' ~ more(tool.function.parameters.properties[name], ['x']) ~ \
'\\n</parameter>' }}
{%- endfor %}
{{- '\\n</function>' }}
{%- endfor %}
{{- '\\n</tools>\\nCall as <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n' }}
{{- '</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{{- '\\n' + (message.content | trim) + ('\\n' if message.tool_calls else '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
"""
    + _OPEN
)
"""Calls as markup; results end with a line end inside their turn."""

HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set function = message.tool_calls[0].function %}
{{- '<|start|>assistant<|header|>\\n\\n{"name": "' + function.name + '", "parameters": ' }}
{{- function.arguments | tojson }}{{- '}<|eom|>' }}
{%- else %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start|>' + role + '<|header|>\\n\\n' }}
{%- if tools and loop.first %}{{- 'Functions: ' }}{{- tools | tojson }}{{- '\\n\\n' }}{%- endif %}
{{- (message.content | trim) + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|header|>\\n\\n' }}{%- endif %}
"""
"""Llama-like: calls are bare JSON, and their turn ends with another token."""

STRICT = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role not in ['assistant', 'tool'] or \
(loop.previtem.role == 'assistant' and not loop.previtem.tool_calls) %}
{{- raise_exception('a result needs a call') }}
{%- endif %}
{{- '[RESULT] ' + message.content + ' [/RESULT]' }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '[CALL] ' }}{{- call.function | tojson }}{%- endfor %}
{{- '</s>' }}
{%- elif message.role == 'user' %}
{{- '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{- raise_exception('no system messages') }}
{%- endif %}
{%- endfor %}
"""
"""Mistral-like: refuses results without calls."""


NAMED = (
    CHATML.replace("'\\n<tool_response>\\n' +", "'\\n<tool_response>\\n' + name.of + ': ' +")
    .replace("{%- for message in messages %}", "{%- set name = namespace(of='') %}\n{%- for message in messages %}", 1)
    .replace("tool_calls or [] %}", "tool_calls or [] %}{%- set name.of = call.function.name %}", 1)
)
"""Shows results under the name of the call."""

OPENERS = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|assistant|>' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{%- else %}{{- '<|' + ('observation' if message.role == 'tool' else message.role) + '|>' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""GLM-like: no turn has an end; a reply ends where the model opens the next turn."""


def write_model(folder: Path, template: str, *, sentencepiece: bool = False, special=(), eos="<|im_end|>") -> Path:
    """Write a folder with a tokenizer (byte-level, or like SentencePiece with byte fallback) and a template."""
    folder.mkdir(parents=True)
    marks = [*(special or CHATML_SPECIAL), *MARKERS]
    added = [AddedToken(t, special=t not in MARKERS, normalized=False) for t in marks]
    corpus = ["read the file and count the lines of a report\n", "reports/total.csv {'a': 1}", "naïve café über"] * 50
    if sentencepiece:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        fallback = [AddedToken(f"<0x{n:02X}>", special=False, normalized=False) for n in range(256)]
        names = [AddedToken("<unk>", special=True), *added, *fallback]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=names, show_progress=False)
        tokenizer.train_from_iterator(corpus, trainer)
        data = json.loads(tokenizer.to_str())
        plain = {f"<0x{n:02X}>" for n in range(256)}
        data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in plain]
        tokenizer = Tokenizer.from_str(json.dumps(data))
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=added, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": marks[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder
