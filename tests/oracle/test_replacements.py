"""What refusals say to write instead of an operator without a gradient computes the same."""

import pytest

torch = pytest.importorskip("torch")

from edgeasync.autodiff.rules import INSTEAD

H, N = torch.linspace(-2, 2, 16, dtype=torch.float64).reshape(4, 4), 4
REPLACED = {
    "CumSum": (H, lambda h: h.cumsum(1)),
    "Tan": (H, torch.tan),
    "Trilu": (H, torch.tril),
}
NAMED = {"Einsum", "RNN"}
"""What no single formula replaces."""


@pytest.mark.parametrize(("operator", "formula"), INSTEAD.items())
def test_a_formula_is_the_operator(operator, formula):
    if operator in NAMED:
        return
    h, expected = REPLACED[operator]
    ones = {"n": N, "h": h, "torch": Double}
    torch.testing.assert_close(eval(formula, ones), expected(h))


class Double:
    """Of torch what the formulas use, with matrices of ones in float64."""

    sin, cos = torch.sin, torch.cos

    @staticmethod
    def ones(*sizes):
        return torch.ones(*sizes, dtype=torch.float64)
