"""Runs a forward model on random inputs, with slightly changed or with random parameters."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

import numpy as np

from edgeasync.autodiff.forward import ForwardGraph
from edgeasync.autodiff.graph import FLOAT, Array
from edgeasync.autodiff.probing import PartedModel
from edgeasync.scores import SCALES, drawn

DRAWS = (1.0, 4.0)
"""Standard deviations of the random inputs."""

ROWS_MIN, ROWS_MAX = 2, 5
"""Minimum and maximum number of examples per run if the batch size is dynamic."""

BYTES_MAX = 64 << 20
"""Maximum size of a result that is kept, unless `ROWS_MIN` examples are larger."""

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
        wanted, model = set(self._wanted), self._model
        try:
            return [{name: value for name, value in model.run(each) if name in wanted} for each in feeds]
        except Exception:  # noqa: BLE001 - onnxruntime raises errors of its own
            return []

    @cached_property
    def _model(self) -> PartedModel:
        prepared = self._prepared
        return PartedModel(prepared.nodes, prepared.constants, opset=prepared.opset)

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

    @cached_property
    def _rows(self) -> int:
        """The number of examples per run if the batch size is dynamic."""
        shapes = [self._prepared.shapes[name] for name in self._wanted]
        largest = max([math.prod(size or 1 for size in shape) for shape in shapes], default=1)
        return max(ROWS_MIN, min(ROWS_MAX, BYTES_MAX // (FLOAT.itemsize * max(largest, 1))))

    def _inputs(self, generator: np.random.Generator, scale: float) -> dict[str, Array]:
        feeds: dict[str, Array] = {}
        for name in self._prepared.inputs:
            size = [self._rows if dim is None else dim for dim in self._prepared.shapes[name]]
            kind = self._prepared.dtypes[name]
            values = generator.standard_normal(size) * scale if kind == FLOAT else generator.integers(0, 2, size)
            feeds[name] = values.astype(kind)
        return feeds
