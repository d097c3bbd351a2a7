"""The sockets of a process: a context of ZeroMQ, of one hub, agent or peer, or of several that share it."""

import zmq

from edgeasync.errors import AddressError


class ZmqNetwork:
    """Makes the sockets of one hub, agent or peer. Those that speak over `inproc:` addresses have to share one."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def close(self) -> None:
        """Close all sockets, and wait until those that linger have sent what they hold."""
        self.context.destroy()  # not `term`, which would wait for ever for a socket that an error left open


def bind(socket: "zmq.Socket[bytes]", address: str) -> str:
    """Let a socket listen at an address; return that, with the port that was found. Raises `AddressError`."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise AddressError(
            f"{address}: cannot be bound: {error.strerror}; "
            "stop what uses it, or give bind (--bind) another port or an address of this machine"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
