"""The database of a pool: opening it, transactions, its clock, and explaining its errors.

Invariant: a write transaction holds the database's write lock from its first statement (SQLite), or locks the rows that
it reads before it changes them (PostgreSQL). So no decision is based on rows that another process is changing.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from clawgym.errors import MissingDependency, PoolError

try:
    import sqlalchemy as sa
    from sqlalchemy import event, exc
    from sqlalchemy.dialects import sqlite
except ImportError as error:
    raise MissingDependency("a pool needs SQLAlchemy: pip install 'clawgym[pool]'") from error

from clawgym.pool import _schema

__all__ = ["DatabaseFailure", "Driver", "Store"]

_R = TypeVar("_R")
_T = TypeVar("_T")
_BUSY_SECONDS = 60.0
_TRIES = 8
LARGEST_CELL = 512 * 2**20
"""Most bytes of one row in SQLite."""
_FOREIGN = sa.text("SELECT name FROM sqlite_master WHERE type IN ('view', 'trigger') LIMIT 1")
_APPLICATION_ID = 0x436C6177  # "Claw", in the header of the SQLite file
_SAFE = (
    "trusted_schema=OFF",  # the schema of an untrusted file must not run functions
    "cell_size_check=ON",
)
_MAKING, _LEASING = 0x436C617747796D01, 0x436C617747796D02  # PostgreSQL's advisory locks; any two numbers


class DatabaseFailure(PoolError):
    """The database failed independently of the request: a full disk, a held lock, a lost connection."""


class Driver:
    """The database driver inside a write transaction.

    It runs the statements that store a turn, which are compiled once: SQLAlchemy takes several times as long for each
    of them as SQLite does.
    """

    def __init__(self, store: Store, cursor: Any) -> None:
        self._store = store
        self._cursor = cursor
        self.postgres = store.postgres

    def rows(self, statement: sa.ClauseElement, **values: Any) -> list[tuple[Any, ...]]:
        """Run a query."""
        self._cursor.execute(self._store.sql(statement), values)
        return self._cursor.fetchall()

    def run(self, statement: sa.ClauseElement, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a change once for each of ``rows``."""
        self._cursor.executemany(self._store.sql(statement), rows)


class Store:
    """One database. Thread-safe; not usable in a forked process. ``read_only``: only for a file that is there."""

    def __init__(self, where: str | Path, *, read_only: bool = False) -> None:
        self._pid = os.getpid()
        self._read_only = read_only
        self._writing = threading.Lock()  # threads wait here rather than in SQLite's polling loop
        self.postgres = isinstance(where, str) and where.startswith("postgresql://")
        if self.postgres:
            self._engine = _postgres(str(where))
            self.name = self._engine.url.render_as_string(hide_password=True)
        else:
            if isinstance(where, str) and "://" in where:
                raise PoolError(
                    f"{where.split('://')[0]}://...: a pool is a file or postgresql://...: give one of them"
                )
            self.name = str(where)
            self._engine = _sqlite(Path(where), read_only)
        self._writer = self._engine.execution_options(clawgym_write=True)
        self._sql: dict[sa.ClauseElement, str] = {}
        self._named = self._engine.dialect if self.postgres else sqlite.dialect(paramstyle="named")
        try:
            self._prepare()
        except BaseException:
            self._engine.dispose()
            raise

    def _prepare(self) -> None:
        with self.read() if self._read_only else self.write() as db:
            if not self._read_only:
                self._lock(db, _MAKING)
            there = set(sa.inspect(db).get_table_names())
            if "clawgym_pool" not in there:
                if self._read_only:
                    raise PoolError(f"{self.name}: this is not a pool: give another file")
                if there & set(_schema.metadata.tables) or (there and not self.postgres):
                    raise PoolError(f"{self.name}: holds other tables ({', '.join(sorted(there)[:3])}): "
                                    "give the pool a database of its own")  # fmt: skip
                _schema.metadata.create_all(db)
                db.execute(_schema.meta.insert().values(key="version", value=str(_schema.VERSION)))
                if not self.postgres:
                    db.exec_driver_sql(f"PRAGMA application_id={_APPLICATION_ID}")
            if not self.postgres and (foreign := db.scalar(_FOREIGN)):
                raise PoolError(f"{self.name}: has the view or trigger {foreign[:80]!r}, which no pool has: "
                                "give another file")  # fmt: skip
            version = db.scalar(sa.select(_schema.meta.c.value).where(_schema.meta.c.key == "version"))
            if version != str(_schema.VERSION):
                raise PoolError(f"{self.name}: a pool of version {version}, this library reads {_schema.VERSION}: "
                                "export it with the library that wrote it")  # fmt: skip

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A read transaction, which sees one consistent state."""
        self._same_process()
        with self._explained(), self._engine.connect() as db, db.begin():
            yield db

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A write transaction: durable when it ends without an error, otherwise rolled back."""
        self._same_process()
        with self._explained(), self._alone(), self._writer.connect() as db, db.begin():
            yield db

    @contextmanager
    def driver(self) -> Iterator[Driver]:
        """:meth:`write`, with the driver in the place of SQLAlchemy."""
        self._same_process()
        with self._explained(), self._alone(), closing(self._engine.raw_connection()) as connection:
            cursor = connection.cursor()
            if not self.postgres:
                cursor.execute("BEGIN IMMEDIATE")
            yield Driver(self, cursor)
            connection.commit()  # otherwise, it is rolled back when it is closed

    def sql(self, statement: sa.ClauseElement) -> str:
        """The text of a statement for :class:`Driver`."""
        text = self._sql.get(statement)
        if text is None:
            text = self._sql[statement] = str(statement.compile(dialect=self._named))
        return text

    def retried(self, work: Callable[[sa.Connection], _R], *, leasing: bool = False) -> _R:
        """Run ``work(db)`` in a write transaction and return its result.

        It is retried after deadlocks and concurrent inserts of the same key. Transactions that change leases
        (``leasing``) run one after another.
        """

        def locked(db: sa.Connection) -> _R:
            if leasing:
                self._lock(db, _LEASING)
            return work(db)

        return self._retried(self.write, locked)

    def driven(self, work: Callable[[Driver], _R]) -> _R:
        """:meth:`retried`, with the driver in the place of SQLAlchemy."""
        return self._retried(self.driver, work)

    def _retried(self, begin: Callable[[], AbstractContextManager[_T]], work: Callable[[_T], _R]) -> _R:
        for attempt in range(_TRIES):
            try:
                with begin() as db:
                    return work(db)
            except PoolError as error:
                if attempt == _TRIES - 1 or not _again(error.__cause__):
                    raise
                time.sleep(0.01 * 2**attempt)
        raise AssertionError  # pragma: no cover

    def _lock(self, db: sa.Connection, number: int) -> None:
        """Take an advisory lock until the transaction ends; SQLite's write lock makes it unnecessary there."""
        if self.postgres:
            db.execute(sa.text(f"SELECT pg_advisory_xact_lock({number})"))

    def now(self, db: sa.Connection) -> float:
        """Seconds since 1970, by the clock of the database server, if there is one."""
        if self.postgres:
            return float(db.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")) or 0)
        return time.time()

    def size(self, db: sa.Connection) -> int:
        """Bytes on disk."""
        if self.postgres:
            return int(db.scalar(sa.text("SELECT pg_database_size(current_database())")) or 0)
        return sum(f.stat().st_size for end in ("", "-wal") if (f := Path(self.name + end)).exists())

    def flush(self) -> None:
        """Empty SQLite's log, which holds pages as they were before a change."""
        if not self.postgres:
            with self._explained(), self._alone(), self._engine.connect() as db:
                db.exec_driver_sql("COMMIT")  # a checkpoint runs outside of transactions
                db.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._engine.dispose()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self.postgres:
            yield
        else:
            with self._writing:
                yield

    def _same_process(self) -> None:
        if os.getpid() != self._pid:
            raise PoolError(f"{self.name}: opened before a fork: open the pool again in the new process")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (exc.SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error) as error:
            cause = getattr(error, "orig", None) or error
            kind = PoolError if _is_integrity(cause) else DatabaseFailure
            raise kind(f"{self.name}: {_advice(str(cause).strip())}") from error


def _sqlite(path: Path, read_only: bool) -> sa.Engine:
    if read_only:
        # Without a log, nobody writes it: then not even SQLite's own files are made beside it.
        log = Path(f"{path}-wal")
        still = {"immutable": "1"} if not log.exists() or not log.stat().st_size else {}
        where, options = f"file:{quote(str(path))}", {"uri": "true", "mode": "ro", **still}
        return _engine(sa.URL.create("sqlite", database=where, query=options), _SAFE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # transcripts must not be readable by other users
    except OSError as error:
        raise PoolError(f"{path}: {error.strerror}: give a file that can be written") from error
    pragmas = (
        "journal_mode=WAL",  # readers never wait for the writer
        "synchronous=NORMAL",  # commits survive a crash of the process, not always a power failure
        "foreign_keys=ON",
        "journal_size_limit=67108864",
        "secure_delete=ON",  # an erased episode is not in free pages
    )
    return _engine(sa.URL.create("sqlite", database=str(path)), (*pragmas, *_SAFE))


def _engine(url: sa.URL, pragmas: Sequence[str]) -> sa.Engine:
    engine = sa.create_engine(
        url,
        connect_args={"timeout": _BUSY_SECONDS, "isolation_level": None, "check_same_thread": False},
        poolclass=sa.QueuePool,
        pool_size=4,
        max_overflow=-1,
    )

    @event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _: object) -> None:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_CELL)

    @event.listens_for(engine, "begin")
    def _begun(db: sa.Connection) -> None:
        db.exec_driver_sql("BEGIN IMMEDIATE" if db.get_execution_options().get("clawgym_write") else "BEGIN")

    return engine


def _postgres(where: str) -> sa.Engine:
    try:
        url = sa.make_url(where).set(drivername="postgresql+psycopg")
        connect_args = {} if "connect_timeout" in url.query else {"connect_timeout": 15}
        return sa.create_engine(url, pool_pre_ping=True, pool_size=8, max_overflow=-1, connect_args=connect_args)
    except ImportError as error:
        raise MissingDependency("a pool on PostgreSQL needs psycopg: pip install 'clawgym[postgres]'") from error
    except exc.ArgumentError:
        raise PoolError("postgresql://...: not a database URL: give postgresql://user@host/database") from None


def _again(error: BaseException | None) -> bool:
    """Whether the same transaction may succeed if repeated at once."""
    cause = getattr(error, "orig", None) or error
    return _is_integrity(cause) or getattr(cause, "sqlstate", None) in ("40001", "40P01")


def _is_integrity(error: BaseException | None) -> bool:
    """Whether a driver refused values: its exceptions have the names of PEP 249."""
    return any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__)


def _advice(message: str) -> str:
    for words, advice in (
        ("database is locked", f"another process has held it for {_BUSY_SECONDS:.0f} s: end that one, then try again"),
        ("disk is full", "the disk is full: make room, then run the same command again"),
        ("not a database", "this is not a pool: give another file"),
        ("malformed", "the file is damaged: restore it from a copy, or export what can be read"),
        ("UNIQUE constraint", "this id is taken by something else: choose another one"),
        ("duplicate key", "this id is taken by something else: choose another one"),
        ("readonly", "it can be read only: make the file and its folder writable"),
    ):
        if words in message:
            return advice
    return f"{message.splitlines()[0]}: see to the database, then try again"
