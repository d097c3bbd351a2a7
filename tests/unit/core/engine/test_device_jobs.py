"""Installing an assignment: what the device then holds, and what it says of it."""

import numpy as np
import pytest

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.device.events import InstallFailed, ModelInstalled
from edgeasync.core.engine.device_jobs import install_model
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorSource, make_codec
from edgeasync.protocol.messages import Assignment, Deltas, ModelVersion, Welcome

SPEC = ParameterSpec((Parameter("weights", (4,)),))
WELCOME = Welcome(bytes(16), SPEC, {}, 0, "identity", 1.0, 3.0, 1 << 16, residual_decay=0.5)
LINEAGE = "0" * 16


def coded(*values, codec="identity"):
    return bytes(make_codec(codec, SPEC).encode(VectorSource(np.array(values, np.float32))))


def assignment(number, payload, deltas=None, lineage=LINEAGE):
    return Assignment(ModelVersion(lineage, number), 8, "identity", 0, len(payload), deltas=deltas)


def leading(held, *steps, to):
    """An assignment with differences, and its payload."""
    checksum = wire.checksum(np.array(to, np.float32).tobytes())
    payload = b"".join(steps)
    return assignment(
        held + len(steps), payload, Deltas(held, tuple(map(len, steps)), checksum, "identity")
    ), payload


@pytest.fixture
def model():
    model = DeviceModel(SPEC)
    payload = coded(1, 2, 3, 4)
    assert isinstance(install_model(model, assignment(5, payload), payload, WELCOME), ModelInstalled)
    return model


def test_differences_lead_on(model):
    message, payload = leading(5, coded(1, 1, 1, 1), coded(2, 0, 0, 0), to=[4, 3, 4, 5])
    assert install_model(model, message, payload, WELCOME) == ModelInstalled(message, message.deltas.checksum)
    assert model.parameters.tolist() == [4, 3, 4, 5]
    assert model.version == ModelVersion(LINEAGE, 7)


def test_a_version_that_is_here_already_is_not_made_twice(model):
    """The hub led on from an older version: it could not know that the newer one had come in."""
    message, payload = leading(4, coded(9, 9, 9, 9), to=[1, 2, 3, 4])
    model.parameters += 1.0
    assert install_model(model, message, payload, WELCOME) == ModelInstalled(message, message.deltas.checksum)
    assert model.parameters.tolist() == [1, 2, 3, 4]


def test_differences_lead_on_into_the_branch_of_a_hub_that_was_started_again(model):
    message, payload = leading(5, coded(1, 1, 1, 1), to=[2, 3, 4, 5])
    message = assignment(message.version.number, payload, message.deltas, "f" * 16)
    assert install_model(model, message, payload, WELCOME) == ModelInstalled(message, message.deltas.checksum)
    assert model.version == message.version


@pytest.mark.parametrize("held", [3, 6])
def test_what_leads_on_from_another_version_leaves_the_one_held_alone(model, held):
    message, payload = leading(held, coded(9, 9, 9, 9), to=[0, 0, 0, 0])
    failed = install_model(model, message, payload, WELCOME)
    assert isinstance(failed, InstallFailed)
    assert not failed.spoilt
    assert model.version == ModelVersion(LINEAGE, 5)
    message, payload = leading(5, coded(1, 1, 1, 1), to=[2, 3, 4, 5])
    assert install_model(model, message, payload, WELCOME) == ModelInstalled(message, message.deltas.checksum)


@pytest.mark.parametrize(
    ("step", "to"),
    [(coded(1, 1, 1, 1), [0, 0, 0, 0]), (coded(np.inf, 0, 0, 0), [np.inf, 2, 3, 4])],
    ids=["another checksum", "not finite"],
)
def test_differences_that_lead_astray_leave_nothing_to_lead_on_from(model, step, to):
    message, payload = leading(5, step, to=to)
    failed = install_model(model, message, payload, WELCOME)
    assert failed.spoilt
    assert model.version is None
    message, payload = leading(5, coded(1, 1, 1, 1), to=[2, 3, 4, 5])
    assert isinstance(install_model(model, message, payload, WELCOME), InstallFailed)
    payload = coded(1, 2, 3, 4)
    assert isinstance(install_model(model, assignment(8, payload), payload, WELCOME), ModelInstalled)


def test_a_residual_decays_with_every_version_that_passed(model):
    codec = make_codec("top_k(0.25)", SPEC)
    model.parameters += np.array([8, 4, 2, 0], np.float32)
    model.encode_update(codec, feedback=True)
    payload = coded(0, 0, 0, 0)
    install_model(model, assignment(7, payload), payload, WELCOME)
    sent = codec.open(model.encode_update(codec, feedback=True)).read(0, 4, np.empty(4, np.float32))
    assert sent.tolist() == [0, 1, 0, 0]
