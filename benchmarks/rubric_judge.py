"""What `clawgym eval` reports of a judge: its votes, how far they agree, and what they cost.

    python benchmarks/rubric_judge.py SET [TASK ...]

The judge is a script at a loopback address. It gives each criterion 0, 0.5 or 1, by its name and the task, and changes
every third of these scores in its last vote. A question of a task's own grader (``questions``) is one criterion. So the
votes differ, and the scores say nothing about the agent, ``noop``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from clawgym.tasks import load

VOTES = 3


def scores(system: str, user: str, vote: int) -> dict[str, float]:
    """The scripted scores of one vote."""
    rubrics = re.findall(r"^SCORES (.*)$", system, re.M)
    names = json.loads(rubrics[-1]) if rubrics else ["score"]
    task = re.sub(r"[0-9a-f]{16}", "", user)  # without the marks of fences, which differ
    found = {}
    for name in names:
        number = hashlib.sha256(f"{name} {task}".encode()).digest()[0]
        score = (0.0, 0.5, 1.0)[number % 3]
        found[name] = (score + 0.5) % 1.5 if vote == VOTES - 1 and number % 9 < 3 else score
    return found


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        user = str(request["messages"][-1]["content"])
        system = str(request["messages"][0]["content"]) if len(request["messages"]) > 1 else ""
        found = scores(system, user, int(request["seed"]))
        text = f"As scripted.\n\nSCORES {json.dumps(found)}"
        if "SCORES" not in system:
            text = json.dumps({**found, "reasoning": "as scripted"})
        words = len((system + user).split()), len(text.split())
        body = {
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"],
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}},
            ],
            "usage": {"prompt_tokens": words[0], "completion_tokens": words[1], "total_tokens": sum(words)},
        }  # fmt: skip
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


def main() -> None:
    name, *ids = sys.argv[1:]
    chosen = ids or [t.id for t in load(name).tasks if t.verifier.grader and not t.unsupported]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        "CLAWGYM_GRADER_MODEL": "scripted",
        "CLAWGYM_GRADER_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
        "CLAWGYM_GRADER_PRICES": "0.15,0.6",
        "CLAWGYM_USER_MODEL": "script",
    }
    with tempfile.TemporaryDirectory() as folder:
        argv = [str(Path(sys.executable).with_name("clawgym")), "eval", name, "--agent", "noop", "-o", f"{folder}/run"]
        argv += [word for task_id in chosen for word in ("--task", task_id)]
        subprocess.run(argv, env=env, check=True)
    server.shutdown()


if __name__ == "__main__":
    main()
