from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from clawgym.cli import app, main
from clawgym.errors import ComparisonRefused, RunFolderError
from clawgym.evaluation.compare import compare
from clawgym.evaluation.paired import detectable, difference, sign_flip
from clawgym.records import Episode, Outcome, Task, TaskFile, TaskSet, VerifierResult, VerifierSpec
from clawgym.records.run_folder import RunFolder, make_manifest

deltas = st.lists(st.integers(-24, 24).map(lambda n: n / 24), min_size=2, max_size=12)
zero_one = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=2, max_size=40)


def tasks(n: int = 40, checker: str = "v1", changed: Sequence[int] = (), inputs: str = "a") -> TaskSet:
    """``n`` tasks; those in ``changed`` have the checker ``checker``, and ``inputs`` go to the first."""

    def spec(i: int) -> VerifierSpec:
        text = checker if i in changed else "v1"
        return VerifierSpec("reward_sh", (TaskFile("reward.sh", text.encode()),))

    items = (
        Task(f"t{i}", f"do {i}", spec(i), inputs=(TaskFile("in", inputs.encode()),) if i == 0 else ()) for i in range(n)
    )
    return TaskSet("bench", tuple(items))


def make_run(
    path: Path,
    scores: Sequence[float | None],
    *,
    task_set: TaskSet | None = None,
    samples: int = 1,
    baselines: dict[str, float] | None = None,
    infra: int = 0,
) -> Path:
    """A run with these official scores (solved at 1, ``None``: not run), of which the first ``infra`` ended so."""
    task_set = task_set or tasks(len(scores) // samples)
    manifest = make_manifest(
        "eval", task_set, agent={"name": path.name, "version": "1"}, samples=samples, baselines=baselines
    )
    jobs = [(task, sample) for sample in range(samples) for task in task_set.tasks]
    with RunFolder.open(path, manifest) as run:
        for n, ((task, sample), score) in enumerate(zip(jobs, scores, strict=True)):
            if score is None:
                continue
            solved = float(score >= 1)
            baseline = (baselines or {}).get(task.id)
            result = VerifierResult(
                {"a": score},
                score,
                solved,
                None if baseline is None else max(0.0, (score - baseline) / (1 - baseline)),
                verifier_hash=task.verifier.digest,
                floor=baseline,
            )
            outcome = Outcome.INFRA if n < infra else Outcome.SOLVED if solved else Outcome.FAILED
            cause = "engine: refused" if n < infra else None
            episode = Episode(
                task.id, task.content_hash, sample, n, "a", outcome, cause=cause, result=None if n < infra else result
            )
            run.record(episode)
    return path


def passes(count: int, of: int = 40) -> list[float]:
    return [1.0] * count + [0.0] * (of - count)


def test_clear_difference_is_reported_with_its_direction(tmp_path: Path):
    low, high = make_run(tmp_path / "low", passes(5)), make_run(tmp_path / "high", passes(30))
    there, back = compare(low, high), compare(high, low)
    assert there.verdict("strict") == "better"
    assert back.verdict("strict") == "worse"
    found, mirrored = there.scores["strict"], back.scores["strict"]
    assert found.value == pytest.approx(25 / 40)
    assert (found.ahead, found.behind) == (25, 0)
    assert (mirrored.value, mirrored.low, mirrored.high) == (-found.value, -found.high, -found.low)
    assert mirrored.p == found.p


def test_run_does_not_differ_from_itself(tmp_path: Path):
    run = make_run(tmp_path / "a", passes(13))
    found = compare(run, run).scores["strict"]
    assert not found.significant
    assert found.low < 0 < found.high, "equal results on 40 tasks do not prove equal runs"
    assert found.p == 1


def test_pairing_finds_a_difference_despite_overlapping_intervals(tmp_path: Path):
    """Eight of forty more, all else equal: the two runs' own intervals overlap widely."""
    a, b = make_run(tmp_path / "a", passes(16)), make_run(tmp_path / "b", passes(24))
    assert compare(a, b).verdict("strict") == "better"
    shuffled = make_run(tmp_path / "c", [1.0] * 4 + [0.0] * 16 + [1.0] * 20)
    assert compare(a, shuffled).verdict("strict") == "not told apart"


def test_no_difference_if_the_interval_excludes_zero_but_the_test_does_not_reject(tmp_path: Path):
    a, b = make_run(tmp_path / "a", passes(16)), make_run(tmp_path / "b", passes(20))
    found = compare(a, b).scores["strict"]
    assert found.low > 0
    assert found.p == pytest.approx(0.125)
    assert not found.significant


def test_more_than_two_percent_infrastructure_errors_are_refused(tmp_path: Path):
    fine = make_run(tmp_path / "fine", passes(20, 100))
    two = make_run(tmp_path / "two", passes(20, 100), infra=2)
    three = make_run(tmp_path / "three", passes(20, 100), infra=3)
    assert compare(fine, two).tasks == 98
    for pair in ((fine, three), (three, fine)):
        with pytest.raises(
            ComparisonRefused, match=r"three: 3 of 100 episodes \(3\.0%\).*same `clawgym eval`"
        ) as caught:
            compare(*pair)
        assert "engine: refused" in str(caught.value)


def test_retried_infrastructure_errors_are_not_refused(tmp_path: Path):
    path = make_run(tmp_path / "a", passes(20, 100), infra=10)
    task_set = tasks(100)
    manifest = make_manifest("eval", task_set, agent={"name": "a", "version": "1"})
    with RunFolder.open(path, manifest) as run:
        for n, task in enumerate(task_set.tasks[:10]):
            result = VerifierResult({"a": 1.0}, 1.0, 1.0, None, verifier_hash=task.verifier.digest)
            run.record(Episode(task.id, task.content_hash, 0, n, "a", Outcome.SOLVED, result=result), attempt=1)
    comparison = compare(path, make_run(tmp_path / "b", passes(20, 100)))
    assert comparison.tasks == 100
    assert any("9.1% of the attempts ended by an infrastructure error" in note for note in comparison.notes)


def test_tasks_that_differ_are_left_out_and_listed(tmp_path: Path):
    a = make_run(tmp_path / "a", passes(20))
    other = tasks(41, checker="v2", changed=(3, 4), inputs="b")
    b = make_run(tmp_path / "b", [*passes(20)[:39], None, 0.0], task_set=other)
    comparison = compare(a, b)
    assert comparison.left_out == {
        "tasks differ": ("t0",),
        "verifiers differ": ("t3", "t4"),
        "no result in the second": ("t39",),
        "only in the second": ("t40",),
    }
    assert comparison.tasks == 36
    printed = CliRunner().invoke(app, ["runs", "compare", str(a), str(b)]).output
    assert "left out, verifiers differ: t3, t4" in printed


def test_too_few_common_tasks_are_refused_with_the_reason(tmp_path: Path):
    a = make_run(tmp_path / "a", passes(20))
    b = make_run(tmp_path / "b", passes(20), task_set=tasks(40, checker="v2", changed=range(35)))
    with pytest.raises(ComparisonRefused, match=r"share 5 graded tasks.*verifiers differ: 35.*same version"):
        compare(a, b)
    six = make_run(tmp_path / "c", passes(20), task_set=tasks(40, checker="v2", changed=range(34)))
    assert compare(a, six).tasks == 6


@pytest.mark.parametrize("change", [{"task_hash": "0" * 64}, {"result": {"verifier_hash": "0" * 64, "strict": 1.0}}])
def test_results_of_another_verifier_or_task_are_refused(tmp_path: Path, change):
    a, b = make_run(tmp_path / "a", passes(20)), make_run(tmp_path / "b", passes(20))
    file = b / "results.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(lines[0]) | change), *lines[1:], ""]))
    with pytest.raises(ComparisonRefused, match=r"b: the result of t0#0 .*clawgym runs verify"):
        compare(a, b)


def test_samples_of_one_task_count_as_one_task(tmp_path: Path):
    """Sixteen copies of four tasks more: what was not told apart on the tasks is not on the copies either."""
    a = make_run(tmp_path / "a", passes(16) * 16, samples=16)
    b = make_run(tmp_path / "b", passes(20) * 16, samples=16)
    found = compare(a, b).scores["strict"]
    assert found.tasks == 40
    assert found.p == pytest.approx(0.125)
    assert not found.significant


def test_tasks_with_different_baselines_are_left_out_of_the_adjusted_score(tmp_path: Path):
    same = {f"t{i}": 0.25 for i in range(40)}
    a = make_run(tmp_path / "a", passes(20), baselines=same)
    b = make_run(tmp_path / "b", passes(20), baselines=same | {"t1": 0.5, "t2": 0.5})
    comparison = compare(a, b)
    assert comparison.scores["corrected"].tasks == 38
    assert comparison.scores["official"].tasks == 40
    assert any("2 tasks left out, whose no-model baselines differ" in note for note in comparison.notes)
    assert "corrected" not in compare(make_run(tmp_path / "c", passes(1)), make_run(tmp_path / "d", passes(1))).scores


def test_other_differences_between_the_runs_are_noted(tmp_path: Path):
    a, b = (make_run(tmp_path / name, passes(20)) for name in "ab")
    assert compare(a, b).notes == ()
    for path, tier, library, code in ((a, "vm", "1.0", "c1"), (b, "container", "2.0", "c2")):
        manifest = json.loads((path / "receipt.json").read_text())
        manifest |= {"library": library, "isolation": {"tier": tier}, "grader": {"code": code}}
        (path / "receipt.json").write_text(json.dumps(manifest))
    assert compare(a, b).notes == (
        "the runs differ in isolation: vm and container",
        "the runs differ in ClawGym version: 1.0 and 2.0",
        "the runs differ in ClawGym's grading code: c1 and c2",
    )


def test_folder_without_run_manifest_is_refused(tmp_path: Path):
    with pytest.raises(RunFolderError, match="give a run folder"):
        compare(make_run(tmp_path / "a", passes(20)), tmp_path)


def test_compare_command_output_and_exit_status(tmp_path: Path, capsys, monkeypatch):
    a, b = make_run(tmp_path / "a", passes(5)), make_run(tmp_path / "b", passes(30))
    text = CliRunner().invoke(app, ["runs", "compare", str(a), str(b)]).output
    assert "better" in text
    assert "80% power" in text
    assert "+62.5" in text
    raw = json.loads(CliRunner().invoke(app, ["runs", "compare", str(a), str(b), "--json"]).output)
    assert raw["scores"]["strict"]["told_apart"] is True
    assert raw["scores"]["strict"]["verdict"] == "better"
    assert raw["scores"]["strict"]["detectable"] > 0
    monkeypatch.setattr(
        "sys.argv", ["clawgym", "runs", "compare", str(a), str(make_run(tmp_path / "c", passes(5, 60)[:60]))]
    )
    main_exit(0)
    monkeypatch.setattr("sys.argv", ["clawgym", "runs", "compare", str(a), str(make_run(tmp_path / "d", [1.0] * 3))])
    main_exit(2)
    assert "share 3 graded tasks" in capsys.readouterr().err


def main_exit(code: int) -> None:
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code


@given(deltas)
def test_difference_is_inside_its_interval_and_changes_sign_with_the_order(values):
    found, back = difference(values), difference([-v for v in values])
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert (back.low, back.high, back.p) == pytest.approx((-found.high, -found.low, found.p))
    assert 0 < found.p <= 1
    assert found.significant == back.significant
    assert not (found.significant and found.low <= 0 <= found.high)


@given(deltas)
def test_exact_sign_flip_test_equals_enumeration(values):
    p, _ = sign_flip(values)
    seen = abs(sum(values)) - 1e-9
    moving = [abs(v) for v in values if v]
    patterns = list(itertools.product((-1, 1), repeat=len(moving)))
    far = sum(abs(sum(s * v for s, v in zip(signs, moving, strict=True))) >= seen for signs in patterns)
    assert p == pytest.approx(far / len(patterns))


@given(zero_one)
def test_sign_flip_of_binary_scores_is_mcnemars_exact_test(values):
    p, name = sign_flip(values)
    assert name == "mcnemar-exact"
    plus, minus = values.count(1.0), values.count(-1.0)
    if plus == minus:
        assert p == 1
    doubled = sign_flip([*values, *values])[0]
    assert doubled <= p + 1e-12, "the same evidence twice cannot be weaker"


def test_sampled_sign_flip_test_is_close_to_the_exact_one():
    generator = np.random.default_rng(3)
    values = list(generator.normal(0.1, 0.4, 14).clip(-1, 1))
    exact, name = sign_flip(values)
    assert name == "sign-flip-exact"
    drawn, other = sign_flip([*values, 1e-6])
    assert other == "sign-flip"
    assert drawn == pytest.approx(exact, abs=0.012)


@given(st.floats(0, 1), st.integers(2, 500), st.booleans())
def test_more_tasks_detect_smaller_differences(deviation, n, binary):
    assert 0 < detectable(deviation, n + 1, binary) <= detectable(deviation, n, binary) <= 1


def test_detectable_matches_published_figures():
    """Miller 2024 (arXiv 2411.00640), section 5: z-quantiles 1.96 and 0.84; for many tasks t is z."""
    assert detectable(0.5, 10_000, False) == pytest.approx((1.95996 + 0.84162) * 0.5 / 100, rel=1e-3)
