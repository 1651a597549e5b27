"""What a ``check.py`` needs: careful readers, a careful runner, and a collector of named checks.

This one file is copied beside a checker as ``clawgym_checks.py``; it needs the standard library only.

Invariants: nothing here writes below the workspace; whatever an agent left there (missing, binary, huge, a
folder, a link, a FIFO) makes at most one check 0, never the checker crash or hang; programs run in a scratch
folder, under a limit, and nothing that they start outlives the checker.

    import clawgym_checks as cg

    checks = cg.Checks()

    @checks("total")
    def _():
        return cg.close(cg.read_json(checks.workspace / "output/report.json")["total"], 42)

    checks.finish()
"""

from __future__ import annotations

# A checker lives for some milliseconds, most of which go into imports: what few checks need is imported late.
import contextlib
import json
import math
import os
import stat
import sys
import time
from collections import Counter
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from typing import Any

    Check = Callable[[], Any]

__all__ = [
    "Checks",
    "Failed",
    "Ran",
    "close",
    "kill_strays",
    "ordered",
    "read_bytes",
    "read_csv",
    "read_json",
    "read_lines",
    "read_text",
    "run_program",
    "scratch",
    "share",
]

SIZE_CAP = 1 << 20
"""Bytes read of one file, and of one program's output."""

HUNG_SECONDS = 10.0
"""After so much waiting for programs that did not end, no more are run."""

_hung_seconds: list[float] = []


class Failed(Exception):
    """The thing under check is not there or not usable: the check is worth 0."""


class Checks:
    """Collects named checks. Use as a decorator factory, then call :meth:`finish` once.

    A check returns a number in [0, 1] or a truth value; whatever it raises makes it 0. ``workspace``
    is the first command line argument, unless given.
    """

    def __init__(self, workspace: str | Path | None = None) -> None:
        self.workspace = Path(workspace if workspace is not None else sys.argv[1])
        self.scores: dict[str, float] = {}

    def __call__(self, name: str) -> Callable[[Check], Check]:
        """Run the decorated function at once and keep its score under ``name``."""
        if name in self.scores:
            raise ValueError(f"two checks are called {name!r}: rename one")

        def run(check: Check) -> Check:
            self.scores[name] = self._score(name, check)
            return check

        return run

    def _score(self, name: str, check: Check) -> float:
        try:
            value = float(check() or 0.0)
        except Exception as error:  # whatever the workspace holds must not stop the other checks
            print(f"{name}: {type(error).__name__}: {str(error)[:200]!a}", file=sys.stderr)
            return 0.0
        return min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0

    def passed(self, *names: str) -> bool:
        """Whether all these earlier checks are worth 1: for checks that doing nothing would satisfy."""
        return all(self.scores[name] == 1.0 for name in names)

    def finish(self) -> None:
        """Kill what programs left running and print the scores as one line of JSON."""
        kill_strays()
        print(json.dumps(self.scores), flush=True)


def read_bytes(path: str | Path, cap: int = SIZE_CAP) -> bytes:
    """The content of a regular file of at most ``cap`` bytes; links are not followed."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise Failed(f"{path}: not a regular file")
        if info.st_size > cap:
            raise Failed(f"{path}: {info.st_size} bytes, more than {cap}")
        with open(handle, "rb", closefd=False) as file:
            return file.read(cap)
    finally:
        os.close(handle)


def read_text(path: str | Path, cap: int = SIZE_CAP) -> str:
    """The content as UTF-8 with line ends made ``\\n`` and no byte order mark."""
    text = read_bytes(path, cap).decode("utf-8-sig")
    return text.replace("\r\n", "\n")


def read_lines(path: str | Path, cap: int = SIZE_CAP) -> list[str]:
    """The lines without trailing spaces; blank lines at the end do not count."""
    text = read_text(path, cap).rstrip()
    return [line.rstrip() for line in text.split("\n")] if text else []


def read_json(path: str | Path, cap: int = SIZE_CAP) -> Any:
    """The JSON value in a file."""
    return json.loads(read_text(path, cap))


def read_csv(path: str | Path, delimiter: str = ",", cap: int = SIZE_CAP) -> list[list[str]]:
    """The rows of a CSV file, header included, without empty rows."""
    text = read_text(path, cap)
    import csv
    import io

    return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]


def close(a: Any, b: Any, tolerance: float = 1e-6) -> bool:
    """Whether two numbers agree within an absolute or relative tolerance; text that is no number never does."""
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)


def share(got: Sequence[Hashable], want: Sequence[Hashable]) -> float:
    """How far two collections agree as multisets: shared over all, 1 if equal, 0 if nothing is shared."""
    left, right = Counter(got), Counter(want)
    union = sum((left | right).values())
    return sum((left & right).values()) / union if union else 0.0


def ordered(got: Sequence[Hashable], want: Sequence[Hashable]) -> bool:
    """Whether everything wanted is there, once, in the wanted order (other things may stand between)."""
    wanted = set(want)
    return bool(want) and [item for item in got if item in wanted] == list(want)


class Ran:
    """What a program did. ``code`` is negative for a signal and ``None`` when the time was up."""

    def __init__(self, code: int | None, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"Ran(code={self.code!r}, out={self.out!r}, err={self.err!r})"


def run_program(
    argv: Sequence[str],
    *,
    cwd: str | Path,
    stdin: str = "",
    timeout: float = 3.0,
    env: Mapping[str, str] | None = None,
    leave_running: bool = False,
) -> Ran:
    """Run ``argv`` in ``cwd`` with a small environment and limits; at most 1 MiB of each stream is kept.

    All that the program started is killed, unless ``leave_running`` (then until :func:`kill_strays`).
    """
    import resource
    import signal
    import subprocess
    import tempfile

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    if sum(_hung_seconds) >= HUNG_SECONDS:
        raise Failed("programs here did not end too often: not run")
    _adopt_orphans()
    base = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(cwd),
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        source.write(stdin.encode())
        source.seek(0)
        try:
            program = subprocess.Popen(
                argv,
                cwd=cwd,
                stdin=source,
                stdout=out,
                stderr=err,
                env={**base, **(env or {})},
                start_new_session=True,
                preexec_fn=limit,
            )
        except OSError as error:
            raise Failed(f"{argv[0]}: {error.strerror}") from error
        code = _wait(program, timeout)
        if code is None:
            _hung_seconds.append(timeout)
            with contextlib.suppress(OSError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        if not leave_running:
            kill_strays()
        return Ran(code, _tail_of(out), _tail_of(err))


def _wait(program: subprocess.Popen, timeout: float) -> int | None:
    """The exit code, or ``None`` when the time is up. Orphans that end meanwhile are reaped, as init would."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program.pid:
            program.returncode = os.waitstatus_to_exitcode(status)
            return program.returncode
        if pid == 0:
            time.sleep(0.002)
    return None


def _tail_of(file: Any) -> str:
    file.seek(0)
    return file.read(SIZE_CAP).decode("utf-8", "replace")


def _adopt_orphans() -> None:
    """Become the parent of daemons, so that they can be found (Linux; elsewhere they cannot)."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def kill_strays(seconds: float = 5.0) -> int:
    """Kill every process below this one, and say how many there were."""
    killed, end = set(), time.monotonic() + seconds
    while (pids := _below(os.getpid())) and time.monotonic() < end:
        import signal

        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        killed |= pids
        time.sleep(0.005)
    return len(killed)


def _below(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if entry.isdigit():
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = set(), [root]
    while queue:
        new = children.get(queue.pop(), ())
        found.update(new)
        queue.extend(new)
    return found


@contextlib.contextmanager
def scratch(source: str | Path | None = None, cap: int = 16 << 20) -> Iterator[Path]:
    """A temporary folder, with a copy of the regular files below ``source``.

    Without links, names that start with a dot, and the folder ``reward``, where some graders mount the checker.
    """
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="check-"))
    try:
        if source is not None:
            _copy(Path(source), folder, cap)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(source: Path, target: Path, cap: int) -> None:
    import shutil

    for root, folders, names in os.walk(source):
        hidden = {"reward"} if Path(root) == source else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in hidden)
        place = target / os.path.relpath(root, source)
        place.mkdir(exist_ok=True)
        for name in sorted(names):
            path = Path(root, name)
            info = path.lstat()
            if name.startswith(".") or not stat.S_ISREG(info.st_mode):
                continue
            cap -= info.st_size
            if cap < 0:
                raise Failed(f"{source}: too much to copy")
            shutil.copy(path, place / name, follow_symlinks=False)
