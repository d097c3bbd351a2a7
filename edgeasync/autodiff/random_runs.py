"""Runs a forward model on random inputs, with slightly changed or with random parameters."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import FLOAT, Array, free_inputs, model_of, tensor, value_info
from edgeasync.autodiff.probing import open_session
from edgeasync.scores import SCALES, drawn

DRAWS = (1.0, 4.0)
"""Standard deviations of the random inputs."""

ROWS = 5
"""Number of examples per run if the batch size is dynamic."""

MOVED = 0.3
"""Relative change of the parameters. Without it, all scores of an untrained model may be 0."""

Runs = list[dict[str, Array]]
"""For each run, the computed tensors by name."""


class RandomRuns:
    """Results of running a model on random inputs. The runs are executed on first use.

    The results contain only tensors that have the same size as one of the tensors in `like`.

    They are empty if the model does not run on random inputs.
    """

    def __init__(self, prepared: ForwardGraph, like: Collection[str]) -> None:
        self._prepared = prepared
        sizes = {self._sizes(name) for name in like}
        self._wanted = [
            name
            for node in prepared.nodes
            for name in node.outputs
            if name and prepared.dtypes[name] == FLOAT and self._sizes(name) in sizes
        ]

    def _sizes(self, name: str) -> tuple[str, ...]:
        return tuple(sorted(str(size) for size in self._prepared.shapes[name] if size != 1))

    @cached_property
    def near(self) -> Runs:
        """Results of a few runs with slightly changed parameters."""
        return self._run(self._near_feeds())

    @cached_property
    def wide(self) -> Runs:
        """Results of runs with random parameters of increasing size."""
        return self._run(self._wide_feeds())

    def _run(self, feeds: Iterable[Mapping[str, Array]]) -> Runs:
        try:
            run = self._session.run
            return [dict(zip(self._wanted, run(self._wanted, each), strict=True)) for each in feeds]
        except Exception:  # noqa: BLE001 - onnxruntime raises errors of its own
            return []

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        """An onnxruntime session for the model, with the parameters as inputs."""
        prepared, shapes = self._prepared, self._prepared.shapes
        used = {name for node in prepared.nodes for name in free_inputs(node)}
        inputs = [value_info(name, prepared.dtypes[name], shapes[name]) for name in prepared.inputs]
        inputs += [value_info(name, value.dtype, value.shape) for name, value in prepared.parameters.items()]
        outputs = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * len(shapes[name]))
            for name in self._wanted
        ]
        constants = [tensor(name, value) for name, value in prepared.constants.items() if name in used]
        model = model_of(prepared.nodes, inputs, outputs, constants, opset=prepared.opset)
        return open_session(model.SerializeToString())

    @cached_property
    def _statistics(self) -> set[str]:
        """Running statistics, which stay as they are, because variances must not become negative."""
        nodes = self._prepared.nodes
        return {name for node in nodes if node.op == "BatchNormalization" for name in node.inputs[3:]}

    def _near_feeds(self) -> Iterator[dict[str, Array]]:
        # In training mode, a BatchNormalization of onnxruntime overwrites statistics, so it gets copies.
        for number, scale in enumerate(DRAWS):
            generator = np.random.Generator(np.random.PCG64(number))
            yield self._inputs(generator, scale) | {
                name: value.copy() if name in self._statistics else value + drawn(value, MOVED, generator)
                for name, value in self._prepared.parameters.items()
            }

    def _wide_feeds(self) -> Iterator[dict[str, Array]]:
        """Yield random inputs and random parameters. Running variances are not changed."""
        for number, scale in enumerate(SCALES):
            generator = np.random.Generator(np.random.PCG64(number))
            yield self._inputs(generator, DRAWS[number % len(DRAWS)]) | {
                name: value.copy() if name in self._statistics else drawn(value, scale, generator)
                for name, value in self._prepared.parameters.items()
            }

    def _inputs(self, generator: np.random.Generator, scale: float) -> dict[str, Array]:
        feeds: dict[str, Array] = {}
        for name in self._prepared.inputs:
            size = [ROWS if dim is None else dim for dim in self._prepared.shapes[name]]
            kind = self._prepared.dtypes[name]
            values = generator.standard_normal(size) * scale if kind == FLOAT else generator.integers(0, 2, size)
            feeds[name] = values.astype(kind)
        return feeds
