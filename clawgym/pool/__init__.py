"""The pool: the durable store of episodes and turns.

Names are imported on first use, to keep the import of the package fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clawgym.pool.pool import Pool
    from clawgym.pool.sequences import sequences_of
    from clawgym.pool.states import EpisodeEnd, PooledEpisode
    from clawgym.pool.writer import PoolWriter

__all__ = ["EpisodeEnd", "Pool", "PoolWriter", "PooledEpisode", "sequences_of"]

_HOMES = {
    "EpisodeEnd": "states",
    "Pool": "pool",
    "PoolWriter": "writer",
    "PooledEpisode": "states",
    "sequences_of": "sequences",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
