"""The diagrams of docs/concepts/states.md are those of the code."""

import pytest

from docs.draw import PICTURES, STATES, moves
from edgeasync.errors import TransitionError
from edgeasync.states import check_move

DOCUMENT = PICTURES.parent / "concepts/states.md"
TABLES = {name: table for name, (_, table, _) in STATES.items()}


@pytest.mark.parametrize("name", STATES)
def test_a_diagram_has_every_state_and_every_move_of_its_table(name):
    _, table, layout = STATES[name]
    assert set(layout.places) == set(table)
    drawn = {
        (start, end) for group, end in moves(table, layout.groups) for start in layout.groups.get(group, (group,))
    }
    assert drawn == {(start, end) for start, following in table.items() for end in following}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_described_and_can_be_reached(name):
    table = TABLES[name]
    section = DOCUMENT.read_text().partition(f"<!-- {name} -->")[2].partition("\n## ")[0]
    reached, new = set(), {next(iter(table))}
    while new:
        reached |= new
        new = {after for state in new for after in table[state]} - reached
    assert reached == set(table)
    assert f"pictures/states-{name}.svg" in section
    for state in table:
        assert f"| `{state}` |" in section


def test_a_move_that_the_table_does_not_have_is_an_error():
    check_move(TABLES["member"], "left", "joining", "a member")
    check_move(TABLES["member"], "lost", "lost", "a member")
    with pytest.raises(TransitionError, match="a member cannot change from 'left' to 'paused'"):
        check_move(TABLES["member"], "left", "paused", "a member")
