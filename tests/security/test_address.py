"""What counts as loopback, and who speaks in clear beyond it: only who was told to."""

import socket

import pytest

from edgeasync.errors import AddressError
from edgeasync.net.address import check_bind, check_connect
from edgeasync.runtime.agent import AgentRuntime
from tests.support.parts.agents import agent_parts
from tests.support.programs.command_line import ADDRESS, mistake
from tests.support.programs.processes import Commands

LOOPBACK = ["tcp://127.0.0.1:5555", "tcp://127.9.9.9:5555", "tcp://[::1]:5555", "ipc:///run/hub", "inproc://hub"]
BEYOND = [
    "tcp://192.0.2.1:5555", "tcp://[2001:db8::1]:5555", "tcp://0.0.0.0:5555", "tcp://[::]:5555", "ipc://@hub",
]  # fmt: skip
NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "127.0.0.1.evil.example": ["192.0.2.66"],
    "half.example": ["127.0.0.1", "192.0.2.66"],
    "six.example": ["::1", "2001:db8::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "home.example": ["127.0.0.1"],
}


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """A resolver that knows `NAMES`, and no other name."""
    resolve = socket.getaddrinfo

    def look_up(host, port, *arguments, **options):
        if host in NAMES:
            return [found for address in NAMES[host] for found in resolve(address, port, *arguments, **options)]
        try:
            return resolve(host, port, *arguments, flags=socket.AI_NUMERICHOST, **options)
        except socket.gaierror:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def connect(address, *, insecure):
    check_connect(address, insecure=insecure)


@pytest.fixture(params=[check_bind, connect])
def check(request):
    return request.param


@pytest.mark.parametrize(
    "address", [*LOOPBACK, "tcp://localhost:5555", "tcp://home.example:1", "tcp://mapped.example:1"]
)
def test_loopback_needs_no_leave(check, address):
    check(address, insecure=False)


@pytest.mark.parametrize(
    "address",
    [*BEYOND, "tcp://127.0.0.1.evil.example:5555", "tcp://half.example:5555", "tcp://six.example:5555"],
)
def test_beyond_loopback_nobody_speaks_in_clear_unless_told_to(check, address):
    with pytest.raises(AddressError, match="--insecure"):
        check(address, insecure=False)
    check(address, insecure=True)


def test_a_hub_that_listens_everywhere_is_not_on_loopback():
    with pytest.raises(AddressError, match=r"could join; set up keys .*--insecure"):
        check_bind("tcp://*:5555", insecure=False)


@pytest.mark.parametrize("host", ["nowhere.example", "a..b", "x" * 64 + ".example"])
def test_a_name_that_does_not_resolve_is_told_by_name(check, host):
    with pytest.raises(AddressError, match=rf"cannot resolve the name {host}"):
        check(f"tcp://{host}:5555", insecure=False)
    check(f"tcp://{host}:5555", insecure=True)


@pytest.mark.parametrize("host", ["a b", " a", "a\t", "a\nb"])
def test_a_host_with_white_space_is_none(check, host):
    """The file in which a hub's keys remember addresses has them apart by white space."""
    with pytest.raises(AddressError, match="is not an address"):
        check(f"tcp://{host}:5555", insecure=True)


def agent(address, **section):
    return AgentRuntime(*agent_parts(lambda _: None, hub=address, **section))


def test_an_agent_speaks_in_clear_beyond_loopback_only_if_told_to():
    with pytest.raises(AddressError, match=r"192\.0\.2\.1.*enrol this device.*--insecure"):
        agent(("tcp://127.0.0.1:5555", "tcp://192.0.2.1:5555"))
    assert agent("tcp://192.0.2.1:5555", insecure=True).address == "tcp://192.0.2.1:5555"


@pytest.mark.process
@pytest.mark.parametrize("address", ["tcp://192.0.2.1:5555", "ipc://@hub"])
def test_the_commands_say_what_to_do(tmp_path, address):
    with Commands(tmp_path) as commands:
        data = commands.data("data.npz")
        for arguments in (["agent", "--data", data, "--hub"], ["hub", commands.settings(), "--bind"]):
            mistake(commands, ADDRESS, address, "--insecure", arguments=[*arguments, address])
