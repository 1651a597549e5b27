"""The report of an experiment as one file."""

from __future__ import annotations

import json

from clawgym.reporting.experiment import chart, experiment, experiment_page, line, markdown, table

from ..viewer.api_types import TYPES

HOSTILE = "a|b\n</script><script>alert(1)</script>"


def test_page_has_the_curves_and_tables_as_data() -> None:
    drawn = chart("Score", [line("arm", [(1, 0.5, 0.4, 0.6)])], low=0, high=1)
    answer = experiment("study", charts=[drawn], tables=[table("By arm", ("arm", "n"), [(HOSTILE, "3")])])
    page = experiment_page(answer)
    assert "<script>alert" not in page
    data = json.loads(page.split('id="clawgym-data">', 1)[1].split("</script>", 1)[0])
    shown = data["answers"][data["home"][1:]]
    TYPES.check(shown, "Experiment")
    TYPES.check(data["answers"]["sources"], "Sources")
    assert shown["charts"][0]["lines"] == [{"name": "arm", "x": [1], "y": [0.5], "low": [0.4], "high": [0.6]}]
    assert shown["tables"][0]["rows"] == [[HOSTILE, "3"]]


def test_cells_of_markdown_stay_in_their_row() -> None:
    assert markdown(table("t", ("a", "b"), [("x|y\nz", "1")])).splitlines()[2:] == ["| x\\|y z | 1 |"]
