"""Who is not let in, and that nobody else gets a message in: CURVE and the ZAP handler over real sockets."""

import asyncio
import contextlib
import socket
import time

import pytest
import zmq

from edgeasync.config import FilePath
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.keys import HubKeys, KeyPair
from edgeasync.errors import AccessError, AddressError
from edgeasync.net.connection_bounds import ConnectionBounds
from edgeasync.net.connections import Connections
from edgeasync.net.curve import CUTS_MIN, FRAME_BYTES, mechanism_at, serve_keys, use_keys
from edgeasync.net.socket_monitor import DENIED
from edgeasync.net.status import fetch_status
from edgeasync.net.zap import ENDPOINT, ZapHandler
from edgeasync.protocol.messages import Refuse, Status, StatusRequest
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.hub import HubRuntime
from tests.support.parts.agents import agent_parts
from tests.support.parts.hubs import run_settings, zeros
from tests.support.programs.command_line import ACCESS, NO_HUB, assert_told
from tests.support.programs.processes import MODEL, PATIENCE_S, until
from tests.support.security.keyed import (
    PATIENCE_MS,
    Proxy,
    ask,
    client,
    denied,
    enrolled,
    is_welcome,
    start_hub,
)

pytestmark = pytest.mark.process


def accepted(address, keys):
    return ask(address, keys)["messages_accepted"]


# -- who comes in, and who does not -------------------------------------------------------------------------------


def test_nobody_else_gets_a_message_in(commands, keys):
    """A plain client, an unknown key, one for another hub, and a revoked key; each is counted under its name."""
    pair, gone, hub = enrolled(keys), enrolled(keys, "pi-2"), keys.pair().public
    keys.revoke("pi-2")
    _, address = start_hub(commands, keys)
    enemies = {
        "unknown_key": (KeyPair.make(), hub),
        "revoked": (gone, hub),
        "hub_key": (pair, KeyPair.make().public),
    }
    for name, arguments in enemies.items():
        with client(address, *arguments) as enemy:
            enemy.say(StatusRequest())
            enemy.ended()
            assert not enemy.socket.poll(0)
        denied(address, keys, name)
    plain = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL".ljust(64, b"\0")
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as stranger:
        stranger.sendall(plain + b"\x04\x19\x05READY")
        read_to_end(stranger)
    assert denied(address, keys, "plain").keys() == {*enemies, "plain"}
    assert accepted(address, keys).keys() == {"statusrequest"}


def test_a_denied_key_is_not_asked_for_again_by_libzmq(commands, keys):
    _, address = start_hub(commands, keys)
    with client(address, KeyPair.make(), keys.pair().public) as enemy:
        assert enemy.failure() == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        enemy.ended()
    assert denied(address, keys, "unknown_key") == {"unknown_key": 1}


def test_what_was_recorded_counts_no_second_time(commands, keys):
    """Bytes that an enrolled device has sent, sent once more: no message comes of them."""
    pair = enrolled(keys)
    _, address = start_hub(commands, keys)
    port = int(address.rpartition(":")[2])
    with Proxy(port) as proxy, client(proxy.address, pair, keys.pair().public) as device:
        assert is_welcome(device.join("pi-1"))
    before = accepted(address, keys)
    with socket.create_connection(("127.0.0.1", port)) as again:
        again.sendall(bytes(proxy.recorded))
        read_to_end(again)
    counts = until(lambda: ask(address, keys)["denied"], "the recorded bytes denied")
    assert counts == {"protocol": 1}
    assert accepted(address, keys)["hello"] == before["hello"] == 1


def read_to_end(connection):
    """Read until the hub has closed the connection."""
    connection.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass


# -- the limit of frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kib", [64, 1024, 16384])
def test_a_piece_of_exactly_the_limit_passes(commands, keys, kib):
    pair = enrolled(keys)
    _, address = start_hub(commands, keys, more=f"[limits]\npiece_bytes = '{kib} KiB'\n")
    with client(address, pair, keys.pair().public) as device:
        device.say(StatusRequest(), bytes(kib * 1024))
        assert isinstance(device.hear(), Refuse)  # it was read: such a message has no payload
        device.say(StatusRequest())
        assert isinstance(device.hear(), Status)
        device.say(StatusRequest(), bytes(max(kib, 1024) * 1024 + 1))
        device.ended()


def test_what_curve_adds_to_a_frame():
    """libzmq's limit counts the frame as it travels: 33 bytes more, and not one less."""
    context, pair, hub = zmq.Context(), KeyPair.make(), KeyPair.make()
    for spare, arrives in ((FRAME_BYTES, True), (FRAME_BYTES - 1, False)):
        server, device = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        server.set(zmq.CURVE_SERVER, 1)
        server.set(zmq.CURVE_SECRETKEY, hub.secret)
        server.set(zmq.MAXMSGSIZE, 65536 + spare)
        monitor = server.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        server.bind("tcp://127.0.0.1:*")
        use_keys(device, pair, hub.public)
        device.connect(server.get_string(zmq.LAST_ENDPOINT))
        device.send(bytes(65536))
        assert (server if arrives else monitor).poll(PATIENCE_MS)
        assert bool(server.poll(0)) == arrives
        server.disable_monitor()
        for each in (monitor, server, device):
            each.close(0)
    context.term()


# -- the ZAP handler ----------------------------------------------------------------------------------------------


async def knock(decide, *, stopped=""):
    """Return what becomes of a client where `decide` decides: its failure, and whether a message came.

    A handler that is `stopped` is closed, or left hanging; the connection is then counted as unfinished.
    """
    context, hub, pair = zmq.Context(), KeyPair.make(), KeyPair.make()
    zap = ZapHandler(context, asyncio.get_running_loop(), decide)
    await asyncio.sleep(0)  # its first look is done: a hanging one looks no more
    server = context.socket(zmq.ROUTER)
    serve_keys(server, hub)
    server.set(zmq.HANDSHAKE_IVL, 200)
    counted: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    bounds = ConnectionBounds(Limits(), lease_s=15.0, files_max=1000, by_address=True)
    connections = Connections(server, loop, bounds, counted.put_nowait, lambda: None, encrypted=True)
    server.bind("tcp://127.0.0.1:*")
    if stopped == "closed":
        zap.close()
    elif stopped == "hanging":
        loop.remove_reader(zap._fd)
    with client(server.get_string(zmq.LAST_ENDPOINT), pair, hub.public) as device:
        device.say(StatusRequest())
        failure = await asyncio.to_thread(device.failure)
    if stopped:
        assert await counted.get() == "unfinished"
    arrived = server.poll(0)
    connections.close()
    zap.close()
    context.destroy(linger=0)
    return failure, arrived


def no(key, address):
    return False


def wrong(key, address):
    raise ValueError("a defect")


def truthy(key, address):
    return "yes"


@pytest.mark.asyncio
@pytest.mark.parametrize("decide", [no, wrong, truthy])
async def test_whatever_is_no_plain_yes_is_a_denial(decide):
    failure, arrived = await knock(decide)
    assert failure == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert not arrived


@pytest.mark.asyncio
async def test_a_key_that_comes_too_often_is_told_another_code():
    """An agent that is told 400 tells a person; any other code may pass, and it tries again."""
    context, hub, pair = zmq.Context(), KeyPair.make(), KeyPair.make()
    answers = iter([None, False])
    zap = ZapHandler(context, asyncio.get_running_loop(), lambda key, address: next(answers))
    server = context.socket(zmq.ROUTER)
    serve_keys(server, hub)
    server.bind("tcp://127.0.0.1:*")
    codes = []
    for _ in range(2):
        with client(server.get_string(zmq.LAST_ENDPOINT), pair, hub.public) as device:
            assert await asyncio.to_thread(device.failure) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            codes.append(device.code)
    zap.close()
    context.destroy(linger=0)
    assert codes == [500, DENIED]


@pytest.mark.asyncio
@pytest.mark.parametrize("stopped", ["closed", "hanging"])
async def test_with_a_stopped_handler_nobody_comes_in(stopped):
    failure, arrived = await knock(lambda key, address: True, stopped=stopped)
    assert failure != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not arrived


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"1.0"],
        [b"1.0", b"7"],
        [b"1.0", b"7", b"edgeasync", b"", b"", b"PLAIN", b"name", b"word"],
        [b"1.0", b"7", b"edgeasync", b"", b"", b"NULL"],
        [b"1.0", b"7", b"edgeasync", b"", b"", b"CURVE"],
        [b"1.0", b"7", b"edgeasync", b"", b"", b"CURVE", b"short"],
        [b"1.0", b"7", b"other", b"", b"", b"CURVE", bytes(32)],
        [b"2.0", b"7", b"edgeasync", b"", b"", b"CURVE", bytes(32)],
        [b"1.0", b"7", b"edgeasync", b"\xff", b"", b"CURVE", bytes(32), b""],
    ],
)
async def test_a_request_that_libzmq_would_not_make_lets_nobody_in(frames):
    context = zmq.Context()
    zap = ZapHandler(context, asyncio.get_running_loop(), lambda key, address: True)
    asker = context.socket(zmq.DEALER)
    asker.connect(ENDPOINT)
    asker.send_multipart([b"", *frames])
    asker.send_multipart([b"", b"1.0", b"8", b"edgeasync", b"", b"", b"CURVE", bytes(32)])
    answers = {}
    while b"8" not in answers:
        assert await asyncio.to_thread(asker.poll, PATIENCE_MS)
        _, version, request, status, *_ = asker.recv_multipart()
        assert version == b"1.0"
        answers[request] = status
    assert answers.pop(b"8") == b"200"
    assert set(answers.values()) <= {b"400", b"500"}
    zap.close()
    context.destroy(linger=0)


# -- what people are told -----------------------------------------------------------------------------------------


def keyed_state(commands, name, pair, hub, address):
    """Write the state folder of an enrolled device."""
    state = DeviceKeys(commands.folder / name)
    state.know(hub, (address,), name)
    (commands.folder / name / "keys" / "device.key").write_text(pair.secret.hex())
    (commands.folder / name / "keys" / "device.key").chmod(0o600)


def test_an_agent_says_which_key_does_not_fit(commands, keys):
    _, address = start_hub(commands, keys)
    _, plain = commands.hub(commands.settings(name="plain"))
    hub = keys.pair().public
    cases = {
        "stranger": (KeyPair.make(), hub, address, "does not know this device's key"),
        "wronghub": (enrolled(keys, "wronghub"), KeyPair.make().public, address, "or enrol this device again"),
        "tonone": (KeyPair.make(), hub, plain, "start that hub with --keys"),
        "noneto": (None, None, address, "this device has no key"),
    }
    for name, (pair, hub_key, place, hint) in cases.items():
        if pair is not None:
            keyed_state(commands, name, pair, hub_key, place)
        agent = commands.agent(place, name)
        assert agent.wait() == ACCESS, agent
        assert hint in agent.stderr


GREETING_BYTES, HANDSHAKE_BYTES = 64, 310
"""What a hub has said when its handshake has begun, and a little more than when it is done."""


def test_a_handshake_that_breaks_says_nothing_about_keys(commands, keys):
    """The agent ended, and the status blamed the keys. A hub that shuts a key out breaks handshakes."""
    pair = enrolled(keys)
    _, address = start_hub(commands, keys)
    port = int(address.rpartition(":")[2])
    with Proxy(port, GREETING_BYTES) as proxy:
        keyed_state(commands, "pi-1", pair, keys.pair().public, proxy.address)
        assert commands.agent(proxy.address, "pi-1").wait_for("joined")
        assert proxy.cut == 1
    with Proxy(port, GREETING_BYTES) as proxy:
        token = keys.issue_token("pi-2", (proxy.address,), time.time()).text()
        assert commands.agent(proxy.address, "pi-2", "--enrol", token).wait_for("joined")
        assert proxy.cut == 1
    # The second connection asks how the hub secures connections.
    with Proxy(port, GREETING_BYTES, HANDSHAKE_BYTES, HANDSHAKE_BYTES) as proxy:
        assert fetch_status(proxy.address, PATIENCE_S, keys.folder)["devices"]
        assert proxy.cut == 2


@pytest.mark.asyncio
async def test_an_agent_that_is_put_off_tries_again(tmp_path):
    """Red before: it took the hub for one of another key, and ended. A hub puts off a key that comes too often."""
    context, pair = zmq.Context(), KeyPair.make()
    zap = ZapHandler(context, asyncio.get_running_loop(), lambda key, address: None)
    hub = context.socket(zmq.ROUTER)
    serve_keys(hub, pair)
    hub.bind("tcp://127.0.0.1:*")
    address, told = hub.get_string(zmq.LAST_ENDPOINT), asyncio.Queue()
    state = DeviceKeys(tmp_path)
    state.know(pair.public, (address,), "pi-1")
    agent = AgentRuntime(*agent_parts(None, keys=state), on_report=told.put_nowait)
    running = asyncio.create_task(agent.run())
    async with asyncio.timeout(PATIENCE_S):
        while (report := await told.get()).event != "unreachable":
            pass
        assert "keeps trying" in report.detail
        for _ in range(CUTS_MIN):
            zap_asked = asyncio.get_running_loop().create_future()
            zap._decide = lambda *_, asked=zap_asked: None if asked.done() else asked.set_result(None)
            await zap_asked
        agent.request_stop()
        assert await running == "stopped"
    zap.close()
    context.destroy(linger=0)


def test_status_is_for_operators(commands, keys):
    _, address = start_hub(commands, keys)
    assert commands.run("status", "--hub", address, "--keys", keys.folder).returncode == 0
    anna = keys.make_operator("anna")
    assert commands.run("status", "--hub", address, "--keys", anna).returncode == 0
    assert_told(commands.run("status", "--hub", address), ACCESS, "--keys")
    other = HubKeys.init(commands.folder / "other")
    assert_told(commands.run("status", "--hub", address, "--keys", other.folder), ACCESS, "another key")
    keys.revoke("anna")

    def refused():
        with contextlib.suppress(AccessError):
            fetch_status(address, PATIENCE_S, anna)
            return False
        return True

    until(refused, "the hub has read the list again")
    _, plain = commands.hub(commands.settings(name="plain"))
    assert_told(commands.run("status", "--hub", plain, "--keys", keys.folder), ACCESS, "has no keys")


def test_who_is_no_hub_is_not_taken_for_one_with_other_keys(commands, keys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        told = commands.run("status", "--hub", address, "--keys", keys.folder, "--timeout-s", "0.2")
    assert_told(told, NO_HUB)


@pytest.mark.asyncio
async def test_how_an_address_secures_connections():
    context, pair = zmq.Context(), KeyPair.make()
    plain, keyed = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    serve_keys(keyed, pair)
    for server, mechanism in ((plain, "NULL"), (keyed, "CURVE")):
        server.bind("tcp://127.0.0.1:*")
        assert await mechanism_at(server.get_string(zmq.LAST_ENDPOINT)) == mechanism
    assert await mechanism_at("inproc://x") == ""
    assert await mechanism_at("ipc:///nowhere") == ""
    context.destroy(linger=0)


# -- in Python ----------------------------------------------------------------------------------------------------


def make_hub(tmp_path, bind, keys=None):
    return HubRuntime(run_settings(tmp_path / "run", bind, keys=keys and FilePath(keys)), zeros(MODEL.spec))


def test_with_keys_a_hub_may_listen_anywhere(tmp_path, keys):
    make_hub(tmp_path, "tcp://0.0.0.0:5555", keys=keys.folder)
    with pytest.raises(AddressError):
        make_hub(tmp_path, "tcp://0.0.0.0:5555")
    with pytest.raises(AddressError, match="inproc"):
        make_hub(tmp_path, "inproc://hub", keys=keys.folder)
