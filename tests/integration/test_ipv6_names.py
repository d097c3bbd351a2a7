"""Hosts that have only an IPv6 address: everything that connects, or listens, takes them alike.

`::1` without brackets stands for such a name: the resolver knows no IPv4 address of it.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edgeasync import Agent, Hub, fetch_status, join
from edgeasync.durable.keys import HubKeys
from edgeasync.net.address import is_ipv6
from tests.support.parts.small_runs import MODEL
from tests.support.programs.command_line import run_command
from tests.support.programs.peers import FILE, name_of, write_list
from tests.support.programs.processes import PATIENCE_S, free_address

pytestmark = pytest.mark.process

DATA = np.eye(4), np.array([0, 1, 0, 1])


def named():
    """Return a free address with such a name."""
    return free_address().replace("127.0.0.1", "::1")


@pytest.fixture
def hub(tmp_path):
    with Hub(MODEL, run=tmp_path / "run", bind=named()) as hub:
        yield hub.address.replace("[::1]", "::1")


def agent_joins(address, folder):
    with Agent(address, DATA) as agent:
        agent.wait_until_joined(PATIENCE_S)


def loop_joins(address, folder):
    arrays = {each.name: np.zeros(each.shape, np.float32) for each in MODEL.spec.parameters}
    with join(address, arrays, timeout_s=PATIENCE_S) as session:
        assert session.connected


def status_comes(address, folder):
    assert fetch_status(address, PATIENCE_S)["version"] == 0


def doctor_is_content(address, folder):
    told = run_command(folder, "doctor", "--hub", address, "--state", folder / "state", "--json")
    levels = {line["name"]: line["level"] for line in map(json.loads, told.stdout.splitlines())}
    assert (levels["hub"], levels["protocol"]) == ("ok", "ok")


@pytest.mark.parametrize("connects", [agent_joins, loop_joins, status_comes, doctor_is_content])
def test_a_hub_is_reached(hub, tmp_path, connects):
    connects(hub, tmp_path)


def test_a_device_enrols(tmp_path):
    keys = HubKeys.init(tmp_path / "keys")
    address = named()
    token = keys.issue_token("pi", (address,), time.time()).text()
    with (
        Hub(MODEL, run=tmp_path / "run", bind=address, keys=tmp_path / "keys"),
        Agent(data=DATA, enrol=token, state=tmp_path / "pi") as agent,
    ):
        agent.wait_until_joined(PATIENCE_S)


def test_peers_reach_each_other(tmp_path):
    write_list(tmp_path, (0, 1), named().rpartition(":")[0] + ":{number}")
    text = (tmp_path / FILE).read_text()
    for number in (0, 1):
        text = text.replace(f'tcp://::1:{number}"', f'{named()}"')
    (tmp_path / FILE).write_text(text)

    def live(number):
        model = {"w": np.full(3, number, np.float32)}
        how = {"peers": tmp_path / FILE, "name": name_of(number), "state": tmp_path / name_of(number)}
        with join(model=model, topology="ring", round_steps=2, lease_s=PATIENCE_S, **how) as session:
            until_s = time.monotonic() + PATIENCE_S
            while session.exchanges < 3 and time.monotonic() < until_s:
                session.step()
        return session.exchanges

    with ThreadPoolExecutor(2) as pool:
        assert min(pool.map(live, (0, 1))) >= 3


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://::1:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://127.0.0.1:5555", False),
        ("tcp://localhost:5555", False),
        ("tcp://no-such-name.invalid:5555", False),
        ("tcp://*:5555", False),
        ("ipc:///run/hub", False),
    ],
)
def test_a_name_with_an_ipv4_address_is_reached_by_that(address, expected):
    assert is_ipv6(address) is expected
