"""Threads that compute parts of a step beside each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from clawgym.engines._crew import Crew  # noqa: E402


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(torch.nn.Linear(1000, 1000, bias=False))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("tokens", "longest", "parts"),
    [
        (1_999, 1, 1),  # too little for two
        (2_000, 1, 2),
        (100_000, 1, 3),  # no more than there are threads
        (100_000, 90_000, 1),  # one part would have nearly everything
        (100_000, 55_000, 2),
        (0, 1, 1),
    ],
)
def test_a_step_is_divided_if_each_part_has_enough_to_do(crew: Crew, tokens: int, longest: int, parts: int) -> None:
    assert crew.parts(tokens, longest) == parts


def test_steps_on_other_devices_are_not_divided() -> None:
    assert Crew(torch.nn.Linear(1000, 1000, device="meta")).parts(100_000, 1) == 1


@pytest.mark.parametrize(("threads", "parts", "each"), [(3, 3, 1), (3, 2, 1), (4, 2, 2), (5, 2, 2)])
def test_parts_run_beside_each_other_and_share_the_threads(crew: Crew, threads: int, parts: int, each: int) -> None:
    torch.set_num_threads(threads)
    together = threading.Barrier(parts, timeout=60)

    def part(number: int) -> tuple[int, int, bool]:
        together.wait()
        return number, torch.get_num_threads(), torch.is_inference_mode_enabled()

    assert crew.map(part, range(parts)) == [(number, each, True) for number in range(parts)]
    assert torch.get_num_threads() == threads
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [threads]


def test_other_numbers_of_parts(crew: Crew) -> None:
    for count in (2, 3, 2):
        together = threading.Barrier(count, timeout=60)
        assert len(crew.map(lambda _, here=together: here.wait(), range(count))) == count


def test_an_error_is_raised_after_all_parts_have_ended(crew: Crew) -> None:
    together, ended = threading.Barrier(2, timeout=60), []

    def part(fails: bool) -> None:
        together.wait()
        if fails:
            raise MemoryError("here")
        time.sleep(0.05)  # in which an error that does not wait would be raised
        ended.append(True)

    with pytest.raises(MemoryError, match="here"):
        crew.map(part, [True, False])
    assert ended == [True]


def test_closing_ends_the_threads() -> None:
    crew, before = Crew(torch.nn.Linear(1, 1)), threading.active_count()
    assert crew.map(str, [1, 2]) == ["1", "2"]
    assert threading.active_count() == before + 3
    crew.close()
    assert threading.active_count() == before


def test_a_thread_that_cannot_be_started_leaves_none(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = threading.active_count(), threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if threading.active_count() > before:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        crew.map(str, [1, 2])
    assert threading.active_count() == before
    assert torch.get_num_threads() == 3
    monkeypatch.undo()
    assert crew.map(str, [1, 2]) == ["1", "2"]
