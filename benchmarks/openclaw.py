"""What the real OpenClaw costs here, beside the published trainer's way to run it, in one run.

    python benchmarks/openclaw.py [--latency 1.0] [--at-once 16] [--alive 64] [--parts cost reset alive]

Both run the same OpenClaw in the same boxes, with a model of ours that answers after ``--latency`` seconds; an episode
is five model calls (four tools). ``reference`` has the published trainer's configuration and environment (but for mDNS,
which no box lets out), and boots when an episode asks. ``ours`` has this library's, and spare boxes that have booted
before. CPU is the busy time of the machine (/proc/stat), in seconds of one core, so: quiet machine, nothing else
running. Memory is PSS of Node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import psutil

from clawgym.agents.blackbox import BlackBoxAgent, ModelLink
from clawgym.agents.blackbox.sandboxes import WarmSandboxes
from clawgym.agents.openclaw.claw import FOLDER, PORT, OpenClaw
from clawgym.agents.protocol import AgentContext
from clawgym.engines.protocol import CallDelta, Delta
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Limits, Outcome, Task, TaskFile, Usage, VerifierSpec
from clawgym.rollout import Attempt, EpisodeRequest, run_episode
from clawgym.sandbox import Backend, SandboxSpec, backend

CALLS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("exec", {"command": "ls -la"}),
    ("read", {"path": "in.txt"}),
    ("write", {"path": "out.txt", "content": "42\n"}),
    ("exec", {"command": "cat out.txt"}),
)
CHECK = b'test "$(cat /root/.openclaw/workspace/out.txt)" = 42 && echo 1.0 || echo 0.0\n'
TASK = Task(
    id="write-42",
    instruction="Write the answer of in.txt into out.txt.",
    verifier=VerifierSpec("reward_sh", (TaskFile("reward.sh", CHECK),)),
    inputs=(TaskFile("in.txt", b"6 * 7\n"),),
    limits=Limits(agent_seconds=600),
)


PARTS = ("cost", "reset", "alive")


class Model:
    """A text engine that makes the :data:`CALLS`, one an answer, and is asked no sooner than it can be."""

    name = "scripted"
    context_window = 128_000

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.asked: list[float] = []

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        self.asked.append(time.perf_counter())
        await asyncio.sleep(self.latency)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if turn < len(CALLS):
            name, arguments = CALLS[turn]
            text = ", ".join(f'"{key}": {value!r}' for key, value in arguments.items()).replace("'", '"')
            yield Delta(calls=(CallDelta(0, f"call{turn}", name, "{" + text + "}"),))
        else:
            yield Delta(text="It is done.")
        yield Delta(finish_reason="tool_calls" if turn < len(CALLS) else "stop", usage=Usage(1, 1))

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    async def aclose(self) -> None: ...


class ReferenceOpenClaw(OpenClaw):
    """As the published trainer configures and starts it."""

    def config(self, link: ModelLink, token: str, workspace: str, seconds: float) -> dict[str, Any]:
        config = super().config(link, token, workspace, seconds)
        config["gateway"]["tailscale"]["resetOnExit"] = False
        del config["gateway"]["controlUi"]
        nodes = ["camera.snap", "camera.clip", "screen.record", "contacts.add", "calendar.add", "reminders.add"]
        config["gateway"]["nodes"] = {"denyCommands": [*nodes, "sms.send"]}
        config["agents"]["defaults"] |= {"heartbeat": {"every": "3680000m"}, "timeoutSeconds": 1000}
        config["commands"] = {"native": "auto", "nativeSkills": "auto", "restart": True, "ownerDisplay": "raw"}
        config["session"] = {"dmScope": "per-channel-peer"}
        for name in ("plugins", "cron", "update", "hooks", "browser"):
            del config[name]
        return config

    def argv(self, link: ModelLink) -> list[str]:
        entry = f"{FOLDER}/node_modules/openclaw/openclaw.mjs"
        return [f"{FOLDER}/node/bin/node", entry, "gateway", "--bind", "loopback", "--port", str(PORT)]

    def env(self) -> dict[str, str]:
        return {
            "HOME": "/root",
            "TMPDIR": "/tmp",
            "OPENCLAW_DISABLE_BONJOUR": "1",
            "PATH": f"{FOLDER}/node/bin:/usr/local/bin:/usr/bin:/bin",
        }


def cpu() -> float:
    """Seconds that the machine's processors have worked since it was started: what was killed counts too."""
    with open("/proc/stat") as file:
        fields = [int(x) for x in file.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4] - fields[7]) / os.sysconf("SC_CLK_TCK")


def pss() -> float:
    """MiB of everything that Node runs in."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if os.path.basename(os.readlink(f"/proc/{process.pid}/exe")) == "node":
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += int(text.partition("Pss:")[2].split()[0])
    return total / 1024


def available() -> float:
    """GiB that the machine has left."""
    return psutil.virtual_memory().available / 2**30


def line(what: str, *values: str) -> None:
    print(f"{what:50}" + "".join(f"{value:>16}" for value in values), flush=True)


class Bench:
    """One configuration, with its own gateway and pool."""

    def __init__(self, claw: OpenClaw, sandboxes: Backend, latency: float) -> None:
        self.claw = claw
        self.backend = sandboxes
        self.model = Model(latency)

    @contextlib.asynccontextmanager
    async def agent(self, spare: int = 0) -> AsyncIterator[BlackBoxAgent]:
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(Pool(Path(folder) / "pool.db")) as pool:
            async with Gateway(self.model, pool) as gateway:
                agent = BlackBoxAgent(self.claw, gateway=gateway, spare=spare)
                try:
                    yield agent
                finally:
                    await agent.aclose()

    async def boot(self, times: int) -> dict[str, float]:
        """Medians: CPU and wall seconds to ready, MiB, CPU a second of doing nothing, seconds to the first call."""
        rows: list[tuple[float, ...]] = []
        async with self.agent() as agent:
            for _ in range(times):
                spent, started = cpu(), time.perf_counter()
                sandbox = await agent.open_sandbox(self.backend, SandboxSpec(limits=TASK.limits))
                ready, wall = cpu() - spent, time.perf_counter() - started
                await asyncio.sleep(3)
                memory, idle, at = pss(), cpu(), time.perf_counter()
                await asyncio.sleep(2)
                idle = (cpu() - idle) / (time.perf_counter() - at)
                await agent.close_sandbox(sandbox)
                rows.append((ready, wall, memory, idle))
        names = ("cpu", "wall", "pss", "idle")
        return dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))

    async def episodes(self, count: int, at_once: int, spare: int) -> dict[str, float]:
        """Episodes a minute and CPU seconds of each, all of it included."""
        gate = asyncio.Semaphore(at_once)

        async def one(agent: BlackBoxAgent) -> Outcome:
            async with gate:
                request = EpisodeRequest(task=TASK, seed=1, keep_workspace=False)
                return (await run_episode(request, agent, self.backend)).episode.outcome

        spent, started = cpu(), time.perf_counter()
        async with self.agent(spare) as agent:
            ended = await asyncio.gather(*(one(agent) for _ in range(count)))
            wall = time.perf_counter() - started
        assert set(ended) == {Outcome.SOLVED}, ended
        return {"minute": 60 * count / wall, "cpu": (cpu() - spent) / count}

    async def resets(self, times: int) -> tuple[list[float], list[float]]:
        """Milliseconds of a reset that finds a booted box: until the task's files are in; until the first call."""
        until_ready: list[float] = []
        until_asked: list[float] = []
        async with self.agent(spare=2) as agent:
            sandboxes = cast(WarmSandboxes, agent.sandboxes)
            for number in range(times + 2):
                while number > 1 and not sandboxes.ready:  # noqa: ASYNC110  # the first two find none
                    await asyncio.sleep(0.05)
                asked, hits, started = len(self.model.asked), sandboxes.hits, time.perf_counter()
                attempt = Attempt(EpisodeRequest(task=TASK, seed=1), self.backend, agent.name, resident=agent)
                await attempt.open()
                ready = time.perf_counter() - started
                await agent.run(AgentContext(attempt.task, attempt.sandbox, attempt.tools, 1, 0, attempt.steps.append))
                await attempt.abandon()
                if sandboxes.hits > hits:
                    until_ready.append(ready * 1000)
                    until_asked.append((self.model.asked[asked] - started) * 1000)
        return until_ready, until_asked

    async def alive(self, count: int) -> dict[str, float]:
        """All of ``count`` booted and waiting at once."""
        before, started = available(), time.perf_counter()
        async with self.agent() as agent:
            asked = (agent.open_sandbox(self.backend, SandboxSpec(limits=TASK.limits)) for _ in range(count))
            held = await asyncio.gather(*asked)
            wall = time.perf_counter() - started
            await asyncio.sleep(3)
            memory, used = pss(), before - available()
            working = sum(not agent._episodes[sandbox.id].booted.running.ended for sandbox in held)
            await asyncio.gather(*(agent.close_sandbox(sandbox) for sandbox in held))
        return {"working": working, "pss": memory / count, "used": used, "wall": wall}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="namespace")
    parser.add_argument("--latency", type=float, default=1.0, help="seconds of every model call (default 1)")
    parser.add_argument("--boots", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=16, help="the reference gets so many episodes, ours twice")
    parser.add_argument("--alive", type=int, default=64, help="how many to hold at once")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    sandboxes = backend(options.backend)
    await sandboxes.probe()
    try:
        await report(options, sandboxes)
    finally:
        await sandboxes.aclose()


async def report(options: argparse.Namespace, sandboxes: Backend) -> None:
    reference = Bench(ReferenceOpenClaw(), sandboxes, options.latency)
    ours = Bench(OpenClaw(), sandboxes, options.latency)
    if "cost" in options.parts:
        await report_cost(options, reference, ours)
    if "reset" in options.parts:
        ours.model.latency = 0.0
        ready, asked = await ours.resets(20)
        line(f"pool-hit reset, files in the box (ms p50 of {len(ready)})", f"{statistics.median(ready):.0f}")
        line("pool-hit reset, first model call (ms p50, max)", f"{statistics.median(asked):.0f}", f"{max(asked):.0f}")
    if "alive" in options.parts:
        held = await ours.alive(options.alive)
        line(f"alive of {options.alive} asked for", f"{held['working']:.0f}")
        line("  memory each (MiB PSS), in all (GiB)", f"{held['pss']:.0f}", f"{held['used']:.1f}")
        line("  seconds until all had booted", f"{held['wall']:.0f}")


async def report_cost(options: argparse.Namespace, reference: Bench, ours: Bench) -> None:
    line("", "reference", "ours", "ours/reference")

    def row(what: str, unit: str, theirs: float, mine: float) -> None:
        line(f"{what} ({unit})", f"{theirs:.2f}", f"{mine:.2f}", f"{mine / theirs:.2f}" if theirs > 0.01 else "")

    theirs, mine = await reference.boot(options.boots), await ours.boot(options.boots)
    row("boot", "CPU s", theirs["cpu"], mine["cpu"])
    row("boot until it answers", "s", theirs["wall"], mine["wall"])
    row("idle", "CPU s/s", theirs["idle"], mine["idle"])
    row("memory, idle", "MiB PSS", theirs["pss"], mine["pss"])
    for at_once in (1, options.at_once):
        few = 4 if at_once == 1 else options.at_once
        many = 4 if at_once == 1 else 2 * options.at_once
        theirs = await reference.episodes(few, at_once, spare=0)
        mine = await ours.episodes(many, at_once, spare=min(2, at_once))
        row(f"episodes, {at_once} at once", "a minute", theirs["minute"], mine["minute"])
        row(f"each, {at_once} at once", "CPU s", theirs["cpu"], mine["cpu"])


if __name__ == "__main__":
    asyncio.run(main())
