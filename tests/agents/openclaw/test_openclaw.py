"""The real OpenClaw as an agent: conversations, failures, spare sandboxes, custom images, run folders."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from clawgym.agents.openclaw.claw import OpenClaw
from clawgym.agents.openclaw.image import add_image
from clawgym.agents.programs.install import Installation
from clawgym.errors import AgentError
from clawgym.gateway.request import SessionRequest
from clawgym.pool import sequences_of
from clawgym.records import Episode, Limits, Outcome, Task, TaskFile, VerifierSpec
from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend

from ...gateway.scripted import refused
from ...rollouts import episode_of
from ...sandbox.images.make import layer
from .images import small_system
from .scripted_openclaw import call, scripted_openclaw

CHECK = b'test "$(cat /root/.openclaw/workspace/out.txt)" = 42 && echo 1.0 || echo 0.0\n'
SOLVE = ["I look." + call("read", path="in.txt"), call("write", path="out.txt", content="42\n"), "Done."]


def make_task(name: str, **changes: object) -> Task:
    verifier = VerifierSpec("reward_sh", (TaskFile("reward.sh", CHECK),))
    inputs = (TaskFile("in.txt", b"6 * 7\n"),)
    task = Task(name, f"Task {name}: write the answer of in.txt into out.txt.", verifier, inputs)
    return dataclasses.replace(task, **changes)  # type: ignore[arg-type]


pytestmark = pytest.mark.usefixtures("openclaw")


async def test_follow_ups_continue_conversation(backend: Backend, model_folder: Path, tmp_path: Path) -> None:
    task = make_task("again")
    script = [*SOLVE, call("exec", command="cat out.txt"), "Checked."]
    dense = scripted_openclaw(
        model_folder, tmp_path / "p.db", {task.instruction: script}, prompt="slim", follow_ups=["Check it."]
    )
    async with dense as (agent, engine, pool):
        group = pool.open_group(size=1, task_id=task.id)
        episode = await episode_of(task, agent, backend, seed=3, session=SessionRequest(group=group))
        assert (episode.outcome, episode.final_message) == (Outcome.SOLVED, "Checked.")
        assert [step.message for step in episode.steps if step.source == "user"] == [task.instruction, "Check it."]
        (sample,) = sequences_of(episode.turns)
        assert sample.turns == (0, 1, 2, 3, 4)
        assert sample.ids[: len(engine.seen[-1].prompt)] == engine.seen[-1].prompt
        batch = pool.fetch("t", step=0, min_episodes=1)
        assert batch is not None
        assert batch.groups[0].episodes[0].episode.reward == 1.0
    results = [o.content for step in episode.steps for o in step.observations]
    assert any("6 * 7" in result for result in results)
    assert all(seen.sampling.seed == 3 for seen in engine.seen)


def hidden(episode: Episode) -> tuple[Outcome, str | None]:
    return episode.outcome, episode.cause


async def test_failures_hidden_by_openclaw_are_recorded(backend: Backend, model_folder: Path, tmp_path: Path) -> None:
    """OpenClaw answers 200 to all of these; the files are right in all of them."""
    wrote = SOLVE[:2]
    scripts = {
        "dead": [*wrote, refused(500)],
        "wrong": [*wrote, refused(422)],
        "steps": [*wrote, *[call("exec", command="true")] * 9],
        "endless": [call("exec", command="sleep 60")],
    }
    limits = {"steps": Limits(max_steps=5), "endless": Limits(agent_seconds=6)}
    tasks = {name: make_task(name, limits=limits.get(name, Limits())) for name in scripts}
    said = {tasks[name].instruction: lines for name, lines in scripts.items()}
    async with scripted_openclaw(model_folder, tmp_path / "p.db", said, prompt="slim") as (agent, _, pool):
        works = [episode_of(task, agent, backend) for task in tasks.values()]
        ended = dict(zip(tasks, await asyncio.gather(*works), strict=True))
        states = {e.task_id: (e.state, e.outcome) for e in pool.episodes()}
    assert hidden(ended["dead"])[0] is Outcome.INFRA
    assert "endpoint returned 500" in ended["dead"].error
    assert hidden(ended["wrong"]) == (Outcome.FAILED, "model-422")
    assert len(ended["steps"].turns) == 5
    assert ended["steps"].outcome is Outcome.SOLVED  # cut off, but the work is complete
    assert hidden(ended["endless"]) == (Outcome.TRUNCATED, "time")
    assert states == {name: ("closed", str(episode.outcome)) for name, episode in ended.items()}


async def test_sandbox_serves_one_episode(backend: Backend, model_folder: Path, tmp_path: Path) -> None:
    task = make_task("spare")
    script = [call("exec", command="ls -a /root /tmp; echo mark > /root/mark"), *SOLVE]
    async with scripted_openclaw(model_folder, tmp_path / "p.db", {task.instruction: script}, spare=1) as (
        agent,
        _,
        pool,
    ):
        first, second = [await episode_of(task, agent, backend, seed=n, sample=n) for n in range(2)]
        async with asyncio.timeout(120):  # the spare started with the second and takes seconds
            while not agent.sandboxes.ready:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        third = await episode_of(task, agent, backend, seed=2, sample=2)
        assert agent.sandboxes.hits == 1  # type: ignore[attr-defined]
        assert {e.outcome for e in pool.episodes()} == {"solved"}
    seen = [next(o.content for s in e.steps for o in s.observations) for e in (first, second, third)]
    assert not any("mark" in text for text in seen)
    sessions = [name for e in (first, second, third) for name in e.files if name.endswith(".jsonl")]
    assert len(sessions) == 3


async def test_openclaw_of_custom_image(
    backend: Backend, model_folder: Path, tmp_path: Path, openclaw: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    rootfs = tmp_path / "rootfs"
    with tarfile.open(fileobj=io.BytesIO(layer(*small_system()))) as tar:
        tar.extractall(rootfs, filter="tar")
    for name in ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "libatomic.so.1"):
        for found in Path("/usr/lib").glob(f"*-linux-gnu/{name}"):
            target = rootfs / found.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, target)
    (rootfs / "opt").mkdir(exist_ok=True)
    subprocess.run(["cp", "-a", "--reflink=auto", openclaw.folder, rootfs / "opt/openclaw"], check=True)
    monkeypatch.setenv("OPENCLAW_ROOTFS", str(rootfs))
    task = make_task("image")
    async with scripted_openclaw(model_folder, tmp_path / "p.db", {task.instruction: SOLVE}, prompt="slim") as (
        agent,
        _,
        _,
    ):
        assert agent.identity()["image"] == str(rootfs)
        assert agent.version == openclaw.version
        episode = await episode_of(task, agent, backend)
    assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
    subprocess.run(["tar", "cf", tmp_path / "image.tar", "-C", rootfs, "."], check=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert add_image(str(tmp_path / "image.tar"), "own/openclaw").version == openclaw.version
    own = make_backend("namespace")
    async with scripted_openclaw(
        model_folder, tmp_path / "q.db", {task.instruction: SOLVE}, prompt="slim", image="own/openclaw"
    ) as (agent, _, _):
        episode = await episode_of(task, agent, own)
    await own.aclose()
    assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
    with pytest.raises(AgentError, match=r"determines the version of OpenClaw: leave out version='2026"):
        OpenClaw("2026.4.1")
    monkeypatch.setenv("OPENCLAW_ROOTFS", str(tmp_path))
    with pytest.raises(AgentError, match="lacks sh"):
        OpenClaw()


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        function = {"name": "exec", "arguments": '{"command": "ls"}'}
        call = {"index": 0, "id": "a", "type": "function", "function": function}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "OK"}
            answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        delta = {"tool_calls": [call]} if turn == 0 else {"content": "I give up."}
        reason = "tool_calls" if turn == 0 else "stop"
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
                  {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
                  {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_eval_writes_run_folder_of_openclaw(tmp_path: Path, openclaw: Installation) -> None:
    env = {**os.environ, "OPENAI_API_KEY": "none", "COLUMNS": "100"}
    clawgym = [sys.executable, "-c", "from clawgym.cli import main; main()"]
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
            argv = ["eval", "terminal-basic", "--limit", "2", "--agent", "openclaw", "--agent-option", "prompt=slim"]
            argv += ["--model", "m", "--base-url", url, "--out", "run"]
            done = subprocess.run([*clawgym, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
        finally:
            server.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "run/receipt.json").read_text())
    assert (manifest["agent"]["name"], manifest["agent"]["version"]) == ("openclaw", "2026.4.1")
    assert manifest["agent"]["sha256"] == openclaw.digest
    rows = [json.loads(line) for line in (tmp_path / "run/results.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["failed", "failed"]
    assert {row["tool_calls"] for row in rows} == {1}
    assert {row["usage"]["completion_tokens"] for row in rows} == {10}
    for folder in (tmp_path / "run/episodes").iterdir():
        with tarfile.open(folder / "agent.tar.gz") as packed:
            assert any(name.endswith(".jsonl") for name in packed.getnames())
    verified = subprocess.run(
        [*clawgym, "runs", "verify", "run"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
