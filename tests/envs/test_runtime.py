"""The loop and the backends that all environments of a process share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from clawgym.envs._runtime import runtime


def test_threads_share_one_backend_until_the_last_release() -> None:
    shared, together = runtime(), Barrier(8)

    def acquire(_: int) -> object:
        together.wait()
        return shared.acquire("namespace")

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(acquire, range(8)))
        assert len(found) == 1
        list(threads.map(lambda _: shared.release("namespace"), range(7)))
    assert shared.acquire("namespace") in found
    for _ in range(2):
        shared.release("namespace")
    assert shared.acquire("namespace") not in found, "the last release closed it"
    shared.release("namespace")
