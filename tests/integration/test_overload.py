"""More than a hub can serve: file descriptors, and devices that ask and never listen."""

import resource
import shutil

import pytest

from tests.support.programs.gluttons import MODEL_BYTES, TRAINERS, Glutton, start_training
from tests.support.programs.processes import trained, until

pytestmark = pytest.mark.process

ASKED_MIN = 5000
"""By each device that never reads; half of that are models, the others statuses."""


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is missing")
def test_a_hub_takes_as_many_descriptors_as_it_may(commands):
    hub, _ = commands.hub(commands.settings(), under=("prlimit", "--nofile=256:4096"))
    assert resource.prlimit(hub.pid, resource.RLIMIT_NOFILE) == (4096, 4096)


def test_who_asks_and_never_reads_is_not_sent_a_single_model_and_training_goes_on(commands):
    _, address = start_training(commands)
    before = trained(address, 10)
    gluttons = [Glutton(address, f"glutton-{number}") for number in range(2)]
    try:

        def asked():
            for glutton in gluttons:
                glutton.ask(200)
            return all(glutton.asked >= ASKED_MIN for glutton in gluttons)

        until(asked, "a hub that reads all that it is asked")
        for name in TRAINERS:
            after = trained(address, 5, name)
        assert after["version"] > before["version"]
        for glutton in gluttons:
            assert 0 < glutton.read_all() < MODEL_BYTES, "announcements, of models that wait for credit"
    finally:
        for glutton in gluttons:
            glutton.close()
