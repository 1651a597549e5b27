"""Engines: what samples tokens."""

from clawgym.engines.openai import Budget, OpenAIEngine, Prices, RateLimits
from clawgym.engines.protocol import Completion, Engine, Sampling
from clawgym.engines.replay import Recorded, ReplayEngine

__all__ = [
    "Budget",
    "Completion",
    "Engine",
    "OpenAIEngine",
    "Prices",
    "RateLimits",
    "Recorded",
    "ReplayEngine",
    "Sampling",
]
