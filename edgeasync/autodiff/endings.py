"""What a model's output is: raw scores, or probabilities made of them, whether by one operator or by arithmetic.

The last operators are read backwards, through what moves, clips or scales values. Each tensor on the way is
recognized by the operator that makes it, or by its values on random inputs: rows that are positive and sum to 1,
and the softmax or sigmoid of an earlier tensor.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np
from onnx import helper, numpy_helper

from edgeasync.autodiff import forward
from edgeasync.autodiff.forward import Forward
from edgeasync.autodiff.graph import (
    FLOAT,
    IR_VERSION,
    Array,
    Node,
    Shape,
    free_inputs,
    needed,
    opset_imports,
    value_info,
    write_nodes,
)
from edgeasync.errors import GraphError, argument
from edgeasync.losses import BinaryCrossEntropy, CrossEntropy, Loss

DRAWS = (1.0, 4.0)
"""Standard deviations of the random inputs of the runs."""

ROWS = 5
"""Examples in a run, if the batch is free."""

MOVED = 0.3
"""How far parameters move for a run, as a share of their size: all scores of a new model may be 0."""

EXACT = 3e-6
"""How far values may be apart that are the same in float32."""

SPREAD_MIN = 0.05
"""Over less than this a sigmoid cannot be told from a straight line."""

_YES_OR_NO = argument("loss", "bce_with_logits")

_MAKERS = frozenset({"HardSigmoid", "Sigmoid", "Softmax"})
_MOVING = frozenset(
    {"Cast", "Concat", "Flatten", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
_SCALING = frozenset({"Add", "Div", "Mul", "Sub"})
_CLIPPING = frozenset({"Clip", "Max", "Min"})


class Ending(msgspec.Struct, frozen=True):
    """What makes probabilities, or their logarithm, of which scores; `axis` is that of the classes."""

    maker: str
    scores: str
    axis: int | None = None
    logarithm: bool = False


def check_ending(prepared: Forward, loss: Loss) -> None:
    """Raise `GraphError` if the loss takes raw scores and the output has none, or a single one for classes."""
    output = prepared.output
    if prepared.dtypes[output] != FLOAT:
        raise GraphError(
            f"output {output!r} is {prepared.dtypes[output]}, not float32; name a float32 tensor as the output"
        )
    if output not in {name for node in prepared.nodes for name in node.outputs}:
        raise GraphError(f"output {output!r} is an input of the model; nothing can be trained")
    if not isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        return
    classes = isinstance(loss, CrossEntropy)
    ending = _find(prepared)
    if classes and ending is not None and ending.maker == "LogSoftmax":
        ending = None  # the softmax of log-probabilities is the probabilities
    shape = prepared.shapes[output]
    if classes and _is_single(shape):
        as_well = f" and {argument('output', ending.scores)}" if ending is not None and ending.scores else ""
        raise GraphError(
            f"output {output!r} of shape {shape} has one score for each example, and cross_entropy needs one for "
            f"each class (its loss would be 0 for ever); give {_YES_OR_NO}{as_well}, with the labels 0 "
            "and 1"
        )
    if ending is None:
        return
    of_it = ending.logarithm and ending.maker != "LogSoftmax"
    what = f"the logarithm of {ending.maker}" if of_it else ending.maker
    raise GraphError(
        f"output {output!r} comes from {what}, but this loss takes the scores before it; "
        f"{_advice(prepared, ending, classes=classes)}"
    )


def _advice(prepared: Forward, ending: Ending, *, classes: bool) -> str:
    if not ending.scores:
        return f"export the scores instead, or give {argument('loss', 'mse')}"
    shape, scores = prepared.shapes[prepared.output], prepared.shapes[ending.scores]
    if classes and _is_single(scores):
        return f"give {argument('output', ending.scores)} and {_YES_OR_NO}, with the labels 0 and 1"
    if classes and (ending.axis not in (None, 1) or _without_ones(shape) != _without_ones(scores)):
        return "export the scores instead, with the classes at axis 1"
    return f"give {argument('output', ending.scores)}"


def _is_single(shape: Shape) -> bool:
    """Return whether there is one score for each example, or for each place of one."""
    return len(shape) == 1 or (len(shape) > 1 and shape[1] == 1)


def _without_ones(shape: Shape) -> list[int | None]:
    return [size for size in shape if size != 1]


def _find(prepared: Forward) -> Ending | None:
    """Return what makes the output's probabilities; by operators if these tell, else by values."""
    makers = {name: node for node in prepared.nodes for name in node.outputs if name}
    runs = _runs(prepared)
    way = list(_on_the_way(prepared, makers))
    for name, scaled, logged in way:
        found = _by_operator(prepared, makers[name])
        if found is not None and (not scaled or _looks_like_shares(prepared, runs, found.axis)):
            return msgspec.structs.replace(found, logarithm=found.logarithm or logged)
    for name, scaled, logged in way:
        found = _by_values(prepared, name, makers, runs)
        if found is not None and (not scaled or _looks_like_shares(prepared, runs, found.axis)):
            return msgspec.structs.replace(found, logarithm=found.logarithm or logged)
    for name, scaled, _ in way:
        node = makers[name]
        if not scaled and node.op == "Clip" and _within_0_and_1(prepared, node):
            return Ending("Clip", node.inputs[0])
    return None


def _on_the_way(prepared: Forward, makers: Mapping[str, Node]) -> Iterator[tuple[str, bool, bool]]:
    """Yield the tensors behind which nothing but moving, clipping and scaling happens, the output first.

    With each: whether values are scaled behind it, and whether their logarithm is taken.
    """
    waiting = [(prepared.output, False, False)]
    while waiting:
        name, scaled, logged = waiting.pop()
        if name not in makers:
            continue
        yield name, scaled, logged
        node = makers[name]
        single = [each for each in node.inputs if not _is_number(prepared, each)]
        if node.op in _MOVING:
            inner = node.inputs if node.op == "Concat" else node.inputs[:1]
            waiting += [(each, scaled, logged) for each in inner]
        elif node.op == "Log" and not logged:
            waiting.append((node.inputs[0], scaled, True))
        elif node.op in _CLIPPING and single:
            waiting.append((single[0], scaled, logged))
        elif node.op in _SCALING and len(single) == 1:
            complement = node.op == "Sub" and _number(prepared, node.inputs[0]) == 1.0
            small = logged and node.op == "Add"  # so that no logarithm is of 0
            waiting.append((single[0], scaled or not (complement or small), logged))


def _by_operator(prepared: Forward, node: Node) -> Ending | None:
    if node.op == "LogSoftmax":
        return Ending("LogSoftmax", node.inputs[0], _axis(prepared, node), logarithm=True)
    if node.op in _MAKERS:
        return Ending(node.op, node.inputs[0], _axis(prepared, node) if node.op == "Softmax" else None)
    return None


def _axis(prepared: Forward, node: Node) -> int:
    return int(node.attributes.get("axis", -1)) % len(prepared.shapes[node.inputs[0]])


def _is_number(prepared: Forward, name: str) -> bool:
    """Return whether a tensor is a constant, or a single number that may be trained."""
    value = prepared.parameters.get(name)
    return not name or name in prepared.constants or (value is not None and value.size == 1)


def _number(prepared: Forward, name: str) -> float | None:
    value = prepared.constants.get(name, prepared.parameters.get(name))
    return float(value.flat[0]) if value is not None and value.size and forward.is_uniform(value) else None


def _within_0_and_1(prepared: Forward, node: Node) -> bool:
    low, high = [(_number(prepared, name) if name else None) for name in (*node.inputs[1:3], "", "")[:2]]
    return node.op == "Clip" and low is not None and high is not None and 0.0 <= low < high <= 1.0


# -- by values -------------------------------------------------------------------------------------------------


def _looks_like_shares(prepared: Forward, runs: list[Mapping[str, Array]], axis: int | None) -> bool:
    """Return whether scaled probabilities are still that: none negative, or all sums the same.

    Others are scores that were bounded on purpose.
    """
    values = [run[prepared.output] for run in runs]
    if not values:
        return False
    if all((value >= 0).all() for value in values):
        return True
    if axis is None or values[0].ndim < 2:
        return False
    sums = np.concatenate([value.sum(1, dtype=np.float64).ravel() for value in values])
    return bool(
        np.ptp(sums) <= EXACT * values[0].shape[1] * max(1.0, *[float(np.abs(value).max()) for value in values])
    )


def _by_values(
    prepared: Forward, name: str, makers: Mapping[str, Node], runs: list[Mapping[str, Array]]
) -> Ending | None:
    """Recognize a tensor by what it holds on random inputs, and find the scores it is made of."""
    values = [run[name] for run in runs if name in run]
    if not values or values[0].ndim < 1 or not all(np.isfinite(value).all() for value in values):
        return None
    spread = max(float(np.ptp(value)) for value in values)
    axes = [axis for axis in dict.fromkeys((1, values[0].ndim - 1)) if 0 < axis < values[0].ndim]
    shares = [
        axis
        for axis in axes
        if values[0].shape[axis] > 1
        and all(
            (value >= 0).all() and np.abs(value.sum(axis, dtype=np.float64) - 1).max() < 1e-4 for value in values
        )
    ]
    if spread < SPREAD_MIN and not shares:
        return None
    formulas: list[tuple[str, int | None, bool, Callable[[Array], Array]]] = []
    if all((value >= 0).all() and (value <= 1).all() for value in values):
        formulas += [("a softmax by arithmetic", axis, False, _softmax_along(axis)) for axis in shares]
        formulas.append(("a sigmoid by arithmetic", None, False, lambda x: np.exp(-np.logaddexp(0, -x))))
    elif makers[name].op != "Log" and all((value <= 0).all() for value in values):
        formulas += [("LogSoftmax", axis, True, _log_softmax_along(axis)) for axis in axes]
        formulas.append(("a sigmoid by arithmetic", None, True, lambda x: -np.logaddexp(0, -x)))
    earlier = list(_earlier(prepared, name, makers))
    for maker, axis, logarithm, formula in formulas:
        matches = [
            other
            for other in earlier
            if all(other in run and run[other].shape == run[name].shape for run in runs)
            and all(_same(formula(run[other].astype(np.float64)), run[name]) for run in runs)
        ]
        # Scores less their maximum are as good, but a person knows the scores.
        plain = [other for other in matches if makers[other].op not in ("LogSoftmax", "Sub")]
        if matches:
            return Ending(maker, (plain or matches)[0], axis, logarithm)
    return Ending("rows that are positive and sum to 1", "", shares[0]) if shares else None


def _softmax_along(axis: int) -> Callable[[Array], Array]:
    return lambda x: np.exp(_log_softmax_along(axis)(x))


def _log_softmax_along(axis: int) -> Callable[[Array], Array]:
    def formula(x: Array) -> Array:
        x = x - x.max(axis, keepdims=True)
        result: Array = x - np.log(np.exp(x).sum(axis, keepdims=True))
        return result

    return formula


def _same(expected: Array, found: Array) -> bool:
    return bool((np.abs(expected - found) <= EXACT * np.maximum(1.0, np.abs(expected))).all())


def _earlier(prepared: Forward, name: str, makers: Mapping[str, Node]) -> Iterator[str]:
    """Yield the tensors that one is made of, the last one first."""
    for node in reversed(needed(prepared.nodes, [name])):
        yield from (made for made in node.outputs if made and made != name and makers.get(made) is node)


def _runs(prepared: Forward) -> list[Mapping[str, Array]]:
    """Run the model on random inputs and moved parameters; return the tensors of the output's size of each run.

    Nothing is returned if it does not run on them: then only operators tell.
    """
    sizes = _without_ones(prepared.shapes[prepared.output])
    wanted = [
        name
        for node in prepared.nodes
        for name in node.outputs
        if name
        and prepared.dtypes[name] == FLOAT
        and sorted(map(str, _without_ones(prepared.shapes[name]))) == sorted(map(str, sizes))
    ]
    used = {name for node in prepared.nodes for name in free_inputs(node)}
    inputs = [value_info(name, prepared.dtypes[name], prepared.shapes[name]) for name in prepared.inputs]
    inputs += [value_info(name, value.dtype, value.shape) for name, value in prepared.parameters.items()]
    graph = helper.make_graph(
        write_nodes(prepared.nodes, {}),
        "ending",
        inputs,
        [helper.make_tensor_value_info(name, 1, [None] * len(prepared.shapes[name])) for name in wanted],
        [numpy_helper.from_array(value, name) for name, value in prepared.constants.items() if name in used],
    )
    imports = opset_imports(prepared.opset, prepared.nodes)
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=imports)
    runs: list[Mapping[str, Array]] = []
    try:
        session = forward.open_session(model.SerializeToString())
        for number, scale in enumerate(DRAWS):
            feeds = _draw(prepared, np.random.Generator(np.random.PCG64(number)), scale)
            runs.append(dict(zip(wanted, session.run(wanted, feeds), strict=True)))
    except Exception:  # noqa: BLE001 - onnxruntime raises errors of its own; the inputs may be none for this model
        return []
    return runs


def _draw(prepared: Forward, generator: np.random.Generator, scale: float) -> dict[str, Array]:
    feeds: dict[str, Array] = {}
    for name in prepared.inputs:
        size = [ROWS if dim is None else dim for dim in prepared.shapes[name]]
        kind = prepared.dtypes[name]
        values = generator.standard_normal(size) * scale if kind == FLOAT else generator.integers(0, 2, size)
        feeds[name] = values.astype(kind)
    for name, value in prepared.parameters.items():
        reach = MOVED * max(float(np.linalg.norm(value)) / np.sqrt(value.size), 0.1)
        feeds[name] = generator.standard_normal(value.shape, np.float32) * np.float32(reach) + value
    return feeds
