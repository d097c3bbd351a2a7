"""A torch module with Adam and a loader that shuffles, killed at random: the same parameters, to the bit."""

import numpy as np
import pytest

pytest.importorskip("torch")

from edgeasync import Run
from tests.support.killed_training import EXAMPLES, kill_at_random, run_once
from tests.support.size import repetitions

EPOCHS = 5


@pytest.mark.parametrize("kind", ["torch", "torch with a generator", "torch on data"])
def test_a_module_ends_with_the_same_parameters_to_the_bit(kind, tmp_path):
    run_once(kind, tmp_path / "undisturbed", EPOCHS)
    kill_at_random(kind, tmp_path / "killed", EPOCHS, kills=repetitions("kills of a trainer"))
    with np.load(tmp_path / "undisturbed/result.npz") as wanted, np.load(tmp_path / "killed/result.npz") as found:
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    assert Run.open(tmp_path / "killed").history["examples"].sum() == EPOCHS * EXAMPLES
