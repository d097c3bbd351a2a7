"""Arrays that stay on a device, by real hubs and agents: no byte of them leaves, and they outlive the device."""

import re
import signal

import numpy as np
import pytest

from edgeasync import Agent, Dataset, Hub, Parameter, ParameterSpec, Policy, Run, StepResult, Stop, nn
from edgeasync.durable.local_file import LOCAL_FILE, LocalFile
from edgeasync.errors import ConfigError
from edgeasync.policies.aggregation import ImmediateAggregator, ModelAverageAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.programs.command_line import CONFIG, mistake
from tests.support.programs.processes import LIVELINESS, PATIENCE_S, trained, until

pytestmark = pytest.mark.process

ANYWHERE = "tcp://127.0.0.1:*"
SPEC = ParameterSpec((
    Parameter("body", (64,)), Parameter("head.weight", (3,)), Parameter("norm.mean", (2,), role="statistic")
))  # fmt: skip
SECRET = np.array([7.123457, -3.987654, 0.246813], np.float32)
ARRAYS = {"body": np.zeros(64), "head.weight": np.full(3, 0.5)}


class Marked:
    """Trains the body towards 1, and gives head and norm values that no sum of others makes."""

    def __init__(self, secret=SECRET, spec=SPEC):
        self.spec = spec
        self.secret = secret
        self.begun = []

    def begin(self, parameters):
        self._arrays = self.spec.views(parameters)
        self.begun.append({name: array.copy() for name, array in self._arrays.items()})

    def step(self):
        self._arrays["body"] += 0.1 * (1.0 - self._arrays["body"])
        self._arrays["head.weight"][:] = self.secret
        if "norm.mean" in self._arrays:
            self._arrays["norm.mean"][:] = self.secret[:2]
        return StepResult(1.0, 4)


def marked_hub(tmp_path, aggregate=None, *, push="identity", local=("head.*", "norm.*"), policy=(), **more):
    initial = SPEC.flatten({
        "body": np.zeros(64, np.float32),
        "head.weight": np.full(3, 0.5, np.float32),
        "norm.mean": np.full(2, 0.25, np.float32),
    })  # fmt: skip
    aggregate = aggregate or ImmediateAggregator()
    rules = Policy(
        aggregate=aggregate, optimizer=(SGD(),), frequency=FixedFrequency(local_steps=4), **dict(policy)
    )
    settings = {"codec": {"push": push, "model": "identity", "delta": "off"}}
    return Hub(
        WithSpec(initial),
        run=tmp_path / "run",
        bind=ANYWHERE,
        policy=rules,
        local=local,
        settings=settings,
        **more,
    )


class WithSpec:
    """Gives a hub a spec with a statistic, as an adapter of a library does."""

    def __init__(self, initial):
        self.initial = initial

    def prepare(self, _):
        from edgeasync.sdk.models import Prepared  # noqa: PLC0415

        return Prepared(spec=SPEC, initial=self.initial, make_trainer=None, make_evaluator=None, restore=dict)


@pytest.fixture
def sent(monkeypatch):
    """All that agents of this process send: headers and payloads."""
    frames = []
    send = AgentRuntime.send

    def record(self, header, payload):
        frames.append((bytes(header), None if payload is None else bytes(payload)))
        send(self, header, payload)

    monkeypatch.setattr(AgentRuntime, "send", record)
    return frames


def holds(content, values, *, halved=False):
    """Return whether any of the values is in these bytes, as float32 or, where they are `halved`, as float16.

    Two bytes are in others by chance: a header has random ones.
    """
    dtypes = (np.float32, np.float16) if halved else (np.float32,)
    return any(value.tobytes() in content for dtype in dtypes for value in np.asarray(values, dtype))


@pytest.mark.parametrize(
    ("aggregate", "push", "policy"),
    [
        (ImmediateAggregator(), "identity", {}),
        (ModelAverageAggregator(), "identity", {}),
        (ImmediateAggregator(), "float16", {}),
        (ImmediateAggregator(), "top_k(0.5)", {}),
        (ImmediateAggregator(), "identity", {"overlap_steps_max": 4}),
    ],
    ids=["differences", "whole models", "float16", "error feedback", "overlap"],
)
def test_no_byte_of_a_local_value_leaves(tmp_path, sent, aggregate, push, policy):
    trainer = Marked()
    hub = marked_hub(tmp_path, aggregate, push=push, policy=policy, until=Stop(updates=12))
    with hub, Agent(hub.address, trainer=trainer, state=tmp_path / "a"):
        hub.wait(PATIENCE_S)
    assert len([payload for _, payload in sent if payload]) >= 10
    assert not any(holds(header, SECRET) for header, _ in sent)
    assert not any(holds(payload, SECRET, halved=push != "identity") for _, payload in sent if payload)
    if push == "identity" and isinstance(aggregate, ImmediateAggregator):
        for _, payload in sent:
            update = SPEC.views(np.frombuffer(payload, np.float32)) if payload else {}
            assert not update or (not update["head.weight"].any() and update["body"].all())
            assert not update or (update["norm.mean"] == 0.25).all(), "a statistic is sent as the hub's value"
    np.testing.assert_array_equal(trainer.begun[-1]["head.weight"], SECRET)
    arrays = Run.open(tmp_path / "run").arrays
    np.testing.assert_array_equal(arrays["head.weight"], np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(arrays["norm.mean"], np.full(2, 0.25, np.float32))
    assert (arrays["body"] > 0.5).all()


def test_local_values_begin_with_the_hubs_and_outlive_a_restart(tmp_path):
    with marked_hub(tmp_path) as hub:
        for start in range(3):
            trainer = Marked(SECRET * 2**start)
            with Agent(hub.address, trainer=trainer, state=tmp_path / "a") as agent:
                until(lambda: agent.updates_answered >= 2, "updates")
                found = agent.evaluate(lambda arrays: float(arrays["head.weight"][0]))
                assert found.loss == trainer.secret[0], "the device's own head, on the hub's body"
            begun = trainer.begun[0]["head.weight"]
            np.testing.assert_array_equal(begun, SECRET * 2 ** (start - 1) if start else np.full(3, 0.5))
        assert (hub.snapshot()["head.weight"] == 0.5).all()


def test_a_device_keeps_arrays_that_others_share(tmp_path):
    """`local` of the agent alone: its update there is zero, and weighs; the others move the hub's values."""
    mine, other = Marked(), Marked(np.ones(3, np.float32))
    with marked_hub(tmp_path, local=()) as hub, Agent(hub.address, trainer=mine, name="mine", local=["head.*"]):
        until(lambda: len(mine.begun) >= 5, "updates of the one")
        assert (hub.snapshot()["head.weight"] == 0.5).all()
        with Agent(hub.address, trainer=other, name="other") as agent:
            until(lambda: agent.updates_answered >= 5, "updates of the other")
            before = len(mine.begun)
            until(lambda: len(mine.begun) > before + 1, "a model of the other's")
    assert (other.begun[-1]["head.weight"] > 0.5).all()
    np.testing.assert_array_equal(mine.begun[-1]["head.weight"], SECRET)


def test_private_batch_norms_of_a_graph(tmp_path):
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    y = (x[:, 0] > x[:, 1]).astype(np.int64)
    with Hub(network, input_shape=(4,), run=tmp_path / "run", bind=ANYWHERE, local=["1.*"]) as hub:
        before = hub.snapshot()
        names = ("one", "two")
        for number, name in enumerate(names):
            data = Dataset.of(x * (1 + 4 * number) + number, y)
            with Agent(hub.address, data, name=name, state=tmp_path / name) as agent:
                until(lambda: agent.updates_answered >= 5, "updates")
        after = hub.snapshot()
    mine, other = (LocalFile(tmp_path / name, state_id(tmp_path / name)).read() for name in names)
    assert mine.keys() == {name for name in before if name.startswith("1.")}
    for name, array in before.items():
        assert (array == after[name]).all() == (name in mine), name
    for name, array in mine.items():
        assert (array != other[name]).any(), f"{name}: each has its own, statistics included"


def state_id(folder):
    return re.search(r'"state_id":"(\w+)"', (folder / "identity.json").read_text())[1]


def test_daemons_keep_a_head_over_kill_and_damage(commands):
    model = 'kind = "mlp"\ninputs = 8\nclasses = 3\nlocal = ["layer1.*"]'
    _, address = commands.hub(commands.settings(model=model))
    (commands.folder / "agent.toml").write_text("[agent]\nseed = 1\n")
    agent = commands.agent(address, "pi")
    trained(address, 5, "pi")
    agent.kill()
    folder = commands.folder / "pi"
    kept = LocalFile(folder, state_id(folder)).read()
    assert {name: array.shape for name, array in kept.items()} == {"layer1.weight": (64, 3), "layer1.bias": (3,)}
    assert kept["layer1.bias"].any(), "it began with zeros, at the hub"
    again = commands.agent(address, "pi")
    trained(address, 5, "pi")
    assert "warning" not in again.names()
    again.kill()
    content = bytearray((folder / LOCAL_FILE).read_bytes())
    content[-1] ^= 1
    (folder / LOCAL_FILE).write_bytes(content)
    last = commands.agent(address, "pi")
    assert "local.safetensors.damaged: damaged" in last.wait_for("warning")["detail"]
    trained(address, 5, "pi")
    last.signal(signal.SIGTERM)
    assert last.wait() == 0
    assert LocalFile(folder, state_id(folder)).read().keys() == kept.keys()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ('local = ["hed.*"]', "no array matches 'hed.*'; the arrays are layer0.weight, layer0.bias"),
        ('local = ["*"]', "match all arrays of the model"),
    ],
)
def test_patterns_that_make_no_sense_are_told_by_hub_and_agent(commands, key, hint):
    wrong = commands.settings(model=f'kind = "softmax"\ninputs = 8\nclasses = 3\n{key}', name="wrong")
    mistake(commands, CONFIG, hint, arguments=["hub", wrong])
    _, address = commands.hub(commands.settings(more=LIVELINESS))
    (commands.folder / "agent.toml").write_text(f"[agent]\n{key}\n")
    agent = ["--hub", address, "--data", commands.data("d.npz"), "--device-id", "pi", "--state", "pi"]
    mistake(commands, CONFIG, hint, arguments=["agent", "agent.toml", *agent])


def test_a_hub_has_no_whole_model_to_evaluate(commands, tmp_path):
    model = 'kind = "softmax"\ninputs = 8\nclasses = 3\nlocal = ["layer0.bias"]'
    settings = commands.settings(model=model, more=f'[evaluation]\ndata = "{commands.data("d.npz")}"\n')
    mistake(commands, CONFIG, "evaluation.data", "model.local", arguments=["hub", settings])
    hub = Hub(
        SoftmaxModel(inputs=8, classes=3), run=tmp_path / "run", bind=ANYWHERE, local=["*.bias"],
        evaluate=(np.eye(8), np.arange(8) % 3),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="evaluate on the agents"):
        hub.start()
