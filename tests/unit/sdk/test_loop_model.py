"""The model of a loop and its worker's vector: which is ahead of the other, and what an exchange does to both."""

import numpy as np
import pytest

from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.sdk.loop_model import LoopModel
from edgeasync.sdk.participants import AddingParticipant

SPEC = ParameterSpec((Parameter("w", (2,)), Parameter("mean", (1,), "statistic")))


class Held(AddingParticipant):
    """Arrays to which the session can add."""

    rounds = False

    def __init__(self):
        self.parameters = SPEC.parameters
        self.arrays = {parameter.name: np.zeros(parameter.shape, np.float32) for parameter in SPEC.parameters}

    def read(self, arrays):
        for name, array in arrays.items():
            array[...] = self.arrays[name]

    def write(self, arrays):
        for name, array in arrays.items():
            self.arrays[name][...] = array

    def stage(self, arrays):
        pass

    def add(self, arrays):
        self.arrays["w"] += arrays["w"]
        self.arrays["mean"][...] = arrays["mean"]


def make(vector, *, ahead_max=0, **options):
    model = LoopModel(SPEC, held := Held(), ahead_max=ahead_max, each_step=False)
    for name, value in options.items():
        setattr(model, name, value)
    assert (model.state, model.renew(vector, whole=False)) == ("absent", None)
    model.offer(adds=False)
    model.take()
    return model, held


def take_step(model, held):
    held.arrays["w"] += 1.0
    model.note_step()


def test_a_loop_in_lockstep_loses_what_it_has_trained_since_its_model_was_read():
    vector = np.full(3, 5.0, np.float32)
    model, held = make(vector)
    assert (model.state, held.arrays["w"].tolist()) == ("same", [5.0, 5.0])
    take_step(model, held)
    assert (model.state, vector[0]) == ("trained", 5.0), "it is read at the end of an assignment"
    model.fill(model.read())
    assert (model.state, vector[0]) == ("same", 6.0)
    take_step(model, held)
    vector[:] = 9.0
    assert model.renew(vector, whole=False) is None
    model.offer(adds=False)
    model.take()
    assert (model.state, held.arrays["w"].tolist(), held.arrays["mean"][0]) == ("same", [9.0, 9.0], 9.0)


def test_a_loop_that_runs_ahead_keeps_it_and_adds_what_others_have_changed():
    vector = np.zeros(3, np.float32)
    model, held = make(vector, ahead_max=4)
    assert model.runs_ahead
    take_step(model, held)
    model.fill(model.read())
    take_step(model, held)
    vector[:] = 11.0
    ahead = model.renew(vector, whole=False)
    assert ahead.prepare(vector)
    model.offer(adds=True)
    assert (model.state, model.is_new, model.is_trained) == ("apart", True, True)
    model.take()
    assert (model.state, held.arrays["w"].tolist(), held.arrays["mean"][0]) == ("trained", [12.0, 12.0], 11.0)
    model.fill(model.read())
    model.renew(vector, whole=True)
    model.offer(adds=False)
    assert (model.state, model.runs_ahead) == ("new", False), "a reset replaces all of it"


def test_a_model_that_was_not_taken_before_the_next_one_never_comes():
    vector, later = np.zeros(3, np.float32), np.ones(3, np.float32)
    model, held = make(vector)
    model.renew(vector, whole=False)
    model.offer(adds=False)
    model.renew(later, whole=False)
    assert model.state == "same"
    model.offer(adds=False)
    model.take()
    assert held.arrays["w"].tolist() == [1.0, 1.0]


def test_steps_count_by_a_factor_in_both():
    vector = np.zeros(3, np.float32)
    model, held = make(vector, factor=np.float32(0.5))
    take_step(model, held)
    assert (model.state, vector[0], held.arrays["w"][0]) == ("same", pytest.approx(0.5), pytest.approx(0.5))
