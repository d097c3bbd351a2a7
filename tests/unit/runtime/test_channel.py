"""The channel's duty beside libzmq's edge-triggered descriptor: whatever a send takes in is read."""

import asyncio

import pytest
import zmq

from edgeasync.runtime.channel import Channel
from tests.support.processes import PATIENCE_S

SENDS = 20_000
"""libzmq looks for what came in at one send in a few thousand, by the processor's clock."""


@pytest.mark.asyncio
async def test_a_message_that_comes_in_while_a_send_fails_is_read():
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.bind("inproc://hub")
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
        dealer.close(0)
        context.destroy(0)


@pytest.mark.asyncio
async def test_an_error_in_what_a_message_leads_to_leaves_no_message_unread():
    loop, context = asyncio.get_running_loop(), zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind("inproc://hub")
    errors, came = [], asyncio.Event()
    loop.set_exception_handler(lambda _, told: errors.append(told["exception"]))

    def on_message(peer, header, payload):
        if header == b"last":
            came.set()
        else:
            raise ZeroDivisionError

    channel = Channel(router, loop, on_message)
    try:
        async with asyncio.timeout(PATIENCE_S):
            dealer.connect("inproc://hub")
            for _ in range(5):
                dealer.send(b"bad")
            dealer.send(b"last")
            await came.wait()
    finally:
        channel.close(0)
        dealer.close(0)
        context.destroy(0)
    assert [type(error) for error in errors] == [ZeroDivisionError] * 5
