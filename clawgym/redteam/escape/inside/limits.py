"""Rows 29-33: use slightly more than the limits allow, then stop. Every process ends by itself within seconds."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time

from .kit import blocked, call, error_name, in_child, opened, probe, skipped

_MiB = 1 << 20


_held = []


def _hold(mib, flags=mmap.MAP_PRIVATE):
    """Allocate ``mib`` MiB, 4 at a time, and keep them until the process ends. Returns how many were allocated."""
    try:
        for _ in range(0, mib, 4):
            piece = mmap.mmap(-1, 4 * _MiB, flags | mmap.MAP_ANONYMOUS)
            for offset in range(0, 4 * _MiB, 4096):
                piece[offset] = 1
            _held.append(piece)
    except (OSError, MemoryError):
        pass
    return 4 * len(_held)


@probe("29a", "more memory than the limit, in one process", bare=False)
def memory(bait):
    def work():
        had = _hold(bait["mib"])
        text = f"{had} MiB of {bait['mib']} were had (limit {bait['limit']})"
        return opened(text) if had >= bait["mib"] else blocked(text)

    return in_child(work)


@probe("29d", "more memory than the limit, in mappings to be shared", bare=False)
def memory_mapped(bait):
    def work():
        had = _hold(bait["mib"], mmap.MAP_SHARED)
        text = f"{had} MiB of {bait['mib']} were had (limit {bait['limit']})"
        return opened(text) if had >= bait["mib"] else blocked(text)

    return in_child(work)


@probe("29b", "more memory than the limit, in several processes", bare=False)
def memory_shared_out(bait):
    readers = []
    wait, release = os.pipe()
    for _ in range(8):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os.close(release)
            os.write(writer, str(_hold(bait["mib"] // 8)).encode())
            os.close(writer)
            os.read(wait, 1)  # keep it until all children have theirs
            os._exit(0)
        os.close(writer)
        readers.append((reader, pid))
    had = 0
    for reader, _ in readers:
        had += int(os.read(reader, 100) or b"0")
        os.close(reader)
    os.close(release)
    killed = sum(os.waitpid(pid, 0)[1] != 0 for _, pid in readers)
    text = f"{had} MiB of {bait['mib']} were had in 8 processes, {killed} killed (limit {bait['limit']})"
    return opened(text) if had >= bait["mib"] and not killed else blocked(text)


@probe("29c", "more memory than the limit, in files that live in memory (memfd)", bare=False)
def memory_files(bait):
    def work():
        fds, had, block = [], 0, b"x" * _MiB
        while had < bait["mib"]:
            fd, error = call("memfd_create", b"probe", 0)
            if error:
                return blocked(f"memfd_create: {error}")
            fds.append(fd)
            for _ in range(8):  # below any limit of one file
                os.write(fd, block)
                had += 1
        return opened(f"{had} MiB were had (limit {bait['limit']})")

    return in_child(work)


@probe("30a", "more processes than the limit", bare=False)
def forks(bait):
    children, why = [], "all"
    for _ in range(bait["processes"]):
        try:
            pid = os.fork()
        except OSError as error:
            why = error_name(error)
            break
        if pid == 0:
            signal.alarm(20)
            time.sleep(10)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    text = f"{len(children)} of {bait['processes']} processes ({why}; limit {bait['limit']})"
    return opened(text) if len(children) == bait["processes"] else blocked(text)


@probe("30b", "more threads than the limit", bare=False)
def threads(bait):
    import threading

    def work():
        stop, made, why = threading.Event(), 0, "all"
        threading.stack_size(64 * 1024)
        for _ in range(bait["processes"]):
            try:
                threading.Thread(target=stop.wait, args=(10,), daemon=True).start()
            except (RuntimeError, MemoryError):
                why = "refused"
                break
            made += 1
        stop.set()
        text = f"{made} of {bait['processes']} threads ({why}; limit {bait['limit']})"
        return opened(text) if made == bait["processes"] else blocked(text)

    return in_child(work)


@probe("31a", "more processor time than the limit", bare=False)
def processor(bait):
    limit = bait["limit"]
    rate = 0.0
    for _ in range(3):
        rate = max(rate, _spin(2))
        if rate >= 0.8 * limit:
            break
    text = f"{rate:.2f} processors were had (limit {limit})"
    if rate > 1.25 * limit:
        return opened(text)
    # Load from other processes looks like a limit.
    return blocked(text) if rate >= 0.8 * limit else skipped(f"{text}: the machine is too busy to tell")


def _spin(seconds):
    """CPUs used by eight busy processes, each in its own session (schedulers with autogroups share by session)."""
    reader, writer = os.pipe()
    children = []
    start = time.monotonic()
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.alarm(20)
            while time.monotonic() - start < seconds:
                sum(range(1000))
            os.write(writer, f"{time.process_time()} ".encode())
            os._exit(0)
        children.append(pid)
    os.close(writer)
    for pid in children:
        os.waitpid(pid, 0)
    used = sum(float(word) for word in os.read(reader, 1000).split())
    os.close(reader)
    return used / (time.monotonic() - start)


@probe("32a", "more disk than the limit", bare=False)
def disk(bait):
    had, block = 0, b"x" * _MiB
    names = []
    try:
        while had < bait["disk_mib"]:
            name = f"fill-{had}"
            names.append(name)
            with open(name, "wb", buffering=0) as file:
                for _ in range(4):
                    if file.write(block) != _MiB:
                        return blocked(f"{had} MiB were had (limit {bait['limit']}): a short write")
                    had += 1
    except OSError as error:
        return blocked(f"{had} MiB were had (limit {bait['limit']}): {error_name(error)}")
    finally:
        for name in names:
            if os.path.exists(name):
                os.unlink(name)
    return opened(f"{had} MiB were had (limit {bait['limit']})")


@probe("32b", "a file larger than the limit (sparse: it takes no room)", bare=False)
def big_file(bait):
    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        fd = os.open("sparse", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, bait["file_mib"] * _MiB + 1)
        finally:
            os.close(fd)
            os.unlink("sparse")
        return opened(f"a file of more than {bait['file_mib']} MiB was made")

    return in_child(work)


@probe("32c", "more files than the limit of the file system (empty ones)", bare=False)
def many_files(bait):
    made, why = 0, None
    os.makedirs("many", exist_ok=True)
    try:
        for number in range(bait["files"]):
            os.close(os.open(f"many/{number}", os.O_WRONLY | os.O_CREAT, 0o600))
            made += 1
    except OSError as error:
        why = error_name(error)
    for number in range(made):
        os.unlink(f"many/{number}")
    os.rmdir("many")
    return blocked(f"{made} files were made: {why}") if why else opened(f"{made} files were made")


@probe("33a", "a daemon that outlives its shell", bare=False)
def daemon(bait):
    _become_daemon(bait, hop=False)
    return opened("started; the host looks for it")


@probe("33b", "a daemon that forks and exits without pause, to be missed by a kill", bare=False)
def hopper(bait):
    _become_daemon(bait, hop=True)
    return opened("started; the host looks for it")


def _become_daemon(bait, hop):
    """Leave a process that writes to a file for some seconds; its command line contains the host's mark."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    end = time.monotonic() + bait["seconds"]
    code = (
        "import os,sys,time\n"
        "end=float(sys.argv[2])\n"
        "while time.monotonic()<end:\n"
        "    open('beat','a').write('x')\n"
        "    if sys.argv[3]=='hop' and os.fork(): os._exit(0)\n"
        "    time.sleep(0.002)\n"
    )
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, bait["mark"], str(end), "hop" if hop else "stay"])
