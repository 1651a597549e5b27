"""Isolation of every backend: limits, network, the host's files, and closing a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from pathlib import Path

import pytest

from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Limits, TaskFile
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

from .conftest import Traits

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def _needs(backend: Backend, feature: str) -> None:
    if not (await backend.probe()).features[feature]:
        pytest.skip(f"this backend says that it has no {feature}")


async def _close(*sandboxes: Sandbox) -> None:
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


# -- limits


async def test_memory_bomb(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(memory_mb=128, disk_mb=32)))
    try:
        try:
            bomb = "x = []\nfor _ in range(512): x.append(b'x' * 2**20)"
            done = await sandbox.exec(["python3", "-c", bomb], timeout=60)
            assert done.exit_code in (1, 137), done.text  # MemoryError, or the kernel's kill; 0: it had them all
            assert not done.timed_out
            assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"
        except SandboxDied as error:
            assert error.cause == "oom"  # noqa: PT017
    finally:
        await sandbox.close()


async def test_fork_bomb_is_contained(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(pids=64)))
    try:
        started = time.monotonic()
        try:
            await sandbox.exec(["bash", "-c", ":(){ :|:& };:; sleep 1"], timeout=1)
            assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"
        except SandboxDied as error:
            assert error.cause == "pids"  # noqa: PT017
        assert time.monotonic() - started < 30
        await sandbox.stop()
        assert time.monotonic() - started < 40
    finally:
        await sandbox.close()


async def test_number_of_processes_is_limited(backend: Backend) -> None:
    forks = (
        "import os, signal, time\nmade = []\ntry:\n    for _ in range(200):\n        made.append(os.fork())\n"
        "        if not made[-1]: time.sleep(30); os._exit(0)\nexcept OSError: pass\nprint(len(made))\n"
        "for pid in made: os.kill(pid, signal.SIGKILL)"
    )
    sandbox = await backend.create(SandboxSpec(limits=Limits(pids=64)))
    try:
        done = await sandbox.exec(["python3", "-c", forks], timeout=25)
        assert done.exit_code == 0, done.text
        assert 8 < int(done.text) < 64
        assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"
    finally:
        await sandbox.close()


async def test_full_disk_fails_only_the_write(backend: Backend) -> None:
    await _needs(backend, "disk_limit")
    sandbox = await backend.create(SandboxSpec(limits=Limits(disk_mb=32, file_mb=256)))
    try:
        done = await sandbox.exec(["sh", "-c", "head -c 100M /dev/zero > /root/big"])
        assert done.exit_code != 0
        assert b"No space left" in done.output
        assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"
        assert (await sandbox.exec(["sh", "-c", "rm /root/big && echo x > /root/small"])).exit_code == 0
    finally:
        await sandbox.close()


async def test_number_of_files_is_limited(backend: Backend) -> None:
    await _needs(backend, "disk_limit")
    sandbox = await backend.create(SandboxSpec(limits=Limits(disk_mb=16)))
    try:
        script = "import os\nfor i in range(200000): os.close(os.open(f'/root/f{i}', os.O_CREAT))"
        done = await sandbox.exec(["python3", "-c", script])
        assert b"No space left" in done.output
        assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"
    finally:
        await sandbox.close()


async def test_largest_file(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(file_mb=1)))
    try:
        done = await sandbox.exec(["sh", "-c", "head -c 3M /dev/zero > /root/f"])
        assert done.exit_code != 0
        assert len(await sandbox.get("/root/f")) == 2**20
    finally:
        await sandbox.close()


async def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    script = (
        "import resource as r\nfor n in ('CORE', 'FSIZE', 'NOFILE'):\n"
        "    soft, hard = r.getrlimit(getattr(r, 'RLIMIT_' + n))\n"
        "    try: r.setrlimit(getattr(r, 'RLIMIT_' + n), (hard + 1, hard + 1)); print(n, 'raised')\n"
        "    except (ValueError, OSError): pass"
    )
    assert (await sandbox.exec(["python3", "-c", script])).output == b""


# -- network


_REACH = """
import socket, sys
family, address = (socket.AF_INET, ("{host}", {port})) if {port} else (socket.AF_UNIX, "\\0{host}")
try:
    with socket.socket(family) as s:
        s.settimeout(2)
        s.connect(address)
        print("reached")
except OSError:
    print("no")
"""


async def _reaches(sandbox: Sandbox, host: str, port: int) -> str:
    return (await sandbox.exec(["python3", "-c", _REACH.format(host=host, port=port)])).text.strip()


async def test_no_network(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "tail -n +3 /proc/net/dev 2>/dev/null | cut -d: -f1 | tr -d ' '"])
    assert done.text.split() in ([], ["lo"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert await _reaches(sandbox, "127.0.0.1", server.getsockname()[1]) == "no"
    assert await _reaches(sandbox, "1.1.1.1", 53) == "no"


async def test_loopback_works_inside(backend: Backend, sandbox: Sandbox) -> None:
    await _needs(backend, "loopback")
    script = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname(), 5)\ns.accept()[0].sendall(b'x')\nprint(c.recv(1))"
    )
    assert (await sandbox.exec(["python3", "-c", script], timeout=20)).output == b"b'x'\n"


async def test_abstract_sockets_of_the_host_are_out_of_reach(backend: Backend, sandbox: Sandbox) -> None:
    await _needs(backend, "abstract_sockets")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0clawgym-test-abstract")
        server.listen()
        assert await _reaches(sandbox, "clawgym-test-abstract", 0) == "no"


async def test_joined_network(backend: Backend, traits: Traits) -> None:
    if not traits.joins_network:
        pytest.skip("this backend cannot join networks as an ordinary user")
    first = await backend.create(SandboxSpec())
    sandboxes = [first]
    try:
        shell = await first.shell()
        await shell.run(
            "echo served > /tmp/page; cd /tmp; python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &"
        )
        second = await backend.create(SandboxSpec(join_network_of=first))
        stranger = await backend.create(SandboxSpec())
        sandboxes += [second, stranger]
        fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/page', timeout=5).read())"
        for _ in range(50):
            done = await second.exec(["python3", "-c", fetch])
            if done.exit_code == 0:
                break
            await asyncio.sleep(0.1)
        assert done.output == b"b'served\\n'\n"
        assert (await stranger.exec(["python3", "-c", fetch])).exit_code != 0
        assert (await second.exec(["cat", "/tmp/page"])).exit_code != 0, "only the network is shared"
        assert b"http.server" not in (await second.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline"])).output
    finally:
        await _close(*reversed(sandboxes))


# -- the host


async def test_host_files_are_not_visible(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    places = [str(secret), str(Path(__file__).resolve()), "/etc/shadow", "/etc/machine-id", "/var/run/docker.sock"]
    for place in places:
        assert (await sandbox.exec(["cat", place])).exit_code != 0, place
    done = await sandbox.exec(["sh", "-c", "ls -A /home /opt /srv /mnt /media /root /tmp /var/log /boot 2>/dev/null"])
    assert [line for line in done.text.split() if not line.endswith(":") and line != "apt"] == []
    roots = await sandbox.exec(["sh", "-c", f"cat /proc/[0-9]*/root{secret}; ls /proc/*/root/etc/shadow"])
    assert b"hunter2" not in roots.output


async def test_host_processes_are_not_visible(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
    assert "pytest" not in done.text
    assert len((await sandbox.exec(["sh", "-c", "ls -d /proc/[0-9]* 2>/dev/null"])).text.split()) < 6


async def test_isolation_as_probed(backend: Backend, traits: Traits) -> None:
    isolation = await backend.probe()
    assert isolation.backend == backend.name
    wanted = ("network", "pid", "no_new_privs", "no_capabilities", "seccomp", "no_vsock", "no_nested_userns")
    wanted += ("host_settings_readonly", "host_files_hidden", "disk_limit")
    wanted += ("proc", "terminals", "loopback", "hostname")
    for name in wanted:
        assert isolation.features[name] is (name not in traits.lacks), name
    assert set(isolation.as_dict()) == {"backend", "tier", "features", "notes"}


_CALLS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, function, *args):
    ctypes.set_errno(0)
    if function(*args) != -1 or ctypes.get_errno() not in (1, 13, 38, 97):
        print(name, ctypes.get_errno())
x86 = os.uname().machine == "x86_64"
sys_ = lambda number, *args: call(number, libc.syscall, ctypes.c_long(number), *args)
if x86:
    for number in (425, 426, 427, 321, 298, 250, 248, 323, 304, 303, 428, 430, 442, 310, 135):
        sys_(number, 0xffffffff, 0, 0, 0, 0, 0)
call("unshare user", libc.unshare, 0x10000000)
call("unshare mount", libc.unshare, 0x20000)
call("mount", libc.mount, b"none", b"/tmp", b"tmpfs", 0, None)
call("chroot", libc.chroot, b"/tmp")
call("vsock", libc.socket, 40, 1, 0)
call("netlink", libc.socket, 16, 3, 0)
call("packet", libc.socket, 17, 3, 0)
call("raw", libc.socket, 2, 3, 1)
call("sethostname", libc.sethostname, b"x", 1)
call("TIOCSTI", libc.ioctl, 0, 0x5412, b"x")
call("TIOCSTI, high bits", libc.ioctl, 0, ctypes.c_ulong(0x100005412), b"x")
"""


async def test_dangerous_calls_are_denied(sandbox: Sandbox) -> None:
    shell = await sandbox.shell(pty=True)  # a terminal, for the calls that ask for one
    await sandbox.put([TaskFile("calls.py", _CALLS.encode())], "/tmp")
    done = await shell.run("python3 /tmp/calls.py")
    assert (done.exit_code, done.output) == (0, b"")


# -- the end


async def test_close_is_idempotent_and_final(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    shell = await sandbox.shell()
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    with pytest.raises(SandboxError):
        await sandbox.exec(["true"])
    with pytest.raises(SandboxError):
        await shell.run("true")
    with pytest.raises(SandboxError):
        await sandbox.snapshot()


async def test_close_while_a_command_runs(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    running = [asyncio.create_task(sandbox.exec(["sleep", "60"])) for _ in range(3)]
    await asyncio.sleep(0.3)
    started = time.monotonic()
    await sandbox.close()
    for task in running:
        with pytest.raises(SandboxError):
            await asyncio.wait_for(task, 5)
    assert time.monotonic() - started < 10


async def test_stop_while_a_command_runs(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    task = asyncio.create_task(sandbox.exec(["sh", "-c", "echo x > /root/x; sleep 60"]))
    await asyncio.sleep(0.3)
    await sandbox.stop()
    with pytest.raises(SandboxError):
        await asyncio.wait_for(task, 5)
    assert await sandbox.get("/root/x") == b"x\n"
    await sandbox.close()


async def test_cancelled_create_leaves_nothing(backend: Backend) -> None:
    for wait in (0.0, 0.01, 0.05):
        task = asyncio.create_task(backend.create(SandboxSpec()))
        await asyncio.sleep(wait)
        task.cancel()
        try:
            await (await task).close()
        except asyncio.CancelledError:
            pass
    for _ in range(200):
        if not backend.sandboxes:  # type: ignore[attr-defined]
            return
        await asyncio.sleep(0.05)
    pytest.fail("a sandbox whose creation was cancelled is still there")


async def test_sandbox_can_only_kill_itself(backend: Backend, traits: Traits) -> None:
    async def lives() -> bool:
        try:
            assert (await sandbox.exec(["echo", "alive"])).output == b"alive\n"
        except SandboxDied as error:
            assert error.cause in ("protocol", "unresponsive", "died")  # noqa: PT017
            with pytest.raises(SandboxDied):  # and stays dead
                await sandbox.exec(["true"])
            return False
        return True

    own_processes = (await backend.probe()).features["pid"] and traits.survives_kills
    sandbox, other = await backend.create(SandboxSpec()), await backend.create(SandboxSpec())
    try:
        with contextlib.suppress(SandboxDied):
            await sandbox.exec(["sh", "-c", "kill -9 1; kill -9 -1"], timeout=5)
        alive = await lives()
        assert alive or not own_processes, "process 1 was killed from inside"
        if alive:
            with contextlib.suppress(SandboxDied):
                await sandbox.exec(["sh", "-c", "head -c 5000000 /dev/urandom > /proc/1/fd/1"], timeout=5)
            await lives()  # or the noise was let near the stream
        assert (await other.exec(["echo", "other"])).output == b"other\n"
    finally:
        await _close(sandbox, other)


async def test_sixteen_sandboxes_at_once(backend: Backend) -> None:
    spec = SandboxSpec(limits=dataclasses.replace(Limits(), memory_mb=128, disk_mb=32))
    sandboxes = await asyncio.gather(*(backend.create(spec) for _ in range(16)))
    try:
        assert len({sandbox.id for sandbox in sandboxes}) == 16
        await asyncio.gather(
            *(sandbox.exec(["sh", "-c", f"echo {i} > /tmp/who"]) for i, sandbox in enumerate(sandboxes))
        )
        held = await asyncio.gather(*(sandbox.get("/tmp/who") for sandbox in sandboxes))
        assert held == [f"{i}\n".encode() for i in range(16)]
        many = await asyncio.gather(*(sandbox.exec(["echo", "x"]) for sandbox in sandboxes for _ in range(8)))
        assert {done.output for done in many} == {b"x\n"}
    finally:
        await _close(*sandboxes)
