"""Gradients of matrix products against finite differences."""

import numpy as np
import pytest

from tests.support.models.gradients import check, numbers


@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("c", [None, (), (5,), (1, 5), (3, 5), (3, 1)], ids=str)
def test_gemm_of_parameters(trans_a, trans_b, c):
    """Both factors are parameters, so that each transposition is checked on both sides."""
    parameters = {
        "a": numbers((4, 3) if trans_a else (3, 4), 5),
        "b": numbers((5, 4) if trans_b else (4, 5), 6),
    }
    if c is not None:
        parameters["c"] = numbers(c, 7)
    inputs = "a, b" if c is None else "a, b, c"
    product = f"g = Gemm<transA={trans_a}, transB={trans_b}, alpha=0.5, beta=2.0>({inputs})"
    check(f"{product}\ny = MatMul(h, g)", (3,), parameters)


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c", [(), (1,), (5,), (1, 5)], ids=str)
def test_gemm_of_a_batch(trans_b, c):
    parameters = {"b": numbers((5, 3) if trans_b else (3, 5), 6), "c": numbers(c, 7)}
    check(f"y = Gemm<transB={trans_b}>(h, b, c)", (3,), parameters)


def test_gemm_of_a_batch_on_its_side():
    check("t = Transpose(h)\ny = Gemm<transA=1>(t, b)", (3,), {"b": numbers((3, 5), 6)})


PRODUCTS = {
    "a batch by a matrix": ((3,), (3, 5), "h, w"),
    "a sequence by a matrix": ((2, 3), (3, 5), "h, w"),
    "images by a matrix": ((2, 4, 3), (3, 5), "h, w"),
    "a matrix by a sequence": ((3, 5), (2, 3), "w, h"),
    "a matrix by images": ((4, 3, 5), (2, 3), "w, h"),
    "a sequence by matrices": ((2, 3), (1, 3, 5), "h, w"),
    "heads by heads": ((4, 2, 3), (4, 3, 5), "h, w"),
    "heads by one": ((4, 2, 3), (1, 3, 5), "h, w"),
    "one by heads": ((1, 2, 3), (4, 3, 5), "h, w"),
    "fewer dimensions on the left": ((3, 4, 5), (3, 2, 4), "w, h"),
    "a batch by a vector": ((3,), (3,), "h, w"),
    "images by a vector": ((4, 2, 3), (3,), "h, w"),
    "a vector by a sequence": ((3, 5), (3,), "w, h"),
}


@pytest.mark.parametrize(("x", "w", "order"), PRODUCTS.values(), ids=PRODUCTS)
def test_matmul(x, w, order):
    check(f"y = MatMul({order})", x, {"w": numbers(w, 9)})


def test_matmul_of_two_that_follow_the_batch():
    check("t = Transpose<perm=[0, 2, 1]>(h)\ny = MatMul(h, t)", (2, 3))
    check("t = Transpose(h)\ng = MatMul(t, h)\ny = MatMul(h, g)", (3,))
    check("t = Transpose(h)\ng = MatMul(h, t)\ny = MatMul(g, h)", (3,))


def test_matmul_of_vectors():
    check("d = MatMul(a, b)\ny = Mul(h, d)", (3,), {"a": numbers((4,), 5), "b": numbers((4,), 6)})
    check("d = MatMul(a, b)\ny = Mul(h, d)", (3,), {"a": numbers((4,), 5), "b": numbers((4, 3), 6)})
    check("d = MatMul(b, a)\ny = Mul(h, d)", (3,), {"a": numbers((4,), 5), "b": numbers((3, 4), 6)})


@pytest.mark.parametrize("dims", [(3, 4), (2, 3, 4)], ids=str)
def test_attention_scores(dims):
    """Two projections of one tensor, multiplied and normalized: gradients reach it by three ways."""
    width = dims[-1]
    parameters = {name: numbers((width, width), place) for place, name in enumerate("qkv")}
    last = [*range(len(dims) + 1)]
    last[-2:] = last[-1], last[-2]
    check(
        "a = MatMul(h, q)\nb = MatMul(h, k)\nc = MatMul(h, v)\n"
        f"t = Transpose<perm={last}>(b)\ns = MatMul(a, t)\nr = Softmax<axis=-1>(s)\ny = MatMul(r, c)",
        dims,
        parameters,
        seed=4,
    )


def test_float32_products_do_not_lose_more_than_they_must():
    check("y = MatMul(h, w)", (257,), {"w": numbers((257, 3), 9) / np.float32(16)})
