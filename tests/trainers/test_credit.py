"""Advantages of turns from outcome and process rewards."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

import pytest

from clawgym.rewards.calibration import weight
from clawgym.trainers.common.judging import Agreement
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ScoredEpisode, batch_metrics, turn_advantages


def config(advantage: str = "grpo", **reward: Any) -> TrainConfig:
    return TrainConfig.model_validate({"algorithm": {"advantage": advantage}, "reward": reward})


def attempt(group: int, score: float, process: dict[int, float], **more: Any) -> ScoredEpisode:
    return ScoredEpisode(group, score, "solved" if score == 1 else "failed", 3, 1, 9, (0, 1, 2), process, **more)


def attempts() -> list[ScoredEpisode]:
    scores = [(0, 1.0), (0, 0.25), (0, 0.0), (1, 0.5), (1, 1.0), (1, 1.0)]
    return [attempt(g, s, {0: n / 6, 1: -n / 3}) for n, (g, s) in enumerate(scores)]


@pytest.mark.parametrize("advantage", ["grpo", "dr-grpo", "rloo", "reinforce++"])
def test_outcome_only_when_process_weight_is_zero(advantage: str) -> None:
    plain, _ = turn_advantages(attempts(), config(advantage), seed=0)
    judged, _ = turn_advantages(attempts(), config(advantage, judge="rule"), seed=0, process_weight=0.0)
    assert judged == plain
    assert len({*plain.values()}) > 2
    heard, _ = turn_advantages(attempts(), config(advantage, judge="rule"), seed=0, process_weight=1.0)
    assert heard != plain
    unjudged = [key for key in plain if key[1] == 2]
    assert sorted(unjudged, key=heard.__getitem__) == sorted(unjudged, key=plain.__getitem__)


def rms(found: dict[tuple[int, int], float]) -> float:
    return math.sqrt(fmean(value**2 for value in found.values()))


def test_sum_of_both_advantages_has_the_scale_of_one() -> None:
    """The third step of GDPO; without the division by a standard deviation (dr-grpo) there is none."""
    judged = [
        attempt(g, s, {t: (-1.0) ** (n + t) for t in range(3)}) for n, (g, s) in enumerate([(0, 1.0), (0, 0.0)] * 8)
    ]
    found, _ = turn_advantages(judged, config(judge="rule", calibrate=False), seed=0)
    assert rms(found) == pytest.approx(1, abs=0.05)
    assert rms(turn_advantages(judged, config("dr-grpo", judge="rule"), seed=0)[0]) != pytest.approx(1, abs=0.05)


def test_rare_process_reward_is_bounded() -> None:
    one_bad = [attempt(0, float(n % 2), {t: -1.0 if (n, t) == (3, 1) else 1.0 for t in range(3)}) for n in range(14)]
    found, _ = turn_advantages(one_bad, config(judge="rule"), seed=0)
    free, _ = turn_advantages(one_bad, config(judge="rule", clip=None), seed=0)
    assert free[3, 1] < 2 * found[3, 1] < 0


@pytest.mark.parametrize("advantage", ["grpo", "dr-grpo"])
def test_sum_is_normalised_by_group_and_step(advantage: str) -> None:
    """R_t = O + r_t, against the formula for the two episodes that reached the step."""
    two = [attempt(0, 1.0, {0: -1.0, 1: 0.5}), attempt(0, 0.0, {0: 1.0, 1: 0.5})]
    found, _ = turn_advantages(two, config(advantage, judge="rule", combine="sum"), seed=0)
    returns = {(n, t): 2 * one.score - 1 + one.process.get(t, 0.0) for n, one in enumerate(two) for t in range(3)}
    for t in range(3):
        both = [returns[0, t], returns[1, t]]
        scale = stdev(both) if advantage == "grpo" and both[0] != both[1] else 1.0
        assert [found[n, t] for n in (0, 1)] == pytest.approx([(r - fmean(both)) / scale for r in both], abs=1e-5)


def test_sum_takes_no_other_baseline() -> None:
    with pytest.raises(ValueError, match="has a baseline of its own, not rloo"):
        config("rloo", judge="rule", combine="sum")


def test_untrained_turn_keeps_step_indices() -> None:
    by_step = config(judge="rule", by_step=True)
    lacks = ScoredEpisode(0, 1.0, "solved", 3, 1, 9, (1, 2), {1: 1.0, 2: -1.0}, steps=(1, 2))
    whole = [attempt(0, 1.0, {0: 0.0, 1: -1.0, 2: 1.0}, steps=(0, 1, 2)), lacks]
    found, _ = turn_advantages(whole, by_step, seed=0)
    assert found[1, 1] > 0 > found[1, 2]
    assert found[0, 1] < 0 < found[0, 2]


def test_shuffle_permutes_process_rewards() -> None:
    mixed = [attempt(n, 1.0, {0: n / 6, 2: -n / 6}) for n in range(6)]
    binary = [turn_advantages(mixed, config("binary", judge="rule", shuffle=on), seed=3)[0] for on in (False, True)]
    assert binary[0] != binary[1]
    assert sorted(binary[0].values()) == sorted(binary[1].values())
    assert all(given[n, 1] == 0 for given in binary for n in range(6))


def test_shuffle_of_process_rewards_keeps_the_outcomes() -> None:
    judged = [attempt(0, n % 2, {0: n / 6, 2: -n / 6}) for n in range(6)]
    about = [config(judge="rule", shuffle=how) for how in (False, "process", True)]
    plain, process, both = (turn_advantages(judged, one, seed=3)[0] for one in about)
    assert plain != process
    alone = [turn_advantages(judged, config(shuffle=how), seed=3)[0] for how in (False, "process", True)]
    assert alone[0] == alone[1] != alone[2]
    assert process != both


@pytest.mark.parametrize("advantage", ["dr-grpo", "rloo"])
def test_shuffle_keeps_penalties_with_their_scores(advantage: str) -> None:
    one_group = [attempt(0, n / 8, {}, penalties={"length": -0.1 * n}) for n in range(6)]
    plain, control = (turn_advantages(one_group, config(advantage, shuffle=on), seed=3)[0] for on in (False, True))
    assert plain != control
    assert sorted(control.values()) == pytest.approx(sorted(plain.values()))


def test_group_fractions_by_kind() -> None:
    groups = [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0), (0.5, 0.5), (0.0, 1.0), (0.5, 1.0), (0.0, 0.25), (0.25, 0.75)]
    found = batch_metrics(
        [attempt(n, score, {}) for n, group in enumerate(groups) for score in group], config(), seed=0
    )
    shares = {name: found[f"rollout/group_{name}_frac"] for name in ("all_zero", "all_one", "all_same_mid", "mixed")}
    assert shares == {"all_zero": 1 / 8, "all_one": 2 / 8, "all_same_mid": 1 / 8, "mixed": 4 / 8}
    assert found["rollout/group_zero_var_frac"] == 4 / 8


def test_process_weight_is_calibrated_by_setting_and_restored_on_resume() -> None:
    extra: dict[str, Any] = {}
    about = config(judge="rule")
    agreement = Agreement(about, extra)
    assert agreement.process_weight("swe") == weight((0, 1))
    for _ in range(20):
        right = [attempt(0, s, {0: 2 * s - 1}, setting="terminal") for s in (0.0, 1.0)]
        wrong = [attempt(0, s, {0: 1 - 2 * s}, setting="swe") for s in (0.0, 1.0)]
        metrics = agreement.add([*right, *wrong])
    assert agreement.process_weight("terminal") > 0.99
    assert agreement.process_weight("swe") < 0.01
    assert metrics["reward/process_auc_terminal"] == 1
    assert metrics["reward/process_auc_swe"] == 0
    again = Agreement(about, extra)
    assert [again.process_weight(s) for s in ("terminal", "swe", "gui")] == [
        agreement.process_weight(s) for s in ("terminal", "swe", "gui")
    ]
    assert Agreement(config(judge="rule", calibrate=False), extra).process_weight("swe") == 1
    assert Agreement(about, {"process_worth": 0.25}).process_weight("swe") == 0.25
    assert Agreement(config(), {}).add(right) == {}


def test_penalties_lower_the_outcome_of_their_episode() -> None:
    about = config("dr-grpo", malformed=0.5)
    lost = [attempt(0, 1.0, {}, penalties={"malformed": -0.5}), attempt(0, 1.0, {}), attempt(0, 0.0, {})]
    found, _ = turn_advantages(lost, about, seed=0)
    mean = (0.5 + 1 - 1) / 3
    assert [found[n, 0] for n in range(3)] == pytest.approx([0.5 - mean, 1 - mean, -1 - mean])


def test_penalties_need_bounds_and_an_outcome() -> None:
    with pytest.raises(ValueError, match=r"set reward\.longest, and reward\.slack"):
        config(length=1.0, longest=100)
    with pytest.raises(ValueError, match="advantage binary has no outcome"):
        config("binary", judge="rule", malformed=1.0)
