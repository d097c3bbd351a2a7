"""Enrol a device: send its public key to the hub, and receive the answer.

The connection is authenticated by the temporary key of an enrolment token.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import zmq

from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import KeyPair, Token
from edgeasync.errors import AccessError, ProtocolError, RefusedError
from edgeasync.net.address import is_ipv6
from edgeasync.net.channel import Channel
from edgeasync.net.curve import mechanism_at
from edgeasync.net.dealer import connect, make_dealer
from edgeasync.net.reach import keys_do_not_fit
from edgeasync.net.socket_monitor import Finding, SocketMonitor
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Enrol, Enrolled, Refuse

CONNECT_S = 5.0
"""Timeout of a connection attempt, after which another address is tried."""

ANSWER_S = 5.0
"""Minimum timeout for the hub's answer once the connection is established."""

ANSWER_ROUND_TRIPS = 8
"""Timeout for the hub's answer in round trips. Greetings, keys and answer need six round trips."""

PAUSE_S = 1.0

USED = "the hub rejected the token: it was used before or has expired; create another with 'edgeasync keys enrol'"

OnFailure = Callable[[str, Finding], Awaitable[None]]
"""Called with an address that did not answer, and with how far the connection got."""


async def enrol(
    context: "zmq.Context[zmq.Socket[bytes]]",
    token: Token,
    own: Key,
    addresses: tuple[str, ...],
    on_failure: OnFailure,
) -> str | None:
    """Send the device's own public key to the hub; return the name that the hub has assigned.

    The connection is authenticated by the token. Return `None` if the hub rejects the token. The
    addresses are tried in turn until one answers. Raises `AccessError` if another hub answers, and
    `RefusedError` if the hub uses another protocol version.
    """
    cuts: Counter[str] = Counter()
    while True:
        for address in addresses:
            answer, finding = await _ask(context, address, token, own)
            if isinstance(answer, Enrolled):
                return answer.name
            if finding == "denied" or (isinstance(answer, Refuse) and answer.code == "not_allowed"):
                return None
            if isinstance(answer, Refuse) and answer.code == "protocol_version":
                raise RefusedError(answer.sentence)
            if finding in ("foreign", "mechanism"):
                cuts[address] += 1
                mechanism = await mechanism_at(address)
                reason = keys_do_not_fit(finding, keyed=True, mechanism=mechanism, cuts=cuts[address])
                if reason:
                    raise AccessError(f"{address}: {reason}")
            await on_failure(address, finding)
        await asyncio.sleep(PAUSE_S)


async def _ask(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, token: Token, own: Key
) -> tuple[Enrolled | Refuse | None, Finding]:
    """Send the key over a new connection.

    Return the answer, if any, and how far the connection got.
    """
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[Enrolled | Refuse | None] = loop.create_future()

    def on_message(peer: bytes, header: bytes, payload: wire.Buffer | None) -> None:  # noqa: ARG001
        try:
            message = wire.decode(header)
        except wire.UnsupportedVersionError as error:
            message = error.to_refuse()
        except ProtocolError:
            return
        if isinstance(message, Enrolled | Refuse) and not heard.done():
            heard.set_result(message)

    def on_connected() -> None:
        if not patience.expired():
            now_s = loop.time()
            patience.reschedule(now_s + max(ANSWER_S, ANSWER_ROUND_TRIPS * (now_s - begun_s)))

    def on_disconnected() -> None:
        if not heard.done():
            heard.set_result(None)

    pair = KeyPair.of(token.secret), token.hub
    ipv6 = await asyncio.to_thread(is_ipv6, address)
    socket = make_dealer(context, wire.HEADER_BYTES_MAX, pair, ipv6=ipv6)
    begun_s = loop.time()
    monitor = SocketMonitor(socket, loop, on_connected, on_disconnected)
    channel = Channel(socket, loop, on_message)
    try:
        connect(socket, address)
        channel.send(b"", wire.encode(Enrol(own)))
        async with asyncio.timeout(CONNECT_S) as patience:
            return await heard, monitor.finding
    except TimeoutError:
        return None, monitor.finding
    finally:
        monitor.close()
        channel.close(0)
