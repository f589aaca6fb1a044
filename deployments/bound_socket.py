"""Binds the server socket."""

import socket


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address but does not listen yet.

    Raises:
        OSError: the host is not an address of this machine, or the port is in use or not permitted.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        # With SO_REUSEADDR, connections of an earlier server that are in the state TIME_WAIT do not prevent binding. If
        # another server listens on the address, bind() still fails.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
