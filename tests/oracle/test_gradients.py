"""Whole models of torch: every export trains as torch does in training mode, or is refused with a reason."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from edgeasync.autodiff.rules import RULES
from edgeasync.errors import GraphError
from tests.oracle.exports import EXPORTS, Stepper, distance, export, torch_step
from tests.oracle.models import MODELS, make

pytestmark = pytest.mark.filterwarnings("ignore")

NORMED = {"residual", "mobile", "sensors"}
"""Models with batch norms after convolutions."""


def refusal(name, way, fresh):
    """Return why an export is refused, or nothing."""
    if name in NORMED and (way == "old, evaluation" or "optimized" in way):
        return "the exporter folded into it"
    return None


def compare(name, way, *, fresh, free=True, threads=1):
    model, x, target, loss = make(name, fresh=fresh)
    data = export(model, x, free=free, **EXPORTS[way])
    why = refusal(name, way, fresh)
    if why:
        with pytest.raises(GraphError, match=why):
            Stepper(data, loss, threads)
        return
    stepper = Stepper(data, loss, threads)
    found = stepper(x, target)
    value, gradients, buffers = torch_step(model, x, target, loss)
    _, single, _ = torch_step(model, x, target, loss, x.float().dtype)
    assert abs(found["loss"] - value) <= 1e-5 * abs(value)
    named = {key.removesuffix(".grad"): gradient for key, gradient in found.items() if key.endswith(".grad")}
    for key, gradient in named.items():
        print(name, way, key, distance(gradient, gradients[key]), distance(single[key], gradients[key]))
    assert set(named) == set(gradients)
    for key, gradient in named.items():
        limit = max(1e-5, 2 * distance(single[key], gradients[key]))
        assert distance(gradient, gradients[key]) <= limit, key
    moved = {key.removesuffix(".new"): value for key, value in found.items() if key.endswith(".new")}
    assert set(moved) == {key for key in buffers if "running" in key}
    for key, statistic in moved.items():
        np.testing.assert_allclose(statistic, buffers[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "trained"])
@pytest.mark.parametrize("way", EXPORTS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name, way, fresh):
    compare(name, way, fresh=fresh)
