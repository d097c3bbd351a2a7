"""Makes a batch size dynamic that a model file fixes, and verifies the result by running it.

Constants that contain the batch size, such as the target shape of a Reshape, are rewritten. The
changed model then runs on a batch of different random examples. All its tensors must be the same as
in runs of the original file with one example each.
"""

import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeasync.autodiff.export import settle
from edgeasync.autodiff.forward import SHAPE_OPERATORS
from edgeasync.autodiff.graph import Array, free_inputs, read_nodes, refill
from edgeasync.autodiff.probing import run_every_tensor
from edgeasync.autodiff.reading import nodes_within
from edgeasync.errors import native_reason

EXAMPLES = 3
"""Number of examples in the batch that verifies a model, or one more if the file fixes this number."""

TOLERANCE = 1e-4
"""Maximum difference from runs with one example each, relative to a tensor's largest value. It
allows for the rounding of float32.
"""

END = np.iinfo(np.int64).max

_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
_RESHAPING = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})

Run = Mapping[str, Array]


def data_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a model that are not initializers."""
    constants = {entry.name for entry in model.graph.initializer}
    return [entry for entry in model.graph.input if entry.name not in constants]


def fixed_size(model: onnx.ModelProto) -> int | None:
    """Return the batch size that a model fixes, or `None` if it is dynamic or unclear."""
    shapes = [[dim.dim_value for dim in entry.type.tensor_type.shape.dim] for entry in data_inputs(model)]
    sizes = {int(shape[0]) if shape and min(shape) > 0 else 0 for shape in shapes}
    return sizes.pop() or None if len(sizes) == 1 else None


def free_batch(model: onnx.ModelProto, original: onnx.ModelProto) -> tuple[onnx.ModelProto, str | None]:
    """Return a model with a dynamic batch size that computes the same as `original`.

    If this is not possible, return `model` itself and the reason, as the end of a sentence.
    """
    size = fixed_size(model)
    if size is None:
        return model, None
    try:
        first = run_all(model, examples(model, 1), size)
        first |= {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}
    except Exception as error:  # noqa: BLE001 - of onnxruntime
        return model, f"it does not run: {native_reason(error)}"
    reason = None
    for every in (False, True):
        freed = onnx.ModelProto()
        freed.CopyFrom(model)
        _Freeing(freed, size, first, every=every).apply()
        found = difference(original, freed)
        if found is None:
            return freed, None
        reason = reason or found.reason
    return model, reason


class _Freeing:
    """Rewrites the constants of a model that contain its fixed batch size.

    `first` contains the tensors of a run at this batch size. `every` also rewrites the target
    shapes in which an axis is not the batch alone, such as (batch * windows, ...).
    """

    def __init__(self, model: onnx.ModelProto, size: int, first: Run, *, every: bool) -> None:
        self._model, self._graph = model, model.graph
        self._size, self._first, self._every = size, first, every
        self._inputs = [entry.name for entry in data_inputs(model)]
        self._nodes: list[onnx.NodeProto] = []
        self._axes = dict.fromkeys(self._inputs, 0)
        """The tensors that depend on the data, and the axis of each that is probably the batch."""
        self._batch: str | None = None
        self._replaced: set[str] = set()

    def apply(self) -> None:
        """Change the model in place."""
        for entry in self._graph.input:
            if entry.name in self._inputs:
                entry.type.tensor_type.shape.dim[0].dim_param = "batch"
        for entry in (*self._graph.value_info, *self._graph.output):
            dims = entry.type.tensor_type.shape.dim
            if dims and dims[0].dim_value == self._size:
                dims[0].Clear()
        for node in self._graph.node:
            if found := [name for name in node.input if name in self._axes]:
                self._free(node)
                for place, name in enumerate(node.output):
                    self._axes[name] = self._axis_after(node, found[0], place)
            self._nodes.append(node)
        refill(self._graph.node, self._nodes)
        # If `train` names such a state, it is now missing, and the build keeps the batch size of the file.
        unread = self._replaced.difference(*[node.input for node in nodes_within(self._graph)])
        refill(self._graph.initializer, [entry for entry in self._graph.initializer if entry.name not in unread])

    def _free(self, node: onnx.NodeProto) -> None:
        found = {
            "Reshape": self._free_reshape,
            "Expand": self._free_expand,
            "Resize": self._free_resize,
            "Slice": self._free_slice,
            "Concat": self._free_concat,
        }.get(node.op_type)
        if found is not None:
            found(node)
        elif node.op_type in _RECURRENT:
            for place in (5, 6):
                self._expand(node, place, 1)

    def _free_reshape(self, node: onnx.NodeProto) -> None:
        shape = list(self._shape(node.output[0]))
        if not self._is_constant(node.input[1]) or not shape or node.input[0] not in self._axes:
            return
        axis = self._axis_after(node, node.input[0], 0)
        if self._every or shape[axis] == self._size:
            shape[axis] = -1
            if 0 in shape:
                return
            self._set(node, 1, np.array(shape, np.int64))
            refill(node.attribute, [entry for entry in node.attribute if entry.name != "allowzero"])

    def _axis_after(self, node: onnx.NodeProto, name: str, place: int) -> int:
        """Return the axis of an output that is probably the batch, because it is so for the input `name`."""
        axis, before, after = self._axes[name], self._shape(name), self._shape(node.output[place])
        if node.op_type in _RECURRENT:
            return 1 if place else 2
        if node.op_type == "Transpose":
            order = next((list(entry.ints) for entry in node.attribute if entry.name == "perm"), [])
            return order.index(axis) if axis in order else len(before) - 1 - axis
        if node.op_type not in _RESHAPING and len(after) >= len(before):
            return axis + len(after) - len(before)
        count = math.prod(before[:axis])
        fitting = [each for each in range(len(after)) if math.prod(after[:each]) == count]
        return next((each for each in fitting if after[each] == self._size), next(iter(fitting), 0))

    def _free_expand(self, node: onnx.NodeProto) -> None:
        if self._is_constant(node.input[1]) and self._shape(node.input[0])[:1] == (self._size,):
            sizes = self._first[node.input[1]]
            if len(sizes) == len(self._shape(node.input[0])):
                self._set(node, 1, np.array([1, *sizes[1:]], np.int64))

    def _free_resize(self, node: onnx.NodeProto) -> None:
        """Replace sizes by the same scales."""
        before, after = self._shape(node.input[0]), self._shape(node.output[0])
        if len(node.input) > 3 and self._is_constant(node.input[3]) and before[:1] == after[:1] == (self._size,):
            self._set(node, 2, np.array(after, np.float32) / np.array(before, np.float32))
            del node.input[3:]

    def _free_slice(self, node: onnx.NodeProto) -> None:
        """Replace an end that is the batch size by the largest number."""
        axes = node.input[3] if len(node.input) > 3 else ""
        if not self._is_constant(node.input[2]) or (axes and not self._is_constant(axes)):
            return
        ends = np.array(self._first[node.input[2]], np.int64)
        places = self._first[axes] if axes else np.arange(len(ends))
        rank = len(self._shape(node.input[0]))
        if self._shape(node.input[0])[:1] == (self._size,) and rank:
            whole = (places % rank == 0) & (ends == self._size)
            if whole.any():
                self._set(node, 2, np.where(whole, END, ends))

    def _free_concat(self, node: onnx.NodeProto) -> None:
        """Expand constants that are joined to a batch, such as the class token of a transformer."""
        axis = next(int(entry.i) for entry in node.attribute if entry.name == "axis")
        if axis % max(1, len(self._shape(node.output[0]))) == 0:
            return
        for place in range(len(node.input)):
            self._expand(node, place, 0)

    def _expand(self, node: onnx.NodeProto, place: int, axis: int) -> None:
        """Expand a constant input, which has the same values for each example, to the batch size."""
        name = node.input[place] if place < len(node.input) else ""
        dims = self._shape(name)
        if not name or name in self._axes or dims[axis : axis + 1] != (self._size,):
            return
        if self._size > 1:
            all_examples = self._first[name]
            one = all_examples.take([0], axis)
            is_weight = all_examples.any() and any(entry.name == name for entry in self._graph.initializer)
            if is_weight or (one != all_examples).any():
                return
            self._replaced.add(name)
            name = f"{node.output[0]}::one_{place}"
            self._nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(one)))
        if self._batch is None:
            self._batch = "batch::size"
            shape = helper.make_node("Shape", [self._inputs[0]], [self._batch], start=0, end=1)
            self._nodes.append(shape)
        sizes, value = f"{node.output[0]}::sizes_{place}", f"{node.output[0]}::input_{place}"
        before, after = [
            self._add(f"{sizes}_{number}", np.array(part, np.int64))
            for number, part in enumerate((dims[:axis], dims[axis + 1 :]))
        ]
        self._nodes += [
            helper.make_node("Concat", [before, self._batch, after], [sizes], axis=0),
            helper.make_node("Expand", [name, sizes], [value]),
        ]
        node.input[place] = value

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._first[name].shape) if name in self._first else ()

    def _is_constant(self, name: str) -> bool:
        return name not in self._axes and name in self._first

    def _set(self, node: onnx.NodeProto, place: int, value: Array) -> None:
        """Replace a constant input of a node."""
        node.input[place] = self._add(f"{node.output[0]}::input_{place}", value)

    def _add(self, name: str, value: Array) -> str:
        self._graph.initializer.append(numpy_helper.from_array(value, name))
        return name


# -- verification ----------------------------------------------------------------------------------------------


class BatchDifference(msgspec.Struct, frozen=True):
    """The reason why two models are not the same, as the end of a sentence."""

    reason: str
    ran: bool = True
    """Whether both models ran, so that their values differ."""


def difference(original: onnx.ModelProto, changed: onnx.ModelProto) -> BatchDifference | None:
    """Compare a batch of random examples with runs of `original` that have one example each.

    Return `None` if they give the same.
    """
    size = fixed_size(original) or 1
    count = EXAMPLES + (size == EXAMPLES)
    feeds = examples(original, count)
    single_model, batch_model = settled(original), settled(changed)
    try:
        batch = run_all(batch_model, feeds)
        fewer = run_all(batch_model, {name: value[:-1] for name, value in feeds.items()})
    except Exception as error:  # noqa: BLE001 - of onnxruntime
        return BatchDifference(f"it does not run with another: {native_reason(error)}", ran=False)
    for name in _computed_from_values(batch_model):
        if name in batch and batch[name].shape == fewer[name].shape:
            return _mixed(name)
    results = [entry.name for entry in changed.graph.output]
    shares = {node.output[0] for node in changed.graph.node if node.op_type in ("Sigmoid", "Softmax")}
    for place in range(count):
        one = {name: value[place : place + 1] for name, value in feeds.items()}
        try:
            single = run_all(single_model, one, size)
        except Exception as error:  # noqa: BLE001 - of onnxruntime
            return BatchDifference(f"it does not run: {native_reason(error)}", ran=False)
        for name in [*results, *[name for name in single if name not in results]]:
            if name not in batch or np.asarray(batch[name]).dtype.kind != "f":
                continue  # shapes, indices and comparisons
            # If a sigmoid is almost 0 everywhere, rounding its scores changes it by a large factor.
            least = 1.0 if name in shares else 0.0
            parts = _parts(single[name], batch[name], place, (size, count), exact=name in results)
            if not any(is_close(one, other, least) for one, other in parts):
                return _mixed(name)
    return None


def _computed_from_values(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the tensors that depend on values of the data, not only on its shape.

    If such a tensor lacks the batch axis, it combines all examples, even if its values are the same
    for all random examples, such as whether any value exceeds a threshold.
    """
    live = {entry.name for entry in data_inputs(model)}
    for node in read_nodes(model.graph.node):
        if node.op not in SHAPE_OPERATORS and not live.isdisjoint(free_inputs(node)):
            made = [name for name in node.outputs if name]
            live.update(made)
            yield from made


def _mixed(name: str) -> BatchDifference:
    return BatchDifference(
        f"the values of {name!r} for an example depend on the other examples of its batch, as if the model "
        "computed a mean over the batch"
    )


def _parts(
    single: Array, batch: Array, place: int, sizes: tuple[int, int], *, exact: bool
) -> list[tuple[Array, Array]]:
    """Return an example's values in `single`, and where example `place` of a batch may have them.

    `sizes` are the batch sizes of both, where `single` contains copies of one example. The batch
    may be any axis, and may be merged with the axis before or after it. If shapes do not tell where
    an example's values are, they are not compared, unless `exact` is set.
    """
    if single.shape == batch.shape and not exact:
        return [(single, batch)]
    found = []
    for axis in range(single.ndim if single.ndim == batch.ndim else 0):
        rest = [each for each in range(single.ndim) if each != axis]
        count, left = divmod(single.shape[axis], sizes[0])
        alike = all(single.shape[each] == batch.shape[each] for each in rest)
        if alike and not left and batch.shape[axis] == count * sizes[1]:
            one, many = np.moveaxis(single, axis, 0), np.moveaxis(batch, axis, 0)
            found.append((one[:count], many[place * count : (place + 1) * count]))
            found.append((one[:: sizes[0]], many[place :: sizes[1]]))
    return found if found or exact else [(single, single)]


def settled(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model in inference mode."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    settle(copied.graph)
    return copied


def is_close(one: Array, other: Array, least: float = 0.0) -> bool:
    """Return whether two tensors differ by no more than rounding.

    A difference is compared with the largest value, which is assumed to be at least `least`.
    """
    if one.shape != other.shape:
        return False
    one, other = one.astype(np.float64), other.astype(np.float64)
    largest = float(np.abs(one[np.isfinite(one)]).max(initial=least))
    return bool(np.allclose(one, other, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True))


def examples(model: onnx.ModelProto, count: int) -> dict[str, Array]:
    """Return random examples for a model: normal floats, and the whole numbers 0 and 1."""
    generator = np.random.Generator(np.random.PCG64(count))
    found: dict[str, Array] = {}
    for entry in data_inputs(model):
        kind = entry.type.tensor_type
        sizes = [count, *[dim.dim_value for dim in kind.shape.dim[1:]]]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        values = generator.standard_normal(sizes) if dtype.kind == "f" else generator.integers(0, 2, sizes)
        found[entry.name] = values.astype(dtype)
    return found


def run_all(model: onnx.ModelProto, feeds: Mapping[str, Array], copies: int = 1) -> dict[str, Array]:
    """Run a model on `copies` copies of a batch, and return all tensors that nodes compute.

    Sequences and dictionaries, such as those of ZipMap, are omitted.
    """
    fed = {name: np.concatenate([value] * copies) for name, value in feeds.items()}
    results = run_every_tensor(model, fed)
    return {name: value for name, value in results.items() if isinstance(value, np.ndarray)} | fed
