"""Gradients of matrix products."""

from edgeasync.autodiff.rules.registry import Gradients, Step, rule


@rule("Gemm")
def _gemm(step: Step) -> Gradients:
    """Gradients of Y = alpha A' B' + beta C, where A' is A or its transpose, and B' likewise."""
    op, gradient, a, b = step.graph.op, step.gradient, step.input(0), step.input(1)
    alpha = step.attribute("alpha", 1.0)
    trans_a, trans_b = step.attribute("transA", 0), step.attribute("transB", 0)
    if trans_a:
        grad_a = op("Gemm", b, gradient, alpha=alpha, transA=trans_b, transB=1)
    else:
        grad_a = op("Gemm", gradient, b, alpha=alpha, transB=1 - trans_b)
    if trans_b:
        grad_b = op("Gemm", gradient, a, alpha=alpha, transA=1, transB=trans_a)
    else:
        grad_b = op("Gemm", a, gradient, alpha=alpha, transA=1 - trans_a)
    if not step.input(2):
        return [grad_a, grad_b]
    beta = step.attribute("beta", 1.0)
    scaled = gradient if beta == 1.0 else op("Mul", gradient, step.graph.scalar(beta))
    return [grad_a, grad_b, step.unbroadcast(scaled, 2)]


@rule("MatMul")
def _matmul(step: Step) -> Gradients:
    rank_a, rank_b = len(step.shape(0)), len(step.shape(1))
    if rank_a == 1 or rank_b == 1:
        return _with_vectors(step)
    op, gradient, a, b = step.graph.op, step.gradient, step.input(0), step.input(1)
    if rank_b == 2:
        return _by_matrix(step)
    grad_a = op("MatMul", gradient, _swap_last(step, b, rank_b))
    grad_b = op("MatMul", _swap_last(step, a, rank_a), gradient)
    shape_a, shape_b = step.shape(0), step.shape(1)
    batch = step.output_shape[:-2]
    return [
        step.graph.reduce_to(grad_a, (*batch, *shape_a[-2:]), shape_a),
        step.graph.reduce_to(grad_b, (*batch, *shape_b[-2:]), shape_b),
    ]


def _by_matrix(step: Step) -> Gradients:
    """Gradients of a product with a matrix: flatten all leading axes into rows."""
    graph, op = step.graph, step.graph.op
    a, b, gradient = step.input(0), step.input(1), step.gradient
    if len(step.shape(0)) > 2:
        (depth, width) = graph.static_shape(b, step.node.where)
        a = op("Reshape", a, graph.ints(-1, depth))
        gradient = op("Reshape", gradient, graph.ints(-1, width))
    grad_a = op("Gemm", gradient, b, transB=1)
    if len(step.shape(0)) > 2:
        grad_a = graph.reshape_like(grad_a, step.input(0))
    return [grad_a, op("Gemm", a, gradient, transA=1)]


def _with_vectors(step: Step) -> Gradients:
    """Gradients of a product with a vector, which is a row on the left or a column on the right.

    The result of the product lacks the axis of the vector.
    """
    graph, op = step.graph, step.graph.op
    a, b, gradient = step.input(0), step.input(1), step.gradient
    shape_a, shape_b = step.shape(0), step.shape(1)
    if len(shape_b) == 1:
        b = op("Unsqueeze", b, graph.ints(1))
        gradient = op("Unsqueeze", gradient, graph.ints(-1))
        shape_b = (*shape_b, 1)
    if len(shape_a) == 1:
        a = op("Unsqueeze", a, graph.ints(0))
        gradient = op("Unsqueeze", gradient, graph.ints(-2))
        shape_a = (1, *shape_a)
    batch = (shape_a if len(shape_a) > len(shape_b) else shape_b)[:-2]
    grad_a = op("MatMul", gradient, _swap_last(step, b, len(shape_b)))
    grad_b = op("MatMul", _swap_last(step, a, len(shape_a)), gradient)
    grad_a = graph.reduce_to(grad_a, (*batch, *shape_a[-2:]), shape_a)
    grad_b = graph.reduce_to(grad_b, (*batch, *shape_b[-2:]), shape_b)
    return [graph.reshape_like(grad_a, step.input(0)), graph.reshape_like(grad_b, step.input(1))]


def _swap_last(step: Step, name: str, rank: int) -> str:
    order = [*range(rank - 2), rank - 1, rank - 2]
    return step.graph.op("Transpose", name, perm=order)
