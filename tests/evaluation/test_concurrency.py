from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clawgym.evaluation.concurrency import ConcurrencyLimit
from clawgym.sandbox.machine import Machine


class FakeMachine:
    """A machine whose readings a test can change."""

    def __init__(self, cores: int = 4, memory: float = 16_000, load: float = 0.0) -> None:
        self.memory, self.load = memory, load
        self.machine = Machine(cores, lambda: self.memory, lambda: self.load)


def test_initial_limit_depends_on_cores_and_memory():
    assert ConcurrencyLimit(100, machine=FakeMachine(cores=4).machine).limit == 8
    assert ConcurrencyLimit(4000, machine=FakeMachine(cores=4).machine).limit == 3
    assert ConcurrencyLimit(64_000, machine=FakeMachine().machine).limit == 1
    assert ConcurrencyLimit(100, ceiling=2, machine=FakeMachine().machine).limit == 2


def test_grows_by_one_per_round_up_to_the_ceiling():
    limit = ConcurrencyLimit(100, ceiling=10, machine=FakeMachine().machine)
    for _ in range(8):
        assert limit.limit == 8
        limit.succeeded()
    assert limit.limit == 9
    for _ in range(100):
        limit.succeeded()
    assert limit.limit == 10


def test_does_not_grow_under_load_and_falls_to_the_cores_under_high_load():
    fake = FakeMachine(load=2.0)
    limit = ConcurrencyLimit(100, machine=fake.machine)
    for _ in range(50):
        limit.succeeded()
    assert limit.limit == 8
    fake.load = 5.0
    for _ in range(50):
        limit.succeeded()
    assert limit.limit == fake.machine.cores == 4


def test_burst_of_failures_halves_once():
    limit = ConcurrencyLimit(100, machine=FakeMachine().machine)
    began = limit.round
    for _ in range(8):
        limit.failed(began)
    assert limit.limit == 4
    limit.failed(limit.round)
    assert limit.limit == 2


def test_low_memory_halves():
    fake = FakeMachine()
    limit = ConcurrencyLimit(1000, machine=fake.machine)
    fake.memory = 400
    limit.succeeded()
    assert limit.limit == 4


@given(
    st.integers(1, 64),
    st.floats(0, 1e6),
    st.integers(1, 10**5),
    st.none() | st.integers(1, 50),
    st.lists(st.booleans(), max_size=200),
)
def test_limit_is_between_one_and_the_ceiling(cores, memory, task_memory, ceiling, events):
    limit = ConcurrencyLimit(task_memory, ceiling, FakeMachine(cores, memory).machine)
    for good in events:
        limit.succeeded() if good else limit.failed(limit.round)
        assert 1 <= limit.limit <= (ceiling or limit.ceiling)


def test_machine_reports_cores_memory_and_load():
    machine = Machine.this()
    assert machine.cores >= 1
    assert machine.memory_mb() > 0
    assert machine.load() >= 0
