"""4, 5, 7-9: the host's network, and socket families that know no network namespace."""

from __future__ import annotations

import socket

from .kit import blocked, error_name, opened, probe, worst


def _greeting(sock, address, bait):
    with sock:
        sock.settimeout(3)
        try:
            sock.connect(address)
            if sock.recv(100).decode(errors="replace") == bait["secret"]:
                return opened(f"the host's listener at {address!r} answered")
        except OSError as error:
            return blocked(error_name(error) if error.errno else str(error))
    return blocked("another listener answered")


@probe("4a", "connect to a listener on the host's loopback (TCP)")
def tcp(bait):
    return _greeting(socket.socket(), ("127.0.0.1", bait["tcp"]), bait)


@probe("4b", "the same over IPv6")
def tcp6(bait):
    if not bait["tcp6"]:
        return blocked("the host has no IPv6 loopback")
    return _greeting(socket.socket(socket.AF_INET6), ("::1", bait["tcp6"]), bait)


@probe("4c", "ask a listener on the host's loopback (UDP)")
def udp(bait):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.sendto(b"?", ("127.0.0.1", bait["udp"]))
        try:
            data = sock.recv(100)
        except OSError as error:
            return blocked(error_name(error) if error.errno else "no answer")
    return opened("the host's listener answered") if data.decode() == bait["secret"] else blocked("another answer")


@probe("4d", "find a route out of the sandbox (nothing is sent)")
def route(bait):
    def towards(family, address):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((address, 9))  # addresses for documentation (RFC 5737, RFC 3849)
            except OSError as error:
                return blocked(error_name(error))
        return opened(f"there is a route to {address}")

    return worst([towards(socket.AF_INET, "192.0.2.1"), towards(socket.AF_INET6, "2001:db8::1")])


@probe("5a", "connect to an abstract unix socket of the host")
def abstract(bait):
    return _greeting(socket.socket(socket.AF_UNIX), "\0" + bait["abstract"], bait)


@probe("5b", "send a datagram to an abstract unix socket of the host")
def abstract_datagram(bait):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + bait["abstract_datagram"])
    return opened("the host's socket took the connection")


def _creates(*families):
    """Only socket(); nothing is bound, connected or sent."""

    def create(family, kind, protocol):
        try:
            socket.socket(family, kind, protocol).close()
        except OSError as error:
            return blocked(error_name(error))
        return opened(f"socket({family}, {kind}, {protocol}) was made")

    return worst(create(*family) for family in families)


@probe("7a", "a raw IPv4 socket")
def raw(bait):
    return _creates((2, 3, 1), (2, 3, 255))


@probe("7b", "a packet socket")
def packet(bait):
    return _creates((17, 3, 0x0300), (17, 2, 0))


@probe("7c", "a raw IPv6 socket")
def raw6(bait):
    return _creates((10, 3, 58))


@probe("8a", "an AF_VSOCK socket (reaches the hypervisor, knows no network namespace)", bare=False)
def vsock(bait):
    return _creates((40, 1, 0), (40, 2, 0))


@probe("9a", "a routing netlink socket")
def netlink(bait):
    return _creates((16, 3, 0))


@probe("9d", "MPTCP and UDP-Lite: other protocols of the families that are allowed")
def other_protocols(bait):
    return _creates((2, 1, 262), (10, 1, 262), (2, 2, 136), (10, 2, 136))


@probe("9e", "any other protocol over IPv4 and IPv6 (SCTP, DCCP, L2TP, SMC, ping, ...)", bare=False)
def protocols(bait):
    numbers = [number for number in (*range(1, 256), 256, 263) if number not in (6, 17, 136)]
    kinds = ((2, 1), (2, 2), (2, 5), (2, 6), (10, 1), (10, 2))
    return _creates(*((*kind, number) for kind in kinds for number in numbers), (2, 5, 0), (2, 6, 0))


@probe("9f", "the other families and protocols through socketpair", bare=False)
def pairs(bait):
    def create(family, kind, protocol):
        try:
            for sock in socket.socketpair(family, kind, protocol):
                sock.close()
        except OSError as error:
            # EOPNOTSUPP: two sockets of the family were made, and it cannot pair them.
            return blocked(error_name(error)) if error_name(error) != "EOPNOTSUPP" else opened(f"family {family}")
        return opened(f"socketpair({family}, {kind}, {protocol}) was made")

    return worst(create(family, kind, 0) for family in range(2, 48) for kind in (1, 2, 3, 5))


@probe("9g", "turn a TCP socket into another protocol's (TCP_ULP: kernel TLS, SMC, MPTCP)")
def upper_protocols(bait):
    def turn(name):
        with socket.socket() as sock:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, 31, name)
            except OSError as error:
                # ENOENT: the kernel has looked for the module.
                reached = error_name(error) in ("ENOENT", "ENOTCONN", "EOPNOTSUPP")
                return (opened if reached else blocked)(f"TCP_ULP {name.decode()}: {error_name(error)}")
        return opened(f"TCP_ULP {name.decode()} was set")

    return worst(turn(name) for name in (b"tls", b"smc", b"mptcp"))


# Where nothing refuses them, the kernel may load the module of an unusual family: not on a bare host.
@probe("9b", "any other netlink protocol (audit, uevents, crypto, ...)", bare=False)
def netlinks(bait):
    return _creates(*((16, 3, protocol) for protocol in range(1, 23)))


@probe("9c", "any other socket family (key, alg, bluetooth, CAN, TIPC, XDP, ...)", bare=False)
def families(bait):
    others = [family for family in range(3, 48) if family not in (10, 16, 17, 40)]
    return _creates(*((family, kind, 0) for family in others for kind in (1, 2, 3, 5)))
