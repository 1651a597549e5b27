"""Folders of this machine mounted in a sandbox: complete, read-only, and not part of archives."""

from __future__ import annotations

import hashlib
import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from clawgym.errors import SandboxError
from clawgym.records import TaskFile
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT = "/opt/tool"


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """A small program, as an installer would leave it: a folder, a file, a link, something to start."""
    os.chmod(tmp_path, 0o755)
    top = tmp_path / "tool"
    (top / "lib" / "deep").mkdir(parents=True)
    (top / "lib" / "deep" / "words.txt").write_text("hello\n")
    (top / "run").write_text('#!/bin/sh\ncat "$(dirname "$0")"/latest/words.txt\n')
    (top / "run").chmod(0o755)
    (top / "latest").symlink_to("lib/deep")
    for path in (top, *top.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0))
    return top


def digest(top: Path) -> str:
    """Everything that a sandbox could have changed."""
    rows: list[object] = []
    for path in (top, *sorted(top.rglob("*"))):
        info = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        rows.append((str(path), info.st_mode, info.st_uid, info.st_gid, info.st_size, info.st_mtime_ns, content))
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def names(tar: bytes) -> set[str]:
    with tarfile.open(fileobj=BytesIO(tar)) as held:
        return set(held.getnames())


async def made(backend: Backend, tool: Path, **spec: object) -> Sandbox:
    return await backend.create(SandboxSpec(mounts={AT: tool}, **spec))  # type: ignore[arg-type]


async def say(sandbox: Sandbox, line: str) -> str:
    return (await sandbox.exec(["bash", "-c", line], timeout=30)).text


async def test_program_of_this_machine_runs_in_sandboxes(backend: Backend, tool: Path) -> None:
    one, two = await made(backend, tool), await made(backend, tool)
    try:
        for sandbox in (one, two):
            assert await say(sandbox, f"{AT}/run; cd {AT}/latest && cat words.txt") == "hello\nhello\n"
            assert await say(sandbox, f"ls {AT}") == "latest\nlib\nrun\n"
    finally:
        await one.close()
        await two.close()


# Each line would change the folder, or a way to it; what it says does not matter.
ATTACKS = f"""
echo x >> {AT}/run
echo x > {AT}/new
mkdir {AT}/lib/new
rm -rf {AT}/lib {AT}/latest {AT}/run
chmod 777 {AT} {AT}/run
chown $(id -u) {AT} {AT}/run
touch -d @1 {AT}/run {AT}
mv {AT}/run {AT}/ran
ln -sf /etc/passwd {AT}/latest
truncate -s 0 {AT}/run
mount -o remount,rw {AT}
mount -o remount,bind,rw {AT}
umount -l {AT}
mount -t tmpfs none {AT}
ln {AT}/run /tmp/hard && chmod 777 /tmp/hard && echo x > /tmp/hard
exec 9< {AT}/run && echo x > /proc/self/fd/9
exec 9< {AT}/run && echo x > /dev/fd/9
cp {AT}/run /tmp/copy && cp /tmp/copy {AT}/run
unshare -rm sh -c 'mount -o remount,bind,rw {AT}; echo x > {AT}/new'
python3 -c 'import os; f = os.open("{AT}/run", os.O_RDONLY); os.fchmod(f, 0o777); os.ftruncate(f, 0)'
python3 -c 'import mmap; mmap.mmap(open("{AT}/run", "r+b").fileno(), 0)[0] = 0'
python3 -c 'import os; os.setxattr("{AT}/run", "user.x", b"1")'
"""


async def test_sandbox_cannot_change_a_mount(backend: Backend, tool: Path) -> None:
    before = digest(tool)
    sandbox = await made(backend, tool)
    try:
        for line in ATTACKS.strip().splitlines():
            await say(sandbox, line)
        assert digest(tool) == before
        assert await say(sandbox, f"{AT}/run") == "hello\n"
        with pytest.raises(SandboxError):
            await sandbox.put([TaskFile("run", b"mine")], AT)
    finally:
        await sandbox.close()
    assert digest(tool) == before
    again = await made(backend, tool)
    try:
        assert await say(again, f"{AT}/run; ls {AT}") == "hello\nlatest\nlib\nrun\n"
    finally:
        await again.close()


async def test_rest_of_the_sandbox_is_writable(backend: Backend, tool: Path) -> None:
    sandbox = await made(backend, tool)
    try:
        assert await say(sandbox, f"cp -r {AT} /tmp/mine && echo '#' >> /tmp/mine/run && /tmp/mine/run") == "hello\n"
    finally:
        await sandbox.close()


async def test_mounts_are_in_forks_and_not_in_snapshots(backend: Backend, tool: Path) -> None:
    sandbox = await made(backend, tool)
    try:
        await say(sandbox, "echo kept > /root/mine")
        snapshot = await sandbox.snapshot()
    finally:
        await sandbox.close()
    plain = with_it = None
    try:
        with_it = await backend.fork(snapshot)
        assert await say(with_it, f"cat /root/mine; {AT}/run") == "kept\nhello\n"
        plain = await backend.fork(snapshot, SandboxSpec())
        assert await say(plain, f"cat /root/mine; ls -A {AT} 2>/dev/null") == "kept\n"
    finally:
        for fork in (plain, with_it):
            if fork is not None:
                await fork.close()
        await backend.drop(snapshot)


async def test_fork_mounts_over_whatever_is_at_the_path(backend: Backend, tool: Path) -> None:
    """The files of a fork are an agent's."""
    sandbox = await backend.create(SandboxSpec())
    try:
        await say(sandbox, f"mkdir -p /opt /home/a; ln -s /etc {AT}; ln -s /home /srv/way; echo mine > /home/b")
        snapshot = await sandbox.snapshot()
    finally:
        await sandbox.close()
    targets = {AT: tool, "/srv/way/tool": tool, "/home/b/tool": tool}
    try:
        fork = await backend.fork(snapshot, SandboxSpec(mounts=targets))
        try:
            for target in targets:
                assert await say(fork, f"{target}/run") == "hello\n", target
        finally:
            await fork.close()
    finally:
        await backend.drop(snapshot)


async def test_mounts_are_not_in_archives(backend: Backend, tool: Path) -> None:
    sandbox = await made(backend, tool)
    try:
        await say(sandbox, "echo kept > /opt/mine")
        archive = await sandbox.get_archive("/opt")
        assert "mine" in names(archive.tar)
        assert not {name for name in names(archive.tar) if name.startswith("tool/")}
        for path in (AT, f"{AT}/lib", f"/opt/../{AT}", f"{AT}/"):
            with pytest.raises(SandboxError):
                await sandbox.get_archive(path)
        for path in (f"{AT}/run", f"{AT}/lib/deep/words.txt", f"/{AT}/run"):
            with pytest.raises(SandboxError, match=r"mounted from this machine .*: read it there"):
                await sandbox.get(path)
        await sandbox.stop()
        assert "mine" in names((await sandbox.get_archive("/opt")).tar)
    finally:
        await sandbox.close()


async def test_owners(backend: Backend, tool: Path) -> None:
    """Files of root's, or of the user whose root the sandbox's is, are root's; those of others can be read too."""
    if os.geteuid() == 0:
        os.chown(tool / "lib" / "deep" / "words.txt", 12345, 12345)
    os.chmod(tool / "lib" / "deep" / "words.txt", 0o666)
    before = digest(tool)
    sandbox = await made(backend, tool)
    try:
        assert await say(sandbox, f"stat -c %U {AT}/run; {AT}/run") == "root\nhello\n"
        await say(sandbox, f"echo x >> {AT}/lib/deep/words.txt")  # anybody may, by its mode
        assert await say(sandbox, f"{AT}/run") == "hello\n"
    finally:
        await sandbox.close()
    assert digest(tool) == before


async def test_mounts_grant_no_privileges(backend: Backend, tool: Path) -> None:
    """A program that would run as its owner does not, and a device is not one."""
    (tool / "id").write_bytes(Path("/usr/bin/id").resolve().read_bytes())
    os.chmod(tool / "id", 0o6755)
    if os.geteuid() == 0:
        os.mknod(tool / "kmsg", 0o20666, os.makedev(1, 11))
        os.chmod(tool / "kmsg", 0o666)
    sandbox = await made(backend, tool)
    try:
        plain = await say(sandbox, "id -u; id -g")
        assert await say(sandbox, f"{AT}/id -u; {AT}/id -g") == plain
        assert (await sandbox.exec(["sh", "-c", f"exec 3< {AT}/kmsg"])).exit_code != 0
    finally:
        await sandbox.close()


async def test_what_cannot_be_mounted(backend: Backend, tool: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    wrong: list[tuple[dict[str, Path], str]] = [
        ({"opt/tool": tool}, "not a plain absolute folder"),
        ({"/opt/../usr/x": tool}, "not a plain absolute folder"),
        ({"//usr/x": tool}, "not a plain absolute folder"),
        ({"/opt/tool/": tool}, "not a plain absolute folder"),
        ({"/": tool}, "system"),
        ({"/usr/local/tool": tool}, "system"),
        ({"/proc/tool": tool}, "system"),
        ({"/lib": tool}, "system"),
        ({"/opt/a": tool, "/opt/a/b": tool}, "nested with '/opt/a'"),
        ({"/opt/a/b": tool, "/opt/a": tool}, "nested with '/opt/a/b'"),
        ({"/verifier/x": tool}, "nested with '/verifier'"),
        ({"/root": tool}, "workdir"),
        ({AT: Path("tool")}, "not an absolute path of this machine"),
        ({AT: tmp_path / "missing"}, "cannot be found"),
        ({AT: tmp_path / "loop"}, "cannot be found"),
        ({AT: tmp_path / "file"}, "not a folder"),
        ({AT: Path("/")}, "another file system"),
    ]
    for mounts, why in wrong:
        with pytest.raises(SandboxError, match=rf"mounts\['.*{why}"):
            await backend.create(SandboxSpec(mounts=mounts, readonly={"/verifier": (TaskFile("a", b""),)}))


async def test_a_mounted_folder_by_way_of_a_link(backend: Backend, tool: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("tool")
    sandbox = await made(backend, tmp_path / "current")
    try:
        assert await say(sandbox, f"{AT}/run") == "hello\n"
    finally:
        await sandbox.close()
