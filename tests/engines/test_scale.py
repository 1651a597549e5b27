"""Finding out from two answers which log-probs a server returns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.engines._scale import COLD, TOP, is_exact, scale_of
from clawgym.engines.protocol import Sampling

from .fake_model import log_softmax

LOGITS = st.lists(st.floats(-8, 8), min_size=TOP, max_size=40)
NOISE = st.floats(-0.005, 0.005)


def top(logprobs: list[float]) -> list[float]:
    return sorted(logprobs, reverse=True)[:TOP]


@given(LOGITS, NOISE)
def test_scaled_log_probs_are_never_taken_for_raw_ones(logits: list[float], noise: float) -> None:
    warm = top(log_softmax(logits))
    cold = top(log_softmax([v / COLD for v in logits]))
    cold[-1] += noise if cold[-1] < -0.01 else 0
    assert scale_of(warm, cold) in ("scaled", "unknown")
    if warm[0] - warm[-1] > 0.1:
        assert scale_of(warm, cold) == "scaled"


@given(LOGITS, NOISE)
def test_raw_log_probs_are_never_taken_for_scaled_ones(logits: list[float], noise: float) -> None:
    warm = top(log_softmax(logits))
    cold = [*warm[:-1], warm[-1] - abs(noise)]
    assert scale_of(warm, cold) in ("raw", "unknown")
    if warm[0] - warm[-1] > 0.1:
        assert scale_of(warm, cold) == "raw"


@pytest.mark.parametrize("logits", [[2.0, 1.0, 0.0], [0.0] * TOP, [-0.1, -0.2, -0.3]])
def test_logits_are_told_apart(logits: list[float]) -> None:
    assert scale_of(logits, logits) == "logits"


@pytest.mark.parametrize("values", [[], [-0.5], [-math.inf, -1.0], [math.nan, -1.0], [-1.7] * TOP])
def test_uninformative_answers_give_unknown(values: list[float]) -> None:
    assert scale_of(values, values) == "unknown"


@pytest.mark.parametrize(
    ("scale", "sampling", "after_cut", "before_cut"),
    [
        ("raw", Sampling(), True, True),
        ("raw", Sampling(temperature=1.0, top_p=0.9, top_k=5), True, True),
        ("raw", Sampling(temperature=0.7), False, False),
        ("scaled", Sampling(temperature=0.7), True, True),
        ("scaled", Sampling(temperature=0.7, top_k=-1, top_p=1.0), True, True),
        ("scaled", Sampling(temperature=0.7, top_k=0), True, True),
        ("scaled", Sampling(temperature=0.7, top_p=0.9), False, True),
        ("scaled", Sampling(top_k=20), False, True),
        ("scaled", Sampling(temperature=0.0), False, False),
        ("raw", Sampling(temperature=0.0), False, False),
        ("unknown", Sampling(), True, True),
        ("unknown", Sampling(top_k=20), False, True),
        ("unknown", Sampling(temperature=0.9), False, False),
        ("logits", Sampling(), False, False),
    ],
)
def test_which_log_probs_are_exact(scale, sampling: Sampling, after_cut: bool, before_cut: bool) -> None:
    assert is_exact(scale, sampling, cut_after=False) is after_cut
    assert is_exact(scale, sampling, cut_after=True) is before_cut
