"""Runs inside a sandbox: sends raw requests to the server that it can reach, and prints the responses.

stdin: JSON ``{"where": port or path, "requests": {name: latin-1 text}, "elsewhere": [[host, port] or path, ...]}``.
stdout: JSON ``{"answers": {name: [statuses]}, "bodies": {name: text}, "reached": [...]}``. Standard library only.
"""

import json
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor


def connect(where, seconds=10.0):
    if isinstance(where, str):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(seconds)
        peer.connect(where)
        return peer
    host, port = where if isinstance(where, list) else ("127.0.0.1", where)
    return socket.create_connection((host, port), seconds)


def send(where, raw):
    got = b""
    try:
        peer = connect(where)
        try:
            peer.sendall(raw)
        except OSError:
            pass  # refused before it was sent: the response can still be read
        peer.settimeout(20.0)
        while data := peer.recv(65536):
            got += data
    except OSError:
        pass
    return got


def idle(where, count):
    """Open ``count`` connections that start a request and never end it; return those that stay open."""
    held = []
    for _ in range(count):
        try:
            peer = connect(where, 2.0)
            peer.sendall(b"POST /s/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
            held.append(peer)
        except OSError:
            break
    return held


def reaches(where):
    try:
        connect(where, 2.0).close()
        return True
    except OSError:
        return False


asked = json.load(sys.stdin)
held = idle(asked["where"], asked.get("idle", 0))
requests = {name: text.encode("latin-1") for name, text in asked["requests"].items()}
for name, (head, size) in asked.get("large", {}).items():
    requests[name] = head.encode("latin-1") + b"x" * size
with ThreadPoolExecutor(8) as threads:
    answers = dict(zip(requests, threads.map(lambda raw: send(asked["where"], raw), requests.values()), strict=True))
time.sleep(asked.get("rest", 0))
print(
    json.dumps(
        {
            "answers": {n: [int(s) for s in re.findall(rb"HTTP/1\.[01] (\d{3}) ", a)] for n, a in answers.items()},
            "bodies": {n: a.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")[:4000] for n, a in answers.items()},
            "reached": [where for where in asked.get("elsewhere", []) if reaches(where)],
            "held": len(held),
        }
    )
)
