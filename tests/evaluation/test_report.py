from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from clawgym.evaluation.report import render_report, write_report
from clawgym.records import (
    Episode,
    Observation,
    Outcome,
    Step,
    Task,
    TaskSet,
    ToolCall,
    Usage,
    VerifierResult,
    VerifierSpec,
)
from clawgym.records.run_folder import RunFolder, make_manifest
from clawgym.reporting.page import asset

STORED = Path(__file__).parent.parent / "data/v0.1/evaluations/sloppy"
WHEN = "2026-01-01T00:00:00+00:00"
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*191 }}<!--<script>\u2028"


class Page(HTMLParser):
    """Elements, attributes and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, dict[str, str | None], str]] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open = (tag, dict(attrs))
            self.blocks.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag):
        if self._open and tag == self._open[0]:
            self._open = None

    def handle_data(self, data):
        if self._open:
            tag, attrs, text = self.blocks[-1]
            self.blocks[-1] = (tag, attrs, text + data)
        else:
            self.text += data

    @property
    def answers(self):
        return json.loads(next(text for tag, attrs, text in self.blocks if attrs.get("id") == "clawgym-data"))[
            "answers"
        ]

    def answer(self, ending: str):
        """The answer of the only address with this ending."""
        (found,) = [answer for address, answer in self.answers.items() if address.endswith(ending)]
        return found


def make_run(path: Path, *, text: str = "hello", task_id: str = "t0", steps: int = 1, **kwargs) -> RunFolder:
    spec = VerifierSpec("reward_sh", ())
    task = Task(task_id, "do", spec, metadata={"category": text, "level": text})
    other = Task("t9", "do", spec, metadata={"category": "b"})
    manifest = make_manifest(
        "eval",
        TaskSet(text, (task, other), version=text, problems={text: text}),
        agent={"name": text, "version": text, "engine": {"model": text}},
    )
    run = RunFolder.open(path, manifest)
    step = Step(
        "agent",
        text,
        WHEN,
        (ToolCall("c1", text, {"command": text}),),
        (Observation(text, "c1"),),
        reasoning=text,
        usage=Usage(5, 6),
    )
    result = VerifierResult({text: 0.5, "ok": 1.0}, 0.75, 0.0, 0.7, tampered=True, changed_inputs=(text,), log=text)
    kwargs = {"outcome": Outcome.FAILED, "cause": text, "usage": Usage(5, 6, 1, 0.5), **kwargs}
    run.record(
        Episode(
            task_id,
            task.content_hash,
            0,
            1,
            text,
            result=result,
            steps=(step,) * steps,
            final_message=text,
            seconds={"agent": 2.0},
            dropped=(text,),
            **kwargs,
        )
    )
    run.append({"key": "t9#0", "task_id": "t9", "task_hash": "", "sample": 0, "outcome": "unsupported", "cause": text})
    run.close()
    return run


def test_untrusted_text_is_escaped(tmp_path: Path):
    page = Page(render_report(make_run(tmp_path / "run", text=ATTACK, task_id=ATTACK)))
    assert [attrs.get("type") for tag, attrs, _ in page.blocks if tag == "script"] == ["application/json", None]
    assert not [tag for tag, _ in page.elements if tag in ("img", "iframe", "object", "embed", "link", "base")]
    for tag, attrs in page.elements:
        for name in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("style", "src", "href", "srcdoc", "action"), (tag, name)
    assert not re.search("[<>&]", next(text for _, attrs, text in page.blocks if attrs.get("type")))
    line = next(one for one in page.answer("/episodes")["items"] if one["outcome"] != "unsupported")
    shown = page.answer(f"/{line['name']}/turns")["items"][0]
    assert shown["text"] == ATTACK.replace("\u2028", "\\u2028")
    assert shown["observations"][0]["text"] == shown["text"]
    assert "1337" not in json.dumps(page.answers), "a template inside the text was rendered"


def test_content_security_policy_allows_only_the_own_style_and_script(tmp_path: Path):
    page = Page(render_report(make_run(tmp_path / "run")))
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag, attrs, text in page.blocks:
        if attrs.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy


def test_page_loads_nothing(tmp_path: Path):
    text = render_report(make_run(tmp_path / "run")).replace(asset("app.js"), "").replace(asset("app.css"), "")
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|innerHTML|eval\(|[ =\"]/tmp|/root", text)


def test_long_texts_are_cut_with_a_note(tmp_path: Path):
    long = "A" * 300_000 + "END"
    text = render_report(make_run(tmp_path / "run", text=long))
    assert len(text) < 300_000 + len(asset("app.js")) + len(asset("app.css"))
    shown = Page(text).answer("/t0.0/turns")["items"][0]
    seen = shown["observations"][0]["text"]
    assert seen.endswith("END")
    assert len(seen) < 20_000
    assert "characters left out" in seen
    assert shown["cut"] > 1_000_000, "the text, the reasoning, the arguments and the observation"


def test_many_steps_are_cut(tmp_path: Path):
    run = make_run(tmp_path / "run", text="x" * 500, steps=3_000)
    turns = Page(render_report(run, total=60_000)).answer("/t0.0/turns")
    assert 2 <= len(turns["items"]) < 100
    assert [turns["items"][n]["n"] for n in (0, -1)] == [0, 2_999]
    assert "steps in the middle are left out" in turns["note"]


def test_page_renders_with_damaged_or_missing_transcripts(tmp_path: Path):
    run = make_run(tmp_path / "run")
    path = run.episode_folder("t0", 0) / "transcript.json"
    path.write_text("{")
    assert "cannot be read" in Page(render_report(run)).answer("/t0.0/turns")["note"]
    path.unlink()
    assert "No transcript" in Page(render_report(run)).answer("/t0.0/turns")["note"]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_shown(tmp_path: Path, outcome: Outcome):
    page = Page(render_report(make_run(tmp_path / "run", outcome=outcome)))
    assert [line["outcome"] for line in page.answer("/episodes")["items"]] == [outcome, "unsupported"]


def test_episode_that_a_model_judged_is_marked(tmp_path: Path):
    task = Task("t", "Do it.", VerifierSpec("grader", grader="rubric"))
    result = VerifierResult({"a": 1.0}, 1.0, 1.0, None, judged_by=f"rubric ({ATTACK})")
    with RunFolder.open(tmp_path / "run", make_manifest("eval", TaskSet("s", (task,)))) as run:
        run.record(Episode(task.id, task.content_hash, 0, 0, "a", Outcome.SOLVED, result=result))
        page = Page(render_report(run))
    assert page.answer("/episodes")["items"][0]["judged_by"].partition(" (")[0] == "rubric"
    assert not [tag for tag, _ in page.elements if tag == "img"]


def test_empty_run_has_a_report(tmp_path: Path):
    RunFolder.open(tmp_path / "run", make_manifest("eval", TaskSet("none", ()))).close()
    assert write_report(tmp_path / "run").read_text().startswith("<!doctype html>")


def test_browser_shows_the_page_under_its_policy(tmp_path: Path) -> None:
    if not (browser := shutil.which("chromium")):
        pytest.skip("no chromium here: make system")
    (tmp_path / "page.html").write_text(render_report(RunFolder.read(STORED)))
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"]
    argv += ["--virtual-time-budget=10000", "--dump-dom", str(tmp_path / "page.html")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert "Checks not passed" in done.stdout
    assert "By category" in done.stdout
