"""Detects whether a model's output contains raw scores or probabilities computed from scores.

The search starts at the output and goes backwards through operators that move, clip or scale
values. On this path, a tensor of probabilities is recognized by its operator, or by its values on
random inputs: its rows are positive and sum to 1, or it equals the softmax or sigmoid of an earlier
tensor. If the output is computed from several such tensors by other arithmetic, it is rejected if
its values all have the same sign, or if they have the same sum in every example. Finally, an output
is rejected if it stays between 0 and 1 for arbitrarily large parameters. Before an error message
recommends a tensor of scores, this tensor is checked in the same way.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np

from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import FLOAT, Array, Node, Shape, needed
from edgeasync.autodiff.random_runs import RandomRuns, Runs
from edgeasync.autodiff.reading import is_uniform
from edgeasync.errors import GraphError, argument
from edgeasync.losses import BinaryCrossEntropy, CrossEntropy, Loss
from edgeasync.scores import are_bounded

EXACT = 3e-6
"""Maximum relative difference between values that count as equal in float32."""

LOOSE = 1e-4
"""Maximum deviation from 1 for a sum of probabilities."""

FREE = 10.0
"""Absolute value that an unbounded tensor exceeds in at least one run. The largest random
parameters are a thousand times larger than usual.
"""

SPREAD_MIN = 0.05
"""Minimum range of values in which a sigmoid can be distinguished from a linear function."""

_YES_OR_NO = argument("loss", "bce_with_logits")
_VALUES = argument("loss", "mse")

_BOUNDED = "bounds"
_MAKERS = frozenset({"HardSigmoid", "Sigmoid", "Softmax"})
_MOVING = frozenset(
    {"Cast", "Concat", "Flatten", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
)
_SCALING = frozenset({"Add", "Div", "Mul", "Sub"})
_CLIPPING = frozenset({"Clip", "Max", "Min"})
_ARITHMETIC = (
    _MOVING
    | _SCALING
    | _CLIPPING
    | {"Abs", "Exp", "Log", "Mean", "Neg", "Pow", "Reciprocal", "Relu", "Sqrt", "Sum", "Where"}
    | {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Softplus", "Tanh"}
)
"""Operators whose results are not scores if all their inputs are probabilities."""

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class Ending(msgspec.Struct, frozen=True):
    """Describes how an output's probabilities, or their logarithms, are computed from scores.

    `maker` names the operator, `scores` is the tensor of scores, and `axis` is the class axis.
    """

    maker: str
    scores: str
    axis: int | None = None
    logarithm: bool = False

    @property
    def said(self) -> str:
        """The predicate for error messages, such as "comes from Softmax"."""
        if self.maker == _BOUNDED:
            return "stays between 0 and 1 for all parameters"
        of_it = self.logarithm and self.maker != "LogSoftmax"
        return f"comes from the logarithm of {self.maker}" if of_it else f"comes from {self.maker}"


def check_ending(prepared: ForwardGraph, loss: Loss) -> Ending | None:
    """Return the softmax or sigmoid at the end, if training can use the scores before it.

    Return `None` if the loss can use the output itself. Raises `GraphError` if the loss needs raw
    scores, but the output contains other probabilities, or if the loss is for classification, but
    the output has a single score per example.
    """
    output = prepared.output
    if prepared.dtypes[output] != FLOAT:
        found = _last_float(prepared)
        advice = (
            f"set {argument('output', found)}, from which it is computed" if found else "choose another output"
        )
        raise GraphError(
            f"output {output!r} is {prepared.dtypes[output]}, but only a float32 tensor can be trained; {advice}"
        )
    if output not in {name for node in prepared.nodes for name in node.outputs}:
        raise GraphError(f"output {output!r} is an input of the model; nothing can be trained")
    if not isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        return None
    shape, classes = prepared.shapes[output], isinstance(loss, CrossEntropy)
    single = classes and _is_single(shape)
    endings = _Endings(prepared, classes=classes and not single)
    ending = endings.of(output)
    if single:
        if ending is not None and endings.are_skipped(ending, classes=False):
            advice = f"it {ending.said}: set {_YES_OR_NO}, with the labels 0 and 1"
        else:
            advice = _advice_for_one(prepared, ending)
        raise GraphError(
            f"output {output!r} of shape {shape} has one score per example, but cross_entropy needs one per class "
            f"(its loss would always be 0); {advice}"
        )
    if ending is not None and not endings.are_skipped(ending, classes=classes):
        raise GraphError(
            f"output {output!r} {ending.said}, but this loss needs the scores before it; "
            f"{_advice(prepared, ending, classes=classes)}"
        )
    return ending


def _last_float(prepared: ForwardGraph) -> str | None:
    """Return the float32 tensor from which the output is computed, such as the scores of a label."""
    makers = {name: node for node in prepared.nodes for name in node.outputs}
    name = prepared.output
    while name in makers and prepared.dtypes[name] != FLOAT:
        name = makers[name].inputs[0]
    return name if name in makers else None


def classes_are_last(prepared: ForwardGraph) -> bool:
    """Return whether the class axis seems to be the last axis instead of axis 1.

    This is assumed if the output has at least three axes and comes from a linear layer.
    """
    makers = {name: node for node in prepared.nodes for name in node.outputs}
    name = prepared.output
    while (node := makers.get(name)) is not None and node.op in ("Add", "Cast", "Identity"):
        varying = [each for each in node.inputs if each in makers]
        if len(varying) != 1:
            return False
        name = varying[0]
    return node is not None and node.op == "MatMul" and len(prepared.shapes[prepared.output]) > 2


def _advice_for_one(prepared: ForwardGraph, ending: Ending | None) -> str:
    """Return advice for a classification loss with a model that has one score per example."""
    if ending is None:
        return f"set {_VALUES} for values, or {_YES_OR_NO} for the labels 0 and 1"
    if not ending.scores:
        return f"it {ending.said}: set {_VALUES}, with the targets 0 and 1"
    if _is_single(prepared.shapes[ending.scores]):
        return f"set {_YES_OR_NO} and {argument('output', ending.scores)}, with the labels 0 and 1"
    return f"set {argument('output', ending.scores)}, which has one score per class"


def _advice(prepared: ForwardGraph, ending: Ending, *, classes: bool) -> str:
    targets = ", with targets of 1 for an example's class and 0 for the others" if classes else ""
    if not ending.scores:
        return f"export the scores instead, or set {_VALUES}{targets}"
    shape, scores = prepared.shapes[prepared.output], prepared.shapes[ending.scores]
    as_output = f"set {argument('output', ending.scores)}"
    if classes and _is_single(scores):
        return f"{as_output} and {_YES_OR_NO}, with the labels 0 and 1"
    same = _without_ones(shape) == _without_ones(scores)
    if classes and not same and "igmoid" in ending.maker:
        return f"{as_output} and {_YES_OR_NO}, with 0 or 1 per answer"
    if classes and (ending.axis not in (None, 0, 1) or not same):
        return f"export the scores instead, with the classes on axis 1, or set {_VALUES}{targets}"
    if not same:
        return f"{as_output} and {argument('loss', 'cross_entropy')}, with class numbers as labels"
    return as_output


def _is_single(shape: Shape) -> bool:
    """Return whether the output has only one score per example, or per position in an example."""
    return len(shape) == 1 or (len(shape) > 1 and shape[1] == 1)


def _without_ones(shape: Shape) -> list[int | None]:
    return [size for size in shape if size != 1]


class _Endings:
    """Finds the scores from which probabilities in a model are computed.

    Runs the model on random inputs only once, and only if necessary.
    """

    def __init__(self, prepared: ForwardGraph, *, classes: bool) -> None:
        self._prepared = prepared
        self._classes = classes
        self._makers = {name: node for node in prepared.nodes for name in node.outputs if name}
        self._tries = RandomRuns(prepared, {name for name, _, _ in self._way(prepared.output)})

    def of(self, name: str) -> Ending | None:
        """Return how a tensor's probabilities are computed, or `None` if it contains scores."""
        found = self._on_the_way(name) or self._of_probabilities(name) or self._bounded(name)
        if found is None or (self._classes and found.maker == "LogSoftmax" and self._are_scores(name)):
            return None
        deeper = self.of(found.scores) if found.scores else None
        return found if deeper is None else msgspec.structs.replace(found, scores=deeper.scores)

    def are_skipped(self, ending: Ending, *, classes: bool) -> bool:
        """Return whether the output is exactly the softmax or sigmoid of scores of the same shape.

        The class axis must be axis 1. For a loss that is not for classes, only a sigmoid counts.
        The logarithms of both count, too.
        """
        prepared, output, scores = self._prepared, self._prepared.output, ending.scores
        if not scores or prepared.shapes[scores] != prepared.shapes[output]:
            return False
        sigmoid = "igmoid" in ending.maker
        if not sigmoid and not (classes and ending.axis == 1):
            return False
        if self._makers[output].op in ("Sigmoid", "Softmax") and self._makers[output].inputs[0] == scores:
            return True
        values = [(run[scores], run[output]) for run in self._tries.near if scores in run and output in run]
        if not values:
            return False
        formulas = [_sigmoid, _log_sigmoid] if sigmoid else [_softmax_along(1), _log_softmax_along(1)]
        return any(
            all(_same(formula(before.astype(np.float64)), after) for before, after in values)
            for formula in formulas
        )

    def _on_the_way(self, output: str) -> Ending | None:
        """Find an operator whose probabilities are only moved, clipped or scaled afterwards.

        Scaled values must still look like probabilities. If they do not, they are scores that are
        bounded on purpose.
        """
        way = list(self._way(output))
        for find in (self._by_operator, self._by_values):
            for name, scaled, logged in way:
                found = find(name)
                if found is not None and (not scaled or self._looks_like_shares(output, found.axis)):
                    return msgspec.structs.replace(found, logarithm=found.logarithm or logged)
        for name, scaled, _ in way:
            node = self._makers[name]
            if not scaled and node.op == "Clip" and _within_0_and_1(self._prepared, node):
                return Ending("Clip", node.inputs[0])
        return None

    def _way(self, output: str) -> Iterator[tuple[str, bool, bool]]:
        """Yield the tensors from which the output is computed by only moving, clipping or scaling.

        Also yields two flags for each tensor: whether its values are scaled later, and whether
        their logarithm is used.
        """
        prepared, waiting = self._prepared, [(output, False, False)]
        while waiting:
            name, scaled, logged = waiting.pop()
            if name not in self._makers:
                continue
            yield name, scaled, logged
            node = self._makers[name]
            single = [each for each in node.inputs if not _is_number(prepared, each)]
            if node.op in _MOVING:
                inner = node.inputs if node.op == "Concat" else node.inputs[:1]
                waiting += [(each, scaled, logged) for each in inner]
            elif node.op == "Log" and not logged:
                waiting.append((node.inputs[0], scaled, True))
            elif node.op in _CLIPPING and len(single) == 1:
                waiting.append((single[0], scaled, logged))
            elif node.op in _SCALING and len(single) == 1:
                complement = node.op == "Sub" and _number(prepared, node.inputs[0]) == 1.0
                small = logged and node.op == "Add"  # a small number added to avoid log(0)
                waiting.append((single[0], scaled or not (complement or small), logged))

    def _of_probabilities(self, output: str) -> Ending | None:
        """Return an `Ending` if the output is computed only from probabilities, by arithmetic.

        Return `None` unless all values of the output have the same sign, or the same sum per
        example.
        """
        for find in (self._by_operator, lambda name: self._by_operator(name) or self._by_values(name)):
            found, waiting, seen = list[Ending](), [output], set[str]()
            while waiting:
                name = waiting.pop()
                if name in seen:
                    continue
                seen.add(name)
                node = self._makers.get(name)
                if (ending := find(name) if node is not None else None) is not None:
                    found.append(ending)
                elif node is None or node.op not in _ARITHMETIC:
                    break
                else:
                    inner = node.inputs[:1] if node.op in _MOVING - {"Concat"} else node.inputs
                    waiting += [each for each in inner if self._is_computed(each)]
            else:
                axes = {ending.axis for ending in found}
                if found and self._looks_like_shares(output, axes.pop() if len(axes) == 1 else None):
                    return self._joined(output, found)
        return None

    def _is_computed(self, name: str) -> bool:
        return not _is_number(self._prepared, name) and self._prepared.dtypes[name] == FLOAT

    def _joined(self, output: str, found: list[Ending]) -> Ending:
        """Combine several `Ending` objects into one.

        The result names the scores only if all endings have the same scores, and these have the
        same size as the output.
        """
        makers, scores = list(dict.fromkeys([each.maker for each in found])), {each.scores for each in found}
        name, shapes = scores.pop(), self._prepared.shapes
        alike = not scores and name and _without_ones(shapes[name]) == _without_ones(shapes[output])
        return Ending(" and ".join(makers), name if alike else "", found[0].axis)

    def _bounded(self, output: str) -> Ending | None:
        """Return an `Ending` if the output always stays between 0 and 1.

        If the output is computed from an unbounded tensor, the `Ending` names this tensor as the
        scores.
        """
        if self._is_of_a_layer(output) or not are_bounded(self._wide(output)):
            return None
        name, free = output, list[str]()
        while name in self._makers and self._makers[name].op in _ARITHMETIC | _MAKERS:
            inner = [each for each in self._makers[name].inputs if self._is_computed(each)]
            if len(inner) != 1 or self._prepared.shapes[inner[0]] != self._prepared.shapes[output]:
                break
            (name,) = inner
            values = np.concatenate([value[np.isfinite(value)] for value in self._wide(name)] or [np.zeros(0)])
            if (np.abs(values) > FREE).any():
                if (values < 0).any() and (values > 0).any():
                    return Ending(_BOUNDED, name)
                free.append(name)
        # Scores of several classes may all have the same sign. Binary scores may not, because then
        # the predicted answer would always be the same.
        return Ending(_BOUNDED, free[0] if free and self._classes else "")

    def _is_of_a_layer(self, name: str) -> bool:
        """Return whether a tensor is the output of a layer such as a convolution.

        Such a tensor contains scores even if its values stay small, because a frozen layer may not
        depend on the random parameters.
        """
        while (node := self._makers.get(name)) is not None:
            if node.domain or node.op in _LAYERS:
                return bool(node.domain) or any(map(self._is_weight, node.inputs))
            if node.op in _MOVING - {"Concat"}:
                name = node.inputs[0]
            elif node.op == "Add" and len(inner := [each for each in node.inputs if each in self._makers]) == 1:
                (name,) = inner
            else:
                return False
        return False

    def _is_weight(self, name: str) -> bool:
        """Return whether a tensor is a parameter or constant, possibly quantized or transposed."""
        while (node := self._makers.get(name)) is not None and node.op in ("DequantizeLinear", "Transpose"):
            name = node.inputs[0]
        return name in self._prepared.parameters or name in self._prepared.constants

    def _by_operator(self, name: str) -> Ending | None:
        return _by_operator(self._prepared, self._makers[name])

    def _by_values(self, name: str) -> Ending | None:
        return _by_values(self._prepared, name, self._makers, self._tries.near)

    def _wide(self, name: str) -> list[Array]:
        return [run[name] for run in self._tries.wide if name in run]

    def _looks_like_shares(self, name: str, axis: int | None) -> bool:
        """Return whether all values have the same sign, or the same sum along `axis`."""
        values = [run[name] for run in self._tries.near if name in run]
        if not values:
            return False
        if all((value >= 0).all() for value in values) or all((value <= 0).all() for value in values):
            return True
        if axis is None or values[0].ndim < 2:
            return False
        sums = np.concatenate([value.sum(1, dtype=np.float64).ravel() for value in values])
        size = max(1.0, *[float(np.abs(value).max()) for value in values])
        return bool(np.ptp(sums) <= EXACT * values[0].shape[1] * size)

    def _are_scores(self, name: str) -> bool:
        """Return whether a tensor of log-probabilities may be used as scores.

        They may be used if they are normalized over the classes of each example, because then their
        softmax equals the softmax of the scores.
        """
        values = [run[name].astype(np.float64) for run in self._tries.near if name in run]
        if any((value > 0).any() for value in values):
            return False

        def normal(axis: int) -> bool:
            sums = [np.logaddexp.reduce(value, axis=axis) for value in values]
            return all(bool((np.abs(total) < LOOSE).all()) for total in sums)

        others = [axis for axis in range(len(self._prepared.shapes[name])) if axis != 1]
        return not values or normal(1) or not any(normal(axis) for axis in others)


def _by_operator(prepared: ForwardGraph, node: Node) -> Ending | None:
    if node.op == "LogSoftmax":
        return Ending("LogSoftmax", node.inputs[0], _axis(prepared, node), logarithm=True)
    if node.op in _MAKERS:
        return Ending(node.op, node.inputs[0], _axis(prepared, node) if node.op == "Softmax" else None)
    return None


def _axis(prepared: ForwardGraph, node: Node) -> int:
    return int(node.attributes.get("axis", -1)) % len(prepared.shapes[node.inputs[0]])


def _is_number(prepared: ForwardGraph, name: str) -> bool:
    """Return whether a tensor is a constant or a scalar parameter."""
    value = prepared.parameters.get(name)
    return not name or name in prepared.constants or (value is not None and value.size == 1)


def _number(prepared: ForwardGraph, name: str) -> float | None:
    value = prepared.constants.get(name, prepared.parameters.get(name))
    return float(value.flat[0]) if value is not None and value.size and is_uniform(value) else None


def _within_0_and_1(prepared: ForwardGraph, node: Node) -> bool:
    low, high = [(_number(prepared, name) if name else None) for name in (*node.inputs[1:3], "", "")[:2]]
    return node.op == "Clip" and low is not None and high is not None and 0.0 <= low < high <= 1.0


# -- by values -------------------------------------------------------------------------------------------------


def _by_values(prepared: ForwardGraph, name: str, makers: Mapping[str, Node], runs: Runs) -> Ending | None:
    """Recognize probabilities by their values on random inputs, and find their scores."""
    values = [run[name] for run in runs if name in run]
    if not values or values[0].ndim < 1 or not all(np.isfinite(value).all() for value in values):
        return None
    spread = max(float(np.ptp(value)) for value in values)
    axes = [axis for axis in dict.fromkeys((1, values[0].ndim - 1, 0)) if axis < values[0].ndim]
    shares = [
        axis
        for axis in axes
        if values[0].shape[axis] > 1
        and all(
            (value >= 0).all() and np.abs(value.sum(axis, dtype=np.float64) - 1).max() < LOOSE for value in values
        )
    ]
    if spread < SPREAD_MIN and not shares:
        return None
    formulas: list[tuple[str, int | None, bool, Callable[[Array], Array]]] = []
    if all((value >= 0).all() and (value <= 1).all() for value in values):
        formulas += [("a softmax by arithmetic", axis, False, _softmax_along(axis)) for axis in shares]
        formulas.append(("a sigmoid by arithmetic", None, False, _sigmoid))
    elif makers[name].op != "Log" and all((value <= 0).all() for value in values):
        formulas += [("LogSoftmax", axis, True, _log_softmax_along(axis)) for axis in axes]
        formulas.append(("a sigmoid by arithmetic", None, True, _log_sigmoid))
    earlier = list(_earlier(prepared, name, makers))
    for maker, axis, logarithm, formula in formulas:
        matches = [
            other
            for other in earlier
            if all(other in run and run[other].shape == run[name].shape for run in runs)
            and all(_same(formula(run[other].astype(np.float64)), run[name]) for run in runs)
        ]
        # Scores minus their maximum would also match, but users know the plain scores.
        plain = [other for other in matches if makers[other].op not in ("LogSoftmax", "Sub")]
        if matches:
            return Ending(maker, (plain or matches)[0], axis, logarithm)
    return Ending("rows that are positive and sum to 1", "", shares[0]) if shares else None


def _sigmoid(x: Array) -> Array:
    return np.asarray(np.exp(_log_sigmoid(x)))


def _log_sigmoid(x: Array) -> Array:
    with np.errstate(invalid="ignore"):  # of infinite values
        return np.asarray(-np.logaddexp(0, -x))


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


def _earlier(prepared: ForwardGraph, name: str, makers: Mapping[str, Node]) -> Iterator[str]:
    """Yield the tensors from which a tensor is computed, starting with the last."""
    for node in reversed(needed(prepared.nodes, [name])):
        yield from (made for made in node.outputs if made and made != name and makers.get(made) is node)
