"""Engines: what samples tokens."""

from clawgym.engines.openai import Budget, OpenAIEngine, Prices, RateLimits
from clawgym.engines.protocol import (
    CallDelta,
    Completion,
    Delta,
    Engine,
    Image,
    Sampling,
    TextEngine,
    TokenEngine,
    Tokens,
)
from clawgym.engines.replay import Recorded, ReplayEngine

__all__ = [
    "Budget",
    "CallDelta",
    "Completion",
    "Delta",
    "Engine",
    "Image",
    "OpenAIEngine",
    "Prices",
    "RateLimits",
    "Recorded",
    "ReplayEngine",
    "Sampling",
    "TextEngine",
    "TokenEngine",
    "Tokens",
]
