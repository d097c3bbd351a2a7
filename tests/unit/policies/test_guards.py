"""Policies that are not edgeasync's own: tried when they are given, watched in a run, found out in a replay."""

import math
import random
import re
from typing import Annotated, ClassVar

import numpy as np
import pytest
from msgspec import Meta

from edgeasync import Run, Stop, train
from edgeasync.config import convert
from edgeasync.durable.run_replay import RunReplay
from edgeasync.durable.verification import verify_run
from edgeasync.errors import ConfigError, PluginError
from edgeasync.policies import Cadence, Interval, Plugin, RowCombiner
from edgeasync.policies.aggregation import BufferedAggregator
from edgeasync.policies.guards import guarded, plugins_of
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy, WarmUp, check_recordable, is_recordable
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.parts import sly_policies as sly

X = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
MODEL = {"kind": "softmax", "inputs": 3, "classes": 2}
DATA = (X, (X[:, 0] > 0).astype(np.int64))


class Halving(Plugin, frozen=True):
    strength: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0

    def __call__(self, staleness):
        return 0.5 ** (self.strength * staleness.versions)


NAME = f"{__name__}:Halving"


# -- by name -----------------------------------------------------------------------------------------------------


def test_a_plugin_is_read_written_and_read_again():
    policy = convert({"staleness": {"kind": NAME, "strength": 2}}, Policy, where="test")
    assert policy == Policy(staleness=Halving(strength=2.0))
    check_recordable(policy)
    assert list(plugins_of(policy)) == ["staleness"]
    assert guarded(Policy()) == Policy(), "edgeasync's own have no guard"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"kind": NAME, "strenght": 2}, "policy.staleness: unknown key `strenght`; did you mean strength?"),
        ({"kind": NAME, "strength": 11}, "policy.staleness.strength: expected `float` <= 10.0"),
        ({"kind": "nowhere.at:All"}, "policy.staleness: plugin nowhere.at:All: no module 'nowhere'"),
        ({"kind": f"{__name__}:Haling"}, f"plugin {__name__}:Haling: {__name__} has no 'Haling'"),
        ({"kind": "pathlib:Path"}, "plugin pathlib:Path: not a subclass of edgeasync.policies.Plugin"),
        ({"kind": "__main__:Own"}, "plugin __main__:Own: is in the main program"),
        ({"kind": "tests.support.parts.sly_policies:Pace"}, "expected `StalenessPolicy`, got `Pace`"),
        ({"kind": "polynomal"}, "policy.staleness.kind: 'polynomal' is not known; did you mean polynomial?"),
    ],
)
def test_a_table_that_cannot_be_read_is_told_where_it_stands(table, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        convert({"model": MODEL, "policy": {"staleness": table}}, HubSettings, where="test")


# -- when it is given --------------------------------------------------------------------------------------------


class Random(Plugin, frozen=True):
    def __call__(self, staleness):
        return random.random()


class Nan(Plugin, frozen=True):
    def __call__(self, staleness):
        return math.nan


class Raises(Plugin, frozen=True):
    def __call__(self, staleness):
        raise KeyError("versions")


class Nothing(Plugin, frozen=True):
    pass


class Short(sly.Single, frozen=True):
    def weights(self, buffered, fleet):
        return [1.0]


class OtherWords(sly.Single, frozen=True):
    answer: ClassVar[str] = "later"


class Unwritten(RowCombiner, frozen=True):
    def combine(self, rows, out):
        out[1:] = 0.0


class Changes(sly.Pace, frozen=True):
    def retune(self, cadence, fleet, devices):
        for device in devices:
            device.updates += 1
        return cadence


class Backwards(sly.Pace, frozen=True):
    def retune(self, cadence, fleet, devices):
        return Cadence(period_s=-1.0)


class NoSteps(sly.Pace, frozen=True):
    def interval(self, device, cadence):
        return Interval(0, "rest")


class Infinite(sly.Step, frozen=True):
    def plan(self, conditions):
        return (math.inf,)


class Writes(sly.Step, frozen=True):
    def apply(self, gradient, parameters, state, scalars):
        parameters[:] = 0.0


class Talks(sly.Alarmed, frozen=True):
    def cause(self, update, fleet):
        return 3


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"staleness": Random()},
            "policy.staleness NAME:Random: returns different results for equal arguments",
        ),
        ({"staleness": Nan()}, "policy.staleness NAME:Nan: the weight is nan; return a number from 0 to 1"),
        ({"staleness": Raises()}, "NAME:Raises: it raised KeyError: 'versions'"),
        ({"staleness": Nothing()}, "policy.staleness NAME:Nothing: missing __call__; see StalenessPolicy"),
        ({"aggregate": Halving()}, "policy.aggregate NAME:Halving: missing update, answer, flush_at_s, weights"),
        ({"aggregate": Short()}, "NAME:Short: weights returned 1 weights for 2 updates"),
        ({"aggregate": OtherWords()}, "NAME:OtherWords: answer is 'later'; set it to one of now, at_flush"),
        ({"combine": Unwritten()}, "NAME:Unwritten: combine left non-finite values"),
        ({"frequency": Changes()}, "NAME:Changes: it modifies its arguments"),
        ({"frequency": Backwards()}, "NAME:Backwards: period_s is -1.0"),
        ({"frequency": NoSteps()}, "NAME:NoSteps: interval returned 0 local steps"),
        ({"optimizer": (SGD(), Infinite())}, "policy.optimizer[1] NAME:Infinite: a scalar of plan is inf"),
        ({"optimizer": (Writes(),)}, "NAME:Writes: apply raised ValueError: assignment destination is read-only"),
        ({"monitor": Monitor(detectors=(Talks(),))}, "policy.monitor.detectors[0] NAME:Talks: cause returned 3"),
        ({"warm_up": WarmUp(updates=3, aggregate=Short())}, "policy.warm_up.aggregate NAME:Short: weights"),
    ],
)
def test_a_mistake_is_told_when_the_policy_is_given(parts, words):
    with pytest.raises(PluginError, match=re.escape(words.replace("NAME", __name__))):
        Policy(**parts)


def test_without_a_run_folder_a_plugin_needs_no_name(tmp_path):
    class Own(Plugin, frozen=True):
        def __call__(self, staleness):
            return 1.0

    policy = Policy(staleness=Own())
    assert not is_recordable(policy)
    assert train(SoftmaxModel(inputs=3, classes=2), DATA, policy=policy, until=Stop(updates=20)).updates >= 20
    with pytest.raises(ConfigError, match=r"policy.staleness: Own\(\) is not registered and cannot be recorded"):
        train(SoftmaxModel(inputs=3, classes=2), DATA, policy=policy, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- in a run and in a replay ------------------------------------------------------------------------------------

GATHERING = {"aggregate": BufferedAggregator(count=3)}
SLY = {
    "staleness": {"staleness": sly.Weight()},
    "aggregate": {"aggregate": sly.Single()},
    "combine": {"combine": sly.Mean(), **GATHERING},
    "frequency": {"frequency": sly.Pace()},
    "optimizer[0]": {"optimizer": (sly.Step(),)},
    "optimizer[1]": {"optimizer": (SGD(), sly.Rate())},
    "monitor.detectors[0]": {"monitor": Monitor(detectors=(sly.Alarmed(),))},
}


def run_under(policy, folder, updates):
    settings = {"checkpoint": {"every": "15 updates", "keep": 50}}
    return train(
        SoftmaxModel(inputs=3, classes=2),
        DATA,
        policy=policy,
        run=folder,
        settings=settings,
        until=Stop(updates=updates),
        workers=3,
    )


@pytest.mark.parametrize("path", SLY)
def test_one_that_decides_differently_in_a_replay_is_found_out_by_name(path, tmp_path, monkeypatch):
    run_under(Policy(**SLY[path]), tmp_path / "run", 60)
    assert verify_run(tmp_path / "run", trust_code=True).compared
    monkeypatch.setattr(sly, "SLY", "differ")
    name = next(iter(plugins_of(Policy(**SLY[path])).values())).__class__.__name__
    replay = RunReplay(tmp_path / "run", trust_code=True)
    with pytest.raises(PluginError, match=rf"{re.escape(f'policy.{path} {sly.__name__}:{name}')} decides"):
        replay.tell(lambda _: True)
    replay.close()


@pytest.mark.parametrize("path", ["staleness", "combine", "frequency", "optimizer[1]"])
@pytest.mark.parametrize("what", ["nan", "raise"])
def test_one_that_goes_wrong_in_mid_run_ends_it_with_the_last_good_version(path, what, tmp_path, monkeypatch):
    policy, seen = Policy(**SLY[path]), []

    def turn(event):
        seen.append(event)
        if len(seen) == 30:
            monkeypatch.setattr(sly, "SLY", what)

    with pytest.raises(PluginError, match=re.escape(f"policy.{path} {sly.__name__}")):
        train(
            SoftmaxModel(inputs=3, classes=2),
            DATA,
            policy=policy,
            run=tmp_path / "run",
            until=Stop(updates=100_000),
            callbacks=[turn],
        )
    monkeypatch.setattr(sly, "SLY", "")
    replay = RunReplay(tmp_path / "run", trust_code=True)
    replay.tell(lambda _: True)
    told = replay.summary()
    replay.close()
    kept = Run.open(tmp_path / "run", trust_code=True)
    assert kept.version in (told.version, told.version - 1), "but what it did not bear"
    assert all(np.isfinite(array).all() for array in kept.arrays.values())
    assert run_under(policy, tmp_path / "run", told.updates_applied + 20).updates > told.updates_applied


def test_without_trust_a_run_under_a_plugin_is_read_up_to_its_last_checkpoint(tmp_path, caplog):
    run, name = tmp_path / "run", f"{sly.__name__}:Weight"
    run_under(Policy(staleness=sly.Weight()), run, 60)
    newest = Run.open(run, trust_code=True)
    for path in max(run.glob("checkpoint-*.json")), max(run.glob("checkpoint-*.safetensors")):
        path.unlink()
    (run / "model.safetensors").unlink()
    kept = max(run.glob("checkpoint-*.json")).stem
    caplog.clear()
    found = Run.open(run)
    assert kept.endswith(f"-{found.version}")
    assert found.version < newest.version
    assert f"stops at {kept}, version {found.version}: later entries need the plugins {name}" in caplog.text
    assert Run.open(run, trust_code=True).version == newest.version

    replay = RunReplay(run)
    assert (replay.beginning.checkpoint, replay.tell(pytest.fail)) == (kept, 0)
    assert replay.summary().updates_applied > 0
    replay.close()
    with pytest.raises(ConfigError, match=rf"--until {replay.beginning.entry + 1}: stops at {kept}"):
        RunReplay(run, until=replay.beginning.entry + 1, checkpoint=kept)
    with pytest.raises(
        PluginError, match=rf"cannot be verified: stops at {kept}.*need the plugins {name}.*--trust-code"
    ):
        verify_run(run)
    with pytest.raises(PluginError, match=f"plugin {name}: only the run's folder names this code"):
        run_under(Policy(), run, 90)
    assert run_under(Policy(staleness=sly.Weight()), run, 90).updates >= 90, "the caller has the plugin"
