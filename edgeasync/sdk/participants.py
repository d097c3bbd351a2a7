"""What takes part in a session: named numpy arrays, torch modules, and what has the methods of `Participant`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.messages import Frozen

Arrays = Mapping[str, npt.NDArray[np.float32]]


class Participant(Protocol):
    """A model that takes part: what a session reads from it, and writes to it.

    All are called in the thread of the user's loop, inside `join`, `step`, `evaluate` and the end of a session.
    A model that holds all values in float32 may have an attribute `rounds = False`: the session then need not read
    back what it has written. A model whose values may not change at every step may have a method `pending`: as
    long as it returns the name of an array, the session neither counts the step nor writes to the model. A model
    that has steps which the session has yet to read may say so by `has_unsent`: the session sends them at its end.
    `note_step()` of a model is called after each step that counts, and may raise an error about it.

    A session reads a model at the end of an assignment. `begin_read(arrays)` may stand for `read`: it notes the
    values, and returns what fills the arrays, which another thread calls. An `AddingParticipant` need not wait for
    exchanges if the hub allows overlap.
    """

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Its arrays: names, shapes, roles."""

    def read(self, arrays: Arrays) -> None:
        """Copy the model's values into these arrays."""

    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the model."""

    def reset_optimizer(self) -> None:
        """Forget the optimizer's state: it is of another model."""

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:
        """Call `on_step` after each of the optimizer's steps, if that can be seen; return what ends that."""

    def state(self) -> TrainerState:
        """Return the optimizer's state, and that of random numbers, as arrays."""

    def restore(self, state: TrainerState) -> None:
        """Resume from such a state; raises `ValueError` if it is another model's."""


@runtime_checkable
class AddingParticipant(Participant, Protocol):
    """A model to which the session can add what others have changed, while its loop trains on."""

    def stage(self, arrays: Arrays) -> None:
        """Prepare `add` for these arrays, in another thread than the loop's."""

    def add(self, arrays: Arrays) -> None:
        """Add the arrays that `stage` was given to the trained values; statistics are replaced by theirs."""


def frozen_of(model: object) -> Frozen | None:
    """Return the checksum of a model's or a trainer's arrays that do not travel, if it has one."""
    found = getattr(model, "frozen", None)
    return found if isinstance(found, Frozen) else None


def rounds(model: Participant) -> bool:
    """Return whether a model may round values written to it. Assume so for unknown types."""
    return bool(getattr(model, "rounds", True))


def pending(model: Participant) -> str | None:
    """Return the name of an array that must keep its value, or None if the model may be written to."""
    ask: Callable[[], str | None] | None = getattr(model, "pending", None)
    return None if ask is None else ask()


def has_unsent(model: Participant) -> bool:
    """Return whether a model has steps that the session has yet to read; not of models that do not know."""
    return bool(getattr(model, "has_unsent", False))


def note_step(model: Participant) -> None:
    """Let a model look at itself after a step that counts."""
    note: Callable[[], None] | None = getattr(model, "note_step", None)
    if note is not None:
        note()


def begin_read(model: Participant, arrays: Arrays) -> Callable[[], None]:
    """Note a model's values as they are now; return what fills the arrays."""
    begin: Callable[[Arrays], Callable[[], None]] | None = getattr(model, "begin_read", None)
    if begin is not None:
        return begin(arrays)
    model.read(arrays)
    return lambda: None


class ArrayParticipant:
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

    def reset_optimizer(self) -> None:
        """Do nothing: there is none that is known."""

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        """Do nothing: the loop calls `session.step`."""
        return lambda: None

    def state(self) -> TrainerState:
        """Return nothing."""
        return {}

    def restore(self, state: TrainerState) -> None:
        """Do nothing."""


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
    if all(hasattr(model, name) for name in ("parameters", "read", "write", "attach")):
        return model  # type: ignore[return-value]
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
