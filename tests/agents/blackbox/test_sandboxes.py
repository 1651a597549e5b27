"""WarmSandboxes: each sandbox is used once, and none leaks if a caller is cancelled. Real sandboxes, a real program."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from clawgym.agents.blackbox.sandboxes import BootedSandbox, WarmSandboxes
from clawgym.errors import InfraError, SandboxUnavailable
from clawgym.records import Limits
from clawgym.sandbox import Backend, SandboxSpec

from .hands import hands

SPEC = SandboxSpec(limits=Limits(memory_mb=128, disk_mb=32, pids=32))
OTHER = SandboxSpec(limits=Limits(memory_mb=128, disk_mb=64, pids=32))


class Store:
    """The sandboxes under test, and what was observed of them."""

    def __init__(self, backend: Backend, gateway: Any, spare: int, booting: int) -> None:
        self.backend, self.gateway = backend, gateway
        self.claw = hands()
        self._start = self.claw.start
        self.claw.start = self.start
        self.sandboxes = WarmSandboxes(self.claw, spare=spare, booting=booting, max_tokens=256)
        self.started: list[str] = []
        self.at_once = 0
        self.most_at_once = 0
        self.go = asyncio.Event()
        self.go.set()
        self.fails: Callable[[], Exception | None] = lambda: None

    async def start(self, sandbox: Any, link: Any) -> Any:
        """The ``start`` of the page's Claw, observed."""
        self.started.append(sandbox.id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.go.wait()
            if error := self.fails():
                raise error
            return await self._start(sandbox, link)
        finally:
            self.at_once -= 1

    def take(self, spec: SandboxSpec = SPEC) -> asyncio.Future[BootedSandbox]:
        return asyncio.ensure_future(self.sandboxes.take(self.backend, spec, self.gateway))

    @property
    def open(self) -> set[str]:
        """Ids of the open sandboxes."""
        return set(self.backend.sandboxes)  # type: ignore[attr-defined]

    async def empty(self) -> None:
        """Wait until no sandbox is open: interrupted work ends in the background."""
        await self._until(lambda: not self.open)

    async def busy(self, starts: int) -> None:
        """Wait until so many programs are starting."""
        await self._until(lambda: self.at_once >= starts)

    async def _until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.01)

    async def quiet(self) -> None:
        """Wait until nothing is starting or closing."""
        while work := [*self.sandboxes._starting, *self.sandboxes._closing]:
            await asyncio.gather(*work, return_exceptions=True)


@pytest.fixture
async def store(backend: Backend, black_box: Any) -> AsyncIterator[Callable[..., Any]]:
    made: list[Store] = []

    async def make(spare: int = 2, booting: int = 2) -> Store:
        made.append(Store(backend, (await black_box(["Hello."])).gateway, spare, booting))
        return made[-1]

    yield make
    for one in made:
        one.go.set()
        await one.sandboxes.aclose()


async def test_spares_are_booted_from_second_request_on(store: Any) -> None:
    setup = await store()
    first = await setup.take()
    await setup.quiet()
    assert setup.open == {first.sandbox.id}  # no spare for a first request
    second = await setup.take()
    await setup.quiet()
    assert len(setup.open) == 3
    assert setup.sandboxes.hits == 0
    third = await setup.take()
    assert setup.sandboxes.hits == 1
    await setup.quiet()
    assert len(setup.open) == 5  # two spares again
    assert len({b.sandbox.id for b in (first, second, third)}) == 3
    assert len({b.opened.id for b in (first, second, third)}) == 3  # and sessions of their own
    for booted in (first, second, third):
        await booted.close()
    await setup.sandboxes.aclose()
    assert setup.open == set()


async def test_spare_works_like_new_sandbox(store: Any) -> None:
    setup = await store(spare=1)
    for _ in range(3):
        booted = await setup.take()
        await setup.quiet()
        await setup.gateway.open_session(reserved=booted.opened)
        assert await booted.running.ask("Hi.") == "Hello."
        assert len(setup.gateway.pool.turns(booted.opened.id)) == 1
        await booted.close()
        await booted.close()
    assert setup.sandboxes.hits == 1


async def test_concurrent_starts_are_limited(store: Any) -> None:
    setup = await store(spare=3, booting=2)
    setup.go.clear()
    asked = [setup.take() for _ in range(6)]
    await setup.busy(2)
    await asyncio.sleep(0.2)  # time for the others to start, if they did not wait
    assert setup.at_once == 2
    setup.go.set()
    for booted in await asyncio.gather(*asked):
        await booted.close()
    await setup.quiet()
    assert setup.most_at_once == 2


async def test_spares_of_other_kind_are_closed(store: Any) -> None:
    setup = await store()
    taken = [await setup.take(), await setup.take()]
    await setup.quiet()
    assert len(setup.open) == 3
    taken.append(await setup.take(OTHER))
    await setup.quiet()
    assert setup.open == {b.sandbox.id for b in taken}
    assert [b.sandbox.spec.limits.disk_mb for b in taken] == [32, 32, 64]
    for booted in taken:
        await booted.close()


async def test_cancelled_request_during_boot_leaks_nothing(store: Any) -> None:
    setup = await store(spare=0, booting=1)
    setup.go.clear()
    leaves, waiting = setup.take(), setup.take()
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    setup.go.set()
    booted = await waiting  # the sandbox that was booting for the cancelled caller
    assert booted.sandbox.id == setup.started[0]
    await setup.quiet()
    again = await setup.take()
    assert setup.sandboxes.hits == 1
    for one in (booted, again):
        await one.close()
    await setup.sandboxes.aclose()
    assert setup.open == set()


async def test_cancelled_request_during_handover_leaks_nothing(store: Any) -> None:
    setup = await store(spare=0)
    leaves = setup.take()
    deliver = setup.sandboxes._deliver

    def delivers(kind: Any, booted: BootedSandbox) -> None:
        deliver(kind, booted)
        leaves.cancel()

    setup.sandboxes._deliver = delivers
    with pytest.raises(asyncio.CancelledError):
        await leaves
    setup.sandboxes._deliver = deliver
    assert len(setup.open) == 1
    booted = await setup.take()
    assert setup.sandboxes.hits == 1
    await booted.close()
    await setup.quiet()
    assert setup.open == set()


@pytest.mark.parametrize("error", [InfraError("no luck: try again"), KeyError("a mistake"), OSError("no descriptors")])
async def test_failed_start_raises_in_waiting_request(store: Any, error: Exception) -> None:
    setup = await store(spare=0)
    setup.fails = lambda: error
    with pytest.raises(type(error), match=str(error)):
        await setup.take()
    await setup.quiet()
    assert setup.open == set()
    setup.fails = lambda: None
    booted = await setup.take()  # the next request succeeds
    await booted.close()


async def test_backend_failure_raises_in_waiting_request(store: Any) -> None:
    setup = await store()
    with pytest.raises(InfraError, match="no sandbox could be created"):
        await setup.take(SandboxSpec(image="no-such-image"))
    setup.fails = lambda: SandboxUnavailable("gone: run clawgym doctor")
    with pytest.raises(SandboxUnavailable):
        await setup.take()


async def test_spare_whose_program_ended_is_not_handed_out(store: Any) -> None:
    setup = await store(spare=1)
    taken = [await setup.take(), await setup.take()]
    await setup.quiet()
    (kind,) = setup.sandboxes._kinds.values()
    kind.ready[0].running.ended = True
    dead = kind.ready[0].sandbox.id
    taken.append(await setup.take())
    assert taken[-1].sandbox.id != dead
    assert setup.sandboxes.hits == 0
    await setup.quiet()
    assert dead not in setup.open
    for booted in taken:
        await booted.close()


async def test_close_during_boot_with_waiting_request(store: Any) -> None:
    setup = await store(spare=3)
    taken = await setup.take()
    setup.go.clear()
    waits = setup.take()
    await setup.busy(2)
    await setup.sandboxes.aclose()
    with pytest.raises(InfraError, match="was closed"):
        await waits
    assert taken.sandbox.id in setup.open  # the caller closes a sandbox that it took
    with pytest.raises(InfraError, match="was closed"):
        await setup.take()
    await setup.sandboxes.aclose()
    await taken.close()
    await setup.empty()


@pytest.mark.parametrize("seed", range(6))
async def test_random_operations_leak_no_sandbox(store: Any, seed: int) -> None:
    """Requests, cancellations, failures and closing in any order: no sandbox is handed out twice or leaks."""
    rng = random.Random(seed)
    setup = await store(spare=rng.choice([0, 1, 3]), booting=rng.choice([1, 2, 4]))
    setup.fails = lambda: rng.choice([None] * 5 + [InfraError("no luck: try again"), KeyError("a mistake")])
    asked: list[asyncio.Future[BootedSandbox]] = []
    taken: list[BootedSandbox] = []

    async def closes(booted: BootedSandbox) -> None:
        await asyncio.sleep(rng.random() * 0.02)
        closing = asyncio.ensure_future(booted.close())
        if rng.random() < 0.3:  # and is cancelled
            await asyncio.sleep(0)
            closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing

    async def works(one: asyncio.Future[BootedSandbox]) -> None:
        try:
            booted = await asyncio.shield(one)
        except (InfraError, KeyError, asyncio.CancelledError):
            return
        taken.append(booted)
        await closes(booted)

    workers: list[asyncio.Future[None]] = []
    for _ in range(30):
        match rng.randrange(4):
            case 0 | 1:
                asked.append(setup.take(rng.choice([SPEC, SPEC, SPEC, OTHER])))
                workers.append(asyncio.ensure_future(works(asked[-1])))
            case 2 if asked:
                rng.choice(asked).cancel()
            case _:
                await asyncio.sleep(rng.random() * 0.06)
    if rng.random() < 0.5:
        await asyncio.gather(*workers)
    await setup.sandboxes.aclose()
    await asyncio.gather(*workers)
    assert len({b.sandbox.id for b in taken}) == len(taken)
    assert len({b.opened.id for b in taken}) == len(taken)
    for booted in taken:  # closing again is harmless, and completes an interrupted one
        await booted.close()
    await setup.empty()
    assert setup.gateway._listeners._runner.sites == set()
