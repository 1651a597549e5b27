"""Pools on real databases: SQLite files, and a PostgreSQL server that the tests start."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym.pool import Pool

from .servers import new_database, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a server, with ``{database}`` to fill in."""
    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty pool may be made."""
    if request.param == "sqlite":
        return str(tmp_path / "pool.db")
    return new_database(request.getfixturevalue("postgres"), f"s{uuid.uuid4().hex}")


@pytest.fixture
def pool(where: str) -> Iterator[Pool]:
    """An empty pool, on each database."""
    with Pool(where) as made:
        yield made


@pytest.fixture
def file_pool(tmp_path: Path) -> Iterator[Pool]:
    """An empty pool in a file."""
    with Pool(tmp_path / "pool.db") as made:
        yield made
