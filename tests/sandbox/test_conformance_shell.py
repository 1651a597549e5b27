"""Every backend's shells and commands, in real sandboxes."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path

import pytest

from clawgym.errors import SandboxError
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

from .conftest import Traits, processes

pytestmark = pytest.mark.asyncio(loop_scope="module")


# -- the persistent shell


async def test_shell_keeps_its_state(shared: Sandbox) -> None:
    shell = await shared.shell()
    first = await shell.run("mkdir -p /tmp/kept && cd /tmp/kept && X=5 && f() { echo f:$1; } && alias ll='echo alias'")
    assert (first.exit_code, first.cwd) == (0, "/tmp/kept")
    second = await shell.run("pwd; echo $X; f 1; export Y=6; bash -c 'echo $Y'")
    assert second.output == b"/tmp/kept\n5\nf:1\n6\n"
    assert (await shell.run("set -o pipefail; false | true")).exit_code == 1
    assert (await shell.run("false | true")).exit_code == 1  # options stay too
    await shell.close()


async def test_programs_are_those_that_a_fork_would_not_have(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    one, two = await sandbox.shell(), await sandbox.shell()
    assert await sandbox.programs() == ()
    await one.run("sleep 60 & setsid sleep 60 & (exec -a renamed sleep 60) & sleep 0")
    await _runs(sandbox, "sleep", "sleep", "sleep")
    await two.run("sleep 0 & exec 3</dev/null")
    await _runs(sandbox, "sleep", "sleep", "sleep")
    await sandbox.close()


async def _runs(sandbox: Sandbox, *programs: str) -> None:
    """Wait until these programs run, and no others: a shell does not wait for the start of its jobs."""
    async with asyncio.timeout(20):
        while await sandbox.programs() != programs:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_time_limit_of_a_year_is_kept(shared: Sandbox) -> None:
    assert (await shared.exec(["echo", "here"], timeout=4e7)).output == b"here\n"


async def test_shell_reports_the_last_status(shared: Sandbox) -> None:
    shell = await shared.shell()
    assert (await shell.run("(exit 9)")).exit_code == 9
    assert (await shell.run("echo $?")).output == b"9\n"
    assert (await shell.run("")).exit_code in (0, 9)
    assert (await shell.run("# a comment only")).output == b""
    await shell.close()


async def test_shell_background_jobs_survive(shared: Sandbox) -> None:
    shell = await shared.shell()
    assert (await shell.run("sleep 30 & echo $!")).exit_code == 0
    assert b"sleep 30" in (await shell.run("jobs")).output
    assert (await shell.run("kill -0 $! && echo alive")).output == b"alive\n"
    done = await shell.run("kill %1; wait %1; echo $?")
    assert b"143" in done.output
    await shell.close()


async def test_background_child_holding_the_pipe_does_not_block(shared: Sandbox) -> None:
    shell = await shared.shell()
    started = time.monotonic()
    done = await shell.run("(sleep 20; echo late) & echo now")
    assert done.output == b"now\n"
    exec_done = await shared.exec(["bash", "-c", "sleep 20 & echo now"])
    assert exec_done.output == b"now\n"
    assert time.monotonic() - started < 5
    await shell.run("kill %1")
    await shell.close()


async def test_output_between_two_commands_is_not_lost(shared: Sandbox) -> None:
    shell = await shared.shell()
    await shell.run("(sleep 0.2; echo from the background) &")
    await asyncio.sleep(0.5)
    assert b"from the background" in (await shell.run("echo next")).output
    await shell.close()


@pytest.mark.parametrize("command", ["if (((", "echo 'open", "for x in", "}", "<<", "$((", "case x in"])
async def test_syntax_errors_keep_the_shell(shared: Sandbox, command: str) -> None:
    shell = await shared.shell()
    await shell.run("X=kept")
    bad = await shell.run(command)
    assert bad.exit_code != 0
    assert not bad.timed_out
    after = await shell.run("echo $X")
    assert after.output == b"kept\n"
    await shell.close()


async def test_exit_restarts_the_shell_and_reports_it(shared: Sandbox) -> None:
    shell = await shared.shell()
    await shell.run("X=5; cd /tmp")
    ended = await shell.run("exit 7")
    assert (ended.exit_code, ended.shell_restarted) == (7, True)
    fresh = await shell.run('echo "[$X]"; pwd')
    assert fresh.output == b"[]\n" + shared.spec.workdir.encode() + b"\n"
    assert fresh.shell_restarted
    assert not (await shell.run(":")).shell_restarted
    await shell.close()


async def test_set_e_ends_the_shell_as_it_would_a_script(shared: Sandbox) -> None:
    shell = await shared.shell()
    done = await shell.run("set -e; false; echo not reached")
    assert b"not reached" not in done.output
    assert done.exit_code == 1
    assert (await shell.run("echo back")).output == b"back\n"
    await shell.close()


async def test_exec_and_kill_of_the_shell_itself(shared: Sandbox) -> None:
    shell = await shared.shell()
    assert (await shell.run("exec echo replaced")).output == b"replaced\n"
    assert (await shell.run("echo back")).output == b"back\n"
    killed = await shell.run("kill -9 $$")
    assert (killed.exit_code, killed.shell_restarted) == (137, True)
    assert (await shell.run("echo again")).output == b"again\n"
    await shell.close()


async def test_heredocs_and_long_commands(shared: Sandbox) -> None:
    shell = await shared.shell()
    done = await shell.run("cat <<'END'\na $b `c`\nEND\necho after")
    assert done.output == b"a $b `c`\nafter\n"
    body = "x" * 300_000  # far beyond a pipe's buffer and the kernel's longest argument
    assert (await shell.run(f"cat <<'END' | wc -c\n{body}\nEND")).output.strip() == b"300001"
    assert (await shell.run("printf '%s' 'ünïcode \\ \"quotes\"'")).text == 'ünïcode \\ "quotes"'
    await shell.close()


@pytest.mark.parametrize(
    "before", ["true", "IFS=x", "export LC_ALL=C", "export LC_ALL=C.UTF-8", "set -f -u", "(exit 3)"]
)
@pytest.mark.parametrize("size", [1, 40, 5000])
async def test_a_command_arrives_as_it_was_sent(shared: Sandbox, before: str, size: int) -> None:
    shell = await shared.shell()
    await shell.run(before)
    for text in ("x" * size, "ü" * size, "x\\ \t" * size + "  ", "\r\n" * size + "ü \n\n"):
        assert (await shell.run(f"printf %s '{text}' # \\ \t ")).output == text.encode()
    for command in ("\1echo a", "\1" + "echo a; " * size, "\x013\nx"):
        assert b"command not found" in (await shell.run(command)).output
    assert (await shell.run("echo fine")).output == b"fine\n"
    await shell.close()


async def test_nul_is_refused(shared: Sandbox) -> None:
    shell = await shared.shell()
    with pytest.raises(SandboxError, match="NUL"):
        await shell.run("echo a\0b")
    with pytest.raises(SandboxError, match="NUL"):
        await shared.exec(["echo", "a\0b"])
    with pytest.raises(SandboxError, match="word"):
        await shared.exec([])
    assert (await shell.run("echo fine")).output == b"fine\n"
    await shell.close()


async def test_stdin_of_a_shell_is_empty(shared: Sandbox) -> None:
    shell = await shared.shell()
    started = time.monotonic()
    assert (await shell.run("cat; read x; echo $?")).output == b"1\n"
    assert time.monotonic() - started < 5
    await shell.close()


async def test_shells_are_independent(shared: Sandbox) -> None:
    one, two = await asyncio.gather(shared.shell(), shared.shell())
    await one.run("X=1; cd /tmp")
    assert (await two.run("echo [$X]")).output == b"[]\n"
    slow = asyncio.create_task(one.run("sleep 3; echo slow"))
    assert (await two.run("echo fast")).output == b"fast\n"
    assert not slow.done()
    assert (await slow).output == b"slow\n"
    await one.close()
    await two.close()


async def test_terminal(shared: Sandbox) -> None:
    shell = await shared.shell(pty=True)
    done = await shell.run("tty; python3 -c 'import sys; print(sys.stdin.isatty(), sys.stdout.isatty())'; stty size")
    if not shared.isolation.features["terminals"]:
        done = await shell.run(
            "echo nameless; python3 -c 'import sys; print(sys.stdin.isatty(), sys.stdout.isatty())'; stty size"
        )
    lines = done.text.split()
    assert lines[0].startswith("/dev/pts/" if shared.isolation.features["terminals"] else "nameless")
    assert lines[1:3] == ["True", "True"]
    assert all(int(n) > 0 for n in lines[3:5]), "a terminal has a size"
    reading = asyncio.create_task(shell.run("read -p 'name? ' n; echo hello $n"))
    await asyncio.sleep(0.3)
    await shell.write(b"claw\n")
    assert b"hello claw" in (await reading).output
    sleeping = asyncio.create_task(shell.run("sleep 30"))
    await asyncio.sleep(0.3)
    await shell.write(b"\x03")
    assert (await asyncio.wait_for(sleeping, 10)).exit_code == 130
    await shell.close()


# -- timeouts


async def test_exec_timeout_kills_children_and_grandchildren(shared: Sandbox) -> None:
    started = time.monotonic()
    script = "sleep 4321 & (sleep 4322 & sleep 4323) & bash -c 'bash -c \"sleep 4324; :\"; :' & echo started; wait"
    done = await shared.exec(["bash", "-c", script], timeout=0.5)
    assert (done.exit_code, done.timed_out) == (124, True)
    assert done.output.startswith(b"started")
    assert time.monotonic() - started < 5
    assert "sleep 432" not in await processes(shared)


async def test_exec_timeout_kills_orphans_of_the_command(shared: Sandbox) -> None:
    # The parent of the sleep has ended: only its session still ties it to the command.
    done = await shared.exec(["bash", "-c", "(sleep 4325 &); sleep 4326"], timeout=0.5)
    assert done.timed_out
    assert "sleep 432" not in await processes(shared)


async def test_exec_timeout_kills_a_process_that_runs_away(shared: Sandbox) -> None:
    script = (
        "import os, time\nlog = os.open('generations', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "if os.fork(): time.sleep(60)\nwhile True:\n    os.write(log, b'.')\n    if os.fork(): os._exit(0)"
    )
    done = await shared.exec(["python3", "-S", "-c", script], timeout=0.5)
    assert done.timed_out
    sizes = (await shared.exec(["sh", "-c", "wc -c < generations; sleep 0.1; wc -c < generations"])).text.split()
    assert sizes[0] == sizes[1] != "0"


async def test_shell_timeout_keeps_the_shell(shared: Sandbox) -> None:
    shell = await shared.shell()
    await shell.run("X=kept; sleep 4331 &")
    done = await shell.run("echo before; sleep 4332", timeout=0.5)
    assert (done.exit_code, done.timed_out, done.shell_restarted) == (124, True, False)
    assert done.output.startswith(b"before\n")
    assert (await shell.run("echo $X")).output == b"kept\n"
    running = await processes(shared)
    assert "sleep 4331" in running, "jobs of earlier commands go on"
    assert "sleep 4332" not in running
    await shell.run("kill %1")
    await shell.close()


async def test_builtin_busy_loop_ends(shared: Sandbox) -> None:
    shell = await shared.shell()
    started = time.monotonic()
    done = await shell.run("while :; do :; done", timeout=0.5)
    assert (done.exit_code, done.timed_out, done.shell_restarted) == (124, True, True)
    assert time.monotonic() - started < 8
    assert (await shell.run("echo back")).output == b"back\n"
    await shell.close()


async def test_command_that_ignores_signals_ends(shared: Sandbox) -> None:
    done = await shared.exec(["bash", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], timeout=0.5)
    assert (done.exit_code, done.timed_out) == (124, True)


async def test_cancelled_exec_is_killed_and_the_sandbox_goes_on(shared: Sandbox) -> None:
    task = asyncio.create_task(shared.exec(["bash", "-c", "sleep 4341 & sleep 4342"]))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.2)
    assert "sleep 434" not in await processes(shared)


async def test_cancelled_shell_command_keeps_the_sandbox(shared: Sandbox) -> None:
    shell = await shared.shell()
    task = asyncio.create_task(shell.run("sleep 4351", timeout=1))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    other = await shared.shell()
    assert (await other.run("echo fine")).output == b"fine\n"
    await shell.close()
    await other.close()


# -- output


async def test_output_cap_keeps_both_ends(shared: Sandbox) -> None:
    done = await shared.exec(["bash", "-c", "echo first; head -c 1000000 /dev/zero; echo last"], max_output=1000)
    assert done.output.startswith(b"first\n")
    assert done.output.endswith(b"last\n")
    assert b"left out" in done.output
    assert len(done.output) < 1000 + 100
    assert done.omitted_bytes == 1000000 + 6 + 5 - 1000


async def test_streams_apart(shared: Sandbox) -> None:
    done = await shared.exec(["bash", "-c", "echo out; echo err >&2; exit 3"], stdout_only=True)
    assert (done.output, done.stderr, done.exit_code) == (b"out\n", b"err\n", 3)
    done = await shared.exec(["bash", "-c", "echo out; echo err >&2; echo out"])
    assert (done.output, done.stderr) == (b"out\nerr\nout\n", b"")


async def test_binary_and_invalid_utf8_output(shared: Sandbox) -> None:
    everything = bytes(range(256)) * 16
    done = await shared.exec(["cat"], stdin=everything)
    assert done.output == everything
    shell = await shared.shell()
    done = await shell.run("printf '\\xff\\xfe\\x00ok'")
    assert done.output == b"\xff\xfe\x00ok"
    assert done.text == "\\xff\\xfe\x00ok"
    await shell.close()


async def test_forged_answers_are_only_output(shared: Sandbox) -> None:
    shell = await shared.shell()
    forged = "printf '\\0\\0\\0x\\0' 2>&1; printf '0\\0/\\0' >&199; echo D{\\\"code\\\":0} >&198"
    done = await shell.run(f"{forged}; (exit 3)")
    assert done.exit_code == 3
    done = await shell.run("printf '\\x00\\x00\\x00\\x0aD\\x00\\x00\\x00\\x01{\"code\":0}'; exit 5")
    assert done.exit_code == 5
    done = await shell.run("__clawgym_last=0; __clawgym_nonce=forged; __clawgym_cmd='echo x'; (exit 4)")
    assert (done.exit_code, done.output) == (4, b"")
    await shell.close()


async def test_flood_costs_bounded_time_and_memory(shared: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    done = await shared.exec(["bash", "-c", "yes | head -c 200M"], timeout=60)
    assert time.monotonic() - started < 45
    assert done.exit_code == 0
    assert done.omitted_bytes + 64 * 1024 == 200 * 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def test_endless_flood_ends_with_the_timeout(shared: Sandbox) -> None:
    shell = await shared.shell()
    started = time.monotonic()
    done = await shell.run("yes", timeout=0.5)
    assert (done.exit_code, done.timed_out) == (124, True)
    assert time.monotonic() - started < 8
    assert (await shell.run("echo back")).output.endswith(b"back\n")
    await shell.close()


async def test_flood_from_the_background_does_not_starve_the_shell(shared: Sandbox) -> None:
    shell = await shared.shell()
    await shell.run("yes &")
    started = time.monotonic()
    done = await shell.run("echo marker; kill %1; wait %1", max_output=100_000)
    assert time.monotonic() - started < 10
    assert len(done.output) < 110_000
    assert (await shell.run("echo calm")).output.endswith(b"calm\n")
    await shell.close()


# -- what a command gets


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 255", 255),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("no-such-command", 127),
        ("/etc", 126),
    ],
)
async def test_exit_codes(shared: Sandbox, script: str, code: int) -> None:
    assert (await shared.exec(["bash", "-c", script])).exit_code == code


async def test_missing_program_and_folder(shared: Sandbox) -> None:
    missing = await shared.exec(["/no/such/program"])
    assert missing.exit_code == 127
    assert b"No such file" in missing.output
    assert (await shared.exec(["true"], cwd="/no/such/folder")).exit_code == 126


async def test_stdin_data(shared: Sandbox) -> None:
    data = os.urandom(3_000_000)
    done = await shared.exec(["sha256sum"], stdin=data)
    import hashlib

    assert done.text.split()[0] == hashlib.sha256(data).hexdigest()
    assert (await shared.exec(["wc", "-c"])).output.strip() == b"0"
    # A program that does not read its input is no reason to hang.
    assert (await shared.exec(["true"], stdin=data)).exit_code == 0


async def test_environment_is_clean(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWGYM_TEST_SECRET", "hunter2")
    sandbox = await backend.create(SandboxSpec(env={"GIVEN": "a b=c"}))
    try:
        done = await sandbox.exec(["env", "-0"], env={"MORE": "x\ny"})
        held = dict(entry.split("=", 1) for entry in done.text.split("\0") if entry)
        allowed = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TERM", "TZ", "DEBIAN_FRONTEND"}
        allowed |= {"PIP_BREAK_SYSTEM_PACKAGES", "PIP_ROOT_USER_ACTION", "HOSTNAME", "PWD", "GIVEN", "MORE"}
        assert set(held) <= allowed
        assert held["GIVEN"] == "a b=c"
        assert held["MORE"] == "x\ny"
        shell = await sandbox.shell()
        assert b"GIVEN=a b=c" in (await shell.run("env")).output
        everywhere = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline"])
        assert b"hunter2" not in everywhere.output
    finally:
        await sandbox.close()


_DESCRIPTORS = """
import os
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
print([fd for fd in range(5000) if is_open(fd)])
"""


async def test_no_descriptor_is_inherited(backend: Backend, tmp_path: Path) -> None:
    secret = tmp_path / "descriptor-secret"
    secret.write_text("hunter2")
    fd = os.open(secret, os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        sandbox = await backend.create(SandboxSpec())
        try:
            done = await sandbox.exec(["sh", "-c", "ls -l /proc/[0-9]*/fd/"])
            assert b"descriptor-secret" not in done.output
            own = await sandbox.exec(["python3", "-c", _DESCRIPTORS])
            assert own.output == b"[0, 1, 2]\n"
            shell = await sandbox.shell()
            assert (await shell.run(f"python3 -c '{_DESCRIPTORS}'")).output == b"[0, 1, 2]\n"
        finally:
            await sandbox.close()
    finally:
        os.close(fd)


async def test_user_host_name_and_folder(shared: Sandbox, traits: Traits) -> None:
    uid = int((await shared.exec(["id", "-u"])).output)
    assert (uid == 0) is traits.root_inside
    if shared.isolation.features["hostname"]:
        assert (await shared.exec(["hostname"])).output == b"box\n"
    done = await shared.exec(["sh", "-c", "pwd; echo ~; umask"])
    assert done.output == b"/root\n/root\n0022\n"
    for name in ("/root", "/tmp", "/var/tmp", "/dev/shm"):
        assert (await shared.exec(["sh", "-c", f"echo x > {name}/w && rm {name}/w"])).exit_code == 0, name
