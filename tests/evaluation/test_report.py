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
from clawgym.reporting.charts import histogram

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
    def data(self):
        return json.loads(next(text for tag, attrs, text in self.blocks if attrs.get("type") == "application/json"))


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
    shown = page.data[0]["steps"][0]
    assert shown["text"] == ATTACK.replace("\u2028", "\\u2028")
    assert shown["seen"][0][0] == shown["text"]
    assert "alert(1)" in page.text, "the text itself must still be readable"
    assert "1337" not in page.text, "a template inside the text was rendered"


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
    text = render_report(make_run(tmp_path / "run"))
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|innerHTML|eval\(", text)


def test_long_texts_are_cut_with_a_note_naming_the_file(tmp_path: Path):
    long = "A" * 300_000 + "END"
    text = render_report(make_run(tmp_path / "run", text=long))
    assert len(text) < 300_000
    shown = Page(text).data[0]["steps"][0]["seen"][0][0]
    assert shown.endswith("END")
    assert len(shown) < 20_000
    assert "characters left out; see episodes/t0.0/transcript.json" in shown


def test_many_steps_are_cut(tmp_path: Path):
    run = make_run(tmp_path / "run", text="x" * 500, steps=3_000)
    detail = Page(render_report(run, total=60_000)).data[0]
    assert 2 <= len(detail["steps"]) < 100
    assert "steps in the middle are left out" in detail["note"]


def test_page_renders_with_damaged_or_missing_transcripts(tmp_path: Path):
    run = make_run(tmp_path / "run")
    path = run.episode_folder("t0", 0) / "transcript.json"
    path.write_text("{")
    assert "cannot be read" in Page(render_report(run)).data[0]["note"]
    path.unlink()
    assert "No transcript" in Page(render_report(run)).data[0]["note"]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_shown(tmp_path: Path, outcome: Outcome):
    page = Page(render_report(make_run(tmp_path / "run", outcome=outcome)))
    rows = [attrs for tag, attrs in page.elements if tag == "tr" and attrs.get("class") == "episode"]
    assert [row["data-outcome"] for row in rows] == [outcome, "unsupported"]
    assert len(page.data) == len(rows)


def test_episode_that_a_model_judged_is_marked(tmp_path: Path):
    task = Task("t", "Do it.", VerifierSpec("grader", grader="rubric"))
    result = VerifierResult({"a": 1.0}, 1.0, 1.0, None, judged_by=f"rubric ({ATTACK})")
    with RunFolder.open(tmp_path / "run", make_manifest("eval", TaskSet("s", (task,)))) as run:
        run.record(Episode(task.id, task.content_hash, 0, 0, "a", Outcome.SOLVED, result=result))
        page = Page(render_report(run))
    marks = [attrs for tag, attrs in page.elements if tag == "span" and attrs.get("class") == "mark"]
    assert [str(mark["title"]).partition(" (")[0] for mark in marks] == ["Judged by a model: rubric"]
    assert not [tag for tag, _ in page.elements if tag == "img"]


def test_empty_run_has_a_report(tmp_path: Path):
    RunFolder.open(tmp_path / "run", make_manifest("eval", TaskSet("none", ()))).close()
    assert write_report(tmp_path / "run").read_text().startswith("<!doctype html>")


def test_histogram_is_as_tall_as_its_fullest_bin() -> None:
    svg = str(histogram([("failed", [0.1] * 6), ("solved", [0.1, 0.1, 1.0])], bins=4))
    labels = re.findall(r'<text class="label" x="28" y="([\d.]+)" text-anchor="end">(\d+)</text>', svg)
    assert labels == [("162.0", "0"), ("87.0", "4"), ("12.0", "8")]
    bars = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="([\d.]+)" width="137.0" height="([\d.]+)"', svg)
    assert bars == [
        ("failed", "35.5", "45.5", "112.5"), ("solved", "35.5", "8.0", "37.5"), ("solved", "455.5", "139.2", "18.8"),
    ]  # fmt: skip
    assert "0.00 to 0.25: 6 episodes" in svg


def test_no_column_is_cut_at_1280_pixels(tmp_path: Path) -> None:
    if not (browser := shutil.which("chromium")):
        pytest.skip("no chromium here: make system")
    page = re.sub('<meta http-equiv="Content-Security-Policy".*>', "", render_report(RunFolder.read(STORED)))
    cut = "[...document.querySelectorAll('th, .scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    (tmp_path / "page.html").write_text(f"{page}<script>document.title = {cut}.map(e => e.outerHTML)</script>")
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"]
    argv += ["--window-size=1280,900", "--dump-dom", str(tmp_path / "page.html")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert "By category" in done.stdout
    assert "<title></title>" in done.stdout, re.findall("<title>.*?</title>", done.stdout, re.DOTALL)
