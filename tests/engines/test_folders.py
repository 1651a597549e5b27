"""Untrusted model folders: no code is run, no link followed out, and memory is bounded by the weights."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clawgym.engines.folders import load_config, load_tokenizer, load_weights, model_folder  # noqa: E402
from clawgym.errors import EngineError  # noqa: E402

AUTO = transformers.AutoModelForCausalLM
CODE = "import pathlib\npathlib.Path({ran!r}).touch()\nclass Model: pass\nclass Config: pass\nclass Words: pass\n"


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A good one, of our own."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def load(folder: Path) -> None:
    """All that is done with a model of a name."""
    found = model_folder(folder)
    load_config(found)
    load_tokenizer(found)
    load_weights(AUTO, found)


def refused(folder: Path, match: str = "") -> None:
    with pytest.raises(EngineError, match=match) as caught:
        load(folder)
    assert len(str(caught.value)) < 2000


def test_a_good_folder_is_loaded(folder: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    load(folder)


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json", "generation_config.json", "all"])
def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path, where: str) -> None:
    ran = tmp_path / "ran"
    names = ("modeling_x", "configuration_x", "tokenization_x", "generate", "custom_generate/generate", "__init__")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(CODE.format(ran=str(ran)))
    automap = {
        "AutoConfig": "configuration_x.Config",
        "AutoModelForCausalLM": "modeling_x.Model",
        "AutoModel": "modeling_x.Model",
        "AutoTokenizer": ["tokenization_x.Words", "tokenization_x.Words"],
    }
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if where in (name, "all"):
            other = {"model_type": "x", "tokenizer_class": "Words"} if where == "all" else {}
            there = folder / name
            there.write_text(there.read_text() if there.exists() else "{}")
            change(there, auto_map=automap, custom_generate="generate", trust_remote_code=True, **other)
    try:
        load(folder)
    except EngineError:
        pass  # refused or left alone: either will do
    assert not ran.exists()


def test_pickles_are_not_read(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "vocab.pt"):
        (folder / name).write_bytes(pickle.dumps(Touches(ran)))
    index = {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refused(folder, "safetensors")
    (folder / "pytorch_model.bin.index.json").unlink()
    refused(folder, "pickles are not read")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Touches(ran)))
    refused(folder)
    assert not ran.exists()


def header(entries: Any, *, length: int | None = None, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


NAME = "model.embed_tokens.weight"
WEIGHTS = {
    "nothing": b"",
    "short": b"\x01",
    "a header of 2^63 bytes": header({}, length=2**63),
    "a header of 2^64 - 1 bytes": header({}, length=2**64 - 1),
    "a header of 90 MB that is not there": header({}, length=90_000_000),
    "a header that is no JSON": header(b"{" * 1000),
    "a deep header": header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a shape of 2^62": header({NAME: tensor([2**62, 4], 0, 8)}, data=bytes(8)),
    "a negative shape": header({NAME: tensor([-1], 0, 8)}, data=bytes(8)),
    "an end before the start": header({NAME: tensor([2], 8, 0)}, data=bytes(8)),
    "an end beyond the file": header({NAME: tensor([2**30], 0, 2**32)}, data=bytes(8)),
    "two tensors over each other": header({NAME: tensor([2], 0, 8), "b": tensor([2], 0, 8)}, data=bytes(8)),
    "a hole": header({NAME: tensor([2], 8, 16)}, data=bytes(16)),
    "an unknown type": header({NAME: tensor([2], 0, 8, "X")}, data=bytes(8)),
    "a list": header([1, 2]),
    "metadata that is no text": header({"__metadata__": {"format": {"a": 1}}, NAME: tensor([2], 0, 8)}, data=bytes(8)),
    "100,000 names of nothing": header({f"w{n}": tensor([0], 0, 0) for n in range(100_000)}),
    "names with paths": header({"../../x": tensor([2], 0, 8)}, data=bytes(8)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_lie_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").write_bytes(WEIGHTS[name])
    refused(folder)


@pytest.mark.parametrize(
    "named",
    ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "model.bin", "", 7, None],
)
def test_an_index_names_files_of_the_folder_alone(folder: Path, named: Any) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "secret.safetensors")
    index = {"metadata": {}, "weight_map": {NAME: named}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("kind", ["link", "link of links", "loop", "fifo", "folder", "device"])
def test_no_file_leads_out_of_the_folder(folder: Path, name: str, kind: str) -> None:
    outside = folder.parent / name
    if (folder / name).exists():
        shutil.move(folder / name, outside)
    else:
        outside.write_text("{}")
    there = folder / name
    match kind:
        case "link":
            there.symlink_to(outside)
        case "link of links":
            (folder / "inner").symlink_to(folder.parent)
            there.symlink_to(f"inner/{name}")
        case "loop":
            there.symlink_to(name)
        case "fifo":
            os.mkfifo(there)
        case "folder":
            there.mkdir()
        case "device":
            there.symlink_to("/dev/zero")
    refused(folder)


SIZES = {
    "layers": {"num_hidden_layers": 10**9},
    "layers as a text": {"num_hidden_layers": "9" * 5000},
    "a negative number of layers": {"num_hidden_layers": -1},
    "vocabulary": {"vocab_size": 10**12},
    "hidden": {"hidden_size": 2**40},
    "heads": {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
    "no heads": {"num_attention_heads": 0},
    "length": {"max_position_embeddings": 2**62},
    "a number of 4,000 digits": {},
    "not a number": {"rms_norm_eps": float("nan"), "hidden_size": float("inf")},
    "labels": {"num_labels": 10**8},
    "types of layers": {"layer_types": ["full_attention"] * 100_000},
    "other class": {"architectures": ["os.system"], "model_type": "../x"},
    "a kernel": {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel"},
    "dtype": {"dtype": "__import__('os').system('true')", "torch_dtype": "os"},
    "quantized": {"quantization_config": {"quant_method": "bitsandbytes", "modules_to_not_convert": ["x"] * 9}},
    "rope": {"rope_scaling": {"type": "x" * 9999, "factor": -1e308}},
    "deep": {"rope_scaling": json.loads('{"a":' * 900 + "1" + "}" * 900)},
}
TOKENIZERS: dict[str, Any] = {
    "nothing": b"",
    "no JSON": b"[" * 100_000,
    "a deep one": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "an array": b"[]",
    "a bomb of a pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}},
    "a pattern of 10^8 times": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(a{9999}){9999}"}, "content": ""}
    },
    "a replacement that grows": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}] * 12,
        }
    },
}
LARGE = {"layers", "vocabulary", "hidden", "heads", "length", "labels", "a kernel"}
_IN_A_PROCESS = """
import json, resource, sys
from pathlib import Path
from clawgym.engines.folders import load_config, load_tokenizer, load_weights, model_folder
from clawgym.errors import EngineError
import torch, transformers
def loaded(folder):
    try:
        found = model_folder(folder)
        load_config(found)
        load_tokenizer(found)
        load_weights(transformers.AutoModelForCausalLM, found)
    except EngineError as error:
        return "refused" if len(str(error)) < 2000 else "refused at length"
    return "loaded"
assert loaded(Path(sys.argv[1])) == "loaded"
told = {}
for folder in map(Path, sys.argv[2:]):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = loaded(folder)
    told[folder.name] = said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
print(json.dumps(told))
"""


@pytest.mark.timeout(170)
def test_wrong_sizes_in_settings_take_no_memory(folder: Path) -> None:
    """In a process of its own, as a failure would exhaust the memory."""
    made = {name: Path(shutil.copytree(folder, folder.parent / name)) for name in (*SIZES, *TOKENIZERS)}
    for name, settings in SIZES.items():
        if name == "a number of 4,000 digits":
            text = (folder / "config.json").read_text()
            digits = text.rstrip().removesuffix("}") + f', "hidden_size": {"9" * 4000}}}'
            (made[name] / "config.json").write_text(digits)
        else:
            change(made[name] / "config.json", **settings)
    for name, changes in TOKENIZERS.items():
        if isinstance(changes, bytes):
            (made[name] / "tokenizer.json").write_bytes(changes)
        else:
            change(made[name] / "tokenizer.json", **changes)
    argv = [sys.executable, "-c", _IN_A_PROCESS, str(folder), *map(str, made.values())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.keys() == made.keys()
    assert {name: took for name, (_, took) in told.items() if took > 300} == {}
    assert {said for said, _ in told.values()} <= {"loaded", "refused"}
    unreadable = {name for name, changes in TOKENIZERS.items() if isinstance(changes, bytes)}
    assert {name for name in LARGE | unreadable if told[name][0] != "refused"} == set()
