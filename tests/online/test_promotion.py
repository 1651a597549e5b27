"""The gate: verdicts, the plan of scores, and attacks on them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.online.betting import log_evidence, lower_bound, spend, upper_bound
from clawgym.online.config import GateSettings
from clawgym.online.promotion import (
    Criterion,
    GateRules,
    Lifetime,
    PairedEvidence,
    PlannedItem,
    PromotionDecision,
    VersionScore,
)

JUDGES = ("judge:a", "judge:b")
SERVICE = Lifetime(("v0",), now=10, decided=10).submit("v1", at=10)


def evidence(differences, other="v0", sources=JUDGES, version="v1", at=20.0) -> PairedEvidence:
    """One group for each difference, around a score of 0.5. ``differences`` may have a column for each source."""
    rows = [list(np.broadcast_to(row, len(sources))) for row in differences]
    items = [PlannedItem(f"t{n}", f"s{n}", at) for n in range(len(rows))]
    scores = [
        VersionScore(item.id, name, 0.5 + sign * float(d) / 2, source)
        for item, row in zip(items, rows, strict=True)
        for source, d in zip(sources, row, strict=True)
        for name, sign in ((version, 1), (other, -1))
    ]
    return PairedEvidence(items, scores)


def everything(turns, tasks=0.0, style=0.0, safety=0.0, n=250, **options) -> dict[Criterion, PairedEvidence]:
    """Evidence with constant differences on the three sets that are compared with the first version."""
    return {
        "turns": evidence(turns, **options),
        "tasks": evidence([tasks] * n, sources=("verifier",)),
        "style": evidence([style] * n, sources=("verifier",)),
        "safety": evidence([safety] * n, sources=("verifier",)),
    }


def decided(turns, service: Lifetime = SERVICE, **options) -> PromotionDecision:
    return service.decide("v1", everything(turns, **options))


def test_clear_gain_without_losses_is_promoted():
    decision = decided([0.2] * 100)
    assert decision.verdict == "promoted"
    turns = decision.figures["turns"]
    assert (turns.n, turns.mean, turns.alpha) == (100, pytest.approx(0.2), spend(1, 0.05))
    assert 0 < turns.lower < 0.2 < turns.upper
    assert [reason.partition(":")[0] for reason in decision.reasons] == ["turns", "tasks", "style", "safety"]
    assert "+0.200 from the serving version over n=100" in decision.reasons[0]


def test_rejection_has_a_level_of_its_own():
    values = [0.1, -0.3] * 20
    for rejected in (0.05, 0.5):
        service = replace(SERVICE, rules=GateRules(reject_alpha=rejected))
        figures = decided(values, service).figures["turns"]
        assert figures.upper == pytest.approx(upper_bound(values, rejected / 4))
        assert figures.lower == pytest.approx(lower_bound(values, spend(1, 0.05)))


def test_little_evidence_leaves_a_candidate():
    decision = decided([0.2] * 10)
    assert decision.verdict == "candidate"
    assert decision.reasons[0].startswith("turns: mean difference +0.200")
    assert "yet" in decision.reasons[0]


def test_clearly_worse_is_rejected():
    decision = decided([-0.2] * 100)
    assert decision.verdict == "rejected"
    assert "clearly worse" in decision.reasons[0]


@pytest.mark.parametrize("criterion", ["tasks", "style", "safety"])
def test_loss_against_the_first_version_is_rejected_in_spite_of_a_gain(criterion: str):
    decision = decided([0.3] * 300, **{criterion: -0.2})
    assert decision.verdict == "rejected"
    assert [reason.partition(":")[0] for reason in decision.reasons] == [criterion]


@pytest.mark.parametrize("criterion", ["tasks", "style", "safety"])
def test_each_criterion_needs_evidence(criterion: Criterion):
    found = everything([0.3] * 300)
    found[criterion] = PairedEvidence([], [])
    decision = SERVICE.decide("v1", found)
    assert decision.verdict == "candidate"
    assert decision.figures[criterion].n == 0
    assert len(decision.reasons) == 1
    assert decision.reasons[0].startswith(criterion)


def test_margin_decides_about_a_small_loss():
    loss = {"tasks": -0.04, "n": 3000}
    assert decided([0.3] * 100, **loss).verdict == "promoted"
    strict = replace(SERVICE, rules=GateRules(margins={"tasks": 0.01, "style": 0.05, "safety": 0.05}))
    assert decided([0.3] * 100, strict, **loss).verdict == "rejected"


def test_small_losses_do_not_add_up():
    """Each version loses 0.06 on tasks against the one before it; the second is 0.12 below the first."""
    service, at, verdicts = Lifetime(("v0",)), 0.0, []
    for number in (1, 2, 3):
        name = f"v{number}"
        service = service.submit(name, at := at + 10)
        found = everything([0.3] * 100, other=service.served[-1], version=name, at=at + 5)
        for criterion, loss in (("tasks", -0.06 * number), ("style", 0.0), ("safety", 0.0)):
            found[criterion] = evidence([loss] * 3000, sources=("verifier",), version=name)
        decision = service.decide(name, found)
        verdicts.append(decision.verdict)
        if decision.verdict == "promoted":
            service = service.promote(decision, at := at + 10)
    assert verdicts == ["promoted", "rejected", "rejected"]


def test_later_candidates_have_smaller_levels():
    service = Lifetime(("v0",))
    for number in range(1, 4):
        service = service.submit(f"other-{number}", at=number)
    service = service.submit("v1", at=10)
    fourth, first = decided([0.2] * 60, service).figures["turns"], decided([0.2] * 60).figures["turns"]
    assert fourth.alpha == spend(4, 0.05) < first.alpha
    assert fourth.lower < first.lower


def test_turns_of_a_session_are_one_value():
    items = [PlannedItem(f"{s}-{t}", s, 20) for s in ("a", "b") for t in range(3)]
    values = {"a": (1.0, 1.0, 0.4), "b": (0.2, 0.0, 0.1)}
    scores = [VersionScore(f"{s}-{t}", "v1", values[s][t]) for s in values for t in range(3)]
    scores += [VersionScore(item.id, "v0", 0.0) for item in items]
    found = PairedEvidence(items, scores).differences("v1", "v0")
    assert found["verifier"].tolist() == pytest.approx([0.8, 0.1])


# Attacks


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan, math.inf, -math.inf])
def test_score_out_of_range_is_refused(value: float):
    with pytest.raises(ValueError, match=r"t1: a score of .* by judge:a: give a number in"):
        VersionScore("t1", "v1", value, "judge:a")


def test_duplicate_turn_is_refused():
    given_ = evidence([0.2] * 3)
    twice = PairedEvidence([*given_.items, given_.items[0]], given_.scores)
    with pytest.raises(ValueError, match="t0 is planned twice"):
        twice.differences("v1", "v0")


def test_duplicate_score_is_refused():
    given_ = evidence([0.2] * 3)
    twice = PairedEvidence(given_.items, [*given_.scores, VersionScore("t0", "v1", 1.0, "judge:a")])
    with pytest.raises(ValueError, match="judge:a scored item t0 of v1 twice"):
        twice.differences("v1", "v0")


def test_missing_pair_in_the_middle_is_refused():
    """Otherwise a candidate could lose its bad turns."""
    given_ = evidence([0.2] * 5)
    left = [score for score in given_.scores if (score.item, score.version) != ("t2", "v1")]
    with pytest.raises(ValueError, match=r"t2 of v1 has no score of judge:[ab], but later groups have"):
        PairedEvidence(given_.items, left).differences("v1", "v0")


def test_missing_scores_at_the_end_do_not_count_yet():
    given_ = evidence([0.2, 0.4, 0.6])
    left = [score for score in given_.scores if (score.item, score.version) != ("t2", "v0")]
    found = PairedEvidence(given_.items, left).differences("v1", "v0")
    assert {source: values.tolist() for source, values in found.items()} == {
        judge: pytest.approx([0.2, 0.4]) for judge in JUDGES
    }


def test_judge_that_skips_turns_is_refused():
    given_ = evidence([0.2] * 5)
    left = [score for score in given_.scores if (score.item, score.source) != ("t1", "judge:b")]
    with pytest.raises(ValueError, match="has no score of judge:b"):
        PairedEvidence(given_.items, left).differences("v1", "v0")


@pytest.mark.parametrize("stray", [VersionScore("other", "v1", 1.0), VersionScore("t0", "v9", 1.0)])
def test_score_of_nothing_planned_is_refused(stray: VersionScore):
    given_ = evidence([0.2])
    with pytest.raises(ValueError, match="belongs to nothing planned"):
        PairedEvidence(given_.items, [*given_.scores, stray]).differences("v1", "v0")


def test_session_in_two_places_is_refused():
    items = [PlannedItem(name, group, 20) for name, group in (("1", "a"), ("2", "b"), ("3", "a"))]
    scores = [VersionScore(item.id, version, 0.5) for item, version in product(items, ("v0", "v1"))]
    with pytest.raises(ValueError, match="group a is planned in two places"):
        PairedEvidence(items, scores).differences("v1", "v0")


@pytest.mark.parametrize("at", [9.0, 10.0, math.nan])
def test_turns_that_the_candidate_could_know_are_refused(at: float):
    with pytest.raises(ValueError, match=r"not newer than the last decision before v1.*began after 10"):
        decided([0.2] * 100, at=at)


def test_judge_that_likes_every_candidate_cannot_promote_one():
    biased = [[1.0, 0.0]] * 400
    assert decided(biased).verdict == "candidate"
    alone = replace(SERVICE, rules=GateRules(sources=1))
    assert decided(biased, alone).verdict == "candidate"  # with two sources, each is still left out


def test_one_source_needs_a_setting():
    one = {"sources": ("judge:a",)}
    decision = decided([0.2] * 100, **one)
    assert decision.verdict == "candidate"
    assert "scores of 1 sources; 2 are needed" in decision.reasons[0]
    assert decided([0.2] * 100, replace(SERVICE, rules=GateRules(sources=1)), **one).verdict == "promoted"


def test_thousands_of_candidates_do_not_help():
    """4,000 equal candidates, looked at after every ten of 300 turns. Some look good enough for a first candidate."""
    u = np.random.default_rng(5).random((4000, 300))
    paths = np.where(u < 0.2, 1.0, np.where(u < 0.4, -1.0, 0.0))
    best = np.max([log_evidence(paths[:, :n]) for n in range(10, 301, 10)], axis=0)
    needed = np.array([-math.log(spend(number, 0.05)) for number in range(1, 4001)])
    assert (best >= needed[0]).any()
    assert (best < needed).all()


def test_a_good_candidate_passes_after_thousands():
    service = replace(Lifetime(("v0",)), submitted=4000).submit("v1", at=10)
    assert service.open[0].number == 4001
    assert decided([0.3] * 200, service, n=1000).verdict == "promoted"


def test_version_cannot_be_compared_twice_at_once():
    with pytest.raises(ValueError, match="being compared already"):
        SERVICE.submit("v1", at=20)
    with pytest.raises(ValueError, match="is serving"):
        SERVICE.submit("v0", at=20)


def test_number_is_not_used_again():
    again = SERVICE.close("v1").submit("v1", at=20)
    assert again.open[0].number == 2


def test_turns_count_until_a_decision():
    """A comparison that ends for a reason other than scores leaves its turns to the next one."""
    assert SERVICE.close("v1").submit("v2", at=30).open[0].after == 10
    rejected = SERVICE.reject("v1", at=20)
    assert rejected.submit("v2", at=30).open[0].after == 20
    with pytest.raises(ValueError, match="before the last event"):
        SERVICE.reject("v1", at=9)


def test_a_rejection_is_a_decision_for_what_came_after_it():
    service = SERVICE.submit("v2", at=12).reject("v1", at=20).submit("v3", at=30, made=15).reject("v3", at=40)
    assert [one.after for one in service.open] == [10]
    assert service.submit("v4", at=50, made=19).open[-1].after == 10
    assert service.submit("v4", at=50, made=20).open[-1].after == 20
    assert service.submit("v4", at=50).open[-1].after == 40
    assert service.submit("v1", at=50, made=5).open[-1].after == 20, "it knows its own rejection"
    with pytest.raises(ValueError, match="after the present time"):
        service.submit("v4", at=50, made=51)
    serving = SERVICE.promote(decided([0.2] * 100), at=60)
    assert serving.submit("v4", at=70, made=5).open[0].after == 60, "what serves changed"


def test_submission_cannot_be_backdated():
    for at in (9.0, math.nan):
        with pytest.raises(ValueError, match="before the last event"):
            SERVICE.submit("v2", at=at)


def test_promotion_ends_all_comparisons():
    service = SERVICE.submit("v2", at=15)
    promoted = service.promote(decided([0.2] * 100, service), at=30)
    assert promoted.served == ("v0", "v1")
    assert promoted.open == ()
    with pytest.raises(ValueError, match="v2 is not being compared"):
        promoted.decide("v2", everything([0.2] * 100, version="v2"))
    again = promoted.submit("v2", at=35).open[0]
    assert (again.number, again.serving, again.first, again.after) == (3, "v1", "v0", 30)


def test_only_a_promoted_candidate_is_served():
    with pytest.raises(ValueError, match="was not promoted"):
        SERVICE.promote(decided([0.2] * 10), at=30)
    stale = decided([0.2] * 100)
    with pytest.raises(ValueError, match="not being compared"):
        SERVICE.promote(stale, at=30).promote(stale, at=31)
    again = SERVICE.close("v1").submit("v1", at=20)
    with pytest.raises(ValueError, match="was not promoted"):
        again.promote(stale, at=30)


def test_rollback_serves_the_version_before():
    service = SERVICE.promote(decided([0.2] * 100), at=30).submit("v2", at=40).roll_back(at=50)
    assert service.served == ("v0",)
    assert service.open == ()
    third = service.submit("v3", at=60).open[0]
    assert (third.number, third.after) == (3, 50)
    with pytest.raises(ValueError, match="none to go back to"):
        service.roll_back(at=60)


def test_missing_criterion_is_refused():
    found = everything([0.2] * 100)
    del found["safety"]
    with pytest.raises(ValueError, match="give turns, tasks, style and safety"):
        SERVICE.decide("v1", found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"reject_alpha": 1.0}, "reject_alpha=1.0"),
        ({"margins": {"tasks": 0.1}}, "give one for each"),
        ({"margins": {"tasks": 0.1, "style": 0.1, "safety": 0.0}}, "the margin of safety is 0.0"),
        ({"sources": 0}, "sources=0"),
    ],
)
def test_wrong_rules_are_refused(settings, message: str):
    with pytest.raises(ValueError, match=message):
        GateRules(**settings)


def test_one_margin_can_be_set_alone():
    assert GateSettings.model_validate({"margins": {"safety": 0.2}}).rules == GateRules(
        margins={"tasks": 0.1, "style": 0.1, "safety": 0.2}
    )


def test_service_needs_a_first_version():
    with pytest.raises(ValueError, match="give the first version"):
        Lifetime(())


def test_lifetime_is_plain_data():
    stored = json.loads(json.dumps(asdict(SERVICE)))
    assert stored["submitted"] == 1
    assert stored["open"][0]["version"] == "v1"


@given(st.lists(st.floats(-1, 1), max_size=80))
def test_verdict_follows_from_the_figures(turns):
    decision = decided(turns)
    figures = decision.figures.values()
    expected = "rejected" if any(f.failed for f in figures) else "candidate"
    enough = decision.figures["turns"].sources >= 2
    assert decision.verdict == ("promoted" if enough and all(f.passed for f in figures) else expected)
    assert not any(f.passed and f.failed for f in figures)
    assert decision.reasons
