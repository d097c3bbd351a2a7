"""Settings of a hub: default trust, rest, and a policy that cannot be kept."""

import re

import numpy as np
import pytest

from edgeasync.config import convert
from edgeasync.errors import ConfigError
from edgeasync.plugins import Plugin
from edgeasync.policies.combining import CentredClipCombiner, MeanCombiner
from edgeasync.policies.frequency import Interval
from edgeasync.policies.policy import Policy
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.sdk.stop import Stop
from edgeasync.sdk.train import train
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.parts.hubs import run_settings, zeros

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
        ({"bind": "tcp://[::1]:5555", "insecure": True}, "admitted"),
        ({"bind": "ipc:///run/hub", "insecure": True}, "admitted"),
        ({"bind": BEYOND, "keys": "/keys"}, "admitted"),
        ({"bind": BEYOND, "insecure": True}, "open"),
        ({"bind": "tcp://*:5555", "insecure": True}, "open"),
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


def test_an_open_hub_refuses_shares_by_examples_and_says_why():
    settings = settings_of({"aggregate": {"kind": "quorum", "weigh_by": "examples"}}, bind=BEYOND, insecure=True)
    with pytest.raises(ConfigError) as caught:
        settings.fleet_policy  # noqa: B018
    assert str(caught.value) == (
        "policy: combine: centred_clip (the default of trust = 'open') gives all devices the same share; "
        "remove aggregate.weigh_by. This hub admits anybody, so policy.trust is 'open'; change the policy, "
        "set hub.keys, or set policy.trust = 'admitted' if you trust everybody who can connect"
    )


ONNX = {"model": {"kind": "onnx", "file": "m.onnx"}}

# -- a policy that cannot be kept ------------------------------------------------------------------------------


class Own:
    """A controller that the library does not know."""

    def retune(self, cadence, fleet, devices):
        return cadence

    def interval(self, device, cadence):
        return Interval(3, "mine")


class Local(Plugin, frozen=True):
    """A plugin, which has no name where no module has it."""

    __module__ = "__main__"

    def __call__(self, staleness):
        return 1.0


class Judged:
    """All the parts of a policy, and no `Policy`."""

    def __getattr__(self, name):
        return getattr(Policy(), name)


OWN = {
    "policy.frequency: <": Policy(frequency=Own()),
    "policy.staleness: <function": Policy(staleness=lambda staleness: 1.0),
    "policy.staleness: Local": Policy(staleness=Local()),
    "policy: Judged": Judged(),
}


class Still:
    spec = SoftmaxModel(inputs=2, classes=2).spec
    begin = step = None


@pytest.mark.parametrize(("words", "policy"), OWN.items(), ids=OWN)
def test_a_part_of_ones_own_is_refused_before_the_folder_is_touched(words, policy, tmp_path):
    wanted = f"{re.escape(words)}.* cannot be recorded, .*('edgeasync policies'|pass an edgeasync.Policy)"
    with pytest.raises(ConfigError, match=wanted):
        HubRuntime(run_settings(tmp_path / "run", "tcp://127.0.0.1:*", policy=policy), zeros(Still.spec))
    arrays = dict(Still.spec.views(np.zeros(Still.spec.length, np.float32)))
    with pytest.raises(ConfigError, match=wanted):
        train(arrays, [Still()], run=tmp_path / "run", until=Stop(updates=1), policy=policy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "quiet"),
    [
        ({}, True),
        ({"hub": {"quiet": False}}, False),
        ({"hub": {"stop": {"updates": 10}}}, False),
        ({"hub": {"stop": {"minutes": 10.0}, "quiet": True}}, True),
        ({"policy": {"frequency": {"kind": "fixed"}}}, False),
    ],
)
def test_a_hub_without_an_end_and_with_an_adaptive_frequency_is_quiet(more, quiet):
    assert convert(ONNX | more, HubSettings, where="test").quiet is quiet


def test_a_hub_that_was_given_an_interval_cannot_be_quiet():
    table = ONNX | {"hub": {"quiet": True}, "policy": {"frequency": {"kind": "fixed"}}}
    with pytest.raises(ConfigError, match=r"hub.quiet needs policy.frequency.kind = 'adaptive'"):
        convert(table, HubSettings, where="test")


@pytest.mark.parametrize("key", ["bytes_per_day_max", "device_bytes_per_day_max"])
def test_a_day_that_pings_would_use_up_is_refused_with_the_file(key):
    """Red before: the file was accepted, and a hub that was made of it raised a bare `ValueError`."""
    told = rf"test: limits.{key} is 1000000 bytes, .* set at least 4423680"
    with pytest.raises(ConfigError, match=told):
        convert(ONNX | {"limits": {key: "1 MB"}}, HubSettings, where="test")
