"""Screenshots of a run, animated in its report."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.evaluation.report import render_report
from clawgym.records import (
    Episode,
    Image,
    Observation,
    Outcome,
    Step,
    Task,
    TaskSet,
    VerifierResult,
    VerifierSpec,
)
from clawgym.records.run_folder import RunFolder, make_manifest
from clawgym.reporting.pictures import animation, thinned

from ..evaluation.test_report import Page

pillow = pytest.importorskip("PIL.Image")


def png(colour: tuple[int, int, int], size: tuple[int, int] = (640, 480)) -> Image:
    buffer = io.BytesIO()
    pillow.new("RGB", size, colour).save(buffer, "PNG")
    return Image(hashlib.sha256(buffer.getvalue()).hexdigest(), buffer.getvalue())


def noise(seed: int, size: tuple[int, int] = (256, 192)) -> Image:
    data = b"".join(hashlib.sha256(b"%d %d" % (seed, n)).digest() for n in range(size[0] * size[1] * 3 // 32))
    buffer = io.BytesIO()
    pillow.frombytes("RGB", size, data).save(buffer, "PNG")
    return Image(hashlib.sha256(buffer.getvalue()).hexdigest(), buffer.getvalue())


def a_run(path: Path, *episodes: tuple[Outcome, list[Image]]) -> RunFolder:
    tasks = [Task(f"t{n}", "do", VerifierSpec("reward_sh", ())) for n in range(len(episodes))]
    with RunFolder.open(path, make_manifest("eval", TaskSet("set", tuple(tasks)))) as run:
        for task, (outcome, pictures) in zip(tasks, episodes, strict=True):
            steps = tuple(Step("agent", "", "", observations=(Observation("", None, p),)) for p in pictures)
            score = float(outcome is Outcome.SOLVED)
            result = VerifierResult({"a": score}, score, score, None)
            run.record(
                Episode(
                    task.id,
                    task.content_hash,
                    0,
                    1,
                    "a",
                    outcome,
                    result=result,
                    steps=(Step("user", "do", ""), *steps),
                )
            )
    return run


def shown(address: str) -> Any:
    head, data = address.split(",")
    assert head == "data:image/gif;base64"
    return pillow.open(io.BytesIO(base64.b64decode(data)))


def policy(page: Page) -> str:
    return str(next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"))


def test_a_solved_and_a_failed_episode_are_shown_a_frame_for_each_picture(tmp_path: Path) -> None:
    one = [png((10 * n, 0, 0)) for n in range(1, 6)]
    other = [png((0, 99, 0)), png((0, 0, 99)), png((0, 99, 0))]
    run = a_run(tmp_path / "run", (Outcome.SOLVED, one), (Outcome.FAILED, other))
    page = Page(render_report(run))
    assert "img-src data:" in policy(page)
    assert [row["pictures"]["note"] for row in page.data] == ["", ""]
    gifs = [shown(row["pictures"]["gif"]) for row in page.data]
    assert [gif.n_frames for gif in gifs] == [5, 3]
    assert [gif.size for gif in gifs] == [(512, 384)] * 2
    gifs[1].seek(1)
    assert gifs[1].convert("RGB").getpixel((100, 100)) == pytest.approx((0, 0, 99), abs=8)


def test_a_run_without_pictures_has_a_page_without_images(tmp_path: Path) -> None:
    text = render_report(a_run(tmp_path / "run", (Outcome.SOLVED, [])))
    assert "img" not in policy(Page(text))
    assert "pictures" not in text


def test_without_pillow_the_page_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "run", (Outcome.SOLVED, [png((1, 2, 3))]))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    (row,) = Page(render_report(run)).data
    assert row["pictures"]["gif"] == ""
    assert "pip install 'clawgym[gui]'" in row["pictures"]["note"]


@pytest.mark.parametrize("data", [b"", b"no picture", png((0, 0, 0), (5000, 2)).data, b"GIF89a", None])
def test_invalid_screenshots_are_left_out_with_a_note(tmp_path: Path, data: bytes | None) -> None:
    run = a_run(tmp_path / "run", (Outcome.SOLVED, [png((9, 9, 9)), png((99, 9, 9))]))
    for n, path in enumerate(sorted((tmp_path / "run" / "pictures").iterdir())):
        if n == 0:
            path.write_bytes(data) if data is not None else path.unlink()
    (row,) = Page(render_report(run)).data
    assert shown(row["pictures"]["gif"]).n_frames == 1
    assert row["pictures"]["note"] == "Pictures: 2, in pictures/; shown are 1."


def test_frames_and_bytes_are_bounded_and_the_last_one_stays(tmp_path: Path) -> None:
    pictures = [noise(n) for n in range(8)]
    a_run(tmp_path / "run", (Outcome.SOLVED, [*pictures, png((0, 0, 200), (256, 192))]))
    seen = [*pictures, png((0, 0, 200), (256, 192))]
    address, note = animation(tmp_path / "run", seen, frames=5, size=10**7)
    assert (shown(address).n_frames, note[-12:]) == (5, "shown are 5.")
    address, note = animation(tmp_path / "run", seen, frames=60, size=100_000)
    gif = shown(address)
    assert len(address) * 3 // 4 <= 100_000 + 100
    assert 1 <= gif.n_frames < 9
    gif.seek(gif.n_frames - 1)
    assert gif.convert("RGB").getpixel((9, 9)) == pytest.approx((0, 0, 200), abs=8)
    assert animation(tmp_path / "run", seen[:1], frames=60, size=10) == (
        "",
        "Pictures: 1, in pictures/; they cannot be shown here.",
    )


@given(count=st.integers(1, 30), most=st.integers(0, 40))
def test_thinning_keeps_order_and_the_last_one(count: int, most: int) -> None:
    kept = thinned(range(count), most)
    assert kept == sorted(set(kept))
    assert kept[-1] == count - 1
    assert len(kept) == max(1, min(count, most))


def test_a_page_shows_sixty_frames_of_an_episode(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", (Outcome.SOLVED, [png((n, 255 - n, 0), (8, 6)) for n in range(0, 248, 4)]))
    (row,) = Page(render_report(run)).data
    assert row["pictures"]["note"] == "Pictures: 62, in pictures/; shown are 60."
