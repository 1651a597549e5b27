"""Push a checkpoint to the Hub: first collect and check the files, then upload them in one commit."""

from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.credentials import find_secrets
from clawgym.errors import MissingDependency, TrainingError
from clawgym.hub import _card
from clawgym.hub._checkpoint import Checkpoint, HubError

__all__ = ["UploadPlan", "Pushed", "Upload", "plan_push", "push"]

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
_OURS = re.compile(r"\.eval_results/clawgym-[^/]+\.yaml|curve\.svg|README\.md")
_MOST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class Upload:
    """One file of the repository."""

    path: str
    source: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size


@dataclass(frozen=True)
class UploadPlan:
    """The files to upload, checked, before anything is sent."""

    checkpoint: Checkpoint
    uploads: tuple[Upload, ...]
    notes: tuple[str, ...]
    """Notes for the user."""

    @property
    def card(self) -> str:
        """The text of ``README.md``."""
        return next(u.source for u in self.uploads if u.path == "README.md").decode()  # type: ignore[union-attr]


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    repo: str
    url: str
    commit: str
    changed: bool
    """Whether the push made a commit."""


@contextmanager
def plan_push(made: Checkpoint, *, merge: bool = False) -> Iterator[UploadPlan]:
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
        _check(uploads, made)
        yield UploadPlan(made, tuple(sorted(uploads, key=lambda upload: upload.path)), tuple(notes))


def push(plan: UploadPlan, repo: str | None = None, *, public: bool = False) -> Pushed:
    """Upload the files in one commit.

    Files uploaded before a failure are not uploaded again; unchanged files are not committed. Files of an earlier push
    that are not part of this one are deleted; other files in the repository are kept.

    Args:
        plan: the files.
        repo: the model repository, created if needed; by default the run's name, in the user's namespace.
        public: make the repository public.

    Raises:
        HubError: the Hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from clawgym.records.manifest import library_version

    repo = repo or re.sub(r"[^\w.-]+|--+|\.\.+", "-", plan.checkpoint.name).strip("-.")
    api = HfApi(library_name="clawgym", library_version=library_version())
    try:
        api.whoami()
        name = api.create_repo(repo, private=not public, exist_ok=True).repo_id
        before = api.model_info(name)
        if not public and before.private is False:
            raise HubError(f"{name} is public: say --public, or name another repository with --repo")
        if public and before.private:
            api.update_repo_settings(name, private=False)
        new = {upload.path for upload in plan.uploads}
        old = [path for path in api.list_repo_files(name) if path not in new and _of_a_push(path)]
        operations = [
            *(CommitOperationAdd(upload.path, upload.source) for upload in plan.uploads),
            *(CommitOperationDelete(path) for path in old),
        ]
        message = f"{plan.checkpoint.name}: step {plan.checkpoint.step}"
        done = api.create_commit(name, operations, commit_message=message)
    except HubError:
        raise
    except Exception as error:  # the client raises errors of its own and of its HTTP library
        raise HubError(_why(repo, error)) from error
    return Pushed(name, f"{api.endpoint}/{name}", done.oid, done.oid != before.sha)


def _why(repo: str, error: BaseException) -> str:
    deepest = error
    while deepest.__cause__ is not None:
        deepest = deepest.__cause__
    reason = next((line for line in str(deepest).splitlines() if line.strip()), type(deepest).__name__)
    status = getattr(getattr(deepest, "response", None), "status_code", None)
    if type(deepest).__name__ == "LocalTokenNotFoundError" or status == 401:
        return f"the Hub does not know you ({reason}): set HF_TOKEN to a token that may write, or `hf auth login`"
    if status == 403:
        return f"the Hub does not let you write {repo} ({reason}): use a token that may, or another --repo"
    return f"{repo} was not pushed ({reason}): run the same command again, what was uploaded is not uploaded twice"


def _of_a_push(path: str) -> bool:
    return bool(_WEIGHTS.fullmatch(path) or path in _BESIDE or _OURS.fullmatch(path))


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


def _check(uploads: Iterable[Upload], made: Checkpoint) -> None:
    uploads = list(uploads)
    names = {upload.path for upload in uploads}
    weights = [upload for upload in uploads if upload.path.endswith(".safetensors")]
    needed = {"tokenizer.json", "tokenizer.model", "vocab.json"}
    if not weights:
        raise HubError(f"{made.folder}: no safetensors in it: push another checkpoint with --checkpoint")
    if not needed & names:
        raise HubError(f"{made.folder}: no tokenizer in it: put tokenizer.json there")
    for upload in uploads:
        if upload.path.endswith(".safetensors.index.json"):
            missing = set(_json(Path(str(upload.source))).get("weight_map", {}).values()) - names
            if missing:
                raise HubError(
                    f"{upload.source}: names {sorted(missing)[0]}, which is not there: push another checkpoint"
                )
    found = [line for upload in uploads for line in find_secrets(upload.path, _text(upload))]
    found += find_secrets("receipt.json", json.dumps(made.manifest.config, indent=1, default=str))
    if found:
        raise HubError(
            "nothing was uploaded, for what would be holds something secret: "
            + "; ".join(found[:10])
            + ": take it out of the run folder, replace it where it was valid, and run the same command again"
        )


def _text(upload: Upload) -> str:
    """The text of a file; for safetensors, of its header."""
    if isinstance(upload.source, bytes):
        return upload.source.decode("utf-8", "replace")
    if not upload.path.endswith(".safetensors"):
        return upload.source.read_bytes().decode("utf-8", "replace")
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
                f"{upload.source}: no whole safetensors file ({error}): push another checkpoint with --checkpoint"
            ) from error
    return json.dumps(entries.get("__metadata__", {}), indent=1)
