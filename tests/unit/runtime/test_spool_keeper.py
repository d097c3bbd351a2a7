"""The spool keeper: recall after a restart, and warnings about disk errors."""

import numpy as np
import pytest

from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.protocol.messages import ModelVersion, Push
from edgeasync.runtime.spool_keeper import SpoolKeeper

MODEL, VERSION = ModelKey("a" * 32, None, "delta"), ModelVersion("0" * 16, 3)
PUSH = Push(bytes(16), 7, VERSION, 8, 64, 0.5, 0.25, 0.125, "int8", 1, 12)
PLACE = {"place": np.array([5])}
KEPT = Spool(MODEL, PUSH, b"payload", np.zeros(3, np.float32), PLACE)
HELD = HeldModel(MODEL, VERSION, 1, np.ones(3, np.float32))


class Files:
    """Files of a device; each call raises the error of its name, if there is one."""

    def __init__(self, **errors):
        self.errors, self.spool, self.held = errors, KEPT, HELD

    def __getattr__(self, call):
        if call in self.errors and self.errors[call] is not None:
            raise self.errors[call]
        return getattr(self, f"_{call}")

    def _read(self):
        return self.spool

    def _write(self, spool):
        self.spool = spool

    def _put_aside(self):
        self.spool = None
        return "spool.damaged"

    def _read_model(self):
        return self.held

    def _write_model(self, held):
        self.held = held


class Trainer:
    """A trainer that resumes from where it is told to be, but from nowhere else than place 5."""

    spec = None

    def __init__(self):
        self.place = 0

    def begin(self, parameters):
        pass

    def step(self):
        pass

    def state(self):
        return {"place": np.array([self.place])}

    def restore(self, state):
        if state["place"] != 5:
            raise ValueError("it is of other data")
        self.place = int(state["place"][0])


def keeper_of(**errors):
    files, warnings = Files(**errors), []
    return SpoolKeeper(files, warnings.append), files, warnings


def test_what_was_kept_is_recalled_and_the_trainer_goes_on_once():
    keeper, _, warnings = keeper_of()
    assert keeper.recall() == (KEPT, HELD)
    trainer, another = Trainer(), Trainer()
    keeper.restore(trainer)
    keeper.restore(another)
    assert (trainer.place, another.place, warnings) == (5, 0, [])


def test_with_an_update_the_trainers_state_is_kept():
    keeper, files, _ = keeper_of()
    trainer = Trainer()
    trainer.place = 9
    keeper.restore(trainer)
    keeper.keep(KEPT)
    assert files.spool.trainer["place"] == 9
    keeper.restore(None)
    keeper.keep(KEPT)
    assert files.spool is KEPT


@pytest.mark.parametrize(
    ("errors", "said", "left"),
    [
        ({"read": StorageError("spool: no right")}, "spool: no right", KEPT),
        ({"read": ProtocolError("an unknown codec")}, "spool.damaged: an unknown codec; renamed the spool", None),
        ({"read": ProtocolError("damaged"), "put_aside": StorageError("in the way")}, "in the way", KEPT),
    ],
)
def test_what_cannot_be_read_costs_a_sentence_and_begins_from_scratch(errors, said, left):
    keeper, files, warnings = keeper_of(**errors)
    assert keeper.recall() == (None, HELD)
    assert files.spool is left
    assert [line.startswith(said) for line in warnings] == [True]
    trainer = Trainer()
    keeper.restore(trainer)
    assert trainer.place == 0


def test_a_trainer_on_other_data_begins_from_scratch():
    keeper, files, warnings = keeper_of()
    files.spool = Spool(MODEL, PUSH, b"", np.zeros(3, np.float32), {"place": np.array([4])})
    keeper.recall()
    keeper.restore(Trainer())
    assert warnings == [
        "the trainer's stored state cannot be restored, so it starts from scratch: it is of other data"
    ]


def test_a_disk_that_fails_is_told_of_once_until_it_works_again():
    keeper, files, warnings = keeper_of(write=StorageError("full"), write_model=StorageError("full"))
    for _ in range(2):
        keeper.keep(KEPT)
        keeper.keep_model(HELD)
    assert warnings == ["full; until then a power cut loses the unanswered update"]
    files.errors = {}
    keeper.keep(KEPT)
    files.errors = {"write": StorageError("full again")}
    keeper.keep(KEPT)
    assert len(warnings) == 2
