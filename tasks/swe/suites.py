"""Repositories of SWE-bench whose tests are not run by a pytest of the task's layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["PYTEST", "SUITES", "RepositoryTests"]


@dataclass(frozen=True, slots=True)
class RepositoryTests:
    """How the tests of a repository are run and named, and what is put back before."""

    runner: str
    """``pytest`` of the layer, ``own-pytest`` of the workspace, ``django`` or ``sympy``."""
    arguments: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    """Patterns of protected files beside those of every repository: the runner of the tests, and what only tests
    import."""
    changeable: tuple[str, ...] = ()
    """Starts of patterns that are protected elsewhere, and are source code here."""
    needs: str = ""
    """What the layer needs beside the dependencies of the repository."""

    @property
    def has_ids(self) -> bool:
        """Whether tests are named ``FILE::NAME``."""
        return self.runner in ("pytest", "own-pytest")

    def listed(self, tests: Iterable[str]) -> list[str]:
        """The tests of a list, without what is in it by mistake.

        ``[100%]`` in rows of pytest is a piece of a progress line that the parser of SWE-bench took for a test.
        """
        return [test for test in tests if self.runner != "own-pytest" or test != "[100%]"]


PYTEST = RepositoryTests("pytest", needs="pytest and ")
SUITES = {
    "django/django": RepositoryTests("django"),
    "sympy/sympy": RepositoryTests(
        "sympy",
        protected=(
            *("bin/*", "sympy/testing/*", "sympy/utilities/runtests.py", "sympy/utilities/pytest.py"),
            *("sympy/utilities/tmpfiles.py", "sympy/utilities/randtest.py", "sympy/utilities/quality_unicode.py"),
        ),
    ),
    "pytest-dev/pytest": RepositoryTests(
        "own-pytest",
        arguments=("-p", "pytester"),
        protected=("testing/*",),
        changeable=("src/pytest", "src/_pytest"),
    ),
}
