"""The files of a leaderboard that is pushed to the Hub as a data set."""

from __future__ import annotations

import re
from pathlib import Path

from clawgym.evaluation.summary import SCORE_LABELS, percent
from clawgym.hub._card import model_name, portable
from clawgym.hub._checkpoint import HubError
from clawgym.hub._upload import Upload, UploadPlan, refuse_secrets, render, repo_name, texts_of
from clawgym.leaderboards.boards import IN_BOARD, BoardFolder
from clawgym.leaderboards.check import UNPROVEN
from clawgym.leaderboards.entries import SCORES
from clawgym.leaderboards.site import ShownEntry, entries_of, ranking_of
from clawgym.records.atif import PICTURES

__all__ = ["OURS", "plan_board"]

OURS = re.compile(rf"{IN_BOARD.pattern}|README\.md", re.ASCII)


def plan_board(where: str | Path) -> UploadPlan:
    """Collect and check the files of a board, and make its card with the ranking.

    Args:
        where: the folder of the board.

    Raises:
        HubError: an entry is damaged or about other tasks, the tasks are a folder, or something in the board looks like
            a secret.
        LeaderboardError: ``where`` is not the folder of a board, or holds links or files that a board may not have.
    """
    board = BoardFolder.read(Path(where))
    names = board.files()
    if (tasks := board.own_tasks) is not None and tasks.name not in names:
        raise HubError(f"{tasks}: tasks of a board on the Hub are one file: name a .jsonl file, or push the set itself")
    shown, left_out = entries_of(board)
    for name, why in left_out.items():
        raise HubError(f"{board.entry(name)}: {why}: repair the entry or remove it")
    name = board.path.resolve().name
    uploads = [Upload(path, board.path / path) for path in names]
    card = Upload("README.md", _card(board, shown, repo_name(name)).encode())
    texts = (text for one in [*uploads, card] if f"/{PICTURES}/" not in one.path for text in texts_of(one))
    refuse_secrets(texts, "the board")
    unchecked = [one.name for one in shown if one.status == "not checked"]
    note = f"not checked: {', '.join(unchecked[:10])}: run `clawgym leaderboard check {where} --record`"
    return UploadPlan(
        name,
        "dataset",
        f"{name}: {len(shown)} entries",
        tuple(sorted([*uploads, card], key=lambda upload: upload.path)),
        (note,) if unchecked else (),
        OURS,
    )


def _card(board: BoardFolder, shown: list[ShownEntry], slug: str) -> str:
    _, lines = ranking_of(shown)
    rows = [(ranked.rank, one, _cells(one)) for ranked, one in lines]
    return render(
        "board.md.j2",
        rules=board.rules,
        name=portable(board.rules.name),
        about=portable(board.rules.about),
        task_set=portable(board.rules.task_set),
        slug=slug,
        scores=[SCORE_LABELS[score] for score in SCORES],
        rows=rows,
        refused=[one.name for one in shown if one.status == "refused"],
        unproven=UNPROVEN,
    )


def _cells(one: ShownEntry) -> list[str]:
    """Agent, model, scores, tokens and cost, check and flags of an entry."""
    entry, summary = one.entry, one.entry.summary
    tokens, cost = summary.tokens_per_solved, summary.cost_per_solved
    return [
        portable(entry.agent),
        model_name(entry.model) or "-",
        *(percent(entry.score(score)) for score in SCORES),
        "-" if tokens is None else f"{tokens:,.0f}",
        "-" if cost is None else f"{cost:.4f}",
        one.status,
        portable("; ".join(entry.flags)),
    ]
