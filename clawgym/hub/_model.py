"""The files of a checkpoint that is pushed to the Hub, collected and checked."""

from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from clawgym.errors import MissingDependency, TrainingError
from clawgym.hub import _card
from clawgym.hub._checkpoint import Checkpoint, HubError
from clawgym.hub._upload import Upload, UploadPlan, refuse_secrets

__all__ = ["OURS", "PULLED", "check_weights", "plan_checkpoint"]

_WEIGHTS = re.compile(r"(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
_BESIDE = {
    *("config.json", "generation_config.json", "adapter_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "preprocessor_config.json", "processor_config.json"),
    "video_preprocessor_config.json",
}
"""Files uploaded beside the weights. All others are left out: optimiser states, pickles, unknown files."""
_TOKENIZER = _BESIDE - {"config.json", "generation_config.json", "adapter_config.json"}
_ORIGINS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Settings that name the folder a model was loaded from."""
OURS = re.compile(
    rf"{_WEIGHTS.pattern}|{'|'.join(map(re.escape, sorted(_BESIDE)))}"
    r"|\.eval_results/clawgym-[^/]+\.yaml|curve\.svg|README\.md"
)
"""The paths of a pushed checkpoint."""
PULLED = re.compile(rf"{_WEIGHTS.pattern}|{'|'.join(map(re.escape, sorted(_BESIDE)))}")
"""The files of a pushed checkpoint that are pulled."""
_MOST_HEADER = 100 * 2**20


@contextmanager
def plan_checkpoint(made: Checkpoint, *, merge: bool = False) -> Iterator[UploadPlan]:
    """Collect and check the files of a push.

    Args:
        made: the checkpoint.
        merge: merge a LoRA adapter into its model and upload that. The merged model is in a temporary folder until the
            context ends.

    Raises:
        HubError: the checkpoint is incomplete, or something in it looks like a secret.
        MissingDependency: ``merge`` needs an optional dependency.
    """
    if merge and not made.adapter:
        raise HubError(f"{made.folder}: is no LoRA adapter, so there is nothing to merge: leave --merge out")
    notes: list[str] = []
    with ExitStack() as stack:
        base, folders = _base(made), [made.folder]
        if made.adapter and (where := Path(base)).is_dir():
            folders.append(where)  # an adapter's folder may lack the tokenizer, which is in the base model's
            if not merge and _card.model_name(base) == where.name:
                notes.append(f"the base model is a folder of this machine ({where.name}): others need --merge")
        if merge:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="clawgym-merge-"))
            folders.insert(0, _merged(made.folder, Path(temporary, "model")))
        uploads = [_portable(path) for path in _files(folders[0])]
        for folder in folders[1:]:
            have = {upload.path for upload in uploads}
            uploads += [_portable(p) for p in _files(folder) if p.name in _TOKENIZER and p.name not in have]
        svg = _card.curve(made)
        if svg is not None:
            uploads.append(Upload(_card.CURVE, svg))
        uploads += [Upload(name, data) for name, data in _card.eval_results(made).items()]
        trained = base if made.adapter and not merge else str(made.manifest.engine.get("model") or base)
        text = _card.card(made, _card.model_name(trained), merge, svg is not None)
        uploads.append(Upload("README.md", text.encode()))
        check_weights(uploads, made.folder)
        settings = ("receipt.json", json.dumps(made.manifest.config, indent=1, default=str))
        refuse_secrets(chain(((upload.path, _text(upload)) for upload in uploads), [settings]), "the run folder")
        title = f"{made.name}: step {made.step}"
        files = tuple(sorted(uploads, key=lambda upload: upload.path))
        yield UploadPlan(made.name, "model", title, files, tuple(notes), OURS)


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and (p.name in _BESIDE or _WEIGHTS.fullmatch(p.name)))


def _base(made: Checkpoint) -> str:
    """The model that training started from: a name on the Hub, or a folder."""
    if made.adapter:
        settings = _json(made.folder / "adapter_config.json")
        if isinstance(settings, dict) and settings.get("base_model_name_or_path"):
            return str(settings["base_model_name_or_path"])
    engine, config = made.manifest.engine, made.manifest.config
    model = engine.get("model") or config.get("model") or ""
    return str(model.get("path") or model.get("name") or "") if isinstance(model, dict) else str(model)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise HubError(f"{path}: cannot be read ({error}): push another checkpoint with --checkpoint") from error


def _portable(path: Path) -> Upload:
    """The file to upload; local folders in its settings are replaced by their last name."""
    if path.suffix != ".json" or path.name in ("tokenizer.json", "vocab.json"):
        return Upload(path.name, path)
    settings = _json(path)
    if not isinstance(settings, dict):
        return Upload(path.name, path)
    changed = {
        key: _card.model_name(settings[key])
        for key in _ORIGINS
        if isinstance(settings.get(key), str) and _card.model_name(settings[key]) != settings[key]
    }
    return (
        Upload(path.name, (json.dumps(settings | changed, indent=2) + "\n").encode())
        if changed
        else Upload(path.name, path)
    )


def _merged(adapter: Path, folder: Path) -> Path:
    try:
        from clawgym.trainers.common.start_model import merge_adapter
    except ImportError as error:
        raise MissingDependency(f"an adapter is merged with torch ({error}): pip install 'clawgym[local]'") from error
    try:
        merge_adapter(adapter, folder)
    except TrainingError as error:
        raise HubError(f"{error}; or push the adapter without --merge") from error
    return folder


# -- checks


def check_weights(uploads: Iterable[Upload], where: Path) -> None:
    """Raise :class:`HubError` unless the files are a whole model or adapter with its tokenizer, in safetensors."""
    uploads = list(uploads)
    names = {upload.path for upload in uploads}
    if not any(name.endswith(".safetensors") for name in names):
        raise HubError(f"{where}: no safetensors in it: choose another checkpoint")
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & names:
        raise HubError(f"{where}: no tokenizer in it: put tokenizer.json there")
    for upload in uploads:
        if upload.path.endswith(".safetensors"):
            _metadata(upload)
        if upload.path.endswith(".safetensors.index.json"):
            parts = _json(Path(str(upload.source)))
            parts = parts.get("weight_map") if isinstance(parts, dict) else None
            missing = set(map(str, parts.values())) - names if isinstance(parts, dict) else {"no file"}
            if missing:
                raise HubError(
                    f"{upload.source}: names {sorted(missing)[0]!r}, which is not there: choose another checkpoint"
                )


def _text(upload: Upload) -> str:
    """The text of a file; for safetensors, of its header."""
    if upload.path.endswith(".safetensors"):
        return json.dumps(_metadata(upload), indent=1)
    return upload.read().decode("utf-8", "replace")


def _metadata(upload: Upload) -> Any:
    """What the header of a safetensors file holds beside the tensors. Raises :class:`HubError` if the file is not
    whole."""
    assert isinstance(upload.source, Path)
    with upload.source.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length) if length <= _MOST_HEADER else b""
            entries = json.loads(header)
            end = max((e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__"), default=0)
            if upload.size != 8 + length + end:
                raise ValueError(f"{upload.size} bytes, not {8 + length + end}")
        except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
            raise HubError(
                f"{upload.source}: no whole safetensors file ({error}): choose another checkpoint"
            ) from error
    return entries.get("__metadata__", {})
