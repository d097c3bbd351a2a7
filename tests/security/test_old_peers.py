"""Peers of ZeroMQ 3 and older, of which libzmq tells a hub less: they end nobody, and are not heard."""

import asyncio
import contextlib

import pytest

from edgeasync import Parameter, ParameterSpec, fetch_status
from edgeasync.net.network import ZmqNetwork
from edgeasync.protocol import wire
from edgeasync.protocol.messages import StatusRequest
from edgeasync.runtime.hub import HubRuntime
from tests.support.parts.hubs import run_settings, zeros
from tests.support.programs.processes import PATIENCE_S
from tests.support.security.keyed import client, is_welcome
from tests.support.security.zmtp import tcp

REQUEST = wire.encode(StatusRequest())
V1_FRAME, V2_FRAME = bytes([len(REQUEST) + 1, 0]) + REQUEST, bytes([0, len(REQUEST)]) + REQUEST
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
OLD = {"1.0": b"\x01\x00" + V1_FRAME, "2.0": SIGNATURE + b"\x01\x05" + b"\0\0" + V2_FRAME}
"""All that a peer of an older ZMTP says: greeting, empty identity, message."""


@pytest.mark.process
def test_a_hub_without_keys_hears_no_peer_of_an_older_zmtp(commands):
    """Red before: 40 bytes of anybody who reached the port ended the hub."""
    hub, address = commands.hub(commands.settings())
    for said in OLD.values():
        with tcp(address) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(said)
            while answer := peer.recv(4096):
                assert REQUEST[:3] not in answer[14:]
    with client(address) as device:
        assert is_welcome(device.join("pi-1"))
    hub.signal(15)
    assert hub.wait() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("said", OLD.values(), ids=OLD)
async def test_in_a_context_of_somebody_else_such_a_peer_connects_and_is_not_heard(tmp_path, said):
    """libzmq could ask a ZAP handler of that context, so the hub does not let it refuse them."""
    network, listening = ZmqNetwork(), asyncio.Event()
    spec = ParameterSpec((Parameter("w", (4,)),))
    settings = run_settings(tmp_path, "tcp://127.0.0.1:*")
    hub = HubRuntime(settings, zeros(spec), network=network, on_report=lambda _: listening.set())
    serving = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await listening.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(hub.address.rpartition(":")[2]))
        writer.write(said)
        await reader.readexactly(2)
        told = await asyncio.to_thread(fetch_status, hub.address, PATIENCE_S)
        assert told["devices"] == []
        writer.close()
        hub.request_stop()
        assert await serving == "stopping"
    network.close()
