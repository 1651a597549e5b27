"""The Tinker API: our trainer, and tinker-cookbook on our environments, against SkyRL's server on a CPU.

The model is tiny. The server is SkyRL's, with some routes translated (``skyrl_server.py``). Needs the packages
``tinker``, ``tinker-cookbook`` and ``skyrl``.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="needs the Tinker SDK: clawgym interop check tinker")

import numpy as np
from tinker_cookbook.rl import train as cookbook

from clawgym.engines.tiny import make_tiny_model
from clawgym.interop.tinker import ClawGymDatasetBuilder, ClawGymGroup
from clawgym.pool import Pool
from clawgym.records import prompt_ids
from clawgym.tasks.sets import load
from clawgym.trainers.common.services import pool_file
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.step import StepMetrics
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local import grpo
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.training_state import TrainingState
from clawgym.trainers.protocols import train
from clawgym.trainers.tinker.state import TinkerLearner

from .one_task import EPISODES, FILE, TASK, by_gym_make, in_the_ledger
from .tiny_policy import SYSTEM, tiny_policy

KEY = "tml-not-a-real-key"
SERVER, TASKS = Path(__file__).with_name("skyrl_server.py"), Path(__file__).with_name("write_words.py")
pytestmark = pytest.mark.timeout(900)


def settings(model: Path | str, **parts: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "name": "tinker",
            "trainer": "tinker",
            "model": {"path": str(model), "context_window": 256, "lora": {"rank": 4, "alpha": 32}},
            "tasks": {
                "generators": ["write-word"],
                "demonstrations": {"count": 1},
                "train": {"first": 100, "count": 2},
                "validation": {"count": 1},
                "heldout": {"first": 100, "count": 1},
            },
            "agent": {"protocol": "text", "system_prompt": SYSTEM, "max_steps": 1, "max_tokens": 24},
            "rollout": {"groups": 2, "group_size": 8, "concurrency": 8},
            "algorithm": {"old": "rollout"},
            "optimizer": {"lr": 1e-3},
            "evaluation": {"before": False, "canary": 0, "every": 100},
            "budget": {"steps": 2},
            **parts,
        }
    )


class Server:
    """The running server, and what it stored."""

    def __init__(self, folder: Path) -> None:
        splits = load_splits(settings("").tasks, settings("").agent)
        tasks = [*splits.train, *splits.validation, *splits.heldout, *load(TASKS).tasks]
        self.model = tiny_policy(folder / "model", tasks)
        command = [sys.executable, str(SERVER), str(self.model), str(folder)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env=environment, start_new_session=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (folder / "log").read_text()
        self.url = f"http://127.0.0.1:{json.loads(line)['port']}"
        self._file = folder / "tinker.db"

    def stored(self, kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The requests of a kind, and their results."""
        with sqlite3.connect(self._file) as db:
            rows = db.execute("select request_type, request_data, result_data from futures order by request_id")
            found = [(name.lower(), json.loads(asked), json.loads(got or "null")) for name, asked, got in rows]
        return [(asked, got) for name, asked, got in found if name == kind]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(60)
        self._log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", running.url)
        patch.setenv("TINKER_API_KEY", KEY)
        patch.setenv("TINKER_TELEMETRY", "0")
        yield running
    running.close()


class Kept:
    """What a run of two steps made of its episodes."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.fetched: list[tuple[Any, dict[str, Any]]] = []
        self.batches: list[tuple[Any, int]] = []


@pytest.fixture(scope="module")
def trained(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    kept = Kept(tmp_path_factory.mktemp("run") / "run")
    make, step = grpo.make_batch, TinkerLearner.train_step

    def made(fetched: Any, config: TrainConfig, **options: Any) -> Any:
        kept.fetched.append((fetched, options))
        return make(fetched, config, **options)

    def stepped(self: TinkerLearner, batch: Any, *, seed: int, **options: Any) -> Any:
        kept.batches.append((batch, seed))
        return step(self, batch, seed=seed, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "make_batch", made)
        patch.setattr(TinkerLearner, "train_step", stepped)
        asyncio.run(train(settings(server.model), kept.run))
    return kept


def float32(values: Any) -> tuple[float, ...]:
    return tuple(np.array(values, np.float32).tolist())


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_it_trains(server: Server, trained: Kept, record_property: Callable[..., None]) -> None:
    rows = rows_of(trained.run, "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    updates = [row for row in rows if row["actor/grad_norm"] > 0]
    assert len(server.stored("optim_step")) == len(updates) > 0  # a step may have no group with different rewards
    names = json.loads((trained.run / "checkpoints/000002/tinker.json").read_text())
    assert names["state"].startswith("tinker://")
    record_property("held", "`trainer: tinker` takes two steps through the SDK, on SkyRL's server on a CPU")


def test_ids_are_those_of_the_server(server: Server, trained: Kept, record_property: Callable[..., None]) -> None:
    sampled = {
        (tuple(asked["prompt"]["chunks"][0]["tokens"]), tuple(one["tokens"]), float32(one["logprobs"]))
        for asked, got in server.stored("sample")
        for one in got["sequences"]
    }
    count = 0
    with Pool(pool_file(trained.run)) as pool:
        for episode in pool.episodes(channel="train"):
            turns = pool.turns(episode.id)
            for n, turn in enumerate(turns):
                assert (tuple(prompt_ids(turns, n)), turn.sampled_ids, float32(turn.logprobs)) in sampled
                assert not turn.flaw
                count += 1
    assert count >= 16
    record_property("held", f"the ids and log-probs of {count} turns in the pool are those in the server's database")


def test_advantages_are_those_of_the_local_trainer(
    server: Server, trained: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    local = settings(server.model, trainer="local")
    minis: list[Any] = []
    monkeypatch.setattr(Learner, "_update", lambda self, mini, metrics, **_: minis.append(mini) or 0.0)
    learner = TrainingState.load(local, tmp_path, server.model).learner
    expected = []
    for (fetched, options), (_, seed) in zip(trained.fetched, trained.batches, strict=True):
        learner.train_step(grpo.make_batch(fetched, local, **options), seed=seed)
    for mini in minis:
        batch = mini.batch
        for n in learner._rows_with_gradient(batch, mini.part):
            own = batch.row == n
            gains = (mini.weights * batch.advantages)[own].tolist()
            expected.append((batch.sequences[n].ids, gains, mini.old[own].tolist()))
    got = [datum for asked, _ in server.stored("forward_backward") for datum in asked["data"]]
    assert len(got) == len(expected) > 0
    ids = 0
    for datum, (sequence, gains, old) in zip(got, expected, strict=True):
        inputs = {name: of["data"] for name, of in datum["loss_fn_inputs"].items()}
        assert [*datum["model_input"]["chunks"][0]["tokens"], inputs["target_tokens"][-1]] == list(sequence)
        assert [value for value in inputs["advantages"] if value] == gains
        assert [value for value in inputs["logprobs"] if value] == old
        ids += len(gains)
    record_property(
        "held", f"the server gets the advantages of {ids} ids that the local trainer computes: equal numbers"
    )


def test_logprobs_of_the_server(server: Server, trained: Kept, record_property: Callable[..., None]) -> None:
    """Those of the old policy, which ``old: recompute`` asks the server for, and those of our model."""
    import tinker

    batch, _ = trained.batches[0]
    service = tinker.ServiceClient(api_key=KEY)
    training = service.create_lora_training_client(str(server.model), rank=4, seed=0).result()
    recompute = settings(server.model, algorithm={"old": "recompute"})
    _, old = TinkerLearner(training, recompute)._prepared(batch, StepMetrics())
    service.close("success").result()
    assert len(old) == len(batch.rollout_logp)
    apart = float((old - batch.rollout_logp).abs().max())
    assert apart < 1e-2
    record_property("held", f"its log-probs in training and in sampling differ by at most {apart:.1e}")


def test_resume(server: Server, trained: Kept, record_property: Callable[..., None]) -> None:
    loads = len(server.stored("load_weights"))
    progress = asyncio.run(train(settings(server.model, budget={"steps": 3}), trained.run))
    assert progress.step == 3
    assert len(server.stored("load_weights")) == loads + 1
    assert [row["step"] for row in rows_of(trained.run, "metrics.jsonl")] == [1, 2, 3]
    state = json.loads((trained.run / "checkpoints/000003/state.json").read_text())
    assert state["updates"] == len([row for row in rows_of(trained.run, "metrics.jsonl") if row["actor/grad_norm"]])
    record_property("held", "the same command resumes from the server's checkpoint, with its optimizer")


def test_the_key_is_not_stored(server: Server, trained: Kept) -> None:
    for path in trained.run.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


def test_cookbook(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    monkeypatch.setattr(cookbook, "fetch_model_pricing", lambda model: None)  # reads a page on the Internet
    builder = ClawGymDatasetBuilder(
        tasks=str(TASKS),
        model=str(server.model),
        groups=2,
        group_size=8,
        protocol="text",
        system_prompt=SYSTEM,
        max_steps=1,
    )
    groups = pickle.loads(pickle.dumps(asyncio.run(builder())[0].get_batch(0)))
    assert [group.size for group in groups] == [8, 8]
    before = len(server.stored("forward_backward"))
    config = cookbook.Config(
        learning_rate=1e-3,
        dataset_builder=builder,
        model_name=str(server.model),
        recipe_name="clawgym",
        max_tokens=24,
        log_path=str(tmp_path),
        lora_rank=4,
        eval_every=0,
        save_every=0,
        base_url=server.url,
        num_groups_to_log=0,
        max_steps=1,
    )
    asyncio.run(cookbook.main(config))
    (row,) = [row for row in rows_of(tmp_path, "metrics.jsonl") if "env/all/reward/total" in row]
    assert 0 < row["env/all/reward/total"] < 1
    sent = [datum for asked, _ in server.stored("forward_backward")[before:] for datum in asked["data"]]
    assert len(sent) == 16
    assert any(any(datum["loss_fn_inputs"]["advantages"]["data"]) for datum in sent)
    record_property("held", "`tinker_cookbook.rl.train` takes a step on 16 of our episodes, by `EnvGroupBuilder`")


async def test_the_task_of_several_routes(tmp_path: Path, record_property: Callable[..., None]) -> None:
    """tinker-cookbook's ``Env``, with ids that are scripted: its observations are the prompts of our ledger."""
    model = make_tiny_model(tmp_path / "model")
    for what, commands in EPISODES.items():
        played = await asyncio.to_thread(by_gym_make, commands)
        with Pool(tmp_path / f"{what}.db") as pool:
            turns = (await in_the_ledger(pool, model, commands)).episode.turns
        group = ClawGymGroup(str(FILE), TASK.id, str(model), size=1, reward="official", protocol="text")
        (env,) = await group.make_envs()
        observation, _ = await env.initial_observation()
        for n, turn in enumerate(turns):
            assert observation.to_ints() == list(prompt_ids(turns, n))
            result = await env.step(turn.sampled_ids)
            observation = result.next_observation
        assert (result.episode_done, result.reward) == (True, played.reward)
        await group.cleanup()
    record_property("held", "a task that other routes play: all prompts as our ledger, rewards as `gym.make`")
