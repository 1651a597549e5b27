"""The gate of a service: real versions, real tasks and canaries; scores of replayed turns by a scorer of the test."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from clawgym.cli import app  # noqa: E402
from clawgym.engines.tiny import make_tiny_model  # noqa: E402
from clawgym.evaluation import EvalConfig, evaluate  # noqa: E402
from clawgym.online.config import ServiceFolder, load_service_config  # noqa: E402
from clawgym.online.door import FEEDBACK  # noqa: E402
from clawgym.online.gate import GateKeeper  # noqa: E402
from clawgym.online.judging import ConversationJudge  # noqa: E402
from clawgym.online.replay import Replayed, ScorerContext  # noqa: E402
from clawgym.online.service import Service, open_service  # noqa: E402
from clawgym.online.versions import Versions  # noqa: E402
from clawgym.pool import EpisodeEnd, Pool  # noqa: E402
from clawgym.records import Turn  # noqa: E402
from clawgym.records.judge import Judgement  # noqa: E402
from clawgym.registry import scorers  # noqa: E402

from .test_serving import tuned  # noqa: E402

LIKED: dict[int, float] = {}
"""Version -> the score of each of its replies."""


@scorers.register("test-liked")
class Liked:
    def __init__(self, context: ScorerContext) -> None:
        pass

    async def score(self, replayed: Replayed) -> float:
        return LIKED[replayed.version.number]


SETTINGS = [
    "redact=false", "held_out=0.999999", "training.reward.judge=complaints", "training.agent.max_steps=1",
    "training.agent.max_tokens=8", "gate.scorers=[test-liked]", "gate.sources=1", "gate.alpha=0.9",
    "gate.margins={tasks: 0.95, style: 0.95, safety: 0.95}", "gate.canaries=42", "gate.task_count=4",
]  # fmt: skip


class Setup:
    def __init__(self, folder: ServiceFolder, service: Service, adapter: Path) -> None:
        self.folder, self.service, self.versions = folder, service, service.versions
        self._adapter = adapter

    def candidate(self, parent: int = 0, conversations: int = 0) -> int:
        copy = partial(shutil.copytree, self._adapter, dirs_exist_ok=True)
        sessions = [f"{len(self.versions.all())}-{number}" for number in range(conversations)]
        return self.versions.add(copy, parent=parent, sessions=sessions).number

    async def talk(self, count: int, source: str = "user") -> None:
        """Conversations with a thumb each, judged."""
        base, key = self.service.base_url, self.service.keys.make(source)
        async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
            for number in range(count):
                messages: list[Any] = [{"role": "user", "content": f"Tell me more, {number}"}]
                got = await client.chat.completions.create(model="any", messages=messages, max_tokens=4)
                messages.append({"role": "assistant", "content": got.choices[0].message.content or ""})
                messages.append({"role": "user", "content": "And now?"})
                last = await client.chat.completions.create(model="any", messages=messages, max_tokens=4)
                await client.post("/feedback", body={"id": got.id, "score": 1}, cast_to=object)
                await client.post("/end", body={"id": last.id}, cast_to=object)
        with Pool(self.folder.pool) as pool:
            judge = ConversationJudge(self.folder, self.folder.config, pool)
            for episode in [e for e in pool.episodes(state="open") if not e.secret_sha256]:
                assert await judge(episode)

    async def measure(self) -> int:
        """Let the gate measure all that there is. Returns the number of parts."""
        with Pool(self.folder.pool) as pool:
            gate, parts = GateKeeper(self.folder, pool), 0
            while await gate.step():
                parts += 1
            return parts


@pytest_asyncio.fixture
async def setup(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    model = make_tiny_model(tmp_path / "model", spread=0.05)
    tuned(model, tmp_path / "adapter", 1)
    folder = ServiceFolder(tmp_path / "service")
    folder.create(load_service_config(None, str(model), [*SETTINGS, *getattr(request, "param", ())]))
    LIKED.clear()
    async with open_service(folder, loops=()) as service:
        yield Setup(folder, service, tmp_path / "adapter")


async def test_a_better_candidate_is_promoted_when_the_evidence_suffices(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: set[int] = set()

    async def evaluated(config: EvalConfig) -> object:
        steps.update(task.limits.max_steps for task in config.task_set.tasks)
        return await evaluate(config)

    monkeypatch.setattr("clawgym.online.gate.evaluate", evaluated)
    LIKED.update({0: 0.0, 1: 1.0})
    await setup.talk(3)
    assert setup.candidate() == 1
    assert setup.versions.serving.number == 0
    assert await setup.measure() == 1, "no canary and no task before a gain is shown"
    assert await setup.measure() == 0, "everything is measured once, also by a gate that starts again"
    assert setup.versions[1].state == "candidate", "too few conversations"
    await setup.talk(8)
    await setup.measure()
    promoted = setup.versions[1]
    assert setup.versions.serving.number == 1
    assert promoted.state == "promoted"
    figures = promoted.gate[-1]["figures"]
    assert figures["turns"]["lower"] > 0
    assert figures["turns"]["n"] in range(5, 13)
    assert [figures[name]["n"] for name in ("tasks", "style", "safety")] == [4, 40, 40], "no canary more than needed"
    assert steps == {1}, "a task has no more steps than training.agent.max_steps"
    with Pool(setup.folder.pool) as pool:
        assert not list(pool.episodes(channel="internal")), "measurements leave nothing"
    assert {file.name for file in setup.folder.gate.iterdir()} == {"scores.jsonl", "latest.json"}
    assert setup.candidate(1) == 2
    assert await setup.measure() == 0, "nothing came after the decision"
    shown = CliRunner().invoke(app, ["serve", "status", "--dir", str(setup.folder.path)])
    assert "Version 1 answers" in shown.output
    assert "The gate on version 1: promoted" in shown.output
    assert "tasks        4 measured, +0.000" in shown.output


@pytest.mark.parametrize("setup", [["gate.margins.style=0.01", "gate.canaries=6"]], indirect=True)
async def test_a_candidate_that_no_measurement_can_help_makes_room(setup: Setup) -> None:
    LIKED.update({0: 0.0, 1: 1.0})
    setup.candidate()
    await setup.talk(11)
    await setup.measure()
    judged = setup.versions[1]
    assert judged.state == "rejected", "six canaries cannot show a margin of 0.01, and there are no others"
    assert judged.gate[-1]["reasons"][0] == "its style canaries do not suffice, nor would all of them"
    assert judged.gate[-1]["reasons"][1].startswith("style: ")
    figures = judged.gate[-1]["figures"]
    assert figures["turns"]["lower"] > 0
    assert [figures[name]["n"] for name in ("style", "safety", "tasks")] == [6, 0, 0], "the rest would not help"


@pytest.mark.parametrize("setup", [["gate.margins.style=0.01", "gate.canaries=6"]], indirect=True)
async def test_after_a_candidate_that_costs_too_much_comes_the_one_it_was_made_of(setup: Setup) -> None:
    LIKED.update({0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0})
    second = setup.candidate(setup.candidate())
    await setup.talk(11)
    with Pool(setup.folder.pool) as pool:
        gate = GateKeeper(setup.folder, pool)
        while setup.versions[second].state == "candidate":
            assert await gate.step()
        setup.candidate(second)
    await setup.measure()
    first, second, third = (setup.versions[number] for number in (1, 2, 3))
    assert [one.state for one in (first, second, third)] == ["rejected", "rejected", "candidate"]
    assert not third.gate, "it was made of a rejected version"
    turns = [one.gate[-1]["figures"]["turns"]["n"] for one in (first, second)]
    assert turns[0] == turns[1] > 0, "a version that was made before a rejection keeps its turns"
    assert [one.gate[-1]["comparison"] for one in (first, second)] == [2, 1]


@pytest.mark.parametrize("setup", [["gate.canaries=6"]], indirect=True)
async def test_a_gate_that_was_killed_between_two_versions_goes_on(setup: Setup) -> None:
    LIKED.update({0: 0.0, 1: 1.0})
    setup.candidate()
    await setup.talk(11)
    scores = setup.folder.gate / "scores.jsonl"
    with Pool(setup.folder.pool) as pool:
        gate = GateKeeper(setup.folder, pool)
        while await gate.step() and '"style"' not in scores.read_text():
            pass
    lines = scores.read_text().splitlines(keepends=True)
    mine = [line for line in lines if '"style"' not in line or json.loads(line)["version"] == 1]
    assert len(mine) == len(lines) - 6, "both versions were measured"
    scores.write_text("".join(mine))
    await setup.measure()
    promoted = setup.versions[1]
    assert promoted.state == "promoted"
    assert promoted.gate[-1]["figures"]["style"]["n"] == 6
    rows = [json.loads(line) for line in scores.read_text().splitlines()]
    measured = [(row["criterion"], row["item"], row["version"]) for row in rows]
    assert len(measured) == len(set(measured)), "nothing is measured twice"


async def test_a_worse_candidate_is_rejected(setup: Setup) -> None:
    LIKED.update({0: 1.0, 1: 0.5, 2: 0.0})
    setup.candidate(setup.candidate())
    await setup.talk(14)
    await setup.measure()
    assert [setup.versions[number].state for number in (1, 2)] == ["rejected"] * 2
    assert "clearly worse" in setup.versions[2].gate[-1]["reasons"][0]
    assert setup.versions[1].gate[-1]["reasons"] == ["version 2, which was made of it, shows no gain"]
    assert not any(setup.versions[number].folder.exists() for number in (1, 2))
    assert setup.versions.serving.number == 0


async def test_a_comparison_is_given_up_for_a_later_step(setup: Setup) -> None:
    LIKED.update(dict.fromkeys(range(5), 0.5))
    compared, parent = [], 0
    for conversations in (2, 1, 1, 4):  # 2, 3, 4 and 8 in all
        parent = setup.candidate(parent, conversations)
        await setup.talk(1)
        await setup.measure()
        compared.append(json.loads((setup.folder.gate / "latest.json").read_bytes())["version"])
    assert compared == [1, 1, 3, 4]
    assert {setup.versions[number].state for number in compared} == {"candidate"}
    assert json.loads((setup.folder.path / "gate.json").read_bytes())["submitted"] == 3, "each takes a level of its own"


async def test_what_was_done_by_hand_ends_the_comparison(setup: Setup) -> None:
    LIKED.update({0: 0.0, 1: 1.0, 2: 1.0})
    first, second = setup.candidate(), setup.candidate()
    await setup.talk(1)
    assert await setup.measure() == 1
    setup.versions.promote(first, "by hand")
    assert await setup.measure() == 0, "the second is no descendant of what answers"
    setup.versions.roll_back("by hand")
    assert await setup.measure() == 0, "nothing came after the rollback"
    await setup.talk(1)
    assert await setup.measure() == 1, "a new comparison of the second with version 0"
    assert setup.versions[second].state == "candidate"


def test_a_promoted_version_that_is_rated_worse_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources agree, an hour after an hour; one source alone cannot do it."""
    now = [1e6]
    monkeypatch.setattr("time.time", lambda: now[0])
    (tmp_path / "model").mkdir()
    folder = ServiceFolder(tmp_path / "service")
    folder.create(load_service_config(None, str(tmp_path / "model"), SETTINGS))
    versions = Versions.create(folder.versions, tmp_path / "model")
    versions.add(lambda part: (part / "weights").write_text("1"), parent=0, sessions=[])
    with Pool(folder.pool) as pool:

        def hour(version: int, votes: dict[str, int]) -> None:
            now[0] += 3600
            for source, vote in votes.items():
                id = pool.open_episode(channel=f"live:{source}")
                pool.append([(id, 0, Turn((1,), (2,), (-0.5,), version))])
                said = Judgement((1 if vote > 0 else -1,), ("",), "user", FEEDBACK).about()
                pool.set_turn_rewards(id, {0: float(vote)}, about={0: said})
                pool.close_episode(id, EpisodeEnd(outcome="solved"))

        gate = GateKeeper(folder, pool)
        for _ in range(60):
            hour(0, {"anna": 1, "bert": 1, "carl": 1})
        versions.promote(1, "better")
        for _ in range(15):
            hour(1, {"anna": 1, "bert": 1, "carl": -1})
        gate.look_after()
        assert versions.serving.number == 1, "one source is not enough"
        shown = CliRunner().invoke(app, ["serve", "status", "--dir", str(folder.path)])
        assert "Version 1 since its promotion: the mean signal dropped, but without one source" in shown.output
        for _ in range(40):
            hour(1, {"anna": -1, "bert": -1, "carl": -1})
            gate.look_after()
        assert versions.serving.number == 0
        assert "rate it worse" in versions.events[-1].reason
        gate.look_after()  # nothing more to do
        assert versions.serving.number == 0
