"""What the viewer shows now: the sources, their indexes, and who is told of changes.

Invariants: a source that changes, comes or goes is reported to every subscriber within a few seconds. Nothing is polled
faster than once a second. The process that makes the indexes ends with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from clawgym.cache import cache_folder
from clawgym.errors import RunFolderError
from clawgym.live.processes import Processes
from clawgym.reporting.page import source_answer, source_id
from clawgym.viewer.index import RunIndex
from clawgym.viewer.sources import FoundSource, Search, find, is_alive, writer

__all__ = ["Catalog"]

_POLL_SECONDS, _FIND_SECONDS = 1.0, 10.0
_QUEUE = 256
"""Events that wait for one subscriber; a slow one is told to read everything again."""
_LINE = 2**20

Event = dict[str, Any]


class _Indexed:
    """The index of one run, for the threads that answer."""

    def __init__(self, run: Path, file: Path) -> None:
        self.lock = threading.Lock()
        self.file = file
        self._run = run
        self._index: RunIndex | None = None
        self.progress = {"done": 0, "total": 0}
        self.problem = ""

    @contextlib.contextmanager
    def use(self) -> Iterator[RunIndex]:
        """The index, for one thread at a time."""
        with self.lock:
            if self._index is None:
                self._index = RunIndex(self._run, self.file)
            yield self._index

    def close(self) -> None:
        with self.lock:
            if self._index is not None:
                self._index.close()
                self._index = None


class Catalog:
    """The sources below ``paths``. Use :meth:`running` around everything else."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = [Path(path) for path in paths]
        self.processes = Processes()
        self._sources: dict[str, FoundSource] = {}
        self._problems: list[str] = []
        self._signatures: dict[str, object] = {}
        self._indexes: dict[str, _Indexed] = {}
        self._subscribers: set[asyncio.Queue[Event]] = set()
        self._folder = _index_folder()
        self._worker: asyncio.subprocess.Process | None = None
        self._waiting: dict[str, bool] = {}
        self._live: object = None

    # ----------------------------------------------------------------------------------------------- what there is

    @property
    def problems(self) -> list[str]:
        """What could not be read, or was left out."""
        return list(self._problems)

    def all(self) -> list[FoundSource]:
        """All sources."""
        return list(self._sources.values())

    def get(self, id: str, *kinds: str) -> FoundSource | None:
        """The source with this id, if it is of one of the kinds."""
        found = self._sources.get(id)
        return found if found is not None and found.kind in kinds else None

    @contextlib.contextmanager
    def index(self, id: str) -> Iterator[RunIndex]:
        """The index of a run, which may still be in the making.

        Raises :class:`~clawgym.errors.RunFolderError` for a run that cannot be read."""
        indexed = self._indexes.get(id)
        if indexed is None:
            raise RunFolderError(f"{id}: the run is gone: choose another of the list")
        if indexed.problem and not indexed.progress["total"]:
            raise RunFolderError(indexed.problem)
        with indexed.use() as index:
            if not index.begun:
                index.update()  # the first answer does not wait for the other process, which has to start
            yield index

    def progress(self, id: str) -> dict[str, int]:
        """How much of the transcripts of a run the search covers."""
        indexed = self._indexes.get(id)
        return {"done": 0, "total": 0} if indexed is None else dict(indexed.progress)

    def problem(self, source: FoundSource) -> str:
        """Why a source cannot be read; otherwise empty."""
        indexed = self._indexes.get(source.id)
        return source.problem or ("" if indexed is None else indexed.problem)

    def noted(self, id: str, key: str) -> dict[str, Any] | None:
        """What was computed of a run; None if it was not computed yet."""
        if (indexed := self._indexes.get(id)) is None:
            return None
        with indexed.use() as index:
            text = index.get(key)
        return json.loads(text) if text else None

    def state(self, source: FoundSource) -> str:
        """``State`` of the answers, for a source of any kind but a training and an audit."""
        if self.problem(source):
            return "damaged"
        if source.kind == "online":
            return "running" if _service_runs(source.path) else "unknown"
        if source.kind == "pool":
            return "running" if writer(source.path.parent) else "unknown"
        if writer(source.path) is not None:
            return "running"
        if source.kind != "run":
            return "unknown"
        figures = self.noted(source.id, "figures")
        return "unknown" if figures is None else "complete" if figures["complete"] else "incomplete"

    # --------------------------------------------------------------------------------------------------- keeping up

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Search the paths, then keep up with them."""
        self._take(await asyncio.to_thread(find, self.paths))
        tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._work())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._worker is not None and self._worker.returncode is None:
                self._worker.kill()
                await self._worker.wait()
            for indexed in self._indexes.values():
                indexed.close()

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[Event]]:
        """A queue of events, as ``LiveEvent`` of the answers."""
        queue: asyncio.Queue[Event] = asyncio.Queue(_QUEUE)
        self._subscribers.add(queue)
        try:
            yield queue
        finally:
            self._subscribers.discard(queue)

    def tell(self, event: Event) -> None:
        """Tell all subscribers."""
        for queue in self._subscribers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait({"kind": "sources"})
            else:
                queue.put_nowait(event)

    async def report(self, id: str) -> None:
        """Tell all subscribers that a source changed."""
        source = self._sources.get(id)
        if source is None or not self._subscribers:
            return
        state, changed = await asyncio.to_thread(lambda: (self.state(source), source.changed()))
        progress = self.progress(id) if id in self._indexes else None
        self.tell({"kind": "source", "id": id, "state": state, "changed": changed, "indexed": progress})

    def _take(self, search: Search) -> bool:
        """Replace the sources. Returns whether there are others than before."""
        found = {source.id: source for source in search.sources}
        other = found != self._sources
        self._sources, self._problems = found, search.problems
        for id in self._indexes.keys() - {id for id, source in found.items() if source.kind == "run"}:
            self._indexes.pop(id).close()
        for id, source in found.items():
            if source.kind == "run" and not source.problem and id not in self._indexes:
                name = sha256(os.fsencode(source.path)).hexdigest()[:24]
                self._indexes[id] = _Indexed(source.path, self._folder / f"{name}.db")
        return other

    async def _follow(self) -> None:
        searched = asyncio.get_running_loop().time()
        while True:
            now = {id: await asyncio.to_thread(source.signature) for id, source in list(self._sources.items())}
            for id, signature in now.items():
                if id in self._sources and self._signatures.get(id) != signature:
                    known = id in self._signatures
                    self._signatures[id] = signature
                    if id in self._indexes:
                        self._waiting[id] = True  # reported when it is read
                    elif known:
                        await self.report(id)
            await self._hand_out()
            if self._subscribers:
                await self._look_at_live()
            await asyncio.sleep(_POLL_SECONDS)
            if asyncio.get_running_loop().time() - searched > _FIND_SECONDS:
                if self._take(await asyncio.to_thread(find, self.paths)):
                    self.tell({"kind": "sources"})
                searched = asyncio.get_running_loop().time()

    async def _look_at_live(self) -> None:
        live = [
            (one.get("id"), one.get("step"), one.get("picture")) for one in await asyncio.to_thread(self.processes.all)
        ]
        if live != self._live:
            self._live = live
            self.tell({"kind": "live"})

    async def _hand_out(self) -> None:
        """Give the process that makes the indexes what is to be read."""
        worker = self._worker
        if worker is None or worker.stdin is None or worker.returncode is not None:
            return
        for id in list(self._waiting):
            del self._waiting[id]
            if id in self._indexes:
                task = {"id": id, "run": str(self._sources[id].path), "index": str(self._indexes[id].file)}
                worker.stdin.write(json.dumps(task).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await worker.stdin.drain()

    async def _work(self) -> None:
        """Run the process that makes the indexes, and report what it did."""
        while True:
            self._worker = worker = await asyncio.create_subprocess_exec(
                # -P: a folder of modules in the working folder is not ours.
                *(sys.executable, "-P", "-m", "clawgym.viewer.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE,
            )
            self._waiting |= dict.fromkeys(self._indexes, True)
            await self._hand_out()
            assert worker.stdout is not None
            while line := await worker.stdout.readline():
                said: Mapping[str, Any] = json.loads(line)
                indexed = self._indexes.get(said["id"])
                if indexed is not None:
                    indexed.progress = {"done": said["done"], "total": said["total"]}
                    indexed.problem = said["problem"]
                    await self.report(said["id"])
            await worker.wait()
            await asyncio.sleep(_POLL_SECONDS)  # it was killed: begin again

    # -------------------------------------------------------------------------------------------------------- boards

    def boards(self) -> dict[str, list[str]]:
        """Id of a board -> the ids of its runs: at least two over the same tasks."""
        runs: dict[str, list[str]] = {}
        for source in self.all():
            figures = self.noted(source.id, "figures") if source.id in self._indexes else None
            if figures is not None and figures["run"]["task_set_hash"] and figures["run"]["episodes"]:
                hash = figures["run"]["task_set_hash"]
                runs.setdefault(source_id(figures["run"]["task_set"] or "board", hash), []).append(source.id)
        return {id: members for id, members in runs.items() if len(members) > 1}

    def answer(self, source: FoundSource, more: Callable[[FoundSource], dict[str, Any]]) -> dict[str, Any]:
        """``Source`` of the answers; ``more`` adds what depends on the kind."""
        return source_answer(
            source.id,
            source.kind,
            source.path.name,
            str(source.path),
            state=self.state(source),
            problem=self.problem(source),
            changed=source.changed(),
        ) | more(source)


def _service_runs(folder: Path) -> bool:
    from clawgym.files import read_below

    try:
        where = json.loads(read_below(folder, "address.json", 2**16))
        return is_alive(where["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _index_folder() -> Path:
    """Where the indexes are: in the user's cache, or in a temporary folder if that cannot be written."""
    folder = cache_folder("viewer")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        with tempfile.NamedTemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="clawgym-viewer-"))
