"""openclaw-dense with the real OpenClaw: rewards, exact tokens, tools in each task's own sandbox, failures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from clawgym.errors import SandboxUnavailable
from clawgym.pool import sequences_of
from clawgym.records import Episode, Outcome, prompt_ids
from clawgym.sandbox import SandboxSpec
from clawgym.sandbox import backend as make_backend

from ...conftest import usable
from ...rollouts import episode_of
from ..conftest import kill_from_outside
from .scripted_dense import DenseSetup, TaskScripts, copy_task, results, scripted_dense
from .scripted_openclaw import call

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("openclaw"),
    pytest.mark.timeout(300),
]

WORK = "/root/.openclaw/workspace"
SOLVE = call("exec", command="cp in.txt out.txt; ls -A")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes():
    async with usable("namespace") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dense(model_folder, sandboxes, tmp_path_factory) -> AsyncIterator[DenseSetup]:
    async with scripted_dense(model_folder, tmp_path_factory.mktemp("pool") / "pool.db") as made:
        yield made


async def run_tasks(dense: DenseSetup, sandboxes, scripts, seconds: float = 120.0) -> dict[str, Episode]:
    """Run all tasks of ``scripts`` concurrently."""
    dense.scripts.scripts |= scripts
    running = (episode_of(copy_task(name, seconds), dense.agent, sandboxes, seed=3) for name in scripts)
    return dict(zip(scripts, await asyncio.gather(*running), strict=True))


def node_processes() -> int:
    mine = psutil.Process().children(recursive=True)
    return sum(process.name() in ("node", "openclaw", "openclaw-gateway") for process in mine)


async def test_concurrent_tasks_use_own_sandboxes(dense, sandboxes):
    names = [f"copy-{n}" for n in range(6)]
    episodes = await run_tasks(
        dense,
        sandboxes,
        {
            name: [
                "I look." + call("exec", command="pwd; ls -A; hostname; id -u"),
                call("read", path="in.txt"),
                call("write", path="notes/mine.md", content=f"é of {name}\n"),
                call("edit", path="notes/mine.md", edits=[{"oldText": name, "newText": name.upper()}]),
                call("exec", command="cat mine.md; cp ../in.txt ../out.txt", workdir=f"{WORK}/notes"),
                f"{name} is done.",
            ]
            for name in names
        },
    )
    assert node_processes() == 1
    seen = {(s.prompt, tuple(s.sampled), tuple(s.logprobs)) for s in dense.engine.seen}
    for name, episode in episodes.items():
        assert episode.outcome is Outcome.SOLVED
        looked, read, _, _, shown = results(episode)
        assert looked.split() == [WORK, "in.txt", "box", "0"]
        assert read.strip() == f"the input of {name}"
        assert shown.strip() == f"é of {name.upper()}"
        assert episode.final_message.endswith(f"{name} is done.")
        assert episode.turns
        for n, turn in enumerate(episode.turns):
            assert turn.flaw is None
            assert (prompt_ids(episode.turns, n), turn.sampled_ids, turn.logprobs) in seen
        assert len(sequences_of(episode.turns)) == 1
        assert episode.files
        assert all(dense.scripts.agents[name] in path for path in episode.files)
        transcripts = b"".join(episode.files.values()).decode()
        assert not any(f"input of {other}" in transcripts for other in names if other != name)


async def test_ended_task_leaves_nothing_in_shared_process(dense, sandboxes):
    episodes = await run_tasks(dense, sandboxes, {"gone": [SOLVE, "Done."]})
    assert episodes["gone"].outcome is Outcome.SOLVED
    agent = dense.scripts.agents["gone"]
    left = await dense.shared_sandbox.exec(
        ["sh", "-c", f"ls /root/.openclaw/agents; grep -rl 'input of gone' /root /tmp; ls -A {WORK}"]
    )
    assert agent not in left.text
    assert "/root" not in left.text
    assert left.text.count("in.txt") == 0
    assert not dense.process.tools._agents


async def test_prompt_differs_little_from_openclaw(dense, sandboxes):
    (episode,) = (await run_tasks(dense, sandboxes, {"prompt": [SOLVE, "Done."]})).values()
    system = next(step.message for step in episode.steps if step.source == "system")
    assert f"Your working directory is: {WORK}" in system
    assert "sandboxed runtime" in system
    assert len(re.findall("[Ss]andbox", system)) < 10
    assert dense.agent.identity()["mode"] == "dense"


async def test_command_output_streams_and_command_ends_when_reader_leaves(dense, sandboxes):
    mark = "sleep 1234.5"
    episodes = await run_tasks(
        dense,
        sandboxes,
        {
            "wait": [
                call("exec", command=f"echo started; {mark}; echo never", background=True),
                call("exec", command="sleep 0.5; pgrep -f '^sleep 1234' | wc -l"),
                lambda scripts: call("process", action="log", sessionId=scripts.session("wait")),
                lambda scripts: call("process", action="kill", sessionId=scripts.session("wait")),
                call("exec", command="sleep 0.5; pgrep -f '^sleep 1234' | wc -l"),
                call("exec", command="yes | head -c 3000; sleep 50", timeout=2),
                call("exec", command="(sleep 100; echo late) & echo early; echo wrong >&2; exit 7"),
                call("exec", command="pgrep -f '^sleep 100' | wc -l; echo to-stdout > /dev/stdout; cp in.txt out.txt"),
                "Done.",
            ]
        },
    )
    said = results(episodes["wait"])
    assert "Command still running" in said[0]
    assert said[1].strip() == "1"
    assert "started" in said[2]
    assert "never" not in said[2]
    assert said[4].strip() == "0"
    assert "timed out after 2 seconds" in said[5]
    assert said[6].split()[:2] == ["early", "wrong"]
    assert "code 7" in said[6]
    assert said[7].split() == ["1", "to-stdout"]
    assert episodes["wait"].outcome is Outcome.SOLVED


async def test_file_tools_use_task_sandbox(dense, sandboxes):
    episodes = await run_tasks(
        dense,
        sandboxes,
        {
            "files": [
                call(
                    "exec",
                    command="ln -s /etc/hostname link; mkdir d; chmod 755 in.txt; head -c 17000000 /dev/zero > big",
                ),
                call("read", path="link"),
                call("read", path="/etc/hostname"),
                call("read", path="~/.bashrc"),
                call("read", path="d"),
                call("read", path="nowhere"),
                call("read", path="big"),
                call("write", path="/tmp/deep/er/x;$(id)'.txt", content="kept\n"),
                call("write", path="/proc/1/x", content="refused"),
                call("exec", command='cat "/tmp/deep/er/x;\\$(id)\'.txt"; stat -c %a in.txt; cp in.txt out.txt'),
                call("read", path="/opt/openclaw/node_modules/openclaw/package.json", limit=3),
                "Done.",
            ]
        },
    )
    said = results(episodes["files"])
    assert said[1].strip() == said[2].strip() == "box"
    assert "ENOENT" in said[3] or said[3] == ""
    assert "directory" in said[4].lower()
    assert "nowhere" in said[5]
    assert "larger" in said[6] or "too" in said[6]
    assert "Successfully" in said[7]
    assert "Successfully" not in said[8]
    assert said[9].split() == ["kept", "755"]
    assert '"name": "openclaw"' in said[10]
    assert episodes["files"].outcome is Outcome.SOLVED


async def test_sandbox_death_fails_only_its_task(dense, sandboxes):
    deaths: list[asyncio.Future[None]] = []

    def die(scripts: TaskScripts) -> str:
        sandbox = dense.process.tools._agents[scripts.agents["dies"]].sandbox
        deaths.append(asyncio.ensure_future(kill_from_outside(sandbox)))
        return call("exec", command="sleep 20")

    episodes = await run_tasks(
        dense, sandboxes, {"dies": [die, "Done."], "lives": [call("exec", command="sleep 1"), SOLVE, "Done."]}
    )
    await asyncio.gather(*deaths)
    assert (episodes["dies"].outcome, episodes["dies"].cause) == (Outcome.FAILED, "died")
    assert episodes["lives"].outcome is Outcome.SOLVED


async def test_end_of_shared_process_is_infra(model_folder, sandboxes, tmp_path):
    async with scripted_dense(model_folder, tmp_path / "pool.db") as dense:

        def die(scripts: TaskScripts) -> str:
            deaths.append(asyncio.ensure_future(kill_from_outside(dense.shared_sandbox)))
            return call("exec", command="sleep 20")

        deaths: list[asyncio.Future[None]] = []
        episodes = await run_tasks(
            dense, sandboxes, {"kills": [die, "Done."], "beside": [call("exec", command="sleep 20"), "Done."]}
        )
        await asyncio.gather(*deaths)
        for episode in episodes.values():
            assert episode.outcome is Outcome.INFRA
            assert "shared OpenClaw" in episode.error
        again = await run_tasks(dense, sandboxes, {"again": [SOLVE, "Done."]})
        assert again["again"].outcome is Outcome.SOLVED


async def test_time_limit_ends_only_its_task(dense, sandboxes):
    episodes = await run_tasks(
        dense, sandboxes, {"slow": [call("exec", command="cp in.txt out.txt; sleep 60"), "Done."]}, seconds=8
    )
    assert (episodes["slow"].outcome, episodes["slow"].cause) == (Outcome.SOLVED, None)
    assert (await run_tasks(dense, sandboxes, {"after": [SOLVE, "Done."]}))["after"].outcome is Outcome.SOLVED


async def test_sandboxes_without_loopback_are_refused(dense, sandboxes):
    chroot = make_backend("chroot")
    try:
        try:
            await chroot.probe()
        except SandboxUnavailable as error:
            pytest.skip(f"chroot: {error}")
        with pytest.raises(SandboxUnavailable, match="openclaw-dense needs sandboxes with a loopback"):
            await dense.claw.take(chroot, SandboxSpec(), dense.agent._gateway)
    finally:
        await chroot.aclose()
    assert json.dumps(dense.claw.identity())
