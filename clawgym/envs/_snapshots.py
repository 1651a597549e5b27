"""Snapshots of running episodes: :class:`EnvSnapshot`, and the store in which an environment keeps its own.

Invariant: a store holds a bounded number of snapshots. Each is dropped when it is closed, when nobody refers to it any
more, or when its environment is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, get_args

from clawgym.envs._runtime import Runtime
from clawgym.errors import SnapshotRefused
from clawgym.rollout import SavedAttempt

__all__ = ["EnvSnapshot", "Method", "SavedEpisode", "SnapshotStore", "checked_method"]

Method = Literal["fork", "replay"]
"""How an episode is restored: in a fork of the sandbox's files, or by its actions in a new sandbox."""
_MOST = 64
"""Most open snapshots for each environment of a batch."""


def checked_method(method: str | None) -> None:
    """Raise ValueError for an unknown ``method``."""
    if method is not None and method not in get_args(Method):
        raise ValueError(f"method={method!r}: use 'fork', 'replay' or None for the environment's own way")


@dataclass(frozen=True, eq=False)
class SavedEpisode:
    """The state of a running episode, as its runner saved it."""

    method: Method
    attempt: SavedAttempt
    seed: int
    baseline: float | None
    info: dict[str, Any]
    """The info of ``reset``."""
    seen: dict[str, Any]
    """The last observation, without the counters."""
    actions: tuple[Any, ...]
    digests: tuple[int, ...]
    """A hash of the observation after each action."""
    seconds_left: float
    state: Any
    """What the environment's ``save`` returned, with the method ``fork``."""


class EnvSnapshot:
    """The state of an episode; made by ``env.snapshot()``, used by ``env.restore(snapshot)`` as often as needed.

    It outlives the episode, and belongs to the environment or batch that took it. Its files are freed by :meth:`close`,
    by the end of a ``with`` block, after the last reference to it, and with its environment.
    """

    def __init__(self, key: int, saved: SavedEpisode, store: SnapshotStore) -> None:
        self.task_id: str = saved.attempt.task.id
        self.step: int = len(saved.actions)
        """Number of actions before the snapshot."""
        self.method: Method = saved.method
        self._key = key
        self._store = store

    @property
    def closed(self) -> bool:
        return not self._store.holds(self._key)

    def close(self) -> None:
        """Free the files. Idempotent."""
        self._store.close(self._key)

    def __enter__(self) -> EnvSnapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.method
        return f"EnvSnapshot({self.task_id!r}, step={self.step}, {state})"


class SnapshotStore:
    """The open snapshots of one environment, or of a batch of ``num_envs``."""

    def __init__(
        self, runtime: Runtime, num_envs: int, drop: Callable[[SavedEpisode], Coroutine[Any, Any, None]]
    ) -> None:
        self._runtime = runtime
        self._most = _MOST * num_envs
        self._drop = drop
        self._held: dict[int, SavedEpisode] = {}
        self._keys = itertools.count()
        self._unused: list[int] = []
        """Keys of snapshots that nobody refers to; dropped before the next one is taken."""

    def holds(self, key: int) -> bool:
        return key in self._held

    def saved(self, snapshot: EnvSnapshot) -> SavedEpisode:
        """Return the state. Raises :class:`SnapshotRefused` if it is closed, or belongs to another environment."""
        if snapshot._store is not self:
            raise SnapshotRefused("this snapshot belongs to another environment: restore it where it was taken")
        if snapshot._key not in self._held:
            raise SnapshotRefused("this snapshot is closed: take another one")
        return self._held[snapshot._key]

    async def take(self, takes: list[Coroutine[Any, Any, SavedEpisode]]) -> list[EnvSnapshot]:
        """Wait for ``takes`` and hold their results. If one fails, none is kept, and its error is raised."""
        await self._drop_unused()
        if len(self._held) + len(takes) > self._most:
            for take in takes:
                take.close()
            raise SnapshotRefused(f"{len(self._held)} snapshots are open, at most {self._most} can be: close some")
        done = await asyncio.gather(*takes, return_exceptions=True)
        taken = [one for one in done if isinstance(one, SavedEpisode)]
        if errors := [one for one in done if isinstance(one, BaseException)]:
            for one in taken:
                await self._drop(one)
            raise errors[0]
        return [self._hold(one) for one in taken]

    def _hold(self, saved: SavedEpisode) -> EnvSnapshot:
        key = next(self._keys)
        self._held[key] = saved
        snapshot = EnvSnapshot(key, saved, self)
        weakref.finalize(snapshot, self._unused.append, key).atexit = False
        return snapshot

    async def _drop_unused(self) -> None:
        while self._unused:
            if (saved := self._held.pop(self._unused.pop(), None)) is not None:
                await self._drop(saved)

    def close(self, key: int) -> None:
        """See :meth:`EnvSnapshot.close`."""
        saved = self._held.pop(key, None)
        if saved is not None and self._runtime.usable:
            self._runtime.run(self._drop(saved))

    async def aclose(self) -> None:
        """Drop all snapshots. Runs on the loop."""
        held, self._held = self._held, {}
        for saved in held.values():
            await self._drop(saved)
