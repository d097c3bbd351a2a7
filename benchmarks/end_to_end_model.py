"""The model and the trainer of the end-to-end benchmark, by the names that hubs and agents import.

A local step adds noise to every parameter, as a step of SGD with noisy gradients would. It takes much less time
than an exchange, so that the exchange is what is measured.
"""

from collections.abc import Callable

import numpy as np

from edgeasync import Parameter, ParameterSpec, StepResult, Vector
from edgeasync.protocol.messages import Welcome

NOISE = 1e-3


def _model(length: int) -> Callable[[], tuple[ParameterSpec, dict[str, Vector]]]:
    """Return a factory of a model with one array of this length."""
    spec = ParameterSpec((Parameter("weights", (length,)),))
    return lambda: (spec, {"weights": np.random.default_rng(0).standard_normal(length).astype(np.float32)})


model_1000, model_250000, model_2500000 = map(_model, (1_000, 250_000, 2_500_000))


class NoiseTrainer:
    """Adds noise to the parameters, alternately with both signs, so that their values stay bounded."""

    def __init__(self, spec: ParameterSpec) -> None:
        self.spec = spec
        self._noise = (NOISE * np.random.default_rng().standard_normal(spec.length)).astype(np.float32)

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._parameters = parameters

    def step(self) -> StepResult:
        """Add the noise."""
        self._parameters += self._noise
        np.negative(self._noise, out=self._noise)
        return StepResult(loss=1.0, examples=1)


def trainer(welcome: Welcome, data: object) -> NoiseTrainer:  # noqa: ARG001
    """Return the trainer of an agent: `--trainer benchmarks.end_to_end_model:trainer`."""
    return NoiseTrainer(welcome.spec)
