"""Tracks a session's optimizers, and warns about steps that do not change the module."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from edgeasync.errors import ConfigError
from edgeasync.sdk.torch_exchanged import Exchanged
from edgeasync.sdk.torch_modules import listed

LOG = logging.getLogger("edgeasync.join")

STEPS_UNSEEN_MAX = 16
"""Number of consecutive uncounted optimizer steps after which the session warns."""

_watchers: list[Callable[[Optimizer], None]] = []
"""Functions to call after each optimizer step. The list is replaced, never modified, because any
thread may read it.
"""

_watchers_lock = threading.RLock()  # reentrant, because the garbage collector may call `end`


def watch_steps(watcher: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call `watcher` after each step of any torch optimizer, in any thread.

    Return a function that ends these calls.

    >>> import torch
    >>> from edgeasync.torch import watch_steps
    >>> stepped = []
    >>> end = watch_steps(stepped.append)
    >>> torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    >>> end()
    >>> len(stepped)
    1
    """
    global _watchers  # noqa: PLW0603 - torch's hooks are global, too
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


# Registered once: torch's own list must not change while another thread iterates over it.
register_optimizer_step_post_hook(_tell_watchers)


class Optimizers:
    """The optimizers that step the exchanged parameters.

    These are the optimizer that the user has passed or, by default, all optimizers.
    """

    def __init__(self, given: Optimizer | None, exchanged: Exchanged) -> None:
        self._given = given
        self._exchanged = exchanged
        self._used: list[Optimizer] = [] if given is None else [given]
        # The passed optimizer may train the module indirectly, for example through float32 copies.
        self._is_trusted = given is not None and not self._owns(given)
        self._stepped: Optimizer | None = None
        self._left: Optimizer | None = None
        self._steps_unseen = 0
        self._replaced: set[str] = set()
        self._reads_to_judge = 0
        self._sums: list[float] = []
        self._has_stepped = self._is_told = False
        self.has_unsent = False
        """Whether an optimizer has stepped the module since the last step that counted."""

    def counts(self, optimizer: Optimizer) -> bool:
        """Record a step; return whether the session must process it."""
        if not self._is_seen(optimizer):
            return False
        self._stepped, self._has_stepped, self.has_unsent = optimizer, True, True
        return True

    def _is_seen(self, optimizer: Optimizer) -> bool:
        if self._given is not None and optimizer is not self._given:
            if self._trains_module(optimizer):
                self.has_unsent = True
                self._note_unseen(
                    "came from the optimizer passed to join; join again with the optimizer that trains"
                )
            return False
        if self._owns(optimizer) or self._is_trusted:
            self._steps_unseen = 0
            if all(optimizer is not used for used in self._used):
                self._used.append(optimizer)
            return True
        if self._trains_module(optimizer):
            return True
        if any(optimizer is used for used in self._used):
            self._left = optimizer
            return True
        if not self._used:
            self._note_unseen(
                "stepped the module that joined; pass the module that you train to join, and its parameters to "
                "the optimizer"
            )
        return False

    def _note_unseen(self, what: str) -> None:
        """Record an optimizer step that is not counted; warn after many such steps in a row."""
        self._steps_unseen += 1
        if self._steps_unseen == STEPS_UNSEEN_MAX:
            LOG.warning("nothing is exchanged: none of the last %d optimizer steps %s", STEPS_UNSEEN_MAX, what)

    def _owns(self, optimizer: Optimizer) -> bool:
        return any(id(tensor) in self._exchanged.trained for tensor in _parameters_in(optimizer))

    def _trains_module(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps any parameter of the module, exchanged or not."""
        trained = {id(tensor) for tensor in self._exchanged.module.parameters() if tensor.requires_grad}
        return any(id(tensor) in trained for tensor in _parameters_in(optimizer))

    def stepped(self) -> Iterator[Tensor]:
        """Yield the parameters of the optimizer that has just stepped."""
        if self._stepped is not None:
            yield from _parameters_in(self._stepped)

    def note_replaced(self, names: set[str]) -> None:
        """Record replaced parameters; `note_counted` warns later if no optimizer steps the new ones."""
        if names:
            self._replaced |= names
            self._reads_to_judge = STEPS_UNSEEN_MAX

    def note_counted(self) -> None:
        """Record a counted step; warn about replaced parameters that no optimizer steps.

        Raises `ConfigError` if the optimizer does not step any exchanged parameter any more.
        """
        self._steps_unseen = 0
        self.has_unsent = False
        if self._replaced:
            self._judge_replaced()
        if (left := self._left) is not None:
            self._left = None
            remedy = "leave the session, and join again with" if left is self._given else "make"
            raise ConfigError(
                f"{type(left).__name__} no longer updates any parameter of this session, because the module's "
                f"parameters were replaced; {remedy} a new optimizer of module.parameters()"
            )

    def _judge_replaced(self) -> None:
        self._reads_to_judge -= 1
        if self._reads_to_judge > 0:
            return
        owned = {id(tensor) for optimizer in self._used for tensor in _parameters_in(optimizer)}
        tensors = self._exchanged.tensors
        if left := [repr(name) for name in sorted(self._replaced) if id(tensors[name]) not in owned]:
            LOG.warning("no optimizer steps %s, which was replaced; add it to an optimizer", listed(left))
        self._replaced.clear()

    def begin_write(self) -> None:
        """Warn if the passed optimizer has stepped without changing the module."""
        if self._is_trusted and self._has_stepped and not self._is_told and self._sums == self._sums_now():
            self._is_told = True
            LOG.warning(
                "nothing is exchanged: the steps of the optimizer passed to join do not change the module; "
                "pass the module that you train to join"
            )
        self._has_stepped = False

    def end_write(self) -> None:
        """Record the module's values after an exchange."""
        if self._is_trusted:
            self._sums = self._sums_now()

    def _sums_now(self) -> list[float]:
        sums = [tensor.detach().double().sum() for tensor in self._exchanged.tensors.values()]
        if len({one.device for one in sums}) > 1:
            sums = [one.cpu() for one in sums]
        found: list[float] = torch.stack(sums).tolist()  # a single wait for the GPU
        return found

    def reset(self) -> None:
        """Reset the optimizers' state of exchanged parameters.

        The parameter groups are kept, so that schedules continue.
        """
        for optimizer in self._used:
            for tensor in list(optimizer.state):
                if id(tensor) in self._exchanged.trained:
                    del optimizer.state[tensor]


def _parameters_in(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
