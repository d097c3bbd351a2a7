import numpy as np
import pytest

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.errors import ProtocolError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorSource, make_codec

# More than two chunks, and not a whole number of them.
LENGTH = 150_000
STATISTICS = 9
SPEC = ParameterSpec((Parameter("w", (LENGTH,)),))
WITH_STATISTICS = ParameterSpec(
    (Parameter("w", (LENGTH - STATISTICS,)), Parameter("running_mean", (STATISTICS,), "statistic"))
)
whole_numbers = pytest.mark.parametrize("codec", [make_codec(name, SPEC) for name in ("identity", "float16")])
lossy = pytest.mark.parametrize("name", ["int8", "int4", "top_k(0.1)", "top_k(0.01)+int8", "sign"])


def vector(seed):
    # Values float16 holds exactly, so that one expectation serves both codecs.
    return np.random.Generator(np.random.PCG64(seed)).integers(-64, 64, LENGTH).astype(np.float32)


def learnt(seed):
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(LENGTH).astype(np.float32)


def decode(payload, codec):
    return codec.open(payload).read(0, LENGTH, np.empty(LENGTH, np.float32)).copy()


def holding():
    """Return a device with a model, and a codec that loses nothing."""
    device = DeviceModel(SPEC)
    device.install(VectorSource(vector(0)))
    return device, make_codec("identity", SPEC)


@whole_numbers
def test_rounds_of_install_train_and_encode(codec):
    device = DeviceModel(SPEC)
    parameters = device.parameters
    for seed in range(3):
        hub, step = vector(seed), vector(seed + 10)
        device.install(codec.open(codec.encode(VectorSource(hub))))
        assert np.array_equal(device.parameters, hub)
        device.parameters += step
        payload = device.encode_update(codec)
        assert np.array_equal(decode(payload, codec), step)
        assert np.array_equal(device.parameters, hub + step)
    assert device.parameters is parameters


@pytest.mark.parametrize("name", ["identity", "float16", "int8", "top_k(0.1)"])
@pytest.mark.parametrize("kind", ["delta", "model"])
def test_statistics_are_sent_as_they_are(name, kind):
    trained, codec = LENGTH - STATISTICS, make_codec(name, WITH_STATISTICS)
    device = DeviceModel(WITH_STATISTICS)
    for seed in range(3):
        device.install(VectorSource(vector(seed)))
        device.parameters += learnt(seed)
        after = device.parameters.copy()
        sent = decode(device.encode_update(codec, kind, feedback=codec.needs_feedback), codec)
        assert np.array_equal(sent[trained:], after[trained:])
        assert np.array_equal(device.parameters, after)
        if codec.elementwise:
            before = vector(seed) if kind == "delta" else np.zeros(LENGTH, np.float32)
            assert np.allclose(sent[:trained], (after - before)[:trained], rtol=2e-3, atol=1e-6)


def test_a_payload_in_flight_outlives_the_next_model():
    device, codec = DeviceModel(SPEC), make_codec("identity", SPEC)
    for kind in ("delta", "model"):
        device.install(VectorSource(vector(0)))
        device.parameters += 1.0
        payload = device.encode_update(codec, kind)
        sent = bytes(payload)
        device.install(VectorSource(vector(1)))
        device.parameters += 2.0
        device.encode_update(codec, kind)
        assert bytes(payload) == sent


@whole_numbers
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, LENGTH - 1])
def test_a_model_that_is_not_finite_is_not_taken_over(codec, bad, position):
    device = DeviceModel(SPEC)
    device.install(VectorSource(vector(0)))
    device.parameters += 1.0
    poisoned = vector(1)
    poisoned[position] = bad
    with pytest.raises(ProtocolError, match="not finite"):
        device.install(codec.open(codec.encode(VectorSource(poisoned))))
    assert np.array_equal(device.parameters, vector(0) + 1.0)
    device.install(VectorSource(vector(2)))
    assert np.array_equal(device.parameters, vector(2))


@pytest.mark.parametrize("name", ["identity", "float16", "int8", "top_k(0.01)"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_diverged_parameters_are_encoded_without_a_warning_and_end_the_residual(name, value):
    device, codec = DeviceModel(SPEC), make_codec(name, SPEC)
    device.parameters[:] = value
    device.install(VectorSource(vector(0)))
    device.parameters[7] = value
    payload = device.encode_update(codec, feedback=True)
    assert not np.isfinite(decode(payload, codec)).all()
    device.resolve(codec, payload, None)
    device.install(VectorSource(vector(0)))
    device.parameters += 1.0
    assert np.isfinite(decode(device.encode_update(codec, feedback=True), codec)).all()


# -- error feedback ------------------------------------------------------------------------------------------


def push(device, codec, seed, **options):
    """Train a little and push it; return what was learnt, what was sent and the payload."""
    device.install(VectorSource(vector(0)))
    step = learnt(seed)
    device.parameters += step
    exact = device.parameters - vector(0)
    payload = device.encode_update(codec, feedback=True, **options)
    return exact, decode(payload, codec), payload


@lossy
def test_what_a_payload_drops_is_part_of_the_next(name):
    """All that was sent, and the residual, make all that was learnt: nothing is lost (Seide et al. 2014)."""
    device, codec = DeviceModel(SPEC), make_codec(name, SPEC)
    left = np.zeros(LENGTH, np.float64)
    for seed in range(6):
        exact, sent, _ = push(device, codec, seed)
        left += exact
        left -= sent
    # One more push, of nothing: it can only hold what was left.
    device.install(VectorSource(vector(0)))
    last = decode(device.encode_update(codec, feedback=True), codec)
    assert np.linalg.norm(last - decode(codec.encode(VectorSource(left.astype(np.float32))), codec)) <= (
        1e-3 * np.linalg.norm(left)
    )
    assert np.linalg.norm(left) > 0


@lossy
@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_an_update_that_never_counts_leaves_the_old_residual_decayed(name, decay):
    device, codec = DeviceModel(SPEC), make_codec(name, SPEC)
    exact, sent, _ = push(device, codec, 1)
    before = exact - sent
    *_, payload = push(device, codec, 2)
    device.resolve(codec, payload, decay)
    exact, sent, _ = push(device, codec, 3)
    expected = decode(codec.encode(VectorSource(exact + np.float32(decay) * before)), codec)
    assert np.linalg.norm(sent - expected) <= 2e-3 * np.linalg.norm(expected)


def test_without_feedback_nothing_is_carried_over():
    device, codec = DeviceModel(SPEC), make_codec("top_k(0.01)", SPEC)
    push(device, codec, 1)
    device.install(VectorSource(vector(0)))
    device.encode_update(codec)
    device.install(VectorSource(vector(0)))
    assert not decode(device.encode_update(codec, feedback=True), codec).any()


def test_a_codec_that_drops_little_takes_over_what_was_left():
    device = DeviceModel(SPEC)
    sparse, dense = make_codec("top_k(0.01)", SPEC), make_codec("int8", SPEC)
    exact, sent, _ = push(device, sparse, 1)
    left = exact - sent
    device.install(VectorSource(vector(0)))
    taken_over = decode(device.encode_update(dense, feedback=None), dense)
    assert np.linalg.norm(taken_over - left) <= 0.02 * np.linalg.norm(left)
    device = DeviceModel(SPEC)
    device.install(VectorSource(vector(0)))
    device.encode_update(dense, feedback=None)
    assert device.residual is None


# -- overlap -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [False, True])
def test_steps_taken_while_an_update_was_under_way_are_kept(feedback):
    device, codec = holding()
    device.parameters += 2.0
    payload = device.encode_update(codec, feedback=feedback, overlap=True)
    assert (decode(payload, codec) == 2.0).all()
    device.parameters += 3.0
    device.install(VectorSource(vector(1)))
    assert np.array_equal(device.parameters, vector(1) + 3.0)
    device.parameters += 4.0
    assert (decode(device.encode_update(codec, feedback=feedback, overlap=True), codec) == 7.0).all()
    device.install(VectorSource(vector(2)))
    assert np.array_equal(device.parameters, vector(2))


def test_steps_taken_in_a_pause_are_kept_though_the_update_was_not_coded_for_that():
    device, codec = holding()
    device.parameters += 2.0
    device.encode_update(codec)
    assert not device.overlaps
    device.begin_overlap()
    device.parameters += 3.0
    device.begin_overlap()
    device.install(VectorSource(vector(1)))
    assert np.array_equal(device.parameters, vector(1) + 3.0)


def test_a_second_model_before_the_next_step_changes_nothing_of_what_was_learnt():
    device, codec = holding()
    device.parameters += 2.0
    device.encode_update(codec, overlap=True)
    device.parameters += 3.0
    device.install(VectorSource(vector(1)))
    device.install(VectorSource(vector(2)))
    assert np.array_equal(device.parameters, vector(2) + 3.0)


@pytest.mark.parametrize("settled", [False, True])
def test_what_went_on_from_a_diverged_update_is_dropped(settled):
    device, codec = holding()
    device.parameters[:] = np.nan
    payload = device.encode_update(codec, overlap=True)
    device.parameters += 1.0
    if settled:
        device.resolve(codec, payload, None)
    device.install(VectorSource(vector(1)))
    assert np.array_equal(device.parameters, vector(1))


def test_a_rejected_update_is_taken_back_though_training_went_on():
    device, codec = DeviceModel(SPEC), make_codec("top_k(0.01)", SPEC)
    exact, sent, _ = push(device, codec, 1, overlap=True)
    before = exact - sent
    *_, payload = push(device, codec, 2, overlap=True)
    device.parameters += 100.0
    device.resolve(codec, payload, 1.0)
    device.install(VectorSource(vector(0)))
    device.parameters -= 100.0
    sent = decode(device.encode_update(codec, feedback=True), codec)
    expected = decode(codec.encode(VectorSource(before)), codec)
    assert np.linalg.norm(sent - expected) <= 2e-3 * np.linalg.norm(expected)


# -- the published chain -------------------------------------------------------------------------------------


def test_one_difference_at_a_time_is_open():
    device, codec = DeviceModel(SPEC), make_codec("identity", SPEC)
    alive = []

    class Step(VectorSource):
        def __init__(self):
            super().__init__(np.ones(LENGTH, np.float32))
            alive.append(self)

    def steps():
        for _ in range(3):
            step = Step()
            yield step
            alive.remove(step)
            assert not alive

    held = np.full(LENGTH, 3.0, np.float32)
    device.install_deltas(steps(), codec, wire.checksum(held.data.cast("B")))
    assert np.array_equal(device.parameters, held)


def test_a_model_that_does_not_have_its_checksum_is_not_taken_over():
    device, codec = holding()
    step = codec.encode(VectorSource(vector(1)))
    right = wire.checksum((vector(0) + vector(1)).data.cast("B"))
    device.install_deltas([codec.open(step)], codec, right)
    assert np.array_equal(device.parameters, vector(0) + vector(1))
    device.install_deltas([], codec, right)
    with pytest.raises(ProtocolError, match="fetches the whole model"):
        device.install_deltas([codec.open(step)], codec, right)
    assert np.array_equal(device.parameters, vector(0) + vector(1))


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_diverged_update_leaves_no_residual_whatever_it_was_refused_for(decay):
    device, codec = DeviceModel(SPEC), make_codec("top_k(0.01)", SPEC)
    push(device, codec, 1)
    device.install(VectorSource(vector(0)))
    device.parameters[5] = np.nan
    payload = device.encode_update(codec, feedback=True)
    device.resolve(codec, payload, decay)
    _, sent, _ = push(device, codec, 2)
    assert np.isfinite(sent).all()
