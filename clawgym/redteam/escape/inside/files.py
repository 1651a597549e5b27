"""Rows 1, 2, 6, 10-16: the host's files, devices, mounts and settings."""

from __future__ import annotations

import ctypes
import os
import stat

from .kit import (
    blocked,
    call,
    can_open,
    error_name,
    in_child,
    opened,
    probe,
    processes,
    reach,
    read,
    skipped,
    worst,
)

_UP = "/.." * 40


def _secret_at(path, bait):
    where = path.replace(_UP, "/../..").replace(bait["path"], "/SECRET")
    try:
        found = bait["secret"].encode() in read(path)
    except OSError as error:
        return blocked(f"{where}: {error_name(error)}")
    return opened(f"read the host's secret at {where}") if found else blocked("another file is there")


@probe("1a", "read a secret of the host by its path")
def by_path(bait):
    return _secret_at(bait["path"], bait)


@probe("1b", "the same through /proc/PID/root of every process")
def by_root(bait):
    pids = processes()
    if not pids:
        return blocked("no /proc")
    return worst(_secret_at(f"/proc/{pid}/root{bait['path']}", bait) for pid in pids)


@probe("1c", "the same through /proc/PID/cwd and .. of every process")
def by_cwd(bait):
    pids = processes()
    if not pids:
        return blocked("no /proc")
    return worst(_secret_at(f"/proc/{pid}/cwd{_UP}{bait['path']}", bait) for pid in pids)


@probe("1d", "see the host's users and machine id instead of the sandbox's own")
def by_identity(bait):
    import hashlib

    for path, digest in bait["digests"].items():
        try:
            if hashlib.sha256(read(path, 1 << 20)).hexdigest() == digest:
                return opened(f"{path} is the host's")
        except OSError:
            pass
    return blocked("other files, or none, in their places")


@probe("2a", "leave a root by chroot into a folder below and climbing out")
def chroot_climb(bait):
    os.makedirs("climb", exist_ok=True)

    def climb():
        os.chroot("climb")
        for _ in range(40):
            os.chdir("..")
        os.chroot(".")
        return _secret_at(bait["path"], bait)

    return in_child(climb)


@probe("2b", "leave a root by an open descriptor of a folder above it")
def chroot_descriptor(bait):
    os.makedirs("climb", exist_ok=True)
    above = os.open("/", os.O_RDONLY)

    def climb():
        os.chroot("climb")
        os.fchdir(above)
        for _ in range(40):
            os.chdir("..")
        os.chroot(".")
        return _secret_at(bait["path"], bait)

    return in_child(climb)


@probe("2c", "climb over / with ..")
def climb_plain(bait):
    return _secret_at(_UP + bait["path"], bait)


@probe("6a", "connect to a unix socket of the host by its path")
def host_socket(bait):
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(3)
        sock.connect(bait["unix_path"])
        if sock.recv(100).decode(errors="replace") == bait["secret"]:
            return opened("the host's listener answered")
    return blocked("another listener")


@probe("6b", "find the socket of a container engine or of the system bus")
def engine_socket(bait):
    import socket

    def connect(path):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(3)
            try:
                sock.connect(path)
            except OSError as error:
                return blocked(f"{path}: {error_name(error)}")
        return opened(f"connected to {path}")

    names = (
        "docker.sock",
        "containerd/containerd.sock",
        "dbus/system_bus_socket",
        "systemd/private",
        "podman/podman.sock",
    )
    return worst(connect(f"{top}/{name}") for top in ("/run", "/var/run") for name in names)


@probe("10a", "mount a file system", bare=False)
def mount(bait):
    os.makedirs("target", exist_ok=True)
    return reach("mount", b"none", b"target", b"clawgym-no-such-type", 0, None)


@probe("10b", "remount", bare=False)
def remount(bait):
    os.makedirs("target", exist_ok=True)  # not a mount point: fails behind the permission check
    return reach("mount", None, b"target", None, 32, None)


@probe("10c", "unmount", bare=False)
def unmount(bait):
    os.makedirs("target", exist_ok=True)
    return reach("umount2", b"target", 0)


@probe("10d", "pivot_root", bare=False)
def pivot(bait):
    return reach("pivot_root", b"/no-such-folder", b"/no-such-folder")


@probe("12a", "make a node of the host's disk and read it")
def disk_node(bait):
    path = "probe-disk"
    try:
        os.mknod(path, stat.S_IFBLK | 0o600, bait["disk"])
        return can_open(path, os.O_RDONLY)
    finally:
        if os.path.lexists(path):
            os.unlink(path)


@probe("12b", "make a device node that works")
def null_node(bait):
    path = "probe-null"  # 1:3, /dev/null: harmless, and as much a device as any
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        return can_open(path, os.O_RDONLY)
    finally:
        if os.path.lexists(path):
            os.unlink(path)


@probe("13a", "open_by_handle_at")
def handle(bait):
    return reach("open_by_handle_at", os.open("/", os.O_RDONLY), None, os.O_RDONLY)


@probe("13b", "read a secret of the host by its file handle")
def handle_secret(bait):
    if not bait["handle"]:
        return skipped("the host's file system gives no handles")
    raw = bytes.fromhex(bait["handle"])

    def through(folder):
        fd = os.open(folder, os.O_RDONLY)
        try:
            result, error = call("open_by_handle_at", fd, ctypes.create_string_buffer(raw, len(raw)), os.O_RDONLY)
        finally:
            os.close(fd)
        if error:
            return blocked(f"open_by_handle_at: {error}")
        found = bait["secret"].encode() in os.read(result, 4096)
        return opened(f"read the host's secret by its handle through {folder}") if found else blocked("another file")

    return worst(through(folder) for folder in ("/", "/usr", "/tmp", ".") if os.path.isdir(folder))


def _write_back(path):
    """Write back the present value: nothing changes even if it works."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        return blocked(f"{path}: {error_name(error)}")
    try:
        value = os.read(fd, 4096)
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, value)
    except OSError as error:
        return blocked(f"{path}: {error_name(error)}")
    finally:
        os.close(fd)
    return opened(f"{path} was written (its own value)")


@probe("14a", "write kernel.core_pattern (a program that the host runs as root)", bare=False)
def core_pattern(bait):
    return _write_back("/proc/sys/kernel/core_pattern")


@probe("14b", "write kernel.modprobe, poweroff_cmd, panic_on_oops, overcommit_memory", bare=False)
def settings(bait):
    names = ("kernel/modprobe", "kernel/poweroff_cmd", "kernel/panic_on_oops", "vm/overcommit_memory")
    return worst(_write_back(f"/proc/sys/{name}") for name in names)


@probe("14c", "open any setting below /proc/sys, or binfmt_misc, for writing", bare=False)
def any_setting(bait):
    found = []
    count = 0
    for folder, _, names in os.walk("/proc/sys"):
        for name in names:
            count += 1
            path = os.path.join(folder, name)
            if can_open(path, os.O_WRONLY)[0] == "open":
                found.append(path)
    if found:
        return opened(f"{len(found)} of {count} can be opened for writing: {', '.join(found[:3])}")
    return blocked(f"none of {count} can be opened for writing")


@probe("14d", "make a pressure trigger, which takes the kernel ten milliseconds to take away again")
def pressure_trigger(bait):
    def make(name):
        fd = os.open(f"/proc/pressure/{name}", os.O_RDWR)
        try:
            os.write(fd, b"some 500000 2000000\0")
        finally:
            os.close(fd)
        return opened(f"a trigger on /proc/pressure/{name}")

    def tried(name):
        try:
            return make(name)
        except OSError as error:
            return blocked(f"{name}: {error_name(error)}")

    return worst(tried(name) for name in ("cpu", "io", "memory", "irq"))


@probe("14e", "open anything in /proc for writing beside one's own processes and /proc/sys", bare=False)
def any_proc_file(bait):
    def tried(path):
        try:
            held = os.fstat(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
        except OSError as error:
            return blocked(error_name(error))
        return blocked("/dev/null lies there") if held.st_rdev == os.makedev(1, 3) else opened(f"{path} can be opened")

    paths = [path for path in _machine_files() if os.path.basename(path) != "sysrq-trigger"]
    return worst(map(tried, paths)) if paths else blocked("no /proc")


def _machine_files():
    """The files of /proc that belong to no process and are not below /proc/sys."""
    if not os.path.isdir("/proc"):
        return
    skipped = ("sys", "self", "thread-self", "net", "mounts")
    for name in sorted(os.listdir("/proc")):
        if name.isdigit() or name in skipped:
            continue
        if os.path.isdir(f"/proc/{name}"):
            for folder, _, files in os.walk(f"/proc/{name}"):
                yield from (os.path.join(folder, file) for file in sorted(files))
        else:
            yield f"/proc/{name}"


@probe("1e", "read how the machine was started, its disks, interrupts, PCI bus, keys (/proc)")
def machine(bait):
    needed = ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "swaps", "uptime", "version", "vmstat")
    # Reading the kernel's log consumes lines; a memory image has no end.
    never = ("kmsg", "kcore", "kpagecount", "kpageflags", "kpagecgroup", "sysrq-trigger")

    def tried(path):
        try:
            return opened(f"{path} has something in it") if read(path) else blocked("empty files")
        except OSError as error:
            return blocked(error_name(error))

    paths = [path for path in _machine_files() if os.path.basename(path) not in (*needed, *never)]
    return worst(map(tried, paths)) if paths else blocked("no /proc")


@probe("1f", "find ClawGym itself: its generators, checkers and reference solutions", bare=False)
def own_distribution(bait):
    for top in ("/usr", "/opt", "/srv"):
        for folder, below, names in os.walk(top):
            if any(name == "clawgym" or name.startswith(("clawgym-", "clawgym_")) for name in [*below, *names]):
                return opened(f"in {folder}")
    return blocked("nothing of that name")


@probe("1g", "see Python and Node packages that nobody asked for, and what the machine's users put into /usr")
def packages(bait):
    asked = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel", "__pycache__")
    found = []
    for folder, below, names in os.walk("/usr"):
        if os.path.basename(folder) in ("site-packages", "dist-packages"):
            unasked = [n for n in [*below, *names] if not {n.partition("-")[0], n.partition(".")[0]} & {*asked}]
            found += [os.path.join(folder, name) for name in sorted(unasked)]
            below[:] = []
        elif folder == "/usr/lib/node_modules":
            found += [os.path.join(folder, name) for name in sorted(below) if name not in ("npm", "corepack")]
            below[:] = []
        elif folder.startswith(("/usr/local", "/usr/src")):
            found += [p for name in sorted(names) if not os.path.islink(p := os.path.join(folder, name))]
    return opened(f"{len(found)}: {', '.join(found[:4])}") if found else blocked("none")


@probe("15a", "open /proc/sysrq-trigger for writing")
def sysrq(bait):
    return can_open("/proc/sysrq-trigger", os.O_WRONLY)


@probe("15b", "read the kernel's memory: /proc/kcore, /dev/mem, /dev/kmem, /dev/port")
def kernel_memory(bait):
    return worst(can_open(path, os.O_RDONLY) for path in ("/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port"))


@probe("15c", "open a disk in /dev")
def disks(bait):
    def is_block(name):
        try:
            return stat.S_ISBLK(os.lstat(f"/dev/{name}").st_mode)
        except OSError:
            return False

    found = [name for name in sorted(os.listdir("/dev")) if is_block(name)]
    if not found:
        return blocked("no block device in /dev")
    return worst(can_open(f"/dev/{name}", os.O_RDONLY) for name in found)


@probe("15d", "find a device in /dev beyond null, zero, full, random, tty and ptmx")
def devices(bait):
    usual = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "console")
    found = []
    for folder in ("/dev", "/dev/net", "/dev/mapper", "/dev/input", "/dev/dri", "/dev/vfio"):
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            path = f"{folder}/{name}"
            mode = os.lstat(path).st_mode
            # Never opened: opening /dev/watchdog starts it.
            if name not in usual and (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) and os.access(path, os.R_OK):
                found.append(path)
    return opened(f"readable: {', '.join(found[:6])}") if found else blocked("none beyond the usual")


@probe("16a", "open anything below /sys for writing", bare=False)
def sys_writable(bait):
    count = 0
    for folder, below, names in os.walk("/sys"):
        # Opening files of debugfs and tracefs may have side effects.
        below[:] = sorted(name for name in below if name not in ("debug", "tracing"))
        for name in names:
            count += 1
            verdict, evidence = can_open(os.path.join(folder, name), os.O_WRONLY)
            if verdict == "open":
                return opened(evidence)
            if count > 20_000:
                return blocked("none of the first 20000 files")
    return blocked(f"none of {count} files" if count else "/sys is empty or missing")


@probe("16b", "read or write the kernel's log at /dev/kmsg")
def kmsg(bait):
    return worst(can_open("/dev/kmsg", flags) for flags in (os.O_RDONLY, os.O_WRONLY))


@probe("16c", "move a process into another cgroup")
def cgroups(bait):
    found = []
    try:
        mounts = read("/proc/self/mounts", 1 << 20).decode().splitlines()
    except OSError:
        mounts = []
    for line in mounts:
        words = line.split()
        if len(words) > 2 and words[2] in ("cgroup", "cgroup2"):
            found += [f"{words[1]}/cgroup.procs", f"{words[1]}/release_agent"]
    if not found:
        return blocked("no cgroup file system is mounted")
    return worst(can_open(path, os.O_WRONLY) for path in found)
