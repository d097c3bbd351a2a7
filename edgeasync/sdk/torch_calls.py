"""Calls a torch module: names and examples of its inputs, and names of its outputs."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from edgeasync.errors import ConfigError
from edgeasync.sdk.torch_draws import SameDraws

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


class Call(NamedTuple):
    """The names of a module's inputs, with an example of each.

    If `by_name` is true, inputs are passed as keyword arguments.
    """

    names: list[str]
    tensors: tuple[Tensor, ...]
    by_name: bool

    def of(self, forward: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Any:
        """Call `forward` with `tensors` as inputs; return its result."""
        return forward(**dict(zip(self.names, tensors, strict=True))) if self.by_name else forward(*tensors)

    @property
    def signature(self) -> inspect.Signature:
        """The signature of a function with one parameter per tensor."""
        return inspect.Signature([inspect.Parameter(name, _POSITIONAL) for name in self.names])


def call_of(module: nn.Module, example: Any) -> Call:
    """Build the call of a module from an example; raises `ConfigError` if `forward` rejects it."""
    if isinstance(example, Mapping):
        call = Call(list(example), _tensors(example), by_name=True)
    elif isinstance(example, tuple) and all(hasattr(value, "shape") for value in example):
        names = _names(module, len(example))
        call = Call(names, _tensors(dict(zip(names, example, strict=True))), by_name=False)
    else:
        call = Call(["x"], _tensors({"x": example}), by_name=False)
    try:
        call.of(inspect.signature(module.forward).bind, call.tensors)
    except TypeError as error:
        raise ConfigError(f"example does not fit {type(module).__name__}.forward: {error}") from error
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if not tensor.ndim or len(tensor) < 2 or len(tensor) != len(call.tensors[0]):
            which = "example" if call.names == ["x"] else f"{name!r} of example"
            raise ConfigError(f"{which} has shape {tuple(tensor.shape)}; pass a batch of at least two examples")
    return call


def _tensors(arrays: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Convert arrays to tensors; floats are converted to float32, the type used on devices."""
    found = []
    for name, array in arrays.items():
        try:
            tensor = torch.as_tensor(array).detach().cpu()
            # A copy: forward may change its input.
            found.append((tensor.float() if tensor.is_floating_point() else tensor).clone())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"input {name!r} of example is {type(array).__name__}, not an array; pass arrays only; if forward "
                "needs other arguments, wrap the module in one that sets them"
            ) from error
    return tuple(found)


def _names(module: nn.Module, count: int) -> list[str]:
    """Return the names of the first `count` positional parameters of `forward`."""
    names: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return [*names, *[f"{name}{number}" for number in range(count - len(names))]][:count]
        names.append(name)
    # If the example has too many inputs, the call fails later, with a reason.
    return [*names[:count], *[f"x{number}" for number in range(len(names), count)]]


def flat(found: Any) -> dict[str, Tensor]:
    """Return a module's outputs by name: `y` for one tensor, `y0`, `y1` and so on for a tuple."""
    return dict(_flat(found, "")) if not isinstance(found, Tensor) else {"y": found}


def _flat(found: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        yield name, found
        return
    parts: Mapping[Any, Any] = {}
    if isinstance(found, Mapping):
        parts = found
    elif dataclasses.is_dataclass(found):
        parts = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    elif hasattr(found, "_asdict"):
        parts = found._asdict()
    elif isinstance(found, tuple | list):
        parts = dict(enumerate(found) if name else ((f"y{place}", value) for place, value in enumerate(found)))
    for key, value in parts.items():
        yield from _flat(value, f"{name}.{key}" if name else str(key))


def quiet(module: nn.Module, use: Callable[[nn.Module], Any]) -> Any:
    """Call `use` with a copy of the module, without dropout and with fixed random numbers."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):  # noqa: SLF001
            part.p = 0.0
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0
    with SameDraws(), _NoDropout():
        return use(copied)


class _NoDropout(TorchFunctionMode):  # type: ignore[misc]
    """Disables dropouts that `forward` applies by calling functions, not by layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return func(
                *args[:4], *[0.0] * bool(args[4:]), *args[5:], **kwargs | ({} if args[4:] else {"dropout_p": 0.0})
            )
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)
