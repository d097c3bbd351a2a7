"""Loads user code specified as `package.module:factory`: a device's trainer, or a hub's model.

The code is imported from this process's module path. Peers cannot specify code, because the
protocol has no field for it.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from edgeasync.config import Section
from edgeasync.data.dataset import Dataset
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.plugins import check_name, find_code
from edgeasync.protocol.messages import Welcome
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.trainer import Trainer


class CustomModel(Section, frozen=True, tag_field="kind", tag="custom", kw_only=True):
    """A model that a user-defined function on the hub returns.

    Every agent needs its own trainer.
    """

    factory: str
    """Function that returns the model, `"package.module:function"`. The hub calls it without
    arguments at every start. It returns named arrays, or a `ParameterSpec` and its arrays. Each
    agent needs a `trainer`. `evaluation.data` and `stop.accuracy` are rejected with such a model.
    """
    local: Patterns | UnsetType = UNSET
    """Names of arrays that stay on each device, as returned by the factory. See [Local
    parameters](/train/local.md).
    """

    def __post_init__(self) -> None:
        check_name(self.factory, "factory")

    def load(self) -> tuple[ParameterSpec, Vector]:
        """Call the factory, and return the model's parameter layout and initial values.

        Raises `ConfigError` if the factory is missing or does not return a model.
        """
        where = f"[model] factory {self.factory}"
        found = find_code(self.factory, where)()
        if isinstance(found, Mapping):
            return flatten(found, where)
        spec, initial = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        if not isinstance(spec, ParameterSpec) or not isinstance(initial, Mapping | np.ndarray):
            raise ConfigError(
                f"{where}: returned {type(found).__name__}; return named arrays, or a ParameterSpec and its arrays"
            )
        try:
            if isinstance(initial, Mapping):
                arrays = {name: as_array(given, name, where) for name, given in initial.items()}
                return spec, spec.flatten(arrays)
            vector = as_array(initial, "initial", where)
            spec.check(vector)
        except ModelMismatchError as error:
            raise ConfigError(f"{where}: the values do not match the spec: {error}") from error
        return spec, vector


def make_trainer(name: str, welcome: Welcome, dataset: Dataset | None) -> Trainer:
    """Call the trainer factory `name`. Raises `ConfigError` unless it returns a trainer."""
    where = f"trainer {name}"
    trainer = find_code(name, where)(welcome, dataset)
    is_trainer = isinstance(getattr(trainer, "spec", None), ParameterSpec)
    if not is_trainer or not all(callable(getattr(trainer, method, None)) for method in ("begin", "step")):
        raise ConfigError(
            f"{where}: returned {type(trainer).__name__}; return a trainer with spec, begin and step"
        )
    made: Trainer = trainer
    return made


def flatten(parameters: Mapping[str, npt.ArrayLike], where: str) -> tuple[ParameterSpec, Vector]:
    """Convert named arrays to a parameter layout and a flat vector.

    Raises `ConfigError` unless all values are finite floats.
    """
    arrays = {name: as_array(given, name, where) for name, given in parameters.items()}
    if not arrays:
        raise ConfigError(f"{where} has no parameters; return at least one named array")
    spec = ParameterSpec(tuple([Parameter(name, array.shape) for name, array in arrays.items()]))
    return spec, spec.flatten(arrays)


def as_array(given: npt.ArrayLike, name: str, where: str) -> npt.NDArray[np.float32]:
    """Convert the values of a parameter to float32.

    Raises `ConfigError` unless all values are finite floats.
    """
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        words = f"{where}: parameter {name!r} cannot be read as a numpy array"
        raise ConfigError(f"{words}: {error}") from error
    if array.dtype.kind != "f":
        raise ConfigError(
            f"{where}: parameter {name!r} is {array.dtype}; only floats can be trained, so convert it"
        )
    if not array.size or not np.isfinite(array).all():
        raise ConfigError(f"{where}: parameter {name!r} is empty, or contains values that are not finite")
    # ascontiguousarray converts a scalar to a vector.
    return np.ascontiguousarray(array, np.float32).reshape(array.shape)
