"""An in-memory server with the API of the Hugging Face Hub: repositories, LFS uploads, commits and downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

USER, TOKEN = "somebody", "hf_" + "local" * 6
_LARGE = (".safetensors", ".parquet", ".jsonl", ".tar.gz")
_PAGE = 40
"""Entries of one page of a listing."""


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of each commit."""
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path -> fields that the listing has in place of the true ones: a repository that lies."""

    def put(self, path: str, data: bytes, **listed: Any) -> None:
        """Add a file in a new commit."""
        self.files[path] = data
        if listed:
            self.listed[path] = listed
        self.commit(path)

    def commit(self, what: str) -> str:
        oid = hashlib.sha1(json.dumps([self.commits[-1], what, sorted(self.files)]).encode()).hexdigest()
        self.commits.append(oid)
        self.history[oid] = dict(self.files)
        return oid

    def at(self, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        """A commit and its files. None if there is none."""
        if revision in (None, "main"):
            return self.commits[-1], self.files
        return (str(revision), self.history[str(revision)]) if revision in self.history else None

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
        if path.endswith(_LARGE):
            digest = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
            found["oid"] = blob(digest.encode())
        return found | self.listed.get(path, {})


@dataclass
class Body:
    """An answer that is no JSON."""

    data: bytes
    headers: dict[str, str] = field(default_factory=dict)


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """``with Hub() as hub: ... hub.url``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        """Models by name, data sets by ``datasets/`` and the name."""
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        """Digests, in the order in which they came."""
        self.downloads: list[tuple[str, int]] = []
        """Path and first byte of each download, in the order in which they were asked for."""
        self.refuse: list[str] = []
        """Beginnings of ``METHOD path`` that are answered 400, once each."""
        self.cut: dict[str, int] = {}
        """Path -> bytes after which its download breaks off, once."""
        self.swap: dict[str, bytes] = {}
        """Path -> what is sent in place of the file."""
        self.store = ""
        """Address that downloads are redirected to."""
        self.token = TOKEN

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                found = urlsplit(self.path)
                status, body = hub.answer(
                    self.command, found.path, self.rfile.read(size), dict(self.headers.items()), parse_qs(found.query)
                )
                if isinstance(body, Body):
                    data, headers = body.data, body.headers
                else:
                    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
                    if isinstance(body, list) and status == 200:
                        data, headers = hub.page(self.path, body, found.query)
                self.send_response(status)
                for name, value in ({"content-length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
                if int(headers.get("content-length", len(data))) > len(data):
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_HEAD = answer

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self, path: str, entries: list[Any], query: str) -> tuple[bytes, dict[str, str]]:
        start = int(parse_qs(query).get("cursor", ["0"])[0])
        headers = {"content-type": "application/json"}
        if start + _PAGE < len(entries):
            following = path.partition("?")[0] + f"?cursor={start + _PAGE}"
            headers["link"] = f'<{self.url}{following}>; rel="next"'
        return json.dumps(entries[start : start + _PAGE]).encode(), headers

    def answer(
        self, method: str, path: str, body: bytes, headers: dict[str, str], query: dict[str, list[str]]
    ) -> tuple[int, Any]:
        path = unquote(path)
        given = {name.lower(): value for name, value in headers.items()}
        for start in self.refuse:
            if f"{method} {path}".startswith(start):
                self.refuse.remove(start)
                return 400, {"error": "refused by the test"}
        if path.startswith("/lfs/"):  # as storage does, by its own address
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            self.uploads.append(oid)
            return 200, {}
        if given.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "who are you?"}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._batch(o) for o in json.loads(body)["objects"]]}
        if match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[2], match[3], given)
        match = re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(tree|preupload|commit|settings|revision)(?:/([^/]+).*)?)?", path
        )
        name = f"{'datasets/' * (match[1] == 'datasets')}{match[2]}" if match else ""
        if not match or name not in self.repos:
            return 404, {"error": f"no {path}"}
        repo = self.repos[name]
        if match[3] == "preupload":
            return 200, {"files": [self._mode(repo, f["path"]) for f in json.loads(body)["files"]]}
        if match[3] == "commit":
            return 200, self._commit(name, repo, [json.loads(line) for line in body.splitlines()])
        if match[3] == "settings":
            repo.private = (
                json.loads(body)["visibility"] == "private" if b"visibility" in body else json.loads(body)["private"]
            )
            return 200, {"private": repo.private}
        found = repo.at(match[4])
        if found is None:
            return 404, {"error": f"no revision {match[4]}"}
        commit, files = found
        if match[3] == "tree":
            return 200, list(self._tree(repo, files))
        siblings = [{"rfilename": name} for name in files]
        return 200, {"id": match[2], "sha": commit, "private": repo.private, "siblings": siblings}

    def _tree(self, repo: Repo, files: dict[str, bytes]) -> Iterator[dict[str, Any]]:
        folders = sorted({path.rpartition("/")[0] for path in files} - {""})
        yield from ({"type": "directory", "path": path, "oid": blob(path.encode())} for path in folders)
        yield from (repo.entry(path, data) for path, data in files.items())

    def _resolve(self, name: str, revision: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        found = self.repos[name].at(revision) if name in self.repos else None
        if found is None or path not in found[1]:
            return 404, {"error": f"no {path}"}
        if self.store:
            address = f"{self.store}/{name}/resolve/{revision}/{path}"
            return 302, Body(b"", {"location": address, "content-length": "0"})
        data = self.swap.get(path, found[1][path])
        first = int(re.sub(r"\D", "", headers.get("range", "").partition("-")[0]) or 0)
        self.downloads.append((path, first))
        part = data[first:]
        about = {"content-length": str(len(part)), "x-repo-commit": found[0], "etag": '"x"'}
        if path in self.cut:
            part = part[: self.cut.pop(path)]
        if "range" in headers:
            about["content-range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        return 206 if "range" in headers else 200, Body(part, about)

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        prefix = "datasets/" if asked.get("type") == "dataset" else ""
        made = {"url": f"{self.url}/{prefix}{name}", "name": name}
        if prefix + name in self.repos:
            return 409, {"error": "You already created this repo", **made}
        self.repos[prefix + name] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        return 200, made

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.objects:
            return asked
        return {**asked, "actions": {"upload": {"href": f"{self.url}/lfs/{asked['oid']}", "header": {}}}}

    def _mode(self, repo: Repo, path: str) -> dict[str, Any]:
        large = path.endswith(_LARGE)
        found = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        data = repo.files.get(path)
        return found if data is None else {**found, "oid": hashlib.sha256(data).hexdigest() if large else blob(data)}

    def _commit(self, name: str, repo: Repo, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del repo.files[value["path"]]
        oid = repo.commit(json.dumps(lines))
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}", "hookOutput": ""}
