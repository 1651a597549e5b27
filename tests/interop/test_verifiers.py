"""verifiers: our tasks in its evaluation with exact tokens, our sandboxes as its runtime, its tasks in ours.

Needs the package ``verifiers``. Run with ``python -P``, so that the folder ``verifiers`` of this repository is not
taken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import clawgym
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import TaskError
from clawgym.evaluation.runner import EvalConfig, evaluate
from clawgym.pool import Pool, sequences_of
from clawgym.records import prompt_ids
from clawgym.sandbox import backend

pytest.importorskip("verifiers.v1", reason="needs verifiers: clawgym interop check verifiers")

import verifiers.v1 as vf
from aiohttp import web
from renderers import Qwen3RendererConfig
from tokenizers import Tokenizer
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig as TheirEval
from verifiers.v1.trace import Trace

from clawgym.engines.tiny import make_tiny_model

from .one_task import EPISODES, FILE, by_gym_make, in_the_ledger, replies_of

EXAMPLES = os.environ.get("VERIFIERS_REPOSITORY")
"""A clone of the repository of verifiers, which has example environments; the package has none."""
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


class Engine:
    """A token-in, token-out server such as vLLM's, with scripted replies; notes the prompts as ids."""

    def __init__(self, tokenizer: Path, replies: list[str]) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.replies = iter(replies)
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = [*self.tokenizer.encode(next(self.replies), add_special_tokens=False).ids, self.end]
        self.prompts.append(body["token_ids"])
        self.sampled.append(ids)
        content = [{"token": f"token_id:{n}", "logprob": -0.25} for n in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": str(len(self.prompts)), "choices": [choice]})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        await runner.cleanup()


async def evaluated(engine: Engine, tokenizer: Path, out: Path, env: dict[str, Any]) -> list[Trace]:
    """The traces of its own evaluation, with its training client."""
    async with engine.serving() as url:
        config = TheirEval.model_validate(
            {
                "env": env,
                "model": str(tokenizer),
                "client": vf.TrainClientConfig(
                    base_url=url, renderer=Qwen3RendererConfig(), renderer_model_name=str(tokenizer)
                ).model_dump(),
                "output_dir": str(out),
                "rich": None,
                "push": False,
            }
        )
        episodes = await run_eval(config)
    traces = [trace for episode in episodes for trace in episode.traces]
    assert all(not trace.errors for trace in traces), traces[0].errors
    return traces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("what", EPISODES)
async def test_our_task_with_exact_ids(
    tokenizer: Path, what: str, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    commands = EPISODES[what]
    engine = Engine(tokenizer, replies_of(commands))
    env = {"taskset": {"id": "our-tasks", "tasks": str(FILE)}, "agent": {"harness": {"id": "our-tasks"}}}
    env["agent"]["harness"]["protocol"] = "text"
    (trace,) = await evaluated(engine, tokenizer, tmp_path, env)

    played = await asyncio.to_thread(by_gym_make, commands)
    assert trace.rewards["official"].score == played.reward
    assert (played.reward == 1) is (what == "solved")
    assert trace.info["clawgym"]["checks"] == played.checks
    for output, seen in zip(played.outputs, trace.info["clawgym"]["outputs"], strict=False):
        assert output.strip() in seen

    with Pool(tmp_path / "pool.db") as pool:
        ended = await in_the_ledger(pool, tokenizer, commands)
    assert ended.reward == played.reward
    turns = ended.episode.turns
    assert engine.prompts == [list(prompt_ids(turns, n)) for n in range(len(turns))]
    assert engine.sampled == [list(turn.sampled_ids) for turn in turns]
    (branch,) = trace.branches
    (sequence,) = sequences_of(turns)
    assert branch.token_ids == list(sequence.ids)
    assert [bool(one) for one in branch.sampled_mask] == [bool(one) for one in sequence.mask]
    compared = f"{len(played.outputs)} outputs as `gym.make`, all {len(sequence.ids)} ids as our ledger"
    record_property("held", f"our task ({what}): the reward, the checks and {compared}")


async def test_our_sandbox_as_its_runtime(
    tokenizer: Path, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    engine = Engine(tokenizer, ["$ echo $FROM; id -u; pwd", "$ echo hi > out.txt; curl -sm 2 http://192.0.2.1", "done"])
    env = {"taskset": {"id": "shell-words"}, "agent": {"harness": {"id": "shell-words"}}}
    (trace,) = await evaluated(engine, tokenizer, tmp_path, env)
    assert trace.rewards["made"].score == 1.0
    assert trace.info["messages"][2]["content"] == "harness\n0\n/workspace\n"
    assert trace.agent.runtime.id.startswith("clawgym:")
    assert [call.error for call in trace.calls] == [None] * 3
    stored = next(Path(tmp_path).rglob("traces.jsonl")).read_text()
    assert "clawgym:" in stored
    record_property("held", "a program in our sandbox plays its environment through its interception server")


class Says:
    """Runs a command and says an answer."""

    name, version = "says", "1"

    def __init__(self, answer: str, command: str) -> None:
        self.answer, self.command = answer, command

    async def run(self, context: AgentContext) -> AgentReport:
        await context.sandbox.exec(["bash", "-c", self.command], cwd=context.task.workspace)
        return AgentReport(final_message=self.answer)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "answer": self.answer, "command": self.command}

    async def aclose(self) -> None: ...


async def test_its_tasks_in_our_evaluation(tmp_path: Path, record_property: Callable[..., None]) -> None:
    tasks = clawgym.load("verifiers:word-lengths")
    assert "image" in (tasks.by_id["boxed"].unsupported or "")
    found = {}
    for name, agent in {"right": Says("4", "echo 4 > answer.txt"), "said": Says("4", "true")}.items():
        made = backend("auto")
        try:
            await evaluate(EvalConfig(tasks, agent, made, tmp_path / name))
        finally:
            await made.aclose()
        rows = map(json.loads, (tmp_path / name / "results.jsonl").read_text().splitlines())
        found[name] = {row["task_id"]: (row["outcome"], (row["result"] or {}).get("checks")) for row in rows}
    assert found["right"]["moon"] == ("solved", {"said": 1.0, "written": 1.0})
    assert found["right"]["river"] == ("failed", {"said": 0.0, "written": 0.0})
    assert found["said"]["moon"] == ("failed", {"said": 1.0, "written": 0.0})
    with pytest.raises(TaskError, match="name an installed taskset"):
        clawgym.load("verifiers:no-such-taskset")
    record_property("held", "its tasks by our agents, scored by its rewards, with and without a runtime")


async def answered(name: str, answers: dict[str, str], out: Path) -> dict[str, Any]:
    """The rows of an evaluation in which the agent says ``answers``, by task."""
    rows = {}
    for number, (id, answer) in enumerate(answers.items()):
        made = backend("auto")
        try:
            tasks = clawgym.load(f"verifiers:{name}", ids=[id])
            await evaluate(EvalConfig(tasks, Says(answer, "true"), made, out / str(number)))
        finally:
            await made.aclose()
        rows[id] = json.loads((out / str(number) / "results.jsonl").read_text())
    return rows


@pytest.mark.skipif(EXAMPLES is None, reason="set VERIFIERS_REPOSITORY to a clone of PrimeIntellect-ai/verifiers")
async def test_environments_of_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    """`code-golf` runs the answer in the runtime; `reverse-text` has its rows in a local folder of the same name."""
    refused = {
        "glossary": "tool servers",
        "scratchpad": "tool servers",
        "interception": "intercepts",
        "proposer-solver": "no reward",
    }
    for name in ("code-golf", "reverse-text", *refused):
        name = name.replace("-", "_")
        monkeypatch.syspath_prepend(str(Path(str(EXAMPLES), "environments", name)))
    rows = tmp_path / "PrimeIntellect/Reverse-Text-RL/train.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in ("abc", "live")))
    monkeypatch.chdir(tmp_path)
    programs = {"simple-sum": "print(sum(range(101)))", "reverse-str": "print('HELLO')"}
    golf = {id: f"```python\n{text}\n```" for id, text in programs.items()}
    played = await answered("code-golf", golf, tmp_path / "golf")
    assert played["simple-sum"]["result"]["checks"] == {"correct": 1.0}
    assert played["reverse-str"]["result"]["checks"] == {"correct": 0.0}
    texts = {"0": "<reversed_text>cba</reversed_text>", "1": "<reversed_text>evil!</reversed_text>"}
    played = await answered("reverse-text", texts, tmp_path / "texts")
    assert (played["0"]["outcome"], played["0"]["result"]["checks"]) == ("solved", {"lcs": 1.0})
    assert played["1"]["result"]["checks"]["lcs"] == pytest.approx(8 / 9)
    for name, why in refused.items():
        assert all(why in (task.unsupported or "") for task in clawgym.load(f"verifiers:{name}").tasks)
    examples = "`code-golf` and `reverse-text` of its repository by our agents, scored by their rewards"
    record_property(
        "held", f"{examples}; {', '.join(f'`{name}`' for name in refused)} are unsupported, with the reason"
    )
