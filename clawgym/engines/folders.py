"""Load untrusted models from a folder or the Hub.

Invariants: nothing in a folder is executed (code, pickled weights and kernels are refused). No file outside of it is
read, through a link or an index. The memory used while loading is bounded by the size of the weights.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clawgym.engines.packaged import PACKAGED, packaged_folder
from clawgym.errors import EngineError

__all__ = [
    "HUB_NAME",
    "check_folder",
    "load_config",
    "load_tokenizer",
    "load_weights",
    "local_name",
    "model_folder",
    "read_settings",
]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/[^/]+/?$")
"""Matches the end of a folder in the cache of the Hub's client."""
_DESCRIBING = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""Files of a model beside its weights."""
_LARGEST, _LARGEST_CONFIG = 256 * 2**20, 16 * 2**20
"""Most bytes of a tokenizer file, and of settings."""
_LONGEST_LINE = 500
_BOUNDS = {
    re.compile(r"n_layers?|num(_\w+)?_layers|(en|de)coder_layers|depth"): 1_000,
    re.compile(r"(num|n)_(\w+_)?experts"): 4_096,
    re.compile(r"max_position_embeddings"): 2**27,
    re.compile(r"num_labels"): 100_000,
}
"""Most parts of a model: each takes time and memory before weights are loaded."""


def model_folder(model: str | Path, *, weights: bool = True) -> Path:
    """The checked folder of a model: ``model`` itself, a packaged model (:mod:`clawgym.engines.packaged`), or one
    that is downloaded from the Hub into its client's cache.

    ``weights=False``: download only the description. Raises :class:`~clawgym.errors.EngineError` if it is missing or
    refused by :func:`check_folder`.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if model in PACKAGED:
            return packaged_folder(str(model))
        if isinstance(model, Path) or not HUB_NAME.fullmatch(model):
            raise EngineError(f"{model}: no such folder: correct the path, or give a name on the Hub")
        folder = _of_hub(model, weights)
    check_folder(folder)
    return folder


def local_name(model: str) -> str:
    """A name of ``model`` (a folder, or a name on the Hub) without the folders of this machine.

    The name on the Hub if it was downloaded from there, else the last part of the path.
    """
    if found := _SNAPSHOT.search(model):
        return found[1].replace("--", "/")
    is_path = model.startswith(("/", "~", ".")) or (model and Path(model).is_dir())
    return Path(model).name if is_path else model


def check_folder(folder: Path) -> None:
    """Check the files that a loader might read.

    Raises :class:`~clawgym.errors.EngineError` for one that is not a regular file, too large, or outside of ``folder``.
    """
    allowed = [folder.resolve()]
    if allowed[0].parent.name == "snapshots":  # the cache of the Hub's client
        allowed.append(allowed[0].parent.parent / "blobs")
    for path in _read_by_loaders(folder):
        try:
            real = path.resolve(strict=True)
            info = real.stat()
        except (OSError, RuntimeError) as error:
            raise EngineError(f"{path}: cannot be read ({error}): fetch the whole folder of the model") from error
        if not any(real.is_relative_to(place) for place in allowed):
            raise EngineError(f"{path}: is a link out of the folder: put the file itself there")
        if not stat.S_ISREG(info.st_mode):
            raise EngineError(f"{path}: is no file: remove it")
        most = _LARGEST_CONFIG if path.name.endswith("config.json") else _LARGEST
        if not path.name.endswith((".safetensors", ".safetensors.index.json")) and info.st_size > most:
            raise EngineError(f"{path}: has over {most // 2**20} MiB: fetch the folder of the model again")
    for index in folder.glob("*.index.json"):
        named = read_settings(index).get("weight_map")
        files = set(named.values()) if isinstance(named, dict) and _plain(named.values()) else {""}
        if bad := [name for name in files if name != Path(name).name or not name.endswith(".safetensors")]:
            raise EngineError(f"{index}: names {bad[0]!r}, which is no safetensors file of this folder: correct it")


def read_settings(file: Path) -> dict[str, Any]:
    """Read an untrusted JSON file with an object. Raises :class:`~clawgym.errors.EngineError` for anything else."""
    try:
        with file.open("rb") as opened:
            value = json.loads(opened.read(_LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{file} cannot be read ({error}): fetch the whole folder of the model") from error
    if not isinstance(value, dict):
        raise EngineError(f"{file}: holds no object: fetch the whole folder of the model")
    return value


def load_config(folder: Path) -> Any:
    """The configuration of the model in a checked ``folder``.

    Raises :class:`~clawgym.errors.EngineError` if it refers to code, or has sizes that no model has.
    """
    from transformers import AutoConfig

    for name, value in _settings(read_settings(folder / "config.json")):
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise EngineError(f"{folder}: names the kernel {value!r}, which would be fetched and run: remove {name}")
        for pattern, most in _BOUNDS.items():
            if pattern.fullmatch(name) and isinstance(value, int) and value > most:
                raise EngineError(f"{folder}: {name} is over {most} in config.json: correct it")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library, and what it checks with, raise many kinds
        raise EngineError(f"{folder}: its config.json cannot be used ({_line(error)}): correct it") from error


def load_weights(auto: Any, folder: Path, **options: Any) -> Any:
    """Load the model in a checked ``folder`` with the transformers class ``auto``.

    Raises :class:`~clawgym.errors.EngineError` if it cannot be loaded, has no safetensors, or lacks weights.
    """
    import torch  # not needed for a tokenizer

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not size:
        raise EngineError(
            f"{folder}: cannot be loaded (no *.safetensors in it; pickles are not read): convert its weights"
        )
    config = load_config(folder)
    try:
        with torch.device("meta"):
            shape = auto.from_config(config, trust_remote_code=False)
        parameters = sum(parameter.numel() for parameter in shape.parameters())
        if parameters > 8 * size:  # each weight takes at least one bit
            raise ValueError(f"its config.json describes {parameters} parameters, more than its files can hold")
        made, info = auto.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # the library and those of the formats raise many kinds
        raise EngineError(f"{folder}: cannot be loaded ({_line(error)}): check the folder, device and dtype") from error
    if missing := sorted(info["missing_keys"]):
        raise EngineError(f"{folder}: {len(missing)} weights are missing, such as {missing[0]!r}: give all of them")
    return made


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in a checked ``folder``. Raises :class:`~clawgym.errors.EngineError` if that fails."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        raise EngineError(f"{folder}: no tokenizer can be loaded ({_line(error)}): name a model's folder") from error


def _of_hub(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*_DESCRIBING, "*.safetensors"] if weights else [*_DESCRIBING]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EngineError(
            f"{name}: is no folder here, and the Hub does not give it ({_line(error)}): correct the name, or give the "
            "folder of a model"
        ) from error


def _read_by_loaders(folder: Path) -> Iterator[Path]:
    names = (*_DESCRIBING, "*.safetensors")
    for place in (folder, folder / "additional_chat_templates"):
        if place.is_dir():
            yield from (path for path in sorted(place.iterdir()) if any(path.match(name) for name in names))


def _settings(value: Any) -> Iterator[tuple[str, Any]]:
    """All settings in ``value``, including those in nested objects."""
    left = [value]
    while left:
        match left.pop():
            case dict() as found:
                yield from found.items()
                left += found.values()
            case list() as found:
                left += found


def _plain(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _line(error: Exception) -> str:
    """The first line of a library's message, which may quote untrusted content."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
