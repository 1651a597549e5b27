"""Runs inside a box, standard library only: becomes a program whose stdin and stdout are a socket that we hold.

``python3 -I -S -c <this file> PLACE PROGRAM ...``: PLACE is a port of 127.0.0.1, or the path of a unix socket in a box
without a loopback. The first connection is stdin and stdout, the second is stderr; nothing listens from then on, and
the program starts, so whatever runs in the box comes too late to speak for it. No process of ours stays.
"""

import _socket as socket  # the C half: socket takes longer to import than Python to start
import os
import sys


def main(place: str, program: list[str]) -> None:
    unix = place.startswith("/")
    listener = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    if unix:
        listener.bind(place)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(place)))
    listener.listen(2)
    if os.fork():
        os._exit(0)  # who started us may connect
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if not unix:  # what is accepted inherits it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    speech, errors = (listener._accept()[0] for _ in range(2))  # type: ignore
    listener.close()
    if unix:
        os.unlink(place)
    for accepted, descriptor in ((speech, 0), (speech, 1), (errors, 2)):
        os.dup2(accepted, descriptor)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode("utf-8", "backslashreplace"))
        os._exit(127)


main(sys.argv[1], sys.argv[2:])
