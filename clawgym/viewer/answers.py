"""Every answer of the viewer: from an address and its query to JSON data, with the types of ``web/src/api.ts``.

Invariants: nothing here writes. What an address does not have raises :class:`Unanswered`; a folder that is damaged
gives an answer that says so, or raises :class:`~clawgym.errors.ClawGymError`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from clawgym._version import __version__
from clawgym.errors import ClawGymError, MissingDependency
from clawgym.evaluation import answers as run_answers
from clawgym.files import read_below
from clawgym.records import Image
from clawgym.records.atif import PICTURES, picture_name
from clawgym.records.run_folder import RunFolder, safe_name
from clawgym.reporting.page import plain, source_answer
from clawgym.reporting.transcripts import Transcript
from clawgym.viewer.catalog import Catalog
from clawgym.viewer.index import EPISODE_FILTERS, read_manifest, step_text, words_of
from clawgym.viewer.sources import FoundSource, writer

__all__ = ["Answers", "Export", "Unanswered"]

_MOST = 500
"""Most items of one page of a list."""
_LARGEST_JSON = 256 * 2**20
_LARGEST_PICTURE = 64 * 2**20
_KEPT_TRANSCRIPTS = 8
_KEPT_ANSWERS = 64
_MOST_SEARCHED = 100
"""Pools that are searched for the episode of a run, and runs for that of a pool."""
_AROUND = 120
"""Characters of a text that are shown before and after what was found."""
_PICTURE = re.compile(r"[0-9a-f]{64}\.(png|jpg|gif|webp)")
_TYPES = {"png": "image/png", "jpg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}

Query = Mapping[str, str]


class Unanswered(Exception):
    """There is no answer. ``status``: 400 for a bad question, 404 if there is no such thing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Export:
    """A file with the rows of a list."""

    def __init__(self, name: str, rows: Iterable[Mapping[str, Any]], format: str) -> None:
        self.name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:80]}.{format}"
        self.type = "text/csv" if format == "csv" else "application/x-ndjson"
        if format == "jsonl":
            self.text = "".join(json.dumps(row) + "\n" for row in map(plain, rows))
        else:
            flat = [{key: _cell(value) for key, value in row.items()} for row in map(plain, rows)]
            buffer = io.StringIO()
            table = csv.DictWriter(buffer, list(dict.fromkeys(key for row in flat for key in row)))
            table.writeheader()
            table.writerows(flat)
            self.text = buffer.getvalue()


def _cell(value: Any) -> Any:
    """A value of a CSV file. What a spreadsheet would take for a formula begins with a quote."""
    text = json.dumps(value) if isinstance(value, list | dict) else value
    return f"'{text}" if isinstance(text, str) and text[:1] in "=+-@\t\r" and text else text


class Answers:
    """The answers about the sources of ``catalog``. Thread-safe. ``writable``: what the page is told."""

    def __init__(self, catalog: Catalog, writable: bool) -> None:
        self._catalog = catalog
        self._writable = writable
        self._lock = Lock()
        self._transcripts: OrderedDict[object, Transcript] = OrderedDict()
        self._computed: OrderedDict[object, Any] = OrderedDict()

    def of(self, address: str, query: Query) -> Any:
        """The answer of ``address``, without ``/api/``: JSON data, a list of an :class:`Export`, or an
        :class:`~clawgym.records.Image`."""
        match address.split("/"):
            case ["sources"]:
                return self._sources()
            case ["runs", id]:
                return self._run(id)
            case ["runs", id, "episodes"]:
                return self._episodes(id, query)
            case ["runs", id, "episodes", name]:
                return self._episode(id, name)
            case ["runs", id, "episodes", name, "turns"]:
                return self._turns(id, name, query)
            case ["runs", id, "episodes", name, "tokens"]:
                return self._tokens(id, name, query)
            case ["runs", id, "pictures", name]:
                return self._picture(id, name)
            case ["compare"]:
                return self._compare(query)
            case ["training", id]:
                return self._training(id, query)
            case ["pools", id, *rest]:
                return self._pool(id, rest, query)
            case ["boards", id]:
                return self._board(id, query)
            case ["audits", id]:
                return self._audit(id)
            case ["audits", id, "tasks"]:
                return self._audit_tasks(id, query)
            case ["attacks", id]:
                return self._attack(id)
            case ["experiments", id]:
                return self._experiment(id)
            case ["online", id]:
                return self._online(id)
            case ["live"]:
                return self._live()
            case ["search"]:
                return self._search(query)
        raise Unanswered(404, f"/api/{address[:200]}: there is no such address: see web/src/api.ts")

    # ------------------------------------------------------------------------------------------------------- helpers

    def _source(self, id: str, kind: str) -> FoundSource:
        found = self._catalog.get(id, kind)
        if found is None:
            raise Unanswered(404, f"{id[:100]}: there is no such {kind}: choose one of the list")
        if found.problem:
            raise Unanswered(404, found.problem)
        return found

    def _kept(self, source: FoundSource, what: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, kept until the files of the source change."""
        key = source.id, what, source.signature()
        with self._lock:
            if key in self._computed:
                self._computed.move_to_end(key)
                return self._computed[key]
        made = make()
        with self._lock:
            self._computed[key] = made
            while len(self._computed) > _KEPT_ANSWERS:
                self._computed.popitem(last=False)
        return made

    def _transcript(self, source: FoundSource, name: str) -> Transcript:
        try:
            info = (source.path / "episodes" / name / "transcript.json").stat(follow_symlinks=False)
            key: object = (source.id, name, info.st_ino, info.st_size, info.st_mtime_ns)
        except OSError:
            return run_answers.transcript_of(source.path, name)
        with self._lock:
            if key in self._transcripts:
                self._transcripts.move_to_end(key)
                return self._transcripts[key]
        read = run_answers.transcript_of(source.path, name)
        with self._lock:
            self._transcripts[key] = read
            while len(self._transcripts) > _KEPT_TRANSCRIPTS:
                self._transcripts.popitem(last=False)
        return read

    def _address(self, id: str) -> Callable[[Image], str | None]:
        def address(image: Image) -> str | None:
            name = picture_name(image)
            return None if name is None else f"/api/runs/{id}/{PICTURES}/{name}"

        return address

    # ------------------------------------------------------------------------------------------------------- sources

    def _sources(self) -> dict[str, Any]:
        catalog = self._catalog
        sources = [catalog.answer(source, self._more) for source in catalog.all()]
        for id, runs in catalog.boards().items():
            members = [source for source in sources if source["id"] in runs]
            sources.append(
                source_answer(
                    id,
                    "board",
                    members[0]["run"]["task_set"] or "unnamed tasks",
                    "",
                    state="complete",
                    changed=max(member["changed"] for member in members),
                    label=f"{len(members)} runs",
                )
            )
        return {
            "library": __version__,
            "writable": self._writable,
            "paths": [str(path) for path in catalog.paths],
            "sources": sources,
            "problems": catalog.problems,
        }

    def _more(self, source: FoundSource) -> dict[str, Any]:
        """What a source has beside what all have."""
        try:
            if source.kind == "run" and not self._catalog.problem(source):
                figures = self._catalog.noted(source.id, "figures")
                return {
                    "label": self._kept(source, "label", lambda: read_manifest(source.path).label[:200]),
                    "run": None if figures is None else figures["run"],
                    "indexed": self._catalog.progress(source.id),
                }
            if source.kind == "training":
                from clawgym.trainers.common.answers import training_figures

                figures = self._kept(source, "figures", lambda: training_figures(source.path))
                measured = figures["score"] is not None and figures["score"]["split"] == "heldout"
                state = "running" if writer(source.path) else "complete" if measured else "incomplete"
                return {"label": f"{figures['method']} · {figures['model']}", "training": figures, "state": state}
            if source.kind == "pool":
                return {"parent": self._training_of(source), "name": source.path.name}
            if source.kind in ("audit", "attack"):
                found = self._document(source)
                return {
                    "label": str(found.get("task_set", {}).get("name") or "")[:200],
                    "state": self._done(source, found),
                }
        except (ClawGymError, Unanswered, ValueError, TypeError, AttributeError, KeyError) as error:
            return {"state": "damaged", "problem": str(error)[:400]}
        return {}

    def _training_of(self, pool: FoundSource) -> str | None:
        return next(
            (one.id for one in self._catalog.all() if one.kind == "training" and one.path == pool.path.parent), None
        )

    # ---------------------------------------------------------------------------------------------------------- runs

    def _run(self, id: str) -> dict[str, Any]:
        source = self._source(id, "run")
        answer = self._catalog.noted(id, "answer")
        notes = [self._catalog.problem(source)] if self._catalog.problem(source) else []
        if answer is None:  # not computed yet
            with self._catalog.index(id) as index:
                manifest = index.manifest
            answer = {
                "name": source.path.name,
                "path": str(source.path),
                "about": run_answers.about(manifest),
                "manifest": run_answers.settings(manifest),
                "summary": None,
                "checks": [],
                "distribution": {"solved": [0] * 20, "unsolved": [0] * 20},
                "categories": [],
                "outcomes": [],
                "slowest": None,
                "notes": [],
            }
        with self._catalog.index(id) as index:
            if index.damaged:
                notes.append(f"{index.damaged} damaged lines of results.jsonl are left out.")
        return answer | {
            "id": id,
            "state": self._catalog.state(source),
            "changed": source.changed(),
            "indexed": self._catalog.progress(id),
            "notes": [*answer["notes"], *notes],
        }

    def _episodes(self, id: str, query: Query) -> Any:
        source = self._source(id, "run")
        format = _format(query)
        offset, limit = (0, 10**9) if format else _part(query)
        where = {name: query[name] for name in EPISODE_FILTERS if query.get(name)}
        progress = self._catalog.progress(id)
        try:
            with self._catalog.index(id) as index:
                total, everything, items = index.episodes(
                    offset=offset, limit=limit, sort=query.get("sort") or "order", where=where
                )
                if not everything:
                    index.manifest  # noqa: B018  # raises for a run that cannot be read
        except ValueError as error:
            raise Unanswered(400, str(error)) from error
        if format:
            return Export(f"{source.path.name}-episodes", items, format)
        covered = progress["done"] >= progress["total"]
        note = "" if covered or not where.get("q") else "The search does not cover all transcripts yet."
        return {"total": total, "all": everything, "offset": offset, "items": items, "note": note}

    def _episode_rows(self, id: str, name: str) -> tuple[FoundSource, dict[str, Any], list[dict[str, Any]]]:
        source = self._source(id, "run")
        with self._catalog.index(id) as index:
            found = index.episode(name)
        if found is None:
            raise Unanswered(404, f"{name[:100]}: the run has no such episode: choose one of its list")
        return source, *found

    def _episode(self, id: str, name: str) -> dict[str, Any]:
        source, line, rows = self._episode_rows(id, name)
        try:
            answer = run_answers.episode_answer(
                source.path, line, rows, self._transcript(source, name), self._address(id)
            )
        except ValueError as error:
            raise Unanswered(404, f"{error}: delete the line to run its episode again") from error
        return {**answer, "run": id, "pool": self._in_pool(rows[-1].get("session"))}

    def _in_pool(self, session: object) -> dict[str, Any] | None:
        """The episode of the pool that recorded a gateway session; None if its pool is not here."""
        try:
            from clawgym.viewer.pools import PoolAnswers
        except ImportError:
            return None
        pools = [one for one in self._catalog.all() if one.kind == "pool"] if isinstance(session, str) else []
        for source in pools[:_MOST_SEARCHED]:
            with suppress(ClawGymError), PoolAnswers(source.path, source.id) as pool:
                if (seq := pool.find(str(session)[:200])) is not None:
                    return {"source": source.id, "seq": seq}
        return None

    def _in_run(self, episode: Mapping[str, Any]) -> dict[str, Any] | None:
        """The episode of a run whose gateway session an episode of a pool is; None if its run is not here."""
        name = safe_name(episode["task"], episode["sample"])
        runs = [one for one in self._catalog.all() if one.kind == "run"]
        for source in runs[:_MOST_SEARCHED]:
            with suppress(ClawGymError), self._catalog.index(source.id) as index:
                _, rows = index.episode(name) or ({}, [])
                if any(row.get("session") == episode["id"] for row in rows):
                    return {"source": source.id, "name": name}
        return None

    def _turns(self, id: str, name: str, query: Query) -> dict[str, Any]:
        source, _, _ = self._episode_rows(id, name)
        offset, limit = _part(query)
        transcript = self._transcript(source, name)
        items = run_answers.turns_answer(transcript, offset, offset + limit, address=self._address(id))
        total = len(transcript.steps)
        return {"total": total, "all": total, "offset": offset, "items": items, "note": transcript.note}

    def _tokens(self, id: str, name: str, query: Query) -> dict[str, Any]:
        source, _, _ = self._episode_rows(id, name)
        answer = run_answers.token_answer(self._transcript(source, name), _number(query, "turn", 0, 10**9))
        if answer is None:
            raise Unanswered(404, "no token ids are stored for this turn: choose another turn")
        return answer

    def _picture(self, id: str, name: str) -> Image:
        source = self._source(id, "run")
        if not (named := _PICTURE.fullmatch(name)):
            raise Unanswered(404, "this is no name of a picture: see the steps of the episode")
        try:
            data = read_below(source.path, f"{PICTURES}/{name}", _LARGEST_PICTURE)
        except OSError as error:
            raise Unanswered(404, f"{PICTURES}/{name} {error.strerror}: run its episode again") from error
        return Image(name[:64], data, _TYPES[named[1]])

    def _read_run(self, id: str) -> RunFolder:
        source = self._catalog.get(id, "run")
        if source is None:
            raise Unanswered(404, f"{id[:100]}: there is no such run: choose two of the list")
        with self._catalog.index(id) as index:
            while index.update():
                pass
            return RunFolder(source.path, index.manifest, index.rows(), None)

    def _compare(self, query: Query) -> dict[str, Any]:
        ids = [query.get("a") or "", query.get("b") or ""]
        runs = [self._read_run(id) for id in ids]
        try:
            answer = run_answers.compare_answer(*runs)
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise Unanswered(
                404, f"a line of the runs is damaged ({error}): delete it, and run its episode again"
            ) from error
        for side, id in zip("ab", ids, strict=True):
            answer[side]["id"] = id
        return answer

    def _search(self, query: Query) -> dict[str, Any]:
        offset, limit = _part(query)
        words = query.get("q") or ""
        total, items, waiting = 0, [], 0
        for source in self._catalog.all():
            if (
                source.kind != "run"
                or self._catalog.problem(source)
                or query.get("source") not in (None, "", source.id)
            ):
                continue
            progress = self._catalog.progress(source.id)
            waiting += progress["total"] - progress["done"]
            with self._catalog.index(source.id) as index:
                count, hits = index.search(words, max(0, offset - total), limit - len(items))
                total += count
                found = [(name, step, index.episode(name)) for name, step in hits]
            for name, step, episode in found:
                if episode is not None:
                    items.append(self._hit(source, name, step, episode[0], words))
        note = f"{waiting:,} transcripts are not covered yet." if waiting else ""
        return {"total": total, "all": total, "offset": offset, "items": items, "note": note}

    def _hit(self, source: FoundSource, name: str, step: int, line: Mapping[str, Any], words: str) -> dict[str, Any]:
        steps = self._transcript(source, name).steps
        text = step_text(steps[step]) if step < len(steps) else ""
        return {
            "source": source.id,
            "run": source.path.name,
            "episode": name,
            "task": line["task"],
            "outcome": line["outcome"],
            "step": step,
            "parts": _parts(text, words_of(words)),
        }

    # ------------------------------------------------------------------------------------------------- other sources

    def _training(self, id: str, query: Query) -> Any:
        from clawgym.trainers.common.answers import training_answer

        source = self._source(id, "training")
        answer = self._kept(source, "training", lambda: training_answer(source.path))
        if format := _format(query):
            rows = [
                {"step": step, **{name: values[n] for name, values in answer["metrics"].items()}}
                for n, step in enumerate(answer["steps"])
            ]
            return Export(f"{source.path.name}-metrics", rows, format)
        pool = next((one for one in self._catalog.all() if one.kind == "pool" and one.path.parent == source.path), None)
        return answer | {
            "id": id,
            "state": self._more(source)["state"],
            "changed": source.changed(),
            "pool": None if pool is None else pool.id,
        }

    def _pool(self, id: str, rest: Sequence[str], query: Query) -> Any:
        try:
            from clawgym.viewer.pools import PoolAnswers
        except ImportError as error:
            raise MissingDependency("showing a pool needs sqlalchemy: pip install 'clawgym[pool]'") from error
        source = self._source(id, "pool")
        with PoolAnswers(source.path, id) as pool:
            match rest:
                case []:
                    return pool.pool() | {"changed": source.changed(), "training": self._training_of(source)}
                case ["groups"]:
                    offset, limit = _part(query)
                    found = pool.groups(offset, limit, _given(query, "channel", "state"))
                    return _page(offset, *found)
                case ["episodes"]:
                    format = _format(query)
                    offset, limit = (0, 10**9) if format else _part(query)
                    where = _given(query, "channel", "fate", "outcome", "group")
                    found = pool.episodes(offset, limit, where, query.get("q") or "")
                    return Export(f"{source.path.stem}-episodes", found[2], format) if format else _page(offset, *found)
                case ["episodes", seq, *what]:
                    return self._pool_episode(pool, _whole(seq), what, query)
                case ["pictures", name] if re.fullmatch(r"[0-9a-f]{64}", name):
                    image = pool.picture(name)
                    if image is not None and image.media_type in _TYPES.values():
                        return image
        raise Unanswered(404, "the pool has no such thing: choose one of its lists")

    def _pool_episode(self, pool: Any, seq: int, what: Sequence[str], query: Query) -> dict[str, Any]:
        match what:
            case []:
                episode = pool.episode(seq)
                return {**episode, "run": self._in_run(episode)}
            case ["turns"]:
                offset, limit = _part(query)
                total, items = pool.turns(seq, offset, limit)
                return _page(offset, total, total, items)
            case ["tokens"]:
                answer = pool.tokens(seq, _number(query, "turn", 0, 10**9))
                if answer is not None:
                    return answer
            case ["sequences"]:
                return pool.sequences(seq)
        raise Unanswered(404, "the episode has no such thing: choose one of its turns")

    def _board(self, id: str, query: Query) -> dict[str, Any]:
        from clawgym.leaderboards.answers import board_answer

        by = query.get("by") or "strict"
        runs = self._catalog.boards().get(id)
        if runs is None:
            raise Unanswered(404, f"{id[:100]}: there is no such board: choose one of the list")
        try:
            return {"id": id, **board_answer([(one, self._read_run(one)) for one in runs], by)}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unanswered(400, str(error)) from error

    def _document(self, source: FoundSource) -> dict[str, Any]:
        """The results of an audit, attack or experiment; empty if there are none yet."""
        name = _document_of(source)

        def read() -> dict[str, Any]:
            try:
                found = json.loads(read_below(source.path, name, _LARGEST_JSON))
            except FileNotFoundError:
                return {}
            except OSError as error:
                raise Unanswered(404, f"{source.path}/{name} {error.strerror}: run the command again") from error
            except (ValueError, RecursionError) as error:
                raise Unanswered(404, f"{source.path}/{name} is damaged: run the command again") from error
            if not isinstance(found, dict):
                raise Unanswered(404, f"{source.path}/{name} is damaged: run the command again")
            return found

        return self._kept(source, "document", read)

    def _done(self, source: FoundSource, document: Mapping[str, Any]) -> str:
        return "running" if writer(source.path) else "complete" if document.get("complete") else "incomplete"

    def _audit(self, id: str) -> dict[str, Any]:
        from clawgym.evaluation.findings import FLAWS

        source = self._source(id, "audit")
        found = self._document(source)
        with _damage(source):
            task_set, counts = found.get("task_set") or {}, found.get("flaws") or {}
            return {
                "id": id,
                "name": source.path.name,
                "path": str(source.path),
                "state": self._done(source, found),
                **_about_set(task_set),
                "audited": len(found.get("tasks") or ()),
                "kept": int(found.get("kept") or 0),
                "flaws": [
                    {
                        "name": flaw.name,
                        "breaks": flaw.breaks,
                        "about": flaw.about,
                        "tasks": int(counts.get(flaw.name) or 0),
                    }
                    for flaw in FLAWS
                ],
                "policies": [
                    {"policy": str(policy), **{name: float(earned[name]) for name in _EARNED}}
                    for policy, earned in (found.get("policies") or {}).items()
                ],
                "baseline": float(found.get("floor") or 0.0),
                "seconds": {str(name): float(value) for name, value in (found.get("seconds") or {}).items()},
                **{name: _texts(found.get(name)) for name in ("unsupported", "infra")},
                "problems": _texts(task_set.get("problems")),
            }

    def _audit_tasks(self, id: str, query: Query) -> dict[str, Any]:
        from clawgym.evaluation.findings import FLAWS

        source = self._source(id, "audit")
        offset, limit = _part(query)
        breaking = {flaw.name for flaw in FLAWS if flaw.breaks}
        with _damage(source):
            rows = [
                {
                    "task": str(task["task"])[:300],
                    "baseline": float(task["floor"]),
                    "solution": None if task["solution"] is None else str(task["solution"])[:2_000],
                    "flaws": {str(name): str(what)[:2_000] for name, what in task["flaws"].items()},
                    "broken": bool(breaking & task["flaws"].keys()),
                }
                for task in self._document(source).get("tasks") or ()
            ]
        flaw, text = query.get("flaw"), (query.get("q") or "").lower()
        kept = [row for row in rows if (not flaw or flaw in row["flaws"]) and text in row["task"].lower()]
        kept.sort(key=lambda row: (not row["broken"], -len(row["flaws"]), -row["baseline"]))
        return _page(offset, len(kept), len(rows), kept[offset : offset + limit])

    def _attack(self, id: str) -> dict[str, Any]:
        source = self._source(id, "attack")
        found = self._document(source)
        with _damage(source):
            return {
                "id": id,
                "name": source.path.name,
                "path": str(source.path),
                "state": self._done(source, found),
                **_about_set(found.get("task_set") or {}),
                "attacked": int(found.get("attacked") or 0),
                "rates": [
                    {
                        **{name: str(rate[name])[:200] for name in ("exploit", "task_class")},
                        "grader": "ClawGym" if rate["harness"] == "ours" else "original grader",
                        **{name: int(rate[name]) for name in ("tasks", "earned", "official", "full")},
                        **{name: float(rate[name]) for name in ("gain", "official_gain", "rate")},
                        "allowed": bool(rate["allowed"]),
                        "earned_on": [str(task)[:300] for task in rate["earned_on"]],
                    }
                    for rate in found.get("rates") or ()
                ],
                "exploits": [
                    {"name": str(name), "tries": str(tries)} for name, tries in (found.get("exploits") or {}).items()
                ],
                "infra": _texts(found.get("infra")),
            }

    def _experiment(self, id: str) -> dict[str, Any]:
        from clawgym.trainers.local.personal_report import report_answer

        source = self._source(id, "experiment")
        with _damage(source):
            window = int(read_manifest(source.path).config["rollout"]["groups"])
            results = {"hints": None, "cells": []} | self._document(source)
            answer = self._kept(source, "experiment", lambda: report_answer(source.path.name, results, window))
        known = {"path": str(source.path), "state": self._catalog.state(source), "changed": source.changed()}
        return {**answer, "id": id, **known}

    def _online(self, id: str) -> dict[str, Any]:
        from clawgym.viewer.services import online_answer

        return {**online_answer(self._source(id, "online").path), "id": id, "writable": self._writable}

    def _live(self) -> dict[str, Any]:
        sources = {pid: one for one in self._catalog.all() if one.kind != "pool" and (pid := writer(one.path))}
        runs: dict[int, dict[str, Any]] = {}
        for entry in self._catalog.processes.all():
            stem, _, number = str(entry.get("id")).partition("/")
            pid = int(head) if (head := stem.partition("-")[0]).isdecimal() else 0
            source = sources.get(pid)
            run = runs.setdefault(
                pid,
                {
                    "source": None if source is None else source.id,
                    "name": f"process {pid}" if source is None else source.path.name,
                    "pid": pid,
                    "sandboxes": [],
                },
            )
            picture = entry.get("picture")
            run["sandboxes"].append(
                {
                    "id": f"{stem}.{number}",
                    **{
                        name: str(entry.get(name) or "")[:most]
                        for name, most in (
                            ("task", 300),
                            ("instruction", 4_000),
                            ("agent", 200),
                            ("action", 400),
                            ("text", 4_000),
                        )
                    },
                    "turn": step if isinstance(step := entry.get("step"), int) else 0,
                    "picture": f"/api/live/{stem}/{number}/{picture}" if isinstance(picture, int) else None,
                }
            )
        return {"runs": list(runs.values())}

    def live_picture(self, stem: str, number: str) -> bytes | None:
        """The newest picture of a sandbox; None if there is none."""
        return self._catalog.processes.picture(f"{stem}/{number}")


def _document_of(source: FoundSource) -> str:
    return "results.json" if source.kind == "experiment" else f"{source.kind}.json"


_EARNED = ("mean", "max", "above_0", "above_half", "crashed")


def _about_set(task_set: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task_set": str(task_set.get("name") or "")[:200],
        "task_set_hash": str(task_set.get("hash") or "")[:100],
        "size": int(task_set.get("size") or 0),
    }


def _texts(value: Any) -> dict[str, str]:
    return {str(key)[:300]: str(text)[:2_000] for key, text in value.items()} if isinstance(value, Mapping) else {}


class _damage:
    """Turn what a document of another form raises into :class:`Unanswered`."""

    def __init__(self, source: FoundSource) -> None:
        self._source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError | OverflowError):
            name = _document_of(self._source)
            raise Unanswered(404, f"{self._source.path}/{name} is damaged: run the command again") from error


def _page(offset: int, total: int, everything: int, items: list[Any]) -> dict[str, Any]:
    return {"total": total, "all": everything, "offset": offset, "items": items, "note": ""}


def _given(query: Query, *names: str) -> dict[str, str]:
    return {name: query[name] for name in names if query.get(name)}


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise Unanswered(404, f"{text[:40]} is no number of an episode: choose one of the list")
    return int(text)


def _number(query: Query, name: str, default: int, most: int) -> int:
    text = query.get(name) or str(default)
    if not text.isdecimal() or len(text) > 18 or int(text) > most:
        raise Unanswered(400, f"{name}={text[:40]}: give a whole number from 0 to {most}")
    return int(text)


def _part(query: Query) -> tuple[int, int]:
    """Offset and limit of a list."""
    return _number(query, "offset", 0, 10**12), _number(query, "limit", 100, _MOST)


def _format(query: Query) -> str:
    format = query.get("format") or ""
    if format not in ("", "csv", "jsonl"):
        raise Unanswered(400, f"format={format[:40]}: choose csv or jsonl")
    return format


def _parts(text: str, words: Sequence[str]) -> list[tuple[str, bool]]:
    """A part of a text around the first of the words, split so that hits stand alone."""
    tokens = [r"\W+".join(map(re.escape, re.findall(r"\w+", word))) for word in words]
    if not tokens:
        return [(text[: 2 * _AROUND], False)]
    pattern = re.compile(rf"\b(?:{'|'.join(tokens)})", re.I)
    first = pattern.search(text)
    start = max(0, (first.start() if first else 0) - _AROUND)
    shown = text[start : start + 3 * _AROUND]
    parts: list[tuple[str, bool]] = []
    last = 0
    for hit in pattern.finditer(shown):
        if hit.end() == hit.start():
            continue
        parts += [(shown[last : hit.start()], False), (hit[0], True)]
        last = hit.end()
    return [part for part in [*parts, (shown[last:], False)] if part[0]]
