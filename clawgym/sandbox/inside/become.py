"""Runs in a sandbox, standard library only: becomes a program whose stdin and stdout are a socket of the host.

``python3 -I -S -c <this file> PLACE PROGRAM ...``: PLACE is a port of 127.0.0.1, or the path of a unix socket in a
sandbox without a loopback. The first connection becomes stdin and stdout, the second stderr. Then it stops listening
and starts the program, so no other program of the sandbox can connect in its place. No extra process stays.
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
        os._exit(0)  # the caller may connect now
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if not unix:  # accepted sockets inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stdio, errors = (listener._accept()[0] for _ in range(2))  # type: ignore
    listener.close()
    if unix:
        os.unlink(place)
    for accepted, descriptor in ((stdio, 0), (stdio, 1), (errors, 2)):
        os.dup2(accepted, descriptor)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode("utf-8", "backslashreplace"))
        os._exit(127)


main(sys.argv[1], sys.argv[2:])
