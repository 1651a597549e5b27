"""Copies trees out of a container and in, as one tar. ``docker exec`` runs its source (``python3 -I -S -c``).

``take``, ``stop`` or ``kill`` ENTRIES BYTES PATH...: write the trees to stdout, with names relative to ``/``. ``stop``
stops all other processes while it copies, ``kill`` kills them, ``take`` does neither. ``fill`` NAME...: unpack the tar
on stdin at ``/``, except what is at, below or above a NAME. Exit codes: 3: a path does not exist or lies behind a link;
4: a process could not be stopped; 5: a bound is exceeded, whose name is on stderr.
"""

import os
import signal
import stat
import sys
import tarfile
import time

from clawgym.sandbox.inside.tars import Tarred
from clawgym.sandbox.inside.trees import FOLDER, Room, TooMuch, walk


def others():
    """pid -> state of every process except this one and process 1."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = file.read().rpartition(b")")[2].split()[0]
            except (OSError, IndexError):
                pass
    return found


def quiet(number, enough):
    """Send signal ``number`` to all other processes until each is in one of the states ``enough``."""
    for _ in range(2000):
        if all(state in enough for state in others().values()):
            return
        try:
            os.kill(-1, number)  # not to process 1 and this one
        except OSError:
            pass
        time.sleep(0.002)
    sys.exit(4)


class Taken(Tarred):
    def refused(self, path, error):
        """Leave out what vanished meanwhile or cannot be read."""


def take(entries, size, paths):
    room = Room(entries, size)
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            info = os.lstat(path)
            if stat.S_ISDIR(info.st_mode):
                top = os.open(path, FOLDER)
                taken = Taken(tar, room, path[1:], True)
                taken.head(top)
                walk(top, taken, room, True)
            else:
                above, name = os.path.split(path)
                top = os.open(above, FOLDER)
                Taken(tar, room, above[1:], True).entry(top, name, name, info)
            os.close(top)


def fill(skip):
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        tar.extraction_filter = lambda member, path: member
        tar.extractall("/", members=(m for m in tar if not any(left_out(m, name) for name in skip)))


def left_out(member, name):
    below = f"{member.name}/".startswith(f"{name}/")
    return below or (name.startswith(f"{member.name}/") and not member.isdir())


def main():
    what, paths = sys.argv[1], sys.argv[2:]
    if what == "fill":
        return fill(paths)
    entries, size, *paths = paths
    if what == "kill":
        quiet(signal.SIGKILL, (b"Z", b"X"))
    elif what == "stop":
        quiet(signal.SIGSTOP, (b"T", b"Z", b"X"))
    try:
        for path in paths:
            if not os.path.lexists(path) or os.path.realpath(os.path.dirname(path)) != os.path.dirname(path):
                sys.exit(3)
        take(int(entries), int(size), paths)
    except TooMuch as error:
        sys.stderr.write(f"{error.bound} {error}")
        sys.exit(5)
    finally:
        if what == "stop" and others():
            os.kill(-1, signal.SIGCONT)
    return None


main()
