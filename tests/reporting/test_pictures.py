"""Screenshots of a run in its report."""

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
from clawgym.reporting.pictures import stills, thinned

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
    assert head == "data:image/png;base64"
    return pillow.open(io.BytesIO(base64.b64decode(data)))


def episodes(run: RunFolder) -> list[dict[str, Any]]:
    answers = Page(render_report(run)).answers
    return [answer for address, answer in answers.items() if address.endswith(".0")]


def test_every_picture_of_an_episode_is_shown_at_its_step(tmp_path: Path) -> None:
    one = [png((10 * n, 0, 0)) for n in range(1, 6)]
    other = [png((0, 99, 0)), png((0, 0, 99)), png((0, 99, 0))]
    found = episodes(a_run(tmp_path / "run", (Outcome.SOLVED, one), (Outcome.FAILED, other)))
    assert [[picture["step"] for picture in row["pictures"]] for row in found] == [[1, 2, 3, 4, 5], [1, 2, 3]]
    images = [shown(picture["src"]) for row in found for picture in row["pictures"]]
    assert {image.size for image in images} == {(512, 384)}
    assert images[6].convert("RGB").getpixel((100, 100)) == pytest.approx((0, 0, 99), abs=8)


def test_without_pillow_the_page_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "run", (Outcome.SOLVED, [png((1, 2, 3))]))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    (row,) = episodes(run)
    assert row["pictures"] == []
    assert "pip install 'clawgym[gui]'" in " ".join(row["notes"])


@pytest.mark.parametrize("data", [b"", b"no picture", png((0, 0, 0), (5000, 2)).data, b"GIF89a", None])
def test_invalid_screenshots_are_left_out_with_a_note(tmp_path: Path, data: bytes | None) -> None:
    run = a_run(tmp_path / "run", (Outcome.SOLVED, [png((9, 9, 9)), png((99, 9, 9))]))
    for n, path in enumerate(sorted((tmp_path / "run" / "pictures").iterdir())):
        if n == 0:
            path.write_bytes(data) if data is not None else path.unlink()
    (row,) = episodes(run)
    assert len(row["pictures"]) == 1
    assert "1 of 2 pictures are shown; all are in pictures/." in row["notes"]


def test_number_and_bytes_are_bounded_and_the_last_one_stays(tmp_path: Path) -> None:
    seen = [*(noise(n) for n in range(8)), png((0, 0, 200), (256, 192))]
    a_run(tmp_path / "run", (Outcome.SOLVED, seen))
    found = stills(tmp_path / "run", seen, frames=5, size=10**7)
    assert (len(found), list(found)[-1]) == (5, seen[-1].sha256)
    found = stills(tmp_path / "run", seen, frames=60, size=100_000)
    assert sum(map(len, found.values())) <= 100_000
    assert 1 <= len(found) < 9
    assert shown(found[seen[-1].sha256]).convert("RGB").getpixel((9, 9)) == pytest.approx((0, 0, 200), abs=8)
    assert stills(tmp_path / "run", seen[:1], frames=60, size=10) == {}
    assert stills(tmp_path / "run", seen, frames=0, size=10**7) == {}


@given(count=st.integers(1, 30), most=st.integers(0, 40))
def test_thinning_keeps_order_and_the_last_one(count: int, most: int) -> None:
    kept = thinned(range(count), most)
    assert kept == sorted(set(kept))
    assert kept[-1] == count - 1
    assert len(kept) == max(1, min(count, most))


def test_a_page_shows_sixty_pictures_of_an_episode(tmp_path: Path) -> None:
    (row,) = episodes(
        a_run(tmp_path / "run", (Outcome.SOLVED, [png((n, 255 - n, 0), (8, 6)) for n in range(0, 248, 4)]))
    )
    assert len(row["pictures"]) == 60
