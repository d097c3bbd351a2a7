"""The diagrams of docs/states.md are those of the code."""

import pytest

from edgeasync.errors import TransitionError
from edgeasync.states import check_move
from tests.support.state_diagrams import DOCUMENT, TABLES, drawn


def test_the_diagrams_are_up_to_date():
    assert drawn(DOCUMENT.read_text()) == DOCUMENT.read_text(), "run python -m tests.support.state_diagrams"


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_described_and_can_be_reached(name):
    table = TABLES[name]
    section = DOCUMENT.read_text().partition(f"<!-- {name} -->")[2].partition("\n## ")[0]
    reached, new = set(), {next(iter(table))}
    while new:
        reached |= new
        new = {after for state in new for after in table[state]} - reached
    assert reached == set(table)
    for state in table:
        assert f"| `{state}` |" in section


def test_a_move_that_the_table_does_not_have_is_an_error():
    check_move(TABLES["member"], "left", "joining", "a member")
    check_move(TABLES["member"], "lost", "lost", "a member")
    with pytest.raises(TransitionError, match="a member cannot go from 'left' to 'paused'"):
        check_move(TABLES["member"], "left", "paused", "a member")
