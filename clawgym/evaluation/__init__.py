"""Evaluation: run a task set, summarize the results and show them (see ``docs/tutorials/benchmark.md``)."""

from __future__ import annotations

from clawgym.evaluation.runner import EvalConfig, episode_seed, evaluate
from clawgym.evaluation.summary import Summary, summarize
from clawgym.statistics import Estimate, pass_at_k, pass_hat_k

__all__ = ["Estimate", "EvalConfig", "Summary", "episode_seed", "evaluate", "pass_at_k", "pass_hat_k", "summarize"]
