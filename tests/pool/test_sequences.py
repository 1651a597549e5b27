from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from clawgym.pool import sequences_of
from clawgym.records import Turn, prompt_ids

from .histories import chain, histories


def proved(turns: list[Turn], index: int) -> bool:
    """No flaw from the first turn of its history to this one."""
    step: int | None = index
    while step is not None:
        if turns[step].flaw is not None:
            return False
        step = turns[step].parent
    return True


@settings(deadline=None, max_examples=600)
@given(turns=histories())
def test_every_exact_sampled_id_is_trained_once(turns: list[Turn]) -> None:
    for roles in (("main",), ("main", "subagent"), ("compaction",)):
        samples = sequences_of(turns, roles=roles)
        trained = Counter(index for sample in samples for index in sample.turn_of)
        assert trained == Counter(
            {
                index: len(turn.sampled_ids)
                for index, turn in enumerate(turns)
                if turn.role in roles and turn.sampled_ids and proved(turns, index)
            }
        )
        for sample in samples:
            last = sample.turns[-1]
            assert sample.ids == prompt_ids(turns, last) + turns[last].sampled_ids
            assert all(turns[index].flaw is None for index in sample.turns)
            at = [place for place, bit in enumerate(sample.mask) if bit]
            assert len(sample.mask) == len(sample.ids)
            assert len(at) == len(sample.logprobs) == len(sample.policy_versions) == len(sample.turn_of) > 0
            by_turn: dict[int, list[tuple[int, float, int | None]]] = {}
            for place, logprob, version, index in zip(
                at, sample.logprobs, sample.policy_versions, sample.turn_of, strict=True
            ):
                by_turn.setdefault(index, []).append((sample.ids[place], logprob, version))
            for index, rows in by_turn.items():
                turn = turns[index]
                versions = [turn.policy_version] * len(turn.sampled_ids)
                assert rows == list(zip(turn.sampled_ids, turn.logprobs, versions, strict=True))


def test_episode_without_branches_is_one_sequence() -> None:
    turns = chain(1, 20)
    (sample,) = sequences_of(turns)
    assert sample.turns == tuple(range(20))
    assert sum(sample.mask) == sum(len(turn.sampled_ids) for turn in turns)


def test_flaw_removes_the_turn_and_its_continuations() -> None:
    turns = chain(2, 3)
    turns += chain(3, 1, parent=2, flaw="constrained") + chain(4, 1, parent=3)
    (sample,) = sequences_of(turns)
    assert sample.turns == (0, 1, 2)


def test_a_compaction_that_reads_the_main_history_does_not_split_it() -> None:
    turns = chain(5, 2)
    turns += chain(6, 1, parent=1, role="compaction") + chain(7, 1, parent=1)
    (sample,) = sequences_of(turns)
    assert sample.turns == (0, 1, 3)
    both = sequences_of(turns, roles=("main", "compaction"))
    assert [s.turns for s in both] == [(0, 1, 2), (0, 1, 3)]
    assert set(both[1].turn_of) == {3}


def test_roles_that_are_never_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        sequences_of(chain(8, 1), roles=("main", "unknown"))
    assert sequences_of(chain(9, 3, role="unknown")) == []
