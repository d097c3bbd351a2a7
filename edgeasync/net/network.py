"""The sockets of a process: a context of ZeroMQ, of one hub, agent or peer, or of several that share it."""

import contextlib
from collections.abc import Iterator

import zmq


class Network:
    """Makes the sockets of one hub, agent or peer. Those that speak over `inproc:` addresses have to share one."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def close(self) -> None:
        """Close all sockets, and wait as long as those that were closed may take to send what they hold."""
        self.context.destroy()  # not `term`, which would wait for ever for a socket that an error left open


@contextlib.contextmanager
def shared_or_own(shared: Network | None) -> Iterator[Network]:
    """Yield the shared network or, without one, a new one that is closed at the end."""
    network = Network() if shared is None else shared
    try:
        yield network
    finally:
        if shared is None:
            network.close()
