"""What takes part in a session: named numpy arrays, torch modules, and what has the methods of `Participant`."""

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
    """A model that takes part: what a session reads from it, and writes to it. Inherit from this class.

    All methods are called in the thread of the user's loop, inside `join`, `step`, `evaluate` and the end of a
    session. The session reads a model at the end of an assignment. `parameters`, `read` and `write` are needed;
    the others have a default. An `AddingParticipant` need not wait for exchanges if the hub allows overlap.
    """

    parameters: Sequence[Parameter]
    """Its arrays: names, shapes, roles."""
    frozen: Frozen | None = None
    """The checksum of its arrays that do not travel."""

    @abstractmethod
    def read(self, arrays: Arrays) -> None:
        """Copy the model's values into these arrays."""

    @abstractmethod
    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the model."""

    def begin_read(self, arrays: Arrays) -> Callable[[], None]:
        """Note the model's values as they are now; return what fills the arrays, which another thread calls."""
        self.read(arrays)
        return lambda: None

    @property
    def rounds(self) -> bool:
        """Whether the model may round values written to it: then the session reads back what it has written."""
        return True

    def pending(self) -> str | None:
        """Return the name of an array whose value is still needed.

        As long as there is one the session neither counts a step nor writes to the model.
        """
        return None

    @property
    def has_unsent(self) -> bool:
        """Whether it has steps that the session has yet to read, and sends at its end."""
        return False

    def note_step(self) -> None:  # noqa: B027 - most have nothing to look at
        """Look at the model after a step that counts; may raise an error about it."""

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        """Call `on_step` after each of the optimizer's steps, if that can be seen; return what ends that."""
        return lambda: None

    def reset_optimizer(self) -> None:  # noqa: B027 - most have none that is known
        """Forget the optimizer's state: it is of another model."""

    def state(self) -> TrainerState:
        """Return the optimizer's state, and that of random numbers, as arrays."""
        return {}

    def restore(self, state: TrainerState) -> None:  # noqa: B027 - most have nothing to resume from
        """Resume from such a state; raises `ValueError` if it is another model's."""


class AddingParticipant(Participant):
    """A model to which the session can add what others have changed, while its loop trains on."""

    @abstractmethod
    def stage(self, arrays: Arrays) -> None:
        """Prepare `add` for these arrays, in another thread than the loop's."""

    @abstractmethod
    def add(self, arrays: Arrays) -> None:
        """Add the arrays that `stage` was given to the trained values; statistics are replaced by theirs."""


def frozen_of(model: object) -> Frozen | None:
    """Return the checksum of a model's or a trainer's arrays that do not travel, if it has one."""
    found = getattr(model, "frozen", None)
    return found if isinstance(found, Frozen) else None


class ArrayParticipant(Participant):
    """Named numpy arrays, which the user's loop changes in place; without a `spec` all of them are trained."""

    def __init__(
        self, arrays: Mapping[str, Any], spec: ParameterSpec | None = None, frozen: Frozen | None = None
    ) -> None:
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.flags.writeable:
                raise ConfigError(f"model[{name!r}] is no array of floats that can be written; give numpy arrays")
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
        """Raise `ModelMismatchError` if the model's arrays no longer fit those at join."""
        self._check(self._joined)

    def read(self, arrays: Arrays) -> None:
        """Copy the model's values into these arrays."""
        self._check({name: array.shape for name, array in arrays.items()})
        for name, array in arrays.items():
            array[...] = self._arrays[name]

    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the model."""
        self._check({name: array.shape for name, array in arrays.items()})
        for name, array in arrays.items():
            self._arrays[name][...] = array

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `ModelMismatchError` if the model's arrays no longer have these shapes."""
        if added := sorted(self._arrays.keys() - shapes.keys()):
            raise ModelMismatchError(f"model[{added[0]!r}] was not there at join; join a hub whose model has it")
        for name, shape in shapes.items():
            ours = self._arrays.get(name)
            if not isinstance(ours, np.ndarray) or ours.dtype.kind != "f" or not ours.flags.writeable:
                raise ModelMismatchError(f"model[{name!r}] is no longer an array of floats that can be written")
            if ours.shape != shape:
                raise ModelMismatchError(f"model[{name!r}] has shape {ours.shape}, and had {shape} at join")


def participant_of(model: object, optimizer: object, also: Sequence[object]) -> Participant:
    """Return how a model takes part; raises `ConfigError` for what is none."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from edgeasync.sdk.torch_participant import TorchParticipant  # noqa: PLC0415 - who has a module has paid for it

        return TorchParticipant(model, optimizer, also)
    if optimizer is not None or also:
        raise ConfigError("optimizer and also are for torch modules; call session.step() after each step")
    if isinstance(model, Mapping):
        return ArrayParticipant(model)
    if isinstance(spec := getattr(model, "spec", None), ParameterSpec) and hasattr(model, "arrays"):
        return ArrayParticipant(model.arrays, spec, frozen_of(model))  # such as edgeasync.networks.Network
    if isinstance(model, Participant):
        return model
    raise ConfigError(
        f"model is {type(model).__name__}; give a torch.nn.Module, or a dict of numpy arrays that your loop "
        "changes in place"
    )


def check_same(parameters: Sequence[Parameter], spec: ParameterSpec) -> None:
    """Raise `ModelMismatchError` unless a model has the hub's arrays, in any order."""
    ours = {parameter.name: parameter for parameter in parameters}
    theirs = {parameter.name: parameter for parameter in spec.parameters}
    for these, others, whose in ((ours, theirs, "your"), (theirs, ours, "the hub's")):
        prefix = next(iter(these), "").partition(".")[0] + "."
        if these.keys() == {prefix + name for name in others}:
            raise ModelMismatchError(
                f"{whose} model is wrapped: its arrays begin with {prefix!r}; give the module inside the wrapper"
            )
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours:
            raise ModelMismatchError(
                f"the hub's model has an array {name!r}, and yours has none; give both the same"
            )
        if name not in theirs:
            raise ModelMismatchError(
                f"your model has an array {name!r}, and the hub's has none; give both the same"
            )
        if ours[name] != theirs[name]:
            mine, hubs = ours[name], theirs[name]
            raise ModelMismatchError(
                f"the array {name!r} is {mine.role} of shape {mine.shape} here, "
                f"{hubs.role} of {hubs.shape} at the hub"
            )
