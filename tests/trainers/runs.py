"""A training run that takes seconds."""

from __future__ import annotations

from typing import Any

from clawgym.trainers.config import TrainConfig

__all__ = ["Said", "small"]


def small(**parts: Any) -> TrainConfig:
    """One-word tasks, a random model, a few episodes per step."""
    return TrainConfig.model_validate(
        {
            "name": "small",
            "backend": "namespace",
            "model": {"scratch": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context_window": 512}},
            "tasks": {
                "generators": ["write-word"],
                "demonstrations": {"count": 4},
                "train": {"first": 100, "count": 6},
                "validation": {"count": 2},
                "heldout": {"first": 100, "count": 2},
            },
            "agent": {"protocol": "text", "system_prompt": "Work.", "max_steps": 2, "max_tokens": 12},
            "rollout": {"groups": 2, "group_size": 2, "concurrency": 8},
            "optimizer": {"lr": 1e-3},
            "compute": {"threads": 1, "row_tokens": 256, "micro_tokens": 1024},
            "sft": {"steps": 4, "batch": 4, "evaluate_every": 2, "shuffle_words": True},
            "evaluation": {"every": 2},
            "budget": {"steps": 3},
            **parts,
        }
    )


class Said:
    """Records the messages of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.steps: list[int] = []

    def say(self, text: str) -> None:
        self.texts.append(text)

    def step(self, step: int, metrics: Any) -> None:
        self.steps.append(step)

    def measuring(self, part: str, episodes: int) -> None: ...

    def measured(self, row: Any) -> None: ...
