from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

from clawgym.errors import PoolError
from clawgym.pool import EpisodeEnd, Pool, sequences_of

from .histories import chain, ids_of, store


def group_of(pool: Pool, outcomes: list[str | None], *, size: int | None = None, deadline: float | None = None) -> str:
    """A group whose episodes ended so (``None``: still open)."""
    group = pool.open_group(task_id="t", size=size or len(outcomes), deadline=deadline)
    for n, outcome in enumerate(outcomes):
        store(pool, chain(n, 3), outcome=outcome, group=group, task_id="t", sample=n)
    return group


def run_out(pool: Pool) -> None:
    """Time passes for every lease and every deadline there is."""
    with pool._store.write() as db:
        db.execute(sa.text("UPDATE batches SET lease_until = 1"))
        db.execute(sa.text("UPDATE groups SET deadline = 1 + seq WHERE deadline IS NOT NULL"))


def test_a_batch_holds_what_was_stored(pool: Pool) -> None:
    group = group_of(pool, ["solved", "failed", "truncated"])
    pool_ids = [e.id for e in pool.episodes()]
    pool.set_turn_rewards(pool_ids[1], {0: 1, 2: -1})
    batch = pool.fetch("trainer", 0)
    assert batch is not None
    (only,) = batch.groups
    assert (only.id, only.task_id, batch.consumer, batch.step, batch.acked) == (group, "t", "trainer", 0, False)
    assert [member.episode.id for member in only.episodes] == pool_ids
    assert [member.episode.outcome for member in only.episodes] == ["solved", "failed", "truncated"]
    assert only.episodes[1].process_rewards == {0: 1.0, 2: -1.0}
    for member in only.episodes:
        assert list(member.sequences) == sequences_of(pool.turns(member.episode.id))
        assert member.episode.n_samples == 1


def test_groups_are_delivered_in_the_order_of_readiness(pool: Pool) -> None:
    slow = pool.open_group(size=2)
    dead = pool.open_group(size=2)
    store(pool, chain(1, 1), outcome=None, group=dead)
    waiting = store(pool, chain(1, 1), outcome=None, group=slow)
    store(pool, chain(2, 1), group=slow)
    quick = group_of(pool, ["solved", "failed"])
    assert [g.id for g in pool.fetch("trainer", 0).groups] == [quick]  # type: ignore[union-attr]
    assert pool.fetch("trainer", 1) is None
    pool.close_episode(waiting, EpisodeEnd(outcome="failed"))
    assert [g.id for g in pool.fetch("trainer", 1).groups] == [slow]  # type: ignore[union-attr]


def test_one_group_can_be_asked_for(pool: Pool) -> None:
    first, second = (group_of(pool, ["solved", "failed"]) for _ in range(2))
    assert [g.id for g in pool.fetch("trainer", 7, only=second).groups] == [second]  # type: ignore[union-attr]
    assert [g.id for g in pool.fetch("trainer", 7, only=second).groups] == [second]  # type: ignore[union-attr]
    assert pool.fetch("trainer", 8, only=second) is None
    assert pool.group_states() == {first: "ready", second: "leased"}
    late = group_of(pool, ["solved", "infra"])
    assert pool.fetch("trainer", 9, only=late) is None
    assert pool.group_states()[late] == "dropped"
    assert pool.group_states()[first] == "ready"


def test_a_step_gets_the_same_batch_for_ever(pool: Pool) -> None:
    for _ in range(3):
        group_of(pool, ["solved", "failed"])
    first = pool.fetch("trainer", 0)
    again = pool.fetch("trainer", 0)
    assert first is not None
    assert again is not None
    assert replace(first, lease_until=0) == replace(again, lease_until=0)
    second = pool.fetch("trainer", 1)
    assert not set(ids_of(first.groups)) & set(ids_of(second.groups))  # type: ignore[union-attr]
    pool.ack("trainer", 0)
    pool.ack("trainer", 0)
    old = pool.fetch("trainer", 0)
    assert old is not None
    assert old.acked
    assert old.groups == first.groups
    other = pool.fetch("other", 0)
    assert not set(ids_of(other.groups)) & {*ids_of(first.groups), *ids_of(second.groups)}  # type: ignore[union-attr]
    with pytest.raises(PoolError, match="channel 'train'"):
        pool.fetch("trainer", 1, channel="online")
    with pytest.raises(PoolError, match="roles"):
        pool.fetch("trainer", 1, roles=("main", "subagent"))


def test_a_batch_is_whole_or_not_at_all(pool: Pool) -> None:
    group_of(pool, ["solved", "failed"])
    assert pool.fetch("trainer", 0, groups=2) is None
    group_of(pool, ["solved", "failed"])
    assert len(pool.fetch("trainer", 0, groups=2).groups) == 2  # type: ignore[union-attr]


def test_expired_lease_goes_to_another_consumer(pool: Pool) -> None:
    group = group_of(pool, ["solved", "failed"])
    pool.fetch("dead", 7)
    assert pool.fetch("trainer", 0) is None
    run_out(pool)
    assert pool.renew("dead", 7) > time.time()  # nobody took it yet
    assert pool.fetch("trainer", 0) is None
    run_out(pool)
    assert [g.id for g in pool.fetch("trainer", 0).groups] == [group]  # type: ignore[union-attr]
    for late in (pool.ack, pool.renew):
        with pytest.raises(PoolError, match="given to another consumer"):
            late("dead", 7)
    pool.ack("trainer", 0)
    with pytest.raises(PoolError, match="given to another consumer"):
        pool.ack("dead", 7)
    assert pool.fetch("dead", 7) is None  # a new choice, and there is nothing to choose


def test_an_ack_after_the_lease_counts_if_nobody_took_it(pool: Pool) -> None:
    group_of(pool, ["solved", "failed"])
    pool.fetch("slow", 0)
    run_out(pool)
    assert pool.fetch("trainer", 0, groups=2) is None  # looks, and finds too little
    pool.ack("slow", 0)
    assert pool.fetch("trainer", 0) is None
    assert pool.stats()["channels"]["train"]["groups"] == {"consumed": 1}


def test_batch_with_a_lost_group_is_lost(pool: Pool) -> None:
    for _ in range(2):
        group_of(pool, ["solved", "failed"])
    both = pool.fetch("slow", 0, groups=2)
    run_out(pool)
    taken = pool.fetch("trainer", 0)
    with pytest.raises(PoolError, match="given to another consumer"):
        pool.ack("slow", 0)
    rest = pool.fetch("slow", 0)
    assert {*ids_of(rest.groups), *ids_of(taken.groups)} == set(ids_of(both.groups))  # type: ignore[union-attr]


def test_what_is_released_is_delivered_again(pool: Pool) -> None:
    group = group_of(pool, ["solved", "failed"])
    pool.fetch("trainer", 0)
    pool.release("trainer", 0)
    assert pool.stats()["channels"]["train"]["fates"] == {}
    for call in (pool.ack, pool.release, pool.renew):
        with pytest.raises(PoolError, match="fetch it first"):
            call("trainer", 0)
    assert [g.id for g in pool.fetch("other", 0).groups] == [group]  # type: ignore[union-attr]
    pool.ack("other", 0)
    for call in (pool.release, pool.renew):
        with pytest.raises(PoolError, match="acked already"):
            call("other", 0)


def test_group_is_delivered_incomplete_at_its_deadline(pool: Pool) -> None:
    enough = group_of(pool, ["solved", "failed", None], size=4, deadline=1000)
    too_few = group_of(pool, ["solved", "infra", None], size=4, deadline=1000)
    assert pool.fetch("trainer", 0) is None
    run_out(pool)
    batch = pool.fetch("trainer", 0)
    assert [g.id for g in batch.groups] == [enough]  # type: ignore[union-attr]
    assert pool.fetch("trainer", 1) is None
    counts = pool.stats()["channels"]["train"]
    assert counts["groups"] == {"leased": 1, "dropped": 1}
    assert sum(counts["dropped"].values()) == 1
    assert counts["fates"] == {"delivered": 2, "late": 2, "infra": 1, "dropped": 1}
    assert [g.id for g in pool.fetch("trainer", 0).groups] == [enough]  # type: ignore[union-attr]
    for late in [e.id for e in pool.episodes(state="open")]:
        pool.close_episode(late, EpisodeEnd(outcome="solved"))
    assert pool.fetch("trainer", 2) is None
    with pytest.raises(PoolError, match="open another group"):
        pool.open_episode(group=too_few, task_id="t")


def test_infra_does_not_count_and_may_be_replaced(pool: Pool) -> None:
    group = group_of(pool, ["solved", "infra"])
    again = store(pool, chain(9, 2), outcome=None, group=group, task_id="t")
    assert pool.fetch("trainer", 0) is None  # it waits for the replacement
    pool.close_episode(again, EpisodeEnd(outcome="failed"))
    batch = pool.fetch("trainer", 0)
    assert [m.episode.outcome for m in batch.groups[0].episodes] == ["solved", "failed"]  # type: ignore[union-attr]
    group_of(pool, ["infra", "infra"])
    assert pool.fetch("trainer", 1) is None
    assert pool.stats()["channels"]["train"]["dropped"] == {"infra": 1}


def test_stale_episodes_are_left_out_and_counted(pool: Pool) -> None:
    group = pool.open_group(size=4)
    for version in (1, 5, 6, None):
        store(pool, chain(1, 2, policy_version=version), group=group)
    batch = pool.fetch("trainer", 0, policy_version=7, max_staleness=2)
    assert [m.sequences[0].policy_versions[0] for m in batch.groups[0].episodes] == [5, 6]  # type: ignore[union-attr]
    assert pool.stats()["channels"]["train"]["fates"] == {"delivered": 2, "stale": 2}
    mixed = chain(1, 1, policy_version=4) + chain(2, 1, policy_version=7, parent=0)
    store(pool, mixed)
    assert pool.fetch("trainer", 1, policy_version=7, max_staleness=2) is None
    assert pool.stats()["channels"]["train"]["dropped"] == {"stale": 1}


def test_staleness_looks_only_at_what_is_trained(pool: Pool) -> None:
    turns = [*chain(1, 1, policy_version=1, role="subagent"), *chain(2, 1, policy_version=9)]
    store(pool, turns)
    batch = pool.fetch("trainer", 0, policy_version=9, max_staleness=0)
    assert batch.groups[0].episodes[0].sequences[0].turns == (1,)  # type: ignore[union-attr]
    store(pool, turns)
    assert pool.fetch("trainer", 1, policy_version=9, max_staleness=0, roles=("main", "subagent")) is None


def test_curation_is_enforced(pool: Pool) -> None:
    for _ in range(3):
        store(pool, chain(1, 2))
    first, second, third = (e.id for e in pool.episodes())
    pool.curate(first, trainable=False)
    pool.curate(second, trainable=False)
    pool.curate(second, trainable=True)
    assert [*ids_of(pool.fetch("trainer", 0).groups)] == [second]  # type: ignore[union-attr]
    assert [*ids_of(pool.fetch("trainer", 1).groups)] == [third]  # type: ignore[union-attr]
    assert pool.episode(first).fate == "curated"


def test_zero_variance_groups_are_replaced_within_a_bound(pool: Pool) -> None:
    """One for each step so far; the others are delivered."""
    same = [group_of(pool, ["solved", "solved"]) for _ in range(3)]
    mixed = [group_of(pool, ["solved", "failed"]) for _ in range(2)]

    def fetched(step: int) -> list[str]:
        batch = pool.fetch("trainer", step, groups=1, replaced=1)
        return [] if batch is None else [group.id for group in batch.groups]

    assert fetched(0) == [same[1]], "the first is replaced; the bound is reached"
    assert fetched(1) == [mixed[0]], "another one may be replaced now"
    assert fetched(1) == [mixed[0]]
    assert fetched(2) == [mixed[1]]
    assert fetched(3) == []
    assert pool.stats()["channels"]["train"]["groups"]["dropped"] == 2


def test_group_that_differs_in_penalties_or_rewards_of_turns_is_kept(pool: Pool) -> None:
    penalised = pool.open_group(size=2)
    for sample in range(2):
        id = pool.open_episode(group=penalised, sample=sample)
        pool.append([(id, n, one) for n, one in enumerate(chain(sample, 2))])
        pool.close_episode(id, EpisodeEnd(outcome="solved", reward=1.0, penalties={"length": -0.5 * sample}))
    judged = pool.open_group(size=2)
    for sample in range(2):
        id = pool.open_episode(group=judged, sample=sample)
        pool.append([(id, n, one) for n, one in enumerate(chain(sample, 2))])
        pool.set_turn_rewards(id, {0: 1.0 - sample})
        pool.close_episode(id, EpisodeEnd(outcome="solved", reward=1.0))
    batch = pool.fetch("trainer", 0, groups=2, replaced=9)
    assert batch is not None
    assert [group.id for group in batch.groups] == [penalised, judged]


def test_inexact_turns_are_not_delivered(pool: Pool) -> None:
    group = pool.open_group(size=4)
    store(pool, chain(1, 2, flaw="text-only"), group=group)
    store(pool, chain(2, 2, role="unknown"), group=group)
    store(pool, [], group=group)
    good = store(pool, chain(3, 2) + chain(4, 1, flaw="constrained"), group=group)
    batch = pool.fetch("trainer", 0, min_episodes=1)
    assert [*ids_of(batch.groups)] == [good]  # type: ignore[union-attr]
    assert batch.groups[0].episodes[0].sequences[0].turns == (0, 1)  # type: ignore[union-attr]
    assert pool.stats()["channels"]["train"]["fates"] == {"delivered": 1, "empty": 3}


def test_channels_do_not_mix(pool: Pool) -> None:
    evaluated = store(pool, chain(1, 2), channel="eval")
    live = store(pool, chain(1, 2), channel="online")
    assert pool.fetch("trainer", 0) is None
    assert [*ids_of(pool.fetch("trainer", 0, channel="online").groups)] == [live]  # type: ignore[union-attr]
    assert pool.episode(evaluated).fate is None


def test_waiting_ends_when_a_group_is_ready(pool: Pool) -> None:
    id = store(pool, chain(1, 2), outcome=None)
    later = threading.Timer(0.3, lambda: pool.close_episode(id, EpisodeEnd(outcome="solved")))
    later.start()
    assert pool.fetch("trainer", 0, wait=30) is not None
    later.join()


def test_waiting_ends_at_the_deadline_of_a_group(pool: Pool) -> None:
    group_of(pool, ["solved", "failed", None], deadline=0.5)
    assert pool.fetch("trainer", 0, wait=60) is not None


def test_lease_expires(pool: Pool) -> None:
    group_of(pool, ["solved", "failed"])
    pool.fetch("dead", 0, lease_seconds=0.2)
    assert pool.fetch("trainer", 0, wait=60) is not None


def test_requests_that_make_no_sense_are_refused(file_pool: Pool) -> None:
    for wrong in ({"groups": 0}, {"min_episodes": 0}, {"lease_seconds": 0}, {"max_staleness": 1}, {"roles": ()},
                  {"roles": ("unknown",)}):  # fmt: skip
        with pytest.raises(ValueError, match=r"correct them|policy_version|cannot be trained"):
            file_pool.fetch("trainer", 0, **wrong)  # type: ignore[arg-type]


def test_stats_count_everything(pool: Pool) -> None:
    branched = chain(1, 2) + chain(2, 1, parent=0)
    store(pool, branched)
    store(pool, chain(3, 2) + chain(4, 1, flaw="stripped"))
    store(pool, chain(5, 1), outcome="infra")
    store(pool, chain(6, 1), outcome=None, channel="online")
    found = pool.stats()
    train = found["channels"]["train"]
    assert train["episodes"] == {"solved": 2, "infra": 1}
    assert (train["turns"], train["flawed_turns"], train["samples"]) == (7, 1, 4)
    assert train["samples_per_episode"] == 1.5
    assert train["trained_ids"] == sum(len(i.sampled_ids) for i in [*branched, *chain(3, 2), *chain(5, 1)])
    assert found["channels"]["online"]["episodes"] == {"open": 1}
    assert found["channels"]["online"]["samples_per_episode"] is None
    assert found["bytes"] > 0


def test_several_consumers_at_once_share_without_overlap(pool: Pool) -> None:
    expected = {store(pool, chain(n, 1)) for n in range(60)}
    got: list[list[str]] = [[] for _ in range(4)]

    def consume(number: int) -> None:
        step = 0
        while (batch := pool.fetch(f"c{number}", step, groups=2)) is not None:
            got[number] += ids_of(batch.groups)
            pool.ack(f"c{number}", step)
            step += 1

    threads = [threading.Thread(target=consume, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [id for some in got for id in some]
    assert len(everything) == len(set(everything))
    assert sorted(everything) == sorted(expected)


def test_one_step_fetched_by_many_is_one_batch(pool: Pool) -> None:
    for n in range(8):
        store(pool, chain(n, 1))
    got: list[tuple[str, ...]] = []

    def rank() -> None:
        batch = pool.fetch("trainer", 0, groups=2)
        assert batch is not None
        got.append(tuple(ids_of(batch.groups)))

    threads = [threading.Thread(target=rank) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert len(set(got)) == 1
    assert pool.stats()["channels"]["train"]["groups"] == {"leased": 2, "ready": 6}
