"""Compares the records of recording agents with what is recovered from a run's folder."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import xxhash

from edgeasync.durable.checkpoint import CheckpointStore
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import JournalReading
from edgeasync.durable.recovery import Rules, open_checkpoint
from tests.support.programs.recording_agent import PLACES, shares_of

PROGRAM = Path(__file__).with_name("recording_agent.py")

OPEN_MAX = 16
"""How many unanswered updates of one device are tried at most."""


class Story:
    """The record of one device, which is read as it grows."""

    def __init__(self, path):
        self.name = path.stem
        self.number = int(path.stem.rpartition("-")[2])
        self.applied, self.rejected, self.unanswered = [], [], []
        self.given, self.told_s, self.joined_s, self.started_s, self.events = [], [], [], [], []
        self._path = path
        self._offset = 0
        self._made = None

    def read(self):
        """Read the lines written since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, line):
        at_s = line["at_s"]
        if "digest" in line:
            self.given.append((line["lineage"], line["number"], line["digest"], line["off_chain"]))
        elif "made" in line:
            self._drop()
            self._made = line["made"]
        elif "told" in line:
            self.told_s.append(at_s)
            counted = line["told"].removeprefix("duplicate of: ").startswith(("applied", "buffered"))
            (self.applied if counted else self.rejected).append(self._made)
            self._made = None
        elif "start" in line:
            self._drop()
            self.started_s.append(at_s)
        else:
            self.events.append((line["event"], line["detail"]))
            if line["event"] == "joined":
                self.joined_s.append(at_s)

    def _drop(self):
        if self._made is not None:
            self.unanswered.append(self._made)
            self._made = None

    def told_of(self, event):
        """Return the details of all events of that name."""
        return [detail for name, detail in self.events if name == event]

    @property
    def open(self):
        """The updates without an answer: each may count, once."""
        return self.unanswered + ([] if self._made is None else [self._made])


class Stories:
    """The stories of devices `0` to `count` in a folder."""

    def __init__(self, folder, count):
        self.all = [Story(Path(folder) / f"device-{number}.jsonl") for number in range(count)]

    def read(self):
        """Read the lines written since the last call; return the stories."""
        for story in self.all:
            story.read()
        return self.all

    @property
    def acknowledged(self):
        """How many updates were acknowledged."""
        return sum(len(story.applied) for story in self.all)

    def check_model(self, vector):
        """Raise `AssertionError` unless the model is the sum of all acknowledged updates and some unanswered."""
        values = np.asarray(vector, np.float64).reshape(-1)
        for story in self.all:
            assert not story.rejected, f"{story.name}: {len(story.rejected)} updates were rejected"
            assert not story.told_of("warning"), f"{story.name}: {story.told_of('warning')}"
            found = values[PLACES * story.number : PLACES * story.number + PLACES]
            counted = _sum(story.applied)
            left = tuple((found - counted).astype(int))
            assert (found == np.round(found)).all()
            assert len(story.open) <= min(OPEN_MAX, max(1, len(story.started_s))), (
                f"{story.name}: {len(story.open)} updates without an answer in {len(story.started_s)} starts"
            )
            assert left in _sums(story.open), (
                f"{story.name}: of {len(story.applied)} acknowledged updates and {story.open} without an answer, "
                f"the sums are {counted.tolist()}, and the model has {found.tolist()}: lost, or counted twice"
            )

    def check_versions(self, known, *, every=True):
        """Raise `AssertionError` unless every model that was given is as it is `known`; return how many were.

        A device that was sent a coarse model holds another, of a version that is known.
        """
        checked = 0
        names = {(lineage, number) for lineage, number, _ in known}
        for lineage, number, digest, off_chain in itertools.chain.from_iterable(story.given for story in self.all):
            if every or (lineage, number) in names:
                assert (lineage, number) in names, f"version {number} of {lineage} was given, and is not recovered"
                same = (lineage, number, digest) in known
                assert same or off_chain, f"version {number} of {lineage} is recovered as another"
                checked += 1
        return checked


def _sum(updates):
    return np.sum([shares_of(k) for k in updates], axis=0) if updates else np.zeros(PLACES)


def _sums(updates):
    """Return the sums of all selections."""
    sums = {(0,) * PLACES}
    for k in updates:
        sums |= {tuple(a + b for a, b in zip(known, shares_of(k), strict=True)) for known in sums}
    return sums


class Replayed:
    """A run's folder, or a copy of it, recovered from a checkpoint of it on.

    `versions` has the lineage, number and digest of every version on the way, as it was made and as it was
    published: a device gets the one or the other.
    """

    def __init__(self, folder, *, oldest=False):
        disk = FolderDisk(Path(folder))
        store = CheckpointStore(disk, keep=10_000)
        known, unreadable = store.manifests()
        assert not unreadable
        name, manifest = known[-1 if oldest else 0]
        fingerprint = manifest.fingerprint
        chosen = store.choose(name, fingerprint)
        found = open_checkpoint(chosen, Rules.make_core, lambda: b"\0" * 16)
        self.versions = set()
        self._note(found)

        def on_entry(*_):
            self._note(found)
            return True

        found.replay(JournalReading(disk, manifest.journal), on_entry)
        found.core.check()
        self.entries = found.entries
        self.vector = found.model.current.vector
        self.number = found.model.current.number
        self.version = found.core.version
        self.updates_applied = found.core.updates_applied

    def _note(self, found):
        for snapshot in (found.publisher.published, found.model.current):
            digest = xxhash.xxh3_64_hexdigest(snapshot.vector.data)
            self.versions.add((found.core.lineage, snapshot.number, digest))


def copy_of(folder, scratch, *, beside=False):
    """Copy a run's folder that nobody writes to, over an earlier copy or beside what that has; return it."""
    if not beside:
        shutil.rmtree(scratch, ignore_errors=True)
    return shutil.copytree(folder, scratch, dirs_exist_ok=beside)
