"""Training on another machine: what its trainer asks of a service, over the TLS address that clients use.

======================================  ==================================================================
``GET /training/config``                the configuration of the service
``POST /training/pool/METHOD``          a method of the pool that training needs, with its arguments
``GET /training/versions?from=BYTES``   the log of the versions, from there on
``GET /training/versions/N/FILE``       a file of the adapter of a version
``POST /training/versions``             a new version: its record, then the two files of its adapter
======================================  ==================================================================

Invariants: nothing is answered without the key for training, which is not the key of a client. The trainer gets no
conversation that is held out, nor what the loops of the service asked. What is sent is bounded before it is held, and a
version appears when all of it has arrived. The service alone writes its folder; the trainer keeps a copy of the log of
versions, which is read as it is at the service.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from pydantic import BaseModel, TypeAdapter, ValidationError

from clawgym.errors import PoolError, ServiceError, ServiceUnreachable
from clawgym.gateway.calls import Refusal
from clawgym.gateway.server import Gateway, guarded, read_object
from clawgym.online.config import ServiceConfig
from clawgym.online.conversations import CHANNEL
from clawgym.online.versions import LOG, Version, Versions
from clawgym.pool import Pool
from clawgym.pool.states import Batch
from clawgym.records import Image, Turn
from clawgym.trainers.config import checked_settings, override_settings

__all__ = ["RemotePool", "RemoteVersions", "ServiceLink", "TrainingDoor"]

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_LARGEST_RECORD = 2**16
"""Most bytes of a request, and of the record of a version."""
_LARGEST_FILE = 2**33
_LARGEST_ANSWER = 2**32
_CHUNK = 2**20
_SECONDS = 120.0
"""Longest time without a byte."""
_FRESH_SECONDS = 1.0
"""The copy of the log may be so old."""


def _image(found: Image) -> dict[str, str]:
    return {"data": base64.b64encode(found.data).decode(), "media_type": found.media_type}


_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_CALLS: Mapping[str, TypeAdapter[Any]] = {
    "stats": _ANY,
    "fetch": TypeAdapter(Batch | None),
    "ack": _ANY,
    "turns": TypeAdapter(tuple[Turn, ...]),
    "about_turn_rewards": TypeAdapter(dict[str, dict[int, dict[str, Any]]]),
    "image": _ANY,
}
"""The methods of the pool that training needs, and what each returns."""


class _About(BaseModel, strict=True, allow_inf_nan=False):
    step: int = 0
    metrics: dict[str, float] = {}


class _Record(BaseModel, strict=True):
    """What is sent of a version and stored. Anything else in it is left out."""

    parent: int
    sessions: list[str]
    about: _About


# --- the side of the service ------------------------------------------------------------------------------------------


class TrainingDoor:
    """Answers the trainer of a service."""

    def __init__(self, gateway: Gateway, versions: Versions, config: ServiceConfig, key: str) -> None:
        self._gateway, self._versions, self._config, self._key = gateway, versions, config, key

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Serve it below ``/training``."""
        which = "the key for training: use the one in training.key of the service"
        for method, path, handler in (
            ("GET", "config", self._settings), ("POST", "pool/{method}", self._pool), ("GET", "versions", self._log),
            ("GET", "versions/{number}/{file}", self._file), ("POST", "versions", self._add),
        ):  # fmt: skip
            router.add_route(method, f"/training/{path}", guarded(handler, secret=self._key, which=which))

    async def _settings(self, request: web.Request) -> dict[str, Any]:
        return self._config.model_dump(mode="json")

    async def _pool(self, request: web.Request) -> web.Response:
        name = request.match_info["method"]
        if name not in _CALLS:
            raise Refusal(404, f"training has no call {name!r}: use the same version of clawgym on both machines")
        given = await read_object(request, most=_LARGEST_RECORD)
        if name == "fetch" and given.get("wait"):
            raise Refusal(400, "'wait' would hold the pool: ask again later", param="wait")

        def work(pool: Pool) -> bytes:
            try:
                _check_channel(pool, name, given)
                found = getattr(pool, name)(**given)
            except (TypeError, ValueError) as error:
                raise Refusal(400, f"{name}: {error}: use the same version of clawgym on both machines") from error
            except PoolError as error:
                raise Refusal(404, str(error)) from error
            return _CALLS[name].dump_json(_image(found) if name == "image" else found)

        return web.Response(body=await self._gateway.in_pool(work), content_type="application/json")

    async def _log(self, request: web.Request) -> web.Response:
        start = request.query.get("from", "0")
        if not start.isdecimal():
            raise Refusal(400, "'from' is not a number of bytes: correct it", param="from")

        def rest() -> bytes:
            with (self._versions.path / LOG).open("rb") as file:
                file.seek(int(start))
                new = file.read()
            return new[: new.rfind(b"\n") + 1]  # a line that is being written comes later

        return web.Response(body=await asyncio.to_thread(rest))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        number, name = request.match_info["number"], request.match_info["file"]
        try:
            folder = self._versions[int(number)].adapter
        except (ValueError, ServiceError):
            folder = None
        if folder is None or name not in _FILES or not (folder / name).is_file():
            raise Refusal(404, f"version {number} has no {name}: it has no adapter, or was deleted")
        return web.FileResponse(folder / name)

    async def _add(self, request: web.Request) -> dict[str, Any]:
        """The body: one line of JSON, then each file as its length in a line and its bytes."""
        part = Path(await asyncio.to_thread(tempfile.mkdtemp, suffix=".sent", dir=self._versions.path))
        try:
            record = _Record.model_validate_json(await _line(request.content, _LARGEST_RECORD))
            for name in _FILES:
                await self._receive(request.content, part / name)

            def add() -> Version:
                return self._versions.add(
                    lambda folder: [(part / name).rename(folder / name) for name in _FILES],
                    parent=record.parent,
                    sessions=record.sessions,
                    about=record.about.model_dump(exclude_unset=True),
                )

            version = await asyncio.to_thread(add)
        except ServiceError as error:
            raise Refusal(409, str(error)) from error
        except (ValueError, OSError) as error:
            raise Refusal(400, f"no version was sent ({error!r}): send it again") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, part, True)
        if not self._config.gate.on:
            await asyncio.to_thread(self._versions.promote, version.number, "without a gate")
        return {"version": version.number}

    @staticmethod
    async def _receive(content: Any, file: Path) -> None:
        size = int(await _line(content, 32))
        if not 0 < size <= _LARGEST_FILE:
            raise ValueError(f"{file.name} has {size} bytes")
        with file.open("xb") as out:
            while size:
                async with asyncio.timeout(_SECONDS):
                    piece = await content.read(min(size, _CHUNK))
                if not piece:
                    raise ValueError(f"{file.name} ends early")
                size -= len(piece)
                await asyncio.to_thread(out.write, piece)


def _check_channel(pool: Pool, name: str, given: Mapping[str, Any]) -> None:
    """Raise :class:`~clawgym.gateway.calls.Refusal` (403) for a call about a channel that is not for training."""
    if name == "fetch":
        channel = given.get("channel")
    elif "id" in given:
        channel = pool.episode(given["id"]).channel
    else:
        return
    if not str(channel).startswith(CHANNEL):
        raise Refusal(403, f"the channel {channel!r} is not for training: ask for {CHANNEL}SOURCE", param="channel")


async def _line(content: Any, most: int) -> bytes:
    async with asyncio.timeout(_SECONDS):
        found = await content.readline()  # raises ValueError for a very long one
    if not found.endswith(b"\n") or len(found) > most:
        raise ValueError("a line is too long, or ends early")
    return found


# --- the side of the trainer ------------------------------------------------------------------------------------------


class ServiceLink:
    """The connection of a trainer to its service.

    Args:
        url: ``https://HOST:PORT``; ``http`` for loopback only.
        key: the key for training.
        ca: a file with certificates to trust, PEM; by default those of the system.

    Raises:
        ServiceError: the address is not one of a service that is safe to use, or the file has no certificates.
    """

    def __init__(self, url: str, key: str, ca: Path | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._key, self.url = parts.hostname or "", parts.port, key, url
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ServiceError(f"{url}: is no address of a service: give https://HOST:PORT")
        if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise ServiceError(f"{url}: conversations would be sent unencrypted: give https://, or 127.0.0.1")
        try:
            self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        except (OSError, ssl.SSLError) as error:
            raise ServiceError(f"{ca}: has no certificates ({error}): give a PEM file") from error

    def config(self, settings: Sequence[str] = ()) -> ServiceConfig:
        """The configuration of the service, with ``settings`` of this machine: ``training.compute``, ``training.verl``,
        ``training.trainer``, or where the model is. Raises :class:`~clawgym.errors.ServiceError` for other settings."""
        for one in settings:
            if not one.startswith(("training.compute.", "training.model.path=", "training.trainer=", "training.verl.")):
                raise ServiceError(f"--set {one}: belongs to the service: give training.compute.KEY=VALUE")
        try:
            data = json.loads(self.call("GET", "config"))
            override_settings(data, settings)
        except ValueError as error:
            raise ServiceUnreachable(f"{self.url}: config: {error}: use the same version of clawgym") from error
        return checked_settings(ServiceConfig, data, self.url, "docs/how-to/serve.md")

    def call(
        self, method: str, path: str, body: bytes | Iterable[bytes] | None = None, *, into: Path | None = None
    ) -> bytes:
        """The body of an answer, or nothing if it went into the file ``into``. ``body``: bytes, or an iterable of them.

        Raises :class:`~clawgym.errors.ServiceError` for what the service refused (409), and else
        :class:`~clawgym.errors.ServiceUnreachable`."""
        made: http.client.HTTPConnection
        if self._tls is not None:
            made = http.client.HTTPSConnection(self._host, self._port, timeout=_SECONDS, context=self._tls)
        else:
            made = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        with contextlib.closing(made):
            try:
                headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
                made.request(method, f"/training/{path}", body, headers)
                answer = made.getresponse()
                if answer.status != 200:
                    kind = ServiceError if answer.status == 409 else ServiceUnreachable
                    raise kind(f"{self.url}: {path}: {_said(answer)}")
                if into is None:
                    found = answer.read(_LARGEST_ANSWER + 1)
                    if len(found) > _LARGEST_ANSWER:
                        raise ServiceUnreachable(f"{self.url}: {path}: the answer is too large: is this a service?")
                    return found
                with into.open("wb") as out:
                    shutil.copyfileobj(answer, out, _CHUNK)
                return b""
            except (OSError, http.client.HTTPException) as error:
                raise ServiceUnreachable(
                    f"{self.url}: does not answer ({error}): start the service with --train-elsewhere, and name its "
                    "certificate with --ca if the system does not trust it"
                ) from error


def _said(answer: http.client.HTTPResponse) -> str:
    try:
        return json.loads(answer.read(2**16))["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}: is this a service of the same version of clawgym?"


class RemotePool:
    """The part of the pool of a service that training needs (:class:`~clawgym.pool.states.TrainingPool`)."""

    def __init__(self, link: ServiceLink) -> None:
        self._link = link

    def _ask(self, method: str, **given: Any) -> Any:
        found = self._link.call("POST", f"pool/{method}", orjson.dumps(given))
        try:
            return _CALLS[method].validate_json(found)
        except ValidationError as error:
            raise ServiceUnreachable(f"{self._link.url}: {method}: {error}: use the same version of clawgym") from error

    def stats(self) -> dict[str, Any]:
        return self._ask("stats")

    def fetch(self, consumer: str, step: int, **about: Any) -> Batch | None:
        return self._ask("fetch", consumer=consumer, step=step, **about)

    def ack(self, consumer: str, step: int) -> None:
        self._ask("ack", consumer=consumer, step=step)

    def turns(self, id: str) -> tuple[Turn, ...]:
        return self._ask("turns", id=id)

    def about_turn_rewards(self, id: str) -> dict[str, dict[int, dict[str, Any]]]:
        return self._ask("about_turn_rewards", id=id)

    def image(self, sha256: str) -> Image:
        found = self._ask("image", sha256=sha256)
        return Image(sha256, base64.b64decode(found["data"]), found["media_type"])


class RemoteVersions(Versions):
    """The versions of a service, with a copy of their log in ``path``."""

    def __init__(self, path: Path, link: ServiceLink) -> None:
        self._link = link
        self._pulled = -_FRESH_SECONDS
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        super().__init__(path)

    def adapter_of(self, version: Version) -> Path | None:
        """See :meth:`Versions.adapter_of`. It is fetched if it is not here."""
        if version.adapter is None or version.adapter.is_dir():
            return version.adapter
        for old in self.path.iterdir():  # one is enough
            if old.is_dir():
                shutil.rmtree(old)
        part = Path(tempfile.mkdtemp(dir=self.path))
        try:
            for name in _FILES:
                self._link.call("GET", f"versions/{version.number}/{name}", into=part / name)
            part.rename(version.adapter)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return version.adapter

    def add(
        self,
        fill: Callable[[Path], object],
        *,
        parent: int,
        sessions: Collection[str],
        about: Mapping[str, Any] | None = None,
    ) -> Version:
        """Send a candidate to the service."""
        with tempfile.TemporaryDirectory(dir=self.path) as part:
            fill(Path(part))
            record = {"parent": parent, "sessions": sorted(sessions), "about": dict(about or {})}

            def pieces() -> Iterator[bytes]:
                yield json.dumps(record).encode() + b"\n"
                for name in _FILES:
                    file = Path(part, name)
                    yield b"%d\n" % file.stat().st_size
                    with file.open("rb") as held:
                        while piece := held.read(_CHUNK):
                            yield piece

            made = json.loads(self._link.call("POST", "versions", pieces()))
        self._pulled = -_FRESH_SECONDS
        return self[made["version"]]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        raise ServiceError(f"only the service changes its versions: run this command there ({self._link.url})")
        yield

    def _refresh(self) -> None:
        if time.monotonic() - self._pulled > _FRESH_SECONDS:
            log = self.path / LOG
            log.touch(mode=0o600)
            new = self._link.call("GET", f"versions?from={log.stat().st_size}")
            with log.open("ab") as out:
                out.write(new)
            self._pulled = time.monotonic()
        super()._refresh()
