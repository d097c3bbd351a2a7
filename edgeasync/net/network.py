"""The ZeroMQ context of a hub, agent or peer. Several of them in one process may share it."""

import zmq

from edgeasync.errors import AddressError


class ZmqNetwork:
    """Creates the sockets of a hub, agent or peer.

    Parties that connect through `inproc:` addresses must share one `ZmqNetwork`.
    """

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def close(self) -> None:
        """Close all sockets, and wait until each has sent its messages or its linger time is over."""
        self.context.destroy()  # `term` would block if an error had left a socket open


def bind(socket: "zmq.Socket[bytes]", address: str) -> str:
    """Bind a socket; return the address with the port that it uses. Raises `AddressError`."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise AddressError(
            f"{address}: cannot listen on this address: {error.strerror}; stop the program that uses it, or set "
            "bind (--bind) to another port or an address of this machine"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
