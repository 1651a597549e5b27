"""The upload of files to a repository of the Hub: a plan of checked files, then commits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from clawgym import credentials
from clawgym.hub._checkpoint import HubError
from clawgym.visible import visible, visible_value

__all__ = ["Pushed", "Upload", "UploadPlan", "push", "refuse_secrets", "render", "repo_name", "texts_of"]

_COMMIT_FILES = 500
_COMMIT_BYTES = 64 * 2**20
_INLINE = 10 * 2**20
"""Smaller files may be sent inside the commit, larger ones are uploaded before it."""


@dataclass(frozen=True)
class Upload:
    """One file of the repository."""

    path: str
    source: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def read(self) -> bytes:
        """The content."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()


@dataclass(frozen=True)
class UploadPlan:
    """The files to upload, checked, before anything is sent."""

    name: str
    """Default name of the repository."""
    kind: Literal["model", "dataset"]
    title: str
    """Message of the commit."""
    uploads: tuple[Upload, ...]
    notes: tuple[str, ...]
    """Notes for the user."""
    ours: re.Pattern[str]
    """Matches the paths of such a push. Those that this plan lacks are deleted."""

    @property
    def card(self) -> str:
        """The text of ``README.md``."""
        return next(u.read() for u in self.uploads if u.path == "README.md").decode()


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    repo: str
    url: str
    commit: str
    changed: bool
    """Whether the push made a commit."""


def repo_name(text: str) -> str:
    """``text`` as the name of a repository on the Hub."""
    return re.sub(r"[^\w.-]+|--+|\.\.+", "-", text, flags=re.ASCII).strip("-.") or "unnamed"


def push(plan: UploadPlan, repo: str | None = None, *, public: bool = False) -> Pushed:
    """Upload the files: in one commit, or in several if they are many, the card in the last.

    Files uploaded before a failure are not uploaded again; unchanged files are not committed. Files of an earlier push
    that are not part of this one are deleted; other files in the repository are kept.

    Args:
        plan: the files.
        repo: the repository, created if needed; by default the plan's name, in the user's namespace.
        public: make the repository public.

    Raises:
        HubError: the Hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from clawgym.records.manifest import library_version

    repo = repo or repo_name(plan.name)
    api = HfApi(library_name="clawgym", library_version=library_version())
    kind = plan.kind
    try:
        api.whoami()
        name = api.create_repo(repo, private=not public, exist_ok=True, repo_type=kind).repo_id
        before = api.repo_info(name, repo_type=kind)
        if not public and before.private is False:
            raise HubError(f"{name} is public: say --public, or name another repository with --repo")
        if public and before.private:
            api.update_repo_settings(name, private=False, repo_type=kind)
        new = {upload.path for upload in plan.uploads}
        old = [p for p in api.list_repo_files(name, repo_type=kind) if p not in new and plan.ours.fullmatch(p)]
        oid = before.sha
        batches = list(_batches(plan.uploads))
        for number, batch in enumerate(batches, 1):
            operations = [CommitOperationAdd(upload.path, upload.source) for upload in batch]
            last = number == len(batches)
            gone = [CommitOperationDelete(path) for path in old] if last else []
            title = plan.title if len(batches) == 1 else f"{plan.title} ({number} of {len(batches)})"
            oid = api.create_commit(name, [*operations, *gone], commit_message=title, repo_type=kind).oid
    except HubError:
        raise
    except Exception as error:  # the client raises errors of its own and of its HTTP library
        raise HubError(_why(repo, error)) from error
    address = f"{api.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
    return Pushed(name, address, str(oid), oid != before.sha)


def _batches(uploads: Iterable[Upload]) -> Iterator[list[Upload]]:
    """The uploads in groups that fit one commit each; the card is in the last."""
    batch: list[Upload] = []
    size = 0
    for upload in sorted(uploads, key=lambda one: one.path == "README.md"):
        inline = upload.size if upload.size < _INLINE else 0
        if batch and (len(batch) >= _COMMIT_FILES or size + inline > _COMMIT_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(upload)
        size += inline
    yield batch


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


# -- secrets


def refuse_secrets(texts: Iterable[tuple[str, str]], place: str) -> None:
    """Raise :class:`HubError` if one of the (name, text) pairs holds what looks like a secret.

    ``place``: where the user can take it out.
    """
    found = [line for name, text in texts for line in credentials.find_secrets(name, text)]
    if found:
        raise HubError(
            "nothing was uploaded, for what would be holds something secret: "
            + "; ".join(found[:10])
            + f": take it out of {place}, replace it where it was valid, and run the same command again"
        )


def texts_of(upload: Upload) -> Iterator[tuple[str, str]]:
    """The (name, text) pairs of a file; of an archive, of every file in it.

    Raises :class:`HubError` for an archive that cannot be searched.
    """
    try:
        yield from credentials.texts_of(upload.path, upload.read())
    except ValueError as error:
        raise HubError(f"{upload.path}: cannot be searched for secrets ({error}): leave the workspaces out") from error


# -- cards


def _cell(text: object) -> str:
    """Escape a value for a Markdown table."""
    shown = visible(" ".join(str(text).split())).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"([\[\]`*_!])", r"\\\1", shown)


def render(template: str, **values: object) -> str:
    """The text of a card. Values are made visible; the filter ``cell`` escapes them for Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("clawgym.hub", "."),
        undefined=jinja2.StrictUndefined,
        finalize=visible_value,
        trim_blocks=True,
    )
    environment.filters["cell"] = _cell
    return environment.get_template(template).render(**values)
