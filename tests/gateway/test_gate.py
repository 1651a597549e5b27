"""The gate: limits, order, a bounded queue, and no turn while weights change."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.gateway.calls import Refusal
from clawgym.gateway.gate import Gate


async def settle(turns=5):
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_streams_limit_and_order():
    gate = Gate(streams=2, waiting=10)
    order, go = [], asyncio.Event()

    async def turn(n):
        async with gate.turn():
            order.append(n)
            assert gate.running <= 2
            await go.wait()

    turns = []
    for n in range(5):
        turns.append(asyncio.ensure_future(turn(n)))
        await settle()
    assert (order, gate.running, gate.queued) == ([0, 1], 2, 3)
    go.set()
    await asyncio.gather(*turns)
    assert order == [0, 1, 2, 3, 4]
    assert (gate.running, gate.queued) == (0, 0)


async def test_queue_is_limited():
    gate = Gate(streams=1, waiting=1)
    async with gate.turn():
        waiting = asyncio.ensure_future(gate.turn().__aenter__())
        await settle()
        with pytest.raises(Refusal) as refused:
            await gate.turn().__aenter__()
        assert (refused.value.status, refused.value.retry_after) == (429, 1.0)
        waiting.cancel()
        await settle()
        assert gate.queued == 0


async def test_cancelled_admission_frees_slot():
    gate = Gate(streams=1, waiting=1)
    first = gate.turn()
    await first.__aenter__()
    leaves = asyncio.ensure_future(gate.turn().__aenter__())
    await settle()
    await first.__aexit__(None, None, None)
    assert gate.running == 1  # it was admitted, but has not run yet
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert (gate.running, gate.queued) == (0, 0)
    async with gate.turn():
        assert gate.running == 1


async def test_weights_change_between_turns():
    gate = Gate(streams=4, waiting=10)
    log = []
    running = gate.turn()
    await running.__aenter__()

    async def change():
        async with gate.closed():
            log.append("change")
            assert gate.running == 0
            await settle()
            log.append("changed")

    async def turn():
        async with gate.turn():
            log.append("turn")

    changing = asyncio.ensure_future(change())
    await settle()
    late = asyncio.ensure_future(turn())
    await settle()
    assert log == []
    await running.__aexit__(None, None, None)
    await asyncio.gather(changing, late)
    assert log == ["change", "changed", "turn"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["turn", "leave", "cancel", "hold"]), max_size=30), st.randoms(use_true_random=False))
def test_random_operations_leak_no_slot(steps, rng):
    async def run():
        gate = Gate(streams=2, waiting=5)
        ends: list[tuple[asyncio.Event, asyncio.Task]] = []
        holds = []

        async def turn(end):
            with contextlib.suppress(Refusal):
                async with gate.turn():
                    await end.wait()

        async def hold():
            async with gate.closed():
                assert gate.running == 0
                await settle()
                assert gate.running == 0

        for step in steps:
            if step == "turn":
                end = asyncio.Event()
                ends.append((end, asyncio.ensure_future(turn(end))))
            elif step == "hold":
                holds.append(asyncio.ensure_future(hold()))
            elif ends:
                end, task = ends.pop(rng.randrange(len(ends)))
                end.set() if step == "leave" else task.cancel()
                holds.append(task)
            await settle(rng.randrange(6))  # also during an admission
            assert gate.running <= 2
        for end, task in ends:
            end.set()
            holds.append(task)
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*holds, return_exceptions=True)
        assert [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)] == []
        assert (gate.running, gate.queued) == (0, 0)
        async with gate.turn():
            pass

    asyncio.run(run())
