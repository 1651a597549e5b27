"""Tensors of a batch: equal, bit by bit, to loops over tokens."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clawgym.pool.states import Batch
from clawgym.records import TrainingSequence
from clawgym.trainers.common.advantages import trained_by_turn, write_advantages
from clawgym.trainers.common.answers import trained_advantages
from clawgym.trainers.common.batch import make_batch, scored_episodes
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import trained_episodes, turn_advantages

from ..batches import batch_of, episode_of, sample_of, teacher_of

JUDGED = TrainConfig.model_validate({"reward": {"judge": "policy"}, "distillation": {"hints": 1}})
PLAIN = TrainConfig()

Teachers = dict[tuple[str, int], list[float]]
logprobs = st.floats(-30, 0)


@st.composite
def samples(draw: st.DrawFn, turns: list[int]) -> TrainingSequence:
    """A sequence that trains some ids of each of ``turns``."""
    ids, mask, turn_of = [3], [0], []
    for turn in turns:
        count = draw(st.integers(1, 5))
        gap = draw(st.integers(0, 3))
        ids += draw(st.lists(st.integers(0, 5), min_size=gap + count, max_size=gap + count))
        mask += [0] * gap + [1] * count
        turn_of += [turn] * count
    return sample_of(ids, mask, draw(st.lists(logprobs, min_size=len(turn_of), max_size=len(turn_of))), turn_of)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, Teachers]:
    groups, teachers, number = [], dict[tuple[str, int], list[float]](), 0
    for _ in range(draw(st.integers(1, 3))):
        members = []
        for _ in range(draw(st.integers(1, 4))):
            turns = draw(st.lists(st.integers(0, 40), unique=True, max_size=4).map(sorted))
            cut = draw(st.integers(0, len(turns)))
            found = [draw(samples(part)) for part in (turns[:cut], turns[cut:]) if part]
            judged = {turn: draw(st.floats(-1, 1)) for turn in turns if draw(st.booleans())}
            members.append(episode_of(number, draw(st.sampled_from([0.0, 0.25, 1.0])), found, judged))
            for turn in turns:
                if draw(st.booleans()):
                    count = sum(sample.turn_of.count(turn) for sample in found)
                    teachers[f"e{number}", turn] = draw(st.lists(logprobs, min_size=count, max_size=count))
            number += 1
        groups.append(members)
    return batch_of(groups), teachers


def by_loops(batch: Batch, teachers: Teachers, config: TrainConfig) -> tuple[dict[str, list[Any]], tuple[int, ...]]:
    """The fields of a batch, token by token; and its trained episodes."""
    scored = scored_episodes(batch)
    by_turn, _ = turn_advantages(scored, config, seed=0)
    fields: dict[str, list[Any]] = {
        name: [] for name in ("row", "episode", "advantages", "rollout_logp", "teacher_logp")
    }
    rows, signal = 0, set()
    for number, member in enumerate(member for group in batch.groups for member in group.episodes):
        for sample in member.sequences:
            seen: dict[int, int] = {}
            for logprob, turn in zip(sample.logprobs, sample.turn_of, strict=True):
                place = seen[turn] = seen.get(turn, -1) + 1
                said = teachers.get((member.episode.id, turn))
                taught = math.nan if said is None else said[place]
                if by_turn[number, turn] or said is not None:
                    signal.add(number)
                for name, value in zip(fields, (rows, number, by_turn[number, turn], logprob, taught), strict=True):
                    fields[name].append(value)
            rows += 1
    return fields, trained_episodes(scored, signal, config)


@given(batches(), st.sampled_from([PLAIN, JUDGED]))
@settings(max_examples=50, deadline=None)
def test_batch_equals_loops_over_tokens(made: tuple[Batch, Teachers], config: TrainConfig) -> None:
    assume(config is PLAIN or any(member.sequences for group in made[0].groups for member in group.episodes))
    found = make_batch(made[0], config, seed=0, teachers={key: teacher_of(said) for key, said in made[1].items()})
    fields, trained = by_loops(*made, config)
    assert found.trained == trained
    for name, values in fields.items():
        dtype = torch.int64 if name in ("row", "episode") else torch.float32
        tensor: torch.Tensor = getattr(found, name)
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor, torch.tensor(values, dtype=dtype), rtol=0, atol=0, equal_nan=True)


@given(batches(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_stored_advantages_are_those_of_the_trained_tokens(made: tuple[Batch, Teachers], random: Any) -> None:
    found = make_batch(made[0], PLAIN, seed=0)
    used = torch.tensor([random.uniform(-2, 2) for _ in found.advantages], dtype=torch.float32)
    wanted: dict[tuple[int, int], list[float]] = {}
    at = 0
    for number, member in enumerate(found.episodes):
        for turn in (turn for sample in member.sequences for turn in sample.turn_of):
            wanted.setdefault((number, turn), []).append(float(used[at]))
            at += 1
    with tempfile.TemporaryDirectory() as folder:
        write_advantages(Path(folder), 7, trained_by_turn(found, used))
        for number, member in enumerate(found.episodes):
            stored = trained_advantages(Path(folder), 7, member.episode.id)
            mine = {turn: values for (owner, turn), values in wanted.items() if owner == number}
            assert stored.keys() == (mine.keys() if number in found.trained else set())
            for turn, figures in stored.items():
                values = mine[turn]
                expected = (sum(values) / len(values), min(values), max(values))
                torch.testing.assert_close(torch.tensor(figures), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        assert trained_advantages(Path(folder), 8, "e0") == {}
