"""The two rules that fill what the published data leaves out: the category, and which inputs may change."""

from __future__ import annotations

import fnmatch

import pytest

from clawgym.tasks.curation.categories import KEYWORDS, RULE, categorize, with_category, without_rule_category
from clawgym.tasks.curation.mutable import inputs_to_change

PATHS = ["config/app.json", "docs/plan.md", "input/data.csv", "scripts/run.py", "data/a.csv"]

CHANGED = [
    ("Modify config/app.json so that debug is off.", "config/app.json"),
    ("3) Edit the existing file docs/plan.md by replacing the marked lines.", "docs/plan.md"),
    ("Append these two tasks to config/app.json under tasks.", "config/app.json"),
    ("Please debug and fix scripts/run.py so it runs.", "scripts/run.py"),
    ("Deliverables: the updated docs/plan.md and output/x.csv.", "docs/plan.md"),
    ("- docs/plan.md (modified)", "docs/plan.md"),
    ("In scripts/run.py, implement the three TODOs.", "scripts/run.py"),
    ("After implementing the functions in scripts/run.py, run it.", "scripts/run.py"),
    ("Read input/data.csv and apply these changes in place: drop column b.", "input/data.csv"),
    ("Leave the corrected CSV in place at input/data.csv.", "input/data.csv"),
    ("Update input/data.csv in place by sorting it.", "input/data.csv"),
    ("Overwrite docs/plan.md to become the release brief.", "docs/plan.md"),
    ("Update ./config/app.json to version 2.", "config/app.json"),
    ("Diagnose and fix the logic in scripts/run.py so that it runs.", "scripts/run.py"),
    ("Open docs/plan.md and edit it so that it names the owner.", "docs/plan.md"),
    ("In config/app.json, set debug to false.", "config/app.json"),
    ("- docs/plan.md (to be modified)", "docs/plan.md"),
    ("Edit input/data.csv by dropping the empty rows.", "input/data.csv"),
    ("Fix the incomplete record in input/data.csv so that the check passes.", "input/data.csv"),
    ("Do not alter input/other.csv. Modify input/data.csv and write output/report.json.", "input/data.csv"),
]

KEPT = [
    "Do not modify config/app.json.",
    "Don’t change data/a.csv or docs/plan.md.",
    "You must never edit scripts/run.py in place.",
    "Read data/a.csv and update output/summary.json.",
    "Rewrite docs/plan.md to output/plan_final.md.",
    "Update docs/plan.md and save to output/plan_updated.md.",
    "Rewrite input/data.csv as a friendly letter.",
    'Add a line: "Update scripts/run.py X from 1 to 2".',
    "Modify the script based on config/app.json.",
    "Compare docs/plan.md with data/a.csv.",
    "Modify otherconfig/app.json and config/app.json.bak",
    "Do not change scripts/run.py, config/app.json, or docs/plan.md.",
    "Read docs/plan.md and config/app.json, then update output/summary.json.",
    "Fix the errors described in docs/plan.md.",
    "Review scripts/run.py and refactor it into scripts/new/run.py.",
    "Fix the logic in scripts/run.py. Save it as output/fixed_run.py.",
    "Edit the letter at docs/plan.md; save the updated version as docs/plan_final.md.",
    "- input/data.csv (do not modify)",
    "Edit input/data.csv. Do not modify the input files.",
    "Edit input/data.csv by dropping rows. Then save the cleaned table to output/rows.json.",
    "Update input/data.csv with these rows:\n- a\n- b\nThe result: output/data_updated.csv",
    "Refactor input/data.csv into a small table.",
    "Complete input/data.csv.",
]


@pytest.mark.parametrize(("instruction", "path"), CHANGED)
def test_mutable_input(instruction, path):
    assert inputs_to_change(instruction, PATHS) == (path,)


@pytest.mark.parametrize(
    "instruction",
    [
        "Update docs/plan.md and config/app.json.",
        "Update docs/plan.md (the plan), `other.md`, and config/app.json.",
        "Modify either config/app.json and/or docs/plan.md as needed.",
        "Modified files: config/app.json, docs/plan.md, output/x.csv",
        "Modify in place: docs/plan.md, config/app.json",
    ],
)
def test_rule_applies_to_all_names_of_a_list(instruction):
    asked = inputs_to_change(instruction, PATHS)
    assert "config/app.json" in asked
    assert set(asked) <= {"config/app.json", "docs/plan.md"}


def test_names_listed_after_their_folder():
    pages = ["site/index.html", "site/menu.html", "site/old.html", "menu.html"]
    assert inputs_to_change("Edit the HTML files in site/ (index.html, menu.html) now.", pages) == tuple(pages[:2])
    assert inputs_to_change("Compare the HTML files in site/ (index.html, menu.html).", pages) == ()


def test_long_instruction_is_fast():
    for filler in ("input/data.csv, ", "save the ", "x", "x/", "."):
        inputs_to_change(f"Edit input/data.csv {filler * 5000}", PATHS)


@pytest.mark.parametrize("instruction", KEPT)
def test_protected_input(instruction):
    assert inputs_to_change(instruction, PATHS) == ()


def test_patterns_match_their_file_only():
    (pattern,) = inputs_to_change("Edit docs/a[1]*.md in place.", ["docs/a[1]*.md", "docs/a1.md"])
    assert fnmatch.fnmatchcase("docs/a[1]*.md", pattern)
    assert not fnmatch.fnmatchcase("docs/a1x.md", pattern)


@pytest.mark.parametrize(
    ("instruction", "category"),
    [
        ("Reply to the meeting invites in my inbox and remind each attendee.", "Productivity & Collaboration"),
        ("Rotate the server logs, check the backup and write a cron entry.", "Systems & Automation"),
        ("Compute the median and the correlation, and name the outliers of the dataset.", "Analysis & Reasoning"),
        ("Draft a blog post with a friendly tone and a headline.", "Content & Domain"),
        ("Plan the trip: a schedule with milestones and a budget.", "Planning & Knowledge"),
        ("Refactor the module and add unit tests for each function.", "Software Development"),
    ],
)
def test_categories(instruction, category):
    assert categorize(instruction) == category


def test_given_category_is_kept_and_derived_one_is_marked():
    assert with_category({"category": "mine"}, "Plan the trip.") == {"category": "mine"}
    filled = with_category({"category": "", "x": 1}, "Plan the trip.")
    assert filled == {"category": "Planning & Knowledge", "category_source": RULE, "x": 1}
    assert without_rule_category(filled) == {"category": "", "x": 1}
    assert without_rule_category({"category": "mine"}) == {"category": "mine"}


def test_keywords_are_unambiguous():
    words = [word for line in KEYWORDS.values() for word in line.split()]
    assert len(words) == len(set(words))
