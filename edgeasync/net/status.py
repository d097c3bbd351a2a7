"""Request the status of a running hub, and send orders to it."""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from edgeasync.config import expanded
from edgeasync.durable.keys import operator_keys
from edgeasync.errors import AccessError, ConfigError, HubUnreachableError, ProtocolError
from edgeasync.net.address import check_connect, is_ipv6
from edgeasync.net.curve import mechanism_at
from edgeasync.net.dealer import Pair, connect, make_dealer
from edgeasync.net.reach import KeyMismatch, key_mismatch
from edgeasync.net.socket_monitor import DENIED
from edgeasync.protocol import wire
from edgeasync.protocol.messages import DEVICE_ID_PATTERN, Order, Refuse, Request, Status, StatusRequest, Wake
from edgeasync.protocol.status import RecentEventList
from edgeasync.structs import parse_json

AGAIN_S = 0.1
"""Delay before a request is repeated after its connection was broken."""

STATUS_BYTES_MAX = 1 << 26
"""Maximum size of a status in bytes. Ten thousand devices need about 10 MB."""

_ENDINGS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)

_MISMATCHES: dict[KeyMismatch, str] = {
    "unknown": "this hub does not know this operator key; set keys (--keys) to a folder of keys of this hub",
    "another hub": "this hub has another key than the one in the folder of keys; set keys (--keys) to a folder of "
    "this hub, or correct the address",
    "no keys there": "this hub has no keys; remove keys (--keys)",
    "no keys here": "this hub answers only operators; set keys (--keys) to the folder of its keys",
}

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

Answer = TypeVar("Answer")

_Ending = Literal["answered", "denied", "cut", "lost", "late"]
"""How a connection ended.

`cut` means that it ended during the handshake. `lost` means that it ended after the handshake, or
because of a temporary problem.
"""


def fetch_status(
    address: str, timeout_s: float = 3.0, keys: Path | None = None, *, wake: bool = False, watch: bool = False
) -> dict[str, Any]:
    """Return the status of the hub at `address`; blocks for up to `timeout_s`.

    With `wake`, also wake its fleet. With `watch`, the status may be a second old, or more in a
    large fleet, and costs the hub nothing if another client has just requested it. The page "Events
    and JSON" describes the keys of the status. For a hub with keys, pass an operator's folder as
    `keys`.

    Raises `AddressError` if the address cannot be used, `StorageError` if the folder of keys cannot
    be read, `AccessError` if the keys do not match, `HubUnreachableError` if no answer arrives in
    time, or `ProtocolError` if the answer is not from a hub of this version.

    >>> import tempfile
    >>> from edgeasync import Hub, fetch_status
    >>> from edgeasync.training.numpy_models import SoftmaxModel
    >>> with Hub(SoftmaxModel(inputs=3, classes=2), run=tempfile.mkdtemp(), bind="tcp://127.0.0.1:*") as hub:
    ...     fetch_status(hub.address)["version"]
    0
    """
    pair = None if keys is None else operator_keys(expanded(keys))
    return ask(address, timeout_s, pair, Wake() if wake else StatusRequest(watches=watch))


def fetch_events(address: str, after: int, timeout_s: float = 3.0, keys: Path | None = None) -> RecentEventList:
    """Return the events of the hub at `address` after a number; raises the errors of `fetch_status`."""
    pair = None if keys is None else operator_keys(expanded(keys))
    request = StatusRequest(events_after=after)
    return _ask_until_answered(address, timeout_s, pair, request, lambda text: parse_json(text, RecentEventList))


def give_order(
    address: str,
    device_id: str,
    order: Literal["quarantine", "release"],
    timeout_s: float = 3.0,
    keys: Path | None = None,
) -> dict[str, Any]:
    """Exclude or release a device and all others with its key; return the hub's status.

    Updates from an excluded device do not count until it is released, even if hub or device
    restart. When this function returns, the order is in the hub's journal. If the hub has no
    journal, the next checkpoint will contain the order.

    Raises the errors of `fetch_status`, and `ConfigError` if the hub does not know the device.
    """
    if not re.match(DEVICE_ID_PATTERN, device_id):
        raise ConfigError(
            f"{device_id!r} is not a valid device name; list the hub's devices with 'edgeasync status'"
        )
    pair = None if keys is None else operator_keys(expanded(keys))
    return ask(address, timeout_s, pair, Order(device_id, order))


def ask(address: str, timeout_s: float, pair: Pair | None, question: Request) -> dict[str, Any]:
    """Send a request to the hub at `address`; return the status with which it answers.

    `pair` contains the operator's key pair and the hub's key. Raises the errors of `fetch_status`,
    and `ConfigError` if the hub refuses the request.
    """
    return _ask_until_answered(address, timeout_s, pair, question, _read_status)


def _ask_until_answered(
    address: str, timeout_s: float, pair: Pair | None, question: Request, read: Callable[[bytes], Answer]
) -> Answer:
    """Send a request over new connections until one is answered; return the answer that `read` parses."""
    check_connect(address, insecure=True)  # allowed without keys, because a device trusts nothing in a status
    context: Context = zmq.Context()
    until_s, cuts = time.monotonic() + timeout_s, 0
    try:
        while True:
            frames, ending = _ask(context, address, pair, until_s, question)
            if frames is not None:
                return read(_payload(frames))
            cuts += ending == "cut"
            if ending != "lost":
                _check_keys(address, ending, cuts, keyed=pair is not None)
            if ending == "late":
                raise HubUnreachableError(
                    f"no hub answers at {address} within {timeout_s:g} s; start one with 'edgeasync hub', "
                    "check the address and the network, or wait longer (--timeout-s)"
                )
            time.sleep(AGAIN_S)
    except (ProtocolError, ValueError) as error:
        raise ProtocolError(
            f"{address}: not an edgeasync hub of this version ({error}); check the address"
        ) from error
    finally:
        context.term()


def is_denied(address: str, pair: Pair, timeout_s: float) -> bool:
    """Return whether a hub rejects these keys, without sending a request."""
    with zmq.Context() as context, _asking(context, address, pair, zmq.EVENT_HANDSHAKE_SUCCEEDED) as (_, monitor):
        return bool(monitor.poll(math.ceil(1000 * timeout_s))) and _ending(monitor) == "denied"


def _ask(
    context: Context,
    address: str,
    pair: Pair | None,
    until_s: float,
    question: Request,
) -> tuple[list[bytes] | None, _Ending]:
    """Send a request over a new connection.

    Return the answer, if any, and how the connection ended.
    """
    with _asking(context, address, pair) as (socket, monitor):
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        socket.send(wire.encode(question))
        ready = dict(poller.poll(math.ceil(max(0.0, until_s - time.monotonic()) * 1000)))
        if socket in ready:
            return socket.recv_multipart(), "answered"
        return None, _ending(monitor) if monitor in ready else "late"


@contextlib.contextmanager
def _asking(context: Context, address: str, pair: Pair | None, events: int = 0) -> Iterator[tuple[Socket, Socket]]:
    """Yield a socket that connects to a hub, and its monitor.

    The monitor reports how the connection ends, and other `events`.
    """
    socket = make_dealer(context, STATUS_BYTES_MAX, pair, ipv6=is_ipv6(address))
    monitor = socket.get_monitor_socket(_ENDINGS | events)
    try:
        connect(socket, address)
        yield socket, monitor
    finally:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)


def _ending(monitor: Socket) -> _Ending:
    """Read an event that ended the connection, and return how it ended. The request is then lost."""
    message = recv_monitor_message(monitor)
    match message["event"]:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "denied" if message["value"] == DENIED else "lost"
        case zmq.EVENT_DISCONNECTED:
            return "lost"
        case _:
            return "cut"


def _check_keys(address: str, ending: _Ending, cuts: int, *, keyed: bool) -> None:
    """Raise `AccessError` if no hub answers because the keys do not match.

    `cuts` is the number of aborted handshakes.
    """
    denied = ending == "denied"
    mechanism = "" if denied else asyncio.run(mechanism_at(address))
    if (mismatch := key_mismatch(denied=denied, keyed=keyed, mechanism=mechanism, cuts=cuts)) is not None:
        raise AccessError(f"{address}: {_MISMATCHES[mismatch]}")


def _payload(frames: list[bytes]) -> bytes:
    if len(frames) == 1 and isinstance(refuse := wire.decode(frames[0]), Refuse):
        raise ConfigError(f"the hub refused the request: {refuse.sentence}")
    if len(frames) != 2 or not isinstance(wire.decode(frames[0]), Status):
        raise ProtocolError("the reply is not a status")
    return frames[1]


def _read_status(text: bytes) -> dict[str, Any]:
    status = parse_json(text, dict[str, Any])
    if missing := {"lineage", "version", "devices"} - set(status):
        raise ProtocolError(f"the status lacks the field {min(missing)!r}")
    return status
