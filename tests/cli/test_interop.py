"""``clawgym interop check``: what it counts, and the page that it writes. The adapters are tested in tests/interop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clawgym.errors import ClawGymError
from clawgym.interop import check
from clawgym.interop.check import ROUTES, Route, check_route, kept_results, page_of, routes_named

TESTS = """
import pytest


def test_holds(record_property):
    record_property("held", "it holds")


def test_fails(record_property):
    record_property("held", "never said")
    assert False


@pytest.fixture
def broken():
    raise OSError


def test_error(broken): ...


def test_skipped():
    pytest.skip("not here")
"""


def test_page_is_that_of_the_stored_results() -> None:
    results = kept_results()
    page = Path(__file__).parents[2] / "docs/results/interop.md"
    assert page.read_text() == page_of([results[name] for name in ROUTES if name in results])
    assert all(result.holds for result in results.values())


def test_each_route_has_tests_a_page_and_versions() -> None:
    root = Path(__file__).parents[2]
    for route in ROUTES.values():
        assert route.version
        assert (root / f"tests/interop/test_{route.name}.py").is_file()
        assert (root / f"docs/how-to/interop/{route.name}.md").is_file()


def test_unknown_route_is_an_error() -> None:
    with pytest.raises(ClawGymError, match="Did you mean 'openenv'"):
        routes_named(["openevn"])
    assert routes_named([]) == list(ROUTES.values())


def test_outcomes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_ROOT", tmp_path)
    monkeypatch.setattr(check, "_environment", lambda route, say: Path(sys.executable))
    route = Route("mine", "Mine", ("mine==1",))
    with pytest.raises(ClawGymError, match="clone"):
        check_route(route, print)
    (tmp_path / "tests/interop").mkdir(parents=True)
    test = tmp_path / "tests/interop/test_mine.py"
    test.write_text(TESTS)
    result, output = check_route(route, print)
    assert (result.passed, result.failed, result.skipped, result.held) == (1, 2, 1, ("it holds",))
    assert not result.holds
    assert "test_fails" in output
    test.write_text(TESTS.partition("def test_fails")[0])
    result, _ = check_route(route, print)
    assert result.holds
    test.write_text("")
    assert not check_route(route, print)[0].holds, "no test is no success"
