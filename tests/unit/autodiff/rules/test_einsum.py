"""Gradients of Einstein summation against finite differences."""

import pytest

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from tests.support.models.gradients import check, forward, numbers

EQUATIONS = {
    "a product": ("bi,io->bo", (3,), [(3, 5)]),
    "spaces": (" b i , i o -> b o ", (3,), [(3, 5)]),
    "implicit output": ("bi,ij", (3,), [(3, 5)]),
    "scores of heads": ("bqhd,bkhd->bhqk", (2, 3, 4), [(1, 5, 3, 4)]),
    "a transpose": ("bij->bji", (2, 3), []),
    "a sum": ("bij->bi", (2, 3), []),
    "a sum over the first operand alone": ("bij,jk->bk", (2, 3), [(3, 4)]),
    "a sum over the second operand alone": ("bi,ijk->bij", (2,), [(2, 3, 4)]),
    "sums over both": ("bij,kl->bl", (2, 3), [(2, 4)]),
    "three operands": ("bi,ij,jk->bk", (2,), [(2, 3), (3, 4)]),
    "an outer product": ("bi,j->bij", (2,), [(3,)]),
    "a product of values": ("bi,bi->bi", (3,), [(1, 3)]),
    "an ellipsis": ("...i,io->...o", (2, 3), [(3, 4)]),
    "ellipses on both sides": ("...ij,...jk->...ik", (5, 2, 3), [(1, 5, 3, 2)]),
    "ellipses, implicit": ("...ij,...jk", (5, 2, 3), [(1, 1, 3, 2)]),
    "an ellipsis in the middle": ("b...i,i->b...", (2, 2, 3), [(3,)]),
    "upper-case letters": ("bI,Ii->bi", (3,), [(3, 5)]),
    "a diagonal": ("bi,jj->bij", (2,), [(3, 3)]),
    "a trace": ("bi,jj->bi", (2,), [(3, 3)]),
    "a diagonal of the batch": ("bii->bi", (3, 3), []),
    "a diagonal that is multiplied": ("bij,iij->bj", (2, 3), [(2, 2, 3)]),
    "three times the same letter": ("bi,iii->bi", (2,), [(2, 2, 2)]),
    "a number": ("i,i->", None, [(3,), (3,)]),
    "a sum of everything": ("ij->", None, [(3, 2)]),
}


@pytest.mark.parametrize(("equation", "x", "others"), EQUATIONS.values(), ids=EQUATIONS)
def test_equations(equation, x, others):
    names = [f"w{place}" for place in range(len(others))]
    parameters = {
        name: numbers(shape, 5 + place) for place, (name, shape) in enumerate(zip(names, others, strict=True))
    }
    if x is None:
        check(f'a = Einsum<equation="{equation}">({", ".join(names)})\ny = Mul(h, a)', (2,), parameters)
    else:
        check(f'a = Einsum<equation="{equation}">({", ".join(["h", *names])})\ny = Tanh(a)', x, parameters)


def test_the_same_operand_twice():
    check('y = Einsum<equation="bi,bj->bij">(h, h)', (3,))


def test_a_diagonal_of_the_batch_axis_is_refused():
    """A product of all examples with each other, of which only the diagonal is kept."""
    text = 'h = Mul(x, p)\nt = Transpose(h)\nm = MatMul(h, t)\ny = Einsum<equation="bb->b">(m)'
    with pytest.raises(GraphError, match="its equation repeats the letter 'b' for the batch axis"):
        build_training_graph(forward(text, {"p": numbers((1, 3))}, (3,)), GraphSettings(loss="mse"))
