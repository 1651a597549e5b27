"""Engines, which sample tokens. Those that need optional packages are imported on first use."""

from typing import TYPE_CHECKING, Any

from clawgym.engines.openai import AnswerBudget, OpenAIEngine, Prices, RateLimits
from clawgym.engines.protocol import (
    CallDelta,
    Checkable,
    Completion,
    Delta,
    Engine,
    GenerateRequest,
    Image,
    Sampling,
    TextEngine,
    TokenEngine,
    Tokens,
)
from clawgym.engines.replay import Recorded, ReplayEngine, ReplayTokens

if TYPE_CHECKING:
    from clawgym.engines.sglang import SGLangEngine
    from clawgym.engines.transformers import TransformersEngine
    from clawgym.engines.vllm import VLLMEngine

__all__ = [
    "AnswerBudget",
    "CallDelta",
    "Checkable",
    "Completion",
    "Delta",
    "Engine",
    "GenerateRequest",
    "Image",
    "OpenAIEngine",
    "Prices",
    "RateLimits",
    "Recorded",
    "ReplayEngine",
    "ReplayTokens",
    "SGLangEngine",
    "Sampling",
    "TextEngine",
    "TokenEngine",
    "Tokens",
    "TransformersEngine",
    "VLLMEngine",
]

_LATE = {"SGLangEngine": "sglang", "TransformersEngine": "transformers", "VLLMEngine": "vllm"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        from importlib import import_module

        return getattr(import_module(f"clawgym.engines.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
