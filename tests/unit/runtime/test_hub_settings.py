"""Whom a hub trusts, by where it listens and by its keys, unless its settings say so."""

import pytest

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.policies.combining import CentredClipCombiner, MeanCombiner
from edgeasync.runtime.hub import RECORD_FILE
from edgeasync.runtime.hub_settings import HubSettings, read_record

MODEL = {"kind": "softmax", "inputs": 3, "classes": 2}
BEYOND = "tcp://0.0.0.0:5555"


def settings_of(policy=None, **hub):
    return convert({"model": MODEL, "policy": policy or {}, "hub": hub}, HubSettings, where="hub.toml")


@pytest.mark.parametrize(
    ("hub", "trust"),
    [
        ({}, "admitted"),
        ({"insecure": True}, "admitted"),
        ({"bind": "tcp://127.0.0.1:5555", "insecure": True}, "admitted"),
        ({"bind": "tcp://localhost:5555", "insecure": True}, "admitted"),
        ({"bind": "tcp://[::1]:5555", "insecure": True}, "admitted"),
        ({"bind": "ipc:///run/hub", "insecure": True}, "admitted"),
        ({"bind": "ipc://@hub", "insecure": True}, "admitted"),
        ({"bind": BEYOND, "keys": "/keys"}, "admitted"),
        ({"bind": BEYOND, "keys": "/keys", "insecure": True}, "admitted"),
        ({"bind": BEYOND, "insecure": True}, "open"),
        ({"bind": "tcp://*:5555", "insecure": True}, "open"),
        ({"bind": "tcp://[::]:5555", "insecure": True}, "open"),
        ({"bind": "tcp://eth0:5555", "insecure": True}, "open"),
    ],
)
def test_whom_a_hub_trusts_that_is_not_told(hub, trust):
    policy = settings_of(**hub).fleet_policy
    assert policy.trust == trust
    assert policy.combine == (CentredClipCombiner() if trust == "open" else MeanCombiner())


@pytest.mark.parametrize("trust", ["admitted", "open"])
@pytest.mark.parametrize("hub", [{}, {"bind": BEYOND, "insecure": True}, {"bind": BEYOND, "keys": "/keys"}])
def test_what_the_settings_say_is_kept(hub, trust):
    assert settings_of({"trust": trust}, **hub).fleet_policy.trust == trust


@pytest.mark.parametrize("policy", [{}, {"combine": {"kind": "mean"}}, {"trust": "admitted"}])
def test_a_run_that_is_resumed_trusts_as_before(tmp_path, policy):
    settings = settings_of(policy, bind=BEYOND, insecure=True)
    (tmp_path / RECORD_FILE).write_bytes(settings.record())
    (tmp_path / "checkpoint-0000000000-0.json").write_bytes(b"{}")  # whether it is whole, the hub will see
    assert read_record(tmp_path).policy == settings.policy


def test_an_open_hub_refuses_shares_by_examples_and_says_why():
    settings = settings_of({"aggregate": {"kind": "quorum", "weigh_by": "examples"}}, bind=BEYOND, insecure=True)
    with pytest.raises(ConfigError) as caught:
        settings.fleet_policy  # noqa: B018
    assert str(caught.value) == (
        "policy: combine: a centred_clip (the default of trust = 'open') gives all devices the same share; "
        "leave weigh_by and balance out. This hub is open to all, so it combines updates robustly: change that, "
        "give the hub keys, or set policy.trust = 'admitted' if you trust all who reach it"
    )
