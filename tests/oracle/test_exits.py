"""Programs that end although services train modules of torch: as `integration/test_exits.py`."""

import pytest

pytest.importorskip("torch")

from tests.support.programs.exits import wrong_ends
from tests.support.size import repetitions

pytestmark = pytest.mark.process


def test_every_program_ends_as_its_own_end_says(tmp_path):
    assert wrong_ends(tmp_path, "torch", repetitions("ends of a program")) == []
