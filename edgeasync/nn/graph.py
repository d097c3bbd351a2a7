"""An ONNX graph under construction, and the tensors that layers exchange.

Every initializer is a parameter or a running statistic of a layer. Constants such as shapes, ratios
and scales are Constant nodes. A layer's last node and its output have the layer's path as their
name, such as `3.body.0`. The layer's other nodes append a word to the path, such as
`3.body.0/rows`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

OPSET = 20
IR_VERSION = 9
INPUT = "x"
OUTPUT = "scores"

ElementType = Literal["float32", "int64"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph: its name, its shape without the batch, and its type."""

    name: str
    dims: tuple[int, ...]
    type: ElementType = "float32"

    def __str__(self) -> str:
        shape = f"[{', '.join(['batch', *map(str, self.dims)])}]"
        return shape if self.type == "float32" else f"{shape} of {self.type}"


class LayerGraph:
    """A graph under construction: its nodes in execution order and its initial parameters.

    Layers add nodes and parameters, then `model` returns the ONNX model. All random parameters come
    from one generator, by operations that round identically on every processor. So the same layers
    and seed produce the same bytes on every machine.
    """

    def __init__(self, seed: int) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._parameters: list[onnx.TensorProto] = []
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def uniform(self, name: str, shape: tuple[int, ...], bound: float) -> str:
        """Add a float32 parameter drawn uniformly from [-bound, bound); return its name."""
        values = self._generator.random(shape, np.float32)
        values *= 2.0
        values -= 1.0
        values *= np.float32(bound)
        return self._parameter(name, values)

    def filled(self, name: str, shape: tuple[int, ...], value: float) -> str:
        """Add a float32 parameter that is initially `value` everywhere; return its name."""
        return self._parameter(name, np.full(shape, value, np.float32))

    def constant(self, name: str, values: npt.NDArray[Any] | np.generic) -> str:
        """Add a tensor that never changes; return its name."""
        tensor = numpy_helper.from_array(np.asarray(values), name)
        return self.node("Constant", name, [], value=tensor)

    def node(self, operator: str, name: str, inputs: Sequence[str], *, output: int = 0, **attributes: Any) -> str:
        """Add a node with one used output, and return the name of both.

        `output` is the index of the used output. An omitted optional input is `""`.
        """
        outputs = [""] * output + [name]
        self._nodes.append(helper.make_node(operator, inputs, outputs, name=name, **attributes))
        return name

    def split(self, name: str, value: str, parts: Sequence[str], axis: int) -> list[str]:
        """Add a Split into equal parts along an axis; return their names, `name/part`."""
        outputs = [f"{name}/{part}" for part in parts]
        self._nodes.append(
            helper.make_node("Split", [value], outputs, name=name, axis=axis, num_outputs=len(outputs))
        )
        return outputs

    def reshape(self, name: str, value: str, shape: Sequence[int]) -> str:
        """Add a Reshape; return its output's name.

        In `shape`, 0 keeps the size of that axis, and -1 is computed from the other sizes.
        """
        return self.node("Reshape", name, [value, self.constant(f"{name}/shape", np.array(shape, np.int64))])

    def model(self, x: Value, result: Value) -> onnx.ModelProto:
        """Return the model from input `x` to `result`, whose name becomes `scores`."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [OUTPUT if name == result.name else name for name in names]
        graph = helper.make_graph(
            self._nodes,
            "model",
            [_value_info(x.name, x)],
            [_value_info(OUTPUT, result)],
            self._parameters,
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name="edgeasync")

    def _parameter(self, name: str, values: npt.NDArray[np.float32]) -> str:
        self._parameters.append(numpy_helper.from_array(values, name))
        return name


def _value_info(name: str, value: Value) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(value.type))
    return helper.make_tensor_value_info(name, element, ["batch", *value.dims])
