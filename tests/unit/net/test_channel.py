"""The channel reads every message, although libzmq's descriptor tells of each only once."""

import asyncio

import pytest
import zmq

from edgeasync.net.channel import BATCH, FRAMES_AT_A_TIME, Channel
from tests.support.programs.processes import PATIENCE_S

pytestmark = pytest.mark.asyncio

SENDS = 20_000
"""libzmq looks for new messages at one send in a few thousand, by the processor's clock."""


@pytest.fixture
def sockets():
    """A ROUTER, bound, and a DEALER that is not connected yet."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.bind("inproc://hub")
    yield router, dealer
    context.destroy(0)


async def test_a_message_that_comes_in_while_a_send_fails_is_read(sockets):
    router, dealer = sockets
    came = asyncio.Event()
    channel = Channel(router, asyncio.get_running_loop(), lambda *_: came.set())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0)  # the channel reads for the first time
            await asyncio.sleep(0)
            dealer.connect("inproc://hub")
            dealer.send(b"status?")
            for _ in range(SENDS):
                assert not channel.send(b"nobody", b"x")
            await came.wait()
    finally:
        channel.close(0)


async def test_a_message_that_comes_in_during_a_send_of_a_dealer_is_read(sockets):
    router, dealer = sockets
    dealer.set(zmq.ROUTING_ID, b"device")
    dealer.connect("inproc://hub")
    came = asyncio.Event()
    channel = Channel(dealer, asyncio.get_running_loop(), lambda *_: came.set())
    try:
        async with asyncio.timeout(PATIENCE_S):
            channel.send(b"", b"hello")
            assert router.recv_multipart() == [b"device", b"hello"]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            router.send_multipart([b"device", b"answer"])
            for _ in range(SENDS):
                channel.send(b"", b"x")
            await came.wait()
    finally:
        channel.close(0)


class Loop:
    """An event loop that calls nothing by itself."""

    def __init__(self):
        self.soon = []

    def add_reader(self, _, callback):
        self.on_readable = callback

    def remove_reader(self, _):
        pass

    def call_soon(self, callback):
        self.soon.append(callback)


async def test_a_socket_that_stays_full_is_read_in_one_batch_a_turn(sockets):
    router, dealer = sockets
    loop, read = Loop(), []
    channel = Channel(router, loop, lambda *_: read.append(1))
    try:
        dealer.connect("inproc://hub")
        for _ in range(4 * BATCH):
            dealer.send(b"message")
        while len(read) < 4 * BATCH:
            before, turn, loop.soon = len(read), loop.soon, []
            for callback in (loop.on_readable, *turn, loop.on_readable):
                callback()
            assert before < len(read) <= before + BATCH
            assert len(loop.soon) == 1
    finally:
        channel.close(0)


async def test_an_error_while_a_message_is_handled_leaves_no_message_unread(sockets):
    router, dealer = sockets
    loop, came, errors = asyncio.get_running_loop(), asyncio.Event(), []
    loop.set_exception_handler(lambda _, told: errors.append(told["exception"]))

    def on_message(peer, header, payload):
        if header != b"last":
            raise ZeroDivisionError
        came.set()

    channel = Channel(router, loop, on_message)
    try:
        async with asyncio.timeout(PATIENCE_S):
            dealer.connect("inproc://hub")
            for header in [b"bad"] * 5 + [b"last"]:
                dealer.send(header)
            await came.wait()
    finally:
        channel.close(0)
    assert [type(error) for error in errors] == [ZeroDivisionError] * 5


async def test_a_long_message_is_told_of_before_its_end_and_the_loop_has_its_turns(sockets):
    """Red before: the loop stood still until the last frame was read."""
    router, dealer = sockets
    loop, came, turns, told = asyncio.get_running_loop(), asyncio.Event(), [], []
    dealer.connect("inproc://hub")
    for _ in range(10 * FRAMES_AT_A_TIME):
        dealer.send(b"", zmq.SNDMORE)
    dealer.send(b"")
    dealer.send_multipart([b"header", b"payload"])
    messages = []

    def on_message(peer, header, payload):
        messages.append((header, payload))
        if payload is not None:
            came.set()

    def turn():
        turns.append(len(messages))
        if not came.is_set():
            loop.call_soon(turn)

    channel = Channel(router, loop, on_message, on_endless=lambda: told.append(len(turns)))
    loop.call_soon(turn)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
    finally:
        channel.close(0)
    assert messages == [(b"", None), (b"header", b"payload")]
    assert told == [0]
    assert turns.count(0) >= 4
