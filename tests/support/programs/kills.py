"""A hub and its agents, killed again and again under load: every acknowledged update counts once, for ever.

`python -m benchmarks.comeback` is the long form, which also holds how soon they are back against bounds.
"""

import signal
import time
from random import Random

import numpy as np

from edgeasync.durable.run_events import ReplayedUpdate
from edgeasync.durable.run_folder import MODEL_FILE, RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.graphs.model_file import load_model
from edgeasync.net.status import fetch_status
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.programs.processes import free_address, until
from tests.support.programs.records import PROGRAM, Replayed, Stories, copy_of

STEP_S = 0.01

EXACT = """
[policy]
aggregate = { kind = "immediate" }
staleness = { kind = "constant" }
optimizer = [{ kind = "sgd", learning_rate = 1.0 }]
frequency = { kind = "fixed", local_steps = 1 }
monitor = { detectors = [], clip = 0 }
[codec]
push = "identity"
model = "identity"
delta = "off"
"""
"""Every update is a version of its own, and the model the sum of them all, to the bit."""

SELDOM = '[checkpoint]\nevery = "1 hour"\nkeep = 10000\n'
"""One at every start and at the end: copies made in between have the whole journal together."""

OFTEN = '[checkpoint]\nevery = "40 updates"\nkeep = 2\n'
"""So that kills come in the middle of one."""

LIVELINESS = "[liveness]\nheartbeat_s = 0.5\nlease_s = 3.0\n"


class Fleet:
    """A hub and processes of recording agents around one run."""

    def __init__(
        self,
        commands,
        *,
        processes=8,
        devices=1,
        policy=EXACT,
        checkpoint=SELDOM,
        step_s=STEP_S,
        inputs=0,
    ):
        self.commands = commands
        self.count = processes * devices
        self.address = free_address()
        inputs = max(inputs, self.count)  # three places for each device, and three to spare
        self.spec = SoftmaxModel(inputs=inputs, classes=3).spec
        table = f'kind = "softmax"\ninputs = {inputs}\nclasses = 3'
        self.settings = commands.settings(
            bind=self.address, model=table, more=LIVELINESS + checkpoint + policy
        )  # fmt: skip
        self.folder = commands.folder / "run-hub"
        self.stories = Stories(commands.folder, self.count)
        self.hub = None
        self.agents = {}
        self.versions = set()
        self._exact = policy == EXACT
        self._whole = checkpoint == SELDOM
        self._devices = devices
        self._step_s = step_s
        for number in range(processes):
            self.start_agents(number)

    def start_hub(self, **options):
        """Start the hub; it need not listen yet."""
        self.hub = self.commands.start("hub", self.settings, "--json", **options)
        return self.hub

    def start_agents(self, number):
        """Start a process of agents."""
        first = number * self._devices
        self.agents[number] = self.commands.start(
            self.address, self.commands.folder, first, first + self._devices, self._step_s, program=(PROGRAM,)
        )

    def devices_of(self, number):
        """Return the stories of a process of agents."""
        return self.stories.all[number * self._devices : (number + 1) * self._devices]

    def wait_for_answers(self, count=1, *, since_s=None, stories=None):
        """Wait until every device has been told `count` outcomes since then; return when each had them."""
        since_s = time.monotonic() if since_s is None else since_s
        wanted = self.stories.all if stories is None else stories

        def told():
            self.stories.read()
            times = [[at_s for at_s in reversed(story.told_s[-500:]) if at_s > since_s] for story in wanted]
            return [sorted(at)[count - 1] for at in times] if all(len(at) >= count for at in times) else None

        return until(told, f"{count} answers for each of {len(wanted)} devices")

    def copy(self):
        """Copy the run's folder while there is no hub, with all that earlier copies had if that is a whole."""
        return copy_of(self.folder, self.commands.folder / "copy", beside=self._whole)

    def check_copy(self):
        """Compare the last copy of the run's folder with what the devices were told."""
        self.stories.read()
        replayed = Replayed(self.commands.folder / "copy")
        self._check_history()
        if self._exact:
            self.stories.check_model(replayed.vector)
        self.versions |= replayed.versions
        return replayed

    def _check_history(self, *, ended=False):
        """Check that the last copy's history has one row for each update that the journal has, and no other.

        Of a hub that was killed the newest rows are only in the journal: the next start writes them.
        """
        copy = self.commands.folder / "copy"
        history = RunFolder(copy).history()
        rows = [(row.entry, row.number, row.device) for row in history.updates]
        assert rows == sorted(set(rows)), "a row comes twice"
        assert not history.trouble
        if not self._whole:
            return
        journaled = []
        replay = RunReplay(copy)
        replay.tell(lambda line: journaled.append(line) or True)
        replay.close()
        decided = [
            (line.entry, line.seq, line.device)
            for line in journaled
            if isinstance(line, ReplayedUpdate) and line.outcome in ("applied", "buffered", "rejected")
        ]
        first = decided[0][0] if decided else 0
        known = [row for row in rows if row[0] >= first]
        assert known == decided[: len(known)]
        assert len(known) == len(decided) or not ended

    def stop(self):
        """Stop the hub; check the model it leaves, and the whole history. Return models checked and entries."""
        self.hub.signal(signal.SIGTERM)
        code = self.hub.wait()
        assert code == 0, str(self.hub)
        self.copy()
        replayed = self.check_copy()
        self._check_history(ended=True)
        vector, _ = load_model(self.folder / MODEL_FILE, self.spec)
        np.testing.assert_array_equal(replayed.vector, vector)
        if not self._whole:
            return self.stories.check_versions(self.versions, every=False), replayed.entries
        replayed = Replayed(self.commands.folder / "copy", oldest=True)
        np.testing.assert_array_equal(replayed.vector, vector)
        return self.stories.check_versions(replayed.versions), replayed.entries


def look(address, for_s):
    """Ask for the status 50 times a second; return the most updates and the newest version, and how often."""
    count, shown, until_s = 0, (0, 0), time.monotonic() + for_s
    while time.monotonic() < until_s:
        time.sleep(0.02)
        status = fetch_status(address)
        count, shown = count + 1, max(shown, (status["updates_applied"], status["version"]))
    return *shown, count


def kill_hubs(commands, kills, *, agent_kills=True, seed=1, **options):
    """Kill the hub and an agent at random moments, again and again; return what was seen."""
    random = Random(seed)
    fleet = Fleet(commands, **options)
    fleet.start_hub()
    fleet.wait_for_answers(3, since_s=0.0)
    first_s, all_s, rejoins_s, listens_s, statuses = [], [], [], [], 0
    for _ in range(kills):
        updates_shown, version_shown, count = look(fleet.address, random.uniform(0.1, 1.0))
        statuses += count
        fleet.hub.kill()
        victim = random.choice(list(fleet.agents)) if agent_kills else None
        if victim is not None:
            fleet.agents[victim].kill()
        fleet.copy()
        begun_s, clock_s = time.monotonic(), time.time()
        fleet.start_hub()
        if victim is not None:
            fleet.start_agents(victim)
        replayed = fleet.check_copy()
        assert replayed.updates_applied >= updates_shown, "updates that a status has shown are lost"
        assert replayed.version >= version_shown, "a version that a status has shown is lost"
        others = [s for number in fleet.agents if number != victim for s in fleet.devices_of(number)]
        answered_s = fleet.wait_for_answers(since_s=begun_s, stories=others)
        listens_s.append(fleet.hub.wait_for("listening")["time"] - clock_s)
        first_s.append(min(answered_s) - begun_s)
        all_s.append(max(answered_s) - begun_s)
        if victim is not None:
            back_s = fleet.wait_for_answers(since_s=begun_s, stories=fleet.devices_of(victim))
            rejoins_s.append(max(back_s) - begun_s)
    fleet.wait_for_answers(3)
    hashes, entries = fleet.stop()
    return {
        "kills": kills,
        "statuses": statuses,
        "updates_acknowledged": fleet.stories.acknowledged,
        "updates_unanswered": sum(len(story.open) for story in fleet.stories.all),
        "hashes_checked": hashes,
        "entries_replayed": entries,
        "listens_s": quantiles(listens_s),
        "first_answer_s": quantiles(first_s),
        "all_answered_s": quantiles(all_s),
        "all_answered_after_listening_s": quantiles(np.subtract(all_s, listens_s)),
        "killed_agents_answered_s_max": round(max(rejoins_s, default=0.0), 3),
    }


def quantiles(seconds):
    """Return the median, the 99th percentile and the longest."""
    return [round(float(value), 3) for value in np.quantile(seconds, (0.5, 0.99, 1.0))]
