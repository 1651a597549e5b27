"""How many episodes run at once: as many as the machine carries, never more than was asked for.

Invariant: at least one, at most the ceiling; one burst of failures halves the number once, not once per failure.
"""

from __future__ import annotations

from clawgym.sandbox.machine import Machine

__all__ = ["Pace"]


class Pace:
    """Additive increase, multiplicative decrease (AIMD) of the number of episodes at once.

    It starts from the cores and the memory that the tasks may use; a full round without an infrastructure error
    adds one, and on many cores one for each eight; such an error or a machine short of memory halves it; a
    machine short of time takes it back to one a core.
    """

    def __init__(self, task_memory_mb: int, ceiling: int | None = None, machine: Machine | None = None) -> None:
        self.machine = machine or Machine.this()
        self._task_memory_mb = max(1, task_memory_mb)
        fits = 0.8 * self.machine.memory_mb() // self._task_memory_mb
        self.ceiling = ceiling or max(1, int(min(fits, 32 * self.machine.cores)))
        self.limit = max(1, int(min(self.ceiling, fits, 2 * self.machine.cores)))
        self.round = 0
        """Goes up at each decrease; give the value at an attempt's start to :meth:`failed`."""
        self._good = 0

    def succeeded(self) -> None:
        """An attempt ended without an infrastructure error."""
        if self.machine.memory_mb() < self._task_memory_mb / 2:
            self.failed(self.round)
            return
        if self.machine.load() > 4:
            self.limit = min(self.limit, max(1, self.machine.cores))
            return
        self._good += 1
        if self._good >= self.limit:
            self._good = 0
            if self.machine.load() < 1.5:
                self.limit = min(self.ceiling, self.limit + max(1, self.machine.cores // 8))

    def failed(self, round_: int) -> None:
        """An attempt that began in ``round_`` ended by an infrastructure error."""
        self._good = 0
        if round_ == self.round:
            self.round += 1
            self.limit = max(1, self.limit // 2)
