"""The machine on which a backend runs its sandboxes."""

from __future__ import annotations

from clawgym.sandbox import backend
from clawgym.sandbox.machine import Machine, machine_of


class Cluster:
    """A backend whose sandboxes are elsewhere, as far as is asked here."""

    def machine(self) -> Machine:
        return Machine(7, lambda: 11.0, lambda: 0.5)


async def test_machine_is_this_one_unless_the_backend_names_another() -> None:
    here = backend("namespace")
    assert machine_of(here).cores == Machine.this().cores
    await here.aclose()
    there = machine_of(Cluster())  # type: ignore[arg-type]
    assert (there.cores, there.memory_mb(), there.load()) == (7, 11.0, 0.5)
