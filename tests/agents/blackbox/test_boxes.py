"""Boxes made ahead: one use each, none lost, none left, whatever happens to who asked. Real boxes, a real program."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from clawgym.agents.blackbox.boxes import Booted, Boxes
from clawgym.errors import InfraError, SandboxUnavailable
from clawgym.records import Limits
from clawgym.sandbox import Backend, SandboxSpec

from .hands import hands

SPEC = SandboxSpec(limits=Limits(memory_mb=128, disk_mb=32, pids=32))
OTHER = SandboxSpec(limits=Limits(memory_mb=128, disk_mb=64, pids=32))


class Store:
    """``boxes`` under test, and what was seen of them."""

    def __init__(self, backend: Backend, gateway: Any, spare: int, booting: int) -> None:
        self.backend, self.gateway = backend, gateway
        self.claw = hands()
        self._start = self.claw.start
        self.claw.start = self.start
        self.boxes = Boxes(self.claw, spare=spare, booting=booting, max_tokens=256)
        self.started: list[str] = []
        self.at_once = 0
        self.most_at_once = 0
        self.go = asyncio.Event()
        self.go.set()
        self.fails: Callable[[], Exception | None] = lambda: None

    async def start(self, box: Any, link: Any) -> Any:
        """The page's, watched."""
        self.started.append(box.id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.go.wait()
            if error := self.fails():
                raise error
            return await self._start(box, link)
        finally:
            self.at_once -= 1

    def take(self, spec: SandboxSpec = SPEC) -> asyncio.Future[Booted]:
        return asyncio.ensure_future(self.boxes.take(self.backend, spec, self.gateway))

    @property
    def open(self) -> set[str]:
        """Boxes that are there."""
        return set(self.backend.sandboxes)  # type: ignore[attr-defined]

    async def empty(self) -> None:
        """Wait until no box is open: what was interrupted in the middle ends in the background."""
        await self._until(lambda: not self.open)

    async def busy(self, starts: int) -> None:
        """Wait until so many programs start."""
        await self._until(lambda: self.at_once >= starts)

    async def _until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)

    async def quiet(self) -> None:
        """Wait until nothing starts or closes any more."""
        while work := [*self.boxes._starting, *self.boxes._closing]:
            await asyncio.gather(*work, return_exceptions=True)


@pytest.fixture
async def store(backend: Backend, room: Any) -> AsyncIterator[Callable[..., Any]]:
    made: list[Store] = []

    async def make(spare: int = 2, booting: int = 2) -> Store:
        made.append(Store(backend, (await room(["Hello."])).gateway, spare, booting))
        return made[-1]

    yield make
    for one in made:
        one.go.set()
        await one.boxes.aclose()


async def test_spares_are_made_once_boxes_are_asked_for_again(store: Any) -> None:
    it = await store()
    first = await it.take()
    await it.quiet()
    assert it.open == {first.box.id}  # who wants one box gets one box
    second = await it.take()
    await it.quiet()
    assert len(it.open) == 3
    assert it.boxes.hits == 0
    third = await it.take()
    assert it.boxes.hits == 1
    await it.quiet()
    assert len(it.open) == 5  # two spares again
    assert len({b.box.id for b in (first, second, third)}) == 3
    assert len({b.opened.id for b in (first, second, third)}) == 3  # sessions too
    for booted in (first, second, third):
        await booted.close()
    await it.boxes.aclose()
    assert it.open == set()


async def test_a_spare_works_like_any_box(store: Any) -> None:
    it = await store(spare=1)
    for _ in range(3):
        booted = await it.take()
        await it.quiet()
        await it.gateway.open_session(reserved=booted.opened)
        assert await booted.running.ask("Hi.") == "Hello."
        assert len(it.gateway.pool.turns(booted.opened.id)) == 1
        await booted.close()
        await booted.close()
    assert it.boxes.hits == 1


async def test_no_more_start_at_once_than_were_allowed(store: Any) -> None:
    it = await store(spare=3, booting=2)
    it.go.clear()
    asked = [it.take() for _ in range(6)]
    await it.busy(2)
    await asyncio.sleep(0.2)  # for the others, if they did not wait
    assert it.at_once == 2
    it.go.set()
    for booted in await asyncio.gather(*asked):
        await booted.close()
    await it.quiet()
    assert it.most_at_once == 2


async def test_another_kind_of_box_takes_the_place_of_the_spares(store: Any) -> None:
    it = await store()
    taken = [await it.take(), await it.take()]
    await it.quiet()
    assert len(it.open) == 3
    taken.append(await it.take(OTHER))
    await it.quiet()
    assert it.open == {b.box.id for b in taken}
    assert [b.box.spec.limits.disk_mb for b in taken] == [32, 32, 64]
    for booted in taken:
        await booted.close()


async def test_who_leaves_while_a_box_boots_loses_none(store: Any) -> None:
    it = await store(spare=0, booting=1)
    it.go.clear()
    leaves, stays = it.take(), it.take()
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    it.go.set()
    booted = await stays  # the box that was booting for another
    assert booted.box.id == it.started[0]
    await it.quiet()
    again = await it.take()
    assert it.boxes.hits == 1
    for one in (booted, again):
        await one.close()
    await it.boxes.aclose()
    assert it.open == set()


async def test_who_leaves_in_the_moment_a_box_is_handed_over_loses_none(store: Any) -> None:
    it = await store(spare=0)
    leaves = it.take()
    deliver = it.boxes._deliver

    def delivers(kind: Any, booted: Booted) -> None:
        deliver(kind, booted)
        leaves.cancel()

    it.boxes._deliver = delivers
    with pytest.raises(asyncio.CancelledError):
        await leaves
    it.boxes._deliver = deliver
    assert len(it.open) == 1
    booted = await it.take()
    assert it.boxes.hits == 1
    await booted.close()
    await it.quiet()
    assert it.open == set()


@pytest.mark.parametrize("error", [InfraError("no luck: try again"), KeyError("a mistake"), OSError("no descriptors")])
async def test_a_failed_start_reaches_who_waits(store: Any, error: Exception) -> None:
    it = await store(spare=0)
    it.fails = lambda: error
    with pytest.raises(type(error), match=str(error)):
        await it.take()
    await it.quiet()
    assert it.open == set()
    it.fails = lambda: None
    booted = await it.take()  # and the next one is not touched
    await booted.close()


async def test_a_backend_that_cannot_reaches_who_waits(store: Any) -> None:
    it = await store()
    with pytest.raises(InfraError, match="no box for it"):
        await it.take(SandboxSpec(image="no-such-image"))
    it.fails = lambda: SandboxUnavailable("gone: run clawgym doctor")
    with pytest.raises(SandboxUnavailable):
        await it.take()


async def test_a_program_that_ended_while_it_waited_is_not_handed_out(store: Any) -> None:
    it = await store(spare=1)
    taken = [await it.take(), await it.take()]
    await it.quiet()
    (kind,) = it.boxes._kinds.values()
    kind.ready[0].running.ended = True
    dead = kind.ready[0].box.id
    taken.append(await it.take())
    assert taken[-1].box.id != dead
    assert it.boxes.hits == 0
    await it.quiet()
    assert dead not in it.open
    for booted in taken:
        await booted.close()


async def test_closed_while_boxes_boot_and_somebody_waits(store: Any) -> None:
    it = await store(spare=3)
    taken = await it.take()
    it.go.clear()
    waits = it.take()
    await it.busy(2)
    await it.boxes.aclose()
    with pytest.raises(InfraError, match="was closed"):
        await waits
    assert taken.box.id in it.open  # what was taken is its taker's
    with pytest.raises(InfraError, match="was closed"):
        await it.take()
    await it.boxes.aclose()
    await taken.close()
    await it.empty()


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_or_left_whatever_happens(store: Any, seed: int) -> None:
    """Asked, left, failed, closed in any order: no box has two takers, and at the end none is open."""
    rng = random.Random(seed)
    it = await store(spare=rng.choice([0, 1, 3]), booting=rng.choice([1, 2, 4]))
    it.fails = lambda: rng.choice([None] * 5 + [InfraError("no luck: try again"), KeyError("a mistake")])
    asked: list[asyncio.Future[Booted]] = []
    taken: list[Booted] = []

    async def closes(booted: Booted) -> None:
        await asyncio.sleep(rng.random() * 0.02)
        closing = asyncio.ensure_future(booted.close())
        if rng.random() < 0.3:  # and is interrupted
            await asyncio.sleep(0)
            closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing

    async def works(one: asyncio.Future[Booted]) -> None:
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
                asked.append(it.take(rng.choice([SPEC, SPEC, SPEC, OTHER])))
                workers.append(asyncio.ensure_future(works(asked[-1])))
            case 2 if asked:
                rng.choice(asked).cancel()
            case _:
                await asyncio.sleep(rng.random() * 0.06)
    if rng.random() < 0.5:
        await asyncio.gather(*workers)
    await it.boxes.aclose()
    await asyncio.gather(*workers)
    assert len({b.box.id for b in taken}) == len(taken)
    assert len({b.opened.id for b in taken}) == len(taken)
    for booted in taken:  # closing again is no harm, and ends what an interruption left
        await booted.close()
    await it.empty()
    assert it.gateway._listeners._runner.sites == set()
