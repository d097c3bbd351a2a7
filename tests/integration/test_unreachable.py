"""An agent that reaches no hub says since when, and why."""

import asyncio
import contextlib
import re
import socket
import time
from datetime import datetime

import pytest
import zmq.asyncio

from edgeasync.cli.output import Printer
from edgeasync.cli.status import print_status
from edgeasync.errors import ProtocolError, RefusedError
from edgeasync.net.status import fetch_status
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Refuse, Status
from edgeasync.runtime.agent import AgentRuntime
from tests.support.formats.versions import in_version
from tests.support.parts.agents import agent_parts
from tests.support.programs.processes import PATIENCE_S, free_address


@contextlib.asynccontextmanager
async def unknown():
    yield "tcp://999.1.1.1:5555"


@contextlib.asynccontextmanager
async def refusing():
    yield free_address()


@contextlib.asynccontextmanager
async def no_socket():
    yield "ipc:///nowhere/hub"


@contextlib.asynccontextmanager
async def deaf():
    """A host that takes no more connections, and says nothing of that."""
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield address_of(server)


@contextlib.asynccontextmanager
async def silent():
    """A host that takes the connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield address_of(server)


@contextlib.asynccontextmanager
async def web_server():
    async def answer(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield address_of(server.sockets[0])


@contextlib.asynccontextmanager
async def other_service(*answer):
    """A ZeroMQ server of something else, that answers with these frames, or not at all."""
    context = zmq.asyncio.Context()
    server = context.socket(zmq.ROUTER)
    server.bind("tcp://127.0.0.1:*")

    async def serve():
        while True:
            peer, *_ = await server.recv_multipart()
            if answer:
                await server.send_multipart([peer, *answer])

    serving = asyncio.create_task(serve())
    try:
        yield server.get_string(zmq.LAST_ENDPOINT)
    finally:
        serving.cancel()
        await asyncio.wait((serving,))
        context.destroy(0)


def address_of(server):
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


async def first_words(*addresses):
    """Run an agent until it says that it reaches no hub; return what it says, and all it said before."""
    said, told = asyncio.get_running_loop().create_future(), []

    def on_report(report):
        told.append(report.event)
        if report.event == "unreachable" and not said.done():
            said.set_result(report.detail)

    agent = AgentRuntime(*agent_parts(None, hub=addresses, insecure=True), on_report=on_report)
    running = asyncio.create_task(agent.run())
    async with asyncio.timeout(PATIENCE_S):
        detail = await said
        agent.request_stop()
        assert await running == "stopped"
    return detail, told


REASONS = {
    "unknown": (unknown, r"cannot resolve the name 999\.1\.1\.1 \(.+\)"),
    "refusing": (refusing, "connection refused, start the hub"),
    "no socket": (no_socket, "connection refused, start the hub"),
    "deaf": (deaf, "no answer"),
    "silent": (
        silent,
        "connected, but no reply: not an edgeasync hub, or a hub that hangs",
    ),
    "web server": (web_server, "not an edgeasync hub"),
    "other service": (other_service, "connected, but no reply: another ZeroMQ program"),
    "junk": (lambda: other_service(b"junk"), r"not an edgeasync hub of this version \(header is not"),
}


@pytest.mark.asyncio
async def test_a_hub_of_another_protocol_version_ends_an_agent():
    async with other_service(in_version(wire.encode(Status()), 99)) as address:
        agent = AgentRuntime(*agent_parts(None, hub=address, insecure=True))
        with pytest.raises(
            RefusedError, match=r"got protocol version 99, expected \d+; install the same version of edgeasync"
        ):
            await asyncio.wait_for(agent.run(), PATIENCE_S)


def ask_and_print(address):
    print_status(fetch_status(address, PATIENCE_S), address, Printer(json=False))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "said",
    [
        b"[" * 100_000,
        b'{"lineage":1,"version":2,"devices":3}',
        b'{"lineage":1,"version":2,"devices":' + b"[" * 10_000,
    ],
    ids=["no object", "of other types", "too deep"],
)
async def test_a_status_that_no_hub_would_send_is_told_in_a_sentence(said):
    """Red before: a `KeyError`, or a `RecursionError`."""
    async with other_service(wire.encode(Status()), said) as address:
        with pytest.raises(ProtocolError, match="not an edgeasync hub of this version"):
            await asyncio.to_thread(ask_and_print, address)


@pytest.mark.asyncio
async def test_an_agent_says_since_when_and_why_it_reaches_no_hub():
    """All reasons at once, and two hubs of a list: each takes as long as an agent waits for an answer."""
    started_s = time.time()
    several = "tcp://999.1.1.1:5555", free_address()
    async with contextlib.AsyncExitStack() as hosts:
        addresses = [await hosts.enter_async_context(make()) for make, _ in REASONS.values()]
        full = await hosts.enter_async_context(other_service(wire.encode(Refuse("hub_full", "full", 30.0))))
        *found, of_several, of_a_full_one = await asyncio.gather(
            *map(first_words, addresses), first_words(*several), first_words(full, several[1])
        )
    for (name, (_, reason)), address, (detail, told) in zip(REASONS.items(), addresses, found, strict=True):
        since, _, rest = detail.partition(": ")
        assert abs(datetime.fromisoformat(since.removeprefix("since ")).timestamp() - started_s) < 10, name
        assert re.match(f"{re.escape(address)}: {reason}.*, .*check", rest), f"{name}: {detail}"
        assert told == ["waiting", "unreachable"], name
    detail, told = of_several
    assert re.fullmatch(
        f"since .*: {several[0]}: cannot resolve the name .*; {several[1]}: connection refused, .*", detail
    )
    assert told == ["waiting", "waiting", "unreachable"]
    detail, told = of_a_full_one
    assert re.fullmatch(f"since [^;]*: {several[1]}: connection refused, [^;]*", detail), (
        "the other one was reached"
    )
    assert told == ["warning", "waiting", "waiting", "unreachable"]
