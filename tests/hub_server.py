"""An in-memory server with the API of the Hugging Face Hub: repositories, LFS uploads and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit

USER, TOKEN = "somebody", "hf_" + "local" * 6


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])
    lfs: set[str] = field(default_factory=set)


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """``with Hub() as hub: ... hub.url``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        """Digests, in the order in which they came."""
        self.refuse: list[str] = []
        """Beginnings of ``METHOD path`` that are answered 400, once each."""

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                status, body = hub.answer(
                    self.command, urlsplit(self.path).path, self.rfile.read(size), self.headers.get("authorization")
                )
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

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

    def answer(self, method: str, path: str, body: bytes, authorization: str | None) -> tuple[int, Any]:
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
        if authorization != f"Bearer {TOKEN}":
            return 401, {"error": "who are you?"}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._batch(o) for o in json.loads(body)["objects"]]}
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(tree|preupload|commit|settings|revision)(?:/.*)?)?", path)
        if not match or match[1] not in self.repos:
            return 404, {"error": f"no {path}"}
        repo = self.repos[match[1]]
        if match[2] == "tree":
            return 200, [
                {"type": "file", "path": name, "size": len(data), "oid": blob(data)}
                for name, data in repo.files.items()
            ]
        if match[2] == "preupload":
            return 200, {"files": [self._mode(repo, f["path"]) for f in json.loads(body)["files"]]}
        if match[2] == "commit":
            return 200, self._commit(match[1], repo, [json.loads(line) for line in body.splitlines()])
        if match[2] == "settings":
            repo.private = (
                json.loads(body)["visibility"] == "private" if b"visibility" in body else json.loads(body)["private"]
            )
            return 200, {"private": repo.private}
        siblings = [{"rfilename": name} for name in repo.files]
        return 200, {"id": match[1], "sha": repo.commits[-1], "private": repo.private, "siblings": siblings}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        made = {"url": f"{self.url}/{name}", "name": name}
        if name in self.repos:
            return 409, {"error": "You already created this model repo", **made}
        self.repos[name] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        return 200, made

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.objects:
            return asked
        return {**asked, "actions": {"upload": {"href": f"{self.url}/lfs/{asked['oid']}", "header": {}}}}

    def _mode(self, repo: Repo, path: str) -> dict[str, Any]:
        large = path.endswith(".safetensors")
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
        repo.commits.append(hashlib.sha1(json.dumps([repo.commits[-1], lines]).encode()).hexdigest())
        oid = repo.commits[-1]
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}", "hookOutput": ""}
