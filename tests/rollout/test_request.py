from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.agents.noop import NoopAgent
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Outcome, VerifierResult
from clawgym.records.run_folder import result_row
from clawgym.rollout import Ended, EpisodeRequest, reward_of
from clawgym.rollout.collect import collect_episode
from clawgym.sandbox import Backend
from clawgym.tasks.packs import terminal_basic

RESULT = VerifierResult({"a": 0.5, "b": 1.0}, official=0.75, strict=0.0, corrected=0.25)


@pytest.mark.parametrize(
    ("name", "reward"), [("official", 0.75), ("strict", 0.0), ("corrected", 0.25), ("checks", 1.5)]
)
def test_reward_is_the_named_score(name, reward) -> None:
    assert reward_of(RESULT, name) == reward
    assert reward_of(None, name) is None


@given(st.floats(0, 1))
def test_baseline_adjusted_reward_without_a_baseline_is_strict(strict: float) -> None:
    assert reward_of(VerifierResult({}, 0.0, strict, None), "corrected") == strict


@pytest.mark.parametrize(("name", "reward"), [("strict", 0.0), ("official", 0.5)])
async def test_pool_gets_requested_reward_and_penalties(
    name, reward, tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(*args: object, **kwargs: object) -> VerifierResult:
        return VerifierResult({"a": 0.5}, 0.5, 0.0, None)

    monkeypatch.setattr("clawgym.rollout.attempt.grade", half)
    seen: list[str] = []

    async def graded(session: str, ended: Ended) -> dict[str, float]:
        assert ended.episode.outcome is Outcome.FAILED
        seen.append(session)
        return {"length": -0.25}

    task = terminal_basic.make("file-op", 0)
    request = EpisodeRequest(task=task, seed=5, sample=1, reward=name, session=SessionRequest(channel="train"))
    with Pool(tmp_path / "p.db") as pool:
        async with Gateway(object(), pool) as gateway:  # type: ignore[arg-type]
            ended = await collect_episode(request, lambda *_: NoopAgent(), backend, gateway, graded=graded)
        (stored,) = pool.episodes()
    assert (ended.reward, ended.penalties, ended.truncated) == (reward, {"length": -0.25}, False)
    assert result_row(ended.episode)["session"] == stored.id
    assert (stored.id, stored.reward, stored.penalties) == (seen[0], reward, {"length": -0.25})
    assert (stored.seed, stored.sample, stored.rewards) == (5, 1, {"strict": 0.0, "official": 0.5})
