"""Many devices that come and go, and thousands that come at once: how soon each is back, and nothing lost.

`python -m benchmarks.comeback` is the long form, which also holds how soon they are back against bounds.
"""

import signal
import time
from pathlib import Path
from random import Random

import numpy as np
import psutil

from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.graphs.model_file import load_model
from edgeasync.net.status import fetch_status
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.programs.kills import EXACT, Fleet, quantiles
from tests.support.programs.processes import PATIENCE_S, free_address
from tests.support.programs.recording_agent import GROUPS, PLACES

PROGRAM = Path(__file__).with_name("crowd_agents.py")


def churn(commands, *, processes, devices, turns, away=0.1, step_s=0.5, seed=1):
    """Kill a share `away` of the processes, wait until their devices are lost, restart; return what was seen."""
    random = Random(seed)
    fleet = Fleet(commands, processes=processes, devices=devices, step_s=step_s)
    fleet.start_hub()
    fleet.wait_for_answers(since_s=0.0)
    missed_s, back_s, own_s = [], [], []
    for _ in range(turns):
        victims = random.sample(list(fleet.agents), max(1, round(away * processes)))
        since, clock_s = len(fleet.hub.events), time.time()
        for number in victims:
            fleet.agents[number].kill()
        gone = [story for number in victims for story in fleet.devices_of(number)]
        missed_s += [fleet.hub.wait_for("lost", since=since, device=s.name)["time"] - clock_s for s in gone]
        begun_s = time.monotonic()
        for number in victims:
            fleet.start_agents(number)
        answered_s = fleet.wait_for_answers(since_s=begun_s, stories=gone)
        back_s += [at_s - begun_s for at_s in answered_s]
        own_s += [at_s - story.started_s[-1] for at_s, story in zip(answered_s, gone, strict=True)]
    fleet.wait_for_answers()
    hashes, _ = fleet.stop()
    return {
        "devices": fleet.count,
        "times_a_device_was_killed": len(missed_s),
        "updates_acknowledged": fleet.stories.acknowledged,
        "hashes_checked": hashes,
        "missed_s": quantiles(missed_s),
        "answered_again_s": quantiles(back_s),
        "answered_again_after_its_start_s": quantiles(own_s),
    }


def joins(commands, *, count, period_s=None, restarts=1):
    """Kill the hub of `count` devices that hold the model, and restart it; return how soon all are back."""
    model = SoftmaxModel(inputs=GROUPS, classes=PLACES)
    address = free_address()
    settings = commands.settings(
        bind=address,
        model=f'kind = "softmax"\ninputs = {GROUPS}\nclasses = {PLACES}',
        more=f"[liveness]\nheartbeat_s = 5.0\nlease_s = 15.0\n{EXACT}",
    )
    hub, _ = commands.hub(settings)
    period_s = count / 1000 if period_s is None else period_s
    crowd = commands.start(address, count, period_s, program=(PROGRAM,))
    crowd.wait_for("all answered")
    seen = []
    for restart in range(restarts):
        hub.kill()
        crowd.tell("disconnected")
        begun_s, clock_s = time.monotonic(), time.time()
        hub = commands.start("hub", settings, "--json")
        back = crowd.wait_for("all joined", count=2 + restart)["joined_s"]
        listens_s = hub.wait_for("listening")["time"] - clock_s
        seen.append([round(listens_s, 2), *[round(at_s - begun_s, 2) for at_s in back]])
        hellos = fetch_status(address, PATIENCE_S)["messages_accepted"]["hello"]
        hub_cpu_s = sum(psutil.Process(hub.pid).cpu_times()[:2])
        crowd.wait_for("all answered", count=2 + restart)
    crowd.tell("finish")
    said = crowd.wait_for("finished")
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0, str(hub)
    vector, version = load_model(commands.folder / "run-hub" / MODEL_FILE, model.spec)
    assert not said["rejected"], said["rejected"]
    assert version == said["answered"], (version, said["answered"])
    np.testing.assert_array_equal(vector[: GROUPS * PLACES].reshape(GROUPS, PLACES), said["sums"])
    return {
        "devices": count,
        "hub_cpu_s": round(hub_cpu_s, 2),
        "hellos_a_device": round(hellos / count, 2),
        "updates_answered": said["answered"],
        "listens_then_joined_first_p50_p99_last_s": seen,
    }
