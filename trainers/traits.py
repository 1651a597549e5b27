"""How the trainer calls an advantage and combines it with process rewards; a property of the registered advantage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from clawgym.registry import advantages

__all__ = ["AdvantageTraits", "traits", "traits_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class AdvantageTraits:
    """How the trainer calls an advantage and combines it with process rewards."""

    uses_outcome: bool = True
    """False: the advantage of a turn is its process reward; the judge's votes become one reward by majority."""
    scales_process: bool = True
    """Whether process rewards are divided by their standard deviation."""
    uses_values: bool = False
    """True: it is a :class:`~clawgym.trainers.protocols.ValueAdvantage`. The trainer trains a critic, and calls it with
    the reward and the value of each turn; the other traits are not used."""


def traits(
    *, uses_outcome: bool = True, scales_process: bool = True, uses_values: bool = False
) -> Callable[[_Function], _Function]:
    """Decorator of an advantage: set its :class:`AdvantageTraits`. Without it the defaults apply."""

    def mark(function: _Function) -> _Function:
        function.traits = AdvantageTraits(uses_outcome, scales_process, uses_values)  # type: ignore[attr-defined]
        return function

    return mark


def traits_of(name: str) -> AdvantageTraits:
    """The traits of the advantage called ``name``. Raises as :meth:`~clawgym.registry.Registry.get` does."""
    return getattr(advantages.get(name), "traits", AdvantageTraits())
