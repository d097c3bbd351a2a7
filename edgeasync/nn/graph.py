"""An ONNX graph under construction, and the values that layers pass to each other.

Initializers are the layers' parameters and running statistics. Fixed values (shapes, ratios,
scales) are Constant nodes. A layer's result and its last node are named by the layer's path
(`3.body.0`); the names of its other nodes have a suffix (`3.body.0/rows`).
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
    """A tensor (batch, *dims) in the graph, referred to by name."""

    name: str
    dims: tuple[int, ...]
    type: ElementType = "float32"

    def __str__(self) -> str:
        shape = f"[{', '.join(['batch', *map(str, self.dims)])}]"
        return shape if self.type == "float32" else f"{shape} of {self.type}"


class LayerGraph:
    """A graph's nodes and initial parameters. Layers add to it, and `model` converts it to ONNX.

    Parameters are drawn uniformly from one generator, with operations whose rounding is the same on
    every processor. So the same layers and seed give the same bytes on every machine.
    """

    def __init__(self, seed: int) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._parameters: list[onnx.TensorProto] = []
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def uniform(self, name: str, shape: tuple[int, ...], bound: float) -> str:
        """Add a float32 parameter with values drawn from [-bound, bound), and return its name."""
        values = self._generator.random(shape, np.float32)
        values *= 2.0
        values -= 1.0
        values *= np.float32(bound)
        return self._parameter(name, values)

    def filled(self, name: str, shape: tuple[int, ...], value: float) -> str:
        """Add a float32 parameter filled with one value, and return its name."""
        return self._parameter(name, np.full(shape, value, np.float32))

    def constant(self, name: str, values: npt.NDArray[Any] | np.generic) -> str:
        """Add a constant tensor, and return its name."""
        tensor = numpy_helper.from_array(np.asarray(values), name)
        return self.node("Constant", name, [], value=tensor)

    def node(self, operator: str, name: str, inputs: Sequence[str], *, output: int = 0, **attributes: Any) -> str:
        """Add a node that uses one of the operator's outputs, by default the first. Return its name.

        The output has the same name as the node. Pass "" for an omitted input.
        """
        outputs = [""] * output + [name]
        self._nodes.append(helper.make_node(operator, inputs, outputs, name=name, **attributes))
        return name

    def split(self, name: str, value: str, parts: Sequence[str], axis: int) -> list[str]:
        """Add a node that splits a tensor into equal parts, and return their names, `name/part`."""
        outputs = [f"{name}/{part}" for part in parts]
        self._nodes.append(
            helper.make_node("Split", [value], outputs, name=name, axis=axis, num_outputs=len(outputs))
        )
        return outputs

    def reshape(self, name: str, value: str, shape: Sequence[int]) -> str:
        """Add a Reshape and return the result's name. In `shape`, 0 keeps a size and -1 is inferred."""
        return self.node("Reshape", name, [value, self.constant(f"{name}/shape", np.array(shape, np.int64))])

    def model(self, x: Value, result: Value) -> onnx.ModelProto:
        """Return the model with input `x` and the output `result`, which is renamed to `scores`."""
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
