"""More than a hub can serve: no file descriptors left, and devices that ask and never listen."""

import resource
import shutil
import sys

import psutil
import pytest

from tests.support.programs.gluttons import MODEL_BYTES, TRAINERS, Glutton, start_training
from tests.support.programs.kills import Fleet
from tests.support.programs.processes import trained, until

pytestmark = pytest.mark.process

ASKED_MIN = 5000
"""By each device that never reads; half of that are models, the others statuses."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
def test_without_file_descriptors_newcomers_wait_and_the_others_go_on(commands):
    fleet = Fleet(commands, processes=8, start=False, checkpoint='[checkpoint]\nevery = "20 updates"\n')
    fleet.start_hub()
    early, late = range(3), range(3, 8)
    for number in early:
        fleet.start_agents(number)
    stories = [fleet.devices_of(number)[0] for number in early]
    fleet.wait_for_answers(3, since_s=0.0, stories=stories)
    hub = psutil.Process(fleet.hub.pid)
    open_files = []
    for _ in range(5):
        fleet.wait_for_answers(1, stories=stories)
        open_files.append(hub.num_fds())
    files_max = min(open_files) + 2  # at times a checkpoint is open, too
    usual, hard = resource.prlimit(fleet.hub.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(fleet.hub.pid, resource.RLIMIT_NOFILE, (files_max, hard))
    for number in late:
        fleet.start_agents(number)
    waiting = [fleet.devices_of(number)[0] for number in late]

    def joined():
        fleet.stories.read()
        return [story for story in waiting if story.joined_s]

    for number in late:
        fleet.agents[number].wait_for("started")
    until(lambda: hub.num_fds() == files_max, "a hub without a descriptor to spare")
    for _ in range(3):
        fleet.wait_for_answers(20, stories=stories)
    assert len(joined()) <= 2
    assert not any(story.told_of("disconnected") for story in stories)

    # When the others end, their places are taken.
    for number in early:
        fleet.agents[number].kill()
    until(lambda: len(joined()) >= 3, "the next devices")
    resource.prlimit(fleet.hub.pid, resource.RLIMIT_NOFILE, (usual, hard))
    fleet.wait_for_answers(3, stories=waiting)
    fleet.stop()


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
