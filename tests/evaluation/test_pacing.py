from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clawgym.evaluation.pacing import Pace
from clawgym.sandbox.machine import Machine


class Box:
    """A machine whose readings a test can change."""

    def __init__(self, cores: int = 4, memory: float = 16_000, load: float = 0.0) -> None:
        self.memory, self.load = memory, load
        self.machine = Machine(cores, lambda: self.memory, lambda: self.load)


def test_starts_from_cores_and_from_memory():
    assert Pace(100, machine=Box(cores=4).machine).limit == 8
    assert Pace(4000, machine=Box(cores=4).machine).limit == 3
    assert Pace(64_000, machine=Box().machine).limit == 1
    assert Pace(100, ceiling=2, machine=Box().machine).limit == 2


def test_grows_by_one_a_round_up_to_the_ceiling():
    pace = Pace(100, ceiling=10, machine=Box().machine)
    for _ in range(8):
        assert pace.limit == 8
        pace.succeeded()
    assert pace.limit == 9
    for _ in range(100):
        pace.succeeded()
    assert pace.limit == 10


def test_does_not_grow_on_a_loaded_machine_and_goes_back_to_the_cores_on_a_swamped_one():
    box = Box(load=2.0)
    pace = Pace(100, machine=box.machine)
    for _ in range(50):
        pace.succeeded()
    assert pace.limit == 8
    box.load = 5.0
    for _ in range(50):
        pace.succeeded()
    assert pace.limit == box.machine.cores == 4


def test_one_burst_halves_once():
    pace = Pace(100, machine=Box().machine)
    began = pace.round
    for _ in range(8):
        pace.failed(began)
    assert pace.limit == 4
    pace.failed(pace.round)
    assert pace.limit == 2


def test_memory_pressure_halves():
    box = Box()
    pace = Pace(1000, machine=box.machine)
    box.memory = 400
    pace.succeeded()
    assert pace.limit == 4


@given(
    st.integers(1, 64),
    st.floats(0, 1e6),
    st.integers(1, 10**5),
    st.none() | st.integers(1, 50),
    st.lists(st.booleans(), max_size=200),
)
def test_always_between_one_and_the_ceiling(cores, memory, task_memory, ceiling, events):
    pace = Pace(task_memory, ceiling, Box(cores, memory).machine)
    for good in events:
        pace.succeeded() if good else pace.failed(pace.round)
        assert 1 <= pace.limit <= (ceiling or pace.ceiling)


def test_this_machine_can_be_read():
    machine = Machine.this()
    assert machine.cores >= 1
    assert machine.memory_mb() > 0
    assert machine.load() >= 0
