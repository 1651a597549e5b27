"""Process 1 of a sandbox: runs commands for the host over one stream, and ends when the stream ends.

It is forked from the supervisor once the child has entered the sandbox. In a Docker container it is started from its
source (``python3 -I -S -c``), with the text of ``trees.py`` in place of the import
(:func:`clawgym.sandbox.link.as_text`). So: standard library only, few imports, one thread, nothing imported later.
Every program in the sandbox can reach it, so the host does not trust its answers (``link.py``).

Frames, in both directions: ``>IBI`` (payload length, op, channel) and the payload.

host -> guest   X exec {argv,cwd,env,timeout,cap,stdin,split}   I input bytes   E end of input
                S shell {pty,cwd,env}   R run (RUN and the command)   K kill and forget the channel
                W files (entries)   w end of files   N make a socket (PORT: listening there; 0: a new one),
                which is sent with the answer   P programs, which are sent as output
guest -> host   H hello {pid}   O output bytes   L stderr bytes   D done (DONE and the working folder)
                F failed {error,cause}
"""

# The C halves of signal, socket, collections, struct and json: the Python halves would double the start-up time.
import _signal as signal  # pyright: ignore[reportMissingImports]
import errno
import fcntl
import os
import resource
import select
import sys
import termios
import time
from _collections import deque  # pyright: ignore[reportMissingImports]
from _json import encode_basestring_ascii, make_scanner
from _socket import AF_INET, AF_UNIX, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket
from _struct import Struct, pack

from clawgym.sandbox.inside.trees import remove

IN, OUT = 0, 1
HEADER = Struct(">IBI")
RUN = Struct(">dI8s")  # timeout, cap, nonce
DONE = Struct(">IBQd")  # exit code, flags (1 timed out, 2 restarted), bytes left out, seconds
ENTRY = Struct(">II")  # in W: length of the JSON, length of the content
PORT = Struct(">H")
PROGRAMS = Struct(">I")  # most bytes of the answer
LONGEST_POLL = 1e6  # seconds; poll() takes no more milliseconds than fit into 32 bits
KILL_ROUNDS = 20  # a fork bomb must not keep this process busy
KILL_SECONDS = 2.0  # the longest wait until killed processes have ended: on a busy machine each needs a turn to end
CLEAR_SECONDS = 10.0  # time limit to remove a tree that is in the way of a file
PROC = -1  # descriptor of /proc, of the host's where the sandbox has none; this process alone has it
HOSTS_PROC = False
PTMX = -1  # descriptor of the host's /dev/ptmx, where the sandbox has none
TICKS = os.sysconf("SC_CLK_TCK")
OOM = -1  # descriptor of this process's oom_score_adj
INTERPRETER = None  # runs Python programs in a fork of this process (linux/warm.py), where the sandbox asks for it
PYTHON = ["python3", "-I", "-S", "-B", "-c"]  # how their commands begin
# bash reads a pipe byte by byte, one system call each, unless it knows the number of characters.
DRIVER = r"""__clawgym_rc() { return "$1"; }
__clawgym_last=0
while IFS= read -r -d '' -u 198 __clawgym_cmd; do
  case $__clawgym_cmd in $'\1'*) read -r -N "${__clawgym_cmd:1}" -u 198 __clawgym_cmd || exit ;; esac
  if [ "$__clawgym_last" != 0 ]; then __clawgym_cmd="__clawgym_rc $__clawgym_last; $__clawgym_cmd"; fi
  eval "$__clawgym_cmd" 198<&- 199>&-
  __clawgym_last=$?
  read -r -N 8 -u 198 __clawgym_nonce || exit
  printf '%s\0%s\0%s\0%s\0' "$__clawgym_nonce" "$__clawgym_last" "$PWD" "$!" >&199
done"""


class _Json:
    """The attributes that the C scanner reads; the defaults of json.loads."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant, memo = float, int, float, {}


scan = make_scanner(_Json)  # pyright: ignore[reportArgumentType]


def loads(data):
    return scan(data if isinstance(data, str) else data.decode(), 0)[0]


def dumps(fields):
    """A flat object whose values are str or int, as JSON."""
    parts = []
    for key, value in fields.items():
        text = encode_basestring_ascii(value) if isinstance(value, str) else repr(value)
        parts.append(f"{encode_basestring_ascii(key)}: {text}")
    return "{" + ", ".join(parts) + "}"


class Tail:
    """Keeps both ends of a stream: the first and the last ``cap // 2`` bytes."""

    def __init__(self, cap):
        self.half, self.head, self.tail, self.kept, self.total = max(cap // 2, 1), bytearray(), deque(), 0, 0

    def add(self, data):
        self.total += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail.append(data)
            self.kept += len(data)
            while self.kept - len(self.tail[0]) >= self.half:
                self.kept -= len(self.tail.popleft())

    def take(self):
        tail = b"".join(self.tail)[-self.half :]
        omitted = self.total - len(self.head) - len(tail)
        if omitted > 0:
            return bytes(self.head) + b"\n[... %d bytes left out ...]\n" % omitted + tail, omitted
        return bytes(self.head) + tail, 0


class Job:
    """A running program or shell: its process, its output, what is still to be written to it."""

    def __init__(self, channel, pid, out, split=None):
        self.channel, self.pid, self.out, self.err = channel, pid, out, split
        self.stdin = None
        self.pending = deque()
        self.end_input = False
        self.buffer = None
        self.errors = None
        self.between = None  # output of background jobs between two commands of a shell
        self.deadline = None
        self.timed_out = False
        self.started = time.monotonic()
        self.status = None  # exit code once reaped
        self.shell = None  # its options, for shells
        self.ctl: int | None = None
        self.report: int | None = None
        self.replies = b""
        self.nonce = None
        self.before = frozenset()  # the shell's children when the command began
        self.background = False  # whether it has ever had a background job
        self.killed_at = None
        self.restarted = False


jobs = {}
outbox = deque()
ready = {}  # descriptor -> events of the last poll
where = {}  # descriptor -> its job, for those in the poller
folders = {}  # channel of a W request -> folders whose modes and times are set at the end, or the error text
poller = select.poll()


def watch(fd, job, events=select.POLLIN):
    where[fd] = job
    poller.register(fd, events)


def drop(fd):
    if where.pop(fd, None) is not None:
        poller.unregister(fd)
    os.close(fd)


def send(op: str, channel: int, payload: "bytes | dict" = b""):
    if not isinstance(payload, bytes):
        payload = dumps(payload).encode()
    outbox.append(HEADER.pack(len(payload), ord(op), channel) + payload)


def spawn(argv, env, cwd, fds, terminal=False):
    """fork, move ``fds`` (target -> source) into place, exec. The OOM killer takes these children first."""
    set_oom(b"500")
    try:
        pid = os.fork()
    finally:
        set_oom(b"0")
    if pid:
        return pid
    try:
        os.setsid()
        for name in ("SIGPIPE", "SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        # Move the sources away from the targets first.
        moved = {}
        for target, source in fds.items():
            high = source
            while high in fds or high < 3:
                high = os.dup(high)
            moved[target] = high
        for target, source in moved.items():
            os.dup2(source, target)
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if os.getuid() != os.geteuid():  # programs of a chroot sandbox must not be able to signal this process
            os.setresuid(os.geteuid(), os.geteuid(), os.geteuid())
        os.closerange(3, 198)
        os.closerange(200 if 199 in fds else 198, 1024)
        try:
            os.chdir(cwd)
        except OSError as error:
            os.write(2, (f"cannot enter {cwd}: {error.strerror}\n").encode())
            os._exit(126)
        if INTERPRETER is not None and argv[:5] == PYTHON and len(argv) > 5:
            INTERPRETER(argv, env)
        execute(argv, env)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            os._exit(126)
    finally:
        os._exit(127)


def execute(argv, env):
    """os.execvpe without its imports."""
    if "/" in argv[0]:
        os.execve(argv[0], argv, env)
    denied = None
    for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
        try:
            os.execve(f"{folder or '.'}/{argv[0]}", argv, env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                denied = denied or error
    raise denied or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def set_oom(value):
    """Set oom_score_adj, which the next child inherits. It is reset afterwards, which a privileged process could
    not."""
    try:
        os.write(OOM, value)
    except OSError:
        pass


def environment(extra):
    env = dict(os.environ)
    env.update(extra or {})
    return env


def start_exec(channel, o):
    fds, keep, close = {}, {}, []
    out_r, out_w = os.pipe()
    close.append(out_w)
    err_r = None
    fds[1] = fds[2] = out_w
    if o.get("split"):
        err_r, err_w = os.pipe()
        fds[2] = err_w
        close.append(err_w)
    if o.get("stdin"):
        in_r, keep["stdin"] = os.pipe()
    else:
        in_r = os.open("/dev/null", os.O_RDONLY)
    fds[0] = in_r
    close.append(in_r)
    try:
        pid = spawn(o["argv"], environment(o.get("env")), o.get("cwd") or "/", fds)
    except OSError:
        for fd in (out_r, err_r, keep.get("stdin")):
            if fd is not None:
                os.close(fd)
        raise
    finally:
        for fd in close:
            os.close(fd)
    job = jobs[channel] = Job(channel, pid, out_r, err_r)
    job.stdin = keep.get("stdin")
    begin(job, o["timeout"], o["cap"])
    for fd in (out_r, err_r):
        if fd is not None:
            os.set_blocking(fd, False)
            watch(fd, job)
    if job.stdin is not None:
        os.set_blocking(job.stdin, False)


def begin(job, timeout, cap):
    job.buffer = Tail(cap)
    job.errors = Tail(cap) if job.shell is None else None
    if job.between is not None:
        job.buffer.add(job.between.take()[0])
        job.between = None
    job.started = time.monotonic()
    job.deadline = job.started + timeout
    job.timed_out = False
    job.killed_at = None


def start_shell(job_or_channel, o):
    ctl_r, ctl_w = os.pipe()
    rep_r, rep_w = os.pipe()
    if o.get("pty"):
        out, slave = open_terminal()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, pack("HHHH", 24, 80, 0, 0))
        inner = {0: slave, 1: slave, 2: slave}
        extra = [slave]
    else:
        out, out_w = os.pipe()
        null = os.open("/dev/null", os.O_RDONLY)
        inner = {0: null, 1: out_w, 2: out_w}
        extra = [null, out_w]
    inner.update({198: ctl_r, 199: rep_w})
    try:
        argv = ["bash", "--noprofile", "--norc", "-c", DRIVER, "bash"]
        pid = spawn(argv, environment(o.get("env")), o.get("cwd") or "/", inner, terminal=bool(o.get("pty")))
    finally:
        for fd in (ctl_r, rep_w, *extra):
            os.close(fd)
    for fd in (ctl_w, rep_r, out):
        os.set_blocking(fd, False)
    if isinstance(job_or_channel, Job):
        job = job_or_channel
        job.pid, job.out, job.status = pid, out, None
    else:
        job = jobs[job_or_channel] = Job(job_or_channel, pid, out)
    job.shell, job.ctl, job.report, job.replies = o, ctl_w, rep_r, b""
    job.background = False
    job.pending.clear()
    watch(rep_r, job)
    watch(out, job)


def open_terminal():
    if PTMX < 0:
        return os.openpty()
    out = os.open(f"self/fd/{PTMX}", os.O_RDWR | os.O_NOCTTY, dir_fd=PROC)
    fcntl.ioctl(out, 0x40045431, pack("i", 0))  # TIOCSPTLCK
    return out, fcntl.ioctl(out, 0x5441, os.O_RDWR | os.O_NOCTTY)  # TIOCGPTPEER: it has no path in the sandbox


def run_in_shell(job, payload):
    if job.buffer is not None:
        return send("F", job.channel, {"error": "the shell is busy", "cause": "busy"})
    restarted = job.status is not None or job.out is None
    if restarted:
        release(job)
        start_shell(job, job.shell)
    job.restarted = restarted
    timeout, cap, job.nonce = RUN.unpack_from(payload)
    begin(job, timeout, cap)
    job.before = children(job.pid) if job.background else frozenset()
    command = payload[RUN.size :]
    if len(command) > 32 and command.isascii():  # bash counts other characters by the locale, which may be changed
        command = b"\1%d\0%s" % (len(command), command)
    else:
        command = (b" " if command[:1] == b"\1" else b"") + command + b"\0"
    job.pending.append(command + job.nonce)
    write_pending(job, job.ctl)
    return None


def write_pending(job, fd):
    while job.pending:
        chunk = job.pending[0]
        try:
            written = os.write(fd, chunk)
        except BlockingIOError:
            if fd not in where:
                watch(fd, job, select.POLLOUT)
            return
        except OSError:
            job.pending.clear()
            break
        if written == len(chunk):
            job.pending.popleft()
        else:
            job.pending[0] = chunk[written:]
    if job.end_input and job.stdin is not None and not job.pending:
        drop(job.stdin)
        job.stdin = None
    elif where.pop(fd, None) is not None:
        poller.unregister(fd)


def drain(job, fd):
    """Read what is available, at most 4 MiB. Returns False once the other side is closed."""
    if fd == job.err:
        buffer = job.errors
    elif job.buffer is not None:
        buffer = job.buffer
    else:
        buffer = job.between = job.between or Tail(16384)
    for _ in range(64):
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        except OSError:  # EIO: the last process has closed the terminal
            return False
        if not data:
            return False
        buffer.add(data)
    return True


def look(name):
    """The content of a file below /proc; b'' if it cannot be read."""
    try:
        fd = os.open(name, os.O_RDONLY, dir_fd=PROC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 14)
    except OSError:
        return b""
    finally:
        os.close(fd)


def children(pid):
    return frozenset(map(int, look(f"{pid}/task/{pid}/children").split()))


def processes():
    """pid -> (parent, session, start in clock ticks since boot) of every process in the sandbox."""
    found = {}
    for name in os.listdir(PROC):
        if name.isdigit() and belongs(name):
            fields = look(name + "/stat").rpartition(b")")[2].split()
            if len(fields) > 19:
                found[int(name)] = (int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def belongs(name):
    """Whether the process with this pid belongs to the sandbox; in the host's /proc it is found by its owner."""
    try:
        return not HOSTS_PROC or os.stat(name, dir_fd=PROC).st_uid == os.geteuid()
    except OSError:
        return False


def programs():
    """The names of the running programs but this process and its shells that wait for a command."""
    waiting = {job.pid for job in jobs.values() if job.shell is not None and job.buffer is None}
    waiting |= {1, os.getpid()}
    names = []
    for pid in processes():
        if pid not in waiting and (name := running(pid)) is not None:
            names.append(name.replace(b"\n", b" "))
    return names


def running(pid):
    """The name of a process; None if it has ended, even if nobody has waited for it yet."""
    head, _, tail = look(f"{pid}/stat").rpartition(b") ")
    return None if tail[:1] in (b"", b"Z", b"X") else head.partition(b"(")[2]


def with_offspring(roots, table, spared=()):
    """``roots`` and all their descendants in ``table`` (of :func:`processes`), without those in ``spared``."""
    found = set(roots).difference(spared)
    grew = bool(found)
    while grew:
        grew = False
        for pid, (parent, _, _) in table.items():
            if parent in found and pid not in found and pid not in spared:
                found.add(pid)
                grew = True
    return found


def descendants(root, since=0, before=frozenset()):
    """The process, its descendants, and orphans of its session.

    Left out: the children ``before`` and their descendants, and orphans started before the tick ``since``.
    """
    table = processes()
    left = {pid for pid, (_, session, start) in table.items() if session == root and start >= since}
    return with_offspring(left | {root}, table, with_offspring(before, table))


def kill_overdue(job, now):
    job.timed_out = True
    if job.shell is None:
        kill_session(job)
        job.deadline = now + 1.0
    elif job.killed_at is None:
        job.killed_at = now
        since = int((time.clock_gettime(time.CLOCK_BOOTTIME) - (now - job.started)) * TICKS)
        kill_all(lambda: descendants(job.pid, since, job.before) - {job.pid})
        job.deadline = now + 1.0
    else:  # the shell itself hangs, for example in a loop of builtins
        kill_session(job)
        job.deadline = now + 5.0


def kill_session(job):
    kill(-job.pid)  # its process group at once: none of them can start another in the meantime
    kill_all(lambda: descendants(job.pid))


def kill_all(find):
    """Kill what ``find`` returns, until it returns nothing new: a process may start another before it is killed.

    Then wait until they have ended: whoever learns of the kill must not see them run any more.
    """
    killed = set()
    for _ in range(KILL_ROUNDS):
        found = find() - killed
        if not found:
            break
        for pid in found:
            kill(pid)
        killed |= found
    until = time.monotonic() + KILL_SECONDS
    while time.monotonic() < until and any(running(pid) is not None for pid in killed):
        time.sleep(0.001)


def kill(pid, sig=signal.SIGKILL):
    try:
        os.kill(pid, sig)
    except OSError:
        pass


def release(job):
    for name in ("out", "err", "stdin", "ctl", "report"):
        fd = getattr(job, name)
        if fd is not None:
            drop(fd)
            setattr(job, name, None)


def finish(job, code, cwd=b"", restarted=False):
    # A shell's command wrote its output before the report: the same poll has seen both.
    for fd in (job.out, job.err):
        if fd is not None and (job.shell is None or job.status is not None or fd in ready):
            drain(job, fd)
    data, omitted = job.buffer.take()
    for op, part in (("O", data), ("L", job.errors.take()[0] if job.errors is not None else b"")):
        for start in range(0, len(part), 262144):
            send(op, job.channel, part[start : start + 262144])
    flags = job.timed_out | (restarted or job.restarted) << 1
    seconds = time.monotonic() - job.started
    send("D", job.channel, DONE.pack(124 if job.timed_out else code, flags, omitted, seconds) + cwd)
    job.buffer = job.errors = job.deadline = job.nonce = None
    job.restarted = False


def reap():
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        for job in list(jobs.values()):
            if job.pid == pid and job.status is None:
                job.status = code if code >= 0 else 128 - code
                if job.shell is None:
                    finish(job, job.status)
                    release(job)
                    del jobs[job.channel]
                elif job.buffer is not None and not (job.report is not None and read_report(job)):
                    # There is no final report in the pipe: the shell ended without an answer.
                    finish(job, job.status, b"", True)


def read_report(job):
    try:
        job.replies += os.read(job.report, 8192)
    except OSError:
        return False
    parts = job.replies.split(b"\0")
    while len(parts) > 4:
        nonce, code, cwd, background = parts[:4]
        parts = parts[4:]
        if nonce == job.nonce:
            job.replies = b"\0".join(parts)
            job.background = bool(background)
            finish(job, int(code) % 256 if code.isdigit() and len(code) < 9 else 255, cwd[:4096])
            return True
    job.replies = b"\0".join(parts)
    if len(job.replies) > 1 << 20:
        job.replies = b""
    return False


def put(channel, payload):
    """Write the entries of one W frame. The first error ends the request."""
    state = folders.setdefault(channel, [])
    at = 0
    while at < len(payload) and isinstance(state, list):
        length, size = ENTRY.unpack_from(payload, at)
        at += ENTRY.size
        entry = loads(payload[at : at + length])
        try:
            put_one(entry, payload[at + length : at + length + size], state)
        except (OSError, ValueError) as error:
            folders[channel] = state = f"{entry['path']}: {getattr(error, 'strerror', error)}"
        at += length + size


def put_one(entry, data, state):
    path, kind = entry["path"], entry["kind"]
    if kind in ("top", "folder"):
        make_folder(path)
        if kind == "folder":
            state.append(entry)
        return
    flags = os.O_WRONLY | os.O_NOFOLLOW
    if not entry.get("more"):
        make_folder(os.path.dirname(path))
        clear_away(path)
        flags |= os.O_CREAT | os.O_EXCL
    if kind == "link":
        os.symlink(entry["target"], path)
    else:
        fd = os.open(path, flags | os.O_APPEND, 0o600)
        try:
            while data:
                data = data[os.write(fd, data) :]
            os.fchmod(fd, entry["mode"])
        finally:
            os.close(fd)
    os.utime(path, (entry["mtime"], entry["mtime"]), follow_symlinks=False)


def make_folder(path):
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:  # a file or a dangling link is in the way
        os.unlink(path)
        os.mkdir(path)


def clear_away(path):
    above, _, name = path.rpartition("/")
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        folder = os.open(above or "/", os.O_RDONLY | os.O_DIRECTORY)
        try:
            remove(folder, name, CLEAR_SECONDS)
        finally:
            os.close(folder)


def end_put(channel):
    state = folders.pop(channel, [])
    if isinstance(state, str):
        return send("F", channel, {"error": state, "cause": "files"})
    for entry in reversed(state):  # modes are set last: some folders are read-only
        os.chmod(entry["path"], entry["mode"])
        os.utime(entry["path"], (entry["mtime"], entry["mtime"]))
    return send("D", channel, DONE.pack(0, 0, 0, 0.0))


def give_socket(channel, port):
    sock = socket(AF_INET, SOCK_STREAM)
    try:
        if port:
            sock.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            sock.listen(1024)
        os.set_blocking(OUT, True)  # the socket travels with its own frame, after all queued ones
        flush()
        send("D", channel, DONE.pack(0, 0, 0, 0.0))
        give(outbox.popleft(), [sock.fileno()])
    finally:
        os.set_blocking(OUT, False)
        sock.close()


def handle(op, channel, payload):
    if op == "I" or op == "E":
        job = jobs.get(channel)
        if job is None:
            return
        if op == "E":
            job.end_input = True
        elif job.shell is not None and job.shell.get("pty"):
            os.write(job.out, payload)
            return
        else:
            job.pending.append(payload)
        if job.stdin is not None:
            write_pending(job, job.stdin)
        return
    if op == "K":
        folders.pop(channel, None)
        job = jobs.pop(channel, None)
        if job is not None:
            kill_session(job)
            release(job)
        return
    try:
        if op == "R":
            run_in_shell(jobs[channel], payload)
        elif op == "X":
            start_exec(channel, loads(payload))
        elif op == "S":
            start_shell(channel, loads(payload))
            send("D", channel, DONE.pack(0, 0, 0, 0.0))
        elif op == "W":
            put(channel, payload)
        elif op == "w":
            end_put(channel)
        elif op == "N":
            give_socket(channel, PORT.unpack(payload)[0])
        elif op == "P":
            cap = PROGRAMS.unpack(payload)[0]
            names = b"\n".join(programs())[:cap]
            if names:
                send("O", channel, names)
            send("D", channel, DONE.pack(0, 0, 0, 0.0))
    except OSError as error:
        cause = "pids" if error.errno in (errno.EAGAIN, errno.ENOMEM) else "exec"
        job = jobs.get(channel)
        if job is not None:
            job.buffer = job.deadline = None
        send("F", channel, {"error": f"{op}: {error.strerror}", "cause": cause})


def give(frame, gifts):
    control = socket(AF_UNIX, SOCK_STREAM, 0, fileno=IN)
    # SOL_SOCKET, SCM_RIGHTS
    control.sendmsg([frame], [(1, 1, b"".join(pack("i", fd) for fd in gifts))])
    control.detach()


def say_hello(config, gifts):
    hello = dumps({"pid": os.getpid(), "nonce": config["nonce"]}).encode()
    frame = HEADER.pack(len(hello), ord("H"), 0) + hello
    if gifts:
        give(frame, gifts)
        for fd in gifts:
            os.close(fd)
    else:
        os.write(OUT, frame)


def flush():
    """Write the queued frames. Returns False if the host has closed the stream."""
    data = b"".join(outbox)
    outbox.clear()
    try:
        written = os.write(OUT, data)
    except BlockingIOError:
        written = 0
    except OSError:
        return False
    if written < len(data):
        outbox.append(data[written:])
    return True


def serve(wake, lifeline):
    inbox = b""
    poller.register(IN, select.POLLIN)
    poller.register(wake, select.POLLIN)
    if lifeline is not None:
        poller.register(lifeline, 0)
    writer = os.dup(OUT)  # IN may be the same socket, and a poller takes each number once
    blocked = False
    while True:
        timeout = None
        for job in jobs.values():
            if job.deadline is not None:
                left = min(max(0.0, job.deadline - time.monotonic()), LONGEST_POLL) * 1000 + 1
                timeout = left if timeout is None else min(timeout, left)
        ready.clear()
        ready.update(poller.poll(timeout))
        for fd, event in ready.items():
            if fd == IN:
                try:
                    data = os.read(IN, 1 << 16)
                except BlockingIOError:
                    continue
                except OSError:
                    return
                if not data:
                    return
                inbox = inbox + data if inbox else data
                at = 0
                while len(inbox) - at >= HEADER.size:
                    length, op, channel = HEADER.unpack_from(inbox, at)
                    end = at + HEADER.size + length
                    if len(inbox) < end:
                        break
                    handle(chr(op), channel, inbox[at + HEADER.size : end])
                    at = end
                inbox = inbox[at:]
            elif fd == wake:
                try:
                    os.read(wake, 4096)
                except BlockingIOError:
                    pass
                reap()
            elif fd == lifeline:
                return
            elif fd in where:
                serve_job(fd, event, where[fd])
        if outbox and not flush():
            return
        if blocked != bool(outbox):
            blocked = not blocked
            if blocked:
                poller.register(writer, select.POLLOUT)
            else:
                poller.unregister(writer)
        now = time.monotonic()
        for job in list(jobs.values()):
            if job.deadline is not None and now >= job.deadline:
                kill_overdue(job, now)


def serve_job(fd, event, job):
    if fd == job.report:
        if event & select.POLLIN:
            read_report(job)
        elif event & select.POLLHUP:
            drop(fd)
            job.report = None
    elif fd == job.out or fd == job.err:
        if not drain(job, fd):
            drop(fd)
            if fd == job.out:
                job.out = None
            else:
                job.err = None
    else:
        write_pending(job, fd)


def prepare(proc=None, ptmx=-1):
    """Open the descriptors that only this process has. ``proc`` and ``ptmx`` are the host's, if the sandbox has
    none."""
    global PROC, HOSTS_PROC, PTMX, OOM
    HOSTS_PROC = proc is not None
    PROC = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY) if proc is None else proc
    PTMX = ptmx
    try:
        OOM = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=PROC)
    except OSError:
        pass


def main(config, gifts=(), lifeline=None):
    """Serve until the stream ends.

    ``gifts`` are descriptors to send to the host. ``lifeline`` is the read end of a pipe that the supervisor holds
    open.
    """
    if "env" in config:
        os.environ.clear()
        os.environ.update(config["env"])
    for name, value in config.get("rlimits", {}).items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))
    os.umask(0o022)
    for path in config.get("mkdirs", ()):
        os.makedirs(path, exist_ok=True)
    for path in config.get("passable", ()):
        os.chmod(path, 0o755)
    wake_r, wake_w = os.pipe()
    for fd in (wake_r, wake_w):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    say_hello(config, gifts)
    os.set_blocking(IN, False)
    os.set_blocking(OUT, False)
    serve(wake_r, lifeline)


if __name__ == "__main__":
    prepare()
    main(loads(sys.argv[1]))
