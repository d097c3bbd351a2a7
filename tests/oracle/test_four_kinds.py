"""torch, ONNX, JAX and numpy train one model: the same arrays, the same steps, one fleet."""

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import edgeasync
from edgeasync import SGD, Agent, Dataset, Hub, Run, Stop, nn
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import ConfigError, GraphError
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.policy import Policy
from edgeasync.sdk.models import prepare, prepare_as
from edgeasync.training.plan import LocalTraining
from tests.support.programs.four_kinds import NumpyModel, digits, start
from tests.support.programs.processes import PATIENCE_S

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
LOCAL = LocalTraining(optimizer=(SGD(learning_rate=0.1),))
EXPORTERS = ["dynamo", "legacy"]


def torch_module():
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    module.load_state_dict({name: torch.from_numpy(array) for name, array in start().items()})
    return module


def jax_model(optimizer):
    def loss(params, x, y):
        hidden = jax.nn.relu(x @ params["0"]["weight"].T + params["0"]["bias"])
        scores = hidden @ params["2"]["weight"].T + params["2"]["bias"]
        return optax.losses.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    tree = {"0": {}, "2": {}}
    for name, array in start().items():
        layer, _, kind = name.partition(".")
        tree[layer][kind] = jax.numpy.asarray(array)
    return edgeasync.jax.model(tree, loss, optimizer)


def onnx_model(exporter="legacy"):
    return edgeasync.torch.to_onnx(torch_module(), torch.zeros(2, 64), exporter=exporter)


def prepared_of(model):
    return prepare(model, None, LOCAL, graph=GraphSettings(), run=Path(), seed=0)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_an_export_has_the_modules_names_roles_and_gradients(exporter):
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 3),
    )
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    spec = prepared_of(edgeasync.torch.to_onnx(module, torch.randn(4, 64), exporter=exporter)).spec
    assert spec == edgeasync.torch.model(module).spec
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_layers_of_nn_have_the_names_of_torch():
    layers = nn.to_onnx(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), (64,))
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    assert prepared_of(layers).spec == edgeasync.torch.model(module).spec


class Unused(torch.nn.Linear):
    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_an_export_that_would_train_otherwise_is_refused(exporter):
    with pytest.raises(GraphError, match=r"no gradient reaches bias of Unused; .* or give freeze=\['bias'\]"):
        edgeasync.torch.to_onnx(Unused(3, 2), torch.randn(4, 3), exporter=exporter)
    with pytest.raises(ConfigError, match="give a batch of two examples"):
        edgeasync.torch.to_onnx(Unused(3, 2), torch.randn(1, 3), exporter=exporter)


def test_ten_steps_are_the_same_in_torch_onnx_jax_and_numpy():
    (x, y), _ = digits()
    data = Dataset.of(x[:320], y[:320])
    module = torch_module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    kinds = {
        "torch": edgeasync.torch.model(module, optimizer=sgd),
        "jax": jax_model(optax.sgd(0.1)),
        "numpy": NumpyModel(),
        **{f"onnx, {exporter}": onnx_model(exporter) for exporter in EXPORTERS},
    }
    spec = prepared_of(kinds["onnx, legacy"]).spec
    found = {}
    for kind, model in kinds.items():
        prepared = prepared_of(model) if kind.startswith("onnx") else prepare_as(model, spec, LOCAL)
        assert prepared.spec == spec, kind
        np.testing.assert_array_equal(prepared.initial, spec.flatten(start()))
        trainer, found[kind] = prepared.make_trainer(data, 3, 1), prepared.initial.copy()
        trainer.begin(found[kind])
        for _ in range(10):
            trainer.step()
    assert np.abs(found["torch"] - spec.flatten(start())).max() > 0.01
    for one, other in itertools.combinations(found, 2):
        np.testing.assert_allclose(found[one], found[other], rtol=0, atol=1e-5, err_msg=f"{one}, {other}")


def central_accuracy(epochs):
    """Return what one process with all data reaches."""
    (x, y), (x_test, y_test) = (map(torch.from_numpy, part) for part in digits())
    module, draw = torch_module(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=draw).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
    return float((module(x_test).argmax(1) == y_test).float().mean())


def test_a_fleet_of_all_four_of_which_one_is_killed_learns_as_one_process_does(tmp_path):
    (x, y), held_out = digits()
    seen, enough = set(), threading.Event()

    class Watch:
        def on_update(self, update):
            seen.add((update.device, update.number))
            if update.device == "numpy" and update.number >= 5:
                enough.set()

    hub = Hub(
        onnx_model(),
        run=tmp_path / "run",
        bind="tcp://127.0.0.1:*",
        optimizer=SGD(learning_rate=0.1),
        evaluate=held_out,
        policy=Policy(frequency=FixedFrequency(local_steps=16)),
        until=Stop(updates=600),
        callbacks=[Watch()],
    )
    module = torch_module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    models = {
        "torch": edgeasync.torch.model(module, optimizer=sgd),
        "jax": jax_model(optax.sgd(0.1)),
        "onnx": None,
    }
    with hub:
        command = [sys.executable, "-m", "tests.support.programs.four_kinds", hub.address, str(tmp_path / "numpy")]
        with subprocess.Popen(command, cwd=ROOT) as first:
            agents = [
                Agent(hub.address, (x[part::4], y[part::4]), model=model, name=name).start()
                for part, (name, model) in enumerate(models.items())
            ]
            assert enough.wait(PATIENCE_S)
            first.kill()
        before = max(number for device, number in seen if device == "numpy")
        with subprocess.Popen(command, cwd=ROOT) as second:
            hub.wait(2 * PATIENCE_S)
            assert second.wait(PATIENCE_S) == 0
        for agent in agents:
            agent.wait(PATIENCE_S)
    assert {device for device, _ in seen} == {"torch", "jax", "onnx", "numpy"}
    assert max(number for device, number in seen if device == "numpy") > before, "it came back"
    run = Run.open(hub.path)
    module = edgeasync.torch.load(torch_module(), run)
    with torch.no_grad():
        predicted = module(torch.from_numpy(held_out[0])).argmax(1).numpy()
    assert (predicted == held_out[1]).mean() > central_accuracy(60) - 0.01
