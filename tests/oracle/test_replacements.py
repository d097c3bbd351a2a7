"""What refusals say to write instead of an operator without a gradient computes the same."""

import pytest

torch = pytest.importorskip("torch")

from edgeasync.autodiff.rules import INSTEAD

nn, F = torch.nn, torch.nn.functional
H = torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(4, 4)
REPLACED = {
    "Celu": (H, F.celu),
    "Mish": (H, F.mish),
    "PRelu": (H, lambda h: F.prelu(h, torch.tensor([0.3], dtype=torch.float64))),
    "ReduceLogSum": (H.exp(), lambda h: torch.logsumexp(h.log(), 1)),
    "Selu": (H, F.selu),
    "Softsign": (H, F.softsign),
}


class Slope:
    slope = 0.3


@pytest.mark.parametrize(("operator", "formula"), INSTEAD.items())
def test_a_formula_is_the_operator(operator, formula):
    h, expected = REPLACED[operator]
    names = {"h": h, "F": F, "self": Slope, "torch": torch}
    torch.testing.assert_close(eval(formula, names), expected(h))
