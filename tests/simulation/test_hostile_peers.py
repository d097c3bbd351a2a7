"""One member of the file of peers is hostile: the others keep finite models, their steps and their pace."""

import pytest

from tests.support.simulation.hostile_mutants import HOSTILE_MUTANTS
from tests.support.simulation.hostile_peers import run_hostile
from tests.support.size import repetitions


@pytest.mark.parametrize("seed", range(repetitions("seeds of hostile peers")))
def test_a_hostile_member_leaves_the_others_finite_models_their_steps_and_their_pace(seed):
    result = run_hostile(seed)
    assert not result.failure, f"seed {seed}\n{result.plan.write()}{result.where}"


@pytest.mark.parametrize("name", HOSTILE_MUTANTS.changes)
def test_a_bug_planted_in_the_protection_from_a_hostile_member_is_noticed(name):
    assert HOSTILE_MUTANTS.is_noticed(name, run_hostile)


def test_the_known_seed_of_every_bug_in_the_protection_is_written_down():
    assert HOSTILE_MUTANTS.seeds().keys() == HOSTILE_MUTANTS.changes.keys()
    assert max(HOSTILE_MUTANTS.seeds().values()) < HOSTILE_MUTANTS.seeds_max
