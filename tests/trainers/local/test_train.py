"""Whole runs: SFT, then RL, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from clawgym.engines.transformers import TransformersEngine
from clawgym.errors import RunFolderError, TrainingError
from clawgym.pool import Pool, sequences_of
from clawgym.records import TaskFile, VerifierSpec
from clawgym.tasks.formats import write
from clawgym.tasks.packs import terminal_basic
from clawgym.trainers.common.checkpoints import Checkpoints
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.main import plan, train

from ..runs import Said, small

pytestmark = pytest.mark.asyncio(loop_scope="module")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a supervised run."""
    out = tmp_path_factory.mktemp("runs") / "sft"
    asyncio.run(train(small(), out, "sft", view=Said()))
    return out


async def test_sft_leaves_loadable_model(taught: Path) -> None:
    assert [row["step"] for row in lines(taught / "metrics.jsonl")] == [1, 2, 3, 4]
    measured = [(row["split"], row["step"], row["greedy"]) for row in lines(taught / "evaluations.jsonl")]
    assert measured[:3] == [("validation", n, False) for n in (0, 2, 4)]
    assert {(split, greedy) for split, _, greedy in measured[3:]} == {("heldout", False), ("heldout", True)}
    best = Checkpoints(taught).best()
    assert best is not None
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        file.name for file in (best / "model").iterdir()
    }
    assert '"evaluations":[{' in (taught / "report.html").read_text()


async def test_sft_resumes_where_it_stopped(taught: Path, tmp_path: Path) -> None:
    stop = asyncio.Event()

    class Stopping(Said):
        def step(self, step: int, metrics: Any) -> None:
            super().step(step, metrics)
            if step == 3:
                stop.set()

    first, second = Stopping(), Said()
    await train(small(), tmp_path / "sft", "sft", view=first, stop=stop)
    await train(small(), tmp_path / "sft", "sft", view=second)
    assert (first.steps, second.steps) == ([1, 2, 3], [4])  # saved where it was stopped
    assert [row["step"] for row in lines(tmp_path / "sft/metrics.jsonl")] == [1, 2, 3, 4]
    whole, stopped = (
        load_file(run / "checkpoints/000004/model/model.safetensors") for run in (taught, tmp_path / "sft")
    )
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


async def test_stop_between_checkpoints_saves_one(taught: Path, tmp_path: Path) -> None:
    config = small(model={"path": str(taught)}, checkpoint_every=10, evaluation={"every": 10}, budget={"steps": 2})
    stop = asyncio.Event()

    class Stopping(Said):
        def step(self, step: int, metrics: Any) -> None:
            super().step(step, metrics)
            stop.set()

    first, second = Stopping(), Said()
    await train(config, tmp_path / "rl", view=first, stop=stop)
    assert Checkpoints(tmp_path / "rl").last() == tmp_path / "rl/checkpoints/000001"
    await train(config, tmp_path / "rl", view=second)
    assert (first.steps, second.steps) == ([1], [2])


@pytest.mark.parametrize("method", ["sft", "rl"])
@pytest.mark.parametrize("during", [1, 2, 3])
async def test_stop_during_an_evaluation(taught: Path, tmp_path: Path, method: str, during: int) -> None:
    """The first validation, a later one, or that of the held-out split at the end is left at once and done again."""
    config = small(model={"path": str(taught)}, evaluation={"every": 1, "before": False}, budget={"steps": 1})
    config = config if method == "rl" else small(sft={"steps": 2, "evaluate_every": 2})
    stop = asyncio.Event()

    class Stopping(Said):
        def __init__(self) -> None:
            super().__init__()
            self.measurements = 0

        def measuring(self, part: str, episodes: int) -> None:
            self.measurements += 1
            if self.measurements == during:
                stop.set()

    await train(config, tmp_path / "run", method, view=Stopping(), stop=stop)
    first = [("validation", 0), ("validation", 1 if method == "rl" else 2)]
    known = [(row["split"], row["step"]) for row in lines(tmp_path / "run/evaluations.jsonl")] if during > 1 else []
    assert known == first[: during - 1], "an evaluation that was cut short has no score"
    again = Said()
    progress = await train(config, tmp_path / "run", method, view=again)
    assert bool(again.steps) == (during == 1), "no update is lost or repeated"
    rows = lines(tmp_path / "run/evaluations.jsonl")
    assert [(row["split"], row["step"]) for row in rows[:2]] == first
    assert [(row["split"], row["greedy"]) for row in rows[2:]] == [("heldout", False), ("heldout", True)]
    assert progress.best_score == max(row["score"] for row in rows[:2])


async def test_updates_have_one_thread(taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc keeps what an update freed for its thread, so each further thread would hold as much again."""
    threads: set[int] = set()
    step = Learner._step

    def watched(self: Learner) -> float:
        threads.add(threading.get_ident())
        return step(self)

    monkeypatch.setattr(Learner, "_step", watched)
    await train(small(), tmp_path / "sft", "sft", view=Said())
    await train(small(model={"path": str(taught)}, budget={"steps": 4}), tmp_path / "rl", view=Said())
    assert len(threads) == 1
    assert threads != {threading.get_ident()}, "the event loop goes on meanwhile"


async def test_sft_stops_at_requested_score(tmp_path: Path) -> None:
    """Tasks with the same solution: a small model solves all of them after some steps."""
    easy = terminal_basic.make("write-word", 0)
    reward = TaskFile("reward.sh", f"test -e {easy.workspace}/done && echo 1 || echo 0\n".encode(), executable=True)
    tasks = (
        replace(
            easy,
            id=f"easy-{n}",
            instruction=f"Begin number {n}.",
            verifier=VerifierSpec("reward_sh", (reward,)),
            solution=(TaskFile("solve.sh", f"touch done # {n}\n".encode()),),
        )
        for n in range(10)
    )
    write(tasks, tmp_path / "easy")
    config = small(
        tasks={"set": str(tmp_path / "easy"), "demonstrations": {"first": 0, "count": 6}, "train": {"first": 6},
               "validation": {"first": 7, "count": 2}, "heldout": {"first": 9}},
        agent={"protocol": "text", "system_prompt": "Work.", "max_steps": 3, "max_tokens": 24},
        sft={"steps": 400, "batch": 6, "lr": 5e-3, "evaluate_every": 40, "until": 1.0},
    )  # fmt: skip
    progress = await train(config, tmp_path / "sft", "sft", view=Said())
    assert progress.best_score == 1.0
    assert progress.step == progress.best_step < 400
    again = await train(config, tmp_path / "sft", "sft", view=Said())
    assert again.step == progress.step


async def test_missing_model_or_data_leaves_no_run(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for method in ("sft", "rl"):
        with pytest.raises(TrainingError, match=r"model\.path .*/nowhere: no such folder"):
            await train(small(model={"path": nowhere}), tmp_path / "run", method, view=Said())
    with pytest.raises(TrainingError, match=r"sft\.data .*/nowhere: no such file"):
        await train(small(sft={"data": nowhere}), tmp_path / "run", "sft", view=Said())
    assert not list(tmp_path.iterdir())


async def test_rl_run(taught: Path, tmp_path: Path) -> None:
    config = small(
        model={"path": str(taught)},
        rollout={"groups": 2, "group_size": 2, "staleness": 1},
        algorithm={"imitation": 0.5},
    )
    out = tmp_path / "rl"
    progress = await train(config, out, view=Said())
    assert progress.step == 3
    rows = lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/submitted_trajectories"] == 4
        assert row["training/rollout_probs_diff"] < 1e-4  # trainer and engine agree
        assert row["staleness/max"] <= 1
        assert row["sft/loss"] > 0
    with Pool(out / "pool.db") as pool:
        stats = pool.stats()["channels"]
        assert stats["train"]["fates"]["delivered"] == 12
        assert stats["train"]["groups"]["consumed"] == 6
        versions = {
            t.policy_version for e in pool.episodes(channel="train") for t in pool.turns(e.id) if e.fate == "delivered"
        }
        episode = next(e for e in pool.episodes(channel="train") if e.fate == "delivered")
        assert sequences_of(pool.turns(episode.id))
    assert versions <= {0, 1, 2}
    assert len(versions) > 1
    files = sorted(path.name for path in (out / "advantages").iterdir())
    assert files == [f"{step:08d}.json" for step in range(3)]
    measured = [(row["split"], row["step"]) for row in lines(out / "evaluations.jsonl")]
    assert [step for split, step in measured if split == "validation"] == [0, 2, 3]  # every second step, and the last
    assert "heldout" in dict(measured)
    other = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"weight_decay": 0.1})})
    with pytest.raises(RunFolderError, match=r"belongs to another configuration .*optimizer\.weight_decay"):
        await train(other, out, view=Said())
    longer = config.model_copy(update={"budget": config.budget.model_copy(update={"steps": 4})})
    said = Said()
    await train(longer, out, view=said)
    assert said.steps == [4]


@pytest.mark.parametrize(("staleness", "free"), [(0, True), (1, False)])
async def test_updates_have_the_memory_of_episodes(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, free: bool
) -> None:
    engines: list[TransformersEngine] = []
    held: list[int] = []
    made, train_step = TransformersEngine.__init__, Learner.train_step

    def make(self: TransformersEngine, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        engines.append(self)

    def step(*args: Any, **named: Any) -> Any:
        found = engines[-1].occupancy()
        held.append(found["held"] + found["kept"])
        return train_step(*args, **named)

    monkeypatch.setattr(TransformersEngine, "__init__", make)
    monkeypatch.setattr(Learner, "train_step", step)
    rollout = {"groups": 2, "group_size": 2, "staleness": staleness}
    await train(small(model={"path": str(taught)}, rollout=rollout), tmp_path / "rl", view=Said())
    assert (held == [0, 0, 0]) == free


async def test_exceeded_guard_keeps_last_good_checkpoint(taught: Path, tmp_path: Path) -> None:
    leaps = small(model={"path": str(taught)}, algorithm={"imitation": 1.0}, optimizer={"lr": 0.5, "warmup": 1})
    with pytest.raises(TrainingError, match=r"KL of one step is .*resume from the last checkpoint"):
        await train(leaps, tmp_path / "rl", view=Said())
    checkpoints = Checkpoints(tmp_path / "rl")
    assert (checkpoints.last(), checkpoints.best()) == (tmp_path / "rl/checkpoints/000000",) * 2
    assert '"evaluations":[{' in (tmp_path / "rl/report.html").read_text()


async def test_lora_training_and_sampling(taught: Path, tmp_path: Path) -> None:
    best = Checkpoints(taught).best()
    about = {"path": str(best / "model"), "lora": {"rank": 2}}  # type: ignore[operator]
    config = small(model=about, budget={"steps": 2}, evaluation={"every": 2, "before": False})
    out = tmp_path / "lora"
    await train(config, out, view=Said())
    measured = [(row["split"], row["greedy"]) for row in lines(out / "evaluations.jsonl")]
    assert measured == [("validation", False), ("validation", False), ("heldout", False), ("heldout", True)]
    assert all(row["training/rollout_probs_diff"] < 1e-4 for row in lines(out / "metrics.jsonl"))
    last = Checkpoints(out).last()
    assert last is not None
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in (last / "adapter").iterdir()}


async def test_full_disk_raises_before_overwriting(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clawgym.trainers.common import checkpoints

    config = small(model={"path": str(taught)}, budget={"steps": 1})
    await train(config, tmp_path / "rl", view=Said())
    before = Checkpoints(tmp_path / "rl").last()
    usage = checkpoints.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda where: usage._replace(free=1000))
    longer = small(model={"path": str(taught)}, budget={"steps": 2})
    with pytest.raises(TrainingError, match=r"takes \d+ MiB and 0 MiB are free: .* from checkpoint 000001"):
        await train(longer, tmp_path / "rl", view=Said())
    assert Checkpoints(tmp_path / "rl").last() == before
    assert not list((tmp_path / "rl/checkpoints").glob(".0*"))
    monkeypatch.undo()
    said = Said()
    await train(longer, tmp_path / "rl", view=said)
    assert said.steps == [2]


async def test_metrics_go_to_trackers(taught: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = {"wandb": {"mode": "offline"}, "tensorboard": None}
    out = tmp_path / "tracked"
    await train(small(model={"path": str(taught)}, tracking=tracking, budget={"steps": 1}), out, view=Said())
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    (row,) = lines(out / "metrics.jsonl")
    (shown,) = board.Scalars("actor/grad_norm")
    assert (shown.step, shown.value) == (1, pytest.approx(row["actor/grad_norm"]))


async def test_plan_describes_run(tmp_path: Path) -> None:
    about = plan(small(), "rl", tmp_path / "run")
    assert about["tasks"] == {"demonstrations": 4, "train": 6, "validation": 2, "heldout": 2}
    assert about["episodes_a_step"] == 4
    assert sum(about["memory_bytes"].values()) > 0
    assert not (tmp_path / "run").exists()
    assert isinstance(small(), TrainConfig)


def memory(tmp_path: Path, **parts: Any) -> dict[str, int]:
    return dict(plan(small(**parts), "rl", tmp_path / "run")["memory_bytes"])


async def test_plan_of_a_trainer_elsewhere_has_no_memory_of_this_machine(tmp_path: Path) -> None:
    about = plan(small(trainer="tinker"), "rl", tmp_path / "run")
    assert about["episodes_a_step"] == 4
    assert about["memory"] == "not estimated for trainer tinker"
    assert about["device"] is None
    assert about["memory_bytes"] == about["peak_bytes"] == about["activations_bytes"] == {}


async def test_planned_memory_grows_with_settings(tmp_path: Path) -> None:
    kept = "activations that are kept"
    plain = memory(tmp_path)
    peaks = plan(small(), "rl", tmp_path / "run")["peak_bytes"]
    assert peaks["rollouts"] < plan(small(rollout={"staleness": 1}), "rl", tmp_path / "run")["peak_bytes"]["the loss"]
    weights = 4 * plan(small(), "rl", tmp_path / "run")["weights"]
    assert plain["weights of the policy"] == plain["weights of the engine"] == plain["gradients"] == weights
    assert plain["moments of AdamW"] == 2 * weights
    wider = memory(tmp_path, model={"scratch": {**small().model.scratch.model_dump(), "hidden": 64}})
    assert all(wider[name] >= size for name, size in plain.items())
    longer = memory(tmp_path, compute={"micro_tokens": 2048, "row_tokens": 256})
    assert longer[kept] == 2 * plain[kept]
    assert memory(tmp_path, compute={"micro_tokens": 10**6})["logits"] == 2**24 * 4 * 5
    deep = small().model.scratch.model_dump() | {"layers": 8}
    stored, again = (memory(tmp_path, model={"scratch": deep}, compute={"checkpointing": on}) for on in (False, True))
    assert again[kept] < stored[kept] / 4
    half = memory(tmp_path, model={"scratch": small().model.scratch.model_dump(), "dtype": "bfloat16"})
    assert half["weights of the policy"] == half["gradients"] == weights / 2
    assert half["float32 copies of the weights"] == half["float32 gradients"] == weights
    assert "weights of the initial policy" in memory(tmp_path, algorithm={"kl": 0.1})
    one_row = memory(tmp_path, model={"scratch": small().model.scratch.model_dump(), "context_window": 4096})
    assert one_row[kept] == 4 * plain[kept]  # sequences are not cut


async def test_plan_for_vision_model(tmp_path: Path) -> None:
    from clawgym.engines.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path / "sees", vision=True)
    about = plan(small(model={"path": str(folder)}), "rl", tmp_path / "run")
    assert about["weights"] > sum(
        t.numel() for n, t in load_file(folder / "model.safetensors").items() if "visual" in n
    )
    assert all(about["memory_bytes"].values())


async def test_turns_are_judged_before_training(taught: Path, tmp_path: Path) -> None:
    config = small(model={"path": str(taught)}, reward={"judge": "rule"}, budget={"steps": 2})
    out = tmp_path / "judged"
    await train(config, out, view=Said())
    rows = lines(out / "metrics.jsonl")
    assert all(row["judge/unscored"] >= 0 and "reward/process_mean" in row for row in rows)
    with Pool(out / "pool.db") as pool:
        for episode in pool.episodes(channel="train"):
            judged, turns = pool.turn_rewards(episode.id).get("judge", {}), pool.turns(episode.id)
            assert set(judged) <= set(range(len(turns)))
            about = pool.about_turn_rewards(episode.id).get("judge", {})
            assert set(about) == set(judged)
            assert all(entry["judge"] == "rule" and entry["votes"] for entry in about.values())
        assert not any(pool.turn_rewards(episode.id) for episode in pool.episodes(channel="validation"))
    for wrong, said in (
        ({"judge": "oracle"}, "there is no judge 'oracle'.*Known judges: complaints, model, policy, prm, rule"),
        ({"judge": "model"}, "set reward.model"),
    ):
        with pytest.raises(ValidationError, match=said):
            small(model={"path": str(taught)}, reward=wrong)


async def test_turns_are_rewarded_for_the_verifiers_checks(taught: Path, tmp_path: Path) -> None:
    """Each turn has the change of the checks' mean score, and no judge runs."""
    about = small(model={"path": str(taught)}, reward={"milestones": "turn"}, budget={"steps": 1})
    await train(about, tmp_path / "rl", "rl", view=Said())
    metrics = lines(tmp_path / "rl/metrics.jsonl")[0]
    assert metrics["reward/process_scored_frac"] == 1
    assert metrics["reward/milestones_unstable_tasks"] == 0
    assert not [name for name in metrics if name.startswith("judge/")]
    with Pool(tmp_path / "rl/pool.db") as pool:
        for episode in pool.episodes(channel="train"):
            rewards = pool.turn_rewards(episode.id)["judge"]
            assert len(rewards) == episode.n_turns
            assert sum(rewards.values()) == episode.rewards["strict"]  # one check, failing at first


async def test_length_and_malformed_penalties(taught: Path, tmp_path: Path) -> None:
    config = small(
        model={"path": str(taught)},
        budget={"steps": 1},
        reward={"malformed": 0.5, "length": 1.0, "longest": 4, "slack": 4},
    )
    await train(config, tmp_path / "rl", view=Said())
    (row,) = lines(tmp_path / "rl/metrics.jsonl")
    assert -1 <= row["reward/penalty_length"] < 0
    with Pool(tmp_path / "rl/pool.db") as pool:
        members = [(e, pool.turns(e.id)) for e in pool.episodes(channel="train") if e.fate == "delivered"]
        lost = [e.penalties for e, _ in members]
    lengths = [sum(len(turn.sampled_ids) for turn in turns) for _, turns in members]
    assert [one["length"] for one in lost] == [-min(1.0, length / 4) for length in lengths]
    shares = [sum(turn.malformed_calls > 0 for turn in turns) / len(turns) for _, turns in members]
    assert [one["malformed"] for one in lost] == [-0.5 * share for share in shares]
    assert row["reward/penalty_malformed"] == pytest.approx(-0.5 * sum(shares) / len(shares))


async def test_custom_judge(taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pleased_judge.py").write_text(
        "from clawgym.rewards.rules import RuleJudge\n\n\n"
        "def make():\n    return RuleJudge(lambda asked: 1, rule='always pleased')\n\n\n"
        "def number():\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = {"path": str(taught)}
    await train(
        small(model=model, reward={"judge": "pleased_judge:make"}, budget={"steps": 1}), tmp_path / "rl", view=Said()
    )

    with Pool(tmp_path / "rl" / "pool.db") as pool:
        rewards = [pool.turn_rewards(episode.id).get("judge", {}) for episode in pool.episodes(channel="train")]
    assert {value for found in rewards for value in found.values()} <= {1.0, -1.0}
    assert any(1.0 in found.values() for found in rewards)
    for name, message in (
        ("pleased_judge:absent", "has no attribute 'absent'.*write package.module:thing"),
        ("no_such_module:make", "No module named 'no_such_module'"),
    ):
        with pytest.raises(ValidationError, match=f"judge '{name}' was not found .*{message}"):
            small(model=model, reward={"judge": name})
    with pytest.raises(TrainingError, match=r"reward\.judge: pleased_judge:number gave int, which is not a judge"):
        await train(small(model=model, reward={"judge": "pleased_judge:number"}), tmp_path / "wrong", view=Said())


_ODD = """
import asyncio
from clawgym.records.judge import Judgement


class Hangs:
    name, version = "hangs", "0"

    async def judge(self, asked):
        await asyncio.Event().wait()
"""


async def test_hanging_judge_loses_no_episode(taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_judges.py").write_text(_ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    view = Said()
    config = small(
        model={"path": str(taught)},
        reward={"judge": "odd_judges:Hangs"},
        rollout={"groups": 2, "group_size": 2, "concurrency": 8, "deadline": 20},
        evaluation={"every": 1, "canary": 0},
        budget={"steps": 1},
    )
    await train(config, tmp_path / "rl", view=view)
    (row,) = lines(tmp_path / "rl" / "metrics.jsonl")
    assert row["rollout/submitted_trajectories"] == 4
    assert row["judge/scored"] == 0 < row["judge/unscored"]
    assert row["reward/process_worth"] == pytest.approx(0.45)
    with Pool(tmp_path / "rl" / "pool.db") as pool:
        assert {episode.fate for episode in pool.episodes(channel="train") if episode.group == "group-00000000"} == {
            "delivered"
        }
    assert any("warning: " in text and "for late" in text for text in view.texts)


_CONTRARY = """
from clawgym.records.judge import Judgement

class Contrary:
    name, version = "contrary", "0"

    async def judge(self, asked):
        said = asked.after.outcome
        return Judgement((None if said is None else -1 if "is solved" in said else 1, 0), ("", ""), "contrary", "0")
"""


async def test_wrong_judge_loses_weight_also_after_resume(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "contrary_judges.py").write_text(_CONTRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    easy = terminal_basic.make("write-word", 0)
    tasks = (
        replace(
            easy,
            id=f"given-{n}",
            instruction=f"Begin number {n}.",
            verifier=VerifierSpec("reward_sh", (TaskFile("reward.sh", f"echo {n % 2}\n".encode(), executable=True),)),
            solution=(TaskFile("solve.sh", f"touch done # {n}\n".encode()),),
        )
        for n in range(12)
    )
    write(tasks, tmp_path / "given")
    config = small(
        model={"path": str(taught)},
        tasks={"set": str(tmp_path / "given"), "demonstrations": {"first": 0}, "train": {"first": 1, "count": 8},
               "validation": {"first": 9}, "heldout": {"first": 10}},
        reward={"judge": "contrary_judges:Contrary", "verdict": True, "count_zeros": False},
        evaluation={"every": 4, "canary": 0},
        budget={"steps": 4},
    )  # fmt: skip
    await train(config, tmp_path / "whole", view=Said())
    part = config.model_copy(update={"budget": config.budget.model_copy(update={"steps": 2})})
    for about in (part, config):
        await train(about, tmp_path / "broken", view=Said())
    whole, broken = ([row["reward/process_worth"] for row in lines(tmp_path / run / "metrics.jsonl")]
                     for run in ("whole", "broken"))  # fmt: skip
    assert whole[0] == pytest.approx(0.45)
    assert whole[2] < whole[1] < 0.45
    assert broken == whole
    with Pool(tmp_path / "whole/pool.db") as pool:
        given = [pool.turn_rewards(e.id) for e in pool.episodes(channel="train") if e.fate == "delivered"]
    assert {value for one in given for value in one["judge"].values()} == {-1.0, 1.0}  # zeros were left out
