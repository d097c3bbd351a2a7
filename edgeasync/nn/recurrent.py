"""Recurrent layers over float32 (batch, time, features). Their initial states are zero.

ONNX expects time before the batch, so each layer transposes its input and its output.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from edgeasync.nn.graph import LayerGraph, Value
from edgeasync.nn.layer import Layer


@dataclass(frozen=True, slots=True)
class _Recurrent(Layer):
    """Base of LSTM and GRU."""

    input_size: int
    hidden_size: int
    num_layers: int = 1
    _: KW_ONLY
    bidirectional: bool = False
    return_sequences: bool = False

    operator: ClassVar[str]
    gates: ClassVar[int]
    attributes: ClassVar[dict[str, int]]

    def build(self, graph: LayerGraph, path: str, x: Value) -> Value:
        """Add the recurrent nodes between two transpositions of time and batch."""
        if len(x.dims) != 2 or x.dims[1] != self.input_size:
            raise self.mismatch(path, x, f"[batch, time, {self.input_size}]")
        directions = 2 if self.bidirectional else 1
        time, features = x.dims[0], directions * int(self.hidden_size)
        sequence, width = graph.node("Transpose", f"{path}/time_first", [x.name], perm=(1, 0, 2)), x.dims[1]
        for layer in range(self.num_layers):
            here = path if self.num_layers == 1 else f"{path}.{layer}"
            last = layer == self.num_layers - 1
            parameters = self._parameters(graph, here, width, directions)
            states = graph.node(
                self.operator,
                f"{here}/states",
                [sequence, *parameters],
                # The first output has the states of all times, the second only the last state.
                output=int(last and not self.return_sequences),
                hidden_size=int(self.hidden_size),
                direction="bidirectional" if self.bidirectional else "forward",
                **self.attributes,
            )
            if not last:
                side_by_side = graph.node("Transpose", f"{here}/directions_last", [states], perm=(0, 2, 1, 3))
                sequence, width = graph.reshape(f"{here}/sequence", side_by_side, (time, -1, features)), features
        if self.return_sequences:
            batch_first = graph.node("Transpose", f"{path}/batch_first", [states], perm=(2, 0, 1, 3))
            return Value(graph.reshape(path, batch_first, (0, time, features)), (time, features))
        batch_first = graph.node("Transpose", f"{path}/batch_first", [states], perm=(1, 0, 2))
        return Value(graph.reshape(path, batch_first, (0, features)), (features,))

    def _parameters(self, graph: LayerGraph, path: str, width: int, directions: int) -> list[str]:
        rows, bound = self.gates * int(self.hidden_size), 1.0 / math.sqrt(self.hidden_size)
        return [
            graph.uniform(f"{path}.weight_ih", (directions, rows, width), bound),
            graph.uniform(f"{path}.weight_hh", (directions, rows, int(self.hidden_size)), bound),
            graph.uniform(f"{path}.bias", (directions, 2 * rows), bound),
        ]


@dataclass(frozen=True, slots=True)
class LSTM(_Recurrent):
    """Long short-term memory over float32 (batch, time, input_size).

    Hochreiter & Schmidhuber 1997. With `return_sequences` the output is the state at every time,
    (batch, time, directions * hidden_size). Otherwise it is the final state,
    (batch, directions * hidden_size). The backward direction ends at the first time. The forward
    states precede the backward states.

    Parameters: `weight_ih` (directions, 4 hidden_size, features), `weight_hh` (directions,
    4 hidden_size, hidden_size) and `bias` (directions, 8 hidden_size). All are drawn uniformly from
    -1 / sqrt(hidden_size) to 1 / sqrt(hidden_size), as in torch. `bias` contains the input's
    biases, then the state's. The gates are in ONNX's order: input, output, forget, cell. With
    several layers, the layer's number precedes the name: `0.weight_ih`.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.LSTM(3, 16), nn.Linear(16, 2)), (20, 3))
    """

    operator: ClassVar[str] = "LSTM"
    gates: ClassVar[int] = 4
    attributes: ClassVar[dict[str, int]] = {}


@dataclass(frozen=True, slots=True)
class GRU(_Recurrent):
    """Gated recurrent units over float32 (batch, time, input_size).

    Cho et al. 2014, arXiv:1406.1078. The reset gate is applied after the state's matrix product, as
    in torch. Outputs and parameters are those of LSTM, but the parameters have 3 instead of 4 and 6
    instead of 8 times hidden_size. The gates are in ONNX's order: update, reset, hidden.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.GRU(3, 16), nn.Linear(16, 2)), (20, 3))
    """

    operator: ClassVar[str] = "GRU"
    gates: ClassVar[int] = 3
    attributes: ClassVar[dict[str, int]] = {"linear_before_reset": 1}
