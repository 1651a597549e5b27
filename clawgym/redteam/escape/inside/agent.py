"""Row 38: process 1 of the sandbox, and the out-of-memory killer."""

from __future__ import annotations

import os
import signal

from .kit import blocked, call, error_name, in_child, opened, probe, read, skipped


@probe("38c", "be spared by the host's out-of-memory killer (oom_score_adj)")
def oom_score(bait):
    def lower():
        before = int(read("/proc/self/oom_score_adj"))
        if before <= -1000:
            return opened(f"oom_score_adj is {before}")
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-1000")
        return opened("oom_score_adj was set to -1000")

    return in_child(lower)


def _own_agent(bait):
    """The parent of this process, if it is certainly not a process of the host; else None.

    That is certain in another pid namespace than the owner's, or under another uid.
    """
    try:
        apart = os.stat("/proc/self/ns/pid").st_ino != bait["pid_namespace"]
    except OSError:
        apart = False
    if os.getppid() < 1:  # the parent is outside the namespace; kill(0) would signal our own group
        return None
    return os.getppid() if apart or os.getuid() != bait["owner_uid"] else None


@probe("38a", "kill the sandbox's own agent", bare=False)
def kill_agent(bait):
    return _signal_agent(bait, signal.SIGKILL)


@probe("38d", "stop the sandbox's own agent (SIGSTOP)", bare=False)
def stop_agent(bait):
    return _signal_agent(bait, signal.SIGSTOP)


def _signal_agent(bait, number):
    agent = _own_agent(bait)
    if agent is None:
        return skipped("the process above this one could be the owner")
    os.kill(agent, number)
    return opened(f"{signal.Signals(number).name} sent to {agent}; the host looks what it did")


@probe("38b", "forge what the sandbox's own agent says to the host", bare=False)
def forge(bait):
    agent = _own_agent(bait)
    if agent is None:
        return skipped("the process above this one could be the owner")
    why = []
    for number in (1, 0):
        fd = -1
        handle, error = call("pidfd_open", agent, 0)
        if error is None:
            fd, error = call("pidfd_getfd", handle, number, 0)
        if error is not None:
            why.append(f"pidfd_getfd: {error}")
            try:
                fd = os.open(f"/proc/{agent}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
            except OSError as cause:
                why.append(f"/proc/{agent}/fd/{number}: {error_name(cause)}")
                continue
        try:
            os.write(fd, bytes.fromhex(bait["frame"]))
        except OSError as cause:
            why.append(f"write: {error_name(cause)}")
            continue
        return opened("a forged frame was sent; the host looks what it did")
    return blocked("; ".join(dict.fromkeys(why)))
