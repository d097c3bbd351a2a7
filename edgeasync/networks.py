"""Computes scores, losses and gradients of a model, for custom training loops without torch.

>>> import numpy as np
>>> from edgeasync import networks, nn
>>> network = networks.Network(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), (3,))
>>> x, y = np.eye(3, dtype=np.float32), np.array([0, 1, 0])
>>> first = network.gradient(x, y).loss
>>> for _ in range(20):
...     network.vector -= 0.5 * network.gradient(x, y).vector
>>> network.gradient(x, y).loss < first
True
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeasync import nn
from edgeasync.config import FilePath
from edgeasync.data.dataset import Dataset, fits
from edgeasync.errors import ConfigError, DataError, ModelMismatchError
from edgeasync.graphs.evaluation import evaluation_graph, numpy_loss
from edgeasync.graphs.graph_model import HubGraph, build_graph, load_graph
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.losses import CrossEntropy, LossSetting, MeanSquaredError, OnnxLoss, check_loss, find_loss, kind_of
from edgeasync.parameters import Vector
from edgeasync.training.onnx_session import Provider, open_session
from edgeasync.training.onnx_trainer import GraphGradient

__all__ = ["BatchGradient", "Network", "mean_loss"]

Examples = npt.ArrayLike | Mapping[str, npt.ArrayLike]


class BatchGradient(NamedTuple):
    """The gradient of a batch's mean loss.

    `weight` is the weight of the batch relative to other batches: the number of its values that
    contribute to the loss. To sum the gradients of several batches, multiply each by its `weight`.
    `vector` is valid until the next call of `gradient` with the same loss.

    >>> import numpy as np
    >>> from edgeasync import networks, nn
    >>> networks.Network(nn.Linear(3, 2), (3,)).gradient(np.eye(3), [0, 1, 0]).weight
    3.0
    """

    loss: float
    weight: float
    vector: Vector


class Network:
    """A model and its values. `network(x)` returns scores, `network.gradient(x, y)` a gradient.

    - `model`: layers of `edgeasync.nn`, an `onnx.ModelProto`, or the path of an ONNX file.
    - `input_shape`: the shape of one example; required for layers.
    - `seed`: the seed of the initial values of layers.
    - `threads`: the number of cores to use.
    - `provider`: onnxruntime's execution provider, as in the settings of an agent.

    `train` and `Hub` accept a network in place of an `onnx.ModelProto`, and start with its current
    values.

    Raises `ConfigError` for invalid arguments, and `GraphError` if the model cannot be trained.

    >>> import numpy as np
    >>> from edgeasync import networks, nn
    >>> network = networks.Network(nn.Linear(3, 2), (3,))
    >>> network(np.eye(3)).shape, sorted(network.arrays)
    ((3, 2), ['0.bias', '0.weight'])
    """

    def __init__(
        self,
        model: object,
        input_shape: Sequence[int] | None = None,
        *,
        seed: int = 0,
        threads: int = 1,
        provider: Provider = "auto",
    ) -> None:
        self._computing: dict[str, Any] = {"threads": threads, "provider": provider}
        from edgeasync.autodiff.contract import read_output  # noqa: PLC0415 - needs onnx

        self._forward, built = _build(model, input_shape, seed)
        self._output = read_output(built.graph)
        self.frozen = built.frozen
        """The checksum of the values that are not trained, or `None`."""
        self.spec = built.spec
        """Names, shapes and roles of the network's arrays."""
        self.vector: Vector = np.array(built.initial)
        """All values: trained ones, then statistics such as a batch norm's running mean."""
        self.arrays = self.spec.views(self.vector)
        """The same values by name. Writing to these arrays changes the network."""
        self._gradients: dict[object, tuple[GraphGradient, Vector]] = {}
        self._session = open_session(evaluation_graph(self._forward, self.spec, None), **self._computing)
        self._fed = {entry.name: entry for entry in self._session.get_inputs()}

    def __call__(self, x: Examples) -> npt.NDArray[np.float32]:
        """Return the scores of examples in evaluation mode.

        Batch norms use running statistics, and dropout is inactive.

        Raises `DataError` for examples that do not match the network.
        """
        inputs = [name for name in self._fed if name not in self.arrays]
        given = x if isinstance(x, Mapping) else {inputs[0]: x}
        if sorted(given) != sorted(inputs):
            raise DataError(
                f"the data has the inputs {', '.join(given)}, but the network has {', '.join(inputs)}; use the "
                "same names"
            )
        feeds = {name: _form(given[name], self._fed[name]) for name in inputs}
        feeds |= {name: array for name, array in self.arrays.items() if name in self._fed}
        found: npt.NDArray[np.float32] = self._session.run(None, feeds)[0]
        return found

    def gradient(self, x: Examples, y: npt.ArrayLike, loss: LossSetting = "cross_entropy") -> BatchGradient:
        """Return the mean loss of a batch and its gradient.

        `loss` is a name or an object of `edgeasync.losses`. As in training, batch norms use the
        batch's statistics and update their running statistics. Raises `DataError` for a batch that
        does not match the network.
        """
        from edgeasync.autodiff.contract import read_output  # noqa: PLC0415 - needs onnx

        loss = find_loss(check_loss(loss, "gradient"))
        batch = Dataset.of(x, y, where="the batch")
        if loss not in self._gradients:
            graph = build_graph(self._forward, OnnxModel(file=FilePath(), loss=loss), "the model").graph
            if (scores := read_output(graph)) != self._output:
                raise ConfigError(
                    f"the network returns {self._output!r}, but {kind_of(loss)} needs the scores before it, "
                    f"{scores!r}; make {scores!r} the output of the model"
                )
            made = GraphGradient(graph, self.spec, **self._computing)
            self._gradients[loss] = made, np.empty(self.spec.length, np.float32)
        gradient, out = self._gradients[loss]
        gradient.check_data(batch)
        found = gradient(self.vector, batch.features, batch.y, out)
        out[self.spec.trained_length :] = 0.0
        return BatchGradient(0.0 if found is None else found, gradient.weight, out)

    def share(self, other: "Network") -> None:
        """Use the memory of another network's values, so that both networks always have the same values.

        Raises `ModelMismatchError` if the other network has different arrays.

        >>> from edgeasync import networks, nn
        >>> small, large = (
        ...     networks.Network(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GlobalAvgPool()), (1, side, side))
        ...     for side in (8, 16)
        ... )
        >>> large.share(small)
        >>> small.arrays["0.bias"] is large.arrays["0.bias"]
        True
        """
        if self.spec != other.spec:
            raise ModelMismatchError("the other network has different arrays; pass a network with the same layers")
        self.vector, self.arrays = other.vector, other.arrays

    def SerializeToString(self) -> bytes:  # noqa: N802 - as protobuf names it
        """Return the ONNX model for inference with the current values, as bytes."""
        from edgeasync.autodiff.export import export_model  # noqa: PLC0415 - needs onnx

        return export_model(self._forward, self.arrays)


def mean_loss(loss: LossSetting, scores: npt.ArrayLike, targets: npt.ArrayLike) -> float:
    """Return the mean loss of scores against targets, as in training.

    Raises `ConfigError` for an `OnnxLoss`.

    >>> from edgeasync import networks
    >>> networks.mean_loss("mse", [[1.0], [2.0]], [[1.0], [4.0]])
    2.0
    """
    found = find_loss(check_loss(loss, "mean_loss"))
    if isinstance(found, OnnxLoss):
        raise ConfigError("a loss that is an ONNX graph needs its model; use Network.gradient")
    values = np.asarray(scores, np.float32)
    kind = np.int64 if isinstance(found, CrossEntropy) else np.float32
    wanted = np.asarray(targets, kind)
    if kind is np.float32:
        if not fits(wanted.shape, values.shape):
            raise DataError(
                f"the targets have shape {wanted.shape}, but the scores have shape {values.shape}; pass one "
                "target per score"
            )
        wanted = wanted.reshape(values.shape)
    summed = numpy_loss(found)(values, wanted)
    return summed.total / summed.weight if summed.weight else 0.0


def _build(model: object, input_shape: Sequence[int] | None, seed: int) -> tuple[bytes, HubGraph]:
    """Return the forward model, and its training graph."""
    settings = OnnxModel(file=FilePath(), loss=MeanSquaredError())  # a loss that matches every output
    if isinstance(model, str | Path):
        graph = load_graph(OnnxModel(file=FilePath.parse(model), loss=MeanSquaredError()))
        if graph.forward is None:
            raise ConfigError(f"{model}: a training graph; pass the forward model that it was built from")
        return graph.forward, graph
    if isinstance(model, nn.Layer):
        if input_shape is None:
            raise ConfigError("layers of edgeasync.nn need the shape of an example, such as input_shape=(64,)")
        model = nn.to_onnx(model, input_shape, seed=seed)
    serialize = getattr(model, "SerializeToString", None)
    if not callable(serialize):
        raise ConfigError(
            f"model is {type(model).__name__}; pass layers of edgeasync.nn, an onnx.ModelProto, or the path of an "
            "ONNX file"
        )
    forward: bytes = serialize()
    return forward, build_graph(forward, settings, "the model")


def _form(values: npt.ArrayLike, entry: Any) -> npt.NDArray[Any]:
    """Convert examples to the form of a session's input."""
    kind = np.int64 if entry.type == "tensor(int64)" else np.float32
    found: npt.NDArray[Any] = np.ascontiguousarray(values, kind)
    have, want = found.shape[1:], tuple(entry.shape[1:])
    if not fits(have, want):
        raise DataError(f"the examples have shape {have}, but the network expects {want}; use data of that shape")
    return found.reshape(len(found), *want)
