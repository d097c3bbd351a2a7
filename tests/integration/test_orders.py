"""Operators' orders about devices, with real processes: `edgeasync device quarantine` and `release`."""

import json
import time
from types import SimpleNamespace

import pytest

from edgeasync import Hub
from edgeasync.durable.keys import HubKeys, KeyPair
from edgeasync.errors import AccessError, ConfigError, HubUnreachableError
from edgeasync.net.status import fetch_status
from edgeasync.runtime.hub_record import read_record
from tests.support.programs.processes import MODEL, PATIENCE_S, free_address, status_when, trained, until

pytestmark = pytest.mark.process

NAME = "bench-1"


def device(status, name=NAME):
    return {one["id"]: one for one in status["devices"]}[name]


def asked(commands, order, address, *flags, name=NAME):
    return commands.run("device", order, name, "--hub", address, *flags)


def mistake(result, error, *words):
    assert result.returncode == error.exit_code, str(result)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    return True


def test_an_order_outlives_a_kill_of_the_hub_right_after_it_and_a_restart_of_the_device(commands):
    settings, address = commands.settings(bind=free_address()), None
    hub, address = commands.hub(settings)
    agent = commands.agent(address, NAME)
    other = commands.agent(address, "bench-2")
    trained(address, device=NAME)

    told = asked(commands, "quarantine", address, "--json")
    hub.kill()
    assert (told.returncode, told.stderr) == (0, "")
    shown = device(json.loads(told.stdout))
    assert shown["state"] == "quarantined"
    assert shown["quarantine"] == {
        "cause": "an operator's order",
        "ends": f"by 'edgeasync device release {NAME}'",
    }

    hub, _ = commands.hub(settings)
    assert "does not count" not in agent.stderr
    told = agent.wait_for("quarantined")["detail"]
    assert told == (
        "an operator of the hub has excluded this device; it continues training, but its updates do not count"
    )
    status = trained(address, device="bench-2")
    counted = device(status)["updates_applied"]
    assert device(status)["state"] == "quarantined"
    status_when(address, lambda status: device(status)["updates_rejected"].get("quarantined", 0) > 3)

    agent.kill()
    agent = commands.agent(address, NAME)
    agent.wait_for("quarantined")
    again = asked(commands, "quarantine", address)
    assert again.returncode == 0
    words = " ".join(again.stdout.split())
    assert f"{NAME} quarantined" in words
    assert device(trained(address, device="bench-2"))["updates_applied"] == counted
    assert not any(event["event"] == "excluded" for event in hub.events), "done once, before the kill"

    for _ in range(2):
        assert asked(commands, "release", address).returncode == 0
    agent.wait_for("released")
    hub.wait_for("released", device=NAME)
    assert device(trained(address, device=NAME))["quarantine"] is None
    assert hub.names().count("released") == 1
    assert other.names().count("quarantined") == 0


def test_orders_are_an_operators_where_there_are_keys(commands, tmp_path):
    keys = HubKeys.init(tmp_path / "keys")
    keys.allow("shed", "device", KeyPair.make().public)
    hub, address = commands.hub(commands.settings(), "--keys", keys.folder)
    assert fetch_status(address, PATIENCE_S, keys.folder)["enrolled_unseen"] == ["shed"]
    for name in (NAME, "bench-2"):
        token = keys.issue_token(name, (address,), time.time())
        commands.agent(address, name, "--enrol", token.text())
    flags = ("--keys", keys.folder)

    def joined(status):
        return all(one in {each["id"] for each in status["devices"]} for one in (NAME, "bench-2"))

    until(lambda: joined(fetch_status(address, PATIENCE_S, keys.folder)), "both are here")
    assert mistake(asked(commands, "quarantine", address), AccessError, "--keys")
    told = asked(commands, "quarantine", address, *flags, "--json")
    assert device(json.loads(told.stdout))["state"] == "quarantined"
    assert device(json.loads(told.stdout), "bench-2")["quarantine"] is None
    assert json.loads(told.stdout)["enrolled_unseen"] == ["shed"], "the others came"
    listed = commands.run("events", "--hub", address, *flags, "--json")
    found = [(event["event"], event["device"]) for event in map(json.loads, listed.stdout.splitlines())]
    assert found[0] == ("listening", "")
    assert {("joined", NAME), ("joined", "bench-2"), ("excluded", NAME)} <= set(found)
    told = commands.run("status", "--hub", address, *flags, "--device", NAME)
    assert "by an operator's order; its updates no longer count" in told.stdout, "among its latest events"
    assert hub.wait_for("excluded", device=NAME)["detail"] == "by an operator's order; its updates no longer count"
    told = asked(commands, "release", address, *flags, "--json")
    assert device(json.loads(told.stdout))["quarantine"] is None


def test_mistakes_end_with_a_line(commands):
    hub, address = commands.hub(commands.settings())
    for order in ("quarantine", "release"):
        mistake(asked(commands, order, address, name="nobody"), ConfigError, "unknown device nobody")
        mistake(
            asked(commands, order, address, name="no/body/x"),
            ConfigError,
            "'no/body/x' is not a valid device name",
        )
        mistake(
            asked(commands, order, free_address(), "--timeout-s", "0.5"), HubUnreachableError, "no hub answers"
        )
    assert hub.names().count("excluded") == 0


@pytest.mark.parametrize("insecure", [True, False])
def test_a_hub_in_python_trusts_as_one_by_the_command_does(tmp_path, insecure):
    bind, told = ("tcp://0.0.0.0:*" if insecure else "tcp://127.0.0.1:*"), []
    on_alert = SimpleNamespace(on_alert=lambda alert: told.append(alert.detail))
    with Hub(MODEL, run=tmp_path / "run", bind=bind, insecure=insecure, callbacks=[on_alert]):
        pass
    assert any("many names" in detail for detail in told) == insecure
    assert read_record(tmp_path / "run").policy.trust == ("open" if insecure else "admitted")
