from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from clawgym.evaluation.summary import JUDGED, READS_FILES, errors_text, summarize_rows
from clawgym.records import Outcome
from clawgym.records.manifest import RunManifest


def manifest(tasks: dict[str, dict[str, Any]] | int = 3, samples: int = 1, **kwargs) -> RunManifest:
    if isinstance(tasks, int):
        tasks = {f"t{i}": {} for i in range(tasks)}
    return RunManifest("eval", tasks={k: {"hash": k, **v} for k, v in tasks.items()}, samples=samples, **kwargs)


def row(task: str, sample: int = 0, outcome: str = "failed", strict: float = 0.0, **kwargs) -> dict[str, Any]:
    result = {"strict": strict, "official": kwargs.pop("official", strict), "corrected": kwargs.pop("corrected", None)}
    result |= {"tampered": kwargs.pop("tampered", False)}
    return {
        "key": f"{task}#{sample}",
        "task_id": task,
        "sample": sample,
        "outcome": outcome,
        "result": None if outcome == "infra" else result,
        **kwargs,
    }


def solved(task: str, sample: int = 0, **kwargs) -> dict[str, Any]:
    return row(task, sample, "solved", 1.0, **kwargs)


def test_infrastructure_errors_are_not_scored_but_counted():
    summary = summarize_rows(manifest(3), [solved("t0"), row("t1", outcome="infra", cause="fork"), row("t2")])
    assert summary.scores.strict is not None
    assert summary.scores.strict.value == 0.5
    assert summary.missing == ("t1#0",)
    assert summary.infra_rate == pytest.approx(1 / 3)
    assert not summary.complete


def test_infrastructure_errors_are_counted_by_origin():
    down = [("endpoint", "503"), ("host", "fork"), ("endpoint", "refused"), (None, "of an earlier version")]
    rows = [row(f"t{n}", outcome="infra", cause=cause, fault=fault) for n, (fault, cause) in enumerate(down)]
    summary = summarize_rows(manifest(5), [*rows, solved("t4")])
    assert summary.infra_faults == {"endpoint": 2, "host": 1, "unknown": 1}
    assert summary.infra_newest == {"endpoint": "refused", "host": "fork", "unknown": "of an earlier version"}
    assert errors_text(summary.infra_faults) == "4 infrastructure errors (2 endpoint, 1 host, 1 unknown)"


def test_later_attempt_replaces_an_infrastructure_error():
    summary = summarize_rows(manifest(1), [row("t0", outcome="infra", cause="fork"), solved("t0")])
    assert summary.complete
    assert (summary.attempts, summary.infra_attempts) == (2, 1)


def test_tasks_are_weighted_equally():
    rows = [solved("t0", 0), *(row("t1", s) for s in range(4))]
    summary = summarize_rows(manifest(2, samples=4), rows)
    assert summary.scores.strict is not None
    assert summary.scores.strict.value == 0.5


def test_truncated_episode_counts_with_its_score():
    summary = summarize_rows(manifest(1), [row("t0", outcome="truncated", strict=1.0)])
    assert summary.scores.strict is not None
    assert summary.scores.strict.value == 1
    assert summary.causes == {}


def test_causes_include_truncation_and_failed_checks():
    rows = [row("t0", outcome="truncated", cause="steps"), row("t1"), row("t2", cause="oom")]
    assert summarize_rows(manifest(3), rows).causes == {"checks failed": 1, "oom": 1, "truncated: steps": 1}


def test_adjusted_score_covers_tasks_with_a_baseline_and_broken_sandboxes_as_zero():
    broken = row("t1", cause="oom") | {"result": None}
    rows = [row("t0", corrected=0.5), broken, row("t2", official=0.9)]
    summary = summarize_rows(manifest(3), rows)
    assert summary.scores.corrected is not None
    assert summary.scores.corrected.tasks == 2
    assert summary.scores.corrected.value == 0.25
    assert summarize_rows(manifest(3), rows[1:]).scores.corrected is None


def test_unsupported_tasks_are_listed_separately():
    about = {"t0": {}, "t1": {"unsupported": "network"}, "t2": {}}
    rows = [
        solved("t0"),
        {"key": "t2#0", "task_id": "t2", "sample": 0, "outcome": Outcome.UNSUPPORTED, "cause": "image"},
    ]
    summary = summarize_rows(manifest(about), rows)
    assert summary.unsupported == {"t1": "network", "t2": "image"}
    assert (summary.planned, summary.complete) == (1, True)
    assert summary.scores.strict is not None
    assert summary.scores.strict.value == 1


def test_groups_by_category_level_and_grader():
    about = {
        "t0": {"category": "b", "level": "hard"},
        "t1": {"category": "a", "level": "easy", "executes_agent_code": "in_process"},
        "t2": {"category": "a", "level": "medium"},
    }
    summary = summarize_rows(manifest(about), [solved("t0"), row("t1"), solved("t2")])
    assert [(g.name, g.strict.value) for g in summary.groups["category"] if g.strict] == [("a", 0.5), ("b", 1.0)]
    assert [g.name for g in summary.groups["level"]] == ["easy", "medium", "hard"]
    assert [(g.name, g.episodes) for g in summary.groups["grader"]] == [
        ("reads files only", 2),
        ("runs agent code (in process)", 1),
    ]
    assert "category" not in summarize_rows(manifest(2), [solved("t0")]).groups


def test_model_judged_episodes_are_counted_and_grouped():
    by = {"result": {"strict": 1.0, "official": 1.0, "judged_by": "rubric (judge-1)"}}
    rows = [solved("t0"), row("t1") | by, row("t2", outcome="infra")]
    summary = summarize_rows(manifest(3), rows)
    assert summary.judged == {"rubric (judge-1)": 1}
    assert [(g.name, g.episodes) for g in summary.groups["grader"]] == [(JUDGED, 1), (READS_FILES, 1)]


def test_pass_at_k_uses_tasks_with_k_samples():
    rows = [solved("t0", 0), row("t0", 1), solved("t1", 0), solved("t1", 1), solved("t2", 0)]
    summary = summarize_rows(manifest(3, samples=2), rows)
    assert {k: e.value for k, e in summary.pass_at.items()} == {1: pytest.approx(2.5 / 3), 2: 1.0}
    assert {k: e.value for k, e in summary.pass_hat.items()} == {1: pytest.approx(2.5 / 3), 2: 0.5}
    assert summary.pass_at[2].tasks == 2


def test_rows_of_other_tasks_and_surplus_samples_are_ignored():
    summary = summarize_rows(manifest(1), [row("t0"), solved("elsewhere"), solved("t0", 5)])
    assert summary.scores.episodes == 1
    assert summary.scores.strict is not None
    assert summary.scores.strict.value == 0


def test_cost_tokens_and_time_add_up():
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "cached_tokens": 4, "cost_usd": 0.5}
    rows = [
        solved("t0", usage=usage, seconds={"agent": 1.5}),
        row("t1", usage=usage | {"cost_usd": None}, seconds={"agent": 2.0}),
    ]
    summary = summarize_rows(manifest(2), rows)
    assert (summary.usage.prompt_tokens, summary.usage.cached_tokens, summary.usage.cost_usd) == (20, 8, 0.5)
    assert summary.cost_per_solved == 0.5
    assert summary.seconds == {"agent": 3.5}


def test_summary_ignores_row_order_and_is_json():
    rows = [
        row(f"t{i}", s, "solved" if (i + s) % 3 else "failed", float((i + s) % 3 > 0)) for i in range(9) for s in (0, 1)
    ]
    one = summarize_rows(manifest(9, samples=2), rows)
    random.Random(1).shuffle(rows)
    two = summarize_rows(manifest(9, samples=2), rows)
    assert json.dumps(one.to_dict()) == json.dumps(two.to_dict())


@pytest.mark.parametrize(("printed", "counted"), [(7.0, 1.0), (-3.0, 0.0), ("nan", 0.0), ("inf", 0.0), (0.4, 0.4)])
def test_official_score_is_clipped(printed, counted):
    estimate = summarize_rows(manifest(1), [row("t0", official=printed)]).scores.official
    assert estimate is not None
    assert estimate.value == counted


def test_scores_with_infrastructure_errors_counted_as_zero():
    rows = [solved("t0"), solved("t1"), row("t2", outcome="infra", cause="fork"), row("t3", official=0.4)]
    summary = summarize_rows(manifest({f"t{i}": {"floor": 0.1} for i in range(4)}), rows)
    assert summary.scores.strict is not None
    assert summary.scores_infra_zero is not None
    assert summary.scores_infra_zero.strict is not None
    assert summary.scores_infra_zero.official is not None
    assert summary.scores.strict.value == pytest.approx(2 / 3)
    assert summary.scores_infra_zero.strict.value == pytest.approx(2 / 4)
    assert summary.scores_infra_zero.official.value == pytest.approx(2.4 / 4)
    assert summary.infra_share == pytest.approx(1 / 4)
    assert summary.to_dict()["infra_share"] == summary.infra_share
    again = summarize_rows(manifest(4), [*rows, solved("t2")])
    assert again.scores_infra_zero is None
    assert again.infra_share == 0


def test_tokens_per_solved_episode_count_all_episodes():
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    rows = [solved("t0", usage=usage), row("t1", usage=usage), row("t2", usage=usage)]
    assert summarize_rows(manifest(3), rows).tokens_per_solved == 360
    assert summarize_rows(manifest(3), rows[1:]).tokens_per_solved is None
    assert summarize_rows(manifest(3), [solved("t0")]).tokens_per_solved is None


def test_detectable_difference_shrinks_with_more_tasks():
    def least(n: int) -> float:
        rows = [solved(f"t{i}") if i % 2 else row(f"t{i}") for i in range(n)]
        return summarize_rows(manifest(n), rows).detectable["strict"]

    assert 0.25 < least(40) < 0.40
    assert least(400) == pytest.approx(least(40) / 10**0.5, rel=0.05)
    assert summarize_rows(manifest(1), [solved("t0")]).detectable == {}


def test_terminal_and_report_show_the_summary(tmp_path):
    from rich.console import Console

    from clawgym.evaluation.terminal import summary_view

    usage = {"prompt_tokens": 100, "completion_tokens": 20, "cost_usd": 0.5}
    rows = [*(solved(f"t{i}", usage=usage) for i in range(8)), row("t8", outcome="infra", cause="fork")]
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(summary_view(summarize_rows(manifest(9), rows), "title"))
    text = console.export_text()
    assert "120 tokens, $0.5000" in text
    assert "counted as 0: strict 88.9, official 88.9" in text
    assert "80% power" in text
    grouped = summarize_rows(
        manifest({f"t{i}": {"category": "ab"[i % 2], "level": ("easy", "hard")[i % 2]} for i in range(9)}), rows
    )
    console.print(summary_view(grouped, "title"))
    text = console.export_text()
    for name, episodes in (("all", 8), ("a", 4), ("b", 4), ("level easy", 4), ("level hard", 4)):
        assert re.search(rf"^\W*{name}\W+{episodes}\W+100\.0", text, re.MULTILINE), (name, text)
