"""The number of steps and the data position of a loop, so that a killed script can resume."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgeasync.core.arrays.spool import TrainerState
from edgeasync.errors import DataError

Item = TypeVar("Item")

RandomState = dict[str, npt.NDArray[Any]]


class LoopState:
    """Counts steps, epochs and batches, and stores the random state at the start of each epoch.

    A resuming loop skips finished epochs without reading a batch, and restarts the interrupted
    epoch with the same random state. Once the loop has reached its old position, `restore` is
    called. It overwrites all changes made while the loop skipped batches.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._epochs = self._batches = 0
        """The number of finished epochs, and of batches received in the current epoch."""
        self._begun = random_state()
        self._passed = 0
        """Epochs passed or skipped since this start; below `_epochs` while the loop resumes."""
        self._resumed: tuple[RandomState, Callable[[], None]] | None = None
        self._generator: Any = None
        """The loader's own random generator, such as a torch generator, if the loader has one."""

    def epoch(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches of one pass over `loader`, or the rest of an interrupted pass."""
        if self._passed < self._epochs:
            self._passed += 1
            if isinstance(getattr(loader, "epoch", None), int):  # a loader that shuffles by epoch number
                loader.epoch += 1  # type: ignore[attr-defined]
            return
        self._generator = getattr(loader, "generator", None)
        if self._resumed is None:
            self._begun, self._batches = random_state(self._generator), 0
        else:
            set_random_state(self._begun, self._generator)
        batches = iter(loader)
        for _ in islice(batches, self._batches):
            pass
        self._arrive()
        for batch in batches:
            self._batches += 1
            yield batch
        if not self._batches:
            raise DataError("the loader returned no batches; check that its data are not empty")
        self._epochs += 1
        self._passed += 1
        self._batches = 0

    def _arrive(self) -> None:
        """Restore the state that was saved, because the loop has reached its old position."""
        if self._resumed is not None:
            (drawn, restore), self._resumed = self._resumed, None
            restore()
            set_random_state(drawn, self._generator)

    def dump(self) -> TrainerState:
        """Return the position as arrays."""
        state = {"place": np.array([self.steps, self._epochs, self._batches], np.int64)}
        state |= {f"begun.{name}": array for name, array in self._begun.items()}
        return state | {f"now.{name}": array for name, array in random_state(self._generator).items()}

    def load(self, state: TrainerState, restore: Callable[[], None]) -> None:
        """Resume from a saved position; call `restore` when the loop has reached it.

        Raises `ValueError` if `state` is invalid.
        """
        place = state.get("place", np.empty(0))
        steps, epochs, batches = (int(number) for number in place)
        begun, drawn = part_of(state, "begun."), part_of(state, "now.")
        before = random_state()
        try:
            for part in (begun, drawn):
                set_random_state(part)  # fails before anything is changed
        finally:
            set_random_state(before)
        self.steps, self._epochs, self._batches, self._begun = steps, epochs, batches, begun
        self._resumed = drawn, restore
        if not epochs and not batches:  # a loop without `batches` has no position in the data
            self._arrive()


def part_of(state: TrainerState, prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays whose names begin with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


def random_state(generator: Any = None) -> RandomState:
    """Return the global random state of Python, numpy and, if it is loaded, torch.

    The state of a torch `generator` is included.
    """
    _, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - loaders may use these
    state: RandomState = {
        "python": np.array(words, np.uint64),
        "python.gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.asarray(keys, np.uint32),
        "numpy.gauss": np.array([place, has_gauss, cached], np.float64),
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state().numpy()
        if isinstance(generator, torch.Generator):
            state["generator"] = generator.get_state().numpy()
    return state


def set_random_state(state: RandomState, generator: Any = None) -> None:
    """Set the global random state; raises `ValueError` if `state` is invalid."""
    torch = sys.modules.get("torch")
    try:
        words, gauss = tuple(int(word) for word in state["python"]), state["python.gauss"]
        random.setstate((3, words, float(gauss[0]) if len(gauss) else None))
        place, has_gauss, cached = state["numpy.gauss"]
        legacy = ("MT19937", state["numpy"], int(place), int(has_gauss), float(cached))
        np.random.set_state(legacy)  # noqa: NPY002
        if torch is not None and "torch" in state:
            torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
            if isinstance(generator, torch.Generator) and "generator" in state:
                generator.set_state(torch.from_numpy(state["generator"].copy()))
    except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"invalid random state: {error}") from error
