"""Models that a session can exchange: numpy arrays, torch modules and custom participants."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.parameters import Arrays, Parameter, ParameterSpec
from edgeasync.protocol.messages import Frozen


class Participant(ABC):
    """A model that a session exchanges. Write a subclass to connect your own kind of model.

    All methods are called in the thread of the user's loop: during `join`, `step` and `evaluate`,
    and at the end of a session. The session reads the model at the end of each assignment.
    `parameters`, `read` and `write` are required; the other members have defaults. If the hub
    allows overlap, the loop of an `AddingParticipant` does not wait for exchanges.
    """

    parameters: Sequence[Parameter]
    """The model's arrays: names, shapes and roles."""
    frozen: Frozen | None = None
    """The checksum of the model's arrays that are not exchanged."""

    @abstractmethod
    def read(self, arrays: Arrays) -> None:
        """Copy the model's values into `arrays`."""

    @abstractmethod
    def write(self, arrays: Arrays) -> None:
        """Copy the values of `arrays` into the model."""

    def begin_read(self, arrays: Arrays) -> Callable[[], None]:
        """Record the model's current values.

        Return a function that copies the recorded values into `arrays`; the session calls this
        function from another thread.
        """
        self.read(arrays)
        return lambda: None

    @property
    def rounds(self) -> bool:
        """Whether the model may round written values; if so, the session reads them back."""
        return True

    def pending(self) -> str | None:
        """Return the name of an array that a backward pass still needs, or `None`.

        While a backward pass needs an array, the session does not count steps or write to the model.
        """
        return None

    @property
    def has_unsent(self) -> bool:
        """Whether the model contains steps that the session must still push when it ends."""
        return False

    def note_step(self) -> None:  # noqa: B027 - optional
        """Check the model after a step that counts; raise an error if the model is unsuitable."""

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        """Call `on_step` after each optimizer step, if steps can be detected.

        Return a function that ends these calls.
        """
        return lambda: None

    def reset_optimizer(self) -> None:  # noqa: B027 - optional
        """Reset the optimizer's state, because it belongs to the previous model."""

    def state(self) -> TrainerState:
        """Return the optimizer's state and the random state as arrays."""
        return {}

    def restore(self, state: TrainerState) -> None:  # noqa: B027 - optional
        """Restore arrays returned by `state`; raise `ValueError` if they do not fit the model."""


class AddingParticipant(Participant):
    """A model to which the session can add other devices' changes while the loop continues."""

    @abstractmethod
    def stage(self, arrays: Arrays) -> None:
        """Prepare to `add` these arrays; called in a thread other than the loop's thread."""

    @abstractmethod
    def add(self, arrays: Arrays) -> None:
        """Add trained arrays to the model's values, and replace the model's statistics.

        `arrays` are the arrays of the last call of `stage`.
        """


def frozen_of(model: object) -> Frozen | None:
    """Return the checksum of those arrays of a model or trainer that are not exchanged.

    Return `None` if all arrays are exchanged.
    """
    found = getattr(model, "frozen", None)
    return found if isinstance(found, Frozen) else None


class ArrayParticipant(Participant):
    """A dict of numpy arrays that the user's loop changes in place; by default, all are trained."""

    def __init__(
        self, arrays: Mapping[str, Any], spec: ParameterSpec | None = None, frozen: Frozen | None = None
    ) -> None:
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.flags.writeable:
                raise ConfigError(f"model[{name!r}] is not a writable array of floats; pass numpy arrays")
        self._arrays = arrays
        trained = [Parameter(name, array.shape) for name, array in arrays.items()]
        self.parameters = trained if spec is None else spec.parameters
        self.frozen = frozen
        self._joined = {parameter.name: parameter.shape for parameter in self.parameters}

    @property
    def rounds(self) -> bool:
        """Whether any array is less precise than float32."""
        return any(array.dtype.itemsize < np.dtype(np.float32).itemsize for array in self._arrays.values())

    def note_step(self) -> None:
        """Raise `ModelMismatchError` if names or shapes of the arrays have changed since `join`."""
        self._check(self._joined)

    def read(self, arrays: Arrays) -> None:
        """Copy the model's values into these arrays."""
        self._check({name: array.shape for name, array in arrays.items()})
        for name, array in arrays.items():
            array[...] = self._arrays[name]

    def write(self, arrays: Arrays) -> None:
        """Copy the values of these arrays into the model."""
        self._check({name: array.shape for name, array in arrays.items()})
        for name, array in arrays.items():
            self._arrays[name][...] = array

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `ModelMismatchError` if the model's arrays no longer have these shapes."""
        if added := sorted(self._arrays.keys() - shapes.keys()):
            raise ModelMismatchError(
                f"model[{added[0]!r}] was added after join; join a hub whose model contains it"
            )
        for name, shape in shapes.items():
            ours = self._arrays.get(name)
            if not isinstance(ours, np.ndarray) or ours.dtype.kind != "f" or not ours.flags.writeable:
                raise ModelMismatchError(f"model[{name!r}] is no longer a writable array of floats")
            if ours.shape != shape:
                raise ModelMismatchError(f"model[{name!r}] has shape {ours.shape}, but had {shape} at join")


def participant_of(model: object, optimizer: object, also: Sequence[object]) -> Participant:
    """Wrap a model as a participant; raises `ConfigError` if it is not supported."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from edgeasync.sdk.torch_participant import TorchParticipant  # noqa: PLC0415 - imports torch

        return TorchParticipant(model, optimizer, also)
    if optimizer is not None or also:
        raise ConfigError("optimizer and also require a torch module; call session.step() after each step")
    if isinstance(model, Mapping):
        return ArrayParticipant(model)
    if isinstance(spec := getattr(model, "spec", None), ParameterSpec) and hasattr(model, "arrays"):
        return ArrayParticipant(model.arrays, spec, frozen_of(model))  # such as edgeasync.networks.Network
    if isinstance(model, Participant):
        return model
    raise ConfigError(
        f"model is {type(model).__name__}; pass a torch.nn.Module, or a dict of numpy arrays that your loop "
        "changes in place"
    )


def check_same(parameters: Sequence[Parameter], spec: ParameterSpec) -> None:
    """Raise `ModelMismatchError` unless a model has the same arrays as the hub's, in any order."""
    ours = {parameter.name: parameter for parameter in parameters}
    theirs = {parameter.name: parameter for parameter in spec.parameters}
    for these, others, whose in ((ours, theirs, "your"), (theirs, ours, "the hub's")):
        prefix = next(iter(these), "").partition(".")[0] + "."
        if these.keys() == {prefix + name for name in others}:
            raise ModelMismatchError(
                f"{whose} model is wrapped: its arrays begin with {prefix!r}; pass the module inside the wrapper"
            )
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours:
            raise ModelMismatchError(
                f"the hub's model has an array {name!r}, and yours does not; use the same model on both"
            )
        if name not in theirs:
            raise ModelMismatchError(
                f"your model has an array {name!r}, and the hub's does not; use the same model on both"
            )
        if ours[name] != theirs[name]:
            mine, hubs = ours[name], theirs[name]
            raise ModelMismatchError(
                f"the array {name!r} is {mine.role} of shape {mine.shape} here, but "
                f"{hubs.role} of {hubs.shape} at the hub"
            )
