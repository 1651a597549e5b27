"""A PostgreSQL server that is private to the test run."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def program(name: str) -> str:
    """The program in PATH, or where Debian puts it. Skips the test if it is not installed."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: int(p.parts[-3]), reverse=True)
    if found is None and not places:
        pytest.skip(f"PostgreSQL is not installed ({name} is missing): sudo make system")
    return found or str(places[0])


def _user() -> str | None:
    """Who runs the server: it refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("PostgreSQL refuses root, and there is no user postgres or nobody: adduser --system postgres")


def _with_us() -> None:
    """The server goes when we do, however that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGQUIT, 0, 0, 0)


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a fresh server on a unix socket, without the name of a database."""
    initdb, postgres, user = program("initdb"), program("postgres"), _user()
    if sys.platform != "linux" and user is not None:
        pytest.skip("started as root on Linux only")
    folder = Path(tempfile.mkdtemp(prefix="cgpg"))
    process: subprocess.Popen[bytes] | None = None
    try:
        if user is not None:
            shutil.chown(folder, user, pwd.getpwnam(user).pw_gid)
        group = None if user is None else pwd.getpwnam(user).pw_gid
        made = subprocess.run(
            [initdb, "-D", f"{folder}/data", "-U", "clawgym", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
            user=user, group=group, extra_groups=None if user is None else [], cwd=folder,
            capture_output=True, text=True,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        argv = [postgres, "-D", f"{folder}/data", "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        argv += ["-c", "shared_buffers=32MB", "-c", "max_connections=100"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(argv, user=user, group=group, extra_groups=None if user is None else [],
                                       cwd=folder, stdout=log, stderr=log, preexec_fn=_with_us)  # fmt: skip
        url = f"postgresql://clawgym@/{{database}}?host={folder}"
        _wait(url.format(database="postgres"), process, folder / "log")
        yield url
    finally:
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    psycopg = pytest.importorskip("psycopg")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"PostgreSQL does not start:\n{log.read_text(errors='replace')[-1500:]}")


def new_database(server: str, name: str) -> str:
    """Make an empty place for one pool; its URL. A schema of its own: a database is 300 files to make and to remove."""
    import psycopg

    url = server.format(database="postgres")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{name}"'.encode())
    return f"{url}&options=-csearch_path%3D{name}"
