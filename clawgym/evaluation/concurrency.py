"""How many episodes run at once: as many as the machine can run, never more than the caller asked for."""

from __future__ import annotations

from clawgym.sandbox.machine import Machine

__all__ = ["ConcurrencyLimit"]


class ConcurrencyLimit:
    """Adapts the number of concurrent episodes by additive increase, multiplicative decrease (AIMD).

    It starts from the cores and the memory that the tasks may use. A full round without an infrastructure error adds
    one, and on many cores one for every eight. An infrastructure error or low memory halves it. A load average above
    4 per core lowers it to one episode per core.

    ``task_memory_mb``: memory limit of the largest task. ``ceiling``: most episodes at once; ``None``: what fits.

    Invariants: the limit is at least 1 and at most the ceiling; one burst of failures halves it once, not once per
    failure.
    """

    def __init__(self, task_memory_mb: int, ceiling: int | None = None, machine: Machine | None = None) -> None:
        self.machine = machine or Machine.this()
        self._task_memory_mb = max(1, task_memory_mb)
        fits = 0.8 * self.machine.memory_mb() // self._task_memory_mb
        self.ceiling = ceiling or max(1, int(min(fits, 32 * self.machine.cores)))
        self.limit = max(1, int(min(self.ceiling, fits, 2 * self.machine.cores)))
        self.round = 0
        """Increases by one at each halving. Pass the value at an attempt's start to :meth:`failed`."""
        self._succeeded = 0

    def succeeded(self) -> None:
        """Report an attempt that ended without an infrastructure error."""
        if self.machine.memory_mb() < self._task_memory_mb / 2:
            self.failed(self.round)
            return
        if self.machine.load() > 4:
            self.limit = min(self.limit, max(1, self.machine.cores))
            return
        self._succeeded += 1
        if self._succeeded >= self.limit:
            self._succeeded = 0
            if self.machine.load() < 1.5:
                self.limit = min(self.ceiling, self.limit + max(1, self.machine.cores // 8))

    def failed(self, round_: int) -> None:
        """Report an attempt that began in ``round_`` and ended by an infrastructure error."""
        self._succeeded = 0
        if round_ == self.round:
            self.round += 1
            self.limit = max(1, self.limit // 2)
