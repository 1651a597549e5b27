"""Copying files into and out of every backend, with hostile contents; snapshots and forks."""

from __future__ import annotations

import contextlib
import io
import tarfile
import time

import pytest

from clawgym.errors import SandboxError, TreeTooLarge
from clawgym.records import Limits, TaskFile
from clawgym.sandbox import Archive, Backend, Sandbox, SandboxSpec

from .conftest import Traits

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORK = "/root/.openclaw/workspace"


async def _sh(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.exec(["bash", "-c", script])
    assert done.exit_code == 0, done.text
    return done.text


def _members(archive: Archive) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
        return {m.name: m for m in tar}


def _content(archive: Archive, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
        held = tar.extractfile(name)
        assert held is not None
        return held.read()


# -- in


async def test_put_and_get(sandbox: Sandbox) -> None:
    files = [
        TaskFile("a.txt", b"hello\n"),
        TaskFile("deep/er/run.sh", b"#!/bin/sh\necho ran\n", executable=True),
        TaskFile("empty", b""),
        TaskFile("blob", bytes(range(256)) * 1000),
    ]
    await sandbox.put(files, WORK)
    assert await sandbox.get(f"{WORK}/a.txt") == b"hello\n"
    assert await sandbox.get(f"{WORK}/empty") == b""
    assert await sandbox.get(f"{WORK}/blob") == bytes(range(256)) * 1000
    assert await _sh(sandbox, f"{WORK}/deep/er/run.sh") == "ran\n"
    assert (await sandbox.exec([f"{WORK}/a.txt"])).exit_code == 126
    await sandbox.put([TaskFile("a.txt", b"replaced")], WORK)
    assert await sandbox.get(f"{WORK}/a.txt") == b"replaced"
    assert await _sh(sandbox, f"cat {WORK}/deep/er/run.sh | wc -l") == "2\n"
    await _sh(sandbox, f"echo changed > {WORK}/a.txt && rm -r {WORK}/deep")  # what is put is the sandbox's own


async def test_put_replaces_links_instead_of_following_them(sandbox: Sandbox) -> None:
    await _sh(sandbox, f"mkdir -p {WORK} && echo kept > /tmp/victim && ln -s /tmp/victim {WORK}/a.txt")
    await sandbox.put([TaskFile("a.txt", b"new")], WORK)
    assert await sandbox.get(f"{WORK}/a.txt") == b"new"
    assert await _sh(sandbox, "cat /tmp/victim") == "kept\n"


async def test_put_refuses_relative_folders(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="absolute"):
        await sandbox.put([TaskFile("a", b"")], "relative")


# -- out


async def test_archive_round_trip_with_odd_names(sandbox: Sandbox) -> None:
    names = [
        b"plain",
        b"with space",
        "ünïcode-漢字".encode(),
        b"new\nline",
        b"\xff\xfe not utf-8",
        b"-rf",
        b"*",
        b"q'\"$",
    ]
    script = "import sys, os\nfor n in %r:\n    os.makedirs(b'%s', exist_ok=True)\n    open(b'%s/' + n, 'wb').write(n)"
    await sandbox.exec(["python3", "-c", script % (names, f"{WORK}/odd", f"{WORK}/odd")])
    archive = await sandbox.get_archive(WORK)
    assert archive.dropped == ()
    held = {m.encode("utf-8", "surrogateescape") for m in _members(archive)}
    assert held == {b"odd", *(b"odd/" + n for n in names)}
    for name in names:
        assert _content(archive, "odd/" + name.decode("utf-8", "surrogateescape")) == name
    await sandbox.put_archive(archive, "/tmp/copy")
    assert await _sh(sandbox, f"diff -r {WORK} /tmp/copy && echo same") == "same\n"
    assert (await sandbox.get(f"{WORK}/odd/new\nline")) == b"new\nline"


async def test_archive_keeps_modes_links_inside_and_empty_folders(sandbox: Sandbox) -> None:
    await _sh(sandbox, f"mkdir -p {WORK}/d/e {WORK}/hollow; cd {WORK}; echo x > d/f; chmod 755 d/f; chmod 600 d/e")
    await _sh(sandbox, f"cd {WORK}; ln -s d/f inside; ln -s ../d/f d/up; ln d/f hard; chmod 4777 d/f")
    members = _members(await sandbox.get_archive(WORK))
    assert members["hollow"].isdir()
    assert members["inside"].issym()
    assert members["d/up"].linkname == "../d/f"
    assert members["d/f"].isreg()
    assert members["hard"].isreg(), "a hard link leaves as a file of its own"
    assert members["d/f"].mode == 0o777, "no setuid bit leaves a sandbox"
    assert {m.uid for m in members.values()} == {0}


async def test_a_link_climbs_at_most_to_the_top_of_the_tree(sandbox: Sandbox) -> None:
    await _sh(
        sandbox, f"mkdir -p {WORK}/d/e && cd {WORK} && ln -s .. out && ln -s ../.. d/out && ln -s ../../.. d/e/out"
    )
    await _sh(
        sandbox, f"cd {WORK} && ln -s . here && ln -s .. d/top && ln -s ../.. d/e/top && ln -s ../out/x d/through"
    )
    archive = await sandbox.get_archive(WORK)
    assert set(_members(archive)) == {"d", "d/e", "here", "d/top", "d/e/top", "d/through"}
    assert {d.split(":")[0] for d in archive.dropped} == {"out", "d/out", "d/e/out"}


async def test_files_of_other_mounts_do_not_leave_a_sandbox(sandbox: Sandbox) -> None:
    """The kernel's own files can be endless, wait for ever, or say something about the host."""
    left: dict[str, bytes] = {}
    for path in ("/proc/version", "/proc/1/environ", "/proc/cpuinfo", "/sys/kernel/notes"):
        with contextlib.suppress(SandboxError):
            left[path] = await sandbox.get(path)
    with contextlib.suppress(SandboxError):
        archive = await sandbox.get_archive("/proc/1")
        left |= {name: _content(archive, name) for name, entry in _members(archive).items() if entry.isreg()}
    assert not any(left.values()), [path for path, content in left.items() if content]


async def test_links_out_fifos_and_devices_are_dropped(sandbox: Sandbox) -> None:
    await _sh(sandbox, f"mkdir -p {WORK} && cd {WORK} && echo x > good && ln -s /etc/passwd out && ln -s ../../.. up")
    await _sh(sandbox, f"cd {WORK} && ln -s d/../../../x sly && mkfifo fifo && ln -s good ok; mknod zero c 1 5 || true")
    await sandbox.exec(
        ["python3", "-c", f"import socket; socket.socket(socket.AF_UNIX).bind('{WORK}/socket')"],
    )
    started = time.monotonic()
    archive = await sandbox.get_archive(WORK)
    assert time.monotonic() - started < 5
    assert set(_members(archive)) == {"good", "ok"}
    assert {d.split(":")[0] for d in archive.dropped} >= {"out", "up", "sly", "fifo"}
    for name in ("out", "fifo", "socket", "ok", "up/etc/passwd", ""):
        with pytest.raises(SandboxError):
            await sandbox.get(f"{WORK}/{name}")
    assert await sandbox.get(f"{WORK}/good") == b"x\n"


async def test_device_nodes_cannot_be_made(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["mknod", "/tmp/disk", "b", "8", "0"])).exit_code != 0


async def test_workspace_replaced_by_a_link(sandbox: Sandbox) -> None:
    await _sh(sandbox, f"mkdir -p {WORK} && rm -rf {WORK} && ln -s /etc {WORK}")
    with pytest.raises(SandboxError):
        await sandbox.get_archive(WORK)
    with pytest.raises(SandboxError):
        await sandbox.get(f"{WORK}/passwd")
    with pytest.raises(SandboxError):
        await sandbox.get_archive("/no/such/folder")
    await _sh(sandbox, f"rm {WORK} && echo file > {WORK}")
    with pytest.raises(SandboxError):
        await sandbox.get_archive(WORK)


async def test_sparse_terabyte_is_refused_at_once(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(limits=Limits(file_mb=2 * 2**20)))
    try:
        await _sh(sandbox, f"mkdir -p {WORK} && truncate -s 1T {WORK}/huge && echo x > {WORK}/small")
        started = time.monotonic()
        with pytest.raises(SandboxError, match="larger"):
            await sandbox.get(f"{WORK}/huge", max_bytes=2**20)
        with pytest.raises(SandboxError, match="larger"):
            await sandbox.get_archive(WORK, max_bytes=2**20)
        assert time.monotonic() - started < 10
        assert await sandbox.get(f"{WORK}/small") == b"x\n"
    finally:
        await sandbox.close()


async def test_size_caps(sandbox: Sandbox) -> None:
    await _sh(sandbox, f"mkdir -p {WORK}/many && cd {WORK} && head -c 100000 /dev/zero > z && touch many/{{1..50}}")
    with pytest.raises(SandboxError, match="larger"):
        await sandbox.get(f"{WORK}/z", max_bytes=99_999)
    assert len(await sandbox.get(f"{WORK}/z", max_bytes=100_000)) == 100_000
    with pytest.raises(SandboxError, match="larger"):
        await sandbox.get_archive(WORK, max_bytes=99_999)
    with pytest.raises(SandboxError, match="entries"):
        await sandbox.get_archive(WORK, max_files=20)
    assert len(_members(await sandbox.get_archive(WORK, max_bytes=100_000, max_files=60))) == 52


async def test_bottomless_folders_are_refused(sandbox: Sandbox) -> None:
    script = f"import os\nos.makedirs('{WORK}'); os.chdir('{WORK}')\nfor i in range(300): os.mkdir('d'); os.chdir('d')"
    assert (await sandbox.exec(["python3", "-c", script])).exit_code == 0
    with pytest.raises(TreeTooLarge, match="128 folders deep") as refused:
        await sandbox.get_archive(WORK)
    assert refused.value.bound == "depth"


# -- after the end


async def test_files_can_be_taken_after_stop(sandbox: Sandbox) -> None:
    await _sh(sandbox, f"mkdir -p {WORK}/sub && echo left > {WORK}/sub/a && ln -s sub/a {WORK}/l && mkfifo {WORK}/p")
    await _sh(sandbox, f"ln -s /etc/passwd {WORK}/out; echo t > /tmp/t; (while :; do date > {WORK}/ticking; done) &")
    await sandbox.stop()
    await sandbox.stop()
    first = await sandbox.get_archive(WORK)
    assert await sandbox.get(f"{WORK}/sub/a") == b"left\n"
    assert await sandbox.get("/tmp/t") == b"t\n"
    assert {"sub", "sub/a", "l"} <= set(_members(first))
    assert {d.split(":")[0] for d in first.dropped} == {"p", "out"}
    assert (await sandbox.get_archive(WORK)).tar == first.tar, "nothing runs any more"
    with pytest.raises(SandboxError):
        await sandbox.get(f"{WORK}/out")
    with pytest.raises(SandboxError, match="larger"):
        await sandbox.get_archive(WORK, max_bytes=2)
    with pytest.raises(SandboxError):
        await sandbox.exec(["true"])
    await sandbox.close()
    with pytest.raises(SandboxError):
        await sandbox.get(f"{WORK}/sub/a")


# -- snapshots


async def test_snapshot_and_fork_are_independent(backend: Backend, sandbox: Sandbox) -> None:
    await sandbox.put([TaskFile("keep", b"1"), TaskFile("gone", b"2"), TaskFile("dir/x", b"3", True)], WORK)
    shell = await sandbox.shell()
    await shell.run(f"V=alive; cd {WORK}; rm gone; ln -s /etc/passwd abs; echo tmp > /tmp/t; chmod 640 keep")
    snapshot = await sandbox.snapshot()
    assert (await shell.run("echo $V")).output == b"alive\n", "the sandbox goes on"
    await shell.run(f"echo changed > {WORK}/keep; rm -r {WORK}/dir; touch {WORK}/later")
    one, two = await backend.fork(snapshot), await backend.fork(snapshot)
    try:
        listing = await _sh(one, f"cd {WORK} && ls && cat keep dir/x /tmp/t && readlink abs && stat -c %a keep dir/x")
        assert listing == "abs\ndir\nkeep\n13tmp\n/etc/passwd\n640\n755\n"
        await _sh(one, f"echo one > {WORK}/keep; rm {WORK}/dir/x")
        assert await two.get(f"{WORK}/keep") == b"1"
        assert await _sh(two, f"cat {WORK}/dir/x") == "3"
        assert await sandbox.get(f"{WORK}/keep") == b"changed\n"
        again = await one.snapshot()
        three = await backend.fork(again)
        assert await three.get(f"{WORK}/keep") == b"one\n"
        assert (await three.exec(["ls", f"{WORK}/dir"])).output == b""
        await three.close()
        await backend.drop(again)
    finally:
        await one.close()
        await two.close()
    await backend.drop(snapshot)
    await backend.drop(snapshot)
    with pytest.raises(SandboxError, match="dropped"):
        await backend.fork(snapshot)


async def test_snapshot_of_a_stopped_sandbox_with_other_limits(backend: Backend, sandbox: Sandbox) -> None:
    await _sh(sandbox, "echo x > /root/x")
    await sandbox.stop()
    snapshot = await sandbox.snapshot()
    await sandbox.close()
    fork = await backend.fork(snapshot, SandboxSpec(env={"E": "1"}, limits=Limits(pids=64)))
    assert await _sh(fork, "cat /root/x; echo $E") == "x\n1\n"
    await fork.close()
    with pytest.raises(SandboxError, match="image"):
        await backend.fork(snapshot, SandboxSpec(image="another"))
    await backend.drop(snapshot)


async def test_fork_grades_with_pristine_tools(backend: Backend, sandbox: Sandbox, traits: Traits) -> None:
    if not traits.pristine_mount:
        pytest.skip("the image cannot be changed, so its tools need no second mount")
    spoiled = "printf '#!/bin/sh\\necho spoiled\\n' > /usr/bin/sort"
    assert ((await sandbox.exec(["bash", "-c", spoiled])).exit_code == 0) is traits.private_usr
    snapshot = await sandbox.snapshot()
    fork = await backend.fork(snapshot, SandboxSpec(pristine_tools=True))
    try:
        done = await _sh(
            fork, "echo 1 | sort; echo 1 | /.pristine/usr/bin/sort; /.pristine/usr/bin/python3 -c 'print(2)'"
        )
        assert done == ("spoiled\n1\n2\n" if traits.private_usr else "1\n1\n2\n")
        assert (await fork.exec(["sh", "-c", "echo > /.pristine/usr/bin/sort"])).exit_code != 0
    finally:
        await fork.close()
        await backend.drop(snapshot)


# -- read-only folders


async def test_readonly_folders_cannot_be_changed(backend: Backend) -> None:
    files = (TaskFile("check.py", b"print(1)\n"), TaskFile("sub/run.sh", b"#!/bin/sh\necho ran\n", executable=True))
    inside = f"{WORK}/reward"
    sandbox = await backend.create(SandboxSpec(workdir=WORK, readonly={"/verifier": files, inside: files}))
    try:
        for folder in ("/verifier", inside):
            assert await _sh(sandbox, f"cat {folder}/check.py; {folder}/sub/run.sh; cd {folder}; ls") == (
                "print(1)\nran\ncheck.py\nsub\n"
            )
            for attack in (
                f"echo x > {folder}/check.py",
                f"echo x > {folder}/new",
                f"rm -f {folder}/check.py",
                f"mv {folder}/check.py {folder}/moved",
                f"chmod 777 {folder}/check.py",
                f"touch {folder}/check.py",
                f"mv {folder} {folder}-moved",
                f"rm -rf {folder}",
                f"mount -t tmpfs none {folder}",
                f"umount {folder}",
                f"mount -o remount,rw {folder}",
                f"ln -sfn /tmp {folder}",
            ):
                await sandbox.exec(["bash", "-c", attack])
                assert await _sh(sandbox, f"cat {folder}/check.py; ls {folder}") == "print(1)\ncheck.py\nsub\n", attack
        await _sh(sandbox, f"echo mine > {WORK}/file && mkdir {WORK}/folder")  # around them the sandbox may write
        assert await sandbox.get(f"{WORK}/file") == b"mine\n"
    finally:
        await sandbox.close()


async def test_workdir_anywhere(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec(workdir="/some/where/new"))
    try:
        shell = await sandbox.shell()
        assert (await shell.run("pwd; echo x > here")).output == b"/some/where/new\n"
        assert await sandbox.get("/some/where/new/here") == b"x\n"
        assert set(_members(await sandbox.get_archive("/some/where/new"))) == {"here"}
    finally:
        await sandbox.close()
