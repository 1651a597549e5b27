"""Many agents in one real OpenClaw: right rewards, exact tokens, tools in each task's own box, ends told apart."""

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
from .dense_desk import Cast, Desk, copy_task, dense_desk, results
from .desk import call

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("openclaw"),
    pytest.mark.timeout(300),
]

WORK = "/root/.openclaw/workspace"
SOLVE = call("exec", command="cp in.txt out.txt; ls -A")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes():
    async with usable("namespace") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(model_folder, boxes, tmp_path_factory) -> AsyncIterator[Desk]:
    async with dense_desk(model_folder, tmp_path_factory.mktemp("pool") / "pool.db") as made:
        yield made


async def play(desk: Desk, boxes, scripts, seconds: float = 120.0) -> dict[str, Episode]:
    """All tasks of ``scripts`` at once."""
    desk.cast.scripts |= scripts
    running = (episode_of(copy_task(name, seconds), desk.agent, boxes, seed=3) for name in scripts)
    return dict(zip(scripts, await asyncio.gather(*running), strict=True))


def node_processes() -> int:
    mine = psutil.Process().children(recursive=True)
    return sum(process.name() in ("node", "openclaw", "openclaw-gateway") for process in mine)


async def test_tasks_at_once_are_worked_on_each_in_its_own_box(desk, boxes):
    names = [f"copy-{n}" for n in range(6)]
    episodes = await play(
        desk,
        boxes,
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
    seen = {(s.prompt, tuple(s.sampled), tuple(s.logprobs)) for s in desk.engine.seen}
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
        assert all(desk.cast.agents[name] in path for path in episode.files)
        transcripts = b"".join(episode.files.values()).decode()
        assert not any(f"input of {other}" in transcripts for other in names if other != name)


async def test_nothing_of_an_ended_task_is_left_in_the_shared_process(desk, boxes):
    episodes = await play(desk, boxes, {"gone": [SOLVE, "Done."]})
    assert episodes["gone"].outcome is Outcome.SOLVED
    agent = desk.cast.agents["gone"]
    left = await desk.office.exec(
        ["sh", "-c", f"ls /root/.openclaw/agents; grep -rl 'input of gone' /root /tmp; ls -A {WORK}"]
    )
    assert agent not in left.text
    assert "/root" not in left.text
    assert left.text.count("in.txt") == 0
    assert not desk.process.tools._hands


async def test_the_prompt_says_little_of_it(desk, boxes):
    (episode,) = (await play(desk, boxes, {"prompt": [SOLVE, "Done."]})).values()
    system = next(step.message for step in episode.steps if step.source == "system")
    assert f"Your working directory is: {WORK}" in system
    assert "sandboxed runtime" in system
    assert len(re.findall("[Ss]andbox", system)) < 10
    assert desk.agent.identity()["mode"] == "dense"


async def test_output_comes_while_a_command_runs_and_ends_with_who_waits(desk, boxes):
    mark = "sleep 1234.5"
    episodes = await play(
        desk,
        boxes,
        {
            "wait": [
                call("exec", command=f"echo started; {mark}; echo never", background=True),
                call("exec", command="sleep 0.5; pgrep -f '^sleep 1234' | wc -l"),
                lambda cast: call("process", action="log", sessionId=cast.session("wait")),
                lambda cast: call("process", action="kill", sessionId=cast.session("wait")),
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


async def test_files_are_those_of_the_box(desk, boxes):
    episodes = await play(
        desk,
        boxes,
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


async def test_a_box_that_dies_is_its_own_tasks_failure(desk, boxes):
    deaths: list[asyncio.Future[None]] = []

    def die(cast: Cast) -> str:
        box = desk.process.tools._hands[cast.agents["dies"]].box
        deaths.append(asyncio.ensure_future(kill_from_outside(box)))
        return call("exec", command="sleep 20")

    episodes = await play(
        desk, boxes, {"dies": [die, "Done."], "lives": [call("exec", command="sleep 1"), SOLVE, "Done."]}
    )
    await asyncio.gather(*deaths)
    assert (episodes["dies"].outcome, episodes["dies"].cause) == (Outcome.FAILED, "died")
    assert episodes["lives"].outcome is Outcome.SOLVED


async def test_the_end_of_the_shared_process_is_ours(model_folder, boxes, tmp_path):
    async with dense_desk(model_folder, tmp_path / "pool.db") as desk:

        def die(cast: Cast) -> str:
            deaths.append(asyncio.ensure_future(kill_from_outside(desk.office)))
            return call("exec", command="sleep 20")

        deaths: list[asyncio.Future[None]] = []
        episodes = await play(
            desk, boxes, {"kills": [die, "Done."], "beside": [call("exec", command="sleep 20"), "Done."]}
        )
        await asyncio.gather(*deaths)
        for episode in episodes.values():
            assert episode.outcome is Outcome.INFRA
            assert "shared OpenClaw" in episode.error
        again = await play(desk, boxes, {"again": [SOLVE, "Done."]})
        assert again["again"].outcome is Outcome.SOLVED


async def test_time_ends_a_task_and_its_commands_alone(desk, boxes):
    episodes = await play(
        desk, boxes, {"slow": [call("exec", command="cp in.txt out.txt; sleep 60"), "Done."]}, seconds=8
    )
    assert (episodes["slow"].outcome, episodes["slow"].cause) == (Outcome.SOLVED, None)
    assert (await play(desk, boxes, {"after": [SOLVE, "Done."]}))["after"].outcome is Outcome.SOLVED


async def test_boxes_without_a_loopback_are_refused(desk, boxes):
    chroot = make_backend("chroot")
    try:
        try:
            await chroot.probe()
        except SandboxUnavailable as error:
            pytest.skip(f"chroot: {error}")
        with pytest.raises(SandboxUnavailable, match="dense mode needs boxes with a loopback"):
            await desk.claw.take(chroot, SandboxSpec(), desk.agent._gateway)
    finally:
        await chroot.aclose()
    assert json.dumps(desk.claw.identity())
