"""Process 1 of a box: runs commands for the host over one stream, and ends when that stream ends.

Sent into the box as text (``python3 -I -S -c``), so: standard library only, few imports, one thread.
Everything in the box can reach it, so the host believes nothing it says (see ``_link.py``).

Frames, both ways: ``>IBI`` (payload length, op, channel) and the payload.

host -> guest   X exec {argv,cwd,env,timeout,cap,stdin,split}   I input bytes   E end of input
                S shell {pty,cwd,env}   R run {cmd,timeout,cap}   K kill and forget the channel
guest -> host   H hello {pid}   O output bytes   L stderr bytes   D done {...}   F failed {error,cause}
"""

# The C halves of signal, socket, collections, struct and json: the Python halves would double a box's start-up.
import _signal as signal  # pyright: ignore[reportMissingImports]
import errno
import os
import select
import sys
import time
from _collections import deque  # pyright: ignore[reportMissingImports]
from _json import encode_basestring_ascii, make_scanner
from _socket import AF_UNIX, SOCK_STREAM, socket
from _struct import Struct, pack

IN, OUT = 0, 1
HEADER = Struct(">IBI")
DRIVER = r"""__clawgym_rc() { return "$1"; }
__clawgym_last=0
while IFS= read -r -d '' -u 198 __clawgym_cmd; do
  if [ "$__clawgym_last" != 0 ]; then __clawgym_cmd="__clawgym_rc $__clawgym_last; $__clawgym_cmd"; fi
  eval "$__clawgym_cmd" 198<&- 199>&-
  __clawgym_last=$?
  IFS= read -r -d '' -u 198 __clawgym_nonce || exit
  printf '%s\0%s\0%s\0' "$__clawgym_nonce" "$__clawgym_last" "$PWD" >&199
done"""


class _Json:
    """What the C scanner asks for; as json.loads has it."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant, memo = float, int, float, {}


def loads(data):
    text = data if isinstance(data, str) else data.decode()
    return make_scanner(_Json)(text, 0)[0]  # pyright: ignore[reportArgumentType]


def dumps(fields):
    """A flat object of str, int, float and bool."""
    parts = []
    for key, value in fields.items():
        if isinstance(value, str):
            value = encode_basestring_ascii(value)
        else:
            value = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
        parts.append(f"{encode_basestring_ascii(key)}: {value}")
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
        self.between = None  # what background jobs print between two commands of a shell
        self.deadline = None
        self.timed_out = False
        self.started = time.monotonic()
        self.status = None  # exit code once reaped
        self.shell = None  # (options) for shells
        self.ctl: int | None = None
        self.report: int | None = None
        self.replies = b""
        self.nonce = None
        self.before = frozenset()
        self.killed_at = None
        self.restarted = False
        self.cwd = "/"


jobs = {}
outbox = deque()


def send(op: str, channel: int, payload: "bytes | dict" = b""):
    if not isinstance(payload, bytes):
        payload = dumps(payload).encode()
    outbox.append(HEADER.pack(len(payload), ord(op), channel) + payload)


def spawn(argv, env, cwd, fds, terminal=False):
    """fork, move ``fds`` (target -> source) into place, exec. The children are the first the OOM killer takes."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        for name in ("SIGPIPE", "SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        # Sources first moved out of the way of the targets.
        moved = {}
        for target, source in fds.items():
            high = source
            while high in fds or high < 3:
                high = os.dup(high)
            moved[target] = high
        for target, source in moved.items():
            os.dup2(source, target)
        if terminal:
            import fcntl
            import termios

            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.closerange(3, 198)
        os.closerange(200 if 199 in fds else 198, 1024)
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("500")
        except OSError:
            pass
        try:
            os.chdir(cwd)
        except OSError as error:
            os.write(2, (f"cannot enter {cwd}: {error.strerror}\n").encode())
            os._exit(126)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            os._exit(126)
    finally:
        os._exit(127)


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
    begin(job, o)
    for fd in (out_r, err_r, job.stdin):
        if fd is not None:
            os.set_blocking(fd, False)


def begin(job, o):
    job.buffer = Tail(int(o["cap"]))
    job.errors = Tail(int(o["cap"]))
    if job.between is not None:
        job.buffer.add(job.between.take()[0])
        job.between = None
    job.started = time.monotonic()
    job.deadline = job.started + float(o["timeout"])
    job.timed_out = False
    job.killed_at = None


def start_shell(job_or_channel, o):
    ctl_r, ctl_w = os.pipe()
    rep_r, rep_w = os.pipe()
    if o.get("pty"):
        import fcntl
        import termios

        out, slave = os.openpty()
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
    job.cwd = o.get("cwd") or "/"
    job.pending.clear()


def run_in_shell(job, o):
    if job.buffer is not None:
        return send("F", job.channel, {"error": "the shell is busy", "cause": "busy"})
    restarted = job.status is not None or job.out is None
    if restarted:
        release(job)
        start_shell(job, job.shell)
    job.restarted = restarted
    begin(job, o)
    job.nonce = o["nonce"]
    job.before = descendants(job.pid)
    job.pending.append(o["cmd"].encode("utf-8", "surrogateescape") + b"\0" + o["nonce"].encode() + b"\0")
    write_pending(job, job.ctl)
    return None


def write_pending(job, fd):
    while job.pending:
        chunk = job.pending[0]
        try:
            written = os.write(fd, chunk)
        except BlockingIOError:
            return
        except OSError:
            job.pending.clear()
            break
        if written == len(chunk):
            job.pending.popleft()
        else:
            job.pending[0] = chunk[written:]
    if job.end_input and job.stdin is not None and not job.pending:
        os.close(job.stdin)
        job.stdin = None


def drain(job, fd):
    """Take what is there now, at most 4 MiB a turn. False once the other side is closed."""
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
        except OSError:  # EIO: the last user of a terminal has gone
            return False
        if not data:
            return False
        buffer.add(data)
    return True


def descendants(root):
    """The process, what it started, and what those left behind in its session."""
    parents, found = {}, {root}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                parents[int(name)] = int(fields[1])
                if int(fields[3]) == root:
                    found.add(int(name))
            except (OSError, IndexError, ValueError):
                pass
    grew = True
    while grew:
        grew = False
        for pid, parent in parents.items():
            if parent in found and pid not in found:
                found.add(pid)
                grew = True
    return frozenset(found)


def kill_overdue(job, now):
    job.timed_out = True
    if job.shell is None:
        targets = descendants(job.pid)
        for pid in targets:
            kill(pid)
        job.deadline = now + 1.0
        return
    if job.killed_at is None:
        job.killed_at = now
        for pid in descendants(job.pid) - job.before - {job.pid}:
            kill(pid)
        job.deadline = now + 1.0
    else:  # the shell itself hangs (a loop of builtins)
        for pid in descendants(job.pid):
            kill(pid)
        job.deadline = now + 5.0


def kill(pid, sig=signal.SIGKILL):
    try:
        os.kill(pid, sig)
    except OSError:
        pass


def release(job):
    for name in ("out", "err", "stdin", "ctl", "report"):
        fd = getattr(job, name)
        if fd is not None:
            os.close(fd)
            setattr(job, name, None)


def finish(job, code, cwd="", restarted=False):
    for fd in (job.out, job.err):
        if fd is not None:
            drain(job, fd)
    data, omitted = job.buffer.take()
    for op, part in (("O", data), ("L", job.errors.take()[0])):
        for start in range(0, len(part), 262144):
            send(op, job.channel, part[start : start + 262144])
    done = {
        "code": 124 if job.timed_out else code,
        "cwd": cwd,
        "timed_out": job.timed_out,
        "omitted": omitted,
        "restarted": restarted or job.restarted,
        "seconds": time.monotonic() - job.started,
    }
    send("D", job.channel, done)
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
                    # No last report in the pipe: the shell ended without answering.
                    finish(job, job.status, "", True)


def read_report(job):
    try:
        job.replies += os.read(job.report, 65536)
    except OSError:
        return False
    parts = job.replies.split(b"\0")
    while len(parts) > 3:
        nonce, code, cwd = parts[:3]
        parts = parts[3:]
        if job.nonce is not None and nonce.decode("ascii", "replace") == job.nonce:
            job.replies = b"\0".join(parts)
            job.cwd = cwd.decode("utf-8", "replace")
            finish(job, int(code) if code.isdigit() else 255, job.cwd)
            return True
    job.replies = b"\0".join(parts)
    if len(job.replies) > 1 << 20:
        job.replies = b""
    return False


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
        job = jobs.pop(channel, None)
        if job is not None:
            for pid in descendants(job.pid):
                kill(pid)
            release(job)
        return
    options = loads(payload)
    try:
        if op == "X":
            start_exec(channel, options)
        elif op == "S":
            start_shell(channel, options)
            send("D", channel, {})
        elif op == "R":
            run_in_shell(jobs[channel], options)
    except OSError as error:
        cause = "pids" if error.errno in (errno.EAGAIN, errno.ENOMEM) else "exec"
        job = jobs.get(channel)
        if job is not None:
            job.buffer = job.deadline = None
        send("F", channel, {"error": f"{op}: {error.strerror}", "cause": cause})


def main():
    config = loads(sys.argv[1])
    import resource

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
    hello = dumps({"pid": os.getpid(), "python": sys.version.split()[0], "nonce": config["nonce"]}).encode()
    frame = HEADER.pack(len(hello), ord("H"), 0) + hello
    if config.get("send_root"):
        control = socket(AF_UNIX, SOCK_STREAM, 0, fileno=IN)
        root = os.open("/", os.O_PATH | os.O_DIRECTORY)
        # SOL_SOCKET, SCM_RIGHTS
        control.sendmsg([frame], [(1, 1, pack("i", root))])
        os.close(root)
        control.detach()
    else:
        os.write(OUT, frame)
    os.set_blocking(IN, False)
    os.set_blocking(OUT, False)
    inbox = b""
    while True:
        poller = select.poll()
        poller.register(IN, select.POLLIN)
        poller.register(wake_r, select.POLLIN)
        if outbox:
            poller.register(OUT, select.POLLOUT)
        where = {}
        now = time.monotonic()
        timeout = None
        for job in jobs.values():
            if len(outbox) < 64:
                for fd in (job.out, job.err, job.report):
                    if fd is not None and not (fd == job.out and job.buffer is None and job.shell is None):
                        where[fd] = job
                        poller.register(fd, select.POLLIN)
            target = job.stdin if job.shell is None else job.ctl
            if job.pending and target is not None:
                where[target] = job
                poller.register(target, select.POLLOUT)
            if job.deadline is not None:
                left = max(0.0, job.deadline - now) * 1000 + 1
                timeout = left if timeout is None else min(timeout, left)
        for fd, event in poller.poll(timeout):
            if fd == IN and event & (select.POLLIN | select.POLLHUP):
                try:
                    data = os.read(IN, 1 << 20)
                except BlockingIOError:
                    continue
                except OSError:
                    return
                if not data:
                    return
                inbox += data
                while len(inbox) >= HEADER.size:
                    length, op, channel = HEADER.unpack_from(inbox)
                    if len(inbox) < HEADER.size + length:
                        break
                    payload = inbox[HEADER.size : HEADER.size + length]
                    inbox = inbox[HEADER.size + length :]
                    handle(chr(op), channel, payload)
            elif fd == wake_r:
                try:
                    os.read(wake_r, 4096)
                except BlockingIOError:
                    pass
                reap()
            elif fd in where and jobs.get(where[fd].channel) is where[fd]:
                job = where[fd]
                if fd == job.report:
                    if event & select.POLLIN:
                        read_report(job)
                    elif event & select.POLLHUP:
                        os.close(job.report)
                        job.report = None
                elif fd == job.out or fd == job.err:
                    if not drain(job, fd):
                        os.close(fd)
                        if fd == job.out:
                            job.out = None
                        else:
                            job.err = None
                elif fd == job.stdin or fd == job.ctl:
                    write_pending(job, fd)
        while outbox:
            try:
                written = os.write(OUT, outbox[0])
            except BlockingIOError:
                break
            except OSError:
                return
            if written == len(outbox[0]):
                outbox.popleft()
            else:
                outbox[0] = outbox[0][written:]
        now = time.monotonic()
        for job in list(jobs.values()):
            if job.deadline is not None and now >= job.deadline:
                kill_overdue(job, now)


main()
