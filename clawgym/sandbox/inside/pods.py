"""What runs in a pod besides the sandbox's programs. Standard library only (``python3 -I -S -c``).

``prepare FOLDER NUMBER ...``: copy what the image has below each FOLDER into ``/clawgym/NUMBER``. With ``--wait`` first
it then waits until the tar on the stdin of a ``fill`` has been unpacked there. ``first PROGRAM ...``: process 1 waits
for a ``relay``, and becomes a program whose stdin and stdout lead there; so it ends when the relay does. ``relay``:
its own stdin and stdout are those of process 1.
"""

import os
import select
import shutil
import socket
import sys
import tarfile
import time

SECONDS = 120  # a pod whose owner does not come ends
STREAM = "\0clawgym-stream"  # only the containers of one pod share a network
READY = "/clawgym/control/ready"


def prepare(words):
    wait = words[:1] == ["--wait"]
    if wait:
        os.mkfifo(READY)
    words = words[wait:]
    for source, number in zip(words[::2], words[1::2], strict=True):
        target = f"/clawgym/{number}"
        for name in os.listdir(source) if os.path.isdir(source) else ():
            try:
                path = os.path.join(source, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.copytree(path, os.path.join(target, name), symlinks=True, dirs_exist_ok=True)
                else:
                    shutil.copy2(path, os.path.join(target, name), follow_symlinks=False)
            except OSError:  # some of it cannot be read by this user
                pass
    if wait:
        os.close(os.open(READY, os.O_RDONLY))


def fill():
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        tar.extraction_filter = lambda member, path: member
        tar.extractall("/clawgym")
    os.close(os.open(READY, os.O_WRONLY))


def first(words):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(STREAM)
    listener.listen(1)
    listener.settimeout(SECONDS)
    stream = listener.accept()[0]
    stream.setblocking(True)
    listener.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, place in ((stream.fileno(), 0), (stream.fileno(), 1), (nothing, 2)):
        os.dup2(descriptor, place)
    for name in [name for name in os.environ if name.startswith("KUBERNETES_")]:
        del os.environ[name]
    os.execvp(words[0], words)


def relay():
    with open("/proc/self/comm", "w") as name:
        name.write("clawgym-relay")
    stream = socket.socket(socket.AF_UNIX)
    end = time.monotonic() + 60
    while True:
        try:
            stream.connect(STREAM)
            break
        except ConnectionRefusedError:  # process 1 is not there yet
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
    while True:
        for ready in select.select([0, stream], [], [])[0]:
            data = os.read(0, 1 << 16) if ready == 0 else stream.recv(1 << 16)
            if not data:
                return
            if ready == 0:
                stream.sendall(data)
            else:
                while data:
                    data = data[os.write(1, data) :]


def main():
    what, words = sys.argv[1], sys.argv[2:]
    if what == "prepare":
        prepare(words)
    elif what == "fill":
        fill()
    elif what == "first":
        first(words)
    else:
        relay()


main()
