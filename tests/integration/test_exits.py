"""Programs that end although services run keep their exit code, and leave the last version on disk."""

import pytest

from tests.support.programs.exits import wrong_ends
from tests.support.size import repetitions

pytestmark = pytest.mark.process


@pytest.mark.parametrize("kind", ["numpy", "ONNX"])
def test_every_program_ends_as_its_own_end_says(tmp_path, kind):
    assert wrong_ends(tmp_path, kind, repetitions("ends of a program")) == []
