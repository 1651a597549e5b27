"""The versions of a served model: their weights, their lineage, and which one answers.

Invariants: the log is the truth, and a line is synced before its effect is reported. The folder of a version appears
when it is complete, and never changes. The first version is there for ever. A version that is not promoted never
answers. What can never answer has no weights after :meth:`Versions.prune`. Readers need no lock, so another process can
show the history while a service runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from clawgym.errors import ServiceError
from clawgym.records.run_folder import repair_tail

__all__ = ["LOG", "Event", "State", "Version", "Versions"]

State = Literal["candidate", "promoted", "rejected", "withdrawn", "erased"]
"""``withdrawn``: it was promoted, and rolled back. ``erased``: its weights are deleted, because a conversation that
they were trained on was forgotten."""
LOG = "log.jsonl"
_LOCK, _PART = "lock", ".part"
_KEPT = 8
"""The newest candidates keep their weights."""


@dataclass(frozen=True)
class Version:
    """Weights that can answer."""

    number: int
    folder: Path
    """A model, or a LoRA adapter."""
    parent: int | None
    """The version that it was trained from; None for the first."""
    sessions: tuple[str, ...] = ()
    """The conversations that were trained on since the parent."""
    made: float = 0.0
    """Seconds since the epoch."""
    state: State = "candidate"
    gate: tuple[Mapping[str, Any], ...] = ()
    """The results of the gate, oldest first."""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adapter(self) -> Path | None:
        """The folder of its LoRA adapter; None for the first version, which is the model itself."""
        return self.folder if self.number else None


@dataclass(frozen=True)
class Event:
    """A change of what answers."""

    at: float
    """Seconds since the epoch."""
    kind: Literal["promoted", "rolled-back"]
    version: int
    """The version that answers from then on."""
    before: int
    reason: str


class Versions:
    """The folder of the versions of one service. See the module for its invariants.

    Raises :class:`~clawgym.errors.ServiceError` for a folder without versions, or with a damaged log.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._known: dict[int, Version] = {}
        self._events: list[Event] = []
        self._serving = 0
        self._forgotten: set[str] = set()
        self._refresh()
        if not self._known:
            raise ServiceError(f"{path} has no versions: name the folder of a service (clawgym serve --dir)")

    @classmethod
    def create(cls, path: Path, model: Path, about: Mapping[str, Any] | None = None) -> Versions:
        """Make the folder with ``model``, which is not copied, as version 0; or open the one that is there."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path):
            if not (path / LOG).exists():
                row = {"kind": "made", "version": 0, "parent": None, "folder": str(model.resolve()), "sessions": []}
                _append(path / LOG, {**row, "about": dict(about or {})})
            made = cls(path)
            kept = {version.folder for version in made.all() if version.state != "erased"}
            for folder in path.iterdir():  # what a killed process left
                if folder.is_dir() and folder not in kept:
                    shutil.rmtree(folder, ignore_errors=True)
        return made

    def all(self) -> tuple[Version, ...]:
        """All versions, oldest first."""
        self._refresh()
        return tuple(self._known.values())

    def __getitem__(self, number: int) -> Version:
        """The version. Raises :class:`~clawgym.errors.ServiceError` if there is none."""
        self._refresh()
        if number not in self._known:
            raise ServiceError(
                f"there is no version {number}: choose one of 0 to {max(self._known)} (clawgym serve history)"
            )
        return self._known[number]

    @property
    def first(self) -> Version:
        """The version that nothing was learnt in."""
        return self[0]

    @property
    def serving(self) -> Version:
        """The version that answers."""
        self._refresh()
        return self._known[self._serving]

    @property
    def events(self) -> tuple[Event, ...]:
        """Every change of what answers, oldest first."""
        self._refresh()
        return tuple(self._events)

    def lineage(self, number: int) -> tuple[Version, ...]:
        """The version and its ancestors, down to the first."""
        found = [self[number]]
        while (parent := found[-1].parent) is not None:
            found.append(self[parent])
        return tuple(found)

    def unserved(self, number: int) -> tuple[Version, ...]:
        """The part of its lineage that the version that answers is not made of, newest first. Empty for that one."""
        known = {one.number for one in self.lineage(self.serving.number)}
        return tuple(one for one in self.lineage(number) if one.number not in known)

    def may_answer(self, number: int) -> bool:
        """Whether it answers, or is made of the version that does, with candidates only since then."""
        made_of_it = self.serving.number in {one.number for one in self.lineage(number)}
        return made_of_it and all(one.state == "candidate" for one in self.unserved(number))

    def adapter_of(self, version: Version) -> Path | None:
        """The folder of its LoRA adapter, on this machine; None for the first version."""
        return version.adapter

    def exposed(self, session: str) -> tuple[Version, ...]:
        """The versions that have been trained on a conversation, themselves or through an ancestor."""
        return tuple(v for v in self.all() if any(session in one.sessions for one in self.lineage(v.number)))

    def last_without(self, sessions: Collection[str]) -> Version:
        """The version that last answered, may answer, and was trained on none of ``sessions``; at worst the first."""
        held = {v.number for session in sessions for v in self.exposed(session)}
        return self._last(held, len(self.events))

    def add(
        self,
        fill: Callable[[Path], object],
        *,
        parent: int,
        sessions: Collection[str],
        about: Mapping[str, Any] | None = None,
    ) -> Version:
        """Add a candidate. ``fill`` writes its weights into an empty folder."""
        part = Path(tempfile.mkdtemp(suffix=_PART, dir=self.path))
        try:
            fill(part)
            _sync(part)
            with self._writing():
                if self[parent].state == "erased":
                    raise ServiceError(f"version {parent} is erased: train on from another one")
                if gone := self._forgotten.intersection(sessions):
                    raise ServiceError(f"the conversation {min(gone)} was forgotten: train without it")
                number = max(self._known) + 1
                place = self.path / f"{number:05d}"
                shutil.rmtree(place, ignore_errors=True)  # of one whose line could not be written
                part.rename(place)
                row = {"kind": "made", "version": number, "parent": parent, "folder": place.name}
                self._append({**row, "sessions": sorted(sessions), "about": dict(about or {})})
                return self._known[number]
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def judged(self, number: int, result: Mapping[str, Any], *, rejected: bool = False) -> Version:
        """Record a result of the gate. A rejected version stays in the history."""
        with self._writing():
            self._of(number, "candidate", "judge")
            self._append({"kind": "judged", "version": number, "rejected": rejected, "result": dict(result)})
        return self[number]

    def prune(self) -> None:
        """Delete the weights of versions that were rejected or withdrawn, and reject all but the newest candidates."""
        with self._writing():
            candidates = [version.number for version in self._known.values() if version.state == "candidate"]
            for number in candidates[:-_KEPT]:
                result = {"verdict": "rejected", "reasons": [f"there are {_KEPT} newer candidates"]}
                self._append({"kind": "judged", "version": number, "rejected": True, "result": result})
            ended = [v.folder for v in self._known.values() if v.state in ("rejected", "withdrawn")]
        for folder in ended:
            shutil.rmtree(folder, ignore_errors=True)

    def promote(self, number: int, reason: str) -> Event:
        """Let a candidate answer."""
        with self._writing():
            self._of(number, "candidate", "promote")
            return self._change("promoted", number, reason)

    def roll_back(self, reason: str, to: int | None = None) -> Event:
        """Let an earlier version answer again, by default the one that answered before. The version that answers now is
        withdrawn; it cannot be promoted again."""
        with self._writing():
            now = self.serving.number
            if to is None:
                if now == 0:
                    raise ServiceError("version 0 answers, and there is none before it: nothing was rolled back")
                began = next(n for n, one in enumerate(self._events) if one.version == now)
                to = self._last({now}, began).number
            target = self[to]
            if to == now or target.state != "promoted":
                raise ServiceError(
                    f"version {to} {'answers already' if to == now else f'is {target.state}'}: choose a promoted "
                    "version (clawgym serve history)"
                )
            return self._change("rolled-back", to, reason)

    def forget(self, session: str) -> tuple[Version, ...]:
        """Erase the versions that a conversation was trained into, and take it out of the records. Returns them.

        Raises :class:`~clawgym.errors.ServiceError` if the version that answers is one of them."""
        with self._writing():
            held = self.exposed(session)
            if self._serving in {version.number for version in held}:
                raise ServiceError(
                    f"version {self._serving} answers and was trained on {session}: roll back to version "
                    f"{self.last_without([session]).number} first (clawgym serve rollback)"
                )
            self._append({"kind": "forgotten", "session": session})
        for version in held:
            shutil.rmtree(version.folder, ignore_errors=True)
        return tuple(self._known[version.number] for version in held)

    def _last(self, without: Collection[int], events: int) -> Version:
        """The promoted version that answered last after so many ``events`` and is not in ``without``."""
        answered = [0, *(event.version for event in self._events[:events])]
        usable = (n for n in reversed(answered) if n not in without and self._known[n].state == "promoted")
        return self._known[next(usable, 0)]

    def _of(self, number: int, state: State, what: str) -> Version:
        version = self[number]
        if version.state != state:
            raise ServiceError(f"version {number} is {version.state}: only a {state} can be {what}d")
        return version

    def _change(self, kind: Literal["promoted", "rolled-back"], number: int, reason: str) -> Event:
        self._append({"kind": kind, "version": number, "before": self._serving, "reason": reason})
        return self.events[-1]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with _locked(self.path):
            self._refresh()
            yield

    def _append(self, row: Mapping[str, Any]) -> None:
        _append(self.path / LOG, row)
        self._refresh()

    def _refresh(self) -> None:
        """Read the lines that are new. An incomplete last line is not there yet."""
        try:
            with (self.path / LOG).open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ServiceError(
                    f"{self.path / LOG}: a line is damaged ({error!r}): restore the file from a backup"
                ) from error
        self._read += end

    def _take(self, row: Mapping[str, Any]) -> None:
        kind = row["kind"]
        if kind == "forgotten":
            gone, held = row["session"], set[int]()
            self._forgotten.add(gone)
            for number, version in self._known.items():  # parents come before their children
                if gone in version.sessions or version.parent in held:
                    held.add(number)
                    left = tuple(session for session in version.sessions if session != gone)
                    self._known[number] = replace(version, sessions=left, state="erased")
            return
        number = row["version"]
        if kind == "made":
            self._known[number] = Version(
                number,
                self.path / row["folder"],
                row["parent"],
                tuple(row["sessions"]),
                row["at"],
                "candidate" if number else "promoted",
                about=row["about"],
            )
            return
        version = self._known[number]
        if kind == "judged":
            state: State = "rejected" if row["rejected"] else version.state
            self._known[number] = replace(version, gate=(*version.gate, row["result"]), state=state)
            return
        if kind == "rolled-back":
            before = self._known[row["before"]]
            self._known[before.number] = replace(before, state="withdrawn")
        self._known[number] = replace(version, state="promoted")
        self._serving = number
        self._events.append(Event(row["at"], kind, number, row["before"], row["reason"]))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # not on Windows, where no service runs

    with (path / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _append(log: Path, row: Mapping[str, Any]) -> None:
    """Write a line durably, after removing what a killed process left of its own."""
    data = json.dumps({"at": time.time(), **row}, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    log.touch(mode=0o600)
    repair_tail(log)
    with log.open("ab", buffering=0) as file:
        whole = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) != len(data):
                raise OSError("the disk is full")
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(whole)
            raise ServiceError(f"{log}: cannot be written ({error}): free space, then try again") from error
    _sync(log.parent)


def _sync(path: Path) -> None:
    """Sync a folder and the files in it."""
    for each in (*(p for p in path.iterdir() if p.is_file()), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
