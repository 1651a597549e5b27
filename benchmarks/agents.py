"""Agent programs by name, with a scripted model: solved tasks, exact tokens, prompts, costs, and lies of the model.

    python benchmarks/agents.py [AGENT ...] [--tasks 5] [--lies | --board MODEL,... | --sets NAME,...]

Without names, all that are installed (`clawgym agents install NAME`). The model is a token engine that looks around,
runs the task's reference solution with the agent's own tool, and says that it is done; so what is measured is the agent
and the gateway. ``--lies`` shows what an agent does with a model that sends bad JSON, calls unknown tools, says
nothing, or never stops. ``--board`` compares agents by the score of a model: ``scripted``; ``careless``, a script of
which a fifth of the replies are lies, the same for all agents, and the right one follows if the agent asks again; and
``smollm2-135m``, which samples its replies. ``--sets`` runs the first tasks of other task sets that are supported here,
with their reference solution where they have one, and counts the graded episodes.

Tokens of the system prompt are those of smollm2-135m's tokenizer. Memory is the highest PSS of the program's own
processes. Seconds are of this machine, with whatever else it does.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

import clawgym
from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.agents.programs.install import installed
from clawgym.agents.programs.releases import RELEASES, release_of
from clawgym.engines.packaged import packaged_folder
from clawgym.engines.protocol import GenerateRequest, TokenEngine, Tokens
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.transformers import TransformersEngine
from clawgym.errors import AgentError
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool, sequences_of
from clawgym.pool.check import check, trace_of
from clawgym.records import Episode, Outcome, Task
from clawgym.registry import agents as known
from clawgym.rollout import EpisodeRequest, run_episode
from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend
from clawgym.statistics import wilson

PACKS = ("terminal-basic", "swe-basic")
"""The packs whose tasks every program in the sandbox can work on: the others bring tools of their own."""
TOOLS: Mapping[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "aider": ("", lambda command: {}),
    "claude-code": ("Bash", lambda command: {"command": command, "description": "Work"}),
    "codex": ("exec_command", lambda command: {"cmd": command}),
    "gemini-cli": ("run_shell_command", lambda command: {"command": command}),
    "mini-swe-agent": ("bash", lambda command: {"command": command}),
    "openclaw": ("exec", lambda command: {"command": command}),
    "openhands": ("terminal", lambda command: {"command": command, "summary": "work", "security_risk": "LOW"}),
    "opencode": ("bash", lambda command: {"command": command, "description": "Work"}),
    "pi": ("bash", lambda command: {"command": command}),
    "terminus": ("", lambda command: {}),
    "qwen-code": (
        "run_shell_command",
        lambda command: {"command": command, "is_background": False, "description": "Work"},
    ),
}
"""Agent -> the name of its shell tool, and the arguments that run a command. Aider has none: it edits files; Terminus
types what the model's JSON says."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FAULTS = ("bad JSON", "unknown tool", "empty")
LIES = (*FAULTS, "never stops")
CARELESS = 0.2
"""Share of the replies of the careless script that are faults."""
SMALL_MODEL = "smollm2-135m"
BOARD = ("scripted", "careless", SMALL_MODEL)
NOT_GRADED = (Outcome.INFRA, Outcome.UNSUPPORTED)
SMALL = {"max_steps": 4, "agent_seconds": 600.0}
"""Limits of the tasks with smollm2-135m."""
BRIEF = 256
"""Most tokens of its replies."""


def call_of(name: str, arguments: Any) -> str:
    """A tool call as the tiny model writes it."""
    body = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'


def act(agent: str, command: str) -> str:
    """A reply that runs a command."""
    if agent == "terminus":
        return typed(f"{command}\n")
    tool, arguments = TOOLS[agent]
    return call_of(tool, arguments(command)) if tool else "I go on."


def typed(keystrokes: str, *, done: bool = False) -> str:
    """A reply to Terminus."""
    commands = [{"keystrokes": keystrokes, "duration": 3.0}] if keystrokes else []
    return json.dumps({"analysis": "I work.", "plan": "Work.", "commands": commands, "task_complete": done})


def solution_command(task: Task) -> str:
    """One command that unpacks and runs the reference solution in the working folder."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for file in task.solution:
            entry = tarfile.TarInfo(file.path)
            entry.size = len(file.read())
            tar.addfile(entry, io.BytesIO(file.read()))
    text = base64.b64encode(packed.getvalue()).decode()
    return f"mkdir /tmp/s && echo {text} | base64 -d | tar xz -C /tmp/s && bash /tmp/s/solve.sh"


def written(task: Task) -> dict[str, str]:
    """The files that the reference solution writes, as text. Runs it here: only for the packs of the library."""
    with tempfile.TemporaryDirectory() as scratch:
        work, solution = Path(scratch, "work"), Path(scratch, "solution")
        for folder, files in ((work, task.inputs), (solution, task.solution)):
            folder.mkdir()
            for file in files:
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                (folder / file.path).write_bytes(file.read())
        env = {"PATH": os.environ["PATH"], "HOME": scratch}
        subprocess.run(["bash", str(solution / "solve.sh")], cwd=work, env=env, capture_output=True, timeout=60)
        before = {file.path: file.read() for file in task.inputs}
        found = {str(path.relative_to(work)): path.read_bytes() for path in work.rglob("*") if path.is_file()}
        return {name: data.decode() for name, data in found.items() if before.get(name) != data}


def chosen(pack: str, count: int) -> list[Task]:
    """``count`` tasks of ``pack`` with small solutions, of as many kinds as there are."""
    kinds: dict[str, list[tuple[int, str, Task]]] = {}
    for task in clawgym.load(pack).tasks:
        if len(solution_command(task)) < 8_000:  # one reply has at most 8,192 tokens
            with contextlib.suppress(UnicodeDecodeError, subprocess.TimeoutExpired):
                size = sum(map(len, written(task).values()))
                kinds.setdefault(task.id.rpartition("-")[0], []).append((size, task.id, task))
    ranked = [(rank, *found) for of in kinds.values() for rank, found in enumerate(sorted(of)[:count])]
    return [task for *_, task in sorted(ranked)[:count]]


@dataclass
class Script:
    """What the model replies to one agent: ``say(prompt, n)``, where ``n`` counts the calls of a session with tools."""

    agent: str
    tasks: list[Task]
    lie: str | None = None
    careless: float = 0.0
    """Share of the replies that are faults."""

    def say(self, prompt: str, n: int) -> str:
        if self.lie == "never stops":
            return act(self.agent, "true")
        if self.lie is not None and n == 0:
            return self._fault(self.lie)
        task = self._task(prompt)
        if task is None:
            return "A short title."
        faults = [self._drawn(task, call) for call in range(n + 1)]
        if (fault := faults[-1]) is not None:
            return self._fault(fault)
        n -= (self.lie is not None) + sum(one is not None for one in faults)
        if self.agent == "aider":
            return "\n\n".join(f"{name}\n```\n{text}```" for name, text in written(task).items())
        work = [solution_command(task)] if task.solution else []
        steps = ["ls -a", *work, *([SUBMIT] if self.agent == "mini-swe-agent" else [])]
        if n < len(steps):
            return act(self.agent, steps[max(n, 0)])
        return typed("", done=True) if self.agent == "terminus" else "It is done."

    def _drawn(self, task: Task, call: int) -> str | None:
        """The fault of a call, the same for every agent."""
        rng = random.Random(f"{task.id} {call}")
        return rng.choice(FAULTS) if rng.random() < self.careless else None

    def _fault(self, kind: str) -> str:
        tool, _ = TOOLS[self.agent]
        if kind == "bad JSON":
            return typed("ls")[:-9] if self.agent == "terminus" else call_of(tool or "x", '{"command": "echo a')
        return call_of("no_such_tool", {"x": 1}) if kind == "unknown tool" else ""

    def _task(self, prompt: str) -> Task | None:
        text = " ".join(prompt.split())
        return next((task for task in self.tasks if " ".join(task.instruction.split())[:400] in text), None)


class ScriptedModel:
    """A token engine that replies as ``script`` says. Keeps the prompt of each session's first call."""

    name = "scripted"
    context_window = 200_000

    def __init__(self, folder: Path, script: Script) -> None:
        self.tokenizer = str(folder)
        self.script = script
        self.prompts: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self._words = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end = self._words.token_to_id("<|im_end|>")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        prompt = self._words.decode(list(request.prompt_ids), skip_special_tokens=False)
        tool = TOOLS[self.script.agent][0]
        n = self.calls[request.session]
        if tool in prompt:  # not a side call, such as for a title
            self.prompts.setdefault(request.session, prompt)
            self.calls[request.session] += 1
        text = self.script.say(prompt, n)
        ids = (*self._words.encode(text, add_special_tokens=False).ids, self._end)
        most = request.sampling.max_tokens or len(ids)
        for n, token in enumerate(ids[:most]):
            last = n + 1 == min(len(ids), most)
            why = ("stop" if len(ids) <= most else "length") if last else None
            yield Tokens((token,), (-0.5 - 0.25 * (n % 7),), 0, why)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    async def aclose(self) -> None: ...


class Brief:
    """A token engine whose replies have at most :data:`BRIEF` tokens."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self.name, self.tokenizer, self.context_window = engine.name, engine.tokenizer, engine.context_window

    def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        most = min(request.sampling.max_tokens or BRIEF, BRIEF)
        return self._engine.generate(replace(request, sampling=replace(request.sampling, max_tokens=most)))

    def identity(self) -> dict[str, Any]:
        return {**self._engine.identity(), "max_tokens": BRIEF}

    async def aclose(self) -> None:
        await self._engine.aclose()


@dataclass
class Seen:
    """The episodes of one agent."""

    agent: str
    version: str
    episodes: list[tuple[str, Episode]] = field(default_factory=list)
    """Pack and episode."""
    prompt: str = ""
    seconds: list[float] = field(default_factory=list)
    memory: float = 0.0
    """MiB."""

    def exact(self) -> float:
        """Percentage of the episodes whose tokens the check of a pool calls exact."""
        found = [check(episode.task_id, trace_of(episode.turns)).status for _, episode in self.episodes]
        return 100 * found.count("exact") / len(found)

    def rows(self) -> str:
        counts = [len(sequences_of(episode.turns)) for _, episode in self.episodes]
        return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"

    def solved(self, pack: str) -> str:
        of = [episode for name, episode in self.episodes if name == pack]
        return f"{sum(episode.outcome is Outcome.SOLVED for episode in of)} of {len(of)}"

    def calls(self) -> str:
        counts = [len(episode.turns) for _, episode in self.episodes]
        return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def memory_of(agent: str) -> float:
    """MiB of the processes that run a program of ``agent``'s installation."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if f"/opt/{agent}/" in os.readlink(f"/proc/{process.pid}/exe"):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += int(text.partition("\nPss:")[2].split()[0])
    return total / 1024


async def attempt(agent: Any, task: Task, backend: Backend) -> Episode:
    return (await run_episode(EpisodeRequest(task=task, seed=0), agent, backend)).episode


@contextlib.asynccontextmanager
async def working(name: str, model: TokenEngine) -> AsyncIterator[BlackBoxAgent]:
    """An agent whose model is ``model``."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(Pool(Path(scratch, "pool.db"))) as pool:
        async with Gateway(model, pool) as gateway:
            agent = BlackBoxAgent(known.make(name), gateway=gateway, spare=0)
            try:
                yield agent
            finally:
                await agent.aclose()


async def solve(name: str, tasks: Mapping[str, list[Task]], folder: Path, backend: Backend) -> Seen:
    """Let an agent work on all tasks, one after another."""
    model = ScriptedModel(folder, Script(name, [task for of in tasks.values() for task in of]))
    async with working(name, model) as agent:
        seen = Seen(name, agent.version)

        async def watch() -> None:
            while True:
                seen.memory = max(seen.memory, await asyncio.to_thread(memory_of, name))
                await asyncio.sleep(0.25)

        watching = asyncio.ensure_future(watch())
        for pack, of in tasks.items():
            for task in of:
                start = time.perf_counter()
                episode = await attempt(agent, task, backend)
                seen.seconds.append(time.perf_counter() - start)
                seen.episodes.append((pack, episode))
        watching.cancel()
        seen.prompt = next(iter(model.prompts.values()), "")
    return seen


async def lie(name: str, what: str, task: Task, folder: Path, backend: Backend) -> str:
    """What an agent does if the first reply of the model is a lie, or all are."""
    task = replace(task, limits=replace(task.limits, max_steps=12, agent_seconds=180))
    async with working(name, ScriptedModel(folder, Script(name, [task], what))) as agent:
        episode = await attempt(agent, task, backend)
    cause = f" ({episode.cause})" if episode.cause else ""
    counts = {"call": len(episode.turns), "sequence": len(sequences_of(episode.turns))}
    return f"{episode.outcome}{cause}, " + ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items())


async def score(name: str, model: TokenEngine, tasks: list[Task], backend: Backend) -> str:
    """The share of solved tasks, in per cent, with Wilson's interval; and the causes of what was not graded."""
    async with working(name, model) as agent:
        episodes = [await attempt(agent, task, backend) for task in tasks]
    solved = sum(episode.outcome is Outcome.SOLVED for episode in episodes)
    low, high = wilson(solved / len(tasks), len(tasks))
    ended = Counter(episode.cause for episode in episodes if episode.outcome in NOT_GRADED)
    causes = "".join(f", {count} {cause}" for cause, count in ended.items())
    return f"{100 * solved / len(tasks):.0f} ({100 * low:.0f} to {100 * high:.0f}){causes}"


async def board(names: list[str], models: list[str], tasks: list[Task], folder: Path, backend: Backend) -> None:
    """Print the scores of agents with models."""
    print("| agent | " + " | ".join(models) + " |\n|---|" + "---|" * len(models), flush=True)
    short = [replace(task, limits=replace(task.limits, **SMALL)) for task in tasks]
    async with AsyncExitStack() as stack:
        small: TokenEngine | None = None
        if SMALL_MODEL in models:
            engine = TransformersEngine(packaged_folder(SMALL_MODEL), threads=1, kernels="int8")
            stack.push_async_callback(engine.aclose)
            small = Brief(engine)
        for name in names:
            cells = []
            for what in models:
                if what == SMALL_MODEL:
                    assert small is not None
                    cells.append(await score(name, small, short, backend))
                else:
                    script = Script(name, tasks, careless=CARELESS if what == "careless" else 0.0)
                    cells.append(await score(name, ScriptedModel(folder, script), tasks, backend))
            print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)


async def played(name: str, tasks: list[Task], folder: Path, backend: Backend) -> str:
    """How many episodes were graded and solved, and why the others were not; with the median time."""
    if not tasks:
        return "none is supported here"
    seen = await solve(name, {"": tasks}, folder, backend)
    done = [episode for _, episode in seen.episodes if episode.outcome not in NOT_GRADED]
    solved = sum(episode.outcome is Outcome.SOLVED for episode in done)
    causes = Counter(f"{e.outcome} {e.cause}" for _, e in seen.episodes if e.outcome in NOT_GRADED)
    why = "".join(f", {count} {cause}" for cause, count in causes.items())
    seconds = sorted(seen.seconds)[len(seen.seconds) // 2]
    return f"{len(done)} graded, {solved} solved{why}, {seconds:.1f} s"


async def matrix(names: list[str], sets: list[str], count: int, folder: Path, backend: Backend) -> None:
    """Print which agents ran which task sets."""
    tasks = {name: supported(name)[:count] for name in sets}
    print("| agent | " + " | ".join(sets) + " |\n|---|" + "---|" * len(sets))
    for name in names:
        cells = [await played(name, tasks[of], folder, backend) for of in sets]
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)


def supported(name: str) -> list[Task]:
    """The tasks of a set that run on this machine without a judge, those with a reference solution first."""
    found = clawgym.load(name).tasks
    tasks = [task for task in found if task.unsupported is None and not task.brings_tools and not task.verifier.grader]
    return sorted(tasks, key=lambda task: not task.solution)


def before_task(prompt: str, tasks: Mapping[str, list[Task]]) -> str:
    """The prompt of a first call without the task's instruction."""
    for task in (task for of in tasks.values() for task in of):
        prompt = prompt.replace(task.instruction, "")
    return prompt


def available(names: list[str]) -> list[str]:
    """The agents that are installed."""
    found: list[str] = []
    for name in names or sorted(TOOLS):
        try:
            known.make(name)
        except AgentError as error:
            print(f"{name}: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("agents", nargs="*", metavar="AGENT", help="names of clawgym list agents")
    parser.add_argument("--tasks", type=int, default=5, help="tasks of each pack")
    parser.add_argument("--sets", metavar="NAME,...", help="show which agents run these task sets")
    parser.add_argument("--board", help=f"show the scores of agents with these models, of {','.join(BOARD)}")
    parser.add_argument("--lies", action="store_true", help="show what agents do when the model lies")
    given = parser.parse_args()
    names = available(given.agents)
    tasks = {pack: chosen(pack, given.tasks) for pack in PACKS}
    words = Tokenizer.from_file(str(packaged_folder("smollm2-135m") / "tokenizer.json"))
    backend = make_backend("namespace")
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny_model(Path(scratch) / "tiny")
        if given.sets:
            await matrix(names, given.sets.split(","), given.tasks, folder, backend)
        elif given.board:
            models = given.board.split(",")
            if unknown := [what for what in models if what not in BOARD]:
                parser.error(f"--board {unknown[0]}: give models of {','.join(BOARD)}")
            await board(names, models, [task for of in tasks.values() for task in of], folder, backend)
        elif given.lies:
            print("| agent | " + " | ".join(LIES) + " |\n|---|" + "---|" * len(LIES))
            for name in names:
                told = [await lie(name, what, tasks[PACKS[0]][0], folder, backend) for what in LIES]
                print(f"| `{name}` | " + " | ".join(told) + " |", flush=True)
        else:
            packs = " | ".join(PACKS)
            print(
                f"| agent | version | {packs} | exact | sequences | calls "
                "| prompt tokens | install | seconds | memory |\n"
                "|---|---|" + "---|" * (len(PACKS) + 7)
            )
            for name in names:
                seen = await solve(name, tasks, folder, backend)
                size = installed(release_of(name)).size / 1e6 if name in RELEASES or name == "openclaw" else 0
                solved = " | ".join(seen.solved(pack) for pack in PACKS)
                tokens = len(words.encode(before_task(seen.prompt, tasks)).ids)
                middle = sorted(seen.seconds)[len(seen.seconds) // 2]
                print(
                    f"| `{name}` | {seen.version} | {solved} | {seen.exact():.0f} % | {seen.rows()} | {seen.calls()} | "
                    f"{tokens:,} | {size:,.0f} MB | {middle:.1f} | {seen.memory:,.0f} MiB |",
                    flush=True,
                )
                for pack, episode in seen.episodes:
                    if episode.outcome is not Outcome.SOLVED:
                        print(f"{name} {pack} {episode.task_id}: {episode.outcome} {episode.cause}", file=sys.stderr)
    await backend.aclose()


if __name__ == "__main__":
    asyncio.run(main())
