"""A loop that resumes sees the batches that it would have seen, and draws the same random numbers."""

import random

import numpy as np
import pytest

from edgeasync.errors import DataError
from edgeasync.sdk.loop_state import LoopState

LOADER_LENGTH = 5


class Shuffled:
    """A loader that shuffles by the global random numbers, as many do."""

    def __iter__(self):
        order = list(range(LOADER_LENGTH))
        random.shuffle(order)
        for place in order:
            yield place, float(np.random.random())  # noqa: NPY002


def run(state, epochs, stop_after=None, seen=None):
    """Run a loop; return what it saw, and the state after `stop_after` batches if it was killed there."""
    seen = [] if seen is None else seen
    for epoch in range(epochs):
        for batch in state.epoch(Shuffled()):
            state.steps += 1
            seen.append((epoch, *batch, random.random()))
            if state.steps == stop_after:
                return seen, state.dump()
    return seen, None


@pytest.mark.parametrize("killed_after", range(1, 3 * LOADER_LENGTH + 1))
def test_a_loop_resumes_behind_its_last_batch(killed_after):
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002
    undisturbed, _ = run(LoopState(), 3)
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002
    seen, kept = run(LoopState(), 3, killed_after)
    random.seed(99)
    resumed, restored = LoopState(), []
    resumed.load(kept, lambda: restored.append(True))
    run(resumed, 3, seen=seen)
    assert seen == undisturbed
    assert restored == [True], "once"
    assert resumed.steps == 3 * LOADER_LENGTH


class ByPass:
    """A loader that shuffles by the number of its pass."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(LOADER_LENGTH).tolist())


@pytest.mark.parametrize("killed_after", range(1, 3 * LOADER_LENGTH))
def test_a_loader_that_counts_its_passes_resumes_in_the_same_order(killed_after):
    undisturbed = [batch for loader in [ByPass()] for epoch in (loader, loader, loader) for batch in epoch]
    before, loader = LoopState(), ByPass()
    for _ in range(killed_after // LOADER_LENGTH):
        list(before.epoch(loader))
    last = before.epoch(loader)
    for _ in range(killed_after % LOADER_LENGTH):
        next(last)
    resumed, loader = LoopState(), ByPass()
    resumed.load(before.dump(), lambda: None)
    rest = [batch for _ in range(3) for batch in resumed.epoch(loader)]
    assert rest == undisturbed[killed_after:]


def test_a_loop_without_batches_resumes_at_once():
    before = LoopState()
    before.steps = 7
    kept = before.dump()
    drawn = random.random()
    restored, state = [], LoopState()
    state.load(kept, lambda: restored.append(True))
    assert (restored, state.steps, random.random()) == ([True], 7, drawn)


@pytest.mark.parametrize("name", ["place", "begun.python", "now.numpy"])
def test_a_place_that_cannot_be_read_changes_nothing(name):
    state = LoopState()
    kept = dict(state.dump())
    kept[name] = kept[name][:1]
    drawn = random.getstate()
    with pytest.raises(ValueError):
        state.load(kept, pytest.fail)
    assert random.getstate() == drawn


def test_a_loader_without_batches_is_a_mistake():
    with pytest.raises(DataError, match="the loader returned no batches"):
        list(LoopState().epoch([]))
