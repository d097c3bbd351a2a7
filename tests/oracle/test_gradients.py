"""Whole models of torch: every export trains as torch does in training mode, or is refused with a reason."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from edgeasync.errors import GraphError
from tests.support.models.torch_exports import EXPORTS, Stepper, distance, export, torch_step
from tests.support.models.torch_models import MODELS, make

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporters and what they call warn of themselves

FOLDED, COMPUTED = "the exporter folded a batch norm into", "which the exporter computed"
MERGED = "the exporter may have merged"
REFUSED = (
    {(name, way): FOLDED for name in ("residual", "mobile", "sensors")
     for way in
     ("old, evaluation", "new, optimized", "new, optimized, of evaluation")}
    | {("groups", way): COMPUTED for way in EXPORTS if way not in {"old, training", "new", "new, of evaluation"}}
    | {("torch's transformer", "new, optimized"): COMPUTED}
)  # fmt: skip
"""The models, trained before, that are refused; all others give the right gradients."""

FEW = {"new, of evaluation", "new, optimized, of evaluation"}
"""Exports that say the same as others, and take a second each: of some models only."""
CASES = [
    (name, way)
    for name in MODELS
    for way in EXPORTS
    if way not in FEW or name in {"residual", "groups"}
    if "new" not in way or name not in {"large vocabulary", "gru"}
    if way != "new, optimized" or name not in {"lenet", "mobile", "two layers of lstm both ways"}
]


def by_value(model, gradients):
    """Return all parameters' values in order, and their gradients: a way to find those that were turned round."""
    values = np.concatenate([entry.detach().numpy().ravel() for entry in model.parameters()])
    slopes = np.concatenate([gradients[name].ravel() for name, _ in model.named_parameters()])
    order = np.argsort(values, kind="stable")
    return values[order], slopes[order]


def compare(name, way, *, fresh=False, free=True, threads=1):
    """Compare loss, gradients and statistics of one step."""
    model, x, target, loss = make(name, fresh=fresh)
    stepper = Stepper(export(model, x, free=free, **EXPORTS[way]), loss, threads)
    # To trace a model in training mode, torch's older exporter runs it, and its statistics move.
    for entry in stepper.graph.spec.parameters:
        if entry.role == "statistic":
            model.get_buffer(entry.name).copy_(torch.from_numpy(stepper.values[entry.name].copy()))
    found = stepper(x, target)
    value, exact, buffers = torch_step(model, x, target, loss)
    _, single, _ = torch_step(model, x, target, loss, torch.float32)
    assert abs(found["loss"] - value) <= 1e-5 * abs(value)
    gradients = {key.removesuffix(".grad"): result for key, result in found.items() if key.endswith(".grad")}
    floor = 1e-2 * max(np.abs(gradient).max() for gradient in exact.values())
    ordered, slopes = by_value(model, exact)
    _, rounded = by_value(model, single)
    count = 0
    for key, whole in gradients.items():
        count += whole.size
        if key in exact:
            gradient, expected, other = whole, exact[key], single[key]
        else:
            places = np.searchsorted(ordered, stepper.values[key])
            np.testing.assert_array_equal(ordered[places], stepper.values[key])
            alone = np.searchsorted(ordered, stepper.values[key], "right") - places == 1
            assert alone.mean() > 0.98
            gradient, expected, other = whole[alone], slopes[places][alone], rounded[places][alone]
        limit = max(1e-5, 2 * distance(other, expected, floor))
        assert distance(gradient, expected, floor) <= limit, key
    assert count == sum(gradient.size for gradient in exact.values())
    moved = {key.removesuffix(".new"): result for key, result in found.items() if key.endswith(".new")}
    assert set(moved) == {key for key in buffers if "running" in key}
    for key, statistic in moved.items():
        np.testing.assert_allclose(statistic, buffers[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_gradients_of_every_export(name, way):
    if (name, way) in REFUSED:
        with pytest.raises(GraphError, match=REFUSED[name, way]):
            compare(name, way)
    else:
        compare(name, way)


@pytest.mark.parametrize("free", [True, False], ids=["free", "fixed"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_several_threads(name, free):
    for threads in (2, 4) if free else (1, 2):
        compare(name, "old, training", free=free, threads=threads)


@pytest.mark.parametrize(
    ("name", "way", "why"),
    [
        ("residual", "old, preserving", None),
        ("residual", "old, training", None),
        ("residual", "new", None),
        ("residual", "new, optimized", FOLDED),
        ("own transformer", "old, training", None),
        ("own transformer", "new", None),
        ("own transformer", "new, optimized", MERGED),
        ("torch's transformer", "new, optimized", f"{MERGED}|{COMPUTED}"),
        ("groups", "old, training", None),
    ],
)
def test_new_models_whose_scales_and_biases_are_all_the_same(name, way, why):
    if why is None:
        compare(name, way, fresh=True)
    else:
        with pytest.raises(GraphError, match=why):
            compare(name, way, fresh=True)


class Tied(torch.nn.Module):
    """A table that is both the first and the last weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.middle = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 50, bias=False)
        self.last.weight = self.embedding.weight
        self.register_buffer("place", torch.randn(1, 6, 8))

    def forward(self, tokens):
        return self.last(torch.tanh(self.middle(self.embedding(tokens) + self.place))).transpose(1, 2)


@pytest.mark.parametrize("way", EXPORTS)
def test_tied_weights_stay_one_and_buffers_are_not_trained_where_they_are_known(way):
    torch.manual_seed(3)
    model, x, target = Tied(), torch.randint(0, 50, (4, 6)), torch.randint(0, 50, (4, 6))
    data = export(model, x, **EXPORTS[way])
    if way not in {"old, training", "new", "new, of evaluation"}:
        with pytest.raises(GraphError, match=COMPUTED):
            Stepper(data, "cross_entropy")
        return
    found = Stepper(data, "cross_entropy", threads=2)(x, target)
    _, exact, _ = torch_step(model, x, target, "cross_entropy")
    table = "embedding.weight" if "embedding.weight.grad" in found else "last.weight"
    assert distance(found[f"{table}.grad"], exact["embedding.weight"], 0) < 1e-5
    assert distance(found["middle.weight.grad"], exact["middle.weight"], 0) < 1e-5
    assert ("place.grad" in found) == (way == "old, training")


def test_a_head_on_a_folded_trunk_is_trained():
    """Frozen, a folded batch norm does what it should."""
    model, x, target, loss = make("residual", fresh=False)
    data = export(model, x, **EXPORTS["old, evaluation"])
    found = Stepper(data, loss, train=("7.*",))(x, target)
    frozen = model.eval().double()
    value = torch.nn.functional.cross_entropy(frozen(x.double()), target)
    value.backward()
    assert distance(found["7.weight.grad"], frozen[7].weight.grad.numpy(), 0) < 1e-5
