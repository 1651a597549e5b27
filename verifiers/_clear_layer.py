"""Removes files of the agent that could replace or expose the verifier from a forked layer: ``python3 -c TEXT
FOLDER...``.

It removes an existing result, and links that lead to the verifier's FOLDERs: through them the verifier's files would be
graded as the agent's own. Unreadable folders are searched too, and get their modes back. Mounts and the image's own
programs are not searched, because links there are harmless.
"""

import errno
import os
import stat
import sys
import time

SECONDS = 3
"""CPU seconds after which every further link is removed. Ordinary workspaces are searched in less time."""
NOT_SEARCHED = {"/usr/lib", "/usr/share", "/usr/include", "/usr/src", "/.pristine", "/proc", "/sys", "/dev"}


def mode(path):
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def remove(path):
    if stat.S_ISDIR(mode(path)):
        os.chmod(path, 0o700)
        for name in os.listdir(path):
            remove(path + "/" + name)
        os.rmdir(path)
    elif mode(path):
        os.unlink(path)


def leads_to(path, folders):
    try:
        fd = os.open(path, os.O_PATH)
        try:
            end = os.readlink(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
    except OSError as error:
        # The kernel reports a loop of links, but a program with its own resolution may follow it.
        if error.errno == errno.ELOOP or time.process_time() > SECONDS:
            return True
        end = os.path.realpath(path)  # the target does not exist yet, or there is no /proc
    return any(end == folder or end.startswith(folder + "/") for folder in folders)


def clear(folders):
    waiting, modes = ["/"], []
    skip = {*NOT_SEARCHED, *folders}
    while waiting:
        folder = waiting.pop()
        before = stat.S_IMODE(mode(folder))
        try:
            if before & 0o700 != 0o700:
                os.chmod(folder, before | 0o700)
                modes.append((folder, before))
            entries = list(os.scandir(folder))
        except OSError:  # another user's: the verifier cannot enter it either
            continue
        for entry in entries:
            if entry.is_symlink() and leads_to(entry.path, folders):
                try:
                    os.unlink(entry.path)
                except OSError as error:
                    if error.errno != errno.EROFS:  # part of the image: the agent cannot have made it
                        raise
            elif entry.is_dir(follow_symlinks=False) and entry.path not in skip:
                waiting.append(entry.path)
    for folder, before in reversed(modes):
        os.chmod(folder, before)


if __name__ == "__main__":
    if stat.S_ISDIR(mode("/logs")):
        os.chmod("/logs", stat.S_IMODE(mode("/logs")) | 0o700)
        remove("/logs/verifier")
    else:
        remove("/logs")
    clear(sys.argv[1:])
