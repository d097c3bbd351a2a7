"""A torch module with Adam and a loader that shuffles, killed at random: the same parameters, to the bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgeasync import Run
from edgeasync.sdk.loop_state import LoopState
from tests.support.programs.killed_training import EXAMPLES, kill_at_random, main
from tests.support.size import repetitions

KILLS = repetitions("kills of a trainer")
EPOCHS = 5 + 2 * KILLS
"""Long enough for all kills."""


KINDS = ["torch with a generator", "torch on data", "torch"]


@pytest.mark.parametrize("kind", KINDS[: 1 + KILLS])
def test_a_module_ends_with_the_same_parameters_to_the_bit(kind, tmp_path):
    main(kind, tmp_path / "undisturbed", EPOCHS)
    kill_at_random(kind, tmp_path / "killed", EPOCHS, kills=KILLS)
    with np.load(tmp_path / "undisturbed/result.npz") as wanted, np.load(tmp_path / "killed/result.npz") as found:
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    assert Run.open(tmp_path / "killed").history["examples"].sum() == EPOCHS * EXAMPLES


@pytest.mark.parametrize("killed_after", [1, 3, 5, 8, 9])
def test_a_loader_with_random_numbers_of_its_own_resumes_in_the_same_order(killed_after):
    def begin():
        generator = torch.Generator().manual_seed(6)
        loader = torch.utils.data.DataLoader(range(9), batch_size=2, shuffle=True, generator=generator)
        return loader, LoopState(), []

    def run(loader, state, seen, stop_after=None):
        for _ in range(3):
            for batch in state.epoch(loader):
                state.steps += 1
                seen.append(batch.tolist())
                if state.steps == stop_after:
                    return state.dump()
        return None

    undisturbed, killed, resumed = begin(), begin(), begin()
    run(*undisturbed)
    kept = run(*killed, stop_after=killed_after)
    resumed[1].load(kept, lambda: None)
    run(*resumed)
    assert killed[2] + resumed[2] == undisturbed[2]
