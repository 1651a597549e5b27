"""Any order of fetching, acknowledging, releasing and expiry: no group is trained on twice or lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from clawgym.errors import PoolError
from clawgym.pool import Pool

from .histories import chain, store

TURNS = chain(1, 1)
consumers = st.sampled_from(["a", "b", "c"])
steps = st.integers(0, 3)
Key = tuple[str, int]


class Fetching(RuleBasedStateMachine):
    """``held``: what a step was last given, with a lease that lasts or not; ``learnt``: what was acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.pool = Pool(Path(self.folder.name) / "pool.db")
        self.ready: set[str] = set()
        self.held: dict[Key, tuple[frozenset[str], bool]] = {}
        self.learnt: dict[Key, frozenset[str]] = {}

    def teardown(self) -> None:
        self.pool.close()
        self.folder.cleanup()

    @rule(count=st.integers(1, 3))
    def episodes_end(self, count: int) -> None:
        self.ready |= {store(self.pool, TURNS) for _ in range(count)}

    @rule(consumer=consumers, step=steps, groups=st.integers(1, 3), lasts=st.booleans())
    def fetch(self, consumer: str, step: int, groups: int, lasts: bool) -> None:
        key = (consumer, step)
        batch = self.pool.fetch(consumer, step, groups=groups, lease_seconds=1000 if lasts else 1e-9)
        if batch is None:
            assert key not in self.learnt
            assert not self.held.get(key, (None, False))[1]
            return
        got = frozenset(group.id for group in batch.groups)
        assert batch.acked == (key in self.learnt)
        if batch.acked:
            assert got == self.learnt[key]
            return
        if self.held.get(key, (None, False))[1]:  # its lease lasts: the same again
            assert got == self.held[key][0]
        else:
            assert len(got) == groups or got == self.held[key][0]
        assert got <= self.ready
        for other, groups_of in self.learnt.items():
            assert not got & groups_of, other
        for other, (theirs, holds) in list(self.held.items()):
            if other != key and got & theirs:
                assert not holds, other
                del self.held[other]  # lost
        self.held[key] = (got, lasts)

    @rule(consumer=consumers, step=steps)
    def ack(self, consumer: str, step: int) -> None:
        key = (consumer, step)
        try:
            self.pool.ack(consumer, step)
        except PoolError:
            assert key not in self.held
            assert key not in self.learnt
        else:
            self.learnt.setdefault(key, self.held.pop(key, (frozenset(), False))[0])
            assert self.learnt[key]

    @rule(consumer=consumers, step=steps)
    def release(self, consumer: str, step: int) -> None:
        key = (consumer, step)
        try:
            self.pool.release(consumer, step)
        except PoolError:
            assert key not in self.held
        else:
            assert key not in self.learnt
            self.held.pop(key, None)

    @invariant()
    def every_group_is_somewhere_and_learnt_once(self) -> None:
        learnt = [group for groups in self.learnt.values() for group in groups]
        assert len(learnt) == len(set(learnt))
        counts = self.pool.stats()["channels"].get("train", {"groups": {}})["groups"]
        assert counts.get("consumed", 0) == len(learnt)
        assert sum(counts.values()) == len(self.ready)


TestFetching = Fetching.TestCase
TestFetching.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
