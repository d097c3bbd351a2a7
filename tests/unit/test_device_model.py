import numpy as np
import pytest

from edgeasync.core.device_model import DeviceModel
from edgeasync.errors import ProtocolError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol.codecs import CODECS

# More than two chunks, and not a whole number of them.
LENGTH = 150_000
SPEC = ParameterSpec((Parameter("w", (LENGTH,)),))


def vector(seed):
    # Values float16 holds exactly, so that one expectation serves every codec.
    return np.random.Generator(np.random.PCG64(seed)).integers(-64, 64, LENGTH).astype(np.float32)


def decode(payload, codec):
    return codec.read(payload, 0, LENGTH, np.empty(LENGTH, np.float32))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_rounds_of_adopt_train_and_encode(codec):
    device = DeviceModel(SPEC)
    parameters = device.parameters
    for seed in range(3):
        hub, learnt = vector(seed), vector(seed + 10)
        device.adopt(codec.encode(hub), codec)
        assert np.array_equal(device.parameters, hub)
        device.parameters += learnt
        payload = device.encode_update(codec)
        assert np.array_equal(decode(payload, codec), learnt)
        assert np.array_equal(device.parameters, hub + learnt)
    assert device.parameters is parameters


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("kind", ["delta", "model"])
def test_statistics_are_sent_as_they_are(codec, kind):
    trained = LENGTH - 9
    spec = ParameterSpec((Parameter("w", (trained,)), Parameter("running_mean", (9,), "statistic")))
    device = DeviceModel(spec)
    for seed in range(3):
        hub, learnt = vector(seed), vector(seed + 10)
        device.adopt(codec.encode(hub), codec)
        device.parameters += learnt
        sent = decode(device.encode_update(codec, kind), codec)
        assert np.array_equal(sent[trained:], (hub + learnt)[trained:])
        assert np.array_equal(sent[:trained], (learnt if kind == "delta" else hub + learnt)[:trained])
        assert np.array_equal(device.parameters, hub + learnt)


def test_a_released_payload_outlives_the_next_adopt():
    device, codec = DeviceModel(SPEC), CODECS["identity"]
    device.adopt(codec.encode(vector(0)), codec)
    device.parameters += 1.0
    payload = device.encode_update(codec)
    device.release()
    device.adopt(codec.encode(vector(1)), codec)
    assert (decode(payload, codec) == 1.0).all()
    device.parameters += 2.0
    assert (decode(device.encode_update(codec), codec) == 2.0).all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, LENGTH - 1])
def test_a_model_that_is_not_finite_is_not_taken_over(codec, bad, position):
    device = DeviceModel(SPEC)
    device.adopt(codec.encode(vector(0)), codec)
    device.parameters += 1.0
    poisoned = vector(1)
    poisoned[position] = bad
    with pytest.raises(ProtocolError, match="not finite"):
        device.adopt(codec.encode(poisoned), codec)
    assert np.array_equal(device.parameters, vector(0) + 1.0)
    device.adopt(codec.encode(vector(2)), codec)
    assert np.array_equal(device.parameters, vector(2))


def test_diverged_parameters_are_encoded_without_a_warning():
    device, codec = DeviceModel(SPEC), CODECS["identity"]
    device.parameters[:] = np.inf
    device.adopt(codec.encode(vector(0)), codec)
    device.parameters[0] = np.inf
    delta = decode(device.encode_update(codec), codec)
    assert np.isinf(delta[0])
    assert not delta[1:].any()
