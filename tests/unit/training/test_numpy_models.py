import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeasync.config import convert
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, DataError
from edgeasync.training.numpy_models import MlpModel, Model, SoftmaxModel

MODELS = [SoftmaxModel(inputs=6, classes=4), MlpModel(inputs=6, hidden=(5, 7), classes=4)]


class Holder(msgspec.Struct):
    model: Model


def float64_loss(model, parameters, x, y):
    """The loss again, in float64 and the plainest way."""
    arrays, start = [], 0
    for parameter in model.spec.parameters:
        arrays.append(parameters[start : start + parameter.size].astype(np.float64).reshape(parameter.shape))
        start += parameter.size
    values = x.reshape(len(x), -1).astype(np.float64)
    for position in range(0, len(arrays), 2):
        if position:
            values = np.maximum(values, 0.0)
        values = values @ arrays[position] + arrays[position + 1]
    return np.mean(np.log(np.exp(values).sum(axis=1)) - values[np.arange(len(y)), y])


@pytest.mark.parametrize("model", MODELS, ids=["softmax", "mlp"])
@given(seed=st.integers(0, 2**32), examples=st.integers(1, 9))
# Derandomised: a draw may put a kink within the difference's step.
@settings(deadline=None, max_examples=25, derandomize=True)
def test_gradients_agree_with_central_differences(model, seed, examples):
    generator = np.random.Generator(np.random.PCG64(seed))
    parameters = generator.normal(0.0, 0.5, model.spec.length).astype(np.float32)
    x = generator.standard_normal((examples, 2, 3), np.float32)
    y = generator.integers(0, 4, examples)
    out = np.full(model.spec.length, np.nan, np.float32)
    loss = model.gradient(parameters, x, y, out)
    assert loss == pytest.approx(float64_loss(model, parameters, x, y), abs=1e-5)
    # Along random directions: one difference tells of every entry. The step is short, to cross few kinks.
    for _ in range(5):
        direction = generator.standard_normal(model.spec.length)
        ahead, behind = parameters + 1e-6 * direction, parameters - 1e-6 * direction
        slope = (float64_loss(model, ahead, x, y) - float64_loss(model, behind, x, y)) / 2e-6
        assert np.vdot(out.astype(np.float64), direction) == pytest.approx(slope, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("model", MODELS, ids=["softmax", "mlp"])
def test_huge_scores_give_a_finite_loss_and_gradient(model):
    parameters = np.full(model.spec.length, 100.0, np.float32)
    out = np.empty_like(parameters)
    loss = model.gradient(parameters, np.full((2, 6), 100.0, np.float32), np.array([0, 3]), out)
    assert loss == pytest.approx(np.log(4.0))
    assert np.isfinite(out).all()


def test_names_shapes_and_first_parameters():
    model = MlpModel(inputs=200, hidden=(300, 100), classes=10)
    views = model.spec.views(model.initial(seed=5))
    assert views["layer0.weight"].shape == (200, 300)
    assert list(views)[-2:] == ["layer2.weight", "layer2.bias"]
    assert views["layer0.weight"].std() == pytest.approx(np.sqrt(2 / 200), rel=0.02)
    assert views["layer2.weight"].std() == pytest.approx(np.sqrt(1 / 100), rel=0.1)
    assert not any(view.any() for name, view in views.items() if name.endswith("bias"))
    assert np.array_equal(model.initial(5), model.initial(5))
    assert not np.array_equal(model.initial(5), model.initial(6))
    assert not SoftmaxModel(inputs=3, classes=2).initial(5).any()


@pytest.mark.parametrize("model", MODELS, ids=["softmax", "mlp"])
def test_data_that_does_not_fit_is_refused(model):
    model.check_data(Dataset.of(np.zeros((4, 3, 2)), [0, 1, 2, 3]))
    with pytest.raises(DataError, match="the data has 5 features, but the hub's model expects 6; use"):
        model.check_data(Dataset.of(np.zeros((4, 5)), [0, 1, 2, 3]))
    with pytest.raises(DataError, match=r"label 4 is out of range: .* has 4 classes; use labels from 0 to 3"):
        model.check_data(Dataset.of(np.zeros((1, 6)), [4]))


def test_models_are_settings():
    for model in MODELS:
        assert msgspec.convert(msgspec.to_builtins(model), Model) == model
    assert convert({"model": {"kind": "mlp", "inputs": 3, "classes": 2}}, Holder, where="t").model == MlpModel(
        inputs=3, classes=2
    )
    for wrong in ({"hidden": []}, {"classes": 1}, {"inputs": 2**24 + 1}, {"z": 1}):
        with pytest.raises(ConfigError, match="model"):
            convert({"model": {"kind": "mlp", "inputs": 3, "classes": 2} | wrong}, Holder, where="hub.toml")
