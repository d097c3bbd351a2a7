"""torch modules in a session: what of them takes part, and how it is read and written."""

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import ConfigError, ModelMismatchError
from edgeasync.parameters import Parameter
from edgeasync.protocol.messages import Frozen
from edgeasync.training.frozen import PIECE, FrozenArray, frozen_checksum

LOG = logging.getLogger("edgeasync.join")

Arrays = Mapping[str, npt.NDArray[np.float32]]

STEPS_PENDING_MAX = 64
"""After this number of steps in a row with another backward pass pending, fewer graphs count as pending."""

STEPS_UNSEEN_MAX = 16
"""The session warns after this number of optimizer steps if none of them counted."""

_watchers: list[Callable[[Optimizer], None]] = []
"""Called after each step of any optimizer. Each change makes a new list, since any thread may step."""

_watchers_lock = threading.Lock()


def watch_steps(watcher: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call this after each step of any optimizer of this process; return what ends that."""
    global _watchers  # noqa: PLW0603 - torch has one list of hooks for all optimizers, too
    with _watchers_lock:
        _watchers = [*_watchers, watcher]

    def end() -> None:
        global _watchers  # noqa: PLW0603
        with _watchers_lock:
            _watchers = [one for one in _watchers if one is not watcher]

    return end


def _tell_watchers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    for watcher in _watchers:
        watcher(optimizer)


# Once, and for good: torch's own list must not change while another thread goes through it.
register_optimizer_step_post_hook(_tell_watchers)


class TorchParticipant:
    """A module in a session, and its optimizer if it is known.

    Its trained parameters take part, each once, however many names it has. So do its floating buffers, as
    statistics. Frozen parameters and other buffers stay as they are.

    The session follows a loop that replaces a tensor by one of the same shape, or freezes a parameter. If the loop
    unfreezes, adds, removes or resizes parameters after `join`, the next step raises `ModelMismatchError`. If its
    optimizer no longer steps the module's parameters, the next step raises `ConfigError`.
    """

    def __init__(self, module: nn.Module, optimizer: object = None, also: Sequence[Any] = ()) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}; give one of torch.optim")
        for one in also:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(f"also has a {type(one).__name__}; give what has state_dict and load_state_dict")
        check_alone()
        self._kept = [*([] if optimizer is None else [optimizer]), *also]
        self._optimizer = optimizer
        self._module = module
        self.parameters = parameters_of(module)
        self.frozen = frozen_of(module)
        self._layout = Layout(module)
        self._exchanged: dict[str, Tensor] = {}
        self._trained: set[int] = set()
        self._saved = SavedTensors({})
        self._stale: set[str] = set()
        self._find_tensors()
        self._used: list[Optimizer] = [] if optimizer is None else [optimizer]
        # An optimizer that was given may train the module indirectly, as by float32 copies of its parameters.
        self._is_trusted = optimizer is not None and not self._owns(optimizer)
        self._optimizer_left: Optimizer | None = None
        self._stepped: Optimizer | None = None
        self._steps_unseen = 0
        self._suspects: set[str] = set()
        self._reads_to_suspect = 0
        self._written: list[float] = []
        self._has_stepped = self._is_told = False
        self.has_unsent = False
        """Whether an optimizer has stepped the module since the session read it last."""

    @property
    def rounds(self) -> bool:
        """Whether the module rounds the values that it is given."""
        return rounds(self._exchanged)

    def read(self, arrays: Arrays) -> None:
        """Copy the module's values into these arrays."""
        check_alone()
        self._look_for_unstepped()
        self._follow()
        self._steps_unseen = 0
        self.has_unsent = False
        if (left := self._optimizer_left) is not None:
            self._optimizer_left = None
            remedy = "leave the session, and join again with" if left is self._optimizer else "make"
            raise ConfigError(
                f"{type(left).__name__} no longer steps any parameter that this session exchanges, because they "
                f"were replaced; {remedy} a new optimizer of module.parameters()"
            )
        read_tensors(self._exchanged, arrays)

    def write(self, arrays: Arrays) -> None:
        """Copy these arrays' values into the module."""
        self._follow()
        if self._is_trusted:
            self._look_for_unreached()
        write_tensors(self._exchanged, arrays)
        if self._is_trusted:
            self._written = self._sums()

    def pending(self) -> str | None:
        """Return the name of a tensor whose value a backward pass still needs, or None.

        Call this after every optimizer step.
        """
        return self._saved.pending(() if self._stepped is None else _parameters_in(self._stepped))

    def _follow(self) -> None:
        """Use the tensors that the module has now; raises `ModelMismatchError` if they no longer fit."""
        if self._layout.has_changed():
            before = self._exchanged
            self._find_tensors()
            self._layout = Layout(self._module)
            replaced = {name for name, tensor in self._exchanged.items() if tensor is not before[name]}
            self._suspects |= {name for name in replaced if id(self._exchanged[name]) in self._trained}
            self._reads_to_suspect = STEPS_UNSEEN_MAX

    def _look_for_unstepped(self) -> None:
        """Warn if parameters were replaced, and no optimizer steps the new ones."""
        if not self._suspects:
            return
        self._reads_to_suspect -= 1
        if self._reads_to_suspect > 0:
            return
        owned = {id(tensor) for optimizer in self._used for tensor in _parameters_in(optimizer)}
        if left := [repr(name) for name in sorted(self._suspects) if id(self._exchanged[name]) not in owned]:
            LOG.warning("no optimizer steps %s, since it was replaced; give it to an optimizer", _listed(left))
        self._suspects.clear()

    def _look_for_unreached(self) -> None:
        """Warn if an optimizer of other tensors has stepped, and the module is as the last exchange left it."""
        if self._has_stepped and not self._is_told and self._written == self._sums():
            self._is_told = True
            LOG.warning(
                "nothing is exchanged: the steps of the optimizer that join was given do not change the module; "
                "give join the module that you train"
            )
        self._has_stepped = False

    def _sums(self) -> list[float]:
        return [float(tensor.detach().double().sum()) for tensor in self._exchanged.values()]

    def _find_tensors(self) -> None:
        tensors = tensors_of(self._module)
        joined = {parameter.name: parameter for parameter in self.parameters}
        gone, resized = [], []
        for name, parameter in joined.items():
            if name in tensors and tuple(tensors[name].shape) == parameter.shape:
                continue
            if parameter.role == "statistic" and name in self._exchanged:
                self._keep_buffer(name)
                tensors[name] = self._exchanged[name]
            elif name in tensors:
                resized.append(f"{name!r} from {parameter.shape} to {tuple(tensors[name].shape)}")
            else:
                gone.append(repr(name))
        trained = {name for name, tensor in tensors.items() if _is_trained(tensor)}
        added = [repr(name) for name in sorted(trained - joined.keys())]
        changes = {"missing": gone, "resized": resized, "newly trained": added}
        if told := [f"{what}: {_listed(names)}" for what, names in changes.items() if names]:
            raise ModelMismatchError(
                f"the module has changed since it joined ({'; '.join(told)}), and a session exchanges only "
                "parameters that were trained at join; leave it, and join a hub whose model has these parameters"
            )
        self._exchanged = {name: tensors[name] for name in joined}
        trained_tensors = {
            name: tensors[name] for name, parameter in joined.items() if parameter.role == "trained"
        }
        self._trained = {id(tensor) for tensor in trained_tensors.values()}
        self._saved = SavedTensors(self._exchanged)

    def _keep_buffer(self, name: str) -> None:
        """Keep exchanging a buffer's last value after it was resized or removed."""
        if name not in self._stale:
            self._stale.add(name)
            LOG.warning("the buffer %r has changed its shape or is gone; its last value is exchanged", name)

    def reset_optimizer(self) -> None:
        """Forget the state of the optimizers that have stepped, but for their groups: schedules continue."""
        for optimizer in self._used:
            for tensor in list(optimizer.state):
                if id(tensor) in self._trained:
                    del optimizer.state[tensor]

    def attach(self, on_step: Callable[[], None]) -> Callable[[], None]:
        """Call `on_step` after each step of the optimizer or, without one, of any that has these parameters."""

        def stepped(optimizer: Optimizer) -> None:
            if self._counts(optimizer):
                self._stepped, self._has_stepped, self.has_unsent = optimizer, True, True
                on_step()

        return watch_steps(stepped)

    def _counts(self, optimizer: Optimizer) -> bool:
        """Return whether to count a step, or to let `read` raise an error about it."""
        if self._optimizer is not None and optimizer is not self._optimizer:
            if self._trains_module(optimizer):
                self.has_unsent = True
                self._note_unseen("were of the optimizer that join was given; join again with the one that trains")
            return False
        if self._owns(optimizer) or self._is_trusted:
            self._steps_unseen = 0
            if all(optimizer is not used for used in self._used):
                self._used.append(optimizer)
            return True
        if self._trains_module(optimizer):
            return True
        if any(optimizer is used for used in self._used):
            self._optimizer_left = optimizer
            return True
        if not self._used:
            self._note_unseen(
                "stepped the module that joined; give join the module that you train, and its parameters to the "
                "optimizer"
            )
        return False

    def _note_unseen(self, what: str) -> None:
        """Note that an optimizer has made a step that does not count; warn if there have been many in a row."""
        self._steps_unseen += 1
        if self._steps_unseen == STEPS_UNSEEN_MAX:
            LOG.warning("nothing is exchanged: none of the last %d optimizer steps %s", STEPS_UNSEEN_MAX, what)

    def _owns(self, optimizer: Optimizer) -> bool:
        return any(id(tensor) in self._trained for tensor in _parameters_in(optimizer))

    def _trains_module(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps any parameter that the module has now, exchanged or not."""
        trained = {id(tensor) for tensor in self._module.parameters() if tensor.requires_grad}
        return any(id(tensor) in trained for tensor in _parameters_in(optimizer))

    def state(self) -> TrainerState:
        """Return the state of the optimizer, and of what else resumes, as an array of bytes."""
        return {"torch": dump_states(self._kept)} if self._kept else {}

    def restore(self, state: TrainerState) -> None:
        """Resume from such a state; raises `ValueError` if it is of other things."""
        if self._kept and "torch" in state:
            load_states(self._kept, state["torch"])


def dump_states(kept: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """Return the states of optimizers and the like as an array of bytes."""
    content = io.BytesIO()
    torch.save([one.state_dict() for one in kept], content)
    return np.frombuffer(content.getvalue(), np.uint8)


def load_states(kept: Sequence[Any], content: npt.NDArray[np.uint8]) -> None:
    """Restore what `dump_states` returned; raises `ValueError` if it is of other things."""
    try:
        states = torch.load(io.BytesIO(content.tobytes()), weights_only=True)
        for one, state in zip(kept, states, strict=True):
            one.load_state_dict(state)
    except Exception as error:
        raise ValueError(f"what was kept cannot be read: {error}") from error


class SavedTensors:
    """Tells which tensors autograd still needs: another backward pass is to come.

    Until its backward, a graph refers to the tensors that it needs. What the optimizer that has just stepped owns
    does not matter: torch refuses to run a graph that is older than the step.

    Graphs that never run refer to tensors, too. So if there is something pending after each of
    `STEPS_PENDING_MAX` steps in a row, graphs that were there when their owner stepped no longer count. If that
    does not help, what was pending all the time is no longer waited for.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        self._tensors = list(tensors.values())
        # A graph, even one that has run, refers to the accumulator, and that to the parameter. Keeping the
        # accumulator makes this one reference constant.
        self._accumulators = [_accumulator_of(one) for one in self._tensors if one.requires_grad]
        self._owners = [_owners_of(name, tensors) for name in self._names]
        self._usual = [1 + one.requires_grad for one in self._tensors]
        self._steps = 0
        self._always: set[str] = set()
        self._ignored: set[str] = set()
        self._is_strict = True

    def pending(self, stepped: Iterable[Tensor]) -> str | None:
        """Return the name of a tensor that is still needed, or None, after a step of the optimizer of these."""
        counts = list(map(_USE_COUNT, self._tensors))
        if counts == self._usual:
            self._steps = 0
            return None
        ids = set(map(id, stepped))
        found: set[str] = set()
        for place, (name, owners, count) in enumerate(zip(self._names, self._owners, counts, strict=True)):
            if not owners.isdisjoint(ids):
                if not self._is_strict:
                    self._usual[place] = count
            elif count > self._usual[place] and name not in self._ignored:
                found.add(name)
        if not found:
            self._steps = 0
            return None
        self._always = self._always & found if self._steps else found
        self._steps += 1
        if self._steps < STEPS_PENDING_MAX:
            return min(found)
        self._steps = 0
        if self._is_strict:
            self._is_strict = False
            return min(found)
        self._ignored |= self._always or found
        LOG.warning(
            "exchanges change %s although a backward pass may still need it: one was pending after each of %d "
            "steps; if that pass runs, join without optimizer, so that the session sees every optimizer's steps",
            _listed(sorted(map(repr, self._always or found))), 2 * STEPS_PENDING_MAX,
        )  # fmt: skip
        return None


def _owners_of(name: str, tensors: Mapping[str, Tensor]) -> set[int]:
    """Return the parameters whose optimizer owns a tensor: itself or, of a buffer, those of the nearest module."""
    if isinstance(tensors[name], nn.Parameter):
        return {id(tensors[name])}
    while name:
        name = name.rpartition(".")[0]
        prefix = f"{name}." if name else ""
        near = {key for key in tensors if key.startswith(prefix) and isinstance(tensors[key], nn.Parameter)}
        if near:
            return {id(tensors[key]) for key in near}
    return set()


def _accumulator_of(parameter: Tensor) -> object:
    """Return the node that adds to a parameter's gradient, in all graphs that it is part of."""
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


class Layout:
    """A snapshot of a module's submodules and tensors, and of which parameters require gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(_parts_of(module))
        self._sizes = list(map(len, self._parts))
        self._filled = list(filter(None, self._parts))
        self._values = list(self._look())
        self._parameters = list(module.parameters())
        self._details = self._look_closely()

    def has_changed(self) -> bool:
        """Return whether the module differs from the snapshot."""
        return (
            list(map(len, self._parts)) != self._sizes
            or not all(map(is_, self._look(), self._values))
            or self._look_closely() != self._details
        )

    def _look(self) -> Iterator[Any]:
        return chain.from_iterable(map(_VALUES, self._filled))

    def _look_closely(self) -> list[object]:
        return [*map(_REQUIRES_GRAD, self._parameters), *map(_SHAPE, self._parameters)]


# Calls from C, since a session looks after every step.
_VALUES = methodcaller("values")
_REQUIRES_GRAD, _SHAPE = attrgetter("requires_grad"), attrgetter("shape")
_USE_COUNT = methodcaller("_use_count")


def _parts_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    for part in module.modules():
        yield part._parameters  # noqa: SLF001 - nothing public is fast enough to look at after every step
        yield part._buffers  # noqa: SLF001
        yield part._modules  # noqa: SLF001


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _parameters_in(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def check_alone() -> None:
    """Raise `ConfigError` if this process is one of several that train one module."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this process is one of {dist.get_world_size()} in a process group of torch, and an exchange would "
            "change the model of this one alone; train without a process group, and let each process join"
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile`, `DataParallel` or its like has wrapped, or the module itself."""
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    while True:
        inner = getattr(module, "_orig_mod", module.module if isinstance(module, parallel) else None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters, frozen ones too, then its floating buffers, by the names of the plain module.

    Buffers that are not in the module's state dict are left out: the module computes them.

    Raises `ConfigError` for a lazy module that has not seen a batch.
    """
    module = unwrapped(module)
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    left_out = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set  # noqa: SLF001 - torch says it nowhere else
    }
    tensors |= {
        name: tensor
        for name, tensor in module.named_buffers()
        if tensor.is_floating_point() and name not in left_out
    }
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name!r} has no shape yet; call the module on one batch first")
        if tensor.is_complex() and tensor.requires_grad:
            raise ConfigError(f"{name!r} is complex; store its real and imaginary parts as two parameters")
        if (sharded := sys.modules.get("torch.distributed.tensor")) and isinstance(tensor, sharded.DTensor):
            raise ConfigError(
                f"{name!r} is sharded; join with a module whose parameters are whole in this process"
            )
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}


def exchanged_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that take part: those that are trained, then floating buffers."""
    found = {
        name: tensor
        for name, tensor in tensors_of(module).items()
        if _is_trained(tensor) or not isinstance(tensor, nn.Parameter)
    }
    if not any(_is_trained(tensor) for tensor in found.values()):
        raise ConfigError(f"{type(module).__name__} has no parameters that can be trained")
    for name, tensor in found.items():
        if not isinstance(tensor, nn.Parameter) and not tensor.isfinite().all():
            raise ConfigError(
                f"the buffer {name!r} has values that are not finite, which cannot be averaged; register it with "
                "persistent=False, or make it a mask of booleans"
            )
    return found


def parameters_of(module: nn.Module) -> list[Parameter]:
    """Return the names, shapes and roles of what takes part."""
    return [
        Parameter(name, tuple(tensor.shape), "trained" if _is_trained(tensor) else "statistic")
        for name, tensor in exchanged_of(module).items()
    ]


def frozen_of(module: nn.Module) -> Frozen | None:
    """Return the checksum of a module's tensors that stay here, `None` if there are none or one cannot be read."""
    try:
        return frozen_checksum(
            "torch",
            [FrozenArray(name, tensor.shape, _pieces_of(tensor)) for name, tensor in _staying_in(module).items()],
        )
    except (NotImplementedError, RuntimeError, TypeError) as error:
        LOG.warning("the frozen parameters cannot be compared with those of other devices: %s", error)
        return None


def _staying_in(module: nn.Module) -> dict[str, Tensor]:
    """Return frozen parameters, and persistent buffers that are not of floats: tables, masks, quantized weights.

    A buffer of a single value counts something, as a batch norm's batches.
    """
    found = {
        name: tensor
        for name, tensor in tensors_of(module).items()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    }
    for prefix, part in unwrapped(module).named_modules():
        for name, tensor in part._buffers.items():  # noqa: SLF001 - only there it says what is persistent
            if tensor is None or tensor.is_floating_point() or tensor.numel() < 2:
                continue
            if name not in part._non_persistent_buffers_set:  # noqa: SLF001
                found[f"{prefix}.{name}".removeprefix(".").replace("_orig_mod.", "")] = tensor
    return found


def _pieces_of(tensor: Tensor) -> Iterator[npt.NDArray[Any]]:
    """Yield a tensor's values in pieces, of floats as float32."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError("a part of a parameter is in another process")
    flat = tensor.detach().reshape(-1)
    for start in range(0, len(flat), PIECE):
        piece = flat[start : start + PIECE].cpu()
        yield (piece.float() if piece.is_floating_point() else piece).numpy()


def rounds(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether any tensor is less precise than float32."""
    return any(tensor.dtype not in {torch.float32, torch.float64} for tensor in tensors.values())


def read_tensors(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copy tensors into arrays."""
    with torch.no_grad():
        for name, array in arrays.items():
            torch.from_numpy(array).copy_(tensors[name])


def write_tensors(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Copy arrays into tensors."""
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))
