"""Every kind of the registry: added from a package outside the tree, used from Python and the command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clawgym import Task, VerifierSpec
from clawgym.envs.swe import SweEnv
from clawgym.errors import AgentError, SandboxUnavailable, TaskError
from clawgym.registry import KINDS, Registry, agents, sandboxes
from clawgym.tasks import write
from clawgym.trainers.config import TrainConfig

AGENT = '''
from clawgym.agents import AgentReport


class WritesAnswer:
    """Writes a number into output/answer.txt.

    Args:
        number: what it writes.
    """

    name = "writes-answer"
    version = "1"

    def __init__(self, number: int = 42) -> None:
        self.number = number

    async def run(self, context):
        await context.sandbox.exec(["bash", "-c", f"mkdir -p output && echo {self.number} > output/answer.txt"])
        return AgentReport(final_message="written")

    def identity(self):
        return {"name": self.name, "version": self.version, "number": self.number}

    async def aclose(self) -> None: ...
'''
SANDBOX = '''
from dataclasses import replace

from clawgym.sandbox.namespace.backend import NamespaceBackend


class Renamed(NamespaceBackend):
    """The namespace backend by another name."""

    name = "renamed"

    async def probe(self):
        return replace(await super().probe(), backend=self.name)
'''
PACK = '''
from clawgym import Task, TaskFile, TaskSet, VerifierSpec
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

CHECK = b"""
import json, pathlib, sys
answer = pathlib.Path(sys.argv[1], "output/answer.txt")
print(json.dumps({"answer": float(answer.exists() and answer.read_text().strip() == "42")}))
"""


class Answers:
    """One task: write 42."""

    version = "1"

    def load(self, split="heldout", seeds=None):
        files = (TaskFile("reward.sh", standard_reward_sh(), executable=True), TaskFile("check.py", CHECK))
        task = Task("answer", "Write 42 into output/answer.txt.", VerifierSpec("reward_sh", files))
        return TaskSet(f"answers:{split}", (task,), self.version)
'''
JUDGE = '''
from clawgym.records.judge import Judgement


class Content:
    """Votes +1 on every turn."""

    name, version = "content", "0"

    def __init__(self, votes: int = 1) -> None:
        self.votes = votes

    async def judge(self, asked):
        return Judgement((1,) * self.votes, ("",) * self.votes, self.name, self.version)
'''
GRADER = '''
class Answer:
    """Wants a number in output/answer.txt.

    Args:
        right: the number.
    """

    name, version, model = "answer", "1", ""

    def __init__(self, right: int) -> None:
        self.right = right

    async def grade(self, submission):
        return {"right": submission.read("output/answer.txt") == f"{self.right}\\n".encode()}
'''
ADVANTAGE = '''
def plain(rewards, groups, *, scale: float = 1.0):
    """The reward itself, without a baseline."""
    return scale * rewards
'''
ENGINE = '''
from pathlib import Path

from tokenizers import Tokenizer

from clawgym.engines import Tokens


class Parrot:
    """Samples the same text each time.

    Args:
        text: what it samples.
    """

    name = "parrot"
    context_window = 4096

    def __init__(self, tokenizer: Path, *, text: str = "hello") -> None:
        self.tokenizer, self.text = str(tokenizer), text

    async def generate(self, request):
        words = Tokenizer.from_file(f"{self.tokenizer}/tokenizer.json")
        ids = (*words.encode(self.text).ids, words.token_to_id("<|im_end|>"))
        yield Tokens(ids, (-0.5,) * len(ids), 0, "stop")

    def identity(self):
        return {"name": self.name}

    async def aclose(self): ...
'''
PARSER = '''
import json

from clawgym.gateway.tool_calls import CallParser


class Brackets(CallParser):
    """Writes calls as [CALL]name {"key": "value"}[/CALL]."""

    open, close = "[CALL]", "[/CALL]"

    def read(self, body, tools):
        name, _, arguments = body.partition(" ")
        json.loads(arguments)
        return name, arguments

    def write(self, name, arguments):
        return f"[CALL]{name} {json.dumps(arguments)}[/CALL]"
'''
DIALECT = '''
from clawgym.gateway.dialects.chat import ChatDialect


class Prompt(ChatDialect):
    """One prompt in, one text out: ``POST /v1/prompt``."""

    path = "prompt"

    def call(self, body, role):
        return super().call({"messages": [{"role": "user", "content": body.get("prompt")}]}, role)

    async def whole(self, deltas, call, body):
        return {"text": "".join([delta.text async for delta in deltas])}
'''
LOSS = '''
def reinforce(logp, old_logp, advantages, weights, importance=None, sequences=None, *, scale: float = 1.0):
    """REINFORCE, without a clip.

    Args:
        scale: factor of the loss.
    """
    weights = weights if importance is None else weights * importance
    return -scale * (weights * advantages * logp).sum(), {"scale": logp.new_tensor(scale)}
'''
ENV = '''
import gymnasium as gym

from clawgym.envs import SandboxEnv
from clawgym.envs.spaces import AnyText


class NumberEnv(SandboxEnv):
    """An action is a number, which is written into output/answer.txt.

    Args:
        plus: added to each number.
    """

    default_tasks = "answers"
    action_space = gym.spaces.Discrete(100)
    observation_space = gym.spaces.Dict({"said": AnyText(100)})

    def __init__(self, *, plus: int = 0):
        self.plus = plus

    async def act(self, sandbox, action):
        done = await sandbox.exec(
            ["bash", "-c", f"mkdir -p output && echo {action + self.plus} | tee output/answer.txt"],
            cwd=self.task.workspace,
        )
        self.submit()
        return {"said": done.text}
'''
FORMAT = '''
from clawgym import Task, TaskFile, VerifierSpec
from clawgym.tasks.formats.protocol import TaskFormat
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh


class Note(TaskFormat):
    """A text file with the instruction, and a checker beside it."""

    def is_task(self, path):
        return path.suffix == ".note"

    def read_task(self, path):
        check = TaskFile("check.py", path.with_suffix(".py").read_bytes())
        files = (TaskFile("reward.sh", standard_reward_sh(), executable=True), check)
        return Task(path.stem, path.read_text(), VerifierSpec("reward_sh", files))

    def write_task(self, task, path):
        path.with_suffix(".note").write_text(task.instruction)
        check = next(file for file in task.verifier.files if file.path == "check.py")
        path.with_suffix(".py").write_bytes(check.read())
'''
TRACKER = '''
from pathlib import Path


class Lines:
    """Appends the names of figures to a file.

    Args:
        file: in the run folder.
    """

    def __init__(self, run, *, file: Path = Path("figures.txt")):
        self.path = run.path / file

    def log(self, step, figures):
        with self.path.open("a") as out:
            print(step, *sorted(figures), file=out)

    def close(self):
        raise RuntimeError("a tracker that fails loses no run")
'''
TRAINER = '''
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.local.main import train


async def twice(config, out, method="rl", view=None, stop=None, *, steps: int = 1):
    """Trains locally, for its own number of steps.

    Args:
        steps: how many.
    """
    config = config.model_copy(update={"trainer": "local", "budget": config.budget.model_copy(update={"steps": steps})})
    return await train(config, out, {"reinforcement": "rl"}[method], view, stop)
'''
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "scratch"
version = "1.2"

[project.entry-points."clawgym.agents"]
writes-answer = "scratch.agent:WritesAnswer"
broken = "scratch.nowhere:Broken"

[project.entry-points."clawgym.judges"]
content = "scratch.judge:Content"

[project.entry-points."clawgym.advantages"]
plain = "scratch.advantage:plain"

[project.entry-points."clawgym.dialects"]
prompt = "scratch.dialect:Prompt"

[project.entry-points."clawgym.engines"]
parrot = "scratch.engine:Parrot"

[project.entry-points."clawgym.envs"]
"Scratch/number-v0" = "scratch.env:NumberEnv"

[project.entry-points."clawgym.formats"]
note = "scratch.format:Note"

[project.entry-points."clawgym.losses"]
reinforce = "scratch.loss:reinforce"

[project.entry-points."clawgym.trackers"]
lines = "scratch.tracker:Lines"

[project.entry-points."clawgym.trainers"]
twice = "scratch.trainer:twice"

[project.entry-points."clawgym.parsers"]
brackets = "scratch.parser:Brackets"

[project.entry-points."clawgym.graders"]
answer = "scratch.grader:Answer"

[project.entry-points."clawgym.packs"]
answers = "scratch.pack:Answers"

[project.entry-points."clawgym.sandboxes"]
renamed = "scratch.sandbox:Renamed"

[tool.setuptools]
packages = ["scratch"]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the scratch package is installed."""
    folder = tmp_path_factory.mktemp("scratch")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "scratch").mkdir()
    for name, text in {
        "__init__": "",
        "advantage": ADVANTAGE,
        "agent": AGENT,
        "dialect": DIALECT,
        "engine": ENGINE,
        "grader": GRADER,
        "judge": JUDGE,
        "env": ENV,
        "format": FORMAT,
        "loss": LOSS,
        "pack": PACK,
        "parser": PARSER,
        "sandbox": SANDBOX,
        "tracker": TRACKER,
        "trainer": TRAINER,
    }.items():
        (folder / "scratch" / f"{name}.py").write_text(text)
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*argv, "--target", str(folder / "site"), str(folder)], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def python(code: str, site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where the scratch package is installed."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=150
    )


def clawgym(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python("from clawgym.cli import main; main()", site, cwd, *words)


def test_entry_points_are_listed_with_their_package(installed: Path, tmp_path: Path) -> None:
    done = clawgym(installed, tmp_path, "list", "--json")
    entries = {(entry["kind"], entry["name"]): entry for entry in json.loads(done.stdout)}
    assert entries["agent", "writes-answer"] == {
        "kind": "agent",
        "name": "writes-answer",
        "target": "scratch.agent:WritesAnswer",
        "source": "scratch 1.2",
        "summary": "Writes a number into output/answer.txt.",
    }
    assert entries["agent", "broken"]["summary"] == "", "listing must not import"
    assert entries["sandbox", "renamed"]["summary"] == "The namespace backend by another name."
    assert entries["agent", "noop"]["source"] == "built in"
    done = clawgym(installed, tmp_path, "list", "agents", "writes-answer", "--json")
    assert json.loads(done.stdout) == [{"name": "number", "type": "int", "default": "42", "about": "what it writes."}]


def test_agent_pack_and_sandbox_of_a_package_run_an_evaluation(installed: Path, tmp_path: Path) -> None:
    words = ["answers:train", "--agent", "writes-answer", "--sandbox", "renamed", "--out", "run"]
    done = clawgym(installed, tmp_path, "eval", *words)
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, (tmp_path / "run/results.jsonl").read_text().splitlines())
    assert (row["task_id"], row["outcome"]) == ("answer", "solved")
    manifest = json.loads((tmp_path / "run/receipt.json").read_text())
    assert manifest["agent"] == {"name": "writes-answer", "version": "1", "number": 42}
    assert manifest["isolation"]["backend"] == "renamed"
    words = ["scratch.pack:Answers:train", "--agent", "scratch.agent:WritesAnswer", "--agent-option", "number=7"]
    done = clawgym(installed, tmp_path, "eval", *words, "--sandbox", "scratch.sandbox:Renamed", "--out", "by-path")
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, (tmp_path / "by-path/results.jsonl").read_text().splitlines())
    assert row["outcome"] == "failed", "7 is not 42"


def test_agent_class_is_used_by_its_path(installed: Path, tmp_path: Path) -> None:
    code = "import clawgym; print(clawgym.make_agent('scratch.agent:WritesAnswer', number='7').number + 1)"
    done = python(code, installed, tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("8", "")


@pytest.mark.parametrize("name", ["renamed", "scratch.sandbox:Renamed"])
def test_sandbox_of_a_package_is_used_in_python(name: str, installed: Path, tmp_path: Path) -> None:
    code = f"""
import asyncio
import clawgym

async def main():
    backend = clawgym.backend({name!r})
    print((await backend.probe()).backend)
    await backend.aclose()

asyncio.run(main())
"""
    done = python(code, installed, tmp_path)
    assert done.stdout.strip() == "renamed", done.stderr


@pytest.mark.parametrize("name", ["parrot", "scratch.engine:Parrot"])
def test_engine_of_a_package_is_made_in_python(name: str, installed: Path, tmp_path: Path) -> None:
    code = f"from clawgym.registry import engines; print(engines.make({name!r}, tokenizer='x', text='hi').text)"
    done = python(code, installed, tmp_path)
    assert done.stdout.strip() == "hi", done.stderr


@pytest.mark.parametrize(
    "name", ["answers", "answers@1", "answers:train", "scratch.pack:Answers", "scratch.pack:Answers:train"]
)
def test_pack_is_loaded_by_name_and_by_path(name: str, installed: Path, tmp_path: Path) -> None:
    done = python(f"import clawgym; print(clawgym.load({name!r}).name)", installed, tmp_path)
    assert done.stdout.strip() == ("answers:train" if name.endswith("train") else "answers:heldout"), done.stderr


def test_environment_runs_a_pack_of_a_package(installed: Path, tmp_path: Path) -> None:
    made = "gymnasium.make('ClawGym/terminal-v0', tasks='answers')"
    code = f"import gymnasium, clawgym; env = {made}; print(env.reset()[0]); env.close()"
    assert "Write 42" in python(code, installed, tmp_path).stdout


def test_grader_of_a_package_grades_a_task_folder(installed: Path, tmp_path: Path) -> None:
    for right in (42, 7):
        (tmp_path / f"tasks/answer-{right}").mkdir(parents=True)
        task = {"task_id": f"answer-{right}", "user_query": "Write it.", "metadata": {}}
        task["clawgym"] = {"grader": "answer", "grader_options": {"right": right}}
        (tmp_path / f"tasks/answer-{right}/data_entry.json").write_text(json.dumps(task))
    done = clawgym(installed, tmp_path, "eval", "./tasks", "--agent", "writes-answer", "--out", "run")
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, (tmp_path / "run/results.jsonl").read_text().splitlines())
    assert {row["task_id"]: row["outcome"] for row in rows} == {"answer-42": "solved", "answer-7": "failed"}
    code = """
from clawgym import TaskSet, VerifierSpec
from clawgym.verifiers.graders import make_grader

print(make_grader(VerifierSpec("grader", grader="scratch.grader:Answer", grader_options={"right": 3})).right)
"""
    assert python(code, installed, tmp_path).stdout.strip() == "3"


TRAIN = """
import sys
from clawgym.trainers.config import load_config
from clawgym.trainers.credit import ScoredEpisode, turn_advantages


config = load_config("tiny-cpu", sys.argv[1:])
attempts = [ScoredEpisode("g", score, "failed", 1, 1, 1, turns=(0,)) for score in (1.0, 0.0)]
print(turn_advantages(attempts, config, seed=0)[0])
"""


@pytest.mark.parametrize("name", ["plain", "scratch.advantage:plain"])
def test_advantage_of_a_package_is_used_in_training(name: str, installed: Path, tmp_path: Path) -> None:
    words = [f"algorithm.advantage={name}", "reward.judge=null"]
    done = python(TRAIN, installed, tmp_path, *words)
    assert done.stdout.strip() == "{(0, 0): 1.0, (1, 0): -1.0}", done.stderr
    done = python(TRAIN, installed, tmp_path, *words, "algorithm.advantage_options={scale: 3}")
    assert done.stdout.strip() == "{(0, 0): 3.0, (1, 0): -3.0}", done.stderr


def test_judge_of_a_package_is_made_with_the_settings_it_takes(installed: Path, tmp_path: Path) -> None:
    code = """
import asyncio
from clawgym.trainers.common.judging import judging
from clawgym.trainers.config import load_config

async def main():
    for name in ("content", "scratch.judge:Content"):
        for own in ("reward.votes=5", "reward.judge_options={votes: 7}"):
            config = load_config("tiny-cpu", [f"reward.judge={name}", own])
            async with judging(config, None) as made:
                print(made.pool._judge.votes)

asyncio.run(main())
"""
    done = python(code, installed, tmp_path)
    assert done.stdout.split() == ["5", "7", "5", "7"], done.stderr


PLAY = """
import sys
import gymnasium
import clawgym.envs

made = "gymnasium.make('Scratch/number-v0', plus='2')", "clawgym.envs.make(env='scratch.env:NumberEnv', plus=2)"
env = eval(made[int(sys.argv[1])])
env.reset()
observation, reward, terminated, *_ = env.step(40)
print(observation["said"].strip(), reward, terminated)
env.close()
"""


@pytest.mark.parametrize("way", ["0", "1"])
def test_environment_of_a_package_is_made_by_name_and_by_path(way: str, installed: Path, tmp_path: Path) -> None:
    done = python(PLAY, installed, tmp_path, way)
    assert done.stdout == "42 1.0 True\n", done.stderr


def test_format_of_a_package_is_read_and_written(installed: Path, tmp_path: Path) -> None:
    def cli(*words: str) -> str:
        done = clawgym(installed, tmp_path, "tasks", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cli("export", "answers", "notes", "--format", "note")
    assert (tmp_path / "notes/answer.note").read_text() == "Write 42 into output/answer.txt."
    assert json.loads(cli("show", "notes/answer.note", "--json"))["tasks"] == 1
    assert json.loads(cli("show", "./notes", "--json"))["tasks"] == 1, "answer.py is a stray file"
    cli("import", "notes/answer.note", "folders", "--from", "scratch.format:Note")
    assert json.loads(cli("show", "./folders", "answer", "--json"))["instruction"] == "Write 42 into output/answer.txt."
    code = """
from pathlib import Path
from clawgym.tasks import read, write

for format in ("note", "scratch.format:Note"):
    tasks = read(Path("notes/answer.note"), format=format)
    print(tasks.tasks[0].id, write(tasks.tasks, Path(format.replace(":", "-")), format))
"""
    assert python(code, installed, tmp_path).stdout.split() == ["answer", "1"] * 2


def test_unknown_format_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no format 'habor'\. Did you mean 'harbor'"):
        write((), tmp_path / "new", "habor")
    with pytest.raises(TaskError, match="this format cannot be written"):
        write([Task("a", "Do it.", VerifierSpec("reward_sh", ()))], tmp_path / "new", "osworld")
    assert not (tmp_path / "new").exists()


TINY = """
name: tiny
backend: renamed
trainer: twice
trainer_options: {steps: 2}
model: {scratch: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, context_window: 512}}
tasks:
  generators: [write-word]
  demonstrations: {count: 4}
  train: {first: 100, count: 6}
  validation: {count: 2}
  heldout: {first: 100, count: 2}
agent: {protocol: text, system_prompt: Work., max_steps: 2, max_tokens: 12}
rollout: {groups: 2, group_size: 2, concurrency: 8}
algorithm: {loss: reinforce, loss_options: {scale: 0.5}, entropy: 1.0e-3}  # trains on every group
optimizer: {lr: 1.0e-3}
compute: {threads: 1, row_tokens: 256, micro_tokens: 1024}
evaluation: {every: 2}
tracking: {lines: {file: seen.txt}, scratch.tracker:Lines: null}
"""


def test_trainer_loss_and_tracker_of_a_package_are_used_by_train(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = clawgym(installed, tmp_path, "train", "reinforcement", "--config", "tiny.yaml", "--out", "run")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/scale"] in (0.5, 0.0) for row in rows), "0 where no token was trained"
    assert any("actor/scale" in row for row in rows)
    for name in ("seen.txt", "figures.txt"):
        seen = (tmp_path / "run" / name).read_text()
        assert re.search(r"^1 .*actor/scale ", seen, re.MULTILINE)
        assert "eval/heldout" in seen


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": {"loss": "pppo"}}, "there is no loss 'pppo'. Did you mean 'ppo'"),
        ({"algorithm": {"loss_options": {"clip": 1}}}, "loss 'ppo' does not take clip.* Did you mean 'clip_low'"),
        ({"tracking": {"wandb": {"mode": "off"}}}, "tracker 'wandb': option mode='off': Input should be 'online'"),
        ({"tracking": {"wandbb": None}}, "there is no tracker 'wandbb'. Did you mean 'wandb'"),
        ({"trainer": "lokal"}, "there is no trainer 'lokal'. Did you mean 'local'"),
        ({"trainer_options": {"steps": 2}}, "trainer 'local' does not take steps: it takes no options"),
        ({"trainer": "no.where:train"}, "trainer 'no.where:train' was not found"),
    ],
)
def test_names_and_options_of_a_configuration_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(settings)


def test_loss_is_named_by_path(installed: Path, tmp_path: Path) -> None:
    code = """
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.protocols import loss_of
chosen = TrainConfig.model_validate({"algorithm": {"loss": "scratch.loss:reinforce", "loss_options": {"scale": 0.5}}})
loss = loss_of(chosen.algorithm)
print(loss.func.__module__, loss.keywords)
"""
    done = python(code, installed, tmp_path)
    assert done.stdout == "scratch.loss {'scale': 0.5}\n", done.stderr


ASK = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
}


@contextlib.contextmanager
def gateway(site: Path, cwd: Path, *words: str) -> Iterator[Callable[[str, Any], Any]]:
    """A started `clawgym gateway`: what posts to its session and gives the answer."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", "from clawgym.cli import main; main()", "gateway", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        shown = dict(process.stdout.readline().split(":", 1) for _ in range(5))

        def post(path: str, body: Any) -> Any:
            headers = {"Authorization": f"Bearer {shown['api_key'].strip()}", "Content-Type": "application/json"}
            asked = urllib.request.Request(f"{shown['base_url'].strip()}/{path}", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.load(answer)

        yield post
    finally:
        process.terminate()
        process.wait(60)


def test_gateway_serves_engine_dialect_and_parser_of_a_package(
    installed: Path, tmp_path: Path, model_folder: Path
) -> None:
    words = ["--engine", "parrot", "--tokenizer", str(model_folder), "--engine-option"]
    call = '[CALL]look {"at": "x"}[/CALL]'
    named = ["--dialect", "chat", "--dialect", "scratch.dialect:Prompt", "--parser", "brackets"]
    with gateway(installed, tmp_path, *words, f"text=So: {call}", *named) as post:
        message = post("chat/completions", ASK)["choices"][0]["message"]
        assert message["content"] == "So:"
        assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "x"}'}
        assert post("prompt", {"prompt": "hi"}) == {"text": f"So: {call}"}, "no tools were offered"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            post("messages", {})


def test_gateway_in_python_serves_every_known_dialect(installed: Path, tmp_path: Path) -> None:
    code = """
from clawgym.engines import ReplayEngine
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool

print(*sorted(Gateway(ReplayEngine(()), Pool("pool.db")).dialects))
try:
    Gateway(ReplayEngine(()), Pool("pool.db"), dialects=["prompt", "scratch.dialect:Prompt"])
except Exception as error:
    print(error)
"""
    done = python(code, installed, tmp_path)
    assert done.stdout.startswith("chat gemini messages prompt responses\nthe dialects 'prompt' and"), done.stderr


@pytest.mark.parametrize("name", ["brackets", "scratch.parser:Brackets"])
def test_parser_of_a_package_reads_actions_of_an_environment(name: str, installed: Path, tmp_path: Path) -> None:
    code = """
import sys
import clawgym, gymnasium

env = gymnasium.make("ClawGym/swe-v0", tasks="answers", action_format=sys.argv[1])
env.reset()
assert any("[CALL]" in env.action_space.sample() for _ in range(50))
env.step('[CALL]bash {"command": "mkdir -p output; echo 42 > output/answer.txt"}[/CALL]')
print(env.step("[CALL]submit {}[/CALL]")[1])
env.close()
"""
    done = python(code, installed, tmp_path, name)
    assert done.stdout == "1.0\n", done.stderr


def test_unknown_action_format_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"action_format='hermse'.* Did you mean 'hermes'\?"):
        SweEnv(action_format="hermse")


def test_entry_point_that_cannot_be_imported_names_its_package(installed: Path, tmp_path: Path) -> None:
    done = clawgym(installed, tmp_path, "eval", "terminal-basic", "--agent", "broken")
    assert done.returncode == 2
    assert "agent 'broken' of scratch cannot be imported" in done.stderr
    assert "repair or uninstall scratch" in done.stderr


def test_every_kind_is_in_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/registry.md").read_text("utf-8")
    rows = re.findall(r"^\| (\w+).*? \| `(clawgym\.\w+)` \| `([\w/]+\.py)`", page, re.MULTILINE)
    packs = re.findall(r"^\| (packs) .*? \| `(clawgym\.packs)` \|", page, re.MULTILINE)
    assert {(kind, group) for kind, group, *_ in [*rows, *packs]} == {(k, r.group) for k, r in KINDS.items()}
    for *_, example in rows:
        assert (Path(__file__).parents[1] / example).is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_name_has_a_summary_and_can_be_imported(kind: str) -> None:
    registry = KINDS[kind]
    for entry in registry.entries():
        if entry.source == "built in":
            assert entry.summary.endswith("."), entry
            for option in registry.options(entry.name):
                assert option.about, f"{entry.name}: {option.name} is not in the Args section of its docstring"


def test_registered_class_is_known_in_this_process() -> None:
    registry = Registry("agent", "clawgym.agents", [], AgentError)

    @registry.register("mine")
    class Mine:
        """Does what I want."""

        def __init__(self, size: int, *, colour: str = "red") -> None:
            self.size, self.colour = size, colour

    made = registry.make("mine", size="3")
    assert (made.size, made.colour) == (3, "red")
    (entry,) = [entry for entry in registry.entries() if entry.name == "mine"]
    assert (entry.source, entry.summary) == ("registered here", "Does what I want.")
    for options, message in [
        ({}, "agent 'mine' needs size: give size=..."),
        ({"size": "big"}, r"option size='big': Input should be a valid integer"),
        ({"size": 1, "color": "x"}, r"does not take color: it takes colour, size. Did you mean 'colour'\?"),
    ]:
        with pytest.raises(AgentError, match=message):
            registry.make("mine", **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("namspace", "there is no sandbox 'namspace'. Did you mean 'namespace'"),
        ("nowhere:Backend", "was not found .*PYTHONPATH"),
        ("json:", "was not found"),
    ],
)
def test_unknown_name_is_refused_with_a_hint(name: str, message: str) -> None:
    with pytest.raises(SandboxUnavailable, match=message):
        sandboxes.get(name)
    assert name not in sandboxes


def test_getting_one_agent_does_not_import_the_others() -> None:
    code = (
        "import sys; from clawgym.registry import sandboxes; sandboxes.get('namespace'); print('docker' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
    assert "noop" in agents
