from __future__ import annotations

import io
from pathlib import Path

import pytest

from clawgym.console import Console
from clawgym.evaluation.progress import RichProgress, duration
from clawgym.records import TaskSet
from clawgym.records.run_folder import RunFolder, make_manifest


def row(task: str, outcome: str = "failed", strict: float = 0.0, cause: str | None = None, **more):
    result = None if outcome == "infra" else {"strict": strict}
    return {
        "key": f"{task}#0",
        "task_id": task,
        "sample": 0,
        "outcome": outcome,
        "result": result,
        "cause": cause,
        **more,
    }


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0s"), (59.6, "1m00s"), (95, "1m35s"), (7260, "2h01m")])
def test_duration_format(seconds: float, text: str):
    assert duration(seconds) == text


def run_with(tmp_path: Path, *rows) -> RunFolder:
    run = RunFolder.open(tmp_path / "run", make_manifest("eval", TaskSet("x", ())))
    for one in rows:
        run.append(one)
    return run


def shown(terminal: bool, tmp_path: Path, done, finished) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    view = RichProgress(console, every=1000)
    with run_with(tmp_path, *done) as run:
        view.start(run, len(finished))
    view.running(2, 4)
    for one in finished:
        view.finished(one)
    if terminal:
        console.print(view._panel())
    view.stop(None)
    return out.getvalue()


def test_prints_lines_without_a_terminal(tmp_path: Path):
    text = shown(
        False,
        tmp_path,
        [],
        [
            row("a", "solved", 1.0),
            row("b", cause="[bold]oom"),
            row("c", "infra", cause="[b]no", fault="endpoint"),
            row("d", "infra"),
        ],
    )
    last = text.splitlines()[-1]
    assert "2/4" in last
    assert "strict 50.0%" in last
    assert "2 infrastructure errors (1 endpoint, 1 unknown), newest: unknown: unknown" in last
    assert "1 [bold]oom" in last, "markup in a cause must be shown as it is"
    assert "\x1b" not in text


def test_shows_a_panel_on_a_terminal(tmp_path: Path):
    text = shown(True, tmp_path, [], [row("a", "solved", 1.0), row("b")])
    assert "2/2" in text
    assert "at most 4 now" in text
    assert "\x1b" in text


def test_panel_counts_infrastructure_errors_by_origin_and_shows_the_newest(tmp_path: Path):
    finished = [row(f"t{n}", "infra", cause=f"[b]{n}", fault=where) for n, where in enumerate(("host", "endpoint"))]
    text = " ".join(shown(True, tmp_path, [], [*finished, row("a")]).split())
    assert "2 infrastructure errors (1 endpoint, 1 host) in 3 attempts; the newest:" in text
    assert "endpoint: [b]1" in text


def test_resumed_run_starts_from_the_stored_results(tmp_path: Path):
    text = shown(False, tmp_path, [row("a", "solved", 1.0), row("z", "infra")], [row("b")])
    assert "Resuming: 1 of 2 episodes are done." in text
    assert "2/2" in text


def test_prints_a_line_for_every_tenth_without_a_terminal(tmp_path: Path):
    text = shown(False, tmp_path, [], [row(f"t{n}") for n in range(25)])
    assert [line.split()[0] for line in text.splitlines()] == [f"{n}/25" for n in (*range(2, 25, 2), 25)]
