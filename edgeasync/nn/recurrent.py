"""Recurrent layers over (batch, time, features), float32. The initial states are zero.

In ONNX, the time axis precedes the batch axis, so the layers start and end with a Transpose.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from edgeasync.nn.graph import LayerGraph, Value
from edgeasync.nn.layer import Layer


@dataclass(frozen=True, slots=True)
class _Recurrent(Layer):
    """Common parts of LSTM and GRU."""

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
        """Add the recurrent nodes, and the transposes before and after them."""
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
                # The first output contains the states of all time steps, the second only the last
                # states.
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
    """Long short-term memory over (batch, time, input_size) (Hochreiter & Schmidhuber 1997).

    With `return_sequences`, the result is the state at every time step, (batch, time, directions *
    hidden_size). Otherwise, it is the last state, (batch, directions * hidden_size). The last state
    of the backward direction belongs to the first time step. The forward direction comes before the
    backward one.

    Parameters, uniform between -1 / sqrt(hidden_size) and 1 / sqrt(hidden_size) as in torch:
    `weight_ih` (directions, 4 hidden_size, features), `weight_hh` (directions, 4 hidden_size,
    hidden_size) and `bias` (directions, 8 hidden_size). `bias` contains the input's bias, then the
    state's bias. The gates are in ONNX's order: input, output, forget, cell. With `num_layers`
    above 1, names start with the layer's number: `0.weight_ih`.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.LSTM(3, 16), nn.Linear(16, 2)), (20, 3))
    """

    operator: ClassVar[str] = "LSTM"
    gates: ClassVar[int] = 4
    attributes: ClassVar[dict[str, int]] = {}


@dataclass(frozen=True, slots=True)
class GRU(_Recurrent):
    """Gated recurrent units over (batch, time, input_size) (Cho et al. 2014, arXiv:1406.1078).

    The reset gate is applied after the product with the state, as in torch. Results and parameters
    are as for LSTM, except that their sizes contain the factors 3 and 6 instead of 4 and 8. The
    gates are in ONNX's order: update, reset, hidden.

    >>> from edgeasync import nn
    >>> model = nn.to_onnx(nn.Sequential(nn.GRU(3, 16), nn.Linear(16, 2)), (20, 3))
    """

    operator: ClassVar[str] = "GRU"
    gates: ClassVar[int] = 3
    attributes: ClassVar[dict[str, int]] = {"linear_before_reset": 1}
