"""Settings of a hub: default trust, and the record by which a run is resumed."""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgeasync.config import Section, convert, read_toml
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.errors import ConfigError, PluginError, StorageError
from edgeasync.graphs.graph_model import FORWARD_FILE
from edgeasync.host.host_info import half_of_memory_bytes
from edgeasync.plugins import Plugin
from edgeasync.policies.combining import CentredClipCombiner, MeanCombiner
from edgeasync.policies.frequency import Interval
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Plateau, Policy, WarmUp, check_recordable
from edgeasync.runtime.hub import RECORD_FILE, HubRuntime
from edgeasync.runtime.hub_settings import RECORD_FORMAT, HubSettings, read_record
from edgeasync.sdk.stop import Stop
from edgeasync.sdk.train import train
from edgeasync.training.numpy_models import SoftmaxModel

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
        "leave weigh_by out. This hub is open to all, so it combines updates robustly: change that, "
        "give the hub keys, or set policy.trust = 'admitted' if you trust all who reach it"
    )


EXAMPLE = Path(__file__).parents[3] / "examples" / "hub.toml"
ONNX = {"model": {"kind": "onnx", "file": "m.onnx"}, "evaluation": {"data": "held-out.npz"}, "hub": {"run": "r"}}


def run_folder(path, settings, *, checkpoint=True):
    path.mkdir(parents=True)
    (path / RECORD_FILE).write_bytes(settings.record())
    if checkpoint:
        (path / "checkpoint-0000000000-0.json").write_bytes(b"{}")  # whether it is whole, the hub will see
    return path


def test_a_record_has_every_setting_with_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = convert(ONNX | {"checkpoint": {"keep": 5, "recovery": "best"}}, HubSettings, where="test")
    table = msgspec.json.decode(settings.record())
    assert table.pop("format") == RECORD_FORMAT
    found = convert(table, HubSettings, where="test")
    assert found.model.file == str(tmp_path / "m.onnx")
    assert found.evaluation.data == str(tmp_path / "held-out.npz")
    assert found.hub.run == str(tmp_path / "r")
    assert (found.checkpoint.keep, found.checkpoint.recovery) == (5, "latest"), "one goes back once"
    assert found.policy == settings.policy


def test_the_settings_of_the_example_outlive_it(tmp_path):
    settings = read_toml(EXAMPLE, HubSettings)
    found = read_record(run_folder(tmp_path / "run", settings))
    assert (found.policy, found.local, found.hub.stop) == (settings.policy, settings.local, settings.hub.stop)
    assert found.hub.run == str(tmp_path / "run")


def test_the_model_comes_with_the_folder(tmp_path):
    run = run_folder(tmp_path / "run", convert(ONNX, HubSettings, where="test"))
    assert read_record(run).model.file == str(Path("m.onnx").absolute())
    (run / FORWARD_FILE).write_bytes(b"")
    assert read_record(run).model.file == str(run / FORWARD_FILE)


def test_a_folder_names_no_code_and_raises_no_limit(tmp_path):
    custom = convert({"model": {"kind": "custom", "factory": "pytest:main"}}, HubSettings, where="test")
    run = run_folder(tmp_path / "custom", custom)
    with pytest.raises(PluginError, match=r"hub.json: \[model\] factory pytest:main: is code that only the run's"):
        read_record(run)
    assert read_record(run, trust_code=True).model.factory == "pytest:main"

    model = ONNX["model"] | {"build_s_max": 5000.0, "build_memory_bytes_max": "4000 GiB"}
    run = run_folder(tmp_path / "large", convert(ONNX | {"model": model}, HubSettings, where="test"))
    found, trusted = read_record(run).model, read_record(run, trust_code=True).model
    assert (found.build_s_max, trusted.build_s_max) == (300.0, 5000.0)
    assert found.build_memory_bytes_max == half_of_memory_bytes() < trusted.build_memory_bytes_max
    model = ONNX["model"] | {"build_s_max": 5.0, "build_memory_bytes_max": "1 MiB"}
    run = run_folder(tmp_path / "small", convert(ONNX | {"model": model}, HubSettings, where="test"))
    assert read_record(run).model == read_record(run, trust_code=True).model, "lower limits stay"


def test_what_cannot_be_gone_on_with(tmp_path):
    settings = convert(ONNX, HubSettings, where="test")
    with pytest.raises(StorageError, match="no checkpoint to resume from; begin by a settings file"):
        read_record(run_folder(tmp_path / "new", settings, checkpoint=False))
    run = run_folder(tmp_path / "old", settings)
    (run / RECORD_FILE).write_bytes(b"{")
    with pytest.raises(StorageError, match="damaged"):
        read_record(run)
    (run / RECORD_FILE).write_bytes(msgspec.json.encode({"format": RECORD_FORMAT, "hub": {"colour": "red"}}))
    with pytest.raises(ConfigError, match="colour"):
        read_record(run)
    for written in (RECORD_FORMAT + 1, RECORD_FORMAT - 1, 0):
        (run / RECORD_FILE).write_bytes(msgspec.json.encode({"format": written}))
        with pytest.raises(StorageError, match=f"is of format {written}, .* start the version of edgeasync that"):
            read_record(run)


# -- a policy that cannot be kept ------------------------------------------------------------------------------


class Own:
    """A controller that the library does not know."""

    def retune(self, cadence, fleet, devices):
        return cadence

    def interval(self, device, cadence):
        return Interval(3, "mine")


class OwnSection(Section, frozen=True, tag_field="kind", tag="fixed"):
    """One that would be read back as another."""

    local_steps: int = 16
    retune, interval = Own.retune, Own.interval


class OwnSgd(SGD, frozen=True):
    """One that is an SGD, and more."""


@dataclass(frozen=True)
class OwnDetector:
    remedy: str = "alert"
    scope: str = "fleet"
    count_max: int = 1
    patient: bool = False

    def cause(self, update, fleet):
        return None


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
    "policy.frequency: OwnSection": Policy(frequency=OwnSection()),
    "policy.staleness: <function": Policy(staleness=lambda staleness: 1.0),
    "policy.staleness: Local": Policy(staleness=Local()),
    "policy.optimizer: ": Policy(optimizer=(OwnSgd(),)),
    "policy.monitor: ": Policy(monitor=Monitor(detectors=(OwnDetector(),))),
    "policy: Judged": Judged(),
}


class Still:
    spec = SoftmaxModel(inputs=2, classes=2).spec
    begin = step = None


@pytest.mark.parametrize(("words", "policy"), OWN.items(), ids=OWN)
def test_a_part_of_ones_own_is_refused_before_the_folder_is_touched(words, policy, tmp_path):
    wanted = f"{re.escape(words)}.* cannot name it, .* 'edgeasync policies'"
    with pytest.raises(ConfigError, match=wanted):
        HubRuntime(
            spec=Still.spec,
            initial=lambda: np.zeros(Still.spec.length, np.float32),
            policy=policy,
            bind="tcp://127.0.0.1:*",
            run=tmp_path / "run",
            settings=HubCoreSettings(),
        )
    arrays = dict(Still.spec.views(np.zeros(Still.spec.length, np.float32)))
    with pytest.raises(ConfigError, match=wanted):
        train(arrays, [Still()], run=tmp_path / "run", until=Stop(updates=1), policy=policy)
    assert list(tmp_path.iterdir()) == []


def test_whatever_the_library_has_can_be_kept():
    for policy in (
        Policy(),
        Policy(optimizer=[SGD()], monitor=Monitor(detectors=[]), behind_max=10),
        Policy(warm_up=WarmUp(updates=5), plateau=Plateau()),
    ):
        check_recordable(policy)


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


@pytest.mark.parametrize(
    ("every", "updates", "seconds"), [("200 updates", 200, None), ("10 s", 1, 10.0), ("2 minutes", 1, 120.0)]
)
def test_evaluations_are_counted_in_updates_or_in_time(every, updates, seconds):
    evaluation = convert(ONNX | {"evaluation": {"every": every}}, HubSettings, where="test").evaluation
    assert (evaluation.every_updates, evaluation.every_s) == (updates, seconds)


@pytest.mark.parametrize("content", ["{}", '{"format": null}', '{"format": "6"}', '{"hub": {}}'])
def test_a_record_without_a_format_is_damaged(tmp_path, content):
    """Red before: it was said to be of format None."""
    run = run_folder(tmp_path / "run", HubSettings(model=SoftmaxModel(inputs=2, classes=2)))
    (run / RECORD_FILE).write_text(content)
    with pytest.raises(
        StorageError, match=r"hub\.json: has no format, so it is damaged, or not a run's of edgeasync; "
    ):
        read_record(run)
